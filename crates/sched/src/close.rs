//! How a hand-off ends here.
//!
//! Owns: the one way out: what is said to the router and the peer, and when the blocks go.
//! Never: frees a block that a step or a copy still touches, or another worker may write to.
//! Invariant: `Released` is said exactly once for each hand-off that was accepted, and last.

use crate::past::Trace;
use crate::sequence::{Phase, Stage};
use crate::{Brain, Note, Output};
use cleave_domain::{Cause, Failure, FinishReason, HandoffId, Report, RouterId};
use cleave_kv::handoff::{receiver, sender};

/// Why a hand-off is over for this worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Close {
    /// Its last token was drawn here.
    Finished(FinishReason),
    /// The other worker has everything.
    HandedOn,
    /// The sequence ended at the other worker before it had to move.
    FinishedThere,
    /// The router no longer wants it, or is gone.
    Cancelled,
    /// It cannot go on.
    Failed(Failure),
}

impl Close {
    /// What it means here that the hand-off ended. A peer that merely no longer knows it would not
    /// take what is sent; if the router cancelled there, it cancels here too.
    pub(crate) fn by_peer(cause: Cause) -> Self {
        match cause {
            Cause::Finished => Self::FinishedThere,
            Cause::Cancelled => Self::Failed(Failure::Rejected),
            Cause::Failed(failure) => Self::Failed(failure),
        }
    }

    /// What the peer is told, if it still waits for something.
    fn cause(&self) -> Cause {
        match self {
            Self::Finished(_) | Self::HandedOn | Self::FinishedThere => Cause::Finished,
            Self::Cancelled => Cause::Cancelled,
            Self::Failed(failure) => Cause::Failed(failure.clone()),
        }
    }
}

impl Brain {
    // === facts ===

    pub(crate) fn cancel(&mut self, router: RouterId, handoff: HandoffId) {
        let sequence = self.sequences.get(&handoff);
        if sequence.is_some_and(|sequence| sequence.router == router) {
            self.close(handoff, Close::Cancelled);
        } else {
            self.cancel_move(router, handoff);
        }
    }

    pub(crate) fn router_lost(&mut self, router: RouterId) {
        self.routers.remove(&router);
        let of_router = self.sequences.iter().filter(|(_, s)| s.router == router);
        let handoffs: Vec<_> = of_router.map(|(handoff, _)| *handoff).collect();
        for handoff in handoffs {
            self.close(handoff, Close::Cancelled);
        }
    }

    /// Ends what nobody renewed and what stood still for too long, and minds the step under way.
    pub(crate) fn expire(&mut self) {
        while let Some(handoff) = self.leases.passed(self.now) {
            self.close(handoff, Close::Failed(Failure::LeaseExpired));
        }
        while let Some(handoff) = self.stalls.passed(self.now) {
            self.stalled(handoff);
        }
        while let Some(handoff) = self.resends.passed(self.now, self.limits.stall_max) {
            self.resend(handoff);
        }
        self.lose_patience();
        self.look_at_step();
    }

    // === the way out ===

    /// Ends a hand-off, unless that happened before.
    pub(crate) fn close(&mut self, handoff: HandoffId, close: Close) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        if sequence.closing() {
            return;
        }
        let cancelled = (close == Close::Cancelled).then_some(self.now);
        sequence.stage = Stage::Closing { cancelled };
        let (router, output_tokens) = (sequence.router, sequence.output_count());
        let timing = sequence.pace.timing();
        let prompt = sequence.phase == Phase::Prompt;
        let prefill = prompt.then(|| sequence.prefill_timing(self.now));
        let peered = std::mem::take(&mut sequence.peered);
        self.active.remove(&sequence.rank);
        if !sequence.stepping() {
            sequence.unseat(&mut self.slots);
        }
        self.leases.end(handoff);
        self.stalls.end(handoff);
        self.resends.end(handoff);
        self.stirred = true;
        let cause = close.cause();
        match close {
            Close::Finished(reason) => self.tell(
                router,
                Report::Finished {
                    handoff,
                    reason,
                    output_tokens,
                    timing,
                    prefill,
                },
            ),
            Close::Failed(failure) => {
                if peered {
                    let failure = failure.clone();
                    self.note(Note::HandoffFailed { handoff, failure });
                }
                self.tell(router, Report::LegFailed { handoff, failure });
            }
            Close::HandedOn | Close::FinishedThere | Close::Cancelled => {}
        }
        self.part_move(handoff, cause.clone());
        self.drop_swap(handoff);
        self.stop_fetch(handoff);
        if peered {
            self.part(handoff, cause);
        }
        self.release_if_settled(handoff);
    }

    /// Tells the peer, if it does not know, and has the body drop what it keeps. The machines end
    /// for good here; that they say so again changes nothing, since the sequence is closing.
    fn part(&mut self, handoff: HandoffId, cause: Cause) {
        let up = receiver::Input::GivenUp {
            cause: cause.clone(),
        };
        if !self.receive(handoff, up) {
            self.send(handoff, sender::Input::GivenUp { cause });
        }
        self.say(Output::Forget { handoff });
    }

    /// Frees everything of a hand-off that is over, once nobody touches its blocks.
    pub(crate) fn release_if_settled(&mut self, handoff: HandoffId) {
        let sequence = self.sequences.get(&handoff);
        if !sequence.is_some_and(|s| s.closing() && s.settled()) || self.read_for_a_move(handoff) {
            return;
        }
        let Some(mut sequence) = self.sequences.remove(&handoff) else {
            return;
        };
        sequence.give_back(&mut self.pool);
        sequence.unseat(&mut self.slots);
        self.stirred = true;
        if let Stage::Closing {
            cancelled: Some(since),
        } = sequence.stage
        {
            let took = self.now.since(since);
            self.note(Note::CancelFreed { took });
        }
        let landed = sequence.incoming.as_ref().is_some_and(|r| r.landed());
        if landed {
            // The sender repeats its seal for as long as it may stand still, and may have begun late.
            self.past
                .add_landed(handoff, self.now, self.limits.stall_max * 2);
        } else {
            self.past.add(handoff, Trace::Over);
        }
        self.stalls.end(handoff);
        self.resends.end(handoff);
        self.tell(sequence.router, Report::Released { handoff });
    }
}
