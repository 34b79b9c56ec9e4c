//! Links over TCP between workers that know each other by certificates.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "../../../tests/harness/authority.rs"]
mod authority;
mod pair;

use authority::Authority;
use cleave_tls::{PEER_NAME, PeerTls};
use cleave_transfer::{LinkEvent, LinksConfig, LocalNet, Passes, Transport, checksum};
use pair::*;

fn peer(authority: &Authority) -> PeerTls {
    let folder = tempfile::tempdir().unwrap();
    authority.sign(folder.path(), PEER_NAME);
    PeerTls::open(folder.path()).unwrap()
}

async fn worker(number: u64, peers: Option<PeerTls>) -> Worker {
    let config = LinksConfig {
        peers,
        streams_count: 4,
        ..config(worker_ref(number, 1), "same")
    };
    Worker::on(LocalNet::default(), config).await
}

#[tokio::test]
async fn blocks_arrive_whole_between_peers() {
    let authority = Authority::new();
    let mut sender = worker(1, Some(peer(&authority))).await;
    let mut receiver = worker(2, Some(peer(&authority))).await;
    sender
        .links
        .know(receiver.me, receiver.route(Transport::Tcp));
    assert!(sender.links.link(receiver.me).is_ok());
    sender.measured().await;
    let to = receiver.me;
    let sending = tokio::spawn(async move {
        for flight in 0..200 {
            sender.send_block(to, flight, 0).await;
        }
        sender
    });
    let mut flights: Vec<u64> = Vec::new();
    for _ in 0..200 {
        let arrived = receiver.arrived().await;
        let flight = arrived.packet.handoff().flight.0;
        let payload = arrived.payload.unwrap();
        assert_eq!(payload.bytes().unwrap(), block_bytes(flight, 0));
        flights.push(flight);
    }
    flights.sort_unstable();
    assert_eq!(flights, (0..200).collect::<Vec<_>>());
    drop(sending.await.unwrap());
    assert!(checksum(b"") != 0, "what was compared is not empty");
}

/// The reason why no link came about, at the end that dialled.
async fn turned_away(dials: Option<PeerTls>, takes: Option<PeerTls>) -> String {
    let mut sender = worker(1, dials).await;
    let receiver = worker(2, takes).await;
    sender
        .links
        .know(receiver.me, receiver.route(Transport::Tcp));
    assert!(sender.links.link(receiver.me).is_ok());
    loop {
        match sender.next().await {
            LinkEvent::Lost { reason, .. } => return reason,
            other => assert!(!matches!(other, LinkEvent::Measured { .. }), "{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_stranger_wrote_to_a_pool() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    // In clear, to a worker that knows its peers, and the other way round.
    turned_away(None, Some(peer(&ours))).await;
    let reason = turned_away(Some(peer(&ours)), None).await;
    assert!(reason.contains("no peer of this fleet"), "{reason}");
    // With a certificate of somebody else's.
    turned_away(Some(peer(&theirs)), Some(peer(&ours))).await;
}

/// A worker that knows passes.
async fn with_passes(number: u64, key: u8) -> (Worker, Passes) {
    let passes = Passes::new([key; 32]);
    let config = LinksConfig {
        passes: Some(passes.clone()),
        ..config(worker_ref(number, 1), "same")
    };
    (Worker::on(LocalNet::default(), config).await, passes)
}

#[tokio::test]
async fn a_sender_without_a_pass_wrote_to_what_was_reserved_for_another() {
    for transport in REMOTE {
        let (mut sender, given) = with_passes(1, 1).await;
        let (mut receiver, made) = with_passes(2, 2).await;
        sender.links.know(receiver.me, receiver.route(transport));
        let to = receiver.me;
        given.hold(handoff(7), made.make(handoff(7), sender.me, "acme"));
        sender.links.link(to).unwrap();
        sender.measured().await;
        for ordinal in 0..3 {
            sender.send_block(to, 7, ordinal).await;
            assert!(receiver.arrived().await.payload.is_some());
        }
        sender.links.link(to).unwrap().send(seal(7)).unwrap();
        assert_eq!(receiver.arrived().await.packet, seal(7));
        // Somebody else's hand-off: with no pass, with this one's, and with one for another sender.
        let stolen = made.make(handoff(9), worker_ref(5, 1), "acme");
        let own = made.make(handoff(7), sender.me, "acme");
        for pass in [None, Some(own), Some(stolen)] {
            if let Some(pass) = pass {
                given.hold(handoff(9), pass);
            }
            sender.send_block(to, 9, 0).await;
            refused(&mut receiver).await;
            sender.lost().await;
            sender.links.link(to).unwrap();
            sender.measured().await;
        }
        // A seal alone is as good as a write; nothing was ever shown for this one.
        sender.links.link(to).unwrap().send(seal(8)).unwrap();
        refused(&mut receiver).await;
    }
}

#[tokio::test]
async fn what_was_still_on_its_way_when_a_hand_off_ended_cost_the_link() {
    for transport in REMOTE {
        let (mut sender, given) = with_passes(1, 1).await;
        let (mut receiver, made) = with_passes(2, 2).await;
        sender.links.know(receiver.me, receiver.route(transport));
        let link = sender.links.link(receiver.me).unwrap();
        for flight in [7, 8] {
            let pass = made.make(handoff(flight), sender.me, "acme");
            given.hold(handoff(flight), pass);
        }
        // Sent before the link stands, of a hand-off that is over when it does.
        link.send(seal(8)).unwrap();
        given.forget(handoff(8));
        assert_eq!(receiver.arrived().await.packet, seal(8));
        // Read while it lived, and sent when it was over: here without a word that came before on the stream.
        sender.measured().await;
        let mut permit = loop {
            match link.reserve(handoff(7), BLOCK) {
                Some(permit) => break permit,
                None => drop(sender.next().await),
            }
        };
        given.forget(handoff(7));
        assert_eq!(given.held_count(), 0);
        permit.copy(frame(7, 0), &block_bytes(7, 0)).unwrap();
        let payload = receiver.arrived().await.payload.unwrap();
        assert_eq!(payload.bytes().unwrap(), block_bytes(7, 0));
        assert!(!link.is_broken());
    }
}

/// Nothing has arrived, and why is told.
async fn refused(receiver: &mut Worker) {
    let mut forged = 0;
    loop {
        match receiver.next().await {
            LinkEvent::Forged { peer } => {
                assert_eq!(peer, worker_ref(1, 1));
                forged += 1;
            }
            LinkEvent::Lost { reason, .. } => {
                assert!(reason.contains("not made for this"), "{reason}");
                assert_eq!(forged, 1);
                return;
            }
            other => panic!("{other:?}"),
        }
    }
}
