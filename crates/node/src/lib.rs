//! The tokio body.
//!
//! Owns: the drivers around both brains, the engine's thread, the connections between processes
//! (gRPC), the HTTP server, metrics, tapes and drain. Never decides: the brains say what a fact
//! means and what is done about it.
//! Invariant: a driver waits for its own inboxes only, so that no slow peer, client or disk delays
//! the others.

mod http;
mod node;
mod options;
mod ports;
mod router;

pub use node::{FleetNode, RouterNode, RunningFleet, RunningRouter, RunningWorker, WorkerNode};
pub use options::RouterOptions;
pub use ports::{FleetPorts, WorkerPorts};

use cleave_kubernetes::KubernetesError;
use cleave_server::ServerError;
use cleave_telemetry::TelemetryError;
use cleave_tls::TlsError;
use cleave_worker::WorkerError;

/// Why a node cannot start, by what the caller can change.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A port cannot be bound.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// An interface for Kubernetes cannot be served.
    #[error(transparent)]
    Kubernetes(#[from] KubernetesError),
    /// The worker cannot start: its folder for KV blocks, its engine's thread or its tape.
    #[error(transparent)]
    Worker(#[from] WorkerError),
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
