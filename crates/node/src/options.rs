//! How a node is set up: plain data, each default on its field.
//!
//! Owns: what a worker may be called. Never: checks anything else: whoever reads the command line
//! does. Invariant: a default is on its field, and nowhere else.

use crate::PolicyFile;
use crate::server::HttpLimits;
use crate::telemetry::Ceilings;
use crate::trace::TraceOptions;
use crate::worker::{StepTime, TierOptions};
use cleave_api::{AdminKey, ApiOptions};
use cleave_domain::{Prices, Role};
use cleave_sched::Lookup;
use cleave_tls::CertificateFiles;
use cleave_transfer::Transport;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

/// A process that dies closes its connections at once; this is for one that is stopped or cut off,
/// whose streams wait for so long. Five beats, so that a machine that is merely overloaded is not
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
    /// Whether blocks go straight from a device's memory into a peer's where both can. Default yes.
    pub writes_to_pools: bool,
    /// What links to and from other processes may go over. Default all but NIXL, over which blocks go in clear.
    pub transports: BTreeSet<Transport>,
    /// NVIDIA's transfer library, for RDMA between hosts. Default the one that the loader finds, if any.
    pub nixl_library: Option<PathBuf>,
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
    /// How tokens are guessed of which a step verifies several, where the engine does. Default not at all;
    /// the command line has it on.
    pub speculation: Option<Lookup>,
    /// Where what its prefix cache would lose is kept. Default nowhere.
    pub tier: TierOptions,
    /// What its device can do and the model asks of it, for what is shown of its use. Default unknown:
    /// nothing is shown.
    pub ceilings: Option<Ceilings>,
    /// How long the engine's steps take. Default: as long as they take.
    pub step_time: StepTime,
    /// What its steps cost, as measured before it joins. Default nothing: then the worker is placed by
    /// its load alone, unless its steps are priced.
    pub prices: Option<Prices>,
    /// A router that says nothing for so long is lost. Default 5 s.
    pub silence_max: Duration,
    /// What `/admin` of its own port asks for. Default nothing: requests of this machine are let in.
    pub admin_key: Option<AdminKey>,
    /// As a router's: then it dials routers, and other workers over TCP, by mutual TLS only, and takes
    /// blocks from nobody else. Default none.
    pub peer_tls: Option<PathBuf>,
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
            writes_to_pools: true,
            transports: [Transport::SharedMemory, Transport::CudaIpc, Transport::Tcp].into(),
            nixl_library: None,
            frame_bytes_max: cleave_transfer::FRAME_BYTES_MAX,
            streams_count: cleave_transfer::STREAMS_COUNT,
            step_max: Duration::from_secs(60),
            swap_bytes: None,
            speculation: None,
            tier: TierOptions::default(),
            ceilings: None,
            step_time: StepTime::Measured,
            prices: None,
            silence_max: SILENCE_MAX,
            admin_key: None,
            peer_tls: None,
            tape: None,
        }
    }
}

/// A name ends up in logs, in metrics, in the names of files.
const NAME_CHARS_MAX: usize = 128;

/// What keeps this from being a worker's name.
pub fn name_flaw(name: &str) -> Option<&'static str> {
    let fits = |c: char| c.is_alphanumeric() || "-_.:@".contains(c);
    if name.is_empty() {
        Some("is empty")
    } else if name.chars().count() > NAME_CHARS_MAX {
        Some("is longer than 128 characters")
    } else if !name.chars().all(fits) {
        Some("has a character other than letters, digits and - _ . : @")
    } else {
        None
    }
}

/// A router's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterOptions {
    /// What its brain is told.
    pub limits: cleave_router::Limits,
    /// What is promised to whom, in a file that is followed while it changes; it replaces that of
    /// `limits`. Default nothing.
    pub policy: Option<PolicyFile>,
    /// The HTTP face's settings.
    pub api: ApiOptions,
    /// `host:port` for Kubernetes' external metrics API, by HTTPS. Default nowhere.
    pub external_metrics_listen: Option<String>,
    /// `host:port` of the fleet's other routers, this one perhaps among them, each a name of several
    /// perhaps: who waits there counts here while no worker is connected. Default none.
    pub fellows: Vec<String>,
    /// Where the brain's tape goes. Default nowhere.
    pub tape: Option<PathBuf>,
    /// Where traces go. Default nowhere.
    pub traces: TraceOptions,
    /// A worker that says nothing for so long is lost, and its streams continue elsewhere. Default
    /// 5 s.
    pub silence_max: Duration,
    /// Tokens that a client may be given, beyond what its socket holds, before it takes one; with more
    /// it stalls. Default 256.
    pub reader_backlog_max: u32,
    /// What connections of clients and workers may cost.
    pub http: HttpLimits,
    /// The certificate that clients are shown. Default none: they speak in clear.
    pub certificate: Option<CertificateFiles>,
    /// The folder by which the fleet's processes know each other: `tls.crt`, `tls.key`, `ca.crt`. With
    /// it nobody else's worker is heard. Default none: any worker is.
    pub peer_tls: Option<PathBuf>,
    /// `host:port` of `/admin`, with what probes and scrapers ask for. Default none: it is where clients
    /// are.
    pub admin_listen: Option<String>,
}

impl Default for RouterOptions {
    fn default() -> Self {
        Self {
            limits: cleave_router::Limits::default(),
            policy: None,
            api: ApiOptions::default(),
            external_metrics_listen: None,
            fellows: Vec::new(),
            tape: None,
            traces: TraceOptions::default(),
            silence_max: SILENCE_MAX,
            reader_backlog_max: 256,
            http: HttpLimits::default(),
            certificate: None,
            peer_tls: None,
            admin_listen: None,
        }
    }
}
