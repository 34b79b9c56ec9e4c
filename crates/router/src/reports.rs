//! A flight's way: the effect of each report of a worker.
//!
//! Owns: the order of orders: reserve on the decode worker, then prefill on the prefill worker (or
//! `MigrateOrder` on the worker that it leaves), then facts only; one worker of both legs has its
//! one order already. Never: chooses a worker, or decides about an attempt that is over.
//! Invariant: a fact counts only for an attempt under way, from the worker that has that leg;
//! anything else is stale, and changes nothing but the claims on that worker.

use crate::brain::RouterBrain;
use crate::event::{OperatorRequest, RouterNote};
use crate::flight::{FlightAttempt, SequenceEnd};
use crate::legs::LegRelease;
use crate::timers::FlightTimer;
use cleave_domain::{
    DecodeTiming, Failure, FlightId, HandoffId, HandoffTarget, Order, PrefillOrder, PrefillTiming,
    Refusal, Report, StepProgress, WorkerDescription, WorkerId, WorkerRef,
};
use std::sync::Arc;

impl RouterBrain {
    // === workers come and go ===

    pub(crate) fn joined(&mut self, worker: WorkerRef, description: WorkerDescription) {
        self.forget(worker);
        self.fleet.join(worker, description);
    }

    pub(crate) fn lost(&mut self, worker: WorkerRef) {
        if self.fleet.get(worker).is_none() {
            self.note(RouterNote::Stale { worker });
            return;
        }
        self.forget(worker);
    }

    /// Forgets the known incarnation of the worker, and fails over all that it held.
    fn forget(&mut self, worker: WorkerRef) {
        // A worker that drained and then left is no loss: nothing failed.
        let present = self.fleet.incarnation_of(worker.worker);
        if present.is_some_and(|present| !self.fleet.has_drained(present)) {
            self.count_loss(worker.worker);
        }
        let held = self.fleet.leave(worker.worker);
        self.stop_waiting_for(worker);
        let lost = || Failure::WorkerLost;
        for handoff in held {
            self.leg_closed(handoff.flight);
            let decodes = |a: &FlightAttempt| a.decode.worker == worker.worker;
            if self.leg(handoff).is_some_and(decodes) {
                self.move_broken(handoff, lost());
            } else if let Some(successor) = self.successor(worker, handoff) {
                self.fail(successor, lost(), worker);
            } else {
                match self.current(handoff) {
                    Some(a) if decodes(a) => self.decode_lost(handoff, lost(), worker),
                    Some(_) => self.prefill_lost(handoff, lost(), worker),
                    None => {}
                }
            }
        }
    }

    /// Passes an operator's command on. Nothing changes here until the worker reports that it
    /// complies.
    pub(crate) fn commanded(&mut self, worker: WorkerId, command: OperatorRequest) {
        let Some(worker) = self.fleet.incarnation_of(worker) else {
            return;
        };
        let order = match command {
            OperatorRequest::Drain => Order::Drain,
            OperatorRequest::Serve(role) => Order::Serve { role },
        };
        self.send_order(worker, order);
        // The answer to a drain is certain, so new requests avoid the worker at once.
        if command == OperatorRequest::Drain {
            self.drains(worker);
        }
    }

    // === reports ===

    pub(crate) fn reported(&mut self, worker: WorkerRef, report: Report) {
        if self.fleet.get(worker).is_none() {
            self.note(RouterNote::Stale { worker });
            return;
        }
        if is_of_a_handoff(&report) {
            self.fleet.set_silent(worker, false);
        }
        match report {
            Report::Load(load) => {
                let load = load.bounded();
                let eased = self.fleet.load_eased(worker, &load);
                self.fleet.update_worker(worker, &Report::Load(load));
                match load.progress {
                    StepProgress::Moving => self.moves_again(worker),
                    StepProgress::Stuck => self.stuck(worker),
                }
                self.settle_migration_request(worker, &load);
                if eased {
                    self.room_appeared(worker);
                }
            }
            Report::Prices(_) => self.fleet.update_worker(worker, &report),
            Report::Prefix { stored, evicted } => {
                let dropped_count = self.fleet.update_prefixes(worker, &stored, &evicted);
                if dropped_count > 0 {
                    self.note(RouterNote::PrefixDropped {
                        worker,
                        dropped_count,
                    });
                }
            }
            Report::Draining => self.drains(worker),
            Report::Relayed(gossip) => self.handle_gossip(gossip),
            Report::Serves { role } => {
                self.fleet.set_role(worker, role);
                self.evacuate_one(worker);
            }
            Report::Reserved {
                handoff,
                present,
                blocks,
                state,
            } => {
                let target = HandoffTarget {
                    worker,
                    present,
                    blocks,
                    state,
                };
                self.reserved(handoff, target);
            }
            Report::Running { handoff, .. } => self.running(worker, handoff),
            Report::Refused { handoff, refusal } => self.refused(worker, handoff, refusal),
            Report::Prefilled { handoff, timing } => self.prefilled(worker, handoff, timing),
            Report::Landed { handoff } => self.landed(worker, handoff),
            Report::MigrationAborted { handoff, failure } => {
                self.move_aborted(worker, handoff, failure)
            }
            Report::MemoryPressure { handoff } => self.memory_pressure(worker, handoff),
            Report::Finished {
                handoff,
                reason,
                output_tokens,
                timing,
                prefill,
            } => {
                let finish = SequenceEnd {
                    reason,
                    output_tokens,
                };
                self.finished(worker, handoff, finish, timing, prefill);
            }
            Report::LegFailed { handoff, failure } => self.leg_failed(worker, handoff, failure),
            Report::Released { handoff } => self.released(worker, handoff),
        }
    }

    fn drains(&mut self, worker: WorkerRef) {
        self.fleet.drain(worker);
        self.evacuate_one(worker);
    }

    fn reserved(&mut self, handoff: HandoffId, target: HandoffTarget) {
        let worker = target.worker;
        self.fleet.change(worker, handoff, |p| p.answered = true);
        let Some(flight) = self.flights.get_mut(&handoff.flight) else {
            return self.note(RouterNote::Stale { worker });
        };
        let request = Arc::clone(&flight.request);
        let waited = self.now.since(flight.submitted);
        let awaits_answer =
            |a: &&mut FlightAttempt| a.decode == worker && !a.is_whole() && !a.reserved;
        if flight.leg_mut(handoff).filter(awaits_answer).is_some() {
            return self.move_reserved(handoff, target);
        }
        let Some(attempt) = flight.attempt_mut(handoff).filter(awaits_answer) else {
            return self.note(RouterNote::Stale { worker });
        };
        let sender = attempt.prefill;
        // The sender began to drain while the other leg answered: it would refuse, and may be gone
        // before.
        if self.fleet.get(sender).is_some_and(|w| w.draining) {
            return self.pass_over(handoff, sender, Some(Refusal::Draining));
        }
        self.accepted(handoff);
        self.fleet.change(sender, handoff, |p| p.ordered = true);
        let due = self.due(handoff.flight);
        let prefill = PrefillOrder {
            handoff,
            request,
            target,
            waited,
            due,
        };
        self.clock_ordered(handoff.flight);
        self.send_order(sender, Order::Prefill(prefill));
    }

    /// The worker of both legs runs the request from now on.
    fn running(&mut self, worker: WorkerRef, handoff: HandoffId) {
        self.fleet.change(worker, handoff, |p| p.answered = true);
        let awaits_answer = |a: &FlightAttempt| a.decode == worker && a.is_whole() && !a.reserved;
        if self.current(handoff).is_some_and(awaits_answer) {
            self.accepted(handoff);
        } else {
            self.note(RouterNote::Stale { worker });
        }
    }

    /// Records that the decode worker of the current attempt holds blocks for it.
    fn accepted(&mut self, handoff: HandoffId) {
        let Some(flight) = self.flights.get_mut(&handoff.flight) else {
            return;
        };
        if let Some(attempt) = flight.attempt_mut(handoff) {
            attempt.reserved = true;
        }
        flight.wait_until = None;
        // Workers that refused it as late stay excluded, or they would be asked again and again.
        flight.refusals = flight.late_workers.len() as u32;
        flight.excluded.clone_from(&flight.late_workers);
        self.timers
            .set(handoff.flight, FlightTimer::StepTimeout, None);
    }

    fn prefilled(&mut self, worker: WorkerRef, handoff: HandoffId, timing: PrefillTiming) {
        self.fleet.prompt_done(worker, handoff);
        let ran = |a: &&mut FlightAttempt| a.reserved && a.prefill == worker;
        let attempt = self
            .flights
            .get_mut(&handoff.flight)
            .and_then(|flight| flight.either_mut(handoff))
            .filter(ran);
        let Some(attempt) = attempt else {
            return self.note(RouterNote::Stale { worker });
        };
        attempt.prefilled = true;
        let (decode, began) = (attempt.decode, attempt.of.is_none());
        if decode == worker {
            self.fleet.stream_began(worker, handoff);
        }
        if began {
            self.clock_first(handoff.flight, timing);
        }
        self.finish_if_done(handoff.flight);
        self.news_of(worker);
        self.evacuate_one(decode);
    }

    fn landed(&mut self, worker: WorkerRef, handoff: HandoffId) {
        // Nothing is valid after `Released`, which is a worker's last report about a hand-off.
        let holds = self.fleet.claim(worker, handoff).is_some();
        let here = |a: &FlightAttempt| holds && a.reserved && a.decode == worker;
        let arrives = |a: &FlightAttempt| here(a) && a.leg_failure.is_none();
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
            return self.note(RouterNote::Stale { worker });
        };
        attempt.landed = true;
        // The loss of the prefill worker may have left a suspicion with its timer.
        attempt.leg_failure = None;
        let sender = attempt.prefill;
        self.fleet.stream_began(worker, handoff);
        if sender != worker {
            self.clock_landed(handoff.flight);
        }
        self.timers
            .set(handoff.flight, FlightTimer::StepTimeout, None);
        // The receiver informs the sender too, but it may be lost before.
        if sender != worker {
            self.release_leg(sender, handoff, LegRelease::Cancel);
        }
        self.evacuate_one(worker);
        if self.failing_over.remove(&handoff.flight).is_some() {
            self.fail_over_stuck();
        }
    }

    fn finished(
        &mut self,
        worker: WorkerRef,
        handoff: HandoffId,
        finish: SequenceEnd,
        timing: DecodeTiming,
        prefill: Option<PrefillTiming>,
    ) {
        let arrived =
            |a: &FlightAttempt| a.reserved && a.decode == worker && a.leg_failure.is_none();
        if self.leg(handoff).is_some_and(arrived) {
            self.moved(handoff.flight);
        }
        // A source finishes a running sequence under its old name.
        let here = |a: &&mut FlightAttempt| {
            a.reserved && (a.decode == worker || (a.prefill == worker && a.of.is_none()))
        };
        let attempt = self
            .flights
            .get_mut(&handoff.flight)
            .and_then(|flight| flight.attempt_mut(handoff))
            .filter(here);
        let Some(attempt) = attempt else {
            return self.note(RouterNote::Stale { worker });
        };
        attempt.finished = Some(finish);
        attempt.landed = true;
        attempt.leg_failure = None;
        if attempt.prefill == worker {
            // Every token came through this worker's stream, the first one too.
            attempt.prefilled = true;
        }
        let began = attempt.of.is_none().then_some(timing);
        if let Some(prefill) = prefill {
            self.clock_first(handoff.flight, prefill);
        }
        self.clock_last(handoff.flight, began);
        self.timers
            .set(handoff.flight, FlightTimer::StepTimeout, None);
        self.release_leg(worker, handoff, LegRelease::AlreadyEnded);
        self.finish_if_done(handoff.flight);
    }

    fn finish_if_done(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        if let Some(finish) = flight.done() {
            self.finish_flight(id, finish);
        }
    }

    fn leg_failed(&mut self, worker: WorkerRef, handoff: HandoffId, failure: Failure) {
        self.release_leg(worker, handoff, LegRelease::AlreadyEnded);
        if self.leg(handoff).is_some_and(|leg| leg.decode == worker) {
            return self.move_broken(handoff, failure);
        }
        match self.current(handoff) {
            Some(a) if a.decode == worker => self.decode_lost(handoff, failure, worker),
            Some(a) if a.prefill == worker => self.prefill_lost(handoff, failure, worker),
            _ => self.note(RouterNote::Stale { worker }),
        }
    }

    fn released(&mut self, worker: WorkerRef, handoff: HandoffId) {
        if self.fleet.release(worker, handoff).is_none() {
            return self.note(RouterNote::Stale { worker });
        }
        // Not after a refusal was taken back: the same order would be sent again at once.
        let ended = !self.flights.contains_key(&handoff.flight);
        if ended || self.current(handoff).is_some() {
            self.fleet.reopen(worker);
        }
        self.leg_closed(handoff.flight);
        // A leg that is released without having done its part has failed. Only a decode leg may
        // know more than its router: the sender reported to it that the first token was the last.
        // Then the sender's own report is on its way.
        let failure = Failure::Rejected;
        if self.leg(handoff).is_some_and(|leg| leg.decode == worker) {
            self.move_broken(handoff, failure);
        } else if let Some(successor) = self.successor(worker, handoff) {
            self.fail(successor, failure, worker);
        } else {
            match self.current(handoff) {
                Some(a) if a.decode == worker && a.finished.is_none() => {
                    if a.reserved && !a.landed && a.prefill != worker {
                        self.trouble(handoff, failure);
                    } else {
                        self.decode_lost(handoff, failure, worker);
                    }
                }
                Some(a) if a.prefill == worker && !a.prefilled => {
                    self.fail(handoff, failure, worker);
                }
                _ => {}
            }
        }
        // Each sequence that left a draining worker lets the next one move.
        self.evacuate_one(worker);
        self.room_appeared(worker);
    }

    fn refused(&mut self, worker: WorkerRef, handoff: HandoffId, refusal: Refusal) {
        self.drop_claim(worker, handoff);
        match &refusal {
            Refusal::QueueFull { retry_after } | Refusal::NoBlocks { retry_after } => {
                self.close_worker(worker, *retry_after);
            }
            Refusal::Draining => self.drains(worker),
            // It may take the next request; this one tries another worker.
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
            return self.move_aborted(worker, handoff, Failure::Rejected);
        }
        let Some(attempt) = self.current(handoff) else {
            return self.note(RouterNote::Stale { worker });
        };
        if attempt.decode != worker && attempt.prefill != worker {
            self.note(RouterNote::Stale { worker });
        } else if attempt.prefilled
            || attempt.landed
            || (attempt.reserved && attempt.decode == worker)
        {
            // Tokens may have been drawn since the worker accepted or reported progress.
            self.fail(handoff, Failure::Rejected, worker);
        } else {
            self.pass_over(handoff, worker, Some(refusal));
        }
    }
}

/// Whether a report concerns a hand-off: only a worker that handles orders sends such reports.
fn is_of_a_handoff(report: &Report) -> bool {
    !matches!(
        report,
        Report::Load(_)
            | Report::Prefix { .. }
            | Report::Prices(_)
            | Report::Relayed(_)
            | Report::Draining
            | Report::Serves { .. }
    )
}
