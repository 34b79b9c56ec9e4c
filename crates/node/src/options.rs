//! How a node is set up: plain data, each default on its field.

use cleave_api::ApiOptions;
use cleave_domain::Role;
use std::path::PathBuf;
use std::time::Duration;

/// A process that dies closes its connections at once; this is for one that is stopped or cut off,
/// whose streams wait for so long. Twenty beats, so that a machine that is merely overloaded is not
/// taken for one.
const SILENCE_MAX: Duration = Duration::from_secs(5);

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
    /// TCP connections of a link that this worker dials, 1 to 16; by default as many as links usually
    /// have.
    pub streams_count: u16,
    /// A step that takes longer makes the worker unhealthy, and its streams move elsewhere. Default
    /// 60 s: one full prefill chunk of a model of a few billion weights takes seconds on a
    /// processor, and a worker taken for stuck costs every stream on it a new prefill.
    pub step_max: Duration,
    /// Bytes of host memory to which sequences may be swapped when the pool is short. Default a
    /// quarter of the pool: enough for the few sequences that a shortage hits, and taken only when
    /// one does.
    pub swap_bytes: Option<u64>,
    /// A router that says nothing for so long is lost. Default 5 s.
    pub silence_max: Duration,
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
            frame_bytes_max: cleave_transfer::FRAME_BYTES_MAX,
            streams_count: cleave_transfer::STREAMS_COUNT,
            step_max: Duration::from_secs(60),
            swap_bytes: None,
            silence_max: SILENCE_MAX,
            tape: None,
        }
    }
}

/// A router's settings.
#[derive(Clone, Debug, PartialEq)]
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
    /// A worker that says nothing for so long is lost, and its streams continue elsewhere. Default
    /// 5 s.
    pub silence_max: Duration,
    /// Tokens that may wait for a client, beyond what its socket holds, before it counts as a slow
    /// reader. Default 256.
    pub reader_backlog_max: u32,
}

impl Default for RouterOptions {
    fn default() -> Self {
        Self {
            limits: cleave_router::Limits::default(),
            api: ApiOptions::default(),
            tape: None,
            otlp_endpoint: None,
            silence_max: SILENCE_MAX,
            reader_backlog_max: 256,
        }
    }
}
