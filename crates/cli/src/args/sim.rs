//! The flags of commands that run the brains without a fleet: `sim`, `replay`.

use super::{ScaleArgs, SimGoodputArgs};
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave sim chaos --seeds 1000
  cleave sim goodput --devices 8 --workload long-short --rate 60 --ttft 500ms --tpot 40ms
  cleave sim scale --policy policy.yaml --workload short-long --rate 60 --duration 20m \\
      --curve 0s=0.1,10m=1,20m=0.1")]
pub(crate) struct SimArgs {
    #[command(subcommand)]
    pub(crate) command: SimCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SimCommand {
    /// Simulate random fleets with faults, drawn from seeds; check safety, then liveness.
    #[command(after_help = "Examples:
  cleave sim chaos --seeds 1000
  cleave sim chaos --seeds 1 --from 4711 --log     one world, a line per event

A violation prints its seed and makes the exit status 1.")]
    Chaos {
        /// Number of worlds to simulate.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
        seeds: u64,
        /// Seed of the first world.
        #[arg(long, value_name = "K", default_value_t = 0)]
        from: u64,
        /// Print a line of state for each event.
        #[arg(long)]
        log: bool,
        /// Simulate a model with a state beside its keys and values.
        #[arg(long)]
        states: bool,
        /// Simulate a model with sliding windows.
        #[arg(long)]
        windows: bool,
        /// Simulate fleets of one to three models.
        #[arg(long)]
        models: bool,
        /// Give requests constraints, some with reasoning in front of them.
        #[arg(long)]
        constraints: bool,
    },
    /// Explore small worlds completely: every order of events and every fault, up to a number of
    /// faults on a path.
    #[command(after_help = "Examples:
  cleave sim explore
  cleave sim explore --world drain --surprises 3

A violation prints the path to it, a line per move, and makes the exit status 1.")]
    Explore {
        /// Name of the one world to explore; all worlds if absent.
        #[arg(long, value_name = "NAME")]
        world: Option<String>,
        /// Limit of faults on one path; each more takes a hundred times as long.
        #[arg(long, value_name = "N")]
        surprises: Option<u8>,
        /// Limit of the states of one world; each takes nine bytes.
        #[arg(long, value_name = "N", default_value_t = 100_000_000)]
        states_max: u64,
    },
    /// Simulate the goodput of a fleet of devices whose prices come from published timings of other
    /// systems, and compare routings.
    Goodput(Box<SimGoodputArgs>),
    /// Simulate how a fleet of devices whose prices come from published timings of other systems
    /// scales with a changing load.
    Scale(Box<ScaleArgs>),
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave serve --tape ./tapes …; cleave replay ./tapes/router.jsonl")]
pub(crate) struct ReplayArgs {
    /// Tapes written by `--tape`.
    #[arg(value_name = "FILE", required = true)]
    pub(crate) tapes: Vec<PathBuf>,
}
