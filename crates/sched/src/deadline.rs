//! Which hand-off lives how long if nothing happens.
//!
//! Owns: one deadline per hand-off. Never: assumes that they pass in the order they were given.
//! Invariant: the two directions agree; [`Deadlines::check`] proves it.

use cleave_domain::{HandoffId, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A book of deadlines: of leases, or of hand-offs that must not stand still.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Deadlines {
    until: BTreeMap<HandoffId, Time>,
    by_time: BTreeSet<(Time, HandoffId)>,
}

impl Deadlines {
    /// Sets a hand-off's deadline anew.
    pub(crate) fn set(&mut self, handoff: HandoffId, until: Time) {
        self.end(handoff);
        self.until.insert(handoff, until);
        self.by_time.insert((until, handoff));
    }

    /// A hand-off that has a deadline gets a later one.
    pub(crate) fn postpone(&mut self, handoff: HandoffId, by: Duration) {
        if let Some(until) = self.until.get(&handoff).copied() {
            self.set(handoff, until + by);
        }
    }

    /// The hand-off needs none any more.
    pub(crate) fn end(&mut self, handoff: HandoffId) {
        if let Some(until) = self.until.remove(&handoff) {
            self.by_time.remove(&(until, handoff));
        }
    }

    /// One whose deadline passed, if any; it has none any more.
    pub(crate) fn passed(&mut self, now: Time) -> Option<HandoffId> {
        let (until, handoff) = *self.by_time.first()?;
        if until > now {
            return None;
        }
        self.end(handoff);
        Some(handoff)
    }

    /// Every one, in the order of hand-offs.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (HandoffId, Time)> + '_ {
        self.until.iter().map(|(handoff, until)| (*handoff, *until))
    }

    /// When the next one passes.
    pub(crate) fn next(&self) -> Option<Time> {
        self.by_time.first().map(|(until, _)| *until)
    }

    /// Asserts that exactly `handoffs` have a deadline, in this order.
    pub(crate) fn check(&self, handoffs: impl Iterator<Item = HandoffId>) {
        assert!(handoffs.eq(self.until.keys().copied()), "deadlines");
        let mut turned: Vec<_> = self.until.iter().map(|(h, t)| (*t, *h)).collect();
        turned.sort_unstable();
        assert!(turned.iter().eq(self.by_time.iter()), "deadlines by time");
    }
}

#[cfg(test)]
mod tests {
    use super::Deadlines;
    use cleave_domain::{FlightId, HandoffId, Time};

    #[test]
    fn lesson_04_leases_expire_in_any_order_and_renewal_moves_them() {
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
        assert_eq!(leases.passed(Time::from_nanos(19)), None);
        assert_eq!(leases.passed(Time::from_nanos(30)), Some(handoff(3)));
        assert_eq!(leases.passed(Time::from_nanos(30)), Some(handoff(1)));
        assert_eq!(leases.passed(Time::from_nanos(30)), None);
        leases.end(handoff(2));
        assert_eq!(leases.next(), None);
    }
}
