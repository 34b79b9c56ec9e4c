//! The formats by name, and the choice by the chat template.
//!
//! Owns: each format's marks, a row each. Never: reads an output.

use super::calls::{CallForm, CallFormat, NAMED_OBJECT, ObjectForm, mark_parts};
use super::harmony;
use super::named_call::{CallId, NamedForm};
use super::reasoning::ReasoningStart;
use super::tagged_call::TaggedForm;
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
struct NamedRow<T> {
    /// Names that users know, from vLLM.
    names: &'static [&'static str],
    /// Texts that a chat template of the format has, all of them; none if no template tells.
    signs: &'static [&'static str],
    format: T,
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

/// A format without any mark.
const UNMARKED: CallFormat = CallFormat {
    group_begin: "",
    group_end: "",
    call_begin: "",
    call_end: "",
    separator: "",
    has_list: false,
    writes_list: false,
    opens_output: false,
    form: CallForm::Pythonic,
};

/// DeepSeek's calls from V3.2 on: tags that its prefix tells from a text's own.
const DEEPSEEK_TAGS: CallFormat = CallFormat {
    call_begin: "<｜DSML｜invoke name=\"",
    form: CallForm::Tagged(TaggedForm {
        name_end: "\">",
        key_begin: "<｜DSML｜parameter name=\"",
        key_end: "\">",
        value_begin: "",
        value_end: "</｜DSML｜parameter>",
        call_end: "</｜DSML｜invoke>",
        has_lines: false,
        text_attribute: "\" string=\"",
    }),
    ..UNMARKED
};

/// DeepSeek's calls in V3 and V3.1.
const DEEPSEEK_MARKS: CallFormat = CallFormat {
    group_begin: "<｜tool▁calls▁begin｜>",
    group_end: "<｜tool▁calls▁end｜>",
    call_begin: "<｜tool▁call▁begin｜>",
    ..UNMARKED
};

/// The first row whose signs a template has is chosen, so a row whose signs are in templates of
/// others comes after these.
const CALLS: &[NamedRow<CallStyle>] = &[
    NamedRow {
        names: &["openai"],
        signs: &["<|channel|>", "<|message|>"],
        format: CallStyle::Harmony,
    },
    NamedRow {
        names: &["deepseek_v4"],
        signs: &["｜DSML｜", "tool_calls>"],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<｜DSML｜tool_calls>",
            group_end: "</｜DSML｜tool_calls>",
            ..DEEPSEEK_TAGS
        }),
    },
    NamedRow {
        names: &["deepseek_v32"],
        signs: &["｜DSML｜", "function_calls>"],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<｜DSML｜function_calls>",
            group_end: "</｜DSML｜function_calls>",
            ..DEEPSEEK_TAGS
        }),
    },
    NamedRow {
        names: &["deepseek_v3"],
        signs: &["<｜tool▁calls▁begin｜>", "```json"],
        format: CallStyle::Framed(&CallFormat {
            call_end: "```<｜tool▁call▁end｜>",
            form: CallForm::Named(NamedForm {
                separator: "\n```json\n",
                prefix: "function<｜tool▁sep｜>",
                id: CallId::Absent,
            }),
            ..DEEPSEEK_MARKS
        }),
    },
    NamedRow {
        names: &["deepseek_v31"],
        signs: &["<｜tool▁calls▁begin｜>"],
        format: CallStyle::Framed(&CallFormat {
            call_end: "<｜tool▁call▁end｜>",
            form: CallForm::Named(NamedForm {
                separator: "<｜tool▁sep｜>",
                prefix: "",
                id: CallId::Absent,
            }),
            ..DEEPSEEK_MARKS
        }),
    },
    NamedRow {
        names: &["gemma4"],
        signs: &["<|tool_call>", "<tool_call|>"],
        format: CallStyle::Framed(&CallFormat {
            call_begin: "<|tool_call>",
            call_end: "<tool_call|>",
            form: CallForm::Escaped,
            ..UNMARKED
        }),
    },
    NamedRow {
        names: &["kimi_k2"],
        signs: &["<|tool_calls_section_begin|>"],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<|tool_calls_section_begin|>",
            group_end: "<|tool_calls_section_end|>",
            call_begin: "<|tool_call_begin|>",
            call_end: "<|tool_call_end|>",
            form: CallForm::Named(NamedForm {
                separator: "<|tool_call_argument_begin|>",
                prefix: "functions.",
                id: CallId::Whole,
            }),
            ..UNMARKED
        }),
    },
    NamedRow {
        names: &["minimax_m2"],
        signs: &["<minimax:tool_call>"],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<minimax:tool_call>",
            group_end: "</minimax:tool_call>",
            call_begin: "<invoke name=\"",
            form: CallForm::Tagged(TaggedForm {
                name_end: "\">",
                key_begin: "<parameter name=\"",
                key_end: "\">",
                value_begin: "",
                value_end: "</parameter>",
                call_end: "</invoke>",
                has_lines: false,
                text_attribute: "",
            }),
            ..UNMARKED
        }),
    },
    NamedRow {
        names: &["glm45", "glm47"],
        signs: &["<arg_key>", "<arg_value>"],
        format: CallStyle::Framed(&CallFormat {
            call_begin: "<tool_call>",
            form: CallForm::Tagged(TaggedForm {
                name_end: "",
                key_begin: "<arg_key>",
                key_end: "</arg_key>",
                value_begin: "<arg_value>",
                value_end: "</arg_value>",
                call_end: "</tool_call>",
                has_lines: false,
                text_attribute: "",
            }),
            ..UNMARKED
        }),
    },
    NamedRow {
        names: &["qwen3_coder", "qwen3_xml"],
        signs: &["<function=", "<parameter="],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<tool_call>",
            group_end: "</tool_call>",
            call_begin: "<function=",
            form: CallForm::Tagged(TaggedForm {
                name_end: ">",
                key_begin: "<parameter=",
                key_end: ">",
                value_begin: "",
                value_end: "</parameter>",
                call_end: "</function>",
                has_lines: true,
                text_attribute: "",
            }),
            ..UNMARKED
        }),
    },
    NamedRow {
        names: &["mistral"],
        signs: &["[TOOL_CALLS]"],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "[TOOL_CALLS]",
            separator: ",",
            has_list: true,
            writes_list: true,
            form: CallForm::ObjectOrNamed(NamedForm {
                separator: "[ARGS]",
                prefix: "",
                id: CallId::Behind("[CALL_ID]"),
            }),
            ..UNMARKED
        }),
    },
    NamedRow {
        names: &["nemotron_json"],
        signs: &["<TOOLCALL>"],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<TOOLCALL>",
            group_end: "</TOOLCALL>",
            separator: ",",
            has_list: true,
            writes_list: true,
            form: CallForm::Object(NAMED_OBJECT),
            ..UNMARKED
        }),
    },
    // Models that write an answer between marks too, which are special tokens.
    NamedRow {
        names: &["cohere_command3"],
        signs: &["<|START_ACTION|>", "<|START_RESPONSE|>"],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<|START_ACTION|>",
            group_end: "<|END_ACTION|>",
            separator: ",",
            has_list: true,
            writes_list: true,
            form: CallForm::Object(ObjectForm {
                number: "tool_call_id",
                name: "tool_name",
                arguments: "parameters",
            }),
            ..UNMARKED
        }),
    },
    NamedRow {
        names: &["step3"],
        signs: &["<steptml:invoke name="],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<｜tool_calls_begin｜>",
            group_end: "<｜tool_calls_end｜>",
            call_begin: "<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"",
            call_end: "<｜tool_call_end｜>",
            form: CallForm::Tagged(TaggedForm {
                name_end: "\">",
                key_begin: "<steptml:parameter name=\"",
                key_end: "\">",
                value_begin: "",
                value_end: "</steptml:parameter>",
                call_end: "</steptml:invoke>",
                has_lines: false,
                text_attribute: "",
            }),
            ..UNMARKED
        }),
    },
    NamedRow {
        names: &["hermes"],
        signs: &["<tool_call>"],
        format: CallStyle::Framed(&CallFormat {
            call_begin: "<tool_call>",
            call_end: "</tool_call>",
            form: CallForm::Object(NAMED_OBJECT),
            ..UNMARKED
        }),
    },
    NamedRow {
        names: &["llama3_json", "llama4_json"],
        signs: &["{\"name\": function name, \"parameters\":"],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<|python_tag|>",
            separator: ";",
            has_list: true,
            opens_output: true,
            form: CallForm::Object(ObjectForm {
                arguments: "parameters",
                ..NAMED_OBJECT
            }),
            ..UNMARKED
        }),
    },
    NamedRow {
        names: &["pythonic", "llama4_pythonic"],
        signs: &["func_name1(params_name1"],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<|python_start|>",
            group_end: "<|python_end|>",
            separator: ",",
            has_list: true,
            writes_list: true,
            opens_output: true,
            form: CallForm::Pythonic,
            ..UNMARKED
        }),
    },
];
