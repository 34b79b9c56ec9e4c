//! The line of flights that wait for room.
//!
//! Owns: their order. Never: decides who is placed.
//! Invariant: at most `max` wait; urgency first (smaller is more urgent), then arrival, and a
//! flight that comes back after a failed attempt keeps its place.

use cleave_domain::FlightId;
use std::collections::BTreeSet;

/// A place in the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) priority: i32,
    pub(crate) arrival: u64,
    pub(crate) flight: FlightId,
}

#[derive(Debug)]
pub(crate) struct Line {
    places: BTreeSet<Place>,
    max: usize,
}

impl Line {
    pub(crate) fn new(max: u32) -> Self {
        Self {
            places: BTreeSet::new(),
            max: max as usize,
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.places.len() >= self.max
    }

    pub(crate) fn len(&self) -> u32 {
        self.places.len() as u32
    }

    pub(crate) fn head(&self) -> Option<Place> {
        self.places.first().copied()
    }

    pub(crate) fn contains(&self, place: &Place) -> bool {
        self.places.contains(place)
    }

    /// The caller has asked [`Line::is_full`].
    pub(crate) fn join(&mut self, place: Place) {
        assert!(!self.is_full(), "the line is longer than its limit");
        assert!(self.places.insert(place), "{} waits twice", place.flight);
    }

    pub(crate) fn leave(&mut self, place: &Place) {
        self.places.remove(place);
    }

    /// Whether somebody waits who goes before `place`.
    pub(crate) fn is_ahead_of(&self, place: &Place) -> bool {
        self.head().is_some_and(|head| head < *place)
    }
}
