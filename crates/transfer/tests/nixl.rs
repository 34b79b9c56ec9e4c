//! Tests of links over NIXL, run where `CLEAVE_TEST_NIXL` names the library. UCX reads its
//! transports from its environment, so each test runs in processes of its own: over TCP and over
//! shared memory.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[allow(dead_code, reason = "a part of it is used here")]
mod pair;

use cleave_domain::WorkerRef;
use cleave_kv::{Packet, PayloadCondition};
use cleave_transfer::{
    DataAddresses, LinkEvent, LinksConfig, LocalNet, Nixl, PeerRoute, Transport,
};
use pair::*;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The variable with the path of the library.
const LIBRARY: &str = "CLEAVE_TEST_NIXL";
/// Set in the processes that the tests start.
const ROLE: &str = "CLEAVE_TEST_NIXL_ROLE";

fn library() -> Option<PathBuf> {
    let library = std::env::var_os(LIBRARY).map(PathBuf::from);
    if library.is_none() {
        println!("SKIPPED: {LIBRARY} names no NIXL library (scripts/install/nixl.sh gets one)");
    }
    library
}

fn this_test(name: &str, role: &str, tls: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", name, "--nocapture"])
        .env(ROLE, role)
        .env_remove("RUST_BACKTRACE")
        .env("UCX_TLS", tls);
    command
}

/// Runs the test in one process for each UCX transport; returns `true` in such a process.
fn in_its_own_process(name: &str) -> bool {
    if library().is_none() {
        return false;
    }
    if std::env::var_os(ROLE).is_some() {
        return true;
    }
    for tls in ["tcp", "posix"] {
        let output = this_test(name, "test", tls).output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "UCX_TLS={tls}\n{stdout}\n{errors}");
        // The writes to a killed peer fail, and UCX must not print them.
        for printed in [&stdout, &errors] {
            assert!(!printed.contains(" UCX "), "UCX_TLS={tls}\n{printed}");
        }
    }
    false
}

/// Creating an agent takes half a second, and longer if all cores are busy.
fn nixl_config(me: WorkerRef) -> LinksConfig {
    let library = library().unwrap();
    LinksConfig {
        silence_max: Duration::from_secs(10),
        transports: [Transport::Nixl].into(),
        nixl: Some(Nixl::load(Some(&library)).unwrap()),
        ..config(me, "f")
    }
}

async fn worker(number: u64) -> LinkedWorker {
    LinkedWorker::on(LocalNet::default(), nixl_config(worker_ref(number, 1))).await
}

/// The addresses as a peer on another host uses them.
fn without_shared_memory(addresses: DataAddresses) -> DataAddresses {
    addresses
        .without(Transport::SharedMemory)
        .with(Transport::Nixl, "tcp")
}

/// Names a peer that cannot be dialled.
async fn add_unreachable_peer(worker: &mut LinkedWorker, peer: WorkerRef) {
    worker.links.add_peer(peer, PeerRoute::Local);
    assert_eq!(worker.next_lost().await.0, peer);
}

async fn nixl_pair() -> (LinkedWorker, LinkedWorker) {
    let (sender, mut receiver) = (worker(1).await, worker(2).await);
    add_unreachable_peer(&mut receiver, sender.me).await;
    let route = PeerRoute::Remote(without_shared_memory(receiver.addresses()));
    sender.links.add_peer(receiver.me, route);
    (sender, receiver)
}

async fn fell_back(worker: &mut LinkedWorker) -> (Transport, Transport, String) {
    loop {
        match worker.next().await {
            LinkEvent::FellBack {
                from, to, reason, ..
            } => return (from, to, reason),
            LinkEvent::Lost { reason, .. } => panic!("{reason}"),
            _ => {}
        }
    }
}

/// An agent has more descriptors than this.
const AGENT_DESCRIPTORS: usize = 4;

/// The number of descriptors of this process. An agent returns its own at its end.
fn descriptors_count() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

async fn wait_for(awaited: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(60), "no {awaited}");
        tokio::task::yield_now().await;
        std::thread::yield_now();
    }
}

#[tokio::test]
async fn blocks_written_by_a_card_arrive_whole_and_once() {
    if !in_its_own_process("blocks_written_by_a_card_arrive_whole_and_once") {
        return;
    }
    let (mut sender, mut receiver) = nixl_pair().await;
    let speed = sender.next_measured().await;
    assert_eq!(speed.transport, Transport::Nixl);
    assert!(speed.bytes_per_second > 0);
    // Many times as much as the credit.
    for ordinal in 0..40 {
        sender.send_block(receiver.me, 7, ordinal).await;
        let arrived = receiver.next_packet().await;
        let Packet::Frame { part, .. } = arrived.packet else {
            panic!("{:?}", arrived.packet);
        };
        assert_eq!(
            (part.ordinal, arrived.condition),
            (ordinal, PayloadCondition::Intact)
        );
        let mut there = vec![0; BLOCK as usize];
        assert!(
            arrived
                .payload
                .unwrap()
                .write_verified(there.as_mut_slice())
                .unwrap()
        );
        assert_eq!(there, block_bytes(7, ordinal));
    }
    sender
        .links
        .link(receiver.me)
        .unwrap()
        .send(seal(7))
        .unwrap();
    assert!(matches!(
        receiver.next_packet().await.packet,
        Packet::Seal(_)
    ));
}

// Lesson: 10.
#[tokio::test]
async fn a_sender_writes_only_granted_slots() {
    if !in_its_own_process("a_sender_writes_only_granted_slots") {
        return;
    }
    let (mut sender, mut receiver) = nixl_pair().await;
    let mut held = fill_window(&mut sender, &mut receiver).await;
    for (ordinal, payload) in held.iter().enumerate() {
        assert_eq!(payload.bytes().unwrap(), block_bytes(1, ordinal as u32));
    }
    held.pop();
    sender.send_block(receiver.me, 1, 9).await;
    let payload = receiver.next_packet().await.payload.unwrap();
    assert_eq!(payload.bytes().unwrap(), block_bytes(1, 9));
    assert_eq!(held[0].bytes().unwrap(), block_bytes(1, 0));
}

#[tokio::test]
async fn agents_end_with_their_links() {
    if !in_its_own_process("agents_end_with_their_links") {
        return;
    }
    // The first round also creates what the library keeps for good.
    let mut before = None;
    for _ in 0..4 {
        let (mut sender, receiver) = nixl_pair().await;
        sender.next_measured().await;
        let during = descriptors_count();
        receiver.server.abort();
        sender.server.abort();
        drop(receiver);
        sender.next_lost().await;
        drop(sender);
        let after = before.unwrap_or(during - AGENT_DESCRIPTORS);
        wait_for("end of the agents", || descriptors_count() <= after).await;
        before = before.or(Some(descriptors_count()));
    }
}

// Lesson: 18.
#[tokio::test]
async fn nixl_at_the_peer_only_falls_back_to_tcp_with_a_report() {
    let mut sender = LinkedWorker::start(worker_ref(1, 1), "f").await;
    let receiver = LinkedWorker::start(worker_ref(2, 1), "f").await;
    let addresses = without_shared_memory(receiver.addresses());
    sender
        .links
        .add_peer(receiver.me, PeerRoute::Remote(addresses));
    let (from, to, reason) = fell_back(&mut sender).await;
    assert_eq!((from, to), (Transport::Nixl, Transport::Tcp));
    assert!(reason.contains("has no NIXL library"), "{reason}");
    assert_eq!(sender.next_measured().await.transport, Transport::Tcp);
}

/// UCX also has a transport over TCP, which is no better than these links' own.
#[tokio::test]
async fn tcp_is_preferred_to_nixl_without_a_network_card() {
    if !in_its_own_process("tcp_is_preferred_to_nixl_without_a_network_card") {
        return;
    }
    for peer_has_it in [true, false] {
        let net = LocalNet::default;
        let both = |number| LinksConfig {
            transports: Transport::ALL.into(),
            ..nixl_config(worker_ref(number, 1))
        };
        let mut sender = LinkedWorker::on(net(), both(1)).await;
        let mut receiver = LinkedWorker::on(net(), both(2)).await;
        add_unreachable_peer(&mut receiver, sender.me).await;
        let addresses = without_shared_memory(receiver.addresses());
        let addresses = if peer_has_it {
            addresses
        } else {
            addresses.without(Transport::Nixl)
        };
        sender
            .links
            .add_peer(receiver.me, PeerRoute::Remote(addresses));
        loop {
            match sender.next().await {
                LinkEvent::Measured { speed, .. } => {
                    break assert_eq!(speed.transport, Transport::Tcp);
                }
                LinkEvent::CreditGranted { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

/// By default only network cards are used, so no port is opened that accepts every client.
#[test]
fn loading_nixl_without_a_network_card_is_an_error() {
    let name = "loading_nixl_without_a_network_card_is_an_error";
    let Some(library) = library() else {
        return;
    };
    if std::env::var_os(ROLE).is_some() {
        let loaded = Nixl::load(Some(&library));
        if std::fs::read_dir("/sys/class/infiniband").is_ok() {
            return println!("SKIPPED: this host has cards");
        }
        let error = loaded.unwrap_err().to_string();
        assert!(error.contains("network cards"), "{error}");
        assert!(error.contains("libnixl_capi"), "{error}");
        return;
    }
    let mut command = this_test(name, "test", "");
    let output = command.env_remove("UCX_TLS").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{printed}");
    assert!(printed.contains("1 passed"), "{printed}");
}

/// Not a test: the other process.
#[tokio::test]
async fn other_process() {
    let role = std::env::var(ROLE).unwrap_or_default();
    let Some(route) = role.strip_prefix("send to ") else {
        if role == "receive" {
            let mut receiver = worker(2).await;
            add_unreachable_peer(&mut receiver, worker_ref(1, 1)).await;
            println!("here: {}", without_shared_memory(receiver.addresses()));
            let mut arrived = Vec::new();
            while let Some(event) = receiver.events.recv().await {
                arrived.push(event);
            }
        }
        return;
    };
    let mut sender = worker(1).await;
    let to = worker_ref(2, 1);
    sender.links.add_peer(to, PeerRoute::parse(route).unwrap());
    for ordinal in 0.. {
        sender.send_block(to, 1, ordinal).await;
    }
}

fn other(role: &str) -> Child {
    let tls = std::env::var("UCX_TLS").unwrap();
    let mut command = this_test("other_process", role, &tls);
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    command.spawn().unwrap()
}

// Lesson: 8.
#[tokio::test]
async fn a_receiver_killed_during_writes_is_lost_once_and_redialled() {
    let name = "a_receiver_killed_during_writes_is_lost_once_and_redialled";
    if !in_its_own_process(name) {
        return;
    }
    let mut sender = worker(1).await;
    let to = worker_ref(2, 1);
    let mut before = None;
    for flight in 0..3 {
        let mut child = other("receive");
        let announced = printed_after("here: ", &mut child);
        sender
            .links
            .add_peer(to, PeerRoute::parse(&announced).unwrap());
        assert_eq!(sender.next_measured().await.transport, Transport::Nixl);
        for ordinal in 0..4 {
            sender.send_block(to, flight, ordinal).await;
        }
        let during = descriptors_count();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(sender.next_lost().await.0, to);
        assert!(sender.links.link(to).is_ok(), "it is dialled anew");
        // The dial finds no listener.
        assert_eq!(sender.next_lost().await.0, to);
        let after = before.unwrap_or(during - AGENT_DESCRIPTORS);
        wait_for("end of the agent", || descriptors_count() <= after).await;
        before = before.or(Some(descriptors_count()));
    }
}

// Lesson: 2.
#[tokio::test]
async fn nothing_writes_after_a_sender_is_killed() {
    let name = "nothing_writes_after_a_sender_is_killed";
    if !in_its_own_process(name) {
        return;
    }
    let mut receiver = worker(2).await;
    add_unreachable_peer(&mut receiver, worker_ref(1, 1)).await;
    let mut before = None;
    for _ in 0..3 {
        let mut child = other(&format!(
            "send to {}",
            without_shared_memory(receiver.addresses())
        ));
        // The sender writes as fast as it is granted; a few payloads are held meanwhile.
        let mut held = Vec::new();
        for ordinal in 0..30 {
            let arrived = receiver.next_packet().await;
            let payload = arrived.payload.unwrap();
            assert_eq!(payload.bytes().unwrap(), block_bytes(1, ordinal));
            held.push((ordinal, payload));
            held.drain(..held.len().saturating_sub(2));
        }
        let during = descriptors_count();
        child.kill().unwrap();
        child.wait().unwrap();
        loop {
            match receiver.next().await {
                LinkEvent::Lost { peer, .. } => break assert_eq!(peer, worker_ref(1, 1)),
                LinkEvent::Arrived { .. } | LinkEvent::CreditGranted { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        let after = before.unwrap_or(during - AGENT_DESCRIPTORS);
        wait_for("end of the agent", || descriptors_count() <= after).await;
        before = before.or(Some(descriptors_count()));
        for (ordinal, payload) in held {
            assert_eq!(
                payload.bytes().unwrap(),
                block_bytes(1, ordinal),
                "still there"
            );
        }
    }
}

/// The loader maps the library once.
#[test]
fn the_library_can_be_loaded_twice() {
    if !in_its_own_process("the_library_can_be_loaded_twice") {
        return;
    }
    let library = library().unwrap();
    let both = [(); 2].map(|()| Nixl::load(Some(&library)).unwrap());
    assert!(!Arc::ptr_eq(&both[0], &both[1]));
    assert_eq!(both[0].path(), library);
}
