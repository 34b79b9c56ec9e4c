//! A flight whose attempt ended too early: it is resumed after its client's last token.
//!
//! Owns: failing, counting, retrying, giving up. Never: chooses a worker.
//! Invariant: an attempt that may have drawn a token is fenced before another begins, and the new
//! one begins exactly after the client's last token. A flight survives `failures_max` failures that
//! count (`losses`); one whose client has every token is done, whichever worker was lost.

use crate::event::{RouterNote, RouterOutput};
use crate::flight::legs::LegRules;
use crate::flight::losses::RecentLosses;
use crate::flight::state::{FailedAttempt, FlightAttempt};
use crate::flight::timers::FlightTimer;
use crate::placement::admit::FlightAdmission;
use crate::placement::policy::NoPlacement;
use cleave_domain::{Ending, Failure, FlightId, HandoffId, Time, TokenId, WorkerId, WorkerRef};
use std::sync::Arc;

/// The rules of recovery, over admission and the recent losses.
#[derive(Debug)]
pub(crate) struct FlightRecovery<'a> {
    pub(crate) admission: FlightAdmission<'a>,
    pub(crate) losses: &'a mut RecentLosses,
}

impl<'a> FlightRecovery<'a> {
    pub(crate) fn legs(&mut self) -> &mut LegRules<'a> {
        self.admission.legs()
    }

    // === failing ===

    /// Handles a prefill worker that cannot go on. That does not matter if the decode worker has
    /// everything, and while it may have, it is given a moment to report it.
    pub(crate) fn prefill_lost(&mut self, handoff: HandoffId, failure: Failure, worker: WorkerRef) {
        let Some(attempt) = self.legs().flights.current(handoff) else {
            return;
        };
        if !attempt.prefilled {
            self.fail(handoff, failure, worker);
        } else if !attempt.landed {
            self.trouble(handoff, failure);
        }
    }

    /// Handles a decode worker that cannot go on. If the sequence is sealed on its way to another,
    /// that one may have it, and is given a moment to report it.
    pub(crate) fn decode_lost(&mut self, handoff: HandoffId, failure: Failure, worker: WorkerRef) {
        if self.legs().flights.is_sealed(handoff.flight) {
            self.trouble(handoff, failure);
        } else {
            self.fail(handoff, failure, worker);
        }
    }

    /// Records that one leg cannot go on; the next report of the other one decides, within a time
    /// limit.
    pub(crate) fn trouble(&mut self, handoff: HandoffId, failure: Failure) {
        let LegRules {
            context, flights, ..
        } = self.legs();
        let until = context.now + context.limits.reserve_timeout;
        let flight = flights.get_mut(handoff.flight);
        let attempt = flight.and_then(|f| f.attempt_mut(handoff));
        if let Some(attempt) = attempt.filter(|a| a.leg_failure.is_none()) {
            attempt.leg_failure = Some(failure);
            flights.set_timer(handoff.flight, FlightTimer::StepTimeout, Some(until));
        }
    }

    /// Ends the attempt, and with it a move that began from it. `worker` is avoided by the next
    /// one, unless the request itself is the reason of the failure: then the flight ends.
    pub(crate) fn fail(&mut self, handoff: HandoffId, failure: Failure, worker: WorkerRef) {
        let id = handoff.flight;
        let shared = self.is_loss_shared();
        let legs = self.legs();
        let Some(attempt) = legs.flights.current(handoff) else {
            return;
        };
        let failed = attempt.clone();
        let other = if attempt.decode == worker {
            attempt.prefill.worker
        } else {
            attempt.decode.worker
        };
        // Either end of a broken link may be at fault, so both are avoided if others are there.
        let link = failure == Failure::LinkLost && !attempt.landed && other != worker.worker;
        let doubtful = link.then_some(other);
        // The answer to an earlier count must not be mistaken for the fence's.
        let flight = legs.flights.get_mut(id);
        if let Some(flight) = flight.filter(|f| f.moving().is_some_and(|m| m.leg.is_none())) {
            flight.name_attempt();
        }
        legs.clock_lost(id);
        legs.drop_legs(id, failure.clone());
        for timer in [
            FlightTimer::StepTimeout,
            FlightTimer::MoveBackoff,
            FlightTimer::RetryDelay,
        ] {
            legs.flights.set_timer(id, timer, None);
        }
        legs.flights.end_fail_over(id);
        if matches!(failure, Failure::Constraint(_)) {
            return self.admission.ends.end(id, Ending::Failed(failure));
        }
        let (now, failures_max) = (legs.context.now, legs.context.limits.failures_max);
        let Some(flight) = legs.flights.get_mut(id) else {
            return;
        };
        flight.failures.count(failure, shared, failures_max, now);
        flight.refusals.exclude([worker.worker]);
        flight.refusals.exclude(doubtful);
        flight.moves.forget_aborted();
        flight.wait_until = None;
        // Nothing was ordered to compute, so no token can exist: no fence is needed.
        if !failed.may_have_drawn() {
            return self.try_again(id, handoff, None);
        }
        self.fence(&failed, doubtful, None);
    }

    /// Fences every attempt up to the last one begun, and asks for the client's tokens.
    pub(crate) fn fence(
        &mut self,
        over: &FlightAttempt,
        peer_in_doubt: Option<WorkerId>,
        unanswered_by: Option<WorkerRef>,
    ) {
        let handoff = over.handoff;
        let legs = self.legs();
        let Some(flight) = legs.flights.get(handoff.flight) else {
            return;
        };
        let fence = flight.last_attempt();
        legs.flights.fence(FailedAttempt {
            handoff,
            fence,
            peer_in_doubt,
            context_tokens_max: over.context_tokens_max,
            unanswered_by,
        });
        legs.context.emit(RouterOutput::Fence { handoff: fence });
    }

    pub(crate) fn is_loss_shared(&mut self) -> bool {
        let context = &self.admission.ends.legs.context;
        self.losses
            .is_shared(context.now, context.limits.losses_together)
    }

    /// Records a lost worker. If another one was lost just before, flights that failed by that are
    /// excused.
    pub(crate) fn count_loss(&mut self, worker: WorkerId) {
        let LegRules {
            context, flights, ..
        } = &mut self.admission.ends.legs;
        let (now, limits) = (context.now, context.limits);
        self.losses.record(worker, now, limits.losses_together);
        if self.losses.is_shared(now, limits.losses_together) {
            for flight in flights.values_mut() {
                flight.failures.excuse_loss(now, limits);
            }
        }
    }

    // === resuming ===

    /// Goes on after the fence of an attempt, whose tokens the client has now.
    pub(crate) fn resume(&mut self, mut failed: FailedAttempt, generated: Arc<[TokenId]>) {
        let id = failed.handoff.flight;
        let LegRules { flights, fleet, .. } = self.legs();
        flights.set_waiting(id);
        let Some(flight) = flights.get_mut(id) else {
            return;
        };
        let drew = flight.extend_output(generated, fleet.block_sizes());
        let unanswered_by = failed.unanswered_by.take_if(|_| drew);
        if !flight.has_output() {
            flight.timestamps.first = None;
        }
        let finish = flight.sequence_end(failed.context_tokens_max);
        if let Some(worker) = unanswered_by {
            self.drew_unanswered(id, worker);
        }
        if let Some(finish) = finish {
            self.admission.ends.finish(id, finish);
        } else if let Some(worker) = failed.unanswered_by {
            self.try_another(id, worker, None);
        } else {
            self.try_again(id, failed.handoff, failed.peer_in_doubt);
        }
        self.fail_over_stuck();
    }

    /// Begins a new attempt after one that failed, or gives up.
    fn try_again(&mut self, id: FlightId, handoff: HandoffId, doubtful: Option<WorkerId>) {
        let shared = self.is_loss_shared();
        let legs = self.legs();
        let (now, limits) = (legs.context.now, legs.context.limits);
        let Some(flight) = legs.flights.get(id) else {
            return;
        };
        let spent = flight.failures.counted() > limits.failures_max;
        let failure = flight.failures.last().filter(|_| !spent).cloned();
        let generated_tokens = flight.request.generated.len() as u32;
        let Some(failure) = failure else {
            return self.admission.end_without_place(id);
        };
        let pause = flight.failures.retry_pause(shared, limits);
        legs.note(RouterNote::Retried {
            handoff,
            failure,
            generated_tokens,
        });
        if let Some(pause) = pause {
            return self.pause(id, now + pause);
        }
        // First without the failed worker and the one in doubt, then with the latter, then with
        // any.
        let mut choice = self.admission.find(id);
        if let (Err(_), Some(doubtful)) = (&choice, doubtful) {
            self.reconsider(id, |worker| worker != doubtful);
            choice = self.admission.find(id);
        }
        if choice.is_err() {
            // No other worker can take it: the one that failed is better than none.
            self.reconsider(id, |_| false);
            choice = self.admission.seek(id);
        }
        match choice {
            Ok(placement) => self.admission.start(id, &placement),
            Err(NoPlacement::NoWorker | NoPlacement::TooLong { .. } | NoPlacement::Busy) => {
                self.admission.wait(id)
            }
        }
    }

    /// Allows workers that failed the flight again, except those for which `keep` holds.
    fn reconsider(&mut self, id: FlightId, keep: impl Fn(WorkerId) -> bool) {
        if let Some(flight) = self.legs().flights.get_mut(id) {
            flight.refusals.reconsider(keep);
        }
    }

    /// Puts a flight into the queue, where it is not placed before `until`.
    fn pause(&mut self, id: FlightId, until: Time) {
        let flights = &mut self.legs().flights;
        if let Some(flight) = flights.get_mut(id) {
            flight.pause_until = Some(until);
        }
        flights.set_timer(id, FlightTimer::RetryDelay, Some(until));
        self.admission.wait(id);
    }

    /// Ends the pause of a waiting flight. The workers that failed it are tried again only if no
    /// other has room now.
    pub(crate) fn pause_over(&mut self, id: FlightId) {
        let flights = &mut self.legs().flights;
        if let Some(flight) = flights.get_mut(id) {
            flight.pause_until = None;
        }
        if !flights.is_waiting(id) {
            return;
        }
        if self.admission.find(id).is_err() {
            self.reconsider(id, |_| false);
        }
        self.admission.serve_queue();
        // The queue placed others first: from now on any worker will do.
        if self.legs().flights.is_waiting(id) {
            self.reconsider(id, |_| false);
        }
    }
}
