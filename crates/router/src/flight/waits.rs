//! The waits of flights: for answers of the body, for timers, and for room.
//!
//! Owns: the effect of each of these. Never: handles the report of a worker; `reports` does.
//! Invariant: an answer or a timer counts only for the stage that waits for it.

use crate::event::RouterNote;
use crate::flight::legs::LegRules;
use crate::flight::state::{FlightPhase, FlightRecord};
use crate::flight::steps::FlightSteps;
use crate::flight::timers::FlightTimer;
use cleave_domain::{Failure, FlightId, HandoffId, TokenId, WorkerRef};
use std::sync::Arc;

impl FlightSteps<'_> {
    // === answers of the body, and timers ===

    /// Handles the client's tokens; an answer that no question waits for is out of date.
    pub(crate) fn counted(&mut self, handoff: HandoffId, generated: Arc<[TokenId]>) {
        let LegRules { flights, fleet, .. } = self.legs();
        if let Some(failed) = flights.counted_attempt(handoff) {
            return self.recovery.resume(failed, generated);
        }
        let flight = flights.get_mut(handoff.flight);
        let moves = |flight: &&mut FlightRecord| {
            let moving = flight.moving();
            moving.is_some_and(|m| m.handoff == handoff && m.leg.is_none())
        };
        if let Some(flight) = flight.filter(moves) {
            flight.extend_output(generated, fleet.block_sizes());
            self.moves().depart(handoff.flight);
        }
    }

    /// Handles the end of the time that the flight may wait in its present stage.
    pub(crate) fn timed_out(&mut self, id: FlightId) {
        let Some(flight) = self.flights().get(id) else {
            return;
        };
        let attempt = match flight.stage() {
            FlightPhase::Waiting => return self.recovery.admission.waited_out(id),
            FlightPhase::CountingTokens(_) => return,
            FlightPhase::Flying(attempt) => attempt,
        };
        let (handoff, decode, prefill) = (attempt.handoff, attempt.decode, attempt.prefill);
        if !attempt.reserved {
            self.recovery.pass_over(handoff, decode, None);
        } else if let Some(failure) = attempt.leg_failure.clone() {
            let silent = flight.leg().map_or(prefill, |leg| leg.decode);
            self.recovery.fail(handoff, failure, silent);
        } else if let Some(leg) = flight.leg().filter(|leg| !leg.reserved) {
            let (handoff, worker) = (leg.handoff, leg.decode);
            let mut moves = self.moves();
            moves.legs.fleet.set_silent(worker, true);
            moves.legs.note(RouterNote::PassedOver {
                handoff,
                worker,
                refusal: None,
            });
            let failed = moves.over(id, Failure::Rejected);
            self.settle_move(failed);
        }
    }

    /// Starts the limit on a client that does not read, at its first stall.
    pub(crate) fn stalled(&mut self, id: FlightId) {
        let LegRules {
            context, flights, ..
        } = self.legs();
        let until = context.now + context.limits.reader_wait_max;
        if flights.timer(id, FlightTimer::ReaderTimeout).is_none() {
            flights.set_timer(id, FlightTimer::ReaderTimeout, Some(until));
        }
    }

    // === room for others ===

    /// Tries all flights that wait for room anywhere: running streams before new requests.
    pub(crate) fn retry_all_waiting(&mut self) {
        self.recovery.fail_over_stuck();
        self.moves().evacuate(None);
        self.recovery.admission.serve_queue();
        self.moves().grant_migration_requests(None);
    }

    /// Offers released or newly reported room to waiting flights. Streams that are to leave a
    /// worker go before new flights, and those that make room for others after them.
    pub(crate) fn room_appeared(&mut self, worker: WorkerRef) {
        self.recovery.fail_over_stuck();
        self.moves().evacuate(Some(worker));
        self.recovery.admission.news_of(worker);
        self.moves().grant_migration_requests(Some(worker));
    }
}
