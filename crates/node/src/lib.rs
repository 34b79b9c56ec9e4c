//! The processes: a router, a worker, or a whole fleet in one.
//!
//! Owns: which parts a process is put together from, its ports and their routes, and the order of
//! its start and its end. Never decides, drives a brain or reads a message: the parts do.
//! Invariant: every port is bound, every certificate read and every library found before a model is
//! loaded; and a process that was told to end answers everything that it accepted, or says why not.

mod http;
mod node;
mod options;
mod peer_responses;
mod ports;

pub use node::{
    FleetModel, FleetNode, RouterNode, RunningFleet, RunningRouter, RunningWorker, WorkerNode,
};
pub use options::RouterOptions;
pub use ports::{FleetPorts, WorkerPorts};

use cleave_kubernetes::KubernetesError;
use cleave_server::ServerError;
use cleave_telemetry::TelemetryError;
use cleave_tls::TlsError;
use cleave_worker::WorkerError;
use std::io;

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

impl NodeError {
    /// Returns the address that cannot be bound, with the system's reason, if that is the error.
    #[must_use]
    pub fn unbound(&self) -> Option<(&str, &io::Error)> {
        match self {
            Self::Server(ServerError::Bind(address, reason))
            | Self::Kubernetes(KubernetesError::Server(ServerError::Bind(address, reason))) => {
                Some((address, reason))
            }
            _ => None,
        }
    }
}
