//! The flags of commands that use one model once: `generate`, `synth`.

use super::{EngineArgs, ModelArgs, SpeculationArgs};
use crate::model_location::ModelLocation;
use crate::values::{parse_temperature, parse_top_p};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave generate --prompt 'Ownership is'
  cleave generate --model ./Qwen3-0.6B --prompt 'Hello' --temperature 0.8 --seed 7 --max-tokens 64
  cleave generate --json --dtype f32 --prompt-tokens 1,2,3 --max-tokens 32

--json prints one object with prompt_tokens, tokens, text, finish_reason, logprobs and
first_top_logits, the 20 largest logits [id, logit] at the last prompt position.
No special token is added to the prompt.")]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    /// The text to continue.
    #[arg(
        long,
        value_name = "TEXT",
        help_heading = "Generation",
        required_unless_present = "prompt_tokens",
        conflicts_with = "prompt_tokens"
    )]
    pub(crate) prompt: Option<String>,
    /// Token ids to continue, separated by commas.
    #[arg(
        long,
        value_name = "IDS",
        help_heading = "Generation",
        value_delimiter = ','
    )]
    pub(crate) prompt_tokens: Option<Vec<u32>>,
    /// Limit of output tokens; the rest of the context if that is less.
    #[arg(long, value_name = "N", help_heading = "Generation", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// Sampling temperature; 0 always takes the most likely token.
    #[arg(long, value_name = "T", help_heading = "Generation", default_value_t = 0.0, value_parser = parse_temperature)]
    pub(crate) temperature: f32,
    /// Draw from the N most likely tokens; 0 draws from all.
    #[arg(
        long,
        value_name = "N",
        help_heading = "Generation",
        default_value_t = 0
    )]
    pub(crate) top_k: u32,
    /// Draw from the most likely tokens that together reach this probability.
    #[arg(long, value_name = "P", help_heading = "Generation", default_value_t = 1.0, value_parser = parse_top_p)]
    pub(crate) top_p: f32,
    /// Seed of the sampling: the same seed draws the same tokens.
    #[arg(
        long,
        value_name = "S",
        help_heading = "Generation",
        default_value_t = 0
    )]
    pub(crate) seed: u64,
    /// Continue after the end token.
    #[arg(long, help_heading = "Generation")]
    pub(crate) ignore_eos: bool,
    /// Print one JSON object instead of text.
    #[arg(long, help_heading = "Generation")]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave synth --shape llama-3.2-1b --out /tmp/llama-1b && cleave serve --model /tmp/llama-1b
  cleave synth --config ./Qwen3-8B/config.json --quantization int4 --out /tmp/qwen3-8b-int4
  cleave synth --model /tmp/llama-1b --quantization awq --out /tmp/llama-1b-awq")]
#[command(group(clap::ArgGroup::new("source").required(true)))]
pub(crate) struct SynthArgs {
    /// Shape of the model, whose weights are random; an unknown name lists all shapes.
    #[arg(long, value_name = "NAME", group = "source")]
    pub(crate) shape: Option<String>,
    /// The config.json of a model, whose weights are random. Its quantisation is not read.
    #[arg(long, value_name = "FILE", group = "source")]
    pub(crate) config: Option<PathBuf>,
    /// Checkpoint whose weights are quantised and written again, rounded to nearest. It is meant
    /// for measuring speed: quantisers that consider activations lose less quality.
    #[arg(
        long,
        value_name = "DIR|ORG/NAME[@REVISION]",
        group = "source",
        requires = "quantization"
    )]
    pub(crate) model: Option<ModelLocation>,
    /// Quantisation format of the new checkpoint.
    #[arg(long, value_enum)]
    pub(crate) quantization: Option<QuantizationArg>,
    /// Weights that share a scale, in layouts with groups; also the rows and columns of a block.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) group_size: u32,
    /// Folder to write; must be absent or empty.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Seed of the random weights: the same seed writes the same weights.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
}

/// Layout of the weights; see [`SynthArgs::quantization`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum QuantizationArg {
    /// compressed-tensors, eight-bit floats, a scale for each row.
    Fp8,
    /// Eight-bit floats, a scale for each block.
    Fp8Block,
    /// compressed-tensors, eight bits, a scale for each row.
    Int8,
    /// compressed-tensors, four bits, symmetric groups.
    Int4,
    /// Four bits, groups with zero points.
    Awq,
    /// Four bits, groups with zero points.
    Gptq,
    /// Eight bits, groups with zero points.
    GptqInt8,
    /// compressed-tensors, eight-bit floats, groups of 32 scaled by powers of two.
    Mxfp8,
    /// compressed-tensors, four-bit floats, groups of 32 scaled by powers of two.
    Mxfp4,
    /// compressed-tensors, four-bit floats, groups of 16 scaled by eight-bit floats.
    Nvfp4,
    /// modelopt, the same numbers.
    ModeloptNvfp4,
    /// modelopt, eight-bit floats, one scale.
    ModeloptFp8,
    /// Not quantised: every tensor in f16; quantised weights are expanded.
    F16,
    /// The same in f32.
    F32,
}
