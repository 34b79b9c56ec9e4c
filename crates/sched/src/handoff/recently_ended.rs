//! Hand-offs that ended here lately, and how.
//!
//! Owns: the ids of recently ended hand-offs. Never: grows without limit: [`KEPT_MAX`] of those
//! that did not land, and [`LANDED_MAX`] of those that did, since seals of these may still be
//! repeated.
//! Invariant: an order that comes twice, the second time after the hand-off's end, is recognised as
//! a repetition, so that no token of it is drawn and emitted again; and so is an order that comes
//! after this worker assured that it would never write for it.

use cleave_domain::{HandoffId, Time};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::time::Duration;

/// Far more than can be under way on one stream, at some twenty bytes each.
const KEPT_MAX: usize = 4096;
/// Limit of landed hand-offs: 1,600 a second for 40 s, at some sixty bytes each.
const LANDED_MAX: usize = 65_536;

/// The hand-offs that ended last.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecentlyEnded {
    ended: BTreeMap<HandoffId, EndedHandoff>,
    by_age: VecDeque<HandoffId>,
    landed_by_age: VecDeque<(Time, HandoffId)>,
}

/// How a remembered hand-off ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum EndedHandoff {
    /// It was here, and is over.
    Ended,
    /// It was here, is over, and had landed: its sender may need the confirmation again.
    Landed,
    /// It never came, and its receiver was assured that nothing of it will be written.
    StoppedBeforeStart,
}

impl RecentlyEnded {
    /// Remembers one that landed and ended now. Above the limit, the oldest is forgotten once it is
    /// older than `keep`, or if there are [`LANDED_MAX`].
    pub(crate) fn add_landed(&mut self, handoff: HandoffId, now: Time, keep: Duration) {
        if self.ended.contains_key(&handoff) {
            return;
        }
        self.ended.insert(handoff, EndedHandoff::Landed);
        self.landed_by_age.push_back((now, handoff));
        while self.landed_by_age.len() > KEPT_MAX
            && let Some((ended, oldest)) = self.landed_by_age.front().copied()
            && (now.since(ended) > keep || self.landed_by_age.len() > LANDED_MAX)
        {
            self.landed_by_age.pop_front();
            self.ended.remove(&oldest);
        }
    }

    /// Remembers one that did not land, and forgets the oldest if there are too many.
    pub(crate) fn add(&mut self, handoff: HandoffId, trace: EndedHandoff) {
        if self.ended.contains_key(&handoff) {
            return;
        }
        self.ended.insert(handoff, trace);
        self.by_age.push_back(handoff);
        if self.by_age.len() > KEPT_MAX
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.ended.remove(&oldest);
        }
    }

    /// How the hand-off ended, if it was here lately.
    pub(crate) fn trace(&self, handoff: HandoffId) -> Option<EndedHandoff> {
        self.ended.get(&handoff).copied()
    }
}

impl Hash for RecentlyEnded {
    /// Leaves out the order, which only says which one is forgotten first, thousands of hand-offs
    /// later.
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.ended.hash(hasher);
    }
}

#[cfg(test)]
mod tests {
    use super::{EndedHandoff, KEPT_MAX, LANDED_MAX, RecentlyEnded};
    use cleave_domain::{FlightId, HandoffId, Time};
    use std::time::Duration;

    #[test]
    fn landed_hand_offs_are_remembered_while_seals_repeat() {
        let handoff = |flight| HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        };
        let keep = Duration::from_secs(40);
        let mut recently_ended = RecentlyEnded::default();
        recently_ended.add_landed(handoff(0), Time::ZERO, keep);
        for flight in 1..=2 * KEPT_MAX as u64 {
            recently_ended.add_landed(handoff(flight), Time::ZERO + keep, keep);
            recently_ended.add(handoff(1_000_000 + flight), EndedHandoff::Ended);
        }
        assert_eq!(recently_ended.trace(handoff(0)), Some(EndedHandoff::Landed));
        let later = Time::ZERO + keep + Duration::from_nanos(1);
        recently_ended.add_landed(handoff(900_000), later, keep);
        assert_eq!(recently_ended.trace(handoff(0)), None);
        assert_eq!(recently_ended.trace(handoff(1)), Some(EndedHandoff::Landed));
        for flight in 0..=LANDED_MAX as u64 {
            recently_ended.add_landed(handoff(2_000_000 + flight), later, keep);
        }
        assert_eq!(recently_ended.landed_by_age.len(), LANDED_MAX);
        assert_eq!(recently_ended.ended.len(), LANDED_MAX + KEPT_MAX);
    }

    #[test]
    fn the_oldest_ended_hand_off_is_forgotten_first() {
        let handoff = |flight| HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        };
        let mut recently_ended = RecentlyEnded::default();
        for flight in 0..=KEPT_MAX as u64 {
            recently_ended.add(handoff(flight), EndedHandoff::Ended);
            recently_ended.add(handoff(flight), EndedHandoff::Landed);
        }
        assert_eq!(recently_ended.trace(handoff(0)), None);
        assert_eq!(recently_ended.trace(handoff(1)), Some(EndedHandoff::Ended));
        assert_eq!(recently_ended.ended.len(), KEPT_MAX);
    }
}
