//! Workers that compute on the same hardware.
//!
//! Owns: who shares a device with whom, and which of them a request is placed by where times decide and it
//! may stay whole. Never: predicts; a forecast takes a worker's device for its own. Invariant: whoever shares
//! its device with nobody is always among those that are asked, and of those that share one exactly one is.
//!
//! Their steps make each other longer, which no forecast knows, each of them reads the weights, and a
//! hand-off between them moves blocks to where the same hardware computes. So what one of them refuses, or
//! has no room for now, waits for that one; the others of its device are there for when it is not. A request
//! without targets, of a policy that promises nothing to anybody, may also use their blocks.

use crate::candidates::Query;
use crate::forecast::{Manners, Need, Prospect};
use crate::policy;
use cleave_domain::{DeviceId, WorkerId};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Devices {
    workers: BTreeMap<DeviceId, BTreeSet<WorkerId>>,
    /// Each that is not alone on its device, and the first of those there.
    shared: BTreeMap<WorkerId, WorkerId>,
}

/// Why another of the same device is asked instead: the least is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Standing {
    too_small: bool,
    /// It makes no progress, or failed this request.
    away: bool,
    full: bool,
    hands_on: bool,
    worker: WorkerId,
}

impl Devices {
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
            (_, Some(first)) => self.shared.extend(there.iter().map(|who| (*who, *first))),
        }
    }

    /// Workers that have no device of their own, but for one of each.
    pub(crate) fn spare(&self) -> u32 {
        let firsts: BTreeSet<&WorkerId> = self.shared.values().collect();
        (self.shared.len() - firsts.len()) as u32
    }

    /// Leaves one of each device; of a worker `stuck` says whether it makes no progress.
    pub(crate) fn leave_one_each(
        &self,
        prospects: &mut Vec<Prospect>,
        (query, need): (&Query, &Need),
        stuck: impl Fn(WorkerId) -> bool,
    ) {
        if self.shared.is_empty() {
            return;
        }
        // What gives way waits, and what was promised to somebody is promised by the device.
        let anywhere = need.manners == Manners::Resumed
            || (need.manners == Manners::New && !need.has_target());
        let mut best: BTreeMap<WorkerId, Standing> = BTreeMap::new();
        for Prospect { seat, .. } in prospects.iter() {
            let worker = seat.worker.worker;
            let Some(device) = self.shared.get(&worker) else {
                continue;
            };
            let failed = query.failures > 0 && query.excluded.contains(&worker);
            let standing = Standing {
                too_small: !policy::holds(seat, &query.ask),
                away: failed || stuck(worker),
                full: anywhere && !policy::stores(seat, &query.ask),
                hands_on: !seat.role.decodes(),
                worker,
            };
            let best = best.entry(*device).or_insert(standing);
            *best = standing.min(*best);
        }
        prospects.retain(|prospect| {
            let worker = prospect.seat.worker.worker;
            let best = self.shared.get(&worker).and_then(|device| best.get(device));
            best.is_none_or(|best| best.worker == worker)
        });
    }
}
