//! Conformance suites that every engine passes, on any device.
//!
//! Owns: comparisons with a reference's goldens and of two devices; path independence to the bit;
//! overlapping steps against the same steps one at a time; drafts against none; vectors; adapters;
//! an engine that spoils what no step may read; errors of logits.
//! Never: knows how an engine is built: the caller passes a [`BuildEngine`].
//! Invariant: a suite returns the first difference as a sentence, and `Ok` only after every check.

mod adapters;
mod agreement;
mod drafts;
mod draws;
mod errors;
mod goldens;
mod overlap;
mod paths;
mod poison;
mod pooling;
mod residues;
mod rng;
mod schedule;
mod sequence;
mod vectors;

pub use adapters::{adapter_goldens, mixed_adapters};
pub use agreement::agreement;
pub use drafts::drafts;
pub use draws::{SetRows, draws_match_host};
pub use errors::logit_error;
pub use goldens::goldens;
pub use overlap::overlap;
pub use paths::path_independence;
pub use poison::poisoned;
pub use pooling::{pooled_paths, pooling};
pub use vectors::vectors;

use crate::{Engine, EngineLimits};
use std::path::Path;

/// Builds a fresh engine for a checkpoint's folder.
pub type BuildEngine<'a> = &'a dyn Fn(&Path, EngineLimits) -> Result<Box<dyn Engine>, String>;
