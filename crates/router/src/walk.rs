//! A flight's way: what each fact about a worker or a leg means for it.
//!
//! Owns: the order of orders. Reserve on D, then prefill on P, then facts only. Never: chooses a
//! worker. Invariant: a leg that was told of a hand-off is told to cancel it, or has said that it
//! is over, before the router forgets it; what a leg holds is counted until it says `Released`.
//!
//! Before the first token is with the client an attempt that fails is tried again elsewhere. After
//! it the flight fails; that is the place where a stream will be resumed.

use crate::brain::Brain;
use crate::event::Note;
use crate::flight::{Attempt, Stage};
use crate::ledger::Promise;
use crate::policy::NoPlace;
use cleave_domain::{
    BlockRef, Ending, Failure, FinishReason, FlightId, HandoffId, Order, Prefill, Refusal, Report,
    Target, WorkerDescription, WorkerRef,
};
use std::sync::Arc;
use std::time::Duration;

/// Workers asked in one round before a flight waits for news.
const ROUND: u32 = 3;

/// How a leg is let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parting {
    /// It must be told.
    Cancel,
    /// It knows: it said so itself, and will say `Released`.
    Known,
}

/// What came of a reservation.
#[derive(Debug)]
struct Held {
    present: u32,
    blocks: Vec<BlockRef>,
}

impl Brain {
    // === workers come and go ===

    pub(crate) fn joined(&mut self, worker: WorkerRef, description: WorkerDescription) {
        self.forget(worker);
        self.fleet.join(worker, description);
        self.serve_line();
    }

    pub(crate) fn lost(&mut self, worker: WorkerRef) {
        if self.fleet.get(worker).is_none() {
            self.note(Note::Stale { worker });
            return;
        }
        self.forget(worker);
    }

    /// Whatever life of the worker is known is over, and with it all it held.
    fn forget(&mut self, worker: WorkerRef) {
        let held = self.fleet.leave(worker.worker);
        for handoff in held {
            self.leg_closed(handoff.flight);
            let Some(attempt) = self.current(handoff) else {
                continue;
            };
            if attempt.decode.worker == worker.worker {
                self.fail(handoff, Failure::WorkerLost, worker);
            } else {
                self.prefill_gone(handoff, Failure::WorkerLost, worker);
            }
        }
    }

    // === reports ===

    pub(crate) fn told(&mut self, worker: WorkerRef, report: Report) {
        if self.fleet.get(worker).is_none() {
            self.note(Note::Stale { worker });
            return;
        }
        match report {
            Report::Load(_) => {
                self.fleet.hear(worker, &report);
                self.news_of(worker);
            }
            Report::Prefix { .. } => self.fleet.hear(worker, &report),
            Report::Draining => self.fleet.drain(worker),
            Report::Reserved {
                handoff,
                present,
                blocks,
            } => self.reserved(worker, handoff, Held { present, blocks }),
            Report::Refused { handoff, refusal } => self.refused(worker, handoff, refusal),
            Report::Prefilled { handoff } => self.prefilled(worker, handoff),
            Report::Landed { handoff } => self.landed(worker, handoff),
            Report::Finished {
                handoff, reason, ..
            } => self.finished(worker, handoff, reason),
            Report::LegFailed { handoff, failure } => self.leg_failed(worker, handoff, failure),
            Report::Released { handoff } => self.released(worker, handoff),
            Report::Stayed { .. } | Report::Crowded { .. } | Report::Serves { .. } => {}
        }
    }

    fn reserved(&mut self, worker: WorkerRef, handoff: HandoffId, held: Held) {
        self.fleet.change(worker, handoff, |p| p.answered = true);
        let Some(flight) = self.flights.get_mut(&handoff.flight) else {
            return self.note(Note::Stale { worker });
        };
        let request = Arc::clone(&flight.request);
        let waited = self.now.since(flight.submitted);
        let asked = |a: &&mut Attempt| a.decode == worker && !a.reserved;
        let Some(attempt) = flight.attempt_mut(handoff).filter(asked) else {
            return self.note(Note::Stale { worker });
        };
        attempt.reserved = true;
        let sender = attempt.prefill;
        flight.wait_until = None;
        flight.refusals = 0;
        flight.excluded.clear();
        self.set_timer(handoff.flight, None);
        self.fleet.change(sender, handoff, |p| p.told = true);
        let target = Target {
            worker,
            present: held.present,
            blocks: held.blocks,
        };
        let prefill = Prefill {
            handoff,
            request,
            target,
            waited,
        };
        self.tell(sender, Order::Prefill(prefill));
    }

    fn prefilled(&mut self, worker: WorkerRef, handoff: HandoffId) {
        self.fleet.change(worker, handoff, |p| {
            p.tokens = 0;
            p.answered = true;
        });
        let Some(flight) = self.flights.get_mut(&handoff.flight) else {
            return self.note(Note::Stale { worker });
        };
        // The token went to the client before this report, whichever attempt drew it.
        flight.emitted = true;
        let ran = |a: &&mut Attempt| a.reserved && a.prefill == worker;
        let Some(attempt) = flight.attempt_mut(handoff).filter(ran) else {
            return self.note(Note::Stale { worker });
        };
        attempt.prefilled = true;
        self.finish_if_done(handoff.flight);
        self.news_of(worker);
    }

    fn landed(&mut self, worker: WorkerRef, handoff: HandoffId) {
        // Released is a worker's last word: what it says after that is not so.
        let holds = self.fleet.promised(worker, handoff).is_some();
        let here = |a: &&mut Attempt| holds && a.reserved && a.decode == worker;
        let attempt = self
            .flights
            .get_mut(&handoff.flight)
            .and_then(|flight| flight.attempt_mut(handoff))
            .filter(here);
        let Some(attempt) = attempt else {
            return self.note(Note::Stale { worker });
        };
        attempt.landed = true;
        let sender = attempt.prefill;
        // A prefill worker that went away may have left a timer.
        self.set_timer(handoff.flight, None);
        // The receiver tells the sender too, but if that is lost nobody else would.
        if sender != worker {
            self.part(sender, handoff, Parting::Cancel);
        }
    }

    fn finished(&mut self, worker: WorkerRef, handoff: HandoffId, reason: FinishReason) {
        let here = |a: &&mut Attempt| a.reserved && (a.decode == worker || a.prefill == worker);
        let attempt = self
            .flights
            .get_mut(&handoff.flight)
            .and_then(|flight| flight.attempt_mut(handoff))
            .filter(here);
        let Some(attempt) = attempt else {
            return self.note(Note::Stale { worker });
        };
        attempt.finished = Some(reason);
        attempt.landed = true;
        if attempt.prefill == worker {
            // Every token came through this worker's stream, the first one too.
            attempt.prefilled = true;
        }
        self.set_timer(handoff.flight, None);
        self.part(worker, handoff, Parting::Known);
        self.finish_if_done(handoff.flight);
    }

    fn finish_if_done(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        if let Some(reason) = flight.done() {
            self.drop_legs(id);
            self.end(id, Ending::Done { reason });
        }
    }

    fn leg_failed(&mut self, worker: WorkerRef, handoff: HandoffId, failure: Failure) {
        self.part(worker, handoff, Parting::Known);
        match self.current(handoff) {
            Some(attempt) if attempt.decode == worker => self.fail(handoff, failure, worker),
            Some(attempt) if attempt.prefill == worker => {
                self.prefill_gone(handoff, failure, worker);
            }
            _ => self.note(Note::Stale { worker }),
        }
    }

    fn released(&mut self, worker: WorkerRef, handoff: HandoffId) {
        if self.fleet.release(worker, handoff).is_none() {
            return self.note(Note::Stale { worker });
        }
        // Not after a refusal taken back: the same would be asked again at once.
        let ended = !self.flights.contains_key(&handoff.flight);
        if ended || self.current(handoff).is_some() {
            self.fleet.open(worker);
        }
        self.leg_closed(handoff.flight);
        // A leg that lets go without having done its part has failed, whatever it thinks. Only a
        // decode leg may know more than its router: the sender told it that the first token was
        // the last. Then the sender's own word is on its way.
        match self.current(handoff) {
            Some(a) if a.decode == worker && a.finished.is_none() => {
                if a.reserved && !a.landed && a.prefill != worker {
                    self.trouble(handoff, Failure::Rejected);
                } else {
                    self.fail(handoff, Failure::Rejected, worker);
                }
            }
            Some(a) if a.prefill == worker && !a.prefilled => {
                self.fail(handoff, Failure::Rejected, worker);
            }
            _ => {}
        }
        self.news_of(worker);
    }

    // === passing over, failing, retrying ===

    fn refused(&mut self, worker: WorkerRef, handoff: HandoffId, refusal: Refusal) {
        // A worker that holds the reservation and refuses the prompt keeps the reservation.
        let held = |p: &Promise| p.blocks > 0 && p.answered;
        let keeps = self.fleet.promised(worker, handoff).is_some_and(held);
        if !keeps && self.fleet.release(worker, handoff).is_some() {
            self.leg_closed(handoff.flight);
        }
        match &refusal {
            Refusal::QueueFull { retry_after } | Refusal::NoBlocks { retry_after } => {
                self.shut(worker, *retry_after);
            }
            Refusal::Draining => self.fleet.drain(worker),
            Refusal::TooLong { .. } | Refusal::NoWorker | Refusal::WrongWorker => {}
        }
        let concerned = self
            .current(handoff)
            .is_some_and(|a| a.decode == worker || a.prefill == worker);
        if !concerned {
            return self.note(Note::Stale { worker });
        }
        self.pass_over(handoff, worker, Some(refusal));
    }

    /// The worker does not take its leg: somebody else may.
    fn pass_over(&mut self, handoff: HandoffId, worker: WorkerRef, refusal: Option<Refusal>) {
        let id = handoff.flight;
        let too_long = match &refusal {
            Some(Refusal::TooLong { tokens_max }) => Some(*tokens_max),
            _ => None,
        };
        self.drop_legs(id);
        self.note(Note::PassedOver {
            handoff,
            worker,
            refusal,
        });
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        if let (Some(tokens_max), None) = (too_long, &flight.failure) {
            return self.end(id, Ending::Refused(Refusal::TooLong { tokens_max }));
        }
        flight.refusals += 1;
        flight.excluded.insert(worker.worker);
        let round_over = flight.refusals >= ROUND;
        match self.find(id) {
            Ok(choice) if !round_over => self.start(id, &choice),
            _ => {
                // Whoever did not even answer is left alone for a moment, or the line's head
                // would be sent straight back.
                self.shut(worker, Duration::ZERO);
                self.wait(id);
            }
        }
    }

    /// The prefill worker cannot go on. If the decode worker has everything that does not matter,
    /// and while it may have, it is given a moment to say so.
    fn prefill_gone(&mut self, handoff: HandoffId, failure: Failure, worker: WorkerRef) {
        let Some(attempt) = self.current(handoff) else {
            return;
        };
        if !attempt.prefilled {
            self.fail(handoff, failure, worker);
        } else if !attempt.landed {
            self.trouble(handoff, failure);
        }
    }

    /// One leg cannot go on, and what the other says next decides. It is given a moment.
    fn trouble(&mut self, handoff: HandoffId, failure: Failure) {
        let until = self.now + self.limits.reserve_timeout;
        let flight = self.flights.get_mut(&handoff.flight);
        if let Some(attempt) = flight.and_then(|f| f.attempt_mut(handoff)) {
            attempt.trouble = Some(failure);
            self.set_timer(handoff.flight, Some(until));
        }
    }

    /// The attempt is over. `worker` is whom to avoid next time.
    fn fail(&mut self, handoff: HandoffId, failure: Failure, worker: WorkerRef) {
        let id = handoff.flight;
        let Some(attempt) = self.current(handoff) else {
            return;
        };
        let untouched = !attempt.prefilled;
        self.drop_legs(id);
        if !untouched {
            return self.end(id, Ending::Failed(failure));
        }
        let failures_max = self.limits.failures_max;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.failures += 1;
        flight.failure = Some(failure.clone());
        flight.excluded.insert(worker.worker);
        flight.wait_until = None;
        if flight.failures > failures_max {
            return self.give_up(id);
        }
        self.note(Note::Retried {
            handoff,
            failure,
            generated_tokens: 0,
        });
        let choice = self.find(id).or_else(|_| {
            // Nobody else is there: the one that failed is better than none.
            if let Some(flight) = self.flights.get_mut(&id) {
                flight.excluded.clear();
            }
            self.find(id)
        });
        match choice {
            Ok(choice) => self.start(id, &choice),
            Err(NoPlace::NoWorker | NoPlace::TooLong { .. } | NoPlace::Busy) => self.wait(id),
        }
    }

    pub(crate) fn timed_out(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        match &flight.stage {
            Stage::Waiting => self.give_up(id),
            Stage::Flying(attempt) => {
                let (handoff, decode, prefill) = (attempt.handoff, attempt.decode, attempt.prefill);
                if attempt.reserved {
                    let failure = attempt.trouble.clone().unwrap_or(Failure::WorkerLost);
                    self.fail(handoff, failure, prefill);
                } else {
                    self.pass_over(handoff, decode, None);
                }
            }
        }
    }

    pub(crate) fn cancelled(&mut self, id: FlightId) {
        if !self.flights.contains_key(&id) {
            // It ended while the client was leaving.
            return;
        }
        self.drop_legs(id);
        if self.fleet.legs_open(id) > 0 {
            self.leaving.insert(id, self.now);
        }
        self.end(id, Ending::Cancelled);
    }

    // === legs ===

    fn current(&self, handoff: HandoffId) -> Option<&Attempt> {
        let attempt = self.flights.get(&handoff.flight)?.attempt()?;
        (attempt.handoff == handoff).then_some(attempt)
    }

    /// Lets go of both legs of the attempt under way.
    fn drop_legs(&mut self, id: FlightId) {
        let Some(attempt) = self.flights.get(&id).and_then(|f| f.attempt()) else {
            return;
        };
        let (handoff, decode, prefill) = (attempt.handoff, attempt.decode, attempt.prefill);
        self.part(decode, handoff, Parting::Cancel);
        self.part(prefill, handoff, Parting::Cancel);
    }

    fn part(&mut self, worker: WorkerRef, handoff: HandoffId, parting: Parting) {
        let Some(promise) = self.fleet.promised(worker, handoff).copied() else {
            return;
        };
        if !promise.told {
            self.fleet.release(worker, handoff);
            self.leg_closed(handoff.flight);
            return;
        }
        if promise.live {
            self.fleet.change(worker, handoff, |p| p.live = false);
            if parting == Parting::Cancel {
                self.tell(worker, Order::Cancel { handoff });
            }
        }
    }

    /// One leg less; the last one of a cancelled flight ends its leaving.
    fn leg_closed(&mut self, flight: FlightId) {
        if self.fleet.legs_open(flight) > 0 {
            return;
        }
        if let Some(since) = self.leaving.remove(&flight) {
            let took = self.now.since(since);
            self.note(Note::CancelFreed {
                flight,
                took,
                stage: crate::CancelStage::Decoding,
            });
        }
    }
}
