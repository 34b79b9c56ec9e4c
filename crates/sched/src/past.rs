//! Which hand-offs were here lately, and how they ended.
//!
//! Owns: the ids of those that ended last. Never: grows without limit: [`KEPT_MAX`] of those that did not
//! land, and [`LANDED_MAX`] of those that did, since seals of these may still be repeated.
//! Invariant: an order that comes twice, the second time after the hand-off's end, is known as a
//! repetition, so that no token of it is drawn and emitted again; and an order that comes after the
//! promise never to write for it is known too.

use cleave_domain::{HandoffId, Time};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::time::Duration;

/// Far more than can be under way on one stream; at some twenty bytes each.
const KEPT_MAX: usize = 4096;
/// Hand-offs that landed and are kept by time: 1,600 a second for 40 s, at some sixty bytes each.
const LANDED_MAX: usize = 65_536;

/// The hand-offs that ended last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Past {
    known: BTreeMap<HandoffId, Trace>,
    by_age: VecDeque<HandoffId>,
    landed_by_age: VecDeque<(Time, HandoffId)>,
}

/// What is left of a hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Trace {
    /// It was here, and is over.
    Over,
    /// The same, and everything had arrived: its sender may have to be told again.
    Landed,
    /// It never came, and its receiver was promised that nothing of it will be written.
    Stopped,
}

impl Past {
    /// Remembers one that landed and ended now. The oldest of too many is forgotten only once it is older
    /// than `keep`, or if there are [`LANDED_MAX`].
    pub(crate) fn add_landed(&mut self, handoff: HandoffId, now: Time, keep: Duration) {
        if self.known.contains_key(&handoff) {
            return;
        }
        self.known.insert(handoff, Trace::Landed);
        self.landed_by_age.push_back((now, handoff));
        while self.landed_by_age.len() > KEPT_MAX
            && let Some((ended, oldest)) = self.landed_by_age.front().copied()
            && (now.since(ended) > keep || self.landed_by_age.len() > LANDED_MAX)
        {
            self.landed_by_age.pop_front();
            self.known.remove(&oldest);
        }
    }

    /// Remembers one that did not land, and forgets the oldest if there are too many.
    pub(crate) fn add(&mut self, handoff: HandoffId, trace: Trace) {
        if self.known.contains_key(&handoff) {
            return;
        }
        self.known.insert(handoff, trace);
        self.by_age.push_back(handoff);
        if self.by_age.len() > KEPT_MAX
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    /// What is left of it, if it was here lately.
    pub(crate) fn trace(&self, handoff: HandoffId) -> Option<Trace> {
        self.known.get(&handoff).copied()
    }
}

impl Hash for Past {
    /// The order only says who is forgotten first, thousands of hand-offs later.
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.known.hash(hasher);
    }
}

#[cfg(test)]
mod tests {
    use super::{KEPT_MAX, LANDED_MAX, Past, Trace};
    use cleave_domain::{FlightId, HandoffId, Time};
    use std::time::Duration;

    #[test]
    fn landed_hand_offs_are_kept_while_their_seals_repeat() {
        let handoff = |flight| HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        };
        let keep = Duration::from_secs(40);
        let mut past = Past::default();
        past.add_landed(handoff(0), Time::ZERO, keep);
        for flight in 1..=2 * KEPT_MAX as u64 {
            past.add_landed(handoff(flight), Time::ZERO + keep, keep);
            past.add(handoff(1_000_000 + flight), Trace::Over);
        }
        assert_eq!(past.trace(handoff(0)), Some(Trace::Landed));
        let later = Time::ZERO + keep + Duration::from_nanos(1);
        past.add_landed(handoff(900_000), later, keep);
        assert_eq!(past.trace(handoff(0)), None);
        assert_eq!(past.trace(handoff(1)), Some(Trace::Landed));
        for flight in 0..=LANDED_MAX as u64 {
            past.add_landed(handoff(2_000_000 + flight), later, keep);
        }
        assert_eq!(past.landed_by_age.len(), LANDED_MAX);
        assert_eq!(past.known.len(), LANDED_MAX + KEPT_MAX);
    }

    #[test]
    fn the_oldest_is_forgotten_first() {
        let handoff = |flight| HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        };
        let mut past = Past::default();
        for flight in 0..=KEPT_MAX as u64 {
            past.add(handoff(flight), Trace::Over);
            past.add(handoff(flight), Trace::Landed);
        }
        assert_eq!(past.trace(handoff(0)), None);
        assert_eq!(past.trace(handoff(1)), Some(Trace::Over));
        assert_eq!(past.known.len(), KEPT_MAX);
    }
}
