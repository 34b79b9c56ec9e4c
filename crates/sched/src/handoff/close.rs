//! The end of a hand-off at this worker.
//!
//! Owns: the one way to end: reports to the router, packets to the peer, and release of the blocks.
//! Never: frees a block that a step or a copy still touches, or another worker may write to.
//! Invariant: `Released` is reported exactly once for each hand-off that was accepted, and last.

use crate::handoff::EndedHandoff;
use crate::sequences::{SequencePhase, SequenceStage};
use crate::{WorkerBrain, WorkerNote, WorkerOutput};
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

impl WorkerBrain {
    // === facts ===

    pub(crate) fn cancel(&mut self, router: RouterId, handoff: HandoffId) {
        let sequence = self.sequences.get(&handoff);
        if sequence.is_some_and(|sequence| sequence.router == router) {
            self.close(handoff, CloseReason::Cancelled);
        } else {
            self.cancel_move(router, handoff);
        }
    }

    pub(crate) fn router_lost(&mut self, router: RouterId) {
        self.reports.leave(router);
        let of_router = self.sequences.iter().filter(|(_, s)| s.router == router);
        let handoffs: Vec<_> = of_router.map(|(handoff, _)| *handoff).collect();
        for handoff in handoffs {
            self.close(handoff, CloseReason::Cancelled);
        }
    }

    /// Ends hand-offs with an expired lease or stall deadline, repeats packets, stops late fetches,
    /// and checks the step under way.
    pub(crate) fn expire(&mut self) {
        while let Some(handoff) = self.leases.pop_passed(self.context.now()) {
            self.close(handoff, CloseReason::Failed(Failure::LeaseExpired));
        }
        while let Some(due) = self.stalls.next().filter(|due| *due <= self.context.now()) {
            let Some(handoff) = self.stalls.pop_passed(self.context.now()) else {
                break;
            };
            if !self.waits_once_more(handoff, due) {
                self.stalled(handoff);
            }
        }
        while let Some(handoff) = self
            .resends
            .next_due(self.context.now(), self.context.limits().stall_max)
        {
            self.resend(handoff);
        }
        self.stop_late_fetches();
        self.steps.detect_stuck(&mut self.context);
    }

    // === the way out ===

    /// Ends a hand-off, unless it was ended before.
    pub(crate) fn close(&mut self, handoff: HandoffId, close: CloseReason) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        if sequence.closing() {
            return;
        }
        let cancelled = (close == CloseReason::Cancelled).then_some(self.context.now());
        sequence.stage = SequenceStage::Closing { cancelled };
        let (router, output_tokens) = (sequence.router, sequence.output_count());
        let timing = sequence.client_timing.timing();
        let prompt = sequence.phase == SequencePhase::Prompt;
        let prefill = prompt.then(|| sequence.prefill_timing(self.context.now()));
        let peered = std::mem::take(&mut sequence.peer_state_open);
        // It leaves the batch at once, but keeps the slot while a step writes to it.
        self.active.remove(&sequence.rank);
        if !sequence.stepping() {
            sequence.free_slot(&mut self.slots_free);
        }
        self.leases.remove(handoff);
        self.stalls.remove(handoff);
        self.resends.end(handoff);
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
        self.drop_swap(handoff);
        self.stop_fetch(handoff);
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
        let sequence = self.sequences.get(&handoff);
        if !sequence.is_some_and(|s| s.closing() && s.settled()) || self.read_for_a_move(handoff) {
            return;
        }
        let Some(mut sequence) = self.sequences.remove(&handoff) else {
            return;
        };
        sequence.release_blocks(&mut self.pools);
        sequence.free_slot(&mut self.slots_free);
        self.context.changed();
        if let SequenceStage::Closing {
            cancelled: Some(since),
        } = sequence.stage
        {
            let took = self.context.now().since(since);
            self.context.note(WorkerNote::CancelFreed { took });
        }
        let landed = sequence.incoming.as_ref().is_some_and(|r| r.has_landed());
        if landed {
            // The sender repeats its seal for up to its stall limit, and may have begun late.
            self.recently_ended.add_landed(
                handoff,
                self.context.now(),
                self.context.limits().stall_max * 2,
            );
        } else {
            self.recently_ended.add(handoff, EndedHandoff::Ended);
        }
        self.stalls.remove(handoff);
        self.resends.end(handoff);
        self.context
            .report(sequence.router, Report::Released { handoff });
    }
}

#[cfg(test)]
mod tests;
