//! Tests that kill or stop the receiving process, which no test within one process can show.

use crate::pair::*;
use cleave_transfer::{DataAddresses, PeerRoute, Transport};
use std::process::{Child, Command};

const CHILD: &str = "CLEAVE_TEST_RECEIVER";

/// Not a test: the receiver's process, started by the other tests. It keeps all that arrives, so
/// that the sender's credit is used up when it dies.
#[tokio::test]
async fn receiver_process() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let mut receiver = LinkedWorker::start(worker_ref(2, 1), "f").await;
    println!("here: {}", receiver.addresses());
    let mut arrived = Vec::new();
    while let Some(event) = receiver.events.recv().await {
        arrived.push(event);
    }
}

fn receiver() -> (Child, DataAddresses) {
    let (child, announced) = start_process("killed::receiver_process", (CHILD, "1"), "here: ");
    (child, DataAddresses::parse(&announced).unwrap())
}

// Lesson: 8.
#[tokio::test]
async fn a_killed_receiver_is_reported_lost_once_and_redialled() {
    for transport in REMOTE {
        let mut sender = LinkedWorker::start(worker_ref(1, 1), "f").await;
        let to = worker_ref(2, 1);
        for flight in 0..3 {
            let (mut child, addresses) = receiver();
            let route = match transport {
                Transport::Tcp => PeerRoute::tcp(addresses.part(Transport::Tcp).unwrap()),
                _ => PeerRoute::Remote(addresses),
            };
            sender.links.add_peer(to, route);
            assert_eq!(sender.next_measured().await.transport, transport);
            for ordinal in 0..4 {
                sender.send_block(to, flight, ordinal).await;
            }
            let link = sender.links.link(to).unwrap();
            assert!(
                link.reserve(frame(1, 0).handoff, BLOCK).is_none(),
                "the receiver holds all credit"
            );
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(sender.next_lost().await.0, to);
            sender.assert_no_event_but_credit();
            assert!(link.is_broken());
        }
    }
}

// Lesson: 9.
#[tokio::test]
async fn a_stopped_receiver_is_lost_after_the_silence_limit() {
    for transport in REMOTE {
        let mut sender = LinkedWorker::start(worker_ref(1, 1), "f").await;
        let to = worker_ref(2, 1);
        let (mut child, addresses) = receiver();
        let route = match transport {
            Transport::Tcp => PeerRoute::tcp(addresses.part(Transport::Tcp).unwrap()),
            _ => PeerRoute::Remote(addresses),
        };
        sender.links.add_peer(to, route);
        sender.send_block(to, 1, 0).await;
        let stopped = Command::new("kill")
            .args(["-STOP", &child.id().to_string()])
            .status();
        assert!(stopped.unwrap().success());
        let (_, reason) = sender.next_lost().await;
        assert!(reason.contains("nothing was heard"), "{reason}");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
