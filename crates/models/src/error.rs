//! Errors of a checkpoint's files.

use std::path::PathBuf;

/// Reason why a file of a checkpoint is refused, one variant for each remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file contradicts itself. Remedy: download it again.
    #[error("{}: {place}: {problem}; download the checkpoint again", file.display())]
    Damaged {
        /// Path of the file that was read.
        file: PathBuf,
        /// Field or tensor of the file, or the part that it is.
        place: String,
        /// Description of the problem.
        problem: String,
    },
    /// The file may be intact, but this model cannot run. Remedy: choose another one.
    #[error("{}: {place}: {problem}", file.display())]
    Unsupported {
        /// Path of the file that was read.
        file: PathBuf,
        /// Field or tensor with the unsupported value.
        place: String,
        /// The unsupported value, and the supported ones.
        problem: String,
    },
}
