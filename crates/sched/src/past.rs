//! Which hand-offs were here lately.
//!
//! Owns: the ids of those released last. Never: grows without limit.
//! Invariant: an order that comes twice, the second time after the hand-off's release, is known as
//! a repetition, so that no token of it is drawn and emitted again.

use cleave_domain::HandoffId;
use std::collections::{BTreeSet, VecDeque};

/// Far more than can be under way on one stream; at sixteen bytes each.
const KEPT_MAX: usize = 4096;

/// The hand-offs released last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Past {
    known: BTreeSet<HandoffId>,
    by_age: VecDeque<HandoffId>,
}

impl Past {
    /// Remembers one, and forgets the oldest if there are too many.
    pub(crate) fn add(&mut self, handoff: HandoffId) {
        if !self.known.insert(handoff) {
            return;
        }
        self.by_age.push_back(handoff);
        if self.by_age.len() > KEPT_MAX
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    /// Whether it was here lately.
    pub(crate) fn knows(&self, handoff: HandoffId) -> bool {
        self.known.contains(&handoff)
    }
}

#[cfg(test)]
mod tests {
    use super::{KEPT_MAX, Past};
    use cleave_domain::{FlightId, HandoffId};

    #[test]
    fn the_oldest_is_forgotten_first() {
        let handoff = |flight| HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        };
        let mut past = Past::default();
        for flight in 0..=KEPT_MAX as u64 {
            past.add(handoff(flight));
            past.add(handoff(flight));
        }
        assert!(!past.knows(handoff(0)));
        assert!(past.knows(handoff(1)));
        assert_eq!(past.known.len(), KEPT_MAX);
    }
}
