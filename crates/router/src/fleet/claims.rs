//! The claims of the flights on the workers: opened by a placement, changed by reports, released.

use super::RouterFleet;
use crate::candidates::{ChosenPlacement, MigrationCost};
use crate::ledger::{LegClaim, StreamSpan};
use crate::policy::AttemptSize;
use cleave_domain::{FlightId, HandoffId, WorkerRef};
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
        placing: &ChosenPlacement,
        ask: &AttemptSize,
    ) {
        self.placements += 1;
        let ChosenPlacement {
            choice, outlook, ..
        } = placing;
        let work = outlook.map_or(Duration::ZERO, |outlook| outlook.work);
        let urgency = outlook.map_or(0, |outlook| outlook.urgency);
        let tokens = u64::from(ask.prompt_tokens - choice.cached_tokens);
        let mut legs = vec![choice.decode];
        if choice.prefill != choice.decode {
            legs.push(choice.prefill);
        }
        for who in legs {
            let decodes = who == choice.decode;
            let computes = who == choice.prefill;
            let blocks = self.blocks(who, ask.tokens_expected).unwrap_or(0);
            let role = self.get(who).map(|worker| worker.description.role);
            let part = LegClaim {
                tokens: if computes { tokens } else { 0 },
                blocks: if decodes { blocks } else { 0 },
                ordered: decodes,
                work: if computes { work } else { Duration::ZERO },
                urgency: if computes { urgency } else { 0 },
                tpot: placing.tpot.filter(|_| decodes),
                span: match outlook.filter(|_| decodes) {
                    Some(outlook) => outlook.span(self.now, placing.tpot.unwrap_or_default()),
                    None => StreamSpan::NONE,
                },
                guest: decodes && role.is_some_and(|role| !role.decodes()),
                ..LegClaim::NEW
            };
            self.add_claim(who, handoff, part);
        }
    }

    /// Records the claim of a move on its target; the sender has its claim already.
    pub(crate) fn claim_move_target(
        &mut self,
        handoff: HandoffId,
        target: WorkerRef,
        burden: &MigrationCost,
    ) {
        self.placements += 1;
        let part = LegClaim {
            blocks: self.blocks(target, burden.ask.tokens_expected).unwrap_or(0),
            ordered: true,
            tpot: burden.tpot,
            ..LegClaim::NEW
        };
        self.add_claim(target, handoff, part);
    }

    fn add_claim(&mut self, who: WorkerRef, handoff: HandoffId, promise: LegClaim) {
        let (placements, now) = (self.placements, self.now);
        if let Some(worker) = self.get_mut(who) {
            worker.chosen = placements;
            worker.ledger.open(handoff, promise, now);
            *self.legs.entry(handoff.flight).or_default() += 1;
        }
    }

    pub(crate) fn claim(&self, who: WorkerRef, handoff: HandoffId) -> Option<&LegClaim> {
        self.get(who)?.ledger.get(handoff)
    }

    pub(crate) fn change(
        &mut self,
        who: WorkerRef,
        handoff: HandoffId,
        edit: impl FnOnce(&mut LegClaim),
    ) {
        if let Some(worker) = self.get_mut(who) {
            worker.ledger.change(handoff, edit);
        }
    }

    /// Counts an order to the worker; `last` names the hand-off whose last order this is.
    pub(crate) fn count_order(&mut self, who: WorkerRef, last: Option<HandoffId>) {
        if let Some(worker) = self.get_mut(who) {
            worker.orders += 1;
            let number = worker.orders;
            if let Some(handoff) = last {
                let number = |p: &mut LegClaim| p.order = Some(number);
                worker.ledger.change(handoff, number);
            }
        }
    }

    /// Records that the hand-off's stream runs there now.
    pub(crate) fn stream_began(&mut self, who: WorkerRef, handoff: HandoffId) {
        let now = self.now;
        if let Some(worker) = self.get_mut(who) {
            worker.ledger.began(handoff, now);
        }
    }

    /// Records that the worker computed the prompt.
    pub(crate) fn prompt_done(&mut self, who: WorkerRef, handoff: HandoffId) {
        let now = self.now;
        if let Some(worker) = self.get_mut(who) {
            worker.ledger.prompt_done(handoff, now);
        }
    }

    /// Removes the hand-off's claim on this worker, and returns it, if there was one.
    pub(crate) fn release(&mut self, who: WorkerRef, handoff: HandoffId) -> Option<LegClaim> {
        let now = self.now;
        let promise = self.get_mut(who)?.ledger.close(handoff, now)?;
        if self.migration_requests.get(&who.worker) == Some(&handoff) {
            self.migration_requests.remove(&who.worker);
        }
        self.drop_leg(handoff.flight);
        Some(promise)
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
