//! Why a checkpoint could not be loaded.
//!
//! Owns: the wording: file, place, problem, and what to do.
//! Never: wraps another crate's error as a type; its text is enough here.
//! Invariant: one error is one line.

use crate::EngineError;
use std::path::{Path, PathBuf};

/// Why a checkpoint could not be loaded, told apart by what helps.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Something is not there: point to another folder, or fetch the file.
    #[error("{}: {problem}", path.display())]
    Absent {
        /// The file or folder looked for.
        path: PathBuf,
        /// What is missing and what to do.
        problem: String,
    },
    /// A file contradicts itself or another: download it again.
    #[error("{}: {place}: {problem}; download the checkpoint again", file.display())]
    Damaged {
        /// The file at fault.
        file: PathBuf,
        /// The field, tensor or part of it.
        place: String,
        /// What is wrong there.
        problem: String,
    },
    /// The checkpoint may be fine, but this engine does not run it: choose another.
    #[error("{}: {place}: {problem}", file.display())]
    Unsupported {
        /// The file that says so.
        file: PathBuf,
        /// The field or tensor.
        place: String,
        /// What is not supported, and what is.
        problem: String,
    },
    /// The device could not take the weights.
    #[error("loading weights: {0}")]
    Device(#[from] EngineError),
}

impl CheckpointError {
    pub(super) fn absent(path: &Path, problem: impl Into<String>) -> Self {
        Self::Absent {
            path: path.to_owned(),
            problem: problem.into(),
        }
    }

    pub(super) fn damaged(
        file: &Path,
        place: impl Into<String>,
        problem: impl Into<String>,
    ) -> Self {
        Self::Damaged {
            file: file.to_owned(),
            place: place.into(),
            problem: problem.into(),
        }
    }

    pub(crate) fn unsupported(
        file: &Path,
        place: impl Into<String>,
        problem: impl Into<String>,
    ) -> Self {
        Self::Unsupported {
            file: file.to_owned(),
            place: place.into(),
            problem: problem.into(),
        }
    }

    pub(super) fn tensor(file: &Path, tensor: &str, problem: impl Into<String>) -> Self {
        Self::damaged(file, format!("tensor `{tensor}`"), problem)
    }
}
