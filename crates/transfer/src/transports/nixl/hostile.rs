//! Tests of late writes, and of peers that violate the protocol of a link over NIXL. They send wire
//! messages to the code that serves links, and run where `CLEAVE_TEST_NIXL` names the library. UCX
//! reads its environment, so each test runs in a process of its own.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use super::library::{
    IN_PROGRESS, NixlAgent, NixlAgentConfig, NixlAgentParts, NixlFunctions, NixlHandle,
    RdmaWriteRequest, with_functions,
};
use super::note::NOTE_BYTES;
use super::receiver::RdmaReceiverParts;
use super::writer::RdmaWriterParts;
use super::{AgentNames, Nixl, RdmaReceiver, RdmaWriter, RingOffer, UcxBackend};
use crate::config::{LinkEvent, LinksConfig};
use crate::hostile::{BLOCK, PlainTcpLinkStream, head, hello, send, stream, welcome, worker};
use crate::transports::shm::{ReceiverRing, RingShape, SenderRing};
use crate::wire::{FrameHead, LinkMessage};
use crate::{DataAddresses, Links, ListenOptions, Listeners, LocalNet, PeerRoute, Transport};
use bytes::BytesMut;
use cleave_domain::Fingerprint;
use std::ffi::{c_char, c_int};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;

mod failing;

/// Set in the processes that the tests start.
const ALONE: &str = "CLEAVE_TEST_NIXL_ALONE";

/// The library, if this is the process of the test; other processes start that one.
fn in_own_process(name: &str) -> Option<Arc<Nixl>> {
    in_own_process_over(name, &["tcp", "posix"])
}

fn in_own_process_over(name: &str, transports: &[&str]) -> Option<Arc<Nixl>> {
    let Some(library) = std::env::var_os("CLEAVE_TEST_NIXL").map(PathBuf::from) else {
        println!("SKIPPED: CLEAVE_TEST_NIXL names no NIXL library (scripts/install/nixl.sh)");
        return None;
    };
    if std::env::var_os(ALONE).is_some() {
        return Some(Nixl::load(Some(&library)).unwrap());
    }
    for tls in transports {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = format!("transports::nixl::hostile::{name}");
        command.args(["--exact", &name, "--nocapture"]);
        let output = command
            .env(ALONE, "1")
            .env("UCX_TLS", tls)
            .env_remove("RUST_BACKTRACE")
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success(),
            "UCX_TLS={tls}\n{printed}\n{errors}"
        );
        assert!(printed.contains("1 passed"), "{printed}");
    }
    None
}

// Lesson: 2.
/// Writes of a sender after the end of the receiver's agent change no memory.
#[test]
fn a_write_after_the_end_of_its_link_changes_nothing() {
    let Some(nixl) = in_own_process("a_write_after_the_end_of_its_link_changes_nothing") else {
        return;
    };
    let shape = RingShape {
        slot_bytes: BLOCK,
        slots_count: 2,
    };
    let (mirror, ring) = (
        ReceiverRing::private(shape).unwrap(),
        SenderRing::private(shape).unwrap(),
    );
    let agent = |name, area| {
        let parts = NixlAgentParts {
            name,
            parameters: &nixl.backend.parameters,
            area,
        };
        NixlAgent::new(&nixl.library, &parts).unwrap()
    };
    let receiver = agent("receiver", mirror.area());
    let sender = agent("sender", ring.area());
    let remote = sender.load_remote(&receiver.metadata().unwrap()).unwrap();
    let to = mirror.area().start as u64;
    let mut slot = ring.take(BLOCK);
    let order = || RdmaWriteRequest {
        from: shape.start(0),
        to,
        len: BLOCK as usize,
        note: [0; NOTE_BYTES],
    };
    slot.fill(1);
    let mut first = sender.write(&remote, &order()).unwrap();
    let mut notes_count = 0;
    while !sender.poll_done(&mut first).unwrap() || notes_count == 0 {
        receiver.read_notes(|_| notes_count += 1).unwrap();
    }
    let there = mirror.view(0, BLOCK).unwrap();
    assert!(there.iter().all(|byte| *byte == 1));
    slot.fill(2);
    drop(receiver);
    // The write may fail at once, later or never; no agent is left to report it.
    let late = sender.write(&remote, &order());
    let until = Instant::now() + Duration::from_secs(1);
    if let Ok(mut late) = late {
        while Instant::now() < until && sender.poll_done(&mut late).is_ok_and(|is_done| !is_done) {}
        sender.release(&mut late);
    }
    drop(sender);
    assert!(there.iter().all(|byte| *byte == 1), "a late write landed");
}

/// The same library, as if only network cards carried the bytes.
fn with_network_card(nixl: &Nixl) -> Arc<Nixl> {
    nixl_with_functions(nixl, |_| {})
}

/// The same library with changed functions.
fn nixl_with_functions(nixl: &Nixl, change: impl FnOnce(&mut NixlFunctions)) -> Arc<Nixl> {
    Arc::new(Nixl {
        library: with_functions(nixl.path.as_os_str(), change),
        path: nixl.path.clone(),
        backend: UcxBackend {
            is_network_card: true,
            ..nixl.backend.clone()
        },
        agent_creations: Arc::default(),
    })
}

fn config(me: u64, nixl: Option<Arc<Nixl>>) -> LinksConfig {
    LinksConfig {
        credit_bytes: 4 * BLOCK,
        streams_count: 1,
        beat: Duration::from_millis(200),
        nixl,
        ..LinksConfig::new(worker(me), Fingerprint("f".into()), BLOCK)
    }
}

/// The worker under test.
struct CompliantRdmaWorker {
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
    address: String,
}

impl CompliantRdmaWorker {
    async fn start(config: LinksConfig) -> Self {
        let (sender, events) = mpsc::channel(256);
        let links = Links::new(config, sender, LocalNet::default());
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap().to_string();
        let opened = Listeners::open(ListenOptions {
            tcp: Some((tcp, address.clone())),
            ..ListenOptions::default()
        });
        tokio::spawn(links.clone().serve(opened.listeners));
        Self {
            links,
            events,
            address,
        }
    }

    /// Names a worker that cannot be reached.
    async fn add_unreachable_peer(&mut self, number: u64) {
        self.links.add_peer(worker(number), PeerRoute::Local);
        self.next_lost().await;
    }

    /// The route for a peer on another host.
    fn route(&self) -> PeerRoute {
        let addresses = DataAddresses::default().with(Transport::Tcp, &self.address);
        PeerRoute::Remote(addresses.with(Transport::Nixl, "tcp"))
    }

    async fn next_fallback(&mut self) -> String {
        loop {
            match self.next().await {
                LinkEvent::FellBack {
                    from, to, reason, ..
                } => {
                    assert_eq!((from, to), (Transport::Nixl, Transport::Tcp));
                    return reason;
                }
                LinkEvent::Lost { reason, .. } => panic!("{reason}"),
                _ => {}
            }
        }
    }

    async fn next_measured(&mut self) -> Transport {
        loop {
            match self.next().await {
                LinkEvent::Measured { speed, .. } => return speed.transport,
                LinkEvent::Lost { reason, .. } => panic!("{reason}"),
                _ => {}
            }
        }
    }

    async fn next(&mut self) -> LinkEvent {
        let next = timeout(Duration::from_secs(30), self.events.recv()).await;
        next.expect("an event in time").expect("links are open")
    }

    async fn next_lost(&mut self) -> String {
        loop {
            match self.next().await {
                LinkEvent::Lost { reason, .. } => return reason,
                LinkEvent::CreditGranted { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Connects and asks for a ring.
    async fn connect_for_ring(&self, from: u64) -> PlainTcpLinkStream {
        self.connect(LinkMessage::HelloRdma(hello(from))).await
    }

    async fn connect(&self, hello: LinkMessage) -> PlainTcpLinkStream {
        let mut stream = stream(TcpStream::connect(&self.address).await.unwrap());
        send(&mut stream, &hello, &[]).await;
        stream
    }
}

/// The answer to the request for a ring, after keep-alives.
async fn answer(stream: &mut PlainTcpLinkStream) -> LinkMessage {
    loop {
        match stream.reader.message().await.unwrap() {
            LinkMessage::Welcome { .. } | LinkMessage::KeepAlive => {}
            other => return other,
        }
    }
}

// Lesson: 16.
#[tokio::test]
async fn a_slot_announced_but_not_written_is_not_delivered() {
    let name = "a_slot_announced_but_not_written_is_not_delivered";
    let Some(nixl) = in_own_process(name) else {
        return;
    };
    let mut victim = CompliantRdmaWorker::start(config(2, Some(nixl))).await;
    victim.add_unreachable_peer(1).await;
    // (announced slots, text of the reported loss)
    let cases: [(&[u32], &str); 3] = [
        (&[0], "closed"),
        (&[1, 1], "more payload than it was granted"),
        (&[4], "more payload than it was granted"),
    ];
    for (slots, expected) in cases {
        let mut stream = victim.connect_for_ring(1).await;
        let answer = answer(&mut stream).await;
        assert!(
            matches!(answer, LinkMessage::RingOffer { .. }),
            "{answer:?}"
        );
        for slot in slots {
            let frame = FrameHead {
                checksum: 0,
                ..head(&[0; BLOCK as usize])
            };
            let frame = LinkMessage::SlotFrame(frame, *slot);
            send(&mut stream, &frame, &[]).await;
        }
        stream.writer.shutdown().await.unwrap();
        // Nothing arrived before.
        let reason = victim.next_lost().await;
        assert!(reason.contains(expected), "{slots:?}: {reason}");
    }
}

#[tokio::test]
async fn a_worker_without_nixl_refuses_a_ring_with_a_reason() {
    let victim = CompliantRdmaWorker::start(config(2, None)).await;
    let mut stream = victim.connect_for_ring(1).await;
    let answer = answer(&mut stream).await;
    assert!(
        matches!(&answer, LinkMessage::NoRing(reason) if reason.contains("no links over NIXL")),
        "{answer:?}"
    );
}

// Lesson: 18.
/// A receiver offers metadata that no agent made. Bytes damaged on the way are refused by the
/// checksum before they reach the library; undamaged ones by the metadata check.
#[tokio::test]
async fn invalid_agent_metadata_falls_back_to_tcp() {
    let name = "invalid_agent_metadata_falls_back_to_tcp";
    let Some(nixl) = in_own_process(name) else {
        return;
    };
    for (damage_from, expected) in [(Some(60), "damaged on the way"), (None, "peer's metadata")] {
        let mut victim =
            CompliantRdmaWorker::start(config(2, Some(with_network_card(&nixl)))).await;
        let fake = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = fake.local_addr().unwrap().to_string();
        let addresses = DataAddresses::default()
            .with(Transport::Tcp, address)
            .with(Transport::Nixl, "tcp");
        victim
            .links
            .add_peer(worker(1), PeerRoute::Remote(addresses));
        let mut stream = stream(fake.accept().await.unwrap().0);
        let request = stream.reader.message().await.unwrap();
        assert!(matches!(request, LinkMessage::HelloRdma(_)), "{request:?}");
        send(&mut stream, &welcome(4 * BLOCK, BLOCK), &[]).await;
        let RingOffer { start, metadata } = RingOffer {
            start: 4096,
            metadata: (0..300).map(|index| (index * 7) as u8).collect(),
        };
        let mut bytes = BytesMut::new();
        LinkMessage::RingOffer { start, metadata }.encode(&mut bytes);
        if let Some(at) = damage_from {
            bytes[at] ^= 4;
        }
        stream.writer.write_all(&bytes).await.unwrap();
        let reason = victim.next_fallback().await;
        assert!(reason.contains(expected), "{reason}");
        // The dialler tries TCP next.
        let mut stream = self::stream(fake.accept().await.unwrap().0);
        let request = stream.reader.message().await.unwrap();
        assert!(matches!(request, LinkMessage::Hello(_)), "{request:?}");
    }
}
