//! The flags of `plan`.

use super::{EngineArgs, ModelArgs};
use crate::values::{Seconds, parse_drain};
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
    /// How well this machine's steps are predicted: prices as a worker measures them at its start,
    /// refined by steps as they are while serving, judged on steps that were held out.
    Calibrate(PlanCalibrateArgs),
}

#[derive(Args, Debug)]
pub(crate) struct PlanCalibrateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Seconds that the first measurement takes, as `worker --calibrate` has it.
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(cleave_node::CALIBRATION), value_parser = parse_drain)]
    pub(crate) budget: Seconds,
    /// Draws the steps.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Steps held out; about three times as many are run.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) steps: u32,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}
