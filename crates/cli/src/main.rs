//! The binary `cleave`.
//!
//! Owns: arguments, configuration, the choice of the device, and the output. Never: decides
//! anything about a request. Invariant: all input of the user is checked before a port is bound.

mod access;
mod adapters;
mod args;
mod autoscale;
mod bench;
mod chat;
mod check;
mod configuration;
mod demo;
mod generate;
mod goodput;
mod gpu;
mod hub;
mod key;
mod kv;
mod load;
mod log;
mod manual;
mod metrics;
mod mock;
mod mock_script;
mod model;
mod model_location;
mod parts;
mod plan;
mod processor;
mod replay;
mod router_cost;
mod scale;
mod serve;
mod server_client;
mod sim;
mod single_request;
mod source;
mod synth;
mod task;
mod top;
mod values;
mod version;

use args::{
    BenchCommand, Cli, CliCommand, KvCommand, LogArgs, LogFormat, LogLevel, PlanCommand, SimCommand,
};
use configuration::ConfigurationError;
use std::process::ExitCode;

fn main() -> ExitCode {
    cleave_cpu::limit_allocator_slack();
    let cli: Cli = match configuration::read(std::env::args_os().collect()) {
        Ok(cli) => cli,
        Err(ConfigurationError::Words(error)) => error.exit(),
        Err(ConfigurationError::File { error, log_format }) => {
            let log = LogArgs {
                log_format,
                log_level: None,
            };
            log::init(&log, LogLevel::Error);
            return failure(&error, log_format);
        }
    };
    // Lines of a log would stand between the lines of a chat.
    let log_level = match cli.command {
        CliCommand::Chat(_) => LogLevel::Warn,
        _ => LogLevel::Info,
    };
    log::init(&cli.log, log_level);
    configuration::warn_of_misspelt_variables();
    let log_format = cli.log.log_format;
    let done = match cli.command {
        CliCommand::Serve(args) => serve::serve(&args),
        CliCommand::Router(args) => serve::router(&args),
        CliCommand::Worker(args) => serve::worker(&args),
        CliCommand::Top(args) => top::run(&args),
        CliCommand::Chat(args) => chat::run(&args),
        CliCommand::Generate(args) => generate::run(&args),
        CliCommand::Synth(args) => synth::run(&args),
        CliCommand::Pull(args) => hub::pull(&args),
        CliCommand::List(args) => hub::list(&args),
        CliCommand::Rm(args) => hub::rm(&args),
        CliCommand::Sim(args) => match args.command {
            SimCommand::Chaos {
                seeds,
                from,
                log,
                states,
                windows,
                models,
                constraints,
            } => {
                let options = cleave_sim::ChaosOptions {
                    log,
                    states,
                    windows,
                    models,
                    constraints,
                    ..Default::default()
                };
                sim::chaos(seeds, from, &options)
            }
            SimCommand::Explore {
                world,
                surprises,
                states_max,
            } => {
                let scope = cleave_sim::explore::ExploreScope {
                    states_max,
                    surprises_max: surprises,
                    without: None,
                };
                sim::explore(world.as_deref(), &scope)
            }
            SimCommand::Goodput(args) => goodput::run_goodput(&args),
            SimCommand::Scale(args) => scale::run_scale(&args),
        },
        CliCommand::Autoscale(args) => autoscale::run(&args),
        CliCommand::Config(args) => configuration::run(&args),
        CliCommand::Completions(args) => manual::completions(&args),
        CliCommand::Man(args) => manual::man(&args),
        CliCommand::Metrics => metrics::print(),
        CliCommand::Check(args) => check::check(&args),
        CliCommand::Replay(args) => replay::run(&args),
        CliCommand::Key(args) => key::run(&args),
        CliCommand::Kv(args) => match args.command {
            KvCommand::Bench(args) => kv::bench(&args),
            KvCommand::FarEnd(args) => kv::far_end(&args),
        },
        CliCommand::Plan(args) => match args.command {
            PlanCommand::Calibrate(args) => plan::calibrate::run(&args),
            PlanCommand::Prices(args) => plan::prices::run(&args),
            PlanCommand::Fit(args) => plan::fit::run(&args),
        },
        CliCommand::Bench(args) => match args.command {
            BenchCommand::Engine(args) => bench::engine(&args),
            BenchCommand::Run(args) => load::run(*args),
            BenchCommand::Goodput(args) => load::goodput(*args),
        },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure(&error, log_format),
    }
}

/// Writes the error that ends the process, in the format of its other lines.
fn failure(error: &anyhow::Error, log_format: LogFormat) -> ExitCode {
    match log_format {
        LogFormat::Text => eprintln!("cleave: {error:#}"),
        LogFormat::Json => tracing::error!(error = format!("{error:#}"), "ended by an error"),
    }
    ExitCode::FAILURE
}
