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

use crate::event::{MoveReason, RouterLimits, RouterNote, RouterOutput, RoutingMode};
use crate::flight::legs::{LegRelease, LegRules};
use crate::flight::state::{FlightAttempt, FlightMigration, FlightRecord};
use crate::flight::timers::FlightTimer;
use crate::placement::candidates::MigrationCost;
use crate::placement::policy::{AttemptSize, NoPlacement};
use cleave_domain::{
    Failure, FlightId, HandoffId, HandoffTarget, MigrateOrder, Order, Refusal, ReserveOrder,
    WorkerId, WorkerLoad, WorkerRef,
};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The rules of moves, over the legs of flights.
#[derive(Debug)]
pub(crate) struct FlightMoves<'a> {
    pub(crate) legs: LegRules<'a>,
}

/// The current attempt of a flight turns out to have failed, as its move ends.
#[must_use]
#[derive(Debug)]
pub(crate) struct SourceFailure {
    pub(crate) handoff: HandoffId,
    pub(crate) failure: Failure,
    /// The worker to be avoided.
    pub(crate) worker: WorkerRef,
}

impl FlightMoves<'_> {
    // === who is to move ===

    /// Moves sequences away from every leaving worker, as far as possible. `news` names the one
    /// worker where room may have appeared; without it all targets are tried.
    pub(crate) fn evacuate(&mut self, news: Option<WorkerRef>) {
        for (source, why) in self.legs.fleet.workers_to_leave() {
            self.evacuate_from(source, why, news);
        }
    }

    /// The same for one worker, if it leaves: a sequence may have begun to run there.
    pub(crate) fn evacuate_one(&mut self, source: WorkerRef) {
        if let Some(why) = self.legs.fleet.move_reason(source) {
            self.evacuate_from(source, why, None);
        }
    }

    fn evacuate_from(&mut self, source: WorkerRef, why: MoveReason, news: Option<WorkerRef>) {
        let mut free = self.moves_free(source);
        for handoff in self.legs.fleet.sequences_to_move(source, why) {
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
        if self
            .legs
            .flights
            .current(handoff)
            .is_none_or(|a| a.decode != worker)
        {
            return self.legs.note(RouterNote::Stale { worker });
        }
        self.legs.fleet.record_migration_request(worker, handoff);
        self.grant(worker, handoff);
    }

    /// Serves workers' requests to have sequences moved; `news` as in [`FlightMoves::evacuate`].
    pub(crate) fn grant_migration_requests(&mut self, news: Option<WorkerRef>) {
        for (source, handoff) in self.legs.fleet.migration_requests() {
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
        let tokens = self.legs.context.limits.expected_output_tokens;
        let blocks = self.legs.fleet.blocks(worker, tokens);
        if blocks.is_some_and(|blocks| load.blocks_free >= blocks) {
            self.legs.fleet.drop_migration_request(worker);
        }
    }

    /// How many more sequences may leave the worker now.
    fn moves_free(&self, source: WorkerRef) -> u32 {
        let generates = |a: &FlightAttempt| {
            let claim = self.legs.fleet.claim(source, a.handoff);
            a.decode == source && claim.is_some_and(|claim| claim.blocks > 0)
        };
        let attempts = self.legs.flights.moving().filter_map(FlightRecord::attempt);
        let moving_now = attempts.filter(|attempt| generates(attempt)).count();
        self.legs
            .context
            .limits
            .moves_max
            .saturating_sub(moving_now as u32)
    }

    fn may_move(&self, source: WorkerRef, handoff: HandoffId) -> bool {
        let runs = |a: &FlightAttempt| a.decode == source && a.is_running();
        let flights = &self.legs.flights;
        let rest = flights.timer(handoff.flight, FlightTimer::MoveBackoff);
        let flight = flights.get(handoff.flight);
        let free = flight.is_some_and(|f| f.moving().is_none()) && rest.is_none();
        free && self.legs.flights.current(handoff).is_some_and(runs)
    }

    // === targets ===

    /// The target of a move now: preferably one that did not fail to take the sequence before.
    fn target(&self, id: FlightId, why: MoveReason) -> Result<WorkerRef, NoPlacement> {
        let flight = self.legs.flights.get(id).ok_or(NoPlacement::NoWorker)?;
        let source = flight.attempt().ok_or(NoPlacement::NoWorker)?.decode;
        let (limits, now) = (self.legs.context.limits, self.legs.context.now);
        let ask = move_ask(flight, why, limits);
        let query = flight.query(None, limits, now);
        let among = |excluded: &BTreeSet<WorkerId>| {
            let query = query.asking(ask, excluded);
            self.legs.fleet.choose_target(source, &query)
        };
        among(flight.moves.avoided()).or_else(|_| among(&BTreeSet::new()))
    }

    /// Whether news of `worker` could give the sequence a target.
    fn could_move_to(&self, id: FlightId, worker: WorkerRef) -> bool {
        let Some(flight) = self.legs.flights.get(id) else {
            return false;
        };
        let (limits, now) = (self.legs.context.limits, self.legs.context.now);
        let ask = move_ask(flight, MoveReason::Drain, limits);
        let query = flight.query(None, limits, now);
        self.legs
            .fleet
            .could_take(worker, &query.asking(ask, &BTreeSet::new()))
    }

    // === a move ===

    fn begin_move(&mut self, id: FlightId, why: MoveReason) {
        let began = self.legs.context.now;
        let Some(flight) = self.legs.flights.get_mut(id) else {
            return;
        };
        let handoff = flight.name_attempt();
        let moving = FlightMigration {
            handoff,
            why,
            began,
            leg: None,
        };
        self.legs.flights.set_move(id, moving);
        self.legs.context.emit(RouterOutput::Count { handoff });
    }

    /// Orders the reservation at a target, once the client's tokens are counted.
    pub(crate) fn depart(&mut self, id: FlightId) {
        let moving = self.legs.flights.take_move(id);
        let flight = self.legs.flights.get(id);
        let of = flight.and_then(|flight| flight.attempt());
        let of = of.filter(|a| a.is_running()).cloned();
        let Some((of, moving)) = of.zip(moving) else {
            return;
        };
        let why = moving.why;
        let Some(flight) = self.legs.flights.get(id) else {
            return;
        };
        if flight.sequence_end(of.context_tokens_max).is_some() {
            // Its `Finished` is on the way.
            return;
        }
        if why == MoveReason::MemoryPressure {
            let drawn = flight.request.generated.len() as u32;
            let rest = self.legs.context.limits.expected_output_tokens;
            if flight.moves.yielded_lately(drawn, rest) {
                return self.legs.fleet.drop_migration_request(of.decode);
            }
        } else if self.legs.fleet.move_reason(of.decode).is_none() {
            // The source serves decode legs again.
            return;
        }
        // If there is no room any more, news of room will start another move.
        if let Ok(target) = self.target(id, why) {
            self.ask_target(id, &of, target, &moving);
        }
    }

    fn ask_target(
        &mut self,
        id: FlightId,
        of: &FlightAttempt,
        target: WorkerRef,
        moving: &FlightMigration,
    ) {
        let (handoff, why) = (moving.handoff, moving.why);
        let Some(flight) = self.legs.flights.get(id) else {
            return;
        };
        let cost = MigrationCost {
            ask: move_ask(flight, why, self.legs.context.limits),
            tpot: flight
                .request
                .slo
                .tpot
                .filter(|_| self.legs.context.limits.mode == RoutingMode::Slo),
        };
        let reserve = ReserveOrder {
            handoff,
            request: Arc::clone(&flight.request),
            sender: of.decode,
            expected_output_tokens: self.legs.context.limits.expected_output_tokens,
            ahead_tokens: self.legs.context.limits.move_ahead_tokens,
            waited: self.legs.context.now.since(flight.submitted),
            due: None,
        };
        let context_tokens_max = self.legs.fleet.context_tokens_max(target);
        let leg = FlightAttempt {
            of: Some(of.handoff),
            ..FlightAttempt::new(handoff, of.decode, target, context_tokens_max)
        };
        let moving = FlightMigration {
            handoff,
            why,
            began: self.legs.context.now,
            leg: Some(leg),
        };
        self.legs.flights.set_move(id, moving);
        self.legs.fleet.claim_move_target(handoff, target, &cost);
        let until = self.legs.context.now + self.legs.context.limits.reserve_timeout;
        self.legs
            .flights
            .set_timer(id, FlightTimer::StepTimeout, Some(until));
        self.legs.note(RouterNote::Moving {
            handoff,
            from: of.decode,
            to: target,
            why,
        });
        self.legs.send_order(target, Order::Reserve(reserve));
    }

    /// Orders the source to send, after the target has reserved blocks.
    pub(crate) fn reserved(&mut self, handoff: HandoffId, target: HandoffTarget) {
        let Some(flight) = self.legs.flights.get_mut(handoff.flight) else {
            return;
        };
        let tokens = (flight.request.prompt.len() + flight.request.generated.len()) as u32;
        let Some(leg) = flight.leg_mut(handoff) else {
            return;
        };
        leg.reserved = true;
        let (source, of) = (leg.prefill, leg.sending());
        self.legs
            .flights
            .set_timer(handoff.flight, FlightTimer::StepTimeout, None);
        let migrate = MigrateOrder {
            handoff,
            of,
            target,
            tokens,
        };
        self.legs.send_order(source, Order::Migrate(migrate));
    }

    /// Completes a move: the target has everything, and its attempt becomes the flight's.
    pub(crate) fn moved(&mut self, id: FlightId) {
        let Some(FlightMigration {
            why,
            began,
            leg: Some(leg),
            ..
        }) = self.legs.flights.take_move(id)
        else {
            return;
        };
        let Some(flight) = self.legs.flights.get_mut(id) else {
            return;
        };
        let drawn = flight.request.generated.len() as u32;
        flight.moves.complete(why, drawn);
        let (handoff, source, of) = (leg.handoff, leg.prefill, leg.sending());
        self.legs.flights.begin(FlightAttempt {
            landed: true,
            ..leg
        });
        self.legs
            .flights
            .set_timer(id, FlightTimer::StepTimeout, None);
        self.legs
            .flights
            .set_timer(id, FlightTimer::MoveBackoff, None);
        let took = self.legs.context.now.since(began);
        self.legs.note(RouterNote::Moved { handoff, took });
        // The target informs the source too, but it may be lost before. The source paused before it
        // sealed, so it has no further reports than those on their way.
        self.legs.release_leg(source, of, LegRelease::Cancel);
        self.next_from(source);
    }

    // === aborted moves ===

    /// Handles a target that does not take the sequence, or should not. The source, once it was
    /// ordered to send, decides: it may have sealed, and then waits for the target's answer.
    pub(crate) fn broken(&mut self, handoff: HandoffId, failure: Failure) -> Option<SourceFailure> {
        let id = handoff.flight;
        let flight = self.legs.flights.get_mut(id)?;
        let speaks = flight.attempt().is_some_and(|a| a.leg_failure.is_none());
        let leg = flight.leg_mut(handoff)?;
        if !(leg.reserved && speaks) {
            return self.over(id, failure);
        }
        if leg.leg_failure.is_none() {
            leg.leg_failure = Some(failure);
            let (source, target) = (leg.prefill, leg.decode);
            self.legs.release_leg(target, handoff, LegRelease::Cancel);
            self.legs.send_order(source, Order::Cancel { handoff });
        }
        None
    }

    pub(crate) fn refused(
        &mut self,
        worker: WorkerRef,
        handoff: HandoffId,
        refusal: Refusal,
    ) -> Option<SourceFailure> {
        self.legs.note(RouterNote::PassedOver {
            handoff,
            worker,
            refusal: Some(refusal),
        });
        self.broken(handoff, Failure::Rejected)
    }

    /// Ends an aborted move: the sequence goes on where it was, if it still is there, and rests
    /// before it tries again.
    pub(crate) fn over(&mut self, id: FlightId, failure: Failure) -> Option<SourceFailure> {
        let moving = self.legs.flights.take_move(id);
        let leg = moving.and_then(|moving| moving.leg)?;
        let now = self.legs.context.now;
        let flight = self.legs.flights.get_mut(id)?;
        let until = now + flight.moves.abort(leg.decode.worker);
        let doubt = flight.attempt().and_then(|a| a.leg_failure.clone());
        let current = flight.attempt().map(|a| a.handoff);
        let flights = &mut self.legs.flights;
        flights.set_timer(id, FlightTimer::StepTimeout, None);
        flights.set_timer(id, FlightTimer::MoveBackoff, Some(until));
        self.legs
            .release_leg(leg.decode, leg.handoff, LegRelease::Cancel);
        let handoff = leg.handoff;
        self.legs
            .note(RouterNote::MigrationAborted { handoff, failure });
        let Some((failure, handoff)) = doubt.zip(current) else {
            self.next_from(leg.prefill);
            return None;
        };
        Some(SourceFailure {
            handoff,
            failure,
            worker: leg.decode,
        })
    }

    /// Tries to move again after the pause that follows an aborted move.
    pub(crate) fn rested(&mut self, id: FlightId) {
        let flight = self.legs.flights.get(id);
        let source = flight.and_then(|f| f.attempt()).map(|a| a.decode);
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
    pub(crate) fn aborted(
        &mut self,
        worker: WorkerRef,
        handoff: HandoffId,
        failure: Failure,
    ) -> Option<SourceFailure> {
        let moves = |a: &FlightAttempt| a.of.is_some() && a.reserved && a.prefill == worker;
        if let Some(leg) = self.legs.flights.leg(handoff).filter(|leg| moves(leg)) {
            // The target's failure is more specific.
            let failure = leg.leg_failure.clone().unwrap_or(failure);
            return self.over(handoff.flight, failure);
        }
        let current = self.legs.flights.current(handoff);
        // It landed, and its last tokens will not come.
        if current.is_some_and(|a| moves(a) && !a.prefilled) {
            return Some(SourceFailure {
                handoff,
                failure,
                worker,
            });
        }
        self.legs.note(RouterNote::Stale { worker });
        None
    }
}

/// The size with which a target is chosen. A target that takes a sequence over to make room
/// elsewhere must have room for twice its growth, or it would be the next to ask.
fn move_ask(flight: &FlightRecord, why: MoveReason, limits: &RouterLimits) -> AttemptSize {
    let output = limits.expected_output_tokens.max(limits.move_ahead_tokens);
    AttemptSize::of(
        &flight.request,
        match why {
            MoveReason::Drain | MoveReason::Role => output,
            MoveReason::MemoryPressure => output.saturating_mul(2),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{FLIGHT, LegsFixture, at, handoff, worker};
    use std::time::Duration;

    fn moves(running: &mut LegsFixture) -> FlightMoves<'_> {
        FlightMoves {
            legs: running.legs(),
        }
    }

    /// A drain of worker 2 moves the flight: worker 3 is to reserve blocks for it.
    fn departed() -> LegsFixture {
        let mut running = LegsFixture::running();
        running.fleet.drain(worker(2));
        moves(&mut running).evacuate(None);
        let count = RouterOutput::Count {
            handoff: handoff(1),
        };
        assert_eq!(running.outputs(), [count]);
        moves(&mut running).depart(FLIGHT);
        running
    }

    #[test]
    fn a_sequence_departs_after_its_tokens_are_counted() {
        let mut moving = departed();
        let [(target, Order::Reserve(order))] = &moving.orders()[..] else {
            panic!("one order to reserve");
        };
        let names = (*target, order.sender, order.handoff);
        assert_eq!(names, (worker(3), worker(2), handoff(1)));
        moving.flights.check(moving.now);
        // A move under way is no reason for a second one.
        moves(&mut moving).evacuate(None);
        assert_eq!(moving.outputs(), []);
    }

    #[test]
    fn a_worker_is_left_by_so_many_at_once() {
        let mut running = LegsFixture::running();
        running.limits.moves_max = 0;
        running.fleet.drain(worker(2));
        moves(&mut running).evacuate(None);
        assert_eq!(running.outputs(), []);
    }

    #[test]
    fn a_landed_move_releases_its_source() {
        let mut moving = departed();
        moving.outputs();
        moves(&mut moving).moved(FLIGHT);
        let cancel = Order::Cancel {
            handoff: handoff(0),
        };
        assert_eq!(moving.orders(), [(worker(2), cancel)]);
        let attempt = moving.flights.current(handoff(1)).unwrap();
        assert_eq!((attempt.decode, attempt.landed), (worker(3), true));
        assert_eq!(moving.flights.moving().count(), 0);
    }

    #[test]
    fn an_aborted_move_rests_twice_as_long_each_time() {
        let mut moving = departed();
        for (attempt, rest) in [(1, 100), (2, 200), (3, 400)] {
            let failed = moves(&mut moving).broken(handoff(attempt), Failure::Rejected);
            assert!(failed.is_none(), "its source goes on");
            let timer = moving.flights.timer(FLIGHT, FlightTimer::MoveBackoff);
            assert_eq!(timer, Some(moving.now + Duration::from_millis(rest)));
            moving
                .flights
                .set_timer(FLIGHT, FlightTimer::MoveBackoff, None);
            moving.fleet.release(worker(3), handoff(attempt));
            moves(&mut moving).rested(FLIGHT);
            moves(&mut moving).depart(FLIGHT);
        }
    }

    #[test]
    fn a_source_in_doubt_fails_with_its_move() {
        let mut moving = departed();
        moving.now = at(9);
        let flight = moving.flights.get_mut(FLIGHT).unwrap();
        let attempt = flight.attempt_mut(handoff(0)).unwrap();
        attempt.leg_failure = Some(Failure::WorkerLost);
        let failed = moves(&mut moving).broken(handoff(1), Failure::Rejected);
        let failed = failed.expect("the source failed");
        assert_eq!(failed.failure, Failure::WorkerLost);
        assert_eq!((failed.handoff, failed.worker), (handoff(0), worker(3)));
    }
}
