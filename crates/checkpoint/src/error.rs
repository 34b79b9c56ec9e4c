//! Errors of loading a checkpoint.
//!
//! Owns: the wording: file, place, problem and remedy.
//! Never: tells a field's error from a tensor's: both have the same remedies.
//! Invariant: one error is one line.

use cleave_models::ConfigError;
use std::path::{Path, PathBuf};

/// Errors of loading a checkpoint, one variant for each remedy.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file is missing. Remedy: name another folder, or download the file.
    #[error("{}: {problem}", path.display())]
    Absent {
        /// File or folder that is missing.
        path: PathBuf,
        /// Description of the problem, with the remedy.
        problem: String,
    },
    /// A file contradicts itself or another one, or is not supported.
    #[error(transparent)]
    Refused(#[from] ConfigError),
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
        Self::Refused(ConfigError::Damaged {
            file: file.to_owned(),
            place: place.into(),
            problem: problem.into(),
        })
    }

    pub(crate) fn unsupported(
        file: &Path,
        place: impl Into<String>,
        problem: impl Into<String>,
    ) -> Self {
        Self::Refused(ConfigError::Unsupported {
            file: file.to_owned(),
            place: place.into(),
            problem: problem.into(),
        })
    }

    pub(super) fn tensor(file: &Path, tensor: &str, problem: impl Into<String>) -> Self {
        Self::damaged(file, format!("tensor `{tensor}`"), problem)
    }
}
