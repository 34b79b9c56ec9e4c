//! The places of a worker's adapters: loaded, in host memory, or in their folders alone.
//!
//! Owns: which adapter is where, and how many names and hand-offs have it. Never: knows a name or
//! an order; loads an adapter.
//! Invariant: no more adapters are loaded, and no more have a copy in host memory, than the limits
//! allow; one that a hand-off has keeps its place.

use cleave_domain::{AdapterId, AdapterPlace};
use std::collections::{BTreeMap, VecDeque};

/// The adapters that a worker has in memory at once, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterLimits {
    /// Adapters that are loaded, for steps to apply.
    pub loaded_max: usize,
    /// Adapters that are loaded or have a copy in host memory. No copies are made if it is not
    /// above `loaded_max`.
    pub host_max: usize,
}

impl AdapterLimits {
    fn has_host_copies(self) -> bool {
        self.host_max > self.loaded_max
    }
}

/// The adapters of a worker by their places.
#[derive(Debug)]
pub(super) struct AdapterPlaces {
    limits: AdapterLimits,
    entries: BTreeMap<AdapterId, AdapterEntry>,
    work: VecDeque<AdapterWork>,
    /// Grows with each begin and end of a use.
    uses_count: u64,
    /// Grows with each change.
    version: u64,
    loads: AdapterLoads,
}

/// Work on an adapter, to be done in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterWork {
    /// Load it from where it is; [`AdapterAdmission::load_ended`] is to be told the end.
    ///
    /// [`AdapterAdmission::load_ended`]: super::AdapterAdmission::load_ended
    Load(AdapterId, LoadSource),
    /// Free the memory in which steps read it.
    Unload(AdapterId),
    /// Free its copy in host memory.
    DropHostCopy(AdapterId),
    /// It is served no longer, and nothing has it.
    Close(AdapterId),
}

/// The place from which an adapter is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadSource {
    /// Its folder; no copy is to be kept.
    Disk,
    /// Its folder; a copy is to be kept in host memory.
    DiskThroughHost,
    /// Its copy in host memory.
    Host,
}

/// The end of a load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadOutcome {
    Loaded,
    Failed {
        /// The reason, which the refusals of its requests give.
        reason: String,
    },
}

/// Loads of adapters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterLoads {
    pub loaded: u64,
    pub failed: u64,
    /// Loaded adapters that left for another one.
    pub evicted: u64,
    /// Loads that began with a copy in host memory, and read no disk.
    pub from_host: u64,
    /// Copies in host memory that were dropped for another one.
    pub dropped: u64,
}

#[derive(Debug, Default)]
struct AdapterEntry {
    state: AdapterState,
    /// Names that stand for it. Without any it is closed once no hand-off has it.
    names_count: usize,
    /// Hand-offs that have it.
    pins_count: usize,
    last_use: u64,
}

/// The state of an adapter at its worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdapterState {
    /// In its folder alone.
    #[default]
    OnDisk,
    /// A copy is in host memory.
    InHost,
    /// A load is under way.
    Loading,
    /// Loaded, for steps to apply.
    Resident,
}

impl AdapterState {
    /// Whether it has one of the places of adapters that steps apply.
    fn has_place(self) -> bool {
        matches!(self, Self::Loading | Self::Resident)
    }
}

impl From<AdapterState> for AdapterPlace {
    fn from(state: AdapterState) -> Self {
        match state {
            AdapterState::Resident => Self::Resident,
            AdapterState::InHost => Self::InHost,
            AdapterState::OnDisk | AdapterState::Loading => Self::OnDisk,
        }
    }
}

/// An adapter that a hand-off has from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    Loaded,
    /// It is to wait for a load.
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
    pub(super) fn new(limits: AdapterLimits) -> Self {
        Self {
            limits: AdapterLimits {
                loaded_max: limits.loaded_max.max(1),
                ..limits
            },
            entries: BTreeMap::new(),
            work: VecDeque::new(),
            uses_count: 0,
            version: 0,
            loads: AdapterLoads::default(),
        }
    }

    /// The work that is to be done first.
    pub(super) fn poll(&mut self) -> Option<AdapterWork> {
        self.work.pop_front()
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
    pub(super) fn state(&self, adapter: AdapterId) -> AdapterState {
        self.entries[&adapter].state
    }

    /// Whether a hand-off has this adapter, which is in this state.
    pub(super) fn is_used(&self, adapter: AdapterId, state: AdapterState) -> bool {
        let entry = &self.entries[&adapter];
        entry.state == state && entry.pins_count > 0
    }

    pub(super) fn count(&self, state: AdapterState) -> usize {
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
            is_idle && entry.state != AdapterState::Loading
        };
        if self.entries.get(&adapter).is_some_and(is_unused) {
            self.entries.remove(&adapter);
            self.work.push_back(AdapterWork::Close(adapter));
        }
    }

    /// Closes an adapter that was opened and got no name.
    pub(super) fn close_if_unknown(&mut self, adapter: AdapterId) {
        if !self.entries.contains_key(&adapter) {
            self.work.push_back(AdapterWork::Close(adapter));
        }
    }

    /// Gives an adapter to one hand-off more; begins to load it if it is not loaded.
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
            AdapterState::Resident => return Ok(Taken::Loaded),
            AdapterState::Loading => {}
            AdapterState::OnDisk | AdapterState::InHost => self.load(adapter, state),
        }
        Ok(Taken::Loading)
    }

    /// Begins to load an adapter that a hand-off is about to need, if there is a place for it. No
    /// hand-off has it yet, so that it may leave again.
    pub(super) fn fetch(&mut self, adapter: AdapterId) {
        let Some(state) = self.entries.get(&adapter).map(|entry| entry.state) else {
            return;
        };
        if !state.has_place() && !self.make_place() {
            return;
        }
        self.version += 1;
        self.uses_count += 1;
        if let Some(entry) = self.entries.get_mut(&adapter) {
            entry.last_use = self.uses_count;
        }
        if !state.has_place() {
            self.load(adapter, state);
        }
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
        let Some(oldest) = self.least_recently_used(AdapterState::Resident) else {
            return false;
        };
        let left = if self.limits.has_host_copies() {
            AdapterState::InHost
        } else {
            AdapterState::OnDisk
        };
        self.leave(oldest, left);
        true
    }

    /// Drops copies in host memory until no more adapters are in memory than may be: the least
    /// recently used first. Loaded adapters alone are never too many.
    fn make_host_place(&mut self) {
        let on_disk = AdapterState::OnDisk;
        while self.entries.len() - self.count(on_disk) > self.limits.host_max {
            let Some(oldest) = self.least_recently_used(AdapterState::InHost) else {
                return;
            };
            self.leave(oldest, on_disk);
        }
    }

    /// The adapter in this state that no hand-off has, and that was used before the others.
    fn least_recently_used(&self, state: AdapterState) -> Option<AdapterId> {
        let free = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.state == state && entry.pins_count == 0);
        let oldest = free.min_by_key(|(_, entry)| entry.last_use);
        oldest.map(|(adapter, _)| *adapter)
    }

    /// Takes an adapter from where it is to a place farther from steps.
    fn leave(&mut self, adapter: AdapterId, to: AdapterState) {
        let Some(entry) = self.entries.get_mut(&adapter) else {
            return;
        };
        let work = if entry.state == AdapterState::InHost {
            self.loads.dropped += 1;
            AdapterWork::DropHostCopy(adapter)
        } else {
            self.loads.evicted += 1;
            AdapterWork::Unload(adapter)
        };
        entry.state = to;
        self.work.push_back(work);
    }

    /// Begins to load an adapter that was in this state.
    fn load(&mut self, adapter: AdapterId, from: AdapterState) {
        let Some(entry) = self.entries.get_mut(&adapter) else {
            return;
        };
        entry.state = AdapterState::Loading;
        let source = if from == AdapterState::InHost {
            self.loads.from_host += 1;
            LoadSource::Host
        } else if self.limits.has_host_copies() {
            LoadSource::DiskThroughHost
        } else {
            LoadSource::Disk
        };
        self.make_host_place();
        self.work.push_back(AdapterWork::Load(adapter, source));
    }

    /// A load has ended. One that failed leaves nothing in memory.
    pub(super) fn load_ended(&mut self, adapter: AdapterId, outcome: &LoadOutcome) {
        self.version += 1;
        let Some(entry) = self.entries.get_mut(&adapter) else {
            return;
        };
        match outcome {
            LoadOutcome::Loaded => {
                entry.state = AdapterState::Resident;
                self.loads.loaded += 1;
            }
            LoadOutcome::Failed { .. } => {
                entry.state = AdapterState::OnDisk;
                self.loads.failed += 1;
                self.work.push_back(AdapterWork::DropHostCopy(adapter));
            }
        }
    }
}
