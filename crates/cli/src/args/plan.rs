//! The flags of `plan`.

use super::{EngineArgs, ModelArgs};
use crate::values::{SecondsArg, parse_seconds_or_zero};
use clap::{Args, Subcommand};

#[derive(Args, Debug)]
#[command(after_help = "Example:
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
