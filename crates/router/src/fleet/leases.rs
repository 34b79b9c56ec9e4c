//! The renewal of leases at the workers.
//!
//! Owns: when leases are renewed next. Never: decides that a lease is still wanted; its claim says
//! so. Invariant: while a claim is ordered and renewed, a renewal is due.

use crate::event::RouterLimits;
use crate::fleet::RouterFleet;
use crate::fleet::ledger::LegClaim;
use cleave_domain::{HandoffId, Order, Time, WorkerRef};

#[derive(Clone, Debug, Default)]
pub(crate) struct LeaseRenewal {
    due_at: Option<Time>,
}

impl LeaseRenewal {
    pub(crate) fn deadline(&self) -> Option<Time> {
        self.due_at
    }

    pub(crate) fn is_due(&self, now: Time) -> bool {
        self.due_at.is_some_and(|at| at <= now)
    }

    /// Begins renewing, if nothing was leased before.
    pub(crate) fn begin(&mut self, now: Time, limits: &RouterLimits) {
        self.due_at.get_or_insert(now + limits.renew_every);
    }

    /// The renewal of every lease that is still wanted; the last of them ends renewing.
    pub(crate) fn renew(
        &mut self,
        now: Time,
        limits: &RouterLimits,
        fleet: &RouterFleet,
    ) -> Vec<(WorkerRef, Order)> {
        let mut orders = Vec::new();
        for worker in fleet.workers() {
            let live = |(id, claim): (HandoffId, &LegClaim)| {
                (claim.renewed && claim.ordered).then_some(id)
            };
            let handoffs: Vec<HandoffId> = worker.ledger.handoffs().filter_map(live).collect();
            if !handoffs.is_empty() {
                orders.push((worker.me, Order::Renew { handoffs }));
            }
        }
        self.due_at = (!orders.is_empty()).then_some(now + limits.renew_every);
        orders
    }

    pub(crate) fn check(&self, fleet: &RouterFleet) {
        let leased = |claim: &LegClaim| claim.renewed && claim.ordered;
        let mut claims = fleet.workers().flat_map(|worker| worker.ledger.handoffs());
        assert!(
            self.due_at.is_some() || !claims.any(|(_, claim)| leased(claim)),
            "a lease is not renewed"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{LegsFixture, at, handoff, worker};

    #[test]
    fn leases_are_renewed_while_any_is_wanted() {
        let mut placed = LegsFixture::placed();
        let mut leases = LeaseRenewal::default();
        leases.begin(at(1000), &placed.limits);
        leases.begin(at(2000), &placed.limits);
        assert_eq!(leases.deadline(), Some(at(6000)), "the first begin counts");
        assert!(!leases.is_due(at(5999)) && leases.is_due(at(6000)));
        let handoffs = vec![handoff(0)];
        // The prefill worker has no order yet, and so no lease.
        let renewed = leases.renew(at(6000), &placed.limits, &placed.fleet);
        assert_eq!(renewed, [(worker(2), Order::Renew { handoffs })]);
        assert_eq!(leases.deadline(), Some(at(11_000)));
        leases.check(&placed.fleet);
        placed.fleet.end_lease(worker(2), handoff(0));
        let renewed = leases.renew(at(11_000), &placed.limits, &placed.fleet);
        assert_eq!((renewed, leases.deadline()), (Vec::new(), None));
        leases.check(&placed.fleet);
    }

    #[test]
    #[should_panic(expected = "a lease is not renewed")]
    fn a_wanted_lease_has_a_renewal() {
        LeaseRenewal::default().check(&LegsFixture::placed().fleet);
    }
}
