//! Tests of peers that violate the protocol. They send wire messages over real sockets to the code
//! that serves links.

#![allow(clippy::unwrap_used)]

use crate::config::{LinkEvent, LinksConfig};
use crate::handshake::DialledLink;
use crate::incoming::LinkStream;
use crate::link::PayloadStore;
use crate::links::Links;
use crate::listeners::{ListenOptions, Listeners, OpenedListeners};
use crate::socket::{MessageReader, write_message};
use crate::transports::Transport;
use crate::transports::shm::{self, HostAddress, HostListener, SenderRing};
use crate::wire::{FrameHead, LinkHello, LinkMessage};
use crate::{LocalNet, PeerRoute, checksum};
use cleave_domain::{BlockHash, Fingerprint, HandoffId, Incarnation, KvPlane, WorkerId, WorkerRef};
use cleave_kv::{BlockPart, PayloadCondition, Seal};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream, unix};
use tokio::sync::mpsc;
use tokio::time::timeout;

pub(crate) const BLOCK: u32 = 4096;

pub(crate) fn worker(worker: u64) -> WorkerRef {
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

/// The worker under test.
struct CompliantWorker {
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
    address: String,
    host_address: HostAddress,
}

impl CompliantWorker {
    async fn start() -> Self {
        let (sender, events) = mpsc::channel(256);
        let links = Links::new(config(2), sender, LocalNet::default());
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap().to_string();
        let OpenedListeners {
            listeners,
            addresses,
            ..
        } = Listeners::open(ListenOptions {
            transports: [Transport::SharedMemory].into(),
            tcp: Some((tcp, address.clone())),
            has_nixl: false,
        });
        let host_address = addresses.part(Transport::SharedMemory).unwrap();
        let host_address = HostAddress::parse(host_address).unwrap();
        tokio::spawn(links.clone().serve(listeners));
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

    async fn next_lost(&mut self) -> String {
        loop {
            if let LinkEvent::Lost { reason, .. } = self.next().await {
                return reason;
            }
        }
    }

    async fn expect_lost(&mut self, expected: &str) {
        let reason = self.next_lost().await;
        assert!(reason.contains(expected), "{reason}");
    }

    /// Has the worker dial a peer, which read its hello and answers with these terms.
    async fn dialled(&self, credit: u32, frame_bytes: u32) -> PlainTcpLinkStream {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        self.links.add_peer(worker(1), PeerRoute::tcp(address));
        let mut stream = stream(listener.accept().await.unwrap().0);
        let hello = stream.reader.message().await.unwrap();
        assert!(matches!(hello, LinkMessage::Hello(_)));
        send(&mut stream, &welcome(credit, frame_bytes), &[]).await;
        stream
    }

    async fn connect(&self) -> PlainTcpLinkStream {
        stream(TcpStream::connect(&self.address).await.unwrap())
    }

    /// Opens a link up to its welcome, and returns its key.
    async fn connect_link(&self) -> (PlainTcpLinkStream, u64) {
        let mut stream = self.connect().await;
        send(&mut stream, &LinkMessage::Hello(hello(1)), &[]).await;
        match stream.reader.message().await.unwrap() {
            LinkMessage::Welcome { key, .. } => (stream, key),
            other => panic!("{other:?}"),
        }
    }

    async fn connect_ring(
        &self,
    ) -> (
        LinkStream<unix::OwnedReadHalf, unix::OwnedWriteHalf>,
        Arc<SenderRing>,
    ) {
        let config = config(1);
        let dialled = shm::dial(&config, worker(2), &self.host_address);
        let (DialledLink { mut streams, .. }, channel) = dialled.await.unwrap();
        match channel.store {
            PayloadStore::Ring(ring, _) => (streams.remove(0), ring),
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) type PlainTcpLinkStream = LinkStream<OwnedReadHalf, OwnedWriteHalf>;

pub(crate) fn stream(stream: TcpStream) -> PlainTcpLinkStream {
    let (reader, writer) = stream.into_split();
    LinkStream {
        reader: MessageReader::new(reader, Duration::from_secs(30), BLOCK),
        writer,
    }
}

pub(crate) async fn send<R, W: AsyncWrite + Unpin>(
    stream: &mut LinkStream<R, W>,
    message: &LinkMessage,
    payload: &[u8],
) {
    let written = write_message(&mut stream.writer, message, payload);
    written.await.unwrap();
}

pub(crate) fn hello(from: u64) -> LinkHello {
    LinkHello {
        from: worker(from),
        to: worker(2),
        block_bytes: BLOCK,
        fingerprint: "f".into(),
    }
}

/// The answer of the first worker to a hello.
pub(crate) fn welcome(credit: u32, frame_bytes: u32) -> LinkMessage {
    LinkMessage::Welcome {
        me: worker(1),
        credit: u64::from(credit),
        key: 1,
        frame_bytes,
    }
}

pub(crate) fn head(bytes: &[u8]) -> FrameHead {
    FrameHead {
        handoff: HandoffId::default(),
        block: Default::default(),
        part: BlockPart {
            plane: KvPlane::Blocks,
            ordinal: 0,
            offset: 0,
            len: bytes.len() as u32,
        },
        checksum: checksum(bytes),
    }
}

// Lesson: 10.
#[tokio::test]
async fn a_peer_that_exceeds_its_credit_is_disconnected() {
    let mut victim = CompliantWorker::start().await;
    let (mut stream, _) = victim.connect_link().await;
    let bytes = [7; BLOCK as usize];
    let mut arrived = Vec::new();
    for _ in 0..4 {
        let frame = LinkMessage::Frame(head(&bytes));
        send(&mut stream, &frame, &bytes).await;
        arrived.push(victim.next().await);
    }
    let frame = LinkMessage::Frame(head(&bytes));
    send(&mut stream, &frame, &bytes).await;
    victim.expect_lost("more payload than it was granted").await;
}

// Lesson: 2.
#[tokio::test]
async fn sending_a_held_or_unknown_slot_ends_the_link() {
    for slot in [0, 99] {
        let mut victim = CompliantWorker::start().await;
        let (mut stream, ring) = victim.connect_ring().await;
        let mut first = ring.take(BLOCK);
        first.fill(1);
        let frame = head(&first);
        let number = first.lend_to_receiver();
        let sent = LinkMessage::SlotFrame(frame, number);
        send(&mut stream, &sent, &[]).await;
        let held = victim.next().await;
        let condition = PayloadCondition::Intact;
        assert!(matches!(held, LinkEvent::Arrived { condition: found, .. } if found == condition));
        let number = if slot == 0 { number } else { slot };
        let again = LinkMessage::SlotFrame(frame, number);
        send(&mut stream, &again, &[]).await;
        victim.expect_lost("more payload than it was granted").await;
    }
}

// Invariant: I25.
// Lesson: 2, 16.
#[tokio::test]
async fn bytes_changed_in_shared_memory_fail_verification() {
    let mut victim = CompliantWorker::start().await;
    let (mut stream, ring) = victim.connect_ring().await;
    let mut slot = ring.take(BLOCK);
    slot.fill(1);
    let before = head(&slot);
    // The byte changes between the checksum and the receiver's read, as a late write into a reused
    // slot would change it.
    slot[1234] ^= 1;
    let sent = LinkMessage::SlotFrame(before, slot.lend_to_receiver());
    send(&mut stream, &sent, &[]).await;
    let LinkEvent::Arrived { payload, .. } = victim.next().await else {
        panic!("a frame was sent");
    };
    let payload = payload.unwrap();
    let mut pool = [0; BLOCK as usize];
    assert_eq!(payload.write_verified(&mut pool[..]), Ok(false));
}

// Lesson: 16.
#[tokio::test]
async fn a_peer_lost_inside_a_frame_delivers_no_frame() {
    let mut victim = CompliantWorker::start().await;
    let (mut stream, _) = victim.connect_link().await;
    let bytes = [7; BLOCK as usize];
    let mut wire = Vec::new();
    write_message(&mut wire, &LinkMessage::Frame(head(&bytes)), &bytes)
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
    // The memory of the lost frame is credit again for the next link.
    let (mut stream, _) = victim.connect_link().await;
    let whole = LinkMessage::Frame(head(&bytes));
    send(&mut stream, &whole, &bytes).await;
    assert!(matches!(victim.next().await, LinkEvent::Arrived { .. }));
}

// Invariant: I50.
/// Over TCP and over shared memory: a seal with a changed token, and a frame with a changed block.
#[tokio::test]
async fn a_damaged_message_ends_the_link_and_is_named() {
    let seal = LinkMessage::Seal(Seal {
        handoff: HandoffId::default(),
        blocks_count: 1,
        digest: 2,
        content: BlockHash::default(),
        output: vec![7],
        state: None,
        window: None,
    });
    let bytes = [7; BLOCK as usize];
    let (frame, slot_frame) = (head(&bytes), LinkMessage::SlotFrame(head(&bytes), 0));
    // The token, and the number of the block.
    let over_tcp = [
        (&seal, 29, "seal"),
        (&LinkMessage::Frame(frame), 20, "frame"),
    ];
    for (message, at, name) in over_tcp {
        let mut victim = CompliantWorker::start().await;
        let (mut stream, _) = victim.connect_link().await;
        let wire = damaged(message, &bytes, at).await;
        stream.writer.write_all(&wire).await.unwrap();
        assert_damaged(&victim.next_lost().await, name);
    }
    for (message, at, name) in [(&seal, 29, "seal"), (&slot_frame, 10, "slot frame")] {
        let mut victim = CompliantWorker::start().await;
        let (mut stream, _ring) = victim.connect_ring().await;
        let wire = damaged(message, &[], at).await;
        stream.writer.write_all(&wire).await.unwrap();
        assert_damaged(&victim.next_lost().await, name);
    }
}

async fn damaged(message: &LinkMessage, payload: &[u8], at: usize) -> Vec<u8> {
    let mut wire = Vec::new();
    write_message(&mut wire, message, payload).await.unwrap();
    wire[at] ^= 1;
    wire
}

fn assert_damaged(reason: &str, name: &str) {
    let expected = format!("message \"{name}\" was damaged on the way");
    assert!(reason.contains(&expected), "{name}: {reason}");
}

#[tokio::test]
async fn a_stream_joins_only_the_link_of_its_own_peer_and_key() {
    let victim = CompliantWorker::start().await;
    let (_stream, key) = victim.connect_link().await;
    for (from, key, welcome) in [(1, key, true), (1, key + 1, false), (3, key, false)] {
        let mut further = victim.connect().await;
        let from = worker(from);
        send(&mut further, &LinkMessage::Join { from, key }, &[]).await;
        match further.reader.message().await.unwrap() {
            LinkMessage::Joined => assert!(welcome),
            LinkMessage::Reject(reason) => assert!(!welcome && reason.contains("gone"), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
}

// Lesson: 8.
#[tokio::test]
async fn the_end_of_one_stream_ends_the_link() {
    let mut victim = CompliantWorker::start().await;
    let (mut first, key) = victim.connect_link().await;
    let mut second = victim.connect().await;
    let from = worker(1);
    send(&mut second, &LinkMessage::Join { from, key }, &[]).await;
    let joined = second.reader.message().await.unwrap();
    assert_eq!(joined, LinkMessage::Joined);
    drop(second);
    victim.expect_lost("closed").await;
    // The first stream was closed before the loss was reported.
    assert!(first.reader.message().await.is_err());
}

#[tokio::test]
async fn a_link_of_too_many_streams_is_ended() {
    let mut victim = CompliantWorker::start().await;
    let (_stream, key) = victim.connect_link().await;
    let mut further = Vec::new();
    for _ in 0..16 {
        let mut stream = victim.connect().await;
        let join = LinkMessage::Join {
            from: worker(1),
            key,
        };
        send(&mut stream, &join, &[]).await;
        further.push(stream);
    }
    victim.expect_lost("beyond the limit").await;
}

#[tokio::test]
async fn credit_beyond_the_window_ends_the_link() {
    for (grant, expected) in [
        (LinkMessage::Credit(1), "grant beyond the window"),
        (LinkMessage::CreditSlots(vec![0]), "grant beyond the window"),
        (LinkMessage::Joined, "from the receiver of a link"),
    ] {
        let mut victim = CompliantWorker::start().await;
        let mut stream = victim.dialled(4 * BLOCK, BLOCK).await;
        // The measurement: three round trips, and one after each of two probes.
        for _ in 0..5 {
            let nonce = loop {
                match stream.reader.next().await.unwrap() {
                    crate::socket::ReceivedMessage::Message(LinkMessage::Ping(nonce)) => {
                        break nonce;
                    }
                    crate::socket::ReceivedMessage::Probe => {}
                    other => panic!("{other:?}"),
                }
            };
            let pong = LinkMessage::Pong(nonce);
            send(&mut stream, &pong, &[]).await;
        }
        send(&mut stream, &grant, &[]).await;
        victim.expect_lost(expected).await;
    }
}

#[tokio::test]
async fn terms_too_small_for_a_block_make_no_link() {
    for (credit, frame_bytes, expected) in [
        (
            BLOCK - 1,
            BLOCK,
            "4095 bytes of credit, and a block has 4096",
        ),
        (4 * BLOCK, 1, "frames of 1 bytes, and 4096 is the least"),
    ] {
        let mut victim = CompliantWorker::start().await;
        let _stream = victim.dialled(credit, frame_bytes).await;
        victim.expect_lost(expected).await;
    }
}

#[tokio::test]
async fn a_ring_over_the_size_limit_is_not_mapped() {
    let host = HostListener::bind().unwrap();
    let address = host.address().clone();
    let oversized_peer = tokio::spawn(async move {
        let (reader, mut writer) = host.accept().await.unwrap().into_split();
        let mut reader = MessageReader::new(reader, Duration::from_secs(20), BLOCK);
        let hello = reader.message().await.unwrap();
        assert!(matches!(hello, LinkMessage::Hello(_)));
        let welcome = welcome(BLOCK << 19, BLOCK);
        write_message(&mut writer, &welcome, &[]).await.unwrap();
        // Until the dialler closes.
        let _ = reader.message().await;
    });
    let Err(refused) = shm::dial(&config(2), worker(1), &address).await else {
        panic!("2 GiB were to be mapped");
    };
    let message = refused.to_string();
    assert!(message.contains("1073741824 is the most"), "{message}");
    oversized_peer.await.unwrap();
}

#[test]
fn a_ring_of_tiny_slots_takes_no_more_memory_than_two_windows() {
    for block_bytes in [1, 100, 4096, 5000, 1 << 20] {
        let config = LinksConfig::new(worker(1), Fingerprint("f".into()), block_bytes);
        let (mirror_bytes, window) = (shm::ring_bytes(&config), u64::from(config.window()));
        assert!(mirror_bytes <= 2 * window, "{block_bytes}: {mirror_bytes}");
    }
}
