//! Write grants on their way from the workers that issued them to those that use them.
//!
//! Owns: the grants that are kept, and for how long. Never issues or verifies one. Invariant: each
//! kept grant is for a leg that its issuer has not released, and was not sent to the sender yet.
//!
//! An issuer sends a grant before it answers the order to reserve, on the same connection. So no
//! grant arrives after the refusal or release that ends it, or after the loss of the issuer's
//! connection.

use super::orders;
use cleave_domain::{HandoffId, Order, Report, WorkerRef};
use cleave_transfer::{GrantStore, WriteGrant};
use std::collections::BTreeMap;

/// Kept by issuer, and not with their flights: a grant ends with the issuer's leg or connection,
/// before the flight or after it.
#[derive(Debug, Default)]
pub(super) struct GrantRelay {
    grants: BTreeMap<WorkerRef, GrantStore>,
    count: usize,
}

impl GrantRelay {
    /// Keeps a grant that a connected worker issued.
    pub(super) fn add(&mut self, issuer: WorkerRef, handoff: HandoffId, grant: WriteGrant) {
        let store = self.grants.entry(issuer).or_default();
        self.count -= store.len();
        store.insert(handoff, grant);
        self.count += store.len();
    }

    /// Drops the grant of a leg that this report ends.
    pub(super) fn handle_report(&mut self, by: WorkerRef, report: &Report) {
        if let Report::Refused { handoff, .. } | Report::Released { handoff } = report {
            self.take(by, *handoff);
        }
    }

    /// The grant that a worker needs for this order.
    pub(super) fn take_for_order(&mut self, order: &Order) -> Option<(HandoffId, WriteGrant)> {
        let (handoff, target) = orders::sender_handoff(order)?;
        Some((handoff, self.take(target, handoff)?))
    }

    /// Drops the grants of a worker that is connected no longer.
    pub(super) fn issuer_lost(&mut self, maker: WorkerRef) {
        let grants = self.grants.remove(&maker);
        self.count -= grants.map_or(0, |grants| grants.len());
    }

    /// How many are kept.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    fn take(&mut self, maker: WorkerRef, handoff: HandoffId) -> Option<WriteGrant> {
        let grant = self.grants.get_mut(&maker)?.remove(handoff)?;
        self.count -= 1;
        Some(grant)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use cleave_domain::{FlightId, HandoffTarget, Incarnation, MigrateOrder, Refusal, WorkerId};
    use cleave_transfer::GRANT_BYTES;

    const MAKER: WorkerRef = WorkerRef {
        worker: WorkerId(1),
        incarnation: Incarnation(1),
    };
    const OTHER: WorkerRef = WorkerRef {
        worker: WorkerId(2),
        ..MAKER
    };
    const PASS: WriteGrant = WriteGrant([7; GRANT_BYTES]);

    fn handoff(flight: u64) -> HandoffId {
        HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        }
    }

    fn migrate(handoff: HandoffId) -> Order {
        Order::Migrate(MigrateOrder {
            handoff,
            of: handoff,
            target: HandoffTarget {
                worker: MAKER,
                present: 0,
                blocks: Vec::new(),
                state: None,
                window: None,
            },
            tokens: 0,
        })
    }

    #[test]
    fn grants_of_ended_hand_offs_are_dropped() {
        let mut grants = GrantRelay::default();
        for flight in 0..300 {
            let handoff = handoff(flight);
            grants.add(MAKER, handoff, PASS);
            match flight % 3 {
                0 => {
                    let order = migrate(handoff);
                    let grant = grants.take_for_order(&order);
                    assert_eq!(grant, Some((handoff, PASS)));
                    assert_eq!(grants.take_for_order(&order), None, "it is sent once");
                }
                1 => {
                    let refusal = Refusal::WrongWorker;
                    grants.handle_report(MAKER, &Report::Refused { handoff, refusal });
                }
                _ => {
                    // A report of the sender does not end the issuer's leg.
                    grants.handle_report(OTHER, &Report::Released { handoff });
                    assert_eq!(grants.count(), 1);
                    grants.handle_report(MAKER, &Report::Released { handoff });
                }
            }
            assert_eq!(grants.count(), 0, "after {flight}");
            assert!(grants.grants[&MAKER].is_empty());
        }
        grants.add(MAKER, handoff(1), PASS);
        grants.add(MAKER, handoff(2), PASS);
        assert_eq!(grants.count(), 2);
        grants.issuer_lost(MAKER);
        assert_eq!((grants.count(), grants.grants.len()), (0, 0));
    }
}
