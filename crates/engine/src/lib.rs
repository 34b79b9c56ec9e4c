//! The model: checkpoints, the forward pass and sampling, behind the trait [`Engine`].
//!
//! Owns: checkpoints, the forward pass written once over [`Ops`](ops::Ops), sampling, and the
//! [`Engine`] trait through which all other crates use a model.
//! Never: knows a request, an SLO, a worker or a route.
//! Invariant: a sequence's tokens depend only on its tokens, sampling and seed, never on the rest
//! of the step or on how the prompt was chunked.

#![warn(missing_docs)]

mod blocks;
pub mod checkpoint;
pub mod conformance;
pub mod e4m3;
mod engine;
mod forward;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod mock;
mod model;
pub mod ops;
mod plan;
mod sampling;
pub mod synth;
mod weights;

pub use blocks::{BlockSpan, DeviceBlocks, PeerBlocks};
pub use engine::{Engine, EngineDescription, EngineError, Overlap, STEPS_IN_FLIGHT_MAX};
pub use mock::MockEngine;
pub use model::{EngineLimits, ModelEngine};
pub use weights::{CheckpointProgress, Weights};
