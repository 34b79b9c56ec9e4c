//! What holds of a link whatever carries it: one suite, run over each transport.
#![allow(missing_docs, clippy::unwrap_used)]

mod pair;

use cleave_domain::{Cause, Failure, Generation};
use cleave_kv::{Condition, Packet};
use cleave_transfer::{LinkDown, LinkEvent, LocalNet, Route, Transport, checksum};
use pair::*;
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
            let arrived = receiver.arrived().await;
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
                    assert_eq!(arrived.condition, Condition::Intact);
                    assert_eq!(payload.land(&mut pool[..]), Ok(true));
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

#[tokio::test]
async fn lesson_10_blocks_that_wait_for_credit_hold_up_no_seal() {
    for transport in ALL {
        let (mut sender, mut receiver) = pair(transport).await;
        // The receiver keeps what arrives, so the window of four blocks fills up.
        let mut kept = Vec::new();
        for ordinal in 0..4 {
            sender.send_block(receiver.me, 1, ordinal).await;
            kept.push(receiver.arrived().await.payload.unwrap());
        }
        let link = sender.links.link(receiver.me).unwrap();
        assert!(
            link.reserve(frame(1, 0).handoff, 1).is_none(),
            "the window is used up"
        );
        link.send(seal(2)).unwrap();
        assert_eq!(receiver.arrived().await.packet, seal(2));
        // Dropping them gives all of it back, and the next block may go.
        kept.clear();
        sender.send_block(receiver.me, 3, 0).await;
        assert!(receiver.arrived().await.payload.is_some());
    }
}

#[tokio::test]
async fn lesson_02_what_the_receiver_keeps_is_not_written_again() {
    for transport in ALL {
        let (mut sender, mut receiver) = pair(transport).await;
        sender.send_block(receiver.me, 1, 0).await;
        let kept = receiver.arrived().await.payload.unwrap();
        for flight in 2..40 {
            sender.send_block(receiver.me, flight, 0).await;
            assert!(receiver.arrived().await.payload.is_some());
        }
        assert_eq!(kept.bytes().unwrap(), block_bytes(1, 0), "{transport}");
    }
}

#[tokio::test]
async fn an_unused_permit_is_credit_again() {
    for transport in ALL {
        let (mut sender, receiver) = pair(transport).await;
        sender.measured().await;
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

#[tokio::test]
async fn lesson_19_kv_of_another_fingerprint_is_turned_away_with_both_names() {
    for transport in ALL {
        let net = LocalNet::default();
        let mut sender = Worker::on(net.clone(), config(worker_ref(1, 1), "weights-a")).await;
        let receiver = Worker::on(net, config(worker_ref(2, 1), "weights-b")).await;
        receiver.links.know(sender.me, nowhere());
        sender.links.know(receiver.me, receiver.route(transport));
        // No other transport is tried: it would end the same way.
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

/// A worker that was named and cannot be reached.
fn nowhere() -> Route {
    Route::tcp("127.0.0.1:1")
}

#[tokio::test]
async fn a_stranger_was_told_which_worker_serves_what() {
    for (number, fingerprint) in [(2, "weights-a"), (3, "weights-b")] {
        let mut stranger = Worker::start(worker_ref(1, 1), fingerprint).await;
        let receiver = Worker::start(worker_ref(2, 1), "weights-b").await;
        let route = receiver.route(Transport::Tcp);
        stranger.links.know(worker_ref(number, 1), route);
        let (_, reason) = stranger.lost().await;
        assert!(reason.contains("turned away"), "{reason}");
        for said in ["weights-b", "w2", "w2/i1"] {
            assert!(!reason.contains(said), "{reason}");
        }
    }
}

#[tokio::test]
async fn lesson_15_a_peer_in_another_life_is_not_talked_to() {
    for transport in REMOTE {
        let mut sender = Worker::start(worker_ref(1, 1), "f").await;
        let receiver = Worker::start(worker_ref(2, 2), "f").await;
        receiver.links.know(sender.me, nowhere());
        // The directory is stale: it names the first life, the second one answers.
        let route = receiver.route(transport);
        sender.links.know(worker_ref(2, 1), route.clone());
        let (_, reason) = sender.lost().await;
        assert!(
            reason.contains("w2/i1") && reason.contains("w2/i2"),
            "{reason}"
        );
        // Once the first life is forgotten nothing is sent to it, whatever is known of the second.
        sender.links.know(worker_ref(2, 2), route);
        sender.links.forget(worker_ref(2, 1));
        for unknown in [worker_ref(2, 1), worker_ref(9, 1)] {
            assert_eq!(
                sender.links.link(unknown).unwrap_err(),
                LinkDown::NoRoute(unknown)
            );
        }
    }
}

#[tokio::test]
async fn lesson_15_a_life_that_began_by_a_clock_set_back_is_reached_all_the_same() {
    for transport in REMOTE {
        let mut sender = Worker::start(worker_ref(1, 1), "f").await;
        let first = Worker::start(worker_ref(2, 9), "f").await;
        sender.links.know(worker_ref(2, 9), first.route(transport));
        sender.links.forget(worker_ref(2, 9));
        let mut second = Worker::start(worker_ref(2, 3), "f").await;
        sender.links.know(worker_ref(2, 3), second.route(transport));
        sender.send_block(worker_ref(2, 3), 1, 0).await;
        assert_eq!(second.arrived().await.from, worker_ref(1, 1));
    }
}

#[tokio::test]
async fn lesson_08_a_dead_peer_is_lost_at_both_ends_and_dialled_anew() {
    for transport in REMOTE {
        let (mut sender, mut receiver) = pair(transport).await;
        sender.send_block(receiver.me, 1, 0).await;
        let kept = receiver.arrived().await.payload.unwrap();

        receiver.server.abort();
        assert_eq!(sender.lost().await.0, receiver.me);
        assert_eq!(
            kept.bytes().unwrap(),
            block_bytes(1, 0),
            "what had arrived stays readable"
        );

        receiver.listen().await;
        sender.links.know(receiver.me, receiver.route(transport));
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
        receiver.hears_nothing_more();
    }
}

#[tokio::test]
async fn a_link_dialled_twice_is_lost_once_and_the_newest_one_stands() {
    for transport in REMOTE {
        let (mut sender, mut receiver) = pair(transport).await;
        sender.send_block(receiver.me, 1, 0).await;
        assert!(receiver.arrived().await.payload.is_some());
        // The same life dials again, as after a loss that the receiver has not noticed.
        let mut again = Worker::start(worker_ref(1, 1), "f").await;
        again.links.know(receiver.me, receiver.route(transport));
        let (peer, reason) = receiver.lost().await;
        assert_eq!(peer, worker_ref(1, 1));
        assert!(reason.contains("replaced"), "{reason}");
        again.send_block(receiver.me, 2, 0).await;
        assert_eq!(receiver.arrived().await.packet.handoff(), handoff(2));
        assert_eq!(sender.lost().await.0, receiver.me);
    }
}

#[tokio::test]
async fn lesson_18_each_link_says_what_carries_it_before_its_first_block() {
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

#[tokio::test]
async fn lesson_03_every_packet_keeps_its_meaning_over_every_transport() {
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
                cause: Cause::Failed(Failure::RetriesSpent(Box::new(engine))),
            },
        ];
        for packet in &packets {
            link.send(packet.clone()).unwrap();
        }
        while !packets.is_empty() {
            let packet = receiver.arrived().await.packet;
            let at = packets.iter().position(|sent| *sent == packet);
            packets.remove(at.unwrap_or_else(|| panic!("{packet:?} was not sent, or twice")));
        }
    }
}
