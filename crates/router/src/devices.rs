//! Workers that compute on the same hardware.
//!
//! Owns: who shares a device with whom, and which of them a request is placed by. Never: predicts; a
//! forecast takes a worker's device for its own. Invariant: whoever shares its device with nobody is
//! always asked, and of those that share one exactly one is.
//!
//! Dividing one device among workers gains nothing: their steps make each other longer, which no forecast
//! knows, weights are read once by each, and a hand-off between them moves blocks to where the same
//! hardware computes. So the others of a device are only asked for what the one cannot do at all: it is
//! not there for it, or has no blocks.

use crate::candidates::Query;
use crate::forecast::Prospect;
use crate::policy;
use cleave_domain::{DeviceId, WorkerId};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Default)]
pub(crate) struct Devices {
    workers: BTreeMap<DeviceId, BTreeSet<WorkerId>>,
    /// Each that is not alone on its device, and the first of those there.
    shared: BTreeMap<WorkerId, WorkerId>,
}

/// Why another of the same device is asked instead; none of it is the best, and the last decides.
type Standing = (bool, bool, bool, bool, WorkerId);

impl Devices {
    pub(crate) fn join(&mut self, worker: WorkerId, device: Option<&DeviceId>) {
        if let Some(device) = device {
            let there = self.workers.entry(device.clone()).or_default();
            there.insert(worker);
            self.name(device);
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
        self.name(device);
    }

    fn name(&mut self, device: &DeviceId) {
        let Some(there) = self.workers.get(device) else {
            return;
        };
        match (there.len(), there.first()) {
            (0, _) | (_, None) => drop(self.workers.remove(device)),
            (1, Some(only)) => drop(self.shared.remove(only)),
            (_, Some(first)) => self.shared.extend(there.iter().map(|who| (*who, *first))),
        }
    }

    /// Leaves one of each device.
    pub(crate) fn leave_one_each(&self, prospects: &mut Vec<Prospect>, query: &Query) {
        if self.shared.is_empty() {
            return;
        }
        let mut best: BTreeMap<WorkerId, Standing> = BTreeMap::new();
        for prospect in prospects.iter() {
            let worker = prospect.seat.worker.worker;
            if let Some(device) = self.shared.get(&worker) {
                let standing = standing(prospect, query);
                let best = best.entry(*device).or_insert(standing);
                *best = standing.min(*best);
            }
        }
        prospects.retain(|prospect| {
            let worker = prospect.seat.worker.worker;
            let best = self.shared.get(&worker).and_then(|device| best.get(device));
            best.is_none_or(|(.., best)| *best == worker)
        });
    }
}

fn standing(prospect: &Prospect, query: &Query) -> Standing {
    let seat = &prospect.seat;
    // Who said that it would be late said it of the device.
    let away = seat.shut && !query.late.contains(&seat.worker.worker);
    (
        !policy::holds(seat, &query.ask),
        away,
        !policy::stores(seat, &query.ask),
        !seat.role.decodes(),
        seat.worker.worker,
    )
}
