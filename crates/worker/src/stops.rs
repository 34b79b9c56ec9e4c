//! Senders that were asked to stop and have not answered.
//!
//! Owns: the hand-offs that wait for each sender. Never answers for a sender: the caller that knows
//! that a sender can write nothing here takes its hand-offs.

use cleave_domain::{HandoffId, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
pub(crate) struct PendingStops {
    unanswered: BTreeMap<WorkerRef, BTreeSet<HandoffId>>,
}

impl PendingStops {
    /// The sender was asked to stop, perhaps again.
    pub(crate) fn requested(&mut self, sender: WorkerRef, handoff: HandoffId) {
        self.unanswered.entry(sender).or_default().insert(handoff);
    }

    pub(crate) fn answered(&mut self, sender: WorkerRef, handoff: HandoffId) {
        if let Some(unanswered) = self.unanswered.get_mut(&sender) {
            unanswered.remove(&handoff);
            if unanswered.is_empty() {
                self.unanswered.remove(&sender);
            }
        }
    }

    /// Removes and gives the stops that a sender no longer needs to answer.
    pub(crate) fn take_all(&mut self, sender: WorkerRef) -> BTreeSet<HandoffId> {
        self.unanswered.remove(&sender).unwrap_or_default()
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

    // Lesson: 2.
    #[test]
    fn stops_stay_pending_until_their_sender_answers() {
        let worker = |number| WorkerRef {
            worker: WorkerId(number),
            ..WorkerRef::default()
        };
        let mut stops = PendingStops::default();
        for (sender, flight) in [(1, 1), (1, 2), (2, 3), (1, 2)] {
            stops.requested(worker(sender), handoff(flight));
        }
        stops.answered(worker(2), handoff(1));
        stops.answered(worker(1), handoff(1));
        assert_eq!(stops.take_all(worker(1)), BTreeSet::from([handoff(2)]));
        assert!(stops.take_all(worker(1)).is_empty());
        stops.answered(worker(2), handoff(3));
        assert!(stops.unanswered.is_empty(), "nothing is kept");
    }
}
