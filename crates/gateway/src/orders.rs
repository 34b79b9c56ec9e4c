//! Facts that a worker needs before it can carry out an order.
//!
//! Never sends anything. Invariant: the matches are exhaustive, so that a new order does not
//! compile before it is handled here.

use cleave_domain::{HandoffId, Order, WorkerRef};

/// The other worker that the order's receiver must reach for it.
pub(super) fn peer_of(order: &Order) -> Option<WorkerRef> {
    match order {
        Order::Reserve(reserve) => Some(reserve.sender),
        Order::Prefill(prefill) => Some(prefill.target.worker),
        Order::Migrate(migrate) => Some(migrate.target.worker),
        Order::Run(_)
        | Order::Renew { .. }
        | Order::Cancel { .. }
        | Order::Drain
        | Order::Serve { .. }
        | Order::Relay(_)
        | Order::FetchAdapter { .. } => None,
    }
}

/// The hand-off whose blocks the worker will write into a pool, and the pool's worker.
pub(super) fn sender_handoff(order: &Order) -> Option<(HandoffId, WorkerRef)> {
    match order {
        Order::Prefill(prefill) => Some((prefill.handoff, prefill.target.worker)),
        Order::Migrate(migrate) => Some((migrate.handoff, migrate.target.worker)),
        Order::Reserve(_)
        | Order::Run(_)
        | Order::Renew { .. }
        | Order::Cancel { .. }
        | Order::Drain
        | Order::Serve { .. }
        | Order::Relay(_)
        | Order::FetchAdapter { .. } => None,
    }
}

/// The hand-off that the order begins.
pub(super) fn handoff_begun(order: &Order) -> Option<HandoffId> {
    match order {
        Order::Reserve(reserve) => Some(reserve.handoff),
        Order::Run(run) => Some(run.handoff),
        order => sender_handoff(order).map(|(handoff, _)| handoff),
    }
}
