//! The claims of the flights on the workers: opened by a placement, changed by reports, released.

use super::RouterFleet;
use crate::event::RouterOutput;
use crate::fleet::ledger::{LegClaim, StreamSpan};
use crate::outputs::RouterContext;
use crate::placement::candidates::{ChosenPlacement, MigrationCost};
use crate::placement::policy::AttemptSize;
use cleave_domain::{FlightId, HandoffId, Order, PrefillOrder, ReserveOrder, RunOrder, WorkerRef};
use std::time::Duration;

impl RouterFleet {
    pub(crate) fn legs_open(&self, flight: FlightId) -> u32 {
        self.legs.get(&flight).copied().unwrap_or(0)
    }

    pub(crate) fn legs_open_in_all(&self) -> u32 {
        self.legs.values().sum()
    }

    /// Records the claims of a placement on its workers, before anything is sent.
    pub(crate) fn claim_legs(
        &mut self,
        handoff: HandoffId,
        placement: &ChosenPlacement,
        ask: &AttemptSize,
    ) {
        self.placements += 1;
        let ChosenPlacement {
            choice, forecast, ..
        } = placement;
        let work = forecast.map_or(Duration::ZERO, |forecast| forecast.work);
        let urgency = forecast.map_or(0, |forecast| forecast.urgency);
        let tokens = u64::from(ask.prompt_tokens - choice.cached_tokens);
        let mut legs = vec![choice.decode];
        if choice.prefill != choice.decode {
            legs.push(choice.prefill);
        }
        for worker_ref in legs {
            let decodes = worker_ref == choice.decode;
            let computes = worker_ref == choice.prefill;
            let blocks = self.blocks(worker_ref, ask.tokens_expected).unwrap_or(0);
            let role = self.get(worker_ref).map(|worker| worker.description.role);
            let part = LegClaim {
                tokens: if computes { tokens } else { 0 },
                blocks: if decodes { blocks } else { 0 },
                ordered: decodes,
                work: if computes { work } else { Duration::ZERO },
                urgency: if computes { urgency } else { 0 },
                tpot: placement.tpot.filter(|_| decodes),
                span: match forecast.filter(|_| decodes) {
                    Some(forecast) => forecast.span(self.now, placement.tpot.unwrap_or_default()),
                    None => StreamSpan::NONE,
                },
                guest: decodes && role.is_some_and(|role| !role.decodes()),
                ..LegClaim::NEW
            };
            self.add_claim(worker_ref, handoff, part);
        }
    }

    /// Records the claim of a move on its target; the sender has its claim already.
    pub(crate) fn claim_move_target(
        &mut self,
        handoff: HandoffId,
        target: WorkerRef,
        cost: &MigrationCost,
    ) {
        self.placements += 1;
        let part = LegClaim {
            blocks: self.blocks(target, cost.ask.tokens_expected).unwrap_or(0),
            ordered: true,
            tpot: cost.tpot,
            ..LegClaim::NEW
        };
        self.add_claim(target, handoff, part);
    }

    fn add_claim(&mut self, worker_ref: WorkerRef, handoff: HandoffId, claim: LegClaim) {
        let (placements, now) = (self.placements, self.now);
        if let Some(worker) = self.get_mut(worker_ref) {
            worker.chosen = placements;
            worker.ledger.open(handoff, claim, now);
            *self.legs.entry(handoff.flight).or_default() += 1;
        }
    }

    pub(crate) fn claim(&self, worker: WorkerRef, handoff: HandoffId) -> Option<&LegClaim> {
        self.get(worker)?.ledger.get(handoff)
    }

    /// Records that the worker answered the order of the hand-off's decode leg.
    pub(crate) fn order_answered(&mut self, worker: WorkerRef, handoff: HandoffId) {
        self.change(worker, handoff, |claim| claim.answered = true);
    }

    /// Records that an order of this leg is sent now: from here on it must be cancelled.
    pub(crate) fn leg_ordered(&mut self, worker: WorkerRef, handoff: HandoffId) {
        self.change(worker, handoff, |claim| claim.ordered = true);
    }

    /// Ends the renewal of the leg's lease: the leg is over, but for its release.
    pub(crate) fn end_lease(&mut self, worker: WorkerRef, handoff: HandoffId) {
        self.change(worker, handoff, |claim| claim.renewed = false);
    }

    fn change(
        &mut self,
        worker_ref: WorkerRef,
        handoff: HandoffId,
        edit: impl FnOnce(&mut LegClaim),
    ) {
        if let Some(worker) = self.get_mut(worker_ref) {
            worker.ledger.change(handoff, edit);
        }
    }

    /// Sends an order to a worker, and counts it: a load tells how many the worker has received.
    pub(crate) fn send_order(
        &mut self,
        worker: WorkerRef,
        order: Order,
        context: &mut RouterContext,
    ) {
        let last = match &order {
            Order::Reserve(ReserveOrder { handoff, .. })
            | Order::Prefill(PrefillOrder { handoff, .. })
            | Order::Run(RunOrder { handoff, .. }) => Some(*handoff),
            _ => None,
        };
        self.count_order(worker, last);
        context.emit(RouterOutput::Order { worker, order });
    }

    /// Counts an order to the worker; `last` names the hand-off whose last order this is.
    pub(super) fn count_order(&mut self, worker_ref: WorkerRef, last: Option<HandoffId>) {
        if let Some(worker) = self.get_mut(worker_ref) {
            worker.orders += 1;
            let number = worker.orders;
            if let Some(handoff) = last {
                let number = |p: &mut LegClaim| p.order = Some(number);
                worker.ledger.change(handoff, number);
            }
        }
    }

    /// Records that the hand-off's stream runs there now.
    pub(crate) fn stream_began(&mut self, worker_ref: WorkerRef, handoff: HandoffId) {
        let now = self.now;
        if let Some(worker) = self.get_mut(worker_ref) {
            worker.ledger.began(handoff, now);
        }
    }

    /// Records that the worker computed the prompt.
    pub(crate) fn prompt_done(&mut self, worker_ref: WorkerRef, handoff: HandoffId) {
        let now = self.now;
        if let Some(worker) = self.get_mut(worker_ref) {
            worker.ledger.prompt_done(handoff, now);
        }
    }

    /// Removes the hand-off's claim on this worker, and returns it, if there was one.
    pub(crate) fn release(&mut self, worker: WorkerRef, handoff: HandoffId) -> Option<LegClaim> {
        let now = self.now;
        let claim = self.get_mut(worker)?.ledger.close(handoff, now)?;
        if self.migration_requests.get(&worker.worker) == Some(&handoff) {
            self.migration_requests.remove(&worker.worker);
        }
        self.drop_leg(handoff.flight);
        Some(claim)
    }

    pub(super) fn drop_leg(&mut self, flight: FlightId) {
        if let Some(count) = self.legs.get_mut(&flight) {
            *count -= 1;
            if *count == 0 {
                self.legs.remove(&flight);
            }
        }
    }
}
