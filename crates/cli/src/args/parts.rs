//! The flags that put a worker together: hardware, a model, formats, degrees of parallelism.
//!
//! Owns: these flags. Never: reads a file. Invariant: hardware and a model are given together.

use super::engine::parse_share;
use clap::Args;
use cleave_planner::parts::{KvFormat, WeightFormat};

/// A worker from parts, in place of a profile.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Worker from parts")]
pub(crate) struct PartsArgs {
    /// Hardware of a worker, in place of `--profile`: a name of the catalogue (an unknown one lists
    /// all), or a file that `cleave plan fit` wrote.
    #[arg(
        long,
        value_name = "NAME|FILE",
        requires = "model",
        conflicts_with = "profile"
    )]
    pub(crate) hardware: Option<String>,
    /// Model on that hardware: a published name such as `llama-3.1-8b` (an unknown one lists all),
    /// a config.json, or a folder that has one. Its weights are not read.
    #[arg(long, value_name = "NAME|DIR|FILE", requires = "hardware")]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) placement: PlacementArgs,
}

/// How a model lies on devices, and the limits of its steps.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Worker from parts")]
pub(crate) struct PlacementArgs {
    /// Format of the projections: `bf16`, `fp8`, `int8`, `int4`, `mxfp4` or `nvfp4`.
    #[arg(long, value_name = "FORMAT", default_value_t = WeightFormat::Bf16)]
    pub(crate) quantization: WeightFormat,
    /// Format of experts; that of `--quantization` if absent.
    #[arg(long, value_name = "FORMAT")]
    pub(crate) expert_quantization: Option<WeightFormat>,
    /// Format of keys and values: `bf16` or `fp8`.
    #[arg(long, value_name = "FORMAT", default_value_t = KvFormat::Bf16)]
    pub(crate) kv_cache_dtype: KvFormat,
    /// Devices that divide each layer.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) tensor_parallel_size: u32,
    /// Groups of devices that divide the layers. A step passes them one after the other; steps of
    /// several batches at once are not reckoned with.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) pipeline_parallel_size: u32,
    /// Tokens in one step, which limits the prefill chunk.
    #[arg(long, value_name = "TOKENS", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) max_num_batched_tokens: u32,
    /// Sequences that one worker runs at once.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) max_num_seqs: u32,
    /// Share of a device's memory for weights, activations, keys and values together.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, value_parser = parse_share)]
    pub(crate) gpu_memory_utilization: f64,
}
