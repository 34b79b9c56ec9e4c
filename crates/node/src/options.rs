//! How a node is set up: plain data, each default on its field.

use cleave_api::ApiOptions;
use cleave_domain::Role;
use std::path::PathBuf;
use std::time::Duration;

/// A worker's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerOptions {
    /// Names the worker in logs and metrics, and is its identity: unique in the fleet, the same
    /// after a restart.
    pub name: String,
    /// Which legs it serves.
    pub role: Role,
    /// Prefill orders queued, and reservations waiting, at most; each. Default 1024.
    pub queue_max: u32,
    /// How long a hand-off lives without its router renewing it. Default 15 s.
    pub lease: Duration,
    /// How long a hand-off may stand still once nothing is left to compute for it. Default 10 s.
    pub stall_max: Duration,
    /// Whether blocks of finished sequences are kept for reuse. Default yes.
    pub prefix_cache: bool,
    /// KV bytes written to the pool between two steps, about; more wait for the next gap, so that
    /// arriving hand-offs slow no running sequence by more than that takes. Default 16 MiB.
    pub import_bytes_per_step: u64,
    /// KV bytes that one peer may have on their way here, by default as many as links usually
    /// allow; never less than two blocks.
    pub credit_bytes: u32,
    /// The longest frame. Default 1 MiB.
    pub frame_bytes_max: u32,
    /// A step that takes longer makes the worker unhealthy. Default 60 s.
    pub step_limit: Duration,
    /// Where the brain's tape goes. Default nowhere.
    pub tape: Option<PathBuf>,
}

impl WorkerOptions {
    /// The defaults, for a worker of this name and role.
    pub fn new(name: impl Into<String>, role: Role) -> Self {
        Self {
            name: name.into(),
            role,
            queue_max: 1024,
            lease: Duration::from_secs(15),
            stall_max: Duration::from_secs(10),
            prefix_cache: true,
            import_bytes_per_step: 16 << 20,
            credit_bytes: cleave_transfer::CREDIT_BYTES,
            frame_bytes_max: 1 << 20,
            step_limit: Duration::from_secs(60),
            tape: None,
        }
    }
}

/// A router's settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterOptions {
    /// What its brain is told.
    pub limits: cleave_router::Limits,
    /// The HTTP face's settings.
    pub api: ApiOptions,
    /// Where the brain's tape goes. Default nowhere.
    pub tape: Option<PathBuf>,
    /// Where traces go: an OpenTelemetry collector's OTLP/gRPC endpoint, `http://host:4317`.
    /// Default nowhere.
    pub otlp_endpoint: Option<String>,
}
