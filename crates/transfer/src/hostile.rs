//! Peers that break the rules, told apart from those that keep them. They speak the wire's words over
//! real sockets, to the code that serves.

#![allow(clippy::unwrap_used)]

use crate::config::{LinkEvent, LinksConfig};
use crate::handshake::Dialled;
use crate::incoming::Stream;
use crate::link::Store;
use crate::links::{Links, Listeners};
use crate::shared_memory::Ring;
use crate::socket::{Reader, write};
use crate::wire::{FrameHead, Hello, Message};
use crate::{HostListener, LocalNet, Route, checksum, host};
use cleave_domain::{BlockHash, Fingerprint, HandoffId, Incarnation, WorkerId, WorkerRef};
use cleave_kv::{BlockPart, Condition, Seal};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream, unix};
use tokio::sync::mpsc;
use tokio::time::timeout;

const BLOCK: u32 = 4096;

fn worker(worker: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(worker),
        incarnation: Incarnation(1),
    }
}

fn config(me: u64) -> LinksConfig {
    LinksConfig {
        credit_bytes: 4 * BLOCK,
        streams_count: 1,
        ..LinksConfig::new(worker(me), Fingerprint("f".into()), BLOCK)
    }
}

/// The one that keeps the rules.
struct Victim {
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
    address: String,
    host_address: crate::HostAddress,
}

impl Victim {
    async fn start() -> Self {
        let (sender, events) = mpsc::channel(256);
        let links = Links::new(config(2), sender, LocalNet::default());
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = HostListener::bind().unwrap();
        let address = tcp.local_addr().unwrap().to_string();
        let host_address = host.address().clone();
        tokio::spawn(links.clone().serve(Listeners {
            tcp: Some(tcp),
            host: Some(host),
        }));
        Self {
            links,
            events,
            address,
            host_address,
        }
    }

    async fn next(&mut self) -> LinkEvent {
        let next = timeout(Duration::from_secs(20), self.events.recv()).await;
        next.expect("an event in time").expect("links are open")
    }

    async fn lost(&mut self) -> String {
        loop {
            if let LinkEvent::Lost { reason, .. } = self.next().await {
                return reason;
            }
        }
    }

    async fn knock(&self) -> Stream<OwnedReadHalf, OwnedWriteHalf> {
        stream(TcpStream::connect(&self.address).await.unwrap())
    }

    /// A link that was welcomed, and its key.
    async fn linked(&self) -> (Stream<OwnedReadHalf, OwnedWriteHalf>, u64) {
        let mut stream = self.knock().await;
        let hello = Message::Hello(Hello {
            from: worker(1),
            to: worker(2),
            block_bytes: BLOCK,
            fingerprint: "f".into(),
        });
        write(&mut stream.writer, &hello, &[]).await.unwrap();
        match stream.reader.message().await.unwrap() {
            Message::Welcome { key, .. } => (stream, key),
            other => panic!("{other:?}"),
        }
    }

    async fn ring(&self) -> (Stream<unix::OwnedReadHalf, unix::OwnedWriteHalf>, Arc<Ring>) {
        let config = config(1);
        let dialled = host::dial(&config, worker(2), &self.host_address);
        let (Dialled { mut streams, .. }, carriage) = dialled.await.unwrap();
        match carriage.store {
            Store::Ring(ring, _) => (streams.remove(0), ring),
            other => panic!("{other:?}"),
        }
    }
}

fn stream(stream: TcpStream) -> Stream<OwnedReadHalf, OwnedWriteHalf> {
    let (reader, writer) = stream.into_split();
    Stream {
        reader: Reader::new(reader, Duration::from_secs(20), BLOCK),
        writer,
    }
}

fn head(bytes: &[u8]) -> FrameHead {
    FrameHead {
        handoff: HandoffId::default(),
        block: Default::default(),
        part: BlockPart {
            ordinal: 0,
            offset: 0,
            len: bytes.len() as u32,
        },
        checksum: checksum(bytes),
    }
}

#[tokio::test]
async fn lesson_10_a_peer_that_overdraws_its_credit_is_cut_off() {
    let mut victim = Victim::start().await;
    let (mut stream, _) = victim.linked().await;
    let bytes = [7; BLOCK as usize];
    let mut kept = Vec::new();
    for _ in 0..4 {
        let frame = Message::Frame(head(&bytes));
        write(&mut stream.writer, &frame, &bytes).await.unwrap();
        kept.push(victim.next().await);
    }
    let frame = Message::Frame(head(&bytes));
    write(&mut stream.writer, &frame, &bytes).await.unwrap();
    let reason = victim.lost().await;
    assert!(
        reason.contains("more payload than it was granted"),
        "{reason}"
    );
}

#[tokio::test]
async fn lesson_02_a_slot_sent_while_it_is_held_or_that_is_none_cuts_the_peer_off() {
    for slot in [0, 99] {
        let mut victim = Victim::start().await;
        let (mut stream, ring) = victim.ring().await;
        let mut first = ring.take(BLOCK);
        first.fill(1);
        let frame = head(&first);
        let number = first.lend();
        let sent = Message::SlotFrame(frame, number);
        write(&mut stream.writer, &sent, &[]).await.unwrap();
        let held = victim.next().await;
        let condition = Condition::Intact;
        assert!(matches!(held, LinkEvent::Arrived { condition: found, .. } if found == condition));
        let number = if slot == 0 { number } else { slot };
        let again = Message::SlotFrame(frame, number);
        write(&mut stream.writer, &again, &[]).await.unwrap();
        let reason = victim.lost().await;
        assert!(
            reason.contains("more payload than it was granted"),
            "{reason}"
        );
    }
}

#[tokio::test]
async fn lesson_02_lesson_16_bytes_changed_in_shared_memory_are_never_intact() {
    let mut victim = Victim::start().await;
    let (mut stream, ring) = victim.ring().await;
    let mut slot = ring.take(BLOCK);
    slot.fill(1);
    let before = head(&slot);
    // Between the checksum and the receiver's reading: what a late write into a reused slot does.
    slot[1234] ^= 1;
    let sent = Message::SlotFrame(before, slot.lend());
    write(&mut stream.writer, &sent, &[]).await.unwrap();
    let LinkEvent::Arrived { payload, .. } = victim.next().await else {
        panic!("a frame was sent");
    };
    let payload = payload.unwrap();
    let mut pool = [0; BLOCK as usize];
    assert_eq!(payload.land(&mut pool[..]), Ok(false));
}

#[tokio::test]
async fn lesson_16_a_peer_that_dies_in_the_middle_of_a_frame_leaves_no_frame() {
    let mut victim = Victim::start().await;
    let (mut stream, _) = victim.linked().await;
    let bytes = [7; BLOCK as usize];
    let mut wire = Vec::new();
    write(&mut wire, &Message::Frame(head(&bytes)), &bytes)
        .await
        .unwrap();
    stream
        .writer
        .write_all(&wire[..wire.len() - 1])
        .await
        .unwrap();
    drop(stream);
    let LinkEvent::Lost { reason, .. } = victim.next().await else {
        panic!("half a frame is none");
    };
    assert!(reason.contains("1 bytes short"), "{reason}");
    // And its memory is credit again for the next link.
    let (mut stream, _) = victim.linked().await;
    let whole = Message::Frame(head(&bytes));
    write(&mut stream.writer, &whole, &bytes).await.unwrap();
    assert!(matches!(victim.next().await, LinkEvent::Arrived { .. }));
}

/// Over TCP and beside a ring of shared memory: a seal whose token changed, and a frame for another block.
#[tokio::test]
async fn a_damaged_message_ends_the_link_and_says_so() {
    let seal = Message::Seal(Seal {
        handoff: HandoffId::default(),
        blocks_count: 1,
        digest: 2,
        content: BlockHash::default(),
        output: vec![7],
    });
    let bytes = [7; BLOCK as usize];
    let (frame, slot_frame) = (head(&bytes), Message::SlotFrame(head(&bytes), 0));
    // The last byte before the checksum; the number of the block.
    let over_tcp = [(&seal, 51, "seal"), (&Message::Frame(frame), 20, "frame")];
    for (message, at, name) in over_tcp {
        let mut victim = Victim::start().await;
        let (mut stream, _) = victim.linked().await;
        let wire = damaged(message, &bytes, at).await;
        stream.writer.write_all(&wire).await.unwrap();
        assert_damaged(&victim.lost().await, name);
    }
    for (message, at, name) in [(&seal, 51, "seal"), (&slot_frame, 20, "slot frame")] {
        let mut victim = Victim::start().await;
        let (mut stream, _ring) = victim.ring().await;
        let wire = damaged(message, &[], at).await;
        stream.writer.write_all(&wire).await.unwrap();
        assert_damaged(&victim.lost().await, name);
    }
}

async fn damaged(message: &Message, payload: &[u8], at: usize) -> Vec<u8> {
    let mut wire = Vec::new();
    write(&mut wire, message, payload).await.unwrap();
    wire[at] ^= 1;
    wire
}

fn assert_damaged(reason: &str, name: &str) {
    let says = format!("message \"{name}\" was damaged on the way");
    assert!(reason.contains(&says), "{name}: {reason}");
}

#[tokio::test]
async fn a_stream_joins_only_the_link_of_its_own_peer_and_key() {
    let victim = Victim::start().await;
    let (_stream, key) = victim.linked().await;
    for (from, key, welcome) in [(1, key, true), (1, key + 1, false), (3, key, false)] {
        let mut further = victim.knock().await;
        let from = worker(from);
        write(&mut further.writer, &Message::Join { from, key }, &[])
            .await
            .unwrap();
        match further.reader.message().await.unwrap() {
            Message::Joined => assert!(welcome),
            Message::Reject(reason) => assert!(!welcome && reason.contains("gone"), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn lesson_08_one_stream_that_ends_ends_the_link_though_the_others_stand() {
    let mut victim = Victim::start().await;
    let (mut first, key) = victim.linked().await;
    let mut second = victim.knock().await;
    let from = worker(1);
    write(&mut second.writer, &Message::Join { from, key }, &[])
        .await
        .unwrap();
    let joined = second.reader.message().await.unwrap();
    assert_eq!(joined, Message::Joined);
    drop(second);
    let reason = victim.lost().await;
    assert!(reason.contains("closed"), "{reason}");
    // The first one was hung up on before that was said.
    assert!(first.reader.message().await.is_err());
}

#[tokio::test]
async fn a_link_of_too_many_streams_is_ended() {
    let mut victim = Victim::start().await;
    let (_stream, key) = victim.linked().await;
    let mut further = Vec::new();
    for _ in 0..16 {
        let mut stream = victim.knock().await;
        let join = Message::Join {
            from: worker(1),
            key,
        };
        write(&mut stream.writer, &join, &[]).await.unwrap();
        further.push(stream);
    }
    let reason = victim.lost().await;
    assert!(reason.contains("beyond the limit"), "{reason}");
}

#[tokio::test]
async fn grants_of_what_was_never_lent_end_the_link() {
    for (grant, expected) in [
        (Message::Grant(1), "grant beyond the window"),
        (Message::GrantSlots(vec![0]), "grant beyond the window"),
        (Message::Joined, "from the receiver of a link"),
    ] {
        let mut victim = Victim::start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        victim.links.know(worker(1), Route::tcp(address));
        let mut stream = stream(listener.accept().await.unwrap().0);
        let hello = stream.reader.message().await.unwrap();
        assert!(matches!(hello, Message::Hello(_)));
        let welcome = Message::Welcome {
            me: worker(1),
            credit: u64::from(4 * BLOCK),
            key: 1,
            frame_bytes: BLOCK,
        };
        write(&mut stream.writer, &welcome, &[]).await.unwrap();
        // Its measurement: three round trips, and after each of two probes another.
        for _ in 0..5 {
            let nonce = loop {
                match stream.reader.next().await.unwrap() {
                    crate::socket::Received::Message(Message::Ping(nonce)) => break nonce,
                    crate::socket::Received::Probe => {}
                    other => panic!("{other:?}"),
                }
            };
            let pong = Message::Pong(nonce);
            write(&mut stream.writer, &pong, &[]).await.unwrap();
        }
        write(&mut stream.writer, &grant, &[]).await.unwrap();
        let reason = victim.lost().await;
        assert!(reason.contains(expected), "{reason}");
    }
}

#[tokio::test]
async fn terms_under_which_no_block_could_travel_make_no_link() {
    for (credit, frame_bytes, expected) in [
        (
            BLOCK - 1,
            BLOCK,
            "4095 bytes of credit, and a block has 4096",
        ),
        (4 * BLOCK, 1, "frames of 1 bytes, and 4096 is the least"),
    ] {
        let mut victim = Victim::start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        victim.links.know(worker(1), Route::tcp(address));
        let mut stream = stream(listener.accept().await.unwrap().0);
        let hello = stream.reader.message().await.unwrap();
        assert!(matches!(hello, Message::Hello(_)));
        let welcome = Message::Welcome {
            me: worker(1),
            credit: u64::from(credit),
            key: 1,
            frame_bytes,
        };
        write(&mut stream.writer, &welcome, &[]).await.unwrap();
        let reason = victim.lost().await;
        assert!(reason.contains(expected), "{reason}");
    }
}

#[tokio::test]
async fn a_ring_beyond_all_windows_is_not_mapped() {
    let host = HostListener::bind().unwrap();
    let address = host.address().clone();
    let giant = tokio::spawn(async move {
        let (reader, mut writer) = host.accept().await.unwrap().into_split();
        let mut reader = Reader::new(reader, Duration::from_secs(20), BLOCK);
        let hello = reader.message().await.unwrap();
        assert!(matches!(hello, Message::Hello(_)));
        let welcome = Message::Welcome {
            me: worker(1),
            credit: u64::from(BLOCK) << 19,
            key: 1,
            frame_bytes: BLOCK,
        };
        write(&mut writer, &welcome, &[]).await.unwrap();
        // Until the other end hangs up.
        let _ = reader.message().await;
    });
    let Err(refused) = host::dial(&config(2), worker(1), &address).await else {
        panic!("2 GiB were to be mapped");
    };
    let said = refused.to_string();
    assert!(said.contains("1073741824 is the most"), "{said}");
    giant.await.unwrap();
}

#[test]
fn a_ring_of_tiny_slots_takes_no_more_memory_than_two_windows() {
    for block_bytes in [1, 100, 4096, 5000, 1 << 20] {
        let config = LinksConfig::new(worker(1), Fingerprint("f".into()), block_bytes);
        let (mirror_bytes, window) = (host::ring_bytes(&config), u64::from(config.window()));
        assert!(mirror_bytes <= 2 * window, "{block_bytes}: {mirror_bytes}");
    }
}
