//! Steps: what the next one runs, which of them are under way, and their results.
//!
//! Owns: the choice of sequences and tokens, and the distribution of results. Never: waits for
//! anything; what cannot run now is tried again in the next step.

mod overlap;
mod plan;
mod settle;
mod steps;
pub(crate) mod targets;

pub(crate) use plan::StepBuilder;
pub(crate) use settle::ReadyBlocks;
pub(crate) use steps::{SegmentInFlight, StepInFlight, StepPipeline};
