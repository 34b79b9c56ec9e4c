//! The places of a worker's adapters: loaded, in host memory, or in their folders alone.
//!
//! Owns: which adapter is where, how many names and hand-offs have it, and the loads under way.
//! Never: knows a name or an order.
//! Invariant: no more adapters are loaded, and no more have a copy in host memory, than the limits
//! allow; one that a hand-off has keeps its place.

use super::AdapterEvent;
use cleave_domain::{AdapterId, AdapterPlace};
use cleave_engine::{AdapterError, AdapterMemory};
use cleave_telemetry::AdapterLoads;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tracing::{info, warn};

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

/// The adapters of a worker by their places.
pub(super) struct AdapterPlaces {
    memory: Option<Arc<dyn AdapterMemory>>,
    limits: AdapterLimits,
    entries: BTreeMap<AdapterId, AdapterEntry>,
    events: mpsc::UnboundedSender<AdapterEvent>,
    /// Grows with each begin and end of a use.
    uses_count: u64,
    /// Grows with each change.
    version: u64,
    loads: AdapterLoads,
}

#[derive(Default)]
struct AdapterEntry {
    state: LoadState,
    /// Names that stand for it. Without any it is closed once no hand-off has it.
    names_count: usize,
    /// Hand-offs that have it.
    pins_count: usize,
    last_use: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LoadState {
    #[default]
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

impl From<LoadState> for AdapterPlace {
    fn from(state: LoadState) -> Self {
        match state {
            LoadState::Resident => Self::Resident,
            LoadState::InHost => Self::InHost,
            LoadState::OnDisk | LoadState::Loading => Self::OnDisk,
        }
    }
}

/// An adapter that a hand-off has from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    Loaded,
    Loading,
}

/// The reason why a hand-off cannot have an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotTaken {
    /// It is not served.
    Unknown,
    /// Every place is taken by an adapter in use.
    Full,
}

impl AdapterPlaces {
    pub(super) fn new(
        memory: Option<Arc<dyn AdapterMemory>>,
        limits: AdapterLimits,
        events: mpsc::UnboundedSender<AdapterEvent>,
    ) -> Self {
        Self {
            memory,
            limits: AdapterLimits {
                loaded_max: limits.loaded_max.max(1),
                ..limits
            },
            entries: BTreeMap::new(),
            events,
            uses_count: 0,
            version: 0,
            loads: AdapterLoads::default(),
        }
    }

    pub(super) fn memory(&self) -> Option<&Arc<dyn AdapterMemory>> {
        self.memory.as_ref()
    }

    pub(super) fn loaded_max(&self) -> usize {
        self.limits.loaded_max
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Loads since the start.
    pub(super) fn loads(&self) -> AdapterLoads {
        self.loads
    }

    /// The state of an adapter that has a name.
    pub(super) fn state(&self, adapter: AdapterId) -> LoadState {
        self.entries[&adapter].state
    }

    /// Whether a hand-off has this adapter, which is in this state.
    pub(super) fn is_used(&self, adapter: AdapterId, state: LoadState) -> bool {
        let entry = &self.entries[&adapter];
        entry.state == state && entry.pins_count > 0
    }

    pub(super) fn count(&self, state: LoadState) -> usize {
        let entries = self.entries.values();
        entries.filter(|entry| entry.state == state).count()
    }

    // === names and hand-offs ===

    /// An open adapter has one name more.
    pub(super) fn add_name(&mut self, adapter: AdapterId) {
        self.version += 1;
        self.entries.entry(adapter).or_default().names_count += 1;
    }

    pub(super) fn remove_name(&mut self, adapter: AdapterId) {
        self.version += 1;
        if let Some(entry) = self.entries.get_mut(&adapter) {
            entry.names_count -= 1;
        }
        self.close_if_unused(adapter);
    }

    /// Closes an adapter that has no name and no hand-off.
    pub(super) fn close_if_unused(&mut self, adapter: AdapterId) {
        let is_unused = |entry: &AdapterEntry| {
            let is_idle = entry.names_count == 0 && entry.pins_count == 0;
            is_idle && entry.state != LoadState::Loading
        };
        if self.entries.get(&adapter).is_some_and(is_unused) {
            self.entries.remove(&adapter);
            self.close_if_unknown(adapter);
        }
    }

    /// Closes an adapter that was opened and got no name.
    pub(super) fn close_if_unknown(&self, adapter: AdapterId) {
        if let (Some(memory), false) = (&self.memory, self.entries.contains_key(&adapter)) {
            memory.close(adapter);
        }
    }

    /// Gives an adapter to one hand-off more; begins to load it if it is not loaded. Must be called
    /// within a tokio runtime.
    pub(super) fn take(&mut self, adapter: AdapterId) -> Result<Taken, NotTaken> {
        let entry = self.entries.get(&adapter).ok_or(NotTaken::Unknown)?;
        let state = entry.state;
        if !state.has_place() && !self.make_place() {
            return Err(NotTaken::Full);
        }
        self.version += 1;
        self.uses_count += 1;
        if let Some(entry) = self.entries.get_mut(&adapter) {
            entry.pins_count += 1;
            entry.last_use = self.uses_count;
        }
        match state {
            LoadState::Resident => return Ok(Taken::Loaded),
            LoadState::Loading => {}
            LoadState::OnDisk | LoadState::InHost => self.load(adapter, state),
        }
        Ok(Taken::Loading)
    }

    /// A hand-off has the adapter no longer.
    pub(super) fn give_back(&mut self, adapter: AdapterId) {
        self.version += 1;
        self.uses_count += 1;
        if let Some(entry) = self.entries.get_mut(&adapter) {
            entry.pins_count -= 1;
            // A use lasts until its end: a long stream's adapter is not the first to leave.
            entry.last_use = self.uses_count;
        }
        self.close_if_unused(adapter);
    }

    // === places ===

    /// Makes room for one more adapter: the least recently used one that no hand-off has leaves.
    fn make_place(&mut self) -> bool {
        let taken = |entry: &&AdapterEntry| entry.state.has_place();
        if self.entries.values().filter(taken).count() < self.limits.loaded_max {
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
        let on_disk = LoadState::OnDisk;
        while self.entries.len() - self.count(on_disk) > self.limits.host_max {
            let Some(oldest) = self.least_recently_used(LoadState::InHost) else {
                return;
            };
            self.leave(oldest, on_disk);
        }
    }

    /// The adapter in this state that no hand-off has, and that was used before the others.
    fn least_recently_used(&self, state: LoadState) -> Option<AdapterId> {
        let free = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.state == state && entry.pins_count == 0);
        let oldest = free.min_by_key(|(_, entry)| entry.last_use);
        oldest.map(|(adapter, _)| *adapter)
    }

    /// Takes an adapter from where it is to a place farther from steps.
    fn leave(&mut self, adapter: AdapterId, to: LoadState) {
        let (Some(memory), Some(entry)) = (&self.memory, self.entries.get_mut(&adapter)) else {
            return;
        };
        if entry.state == LoadState::InHost {
            memory.drop_host_copy(adapter);
            self.loads.dropped += 1;
        } else {
            memory.unload(adapter);
            self.loads.evicted += 1;
        }
        entry.state = to;
    }

    /// Begins to load an adapter that was in this state.
    fn load(&mut self, adapter: AdapterId, from: LoadState) {
        let (Some(memory), Some(entry)) = (&self.memory, self.entries.get_mut(&adapter)) else {
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

    /// A load has ended.
    pub(super) fn load_ended(&mut self, adapter: AdapterId, outcome: &Result<(), AdapterError>) {
        self.version += 1;
        let Some(entry) = self.entries.get_mut(&adapter) else {
            return;
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
    }
}
