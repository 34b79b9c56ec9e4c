//! Tests of links with several TCP connections and faults between the ends, and of the choice of a
//! transport.

use crate::pair::*;
use cleave_kv::{Packet, PayloadCondition};
use cleave_transfer::{DataAddresses, LinkEvent, LinksConfig, LocalNet, PeerRoute, Transport};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;

/// A proxy that changes bytes of the stream from the dialler: `change` gets the offset in that
/// stream and the byte.
async fn proxy(target: String, change: impl Fn(u64, &mut u8) + Send + Copy + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let far = TcpStream::connect(&target).await.unwrap();
            let (mut near_read, mut near_write) = near.into_split();
            let (mut far_read, mut far_write) = far.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut far_read, &mut near_write).await });
            tokio::spawn(async move {
                let (mut offset, mut buffer) = (0u64, vec![0; 1 << 16]);
                while let Ok(count @ 1..) = near_read.read(&mut buffer).await {
                    for byte in &mut buffer[..count] {
                        change(offset, byte);
                        offset += 1;
                    }
                    if far_write.write_all(&buffer[..count]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// The state of one connection through a [`ConnectionProxy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProxyState {
    Open,
    /// Nothing passes either way; the connection stays open.
    Paused,
    /// Closed in the middle of a transfer.
    Cut,
    /// Only the direction from the dialler is closed.
    HalfClosed,
}

/// A proxy whose connections, numbered in order of arrival, can be paused and cut.
struct ConnectionProxy {
    address: String,
    connections: Arc<Mutex<Vec<watch::Sender<ProxyState>>>>,
}

impl ConnectionProxy {
    async fn before(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let connections = Arc::new(Mutex::new(Vec::new()));
        let opened = Arc::clone(&connections);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let (sender, state_receiver) = watch::channel(ProxyState::Open);
                opened.lock().unwrap().push(sender);
                let far = TcpStream::connect(&target).await.unwrap();
                let (near_read, near_write) = near.into_split();
                let (far_read, far_write) = far.into_split();
                tokio::spawn(relay(near_read, far_write, state_receiver.clone(), true));
                tokio::spawn(relay(far_read, near_write, state_receiver, false));
            }
        });
        Self {
            address,
            connections,
        }
    }

    fn set(&self, connection: usize, state: ProxyState) {
        self.connections.lock().unwrap()[connection].send_replace(state);
    }

    fn count(&self) -> usize {
        self.connections.lock().unwrap().len()
    }
}

async fn relay(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut state_receiver: watch::Receiver<ProxyState>,
    is_outward: bool,
) {
    // An odd size, so that cuts fall inside messages.
    let mut buffer = vec![0; 777];
    loop {
        let state = *state_receiver.borrow_and_update();
        match state {
            ProxyState::Cut => return,
            ProxyState::HalfClosed if is_outward => return,
            ProxyState::Paused => state_receiver.changed().await.unwrap(),
            ProxyState::Open | ProxyState::HalfClosed => {
                tokio::select! {
                    changed = state_receiver.changed() => {
                        if changed.is_err() {
                            return;
                        }
                    }
                    read = from.read(&mut buffer) => match read {
                        Ok(count @ 1..) if to.write_all(&buffer[..count]).await.is_ok() => {}
                        _ => return,
                    },
                }
            }
        }
    }
}

/// A limit on silence that a test waits for.
const SILENCE_REACHED: Duration = Duration::from_secs(2);
/// Longer than `LinkedWorker::next` waits, so a loss that a test sees has another reason.
const SILENCE_UNREACHED: Duration = Duration::from_secs(60);

/// `silence_max` of the two ends of a link.
#[derive(Clone, Copy)]
struct LinkSilenceLimits {
    sender: Duration,
    receiver: Duration,
}

impl LinkSilenceLimits {
    const UNREACHED: Self = Self {
        sender: SILENCE_UNREACHED,
        receiver: SILENCE_UNREACHED,
    };
}

async fn gated_pair(
    silence_limits: LinkSilenceLimits,
    credit_bytes: u32,
) -> (LinkedWorker, LinkedWorker, ConnectionProxy) {
    let config = |me, silence_max| LinksConfig {
        silence_max,
        credit_bytes,
        ..config(me, "f")
    };
    let LinkSilenceLimits {
        sender: sender_silence_max,
        receiver: receiver_silence_max,
    } = silence_limits;
    let sender_config = config(worker_ref(1, 1), sender_silence_max);
    let receiver_config = config(worker_ref(2, 1), receiver_silence_max);
    let mut sender = LinkedWorker::on(LocalNet::default(), sender_config).await;
    let receiver = LinkedWorker::on(LocalNet::default(), receiver_config).await;
    let gate = ConnectionProxy::before(receiver.address.clone()).await;
    sender
        .links
        .add_peer(receiver.me, PeerRoute::tcp(gate.address.clone()));
    sender.next_measured().await;
    assert_eq!(gate.count(), 4, "the usual number of streams");
    (sender, receiver, gate)
}

#[tokio::test]
async fn messages_of_several_streams_arrive_all_in_any_order() {
    let (mut sender, mut receiver, gate) =
        gated_pair(LinkSilenceLimits::UNREACHED, 64 * BLOCK).await;
    gate.set(2, ProxyState::Paused);
    // Idle streams take messages in turn, so the paused one holds some.
    let mut expected: BTreeSet<(u64, Option<u32>)> = BTreeSet::new();
    for flight in 0..8 {
        for ordinal in 0..4 {
            sender.send_block(receiver.me, flight, ordinal).await;
            expected.insert((flight, Some(ordinal)));
        }
        let link = sender.links.link(receiver.me).unwrap();
        link.send(seal(flight)).unwrap();
        expected.insert((flight, None));
    }
    let mut overtaken = BTreeSet::new();
    while !expected.is_empty() {
        // If nothing arrives for this long, everything that can arrive has arrived; then the rest
        // is released.
        let wait = timeout(Duration::from_millis(500), receiver.next_packet());
        let Ok(arrived) = wait.await else {
            assert!(overtaken.is_empty(), "{expected:?} never came");
            overtaken.clone_from(&expected);
            gate.set(2, ProxyState::Open);
            continue;
        };
        let flight = arrived.packet.handoff().flight.0;
        let ordinal = match arrived.packet {
            Packet::Frame { part, .. } => {
                let bytes = block_bytes(flight, part.ordinal);
                let payload = arrived.payload.unwrap();
                assert_eq!(payload.bytes(), Some(&bytes[..]));
                Some(part.ordinal)
            }
            _ => None,
        };
        assert!(expected.remove(&(flight, ordinal)), "came once");
    }
    assert!(!overtaken.is_empty(), "one stream was held");
}

// Lesson: 8.
#[tokio::test]
async fn one_lost_stream_loses_the_link_once_at_both_ends() {
    for end in [ProxyState::Cut, ProxyState::HalfClosed] {
        for stream in 0..4 {
            let (mut sender, mut receiver, gate) =
                gated_pair(LinkSilenceLimits::UNREACHED, 4 * BLOCK).await;
            let link = sender.links.link(receiver.me).unwrap();
            sender.send_block(receiver.me, 1, 0).await;
            assert!(receiver.next_packet().await.payload.is_some());
            gate.set(stream, end);
            assert_eq!(sender.next_lost().await.0, receiver.me, "{end:?} {stream}");
            assert_eq!(receiver.next_lost().await.0, sender.me, "{end:?} {stream}");
            assert!(link.is_broken());
            // The next use dials anew, with all streams, and no second loss of the first link is
            // reported.
            sender.send_block(receiver.me, 2, 0).await;
            assert_eq!(receiver.next_packet().await.packet.handoff(), handoff(2));
            assert_eq!(gate.count(), 8);
        }
    }
}

// Lesson: 9.
#[tokio::test]
async fn one_silent_stream_loses_the_link() {
    // A paused stream is silent at both ends. The end whose limit passes first reports the silence
    // and closes the link, and the other end reports the close. With equal limits either end may be
    // first, so each end in turn has the only limit that passes.
    let sender_first = async {
        let (sender, receiver, _gate) = pair_with_a_silent_stream(LinkSilenceLimits {
            sender: SILENCE_REACHED,
            ..LinkSilenceLimits::UNREACHED
        })
        .await;
        assert_lost_by_silence(sender, receiver).await;
    };
    let receiver_first = async {
        let (sender, receiver, _gate) = pair_with_a_silent_stream(LinkSilenceLimits {
            receiver: SILENCE_REACHED,
            ..LinkSilenceLimits::UNREACHED
        })
        .await;
        assert_lost_by_silence(receiver, sender).await;
    };
    tokio::join!(sender_first, receiver_first);
}

async fn pair_with_a_silent_stream(
    silence_limits: LinkSilenceLimits,
) -> (LinkedWorker, LinkedWorker, ConnectionProxy) {
    let (mut sender, mut receiver, gate) = gated_pair(silence_limits, 4 * BLOCK).await;
    sender.send_block(receiver.me, 1, 0).await;
    assert!(receiver.next_packet().await.payload.is_some());
    gate.set(3, ProxyState::Paused);
    (sender, receiver, gate)
}

/// Asserts that `first` loses the link by its limit on silence, and `second` by the close.
async fn assert_lost_by_silence(mut first: LinkedWorker, mut second: LinkedWorker) {
    let silent = format!("nothing was heard for {SILENCE_REACHED:?}");
    assert_eq!(first.next_lost().await, (second.me, silent));
    let closed = "the peer closed the link".to_owned();
    assert_eq!(second.next_lost().await, (first.me, closed));
}

/// The identity of the receiver's host, and the name of its socket there.
fn host_address(receiver: &LinkedWorker) -> (String, String) {
    let part = receiver.addresses.part(Transport::SharedMemory);
    let (host_id, name) = part.unwrap().split_once('/').unwrap();
    (host_id.to_owned(), name.to_owned())
}

// Lesson: 18.
#[tokio::test]
async fn a_failed_transport_is_reported_and_the_next_is_used() {
    let mut sender = LinkedWorker::start(worker_ref(1, 1), "f").await;
    let mut receiver = LinkedWorker::start(worker_ref(2, 1), "f").await;
    let (host_id, _) = host_address(&receiver);
    let part = format!("{host_id}/cleave-kv-nobody-has-this-name");
    let addresses = receiver.addresses().with(Transport::SharedMemory, part);
    sender
        .links
        .add_peer(receiver.me, PeerRoute::Remote(addresses));
    let LinkEvent::FellBack {
        peer,
        from,
        to,
        reason,
    } = sender.next().await
    else {
        panic!("a fallback is reported first");
    };
    assert_eq!(peer, receiver.me);
    assert_eq!((from, to), (Transport::SharedMemory, Transport::Tcp));
    assert!(
        reason.contains("nobody-has-this-name") && reason.contains("refused"),
        "{reason}"
    );
    assert_eq!(sender.next_measured().await.transport, Transport::Tcp);
    sender.send_block(receiver.me, 1, 0).await;
    assert!(receiver.next_packet().await.payload.is_some());
}

#[tokio::test]
async fn a_peer_on_another_host_is_not_tried_over_shared_memory() {
    let mut sender = LinkedWorker::start(worker_ref(1, 1), "f").await;
    let receiver = LinkedWorker::start(worker_ref(2, 1), "f").await;
    let (_, name) = host_address(&receiver);
    let other_host = format!("another-boot/{name}");
    let addresses = receiver.addresses();
    let addresses = addresses.with(Transport::SharedMemory, &other_host);
    sender
        .links
        .add_peer(receiver.me, PeerRoute::Remote(addresses));
    let LinkEvent::Measured { speed, .. } = sender.next().await else {
        panic!("nothing was to be tried before");
    };
    assert_eq!(speed.transport, Transport::Tcp);
    let unreachable = DataAddresses::default().with(Transport::SharedMemory, other_host);
    sender
        .links
        .add_peer(worker_ref(3, 1), PeerRoute::Remote(unreachable));
    let (_, reason) = sender.next_lost().await;
    assert!(reason.contains("own host"), "{reason}");
}

// Lesson: 2, 16.
#[tokio::test]
async fn a_payload_with_a_flipped_byte_is_reported_damaged() {
    let one_stream = LinksConfig {
        streams_count: 1,
        ..config(worker_ref(1, 1), "f")
    };
    let mut sender = LinkedWorker::on(LocalNet::default(), one_stream).await;
    let mut receiver = LinkedWorker::start(worker_ref(2, 1), "f").await;
    // Handshake, pings and two probes of 1 MiB precede the frames; the flipped byte is in the
    // payload of a later frame.
    let address = proxy(receiver.address.clone(), |offset, byte| {
        if offset == (2 << 20) + 3 * 4096 {
            *byte ^= 0x10;
        }
    })
    .await;
    sender.links.add_peer(receiver.me, PeerRoute::tcp(address));
    let to = receiver.me;
    let sending = tokio::spawn(async move {
        for ordinal in 0..8 {
            sender.send_block(to, 1, ordinal).await;
        }
        sender
    });
    let mut damaged = 0;
    for _ in 0..8 {
        let arrived = receiver.next_packet().await;
        let Packet::Frame { part, .. } = arrived.packet else {
            panic!("only frames were sent");
        };
        let payload = arrived.payload.unwrap();
        let same = payload.bytes() == Some(&block_bytes(1, part.ordinal)[..]);
        assert_eq!(arrived.condition == PayloadCondition::Intact, same);
        damaged += u32::from(!same);
    }
    assert_eq!(damaged, 1);
    drop(sending.await.unwrap());
}

#[tokio::test]
async fn garbage_and_idle_connections_do_not_disturb_links() {
    let mut sender = LinkedWorker::start(worker_ref(1, 1), "f").await;
    let mut receiver = LinkedWorker::start(worker_ref(2, 1), "f").await;
    let mut idle_streams = Vec::new();
    for garbage in [
        &b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"[..],
        &[0xff; 4096],
        &[1, 0, 0, 0, 255, 255, 255, 255],
        &[1, 0, 0, 0, 6, 0, 0, 0, b'C', b'L', b'V', b'K', 9, 9],
        b"",
    ] {
        let mut stream = TcpStream::connect(&receiver.address).await.unwrap();
        stream.write_all(garbage).await.unwrap();
        idle_streams.push(stream);
    }
    sender.add_peer(&receiver, Transport::Tcp);
    sender.send_block(receiver.me, 1, 0).await;
    assert!(receiver.next_packet().await.payload.is_some());
    // All connections but the idle one were closed.
    for stream in &mut idle_streams[..4] {
        let mut rest = Vec::new();
        let ended = timeout(Duration::from_secs(20), stream.read_to_end(&mut rest)).await;
        let _ = ended.expect("hung up in time");
    }
}

// Lesson: 9.
#[tokio::test]
async fn a_silent_peer_is_lost() {
    let mut sender = LinkedWorker::start(worker_ref(1, 1), "f").await;
    // The listener accepts and then sends nothing, as a stopped process does.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let route = PeerRoute::tcp(listener.local_addr().unwrap().to_string());
    let mute = tokio::spawn(async move { listener.accept().await });
    sender.links.add_peer(worker_ref(2, 1), route);
    let (_, reason) = sender.next_lost().await;
    assert!(reason.contains("nothing was heard"), "{reason}");
    drop(mute.await);
}
