//! Errors of a config.json.

use std::path::PathBuf;

/// Reason why a config.json describes no model that can run, one variant for each remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file contradicts itself. Remedy: download it again.
    #[error("{}: {place}: {problem}; download the checkpoint again", file.display())]
    Damaged {
        /// Path of the file that was read.
        file: PathBuf,
        /// Field of the file.
        place: String,
        /// Description of the problem.
        problem: String,
    },
    /// The file may be intact, but this model cannot run. Remedy: choose another one.
    #[error("{}: {place}: {problem}", file.display())]
    Unsupported {
        /// Path of the file that was read.
        file: PathBuf,
        /// Field with the unsupported value.
        place: String,
        /// The unsupported value, and the supported ones.
        problem: String,
    },
}
