//! The adapters of a worker, and the orders that wait until theirs is loaded.
//!
//! Owns: which hand-offs have which adapter, and the orders held back. Never: loads an adapter;
//! knows a name of one.
//! Invariant: an order that passes has an adapter that is loaded, if it has one, and it stays
//! loaded until the hand-off is released.
//!
//! It stands before a worker's brain, which knows no adapter. To drive it: after each call do all
//! work that [`AdapterAdmission::poll`] gives, in order.

mod places;

pub use places::{AdapterLimits, AdapterLoads, AdapterState, AdapterWork, LoadOutcome, LoadSource};

use cleave_domain::{AdapterId, HandoffId, Refusal, RouterId};
use places::{AdapterPlaces, NotTaken, Taken};
use std::collections::BTreeMap;
use std::time::Duration;

/// The time after which a router may ask again where every place has an adapter in use: streams
/// end all the time.
const PLACE_WAIT: Duration = Duration::from_millis(100);

/// The adapters of a worker, and the orders `O` that wait for one.
#[derive(Debug)]
pub struct AdapterAdmission<O> {
    places: AdapterPlaces,
    /// By hand-off, in the order of arrival. The first has the adapter that all wait for.
    held: BTreeMap<HandoffId, WaitingOrders<O>>,
    taken: BTreeMap<HandoffId, AdapterId>,
}

#[derive(Debug)]
struct WaitingOrders<O> {
    adapter: AdapterId,
    orders: Vec<O>,
}

/// The way of an order.
#[derive(Debug, PartialEq, Eq)]
pub enum AdapterPassage<O> {
    /// It need not wait.
    Open(O),
    /// It waits until its adapter is loaded.
    Held,
    /// Its hand-off is refused, and leaves nothing behind.
    Refused(HandoffId, O, Refusal),
}

impl<O> AdapterAdmission<O> {
    pub fn new(limits: AdapterLimits) -> Self {
        Self {
            places: AdapterPlaces::new(limits),
            held: BTreeMap::new(),
            taken: BTreeMap::new(),
        }
    }

    /// The next work on an adapter.
    pub fn poll(&mut self) -> Option<AdapterWork> {
        self.places.poll()
    }

    // === getters ===

    /// Adapters that are loaded at once, at most.
    pub fn loaded_max(&self) -> usize {
        self.places.loaded_max()
    }

    /// Grows with each change of an adapter's state or use.
    pub fn version(&self) -> u64 {
        self.places.version()
    }

    /// Loads since the start.
    pub fn loads(&self) -> AdapterLoads {
        self.places.loads()
    }

    /// The state of an adapter that has a name.
    pub fn state(&self, adapter: AdapterId) -> AdapterState {
        self.places.state(adapter)
    }

    /// Whether a hand-off has this adapter, which has a name, and it is in this state.
    pub fn is_used(&self, adapter: AdapterId, state: AdapterState) -> bool {
        self.places.is_used(adapter, state)
    }

    /// The number of adapters in this state.
    pub fn count(&self, state: AdapterState) -> usize {
        self.places.count(state)
    }

    // === names ===

    /// An open adapter has one name more.
    pub fn add_name(&mut self, adapter: AdapterId) {
        self.places.add_name(adapter);
    }

    /// An adapter has one name fewer. Hand-offs that have it keep it.
    pub fn remove_name(&mut self, adapter: AdapterId) {
        self.places.remove_name(adapter);
    }

    /// Closes an adapter that was opened and got no name.
    pub fn close_if_unknown(&mut self, adapter: AdapterId) {
        self.places.close_if_unknown(adapter);
    }

    // === orders ===

    /// Gives an order of a hand-off back if it need not wait. The first order has the adapter of
    /// its request.
    pub fn pass(
        &mut self,
        handoff: HandoffId,
        adapter: Option<AdapterId>,
        order: O,
    ) -> AdapterPassage<O> {
        if let Some(held) = self.held.get_mut(&handoff) {
            held.orders.push(order);
            return AdapterPassage::Held;
        }
        let Some(adapter) = adapter.filter(|_| !self.taken.contains_key(&handoff)) else {
            return AdapterPassage::Open(order);
        };
        let refusal = match self.places.take(adapter) {
            Ok(taken) => {
                self.taken.insert(handoff, adapter);
                if taken == Taken::Loaded {
                    return AdapterPassage::Open(order);
                }
                let orders = vec![order];
                self.held.insert(handoff, WaitingOrders { adapter, orders });
                return AdapterPassage::Held;
            }
            Err(NotTaken::Unknown) => Refusal::NoAdapter {
                reason: format!("adapter {adapter} is not served by this worker any more"),
            },
            Err(NotTaken::Full) => Refusal::QueueFull {
                retry_after: PLACE_WAIT,
            },
        };
        AdapterPassage::Refused(handoff, order, refusal)
    }

    /// Begins to load an adapter whose hand-off is on its way. The hand-off itself has it from
    /// [`AdapterAdmission::pass`] on.
    pub fn fetch(&mut self, adapter: AdapterId) {
        self.places.fetch(adapter);
    }

    /// Gives the orders that waited for a load; after a failure, their refusals.
    pub fn load_ended(
        &mut self,
        adapter: AdapterId,
        outcome: &LoadOutcome,
    ) -> Vec<AdapterPassage<O>> {
        self.places.load_ended(adapter, outcome);
        let waited = self.held.iter().filter(|(_, held)| held.adapter == adapter);
        let waited: Vec<HandoffId> = waited.map(|(handoff, _)| *handoff).collect();
        let mut passages = Vec::new();
        for handoff in waited {
            let held = self.held.remove(&handoff);
            let mut orders = held.into_iter().flat_map(|held| held.orders);
            let LoadOutcome::Failed { reason } = outcome else {
                passages.extend(orders.map(AdapterPassage::Open));
                continue;
            };
            self.release(handoff);
            // The first order is the hand-off's; those after it, as a cancel, have no subject now.
            let first = orders.next();
            let refuse = |order| {
                let reason = reason.clone();
                AdapterPassage::Refused(handoff, order, Refusal::NoAdapter { reason })
            };
            passages.extend(first.map(refuse));
        }
        self.places.close_if_unused(adapter);
        passages
    }

    /// A hand-off has ended, or was refused.
    pub fn release(&mut self, handoff: HandoffId) {
        if let Some(adapter) = self.taken.remove(&handoff) {
            self.places.give_back(adapter);
        }
    }

    /// Drops the orders of a router that is gone, and ends its hand-offs.
    pub fn router_lost(&mut self, router: RouterId) {
        let is_gone = |handoff: &HandoffId| handoff.flight.router() == router;
        self.held.retain(|handoff, _| !is_gone(handoff));
        let gone = self.taken.keys().copied().filter(is_gone);
        for handoff in gone.collect::<Vec<_>>() {
            self.release(handoff);
        }
    }
}

#[cfg(test)]
mod tests;
