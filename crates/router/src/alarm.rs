//! What flights are to be reminded of, and when.
//!
//! Owns: one time per flight and alarm at most. Never: knows what is done about it.
//! Invariant: both ways to look an alarm up agree.

use cleave_domain::{FlightId, Time};
use std::collections::{BTreeMap, BTreeSet};

/// What a flight may be reminded of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Alarm {
    /// It has waited long enough: for room, for a reservation's answer, or for one leg's word after
    /// the other leg was lost.
    Step,
    /// Its client has read nothing for too long.
    Reader,
    /// Another try to move it may be made, after one that came to nothing.
    Pause,
    /// It may be placed again, after a loss of its worker that was not mended at once.
    Retry,
}

impl Alarm {
    pub(crate) const ALL: [Self; 4] = [Self::Step, Self::Reader, Self::Pause, Self::Retry];
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Alarms {
    by_time: BTreeSet<(Time, FlightId, Alarm)>,
    by_flight: BTreeMap<(FlightId, Alarm), Time>,
}

impl Alarms {
    /// Replaces the time of the alarm; `None` stops it.
    pub(crate) fn set(&mut self, flight: FlightId, alarm: Alarm, at: Option<Time>) {
        if let Some(old) = self.by_flight.remove(&(flight, alarm)) {
            self.by_time.remove(&(old, flight, alarm));
        }
        if let Some(at) = at {
            self.by_flight.insert((flight, alarm), at);
            self.by_time.insert((at, flight, alarm));
        }
    }

    pub(crate) fn get(&self, flight: FlightId, alarm: Alarm) -> Option<Time> {
        self.by_flight.get(&(flight, alarm)).copied()
    }

    pub(crate) fn first(&self) -> Option<Time> {
        self.by_time.first().map(|(at, _, _)| *at)
    }

    /// Takes out the first alarm whose time has come.
    pub(crate) fn due(&mut self, now: Time) -> Option<(FlightId, Alarm)> {
        let (at, flight, alarm) = self.by_time.first().copied()?;
        if at > now {
            return None;
        }
        self.set(flight, alarm, None);
        Some((flight, alarm))
    }

    pub(crate) fn forget(&mut self, flight: FlightId) {
        for alarm in Alarm::ALL {
            self.set(flight, alarm, None);
        }
    }

    pub(crate) fn flights(&self) -> impl Iterator<Item = FlightId> {
        self.by_flight.keys().map(|(flight, _)| *flight)
    }

    pub(crate) fn check(&self) {
        assert_eq!(self.by_time.len(), self.by_flight.len(), "an alarm is lost");
        for (at, flight, alarm) in &self.by_time {
            assert_eq!(self.get(*flight, *alarm), Some(*at), "{flight}");
        }
    }
}
