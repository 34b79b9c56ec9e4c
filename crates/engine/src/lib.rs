//! A model at work: the forward pass and sampling, behind the trait [`Engine`].
//!
//! Owns: the interpreter of a [`ModelSpec`](cleave_models::ModelSpec), written once over
//! [`Ops`](ops::Ops), sampling, and the [`Engine`] trait through which all other crates use a
//! model.
//! Never: knows a request, an SLO, a worker or a route.
//! Invariant: a sequence's tokens depend only on its tokens, sampling and seed, never on the rest
//! of the step or on how the prompt was chunked.

#![warn(missing_docs)]

mod adapters;
mod blocks;
pub mod conformance;
mod constraint;
mod engine;
mod folding;
mod forward;
mod mock;
mod model;
pub mod ops;
mod plan;
mod rotary;
mod sampling;
mod weights;

pub use adapters::{
    AdapterError, AdapterFacts, AdapterMatrices, AdapterMemory, AdapterTable, LowRank,
    StoredChanges, StoredLowRank,
};
pub use blocks::{BlockSpan, DeviceBlocks, PeerBlocks};
pub use constraint::{ConstraintError, ConstraintSource, TokenMask, TokenMatcher};
pub use engine::{Engine, EngineDescription, EngineError, Overlap, STEPS_IN_FLIGHT_MAX};
pub use mock::{AnswerScript, MOCK_HIDDEN, MockEngine};
pub use model::{EngineLimits, ModelEngine};
pub use weights::{LoadError, MatrixBytes, Weights};
