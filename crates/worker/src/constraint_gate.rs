//! Orders that wait until their constraints are compiled.
//!
//! Owns: the orders held back, and which hand-offs have which constraint. Never: holds up an order
//! of another hand-off, or changes the order of two of one.
//! Invariant: an order that passes has a constraint that is known, if it has one.

use super::constraints::{CompileState, WorkerConstraints};
use cleave_domain::{Constraint, HandoffId, Order, Report, Request, RouterId};
use cleave_telemetry::RequestContext;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::spawn_blocking;

/// Constraints that are compiled at once: the others' threads have work of their own.
const COMPILING_MAX: usize = 2;

/// An order with its sender.
#[derive(Debug)]
pub(crate) struct RouterOrder {
    pub(crate) router: RouterId,
    pub(crate) order: Order,
    pub(crate) context: Option<Arc<RequestContext>>,
}

impl RouterOrder {
    /// The hand-off and the request for which it may have to wait.
    pub(crate) fn subject(&self) -> (Option<HandoffId>, Option<&Request>) {
        self.order.subject()
    }
}

/// The orders of a worker that wait for a constraint.
pub(crate) struct ConstraintGate {
    constraints: Arc<WorkerConstraints>,
    permits: Arc<Semaphore>,
    compiled: mpsc::UnboundedSender<Arc<Constraint>>,
    /// By hand-off, in the order of arrival. The first has the constraint that all wait for.
    held: BTreeMap<HandoffId, HeldOrders>,
    pinned: BTreeMap<HandoffId, Arc<Constraint>>,
}

#[derive(Debug)]
struct HeldOrders {
    constraint: Arc<Constraint>,
    orders: Vec<RouterOrder>,
}

impl ConstraintGate {
    /// Gives the gate, and the constraints that become known; each is to be given to
    /// [`ConstraintGate::take_known`].
    pub(crate) fn new(
        constraints: Arc<WorkerConstraints>,
    ) -> (Self, mpsc::UnboundedReceiver<Arc<Constraint>>) {
        let (compiled, known) = mpsc::unbounded_channel();
        let gate = Self {
            constraints,
            permits: Arc::new(Semaphore::new(COMPILING_MAX)),
            compiled,
            held: BTreeMap::new(),
            pinned: BTreeMap::new(),
        };
        (gate, known)
    }

    /// Gives an order back if it need not wait. Must be called within a tokio runtime.
    pub(crate) fn pass(&mut self, order: RouterOrder) -> Option<RouterOrder> {
        let (handoff, request) = order.subject();
        let constraint = request.and_then(|request| request.sampling.constraint.as_ref());
        let Some(handoff) = handoff else {
            return Some(order);
        };
        if let Some(held) = self.held.get_mut(&handoff) {
            held.orders.push(order);
            return None;
        }
        let Some(constraint) = constraint.filter(|_| !self.pinned.contains_key(&handoff)) else {
            return Some(order);
        };
        let constraint = Arc::clone(constraint);
        self.pinned.insert(handoff, Arc::clone(&constraint));
        match self.constraints.pin(&constraint) {
            CompileState::Known => return Some(order),
            CompileState::UnderWay => {}
            CompileState::New => self.compile(&constraint),
        }
        let orders = vec![order];
        self.held.insert(handoff, HeldOrders { constraint, orders });
        None
    }

    fn compile(&self, constraint: &Arc<Constraint>) {
        let (constraints, permits) = (Arc::clone(&self.constraints), Arc::clone(&self.permits));
        let (constraint, compiled) = (Arc::clone(constraint), self.compiled.clone());
        tokio::spawn(async move {
            let permit = permits.acquire().await;
            let subject = Arc::clone(&constraint);
            // It catches its panics.
            let _ = spawn_blocking(move || constraints.compile(&subject)).await;
            drop(permit);
            // The driver may have ended.
            let _ = compiled.send(constraint);
        });
    }

    /// Gives the orders that waited for a constraint, which is known now.
    pub(crate) fn take_known(&mut self, constraint: &Constraint) -> Vec<RouterOrder> {
        let waited = self
            .held
            .iter()
            .filter(|(_, held)| *held.constraint == *constraint);
        let waited: Vec<HandoffId> = waited.map(|(handoff, _)| *handoff).collect();
        let held = waited
            .iter()
            .filter_map(|handoff| self.held.remove(handoff));
        held.flat_map(|held| held.orders).collect()
    }

    /// Ends the holds of hand-offs that have ended.
    pub(crate) fn reported(&mut self, report: &Report) {
        if let Report::Refused { handoff, .. } | Report::Released { handoff, .. } = report
            && let Some(constraint) = self.pinned.remove(handoff)
        {
            self.constraints.unpin(&constraint);
        }
    }

    /// Drops the orders of a router that is gone, and the holds of its hand-offs.
    pub(crate) fn router_lost(&mut self, router: RouterId) {
        self.held
            .retain(|handoff, _| handoff.flight.router() != router);
        self.pinned.retain(|handoff, constraint| {
            let stays = handoff.flight.router() != router;
            if !stays {
                self.constraints.unpin(constraint);
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests;
