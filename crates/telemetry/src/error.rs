//! The reasons why a process cannot be observed.
//!
//! Owns: their texts. Never: handles one.

use std::io;
use std::path::PathBuf;

/// The reason why a process cannot be observed as its options ask.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The collector of traces cannot be used.
    #[error(
        "--otlp-endpoint {endpoint} (or OTEL_EXPORTER_OTLP_ENDPOINT): traces cannot be sent there: {reason}"
    )]
    Collector {
        /// The endpoint as configured.
        endpoint: String,
        reason: String,
    },
    /// The tape cannot be written.
    #[error("cannot write the tape {}", .0.display())]
    Tape(PathBuf, #[source] io::Error),
}
