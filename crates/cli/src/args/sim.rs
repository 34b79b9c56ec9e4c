//! The flags of what runs the decision code without a fleet: `sim`, `replay`.

use super::{GoodputArgs, ScaleArgs};
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave sim chaos --seeds 1000
  cleave sim goodput --devices 8 --workload long-short --rate 60 --ttft 500ms --tpot 40ms
  cleave sim scale --policy policy.yaml --workload short-long --rate 60 --duration 20m --curve 0s=0.1,10m=1,20m=0.1")]
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
    /// How much a fleet of real devices, as prices, serves within its promises, and how much others would.
    Goodput(Box<GoodputArgs>),
    /// How a fleet of real devices, as prices, grows and shrinks with a load that changes.
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
