//! The properties of a link over every transport: one suite, run over each.

use crate::pair::*;
use cleave_domain::{AbandonCause, Failure, Generation};
use cleave_kv::{Packet, PayloadCondition};
use cleave_transfer::{LinkDown, LinkEvent, LocalNet, PeerRoute, Transport, checksum};
use std::collections::BTreeSet;

#[tokio::test]
async fn frames_and_packets_arrive_whole_over_every_transport() {
    for transport in ALL {
        let (mut sender, mut receiver) = pair(transport).await;
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
        let mut expected: BTreeSet<(u64, Option<u32>)> = (0..40)
            .flat_map(|flight| [Some(0), Some(1), Some(2), None].map(|part| (flight, part)))
            .collect();
        while !expected.is_empty() {
            let arrived = receiver.next_packet().await;
            assert_eq!(arrived.from, worker_ref(1, 1));
            let flight = arrived.packet.handoff().flight.0;
            let ordinal = match arrived.packet {
                Packet::Frame {
                    part,
                    block,
                    checksum: sum,
                    ..
                } => {
                    assert_eq!(block.generation, Generation(1));
                    let payload = arrived.payload.unwrap();
                    let bytes = payload.bytes().unwrap();
                    assert_eq!(bytes, block_bytes(flight, part.ordinal));
                    assert_eq!(sum, checksum(bytes));
                    let mut pool = vec![0; BLOCK as usize];
                    assert_eq!(arrived.condition, PayloadCondition::Intact);
                    assert_eq!(payload.write_verified(&mut pool[..]), Ok(true));
                    assert_eq!(pool, bytes);
                    Some(part.ordinal)
                }
                packet => {
                    assert_eq!(packet, seal(flight));
                    None
                }
            };
            assert!(expected.remove(&(flight, ordinal)), "came once");
        }
        drop(sending.await.unwrap());
    }
}

// Lesson: 10.
#[tokio::test]
async fn blocks_waiting_for_credit_do_not_delay_seals() {
    for transport in ALL {
        let (mut sender, mut receiver) = pair(transport).await;
        let mut held = fill_window(&mut sender, &mut receiver).await;
        let link = sender.links.link(receiver.me).unwrap();
        link.send(seal(2)).unwrap();
        assert_eq!(receiver.next_packet().await.packet, seal(2));
        // Dropping the payloads returns all credit, and the next block may be sent.
        held.clear();
        sender.send_block(receiver.me, 3, 0).await;
        assert!(receiver.next_packet().await.payload.is_some());
    }
}

// Invariant: I25.
// Lesson: 2.
#[tokio::test]
async fn payloads_kept_by_the_receiver_are_not_overwritten() {
    for transport in ALL {
        let (mut sender, mut receiver) = pair(transport).await;
        sender.send_block(receiver.me, 1, 0).await;
        let payload = receiver.next_packet().await.payload.unwrap();
        for flight in 2..40 {
            sender.send_block(receiver.me, flight, 0).await;
            assert!(receiver.next_packet().await.payload.is_some());
        }
        assert_eq!(payload.bytes().unwrap(), block_bytes(1, 0), "{transport}");
    }
}

#[tokio::test]
async fn a_dropped_permit_returns_its_credit() {
    for transport in ALL {
        let (mut sender, receiver) = pair(transport).await;
        sender.next_measured().await;
        let link = sender.links.link(receiver.me).unwrap();
        let mut all = loop {
            match link.reserve(frame(1, 0).handoff, 4 * BLOCK) {
                Some(permit) => break permit,
                None => drop(sender.next().await),
            }
        };
        assert!(link.reserve(frame(1, 0).handoff, BLOCK).is_none());
        all.buffer(BLOCK).fill(1);
        drop(all);
        assert!(link.reserve(frame(1, 0).handoff, 4 * BLOCK).is_some());
    }
}

// Invariant: I10.
// Lesson: 19.
#[tokio::test]
async fn a_fingerprint_mismatch_is_refused_with_both_values() {
    for transport in ALL {
        let net = LocalNet::default();
        let mut sender = LinkedWorker::on(net.clone(), config(worker_ref(1, 1), "weights-a")).await;
        let receiver = LinkedWorker::on(net, config(worker_ref(2, 1), "weights-b")).await;
        receiver.links.add_peer(sender.me, unreachable_route());
        sender.add_peer(&receiver, transport);
        // No other transport is tried, because it would fail the same way.
        let LinkEvent::Lost { peer, reason } = sender.next().await else {
            panic!("the loss comes first");
        };
        assert_eq!(peer, receiver.me);
        assert!(
            reason.contains("weights-a") && reason.contains("weights-b"),
            "{reason}"
        );
    }
}

/// The route of a worker that was named but cannot be reached.
fn unreachable_route() -> PeerRoute {
    PeerRoute::tcp("127.0.0.1:1")
}

#[tokio::test]
async fn an_unknown_peer_learns_nothing_about_the_worker() {
    for (number, fingerprint) in [(2, "weights-a"), (3, "weights-b")] {
        let mut unknown_worker = LinkedWorker::start(worker_ref(1, 1), fingerprint).await;
        let receiver = LinkedWorker::start(worker_ref(2, 1), "weights-b").await;
        let route = receiver.route(Transport::Tcp);
        unknown_worker.links.add_peer(worker_ref(number, 1), route);
        let (_, reason) = unknown_worker.next_lost().await;
        assert!(reason.contains("turned away"), "{reason}");
        for secret in ["weights-b", "w2", "w2/i1"] {
            assert!(!reason.contains(secret), "{reason}");
        }
    }
}

// Invariant: I9.
// Lesson: 15.
#[tokio::test]
async fn another_incarnation_of_a_peer_is_refused() {
    for transport in REMOTE {
        let mut sender = LinkedWorker::start(worker_ref(1, 1), "f").await;
        let receiver = LinkedWorker::start(worker_ref(2, 2), "f").await;
        receiver.links.add_peer(sender.me, unreachable_route());
        // The route is stale: it names the first incarnation, and the second answers.
        let route = receiver.route(transport);
        sender.links.add_peer(worker_ref(2, 1), route.clone());
        let (_, reason) = sender.next_lost().await;
        assert!(
            reason.contains("w2/i1") && reason.contains("w2/i2"),
            "{reason}"
        );
        // Once the first incarnation is forgotten nothing is sent to it, even if the second is
        // known.
        sender.links.add_peer(worker_ref(2, 2), route);
        sender.links.remove_peer(worker_ref(2, 1));
        for unknown in [worker_ref(2, 1), worker_ref(9, 1)] {
            assert_eq!(
                sender.links.link(unknown).unwrap_err(),
                LinkDown::NoRoute(unknown)
            );
        }
    }
}

// Lesson: 15.
#[tokio::test]
async fn an_incarnation_with_a_smaller_number_is_reachable() {
    for transport in REMOTE {
        let mut sender = LinkedWorker::start(worker_ref(1, 1), "f").await;
        let first = LinkedWorker::start(worker_ref(2, 9), "f").await;
        sender
            .links
            .add_peer(worker_ref(2, 9), first.route(transport));
        sender.links.remove_peer(worker_ref(2, 9));
        let mut second = LinkedWorker::start(worker_ref(2, 3), "f").await;
        sender
            .links
            .add_peer(worker_ref(2, 3), second.route(transport));
        sender.send_block(worker_ref(2, 3), 1, 0).await;
        assert_eq!(second.next_packet().await.from, worker_ref(1, 1));
    }
}

// Lesson: 8.
#[tokio::test]
async fn a_dead_peer_is_lost_at_both_ends_and_redialled() {
    for transport in REMOTE {
        let (mut sender, mut receiver) = pair(transport).await;
        sender.send_block(receiver.me, 1, 0).await;
        let payload = receiver.next_packet().await.payload.unwrap();

        receiver.server.abort();
        assert_eq!(sender.next_lost().await.0, receiver.me);
        assert_eq!(
            payload.bytes().unwrap(),
            block_bytes(1, 0),
            "what had arrived stays readable"
        );

        receiver.listen().await;
        sender.add_peer(&receiver, transport);
        sender.send_block(receiver.me, 2, 0).await;
        loop {
            // The aborted server reported nothing; the new link delivers the block.
            if let LinkEvent::Arrived { packet, .. } = receiver.next().await {
                assert_eq!(packet.handoff(), handoff(2));
                break;
            }
        }
        drop(sender.links);
        sender.events.close();
        assert_eq!(receiver.next_lost().await.0, worker_ref(1, 1));
        receiver.assert_no_event_but_credit();
    }
}

#[tokio::test]
async fn a_second_dial_replaces_the_first_link() {
    for transport in REMOTE {
        let (mut sender, mut receiver) = pair(transport).await;
        sender.send_block(receiver.me, 1, 0).await;
        assert!(receiver.next_packet().await.payload.is_some());
        // The same incarnation dials again, as after a loss that the receiver has not noticed.
        let mut again = LinkedWorker::start(worker_ref(1, 1), "f").await;
        again.add_peer(&receiver, transport);
        let (peer, reason) = receiver.next_lost().await;
        assert_eq!(peer, worker_ref(1, 1));
        assert!(reason.contains("replaced"), "{reason}");
        again.send_block(receiver.me, 2, 0).await;
        assert_eq!(receiver.next_packet().await.packet.handoff(), handoff(2));
        assert_eq!(sender.next_lost().await.0, receiver.me);
    }
}

// Lesson: 18.
#[tokio::test]
async fn each_link_reports_its_transport_before_its_first_block() {
    for transport in ALL {
        let (mut sender, receiver) = pair(transport).await;
        let LinkEvent::Measured { peer, speed } = sender.next().await else {
            panic!("the measurement comes first");
        };
        assert_eq!((peer, speed.transport), (receiver.me, transport));
        assert!(speed.bytes_per_second > 1 << 20, "{speed:?}");
        assert_eq!(speed.latency.is_zero(), transport == Transport::Local);
    }
}

// Lesson: 3.
#[tokio::test]
async fn every_packet_round_trips_over_every_transport() {
    for transport in ALL {
        let (sender, mut receiver) = pair(transport).await;
        let link = sender.links.link(receiver.me).unwrap();
        let [first, second, third, fourth] = [1, 2, 3, 4].map(handoff);
        let engine = Failure::Engine("odd \u{2603}".into());
        let mut packets = vec![
            Packet::Landed { handoff: first },
            Packet::Stop { handoff: second },
            Packet::Stopped { handoff: third },
            Packet::Abandoned {
                handoff: fourth,
                cause: AbandonCause::Failed(Failure::RetriesSpent(Box::new(engine))),
            },
        ];
        for packet in &packets {
            link.send(packet.clone()).unwrap();
        }
        while !packets.is_empty() {
            let packet = receiver.next_packet().await.packet;
            let at = packets.iter().position(|sent| *sent == packet);
            packets.remove(at.unwrap_or_else(|| panic!("{packet:?} was not sent, or twice")));
        }
    }
}
