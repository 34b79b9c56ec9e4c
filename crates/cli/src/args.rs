//! The command line: every flag with its unit, its default and an example.
//!
//! Owns: what a user may type. Never: acts on it, reads a file, or holds a default that another
//! place holds too.

use crate::values::{
    Seconds, parse_block_bytes, parse_bytes, parse_drain, parse_name, parse_router, parse_seconds,
    parse_silence, parse_swap_bytes, parse_temperature, parse_top_p,
};
use clap::{Args, Parser, Subcommand, ValueEnum};
use cleave_api::AdminKey;
use cleave_domain::Role;
use cleave_node::{RouterOptions, WorkerOptions};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

/// Serves large language models with prefill and decode split apart.
///
/// Prefill workers run prompts, decode workers generate, a router assigns each request to one of
/// each and KV blocks travel between them. One binary, one OpenAI-compatible HTTP API.
#[derive(Debug, Parser)]
#[command(name = "cleave", version, after_help = EXAMPLES, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "Examples:
  cleave serve                                  everything on this machine, bundled checkpoint
  cleave serve --model ./Llama-3.2-1B --port 8080 --prefill 1 --decode 2
  cleave generate --prompt 'A slice is'         one prompt, no server
  curl localhost:8000/v1/completions -H 'content-type: application/json' \\
       -d '{\"prompt\": \"A vector is\", \"max_tokens\": 40, \"stream\": true}'

`cleave COMMAND --help` explains each command.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run router, prefill and decode workers in this one process.
    Serve(ServeArgs),
    /// Run the router alone: HTTP API for clients, gRPC for workers, both on one port.
    Router(RouterArgs),
    /// Run one worker that dials one or several routers.
    Worker(WorkerArgs),
    /// Continue one prompt and exit; no server.
    Generate(GenerateArgs),
    /// Write a checkpoint of a named shape with random weights.
    Synth(SynthArgs),
    /// Run the decision code in a simulated fleet.
    Sim(SimArgs),
    /// Feed a recorded tape to a fresh brain and compare what it decides.
    Replay(ReplayArgs),
    /// Measure.
    Bench(BenchArgs),
    /// How KV blocks travel between workers.
    Kv(KvArgs),
}

/// Flags show and take what the parts hold as their defaults.
static ROUTER: LazyLock<RouterOptions> = LazyLock::new(RouterOptions::default);

fn worker_defaults() -> WorkerOptions {
    WorkerOptions::new("w", Role::Both)
}

/// Long enough for most answers, and what orchestrators give a process by themselves.
const DRAIN_MAX: Duration = Duration::from_secs(30);

/// Which model, and how it is held in memory.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelArgs {
    /// Hugging Face folder (config.json, tokenizer.json, *.safetensors); the bundled demo if absent.
    #[arg(long, value_name = "DIR", env = "CLEAVE_MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// Name under which the API serves the model; the folder's name if absent.
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,
    /// Number format of weights and KV cache; `auto` takes the checkpoint's (f16 runs as bf16).
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    pub(crate) dtype: Dtype,
    /// Shorten the model's context to this many tokens (prompt and output).
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_model_len: Option<u32>,
}

/// How an engine runs.
#[derive(Args, Clone, Debug)]
pub(crate) struct EngineArgs {
    /// Where to compute. `cpu` is the only device of this build.
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,
    /// Processor threads, all workers of this process together; the machine's cores if absent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
    /// Instruction set; the best that the processor has if absent.
    #[arg(long, value_name = "ISA")]
    pub(crate) isa: Option<String>,
    /// KV cache of each worker, such as `512MiB` or `4GiB`; sized from free memory if absent.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) kv_cache: Option<u64>,
    /// Tokens per KV block.
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) block_size: u32,
    /// Sequences that one worker runs at once.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_num_seqs: u32,
    /// Tokens in one step; bounds the prefill chunk.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) max_num_batched_tokens: u32,
    /// Requests a worker queues before it refuses, each leg.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub(crate) max_queue: Option<u32>,
    /// Do not keep blocks of finished sequences for reuse.
    #[arg(long)]
    pub(crate) no_prefix_cache: bool,
}

impl EngineArgs {
    /// Threads of all workers of this process together.
    pub(crate) fn threads(&self) -> usize {
        self.threads
            .map_or_else(cleave_cpu::cores_count, |threads| threads as usize)
    }
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave serve
  cleave serve --model ./Qwen2.5-0.5B --prefill 1 --decode 3 --threads 8
  cleave serve --port 0          picks a free port and prints it")]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) worker: WorkerLimitArgs,
    #[command(flatten)]
    pub(crate) router: RouterLimitArgs,
    /// Prefill workers; with `--prefill 0 --decode 0 --both N` serving is aggregated.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub(crate) prefill: u32,
    /// Decode workers.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub(crate) decode: u32,
    /// Workers that serve both legs.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub(crate) both: u32,
    /// Address to listen on.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub(crate) host: std::net::IpAddr,
    /// Port to listen on; 0 picks a free one.
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub(crate) port: u16,
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
    pub(crate) limits: RouterLimitArgs,
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
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) limits: WorkerLimitArgs,
    /// Where other workers send KV blocks to; port 0 picks a free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    pub(crate) data_listen: SocketAddr,
    /// The address that other workers reach `--data-listen` by, when it differs (NAT, 0.0.0.0).
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_router)]
    pub(crate) data_advertise: Option<String>,
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
    /// Tokens that a client may be given without taking one, beyond what its socket holds; with more
    /// it is stalled. A slow reader that goes on reading never is.
    #[arg(long, value_name = "TOKENS", default_value_t = ROUTER.reader_backlog_max, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) reader_backlog: u32,
}

/// What a worker allows itself.
#[derive(Args, Clone, Debug)]
pub(crate) struct WorkerLimitArgs {
    /// Host memory of each worker to which running sequences are swapped when its KV cache is short,
    /// such as `4GiB`; 0 for none. A quarter of the KV cache if absent.
    #[arg(long, value_name = "SIZE", value_parser = parse_swap_bytes)]
    pub(crate) swap_space: Option<u64>,
    /// A step that takes longer makes the worker unhealthy and moves its streams elsewhere, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(worker_defaults().step_max), value_parser = parse_seconds)]
    pub(crate) step_max: Seconds,
}

/// What every long-running command shares.
#[derive(Args, Clone, Debug)]
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
    /// Record what every brain is told, one file per brain, for `cleave replay`.
    #[arg(long, value_name = "DIR")]
    pub(crate) tape: Option<PathBuf>,
    /// Send OpenTelemetry traces to this OTLP gRPC endpoint, such as http://localhost:4317.
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub(crate) otlp_endpoint: Option<String>,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave generate --prompt 'Ownership is'
  cleave generate --model ./Qwen3-0.6B --prompt 'Hello' --temperature 0.8 --seed 7 --max-tokens 64
  cleave generate --json --dtype f32 --prompt-tokens 1,2,3 --max-tokens 32

With --json one object is printed: prompt_tokens, tokens, text, finish_reason and
first_top_logits, the 20 largest logits [id, logit] at the last prompt position.
No special token is added to the prompt.")]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// The text to continue.
    #[arg(
        long,
        value_name = "TEXT",
        required_unless_present = "prompt_tokens",
        conflicts_with = "prompt_tokens"
    )]
    pub(crate) prompt: Option<String>,
    /// The token ids to continue, with commas.
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub(crate) prompt_tokens: Option<Vec<u32>>,
    /// Tokens to produce at most; as many as the context holds, if that is fewer.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// 0 always takes the most likely token.
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true, value_parser = parse_temperature)]
    pub(crate) temperature: f32,
    /// Draw from the N most likely tokens; 0 from all.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) top_k: u32,
    /// Draw from the most likely tokens that together reach this probability.
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true, value_parser = parse_top_p)]
    pub(crate) top_p: f32,
    /// Same seed, same tokens.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Go on past the end token.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave synth --shape llama-3.2-1b --out /tmp/llama-1b && cleave serve --model /tmp/llama-1b")]
pub(crate) struct SynthArgs {
    /// Which shape; an unknown one lists all.
    #[arg(long, value_name = "NAME")]
    pub(crate) shape: String,
    /// Folder to write; must not exist or be empty.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Same seed, same weights.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave sim chaos --seeds 1000")]
pub(crate) struct SimArgs {
    #[command(subcommand)]
    pub(crate) command: SimCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SimCommand {
    /// Draw whole worlds from seeds, inject faults, check safety, then liveness.
    #[command(after_help = "Examples:
  cleave sim chaos --seeds 1000
  cleave sim chaos --seeds 1 --from 4711 --log     one world, a line per event

A violation prints its seed and makes the exit status 1.")]
    Chaos {
        /// How many worlds.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
        seeds: u64,
        /// The first seed.
        #[arg(long, value_name = "K", default_value_t = 0)]
        from: u64,
        /// Print a line of state per event.
        #[arg(long)]
        log: bool,
    },
    /// Explore small worlds whole: every order, every fault, up to so many surprises on a path.
    #[command(after_help = "Examples:
  cleave sim explore
  cleave sim explore --world drain --surprises 3

A broken promise prints the way to it, a line per move, and makes the exit status 1.")]
    Explore {
        /// Only this one.
        #[arg(long, value_name = "NAME")]
        world: Option<String>,
        /// Surprises on one path; each more takes a hundred times as long.
        #[arg(long, value_name = "N")]
        surprises: Option<u8>,
        /// States of a world at most; nine bytes each.
        #[arg(long, value_name = "N", default_value_t = 100_000_000)]
        states_max: u64,
    },
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave serve --tape ./tapes …; cleave replay ./tapes/router.jsonl")]
pub(crate) struct ReplayArgs {
    /// Tapes written by `--tape`.
    #[arg(value_name = "FILE", required = true)]
    pub(crate) tapes: Vec<PathBuf>,
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave bench engine --model ./Llama-3.2-1B")]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Prefill and decode speed of the engine alone, without a server.
    #[command(after_help = "Example:
  cleave synth --shape llama-160m --out /tmp/m && cleave bench engine --model /tmp/m --rounds 5")]
    Engine {
        #[command(flatten)]
        model: ModelArgs,
        #[command(flatten)]
        engine: EngineArgs,
        /// Rounds of each measurement; medians and bests are printed.
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
        /// Print one JSON object instead of a table.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave kv bench")]
pub(crate) struct KvArgs {
    #[command(subcommand)]
    pub(crate) command: KvCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KvCommand {
    /// Bandwidth and latency of each transport, by number of blocks, beside what the machine can do.
    #[command(after_help = "Examples:
  cleave kv bench
  cleave kv bench --transport shm --block-bytes 2MiB --blocks 1,32 --rounds 31 --json

A sample is the time from asking for the first block in one worker's pool until the last one is in
the other's, verified, and the sender knows. `tcp` and `shm` run between two processes. The floor is
taken in turns with it: for `tcp` the same blocks over one plain blocking socket between the same
processes, for the others a copy of them from pool to pool by one thread.")]
    Bench(KvBenchArgs),
    /// The other process of a measurement; started by it.
    #[command(hide = true)]
    FarEnd(KvFarArgs),
}

#[derive(Args, Debug)]
pub(crate) struct KvBenchArgs {
    /// What carries the blocks.
    #[arg(long, value_enum, default_value_t = TransportArg::All)]
    pub(crate) transport: TransportArg,
    /// Bytes of a block, such as 512KiB.
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_block_bytes)]
    pub(crate) block_bytes: u32,
    /// Blocks sent at once, with commas; the largest is the size of the pools.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,8,64,512", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) blocks: Vec<u32>,
    /// Samples of each; medians are printed.
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct KvFarArgs {
    #[arg(long, value_enum)]
    pub(crate) transport: FarTransport,
    #[arg(long)]
    pub(crate) block_bytes: u32,
    #[arg(long)]
    pub(crate) blocks_count: u32,
    /// Where the near end listens.
    #[arg(long)]
    pub(crate) near: String,
}

/// See [`KvBenchArgs::transport`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportArg {
    All,
    Local,
    Shm,
    Tcp,
}

/// See [`KvFarArgs::transport`]: those between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FarTransport {
    Shm,
    Tcp,
}

/// See [`ModelArgs::dtype`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    Auto,
    F32,
    Bf16,
}

/// See [`EngineArgs::device`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    Cpu,
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_worker_could_be_called_anything_and_be_reached_nowhere() {
        for good in ["d0", "decode-host.7-123", "rack:3@b"] {
            assert_eq!(parse_name(good).as_deref(), Ok(good));
        }
        let long = "x".repeat(129);
        for bad in ["", "a\nb", "\"", "../w", "\u{1b}[2J", long.as_str()] {
            assert!(parse_name(bad).is_err(), "{bad:?}");
        }
        let words = ["cleave", "worker", "--leg", "both", "--router", "h:1"];
        for more in [
            ["--data-advertise", "foo"],
            ["--name", ""],
            ["--admin-key", ""],
        ] {
            let words = words.iter().chain(&more);
            assert!(Cli::try_parse_from(words).is_err(), "{more:?}");
        }
    }

    #[test]
    fn defaults_are_those_of_the_parts() {
        let parse = |words: &[&str]| Cli::try_parse_from(words).unwrap().command;
        let Command::Router(router) = parse(&["cleave", "router"]) else {
            panic!("a router was asked for");
        };
        let limits = cleave_node::RouterOptions::default();
        let RouterLimitArgs {
            migration_limit,
            max_moves,
            reader_wait,
            reader_backlog,
        } = router.limits;
        assert_eq!(migration_limit, limits.limits.failures_max);
        assert_eq!(max_moves, limits.limits.moves_max);
        assert_eq!(reader_wait.0, limits.limits.reader_wait_max);
        assert_eq!(reader_backlog, limits.reader_backlog_max);
        assert_eq!(router.process.worker_silence.0, limits.silence_max);
        let words = ["cleave", "worker", "--leg", "both", "--router", "h:1"];
        let Command::Worker(worker) = parse(&words) else {
            panic!("a worker was asked for");
        };
        let options = cleave_node::WorkerOptions::new("w", Role::Both);
        assert_eq!(worker.limits.step_max.0, options.step_max);
        assert_eq!(worker.limits.swap_space, options.swap_bytes);
        assert_eq!(worker.process.worker_silence.0, options.silence_max);
    }
}
