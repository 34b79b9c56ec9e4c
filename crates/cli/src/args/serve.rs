//! The flags of what runs long: `serve`, `router`, `worker`.
//!
//! Owns: these flags. Never: holds a default that a part holds too: flags show and take the parts'.

use super::tier::TierArgs;
use super::transport::TransportArgs;
use super::{
    EngineArgs, FaceArgs, FellowArgs, MockArgs, ModelArgs, PickerArgs, PromptArgs, SpeculationArgs,
    StreamArgs, TraceArgs,
};
use crate::values::{
    Seconds, parse_drain, parse_name, parse_router, parse_seconds, parse_silence, parse_swap_bytes,
};
use clap::{Args, ValueEnum};
use cleave_api::AdminKey;
use cleave_domain::Role;
use cleave_node::{Mode, Placement, RouterOptions, WorkerOptions};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

/// Flags show and take what the parts hold as their defaults.
static ROUTER: LazyLock<RouterOptions> = LazyLock::new(RouterOptions::default);

fn worker_defaults() -> WorkerOptions {
    WorkerOptions::new("w", Role::Both)
}

/// Long enough for most answers, and what orchestrators give a process by themselves.
const DRAIN_MAX: Duration = Duration::from_secs(30);

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave serve                   one worker that serves both legs with all cores
  cleave serve --prefill 1 --decode 1      the legs apart, on the same cores
  cleave serve --model ./Qwen2.5-0.5B --prefill 1 --decode 3 --threads 8
  cleave serve --port 0          picks a free port and prints it
  cleave serve --engine mock --prefill 8 --decode 8     a fleet without a model, in the time of a real one")]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) host: HostArgs,
    #[command(flatten)]
    pub(crate) router: RouterLimitArgs,
    /// Prefill workers; if absent, one where `--decode` is alone, else none.
    #[arg(long, value_name = "N", help_heading = "Workers", value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub(crate) prefill: Option<u32>,
    /// Decode workers; if absent, one where `--prefill` is alone, else none.
    #[arg(long, value_name = "N", help_heading = "Workers", value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub(crate) decode: Option<u32>,
    /// Workers that serve both legs; if absent, one where no other is asked for: one worker with all cores
    /// does more than two that share them.
    #[arg(long, value_name = "N", help_heading = "Workers", value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub(crate) both: Option<u32>,
    /// Address to listen on.
    #[arg(long = "host", value_name = "IP", default_value = "127.0.0.1")]
    pub(crate) address: std::net::IpAddr,
    /// Port to listen on; 0 picks a free one.
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub(crate) port: u16,
    #[command(flatten)]
    pub(crate) face: FaceArgs,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
}

#[derive(Args, Debug)]
#[command(
    after_help = "The router needs no model: it learns tokenizer and limits from the first worker.
It prints its address as soon as clients and workers may connect; /ready answers 200 once a
prefill and a decode worker have joined.

Example (five processes on one machine):
  cleave router --listen 127.0.0.1:8000 &
  cleave worker --leg prefill --router 127.0.0.1:8000 &
  cleave worker --leg prefill --router 127.0.0.1:8000 &
  cleave worker --leg decode  --router 127.0.0.1:8000 &
  cleave worker --leg decode  --router 127.0.0.1:8000 &"
)]
pub(crate) struct RouterArgs {
    /// Address for clients (HTTP) and workers (gRPC); port 0 picks a free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000")]
    pub(crate) listen: SocketAddr,
    #[command(flatten)]
    pub(crate) face: FaceArgs,
    #[command(flatten)]
    pub(crate) limits: RouterLimitArgs,
    #[command(flatten)]
    pub(crate) picker: PickerArgs,
    #[command(flatten)]
    pub(crate) fellows: FellowArgs,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave worker --leg prefill --router 127.0.0.1:8000
  cleave worker --leg decode --router router-0:8000,router-1:8000 --model /models/llama --threads 16
  cleave worker --leg both --router cleave-router.default.svc:8000   every address of the name")]
pub(crate) struct WorkerArgs {
    /// Which half of a request this worker serves.
    #[arg(long, value_enum)]
    pub(crate) leg: LegArg,
    /// Routers to serve: host:port, several with commas; a name stands for all its addresses.
    #[arg(long, value_name = "ADDR", value_delimiter = ',', required = true, value_parser = parse_router)]
    pub(crate) router: Vec<String>,
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Where other workers send KV blocks to; port 0 picks a free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    pub(crate) data_listen: SocketAddr,
    /// The address that other workers reach `--data-listen` by, when it differs (NAT, 0.0.0.0).
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_router)]
    pub(crate) data_advertise: Option<String>,
    #[command(flatten)]
    pub(crate) transport: TransportArgs,
    /// Where /metrics, /health, /ready and /admin of this worker are served; not at all if absent.
    #[arg(long, value_name = "ADDR")]
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Name of this worker in logs and metrics, and its identity: unique in the fleet, the same
    /// after a restart. Made of leg, host and process id if absent.
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
}

/// What a router allows flights and clients.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Routing")]
pub(crate) struct RouterLimitArgs {
    /// Failures that a request survives, before its first token or after it; 0 for none. Its stream
    /// continues on another worker each time.
    #[arg(long, value_name = "N", default_value_t = ROUTER.limits.failures_max, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub(crate) migration_limit: u32,
    /// Running sequences that leave one worker at once when it drains or changes its role.
    #[arg(long, value_name = "N", default_value_t = ROUTER.limits.moves_max, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) max_moves: u32,
    /// How long a stalled client may go on reading nothing, in seconds; then its request ends.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(ROUTER.limits.reader_wait_max), value_parser = parse_seconds)]
    pub(crate) reader_wait: Seconds,
    /// SLO classes, rules and tenants in a YAML file, followed while it changes; SIGHUP reads it at once.
    /// One class without targets if absent.
    #[arg(long, value_name = "FILE", env = "CLEAVE_POLICY")]
    pub(crate) policy: Option<PathBuf>,
    /// Where Kubernetes' external metrics API answers, by HTTPS with a certificate made at the start: what a
    /// plain HPA asks how many workers are wanted.
    #[arg(long, value_name = "ADDR")]
    pub(crate) external_metrics_listen: Option<SocketAddr>,
    /// What requests are routed by: `slo` predicts times and refuses what cannot be met, `load` goes by
    /// cached prefixes and load, `round-robin` by turns.
    #[arg(long, value_enum, default_value_t = ROUTER.limits.mode.into())]
    pub(crate) router_mode: ModeArg,
    /// Whether one worker may serve both legs of a request: `auto` decides for each, `split` uses two,
    /// `whole` one.
    #[arg(long, value_enum, default_value_t = ROUTER.limits.placement.into())]
    pub(crate) placement: PlacementArg,
    /// Tokens that a client may be given without taking one, beyond what its socket holds; with more
    /// it is stalled. A slow reader that goes on reading never is.
    #[arg(long, value_name = "TOKENS", default_value_t = ROUTER.reader_backlog_max, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) reader_backlog: u32,
    #[command(flatten)]
    pub(crate) streams: StreamArgs,
    #[command(flatten)]
    pub(crate) prompts: PromptArgs,
}

/// What every process with workers in it takes: which engine of which model, and how far it may go.
#[derive(Args, Clone, Debug)]
pub(crate) struct HostArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) mock: MockArgs,
    #[command(flatten)]
    pub(crate) limits: WorkerLimitArgs,
}

/// What a worker allows itself.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Worker limits")]
pub(crate) struct WorkerLimitArgs {
    /// Host memory of each worker to which running sequences are swapped when its KV cache is short,
    /// such as `4GiB`; 0 for none. A quarter of the KV cache if absent.
    #[arg(long, value_name = "SIZE", value_parser = parse_swap_bytes)]
    pub(crate) swap_space: Option<u64>,
    #[command(flatten)]
    pub(crate) tier: TierArgs,
    /// A step that takes longer makes the worker unhealthy and moves its streams elsewhere, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(worker_defaults().step_max), value_parser = parse_seconds)]
    pub(crate) step_max: Seconds,
    /// Seconds for which each worker measures its engine before it joins, so that the router can
    /// predict it; 0 for none: then requests are placed by load alone.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(cleave_node::CALIBRATION), value_parser = parse_drain)]
    pub(crate) calibrate: Seconds,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
}

/// What every long-running command shares.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Process")]
pub(crate) struct ProcessArgs {
    /// How long running requests may go on after Ctrl-C or SIGTERM, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(DRAIN_MAX), value_parser = parse_drain)]
    pub(crate) drain_timeout: Seconds,
    /// A router or worker that says nothing for so long is lost to the other, in seconds; streams of a
    /// lost worker continue elsewhere.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(ROUTER.silence_max), value_parser = parse_silence)]
    pub(crate) worker_silence: Seconds,
    /// Key that /admin asks for (`Authorization: Bearer KEY`); better set in the environment, where
    /// others do not see it. Without one /admin answers only requests of this machine itself.
    #[arg(long, value_name = "KEY", env = "CLEAVE_ADMIN_KEY", hide_env_values = true, value_parser = AdminKey::new)]
    pub(crate) admin_key: Option<AdminKey>,
    /// Folder with `tls.crt`, `tls.key` and `ca.crt`, as a Kubernetes TLS secret is mounted: the processes of
    /// a fleet then take orders and blocks from each other only, by mutual TLS. Their certificates are for
    /// the DNS name `cleave-peer`, as clients and as servers. Followed while they change.
    #[arg(long, value_name = "DIR")]
    pub(crate) peer_tls: Option<PathBuf>,
    /// Record what every brain is told, one file per brain, for `cleave replay`.
    #[arg(long, value_name = "DIR")]
    pub(crate) tape: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) traces: TraceArgs,
}

/// See [`RouterLimitArgs::router_mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    Slo,
    Load,
    RoundRobin,
}

impl From<ModeArg> for Mode {
    fn from(mode: ModeArg) -> Self {
        match mode {
            ModeArg::Slo => Self::Slo,
            ModeArg::Load => Self::Load,
            ModeArg::RoundRobin => Self::RoundRobin,
        }
    }
}

impl From<Mode> for ModeArg {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Slo => Self::Slo,
            Mode::Load => Self::Load,
            Mode::RoundRobin => Self::RoundRobin,
        }
    }
}

/// See [`RouterLimitArgs::placement`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlacementArg {
    Auto,
    Split,
    Whole,
}

impl From<PlacementArg> for Placement {
    fn from(placement: PlacementArg) -> Self {
        match placement {
            PlacementArg::Auto => Self::Auto,
            PlacementArg::Split => Self::Split,
            PlacementArg::Whole => Self::Whole,
        }
    }
}

impl From<Placement> for PlacementArg {
    fn from(placement: Placement) -> Self {
        match placement {
            Placement::Auto => Self::Auto,
            Placement::Split => Self::Split,
            Placement::Whole => Self::Whole,
        }
    }
}

/// See [`WorkerArgs::leg`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LegArg {
    Prefill,
    Decode,
    Both,
}

impl From<LegArg> for Role {
    fn from(leg: LegArg) -> Self {
        match leg {
            LegArg::Prefill => Self::Prefill,
            LegArg::Decode => Self::Decode,
            LegArg::Both => Self::Both,
        }
    }
}
