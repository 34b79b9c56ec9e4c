//! The end of a hand-off at this worker.
//!
//! Owns: the one way to end: reports to the router, packets to the peer, and release of the blocks.
//! Never: frees a block that a step or a copy still touches, or another worker may write to.
//! Invariant: `Released` is reported exactly once for each hand-off that was accepted, and last.

use super::{EndedHandoff, Handoffs};
use crate::memory::drop_swap;
use crate::sequences::{SequencePhase, SequenceStage, WorkerSequence};
use crate::{WorkerNote, WorkerOutput};
use cleave_domain::{AbandonCause, Failure, FinishReason, HandoffId, Report, RouterId};
use cleave_kv::handoff::{receiver, sender};

/// Why a hand-off is over at this worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CloseReason {
    /// Its last token was drawn here.
    Finished(FinishReason),
    /// The other worker has everything.
    HandedOff,
    /// The sequence ended at the other worker before it had to move.
    FinishedAtPeer,
    /// The router cancelled it, or is gone.
    Cancelled,
    /// It cannot go on.
    Failed(Failure),
}

impl CloseReason {
    /// Maps the peer's cause to a reason here. A peer that merely forgot the hand-off would not
    /// take its frames; if the router cancelled it there, it cancels here too.
    pub(crate) fn from_peer_cause(cause: AbandonCause) -> Self {
        match cause {
            AbandonCause::Finished => Self::FinishedAtPeer,
            AbandonCause::Cancelled => Self::Failed(Failure::Rejected),
            AbandonCause::Failed(failure) => Self::Failed(failure),
        }
    }

    /// The cause to send to the peer, if it still waits for something.
    fn cause(&self) -> AbandonCause {
        match self {
            Self::Finished(_) | Self::HandedOff | Self::FinishedAtPeer => AbandonCause::Finished,
            Self::Cancelled => AbandonCause::Cancelled,
            Self::Failed(failure) => AbandonCause::Failed(failure.clone()),
        }
    }
}

impl Handoffs<'_> {
    // === facts ===

    pub(crate) fn cancel(&mut self, router: RouterId, handoff: HandoffId) {
        let sequence = self.sequences.get(handoff);
        if sequence.is_some_and(|sequence| sequence.router == router) {
            self.close(handoff, CloseReason::Cancelled);
        } else {
            self.cancel_move(router, handoff);
        }
    }

    pub(crate) fn router_lost(&mut self, router: RouterId) {
        let of_router = |s: &WorkerSequence| s.router == router;
        for handoff in self.sequences.handoffs_where(of_router) {
            self.close(handoff, CloseReason::Cancelled);
        }
    }

    /// Ends every sequence: the engine can run nothing more.
    pub(crate) fn engine_lost(&mut self, reason: &str) {
        for handoff in self.sequences.handoffs_where(|_| true) {
            self.close(handoff, CloseReason::Failed(Failure::Engine(reason.into())));
        }
    }

    /// Ends hand-offs whose router did not renew their lease in time.
    pub(crate) fn end_expired(&mut self) {
        while let Some(handoff) = self.sequences.next_expired(self.context.now()) {
            self.close(handoff, CloseReason::Failed(Failure::LeaseExpired));
        }
    }

    // === the way out ===

    /// Ends a hand-off, unless it was ended before.
    pub(crate) fn close(&mut self, handoff: HandoffId, close: CloseReason) {
        let now = self.context.now();
        let Some(sequence) = self.sequences.get_mut(handoff) else {
            return;
        };
        if sequence.closing() {
            return;
        }
        let (router, output_tokens) = (sequence.router, sequence.output_count());
        let timing = sequence.client_timing.timing();
        let prompt = sequence.phase == SequencePhase::Prompt;
        let prefill = prompt.then(|| sequence.prefill_timing(now));
        let peered = std::mem::take(&mut sequence.peer_state_open);
        let cancelled = (close == CloseReason::Cancelled).then_some(now);
        self.sequences.close(handoff, cancelled);
        self.peers.forget(handoff);
        self.context.changed();
        let cause = close.cause();
        match close {
            CloseReason::Finished(reason) => self.context.report(
                router,
                Report::Finished {
                    handoff,
                    reason,
                    output_tokens,
                    timing,
                    prefill,
                },
            ),
            CloseReason::Failed(failure) => {
                if peered {
                    let failure = failure.clone();
                    self.context
                        .note(WorkerNote::HandoffFailed { handoff, failure });
                }
                self.context
                    .report(router, Report::LegFailed { handoff, failure });
            }
            CloseReason::HandedOff | CloseReason::FinishedAtPeer | CloseReason::Cancelled => {}
        }
        // A move, swap or fetch of it ends with it; each of them settles by its own answer.
        self.close_move(handoff, cause.clone());
        if let Some(sequence) = self.sequences.get_mut(handoff) {
            drop_swap(self.context, sequence);
            self.memory.stop_fetch(self.context, sequence);
        }
        if peered {
            self.part(handoff, cause);
        }
        self.release_if_settled(handoff);
    }

    /// Informs the peer, if it does not know, and lets the body drop its state for the hand-off.
    /// The machines end for good here; the end that they report again changes nothing, since the
    /// sequence is closing.
    fn part(&mut self, handoff: HandoffId, cause: AbandonCause) {
        let up = receiver::ReceiverInput::GiveUp {
            cause: cause.clone(),
        };
        if !self.receive(handoff, up) {
            self.send(handoff, sender::SenderInput::GiveUp { cause });
        }
        self.context.emit(WorkerOutput::Forget { handoff });
    }

    /// Frees everything of a hand-off that is over, once nothing touches its blocks.
    pub(crate) fn release_if_settled(&mut self, handoff: HandoffId) {
        let sequence = self.sequences.get(handoff);
        let over = sequence.is_some_and(|s| s.closing() && s.settled());
        if !over || self.peers.reads_for_move(handoff) {
            return;
        }
        let Some(mut sequence) = self.sequences.remove(handoff) else {
            return;
        };
        self.memory.release(&mut sequence);
        self.context.changed();
        if let SequenceStage::Closing {
            cancelled: Some(since),
        } = sequence.stage()
        {
            let took = self.context.now().since(since);
            self.context.note(WorkerNote::CancelFreed { took });
        }
        if sequence.incoming.as_ref().is_some_and(|r| r.has_landed()) {
            self.peers.remember_landed(handoff, self.context);
        } else {
            self.peers.remember(handoff, EndedHandoff::Ended);
        }
        self.peers.forget(handoff);
        self.context
            .report(sequence.router, Report::Released { handoff });
    }
}

#[cfg(test)]
mod tests;
