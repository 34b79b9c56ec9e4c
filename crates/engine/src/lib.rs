//! The model.
//!
//! Owns: checkpoints, the forward pass written once over [`Ops`](ops::Ops), sampling, and the
//! [`Engine`] trait through which everything else sees a model.
//! Never: learns what a request, an SLO, a worker or a route is.
//! Invariant: a sequence's tokens depend only on its tokens, sampling and seed, never on what else
//! is in the step or how it was cut into chunks.

mod blocks;
pub mod checkpoint;
pub mod conformance;
pub mod e4m3;
mod forward;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod mock;
mod model;
pub mod ops;
mod plan;
mod sampling;
pub mod synth;
mod waist;
mod weights;

pub use blocks::{BlockSpan, DeviceBlocks, PeerBlocks};
pub use mock::MockEngine;
pub use model::{EngineLimits, ModelEngine};
pub use waist::{Engine, EngineDescription, EngineError, Overlap, STEPS_IN_FLIGHT_MAX};
pub use weights::{Progress, Weights};
