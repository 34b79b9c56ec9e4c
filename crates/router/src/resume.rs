//! What becomes of a flight whose attempt is over too early: asked elsewhere, or resumed where its
//! client's tokens end.
//!
//! Owns: passing over, failing, counting, trying again, giving up. Never: chooses a worker.
//! Invariant: an attempt that may have drawn a token is fenced before another begins, and the new
//! one begins exactly where the client's tokens end. A flight survives `failures_max` failures that count
//! (`losses`); one whose client has every token is done, whoever was lost.

use crate::alarm::Alarm;
use crate::brain::Brain;
use crate::candidates::Placing;
use crate::event::{Note, Output};
use crate::flight::{Broken, Stage};
use crate::forecast::Miss;
use crate::policy::NoPlace;
use crate::prefix::Content;
use cleave_domain::{
    Ending, Failure, FlightId, HandoffId, Refusal, Request, TokenId, WorkerId, WorkerRef,
};
use std::sync::Arc;
use std::time::Duration;

/// Workers asked in one round before a flight waits for news.
const ROUND: u32 = 3;

impl Brain {
    // === passing over ===

    /// The worker does not take its leg: somebody else may. Nothing was drawn.
    pub(crate) fn pass_over(
        &mut self,
        handoff: HandoffId,
        worker: WorkerRef,
        refusal: Option<Refusal>,
    ) {
        let id = handoff.flight;
        // A refusal that any other worker would give too is the answer, unless the request ran somewhere before.
        let last_word = refusal.clone().filter(|refusal| match refusal {
            Refusal::TooLong { .. } | Refusal::OutOfVocabulary { .. } => true,
            Refusal::QueueFull { .. }
            | Refusal::NoBlocks { .. }
            | Refusal::NoWorker
            | Refusal::Late { .. }
            | Refusal::Draining
            | Refusal::WrongWorker => false,
        });
        let late = match &refusal {
            Some(Refusal::Late {
                aim,
                predicted,
                retry_after,
            }) => Some(Miss {
                aim: *aim,
                predicted: *predicted,
                clears: Some(*retry_after),
            }),
            _ => None,
        };
        self.clock_lost(id);
        self.drop_legs(id, Failure::Rejected);
        self.note(Note::PassedOver {
            handoff,
            worker,
            refusal: refusal.clone(),
        });
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        if let (Some(refusal), None) = (last_word, &flight.failure) {
            return self.refuse(id, refusal, Vec::new());
        }
        // One worker's state, or a mistake of this router about it, is no answer of the fleet.
        let answers =
            refusal.filter(|refusal| !matches!(refusal, Refusal::Draining | Refusal::WrongWorker));
        flight.refused = answers.or(flight.refused.take());
        flight.refusals += 1;
        flight.excluded.insert(worker.worker);
        if late.is_some() {
            flight.late.insert(worker.worker);
        }
        let round_over = flight.refusals >= ROUND;
        let told = flight.failure.is_none().then_some(late).flatten();
        let found = self.seek(id);
        if let Some(placing) = found.as_ref().ok().filter(|p| p.miss().is_none())
            && !round_over
        {
            return self.start(id, placing);
        }
        let considered = match &found {
            Ok(placing) => placing.considered.clone(),
            Err(_) => Vec::new(),
        };
        let missed = found.as_ref().ok().and_then(Placing::miss);
        match missed.or(told) {
            // Workers said so, or it is predicted of all that remain.
            Some(miss) => self.unmet(id, miss, considered),
            None => {
                // Whoever did not even answer is left alone for a moment, or the line's head
                // would be sent straight back.
                self.shut(worker, Duration::ZERO);
                self.wait(id);
            }
        }
    }

    // === failing ===

    /// The prefill worker cannot go on. If the decode worker has everything that does not matter,
    /// and while it may have, it is given a moment to say so.
    pub(crate) fn prefill_gone(&mut self, handoff: HandoffId, failure: Failure, who: WorkerRef) {
        let Some(attempt) = self.current(handoff) else {
            return;
        };
        if !attempt.prefilled {
            self.fail(handoff, failure, who);
        } else if !attempt.landed {
            self.trouble(handoff, failure);
        }
    }

    /// The decode worker cannot go on. If the sequence stands sealed on its way to another, that one
    /// may have it, and is given a moment to say so.
    pub(crate) fn decode_gone(&mut self, handoff: HandoffId, failure: Failure, who: WorkerRef) {
        if self.is_sealed(handoff.flight) {
            self.trouble(handoff, failure);
        } else {
            self.fail(handoff, failure, who);
        }
    }

    /// One leg cannot go on, and what the other says next decides. It is given a moment.
    pub(crate) fn trouble(&mut self, handoff: HandoffId, failure: Failure) {
        let until = self.now + self.limits.reserve_timeout;
        let flight = self.flights.get_mut(&handoff.flight);
        let attempt = flight.and_then(|f| f.attempt_mut(handoff));
        if let Some(attempt) = attempt.filter(|a| a.trouble.is_none()) {
            attempt.trouble = Some(failure);
            self.alarms.set(handoff.flight, Alarm::Step, Some(until));
        }
    }

    /// The attempt is over, and with it a move that began from it. `worker` is whom to avoid next
    /// time.
    pub(crate) fn fail(&mut self, handoff: HandoffId, failure: Failure, worker: WorkerRef) {
        let id = handoff.flight;
        let Some(attempt) = self.current(handoff) else {
            return;
        };
        let ordered = attempt.reserved;
        let context_tokens_max = attempt.context_tokens_max;
        let other = match attempt.decode == worker {
            true => attempt.prefill.worker,
            false => attempt.decode.worker,
        };
        let link = failure == Failure::LinkLost && !attempt.landed && other != worker.worker;
        let doubtful = link.then_some(other);
        // While a count is out its answer must not pass for the fence's.
        let flight = self.flights.get_mut(&id);
        if let Some(flight) = flight.filter(|f| f.moving.as_ref().is_some_and(|m| m.leg.is_none()))
        {
            flight.name_attempt();
        }
        self.clock_lost(id);
        self.drop_legs(id, failure.clone());
        self.alarms.set(id, Alarm::Step, None);
        self.alarms.set(id, Alarm::Pause, None);
        self.alarms.set(id, Alarm::Retry, None);
        self.rescued.remove(&id);
        self.count_failure(id, failure);
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.excluded.insert(worker.worker);
        flight.excluded.extend(doubtful);
        flight.avoided.clear();
        flight.stays = 0;
        flight.wait_until = None;
        if !ordered {
            return self.try_again(id, handoff, None);
        }
        let fence = HandoffId {
            flight: id,
            attempt: flight.attempts - 1,
        };
        flight.stage = Stage::Counting(Broken {
            handoff,
            fence,
            doubtful,
            context_tokens_max,
        });
        self.counting += 1;
        self.say(Output::Fence { handoff: fence });
    }

    // === resuming ===

    /// What the client has; an answer to a question that is no longer asked is out of date.
    pub(crate) fn counted(&mut self, handoff: HandoffId, generated: Arc<[TokenId]>) {
        let Some(flight) = self.flights.get(&handoff.flight) else {
            return;
        };
        match (&flight.stage, &flight.moving) {
            (Stage::Counting(broken), _) if broken.fence == handoff => {
                let broken = *broken;
                self.given(handoff.flight, generated);
                self.resume(handoff.flight, broken);
            }
            (_, Some(moving)) if moving.handoff == handoff && moving.leg.is_none() => {
                self.given(handoff.flight, generated);
                self.depart(handoff.flight);
            }
            _ => {}
        }
    }

    fn given(&mut self, id: FlightId, generated: Arc<[TokenId]>) {
        let sizes: Vec<u32> = self.fleet.block_sizes().collect();
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        if generated.len() > flight.request.generated.len() {
            let request = Request {
                generated,
                ..Request::clone(&flight.request)
            };
            flight.content = Content::of(&request, sizes.into_iter());
            flight.request = Arc::new(request);
        }
    }

    fn resume(&mut self, id: FlightId, broken: Broken) {
        self.counting -= 1;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.stage = Stage::Waiting;
        if !flight.given() {
            flight.clock.first = None;
        }
        if let Some(finish) = flight.over(broken.context_tokens_max) {
            self.done(id, finish);
        } else {
            self.try_again(id, broken.handoff, broken.doubtful);
        }
        self.rescue();
    }

    /// A new attempt after one that failed.
    fn try_again(&mut self, id: FlightId, handoff: HandoffId, doubtful: Option<WorkerId>) {
        let failures_max = self.limits.failures_max;
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let spent = flight.failures_counted() > failures_max;
        let failure = flight.failure.clone().filter(|_| !spent);
        let generated_tokens = flight.request.generated.len() as u32;
        let Some(failure) = failure else {
            return self.give_up(id);
        };
        let pause = self.pause_for(flight, &failure);
        self.note(Note::Retried {
            handoff,
            failure,
            generated_tokens,
        });
        if let Some(until) = pause {
            return self.pause(id, until);
        }
        let mut choice = self.find(id);
        if let (Err(_), Some(doubtful)) = (&choice, doubtful) {
            self.reconsider(id, |worker| worker != doubtful);
            choice = self.find(id);
        }
        if choice.is_err() {
            // Nobody else is there: the one that failed is better than none.
            self.reconsider(id, |_| false);
            choice = self.seek(id);
        }
        match choice {
            Ok(placing) => self.start(id, &placing),
            Err(NoPlace::NoWorker | NoPlace::TooLong { .. } | NoPlace::Busy) => self.wait(id),
        }
    }

    /// Lets the flight be placed again on workers that failed it, but for those to `keep` excluded.
    pub(crate) fn reconsider(&mut self, id: FlightId, keep: impl Fn(WorkerId) -> bool) {
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.excluded.retain(|worker| keep(*worker));
        }
    }

    /// There is no place for the flight: refused if it is untouched, failed if it was tried. One that
    /// only waited too long after a failure had retries left: its last failure is the reason.
    pub(crate) fn give_up(&mut self, id: FlightId) {
        let retry_after = self.retry_after();
        let exists = !matches!(self.find(id), Err(NoPlace::NoWorker));
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let failure = match &flight.failure {
            Some(last) if flight.failures_counted() > self.limits.failures_max => {
                Failure::RetriesSpent(Box::new(last.clone()))
            }
            Some(last) => last.clone(),
            None if exists => {
                let refusal = unplaced(flight.refused.as_ref(), retry_after);
                return self.refuse(id, refusal, Vec::new());
            }
            None => return self.refuse(id, Refusal::NoWorker, Vec::new()),
        };
        self.end(id, Ending::Failed(failure));
    }

    /// The flight has waited long enough for whatever it waits for.
    pub(crate) fn timed_out(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let attempt = match &flight.stage {
            Stage::Waiting => return self.waited_out(id),
            Stage::Counting(_) => return,
            Stage::Flying(attempt) => attempt,
        };
        let (handoff, decode, prefill) = (attempt.handoff, attempt.decode, attempt.prefill);
        if !attempt.reserved {
            self.pass_over(handoff, decode, None);
        } else if let Some(failure) = attempt.trouble.clone() {
            let silent = flight.leg().map_or(prefill, |leg| leg.decode);
            self.fail(handoff, failure, silent);
        } else if let Some(leg) = flight.leg().filter(|leg| !leg.reserved) {
            let (handoff, worker) = (leg.handoff, leg.decode);
            self.note(Note::PassedOver {
                handoff,
                worker,
                refusal: None,
            });
            self.move_over(id, Failure::Rejected);
        }
    }
}

/// The answer to a request that waited for room in vain, by the last refusal of a worker: a queue was
/// full only if none of the workers said otherwise.
fn unplaced(refused: Option<&Refusal>, retry_after: Duration) -> Refusal {
    match refused {
        Some(Refusal::NoBlocks { .. }) => Refusal::NoBlocks { retry_after },
        Some(
            other @ (Refusal::TooLong { .. }
            | Refusal::OutOfVocabulary { .. }
            | Refusal::NoWorker
            | Refusal::Draining
            | Refusal::WrongWorker),
        ) => other.clone(),
        None | Some(Refusal::QueueFull { .. } | Refusal::Late { .. }) => {
            Refusal::QueueFull { retry_after }
        }
    }
}
