//! Calls as templates write them, and texts at random: the parts do not depend on the division.

use super::tests::{formats, read, tools};
use super::{AnswerPart, OutputReading, ToolCallParser};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Writes calls as templates of this format do.
pub(super) fn rendered(format: &str, calls: &[(&str, Value)]) -> String {
    let tagged = |begin: &str, name_end: &str, key: [&str; 2], value: [&str; 2], end: &str| {
        let call = |(name, arguments): &(&str, Value)| {
            let arguments = arguments.as_object().unwrap().iter().map(|(name, json)| {
                let text = json
                    .as_str()
                    .map_or_else(|| json.to_string(), str::to_owned);
                format!("{}{name}{}{}{text}{}", key[0], key[1], value[0], value[1])
            });
            let arguments: Vec<String> = arguments.collect();
            format!("{begin}{name}{name_end}{}{end}", arguments.join("\n"))
        };
        calls.iter().map(call).collect::<Vec<_>>().join("\n")
    };
    let object = |(name, arguments): &(&str, Value)| {
        json!({"name": name, "arguments": arguments}).to_string()
    };
    let objects: Vec<String> = calls.iter().map(object).collect();
    match format {
        "hermes" => objects
            .iter()
            .map(|call| format!("<tool_call>\n{call}\n</tool_call>\n"))
            .collect(),
        "llama3_json" | "llama4_json" => {
            let renamed = |call: &String| call.replacen("\"arguments\":", "\"parameters\":", 1);
            let objects: Vec<String> = objects.iter().map(renamed).collect();
            objects.join("; ")
        }
        "pythonic" | "llama4_pythonic" => {
            let call = |(name, arguments): &(&str, Value)| {
                let arguments = arguments.as_object().unwrap().iter();
                let arguments = arguments.map(|(name, value)| format!("{name}={}", python(value)));
                format!("{name}({})", arguments.collect::<Vec<_>>().join(", "))
            };
            let calls: Vec<String> = calls.iter().map(call).collect();
            format!("[{}]", calls.join(", "))
        }
        "deepseek_v3" => {
            let call = |(name, arguments): &(&str, Value)| {
                format!(
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
                )
            };
            let calls: Vec<String> = calls.iter().map(call).collect();
            format!(
                "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
                calls.join("\n")
            )
        }
        "deepseek_v31" => {
            let call = |(name, arguments): &(&str, Value)| {
                format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
            };
            let calls: String = calls.iter().map(call).collect();
            format!("<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>")
        }
        "deepseek_v32" | "deepseek_v4" | "deepseek_v41" => {
            let blank = if format == "deepseek_v41" { " " } else { "" };
            let call = |(name, arguments): &(&str, Value)| {
                let arguments = arguments.as_object().unwrap().iter().map(|(name, json)| {
                    let text = json.as_str().map_or_else(|| json.to_string(), str::to_owned);
                    let is_text = json.is_string();
                    format!("<｜DSML｜{blank}parameter name=\"{name}\" string=\"{is_text}\">{text}</｜DSML｜{blank}parameter>\n")
                });
                let arguments: String = arguments.collect();
                format!(
                    "<｜DSML｜{blank}invoke name=\"{name}\">\n{arguments}</｜DSML｜{blank}invoke>\n"
                )
            };
            let calls: String = calls.iter().map(call).collect();
            let group = match format {
                "deepseek_v4" => "tool_calls",
                "deepseek_v41" => " calls",
                _ => "function_calls",
            };
            format!("<｜DSML｜{group}>\n{calls}</｜DSML｜{group}>")
        }
        "mistral" => format!("[TOOL_CALLS][{}]", objects.join(", ")),
        "granite" => format!("<|tool_call|>[{}]", objects.join(", ")),
        "hunyuan_a13b" | "jamba" => format!("<tool_calls>[{}]</tool_calls>", objects.join(", ")),
        "longcat" => objects
            .iter()
            .map(|call| format!("<longcat_tool_call>\n{call}\n</longcat_tool_call>\n"))
            .collect(),
        "nemotron_json" => format!("<TOOLCALL>[{}]</TOOLCALL>", objects.join(", ")),
        "cohere_command3" => {
            let call = |(number, (name, arguments)): (usize, &(&str, Value))| {
                let number = number.to_string();
                json!({"tool_call_id": number, "tool_name": name, "parameters": arguments})
                    .to_string()
            };
            let calls: Vec<String> = calls.iter().enumerate().map(call).collect();
            let calls = calls.join(",\n    ");
            format!("<|START_ACTION|>[\n    {calls}\n]<|END_ACTION|>")
        }
        "step3" => {
            let calls = tagged(
                "<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"",
                "\">",
                ["<steptml:parameter name=\"", "\">"],
                ["", "</steptml:parameter>"],
                "</steptml:invoke><｜tool_call_end｜>",
            );
            format!("<｜tool_calls_begin｜>{calls}<｜tool_calls_end｜>")
        }
        "kimi_k2" => {
            let call = |(name, arguments): &(&str, Value)| {
                format!(
                    "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
                )
            };
            let calls: String = calls.iter().map(call).collect();
            format!("<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>")
        }
        "gemma4" => {
            let call = |(name, arguments): &(&str, Value)| {
                format!("<|tool_call>call:{name}{}<tool_call|>", escaped(arguments))
            };
            calls.iter().map(call).collect()
        }
        "openai" => {
            let call = |(name, arguments): &(&str, Value)| {
                format!("<|channel|>commentary to=functions.{name}<|message|>{arguments}<|call|>")
            };
            calls.iter().map(call).collect()
        }
        "qwen3_coder" | "qwen3_xml" | "seed_oss" => {
            let calls = tagged(
                "<function=",
                ">\n",
                ["<parameter=", ">"],
                ["\n", "\n</parameter>"],
                "\n</function>",
            );
            let group = if format == "seed_oss" {
                "seed:tool_call"
            } else {
                "tool_call"
            };
            format!("<{group}>\n{calls}\n</{group}>")
        }
        "minimax_m2" => {
            let calls = tagged(
                "<invoke name=\"",
                "\">",
                ["<parameter name=\"", "\">"],
                ["", "</parameter>"],
                "</invoke>",
            );
            format!("<minimax:tool_call>{calls}</minimax:tool_call>")
        }
        "glm47" => tagged(
            "<tool_call>",
            "",
            ["<arg_key>", "</arg_key>"],
            ["<arg_value>", "</arg_value>"],
            "</tool_call>",
        ),
        "glm45" => tagged(
            "<tool_call>",
            "\n",
            ["<arg_key>", "</arg_key>"],
            ["<arg_value>", "</arg_value>"],
            "</tool_call>",
        ),
        _ => unreachable!("no such format here"),
    }
}

/// Writes a value as Gemma's templates do.
fn escaped(value: &Value) -> String {
    match value {
        Value::String(text) => format!("<|\"|>{text}<|\"|>"),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(escaped).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(members) => {
            let member = |(name, value)| format!("{name}:{}", escaped(value));
            let members: Vec<String> = members.iter().map(member).collect();
            format!("{{{}}}", members.join(","))
        }
        other => other.to_string(),
    }
}

/// Writes a value as a literal of Python.
fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(python).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(members) => {
            let member = |(name, value)| format!("{}: {}", json!(name), python(value));
            let members: Vec<String> = members.iter().map(member).collect();
            format!("{{{}}}", members.join(", "))
        }
        other => other.to_string(),
    }
}

/// Calls that a reader found.
pub(super) fn found(parts: &[AnswerPart]) -> Vec<(String, Value)> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for part in parts {
        match part {
            AnswerPart::CallBegin { name, .. } => calls.push((name.clone(), String::new())),
            AnswerPart::CallArguments(text) => calls.last_mut().unwrap().1.push_str(text),
            AnswerPart::Text(_) | AnswerPart::Reasoning(_) | AnswerPart::CallEnd => {}
        }
    }
    let json = |(name, text): (String, String)| (name, serde_json::from_str(&text).unwrap());
    calls.into_iter().map(json).collect()
}

/// Names of all formats.
pub(super) fn names() -> Vec<&'static str> {
    ToolCallParser::names()
        .filter(|name| *name != "none")
        .collect()
}

/// Texts that stand in strings: of every script, and parts of every format.
fn texts() -> impl Strategy<Value = String> {
    let words = prop::sample::select(vec![
        "\"",
        "\\",
        "'",
        "\n",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ", ",
        ": ",
        "</",
        "<",
        ">",
        "|",
        "`",
        "\u{e9}",
        "\u{1f600}",
        "e\u{301}",
        "\u{4f60}",
        "\u{2028}",
        "null",
        "true",
        "1e5",
        "<tool_call>",
        "</tool_call>",
        "<function=weather>",
        "</parameter",
        "</parameter>",
        "</arg_value>",
        "<arg_key>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "</think>",
        "```",
        "weather(",
        "\u{0}",
    ]);
    let words = prop::collection::vec(words, 0..6).prop_map(|words| words.concat());
    prop_oneof![words, "[a-z ]{0,12}", "\\PC{0,8}"]
}

/// Values of every kind and depth.
fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        // Their texts are read back exactly.
        any::<i16>().prop_map(|number| json!(f64::from(number) / 4.0)),
        texts().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        let keys = prop_oneof!["[a-z_]{1,6}", "[a-z]{0,2}"];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((keys, inner), 0..4)
                .prop_map(|members| members.into_iter().collect()),
        ]
    })
}

/// Arguments of the tools, of the kinds that their schema names.
pub(super) fn arguments() -> impl Strategy<Value = Value> {
    let note = prop_oneof![Just(Value::Null), texts().prop_map(Value::from)];
    let objects = prop::collection::vec(("[a-z_]{1,6}", values()), 0..4);
    let objects = objects.prop_map(|members| members.into_iter().collect::<Value>());
    let members = (
        prop::option::of(texts().prop_map(Value::from)),
        prop::option::of(any::<i64>().prop_map(Value::from)),
        prop::option::of(note),
        prop::option::of(objects),
    );
    members.prop_map(|(city, days, note, deep)| {
        let members = [
            ("city", city),
            ("days", days),
            ("note", note),
            ("deep", deep),
        ];
        let given = members
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)));
        given
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    })
}

/// Whether a text stands in a value.
fn has_text(value: &Value, is_found: &dyn Fn(&str) -> bool) -> bool {
    match value {
        Value::String(text) => is_found(text),
        Value::Array(items) => items.iter().any(|item| has_text(item, is_found)),
        Value::Object(members) => members
            .iter()
            .any(|(name, value)| is_found(name) || has_text(value, is_found)),
        _ => false,
    }
}

/// Whether a format can write these arguments at all: it writes strings without quotes, so that
/// its own marks end them.
pub(super) fn is_writable(format: &str, reading: &OutputReading, arguments: &Value) -> bool {
    let marks: Vec<&str> = reading.marks().filter(|mark| mark.len() > 1).collect();
    let has_mark = |text: &str| marks.iter().any(|mark| text.contains(mark));
    let is_null = |text: &str| text.trim() == "null";
    let has_key = |name: &str| name.is_empty();
    match format {
        // A note that says null.
        "qwen3_coder" | "qwen3_xml" | "seed_oss" | "minimax_m2" | "glm45" | "glm47" | "step3" => {
            !has_text(arguments, &has_mark) && !has_text(&arguments["note"], &is_null)
        }
        // Keys have no quotes.
        "gemma4" => !has_text(arguments, &has_mark) && !has_text(arguments, &has_key),
        _ => !has_text(arguments, &has_mark),
    }
}

pub(super) fn pieces_of<'a>(text: &'a str, cuts: &[usize]) -> Vec<&'a str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    for cut in cuts {
        let at = rest.floor_char_boundary(*cut);
        let (piece, more) = rest.split_at(at);
        pieces.push(piece);
        rest = more;
    }
    pieces.push(rest);
    pieces
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_rendered_call_is_read_back(
        format in prop::sample::select(names()),
        arguments in prop::collection::vec(arguments(), 1..4),
        cuts in prop::collection::vec(0usize..9, 0..40),
    ) {
        let reading = OutputReading::new(&formats("none", format), "", tools()).unwrap();
        prop_assume!(arguments.iter().all(|arguments| is_writable(format, &reading, arguments)));
        let tools = ["weather", "time"].into_iter().cycle();
        let calls: Vec<(&str, Value)> = tools.zip(arguments).collect();
        let output = rendered(format, &calls);
        let parts = read(&reading, &pieces_of(&output, &cuts));
        let calls: Vec<(String, Value)> = calls.into_iter().map(|(name, json)| (name.to_owned(), json)).collect();
        prop_assert_eq!(found(&parts), calls, "{}", output);
    }

    #[test]
    fn no_division_changes_the_parts(
        format in prop::sample::select(ToolCallParser::names().filter(|name| *name != "none").collect::<Vec<_>>()),
        words in prop::collection::vec(prop::sample::select(vec![
            "<tool_call>", "</tool_call>", "{\"name\": \"time\", \"arguments\": {", "}", "\"", "<function=", "time", ">",
            "<parameter=city>", "</parameter>", "</function>", "[TOOL_CALLS]", "[", "]", "[ARGS]", "{}", ";", ",", " ", "\n",
            "<|channel|>", "<|message|>", "analysis", "to=functions.time", "<think>", "</think>", "x", "<|python_tag|>",
            "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "time(", "city='", "')",
            "<|tool_call>", "<tool_call|>", "call:time{", "<|\"|>", "a:",
        ]), 0..14),
        cuts in prop::collection::vec(0usize..7, 0..60),
    ) {
        let output = words.concat();
        let reading = OutputReading::new(&formats("qwen3", format), "", tools()).unwrap();
        let whole = read(&reading, &[&output]);
        prop_assert_eq!(read(&reading, &pieces_of(&output, &cuts)), whole);
    }
}
