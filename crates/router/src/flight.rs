//! A flight: one request on its way from submission to its one end.
//!
//! Owns: what a router remembers of a request and of the attempt under way. Never: decides.
//! Invariant: a flight either waits in the line or has an attempt under way.

use crate::line::Place;
use crate::prefix::Content;
use cleave_domain::{Failure, FinishReason, HandoffId, Request, Time, WorkerId, WorkerRef};
use std::collections::BTreeSet;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) request: Arc<Request>,
    pub(crate) content: Content,
    pub(crate) place: Place,
    pub(crate) submitted: Time,
    pub(crate) stage: Stage,
    /// The next attempt's number. Every pair of workers asked gets its own, refused ones too, so
    /// that a hand-off never means two different pairs.
    pub(crate) attempts: u32,
    /// Attempts that failed, and why the last one did.
    pub(crate) failures: u32,
    pub(crate) failure: Option<Failure>,
    /// Workers that passed since the flight last had a reservation.
    pub(crate) refusals: u32,
    /// Not to be asked in this round.
    pub(crate) excluded: BTreeSet<WorkerId>,
    /// When waiting ends; kept across refusals, so that they do not prolong it.
    pub(crate) wait_until: Option<Time>,
    /// The first token is with the client.
    pub(crate) emitted: bool,
    /// The one timer that runs for it.
    pub(crate) timer: Option<Time>,
}

#[derive(Debug)]
pub(crate) enum Stage {
    /// In the line.
    Waiting,
    /// On two workers.
    Flying(Attempt),
}

/// One hand-off, seen from the router. Reports of the two legs come over two links, in any order
/// between them; facts are therefore ticked off, not states walked through.
#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    pub(crate) handoff: HandoffId,
    pub(crate) prefill: WorkerRef,
    pub(crate) decode: WorkerRef,
    /// D holds blocks; P was told to start.
    pub(crate) reserved: bool,
    /// P drew the first token, and the client has it.
    pub(crate) prefilled: bool,
    /// What happened to one leg: fatal unless the other says that all is well.
    pub(crate) trouble: Option<Failure>,
    /// D has everything.
    pub(crate) landed: bool,
    /// The last token was produced.
    pub(crate) finished: Option<FinishReason>,
}

impl Flight {
    pub(crate) fn attempt(&self) -> Option<&Attempt> {
        match &self.stage {
            Stage::Waiting => None,
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

    /// Once the last token is known to be out and the first one to be with the client: why it
    /// stopped. Waiting for both means that every token has passed, for links keep their order.
    pub(crate) fn done(&self) -> Option<FinishReason> {
        let attempt = self.attempt()?;
        attempt.finished.filter(|_| attempt.prefilled)
    }
}
