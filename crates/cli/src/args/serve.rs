//! The flags of the long-running commands: `serve`, `router`, `worker`.
//!
//! Owns: these flags. Never: holds a default that a library crate holds, too.

use super::tier::TierArgs;
use super::transport::TransportArgs;
use super::{
    AdapterArgs, EngineArgs, HttpArgs, MockArgs, ModelFormArgs, ModelNameArgs, PeerRouterArgs,
    PickerArgs, PromptArgs, ServedModelsArgs, SpeculationArgs, StreamArgs, TraceArgs,
};
use crate::values::{
    SecondsArg, parse_router, parse_seconds, parse_seconds_or_zero, parse_silence_limit,
    parse_swap_bytes, parse_worker_name,
};
use clap::{Args, ValueEnum};
use cleave_api::AdminKey;
use cleave_domain::Role;
use cleave_node::RouterOptions;
use cleave_router::{LegPlacement, RoutingMode};
use cleave_worker::WorkerOptions;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

/// Defaults of the library crates, which the flags show and use.
static ROUTER: LazyLock<RouterOptions> = LazyLock::new(RouterOptions::default);

fn worker_defaults() -> WorkerOptions {
    WorkerOptions::new("w", Role::Both)
}

/// Long enough for most answers, and equal to the default grace period of orchestrators.
const DRAIN_MAX: Duration = Duration::from_secs(30);

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave serve                   one worker that serves both legs with all cores
  cleave serve --prefill 1 --decode 1      the legs apart, on the same cores
  cleave serve --model ./Qwen2.5-0.5B --prefill 1 --decode 3 --threads 8
  cleave serve --model chat=./Qwen2.5-0.5B --model embed=org/embedder      two models, each with its workers
  cleave serve --port 0          a free port, which is printed
  cleave serve --engine mock --prefill 8 --decode 8     a fleet without a model, at real speed")]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) models: ServedModelsArgs,
    #[command(flatten)]
    pub(crate) host: HostArgs,
    #[command(flatten)]
    pub(crate) router: RouterLimitArgs,
    #[command(flatten)]
    pub(crate) workers: WorkerCountArgs,
    /// Address to listen on.
    #[arg(
        long = "host",
        value_name = "IP",
        help_heading = "Address",
        default_value = "127.0.0.1"
    )]
    pub(crate) address: std::net::IpAddr,
    /// Port to listen on; 0 picks a free port.
    #[arg(
        long,
        value_name = "PORT",
        help_heading = "Address",
        default_value_t = 8000
    )]
    pub(crate) port: u16,
    #[command(flatten)]
    pub(crate) http: HttpArgs,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
}

/// Workers of each model of one process.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Workers")]
pub(crate) struct WorkerCountArgs {
    /// Number of prefill workers of each model; if absent, one if `--decode` is given without
    /// `--both`, otherwise none.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub(crate) prefill: Option<u32>,
    /// Number of decode workers of each model; if absent, one if `--prefill` is given without
    /// `--both`, otherwise none.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub(crate) decode: Option<u32>,
    /// Number of workers of each model that serve both legs; if absent, one if neither `--prefill`
    /// nor `--decode` is given, because one worker with all cores is faster than two that share
    /// them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub(crate) both: Option<u32>,
}

#[derive(Args, Debug)]
#[command(after_help = "Example (five processes on one machine):
  cleave router --listen 127.0.0.1:8000 &
  cleave worker --leg prefill --router 127.0.0.1:8000 &
  cleave worker --leg prefill --router 127.0.0.1:8000 &
  cleave worker --leg decode  --router 127.0.0.1:8000 &
  cleave worker --leg decode  --router 127.0.0.1:8000 &

The router needs no model: it learns tokenizer and limits from the first worker.
It prints its address as soon as clients and workers can connect; /ready answers 200 once a
prefill and a decode worker have joined (a prefill worker, where the model is served for vectors),
and at once where the policy's scaling acts: the first request then starts a worker.")]
pub(crate) struct RouterArgs {
    /// Address for clients (HTTP) and workers (gRPC); port 0 picks a free port.
    #[arg(
        long,
        value_name = "ADDR",
        help_heading = "Address",
        default_value = "127.0.0.1:8000"
    )]
    pub(crate) listen: SocketAddr,
    /// Served name of the model whose workers may join, several separated by commas; workers of
    /// other models are turned away. If absent, the workers that come decide what is served.
    #[arg(
        long,
        value_name = "NAME",
        help_heading = "Models",
        value_delimiter = ','
    )]
    pub(crate) served_model: Vec<String>,
    #[command(flatten)]
    pub(crate) http: HttpArgs,
    #[command(flatten)]
    pub(crate) limits: RouterLimitArgs,
    #[command(flatten)]
    pub(crate) picker: PickerArgs,
    #[command(flatten)]
    pub(crate) peers: PeerRouterArgs,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave worker --leg prefill --router 127.0.0.1:8000
  cleave worker --leg decode --router router-0:8000,router-1:8000 --model /models/llama --threads 16
  cleave worker --leg both --router cleave-router.default.svc:8000   every address of the name")]
pub(crate) struct WorkerArgs {
    /// Legs of a request that this worker serves.
    #[arg(long, value_enum, help_heading = "Worker")]
    pub(crate) leg: LegArg,
    /// Routers to serve: host:port, several separated by commas; a name stands for all its
    /// addresses.
    #[arg(long, value_name = "ADDR", help_heading = "Worker", value_delimiter = ',', required = true, value_parser = parse_router)]
    pub(crate) router: Vec<String>,
    #[command(flatten)]
    pub(crate) model: ModelNameArgs,
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Address at which other workers connect, to send KV blocks or to confirm them; port 0 picks a
    /// free port. On several machines every worker needs one that the others reach.
    #[arg(
        long,
        value_name = "ADDR",
        help_heading = "KV transport",
        default_value = "127.0.0.1:0"
    )]
    pub(crate) data_listen: SocketAddr,
    /// Address at which other workers reach `--data-listen`, if it differs, as behind NAT. For a
    /// `--data-listen` of 0.0.0.0 it is by default the address from which this worker reaches its
    /// router. With this flag no shared memory is offered.
    #[arg(long, value_name = "HOST:PORT", help_heading = "KV transport", value_parser = parse_router)]
    pub(crate) data_advertise: Option<String>,
    #[command(flatten)]
    pub(crate) transport: TransportArgs,
    /// Address of this worker's /metrics, /health, /ready and /admin; they are not served if
    /// absent.
    #[arg(long, value_name = "ADDR", help_heading = "Process")]
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Name of this worker in logs and metrics, and its identity: unique in the fleet, and the same
    /// after a restart. Made of leg, host and process id if absent.
    #[arg(long, value_name = "NAME", help_heading = "Process", value_parser = parse_worker_name)]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
}

/// Limits of a router for flights and clients.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Routing")]
pub(crate) struct RouterLimitArgs {
    /// Failures that a request survives, before or after its first token; 0 for none. After each
    /// one its stream continues on another worker.
    #[arg(long, value_name = "N", default_value_t = ROUTER.limits.failures_max, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub(crate) migration_limit: u32,
    /// Limit of running sequences that leave one worker at once while it drains or changes its
    /// role.
    #[arg(long, value_name = "N", default_value_t = ROUTER.limits.moves_max, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) max_moves: u32,
    /// Time limit, in seconds, of a request that waits for a worker with room; then it is refused
    /// with `queue_full` or `no_blocks`, or with `no_worker` if no worker answers. A stream that
    /// lost its worker waits as long, and then ends with its last failure, such as `worker_lost`.
    #[arg(long, value_name = "SECONDS", default_value_t = SecondsArg(ROUTER.limits.queue_wait_max), value_parser = parse_seconds)]
    pub(crate) queue_wait: SecondsArg,
    /// Time limit, in seconds, of a client that has stopped reading; then its request ends.
    #[arg(long, value_name = "SECONDS", default_value_t = SecondsArg(ROUTER.limits.reader_wait_max), value_parser = parse_seconds)]
    pub(crate) reader_wait: SecondsArg,
    /// YAML file of SLO classes, rules and tenants, reloaded when it changes and on SIGHUP. If
    /// absent, there is one class without targets.
    #[arg(long, value_name = "FILE")]
    pub(crate) policy: Option<PathBuf>,
    /// Address for Kubernetes' external metrics API, by HTTPS with a certificate made at the start.
    /// A plain HPA asks it for the desired number of workers.
    #[arg(long, value_name = "ADDR")]
    pub(crate) external_metrics_listen: Option<SocketAddr>,
    /// Routing of requests: `slo` predicts times and refuses requests whose targets cannot be met,
    /// `load` goes by cached prefixes and load, `round-robin` takes workers in turn.
    #[arg(long, value_enum, default_value_t = ROUTER.limits.mode.into())]
    pub(crate) router_mode: ModeArg,
    /// Whether one worker may serve both legs of a request: `auto` decides for each request,
    /// `split` uses two workers, `whole` uses one.
    #[arg(long, value_enum, default_value_t = ROUTER.limits.placement.into())]
    pub(crate) placement: PlacementArg,
    /// Tokens that wait for a client beyond the data in its socket before it counts as stalled. A
    /// slow client that continues to read never counts as stalled.
    #[arg(long, value_name = "TOKENS", default_value_t = ROUTER.reader_backlog_max, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) reader_backlog: u32,
    #[command(flatten)]
    pub(crate) streams: StreamArgs,
    #[command(flatten)]
    pub(crate) prompts: PromptArgs,
}

/// Flags of a model's workers: the form of the model, the engine and the limits.
#[derive(Args, Clone, Debug)]
pub(crate) struct HostArgs {
    #[command(flatten)]
    pub(crate) form: ModelFormArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) mock: MockArgs,
    #[command(flatten)]
    pub(crate) adapters: AdapterArgs,
    #[command(flatten)]
    pub(crate) limits: WorkerLimitArgs,
}

/// Limits of a worker.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Worker limits")]
pub(crate) struct WorkerLimitArgs {
    /// Host memory of each worker for running sequences that are swapped out when its KV cache is
    /// short, such as `4GiB`; 0 for none. A quarter of the KV cache if absent.
    #[arg(long, value_name = "SIZE", value_parser = parse_swap_bytes)]
    pub(crate) swap_space: Option<u64>,
    #[command(flatten)]
    pub(crate) tier: TierArgs,
    /// Time limit of a step, in seconds; a longer one makes the worker unhealthy, and its streams
    /// move to other workers.
    #[arg(long, value_name = "SECONDS", help_heading = "Worker limits", default_value_t = SecondsArg(worker_defaults().step_max), value_parser = parse_seconds)]
    pub(crate) step_max: SecondsArg,
    /// Seconds for which each worker measures its engine before it joins, so that the router can
    /// predict its step times; 0 for none, and requests are then placed by load alone.
    #[arg(long, value_name = "SECONDS", help_heading = "Worker limits", default_value_t = SecondsArg(cleave_worker::CALIBRATION), value_parser = parse_seconds_or_zero)]
    pub(crate) calibrate: SecondsArg,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
}

/// Flags that every long-running command shares.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Process")]
pub(crate) struct ProcessArgs {
    /// Time limit, in seconds, for running requests after Ctrl-C or SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = SecondsArg(DRAIN_MAX), value_parser = parse_seconds_or_zero)]
    pub(crate) drain_timeout: SecondsArg,
    /// Seconds of silence after which a router or worker counts as lost to the other; streams of a
    /// lost worker continue on others.
    #[arg(long, value_name = "SECONDS", default_value_t = SecondsArg(ROUTER.silence_max), value_parser = parse_silence_limit)]
    pub(crate) worker_silence: SecondsArg,
    /// Key that /admin requires (`Authorization: Bearer KEY`). Set it in the environment, where
    /// other users cannot see it. Without a key /admin accepts only requests of this machine.
    #[arg(long, value_name = "KEY", value_parser = AdminKey::new)]
    pub(crate) admin_key: Option<AdminKey>,
    /// File whose one line is that key; read once, at the start.
    #[arg(long, value_name = "FILE", conflicts_with = "admin_key")]
    pub(crate) admin_key_file: Option<PathBuf>,
    /// Folder with `tls.crt`, `tls.key` and `ca.crt`, as Kubernetes mounts a TLS secret. The
    /// processes of a fleet then accept orders and blocks only from each other, by mutual TLS.
    /// Their certificates are for the DNS name `cleave-peer`, as clients and as servers. Reloaded
    /// when they change.
    #[arg(long, value_name = "DIR")]
    pub(crate) peer_tls: Option<PathBuf>,
    /// Record the inputs and outputs of every brain, one file per brain, for `cleave replay`.
    #[arg(long, value_name = "DIR")]
    pub(crate) tape: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) traces: TraceArgs,
}

/// Routing of requests; see [`RouterLimitArgs::router_mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    Slo,
    Load,
    RoundRobin,
}

impl From<ModeArg> for RoutingMode {
    fn from(mode: ModeArg) -> Self {
        match mode {
            ModeArg::Slo => Self::Slo,
            ModeArg::Load => Self::Load,
            ModeArg::RoundRobin => Self::RoundRobin,
        }
    }
}

impl From<RoutingMode> for ModeArg {
    fn from(mode: RoutingMode) -> Self {
        match mode {
            RoutingMode::Slo => Self::Slo,
            RoutingMode::Load => Self::Load,
            RoutingMode::RoundRobin => Self::RoundRobin,
        }
    }
}

/// Placement of legs; see [`RouterLimitArgs::placement`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlacementArg {
    Auto,
    Split,
    Whole,
}

impl From<PlacementArg> for LegPlacement {
    fn from(placement: PlacementArg) -> Self {
        match placement {
            PlacementArg::Auto => Self::Auto,
            PlacementArg::Split => Self::Split,
            PlacementArg::Whole => Self::Whole,
        }
    }
}

impl From<LegPlacement> for PlacementArg {
    fn from(placement: LegPlacement) -> Self {
        match placement {
            LegPlacement::Auto => Self::Auto,
            LegPlacement::Split => Self::Split,
            LegPlacement::Whole => Self::Whole,
        }
    }
}

/// Legs of a worker; see [`WorkerArgs::leg`].
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
