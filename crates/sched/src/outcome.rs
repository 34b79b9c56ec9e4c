//! Outcomes of copies between the pool and the tiers (host memory and the offload file), and the
//! kinds of failures of a step.
//!
//! Owns: the answers, and whether a content is at fault. Never: an error for a client: KV that
//! could not be loaded is computed.

use cleave_domain::Failure;
use serde::{Deserialize, Serialize};

/// Outcome of [`crate::WorkerInput::SwappedOut`] and [`crate::WorkerInput::SwappedIn`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SwapOutcome {
    /// Every block was copied.
    Copied,
    Dropped,
    /// The engine could not read or write one, or host memory ran out.
    Broken,
}

/// Outcome of [`crate::WorkerInput::Offloaded`] and [`crate::WorkerInput::SpilledToDisk`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OffloadOutcome {
    /// The tier has it.
    Copied,
    /// It could not be read or written.
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FetchOutcome {
    Copied,
    /// A [`crate::WorkerOutput::FetchStop`] ended the fetch.
    Stopped,
    /// The tier does not have the next block.
    Missing,
    /// The next block is damaged, or has another content.
    Corrupt,
    /// The disk could not read the next block.
    Unreadable,
    /// The engine could not write the next block.
    Broken,
}

impl FetchOutcome {
    /// Whether a fetch of the next content would fail again.
    pub(crate) fn is_contents_fault(self) -> bool {
        match self {
            Self::Missing | Self::Corrupt | Self::Unreadable => true,
            Self::Copied | Self::Stopped | Self::Broken => false,
        }
    }
}

/// The kind of a step's failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum StepFault {
    /// The engine, or an input that it could not run: another worker may succeed.
    #[default]
    Engine,
    /// The constraints of the named slots, which no worker can enforce any further.
    Constraint,
}

impl StepFault {
    pub(crate) fn failure(self, reason: String) -> Failure {
        match self {
            Self::Engine => Failure::Engine(reason),
            Self::Constraint => Failure::Constraint(reason),
        }
    }
}
