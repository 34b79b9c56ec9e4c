//! Facts that a worker needs before it can carry out an order.
//!
//! Never sends anything. Invariant: the matches are exhaustive, so that a new order does not
//! compile before it is handled here.

use cleave_domain::{HandoffId, Order, WorkerRef};

/// The other worker that this one must reach for the order.
pub(super) fn peer_of(order: &Order, worker: WorkerRef) -> Option<WorkerRef> {
    let peer = match order {
        Order::Reserve(reserve) => reserve.sender,
        Order::Prefill(prefill) => prefill.target.worker,
        Order::Migrate(migrate) => migrate.target.worker,
        Order::Renew { .. }
        | Order::Cancel { .. }
        | Order::Drain
        | Order::Serve { .. }
        | Order::Relay(_) => return None,
    };
    (peer != worker).then_some(peer)
}

/// The hand-off whose blocks the worker will write into a pool, and the pool's worker.
pub(super) fn sender_handoff(order: &Order) -> Option<(HandoffId, WorkerRef)> {
    match order {
        Order::Prefill(prefill) => Some((prefill.handoff, prefill.target.worker)),
        Order::Migrate(migrate) => Some((migrate.handoff, migrate.target.worker)),
        Order::Reserve(_)
        | Order::Renew { .. }
        | Order::Cancel { .. }
        | Order::Drain
        | Order::Serve { .. }
        | Order::Relay(_) => None,
    }
}

/// The hand-off that the order begins.
pub(super) fn handoff_begun(order: &Order) -> Option<HandoffId> {
    match order {
        Order::Reserve(reserve) => Some(reserve.handoff),
        order => sender_handoff(order).map(|(handoff, _)| handoff),
    }
}
