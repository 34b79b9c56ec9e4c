//! A flight's way: what each word of a worker means for it.
//!
//! Owns: the order of orders. Reserve on D, then prefill on P (or `Migrate` on the worker it leaves),
//! then facts only. Never: chooses a worker, or decides what becomes of an attempt that is over.
//! Invariant: a fact counts only for an attempt under way, from the worker whose part it is; anything
//! else is stale, and changes nothing but the count of what that worker holds.

use crate::alarm::Alarm;
use crate::brain::Brain;
use crate::event::{Command, Note};
use crate::flight::{Attempt, Finish};
use crate::ledger::Promise;
use crate::legs::Parting;
use cleave_domain::{
    DecodeTiming, Failure, FlightId, HandoffId, Order, Prefill, PrefillTiming, Progress, Refusal,
    Report, Target, WorkerDescription, WorkerId, WorkerRef,
};
use std::sync::Arc;

impl Brain {
    // === workers come and go ===

    pub(crate) fn joined(&mut self, worker: WorkerRef, description: WorkerDescription) {
        self.forget(worker);
        self.fleet.join(worker, description);
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
        // A worker that drained and then left is no loss: nothing failed.
        let life = self.fleet.life_of(worker.worker);
        if life.is_some_and(|life| !self.fleet.has_drained(life)) {
            self.count_loss(worker.worker);
        }
        let held = self.fleet.leave(worker.worker);
        self.stop_waiting_for(worker);
        let lost = || Failure::WorkerLost;
        for handoff in held {
            self.leg_closed(handoff.flight);
            let decodes = |a: &Attempt| a.decode.worker == worker.worker;
            if self.leg(handoff).is_some_and(decodes) {
                self.move_broken(handoff, lost());
            } else if let Some(heir) = self.heir(worker, handoff) {
                self.fail(heir, lost(), worker);
            } else {
                match self.current(handoff) {
                    Some(a) if decodes(a) => self.decode_gone(handoff, lost(), worker),
                    Some(_) => self.prefill_gone(handoff, lost(), worker),
                    None => {}
                }
            }
        }
    }

    /// An operator wants something. Nothing changes here until the worker says that it does it.
    pub(crate) fn commanded(&mut self, worker: WorkerId, command: Command) {
        let Some(worker) = self.fleet.life_of(worker) else {
            return;
        };
        let order = match command {
            Command::Drain => Order::Drain,
            Command::Serve(role) => Order::Serve { role },
        };
        self.tell(worker, order);
        // What it will answer is known; whoever comes meanwhile is not sent there.
        if command == Command::Drain {
            self.drains(worker);
        }
    }

    // === reports ===

    pub(crate) fn told(&mut self, worker: WorkerRef, report: Report) {
        if self.fleet.get(worker).is_none() {
            self.note(Note::Stale { worker });
            return;
        }
        match report {
            Report::Load(load) => {
                let load = load.bounded();
                let eased = self.fleet.eased_by(worker, &load);
                self.fleet.hear(worker, &Report::Load(load));
                match load.progress {
                    Progress::Moving => self.moves_again(worker),
                    Progress::Stuck => self.stuck(worker),
                }
                self.settle_wish(worker, &load);
                if eased {
                    self.room_at(worker);
                }
            }
            Report::Prefix { .. } | Report::Prices(_) => self.fleet.hear(worker, &report),
            Report::Draining => self.drains(worker),
            Report::PassedOn(voice) => self.passed_on(voice),
            Report::Serves { role } => {
                self.fleet.serve(worker, role);
                self.evacuate_one(worker);
            }
            Report::Reserved {
                handoff,
                present,
                blocks,
            } => {
                let target = Target {
                    worker,
                    present,
                    blocks,
                };
                self.reserved(handoff, target);
            }
            Report::Refused { handoff, refusal } => self.refused(worker, handoff, refusal),
            Report::Prefilled { handoff, timing } => self.prefilled(worker, handoff, timing),
            Report::Landed { handoff } => self.landed(worker, handoff),
            Report::Stayed { handoff, failure } => self.stayed(worker, handoff, failure),
            Report::Crowded { handoff } => self.crowded(worker, handoff),
            Report::Finished {
                handoff,
                reason,
                output_tokens,
                timing,
                prefill,
            } => {
                let finish = Finish {
                    reason,
                    output_tokens,
                };
                self.finished(worker, handoff, (finish, timing, prefill));
            }
            Report::LegFailed { handoff, failure } => self.leg_failed(worker, handoff, failure),
            Report::Released { handoff } => self.released(worker, handoff),
        }
    }

    fn drains(&mut self, worker: WorkerRef) {
        self.fleet.drain(worker);
        self.evacuate_one(worker);
    }

    fn reserved(&mut self, handoff: HandoffId, target: Target) {
        let worker = target.worker;
        self.fleet.change(worker, handoff, |p| p.answered = true);
        let Some(flight) = self.flights.get_mut(&handoff.flight) else {
            return self.note(Note::Stale { worker });
        };
        let request = Arc::clone(&flight.request);
        let waited = self.now.since(flight.submitted);
        let asked = |a: &&mut Attempt| a.decode == worker && !a.reserved;
        if flight.leg_mut(handoff).filter(asked).is_some() {
            return self.move_reserved(handoff, target);
        }
        let Some(attempt) = flight.attempt_mut(handoff).filter(asked) else {
            return self.note(Note::Stale { worker });
        };
        let sender = attempt.prefill;
        // It began to leave while the other leg answered: it would refuse, and may be gone before.
        let drains = self.fleet.get(sender).is_some_and(|w| w.draining);
        if sender != worker && drains {
            return self.pass_over(handoff, sender, Some(Refusal::Draining));
        }
        attempt.reserved = true;
        flight.wait_until = None;
        // Who would be late stays out: or it would be asked again and again.
        flight.refusals = flight.late.len() as u32;
        flight.excluded.clone_from(&flight.late);
        self.alarms.set(handoff.flight, Alarm::Step, None);
        self.fleet.change(sender, handoff, |p| p.told = true);
        let due = self.due(handoff.flight);
        let prefill = Prefill {
            handoff,
            request,
            target,
            waited,
            due,
        };
        self.clock_ordered(handoff.flight);
        self.tell(sender, Order::Prefill(prefill));
    }

    fn prefilled(&mut self, worker: WorkerRef, handoff: HandoffId, timing: PrefillTiming) {
        self.fleet.prompt_done(worker, handoff);
        let ran = |a: &&mut Attempt| a.reserved && a.prefill == worker;
        let attempt = self
            .flights
            .get_mut(&handoff.flight)
            .and_then(|flight| flight.either_mut(handoff))
            .filter(ran);
        let Some(attempt) = attempt else {
            return self.note(Note::Stale { worker });
        };
        attempt.prefilled = true;
        let (decode, began) = (attempt.decode, attempt.of.is_none());
        if decode == worker {
            self.fleet.began(worker, handoff);
        }
        if began {
            self.clock_first(handoff.flight, timing);
        }
        self.finish_if_done(handoff.flight);
        self.news_of(worker);
        self.evacuate_one(decode);
    }

    fn landed(&mut self, worker: WorkerRef, handoff: HandoffId) {
        // Released is a worker's last word: what it says after that is not so.
        let holds = self.fleet.promised(worker, handoff).is_some();
        let here = |a: &Attempt| holds && a.reserved && a.decode == worker;
        let arrives = |a: &Attempt| here(a) && a.trouble.is_none();
        if self.leg(handoff).is_some_and(arrives) {
            self.moved(handoff.flight);
            return self.evacuate_one(worker);
        }
        let attempt = self
            .flights
            .get_mut(&handoff.flight)
            .and_then(|flight| flight.attempt_mut(handoff))
            .filter(|a| here(a) && !a.landed);
        let Some(attempt) = attempt else {
            return self.note(Note::Stale { worker });
        };
        attempt.landed = true;
        // A prefill worker that went away may have left a doubt, and its alarm.
        attempt.trouble = None;
        let sender = attempt.prefill;
        self.fleet.began(worker, handoff);
        if sender != worker {
            self.clock_landed(handoff.flight);
        }
        self.alarms.set(handoff.flight, Alarm::Step, None);
        // The receiver tells the sender too, but if that is lost nobody else would.
        if sender != worker {
            self.part(sender, handoff, Parting::Cancel);
        }
        self.evacuate_one(worker);
        if self.rescued.remove(&handoff.flight).is_some() {
            self.rescue();
        }
    }

    fn finished(
        &mut self,
        worker: WorkerRef,
        handoff: HandoffId,
        (finish, timing, prefill): (Finish, DecodeTiming, Option<PrefillTiming>),
    ) {
        let arrived = |a: &Attempt| a.reserved && a.decode == worker && a.trouble.is_none();
        if self.leg(handoff).is_some_and(arrived) {
            self.moved(handoff.flight);
        }
        // Who sends a running sequence finishes it under its old name.
        let here = |a: &&mut Attempt| {
            a.reserved && (a.decode == worker || (a.prefill == worker && a.of.is_none()))
        };
        let attempt = self
            .flights
            .get_mut(&handoff.flight)
            .and_then(|flight| flight.attempt_mut(handoff))
            .filter(here);
        let Some(attempt) = attempt else {
            return self.note(Note::Stale { worker });
        };
        attempt.finished = Some(finish);
        attempt.landed = true;
        attempt.trouble = None;
        if attempt.prefill == worker {
            // Every token came through this worker's stream, the first one too.
            attempt.prefilled = true;
        }
        let began = attempt.of.is_none().then_some(timing);
        if let Some(prefill) = prefill {
            self.clock_first(handoff.flight, prefill);
        }
        self.clock_last(handoff.flight, began);
        self.alarms.set(handoff.flight, Alarm::Step, None);
        self.part(worker, handoff, Parting::Known);
        self.finish_if_done(handoff.flight);
    }

    fn finish_if_done(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        if let Some(finish) = flight.done() {
            self.done(id, finish);
        }
    }

    fn leg_failed(&mut self, worker: WorkerRef, handoff: HandoffId, failure: Failure) {
        self.part(worker, handoff, Parting::Known);
        if self.leg(handoff).is_some_and(|leg| leg.decode == worker) {
            return self.move_broken(handoff, failure);
        }
        match self.current(handoff) {
            Some(a) if a.decode == worker => self.decode_gone(handoff, failure, worker),
            Some(a) if a.prefill == worker => self.prefill_gone(handoff, failure, worker),
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
        let failure = Failure::Rejected;
        if self.leg(handoff).is_some_and(|leg| leg.decode == worker) {
            self.move_broken(handoff, failure);
        } else if let Some(heir) = self.heir(worker, handoff) {
            self.fail(heir, failure, worker);
        } else {
            match self.current(handoff) {
                Some(a) if a.decode == worker && a.finished.is_none() => {
                    if a.reserved && !a.landed && a.prefill != worker {
                        self.trouble(handoff, failure);
                    } else {
                        self.decode_gone(handoff, failure, worker);
                    }
                }
                Some(a) if a.prefill == worker && !a.prefilled => {
                    self.fail(handoff, failure, worker);
                }
                _ => {}
            }
        }
        // What left a worker that is to be left makes way for what is still there.
        self.evacuate_one(worker);
        self.room_at(worker);
    }

    fn refused(&mut self, worker: WorkerRef, handoff: HandoffId, refusal: Refusal) {
        // A worker that holds the reservation and refuses the prompt keeps the reservation.
        let held = |p: &Promise| p.blocks > 0 && p.answered;
        let keeps = self.fleet.promised(worker, handoff).is_some_and(held);
        if !keeps {
            self.let_go(worker, handoff);
        }
        match &refusal {
            Refusal::QueueFull { retry_after } | Refusal::NoBlocks { retry_after } => {
                self.shut(worker, *retry_after);
            }
            Refusal::Draining => self.drains(worker),
            // It may well take the next; this one asks elsewhere.
            Refusal::Late { .. }
            | Refusal::TooLong { .. }
            | Refusal::OutOfVocabulary { .. }
            | Refusal::NoWorker
            | Refusal::WrongWorker => {}
        }
        if self.leg(handoff).is_some_and(|leg| leg.decode == worker) {
            return self.move_refused(worker, handoff, refusal);
        }
        if self
            .leg(handoff)
            .is_some_and(|leg| leg.reserved && leg.prefill == worker)
        {
            return self.stayed(worker, handoff, Failure::Rejected);
        }
        let Some(attempt) = self.current(handoff) else {
            return self.note(Note::Stale { worker });
        };
        if attempt.decode != worker && attempt.prefill != worker {
            self.note(Note::Stale { worker });
        } else if attempt.prefilled || attempt.landed {
            // Who takes back what it did may have drawn tokens.
            self.fail(handoff, Failure::Rejected, worker);
        } else {
            self.pass_over(handoff, worker, Some(refusal));
        }
    }
}
