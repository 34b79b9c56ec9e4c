//! The wait of a flight in the queue.
//!
//! Owns: joining the queue, and the end of the wait without a place. Never: places a flight.
//! Invariant: a flight waits with a time limit, and its end names the reason that it last met.

use crate::event::{DecisionOutcome, RoutingMode};
use crate::flight::end::FlightEndings;
use crate::flight::timers::FlightTimer;
use crate::placement::admit::FlightAdmission;
use crate::placement::forecast::TargetMiss;
use crate::placement::policy::NoPlacement;
use crate::queue::QueueKind;
use cleave_domain::{Ending, Failure, FlightId, OnSloMiss, Refusal, SloMetric};
use std::time::Duration;

impl FlightAdmission<'_> {
    /// Joins the queue; a new flight ends where the queue, or its class's part of it, is full.
    pub(crate) fn wait(&mut self, id: FlightId) {
        let Some(flight) = self.flight(id) else {
            return;
        };
        let class = flight.class(&self.ends.legs.context.limits.policy);
        let full = class
            .queue_max
            .is_some_and(|max| self.ends.queue.len_of(&flight.place.queue.class) >= max);
        let fresh = flight.failures.last().is_none();
        // A worker that could not load its adapter could not soon after, either, and no other one
        // answered that it is busy.
        let is_broken = matches!(flight.refusals.last(), Some(Refusal::NoAdapter { .. }));
        if fresh && (full || is_broken) {
            return self.end_without_place(id);
        }
        if fresh && self.ends.queue.is_full() {
            match self.ends.queue.last_behind(&flight.place) {
                Some(last) => self.end_without_place(last),
                None => return self.end_without_place(id),
            }
        }
        let Some(flight) = self.flight(id) else {
            return;
        };
        let limit = self.ends.rules().wait_limit(flight);
        self.ends.decide(id, DecisionOutcome::Waits, Vec::new());
        let FlightEndings { legs, queue, .. } = &mut self.ends;
        let by_time = fresh && legs.context.limits.mode == RoutingMode::Slo;
        legs.flights.set_waiting(id);
        let Some(flight) = legs.flights.get_mut(id) else {
            return;
        };
        if !flight.pauses(legs.context.now) {
            flight.refusals.reconsider(|_| false);
        }
        flight.refusals.wait();
        let until = *flight.wait_until.get_or_insert(limit);
        let latest = Some(flight.place.latest_start).filter(|_| by_time);
        if !fresh {
            flight.place.queue.kind = QueueKind::Resumed;
        }
        queue.join(&flight.place);
        let until = until.min(latest.unwrap_or(until));
        legs.flights
            .set_timer(id, FlightTimer::StepTimeout, Some(until));
    }

    /// Lets a flight wait until workers are there; its targets count from then on. While a worker
    /// is to be started, no request is refused for want of one before the worker could be there.
    pub(crate) fn wait_for_workers(&mut self, id: FlightId, start_max: Duration) {
        if let Some(flight) = self.flight_mut(id) {
            let limit = match flight.on_miss {
                OnSloMiss::Queue(limit) => limit.max(start_max),
                OnSloMiss::Reject | OnSloMiss::Downgrade(_) => start_max,
            };
            flight.on_miss = OnSloMiss::Queue(limit);
            flight.place.latest_start = flight.submitted + limit;
            flight.awaits_start = true;
        }
        self.wait(id);
    }

    /// Handles the end of a flight's waiting time, or its latest start.
    pub(crate) fn waited_out(&mut self, id: FlightId) {
        let Some(flight) = self.flight(id) else {
            return;
        };
        let (now, limits) = (self.ends.legs.context.now, self.ends.legs.context.limits);
        let by_time = limits.mode == RoutingMode::Slo && flight.is_new();
        let Some(due) = flight.prompt_deadline().filter(|_| by_time) else {
            return self.end_without_place(id);
        };
        let (alone, relief) = self.ends.rules().prompt_times(flight);
        let queues = matches!(flight.on_miss, OnSloMiss::Queue(_));
        // Its prefix may be cached somewhere, so it may start later than was assumed.
        let last = flight.submitted + due.saturating_sub(alone);
        if !queues && last > now {
            return match flight.wait_until.filter(|at| *at > now) {
                Some(at) => {
                    let at = Some(at.min(last));
                    let flights = &mut self.ends.legs.flights;
                    flights.set_timer(id, FlightTimer::StepTimeout, at);
                }
                None => self.end_without_place(id),
            };
        }
        if self.full() == Refusal::NoWorker {
            return self.end_without_place(id);
        }
        let retry_after = || self.ends.queue.retry_after();
        let miss = TargetMiss {
            aim: match flight.request.slo.ttft {
                Some(_) => SloMetric::Ttft,
                None => SloMetric::EndToEnd,
            },
            predicted: now.since(flight.submitted) + alone,
            met_after: Some(relief.unwrap_or_else(retry_after)),
        };
        self.unmet(id, miss, Vec::new());
    }

    /// Ends a flight without a place: refused if it never ran, failed if it did. One that only
    /// waited too long after a failure had retries left, so its last failure is the reason.
    pub(crate) fn end_without_place(&mut self, id: FlightId) {
        let exists = !matches!(self.find(id), Err(NoPlacement::NoWorker));
        let full = self.full();
        let Some(flight) = self.flight(id) else {
            return;
        };
        let failure = match flight.failures.last() {
            Some(last)
                if flight.failures.counted() > self.ends.legs.context.limits.failures_max =>
            {
                Failure::RetriesSpent(Box::new(last.clone()))
            }
            Some(last) => last.clone(),
            None if exists => {
                let refusal = unplaced(flight.refusals.last(), full);
                return self.ends.refuse(id, refusal, Vec::new());
            }
            None => return self.ends.refuse(id, self.unserved(id), Vec::new()),
        };
        self.ends.end(id, Ending::Failed(failure));
    }

    fn full(&self) -> Refusal {
        self.ends.rules().full(self.ends.queue)
    }

    /// The refusal of a flight that no connected worker serves.
    pub(crate) fn unserved(&self, id: FlightId) -> Refusal {
        let adapter = self.flight(id).and_then(|flight| flight.request.adapter);
        let fleet = &self.ends.legs.fleet;
        let reason = adapter.and_then(|adapter| fleet.adapter_problem(adapter));
        reason.map_or(Refusal::NoWorker, |reason| Refusal::NoAdapter {
            reason: reason.to_owned(),
        })
    }
}

/// The refusal of a request that waited for room in vain, by the last refusal of a worker: a queue
/// was full only if no worker gave another reason. `full` is the fleet's own answer.
fn unplaced(refused: Option<&Refusal>, full: Refusal) -> Refusal {
    match (refused, full) {
        (Some(Refusal::NoBlocks { .. }), Refusal::QueueFull { retry_after }) => {
            Refusal::NoBlocks { retry_after }
        }
        (None | Some(Refusal::QueueFull { .. } | Refusal::NoBlocks { .. }), full) => full,
        (
            Some(
                other @ (Refusal::Late { .. }
                | Refusal::TooLong { .. }
                | Refusal::OutOfVocabulary { .. }
                | Refusal::NoAdapter { .. }),
            ),
            _,
        ) => other.clone(),
        // The fleet is not full, and no worker serves the request: another router may know better.
        (Some(Refusal::NoWorker | Refusal::Draining | Refusal::WrongWorker), _) => {
            Refusal::NoWorker
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::SloMetric;

    #[test]
    fn no_other_refusal_of_a_worker_becomes_queue_full() {
        let soon = Duration::from_secs(1);
        let full = Refusal::QueueFull { retry_after: soon };
        let late = Refusal::Late {
            aim: SloMetric::Ttft,
            predicted: soon,
            retry_after: soon,
        };
        let reason = "its file is shorter".to_owned();
        let broken = Refusal::NoAdapter { reason };
        let no_blocks = Refusal::NoBlocks { retry_after: soon };
        for (refused, answer) in [
            (full.clone(), full.clone()),
            (no_blocks.clone(), no_blocks),
            (late.clone(), late),
            (
                Refusal::TooLong { tokens_max: 7 },
                Refusal::TooLong { tokens_max: 7 },
            ),
            (
                Refusal::OutOfVocabulary { vocab_size: 9 },
                Refusal::OutOfVocabulary { vocab_size: 9 },
            ),
            (Refusal::NoWorker, Refusal::NoWorker),
            (Refusal::Draining, Refusal::NoWorker),
            (Refusal::WrongWorker, Refusal::NoWorker),
            (broken.clone(), broken),
        ] {
            assert_eq!(
                unplaced(Some(&refused), full.clone()),
                answer,
                "{refused:?}"
            );
        }
        assert_eq!(unplaced(None, full.clone()), full);
    }
}
