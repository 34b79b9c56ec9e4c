//! The flags of `chat`.
//!
//! Owns: these flags. Never: reads a file.

use super::{EngineArgs, ModelArgs, SpeculationArgs};
use crate::values::parse_temperature;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave chat                                     the bundled checkpoint, in this process
  cleave chat --model ./Qwen3-0.6B --reasoning-effort none --system 'Answer in one sentence.'
  cleave chat --url http://127.0.0.1:8000         a running server, or any other of OpenAI's API
  cleave chat --tools tools.json                  asks for the result of each call
  printf 'What is a slice?\\nAnd a vector?\\n' | cleave chat --url http://127.0.0.1:8000

Commands: /help lists them. A line that ends with \\ goes on in the next one. Ctrl-C stops an
answer, and twice where none is open ends the program, as Ctrl-D does.

Without a terminal each line of standard input is a message, or the result of a call, and standard
output has the answers alone: no colours, no reasoning, and calls as one line of JSON. The exit
status is 0 at the end of the input, 1 at the first answer that failed (or is no JSON, with
--json-schema), and 130 after Ctrl-C.")]
pub(crate) struct ChatArgs {
    /// URL of a server of OpenAI's API. With it the flags of model, engine and speculation have no
    /// effect, but for `--served-model-name`, the model that is asked for; without it the model
    /// runs in this process, at a free port of this machine.
    #[arg(long, value_name = "URL", help_heading = "Server")]
    pub(crate) url: Option<String>,
    /// Certificate authorities, in PEM, that an https:// server must be signed by; the system's if
    /// absent.
    #[arg(long, value_name = "FILE", help_heading = "Server", requires = "url")]
    pub(crate) cacert: Option<PathBuf>,
    /// API key of the server, sent as `Authorization: Bearer …`. Set it in the environment, where
    /// other users cannot see it.
    #[arg(
        long,
        value_name = "KEY",
        help_heading = "Server",
        env = "OPENAI_API_KEY"
    )]
    pub(crate) api_key: Option<String>,
    /// SLO class of the requests.
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    pub(crate) slo_class: Option<String>,
    /// Instructions before the conversation, its system prompt.
    #[arg(long, value_name = "TEXT", help_heading = "Conversation")]
    pub(crate) system: Option<String>,
    /// Sampling temperature; the model's own if absent.
    #[arg(long, value_name = "T", help_heading = "Conversation", value_parser = parse_temperature)]
    pub(crate) temperature: Option<f32>,
    /// Limit of output tokens of an answer; the rest of the context if absent.
    #[arg(long, value_name = "N", help_heading = "Conversation", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: Option<u32>,
    /// Effort of reasoning; `none` switches it off where the model's template can. The template's
    /// own choice if absent.
    #[arg(long, value_enum, value_name = "EFFORT", help_heading = "Conversation")]
    pub(crate) reasoning_effort: Option<ReasoningEffortArg>,
    /// File of tools that the model may call: a JSON list of functions, or of OpenAI's tools.
    #[arg(long, value_name = "FILE", help_heading = "Conversation")]
    pub(crate) tools: Option<PathBuf>,
    /// File of a JSON Schema that each answer matches.
    #[arg(long, value_name = "FILE", help_heading = "Conversation")]
    pub(crate) json_schema: Option<PathBuf>,
    /// Show how long the model reasoned, and not its reasoning.
    #[arg(long, help_heading = "Conversation")]
    pub(crate) hide_reasoning: bool,
    /// Print a line about time and tokens after each answer, to standard error; in a terminal it is
    /// printed anyway, until /timing.
    #[arg(long, help_heading = "Conversation")]
    pub(crate) timing: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
}

/// Effort of reasoning; see [`ChatArgs::reasoning_effort`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReasoningEffortArg {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

impl ReasoningEffortArg {
    /// The value of the request's field.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Minimal => "minimal",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::Xhigh => "xhigh",
            Self::Max => "max",
        }
    }
}
