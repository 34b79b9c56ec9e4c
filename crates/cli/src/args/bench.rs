//! The flags of `bench`.

use super::{EngineArgs, ModelArgs};
use crate::bench::BenchShape;
use crate::load::{LoadGoodputArgs, LoadRunArgs};
use clap::{Args, Subcommand};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave bench engine --model ./Llama-3.2-1B
  cleave bench run --url http://localhost:8000 --workload short-long --rate 4 --duration 60s
  cleave bench goodput --url http://localhost:8000 --workload short-long \\
      --slo ttft=500ms,tpot=50ms")]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure the prefill and decode speed of the engine alone, without a server. On a processor
    /// the result includes the floor: the time that products and memory reads take at least,
    /// measured just before and after each sample.
    #[command(after_help = "Example:
  cleave synth --shape llama-160m --out /tmp/m && cleave bench engine --model /tmp/m --rounds 5")]
    Engine(Box<EngineBenchArgs>),
    /// Send load to a server at one rate, and measure the latencies at the client.
    Run(Box<LoadRunArgs>),
    /// Search for the highest rate at which a server meets its targets.
    Goodput(Box<LoadGoodputArgs>),
}

#[derive(Args, Debug)]
pub(crate) struct EngineBenchArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Shapes to measure, separated by commas: `prefill:TOKENS`, or `decode:SEQUENCESxCONTEXT`,
    /// such as `decode:8x1024`. If absent, a selection of both that suits the device.
    #[arg(
        long,
        value_name = "SHAPES",
        help_heading = "Measurement",
        value_delimiter = ','
    )]
    pub(crate) shapes: Vec<BenchShape>,
    /// Read shapes from standard input, one per line, and answer each with a line of JSON, for
    /// measurements that alternate with another program. The KV cache has the size of `--kv-cache`
    /// or, if absent, of free memory.
    #[arg(long, help_heading = "Measurement", conflicts_with = "shapes")]
    pub(crate) stdin: bool,
    /// Samples of each shape; medians and bests are printed.
    #[arg(long, value_name = "N", help_heading = "Measurement", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Print one JSON object instead of a table.
    #[arg(long, help_heading = "Measurement")]
    pub(crate) json: bool,
}
