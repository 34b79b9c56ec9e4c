//! The formats of calls, a row each.
//!
//! Owns: their marks and members, and the signs of them in chat templates. Never: reads an output.

use super::calls::{CallForm, CallFormat, NAMED_OBJECT, ObjectForm};
use super::named_call::{CallId, NamedForm};
use super::registry::{CallStyle, NamedRow};
use super::tagged_call::TaggedForm;

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
    form: CallForm::Tagged(DEEPSEEK_TAGGED),
    ..UNMARKED
};

const DEEPSEEK_TAGGED: TaggedForm = TaggedForm {
    name_end: "\">",
    key_begin: "<｜DSML｜parameter name=\"",
    key_end: "\">",
    value_begin: "",
    value_end: "</｜DSML｜parameter>",
    call_end: "</｜DSML｜invoke>",
    has_lines: false,
    text_attribute: "\" string=\"",
};

/// Calls of functions between tags, in lines of their own.
const FUNCTION_TAGS: CallFormat = CallFormat {
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
};

/// Calls as a list of JSON objects.
const OBJECT_LIST: CallFormat = CallFormat {
    separator: ",",
    has_list: true,
    writes_list: true,
    form: CallForm::Object(NAMED_OBJECT),
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
pub(super) const CALLS: &[NamedRow<CallStyle>] = &[
    NamedRow {
        names: &["openai"],
        signs: &["<|channel|>", "<|message|>"],
        format: CallStyle::Harmony,
    },
    // As V4, with a blank in front of each tag's name.
    NamedRow {
        names: &["deepseek_v41"],
        signs: &["｜DSML｜ calls>"],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<｜DSML｜ calls>",
            group_end: "</｜DSML｜ calls>",
            call_begin: "<｜DSML｜ invoke name=\"",
            form: CallForm::Tagged(TaggedForm {
                key_begin: "<｜DSML｜ parameter name=\"",
                value_end: "</｜DSML｜ parameter>",
                call_end: "</｜DSML｜ invoke>",
                ..DEEPSEEK_TAGGED
            }),
            ..DEEPSEEK_TAGS
        }),
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
        names: &["seed_oss"],
        signs: &["<seed:tool_call>"],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<seed:tool_call>",
            group_end: "</seed:tool_call>",
            ..FUNCTION_TAGS
        }),
    },
    NamedRow {
        names: &["qwen3_coder", "qwen3_xml"],
        signs: &["<function=", "<parameter="],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<tool_call>",
            group_end: "</tool_call>",
            ..FUNCTION_TAGS
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
            ..OBJECT_LIST
        }),
    },
    NamedRow {
        names: &["granite"],
        signs: &["<|tool_call|>"],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<|tool_call|>",
            ..OBJECT_LIST
        }),
    },
    // Templates of other formats have these marks too.
    NamedRow {
        names: &["hunyuan_a13b", "jamba"],
        signs: &[],
        format: CallStyle::Framed(&CallFormat {
            group_begin: "<tool_calls>",
            group_end: "</tool_calls>",
            ..OBJECT_LIST
        }),
    },
    NamedRow {
        names: &["longcat"],
        signs: &["<longcat_tool_call>"],
        format: CallStyle::Framed(&CallFormat {
            call_begin: "<longcat_tool_call>",
            call_end: "</longcat_tool_call>",
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
            form: CallForm::Object(ObjectForm {
                number: "tool_call_id",
                name: "tool_name",
                arguments: "parameters",
            }),
            ..OBJECT_LIST
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
