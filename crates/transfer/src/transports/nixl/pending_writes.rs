//! The receiving end of links whose heads arrive before their payloads: over NIXL, where writes are
//! announced.
//!
//! Owns: the heads that were read ahead, and the time limit of a write. Never: reads or verifies a
//! payload.
//! Invariant: announced messages are handled in their order; everything written before the stream
//! ended is still delivered, however slowly its events are received.

use super::{RdmaReceiver, failure};
use crate::grant::AdmittedHandoffs;
use crate::incoming::{DeferredAction, LinkAction, LinkReceiver, receive_action};
use crate::socket::{LinkError, MessageReader};
use std::pin::pin;
use std::time::Duration;
use tokio::io::AsyncRead;
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

/// Limit of the heads that are read before their writes have completed; usually more than a ring
/// has slots.
const HEADS_AHEAD_MAX: usize = 256;

/// The announced writes of one link.
pub(crate) struct PendingWrites {
    pub(crate) receiver: RdmaReceiver,
    /// The time limit of a write.
    pub(crate) silence_max: Duration,
    /// The time limit once the stream has ended: a sender that closes in order has waited for its
    /// writes, and the writes of a killed one never complete.
    pub(crate) grace: Duration,
}

/// Receives messages until the link ends. Reading continues while a write is awaited, so that the
/// end of the stream is noticed.
pub(crate) async fn receive_ahead<R: AsyncRead + Unpin>(
    reader: &mut MessageReader<R>,
    link_receiver: &LinkReceiver,
    pending_writes: &PendingWrites,
    pongs: mpsc::Sender<u64>,
) -> LinkError {
    let (ahead, mut queue) = mpsc::channel(HEADS_AHEAD_MAX);
    let (ending, ended) = watch::channel(false);
    let mut read = pin!(async move {
        let mut admitted = AdmittedHandoffs::new(link_receiver.grants.clone());
        loop {
            let deferred = match receive_action(reader, link_receiver, &mut admitted).await {
                Ok(deferred) => deferred,
                Err(error) => return error,
            };
            if ahead.send(deferred).await.is_err() {
                return LinkError::Closing;
            }
        }
    });
    let mut act = pin!(async {
        while let Some(DeferredAction { action, after_slot }) = queue.recv().await {
            if let Some(slot) = after_slot {
                pending_writes
                    .wait_until_written(slot, ended.clone())
                    .await?;
            }
            match action {
                LinkAction::Ping(nonce) => pending_writes.queue_pong(nonce, &pongs).await?,
                action => link_receiver.perform(action, &pongs).await?,
            }
        }
        Err(LinkError::Closed)
    });
    let error_of = |acted: Result<(), LinkError>| acted.err().unwrap_or(LinkError::Closed);
    tokio::select! {
        biased;
        acted = &mut act => error_of(acted),
        error = &mut read => {
            ending.send_replace(true);
            let _ = act.await;
            error
        }
        reason = pending_writes.receiver.wait_until_failed() => failure(reason),
    }
}

impl PendingWrites {
    /// Returns when the slot has been written.
    async fn wait_until_written(
        &self,
        slot: u32,
        mut ended: watch::Receiver<bool>,
    ) -> Result<(), LinkError> {
        let Self {
            receiver,
            silence_max,
            grace,
        } = self;
        let given_up = async {
            // The sending end of `ended` lives as long as this function waits.
            let _ = ended.wait_for(|ended| *ended).await;
            sleep(*grace).await;
        };
        tokio::select! {
            biased;
            written = timeout(*silence_max, receiver.wait_until_written(slot)) => {
                let written = written.map_err(|_| LinkError::WriteTimedOut(*silence_max))?;
                written.map_err(failure)
            }
            () = given_up => Err(LinkError::WriteTimedOut(*grace)),
        }
    }

    /// Queues a pong. Pings wait behind slow writes and then arrive together, so they count as a
    /// flood only if the peer does not read the answers.
    async fn queue_pong(&self, nonce: u64, pongs: &mpsc::Sender<u64>) -> Result<(), LinkError> {
        match timeout(self.silence_max, pongs.send(nonce)).await {
            // If the answering task has ended, the reader reports the end of the stream, after
            // everything before it.
            Ok(_) => Ok(()),
            Err(_) => Err(LinkError::Unexpected("flood of pings")),
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::LinkEvent;
    use crate::credit::CreditAccount;
    use crate::incoming::{PayloadSource, SlotReadiness};
    use crate::socket::write_message;
    use crate::transports::nixl::receiver::AwaitedSlot;
    use crate::transports::shm::{ReceiverRing, RingShape};
    use crate::wire::{FrameHead, LinkMessage};
    use cleave_domain::{HandoffId, Incarnation, KvPlane, WorkerId, WorkerRef};
    use cleave_kv::BlockPart;
    use std::sync::mpsc::{self as threads, TryRecvError};
    use tokio::io::DuplexStream;
    use tokio::task::{JoinHandle, yield_now};
    use tokio::time::advance;

    const SLOTS: u32 = 4;
    const BLOCK: u32 = 64;
    const GRACE: Duration = Duration::from_secs(1);

    /// A receiver under a paused clock, and the handles that drive it.
    struct PendingWritesFixture {
        sender: Option<DuplexStream>,
        awaited_slots: threads::Receiver<AwaitedSlot>,
        arrivals: mpsc::Receiver<LinkEvent>,
        pongs: mpsc::Receiver<u64>,
        _failure: watch::Sender<Option<String>>,
        received: JoinHandle<LinkError>,
    }

    fn fixture() -> PendingWritesFixture {
        let shape = RingShape {
            slot_bytes: BLOCK,
            slots_count: SLOTS,
        };
        let (request_sender, awaited_slots) = threads::channel();
        let (failing, failure) = watch::channel(None);
        let pending_writes = PendingWrites {
            receiver: RdmaReceiver::from_channels(request_sender, failure),
            silence_max: 100 * GRACE,
            grace: GRACE,
        };
        // The receiver of events takes one at a time.
        let (events, arrivals) = mpsc::channel(1);
        let link_receiver = LinkReceiver {
            peer: WorkerRef {
                worker: WorkerId(1),
                incarnation: Incarnation(1),
            },
            block_bytes: BLOCK,
            account: CreditAccount::of_slots(SLOTS),
            grants: None,
            payload_source: PayloadSource::Ring(
                ReceiverRing::private(shape).unwrap(),
                SlotReadiness::AfterWrite(pending_writes),
            ),
            events,
        };
        let (pongs, answers) = mpsc::channel(2);
        let (sender, receiver) = tokio::io::duplex(1 << 16);
        let received = tokio::spawn(async move {
            let PayloadSource::Ring(_, SlotReadiness::AfterWrite(pending_writes)) =
                &link_receiver.payload_source
            else {
                unreachable!("made so above");
            };
            let mut reader = MessageReader::new(receiver, 1000 * GRACE, BLOCK);
            receive_ahead(&mut reader, &link_receiver, pending_writes, pongs).await
        });
        PendingWritesFixture {
            sender: Some(sender),
            awaited_slots,
            arrivals,
            pongs: answers,
            _failure: failing,
            received,
        }
    }

    impl PendingWritesFixture {
        async fn send(&mut self, message: LinkMessage) {
            let sender = self.sender.as_mut().unwrap();
            write_message(sender, &message, &[]).await.unwrap();
        }

        async fn announce(&mut self, slot: u32) {
            let part = BlockPart {
                plane: KvPlane::Blocks,
                ordinal: slot,
                offset: 0,
                len: BLOCK,
            };
            let head = FrameHead {
                handoff: HandoffId::default(),
                block: Default::default(),
                part,
                checksum: 0,
            };
            self.send(LinkMessage::SlotFrame(head, slot)).await;
        }

        /// The next slot that is awaited. The clock stays paused, because this loop is never idle.
        async fn next_awaited(&mut self) -> AwaitedSlot {
            loop {
                match self.awaited_slots.try_recv() {
                    Ok(awaited) => return awaited,
                    Err(TryRecvError::Empty) => yield_now().await,
                    Err(TryRecvError::Disconnected) => panic!("no slot is awaited any more"),
                }
            }
        }

        /// Lets all tasks run as far as they can.
        async fn settle(&self) {
            for _ in 0..100 {
                yield_now().await;
            }
        }
    }

    // Lesson: 16.
    #[tokio::test(start_paused = true)]
    async fn slots_written_before_the_end_reach_a_slow_reader() {
        let mut fixture = fixture();
        for slot in 0..SLOTS {
            fixture.announce(slot).await;
        }
        drop(fixture.sender.take());
        for slot in 0..SLOTS {
            let AwaitedSlot {
                slot: awaited_slot,
                written,
            } = fixture.next_awaited().await;
            assert_eq!(awaited_slot, slot);
            written.send(Ok(())).unwrap();
            // The receiver of events takes longer than a grace period for each.
            fixture.settle().await;
            advance(3 * GRACE).await;
            if slot > 0 {
                let arrived = fixture.arrivals.recv().await;
                assert!(matches!(arrived, Some(LinkEvent::Arrived { .. })), "{slot}");
            }
        }
        let arrived = fixture.arrivals.recv().await;
        assert!(matches!(arrived, Some(LinkEvent::Arrived { .. })));
        assert!(matches!(fixture.received.await.unwrap(), LinkError::Closed));
    }

    // Lesson: 8.
    #[tokio::test(start_paused = true)]
    async fn a_missing_write_ends_the_link_after_the_grace_period() {
        let mut fixture = fixture();
        fixture.announce(0).await;
        let _never = fixture.next_awaited().await;
        drop(fixture.sender.take());
        fixture.settle().await;
        advance(GRACE / 2).await;
        fixture.settle().await;
        assert!(!fixture.received.is_finished(), "it may still come");
        advance(GRACE).await;
        assert!(matches!(fixture.received.await.unwrap(), LinkError::Closed));
    }

    // Lesson: 8.
    #[tokio::test(start_paused = true)]
    async fn pings_behind_a_slow_write_are_no_flood() {
        let mut fixture = fixture();
        fixture.announce(0).await;
        let awaited = fixture.next_awaited().await;
        for nonce in 0..100 {
            fixture.send(LinkMessage::Ping(nonce)).await;
        }
        fixture.settle().await;
        awaited.written.send(Ok(())).unwrap();
        assert!(fixture.arrivals.recv().await.is_some());
        for nonce in 0..100 {
            assert_eq!(fixture.pongs.recv().await, Some(nonce));
        }
        assert!(!fixture.received.is_finished());
    }
}
