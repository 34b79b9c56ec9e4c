//! What must be true of a fleet after every fact.
//!
//! Owns: the assertions. Never: changes anything. Invariant: whatever is counted or listed twice agrees.

use super::Fleet;
use crate::devices::Devices;
use cleave_domain::{FlightId, WorkerId};
use std::collections::BTreeMap;

impl Fleet {
    pub(crate) fn check(&self) {
        let mut legs: BTreeMap<FlightId, u32> = BTreeMap::new();
        for worker in self.workers.values() {
            worker.ledger.check();
            for (handoff, _) in worker.ledger.handoffs() {
                *legs.entry(handoff.flight).or_default() += 1;
            }
            let group = self.groups.get(&worker.description.fingerprint);
            assert!(
                group.is_some_and(|g| g.workers.contains(&worker.me.worker)),
                "{} is in no group",
                worker.me
            );
        }
        for (id, worker) in &self.workers {
            assert_eq!(
                worker.stuck(),
                self.stuck.contains(id),
                "{id} is or is not stuck"
            );
            let is_left = self.leaving.contains(id);
            assert!(is_left || !worker.draining, "{id} drains in silence");
            assert!(
                !is_left || worker.leaves().is_some(),
                "{id} is left for no reason"
            );
        }
        let known = |id: &WorkerId| self.workers.contains_key(id);
        let lists = self.leaving.iter().chain(&self.stuck);
        assert!(
            lists.into_iter().all(known),
            "a list holds a worker that is gone"
        );
        let mut devices = Devices::default();
        for (id, worker) in &self.workers {
            devices.join(*id, worker.description.device.as_ref());
        }
        assert_eq!(devices, self.devices, "a device has other workers");
        let total = self.census.total() as usize;
        assert_eq!(total, self.workers.len(), "the census is wrong");
        assert_eq!(legs, self.legs, "open legs are miscounted");
        let grouped: usize = self.groups.values().map(|g| g.workers.len()).sum();
        assert_eq!(grouped, self.workers.len(), "a group holds a worker twice");
    }
}
