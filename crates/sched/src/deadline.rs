//! Deadlines of hand-offs.
//!
//! Owns: one deadline per hand-off. Never: assumes that deadlines pass in the order in which they
//! were set.
//! Invariant: the two directions agree; [`Deadlines::check`] proves it.

use cleave_domain::{HandoffId, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Deadlines of leases, stalls or fetches, found by hand-off and by time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Deadlines {
    until: BTreeMap<HandoffId, Time>,
    by_time: BTreeSet<(Time, HandoffId)>,
}

impl Deadlines {
    /// Sets or replaces a hand-off's deadline.
    pub(crate) fn set(&mut self, handoff: HandoffId, until: Time) {
        self.remove(handoff);
        self.until.insert(handoff, until);
        self.by_time.insert((until, handoff));
    }

    /// Postpones a hand-off's deadline, if it has one.
    pub(crate) fn postpone(&mut self, handoff: HandoffId, by: Duration) {
        if let Some(until) = self.until.get(&handoff).copied() {
            self.set(handoff, until + by);
        }
    }

    /// Removes a hand-off's deadline.
    pub(crate) fn remove(&mut self, handoff: HandoffId) {
        if let Some(until) = self.until.remove(&handoff) {
            self.by_time.remove(&(until, handoff));
        }
    }

    /// Removes and returns a hand-off whose deadline has passed, if any.
    pub(crate) fn pop_passed(&mut self, now: Time) -> Option<HandoffId> {
        let (until, handoff) = *self.by_time.first()?;
        if until > now {
            return None;
        }
        self.remove(handoff);
        Some(handoff)
    }

    /// All deadlines, in the order of hand-offs.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (HandoffId, Time)> + '_ {
        self.until.iter().map(|(handoff, until)| (*handoff, *until))
    }

    /// The earliest deadline; `None` if there is none.
    pub(crate) fn next(&self) -> Option<Time> {
        self.by_time.first().map(|(until, _)| *until)
    }

    /// Asserts that exactly `handoffs` have a deadline, in this order.
    pub(crate) fn check(&self, handoffs: impl Iterator<Item = HandoffId>) {
        assert!(
            handoffs.eq(self.until.keys().copied()),
            "the hand-offs with a deadline are wrong"
        );
        let mut turned: Vec<_> = self.until.iter().map(|(h, t)| (*t, *h)).collect();
        turned.sort_unstable();
        assert!(
            turned.iter().eq(self.by_time.iter()),
            "the two indices of deadlines differ"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::Deadlines;
    use cleave_domain::{FlightId, HandoffId, Time};

    // Invariant: I8.
    // Lesson: 4.
    /// Lesson 4: a reaper must not assume that leases expire in the order in which they were set.
    #[test]
    fn leases_expire_in_any_order_and_renewal_moves_them() {
        let handoff = |flight| HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        };
        let mut leases = Deadlines::default();
        leases.set(handoff(1), Time::from_nanos(30));
        leases.set(handoff(2), Time::from_nanos(10));
        leases.set(handoff(3), Time::from_nanos(20));
        leases.set(handoff(2), Time::from_nanos(40));
        leases.check([1, 2, 3].map(handoff).into_iter());
        assert_eq!(leases.next(), Some(Time::from_nanos(20)));
        assert_eq!(leases.pop_passed(Time::from_nanos(19)), None);
        assert_eq!(leases.pop_passed(Time::from_nanos(30)), Some(handoff(3)));
        assert_eq!(leases.pop_passed(Time::from_nanos(30)), Some(handoff(1)));
        assert_eq!(leases.pop_passed(Time::from_nanos(30)), None);
        leases.remove(handoff(2));
        assert_eq!(leases.next(), None);
    }
}
