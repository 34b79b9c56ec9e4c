//! The tokio body.
//!
//! Owns: the drivers around both brains, the engine's thread, connections between processes (gRPC)
//! and the HTTP server, metrics, tapes, drain. Never: decides anything: what a fact means and what
//! is to be done is the brains'.
//! Invariant: a driver waits for nobody but its own inboxes, so no slow peer, client or disk of
//! one can hold up the others.

mod ask;
mod calibrate;
mod clock;
mod door;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod grpc;
mod health;
mod http;
mod line;
mod node;
mod options;
mod picker;
mod policy;
mod ports;
mod router;
mod scaling;
mod server;
mod tape;
mod telemetry;
mod trace;
mod views;
mod wire;
mod worker;

pub use calibrate::{CALIBRATION, Calibration, Part, Rehearsal, calibrate};
pub use cleave_router::{Mode, Placement};
pub use cleave_tls::{CertificateFiles, TlsError};
pub use node::{RouterNode, Running, RunningRouter, RunningWorker, Serve, WorkerNode};
pub use options::{RouterOptions, WorkerOptions, name_flaw};
pub use picker::{PickerOptions, ProxyTls};
pub use policy::{Flaw, PolicyError, PolicyFile};
pub use ports::{ServePorts, WorkerPorts};
pub use server::HttpLimits;
pub use telemetry::{Ceilings, metrics_page};
pub use trace::{SampleError, Sampler, TraceError, TraceOptions};
pub use worker::{DiskOptions, SlabError, StepTime, TierOptions, speculation};

/// The shortest silence that may be taken for loss.
pub const SILENCE_MIN: std::time::Duration = grpc::SILENCE_MIN;

use std::io;
use std::path::PathBuf;

/// Why a node cannot start, by what the caller can change.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A port cannot be had.
    #[error("cannot listen on {0}")]
    Bind(String, #[source] io::Error),
    /// The tape cannot be written.
    #[error("cannot write the tape {}", .0.display())]
    Tape(PathBuf, #[source] io::Error),
    /// The folder for KV blocks cannot be used.
    #[error(transparent)]
    Tier(#[from] SlabError),
    /// The system gives no thread for the engine.
    #[error("cannot start the engine's thread")]
    Thread(#[source] io::Error),
    /// The collector's address is of no use.
    #[error(transparent)]
    Traces(#[from] TraceError),
    /// Certificates or keys are of no use.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Blocks may go over NIXL alone, and it cannot be had.
    #[error("--kv-transport names no other transport than NIXL")]
    Nixl(#[from] cleave_transfer::NixlError),
    /// The model's text side cannot be used.
    #[error("{0}")]
    Model(String),
}
