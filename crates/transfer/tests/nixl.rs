//! Links over NIXL, where the library is there: `CLEAVE_TEST_NIXL` names it. Each is tried over TCP and over shared memory,
//! which UCX reads from its environment; so each runs in a process of its own.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

mod pair;

use cleave_domain::WorkerRef;
use cleave_kv::{Condition, Packet};
use cleave_transfer::{Addresses, LinkEvent, LinksConfig, LocalNet, Nixl, Route, Transport};
use pair::*;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The library's path, for these tests.
const LIBRARY: &str = "CLEAVE_TEST_NIXL";
/// Set in the processes that tests start.
const ROLE: &str = "CLEAVE_TEST_NIXL_ROLE";

fn library() -> Option<PathBuf> {
    let library = std::env::var_os(LIBRARY).map(PathBuf::from);
    if library.is_none() {
        println!("SKIPPED: {LIBRARY} names no NIXL library (scripts/nixl/install.sh gets one)");
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

/// Runs the rest of the test in a process for each way; `true` in such a process.
fn in_its_own_process(name: &str) -> bool {
    if library().is_none() {
        return false;
    }
    if std::env::var_os(ROLE).is_some() {
        return true;
    }
    for tls in ["tcp", "posix"] {
        let output = this_test(name, "test", tls).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "UCX_TLS={tls}\n{said}\n{errors}");
        // A peer that is killed leaves writes behind, which is news for nobody.
        for printed in [&said, &errors] {
            assert!(!printed.contains(" UCX "), "UCX_TLS={tls}\n{printed}");
        }
    }
    false
}

/// Agents take half a second to make, and longer where all cores are taken.
fn nixl_config(me: WorkerRef) -> LinksConfig {
    let library = library().unwrap();
    LinksConfig {
        silence_max: Duration::from_secs(10),
        transports: [Transport::Nixl].into(),
        nixl: Some(Nixl::load(Some(&library)).unwrap()),
        ..config(me, "f")
    }
}

async fn worker(number: u64) -> Worker {
    Worker::on(LocalNet::default(), nixl_config(worker_ref(number, 1))).await
}

/// As a peer of another host sees it.
fn far(addresses: Addresses) -> Addresses {
    Addresses {
        shared_memory: None,
        nixl: true,
        ..addresses
    }
}

/// A router names a peer, which cannot be dialled.
async fn hears_of(worker: &mut Worker, peer: WorkerRef) {
    worker.links.know(peer, Route::Local);
    assert_eq!(worker.lost().await.0, peer);
}

async fn nixl_pair() -> (Worker, Worker) {
    let (sender, mut receiver) = (worker(1).await, worker(2).await);
    hears_of(&mut receiver, sender.me).await;
    let route = Route::Remote(far(receiver.addresses()));
    sender.links.know(receiver.me, route);
    (sender, receiver)
}

async fn fell_back(worker: &mut Worker) -> (Transport, Transport, String) {
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

/// An agent has more than these.
const AGENT_DESCRIPTORS: usize = 4;

/// Descriptors of this process. An agent has some, and gives them back at its end.
fn descriptors_count() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

async fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(60), "no {what}");
        tokio::task::yield_now().await;
        std::thread::yield_now();
    }
}

#[tokio::test]
async fn blocks_that_a_card_writes_arrive_whole_and_once() {
    if !in_its_own_process("blocks_that_a_card_writes_arrive_whole_and_once") {
        return;
    }
    let (mut sender, mut receiver) = nixl_pair().await;
    let speed = sender.measured().await;
    assert_eq!(speed.transport, Transport::Nixl);
    assert!(speed.bytes_per_second > 0);
    // Many times the credit.
    for ordinal in 0..40 {
        sender.send_block(receiver.me, 7, ordinal).await;
        let arrived = receiver.arrived().await;
        let Packet::Frame { part, .. } = arrived.packet else {
            panic!("{:?}", arrived.packet);
        };
        assert_eq!(
            (part.ordinal, arrived.condition),
            (ordinal, Condition::Intact)
        );
        let mut there = vec![0; BLOCK as usize];
        assert!(arrived.payload.unwrap().land(there.as_mut_slice()).unwrap());
        assert_eq!(there, block_bytes(7, ordinal));
    }
    sender
        .links
        .link(receiver.me)
        .unwrap()
        .send(seal(7))
        .unwrap();
    assert!(matches!(receiver.arrived().await.packet, Packet::Seal(_)));
}

#[tokio::test]
async fn lesson_10_a_sender_writes_no_slot_that_it_was_not_granted() {
    if !in_its_own_process("lesson_10_a_sender_writes_no_slot_that_it_was_not_granted") {
        return;
    }
    let (mut sender, mut receiver) = nixl_pair().await;
    let mut held = Vec::new();
    for ordinal in 0..4 {
        sender.send_block(receiver.me, 1, ordinal).await;
        held.push(receiver.arrived().await.payload.unwrap());
    }
    let link = sender.links.link(receiver.me).unwrap();
    assert!(
        link.reserve(frame(1, 0).handoff, BLOCK).is_none(),
        "all of it is held"
    );
    for (ordinal, payload) in held.iter().enumerate() {
        assert_eq!(payload.bytes().unwrap(), block_bytes(1, ordinal as u32));
    }
    held.pop();
    sender.send_block(receiver.me, 1, 9).await;
    let payload = receiver.arrived().await.payload.unwrap();
    assert_eq!(payload.bytes().unwrap(), block_bytes(1, 9));
    assert_eq!(held[0].bytes().unwrap(), block_bytes(1, 0));
}

#[tokio::test]
async fn agents_end_with_their_links() {
    if !in_its_own_process("agents_end_with_their_links") {
        return;
    }
    // The first one brings what the library keeps.
    let mut before = None;
    for _ in 0..4 {
        let (mut sender, receiver) = nixl_pair().await;
        sender.measured().await;
        let during = descriptors_count();
        receiver.server.abort();
        sender.server.abort();
        drop(receiver);
        sender.lost().await;
        drop(sender);
        let after = before.unwrap_or(during - AGENT_DESCRIPTORS);
        wait_for("end of the agents", || descriptors_count() <= after).await;
        before = before.or(Some(descriptors_count()));
    }
}

#[tokio::test]
async fn lesson_18_a_library_that_the_peer_alone_has_is_told_and_tcp_is_taken() {
    let mut sender = Worker::start(worker_ref(1, 1), "f").await;
    let receiver = Worker::start(worker_ref(2, 1), "f").await;
    let addresses = far(receiver.addresses());
    sender.links.know(receiver.me, Route::Remote(addresses));
    let (from, to, reason) = fell_back(&mut sender).await;
    assert_eq!((from, to), (Transport::Nixl, Transport::Tcp));
    assert!(reason.contains("has no NIXL library"), "{reason}");
    assert_eq!(sender.measured().await.transport, Transport::Tcp);
}

/// UCX has a way over TCP, too, which is no network card's and no better than these links' own.
#[tokio::test]
async fn what_no_card_carries_was_taken_before_tcp() {
    if !in_its_own_process("what_no_card_carries_was_taken_before_tcp") {
        return;
    }
    for peer_has_it in [true, false] {
        let net = LocalNet::default;
        let both = |number| LinksConfig {
            transports: Transport::ALL.into(),
            ..nixl_config(worker_ref(number, 1))
        };
        let mut sender = Worker::on(net(), both(1)).await;
        let mut receiver = Worker::on(net(), both(2)).await;
        hears_of(&mut receiver, sender.me).await;
        let addresses = Addresses {
            nixl: peer_has_it,
            ..far(receiver.addresses())
        };
        sender.links.know(receiver.me, Route::Remote(addresses));
        loop {
            match sender.next().await {
                LinkEvent::Measured { speed, .. } => {
                    break assert_eq!(speed.transport, Transport::Tcp);
                }
                LinkEvent::Granted { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

/// By default it goes over network cards alone: no port is opened that trusts whoever reaches it.
#[test]
fn without_a_card_for_it_the_library_is_of_no_use_and_that_is_said() {
    let name = "without_a_card_for_it_the_library_is_of_no_use_and_that_is_said";
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
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("1 passed"), "{said}");
}

/// Not a test of its own: the other process.
#[tokio::test]
async fn other_process() {
    let role = std::env::var(ROLE).unwrap_or_default();
    let Some(route) = role.strip_prefix("send to ") else {
        if role == "receive" {
            let mut receiver = worker(2).await;
            hears_of(&mut receiver, worker_ref(1, 1)).await;
            println!("here: {}", far(receiver.addresses()));
            let mut kept = Vec::new();
            while let Some(event) = receiver.events.recv().await {
                kept.push(event);
            }
        }
        return;
    };
    let mut sender = worker(1).await;
    let to = worker_ref(2, 1);
    sender.links.know(to, Route::parse(route).unwrap());
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

#[tokio::test]
async fn lesson_08_a_receiver_killed_while_it_is_written_to_is_lost_once_and_dialled_anew() {
    let name = "lesson_08_a_receiver_killed_while_it_is_written_to_is_lost_once_and_dialled_anew";
    if !in_its_own_process(name) {
        return;
    }
    let mut sender = worker(1).await;
    let to = worker_ref(2, 1);
    let mut before = None;
    for flight in 0..3 {
        let mut child = other("receive");
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        let mut lines = lines.map_while(Result::ok);
        let announced = lines.find_map(|line| Some(line.split_once("here: ")?.1.to_owned()));
        sender
            .links
            .know(to, Route::parse(&announced.unwrap()).unwrap());
        assert_eq!(sender.measured().await.transport, Transport::Nixl);
        for ordinal in 0..4 {
            sender.send_block(to, flight, ordinal).await;
        }
        let during = descriptors_count();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(sender.lost().await.0, to);
        assert!(sender.links.link(to).is_ok(), "it is dialled anew");
        // And finds nobody.
        assert_eq!(sender.lost().await.0, to);
        let after = before.unwrap_or(during - AGENT_DESCRIPTORS);
        wait_for("end of the agent", || descriptors_count() <= after).await;
        before = before.or(Some(descriptors_count()));
    }
}

#[tokio::test]
async fn lesson_02_a_sender_killed_in_the_middle_of_its_writes_leaves_nothing_that_writes() {
    let name = "lesson_02_a_sender_killed_in_the_middle_of_its_writes_leaves_nothing_that_writes";
    if !in_its_own_process(name) {
        return;
    }
    let mut receiver = worker(2).await;
    hears_of(&mut receiver, worker_ref(1, 1)).await;
    let mut before = None;
    for _ in 0..3 {
        let mut child = other(&format!("send to {}", far(receiver.addresses())));
        // It writes as fast as it is granted; a few are held meanwhile.
        let mut held = Vec::new();
        for ordinal in 0..30 {
            let arrived = receiver.arrived().await;
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
                LinkEvent::Arrived { .. } | LinkEvent::Granted { .. } => {}
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

/// The library is one, whoever loads it.
#[test]
fn it_is_loaded_twice_without_harm() {
    if !in_its_own_process("it_is_loaded_twice_without_harm") {
        return;
    }
    let library = library().unwrap();
    let both = [(); 2].map(|()| Nixl::load(Some(&library)).unwrap());
    assert!(!Arc::ptr_eq(&both[0], &both[1]));
    assert_eq!(both[0].path(), library);
}
