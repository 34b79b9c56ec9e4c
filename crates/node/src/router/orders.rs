//! What else a worker must know before it can follow an order.
//!
//! Never: says anything. Invariant: an order that is new is looked at here before it compiles.

use cleave_domain::{HandoffId, Order, WorkerRef};

/// The other worker that this one will have to reach.
pub(super) fn peer_of(order: &Order, worker: WorkerRef) -> Option<WorkerRef> {
    let peer = match order {
        Order::Reserve(reserve) => reserve.sender,
        Order::Prefill(prefill) => prefill.target.worker,
        Order::Migrate(migrate) => migrate.target.worker,
        Order::Renew { .. }
        | Order::Cancel { .. }
        | Order::Drain
        | Order::Serve { .. }
        | Order::PassOn(_) => return None,
    };
    (peer != worker).then_some(peer)
}

/// The hand-off whose blocks it will write into a pool, and whose that is.
pub(super) fn sends(order: &Order) -> Option<(HandoffId, WorkerRef)> {
    match order {
        Order::Prefill(prefill) => Some((prefill.handoff, prefill.target.worker)),
        Order::Migrate(migrate) => Some((migrate.handoff, migrate.target.worker)),
        Order::Reserve(_)
        | Order::Renew { .. }
        | Order::Cancel { .. }
        | Order::Drain
        | Order::Serve { .. }
        | Order::PassOn(_) => None,
    }
}

/// The hand-off that it begins to work for.
pub(super) fn begins(order: &Order) -> Option<HandoffId> {
    match order {
        Order::Reserve(reserve) => Some(reserve.handoff),
        order => sends(order).map(|(handoff, _)| handoff),
    }
}
