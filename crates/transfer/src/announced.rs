//! The receiving end where heads come before what they speak of: over NIXL, whose writes are announced.
//!
//! Owns: the heads that were read ahead, and how long a write is waited for. Never: reads or verifies a payload.
//! Invariant: what was announced is acted on in the order in which it was; whatever was written before the stream ended
//! still arrives, however long it takes those who hear of it.

use crate::incoming::{Heard, Hearing, What, hear_one};
use crate::nixl::Landing;
use crate::pass::Admitted;
use crate::socket::{Reader, SocketError};
use std::pin::pin;
use std::time::Duration;
use tokio::io::AsyncRead;
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

/// Heads that are read before what they speak of is there: more than a ring has slots, usually.
const AHEAD_MAX: usize = 256;

/// Writes that were announced.
pub(crate) struct Announced {
    pub(crate) landing: Landing,
    /// One takes no longer, or never comes.
    pub(crate) silence_max: Duration,
    /// The same, once the stream has ended: a sender that ends well has waited for its writes, and for one that was killed
    /// nobody waits long.
    pub(crate) grace: Duration,
}

/// Reading goes on while a write is waited for: so the end of the stream is seen, too.
pub(crate) async fn hear<R: AsyncRead + Unpin>(
    reader: &mut Reader<R>,
    (hearing, announced): (&Hearing, &Announced),
    pongs: mpsc::Sender<u64>,
) -> SocketError {
    let (ahead, mut queue) = mpsc::channel(AHEAD_MAX);
    let (ending, ended) = watch::channel(false);
    let mut read = pin!(async move {
        let mut admitted = Admitted::new(hearing.passes.clone());
        loop {
            let heard = match hear_one(reader, (hearing, &mut admitted)).await {
                Ok(heard) => heard,
                Err(error) => return error,
            };
            if ahead.send(heard).await.is_err() {
                return SocketError::Closing;
            }
        }
    });
    let mut act = pin!(async {
        while let Some(Heard { what, after }) = queue.recv().await {
            if let Some(slot) = after {
                announced.written(slot, ended.clone()).await?;
            }
            match what {
                What::Ping(nonce) => announced.answer(nonce, &pongs).await?,
                what => hearing.act(what, &pongs).await?,
            }
        }
        Err(SocketError::Closed)
    });
    let error_of = |acted: Result<(), SocketError>| acted.err().unwrap_or(SocketError::Closed);
    tokio::select! {
        biased;
        acted = &mut act => error_of(acted),
        error = &mut read => {
            ending.send_replace(true);
            let _ = act.await;
            error
        }
        reason = announced.landing.failed() => SocketError::Nixl(reason),
    }
}

impl Announced {
    /// Returns when the slot was written.
    async fn written(
        &self,
        slot: u32,
        mut ended: watch::Receiver<bool>,
    ) -> Result<(), SocketError> {
        let Self {
            landing,
            silence_max,
            grace,
        } = self;
        let given_up = async {
            // Nobody takes the other end away while this waits.
            let _ = ended.wait_for(|ended| *ended).await;
            sleep(*grace).await;
        };
        tokio::select! {
            biased;
            written = timeout(*silence_max, landing.written(slot)) => {
                let written = written.map_err(|_| SocketError::Unwritten(*silence_max))?;
                written.map_err(SocketError::Nixl)
            }
            () = given_up => Err(SocketError::Unwritten(*grace)),
        }
    }

    /// Pings wait behind slow writes, and are many when these are there: so it is no flood unless the peer does not take
    /// the answers.
    async fn answer(&self, nonce: u64, pongs: &mpsc::Sender<u64>) -> Result<(), SocketError> {
        match timeout(self.silence_max, pongs.send(nonce)).await {
            // Where nobody answers any more the reader sees the end, after what came before it.
            Ok(_) => Ok(()),
            Err(_) => Err(SocketError::Unexpected("flood of pings")),
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::LinkEvent;
    use crate::credit::Account;
    use crate::incoming::{Arrivals, Places};
    use crate::nixl::Awaited;
    use crate::shared_memory::{Mirror, Shape};
    use crate::socket::write;
    use crate::wire::{FrameHead, Message};
    use cleave_domain::{HandoffId, Incarnation, WorkerId, WorkerRef};
    use cleave_kv::BlockPart;
    use std::sync::mpsc::{self as threads, TryRecvError};
    use tokio::io::DuplexStream;
    use tokio::task::{JoinHandle, yield_now};
    use tokio::time::advance;

    const SLOTS: u32 = 4;
    const BLOCK: u32 = 64;
    const GRACE: Duration = Duration::from_secs(1);

    /// A receiver whose clock stands still unless it is moved, and what it is played with.
    struct Played {
        sender: Option<DuplexStream>,
        asked: threads::Receiver<Awaited>,
        arrivals: mpsc::Receiver<LinkEvent>,
        pongs: mpsc::Receiver<u64>,
        _failure: watch::Sender<Option<String>>,
        heard: JoinHandle<SocketError>,
    }

    fn play() -> Played {
        let shape = Shape {
            slot_bytes: BLOCK,
            slots_count: SLOTS,
        };
        let (asking, asked) = threads::channel();
        let (failing, failure) = watch::channel(None);
        let announced = Announced {
            landing: Landing::of(asking, failure),
            silence_max: 100 * GRACE,
            grace: GRACE,
        };
        // Whoever hears of arrivals takes one at a time.
        let (events, arrivals) = mpsc::channel(1);
        let hearing = Hearing {
            peer: WorkerRef {
                worker: WorkerId(1),
                incarnation: Incarnation(1),
            },
            block_bytes: BLOCK,
            account: Account::of_slots(SLOTS),
            passes: None,
            places: Places::Ring(
                Mirror::private(shape).unwrap(),
                Arrivals::Announced(announced),
            ),
            events,
        };
        let (pongs, answers) = mpsc::channel(2);
        let (sender, receiver) = tokio::io::duplex(1 << 16);
        let heard = tokio::spawn(async move {
            let Places::Ring(_, Arrivals::Announced(announced)) = &hearing.places else {
                unreachable!("made so above");
            };
            let mut reader = Reader::new(receiver, 1000 * GRACE, BLOCK);
            hear(&mut reader, (&hearing, announced), pongs).await
        });
        Played {
            sender: Some(sender),
            asked,
            arrivals,
            pongs: answers,
            _failure: failing,
            heard,
        }
    }

    impl Played {
        async fn say(&mut self, message: Message) {
            let sender = self.sender.as_mut().unwrap();
            write(sender, &message, &[]).await.unwrap();
        }

        async fn announce(&mut self, slot: u32) {
            let part = BlockPart {
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
            self.say(Message::SlotFrame(head, slot)).await;
        }

        /// The next question for a slot. The clock stands still meanwhile, because this is never idle.
        async fn asks(&mut self) -> Awaited {
            loop {
                match self.asked.try_recv() {
                    Ok(awaited) => return awaited,
                    Err(TryRecvError::Empty) => yield_now().await,
                    Err(TryRecvError::Disconnected) => panic!("nobody asks any more"),
                }
            }
        }

        /// All tasks have come as far as they can.
        async fn settle(&self) {
            for _ in 0..100 {
                yield_now().await;
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lesson_16_what_was_written_before_a_good_end_was_dropped_with_a_slow_reader() {
        let mut played = play();
        for slot in 0..SLOTS {
            played.announce(slot).await;
        }
        drop(played.sender.take());
        for slot in 0..SLOTS {
            let Awaited {
                slot: asked,
                written,
            } = played.asks().await;
            assert_eq!(asked, slot);
            written.send(Ok(())).unwrap();
            // Whoever hears of it takes longer than a grace for each.
            played.settle().await;
            advance(3 * GRACE).await;
            if slot > 0 {
                let arrived = played.arrivals.recv().await;
                assert!(matches!(arrived, Some(LinkEvent::Arrived { .. })), "{slot}");
            }
        }
        let arrived = played.arrivals.recv().await;
        assert!(matches!(arrived, Some(LinkEvent::Arrived { .. })));
        assert!(matches!(played.heard.await.unwrap(), SocketError::Closed));
    }

    #[tokio::test(start_paused = true)]
    async fn lesson_08_a_write_that_never_comes_is_waited_for_one_grace_after_the_end() {
        let mut played = play();
        played.announce(0).await;
        let _never = played.asks().await;
        drop(played.sender.take());
        played.settle().await;
        advance(GRACE / 2).await;
        played.settle().await;
        assert!(!played.heard.is_finished(), "it may still come");
        advance(GRACE).await;
        assert!(matches!(played.heard.await.unwrap(), SocketError::Closed));
    }

    #[tokio::test(start_paused = true)]
    async fn lesson_08_pings_behind_a_slow_write_were_taken_for_a_flood() {
        let mut played = play();
        played.announce(0).await;
        let awaited = played.asks().await;
        for nonce in 0..100 {
            played.say(Message::Ping(nonce)).await;
        }
        played.settle().await;
        awaited.written.send(Ok(())).unwrap();
        assert!(played.arrivals.recv().await.is_some());
        for nonce in 0..100 {
            assert_eq!(played.pongs.recv().await, Some(nonce));
        }
        assert!(!played.heard.is_finished());
    }
}
