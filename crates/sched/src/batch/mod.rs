//! Steps: what the next one runs, which of them are under way, and their results.
//!
//! Owns: the choice of sequences and tokens, and the distribution of results. Never: waits for
//! anything; what cannot run now is tried again in the next step.
//!
//! [`StepPlanner`] chooses a step when none is under way, [`StepAhead`] repeats the one under way,
//! [`StepResults`] distributes what a step has drawn; [`StepPipeline`] knows the steps between.

mod chunks;
mod decodes;
mod overlap;
mod plan;
mod settle;
mod steps;
pub(crate) mod targets;

pub(crate) use overlap::StepAhead;
pub(crate) use plan::{StepBuilder, StepPlanner};
pub(crate) use settle::StepResults;
pub(crate) use steps::{SegmentInFlight, StepPipeline};
