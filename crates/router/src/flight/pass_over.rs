//! A worker that does not take its leg: it refuses, or does not answer.
//!
//! Owns: passing over it, and the choice to try another, to wait or to refuse. Never: counts this
//! as a failure of the flight, unless the worker drew a token.
//! Invariant: after an order to run both legs that was not answered, no other attempt begins before
//! that one is fenced.

use crate::event::RouterNote;
use crate::flight::legs::LegRules;
use crate::flight::refusals::{is_final, refused_late};
use crate::flight::resume::FlightRecovery;
use crate::flight::timers::FlightTimer;
use crate::placement::candidates::ChosenPlacement;
use cleave_domain::{Failure, FlightId, HandoffId, Refusal, WorkerRef};
use std::time::Duration;

impl FlightRecovery<'_> {
    /// Passes over a worker that does not take its leg: another may. After a refusal nothing was
    /// drawn. A worker that was ordered to run both legs and gives no answer may have drawn tokens,
    /// so the attempt is fenced first.
    pub(crate) fn pass_over(
        &mut self,
        handoff: HandoffId,
        worker: WorkerRef,
        refusal: Option<Refusal>,
    ) {
        let id = handoff.flight;
        let legs = self.legs();
        // No answer at all: the worker is not counted as able to serve until it answers again.
        if refusal.is_none() {
            legs.fleet.set_silent(worker, true);
        }
        let attempt = legs.flights.current(handoff);
        let attempt = attempt.filter(|a| refusal.is_none() && a.is_whole());
        let unanswered = attempt.cloned();
        legs.clock_lost(id);
        legs.drop_legs(id, Failure::Rejected);
        legs.note(RouterNote::PassedOver {
            handoff,
            worker,
            refusal: refusal.clone(),
        });
        match unanswered {
            Some(attempt) => {
                legs.flights.set_timer(id, FlightTimer::StepTimeout, None);
                self.fence(&attempt, None, Some(worker));
            }
            None => self.try_another(id, worker, refusal),
        }
    }

    /// A worker that was passed over for want of an answer drew tokens that its client has: the
    /// attempt counts as failed, since a flight with output is never refused.
    pub(crate) fn drew_unanswered(&mut self, id: FlightId, worker: WorkerRef) {
        let shared = self.is_loss_shared();
        let LegRules {
            context, flights, ..
        } = self.legs();
        if let Some(flight) = flights.get_mut(id) {
            let failures_max = context.limits.failures_max;
            flight
                .failures
                .count(Failure::Rejected, shared, failures_max, context.now);
            flight.refusals.exclude([worker.worker]);
            flight.wait_until = None;
        }
    }

    /// Tries the next worker for a flight of which this one drew nothing, or lets it wait.
    pub(crate) fn try_another(
        &mut self,
        id: FlightId,
        worker: WorkerRef,
        refusal: Option<Refusal>,
    ) {
        let Some(flight) = self.legs().flights.get_mut(id) else {
            return;
        };
        let fresh = flight.failures.last().is_none();
        // A refusal that any other worker would repeat is final, unless the request ran somewhere
        // before.
        if let Some(refusal) = refusal.clone().filter(|refusal| fresh && is_final(refusal)) {
            return self.admission.ends.refuse(id, refusal, Vec::new());
        }
        // The stream has a token outside the vocabulary, which every worker would refuse.
        if let Some(Refusal::OutOfVocabulary { .. }) = refusal {
            return self.admission.end_without_place(id);
        }
        let refused_late = refused_late(refusal.as_ref()).filter(|_| fresh);
        flight.refusals.refuse(worker.worker, refusal);
        let round_over = flight.refusals.is_round_over();
        let found = self.admission.seek(id);
        if let Some(placement) = found.as_ref().ok().filter(|p| p.miss().is_none())
            && !round_over
        {
            return self.admission.start(id, placement);
        }
        let considered = match &found {
            Ok(placement) => placement.considered.clone(),
            Err(_) => Vec::new(),
        };
        let missed = found.as_ref().ok().and_then(ChosenPlacement::miss);
        match missed.or(refused_late) {
            // Workers refused for lateness, or it is predicted of all that remain.
            Some(miss) => self.admission.unmet(id, miss, considered),
            None => {
                // A worker that did not even answer is closed for a moment, or the first flight of
                // the queue would be sent straight back.
                self.admission.close_worker(worker, Duration::ZERO);
                self.admission.wait(id);
            }
        }
    }
}
