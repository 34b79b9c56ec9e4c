//! The passes over the queue.
//!
//! Owns: the order of a pass, and the wait of a worker that refused. Never: predicts, or decides
//! when a pass is due; `passes` does.
//! Invariant: a pass places what has room, and ends after [`TRIES_MAX`] flights without a place.
//!
//! **Overtaking.** A pass goes through the queue in its order. A flight that would meet its target
//! nowhere holds up no other. A flight that finds no room may be overtaken by those of other queues
//! that do, [`OVERTAKEN_MAX`] times; from then on the queue stops until it is placed, so that large
//! requests do not starve. A flight without targets that yields to those with some holds up only
//! its own queue; it may starve until its waiting time is over. In the modes by load and round
//! robin nothing overtakes.
//!
//! [`OVERTAKEN_MAX`]: crate::placement::rules::OVERTAKEN_MAX

use crate::flight::state::FlightRecord;
use crate::placement::admit::FlightAdmission;
use crate::placement::policy::NoPlacement;
use crate::placement::rules::OvertakeRule;
use crate::queue::{QueueId, RETRY_AFTER};
use cleave_domain::{FlightId, WorkerRef};
use std::collections::BTreeSet;
use std::time::Duration;

/// Flights that find no place in one pass, at most.
const TRIES_MAX: u32 = 8;

impl FlightAdmission<'_> {
    /// The flight to be placed next.
    pub(crate) fn head(&self) -> Option<FlightId> {
        self.next_of(&BTreeSet::new(), &BTreeSet::new())
    }

    fn next_of(&self, closed: &BTreeSet<QueueId>, passed: &BTreeSet<FlightId>) -> Option<FlightId> {
        let legs = &self.ends.legs;
        let turn = Some(legs.fleet.version());
        let is_passed = |id| {
            let flight = legs.flights.get(id);
            let waits_on = |flight: &FlightRecord| {
                flight.unplaceable_at == turn || flight.pauses(legs.context.now)
            };
            passed.contains(&id) || flight.is_none_or(waits_on)
        };
        self.ends.queue.first(self.ends.tally, closed, is_passed)
    }

    /// Places as many flights as possible, in the order of the queue.
    /// A flight that finds no room closes its queue for the pass, or ends the pass, by its overtake
    /// rule.
    pub(crate) fn serve_queue(&mut self) {
        let mut closed = BTreeSet::new();
        let mut overtaken: Vec<FlightId> = Vec::new();
        let mut passed = BTreeSet::new();
        let mut tries = 0;
        while let Some(id) = self.next_of(&closed, &passed).filter(|_| tries < TRIES_MAX) {
            let queue = self.flight(id).map(|f| f.place.queue_id());
            match self.seek(id) {
                Ok(placement) => match placement.miss() {
                    None => {
                        self.start(id, &placement);
                        self.count_overtaken(&overtaken);
                    }
                    Some(miss) => {
                        tries += 1;
                        passed.insert(id);
                        self.unmet(id, miss, placement.considered);
                    }
                },
                // It holds up no other flight.
                Err(NoPlacement::TooLong { .. } | NoPlacement::NoWorker) => {}
                Err(NoPlacement::Busy) => {
                    tries += 1;
                    // The fleet is full, whatever an earlier refusal said.
                    if let Some(flight) = self.flight_mut(id) {
                        flight.refusals.forget_reason();
                    }
                    match self.overtake_rule(id) {
                        OvertakeRule::Forbidden => break,
                        OvertakeRule::Counted => overtaken.push(id),
                        OvertakeRule::Uncounted => {}
                    }
                    closed.extend(queue);
                }
            }
        }
    }

    fn count_overtaken(&mut self, flights: &[FlightId]) {
        for id in flights {
            if let Some(flight) = self.flight_mut(*id) {
                flight.overtaken += 1;
            }
        }
    }

    fn overtake_rule(&self, id: FlightId) -> OvertakeRule {
        let rule = |flight| self.ends.rules().overtake_rule(flight);
        self.flight(id).map_or(OvertakeRule::Forbidden, rule)
    }

    /// Makes a pass over the queue after news of room or time, but at most one in each interval.
    pub(crate) fn serve_queue_soon(&mut self) {
        let is_empty = self.ends.queue.len() == 0;
        if self.passes.ask(self.ends.legs.context.now, is_empty) {
            self.serve_queue();
        }
    }

    /// Makes a pass over the queue after news of a worker, if that could help the first flight.
    pub(crate) fn news_of(&mut self, worker: WorkerRef) {
        if self.ends.queue.len() == 0 {
            return;
        }
        if self.ends.rules().overtakes() {
            return self.serve_queue_soon();
        }
        let head = self.head().and_then(|id| self.flight(id));
        let legs = &self.ends.legs;
        let helps = |flight: &FlightRecord| {
            let query = flight.query(None, legs.context.limits, legs.context.now);
            legs.fleet.could_help(worker, &query)
        };
        if head.is_some_and(helps) {
            self.serve_queue();
        }
    }

    /// Closes a worker for `wait`, and makes a pass over the queue then.
    pub(crate) fn close_worker(&mut self, worker: WorkerRef, wait: Duration) {
        let (least, _) = RETRY_AFTER;
        let legs = &mut self.ends.legs;
        // A worker's own estimate may be long; another try each second costs nothing.
        let until = legs.context.now + wait.clamp(least / 10, Duration::from_secs(1));
        legs.fleet.close_until(worker, until);
        self.passes.retry(worker.worker, until);
    }
}
