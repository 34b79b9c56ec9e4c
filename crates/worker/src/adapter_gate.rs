//! Orders that wait until their adapters are loaded, and the adapters of a worker.
//!
//! Owns: the names of the adapters, which hand-offs have which, and the orders held back. Never:
//! reads a file on the driver's thread, or holds up an order of another hand-off.
//! Invariant: an order that passes has an adapter that is loaded, if it has one, and it stays
//! loaded until the hand-off is released.

mod places;

pub(crate) use places::AdapterLimits;

use super::constraint_gate::RouterOrder;
use cleave_domain::{AdapterId, AdapterOffer, HandoffId, Refusal, Report, RouterId};
use cleave_engine::{AdapterError, AdapterFacts, AdapterMemory};
use cleave_telemetry::AdapterUse;
use places::{AdapterPlaces, LoadState, NotTaken, Taken};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

/// The time after which a router may ask again where every place has an adapter in use: streams
/// end all the time.
const PLACE_WAIT: Duration = Duration::from_millis(100);

/// The adapters of a worker, and the orders that wait for one.
pub(crate) struct AdapterGate {
    places: AdapterPlaces,
    /// Contents that the names stand for.
    names: BTreeMap<String, NamedAdapter>,
    /// By hand-off, in the order of arrival. The first has the adapter that all wait for.
    held: BTreeMap<HandoffId, WaitingOrders>,
    pinned: BTreeMap<HandoffId, AdapterId>,
    events: mpsc::UnboundedSender<AdapterEvent>,
    /// The folder below which routers may name adapters; `None` if they may name none.
    root: Option<PathBuf>,
}

/// An adapter that a worker serves.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedAdapter {
    /// The folder that it was read from.
    folder: PathBuf,
    /// The folder as the command named it that loaded it; `None` for one of the worker's start.
    loaded_from: Option<String>,
    /// The content of the folder when it was opened.
    adapter: AdapterId,
}

#[derive(Debug)]
struct WaitingOrders {
    adapter: AdapterId,
    orders: Vec<RouterOrder>,
}

/// The end of work on an adapter that was done beside the driver.
#[derive(Debug)]
pub(crate) enum AdapterEvent {
    /// A load has ended.
    Loaded {
        adapter: AdapterId,
        outcome: Result<(), AdapterError>,
    },
    /// A folder was opened, or refused with the reason.
    Opened {
        request: OpenRequest,
        outcome: Result<(PathBuf, AdapterFacts), String>,
    },
}

/// A router's request to serve the adapter in a folder.
#[derive(Debug)]
pub(crate) struct OpenRequest {
    pub(crate) router: RouterId,
    /// The number of the change, which the answer names.
    pub(crate) change: u64,
    pub(crate) name: String,
    pub(crate) folder: String,
    /// The content that the folder must have; `None` for whatever it has.
    pub(crate) content: Option<AdapterId>,
}

/// The way of an order at the gate.
#[derive(Debug)]
pub(crate) enum Passage {
    /// It need not wait.
    Open(RouterOrder),
    /// It waits until its adapter is loaded.
    Held,
    /// It is refused, and leaves nothing behind.
    Refused(RouterId, Report),
}

impl AdapterGate {
    /// Gives the gate, and the ends of its work. Routers may name folders below `root`.
    pub(crate) fn new(
        memory: Option<Arc<dyn AdapterMemory>>,
        limits: AdapterLimits,
        root: Option<PathBuf>,
    ) -> (Self, mpsc::UnboundedReceiver<AdapterEvent>) {
        let (events, ends) = mpsc::unbounded_channel();
        let gate = Self {
            places: AdapterPlaces::new(memory, limits, events.clone()),
            names: BTreeMap::new(),
            held: BTreeMap::new(),
            pinned: BTreeMap::new(),
            events,
            root,
        };
        (gate, ends)
    }

    /// Whether the engine applies adapters.
    pub(crate) fn is_capable(&self) -> bool {
        self.places.memory().is_some()
    }

    // === names ===

    /// Serves an open adapter under a name from the start.
    pub(crate) fn serve(&mut self, name: &str, folder: &Path, facts: AdapterFacts) {
        let named = NamedAdapter {
            folder: folder.to_owned(),
            loaded_from: None,
            adapter: facts.adapter,
        };
        self.name(name, named);
    }

    /// Serves the adapter of a folder that was opened for a router.
    ///
    /// # Errors
    /// The reason, if the folder was refused or has another content than it must have.
    pub(crate) fn opened(
        &mut self,
        request: &OpenRequest,
        outcome: Result<(PathBuf, AdapterFacts), String>,
    ) -> Result<(), String> {
        let (folder, facts) = outcome?;
        let adapter = facts.adapter;
        if let Some(content) = request.content.filter(|content| *content != adapter) {
            self.places.close_if_unknown(adapter);
            return Err(format!(
                "{}: has adapter {adapter}, and other workers serve {content} as {}; load it again to serve the \
                 new content",
                folder.display(),
                request.name,
            ));
        }
        let named = NamedAdapter {
            folder,
            loaded_from: Some(request.folder.clone()),
            adapter,
        };
        self.name(&request.name, named);
        Ok(())
    }

    /// Whether this content is served under this name.
    pub(crate) fn serves(&self, name: &str, content: AdapterId) -> bool {
        let named = self.names.get(name);
        named.is_some_and(|named| named.adapter == content)
    }

    /// Gives an adapter a name, in place of an earlier one of the name. Hand-offs that have the
    /// earlier one keep it.
    fn name(&mut self, name: &str, named: NamedAdapter) {
        self.places.add_name(named.adapter);
        let earlier = self.names.insert(name.to_owned(), named);
        if let Some(earlier) = earlier {
            self.places.remove_name(earlier.adapter);
        }
    }

    /// Opens a folder that a router named, beside the driver; [`AdapterEvent::Opened`] follows.
    /// Must be called within a tokio runtime.
    pub(crate) fn open(&self, request: OpenRequest) {
        let (memory, root) = (self.places.memory().cloned(), self.root.clone());
        let events = self.events.clone();
        tokio::spawn(async move {
            let folder = request.folder.clone();
            let opened =
                spawn_blocking(move || open_below(memory.as_deref(), root.as_deref(), &folder));
            let outcome = opened.await;
            let outcome = outcome.unwrap_or_else(|_| Err("reading the adapter failed".to_owned()));
            // The driver may have ended.
            let _ = events.send(AdapterEvent::Opened { request, outcome });
        });
    }

    /// Serves the adapter of this name no longer; whether there was one. Hand-offs that have it
    /// keep it.
    pub(crate) fn remove(&mut self, name: &str) -> bool {
        let named = self.names.remove(name);
        if let Some(named) = &named {
            self.places.remove_name(named.adapter);
        }
        named.is_some()
    }

    /// All adapters with the places of their weights, by ascending name.
    pub(crate) fn offers(&self) -> Vec<AdapterOffer> {
        let offers = self.names.iter().map(|(name, named)| AdapterOffer {
            name: name.clone(),
            adapter: named.adapter,
            root: named.folder.display().to_string(),
            loaded_from: named.loaded_from.clone(),
            place: self.places.state(named.adapter).into(),
        });
        offers.collect()
    }

    /// Grows with each change of what [`AdapterGate::in_use`] gives.
    pub(crate) fn version(&self) -> u64 {
        self.places.version()
    }

    /// The adapters as metrics show them.
    pub(crate) fn in_use(&self) -> AdapterUse {
        let names = |state: LoadState| {
            let used = self.names.iter();
            let used = used.filter(|(_, named)| self.places.is_used(named.adapter, state));
            used.map(|(name, _)| name.clone()).collect()
        };
        AdapterUse {
            max_loras: self.places.loaded_max(),
            served: self.names.len(),
            loaded: self.places.count(LoadState::Resident),
            in_host: self.places.count(LoadState::InHost),
            running: names(LoadState::Resident),
            waiting: names(LoadState::Loading),
            loads: self.places.loads(),
        }
    }

    // === orders ===

    /// Gives an order back if it need not wait. Must be called within a tokio runtime.
    pub(crate) fn pass(&mut self, order: RouterOrder) -> Passage {
        let (handoff, request) = order.subject();
        let adapter = request.and_then(|request| request.adapter);
        let Some(handoff) = handoff else {
            return Passage::Open(order);
        };
        if let Some(held) = self.held.get_mut(&handoff) {
            held.orders.push(order);
            return Passage::Held;
        }
        let Some(adapter) = adapter.filter(|_| !self.pinned.contains_key(&handoff)) else {
            return Passage::Open(order);
        };
        let refuse = |refusal| Passage::Refused(order.router, refused(handoff, refusal));
        let taken = match self.places.take(adapter) {
            Ok(taken) => taken,
            Err(NotTaken::Unknown) => return refuse(Refusal::NoAdapter),
            Err(NotTaken::Full) => {
                let retry_after = PLACE_WAIT;
                return refuse(Refusal::QueueFull { retry_after });
            }
        };
        self.pinned.insert(handoff, adapter);
        if taken == Taken::Loaded {
            return Passage::Open(order);
        }
        let orders = vec![order];
        self.held.insert(handoff, WaitingOrders { adapter, orders });
        Passage::Held
    }

    /// Gives the orders that waited for a load; after a failure, their refusals.
    pub(crate) fn loaded(
        &mut self,
        adapter: AdapterId,
        outcome: &Result<(), AdapterError>,
    ) -> Vec<Passage> {
        self.places.load_ended(adapter, outcome);
        let waited = self.held.iter().filter(|(_, held)| held.adapter == adapter);
        let waited: Vec<HandoffId> = waited.map(|(handoff, _)| *handoff).collect();
        let mut passages = Vec::new();
        for handoff in waited {
            let held = self.held.remove(&handoff);
            let orders = held.into_iter().flat_map(|held| held.orders);
            if outcome.is_ok() {
                passages.extend(orders.map(Passage::Open));
                continue;
            }
            self.release(handoff);
            // The first order is the hand-off's; those after it, as a cancel, have no subject now.
            let router = orders.map(|order| order.router).next();
            let report = refused(handoff, Refusal::NoAdapter);
            passages.extend(router.map(|router| Passage::Refused(router, report)));
        }
        self.places.close_if_unused(adapter);
        passages
    }

    /// Ends the holds of hand-offs that have ended.
    pub(crate) fn reported(&mut self, report: &Report) {
        if let Report::Refused { handoff, .. } | Report::Released { handoff, .. } = report {
            self.release(*handoff);
        }
    }

    fn release(&mut self, handoff: HandoffId) {
        if let Some(adapter) = self.pinned.remove(&handoff) {
            self.places.give_back(adapter);
        }
    }

    /// Drops the orders of a router that is gone, and the holds of its hand-offs.
    pub(crate) fn router_lost(&mut self, router: RouterId) {
        self.held
            .retain(|handoff, _| handoff.flight.router() != router);
        let gone = self.pinned.keys().copied();
        let gone = gone.filter(|handoff| handoff.flight.router() == router);
        for handoff in gone.collect::<Vec<_>>() {
            self.release(handoff);
        }
    }
}

/// Opens a folder below `root`, whatever links are on the way.
fn open_below(
    memory: Option<&dyn AdapterMemory>,
    root: Option<&Path>,
    folder: &str,
) -> Result<(PathBuf, AdapterFacts), String> {
    let memory = memory.ok_or("its engine applies no adapters")?;
    let root = root.ok_or("it was started without --lora-root, so that adapters are fixed")?;
    let outside = || format!("{folder} is not a folder below --lora-root");
    let real = |path: &Path| path.canonicalize().map_err(|_| outside());
    let path = real(&root.join(folder))?;
    // Nothing of a folder elsewhere is told, not even whether it exists.
    if !path.starts_with(real(root)?) {
        return Err(outside());
    }
    let facts = memory.open(&path).map_err(|error| error.to_string())?;
    Ok((path, facts))
}

fn refused(handoff: HandoffId, refusal: Refusal) -> Report {
    Report::Refused { handoff, refusal }
}

#[cfg(test)]
mod tests;
