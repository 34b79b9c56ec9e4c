//! Orders that wait until their adapters are loaded, and the adapters of a worker.
//!
//! Owns: the names of the adapters, which are loaded, which hand-offs have which, and the orders
//! held back. Never: reads a file on the driver's thread, or holds up an order of another hand-off.
//! Invariant: an order that passes has an adapter that is loaded, if it has one, and it stays
//! loaded until the hand-off is released. No more adapters are loaded, and no more have a copy
//! in host memory, than the limits allow.

use super::constraint_gate::RouterOrder;
use cleave_domain::{AdapterId, AdapterOffer, AdapterPlace, HandoffId, Refusal, Report, RouterId};
use cleave_engine::{AdapterError, AdapterFacts, AdapterMemory};
use cleave_telemetry::{AdapterLoads, AdapterUse};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tracing::{info, warn};

/// The time after which a router may ask again where every place has an adapter in use: streams
/// end all the time.
const PLACE_WAIT: Duration = Duration::from_millis(100);

/// The adapters of a worker, and the orders that wait for one.
pub(crate) struct AdapterGate {
    memory: Option<Arc<dyn AdapterMemory>>,
    limits: AdapterLimits,
    /// Contents that the names stand for.
    names: BTreeMap<String, NamedAdapter>,
    adapters: BTreeMap<AdapterId, AdapterEntry>,
    /// By hand-off, in the order of arrival. The first has the adapter that all wait for.
    held: BTreeMap<HandoffId, WaitingOrders>,
    pinned: BTreeMap<HandoffId, AdapterId>,
    events: mpsc::UnboundedSender<AdapterEvent>,
    /// The folder below which routers may name adapters; `None` if they may name none.
    root: Option<PathBuf>,
    /// Grows with each begin and end of a use.
    uses_count: u64,
    /// Grows with each change of what [`AdapterGate::in_use`] gives.
    version: u64,
    loads: AdapterLoads,
}

/// The adapters that a worker has in memory at once, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdapterLimits {
    /// Adapters that are loaded, for steps to apply.
    pub(crate) loaded_max: usize,
    /// Adapters that are loaded or have a copy in host memory. No copies are made if it is not
    /// above `loaded_max`.
    pub(crate) host_max: usize,
}

impl AdapterLimits {
    fn has_host_copies(self) -> bool {
        self.host_max > self.loaded_max
    }
}

/// An adapter that a worker serves.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedAdapter {
    /// The folder that it was read from.
    folder: PathBuf,
    /// The content of the folder when it was opened.
    adapter: AdapterId,
}

struct AdapterEntry {
    state: LoadState,
    /// Names that stand for it. Without any it is closed once no hand-off has it.
    names_count: usize,
    /// Hand-offs that have it.
    pins_count: usize,
    last_use: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoadState {
    OnDisk,
    /// A copy is in host memory.
    InHost,
    Loading,
    Resident,
}

impl LoadState {
    /// Whether it has one of the places of adapters that steps apply.
    fn has_place(self) -> bool {
        matches!(self, Self::Loading | Self::Resident)
    }
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
            memory,
            limits: AdapterLimits {
                loaded_max: limits.loaded_max.max(1),
                ..limits
            },
            names: BTreeMap::new(),
            adapters: BTreeMap::new(),
            held: BTreeMap::new(),
            pinned: BTreeMap::new(),
            events,
            root,
            uses_count: 0,
            version: 0,
            loads: AdapterLoads::default(),
        };
        (gate, ends)
    }

    /// Whether the engine applies adapters.
    pub(crate) fn is_capable(&self) -> bool {
        self.memory.is_some()
    }

    // === names ===

    /// Serves an open adapter under a name, in place of an earlier one of the name. Hand-offs that
    /// have the earlier one keep it.
    pub(crate) fn serve(&mut self, name: &str, folder: &Path, facts: AdapterFacts) {
        self.version += 1;
        let adapter = facts.adapter;
        let entry = self.adapters.entry(adapter).or_insert(AdapterEntry {
            state: LoadState::OnDisk,
            names_count: 0,
            pins_count: 0,
            last_use: 0,
        });
        entry.names_count += 1;
        let named = NamedAdapter {
            folder: folder.to_owned(),
            adapter,
        };
        let earlier = self.names.insert(name.to_owned(), named);
        if let Some(earlier) = earlier {
            self.unname(earlier.adapter);
        }
    }

    /// Opens a folder that a router named, beside the driver; [`AdapterEvent::Opened`] follows.
    /// Must be called within a tokio runtime.
    pub(crate) fn open(&self, request: OpenRequest) {
        let (memory, root) = (self.memory.clone(), self.root.clone());
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
        self.version += 1;
        let named = self.names.remove(name);
        let adapter = named.map(|named| named.adapter);
        adapter.into_iter().for_each(|adapter| self.unname(adapter));
        adapter.is_some()
    }

    /// All adapters with the places of their weights, by ascending name.
    pub(crate) fn offers(&self) -> Vec<AdapterOffer> {
        let offers = self.names.iter().map(|(name, named)| {
            let state = self.adapters[&named.adapter].state;
            AdapterOffer {
                name: name.clone(),
                adapter: named.adapter,
                root: named.folder.display().to_string(),
                place: match state {
                    LoadState::Resident => AdapterPlace::Resident,
                    LoadState::InHost => AdapterPlace::InHost,
                    LoadState::OnDisk | LoadState::Loading => AdapterPlace::OnDisk,
                },
            }
        });
        offers.collect()
    }

    /// Grows with each change of what [`AdapterGate::in_use`] gives.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// The adapters as metrics show them.
    pub(crate) fn in_use(&self) -> AdapterUse {
        let is = |named: &NamedAdapter, state: LoadState| {
            let entry = &self.adapters[&named.adapter];
            entry.state == state && entry.pins_count > 0
        };
        let names = |state: LoadState| {
            let used = self.names.iter().filter(|(_, named)| is(named, state));
            used.map(|(name, _)| name.clone()).collect()
        };
        let count = |state: LoadState| {
            let entries = self.adapters.values();
            entries.filter(|entry| entry.state == state).count()
        };
        AdapterUse {
            max_loras: self.limits.loaded_max,
            served: self.names.len(),
            loaded: count(LoadState::Resident),
            in_host: count(LoadState::InHost),
            running: names(LoadState::Resident),
            waiting: names(LoadState::Loading),
            loads: self.loads,
        }
    }

    fn unname(&mut self, adapter: AdapterId) {
        if let Some(entry) = self.adapters.get_mut(&adapter) {
            entry.names_count -= 1;
        }
        self.close_if_unused(adapter);
    }

    /// Closes an adapter that has no name and no hand-off.
    fn close_if_unused(&mut self, adapter: AdapterId) {
        let is_unused = |entry: &AdapterEntry| {
            let is_idle = entry.names_count == 0 && entry.pins_count == 0;
            is_idle && entry.state != LoadState::Loading
        };
        if self.adapters.get(&adapter).is_some_and(is_unused)
            && let Some(memory) = &self.memory
        {
            self.adapters.remove(&adapter);
            memory.close(adapter);
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
        let Some(state) = self.adapters.get(&adapter).map(|entry| entry.state) else {
            return Passage::Refused(order.router, refused(handoff, Refusal::NoAdapter));
        };
        if !state.has_place() && !self.make_place() {
            let retry_after = PLACE_WAIT;
            let refusal = Refusal::QueueFull { retry_after };
            return Passage::Refused(order.router, refused(handoff, refusal));
        }
        self.pin(handoff, adapter);
        match state {
            LoadState::Resident => return Passage::Open(order),
            LoadState::Loading => {}
            LoadState::OnDisk | LoadState::InHost => self.load(adapter, state),
        }
        let orders = vec![order];
        self.held.insert(handoff, WaitingOrders { adapter, orders });
        Passage::Held
    }

    fn pin(&mut self, handoff: HandoffId, adapter: AdapterId) {
        self.version += 1;
        self.uses_count += 1;
        self.pinned.insert(handoff, adapter);
        if let Some(entry) = self.adapters.get_mut(&adapter) {
            entry.pins_count += 1;
            entry.last_use = self.uses_count;
        }
    }

    fn unpin(&mut self, adapter: AdapterId) {
        self.version += 1;
        self.uses_count += 1;
        if let Some(entry) = self.adapters.get_mut(&adapter) {
            entry.pins_count -= 1;
            // A use lasts until its end: a long stream's adapter is not the first to leave.
            entry.last_use = self.uses_count;
        }
        self.close_if_unused(adapter);
    }

    /// Makes room for one more adapter: the least recently used one that no hand-off has leaves.
    fn make_place(&mut self) -> bool {
        let taken = |entry: &&AdapterEntry| entry.state.has_place();
        if self.adapters.values().filter(taken).count() < self.limits.loaded_max {
            return true;
        }
        let Some(oldest) = self.least_recently_used(LoadState::Resident) else {
            return false;
        };
        let left = if self.limits.has_host_copies() {
            LoadState::InHost
        } else {
            LoadState::OnDisk
        };
        self.leave(oldest, left);
        true
    }

    /// Drops copies in host memory until no more adapters are in memory than may be: the least
    /// recently used first. Loaded adapters alone are never too many.
    fn make_host_place(&mut self) {
        let held = |gate: &Self| {
            let held = gate.adapters.values();
            held.filter(|entry| entry.state != LoadState::OnDisk)
                .count()
        };
        while held(self) > self.limits.host_max {
            let Some(oldest) = self.least_recently_used(LoadState::InHost) else {
                return;
            };
            self.leave(oldest, LoadState::OnDisk);
        }
    }

    /// The adapter in this state that no hand-off has, and that was used before the others.
    fn least_recently_used(&self, state: LoadState) -> Option<AdapterId> {
        let free = self
            .adapters
            .iter()
            .filter(|(_, entry)| entry.state == state && entry.pins_count == 0);
        let oldest = free.min_by_key(|(_, entry)| entry.last_use);
        oldest.map(|(adapter, _)| *adapter)
    }

    /// Takes an adapter from where it is to a place farther from steps.
    fn leave(&mut self, adapter: AdapterId, to: LoadState) {
        let (Some(memory), Some(entry)) = (&self.memory, self.adapters.get_mut(&adapter)) else {
            return;
        };
        match entry.state {
            LoadState::InHost => {
                memory.drop_host_copy(adapter);
                self.loads.dropped += 1;
            }
            _ => {
                memory.unload(adapter);
                self.loads.evicted += 1;
            }
        }
        entry.state = to;
    }

    /// Begins to load an adapter that was in this state.
    fn load(&mut self, adapter: AdapterId, from: LoadState) {
        self.version += 1;
        let (Some(memory), Some(entry)) = (&self.memory, self.adapters.get_mut(&adapter)) else {
            return;
        };
        entry.state = LoadState::Loading;
        let (memory, events) = (Arc::clone(memory), self.events.clone());
        if from == LoadState::InHost {
            self.loads.from_host += 1;
        }
        self.make_host_place();
        let is_copied = self.limits.has_host_copies();
        let load = move || {
            if is_copied {
                memory.copy_to_host(adapter)?;
            }
            memory.load(adapter)
        };
        tokio::spawn(async move {
            let loaded = spawn_blocking(load).await;
            // A panic of a load is an error of the adapter alone.
            let outcome = loaded.unwrap_or(Err(AdapterError::Unknown(adapter)));
            // The driver may have ended.
            let _ = events.send(AdapterEvent::Loaded { adapter, outcome });
        });
    }

    /// Gives the orders that waited for a load; after a failure, their refusals.
    pub(crate) fn loaded(
        &mut self,
        adapter: AdapterId,
        outcome: &Result<(), AdapterError>,
    ) -> Vec<Passage> {
        self.version += 1;
        let Some(entry) = self.adapters.get_mut(&adapter) else {
            return Vec::new();
        };
        match outcome {
            Ok(()) => {
                entry.state = LoadState::Resident;
                self.loads.loaded += 1;
                info!(%adapter, "adapter loaded");
            }
            Err(error) => {
                entry.state = LoadState::OnDisk;
                self.loads.failed += 1;
                warn!(%adapter, %error, "an adapter cannot be loaded");
                if let Some(memory) = &self.memory {
                    memory.drop_host_copy(adapter);
                }
            }
        }
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
        self.close_if_unused(adapter);
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
            self.unpin(adapter);
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
