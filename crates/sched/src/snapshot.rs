//! The state of a worker as its policies read it.
//!
//! Owns: nothing. Never: changes anything: load, forecasts and refusals are functions of it.

use crate::batch::StepPipeline;
use crate::context::WorkerContext;
use crate::forecast::WorkForecast;
use crate::memory::KvMemory;
use crate::policy;
use crate::sequences::{SequenceTable, WorkerSequence};
use std::time::Duration;

/// The machines from which load, forecasts and refusals follow.
#[derive(Clone, Copy)]
pub(crate) struct LoadSnapshot<'a> {
    pub(crate) context: &'a WorkerContext,
    pub(crate) sequences: &'a SequenceTable,
    pub(crate) memory: &'a KvMemory,
    pub(crate) steps: &'a StepPipeline,
    pub(crate) forecast: &'a WorkForecast,
}

impl LoadSnapshot<'_> {
    /// Upper bound of the time until the first running sequence ends.
    pub(crate) fn soonest_end(&self) -> Duration {
        let left = |s: &WorkerSequence| s.request.stop.max_tokens.saturating_sub(s.output_count());
        let running = self.sequences.iter().filter(|s| s.slot().is_some());
        let steps = running.map(left).min().unwrap_or(1);
        policy::retry_after(steps, self.steps.mean())
    }
}
