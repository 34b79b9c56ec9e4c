//! A whole process killed in the middle of it, which no test within a process can show.
#![allow(missing_docs, clippy::unwrap_used)]

mod pair;

use cleave_transfer::{Addresses, Route, Transport};
use pair::*;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

const CHILD: &str = "CLEAVE_TEST_RECEIVER";

/// Not a test of its own: the receiver's process, when the other one starts it. It keeps all that
/// arrives, so that the sender's credit is out when it dies.
#[tokio::test]
async fn receiver_process() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let mut receiver = Worker::start(worker_ref(2, 1), "f").await;
    println!("here: {}", receiver.addresses());
    let mut kept = Vec::new();
    while let Some(event) = receiver.events.recv().await {
        kept.push(event);
    }
}

fn receiver() -> (Child, Addresses) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "receiver_process", "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    let announced = lines.find_map(|line| Some(line.split_once("here: ")?.1.to_owned()));
    (child, Addresses::parse(&announced.unwrap()).unwrap())
}

#[tokio::test]
async fn lesson_08_a_receiver_killed_while_it_holds_the_credit_is_lost_once_and_dialled_anew() {
    for transport in REMOTE {
        let mut sender = Worker::start(worker_ref(1, 1), "f").await;
        let to = worker_ref(2, 1);
        for flight in 0..3 {
            let (mut child, addresses) = receiver();
            let route = match transport {
                Transport::Tcp => Route::tcp(addresses.tcp.unwrap()),
                _ => Route::Remote(addresses),
            };
            sender.links.know(to, route);
            assert_eq!(sender.measured().await.transport, transport);
            for ordinal in 0..4 {
                sender.send_block(to, flight, ordinal).await;
            }
            let link = sender.links.link(to).unwrap();
            assert!(
                link.reserve(frame(1, 0).handoff, BLOCK).is_none(),
                "all credit is with the other"
            );
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(sender.lost().await.0, to);
            sender.hears_nothing_more();
            assert!(link.is_broken());
        }
    }
}

#[tokio::test]
async fn lesson_09_a_receiver_that_is_stopped_is_lost_by_its_silence() {
    for transport in REMOTE {
        let mut sender = Worker::start(worker_ref(1, 1), "f").await;
        let to = worker_ref(2, 1);
        let (mut child, addresses) = receiver();
        let route = match transport {
            Transport::Tcp => Route::tcp(addresses.tcp.unwrap()),
            _ => Route::Remote(addresses),
        };
        sender.links.know(to, route);
        sender.send_block(to, 1, 0).await;
        let stopped = Command::new("kill")
            .args(["-STOP", &child.id().to_string()])
            .status();
        assert!(stopped.unwrap().success());
        let (_, reason) = sender.lost().await;
        assert!(reason.contains("nothing was heard"), "{reason}");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
