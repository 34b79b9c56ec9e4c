//! A flight's way: the effect of each report of a worker.
//!
//! Owns: the order of orders: reserve on the decode worker, then prefill on the prefill worker (or
//! `MigrateOrder` on the worker that it leaves), then facts only; one worker of both legs has its
//! one order already. Never: chooses a worker, or decides about an attempt that is over.
//! Invariant: a fact counts only for an attempt under way, from the worker that has that leg;
//! anything else is stale, and changes nothing but the claims on that worker.

use crate::event::RouterNote;
use crate::fleet::stuck::StuckDeadlines;
use crate::flight::end::FlightEndings;
use crate::flight::legs::{LegRelease, LegRules};
use crate::flight::migrate::{FlightMoves, SourceFailure};
use crate::flight::resume::FlightRecovery;
use crate::flight::state::{FlightAttempt, FlightRecord, RouterFlights, SequenceEnd};
use crate::flight::timers::FlightTimer;
use cleave_domain::{
    DecodeTiming, Failure, FlightId, HandoffId, HandoffTarget, Order, PrefillOrder, PrefillTiming,
    Refusal, Report, StepProgress, WorkerDescription, WorkerRef,
};
use std::sync::Arc;

/// The rules of a flight's way, over recovery and the stuck workers.
#[derive(Debug)]
pub(crate) struct FlightSteps<'a> {
    pub(crate) recovery: FlightRecovery<'a>,
    pub(crate) stuck: &'a mut StuckDeadlines,
}

impl<'a> FlightSteps<'a> {
    pub(crate) fn legs(&mut self) -> &mut LegRules<'a> {
        self.recovery.legs()
    }

    pub(crate) fn moves(&mut self) -> FlightMoves<'_> {
        FlightMoves {
            legs: self.legs().reborrow(),
        }
    }

    pub(crate) fn flights(&self) -> &RouterFlights {
        self.recovery.admission.ends.legs.flights
    }

    fn stale(&mut self, worker: WorkerRef) {
        self.legs().note(RouterNote::Stale { worker });
    }

    /// Fails the attempt that turned out to have failed as its move ended.
    pub(crate) fn settle_move(&mut self, failed: Option<SourceFailure>) {
        if let Some(SourceFailure {
            handoff,
            failure,
            worker,
        }) = failed
        {
            self.recovery.fail(handoff, failure, worker);
        }
    }

    // === workers come and go ===

    pub(crate) fn joined(&mut self, worker: WorkerRef, description: WorkerDescription) {
        self.forget(worker);
        self.legs().fleet.join(worker, description);
    }

    pub(crate) fn lost(&mut self, worker: WorkerRef) {
        if self.legs().fleet.get(worker).is_none() {
            self.stale(worker);
            return;
        }
        self.forget(worker);
    }

    /// Forgets the known incarnation of the worker, and fails over all that it held.
    fn forget(&mut self, worker: WorkerRef) {
        // A worker that drained and then left is no loss: nothing failed.
        let present = self.legs().fleet.incarnation_of(worker.worker);
        if present.is_some_and(|present| !self.legs().fleet.has_drained(present)) {
            self.recovery.count_loss(worker.worker);
        }
        let held = self.legs().fleet.leave(worker.worker);
        self.stuck.end(worker.worker);
        let lost = || Failure::WorkerLost;
        for handoff in held {
            self.legs().leg_closed(handoff.flight);
            let decodes = |a: &FlightAttempt| a.decode.worker == worker.worker;
            if self.flights().leg(handoff).is_some_and(decodes) {
                self.move_broken(handoff, lost());
            } else if let Some(successor) = self.flights().successor(worker, handoff) {
                self.recovery.fail(successor, lost(), worker);
            } else {
                match self.flights().current(handoff) {
                    Some(a) if decodes(a) => self.recovery.decode_lost(handoff, lost(), worker),
                    Some(_) => self.recovery.prefill_lost(handoff, lost(), worker),
                    None => {}
                }
            }
        }
    }

    // === reports ===

    pub(crate) fn reported(&mut self, worker: WorkerRef, report: Report) {
        if self.legs().fleet.get(worker).is_none() {
            self.stale(worker);
            return;
        }
        if is_of_a_handoff(&report) {
            self.legs().fleet.set_silent(worker, false);
        }
        match report {
            Report::Load(load) => {
                let load = load.bounded();
                let eased = self.legs().fleet.load_eased(worker, &load);
                self.legs().fleet.update_worker(worker, &Report::Load(load));
                match load.progress {
                    StepProgress::Moving => self.progresses(worker),
                    StepProgress::Stuck => self.is_stuck(worker),
                }
                self.moves().settle_migration_request(worker, &load);
                if eased {
                    self.room_appeared(worker);
                }
            }
            Report::Prices(_) => self.legs().fleet.update_worker(worker, &report),
            Report::Prefix { stored, evicted } => {
                let dropped_count = self.legs().fleet.update_prefixes(worker, &stored, &evicted);
                if dropped_count > 0 {
                    self.legs().note(RouterNote::PrefixDropped {
                        worker,
                        dropped_count,
                    });
                }
            }
            Report::Adapters(report) => {
                self.legs().fleet.set_adapters(worker, &report.offers);
                self.room_appeared(worker);
            }
            Report::Draining => self.drains(worker),
            Report::Relayed(gossip) => {
                let ends = &mut self.recovery.admission.ends;
                ends.scaling.receive_gossip(ends.legs.context.now, gossip);
            }
            Report::Serves { role } => {
                self.legs().fleet.set_role(worker, role);
                self.moves().evacuate_one(worker);
            }
            Report::Reserved {
                handoff,
                present,
                blocks,
                state,
                window,
            } => {
                let target = HandoffTarget {
                    worker,
                    present,
                    blocks,
                    state,
                    window,
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
            Report::MemoryPressure { handoff } => self.moves().memory_pressure(worker, handoff),
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

    /// Handles a worker's report that its step takes too long.
    fn is_stuck(&mut self, worker: WorkerRef) {
        let LegRules { context, fleet, .. } = self.recovery.legs();
        if !fleet.set_progress(worker, StepProgress::Stuck) {
            return;
        }
        context.note(RouterNote::WorkerStuck { worker });
        let until = context.now + context.limits.stuck_max;
        let sequences = fleet.sequences(worker);
        self.stuck.begin(worker.worker, until);
        for handoff in sequences {
            // A sealed move may have landed and cannot be taken back.
            let arrives = |leg: &FlightAttempt| leg.decode == worker && !leg.prefilled;
            if self.flights().leg(handoff).is_some_and(arrives) {
                self.legs().release_leg(worker, handoff, LegRelease::Cancel);
                self.move_broken(handoff, Failure::WorkerStuck);
            }
        }
        self.recovery.fail_over_stuck();
    }

    /// Handles the report that the step has ended after all.
    fn progresses(&mut self, worker: WorkerRef) {
        let fleet = &mut self.legs().fleet;
        if fleet.set_progress(worker, StepProgress::Moving) {
            self.stuck.end(worker.worker);
        }
    }

    fn move_broken(&mut self, handoff: HandoffId, failure: Failure) {
        let failed = self.moves().broken(handoff, failure);
        self.settle_move(failed);
    }

    fn move_aborted(&mut self, worker: WorkerRef, handoff: HandoffId, failure: Failure) {
        let failed = self.moves().aborted(worker, handoff, failure);
        self.settle_move(failed);
    }

    pub(crate) fn drains(&mut self, worker: WorkerRef) {
        self.legs().fleet.drain(worker);
        self.moves().evacuate_one(worker);
    }

    fn reserved(&mut self, handoff: HandoffId, target: HandoffTarget) {
        let id = handoff.flight;
        let worker = target.worker;
        let legs = self.legs();
        let (now, limits) = (legs.context.now, legs.context.limits);
        legs.fleet.order_answered(worker, handoff);
        let Some(flight) = legs.flights.get_mut(id) else {
            return self.stale(worker);
        };
        let request = Arc::clone(&flight.request);
        let waited = now.since(flight.submitted);
        let awaits_answer =
            |a: &&mut FlightAttempt| a.decode == worker && !a.is_whole() && !a.reserved;
        if flight.leg_mut(handoff).filter(awaits_answer).is_some() {
            return self.moves().reserved(handoff, target);
        }
        let Some(attempt) = flight.attempt_mut(handoff).filter(awaits_answer) else {
            return self.stale(worker);
        };
        let sender = attempt.prefill;
        // The sender began to drain while the other leg answered: it would refuse, and may be gone
        // before.
        if legs.fleet.get(sender).is_some_and(|w| w.draining) {
            let refusal = Some(Refusal::Draining);
            return self.recovery.pass_over(handoff, sender, refusal);
        }
        flight.accept(handoff);
        flight.timestamps.ordered = Some(now);
        let due = flight.deadline(limits, now);
        legs.flights.set_timer(id, FlightTimer::StepTimeout, None);
        legs.fleet.leg_ordered(sender, handoff);
        let prefill = PrefillOrder {
            handoff,
            request,
            target,
            waited,
            due,
        };
        legs.send_order(sender, Order::Prefill(prefill));
    }

    /// The worker of both legs runs the request from now on.
    fn running(&mut self, worker: WorkerRef, handoff: HandoffId) {
        let legs = self.legs();
        legs.fleet.order_answered(worker, handoff);
        let awaits_answer = |a: &FlightAttempt| a.decode == worker && a.is_whole() && !a.reserved;
        if !legs.flights.current(handoff).is_some_and(awaits_answer) {
            return self.stale(worker);
        }
        if let Some(flight) = legs.flights.get_mut(handoff.flight) {
            flight.accept(handoff);
        }
        legs.flights
            .set_timer(handoff.flight, FlightTimer::StepTimeout, None);
    }

    fn prefilled(&mut self, worker: WorkerRef, handoff: HandoffId, timing: PrefillTiming) {
        let legs = self.legs();
        legs.fleet.prompt_done(worker, handoff);
        let ran = |a: &&mut FlightAttempt| a.reserved && a.prefill == worker;
        let attempt = legs
            .flights
            .get_mut(handoff.flight)
            .and_then(|flight| flight.either_mut(handoff))
            .filter(ran);
        let Some(attempt) = attempt else {
            return self.stale(worker);
        };
        attempt.prefilled = true;
        let (decode, began) = (attempt.decode, attempt.of.is_none());
        if decode == worker {
            legs.fleet.stream_began(worker, handoff);
        }
        if began {
            self.first_token(handoff.flight, timing);
        }
        self.finish_if_done(handoff.flight);
        self.recovery.admission.news_of(worker);
        self.moves().evacuate_one(decode);
    }

    /// Records the first token, and learns from its time.
    fn first_token(&mut self, id: FlightId, timing: PrefillTiming) {
        let FlightEndings { legs, tally, .. } = &mut self.recovery.admission.ends;
        let (now, limits) = (legs.context.now, legs.context.limits);
        if let Some(flight) = legs.flights.get_mut(id)
            && flight.timestamps.first_token(timing, now)
        {
            tally.learn_first_token(flight, &limits.policy, now);
        }
    }

    fn landed(&mut self, worker: WorkerRef, handoff: HandoffId) {
        let legs = self.legs();
        let now = legs.context.now;
        // Nothing is valid after `Released`, which is a worker's last report about a hand-off.
        let holds = legs.fleet.claim(worker, handoff).is_some();
        let here = |a: &FlightAttempt| holds && a.reserved && a.decode == worker;
        let arrives = |a: &FlightAttempt| here(a) && a.leg_failure.is_none();
        if legs.flights.leg(handoff).is_some_and(arrives) {
            let mut moves = self.moves();
            moves.moved(handoff.flight);
            return moves.evacuate_one(worker);
        }
        let Some(flight) = legs.flights.get_mut(handoff.flight) else {
            return self.stale(worker);
        };
        let attempt = flight.attempt_mut(handoff);
        let Some(attempt) = attempt.filter(|a| here(a) && !a.landed) else {
            return self.stale(worker);
        };
        attempt.landed = true;
        // The loss of the prefill worker may have left a suspicion with its timer.
        attempt.leg_failure = None;
        let sender = attempt.prefill;
        if sender != worker {
            flight.timestamps.landed.get_or_insert(now);
        }
        legs.fleet.stream_began(worker, handoff);
        legs.flights
            .set_timer(handoff.flight, FlightTimer::StepTimeout, None);
        // The receiver informs the sender too, but it may be lost before.
        if sender != worker {
            legs.release_leg(sender, handoff, LegRelease::Cancel);
        }
        self.moves().evacuate_one(worker);
        if self.legs().flights.end_fail_over(handoff.flight) {
            self.recovery.fail_over_stuck();
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
        if self.flights().leg(handoff).is_some_and(arrived) {
            self.moves().moved(handoff.flight);
        }
        // A source finishes a running sequence under its old name.
        let here = |a: &&mut FlightAttempt| {
            a.reserved && (a.decode == worker || (a.prefill == worker && a.of.is_none()))
        };
        let flight = self.legs().flights.get_mut(handoff.flight);
        let attempt = flight.and_then(|flight| flight.attempt_mut(handoff));
        let Some(attempt) = attempt.filter(here) else {
            return self.stale(worker);
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
            self.first_token(handoff.flight, prefill);
        }
        let legs = self.legs();
        // The timing of its decode worker, if that is the flight's first one.
        let flight = legs.flights.get_mut(handoff.flight);
        if let Some(flight) = flight.filter(|flight| flight.failures.failures() == 0) {
            flight.timestamps.decode = began.unwrap_or_default();
        }
        legs.flights
            .set_timer(handoff.flight, FlightTimer::StepTimeout, None);
        legs.release_leg(worker, handoff, LegRelease::AlreadyEnded);
        self.finish_if_done(handoff.flight);
    }

    fn finish_if_done(&mut self, id: FlightId) {
        let finish = self.flights().get(id).and_then(FlightRecord::done);
        if let Some(finish) = finish {
            self.recovery.admission.ends.finish(id, finish);
        }
    }

    fn leg_failed(&mut self, worker: WorkerRef, handoff: HandoffId, failure: Failure) {
        self.legs()
            .release_leg(worker, handoff, LegRelease::AlreadyEnded);
        if self
            .flights()
            .leg(handoff)
            .is_some_and(|leg| leg.decode == worker)
        {
            return self.move_broken(handoff, failure);
        }
        match self.flights().current(handoff) {
            Some(a) if a.decode == worker => self.recovery.decode_lost(handoff, failure, worker),
            Some(a) if a.prefill == worker => self.recovery.prefill_lost(handoff, failure, worker),
            _ => self.stale(worker),
        }
    }

    fn released(&mut self, worker: WorkerRef, handoff: HandoffId) {
        if self.legs().fleet.release(worker, handoff).is_none() {
            return self.stale(worker);
        }
        // Not after a refusal was taken back: the same order would be sent again at once.
        let ended = !self.flights().contains(handoff.flight);
        if ended || self.flights().current(handoff).is_some() {
            self.legs().fleet.reopen(worker);
        }
        self.legs().leg_closed(handoff.flight);
        // A leg that is released without having done its part has failed. Only a decode leg may
        // know more than its router: the sender reported to it that the first token was the last.
        // Then the sender's own report is on its way.
        let failure = Failure::Rejected;
        if self
            .flights()
            .leg(handoff)
            .is_some_and(|leg| leg.decode == worker)
        {
            self.move_broken(handoff, failure);
        } else if let Some(successor) = self.flights().successor(worker, handoff) {
            self.recovery.fail(successor, failure, worker);
        } else {
            match self.flights().current(handoff) {
                Some(a) if a.decode == worker && a.finished.is_none() => {
                    if a.reserved && !a.landed && a.prefill != worker {
                        self.recovery.trouble(handoff, failure);
                    } else {
                        self.recovery.decode_lost(handoff, failure, worker);
                    }
                }
                Some(a) if a.prefill == worker && !a.prefilled => {
                    self.recovery.fail(handoff, failure, worker);
                }
                _ => {}
            }
        }
        // Each sequence that left a draining worker lets the next one move.
        self.moves().evacuate_one(worker);
        self.room_appeared(worker);
    }

    fn refused(&mut self, worker: WorkerRef, handoff: HandoffId, refusal: Refusal) {
        self.legs().drop_claim(worker, handoff);
        match &refusal {
            Refusal::QueueFull { retry_after } | Refusal::NoBlocks { retry_after } => {
                self.recovery.admission.close_worker(worker, *retry_after);
            }
            Refusal::Draining => self.drains(worker),
            // It may take the next request; this one tries another worker.
            Refusal::Late { .. }
            | Refusal::TooLong { .. }
            | Refusal::OutOfVocabulary { .. }
            | Refusal::NoWorker
            | Refusal::WrongWorker
            | Refusal::NoAdapter { .. } => {}
        }
        if self
            .flights()
            .leg(handoff)
            .is_some_and(|leg| leg.decode == worker)
        {
            let failed = self.moves().refused(worker, handoff, refusal);
            return self.settle_move(failed);
        }
        if self
            .flights()
            .leg(handoff)
            .is_some_and(|leg| leg.reserved && leg.prefill == worker)
        {
            return self.move_aborted(worker, handoff, Failure::Rejected);
        }
        let Some(attempt) = self.flights().current(handoff) else {
            return self.stale(worker);
        };
        if attempt.decode != worker && attempt.prefill != worker {
            self.stale(worker);
        } else if attempt.prefilled
            || attempt.landed
            || (attempt.reserved && attempt.decode == worker)
        {
            // Tokens may have been drawn since the worker accepted or reported progress.
            self.recovery.fail(handoff, Failure::Rejected, worker);
        } else {
            self.recovery.pass_over(handoff, worker, Some(refusal));
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
            | Report::Adapters(_)
            | Report::Draining
            | Report::Serves { .. }
    )
}
