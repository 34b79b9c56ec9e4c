//! A flight: one request on its way from submission to its one end.
//!
//! Owns: the router's memory of a request and of its present attempts. Never: decides.
//! Invariant: a flight waits in the queue, or has an attempt under way, or waits until its client's
//! tokens are counted; beside an attempt that decodes there may be a second one, to which it moves.

mod table;

pub(crate) use table::RouterFlights;

use crate::accounting::verdict::FlightTimestamps;
use crate::event::{CancelStage, MoveReason};
use crate::flight::losses::FailureBudget;
use crate::flight::move_history::MoveHistory;
use crate::flight::refusals::WorkerRefusals;
use crate::placement::forecast::PlacementForecast;
use crate::placement::prefix::PrefixHashes;
use crate::queue::QueuePlace;
use cleave_domain::{
    Failure, Fingerprint, FinishReason, HandoffId, OnSloMiss, Request, Time, TokenId, WorkerId,
    WorkerRef,
};
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(crate) struct FlightRecord {
    /// Includes the output that the client had at the last count.
    pub(crate) request: Arc<Request>,
    pub(crate) content: PrefixHashes,
    pub(crate) place: QueuePlace,
    pub(crate) submitted: Time,
    stage: FlightPhase,
    /// Fingerprint of the workers that draw its tokens, from its latest attempt.
    pub(crate) drawn_by: Option<Fingerprint>,
    /// The next attempt's number. Every pair of workers gets its own, refused ones too, so that a
    /// hand-off never means two different pairs.
    attempts: u32,
    pub(crate) failures: FailureBudget,
    pub(crate) refusals: WorkerRefusals,
    /// End of the pause before it may be placed, while it waits.
    pub(crate) pause_until: Option<Time>,
    /// End of its waiting time; kept across refusals, so that they do not prolong it.
    pub(crate) wait_until: Option<Time>,
    /// The fleet's version in which no worker was large enough, or none had the fingerprint of the
    /// client's tokens.
    pub(crate) unplaceable_at: Option<u64>,
    /// The move to another decode worker.
    moving: Option<FlightMigration>,
    pub(crate) moves: MoveHistory,
    /// Flights that were placed while it was ahead of them and found no room.
    pub(crate) overtaken: u32,
    /// The rule for a target that cannot be met, from the class that it had at submission.
    pub(crate) on_miss: OnSloMiss,
    /// It came when no worker could serve it, and waited for workers to be started.
    pub(crate) awaits_start: bool,
    /// How often its class was downgraded.
    pub(crate) downgrades: u32,
    /// Tokens that its tenant's account was charged for it.
    pub(crate) charged: i64,
    /// Deadline of its first token, or of the next one of a resumed stream.
    pub(crate) due: Option<Time>,
    /// The forecast of its last placement.
    pub(crate) forecast: Option<PlacementForecast>,
    pub(crate) timestamps: FlightTimestamps,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FlightPhase {
    Waiting,
    Flying(FlightAttempt),
    /// Its last attempt is over and fenced; a new one begins after the client's last token.
    CountingTokens(FailedAttempt),
}

/// The attempt that failed last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FailedAttempt {
    pub(crate) handoff: HandoffId,
    /// The attempt named in the fence: the last one that was begun.
    pub(crate) fence: HandoffId,
    /// The worker at the other end of a link that broke: its report may still come, and would end
    /// the next attempt between the same two.
    pub(crate) peer_in_doubt: Option<WorkerId>,
    /// The longest sequence that its decode worker could hold: there a sequence ends by itself.
    pub(crate) context_tokens_max: u32,
    /// The worker of both legs, if it did not answer the order to run: it is only passed over,
    /// unless it drew a token for the client.
    pub(crate) unanswered_by: Option<WorkerRef>,
}

/// One hand-off, as the router sees it. Reports of the two legs come over two connections, in any
/// order between them; so each fact is a flag of its own rather than a state in a sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FlightAttempt {
    pub(crate) handoff: HandoffId,
    /// The sender: the prefill worker, or the decode worker from which the sequence moves.
    pub(crate) prefill: WorkerRef,
    pub(crate) decode: WorkerRef,
    /// The attempt under which the sender decoded, if the sequence moves.
    pub(crate) of: Option<HandoffId>,
    /// The longest sequence that the decode worker can hold.
    pub(crate) context_tokens_max: u32,
    /// The decode worker holds blocks, and the sender was ordered to start; or the worker of both
    /// legs accepted the order to run.
    pub(crate) reserved: bool,
    /// The sender drew its last token, and the client has it.
    pub(crate) prefilled: bool,
    /// One leg failed: fatal unless the other one confirms.
    pub(crate) leg_failure: Option<Failure>,
    pub(crate) landed: bool,
    /// The last token was produced.
    pub(crate) finished: Option<SequenceEnd>,
}

/// How a sequence ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SequenceEnd {
    pub(crate) reason: FinishReason,
    pub(crate) output_tokens: u32,
}

/// A running sequence on its way to another decode worker.
#[derive(Clone, Debug)]
pub(crate) struct FlightMigration {
    pub(crate) handoff: HandoffId,
    pub(crate) why: MoveReason,
    pub(crate) began: Time,
    /// The new attempt; none until the client's tokens are counted. Its sender is the decode worker
    /// of the flight's current attempt. Once it has failed, it is cancelled, and the sender's final
    /// report about it is awaited.
    pub(crate) leg: Option<FlightAttempt>,
}

impl FlightAttempt {
    /// An attempt of which nothing is known yet.
    pub(crate) fn new(
        handoff: HandoffId,
        prefill: WorkerRef,
        decode: WorkerRef,
        context_tokens_max: u32,
    ) -> Self {
        Self {
            handoff,
            prefill,
            decode,
            of: None,
            context_tokens_max,
            reserved: false,
            prefilled: false,
            leg_failure: None,
            landed: false,
            finished: None,
        }
    }

    /// The hand-off under whose name the sender holds something.
    pub(crate) fn sending(&self) -> HandoffId {
        self.of.unwrap_or(self.handoff)
    }

    /// Whether one worker serves both legs.
    pub(crate) fn is_whole(&self) -> bool {
        self.prefill == self.decode
    }

    /// Whether a token may have been drawn: a worker was ordered to run the prompt.
    pub(crate) fn may_have_drawn(&self) -> bool {
        self.reserved || self.is_whole()
    }

    /// Whether it decodes, every token of its sender has passed, and no leg failed.
    pub(crate) fn is_running(&self) -> bool {
        self.landed && self.prefilled && self.finished.is_none() && self.leg_failure.is_none()
    }
}

impl FlightRecord {
    /// A flight that is submitted now.
    pub(crate) fn new(
        place: QueuePlace,
        request: Arc<Request>,
        block_sizes: impl Iterator<Item = u32>,
        now: Time,
    ) -> Self {
        Self {
            content: PrefixHashes::of(&request, block_sizes),
            request,
            place,
            submitted: now,
            stage: FlightPhase::Waiting,
            drawn_by: None,
            attempts: 0,
            failures: FailureBudget::default(),
            refusals: WorkerRefusals::default(),
            pause_until: None,
            wait_until: None,
            unplaceable_at: None,
            moving: None,
            moves: MoveHistory::default(),
            overtaken: 0,
            on_miss: OnSloMiss::Reject,
            awaits_start: false,
            downgrades: 0,
            charged: 0,
            due: None,
            forecast: None,
            timestamps: FlightTimestamps::default(),
        }
    }

    /// Whether its client has a token, as of the last count.
    pub(crate) fn has_output(&self) -> bool {
        !self.request.generated.is_empty()
    }

    pub(crate) fn stage(&self) -> &FlightPhase {
        &self.stage
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.stage == FlightPhase::Waiting
    }

    /// The move to another decode worker.
    pub(crate) fn moving(&self) -> Option<&FlightMigration> {
        self.moving.as_ref()
    }

    pub(crate) fn attempt(&self) -> Option<&FlightAttempt> {
        match &self.stage {
            FlightPhase::Waiting | FlightPhase::CountingTokens(_) => None,
            FlightPhase::Flying(attempt) => Some(attempt),
        }
    }

    /// The attempt under way, if it is this one.
    pub(crate) fn attempt_mut(&mut self, handoff: HandoffId) -> Option<&mut FlightAttempt> {
        match &mut self.stage {
            FlightPhase::Flying(attempt) if attempt.handoff == handoff => Some(attempt),
            _ => None,
        }
    }

    /// The attempt to which it moves.
    pub(crate) fn leg(&self) -> Option<&FlightAttempt> {
        self.moving.as_ref()?.leg.as_ref()
    }

    /// The attempt to which it moves, if it is this one.
    pub(crate) fn leg_mut(&mut self, handoff: HandoffId) -> Option<&mut FlightAttempt> {
        let leg = self.moving.as_mut()?.leg.as_mut()?;
        (leg.handoff == handoff).then_some(leg)
    }

    /// The current attempt or the one to which it moves, if it is this one.
    pub(crate) fn either_mut(&mut self, handoff: HandoffId) -> Option<&mut FlightAttempt> {
        let leg = self.moving.as_mut().and_then(|m| m.leg.as_mut());
        let current = match &mut self.stage {
            FlightPhase::Flying(attempt) => Some(attempt),
            FlightPhase::Waiting | FlightPhase::CountingTokens(_) => None,
        };
        current
            .into_iter()
            .chain(leg)
            .find(|a| a.handoff == handoff)
    }

    /// Assigns the next attempt's name.
    pub(crate) fn name_attempt(&mut self) -> HandoffId {
        self.attempts += 1;
        self.last_attempt()
    }

    /// The name of the last attempt that was begun.
    pub(crate) fn last_attempt(&self) -> HandoffId {
        HandoffId {
            flight: self.place.flight,
            attempt: self.attempts - 1,
        }
    }

    /// Number of attempts that were begun.
    pub(crate) fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Whether it may not be placed yet.
    pub(crate) fn pauses(&self, now: Time) -> bool {
        self.pause_until.is_some_and(|until| until > now)
    }

    /// How the sequence ended, once its last token and the sender's last token have passed to the
    /// client. Both reports imply that every token has passed, since connections keep their order.
    pub(crate) fn done(&self) -> Option<SequenceEnd> {
        let attempt = self.attempt()?;
        attempt.finished.filter(|_| attempt.prefilled)
    }

    /// Records that the decode worker of its current attempt holds blocks for it.
    pub(crate) fn accept(&mut self, handoff: HandoffId) {
        if let Some(attempt) = self.attempt_mut(handoff) {
            attempt.reserved = true;
        }
        self.wait_until = None;
        self.refusals.accept();
    }

    /// Adds the output that its client has to the request. Returns whether that is more than
    /// before.
    pub(crate) fn extend_output(
        &mut self,
        generated: Arc<[TokenId]>,
        block_sizes: impl Iterator<Item = u32>,
    ) -> bool {
        let is_more = generated.len() > self.request.generated.len();
        if is_more {
            let request = Request {
                generated,
                ..Request::clone(&self.request)
            };
            self.content = PrefixHashes::of(&request, block_sizes);
            self.request = Arc::new(request);
        }
        is_more
    }

    pub(crate) fn cancel_stage(&self) -> CancelStage {
        match self.attempt() {
            None => CancelStage::Queued,
            Some(a) if a.landed => CancelStage::Decoding,
            Some(a) if a.prefilled => CancelStage::Sending,
            Some(a) if a.reserved => CancelStage::Prefilling,
            Some(_) => CancelStage::Reserving,
        }
    }

    /// How the sequence ended, if the client has all of it. The context limit is not in the
    /// request, and the worker that knew it may be gone.
    pub(crate) fn sequence_end(&self, context_tokens_max: u32) -> Option<SequenceEnd> {
        let output = &self.request.generated;
        let reason = self.request.finish_reason(output, context_tokens_max)?;
        Some(SequenceEnd {
            reason,
            output_tokens: output.len() as u32,
        })
    }

    /// Asserts that the parts of the record agree, whatever the fleet and the queue are.
    fn check(&self) {
        let id = self.place.flight;
        self.failures.check();
        self.refusals.check();
        self.moves.check();
        if let FlightPhase::CountingTokens(failed) = &self.stage {
            assert_eq!(
                failed.fence,
                self.last_attempt(),
                "{id} is fenced below its last attempt"
            );
        }
        assert!(
            self.moving.is_none() || self.attempt().is_some(),
            "{id} moves without a current attempt"
        );
        let Some((attempt, leg)) = self.attempt().zip(self.leg()) else {
            return;
        };
        let to = leg.handoff;
        assert!(
            attempt.landed && attempt.prefilled,
            "{to} moves before its source runs"
        );
        assert_eq!(leg.of, Some(attempt.handoff), "{to} moves from elsewhere");
        assert_eq!(leg.prefill, attempt.decode, "{to} moves from elsewhere");
        assert_ne!(
            leg.decode, attempt.decode,
            "{to} moves to the worker that it leaves"
        );
        assert!(!leg.landed, "{to} landed and is not the flight's attempt");
    }
}
