//! The tokio body.
//!
//! Owns: the drivers around both brains, the engine's thread, the connections between processes
//! (gRPC), the HTTP server, metrics, tapes and drain. Never decides: the brains say what a fact
//! means and what is done about it.
//! Invariant: a driver waits for its own inboxes only, so that no slow peer, client or disk delays
//! the others.

mod acceptor;
mod calibrate;
mod clock;
mod connection;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod grpc;
mod health;
mod http;
mod node;
mod options;
mod peer_router;
mod picker;
mod ports;
mod router;
mod scaling;
mod server;
mod views;
mod wire;
mod worker;

pub use calibrate::{CALIBRATION, Calibration, StepPart, StepTimer, calibrate};
pub use cleave_router::{LegPlacement, RoutingMode};
pub use cleave_tls::{CertificateFiles, TlsError};
pub use node::{FleetNode, RouterNode, RunningFleet, RunningRouter, RunningWorker, WorkerNode};
pub use options::{RouterOptions, WorkerOptions, invalid_name_reason};
pub use picker::{PickerOptions, ProxyTls};
pub use ports::{FleetPorts, WorkerPorts};
pub use server::HttpLimits;
pub use worker::{DiskOptions, SlabError, StepTime, TierOptions, speculation};

/// The shortest silence after which a peer may count as lost.
pub const SILENCE_MIN: std::time::Duration = grpc::SILENCE_MIN;

use cleave_telemetry::TelemetryError;
use std::io;

/// Why a node cannot start, by what the caller can change.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A port cannot be bound.
    #[error("cannot listen on {0}")]
    Bind(String, #[source] io::Error),
    /// The folder for KV blocks cannot be used.
    #[error(transparent)]
    Tier(#[from] SlabError),
    /// The system cannot start the engine's thread.
    #[error("cannot start the engine's thread")]
    Thread(#[source] io::Error),
    /// The tape cannot be written, or the trace collector's address cannot be used.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// Certificates or keys cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// NIXL is the only allowed transport, and it is not available.
    #[error("NIXL is not available, and --kv-transport allows no other transport")]
    Nixl(#[from] cleave_transfer::NixlError),
    /// The model's tokenizer or templates cannot be used.
    #[error("{0}")]
    Model(String),
}
