//! Workers that compute on the same hardware.
//!
//! Owns: which workers share a device, and which one of them is considered for a request, where
//! times decide and it may stay whole. Never: predicts; a forecast assumes that a worker has its
//! device alone. Invariant: a worker with its own device is always considered, and of those that
//! share a device exactly one is.
//!
//! Steps of workers on one device slow each other down, which no forecast knows; each of them reads
//! the weights; and a hand-off between them moves blocks to where the same hardware computes. So a
//! request that the chosen one refuses, or has no room for now, waits for that one; the others of
//! its device serve when it cannot. A request without targets, where no request has any, may also
//! use their blocks.

use crate::placement::candidates::PlacementQuery;
use crate::placement::forecast::{PlacementPriority, RequestNeed, WorkerForecast};
use crate::placement::policy;
use cleave_domain::{DeviceId, WorkerId};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SharedDevices {
    workers: BTreeMap<DeviceId, BTreeSet<WorkerId>>,
    /// Each worker that shares its device, and the first worker of that device.
    shared: BTreeMap<WorkerId, WorkerId>,
}

/// The order of preference among the workers of a device: the least is considered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct DeviceMemberRank {
    too_small: bool,
    /// It makes no progress, or failed this request.
    unavailable: bool,
    full: bool,
    sends_away: bool,
    worker: WorkerId,
}

impl SharedDevices {
    pub(crate) fn join(&mut self, worker: WorkerId, device: Option<&DeviceId>) {
        if let Some(device) = device {
            let there = self.workers.entry(device.clone()).or_default();
            there.insert(worker);
            self.regroup(device);
        }
    }

    pub(crate) fn leave(&mut self, worker: WorkerId, device: Option<&DeviceId>) {
        self.shared.remove(&worker);
        let Some(device) = device else {
            return;
        };
        if let Some(there) = self.workers.get_mut(device) {
            there.remove(&worker);
        }
        self.regroup(device);
    }

    fn regroup(&mut self, device: &DeviceId) {
        let Some(there) = self.workers.get(device) else {
            return;
        };
        match (there.len(), there.first()) {
            (0, _) | (_, None) => drop(self.workers.remove(device)),
            (1, Some(only)) => drop(self.shared.remove(only)),
            (_, Some(first)) => self
                .shared
                .extend(there.iter().map(|worker| (*worker, *first))),
        }
    }

    /// Workers beyond the first of each device.
    pub(crate) fn workers_sharing(&self) -> u32 {
        let firsts: BTreeSet<&WorkerId> = self.shared.values().collect();
        (self.shared.len() - firsts.len()) as u32
    }

    /// Keeps one worker of each device; `stuck` tells whether a worker makes no progress.
    pub(crate) fn leave_one_each(
        &self,
        workers: &mut Vec<WorkerForecast>,
        query: &PlacementQuery,
        need: &RequestNeed,
        stuck: impl Fn(WorkerId) -> bool,
    ) {
        if self.shared.is_empty() {
            return;
        }
        // A yielding request waits instead, and targets are promised by the device as a whole.
        let anywhere = need.priority_over_others == PlacementPriority::Resumed
            || (need.priority_over_others == PlacementPriority::New && !need.has_target());
        let mut best: BTreeMap<WorkerId, DeviceMemberRank> = BTreeMap::new();
        for WorkerForecast { snapshot, .. } in workers.iter() {
            let worker = snapshot.worker.worker;
            let Some(device) = self.shared.get(&worker) else {
                continue;
            };
            let failed = query.failures > 0 && query.excluded.contains(&worker);
            let standing = DeviceMemberRank {
                too_small: !policy::fits_ever(snapshot, &query.ask),
                unavailable: failed || stuck(worker),
                full: anywhere && !policy::has_memory(snapshot, &query.ask, snapshot.cached_blocks),
                sends_away: !snapshot.role.decodes(),
                worker,
            };
            let best = best.entry(*device).or_insert(standing);
            *best = standing.min(*best);
        }
        workers.retain(|worker_forecast| {
            let worker = worker_forecast.snapshot.worker.worker;
            let best = self.shared.get(&worker).and_then(|device| best.get(device));
            best.is_none_or(|best| best.worker == worker)
        });
    }
}
