//! Links over TCP between workers with certificates, and write grants.

use crate::authority::TestAuthority;
use crate::pair::*;
use cleave_tls::{PEER_NAME, PeerTls};
use cleave_transfer::{GrantIssuer, LinkEvent, LinksConfig, LocalNet, Transport, checksum};

fn peer(authority: &TestAuthority) -> PeerTls {
    let folder = tempfile::tempdir().unwrap();
    authority.sign(folder.path(), PEER_NAME);
    PeerTls::open(folder.path()).unwrap()
}

async fn worker(number: u64, peers: Option<PeerTls>) -> LinkedWorker {
    let config = LinksConfig {
        peer_tls: peers,
        streams_count: 4,
        ..config(worker_ref(number, 1), "same")
    };
    LinkedWorker::on(LocalNet::default(), config).await
}

#[tokio::test]
async fn blocks_arrive_whole_between_peers() {
    let authority = TestAuthority::new();
    let mut sender = worker(1, Some(peer(&authority))).await;
    let mut receiver = worker(2, Some(peer(&authority))).await;
    sender.add_peer(&receiver, Transport::Tcp);
    assert!(sender.links.link(receiver.me).is_ok());
    sender.next_measured().await;
    let to = receiver.me;
    let sending = tokio::spawn(async move {
        for flight in 0..200 {
            sender.send_block(to, flight, 0).await;
        }
        sender
    });
    let mut flights: Vec<u64> = Vec::new();
    for _ in 0..200 {
        let arrived = receiver.next_packet().await;
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

/// The reason for which no link was made, at the end that dialled.
async fn link_failure(dials: Option<PeerTls>, takes: Option<PeerTls>) -> String {
    let mut sender = worker(1, dials).await;
    let receiver = worker(2, takes).await;
    sender.add_peer(&receiver, Transport::Tcp);
    assert!(sender.links.link(receiver.me).is_ok());
    loop {
        match sender.next().await {
            LinkEvent::Lost { reason, .. } => return reason,
            other => assert!(!matches!(other, LinkEvent::Measured { .. }), "{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_peer_without_a_fleet_certificate_gets_no_link() {
    let (own_authority, other_authority) = (TestAuthority::new(), TestAuthority::new());
    // A plain connection to a worker with a certificate, and the reverse.
    link_failure(None, Some(peer(&own_authority))).await;
    let reason = link_failure(Some(peer(&own_authority)), None).await;
    assert!(reason.contains("no peer of this fleet"), "{reason}");
    // A certificate of another authority.
    let reason = link_failure(Some(peer(&other_authority)), Some(peer(&own_authority))).await;
    assert!(reason.contains("same authority"), "{reason}");
}

/// A worker that uses write grants.
async fn worker_with_grants(number: u64, key: u8) -> (LinkedWorker, GrantIssuer) {
    let passes = GrantIssuer::new([key; 32]);
    let config = LinksConfig {
        grants: Some(passes.clone()),
        ..config(worker_ref(number, 1), "same")
    };
    (LinkedWorker::on(LocalNet::default(), config).await, passes)
}

// Invariant: I47.
#[tokio::test]
async fn a_sender_without_a_valid_grant_is_refused() {
    for transport in REMOTE {
        let (mut sender, sender_grants) = worker_with_grants(1, 1).await;
        let (mut receiver, receiver_grants) = worker_with_grants(2, 2).await;
        sender.add_peer(&receiver, transport);
        let to = receiver.me;
        sender_grants.store(
            handoff(7),
            receiver_grants.issue(handoff(7), sender.me, "acme"),
        );
        sender.links.link(to).unwrap();
        sender.next_measured().await;
        for ordinal in 0..3 {
            sender.send_block(to, 7, ordinal).await;
            assert!(receiver.next_packet().await.payload.is_some());
        }
        sender.links.link(to).unwrap().send(seal(7)).unwrap();
        assert_eq!(receiver.next_packet().await.packet, seal(7));
        // Another hand-off: with no grant, with the grant of this one, and with a grant for another
        // sender.
        let stolen = receiver_grants.issue(handoff(9), worker_ref(5, 1), "acme");
        let own = receiver_grants.issue(handoff(7), sender.me, "acme");
        for grant in [None, Some(own), Some(stolen)] {
            if let Some(grant) = grant {
                sender_grants.store(handoff(9), grant);
            }
            sender.send_block(to, 9, 0).await;
            expect_invalid_grant(&mut receiver).await;
            sender.next_lost().await;
            sender.links.link(to).unwrap();
            sender.next_measured().await;
        }
        // A seal counts as a write; no grant was ever sent for this hand-off.
        sender.links.link(to).unwrap().send(seal(8)).unwrap();
        expect_invalid_grant(&mut receiver).await;
    }
}

#[tokio::test]
async fn late_messages_of_an_ended_hand_off_keep_the_link() {
    for transport in REMOTE {
        let (mut sender, sender_grants) = worker_with_grants(1, 1).await;
        let (mut receiver, receiver_grants) = worker_with_grants(2, 2).await;
        sender.add_peer(&receiver, transport);
        let link = sender.links.link(receiver.me).unwrap();
        for flight in [7, 8] {
            let grant = receiver_grants.issue(handoff(flight), sender.me, "acme");
            sender_grants.store(handoff(flight), grant);
        }
        // Sent before the link is established, of a hand-off that has ended by then.
        link.send(seal(8)).unwrap();
        sender_grants.remove(handoff(8));
        assert_eq!(receiver.next_packet().await.packet, seal(8));
        // Read while the hand-off lived, and sent after its end; its grant was not sent on the
        // stream before.
        sender.next_measured().await;
        let mut permit = loop {
            match link.reserve(handoff(7), BLOCK) {
                Some(permit) => break permit,
                None => drop(sender.next().await),
            }
        };
        sender_grants.remove(handoff(7));
        assert_eq!(sender_grants.stored_count(), 0);
        permit.send_copy(frame(7, 0), &block_bytes(7, 0)).unwrap();
        let payload = receiver.next_packet().await.payload.unwrap();
        assert_eq!(payload.bytes().unwrap(), block_bytes(7, 0));
        assert!(!link.is_broken());
    }
}

/// Asserts that nothing arrived, and that the reason is reported.
async fn expect_invalid_grant(receiver: &mut LinkedWorker) {
    let mut forged = 0;
    loop {
        match receiver.next().await {
            LinkEvent::InvalidGrant { peer } => {
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
