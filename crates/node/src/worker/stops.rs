//! Senders that were asked to stop and have not answered.
//!
//! Owns: which hand-offs wait for whom. Never: answers in a sender's place: whoever knows that it writes nothing here
//! takes what waits for it.

use cleave_domain::{HandoffId, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Stops {
    asked: BTreeMap<WorkerRef, BTreeSet<HandoffId>>,
}

impl Stops {
    /// It was asked, perhaps again.
    pub(crate) fn ask(&mut self, sender: WorkerRef, handoff: HandoffId) {
        self.asked.entry(sender).or_default().insert(handoff);
    }

    /// It answered.
    pub(crate) fn answered(&mut self, sender: WorkerRef, handoff: HandoffId) {
        if let Some(asked) = self.asked.get_mut(&sender) {
            asked.remove(&handoff);
            if asked.is_empty() {
                self.asked.remove(&sender);
            }
        }
    }

    /// Nothing more is expected of it.
    pub(crate) fn take(&mut self, sender: WorkerRef) -> BTreeSet<HandoffId> {
        self.asked.remove(&sender).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{FlightId, WorkerId};

    fn handoff(flight: u64) -> HandoffId {
        HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        }
    }

    #[test]
    fn lesson_02_what_waits_for_a_sender_is_known_until_it_answers() {
        let worker = |number| WorkerRef {
            worker: WorkerId(number),
            ..WorkerRef::default()
        };
        let mut stops = Stops::default();
        for (sender, flight) in [(1, 1), (1, 2), (2, 3), (1, 2)] {
            stops.ask(worker(sender), handoff(flight));
        }
        stops.answered(worker(2), handoff(1));
        stops.answered(worker(1), handoff(1));
        assert_eq!(stops.take(worker(1)), BTreeSet::from([handoff(2)]));
        assert!(stops.take(worker(1)).is_empty());
        stops.answered(worker(2), handoff(3));
        assert!(stops.asked.is_empty(), "nothing is kept");
    }
}
