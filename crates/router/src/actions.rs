//! The outputs of a router's brain as methods, so that no two bodies list them on their own.
//!
//! Owns: the only `match` over all of [`RouterOutput`] that performs them. Never: performs one;
//! bodies do. Invariant: an output that is added here fails to compile until every body performs
//! it.

use crate::{RouterNote, RouterOutput, RouterReadiness};
use cleave_domain::{Ending, FlightId, HandoffId, Order, RequestStageTimes, WorkerRef};
use cleave_planner::scaling::ScalerDecision;

/// A body: it performs the outputs of a router's brain. [`RouterOutput`] says what each asks for.
pub trait RouterActions {
    /// The result of performing one output, such as `()`.
    type Outcome;

    fn order(&mut self, worker: WorkerRef, order: Order) -> Self::Outcome;
    fn fence(&mut self, handoff: HandoffId) -> Self::Outcome;
    fn count(&mut self, handoff: HandoffId) -> Self::Outcome;
    fn end(
        &mut self,
        flight: FlightId,
        ending: Ending,
        output_tokens: Option<u32>,
        timing: RequestStageTimes,
    ) -> Self::Outcome;
    fn drained(&mut self) -> Self::Outcome;
    fn readiness(&mut self, readiness: RouterReadiness) -> Self::Outcome;
    fn workers_wanted(&mut self, decision: ScalerDecision) -> Self::Outcome;
    fn note(&mut self, note: RouterNote) -> Self::Outcome;
}

impl RouterOutput {
    /// Has the body perform this output.
    pub fn perform<A: RouterActions>(self, body: &mut A) -> A::Outcome {
        match self {
            Self::Order { worker, order } => body.order(worker, order),
            Self::Fence { handoff } => body.fence(handoff),
            Self::Count { handoff } => body.count(handoff),
            Self::End {
                flight,
                ending,
                output_tokens,
                timing,
            } => body.end(flight, ending, output_tokens, timing),
            Self::Drained => body.drained(),
            Self::Readiness(readiness) => body.readiness(readiness),
            Self::WorkersWanted(decision) => body.workers_wanted(decision),
            Self::Note(note) => body.note(note),
        }
    }
}
