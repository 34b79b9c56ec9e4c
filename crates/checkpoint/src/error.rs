//! Errors of loading a checkpoint.
//!
//! Owns: the wording: file, place, problem and remedy.
//! Never: wraps another crate's error as a type; its text is enough here.
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
    /// A file contradicts itself or another one. Remedy: download it again.
    #[error("{}: {place}: {problem}; download the checkpoint again", file.display())]
    Damaged {
        /// File that contradicts itself or another one.
        file: PathBuf,
        /// Field, tensor or part of the file.
        place: String,
        /// Description of the problem.
        problem: String,
    },
    /// The checkpoint may be intact, but this engine cannot run it. Remedy: choose another one.
    #[error("{}: {place}: {problem}", file.display())]
    Unsupported {
        /// File that has the unsupported value.
        file: PathBuf,
        /// Field or tensor that is not supported.
        place: String,
        /// The unsupported value, and the supported ones.
        problem: String,
    },
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

impl From<ConfigError> for CheckpointError {
    fn from(error: ConfigError) -> Self {
        match error {
            ConfigError::Damaged {
                file,
                place,
                problem,
            } => Self::Damaged {
                file,
                place,
                problem,
            },
            ConfigError::Unsupported {
                file,
                place,
                problem,
            } => Self::Unsupported {
                file,
                place,
                problem,
            },
        }
    }
}
