//! The flags of `bench`.

use super::{EngineArgs, ModelArgs};
use crate::bench::Shape;
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
    /// Prefill and decode speed of the engine alone, without a server; on a processor beside the least that its products
    /// and its memory would take, measured just before and after each sample.
    #[command(after_help = "Example:
  cleave synth --shape llama-160m --out /tmp/m && cleave bench engine --model /tmp/m --rounds 5")]
    Engine(Box<EngineBenchArgs>),
    /// Load on a server at one rate: what its users feel.
    Run(Box<RunArgs>),
    /// The highest rate at which a server keeps its targets.
    Goodput(Box<GoodputArgs>),
}

#[derive(Args, Debug)]
pub(crate) struct EngineBenchArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// What to measure, with commas: `prefill:TOKENS`, or `decode:SEQUENCESxCONTEXT`, such as
    /// `decode:8x1024`. If absent, some of both that suit the device.
    #[arg(long, value_name = "SHAPES", value_delimiter = ',')]
    pub(crate) shapes: Vec<Shape>,
    /// Take shapes from standard input, one a line, and answer each with a line of JSON: to measure by
    /// turns with something else. The KV cache is then as large as `--kv-cache` or free memory says.
    #[arg(long, conflicts_with = "shapes")]
    pub(crate) stdin: bool,
    /// Rounds of each measurement; medians and bests are printed.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}
