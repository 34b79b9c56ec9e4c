//! A worker that does not take its leg: it refuses, or does not answer.
//!
//! Owns: passing over it, and the choice to try another, to wait or to refuse. Never: counts this
//! as a failure of the flight, unless the worker drew a token.
//! Invariant: after an order to run both legs that was not answered, no other attempt begins before
//! that one is fenced.

use crate::brain::RouterBrain;
use crate::candidates::ChosenPlacement;
use crate::event::RouterNote;
use crate::forecast::TargetMiss;
use crate::timers::FlightTimer;
use cleave_domain::{Failure, FlightId, HandoffId, Refusal, WorkerRef};
use std::time::Duration;

/// Workers tried in one round before a flight waits for news.
const ROUND_WORKERS: u32 = 3;

impl RouterBrain {
    /// Passes over a worker that does not take its leg: another may. After a refusal nothing was
    /// drawn. A worker that was ordered to run both legs and gives no answer may have drawn tokens,
    /// so the attempt is fenced first.
    pub(crate) fn pass_over(
        &mut self,
        handoff: HandoffId,
        worker: WorkerRef,
        refusal: Option<Refusal>,
    ) {
        let id = handoff.flight;
        // No answer at all: the worker is not counted as able to serve until it answers again.
        if refusal.is_none() {
            self.fleet.set_silent(worker, true);
        }
        let attempt = self.current(handoff).filter(|_| refusal.is_none());
        let unanswered = attempt.filter(|a| a.is_whole()).cloned();
        self.clock_lost(id);
        self.drop_legs(id, Failure::Rejected);
        self.note(RouterNote::PassedOver {
            handoff,
            worker,
            refusal: refusal.clone(),
        });
        match unanswered {
            Some(attempt) => {
                self.timers.set(id, FlightTimer::StepTimeout, None);
                self.fence(&attempt, None, Some(worker));
            }
            None => self.try_another(id, worker, refusal),
        }
    }

    /// Tries the next worker for a flight of which this one drew nothing, or lets it wait.
    pub(crate) fn try_another(
        &mut self,
        id: FlightId,
        worker: WorkerRef,
        refusal: Option<Refusal>,
    ) {
        // A refusal that any other worker would repeat is final, unless the request ran somewhere
        // before.
        let last_word = refusal.clone().filter(|refusal| match refusal {
            Refusal::TooLong { .. } | Refusal::OutOfVocabulary { .. } => true,
            Refusal::QueueFull { .. }
            | Refusal::NoBlocks { .. }
            | Refusal::NoWorker
            | Refusal::Late { .. }
            | Refusal::Draining
            | Refusal::WrongWorker => false,
        });
        let late = match &refusal {
            Some(Refusal::Late {
                aim,
                predicted,
                retry_after,
            }) => Some(TargetMiss {
                aim: *aim,
                predicted: *predicted,
                met_after: Some(*retry_after),
            }),
            _ => None,
        };
        let foreign = matches!(refusal, Some(Refusal::OutOfVocabulary { .. }));
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        if let (Some(refusal), None) = (last_word, &flight.failure) {
            return self.refuse(id, refusal, Vec::new());
        }
        // The stream has a token outside the vocabulary, which every worker would refuse.
        if foreign {
            return self.end_without_place(id);
        }
        // One worker's draining, or a routing mistake, replaces no answer of another worker.
        let is_answer = !matches!(refusal, Some(Refusal::Draining | Refusal::WrongWorker));
        if is_answer || flight.refused.is_none() {
            flight.refused = refusal.or(flight.refused.take());
        }
        flight.refusals += 1;
        flight.excluded.insert(worker.worker);
        if late.is_some() {
            flight.late_workers.insert(worker.worker);
        }
        // After a full round the flight waits for news instead of trying every worker of a large
        // fleet.
        let round_over = flight.refusals >= ROUND_WORKERS;
        let refused_late = flight.failure.is_none().then_some(late).flatten();
        let found = self.seek(id);
        if let Some(placement) = found.as_ref().ok().filter(|p| p.miss().is_none())
            && !round_over
        {
            return self.start(id, placement);
        }
        let considered = match &found {
            Ok(placement) => placement.considered.clone(),
            Err(_) => Vec::new(),
        };
        let missed = found.as_ref().ok().and_then(ChosenPlacement::miss);
        match missed.or(refused_late) {
            // Workers refused for lateness, or it is predicted of all that remain.
            Some(miss) => self.unmet(id, miss, considered),
            None => {
                // A worker that did not even answer is closed for a moment, or the first flight of
                // the queue would be sent straight back.
                self.close_worker(worker, Duration::ZERO);
                self.wait(id);
            }
        }
    }

    /// A worker that was passed over for want of an answer drew tokens that its client has: the
    /// attempt counts as failed, since a flight with output is never refused.
    pub(crate) fn drew_unanswered(&mut self, id: FlightId, worker: WorkerRef) {
        self.count_failure(id, Failure::Rejected);
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.excluded.insert(worker.worker);
            flight.wait_until = None;
        }
    }
}
