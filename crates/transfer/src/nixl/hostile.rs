//! Writes that come too late, and peers that break the rules of a link over NIXL: spoken in the wire's words to the code
//! that serves, where the library is (`CLEAVE_TEST_NIXL`). UCX reads its environment, so each runs in a process of its own.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use super::landing::LandingParts;
use super::library::{
    Agent, AgentConfig, AgentParts, Functions, Handle, IN_PROGRESS, Order, failing,
};
use super::note::NOTE_BYTES;
use super::writer::WriterParts;
use super::{Backend, Landing, Names, Nixl, Offer, Writer};
use crate::config::{LinkEvent, LinksConfig};
use crate::incoming::Stream;
use crate::shared_memory::{Mirror, Ring, Shape};
use crate::socket::{Reader, write};
use crate::wire::{FrameHead, Hello, Message};
use crate::{Addresses, Links, Listeners, LocalNet, Route, Transport};
use bytes::BytesMut;
use cleave_domain::{Fingerprint, HandoffId, Incarnation, WorkerId, WorkerRef};
use cleave_kv::BlockPart;
use std::ffi::{c_char, c_int};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;

mod failing;

const BLOCK: u32 = 4096;
/// Set in the processes that tests start.
const ALONE: &str = "CLEAVE_TEST_NIXL_ALONE";

/// The library, in a process of this test's own; the others start those.
fn alone(name: &str) -> Option<Arc<Nixl>> {
    alone_over(name, &["tcp", "posix"])
}

fn alone_over(name: &str, ways: &[&str]) -> Option<Arc<Nixl>> {
    let Some(library) = std::env::var_os("CLEAVE_TEST_NIXL").map(PathBuf::from) else {
        println!("SKIPPED: CLEAVE_TEST_NIXL names no NIXL library (scripts/nixl/install.sh)");
        return None;
    };
    if std::env::var_os(ALONE).is_some() {
        return Some(Nixl::load(Some(&library)).unwrap());
    }
    for tls in ways {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = format!("nixl::hostile::{name}");
        command.args(["--exact", &name, "--nocapture"]);
        let output = command
            .env(ALONE, "1")
            .env("UCX_TLS", tls)
            .env_remove("RUST_BACKTRACE")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "UCX_TLS={tls}\n{said}\n{errors}");
        assert!(said.contains("1 passed"), "{said}");
    }
    None
}

/// What a sender still writes when the receiver's agent has ended reaches nothing.
#[test]
fn lesson_02_a_write_after_the_end_of_its_link_lands_nowhere() {
    let Some(nixl) = alone("lesson_02_a_write_after_the_end_of_its_link_lands_nowhere") else {
        return;
    };
    let shape = Shape {
        slot_bytes: BLOCK,
        slots_count: 2,
    };
    let (mirror, ring) = (
        Mirror::private(shape).unwrap(),
        Ring::private(shape).unwrap(),
    );
    let agent = |name, area| {
        let parts = AgentParts {
            name,
            parameters: &nixl.backend.parameters,
            area,
        };
        Agent::new(&nixl.library, &parts).unwrap()
    };
    let receiver = agent("receiver", mirror.area());
    let sender = agent("sender", ring.area());
    let remote = sender.know(&receiver.metadata().unwrap()).unwrap();
    let to = mirror.area().start as u64;
    let mut slot = ring.take(BLOCK);
    let order = || Order {
        from: shape.start(0),
        to,
        len: BLOCK as usize,
        note: [0; NOTE_BYTES],
    };
    slot.fill(1);
    let mut first = sender.write(&remote, &order()).unwrap();
    let mut notes_count = 0;
    while !sender.is_done(&mut first).unwrap() || notes_count == 0 {
        receiver.notes(|_| notes_count += 1).unwrap();
    }
    let there = mirror.view(0, BLOCK).unwrap();
    assert!(there.iter().all(|byte| *byte == 1));
    slot.fill(2);
    drop(receiver);
    // It may fail at once, later or never: nobody is there to say.
    let late = sender.write(&remote, &order());
    let until = Instant::now() + Duration::from_secs(1);
    if let Ok(mut late) = late {
        while Instant::now() < until && sender.is_done(&mut late).is_ok_and(|is_done| !is_done) {}
        sender.release(&mut late);
    }
    drop(sender);
    assert!(there.iter().all(|byte| *byte == 1), "a late write landed");
}

fn worker(worker: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(worker),
        incarnation: Incarnation(1),
    }
}

/// As if network cards wrote.
fn by_card(nixl: &Nixl) -> Arc<Nixl> {
    with(nixl, |_| {})
}

/// The same with other functions.
fn with(nixl: &Nixl, change: impl FnOnce(&mut Functions)) -> Arc<Nixl> {
    Arc::new(Nixl {
        library: failing(nixl.path.as_os_str(), change),
        path: nixl.path.clone(),
        backend: Backend {
            is_by_card: true,
            ..nixl.backend.clone()
        },
        late: Arc::default(),
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

/// The one that keeps the rules.
struct Victim {
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
    address: String,
}

type TcpEnd = Stream<OwnedReadHalf, OwnedWriteHalf>;

impl Victim {
    async fn start(config: LinksConfig) -> Self {
        let (sender, events) = mpsc::channel(256);
        let links = Links::new(config, sender, LocalNet::default());
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap().to_string();
        tokio::spawn(links.clone().serve(Listeners {
            tcp: Some(tcp),
            host: None,
        }));
        Self {
            links,
            events,
            address,
        }
    }

    /// A router names a worker that cannot be reached.
    async fn hears_of(&mut self, number: u64) {
        self.links.know(worker(number), Route::Local);
        self.lost().await;
    }

    /// As a peer of another host reaches it.
    fn route(&self) -> Route {
        Route::Remote(Addresses {
            tcp: Some(self.address.clone()),
            nixl: true,
            ..Addresses::default()
        })
    }

    async fn fell_back(&mut self) -> String {
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

    async fn measured(&mut self) -> Transport {
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

    async fn lost(&mut self) -> String {
        loop {
            match self.next().await {
                LinkEvent::Lost { reason, .. } => return reason,
                LinkEvent::Granted { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Somebody who asks for a ring.
    async fn approach(&self, from: u64) -> TcpEnd {
        self.knock(Message::Approach(hello(from))).await
    }

    async fn knock(&self, hello: Message) -> TcpEnd {
        let mut stream = stream(TcpStream::connect(&self.address).await.unwrap());
        write(&mut stream.writer, &hello, &[]).await.unwrap();
        stream
    }
}

fn hello(from: u64) -> Hello {
    Hello {
        from: worker(from),
        to: worker(2),
        block_bytes: BLOCK,
        fingerprint: "f".into(),
    }
}

/// The answer to a wish for a ring, past signs of life.
async fn answer(stream: &mut TcpEnd) -> Message {
    loop {
        match stream.reader.message().await.unwrap() {
            Message::Welcome { .. } | Message::Wait => {}
            other => return other,
        }
    }
}

fn stream(stream: TcpStream) -> TcpEnd {
    let (reader, writer) = stream.into_split();
    Stream {
        reader: Reader::new(reader, Duration::from_secs(30), BLOCK),
        writer,
    }
}

fn head() -> FrameHead {
    FrameHead {
        handoff: HandoffId::default(),
        block: Default::default(),
        part: BlockPart {
            ordinal: 0,
            offset: 0,
            len: BLOCK,
        },
        checksum: 0,
    }
}

#[tokio::test]
async fn lesson_16_a_slot_that_was_announced_and_not_written_was_taken_for_a_block() {
    let name = "lesson_16_a_slot_that_was_announced_and_not_written_was_taken_for_a_block";
    let Some(nixl) = alone(name) else {
        return;
    };
    let mut victim = Victim::start(config(2, Some(nixl))).await;
    victim.hears_of(1).await;
    // (slots that are announced, what is said of it)
    let cases: [(&[u32], &str); 3] = [
        (&[0], "closed"),
        (&[1, 1], "more payload than it was granted"),
        (&[4], "more payload than it was granted"),
    ];
    for (slots, says) in cases {
        let mut stream = victim.approach(1).await;
        let answer = answer(&mut stream).await;
        assert!(matches!(answer, Message::Landing { .. }), "{answer:?}");
        for slot in slots {
            let frame = Message::SlotFrame(head(), *slot);
            write(&mut stream.writer, &frame, &[]).await.unwrap();
        }
        stream.writer.shutdown().await.unwrap();
        // And nothing arrived before.
        let reason = victim.lost().await;
        assert!(reason.contains(says), "{slots:?}: {reason}");
    }
}

#[tokio::test]
async fn a_worker_without_the_library_says_so_to_who_asks_for_a_ring() {
    let victim = Victim::start(config(2, None)).await;
    let mut stream = victim.approach(1).await;
    let answer = answer(&mut stream).await;
    assert!(
        matches!(&answer, Message::NoLanding(reason) if reason.contains("no links over NIXL")),
        "{answer:?}"
    );
}

/// A receiver that offers what no agent made: before a byte of it reaches the library where it was damaged on the way, and
/// by the library's own word where it was not.
#[tokio::test]
async fn lesson_18_metadata_that_is_none_costs_the_link_its_speed_and_nothing_else() {
    let name = "lesson_18_metadata_that_is_none_costs_the_link_its_speed_and_nothing_else";
    let Some(nixl) = alone(name) else {
        return;
    };
    for (damage_from, says) in [(Some(60), "damaged on the way"), (None, "peer's metadata")] {
        let mut victim = Victim::start(config(2, Some(by_card(&nixl)))).await;
        let fake = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addresses = Addresses {
            tcp: Some(fake.local_addr().unwrap().to_string()),
            nixl: true,
            ..Addresses::default()
        };
        victim.links.know(worker(1), Route::Remote(addresses));
        let mut stream = stream(fake.accept().await.unwrap().0);
        let asked = stream.reader.message().await.unwrap();
        assert!(matches!(asked, Message::Approach(_)), "{asked:?}");
        let welcome = Message::Welcome {
            me: worker(1),
            credit: u64::from(4 * BLOCK),
            key: 1,
            frame_bytes: BLOCK,
        };
        write(&mut stream.writer, &welcome, &[]).await.unwrap();
        let Offer { start, metadata } = Offer {
            start: 4096,
            metadata: (0..300).map(|index| (index * 7) as u8).collect(),
        };
        let mut bytes = BytesMut::new();
        Message::Landing { start, metadata }.encode(&mut bytes);
        if let Some(at) = damage_from {
            bytes[at] ^= 4;
        }
        stream.writer.write_all(&bytes).await.unwrap();
        let reason = victim.fell_back().await;
        assert!(reason.contains(says), "{reason}");
        // It tries again over TCP.
        let mut stream = self::stream(fake.accept().await.unwrap().0);
        let asked = stream.reader.message().await.unwrap();
        assert!(matches!(asked, Message::Hello(_)), "{asked:?}");
    }
}
