//! What every engine must show, whatever it runs on.
//!
//! Owns: the comparison with a reference's goldens and of two devices with each other, path independence to the bit, steps that overlap against
//! the same steps one at a time, and drafts against none.
//! Never: knows how an engine is built: the caller hands in a [`Build`].
//! Invariant: a suite returns the first difference as a sentence, and `Ok` only after every check.

mod agreement;
mod dice;
mod drafts;
mod draws;
mod goldens;
mod overlap;
mod paths;
mod schedule;
mod sequence;

pub use agreement::agreement;
pub use drafts::drafts;
pub use draws::{SetRows, draws};
pub use goldens::goldens;
pub use overlap::overlap;
pub use paths::path_independence;

use crate::{Engine, EngineLimits};
use std::path::Path;

/// Builds a fresh engine for a checkpoint's folder.
pub type Build<'a> = &'a dyn Fn(&Path, EngineLimits) -> Result<Box<dyn Engine>, String>;
