//! Moves of running sequences: away from a worker that leaves, serves other legs, or runs out of
//! blocks.
//!
//! Owns: a move from the request to the landing. Never: ends the attempt that decodes, or counts an
//! aborted move as a failure of the flight.
//! Invariant: at most `moves_max` sequences leave one worker at once; a sequence moves only while
//! it runs, and begins no second move before the worker it would leave has reported about the
//! first.
//!
//! A move is a hand-off whose sender is the decode worker. The client's tokens are counted, the
//! target reserves blocks for prompt and tokens, the source sends while it decodes on, pauses for
//! the rest, and the target's `Landed` makes the new attempt the flight's. The source answers for
//! the old attempt until then: whatever happens to the target, the source reports whether it goes
//! on. After an aborted move the flight stays where it is for a while, twice as long each time.

use crate::brain::RouterBrain;
use crate::candidates::MigrationCost;
use crate::event::{MoveReason, RouterNote, RouterOutput, RoutingMode};
use crate::flight::{FlightAttempt, FlightMigration, FlightPhase, FlightRecord};
use crate::legs::LegRelease;
use crate::policy::{AttemptSize, NoPlacement};
use crate::timers::FlightTimer;
use cleave_domain::{
    Failure, FlightId, HandoffId, HandoffTarget, MigrateOrder, Order, Refusal, ReserveOrder,
    WorkerId, WorkerLoad, WorkerRef,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How long a flight stays where it is after an aborted move: at first, and at most.
const MOVE_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

impl RouterBrain {
    // === who is to move ===

    /// Moves sequences away from every leaving worker, as far as possible. `news` names the one
    /// worker where room may have appeared; without it all targets are tried.
    pub(crate) fn evacuate(&mut self, news: Option<WorkerRef>) {
        for (source, why) in self.fleet.workers_to_leave() {
            self.evacuate_from(source, why, news);
        }
    }

    /// The same for one worker, if it leaves: a sequence may have begun to run there.
    pub(crate) fn evacuate_one(&mut self, source: WorkerRef) {
        if let Some(why) = self.fleet.move_reason(source) {
            self.evacuate_from(source, why, None);
        }
    }

    fn evacuate_from(&mut self, source: WorkerRef, why: MoveReason, news: Option<WorkerRef>) {
        let mut free = self.moves_free(source);
        for handoff in self.fleet.sequences_to_move(source, why) {
            if free == 0 {
                return;
            }
            let id = handoff.flight;
            let helps = |worker| self.could_move_to(id, worker);
            if self.may_move(source, handoff)
                && news.is_none_or(helps)
                && self.target(id, why).is_ok()
            {
                self.begin_move(id, why);
                free -= 1;
            }
        }
    }

    /// Handles a worker's request to have a sequence moved. The request stands until another
    /// replaces it, the sequence is gone, or there is room; meanwhile no further sequence is placed
    /// there.
    pub(crate) fn memory_pressure(&mut self, worker: WorkerRef, handoff: HandoffId) {
        if self.current(handoff).is_none_or(|a| a.decode != worker) {
            return self.note(RouterNote::Stale { worker });
        }
        self.fleet.record_migration_request(worker, handoff);
        self.grant(worker, handoff);
    }

    /// Serves workers' requests to have sequences moved; `news` as in [`RouterBrain::evacuate`].
    pub(crate) fn grant_migration_requests(&mut self, news: Option<WorkerRef>) {
        for (source, handoff) in self.fleet.migration_requests() {
            if news.is_none_or(|worker| self.could_move_to(handoff.flight, worker)) {
                self.grant(source, handoff);
            }
        }
    }

    fn grant(&mut self, source: WorkerRef, handoff: HandoffId) {
        let id = handoff.flight;
        let may = self.may_move(source, handoff) && self.moves_free(source) > 0;
        if may && self.target(id, MoveReason::MemoryPressure).is_ok() {
            self.begin_move(id, MoveReason::MemoryPressure);
        }
    }

    /// Drops a worker's request once its load shows room for the expected output of one more
    /// sequence.
    pub(crate) fn settle_migration_request(&mut self, worker: WorkerRef, load: &WorkerLoad) {
        let tokens = self.limits.expected_output_tokens;
        let blocks = self.fleet.blocks(worker, tokens);
        if blocks.is_some_and(|blocks| load.blocks_free >= blocks) {
            self.fleet.drop_migration_request(worker);
        }
    }

    /// How many more sequences may leave the worker now.
    fn moves_free(&self, source: WorkerRef) -> u32 {
        let generates = |a: &FlightAttempt| {
            let claim = self.fleet.claim(source, a.handoff);
            a.decode == source && claim.is_some_and(|claim| claim.blocks > 0)
        };
        let attempts = self.moving.iter();
        let attempts = attempts.filter_map(|id| self.flights.get(id)?.attempt());
        let moving_now = attempts.filter(|attempt| generates(attempt)).count();
        self.limits.moves_max.saturating_sub(moving_now as u32)
    }

    fn may_move(&self, source: WorkerRef, handoff: HandoffId) -> bool {
        let runs = |a: &FlightAttempt| a.decode == source && a.is_running();
        let rests = self
            .timers
            .get(handoff.flight, FlightTimer::MoveBackoff)
            .is_some();
        let flight = self.flights.get(&handoff.flight);
        let free = flight.is_some_and(|f| f.moving.is_none()) && !rests;
        free && self.current(handoff).is_some_and(runs)
    }

    // === targets ===

    /// The size with which a target is chosen. A target that takes a sequence over to make room
    /// elsewhere must have room for twice its growth, or it would be the next to ask.
    fn move_ask(&self, flight: &FlightRecord, why: MoveReason) -> AttemptSize {
        let output = self.limits.expected_output_tokens;
        let output = output.max(self.limits.move_ahead_tokens);
        AttemptSize::of(
            &flight.request,
            match why {
                MoveReason::Drain | MoveReason::Role => output,
                MoveReason::MemoryPressure => output.saturating_mul(2),
            },
        )
    }

    /// The target of a move now: preferably one that did not fail to take the sequence before.
    fn target(&self, id: FlightId, why: MoveReason) -> Result<WorkerRef, NoPlacement> {
        let flight = self.flights.get(&id).ok_or(NoPlacement::NoWorker)?;
        let source = flight.attempt().ok_or(NoPlacement::NoWorker)?.decode;
        let ask = self.move_ask(flight, why);
        let query = self.query(flight, None);
        let among = |excluded: &BTreeSet<WorkerId>| {
            let query = query.asking(ask, excluded);
            self.fleet.choose_target(source, &query)
        };
        among(&flight.avoided).or_else(|_| among(&BTreeSet::new()))
    }

    /// Whether news of `worker` could give the sequence a target.
    fn could_move_to(&self, id: FlightId, worker: WorkerRef) -> bool {
        let Some(flight) = self.flights.get(&id) else {
            return false;
        };
        let ask = self.move_ask(flight, MoveReason::Drain);
        let query = self.query(flight, None);
        self.fleet
            .could_take(worker, &query.asking(ask, &BTreeSet::new()))
    }

    // === a move ===

    fn begin_move(&mut self, id: FlightId, why: MoveReason) {
        let began = self.now;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        let handoff = flight.name_attempt();
        let moving = FlightMigration {
            handoff,
            why,
            began,
            leg: None,
        };
        self.set_move(id, moving);
        self.emit_output(RouterOutput::Count { handoff });
    }

    fn set_move(&mut self, id: FlightId, moving: FlightMigration) {
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.moving = Some(moving);
            self.moving.insert(id);
        }
    }

    pub(crate) fn take_move(&mut self, id: FlightId) -> Option<FlightMigration> {
        self.moving.remove(&id);
        self.flights.get_mut(&id)?.moving.take()
    }

    /// Orders the reservation at a target, once the client's tokens are counted.
    pub(crate) fn depart(&mut self, id: FlightId) {
        let moving = self.take_move(id);
        let flight = self.flights.get(&id);
        let of = flight.and_then(|flight| flight.attempt());
        let of = of.filter(|a| a.is_running()).cloned();
        let Some((of, moving)) = of.zip(moving) else {
            return;
        };
        let why = moving.why;
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        if flight.sequence_end(of.context_tokens_max).is_some() {
            // Its `Finished` is on the way.
            return;
        }
        if why == MoveReason::MemoryPressure {
            if self.yielded_lately(flight) {
                return self.fleet.drop_migration_request(of.decode);
            }
        } else if self.fleet.move_reason(of.decode).is_none() {
            // The source serves decode legs again.
            return;
        }
        // If there is no room any more, news of room will start another move.
        if let Ok(target) = self.target(id, why) {
            self.ask_target(id, &of, target, &moving);
        }
    }

    /// Whether a sequence was moved to make room recently: it draws some tokens before it is moved
    /// for that reason again.
    fn yielded_lately(&self, flight: &FlightRecord) -> bool {
        let drawn = flight.request.generated.len() as u32;
        let rest = self.limits.expected_output_tokens;
        flight
            .yielded_at
            .is_some_and(|at| drawn < at.saturating_add(rest))
    }

    fn ask_target(
        &mut self,
        id: FlightId,
        of: &FlightAttempt,
        target: WorkerRef,
        moving: &FlightMigration,
    ) {
        let (handoff, why) = (moving.handoff, moving.why);
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let cost = MigrationCost {
            ask: self.move_ask(flight, why),
            tpot: flight
                .request
                .slo
                .tpot
                .filter(|_| self.limits.mode == RoutingMode::Slo),
        };
        let reserve = ReserveOrder {
            handoff,
            request: Arc::clone(&flight.request),
            sender: of.decode,
            expected_output_tokens: self.limits.expected_output_tokens,
            ahead_tokens: self.limits.move_ahead_tokens,
            waited: self.now.since(flight.submitted),
            due: None,
        };
        let leg = FlightAttempt {
            handoff,
            prefill: of.decode,
            decode: target,
            of: Some(of.handoff),
            context_tokens_max: self.fleet.context_tokens_max(target),
            reserved: false,
            prefilled: false,
            leg_failure: None,
            landed: false,
            finished: None,
        };
        let moving = FlightMigration {
            handoff,
            why,
            began: self.now,
            leg: Some(leg),
        };
        self.set_move(id, moving);
        self.fleet.claim_move_target(handoff, target, &cost);
        let until = self.now + self.limits.reserve_timeout;
        self.timers.set(id, FlightTimer::StepTimeout, Some(until));
        self.note(RouterNote::Moving {
            handoff,
            from: of.decode,
            to: target,
            why,
        });
        self.send_order(target, Order::Reserve(reserve));
    }

    /// Orders the source to send, after the target has reserved blocks.
    pub(crate) fn move_reserved(&mut self, handoff: HandoffId, target: HandoffTarget) {
        let Some(flight) = self.flights.get_mut(&handoff.flight) else {
            return;
        };
        let tokens = (flight.request.prompt.len() + flight.request.generated.len()) as u32;
        let Some(leg) = flight.leg_mut(handoff) else {
            return;
        };
        leg.reserved = true;
        let (source, of) = (leg.prefill, leg.sending());
        self.timers
            .set(handoff.flight, FlightTimer::StepTimeout, None);
        let migrate = MigrateOrder {
            handoff,
            of,
            target,
            tokens,
        };
        self.send_order(source, Order::Migrate(migrate));
    }

    /// Completes a move: the target has everything, and its attempt becomes the flight's.
    pub(crate) fn moved(&mut self, id: FlightId) {
        let Some(FlightMigration {
            why,
            began,
            leg: Some(leg),
            ..
        }) = self.take_move(id)
        else {
            return;
        };
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.moves_aborted = 0;
        if why == MoveReason::MemoryPressure {
            flight.yielded_at = Some(flight.request.generated.len() as u32);
        }
        let (handoff, source, of) = (leg.handoff, leg.prefill, leg.sending());
        flight.stage = FlightPhase::Flying(FlightAttempt {
            landed: true,
            ..leg
        });
        flight.avoided.clear();
        self.timers.set(id, FlightTimer::StepTimeout, None);
        self.timers.set(id, FlightTimer::MoveBackoff, None);
        let took = self.now.since(began);
        self.note(RouterNote::Moved { handoff, took });
        // The target informs the source too, but it may be lost before. The source paused before it
        // sealed, so it has no further reports than those on their way.
        self.release_leg(source, of, LegRelease::Cancel);
        self.next_from(source);
    }

    // === aborted moves ===

    /// Whether the source has sealed, so that the target may have everything.
    pub(crate) fn is_sealed(&self, id: FlightId) -> bool {
        let leg = self.flights.get(&id).and_then(|flight| flight.leg());
        leg.is_some_and(|leg| leg.prefilled && leg.leg_failure.is_none())
    }

    /// Handles a target that does not take the sequence, or should not. The source, once it was
    /// ordered to send, decides: it may have sealed, and then waits for the target's answer.
    pub(crate) fn move_broken(&mut self, handoff: HandoffId, failure: Failure) {
        let id = handoff.flight;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        let speaks = flight.attempt().is_some_and(|a| a.leg_failure.is_none());
        let Some(leg) = flight.leg_mut(handoff) else {
            return;
        };
        if !(leg.reserved && speaks) {
            return self.move_over(id, failure);
        }
        if leg.leg_failure.is_none() {
            leg.leg_failure = Some(failure);
            let (source, target) = (leg.prefill, leg.decode);
            self.release_leg(target, handoff, LegRelease::Cancel);
            self.send_order(source, Order::Cancel { handoff });
        }
    }

    pub(crate) fn move_refused(&mut self, worker: WorkerRef, handoff: HandoffId, refusal: Refusal) {
        self.note(RouterNote::PassedOver {
            handoff,
            worker,
            refusal: Some(refusal),
        });
        self.move_broken(handoff, Failure::Rejected);
    }

    /// Ends an aborted move: the sequence goes on where it was, if it still is there, and rests
    /// before it tries again.
    pub(crate) fn move_over(&mut self, id: FlightId, failure: Failure) {
        let Some(leg) = self.take_move(id).and_then(|moving| moving.leg) else {
            return;
        };
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.avoided.insert(leg.decode.worker);
        let (shortest, longest) = MOVE_BACKOFF;
        let rest = shortest * (1_u32 << flight.moves_aborted.min(10));
        let until = self.now + rest.min(longest);
        flight.moves_aborted += 1;
        let doubt = flight.attempt().and_then(|a| a.leg_failure.clone());
        let current = flight.attempt().map(|a| a.handoff);
        self.timers.set(id, FlightTimer::StepTimeout, None);
        self.timers.set(id, FlightTimer::MoveBackoff, Some(until));
        self.release_leg(leg.decode, leg.handoff, LegRelease::Cancel);
        let handoff = leg.handoff;
        self.note(RouterNote::MigrationAborted { handoff, failure });
        match doubt.zip(current) {
            Some((doubt, current)) => self.fail(current, doubt, leg.decode),
            None => self.next_from(leg.prefill),
        }
    }

    /// Tries to move again after the pause that follows an aborted move.
    pub(crate) fn rested(&mut self, id: FlightId) {
        let source = self
            .flights
            .get(&id)
            .and_then(|f| f.attempt())
            .map(|a| a.decode);
        if let Some(source) = source {
            self.next_from(source);
        }
    }

    /// Starts another move from this worker, after one is over or may be tried again.
    fn next_from(&mut self, source: WorkerRef) {
        self.evacuate_one(source);
        self.grant_migration_requests(None);
    }

    /// Handles the source's report that the move was aborted.
    pub(crate) fn move_aborted(&mut self, worker: WorkerRef, handoff: HandoffId, failure: Failure) {
        let moves = |a: &FlightAttempt| a.of.is_some() && a.reserved && a.prefill == worker;
        if self.leg(handoff).is_some_and(moves) {
            // The target's failure is more specific.
            let target_failure = self.leg(handoff).and_then(|leg| leg.leg_failure.clone());
            return self.move_over(handoff.flight, target_failure.unwrap_or(failure));
        }
        match self.current(handoff) {
            // It landed, and its last tokens will not come.
            Some(a) if moves(a) && !a.prefilled => self.fail(handoff, failure, worker),
            _ => self.note(RouterNote::Stale { worker }),
        }
    }
}
