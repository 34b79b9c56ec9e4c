//! The binary `cleave`.
//!
//! Owns: arguments, configuration, the choice of the device, and what is printed.
//! Never: decides anything about a request.
//! Invariant: everything a user gave is checked before a port is bound.

mod args;
mod autoscale;
mod bench;
mod check;
mod demo;
mod generate;
mod goodput;
mod gpu;
mod key;
mod kv;
mod load;
mod log;
mod metrics;
mod mock;
mod model;
mod page;
mod plan;
mod processor;
mod replay;
mod router_cost;
mod scale;
mod serve;
mod sim;
mod solo;
mod source;
mod synth;
mod top;
mod values;

use args::{BenchCommand, Cli, Command, KvCommand, PlanCommand, SimCommand};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    log::begin(&cli.log);
    let done = match cli.command {
        Command::Serve(args) => serve::serve(&args),
        Command::Router(args) => serve::router(&args),
        Command::Worker(args) => serve::worker(&args),
        Command::Top(args) => top::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Sim(args) => match args.command {
            SimCommand::Chaos { seeds, from, log } => {
                let options = cleave_sim::Options {
                    log,
                    ..Default::default()
                };
                sim::chaos(seeds, from, &options)
            }
            SimCommand::Explore {
                world,
                surprises,
                states_max,
            } => {
                let scope = cleave_sim::explore::Scope {
                    states_max,
                    surprises_max: surprises,
                    without: None,
                };
                sim::explore(world.as_deref(), &scope)
            }
            SimCommand::Goodput(args) => goodput::run_goodput(&args),
            SimCommand::Scale(args) => scale::run_scale(&args),
        },
        Command::Autoscale(args) => autoscale::run(&args),
        Command::Metrics => metrics::print(),
        Command::Check(args) => check::check(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Key(args) => key::run(&args),
        Command::Kv(args) => match args.command {
            KvCommand::Bench(args) => kv::bench(&args),
            KvCommand::FarEnd(args) => kv::far_end(&args),
        },
        Command::Plan(args) => match args.command {
            PlanCommand::Calibrate(args) => plan::run(&args),
        },
        Command::Bench(args) => match args.command {
            BenchCommand::Engine(args) => bench::engine(&args),
            BenchCommand::Run(args) => load::run(*args),
            BenchCommand::Goodput(args) => load::goodput(*args),
        },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cleave: {error:#}");
            ExitCode::FAILURE
        }
    }
}
