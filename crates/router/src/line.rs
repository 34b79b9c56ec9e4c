//! The line of flights that wait for room.
//!
//! Owns: their order. Never: decides who is placed.
//! Invariant: urgency first (smaller is more urgent), then arrival. Who comes anew finds room for at
//! most `max`; a flight that comes back after a failed attempt keeps its place, and is let in
//! whatever the length: its client has been promised an answer, and the number of flights bounds it.

use cleave_domain::FlightId;
use std::collections::BTreeSet;

/// A place in the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) priority: i32,
    pub(crate) arrival: u64,
    pub(crate) flight: FlightId,
}

#[derive(Clone, Debug)]
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

    /// In order.
    pub(crate) fn places(&self) -> impl Iterator<Item = &Place> {
        self.places.iter()
    }

    pub(crate) fn contains(&self, place: &Place) -> bool {
        self.places.contains(place)
    }

    /// For a new flight the caller has asked [`Line::is_full`].
    pub(crate) fn join(&mut self, place: Place) {
        assert!(self.places.insert(place), "{} waits twice", place.flight);
    }

    pub(crate) fn leave(&mut self, place: &Place) {
        self.places.remove(place);
    }
}
