//! Timers of flights.
//!
//! Owns: at most one time per flight and kind of timer. Never: knows their effects.
//! Invariant: both indices agree.

use cleave_domain::{FlightId, Time};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum FlightTimer {
    /// It has waited long enough: for room, for a reservation's answer, or for one leg's report
    /// after the other leg was lost.
    StepTimeout,
    /// Its client has read nothing for too long.
    ReaderTimeout,
    /// A move may be tried again, after an aborted one.
    MoveBackoff,
    /// It may be placed again, after the pause that follows a loss of its worker.
    RetryDelay,
}

impl FlightTimer {
    pub(crate) const ALL: [Self; 4] = [
        Self::StepTimeout,
        Self::ReaderTimeout,
        Self::MoveBackoff,
        Self::RetryDelay,
    ];
}

#[derive(Clone, Debug, Default)]
pub(crate) struct FlightTimers {
    by_time: BTreeSet<(Time, FlightId, FlightTimer)>,
    by_flight: BTreeMap<(FlightId, FlightTimer), Time>,
}

impl FlightTimers {
    /// Replaces the time of a timer; `None` stops it.
    pub(crate) fn set(&mut self, flight: FlightId, timer: FlightTimer, at: Option<Time>) {
        if let Some(old) = self.by_flight.remove(&(flight, timer)) {
            self.by_time.remove(&(old, flight, timer));
        }
        if let Some(at) = at {
            self.by_flight.insert((flight, timer), at);
            self.by_time.insert((at, flight, timer));
        }
    }

    pub(crate) fn get(&self, flight: FlightId, timer: FlightTimer) -> Option<Time> {
        self.by_flight.get(&(flight, timer)).copied()
    }

    pub(crate) fn first(&self) -> Option<Time> {
        self.by_time.first().map(|(at, _, _)| *at)
    }

    /// Removes and returns the first timer that is due.
    pub(crate) fn due(&mut self, now: Time) -> Option<(FlightId, FlightTimer)> {
        let (at, flight, timer) = self.by_time.first().copied()?;
        if at > now {
            return None;
        }
        self.set(flight, timer, None);
        Some((flight, timer))
    }

    pub(crate) fn remove_flight(&mut self, flight: FlightId) {
        for timer in FlightTimer::ALL {
            self.set(flight, timer, None);
        }
    }

    pub(crate) fn flights(&self) -> impl Iterator<Item = FlightId> {
        self.by_flight.keys().map(|(flight, _)| *flight)
    }

    pub(crate) fn check(&self) {
        assert_eq!(
            self.by_time.len(),
            self.by_flight.len(),
            "the two indices of timers differ"
        );
        for (at, flight, timer) in &self.by_time {
            assert_eq!(self.get(*flight, *timer), Some(*at), "{flight}");
        }
    }
}
