//! Counts descriptors and mappings of its process, and is therefore alone in it.
#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "a part of it is used here")]
mod pair;

use pair::*;
use std::time::Duration;
use tokio::time::timeout;

/// The number of descriptors, and of mapped rings.
fn held() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (descriptors, maps.matches("cleave-ring").count())
}

async fn until(expected: (usize, usize)) {
    let settled = async {
        while held() != expected {
            tokio::task::yield_now().await;
        }
    };
    let settled = timeout(Duration::from_secs(20), settled).await;
    let descriptors: Vec<_> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .collect();
    assert!(
        settled.is_ok(),
        "{:?} held in place of {expected:?}: {descriptors:?}",
        held()
    );
}

// Lesson: 2.
#[tokio::test]
async fn ended_links_leak_no_descriptor_and_no_memory() {
    for transport in REMOTE {
        let before = held();
        for round in 0..10 {
            let (mut sender, mut receiver) = pair(transport).await;
            sender.send_block(receiver.me, round, 0).await;
            let payload = receiver.next_packet().await.payload.unwrap();
            let link = sender.links.link(receiver.me).unwrap();
            let mut permit = loop {
                match link.reserve(frame(1, 0).handoff, BLOCK) {
                    Some(permit) => break permit,
                    None => drop(sender.next().await),
                }
            };
            permit.buffer(BLOCK).fill(1);
            receiver.server.abort();
            assert_eq!(sender.next_lost().await.0, receiver.me);
            // Both ends may still hold and use parts of a link that has ended.
            permit.buffer(BLOCK).fill(2);
            assert_eq!(payload.bytes().unwrap(), block_bytes(round, 0));
            drop((permit, link, payload));
            // The server listens for as long as it is polled.
            sender.server.abort();
            drop((sender, receiver));
            until(before).await;
        }
    }
}
