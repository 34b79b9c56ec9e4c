//! The command line: every flag with its unit, its default and an example.
//!
//! Owns: the flags; each group of commands has its file. Never: acts on a flag, reads a file, or
//! holds a default that a library crate holds, too.

mod access;
mod adapters;
mod autoscale;
mod balancing;
mod bench;
mod chat;
mod config;
mod engine;
mod generate;
mod goodput;
mod http;
mod hub;
mod key;
mod kv;
mod manual;
mod models;
mod parts;
mod plan;
mod scale;
mod serve;
mod server_key;
mod sim;
mod speculation;
mod telemetry;
mod tier;
mod top;
mod transport;

pub(crate) use access::{AccessArgs, ApiKey, parse_api_key};
pub(crate) use adapters::{AdapterArgs, LoraModule, host_loras_max};
pub(crate) use autoscale::AutoscaleArgs;
pub(crate) use balancing::{PeerRouterArgs, PickerArgs, StreamArgs};
pub(crate) use bench::{BenchArgs, BenchCommand, EngineBenchArgs};
pub(crate) use chat::ChatArgs;
pub(crate) use config::{ConfigArgs, ConfigCheckArgs, ConfigCommand, ConfigPrintArgs};
pub(crate) use engine::{
    DecodeShare, DeviceArg, DtypeArg, EngineArgs, EngineKind, GpuMatmul, KvCacheDtype, MockArgs,
    ModelArgs, ModelFormArgs, ModelNameArgs, PoolingArg, QuantizeArg, RunnerArg,
};
pub(crate) use generate::{GenerateArgs, QuantizationArg, SynthArgs};
pub(crate) use goodput::{
    ArrivalArgs, CheckArgs, FleetArg, GoodputQuestion, ScenarioArgs, SimGoodputArgs, TargetArgs,
};
pub(crate) use http::HttpArgs;
pub(crate) use hub::{ListArgs, PullArgs, RmArgs};
pub(crate) use key::KeyArgs;
pub(crate) use kv::{FarTransportArg, KvArgs, KvBenchArgs, KvCommand, KvFarArgs, TransportArg};
pub(crate) use manual::{CompletionsArgs, ManArgs};
pub(crate) use models::ServedModelsArgs;
pub(crate) use parts::{PartsArgs, PlacementArgs};
pub(crate) use plan::{PlanArgs, PlanCalibrateArgs, PlanCommand, PlanFitArgs, PlanPricesArgs};
pub(crate) use scale::{RatePoint, ScaleArgs};
pub(crate) use serve::{
    HostArgs, ProcessArgs, RouterArgs, RouterLimitArgs, ServeArgs, WorkerArgs, WorkerCountArgs,
};
pub(crate) use server_key::ServerKeyArgs;
pub(crate) use sim::{ReplayArgs, SimArgs, SimCommand};
pub(crate) use speculation::SpeculationArgs;
pub(crate) use telemetry::{LogArgs, LogFormat, LogLevel, PromptArgs, TraceArgs};
pub(crate) use top::TopArgs;

use clap::{Parser, Subcommand};

/// Serves large language models with prefill and decode split apart.
///
/// Prefill workers run prompts, decode workers generate, and a router assigns each request to one
/// of each; KV blocks travel between them. One binary, one OpenAI-compatible HTTP API.
#[derive(Debug, Parser)]
#[command(name = "cleave", version, long_version = crate::version::LONG.as_str(), after_help = EXAMPLES, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) log: LogArgs,
    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

const EXAMPLES: &str = "Examples:
  cleave serve                                  everything on this machine, bundled checkpoint
  cleave serve --model ./Llama-3.2-1B --port 8080 --prefill 1 --decode 2
  cleave chat                                   a conversation, no server
  cleave generate --prompt 'A slice is'         one prompt, no server
  curl localhost:8000/v1/completions -H 'content-type: application/json' \\
       -d '{\"prompt\": \"A vector is\", \"max_tokens\": 40, \"stream\": true}'

`cleave COMMAND -h` has the flags used most, `cleave COMMAND --help` all. Each may also be a
variable, --max-num-seqs as CLEAVE_MAX_NUM_SEQS, or a line of the file of --config.";

#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    /// Run a router and its workers in this one process.
    Serve(Box<ServeArgs>),
    /// Run the router alone: HTTP API for clients, gRPC for workers, both on one port.
    Router(RouterArgs),
    /// Run one worker that connects to one or several routers.
    Worker(WorkerArgs),
    /// Watch a fleet in the terminal; the router's `/ui` shows the same in a browser.
    Top(TopArgs),
    /// Start and stop workers so that their number follows a router's policy.
    Autoscale(AutoscaleArgs),
    /// Talk with a model in the terminal; `/ui/chat` of a server does so in a browser.
    Chat(Box<ChatArgs>),
    /// Continue one prompt and exit, without a server.
    Generate(GenerateArgs),
    /// Write a checkpoint of a named shape with random weights.
    Synth(SynthArgs),
    /// Download a model of a hub into the cache, or its newest commit.
    Pull(PullArgs),
    /// List the models in the cache.
    List(ListArgs),
    /// Remove a model from the cache.
    Rm(RmArgs),
    /// Run the production schedulers and routers in a simulated fleet.
    Sim(SimArgs),
    /// Check a policy file, and whether a simulated fleet could meet its targets.
    Check(Box<CheckArgs>),
    /// Replay a recorded tape with a new brain and compare its decisions.
    Replay(ReplayArgs),
    /// Print `docs/metrics.md`, the page that documents every metric.
    #[command(after_help = "Example:
  cleave metrics > docs/metrics.md")]
    Metrics,
    /// Measure the speed of an engine or the goodput of a server.
    Bench(BenchArgs),
    /// Make an API key for a tenant, and print its digest for the policy.
    Key(KeyArgs),
    /// Measure the transport of KV blocks between workers.
    Kv(KvArgs),
    /// Compute or measure the times of a worker's steps, and the errors of predictions.
    Plan(PlanArgs),
    /// Check a file of flags, or print the values in force.
    Config(ConfigArgs),
    /// Print a completion script for a shell.
    Completions(CompletionsArgs),
    /// Print the manual page, or write the pages of all commands into a folder.
    Man(ManArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::parse_worker_name;
    use clap::CommandFactory;
    use cleave_domain::Role;

    #[test]
    fn the_command_line_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn worker_names_and_addresses_are_checked() {
        for good in ["d0", "decode-host.7-123", "rack:3@b"] {
            assert_eq!(parse_worker_name(good).as_deref(), Ok(good));
        }
        let long = "x".repeat(129);
        for bad in ["", "a\nb", "\"", "../w", "\u{1b}[2J", long.as_str()] {
            assert!(parse_worker_name(bad).is_err(), "{bad:?}");
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
    fn a_picker_certificate_must_be_given() {
        let picker = |more: &str| {
            let words = "cleave router --ext-proc-listen [::1]:9002 --picker-endpoints h:8000";
            let parsed = Cli::try_parse_from(words.split(' ').chain(more.split_whitespace()));
            parsed.map(|cli| match cli.command {
                CliCommand::Router(router) => router.picker.options().unwrap().tls,
                _ => panic!("a router was asked for"),
            })
        };
        let front = "--ssl-certfile c --ssl-keyfile k --ext-proc-tls front";
        for (more, tls) in [
            ("", cleave_kubernetes::ProxyTls::Front),
            (front, cleave_kubernetes::ProxyTls::Front),
            (
                "--ext-proc-tls self-signed",
                cleave_kubernetes::ProxyTls::SelfSigned,
            ),
            ("--ext-proc-tls off", cleave_kubernetes::ProxyTls::Off),
        ] {
            assert_eq!(picker(more).unwrap(), tls, "{more}");
        }
        assert!(picker("--ext-proc-tls front").is_err());
        assert!(picker("--ext-proc-tls yes").is_err());
    }

    // Lesson: 32.
    #[test]
    fn flag_defaults_equal_the_library_defaults() {
        let parse = |words: &[&str]| Cli::try_parse_from(words).unwrap().command;
        let CliCommand::Router(router) = parse(&["cleave", "router"]) else {
            panic!("a router was asked for");
        };
        let limits = cleave_node::RouterOptions::default();
        let RouterLimitArgs {
            migration_limit,
            max_moves,
            queue_wait,
            reader_wait,
            reader_backlog,
            external_metrics_listen,
            policy,
            router_mode,
            placement,
            streams,
            prompts,
        } = router.limits;
        assert_eq!(policy, None);
        assert_eq!(prompts.shown(), limits.api.prompts);
        assert_eq!(router.process.traces.trace_sample, None);
        assert_eq!(streams.keep_alive(), limits.api.keep_alive);
        assert_eq!(router.picker.options(), None);
        assert_eq!(router.peers.fellow_routers, limits.peer_routers);
        assert_eq!(external_metrics_listen, None);
        assert_eq!(
            cleave_router::RoutingMode::from(router_mode),
            limits.limits.mode
        );
        let placement = cleave_router::LegPlacement::from(placement);
        assert_eq!(placement, limits.limits.placement);
        assert_eq!(migration_limit, limits.limits.failures_max);
        assert_eq!(max_moves, limits.limits.moves_max);
        assert_eq!(queue_wait.0, limits.limits.queue_wait_max);
        assert_eq!(reader_wait.0, limits.limits.reader_wait_max);
        assert_eq!(reader_backlog, limits.reader_backlog_max);
        assert_eq!(router.process.worker_silence.0, limits.silence_max);
        assert_eq!(router.http.http_limits(), limits.http);
        assert_eq!(router.http.max_body, limits.api.body_bytes_max);
        assert_eq!(router.http.body_memory, limits.api.body_memory_bytes);
        assert_eq!(
            router.http.template_memory,
            limits.api.template_memory_bytes
        );
        assert_eq!(router.http.vector_memory, limits.api.vector_memory_bytes);
        assert_eq!(router.http.body_timeout.0, limits.api.body_wait_max);
        let words = ["cleave", "worker", "--leg", "both", "--router", "h:1"];
        let CliCommand::Worker(worker) = parse(&words) else {
            panic!("a worker was asked for");
        };
        let options = cleave_worker::WorkerOptions::new("w", Role::Both);
        let limits = &worker.host.limits;
        assert_eq!(limits.step_max.0, options.step_max);
        assert_eq!(limits.swap_space, options.swap_bytes);
        assert_eq!(limits.tier.options(), options.tier);
        assert_eq!(limits.calibrate.0, cleave_worker::CALIBRATION);
        assert_eq!(worker.process.worker_silence.0, options.silence_max);
    }

    #[test]
    fn flags_of_long_running_commands_have_sections() {
        let mut cli = Cli::command();
        cli.build();
        for name in ["serve", "router", "worker"] {
            let command = cli.find_subcommand(name).expect("it exists");
            let mut sections = std::collections::BTreeMap::<_, u32>::new();
            for argument in command.get_arguments().filter(|a| !a.is_hide_set()) {
                let section = argument.get_help_heading().unwrap_or_default();
                *sections.entry(section.to_owned()).or_default() += 1;
            }
            // Flags of addresses and roles, and help itself, have no section.
            let without = sections.get("").copied().unwrap_or_default();
            assert!(without <= 8, "{name}: {sections:?}");
            let largest = sections.values().max().copied().unwrap_or_default();
            assert!(largest <= 16 && sections.len() >= 5, "{name}: {sections:?}");
        }
    }
}
