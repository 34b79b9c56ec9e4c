//! The command line: every flag with its unit, its default and an example.
//!
//! Owns: what a user may type; each group of commands has its file. Never: acts on it, reads a file,
//! or holds a default that another place holds too.

mod autoscale;
mod balancing;
mod bench;
mod engine;
mod face;
mod generate;
mod goodput;
mod key;
mod kv;
mod plan;
mod scale;
mod serve;
mod sim;
mod speculation;
mod telemetry;
mod tier;
mod top;
mod transport;

pub(crate) use autoscale::AutoscaleArgs;
pub(crate) use balancing::{FellowArgs, PickerArgs, StreamArgs};
pub(crate) use bench::{BenchArgs, BenchCommand, EngineBenchArgs};
pub(crate) use engine::{
    DecodeShare, Device, Dtype, EngineArgs, EngineKind, GpuMatmul, KvCacheDtype, MockArgs,
    ModelArgs, QuantizeArg,
};
pub(crate) use face::FaceArgs;
pub(crate) use generate::{GenerateArgs, Quantized, SynthArgs};
pub(crate) use goodput::{
    ArrivalArgs, CheckArgs, GoodputArgs, Question, ScenarioArgs, TargetArgs, Workers,
};
pub(crate) use key::KeyArgs;
pub(crate) use kv::{FarTransport, KvArgs, KvBenchArgs, KvCommand, KvFarArgs, TransportArg};
pub(crate) use plan::{PlanArgs, PlanCalibrateArgs, PlanCommand};
pub(crate) use scale::{Knot, ScaleArgs};
pub(crate) use serve::{HostArgs, ProcessArgs, RouterArgs, RouterLimitArgs, ServeArgs, WorkerArgs};
pub(crate) use sim::{ReplayArgs, SimArgs, SimCommand};
pub(crate) use speculation::SpeculationArgs;
pub(crate) use telemetry::{LogArgs, LogFormat, LogLevel, PromptArgs, TraceArgs};
pub(crate) use top::TopArgs;

use clap::{Parser, Subcommand};

/// Serves large language models with prefill and decode split apart.
///
/// Prefill workers run prompts, decode workers generate, a router assigns each request to one of
/// each and KV blocks travel between them. One binary, one OpenAI-compatible HTTP API.
#[derive(Debug, Parser)]
#[command(name = "cleave", version, after_help = EXAMPLES, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) log: LogArgs,
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
    /// Run a router and its workers in this one process.
    Serve(ServeArgs),
    /// Run the router alone: HTTP API for clients, gRPC for workers, both on one port.
    Router(RouterArgs),
    /// Run one worker that dials one or several routers.
    Worker(WorkerArgs),
    /// Watch a fleet in the terminal; `/ui` of the router shows the same in a browser.
    Top(TopArgs),
    /// Start and stop workers as a router's policy wants them.
    Autoscale(AutoscaleArgs),
    /// Continue one prompt and exit; no server.
    Generate(GenerateArgs),
    /// Write a checkpoint of a named shape with random weights.
    Synth(SynthArgs),
    /// Run the decision code in a simulated fleet.
    Sim(SimArgs),
    /// Check a policy, and whether a fleet could keep what it promises.
    Check(Box<CheckArgs>),
    /// Feed a recorded tape to a fresh brain and compare what it decides.
    Replay(ReplayArgs),
    /// Print the page that documents every metric, `docs/metrics.md`.
    Metrics,
    /// Measure.
    Bench(BenchArgs),
    /// Make an API key for a tenant, and print what a policy holds of it.
    Key(KeyArgs),
    /// How KV blocks travel between workers.
    Kv(KvArgs),
    /// What work costs on this machine, and how well that is known.
    Plan(PlanArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::parse_name;
    use clap::CommandFactory;
    use cleave_domain::Role;

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
    fn a_picker_was_told_to_show_a_certificate_that_is_not_there() {
        let picker = |more: &str| {
            let words = "cleave router --ext-proc-listen [::1]:9002 --picker-endpoints h:8000";
            let parsed = Cli::try_parse_from(words.split(' ').chain(more.split_whitespace()));
            parsed.map(|cli| match cli.command {
                Command::Router(router) => router.picker.options().unwrap().tls,
                _ => panic!("a router was asked for"),
            })
        };
        let front = "--ssl-certfile c --ssl-keyfile k --ext-proc-tls front";
        for (more, tls) in [
            ("", cleave_node::ProxyTls::Front),
            (front, cleave_node::ProxyTls::Front),
            (
                "--ext-proc-tls self-signed",
                cleave_node::ProxyTls::SelfSigned,
            ),
            ("--ext-proc-tls off", cleave_node::ProxyTls::Off),
        ] {
            assert_eq!(picker(more).unwrap(), tls, "{more}");
        }
        assert!(picker("--ext-proc-tls front").is_err());
        assert!(picker("--ext-proc-tls yes").is_err());
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
        assert_eq!(router.fellows.fellow_routers, limits.fellows);
        assert_eq!(external_metrics_listen, None);
        assert_eq!(cleave_node::Mode::from(router_mode), limits.limits.mode);
        let placement = cleave_node::Placement::from(placement);
        assert_eq!(placement, limits.limits.placement);
        assert_eq!(migration_limit, limits.limits.failures_max);
        assert_eq!(max_moves, limits.limits.moves_max);
        assert_eq!(reader_wait.0, limits.limits.reader_wait_max);
        assert_eq!(reader_backlog, limits.reader_backlog_max);
        assert_eq!(router.process.worker_silence.0, limits.silence_max);
        assert_eq!(router.face.limits(), limits.http);
        assert_eq!(router.face.max_body, limits.api.body_bytes_max);
        assert_eq!(router.face.body_memory, limits.api.body_memory_bytes);
        assert_eq!(router.face.body_timeout.0, limits.api.body_wait_max);
        let words = ["cleave", "worker", "--leg", "both", "--router", "h:1"];
        let Command::Worker(worker) = parse(&words) else {
            panic!("a worker was asked for");
        };
        let options = cleave_node::WorkerOptions::new("w", Role::Both);
        let limits = &worker.host.limits;
        assert_eq!(limits.step_max.0, options.step_max);
        assert_eq!(limits.swap_space, options.swap_bytes);
        assert_eq!(limits.tier.options(), options.tier);
        assert_eq!(limits.calibrate.0, cleave_node::CALIBRATION);
        assert_eq!(worker.process.worker_silence.0, options.silence_max);
    }

    #[test]
    fn the_flags_of_long_running_commands_stand_in_sections() {
        let mut cli = Cli::command();
        cli.build();
        for name in ["serve", "router", "worker"] {
            let command = cli.find_subcommand(name).expect("it exists");
            let mut sections = std::collections::BTreeMap::<_, u32>::new();
            for argument in command.get_arguments().filter(|a| !a.is_hide_set()) {
                let section = argument.get_help_heading().unwrap_or_default();
                *sections.entry(section.to_owned()).or_default() += 1;
            }
            // Where it listens or whom it serves, and help itself.
            let without = sections.get("").copied().unwrap_or_default();
            assert!(without <= 8, "{name}: {sections:?}");
            let largest = sections.values().max().copied().unwrap_or_default();
            assert!(largest <= 16 && sections.len() >= 5, "{name}: {sections:?}");
        }
    }
}
