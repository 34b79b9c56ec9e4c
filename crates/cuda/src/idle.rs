//! How long the device stands still between decode steps.
//!
//! Owns: moments in the stream: where each pass began, and where its tokens were drawn. Where the device waits for
//! the host it has nothing to do from the first of them on, so what the host takes to queue the pass's first
//! operation after that is not in the figure.
//! Never: waits.
//! Invariant: a moment is recorded again only when both passes that it lies between were fetched.

use crate::driver::{Event, Stream};
use crate::error::CudaError;
use std::time::Duration;

/// Passes whose moments are kept: those under way, and the one before them.
const KEPT: usize = cleave_engine::STEPS_IN_FLIGHT_MAX + 1;

#[derive(Debug)]
pub(crate) struct Idle {
    /// By the number of the pass, modulo [`KEPT`].
    began: [Event; KEPT],
    drawn: [Event; KEPT],
    /// Draws so far, and how many of them were fetched.
    drawn_count: usize,
    fetched_count: usize,
    last: Option<Duration>,
}

impl Idle {
    pub(crate) fn new(stream: &Stream) -> Result<Self, CudaError> {
        let events = || -> Result<[Event; KEPT], CudaError> {
            let event = || Event::timed(stream.device());
            Ok([event()?, event()?, event()?])
        };
        Ok(Self {
            began: events()?,
            drawn: events()?,
            drawn_count: 0,
            fetched_count: 0,
            last: None,
        })
    }

    /// The first operation of a pass is queued next.
    pub(crate) fn begins(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.began[self.drawn_count % KEPT].record(stream)
    }

    /// The tokens of the pass were queued, with their way to the host. It counts whether or not its moment can be had.
    pub(crate) fn draws(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let pass = self.drawn_count;
        self.drawn_count += 1;
        self.drawn[pass % KEPT].record(stream)
    }

    /// The oldest pass that was drawn and not fetched is over. What cannot be measured is no failure of the pass.
    pub(crate) fn fetched(&mut self) {
        let pass = self.fetched_count;
        self.fetched_count += 1;
        self.last = pass.checked_sub(1).and_then(|before| {
            let began = &self.began[pass % KEPT];
            self.drawn[before % KEPT].until(began).ok()
        });
    }

    /// Between the pass that was fetched last and the one before it.
    pub(crate) fn last(&self) -> Option<Duration> {
        self.last
    }
}
