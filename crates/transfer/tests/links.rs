//! Two workers' links over real sockets, with whatever stands between them.
#![allow(missing_docs, clippy::unwrap_used)]

use bytes::Bytes;
use cleave_domain::{
    BlockIndex, BlockRef, Cause, Failure, Fingerprint, FlightId, Generation, HandoffId,
    Incarnation, WorkerId, WorkerRef,
};
use cleave_kv::{BlockPart, Packet, Seal};
use cleave_transfer::{
    Frame, LinkDown, LinkEvent, Links, LinksConfig, LocalNet, Payload, Route, checksum,
};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

const BLOCK: u32 = 4096;

struct Arrived {
    from: WorkerRef,
    packet: Packet,
    intact: bool,
    payload: Option<Payload>,
}

struct Worker {
    me: WorkerRef,
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
    address: String,
    server: JoinHandle<()>,
}

fn worker_ref(worker: u64, incarnation: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(worker),
        incarnation: Incarnation(incarnation),
    }
}

fn config(me: WorkerRef, fingerprint: &str) -> LinksConfig {
    LinksConfig {
        credit_bytes: 4 * BLOCK,
        beat: Duration::from_millis(50),
        silence_max: Duration::from_millis(500),
        ..LinksConfig::new(me, Fingerprint(fingerprint.into()), BLOCK)
    }
}

impl Worker {
    async fn start(me: WorkerRef, fingerprint: &str) -> Self {
        Self::on(LocalNet::default(), me, fingerprint).await
    }

    async fn on(net: LocalNet, me: WorkerRef, fingerprint: &str) -> Self {
        let (sender, events) = mpsc::channel(256);
        let links = Links::new(config(me, fingerprint), sender, net);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = tokio::spawn(links.clone().serve(listener));
        Self {
            me,
            links,
            events,
            address,
            server,
        }
    }

    fn route(&self) -> Route {
        Route::Tcp(self.address.clone())
    }

    async fn next(&mut self) -> LinkEvent {
        let next = timeout(Duration::from_secs(20), self.events.recv()).await;
        next.expect("an event in time").expect("links are open")
    }

    async fn arrived(&mut self) -> Arrived {
        loop {
            match self.next().await {
                LinkEvent::Arrived {
                    from,
                    packet,
                    intact,
                    payload,
                } => {
                    return Arrived {
                        from,
                        packet,
                        intact,
                        payload,
                    };
                }
                LinkEvent::Lost { peer, reason } => panic!("{peer} lost: {reason}"),
                LinkEvent::Granted { .. } | LinkEvent::Measured { .. } => {}
            }
        }
    }

    async fn lost(&mut self) -> (WorkerRef, String) {
        loop {
            if let LinkEvent::Lost { peer, reason } = self.next().await {
                return (peer, reason);
            }
        }
    }

    /// Sends one block of `handoff`, waiting for credit.
    async fn send_block(&mut self, to: WorkerRef, flight: u64, ordinal: u32) -> u64 {
        let link = self.links.link(to).unwrap();
        let mut permit = loop {
            match link.reserve(BLOCK) {
                Some(permit) => break permit,
                None => match self.next().await {
                    LinkEvent::Lost { reason, .. } => panic!("{reason}"),
                    _ => continue,
                },
            }
        };
        permit.send(frame(flight, ordinal)).unwrap()
    }
}

fn handoff(flight: u64) -> HandoffId {
    HandoffId {
        flight: FlightId(flight),
        attempt: 0,
    }
}

fn block_bytes(flight: u64, ordinal: u32) -> Vec<u8> {
    let seed = checksum(&[flight.to_le_bytes(), u64::from(ordinal).to_le_bytes()].concat());
    (0..BLOCK as usize)
        .map(|i| seed.rotate_left(i as u32 % 64) as u8 ^ i as u8)
        .collect()
}

fn frame(flight: u64, ordinal: u32) -> Frame {
    Frame {
        handoff: handoff(flight),
        block: BlockRef {
            block: BlockIndex(ordinal),
            generation: Generation(1),
        },
        part: BlockPart {
            ordinal,
            offset: 0,
            len: BLOCK,
        },
        payload: Bytes::from(block_bytes(flight, ordinal)),
    }
}

fn seal(flight: u64) -> Packet {
    Packet::Seal(Seal {
        handoff: handoff(flight),
        blocks_count: 1,
        digest: 5,
        output: vec![6, 7],
    })
}

/// Relays one direction at a time, changing the bytes that `change` wants changed. The argument is
/// the offset in the stream from the dialler.
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

#[tokio::test]
async fn frames_and_packets_arrive_whole_and_in_order() {
    for local in [false, true] {
        let net = LocalNet::default();
        let mut sender = Worker::on(net.clone(), worker_ref(1, 1), "f").await;
        let mut receiver = Worker::on(net, worker_ref(2, 1), "f").await;
        let route = if local {
            Route::Local
        } else {
            receiver.route()
        };
        sender.links.know(receiver.me, route);
        let to = receiver.me;
        let sending = tokio::spawn(async move {
            for flight in 0..40 {
                for ordinal in 0..3 {
                    sender.send_block(to, flight, ordinal).await;
                }
                sender.links.link(to).unwrap().send(seal(flight)).unwrap();
            }
            sender
        });
        for flight in 0..40 {
            for expected in 0..3 {
                let arrived = receiver.arrived().await;
                assert_eq!(arrived.from, worker_ref(1, 1));
                let Packet::Frame {
                    handoff: id,
                    part,
                    block,
                    checksum: sum,
                } = arrived.packet
                else {
                    panic!("{:?} in place of a frame", arrived.packet);
                };
                assert_eq!((id, part.ordinal), (handoff(flight), expected));
                assert_eq!(block.generation, Generation(1));
                assert!(arrived.intact);
                let payload = arrived.payload.unwrap();
                assert_eq!(&*payload, block_bytes(flight, expected));
                assert_eq!(sum, checksum(&payload));
            }
            assert_eq!(receiver.arrived().await.packet, seal(flight));
        }
        drop(sending.await.unwrap());
    }
}

#[tokio::test]
async fn lesson_02_lesson_16_a_flipped_byte_in_a_payload_is_never_intact() {
    let mut sender = Worker::start(worker_ref(1, 1), "f").await;
    let mut receiver = Worker::start(worker_ref(2, 1), "f").await;
    // Everything before the frames is handshake, pings and a probe of 1 MiB; the flip falls into
    // the payload of a later frame.
    let address = proxy(receiver.address.clone(), |offset, byte| {
        if offset == (1 << 20) + 3 * 4096 {
            *byte ^= 0x10;
        }
    })
    .await;
    sender.links.know(receiver.me, Route::Tcp(address));
    let to = receiver.me;
    let sending = tokio::spawn(async move {
        for ordinal in 0..8 {
            sender.send_block(to, 1, ordinal).await;
        }
        sender
    });
    let mut damaged = 0;
    for _ in 0..8 {
        let arrived = receiver.arrived().await;
        let Packet::Frame { part, .. } = arrived.packet else {
            panic!("only frames were sent");
        };
        let same = *arrived.payload.unwrap() == block_bytes(1, part.ordinal)[..];
        assert_eq!(arrived.intact, same);
        damaged += u32::from(!arrived.intact);
    }
    assert_eq!(damaged, 1);
    drop(sending.await.unwrap());
}

#[tokio::test]
async fn lesson_10_blocks_that_wait_for_credit_hold_up_no_seal() {
    for local in [false, true] {
        let net = LocalNet::default();
        let mut sender = Worker::on(net.clone(), worker_ref(1, 1), "f").await;
        let mut receiver = Worker::on(net, worker_ref(2, 1), "f").await;
        let route = if local {
            Route::Local
        } else {
            receiver.route()
        };
        sender.links.know(receiver.me, route);
        // The receiver keeps what arrives, so the window of four blocks fills up.
        let mut kept = Vec::new();
        for ordinal in 0..4 {
            sender.send_block(receiver.me, 1, ordinal).await;
            kept.push(receiver.arrived().await.payload.unwrap());
        }
        let link = sender.links.link(receiver.me).unwrap();
        assert!(link.reserve(1).is_none(), "the window is used up");
        link.send(seal(2)).unwrap();
        assert_eq!(receiver.arrived().await.packet, seal(2));
        // Dropping them gives all of it back, and the next block may go.
        kept.clear();
        sender.send_block(receiver.me, 3, 0).await;
        assert!(receiver.arrived().await.payload.is_some());
    }
}

#[tokio::test]
async fn an_unused_permit_is_credit_again() {
    let mut sender = Worker::start(worker_ref(1, 1), "f").await;
    let receiver = Worker::start(worker_ref(2, 1), "f").await;
    sender.links.know(receiver.me, receiver.route());
    while !matches!(sender.next().await, LinkEvent::Granted { .. }) {}
    let link = sender.links.link(receiver.me).unwrap();
    let all = link.reserve(4 * BLOCK).unwrap();
    assert!(link.reserve(BLOCK).is_none());
    drop(all);
    assert!(link.reserve(4 * BLOCK).is_some());
}

#[tokio::test]
async fn lesson_19_kv_of_another_fingerprint_is_turned_away_with_both_names() {
    for local in [false, true] {
        let net = LocalNet::default();
        let mut sender = Worker::on(net.clone(), worker_ref(1, 1), "weights-a").await;
        let receiver = Worker::on(net, worker_ref(2, 1), "weights-b").await;
        let route = if local {
            Route::Local
        } else {
            receiver.route()
        };
        sender.links.know(receiver.me, route);
        let (peer, reason) = sender.lost().await;
        assert_eq!(peer, receiver.me);
        assert!(
            reason.contains("weights-a") && reason.contains("weights-b"),
            "{reason}"
        );
    }
}

#[tokio::test]
async fn lesson_15_a_peer_in_another_life_is_not_talked_to() {
    let mut sender = Worker::start(worker_ref(1, 1), "f").await;
    let receiver = Worker::start(worker_ref(2, 2), "f").await;
    // The directory is stale: it names the first life, the second one answers.
    sender.links.know(worker_ref(2, 1), receiver.route());
    let (_, reason) = sender.lost().await;
    assert!(
        reason.contains("w2/i1") && reason.contains("w2/i2"),
        "{reason}"
    );
    // Once the first life is forgotten nothing is sent to it, whatever is known of the second.
    sender.links.know(worker_ref(2, 2), receiver.route());
    sender.links.forget(worker_ref(2, 1));
    assert_eq!(
        sender.links.link(worker_ref(2, 1)).unwrap_err(),
        LinkDown::NoRoute(worker_ref(2, 1))
    );
    assert_eq!(
        sender.links.link(worker_ref(9, 1)).unwrap_err(),
        LinkDown::NoRoute(worker_ref(9, 1))
    );
}

#[tokio::test]
async fn lesson_15_a_life_that_began_by_a_clock_set_back_is_reached_all_the_same() {
    let mut sender = Worker::start(worker_ref(1, 1), "f").await;
    let first = Worker::start(worker_ref(2, 9), "f").await;
    sender.links.know(worker_ref(2, 9), first.route());
    sender.links.forget(worker_ref(2, 9));
    let mut second = Worker::start(worker_ref(2, 3), "f").await;
    sender.links.know(worker_ref(2, 3), second.route());
    sender.send_block(worker_ref(2, 3), 1, 0).await;
    assert_eq!(second.arrived().await.from, worker_ref(1, 1));
}

#[tokio::test]
async fn garbage_and_idle_strangers_hurt_nobody() {
    let mut sender = Worker::start(worker_ref(1, 1), "f").await;
    let mut receiver = Worker::start(worker_ref(2, 1), "f").await;
    let mut strangers = Vec::new();
    for garbage in [
        &b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"[..],
        &[0xff; 4096],
        &[1, 0, 0, 0, 255, 255, 255, 255],
        &[1, 0, 0, 0, 6, 0, 0, 0, b'C', b'L', b'V', b'K', 9, 9],
        b"",
    ] {
        let mut stream = TcpStream::connect(&receiver.address).await.unwrap();
        stream.write_all(garbage).await.unwrap();
        strangers.push(stream);
    }
    sender.links.know(receiver.me, receiver.route());
    sender.send_block(receiver.me, 1, 0).await;
    assert!(receiver.arrived().await.payload.is_some());
    // All but the idle one have been hung up on.
    for stream in &mut strangers[..4] {
        let mut rest = Vec::new();
        let ended = timeout(Duration::from_secs(20), stream.read_to_end(&mut rest)).await;
        let _ = ended.expect("hung up in time");
    }
}

#[tokio::test]
async fn lesson_08_a_dead_peer_is_lost_at_both_ends_and_dialled_anew() {
    let mut sender = Worker::start(worker_ref(1, 1), "f").await;
    let mut receiver = Worker::start(worker_ref(2, 1), "f").await;
    sender.links.know(receiver.me, receiver.route());
    sender.send_block(receiver.me, 1, 0).await;
    assert!(receiver.arrived().await.payload.is_some());

    receiver.server.abort();
    assert_eq!(sender.lost().await.0, receiver.me);

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let route = Route::Tcp(listener.local_addr().unwrap().to_string());
    receiver.server = tokio::spawn(receiver.links.clone().serve(listener));
    sender.links.know(receiver.me, route);
    sender.send_block(receiver.me, 2, 0).await;
    loop {
        // The aborted server told nobody; the new link brings the block.
        if let LinkEvent::Arrived { packet, .. } = receiver.next().await {
            assert_eq!(packet.handoff(), handoff(2));
            break;
        }
    }
    drop(sender.links);
    sender.events.close();
    assert_eq!(receiver.lost().await.0, worker_ref(1, 1));
}

#[tokio::test]
async fn lesson_09_a_peer_that_falls_silent_is_lost() {
    let mut sender = Worker::start(worker_ref(1, 1), "f").await;
    // It accepts and then says nothing, as a stopped process does.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let route = Route::Tcp(listener.local_addr().unwrap().to_string());
    let mute = tokio::spawn(async move { listener.accept().await });
    sender.links.know(worker_ref(2, 1), route);
    let (_, reason) = sender.lost().await;
    assert!(reason.contains("nothing was heard"), "{reason}");
    drop(mute.await);
}

#[tokio::test]
async fn lesson_18_each_link_is_measured_before_its_first_block() {
    let mut sender = Worker::start(worker_ref(1, 1), "f").await;
    let receiver = Worker::start(worker_ref(2, 1), "f").await;
    sender.links.know(receiver.me, receiver.route());
    let LinkEvent::Measured { peer, speed } = sender.next().await else {
        panic!("the measurement comes first");
    };
    assert_eq!(peer, receiver.me);
    assert!(speed.bytes_per_second > 1 << 20, "{speed:?}");
    assert!(!speed.latency.is_zero());
}

#[tokio::test]
async fn lesson_03_an_abandoned_hand_off_keeps_its_reason_over_the_wire() {
    let mut sender = Worker::start(worker_ref(1, 1), "f").await;
    let mut receiver = Worker::start(worker_ref(2, 1), "f").await;
    sender.links.know(receiver.me, receiver.route());
    let link = sender.links.link(receiver.me).unwrap();
    let packets = [
        Packet::Landed {
            handoff: handoff(1),
        },
        Packet::Abandoned {
            handoff: handoff(2),
            cause: Cause::Failed(Failure::RetriesSpent(Box::new(Failure::Engine(
                "odd ☃".into(),
            )))),
        },
    ];
    for packet in &packets {
        link.send(packet.clone()).unwrap();
    }
    for packet in packets {
        assert_eq!(receiver.arrived().await.packet, packet);
    }
    assert!(sender.events.try_recv().is_ok());
}
