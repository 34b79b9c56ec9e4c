//! The flags of `bench`.

use super::{EngineArgs, ModelArgs};
use crate::load::{GoodputArgs, RunArgs};
use clap::{Args, Subcommand};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave bench engine --model ./Llama-3.2-1B
  cleave bench run --url http://localhost:8000 --workload short-long --rate 4 --duration 60s
  cleave bench goodput --url http://localhost:8000 --workload short-long --slo ttft=500ms,tpot=50ms")]
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
    /// Load on a server at one rate: what its users feel.
    Run(Box<RunArgs>),
    /// The highest rate at which a server keeps its targets.
    Goodput(Box<GoodputArgs>),
}
