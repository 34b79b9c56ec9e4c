//! A flight whose attempt ended too early: it is resumed after its client's last token.
//!
//! Owns: failing, counting, retrying, giving up. Never: chooses a worker.
//! Invariant: an attempt that may have drawn a token is fenced before another begins, and the new
//! one begins exactly after the client's last token. A flight survives `failures_max` failures that
//! count (`losses`); one whose client has every token is done, whichever worker was lost.

use crate::brain::RouterBrain;
use crate::event::{RouterNote, RouterOutput};
use crate::flight::{FailedAttempt, FlightAttempt, FlightPhase};
use crate::policy::NoPlacement;
use crate::prefix::PrefixHashes;
use crate::timers::FlightTimer;
use cleave_domain::{
    Ending, Failure, FlightId, HandoffId, Refusal, Request, TokenId, WorkerId, WorkerRef,
};
use std::sync::Arc;

impl RouterBrain {
    // === failing ===

    /// Handles a prefill worker that cannot go on. That does not matter if the decode worker has
    /// everything, and while it may have, it is given a moment to report it.
    pub(crate) fn prefill_lost(&mut self, handoff: HandoffId, failure: Failure, worker: WorkerRef) {
        let Some(attempt) = self.current(handoff) else {
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
        if self.is_sealed(handoff.flight) {
            self.trouble(handoff, failure);
        } else {
            self.fail(handoff, failure, worker);
        }
    }

    /// Records that one leg cannot go on; the next report of the other one decides, within a time
    /// limit.
    pub(crate) fn trouble(&mut self, handoff: HandoffId, failure: Failure) {
        let until = self.now + self.limits.reserve_timeout;
        let flight = self.flights.get_mut(&handoff.flight);
        let attempt = flight.and_then(|f| f.attempt_mut(handoff));
        if let Some(attempt) = attempt.filter(|a| a.leg_failure.is_none()) {
            attempt.leg_failure = Some(failure);
            self.timers
                .set(handoff.flight, FlightTimer::StepTimeout, Some(until));
        }
    }

    /// Ends the attempt, and with it a move that began from it. `worker` is avoided by the next
    /// one.
    pub(crate) fn fail(&mut self, handoff: HandoffId, failure: Failure, worker: WorkerRef) {
        let id = handoff.flight;
        let Some(attempt) = self.current(handoff) else {
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
        let flight = self.flights.get_mut(&id);
        if let Some(flight) = flight.filter(|f| f.moving.as_ref().is_some_and(|m| m.leg.is_none()))
        {
            flight.name_attempt();
        }
        self.clock_lost(id);
        self.drop_legs(id, failure.clone());
        self.timers.set(id, FlightTimer::StepTimeout, None);
        self.timers.set(id, FlightTimer::MoveBackoff, None);
        self.timers.set(id, FlightTimer::RetryDelay, None);
        self.failing_over.remove(&id);
        self.count_failure(id, failure);
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.excluded.insert(worker.worker);
        flight.excluded.extend(doubtful);
        flight.avoided.clear();
        flight.moves_aborted = 0;
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
        let Some(flight) = self.flights.get_mut(&handoff.flight) else {
            return;
        };
        let fence = HandoffId {
            attempt: flight.attempts - 1,
            ..handoff
        };
        flight.stage = FlightPhase::CountingTokens(FailedAttempt {
            handoff,
            fence,
            peer_in_doubt,
            context_tokens_max: over.context_tokens_max,
            unanswered_by,
        });
        self.counting_flights += 1;
        self.emit_output(RouterOutput::Fence { handoff: fence });
    }

    // === resuming ===

    /// Handles the client's tokens; an answer that no question waits for is out of date.
    pub(crate) fn counted(&mut self, handoff: HandoffId, generated: Arc<[TokenId]>) {
        let Some(flight) = self.flights.get(&handoff.flight) else {
            return;
        };
        match (&flight.stage, &flight.moving) {
            (FlightPhase::CountingTokens(broken), _) if broken.fence == handoff => {
                let mut broken = *broken;
                if self.given(handoff.flight, generated)
                    && let Some(worker) = broken.unanswered_by.take()
                {
                    self.drew_unanswered(handoff.flight, worker);
                }
                self.resume(handoff.flight, broken);
            }
            (_, Some(moving)) if moving.handoff == handoff && moving.leg.is_none() => {
                self.given(handoff.flight, generated);
                self.depart(handoff.flight);
            }
            _ => {}
        }
    }

    /// Adds the client's tokens to the request. Returns whether it has more than before.
    fn given(&mut self, id: FlightId, generated: Arc<[TokenId]>) -> bool {
        let sizes: Vec<u32> = self.fleet.block_sizes().collect();
        let flight = self.flights.get_mut(&id);
        let Some(flight) = flight.filter(|f| generated.len() > f.request.generated.len()) else {
            return false;
        };
        let request = Request {
            generated,
            ..Request::clone(&flight.request)
        };
        flight.content = PrefixHashes::of(&request, sizes.into_iter());
        flight.request = Arc::new(request);
        true
    }

    fn resume(&mut self, id: FlightId, broken: FailedAttempt) {
        self.counting_flights -= 1;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.stage = FlightPhase::Waiting;
        if !flight.has_output() {
            flight.timestamps.first = None;
        }
        if let Some(finish) = flight.sequence_end(broken.context_tokens_max) {
            self.finish_flight(id, finish);
        } else if let Some(worker) = broken.unanswered_by {
            self.try_another(id, worker, None);
        } else {
            self.try_again(id, broken.handoff, broken.peer_in_doubt);
        }
        self.fail_over_stuck();
    }

    /// Begins a new attempt after one that failed, or gives up.
    fn try_again(&mut self, id: FlightId, handoff: HandoffId, doubtful: Option<WorkerId>) {
        let failures_max = self.limits.failures_max;
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let spent = flight.failures_counted() > failures_max;
        let failure = flight.failure.clone().filter(|_| !spent);
        let generated_tokens = flight.request.generated.len() as u32;
        let Some(failure) = failure else {
            return self.end_without_place(id);
        };
        let pause = self.pause_for(flight, &failure);
        self.note(RouterNote::Retried {
            handoff,
            failure,
            generated_tokens,
        });
        if let Some(until) = pause {
            return self.pause(id, until);
        }
        // First without the failed worker and the one in doubt, then with the latter, then with
        // any.
        let mut choice = self.find(id);
        if let (Err(_), Some(doubtful)) = (&choice, doubtful) {
            self.reconsider(id, |worker| worker != doubtful);
            choice = self.find(id);
        }
        if choice.is_err() {
            // No other worker can take it: the one that failed is better than none.
            self.reconsider(id, |_| false);
            choice = self.seek(id);
        }
        match choice {
            Ok(placement) => self.start(id, &placement),
            Err(NoPlacement::NoWorker | NoPlacement::TooLong { .. } | NoPlacement::Busy) => {
                self.wait(id)
            }
        }
    }

    /// Allows workers that failed the flight again, except those for which `keep` holds.
    pub(crate) fn reconsider(&mut self, id: FlightId, keep: impl Fn(WorkerId) -> bool) {
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.excluded.retain(|worker| keep(*worker));
        }
    }

    /// Ends a flight without a place: refused if it never ran, failed if it did. One that only
    /// waited too long after a failure had retries left, so its last failure is the reason.
    pub(crate) fn end_without_place(&mut self, id: FlightId) {
        let exists = !matches!(self.find(id), Err(NoPlacement::NoWorker));
        let full = self.full();
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let failure = match &flight.failure {
            Some(last) if flight.failures_counted() > self.limits.failures_max => {
                Failure::RetriesSpent(Box::new(last.clone()))
            }
            Some(last) => last.clone(),
            None if exists => {
                let refusal = unplaced(flight.refused.as_ref(), full);
                return self.refuse(id, refusal, Vec::new());
            }
            None => return self.refuse(id, Refusal::NoWorker, Vec::new()),
        };
        self.end(id, Ending::Failed(failure));
    }

    /// The refusal where nothing has room. Connected workers that answer nothing are not a full
    /// queue: a client that sends less would not be served either.
    pub(crate) fn full(&self) -> Refusal {
        if self.fleet.answers(self.now, self.terms()) {
            let retry_after = self.retry_after();
            Refusal::QueueFull { retry_after }
        } else {
            Refusal::NoWorker
        }
    }

    /// Handles the end of the time that the flight may wait in its present stage.
    pub(crate) fn timed_out(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let attempt = match &flight.stage {
            FlightPhase::Waiting => return self.waited_out(id),
            FlightPhase::CountingTokens(_) => return,
            FlightPhase::Flying(attempt) => attempt,
        };
        let (handoff, decode, prefill) = (attempt.handoff, attempt.decode, attempt.prefill);
        if !attempt.reserved {
            self.pass_over(handoff, decode, None);
        } else if let Some(failure) = attempt.leg_failure.clone() {
            let silent = flight.leg().map_or(prefill, |leg| leg.decode);
            self.fail(handoff, failure, silent);
        } else if let Some(leg) = flight.leg().filter(|leg| !leg.reserved) {
            let (handoff, worker) = (leg.handoff, leg.decode);
            self.fleet.set_silent(worker, true);
            self.note(RouterNote::PassedOver {
                handoff,
                worker,
                refusal: None,
            });
            self.move_over(id, Failure::Rejected);
        }
    }
}

/// The refusal of a request that waited for room in vain, by the last refusal of a worker: a queue
/// was full only if no worker gave another reason. `full` is the fleet's own answer.
fn unplaced(refused: Option<&Refusal>, full: Refusal) -> Refusal {
    match (refused, full) {
        (Some(Refusal::NoBlocks { .. }), Refusal::QueueFull { retry_after }) => {
            Refusal::NoBlocks { retry_after }
        }
        (None | Some(Refusal::QueueFull { .. } | Refusal::NoBlocks { .. }), full) => full,
        (
            Some(
                other @ (Refusal::Late { .. }
                | Refusal::TooLong { .. }
                | Refusal::OutOfVocabulary { .. }),
            ),
            _,
        ) => other.clone(),
        // The fleet is not full, and no worker serves the request: another router may know better.
        (Some(Refusal::NoWorker | Refusal::Draining | Refusal::WrongWorker), _) => {
            Refusal::NoWorker
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::SloMetric;
    use std::time::Duration;

    #[test]
    fn no_other_refusal_of_a_worker_becomes_queue_full() {
        let soon = Duration::from_secs(1);
        let full = Refusal::QueueFull { retry_after: soon };
        let late = Refusal::Late {
            aim: SloMetric::Ttft,
            predicted: soon,
            retry_after: soon,
        };
        let no_blocks = Refusal::NoBlocks { retry_after: soon };
        for (refused, answer) in [
            (full.clone(), full.clone()),
            (no_blocks.clone(), no_blocks),
            (late.clone(), late),
            (
                Refusal::TooLong { tokens_max: 7 },
                Refusal::TooLong { tokens_max: 7 },
            ),
            (
                Refusal::OutOfVocabulary { vocab_size: 9 },
                Refusal::OutOfVocabulary { vocab_size: 9 },
            ),
            (Refusal::NoWorker, Refusal::NoWorker),
            (Refusal::Draining, Refusal::NoWorker),
            (Refusal::WrongWorker, Refusal::NoWorker),
        ] {
            assert_eq!(
                unplaced(Some(&refused), full.clone()),
                answer,
                "{refused:?}"
            );
        }
        assert_eq!(unplaced(None, full.clone()), full);
    }
}
