//! The formats by name, and the choice by the chat template.
//!
//! Owns: the choice, and the marks of reasoning; those of calls are in `call_rows`. Never: reads an
//! output.

use super::call_rows::CALLS;
use super::calls::{CallForm, CallFormat, mark_parts};
use super::harmony;
use super::reasoning::ReasoningStart;
use std::str::FromStr;

/// The formats of a model's outputs.
#[derive(Clone, Copy, Debug, Default)]
pub struct OutputFormats {
    reasoning: Option<&'static ReasoningFormat>,
    calls: Option<&'static CallStyle>,
    reasoning_field: ReasoningField,
}

/// The field of a message that has the reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningField {
    /// `reasoning_content`, as DeepSeek's API, SGLang and others have it.
    #[default]
    ReasoningContent,
    /// `reasoning`, as vLLM has it.
    Reasoning,
}

impl ReasoningField {
    pub const NAMES: [&str; 2] = [Self::ReasoningContent.name(), Self::Reasoning.name()];

    pub const fn name(self) -> &'static str {
        match self {
            Self::ReasoningContent => "reasoning_content",
            Self::Reasoning => "reasoning",
        }
    }
}

impl FromStr for ReasoningField {
    type Err = UnknownParser;

    fn from_str(name: &str) -> Result<Self, UnknownParser> {
        let fields = [Self::ReasoningContent, Self::Reasoning];
        let found = fields.into_iter().find(|field| field.name() == name);
        found.ok_or_else(|| UnknownParser(Self::NAMES.join(", ")))
    }
}

/// Marks of the reasoning at the beginning of an output.
#[derive(Debug)]
pub(super) struct ReasoningFormat {
    pub(super) begin: &'static str,
    pub(super) end: &'static str,
}

/// How calls are read.
#[derive(Debug)]
pub(super) enum CallStyle {
    Framed(&'static CallFormat),
    /// Messages in channels, which have reasoning too.
    Harmony,
}

impl ReasoningFormat {
    /// Where an output of this prompt begins.
    pub(super) fn start_after(&self, prompt: &str) -> ReasoningStart {
        let prompt = prompt.trim_end();
        if prompt.ends_with(self.begin) {
            ReasoningStart::Open
        } else if prompt.ends_with(self.end) {
            ReasoningStart::Closed
        } else {
            ReasoningStart::Possible
        }
    }

    pub(super) fn marks(&self) -> impl Iterator<Item = &'static str> + use<> {
        [self.begin, self.end].into_iter().flat_map(mark_parts)
    }
}

impl CallStyle {
    pub(super) fn marks(&self) -> Box<dyn Iterator<Item = &'static str>> {
        match self {
            Self::Framed(format) => Box::new(format.marks()),
            Self::Harmony => Box::new(harmony::MARKS.into_iter()),
        }
    }

    pub(super) fn has_short_ids(&self) -> bool {
        // Mistral's.
        matches!(self, Self::Framed(format) if matches!(format.form, CallForm::ObjectOrNamed(_)))
    }
}

/// A row of the registry.
pub(super) struct NamedRow<T> {
    /// Names that users know, from vLLM.
    pub(super) names: &'static [&'static str],
    /// Texts that a chat template of the format has, all of them; none if no template tells.
    pub(super) signs: &'static [&'static str],
    pub(super) format: T,
}

impl OutputFormats {
    /// Chooses the formats that a chat template writes itself.
    pub(crate) fn of_template(template: &str) -> Self {
        fn chosen<T>(rows: &'static [NamedRow<T>], template: &str) -> Option<&'static T> {
            let fits = |row: &&NamedRow<T>| {
                let mut signs = row.signs.iter();
                !row.signs.is_empty() && signs.all(|sign| template.contains(sign))
            };
            rows.iter().find(fits).map(|row| &row.format)
        }
        let calls = chosen(CALLS, template);
        Self {
            // Channels have the reasoning in them.
            reasoning: chosen(REASONING, template)
                .filter(|_| !matches!(calls, Some(CallStyle::Harmony))),
            calls,
            reasoning_field: ReasoningField::default(),
        }
    }

    /// Reads reasoning in this format instead.
    pub fn with_reasoning(self, parser: ReasoningParser) -> Self {
        let reasoning = parser.0.map(|row| &REASONING[row].format);
        Self { reasoning, ..self }
    }

    /// Reads calls in this format instead.
    pub fn with_calls(self, parser: ToolCallParser) -> Self {
        let calls = parser.0.map(|row| &CALLS[row].format);
        Self { calls, ..self }
    }

    /// Gives reasoning to clients in this field.
    pub fn with_reasoning_field(self, reasoning_field: ReasoningField) -> Self {
        Self {
            reasoning_field,
            ..self
        }
    }

    /// The field of messages that has the reasoning.
    pub fn reasoning_field(&self) -> ReasoningField {
        self.reasoning_field
    }

    /// Whether calls are read.
    pub fn reads_calls(&self) -> bool {
        self.calls.is_some()
    }

    pub(super) fn reasoning(&self) -> Option<&'static ReasoningFormat> {
        self.reasoning
    }

    pub(super) fn calls(&self) -> Option<&'static CallStyle> {
        self.calls
    }
}

/// A format of reasoning by its name in vLLM, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasoningParser(Option<usize>);

/// A format of calls by its name in vLLM, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToolCallParser(Option<usize>);

/// A name that is no parser's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this name is not known; it may be {0}")]
pub struct UnknownParser(String);

impl ReasoningParser {
    /// Names that `FromStr` reads, for lists of a flag's values.
    pub fn names() -> impl Iterator<Item = &'static str> {
        names(REASONING)
    }
}

impl FromStr for ReasoningParser {
    type Err = UnknownParser;

    fn from_str(name: &str) -> Result<Self, UnknownParser> {
        row_named(REASONING, name).map(Self)
    }
}

impl ToolCallParser {
    /// Names that `FromStr` reads, for lists of a flag's values.
    pub fn names() -> impl Iterator<Item = &'static str> {
        names(CALLS)
    }
}

impl FromStr for ToolCallParser {
    type Err = UnknownParser;

    fn from_str(name: &str) -> Result<Self, UnknownParser> {
        row_named(CALLS, name).map(Self)
    }
}

/// Name of the absence of a parser.
const NONE: &str = "none";

fn names<T>(rows: &'static [NamedRow<T>]) -> impl Iterator<Item = &'static str> {
    let names = rows.iter().flat_map(|row| row.names);
    names.copied().chain([NONE])
}

fn row_named<T>(rows: &'static [NamedRow<T>], name: &str) -> Result<Option<usize>, UnknownParser> {
    let found = rows.iter().position(|row| row.names.contains(&name));
    if found.is_some() || name == NONE {
        return Ok(found);
    }
    Err(UnknownParser(names(rows).collect::<Vec<_>>().join(", ")))
}

const REASONING: &[NamedRow<ReasoningFormat>] = &[
    NamedRow {
        names: &["mistral"],
        signs: &["[THINK]", "[/THINK]"],
        format: ReasoningFormat {
            begin: "[THINK]",
            end: "[/THINK]",
        },
    },
    NamedRow {
        names: &["gemma4"],
        signs: &["<|channel>", "<channel|>"],
        format: ReasoningFormat {
            begin: "<|channel>thought",
            end: "<channel|>",
        },
    },
    NamedRow {
        names: &["cohere_command3"],
        signs: &["<|START_THINKING|>", "<|END_THINKING|>"],
        format: ReasoningFormat {
            begin: "<|START_THINKING|>",
            end: "<|END_THINKING|>",
        },
    },
    NamedRow {
        names: &["seed_oss"],
        signs: &["<seed:think>", "</seed:think>"],
        format: ReasoningFormat {
            begin: "<seed:think>",
            end: "</seed:think>",
        },
    },
    NamedRow {
        names: &[
            "qwen3",
            "deepseek_r1",
            "deepseek_v3",
            "deepseek_v4",
            "deepseek_v41",
            "glm45",
            "kimi_k2",
            "minimax_m2",
            "olmo3",
            "nemotron_v3",
            "step3",
        ],
        signs: &["</think>"],
        format: ReasoningFormat {
            begin: "<think>",
            end: "</think>",
        },
    },
];
