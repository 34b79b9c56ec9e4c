//! The flags of `plan`.

use super::{EngineArgs, ModelArgs, PlacementArgs};
use crate::values::{SecondsArg, parse_seconds_or_zero};
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave plan prices --hardware h100 --model llama-3.1-70b --tensor-parallel-size 4
  cleave plan calibrate --model ./Llama-3.2-1B")]
pub(crate) struct PlanArgs {
    #[command(subcommand)]
    pub(crate) command: PlanCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PlanCommand {
    /// Measure how well step times are predicted on this machine: with the prices that a worker
    /// measures at its start, and with prices refined by further steps, both judged on steps that
    /// were held out.
    Calibrate(PlanCalibrateArgs),
    /// Compute the step times and the KV capacity of a worker from hardware, a model and formats.
    Prices(PlanPricesArgs),
    /// Fit the shares of its peaks that hardware reaches to half of the given measurements, and
    /// judge them on the other half, by phase and by size.
    Fit(PlanFitArgs),
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave plan prices --hardware h100 --model llama-3.1-70b --tensor-parallel-size 4
  cleave plan prices --hardware h200 --model gpt-oss-120b --expert-quantization mxfp4 \\
      --json > profile.json; cleave serve --engine mock --mock-profile profile.json")]
pub(crate) struct PlanPricesArgs {
    /// Hardware of the worker: a name of the catalogue (an unknown one lists all), or a file that
    /// `cleave plan fit` wrote.
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) hardware: String,
    /// Model on that hardware: a published name such as `llama-3.1-8b` (an unknown one lists all),
    /// a config.json, or a folder that has one. Its weights are not read.
    #[arg(long, value_name = "NAME|DIR|FILE")]
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) placement: PlacementArgs,
    /// Print the profile as JSON, as `--mock-profile` reads it.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave bench engine --model ./Llama-3.2-1B --json > steps.json
  cleave plan fit --hardware h100 --model llama-3.2-1b --samples steps.json --out mine.json
  cleave sim goodput --hardware mine.json --model llama-3.1-8b --devices 4 \\
      --workload long-short --ttft 1s --tpot 40ms")]
pub(crate) struct PlanFitArgs {
    /// Hardware that was measured: a name of the catalogue, or a file, whose shares are the first
    /// guess.
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) hardware: String,
    /// Tables of `cleave bench engine --json`, or reports of the GPU lab.
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    pub(crate) samples: Vec<PathBuf>,
    /// Model of the tables of `cleave bench engine`, as for `cleave plan prices`; a report names
    /// its models.
    #[arg(long, value_name = "NAME|DIR|FILE")]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) placement: PlacementArgs,
    /// Name of the fitted hardware; that of `--hardware` if absent.
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// File that gets the fitted hardware, for `--hardware`.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave plan calibrate --model ./Llama-3.2-1B")]
pub(crate) struct PlanCalibrateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Seconds of the first measurement, as in `worker --calibrate`.
    #[arg(long, value_name = "SECONDS", help_heading = "Measurement", default_value_t = SecondsArg(cleave_worker::CALIBRATION), value_parser = parse_seconds_or_zero)]
    pub(crate) budget: SecondsArg,
    /// Seed of the random steps.
    #[arg(
        long,
        value_name = "N",
        help_heading = "Measurement",
        default_value_t = 1
    )]
    pub(crate) seed: u64,
    /// Number of steps held out; about three times as many run.
    #[arg(long, value_name = "N", help_heading = "Measurement", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) steps: u32,
    /// Print one JSON object instead of a table.
    #[arg(long, help_heading = "Measurement")]
    pub(crate) json: bool,
}
