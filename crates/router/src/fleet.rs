//! The workers, as far as a router knows them.
//!
//! Owns: the connected workers with their incarnation, load, cached prefixes and open claims.
//! Never: decides what is sent to a worker, or knows the content of a flight.
//! Invariant: nothing of an earlier incarnation is kept: its load, claims and prefixes are dropped.

mod adapters;
mod check;
mod claims;
pub(crate) mod leases;
pub(crate) mod ledger;
pub(crate) mod stuck;

use crate::event::{MoveReason, RoleCounts};
use crate::fleet::ledger::WorkerLedger;
use crate::placement::devices::SharedDevices;
use cleave_domain::{
    AdapterId, AdapterPlace, BlockHash, Capacity, Fingerprint, FlightId, HandoffId, Prices, Report,
    Role, StepProgress, Time, WorkerDescription, WorkerId, WorkerLoad, WorkerRef,
};
use cleave_kv::FleetPrefixIndex;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::time::Duration;

#[derive(Clone, Debug)]
pub(crate) struct FleetWorker {
    pub(crate) me: WorkerRef,
    pub(crate) description: WorkerDescription,
    pub(crate) load: WorkerLoad,
    pub(crate) ledger: WorkerLedger,
    /// It reported that it accepts nothing new.
    pub(crate) draining: bool,
    pub(crate) progress: StepProgress,
    /// It left an order unanswered, and has reported nothing about any hand-off since.
    pub(crate) unresponsive: bool,
    /// After a refusal: not asked again before this time.
    pub(crate) closed_until: Time,
    /// The count of placements when it was last chosen.
    pub(crate) chosen: u64,
    /// Its reported prices; empty before its first report.
    pub(crate) prices: Prices,
    pub(crate) orders: u64,
    /// When its last load arrived.
    pub(crate) load_received_at: Time,
    /// The LoRA adapters that it serves, and where each is.
    pub(crate) adapters: BTreeMap<AdapterId, AdapterPlace>,
    /// Adapters that it would serve if it could load them, each with the reason.
    pub(crate) adapter_problems: BTreeMap<AdapterId, String>,
}

/// Contents assumed for a worker, at most, for each block of its pool. A worker does not announce
/// the size of its tiers; memory and disk of a server hold some ten times as much as its devices.
/// So a worker that reports without end takes some two kilobytes of this router's memory for each
/// block it announced.
const CONTENTS_PER_BLOCK: usize = 16;

/// Number of state slots, or 0.
fn windows_count(capacity: &Capacity) -> u32 {
    capacity.windows.map_or(0, |windows| windows.count)
}

fn states_count(capacity: &Capacity) -> u32 {
    capacity.states.map_or(0, |states| states.count)
}

/// Workers with one fingerprint, which may exchange blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct CompatibleWorkers {
    pub(crate) workers: BTreeSet<WorkerId>,
    pub(crate) prefixes: FleetPrefixIndex,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct RouterFleet {
    /// Time of the present fact.
    now: Time,
    workers: BTreeMap<WorkerId, FleetWorker>,
    groups: BTreeMap<Fingerprint, CompatibleWorkers>,
    devices: SharedDevices,
    /// Open claims by flight, over all attempts and workers.
    legs: BTreeMap<FlightId, u32>,
    placements: u64,
    /// Number of workers, draining ones included.
    census: RoleCounts,
    /// Version: grows when a worker joins, leaves, drains, changes its role or its progress.
    version: u64,
    /// Workers that drain or stopped decoding: their sequences are to move.
    to_leave: BTreeSet<WorkerId>,
    stuck: BTreeSet<WorkerId>,
    /// Workers about to run out of blocks, each with the sequence that it asked to have moved.
    migration_requests: BTreeMap<WorkerId, HandoffId>,
}

impl FleetWorker {
    pub(crate) fn accepts(&self) -> bool {
        !self.draining && !self.stuck()
    }

    pub(crate) fn stuck(&self) -> bool {
        self.progress == StepProgress::Stuck
    }

    pub(crate) fn priced(&self) -> bool {
        !self.prices.rows.is_empty()
    }

    /// Why its running sequences are to move, if they are.
    fn move_reason(&self) -> Option<MoveReason> {
        if self.draining {
            Some(MoveReason::Drain)
        } else {
            (!self.description.role.decodes()).then_some(MoveReason::Role)
        }
    }
}

impl RouterFleet {
    /// Sets the time of the present fact.
    pub(crate) fn set_now(&mut self, now: Time) {
        self.now = now;
    }

    /// Workers that may exchange blocks, by their fingerprint.
    pub(crate) fn groups(&self) -> &BTreeMap<Fingerprint, CompatibleWorkers> {
        &self.groups
    }

    pub(crate) fn devices(&self) -> &SharedDevices {
        &self.devices
    }

    /// Whether the worker asked to have a sequence moved, and has no room since.
    pub(crate) fn is_short_of_memory(&self, worker: WorkerId) -> bool {
        self.migration_requests.contains_key(&worker)
    }

    pub(crate) fn census(&self) -> RoleCounts {
        RoleCounts {
            devices: self.census.total() - self.devices.workers_sharing(),
            ..self.census
        }
    }

    /// Changes when readiness may have changed.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn workers(&self) -> impl Iterator<Item = &FleetWorker> {
        self.workers.values()
    }

    /// The worker, if it is connected in this incarnation.
    pub(crate) fn get(&self, worker: WorkerRef) -> Option<&FleetWorker> {
        self.workers.get(&worker.worker).filter(|w| w.me == worker)
    }

    fn get_mut(&mut self, worker: WorkerRef) -> Option<&mut FleetWorker> {
        self.workers
            .get_mut(&worker.worker)
            .filter(|w| w.me == worker)
    }

    /// Adds a worker; the caller has removed its earlier incarnation.
    pub(crate) fn join(&mut self, me: WorkerRef, description: WorkerDescription) {
        let group = self
            .groups
            .entry(description.fingerprint.clone())
            .or_default();
        group.workers.insert(me.worker);
        self.devices.join(me.worker, description.device.as_ref());
        let role = description.role;
        let load = WorkerLoad {
            blocks_free: description.capacity.blocks_count,
            states_free: states_count(&description.capacity),
            windows_free: windows_count(&description.capacity),
            ..WorkerLoad::default()
        };
        let worker = FleetWorker {
            me,
            description,
            load,
            ledger: WorkerLedger::default(),
            draining: false,
            progress: StepProgress::Moving,
            unresponsive: false,
            closed_until: Time::ZERO,
            chosen: 0,
            prices: Prices::default(),
            orders: 0,
            load_received_at: self.now,
            adapters: BTreeMap::new(),
            adapter_problems: BTreeMap::new(),
        };
        let before = self.workers.insert(me.worker, worker);
        assert!(before.is_none(), "{me} joined while connected");
        *self.census.of_role(role) += 1;
        self.version += 1;
    }

    /// Removes a worker in any incarnation. Returns the hand-offs that it had.
    pub(crate) fn leave(&mut self, worker: WorkerId) -> Vec<HandoffId> {
        let Some(lost) = self.workers.remove(&worker) else {
            return Vec::new();
        };
        *self.census.of_role(lost.description.role) -= 1;
        self.version += 1;
        self.to_leave.remove(&worker);
        self.stuck.remove(&worker);
        self.migration_requests.remove(&worker);
        self.devices.leave(worker, lost.description.device.as_ref());
        let fingerprint = &lost.description.fingerprint;
        if let Some(group) = self.groups.get_mut(fingerprint) {
            group.workers.remove(&worker);
            group.prefixes.worker_lost(lost.me);
            if group.workers.is_empty() {
                self.groups.remove(fingerprint);
            }
        }
        let handoffs: Vec<HandoffId> = lost.ledger.handoffs().map(|(id, _)| id).collect();
        for handoff in &handoffs {
            self.drop_leg(handoff.flight);
        }
        handoffs
    }

    /// Stores a worker's `WorkerLoad` or `Prices`; ignores other reports.
    pub(crate) fn update_worker(&mut self, worker_ref: WorkerRef, report: &Report) {
        let Some(worker) = self
            .workers
            .get_mut(&worker_ref.worker)
            .filter(|w| w.me == worker_ref)
        else {
            return;
        };
        match report {
            Report::Load(load) => {
                worker.load = *load;
                worker.load_received_at = self.now;
                worker.ledger.settle(load.orders_received);
            }
            Report::Prices(prices) => {
                let news = worker.prices.rows.is_empty() != prices.rows.is_empty();
                worker.prices.clone_from(prices);
                // Prices decide which workers can serve a request.
                self.version += u64::from(news);
            }
            _ => {}
        }
    }

    /// Stores a worker's `Prefix`. Returns the number of contents dropped above its limit.
    pub(crate) fn update_prefixes(
        &mut self,
        worker_ref: WorkerRef,
        stored: &[BlockHash],
        evicted: &[BlockHash],
    ) -> usize {
        let Some(worker) = self
            .workers
            .get(&worker_ref.worker)
            .filter(|w| w.me == worker_ref)
        else {
            return 0;
        };
        let Some(group) = self.groups.get_mut(&worker.description.fingerprint) else {
            return 0;
        };
        let capacity = &worker.description.capacity;
        // Snapshots of states and blocks of windows are contents too.
        let others = states_count(capacity).saturating_add(windows_count(capacity));
        let slots = capacity.blocks_count.saturating_add(others) as usize;
        let contents_max = slots.saturating_mul(CONTENTS_PER_BLOCK);
        // A content that was evicted and stored again in one report is present.
        group.prefixes.evicted(worker_ref, evicted);
        group.prefixes.stored(worker_ref, stored, contents_max)
    }

    pub(crate) fn close_until(&mut self, worker_ref: WorkerRef, until: Time) {
        if let Some(worker) = self.get_mut(worker_ref) {
            worker.closed_until = worker.closed_until.max(until);
        }
    }

    /// Whether a load shows less of anything than was assumed: only then may it make room.
    pub(crate) fn load_eased(&self, worker_ref: WorkerRef, load: &WorkerLoad) -> bool {
        let Some(worker) = self.get(worker_ref) else {
            return false;
        };
        let old = &worker.load;
        let sequences = |load: &WorkerLoad| {
            load.sequences_waiting
                .saturating_add(load.sequences_running)
        };
        let gap = |load: &WorkerLoad| load.tpot_least.unwrap_or(Duration::MAX);
        let new = load.backlog.micros.iter().flatten();
        let mut backlog = old.backlog.micros.iter().flatten().zip(new);
        !worker.ledger.settled_by(load.orders_received).is_empty()
            || load.blocks_free > old.blocks_free
            || load.states_free > old.states_free
            || load.windows_free > old.windows_free
            || sequences(load) < sequences(old)
            || load.queue_tokens < old.queue_tokens
            || load.context_tokens < old.context_tokens
            || load.streams < old.streams
            || gap(load) > gap(old)
            || load.progress != old.progress
            || backlog.any(|(old, new)| new < old)
    }

    /// Whether any worker has reported prices.
    pub(crate) fn priced(&self) -> bool {
        self.workers.values().any(FleetWorker::priced)
    }

    /// Ends the closure after a refusal: something was released there, so the worker's estimate is
    /// out of date.
    pub(crate) fn reopen(&mut self, worker_ref: WorkerRef) {
        if let Some(worker) = self.get_mut(worker_ref) {
            worker.closed_until = Time::ZERO;
        }
    }

    /// Records that the worker left an order unanswered, or answers again.
    pub(crate) fn set_silent(&mut self, worker_ref: WorkerRef, silent: bool) {
        if let Some(worker) = self.get_mut(worker_ref) {
            worker.unresponsive = silent;
        }
    }

    pub(crate) fn drain(&mut self, worker_ref: WorkerRef) {
        if let Some(worker) = self.get_mut(worker_ref) {
            worker.draining = true;
            self.version += 1;
            self.to_leave.insert(worker_ref.worker);
        }
    }

    pub(crate) fn set_role(&mut self, worker_ref: WorkerRef, role: Role) {
        let Some(worker) = self.get_mut(worker_ref) else {
            return;
        };
        let before = std::mem::replace(&mut worker.description.role, role);
        if before.decodes() && !role.decodes() {
            // A guest was placed there for another role than the present one.
            worker.ledger.clear_guests();
        }
        let moves_away = worker.move_reason().is_some();
        *self.census.of_role(before) -= 1;
        *self.census.of_role(role) += 1;
        self.version += 1;
        if !moves_away {
            self.to_leave.remove(&worker_ref.worker);
        } else if before != role {
            // Only a change of role makes sequences move. Workers repeat their role whenever a
            // router joins, and a repetition must not move the guests.
            self.to_leave.insert(worker_ref.worker);
        }
    }

    /// Records the worker's progress; true if it has changed.
    pub(crate) fn set_progress(&mut self, worker_ref: WorkerRef, progress: StepProgress) -> bool {
        let Some(worker) = self.get_mut(worker_ref).filter(|w| w.progress != progress) else {
            return false;
        };
        worker.progress = progress;
        self.version += 1;
        match progress {
            StepProgress::Stuck => self.stuck.insert(worker_ref.worker),
            StepProgress::Moving => self.stuck.remove(&worker_ref.worker),
        };
        true
    }

    /// Whether that worker, in any incarnation, makes no progress.
    pub(crate) fn is_stuck_worker(&self, worker: WorkerId) -> bool {
        self.stuck.contains(&worker)
    }

    pub(crate) fn stuck(&self) -> Vec<WorkerRef> {
        self.workers_of(&self.stuck)
            .map(|worker| worker.me)
            .collect()
    }

    /// Workers from which running sequences are to move, and why.
    pub(crate) fn workers_to_leave(&self) -> Vec<(WorkerRef, MoveReason)> {
        let workers = self.workers_of(&self.to_leave);
        let with_reason = workers.filter_map(|worker| Some((worker, worker.move_reason()?)));
        let with_some = with_reason.filter(|(worker, why)| {
            let totals = worker.ledger.totals();
            let guests = if *why == MoveReason::Role {
                totals.guests
            } else {
                0
            };
            totals.sequences > guests
        });
        with_some.map(|(worker, why)| (worker.me, why)).collect()
    }

    /// Whether the worker drains and holds nothing of a flight any more.
    pub(crate) fn has_drained(&self, worker_ref: WorkerRef) -> bool {
        let worker = self.get(worker_ref);
        worker.is_some_and(|worker| worker.draining && worker.ledger.handoffs().next().is_none())
    }

    pub(crate) fn move_reason(&self, worker_ref: WorkerRef) -> Option<MoveReason> {
        let worker = self.get(worker_ref)?;
        worker
            .move_reason()
            .filter(|_| self.to_leave.contains(&worker_ref.worker))
    }

    pub(crate) fn is_stuck(&self, worker: WorkerRef) -> bool {
        self.get(worker).is_some_and(FleetWorker::stuck)
    }

    pub(crate) fn record_migration_request(&mut self, worker: WorkerRef, handoff: HandoffId) {
        if self.claim(worker, handoff).is_some() {
            self.migration_requests.insert(worker.worker, handoff);
        }
    }

    pub(crate) fn drop_migration_request(&mut self, worker: WorkerRef) {
        if self.get(worker).is_some() {
            self.migration_requests.remove(&worker.worker);
        }
    }

    pub(crate) fn migration_requests(&self) -> Vec<(WorkerRef, HandoffId)> {
        let live =
            |(id, handoff): (&WorkerId, &HandoffId)| Some((self.incarnation_of(*id)?, *handoff));
        self.migration_requests.iter().filter_map(live).collect()
    }

    /// Number of the worker's blocks that so many tokens fill.
    pub(crate) fn blocks(&self, worker: WorkerRef, tokens: u32) -> Option<u32> {
        let capacity = &self.get(worker)?.description.capacity;
        Some(tokens.div_ceil(capacity.block_tokens))
    }

    pub(crate) fn workers_of<'a>(
        &'a self,
        ids: &'a BTreeSet<WorkerId>,
    ) -> impl Iterator<Item = &'a FleetWorker> {
        ids.iter().filter_map(|id| self.workers.get(id))
    }

    /// The group's workers in the order of their ids; one group alone needs no look-ups.
    pub(crate) fn members<'a>(
        &'a self,
        group: &'a CompatibleWorkers,
    ) -> impl Iterator<Item = &'a FleetWorker> {
        let only = group.workers.len() == self.workers.len();
        let all = only.then(|| self.workers.values());
        let some = (!only).then(|| self.workers_of(&group.workers));
        let all = all.into_iter().flatten();
        all.chain(some.into_iter().flatten())
    }

    /// The present incarnation of the worker.
    pub(crate) fn incarnation_of(&self, worker: WorkerId) -> Option<WorkerRef> {
        self.workers.get(&worker).map(|worker| worker.me)
    }

    /// Whether there are workers, and none could hold so many tokens.
    pub(crate) fn is_too_long(&self, tokens: usize) -> bool {
        let holds =
            |worker: &FleetWorker| tokens < worker.description.capacity.context_tokens_max as usize;
        !self.workers.is_empty() && !self.workers.values().any(holds)
    }

    /// The longest sequence that a worker can hold; unlimited for one that is gone.
    pub(crate) fn context_tokens_max(&self, worker_ref: WorkerRef) -> u32 {
        let about = self
            .get(worker_ref)
            .map(|worker| &worker.description.capacity);
        about.map_or(u32::MAX, |capacity| capacity.context_tokens_max)
    }

    pub(crate) fn fingerprint(&self, worker_ref: WorkerRef) -> Option<&Fingerprint> {
        self.get(worker_ref)
            .map(|worker| &worker.description.fingerprint)
    }

    /// Hand-offs of which the worker holds something.
    pub(crate) fn handoffs(&self, worker_ref: WorkerRef) -> Vec<HandoffId> {
        let ledger = self.get(worker_ref).map(|worker| &worker.ledger);
        let all = ledger.into_iter().flat_map(WorkerLedger::handoffs);
        all.map(|(handoff, _)| handoff).collect()
    }

    /// Sequences that decode there or will, and are to move for that reason: after a change of
    /// role, guests stay.
    pub(crate) fn sequences_to_move(&self, worker: WorkerRef, why: MoveReason) -> Vec<HandoffId> {
        let is_guest = |handoff: &HandoffId| self.claim(worker, *handoff).is_some_and(|p| p.guest);
        let mut sequences = self.sequences(worker);
        sequences.retain(|handoff| why != MoveReason::Role || !is_guest(handoff));
        sequences
    }

    /// Sequences that decode there or will.
    pub(crate) fn sequences(&self, worker_ref: WorkerRef) -> Vec<HandoffId> {
        let ledger = self.get(worker_ref).map(|worker| &worker.ledger);
        let all = ledger.into_iter().flat_map(WorkerLedger::handoffs);
        all.filter(|(_, claim)| claim.blocks > 0)
            .map(|(handoff, _)| handoff)
            .collect()
    }

    // === contents ===

    /// Block size of each group; it is part of the fingerprint.
    pub(crate) fn block_sizes(&self) -> impl Iterator<Item = u32> {
        let capacities = self.groups.values().filter_map(|g| self.group_capacity(g));
        capacities.map(|capacity| capacity.block_tokens)
    }

    /// Capacity of the first worker of a group; the others have the same sizes, which are part of
    /// the fingerprint, in other numbers.
    pub(crate) fn group_capacity(&self, group: &CompatibleWorkers) -> Option<&Capacity> {
        let worker = self.workers.get(group.workers.first()?)?;
        Some(&worker.description.capacity)
    }

    pub(crate) fn hash_groups(&self, hasher: &mut impl Hasher) {
        for group in self.groups.values() {
            group.prefixes.hash(hasher);
        }
        self.to_leave.hash(hasher);
        self.migration_requests.hash(hasher);
    }
}

#[cfg(test)]
mod claim_tests;
#[cfg(test)]
mod state_tests;

#[cfg(test)]
mod tests {
    use super::{CONTENTS_PER_BLOCK, RouterFleet};
    use cleave_domain::{
        BlockHash, Capacity, Fingerprint, Role, WorkerDescription, WorkerId, WorkerRef,
    };

    #[test]
    fn prefix_reports_are_bounded_by_the_workers_blocks() {
        let me = WorkerRef {
            worker: WorkerId(1),
            ..WorkerRef::default()
        };
        let capacity = Capacity {
            block_tokens: 16,
            block_bytes: 64,
            blocks_count: 4,
            slots_count: 1,
            step_tokens_max: 16,
            context_tokens_max: 64,
            states: None,
            windows: None,
        };
        let description = WorkerDescription {
            role: Role::Both,
            home: Role::Both,
            model: String::new(),
            fingerprint: Fingerprint::default(),
            capacity,
            queue_max: 1,
            device: None,
        };
        let mut fleet = RouterFleet::default();
        fleet.join(me, description);
        let mut dropped_count = 0;
        for number in 0..10_000_u128 {
            let stored = vec![BlockHash(number.wrapping_mul(0x9e37_79b9).to_be_bytes())];
            dropped_count += fleet.update_prefixes(me, &stored, &[]);
        }
        assert_eq!(dropped_count, 10_000 - 4 * CONTENTS_PER_BLOCK);
        let prefixes = &fleet.groups[&Fingerprint::default()].prefixes;
        assert_eq!(prefixes.blocks_count(me), 4 * CONTENTS_PER_BLOCK);
        prefixes.check();
    }
}
