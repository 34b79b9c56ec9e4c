//! Measures how long the device is idle between decode steps.
//!
//! Owns: two timed events for each pass: its beginning, and the draw of its tokens. If the device
//! waits for the host, it has nothing to do after the first event either, so the time that the host
//! takes to queue the pass's first operation is missing from the figure.
//! Never: waits for the device.
//! Invariant: an event is recorded again only after both passes that it lies between were fetched.

use crate::driver::{CudaEvent, CudaStream};
use crate::error::CudaError;
use std::time::Duration;

/// The number of passes whose events are kept: those in flight, and the one before them.
const PASSES_TIMED: usize = cleave_engine::STEPS_IN_FLIGHT_MAX + 1;

#[derive(Debug)]
pub(crate) struct DeviceIdleTimer {
    /// Indexed by the number of the pass, modulo [`PASSES_TIMED`].
    began: [CudaEvent; PASSES_TIMED],
    /// The pass whose beginning each event has recorded.
    recorded: [Option<usize>; PASSES_TIMED],
    drawn: [CudaEvent; PASSES_TIMED],
    /// The number of draws so far; `fetched_count` of them were fetched.
    drawn_count: usize,
    fetched_count: usize,
    last: Option<Duration>,
}

impl DeviceIdleTimer {
    pub(crate) fn new(stream: &CudaStream) -> Result<Self, CudaError> {
        let events = || -> Result<[CudaEvent; PASSES_TIMED], CudaError> {
            let event = || CudaEvent::timed(stream.device());
            Ok([event()?, event()?, event()?])
        };
        Ok(Self {
            began: events()?,
            recorded: [None; PASSES_TIMED],
            drawn: events()?,
            drawn_count: 0,
            fetched_count: 0,
            last: None,
        })
    }

    /// Records that a pass begins; the caller queues its first operation next.
    pub(crate) fn pass_begins(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        let pass = self.drawn_count;
        self.began[pass % PASSES_TIMED].record(stream)?;
        self.recorded[pass % PASSES_TIMED] = Some(pass);
        Ok(())
    }

    /// Records that the draw of the pass's tokens and their copy to the host were queued. The draw
    /// counts even if its event cannot be recorded, because its fetch will be counted too.
    pub(crate) fn pass_drawn(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        let pass = self.drawn_count;
        self.drawn_count += 1;
        self.drawn[pass % PASSES_TIMED].record(stream)
    }

    /// Records that another part of the newest pass's draw was queued.
    pub(crate) fn draw_extended(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        match self.drawn_count.checked_sub(1) {
            Some(pass) => self.drawn[pass % PASSES_TIMED].record(stream),
            None => Ok(()),
        }
    }

    /// Notes that the oldest pass in flight was fetched, and measures the time before it. A failed
    /// measurement is no failure of the pass.
    pub(crate) fn pass_fetched(&mut self) {
        let pass = self.fetched_count;
        self.fetched_count += 1;
        // A draw alone, without a pass before it, has no beginning.
        let has_begun = self.recorded[pass % PASSES_TIMED] == Some(pass);
        let before = pass.checked_sub(1).filter(|_| has_begun);
        self.last = before.and_then(|before| {
            let began = &self.began[pass % PASSES_TIMED];
            self.drawn[before % PASSES_TIMED].elapsed_until(began).ok()
        });
    }

    /// Returns the idle time between the pass that was fetched last and the one before it.
    pub(crate) fn last(&self) -> Option<Duration> {
        self.last
    }
}
