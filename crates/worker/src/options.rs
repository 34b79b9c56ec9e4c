//! How a worker is set up: plain data, each default on its field.
//!
//! Never checks anything: the command line does. Invariant: a default stands on its field, and
//! nowhere else.

use crate::{StepTime, TierOptions};
use cleave_api::AdminKey;
use cleave_domain::{Prices, Role};
use cleave_engine::AdapterFacts;
use cleave_fleet::SILENCE_DEFAULT;
use cleave_sched::LookupLimits;
use cleave_telemetry::DeviceCeilings;
use cleave_transfer::Transport;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

/// The settings of one worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerOptions {
    /// Names the worker in logs and metrics, and is its identity: unique in the fleet, the same
    /// after a restart.
    pub name: String,
    /// The legs that it serves.
    pub role: Role,
    /// Prefill orders queued at most, and reservations waiting at most. Default 1024.
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
    /// Transports for links to and from other processes. Default all but NIXL, which sends blocks
    /// unencrypted.
    pub transports: BTreeSet<Transport>,
    /// Path of NVIDIA's transfer library, for RDMA between hosts. Default the one that the loader
    /// finds, if any.
    pub nixl_library: Option<PathBuf>,
    /// The longest frame. Default 1 MiB.
    pub frame_bytes_max: u32,
    /// TCP connections of a link that this worker dials, 1 to 16; by default as many as links
    /// usually have.
    pub streams_count: u16,
    /// A step that takes longer makes the worker unhealthy, and its streams move elsewhere. Default
    /// 60 s: one full prefill chunk of a model of a few billion weights takes seconds on a
    /// processor, and a worker taken for stuck costs every stream on it a new prefill.
    pub step_max: Duration,
    /// Bytes of host memory to which sequences may be swapped when the pool is short. Default a
    /// quarter of the pool: enough for the few sequences that a shortage hits, and taken only when
    /// one does.
    pub swap_bytes: Option<u64>,
    /// How draft tokens are guessed, where the engine verifies several in a step. Default off; the
    /// command line turns it on.
    pub speculation: Option<LookupLimits>,
    /// Where blocks evicted from the prefix cache are kept. Default nowhere.
    pub tier: TierOptions,
    /// The device's limits and the model's sizes, for the utilisation metrics. Default unknown: no
    /// utilisation is shown.
    pub ceilings: Option<DeviceCeilings>,
    /// How long the engine's steps take. Default: measured.
    pub step_time: StepTime,
    /// Prices of its steps, as measured before it joins. Default none: the worker is then placed by
    /// its load alone, unless its steps are priced.
    pub prices: Option<Prices>,
    /// A router that sends nothing for this long counts as lost. Default 5 s.
    pub silence_max: Duration,
    /// The key for `/admin` on its own port. Default none: requests from this machine are accepted.
    pub admin_key: Option<AdminKey>,
    /// The folder with the fleet's certificates, as a router has it. With it the worker
    /// uses mutual TLS only, with routers and with other workers over TCP. Default none.
    pub peer_tls: Option<PathBuf>,
    /// Where the brain's tape goes. Default nowhere.
    pub tape: Option<PathBuf>,
    /// The LoRA adapters that it serves from the start. Default none.
    pub adapters: Vec<OpenAdapter>,
    /// LoRA adapters that are loaded at once, at most. Default 8.
    pub max_loras: usize,
    /// LoRA adapters that are loaded or have a copy in host memory, at most; others wait in their
    /// folders. Default 8: no copies.
    pub max_cpu_loras: usize,
    /// The folder below which routers may name adapters to load. Default none: adapters are fixed.
    pub lora_root: Option<PathBuf>,
}

/// A LoRA adapter that the engine has opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenAdapter {
    /// The model name that requests give.
    pub name: String,
    /// The folder that it was opened from.
    pub folder: PathBuf,
    /// Content of the folder.
    pub facts: AdapterFacts,
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
            silence_max: SILENCE_DEFAULT,
            admin_key: None,
            peer_tls: None,
            tape: None,
            adapters: Vec::new(),
            max_loras: 8,
            max_cpu_loras: 8,
            lora_root: None,
        }
    }
}
