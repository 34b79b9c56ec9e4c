//! A flight: one request on its way from submission to its one end.
//!
//! Owns: what a router remembers of a request and of the attempts under way. Never: decides.
//! Invariant: a flight waits in the line, or has an attempt under way, or is about to be told how
//! many of its tokens the client has; beside an attempt that generates there may be a second one, to
//! which it moves.

use crate::event::{CancelStage, MoveReason};
use crate::forecast::Outlook;
use crate::line::Place;
use crate::prefix::Content;
use crate::verdict::Clock;
use cleave_domain::{
    Failure, Fingerprint, FinishReason, HandoffId, Refusal, Request, Time, Unmet, WorkerId,
    WorkerRef,
};
use std::collections::BTreeSet;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(crate) struct Flight {
    /// With what the client was given as of the last count.
    pub(crate) request: Arc<Request>,
    pub(crate) content: Content,
    pub(crate) place: Place,
    pub(crate) submitted: Time,
    pub(crate) stage: Stage,
    /// What draws its tokens since its latest attempt.
    pub(crate) drawn_by: Option<Fingerprint>,
    /// The next attempt's number. Every pair of workers asked gets its own, refused ones too, so
    /// that a hand-off never means two different pairs.
    pub(crate) attempts: u32,
    /// Attempts that failed, and why the last one did.
    pub(crate) failures: u32,
    pub(crate) failure: Option<Failure>,
    /// Of the failures, those with a cause that other flights shared: they do not count.
    pub(crate) failures_spared: u32,
    /// When its worker was lost last, unless that is spared already.
    pub(crate) lost_at: Option<Time>,
    /// While it waits: not placed before.
    pub(crate) pause_until: Option<Time>,
    /// Workers that passed since the flight last had a reservation.
    pub(crate) refusals: u32,
    /// As the last of them that said why.
    pub(crate) refused: Option<Refusal>,
    /// Not to be asked in this round.
    pub(crate) excluded: BTreeSet<WorkerId>,
    /// When waiting ends; kept across refusals, so that they do not prolong it.
    pub(crate) wait_until: Option<Time>,
    /// The fleet's turn in which no worker was large enough, or none drew as its client's tokens were
    /// drawn.
    pub(crate) homeless: Option<u64>,
    /// The way to another decode worker.
    pub(crate) moving: Option<Move>,
    /// Moves that came to nothing since the last that did not, and the workers that did not take it
    /// over: others are asked before them.
    pub(crate) stays: u32,
    pub(crate) avoided: BTreeSet<WorkerId>,
    /// Output tokens it had when it was last moved to make room.
    pub(crate) yielded_at: Option<u32>,
    /// Flights that were placed while it stood before them and found no room.
    pub(crate) overtaken: u32,
    /// Workers that could not be in time for it, by their own word, since it last waited.
    pub(crate) late: BTreeSet<WorkerId>,
    /// What becomes of it if its target cannot be met, as its class said when it came.
    pub(crate) unmet: Unmet,
    /// It came when nobody could have served it, and waited for workers that were to be started.
    pub(crate) hopes: bool,
    /// How often it became one of another class.
    pub(crate) downgrades: u32,
    /// Tokens that its tenant's account was charged for it.
    pub(crate) charged: i64,
    /// When its first token is due, if that was promised; of a resumed stream the next one.
    pub(crate) due: Option<Time>,
    /// What was predicted when it was placed last.
    pub(crate) outlook: Option<Outlook>,
    pub(crate) clock: Clock,
}

#[derive(Clone, Debug)]
pub(crate) enum Stage {
    /// In the line.
    Waiting,
    /// On two workers.
    Flying(Attempt),
    /// Its last attempt is over and fenced; a new one begins where the client's tokens end.
    Counting(Broken),
}

/// The attempt that failed last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Broken {
    pub(crate) handoff: HandoffId,
    /// As the fence named it: the last attempt ever begun.
    pub(crate) fence: HandoffId,
    /// At the other end of a link that broke: its word of it may still come, and would end the next
    /// attempt between the same two.
    pub(crate) doubtful: Option<WorkerId>,
    /// The longest sequence its decode worker could hold: there a sequence ends of its own accord.
    pub(crate) context_tokens_max: u32,
}

/// One hand-off, seen from the router. Reports of the two legs come over two links, in any order
/// between them; facts are therefore ticked off, not states walked through.
#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    pub(crate) handoff: HandoffId,
    /// Who sends: the prefill worker, or the decode worker from which the sequence moves.
    pub(crate) prefill: WorkerRef,
    pub(crate) decode: WorkerRef,
    /// The attempt under which the sender generated, if the sequence moves.
    pub(crate) of: Option<HandoffId>,
    /// The longest sequence that the decode worker can hold.
    pub(crate) context_tokens_max: u32,
    /// D holds blocks; the sender was told to start.
    pub(crate) reserved: bool,
    /// The sender drew its last token, and the client has it.
    pub(crate) prefilled: bool,
    /// What happened to one leg: fatal unless the other says that all is well.
    pub(crate) trouble: Option<Failure>,
    /// D has everything.
    pub(crate) landed: bool,
    /// The last token was produced.
    pub(crate) finished: Option<Finish>,
}

/// How a sequence ended of its own accord.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Finish {
    pub(crate) reason: FinishReason,
    /// Over its whole life.
    pub(crate) output_tokens: u32,
}

/// A running sequence on its way to another decode worker.
#[derive(Clone, Debug)]
pub(crate) struct Move {
    /// The new attempt's name.
    pub(crate) handoff: HandoffId,
    pub(crate) why: MoveReason,
    pub(crate) began: Time,
    /// The new attempt; none until the client's tokens are counted. Its sender is the decode worker
    /// of the flight's current attempt. In trouble, it is given up, and the sender's last word about
    /// it is awaited.
    pub(crate) leg: Option<Attempt>,
}

impl Attempt {
    /// The hand-off under whose name the sender holds something.
    pub(crate) fn sending(&self) -> HandoffId {
        self.of.unwrap_or(self.handoff)
    }

    /// It generates, every token of its sender has passed, and nothing is wrong with it.
    pub(crate) fn runs(&self) -> bool {
        self.landed && self.prefilled && self.finished.is_none() && self.trouble.is_none()
    }
}

impl Flight {
    /// One that was submitted now.
    pub(crate) fn new(
        place: Place,
        request: Arc<Request>,
        block_sizes: impl Iterator<Item = u32>,
        now: Time,
    ) -> Self {
        Self {
            content: Content::of(&request, block_sizes),
            request,
            place,
            submitted: now,
            stage: Stage::Waiting,
            drawn_by: None,
            attempts: 0,
            failures: 0,
            failure: None,
            failures_spared: 0,
            lost_at: None,
            pause_until: None,
            refusals: 0,
            refused: None,
            excluded: BTreeSet::new(),
            wait_until: None,
            homeless: None,
            moving: None,
            stays: 0,
            avoided: BTreeSet::new(),
            yielded_at: None,
            overtaken: 0,
            late: BTreeSet::new(),
            unmet: Unmet::Reject,
            hopes: false,
            downgrades: 0,
            charged: 0,
            due: None,
            outlook: None,
            clock: Clock::default(),
        }
    }

    /// Whether its client has a token, as of the last count.
    pub(crate) fn given(&self) -> bool {
        !self.request.generated.is_empty()
    }

    pub(crate) fn attempt(&self) -> Option<&Attempt> {
        match &self.stage {
            Stage::Waiting | Stage::Counting(_) => None,
            Stage::Flying(attempt) => Some(attempt),
        }
    }

    /// The attempt under way, if it is this one.
    pub(crate) fn attempt_mut(&mut self, handoff: HandoffId) -> Option<&mut Attempt> {
        match &mut self.stage {
            Stage::Flying(attempt) if attempt.handoff == handoff => Some(attempt),
            _ => None,
        }
    }

    /// The attempt to which it moves.
    pub(crate) fn leg(&self) -> Option<&Attempt> {
        self.moving.as_ref()?.leg.as_ref()
    }

    /// The attempt to which it moves, if it is this one.
    pub(crate) fn leg_mut(&mut self, handoff: HandoffId) -> Option<&mut Attempt> {
        let leg = self.moving.as_mut()?.leg.as_mut()?;
        (leg.handoff == handoff).then_some(leg)
    }

    /// Either of the two, if it is this one.
    pub(crate) fn either_mut(&mut self, handoff: HandoffId) -> Option<&mut Attempt> {
        let leg = self.moving.as_mut().and_then(|m| m.leg.as_mut());
        let current = match &mut self.stage {
            Stage::Flying(attempt) => Some(attempt),
            Stage::Waiting | Stage::Counting(_) => None,
        };
        current
            .into_iter()
            .chain(leg)
            .find(|a| a.handoff == handoff)
    }

    /// Gives the next attempt its name.
    pub(crate) fn name_attempt(&mut self) -> HandoffId {
        self.attempts += 1;
        HandoffId {
            flight: self.place.flight,
            attempt: self.attempts - 1,
        }
    }

    /// Once the last token is known to be out and the sender's to be with the client: how it
    /// ended. Waiting for both means that every token has passed, for links keep their order.
    pub(crate) fn done(&self) -> Option<Finish> {
        let attempt = self.attempt()?;
        attempt.finished.filter(|_| attempt.prefilled)
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

    /// How the sequence ended, if the client has all of it. A context's end is not in the request: the
    /// worker that knew it may be gone.
    pub(crate) fn over(&self, context_tokens_max: u32) -> Option<Finish> {
        let output = &self.request.generated;
        let reason = self.request.over(output, context_tokens_max)?;
        Some(Finish {
            reason,
            output_tokens: output.len() as u32,
        })
    }
}
