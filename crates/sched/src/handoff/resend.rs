//! Packets that are repeated until they are answered.
//!
//! Owns: when a seal, or a request to stop writing, is sent again. Never: builds a packet, or gives
//! a hand-off up: a deadline of its own does that.
//! Invariant: each gap before a repetition is twice the gap before it, and none is longer than the
//! hand-off may stall.

use crate::deadline::Deadlines;
use cleave_domain::{HandoffId, Time};
use std::collections::BTreeMap;
use std::time::Duration;

/// Upper limit of the first gap. A link that lost a packet and stands is rare, so one second is
/// soon enough for its client, and a healthy answer takes milliseconds.
const FIRST_MAX: Duration = Duration::from_secs(1);
/// Upper limit of the first gap as a part of the stall limit: gaps of 1, 2, 4 and 8 parts fit into
/// it.
const FIRST_PARTS: u32 = 16;

#[derive(Clone, Debug, Default)]
pub(crate) struct Resends {
    due: Deadlines,
    /// For each hand-off that waits for an answer, the gap before its next repetition.
    spans: BTreeMap<HandoffId, Duration>,
}

impl Resends {
    /// Schedules repetitions of a packet that needs an answer, unless this hand-off has some
    /// already.
    pub(crate) fn begin(&mut self, handoff: HandoffId, now: Time, stall_max: Duration) {
        if self.spans.contains_key(&handoff) {
            return;
        }
        let span = FIRST_MAX.min(stall_max / FIRST_PARTS);
        self.spans.insert(handoff, span);
        // A gap of zero never grows: a hand-off with no stall time is given up, not repeated.
        if !span.is_zero() {
            self.due.set(handoff, now + span);
        }
    }

    /// Stops the repetitions: it was answered, or is over.
    pub(crate) fn end(&mut self, handoff: HandoffId) {
        self.spans.remove(&handoff);
        self.due.remove(handoff);
    }

    /// A hand-off whose packet is to be repeated now, if any; schedules the next repetition.
    pub(crate) fn next_due(&mut self, now: Time, stall_max: Duration) -> Option<HandoffId> {
        let handoff = self.due.pop_passed(now)?;
        let span = self.spans.get_mut(&handoff)?;
        *span *= 2;
        if *span <= stall_max {
            self.due.set(handoff, now + *span);
        }
        Some(handoff)
    }

    pub(crate) fn next(&self) -> Option<Time> {
        self.due.next()
    }

    /// All waiting hand-offs in their order: the next repetition, if any, and the gap before it.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (HandoffId, Option<Time>, Duration)> + '_ {
        let due: BTreeMap<HandoffId, Time> = self.due.iter().collect();
        let spans = self.spans.iter();
        spans.map(move |(handoff, span)| (*handoff, due.get(handoff).copied(), *span))
    }

    /// Asserts that exactly `handoffs` wait for an answer, in this order.
    pub(crate) fn check(&self, handoffs: impl Iterator<Item = HandoffId>) {
        let waiting = self.spans.keys().copied();
        assert!(
            handoffs.eq(waiting),
            "the hand-offs with repetitions are wrong"
        );
        let due = self.due.iter().map(|(handoff, _)| handoff);
        due.for_each(|handoff| assert!(self.spans.contains_key(&handoff), "no gap is recorded"));
    }
}

#[cfg(test)]
mod tests {
    use super::Resends;
    use cleave_domain::{FlightId, HandoffId, Time};
    use std::time::Duration;

    /// The times, in milliseconds, at which a packet is sent again.
    fn repeated(stall_max: Duration) -> Vec<u128> {
        let (flight, attempt) = (FlightId(1), 0);
        let handoff = HandoffId { flight, attempt };
        let mut resends = Resends::default();
        resends.begin(handoff, Time::ZERO, stall_max);
        // Beginning again changes nothing.
        resends.begin(handoff, Time::ZERO + Duration::from_millis(1), stall_max);
        let mut times = Vec::new();
        while let Some(at) = resends.next() {
            assert_eq!(
                resends.next_due(at - Duration::from_nanos(1), stall_max),
                None
            );
            assert_eq!(resends.next_due(at, stall_max), Some(handoff));
            times.push(at.since(Time::ZERO).as_millis());
        }
        resends.check([handoff].into_iter());
        resends.end(handoff);
        resends.check([].into_iter());
        times
    }

    #[test]
    fn resend_gaps_double_and_end_at_stall_max() {
        let seconds = Duration::from_secs;
        assert_eq!(repeated(seconds(20)), [1000, 3000, 7000, 15_000, 31_000]);
        let sixteenths = [100, 300, 700, 1500, 3100];
        assert_eq!(repeated(Duration::from_millis(1600)), sixteenths);
    }

    #[test]
    fn zero_stall_max_disables_resends() {
        assert!(repeated(Duration::ZERO).is_empty());
        assert!(repeated(Duration::from_nanos(15)).is_empty());
        assert_eq!(repeated(Duration::from_nanos(16)).len(), 5);
    }

    #[test]
    fn an_answered_packet_is_not_repeated() {
        let handoff = |flight| HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        };
        let (mut resends, stall_max) = (Resends::default(), Duration::from_secs(20));
        resends.begin(handoff(1), Time::ZERO, stall_max);
        resends.begin(handoff(2), Time::ZERO, stall_max);
        resends.end(handoff(1));
        let later = Time::ZERO + stall_max;
        assert_eq!(resends.next_due(later, stall_max), Some(handoff(2)));
        assert_eq!(resends.next_due(later, stall_max), None);
        resends.end(handoff(2));
        assert_eq!(resends.next(), None);
    }
}
