//! The outputs of one model's brain, performed by the router's driver.
//!
//! Never decides. Invariant: everything that is counted or shown has the model of the pool that
//! caused it.

use super::RouterDriver;
use crate::flights::FlightEnd;
use cleave_domain::{
    Ending, FlightId, HandoffId, Order, RequestStageTimes, Role, ScalingMode, WorkerRef,
};
use cleave_fleet::ScalingStatus;
use cleave_planner::scaling::ScalerDecision;
use cleave_router::{RouterActions, RouterNote, RouterReadiness};
use cleave_telemetry::NoteContext;
use std::sync::Arc;
use tracing::{Level, info};

/// The driver, for the pool of one model.
pub(super) struct PoolActions<'a> {
    pub(super) driver: &'a mut RouterDriver,
    pub(super) model: Arc<str>,
}

impl PoolActions<'_> {
    /// Publishes how many workers are wanted from now on.
    fn scaling_decided(&mut self, decision: ScalerDecision) {
        let model = &self.model;
        let effects = &self.driver.effects;
        let before = effects.scaling.borrow().of(model);
        let mode = match before {
            ScalingStatus::Off => return,
            ScalingStatus::Starting(mode)
            | ScalingStatus::First(mode, _)
            | ScalingStatus::Decided(mode, _) => mode,
        };
        if decision.first {
            return self.first_workers_wanted(mode, &decision);
        }
        let is_unchanged = matches!(&before, ScalingStatus::Decided(_, earlier) if earlier.wanted == decision.wanted);
        if !is_unchanged {
            let target = &decision.wanted;
            let reason = |role| target.reasons.for_role(role).name();
            info!(
                %model,
                prefill = target.workers.prefill,
                decode = target.workers.decode,
                both = target.workers.both,
                prefill_legs = target.legs.prefill,
                decode_legs = target.legs.decode,
                why_prefill = reason(Role::Prefill),
                why_decode = reason(Role::Decode),
                why_both = reason(Role::Both),
                rate = decision.rate,
                waiting = decision.waiting,
                advice = mode == ScalingMode::Advise,
                "workers wanted"
            );
        }
        effects.scaling_series.show(model, &decision);
        effects.dashboard.scaling_decided(model, &decision.wanted);
        let status = ScalingStatus::Decided(mode, decision);
        effects
            .scaling
            .send_modify(|statuses| statuses.set(model, status));
    }

    /// A request waits at a router that has just started and knows no worker.
    fn first_workers_wanted(&self, mode: ScalingMode, decision: &ScalerDecision) {
        let model = &self.model;
        let scaling = &self.driver.effects.scaling;
        let first = decision.wanted.workers;
        let status = ScalingStatus::First(mode, first);
        if scaling.borrow().of(model) == status {
            return;
        }
        info!(
            %model,
            prefill = first.prefill,
            decode = first.decode,
            both = first.both,
            waiting = decision.waiting,
            advice = mode == ScalingMode::Advise,
            "first workers wanted: a request waits, and this router has just started; none is stopped before its \
             workers had time to connect"
        );
        scaling.send_modify(|statuses| statuses.set(model, status));
    }
}

impl RouterActions for PoolActions<'_> {
    type Outcome = ();

    fn order(&mut self, worker: WorkerRef, order: Order) {
        self.driver.send_order(worker, order);
    }

    fn fence(&mut self, handoff: HandoffId) {
        let generated = self.driver.effects.flights.fence(handoff);
        self.driver.queue_answer(handoff, generated);
    }

    fn count(&mut self, handoff: HandoffId) {
        let generated = self.driver.effects.flights.tokens_given(handoff.flight);
        self.driver.queue_answer(handoff, generated);
    }

    fn end(
        &mut self,
        flight: FlightId,
        ending: Ending,
        output_tokens: Option<u32>,
        timing: RequestStageTimes,
    ) {
        let end = FlightEnd {
            ending,
            output_tokens,
            timing,
        };
        let effects = &self.driver.effects;
        if let Some(ended) = effects.flights.end(flight, end)
            && let Some(judged) = ended.judged
            && let Some(verdict) = effects.slo.ended(&self.model, judged, &ended.ending)
        {
            effects.dashboard.judged(&verdict);
        }
    }

    /// The pools report the end of a drain together.
    fn drained(&mut self) {}

    fn readiness(&mut self, readiness: RouterReadiness) {
        let model = &self.model;
        let all = &self.driver.effects.readiness;
        all.send_modify(|all| all.set(model, readiness));
    }

    fn workers_wanted(&mut self, decision: ScalerDecision) {
        self.scaling_decided(decision);
    }

    fn note(&mut self, note: RouterNote) {
        let effects = &self.driver.effects;
        let is_logged = tracing::enabled!(target: "note", Level::DEBUG)
            || tracing::enabled!(target: "decision", Level::DEBUG);
        let flight = note.flight();
        let request = flight.filter(|_| is_logged);
        let request = request.and_then(|flight| effects.flights.request_context(flight));
        let roster = &effects.roster;
        let context = NoteContext {
            flight,
            model: &self.model,
            request: request.as_ref(),
            worker_name: &|worker| roster.name(worker),
        };
        for observer in effects.observers() {
            observer.handle_note(&note, context);
        }
    }
}
