//! Alone in its process, because it counts what the process holds.
#![allow(missing_docs, clippy::unwrap_used)]

mod pair;

use pair::*;
use std::time::Duration;
use tokio::time::timeout;

/// Descriptors, and mappings of rings.
fn held() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (descriptors, maps.matches("cleave-ring").count())
}

async fn until(what: (usize, usize)) {
    let settled = async {
        while held() != what {
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
        "{:?} held in place of {what:?}: {descriptors:?}",
        held()
    );
}

#[tokio::test]
async fn lesson_02_links_that_come_and_go_leave_no_descriptor_and_no_memory() {
    for transport in REMOTE {
        let before = held();
        for round in 0..10 {
            let (mut sender, mut receiver) = pair(transport).await;
            sender.send_block(receiver.me, round, 0).await;
            let kept = receiver.arrived().await.payload.unwrap();
            let link = sender.links.link(receiver.me).unwrap();
            let mut permit = loop {
                match link.reserve(frame(1, 0).handoff, BLOCK) {
                    Some(permit) => break permit,
                    None => drop(sender.next().await),
                }
            };
            permit.buffer(BLOCK).fill(1);
            receiver.server.abort();
            assert_eq!(sender.lost().await.0, receiver.me);
            // Both ends may hold something of a link that is gone, and use it.
            permit.buffer(BLOCK).fill(2);
            assert_eq!(kept.bytes().unwrap(), block_bytes(round, 0));
            drop((permit, link, kept));
            // It would listen for as long as it is polled.
            sender.server.abort();
            drop((sender, receiver));
            until(before).await;
        }
    }
}
