//! Routers and workers of one fleet, connected.
//!
//! Owns: the messages between a router and a worker, their form on the wire, the connections that
//! carry them (channels within a process, gRPC between processes), and what the bodies of both
//! share: the brains' clock, the monitor of their progress, the views that operators see. Never
//! decides, or knows what a message leads to: a driver receives it as an event. Invariant: messages
//! of one connection arrive in the order in which they were sent, or the connection is lost.

mod acceptor;
mod clock;
mod connection;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod grpc;
mod health;
pub mod sample;
mod scaling_status;
pub mod views;
mod wire;

pub use acceptor::{
    DriverStopped, EmissionSink, RouterAcceptor, RouterSession, WorkerAcceptor,
    WorkerConnectionEvent, WorkerEvent, connect,
};
pub use clock::{BrainClock, deadline_reached};
pub use connection::{
    FromWorker, LinkState, Registration, RouterConnection, ToWorker, WorkerActivity,
    WorkerConnection, invalid_name_reason,
};
pub use grpc::{
    FAREWELL_MAX, ModelAdmission, RouterConnections, SILENCE_DEFAULT, SILENCE_MIN, Uplink,
    fleet_routes, local_address, watch_names,
};
pub use health::{HealthMonitor, panic_message};
pub use scaling_status::{
    POOLS, ScalingStatus, ScalingStatusReader, ScalingStatuses, ScalingUnavailable,
};
pub use wire::{files_digest, nanos};
