//! Invariants of the fleet, asserted after every fact in tests.
//!
//! Owns: the assertions. Never: changes anything. Invariant: every count and list agrees with what
//! it is derived from.

use super::RouterFleet;
use crate::placement::devices::SharedDevices;
use cleave_domain::{FlightId, WorkerId};
use std::collections::BTreeMap;

impl RouterFleet {
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
                "the list of stuck workers is wrong about {id}"
            );
            let is_left = self.to_leave.contains(id);
            assert!(
                is_left || !worker.draining,
                "{id} drains but is not listed as leaving"
            );
            assert!(
                !is_left || worker.move_reason().is_some(),
                "{id} is listed as leaving without a reason"
            );
        }
        let is_member = |id: &WorkerId| self.workers.contains_key(id);
        let lists = self.to_leave.iter().chain(&self.stuck);
        assert!(
            lists.into_iter().all(is_member),
            "a list holds a worker that is gone"
        );
        let mut devices = SharedDevices::default();
        for (id, worker) in &self.workers {
            devices.join(*id, worker.description.device.as_ref());
        }
        assert_eq!(devices, self.devices, "the index of devices is wrong");
        let total = self.census.total() as usize;
        assert_eq!(
            total,
            self.workers.len(),
            "the number of workers by role is wrong"
        );
        assert_eq!(legs, self.legs, "the number of open legs is wrong");
        let grouped: usize = self.groups.values().map(|g| g.workers.len()).sum();
        assert_eq!(grouped, self.workers.len(), "a group holds a worker twice");
    }
}
