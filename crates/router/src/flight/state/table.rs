//! The flights of a router, with their timers.
//!
//! Owns: the flights, the stage of each, and the indices of stages. Never: decides, or knows the
//! queue and the workers. Invariant: every flight that was entered is here or was removed once; an
//! index lists exactly the flights whose stage it names, and no timer outlives its flight.

use super::{FailedAttempt, FlightAttempt, FlightMigration, FlightPhase, FlightRecord};
use crate::flight::timers::{FlightTimer, FlightTimers};
use cleave_domain::{FlightId, HandoffId, Time, WorkerId, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Default)]
pub(crate) struct RouterFlights {
    flights: BTreeMap<FlightId, FlightRecord>,
    timers: FlightTimers,
    /// Flights with a move under way, an index that saves a walk over all flights.
    moving: BTreeSet<FlightId>,
    /// Flights that failed over from a stuck worker and do not run elsewhere yet.
    failing_over: BTreeMap<FlightId, WorkerId>,
    /// Number of flights that are fenced and whose tokens are being counted.
    counting: u32,
    arrivals: u64,
    ended: u64,
}

impl RouterFlights {
    pub(crate) fn len(&self) -> usize {
        self.flights.len()
    }

    pub(crate) fn get(&self, id: FlightId) -> Option<&FlightRecord> {
        self.flights.get(&id)
    }

    /// The flight, to change all but its stage and its move.
    pub(crate) fn get_mut(&mut self, id: FlightId) -> Option<&mut FlightRecord> {
        self.flights.get_mut(&id)
    }

    pub(crate) fn contains(&self, id: FlightId) -> bool {
        self.flights.contains_key(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (FlightId, &FlightRecord)> {
        self.flights.iter().map(|(id, flight)| (*id, flight))
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut FlightRecord> {
        self.flights.values_mut()
    }

    // === attempts ===

    /// The current attempt of a flight, if it is this one.
    pub(crate) fn current(&self, handoff: HandoffId) -> Option<&FlightAttempt> {
        let attempt = self.get(handoff.flight)?.attempt()?;
        (attempt.handoff == handoff).then_some(attempt)
    }

    /// The attempt to which a flight moves, if it is this one.
    pub(crate) fn leg(&self, handoff: HandoffId) -> Option<&FlightAttempt> {
        let leg = self.get(handoff.flight)?.leg()?;
        (leg.handoff == handoff).then_some(leg)
    }

    /// The attempt that moved here from `handoff` and whose sender has not reported its last token
    /// yet.
    pub(crate) fn successor(&self, worker: WorkerRef, handoff: HandoffId) -> Option<HandoffId> {
        let attempt = self.get(handoff.flight)?.attempt()?;
        let waits = attempt.of == Some(handoff) && !attempt.prefilled;
        (waits && attempt.prefill.worker == worker.worker).then_some(attempt.handoff)
    }

    /// Whether the source of a move has sealed, so that the target may have everything.
    pub(crate) fn is_sealed(&self, id: FlightId) -> bool {
        let leg = self.get(id).and_then(|flight| flight.leg());
        leg.is_some_and(|leg| leg.prefilled && leg.leg_failure.is_none())
    }

    // === stages ===

    /// The number of the next arrival.
    pub(crate) fn next_arrival(&self) -> u64 {
        self.arrivals + 1
    }

    /// Adds a flight; it waits.
    pub(crate) fn enter(&mut self, id: FlightId, flight: FlightRecord) {
        assert_eq!(flight.stage, FlightPhase::Waiting, "{id} begins elsewhere");
        let before = self.flights.insert(id, flight);
        assert!(before.is_none(), "{id} was submitted twice");
        self.arrivals += 1;
    }

    /// Removes a flight that ends, with its timers.
    pub(crate) fn remove(&mut self, id: FlightId) -> Option<FlightRecord> {
        let flight = self.flights.remove(&id)?;
        self.timers.remove_flight(id);
        self.counting -= u32::from(matches!(flight.stage, FlightPhase::CountingTokens(_)));
        self.failing_over.remove(&id);
        self.moving.remove(&id);
        self.ended += 1;
        Some(flight)
    }

    /// Begins an attempt: from now on it is the current one.
    pub(crate) fn begin(&mut self, attempt: FlightAttempt) {
        self.set_stage(attempt.handoff.flight, FlightPhase::Flying(attempt));
    }

    /// Lets a flight wait, whose attempt is over or which had none.
    pub(crate) fn set_waiting(&mut self, id: FlightId) {
        self.set_stage(id, FlightPhase::Waiting);
    }

    /// Ends the current attempt, whose tokens are to be counted.
    pub(crate) fn fence(&mut self, failed: FailedAttempt) {
        self.set_stage(failed.handoff.flight, FlightPhase::CountingTokens(failed));
    }

    /// The attempt whose tokens are counted, if `fence` is the one named in its fence.
    pub(crate) fn counted_attempt(&self, fence: HandoffId) -> Option<FailedAttempt> {
        match &self.get(fence.flight)?.stage {
            FlightPhase::CountingTokens(failed) if failed.fence == fence => Some(*failed),
            _ => None,
        }
    }

    pub(crate) fn is_waiting(&self, id: FlightId) -> bool {
        let flight = self.get(id);
        flight.is_some_and(FlightRecord::is_waiting)
    }

    fn set_stage(&mut self, id: FlightId, stage: FlightPhase) {
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        assert!(
            flight.moving.is_none(),
            "{id} changes its stage as it moves"
        );
        self.counting -= u32::from(matches!(flight.stage, FlightPhase::CountingTokens(_)));
        self.counting += u32::from(matches!(stage, FlightPhase::CountingTokens(_)));
        flight.stage = stage;
    }

    /// Number of flights whose tokens are being counted.
    pub(crate) fn counting(&self) -> u32 {
        self.counting
    }

    // === moves ===

    /// Begins a move of the flight, or replaces it by its next stage.
    pub(crate) fn set_move(&mut self, id: FlightId, moving: FlightMigration) {
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.moving = Some(moving);
            self.moving.insert(id);
        }
    }

    pub(crate) fn take_move(&mut self, id: FlightId) -> Option<FlightMigration> {
        self.moving.remove(&id);
        self.flights.get_mut(&id)?.moving.take()
    }

    /// Flights with a move under way.
    pub(crate) fn moving(&self) -> impl Iterator<Item = &FlightRecord> {
        self.moving.iter().filter_map(|id| self.flights.get(id))
    }

    // === failing over ===

    /// Records that a flight failed over from a stuck worker.
    pub(crate) fn fail_over(&mut self, id: FlightId, from: WorkerId) {
        if self.contains(id) {
            self.failing_over.insert(id, from);
        }
    }

    /// Records that a flight runs again, or failed anew. Returns whether it was failing over.
    pub(crate) fn end_fail_over(&mut self, id: FlightId) -> bool {
        self.failing_over.remove(&id).is_some()
    }

    /// Number of flights that are failing over from this worker.
    pub(crate) fn failing_over_from(&self, worker: WorkerId) -> usize {
        let from = self.failing_over.values();
        from.filter(|from| **from == worker).count()
    }

    pub(crate) fn failing_over(&self) -> &BTreeMap<FlightId, WorkerId> {
        &self.failing_over
    }

    // === timers ===

    pub(crate) fn timer(&self, id: FlightId, timer: FlightTimer) -> Option<Time> {
        self.timers.get(id, timer)
    }

    /// Replaces the time of a timer; `None` stops it.
    pub(crate) fn set_timer(&mut self, id: FlightId, timer: FlightTimer, at: Option<Time>) {
        let at = at.filter(|_| self.contains(id));
        self.timers.set(id, timer, at);
    }

    pub(crate) fn first_timer(&self) -> Option<Time> {
        self.timers.first()
    }

    /// Removes and returns the first timer that is due.
    pub(crate) fn due_timer(&mut self, now: Time) -> Option<(FlightId, FlightTimer)> {
        self.timers.due(now)
    }

    // === invariants ===

    pub(crate) fn check(&self, now: Time) {
        self.timers.check();
        let sum = self.ended + self.flights.len() as u64;
        assert_eq!(
            self.arrivals, sum,
            "flights submitted, ended and under way do not add up"
        );
        let mut counting = 0;
        for (id, flight) in &self.flights {
            flight.check();
            counting += u32::from(matches!(flight.stage, FlightPhase::CountingTokens(_)));
            assert_eq!(
                self.moving.contains(id),
                flight.moving.is_some(),
                "the list of moving flights is wrong about {id}"
            );
            self.check_timers(*id, flight, now);
        }
        assert_eq!(
            counting, self.counting,
            "the number of flights being counted is wrong"
        );
        let listed = self.moving.iter().chain(self.failing_over.keys()).copied();
        for id in listed.chain(self.timers.flights()) {
            assert!(self.contains(id), "{id} ended but is listed or has a timer");
        }
    }

    /// Asserts that a flight that waits for anything has a limit on it.
    fn check_timers(&self, id: FlightId, flight: &FlightRecord, now: Time) {
        let is_timed = self.timer(id, FlightTimer::StepTimeout).is_some();
        match &flight.stage {
            FlightPhase::Waiting => assert!(is_timed, "{id} waits without a time limit"),
            FlightPhase::Flying(attempt) => {
                let answered = attempt.reserved && flight.leg().is_none_or(|leg| leg.reserved);
                assert!(
                    answered || is_timed,
                    "{id} waits for an answer without an alarm"
                );
            }
            FlightPhase::CountingTokens(_) => {}
        }
        let retries = self.timer(id, FlightTimer::RetryDelay).is_some();
        assert!(
            retries || !flight.pauses(now),
            "{id} pauses without a timer"
        );
    }
}

#[cfg(test)]
mod tests;
