//! Calls as templates write them, and texts at random: the parts do not depend on the division.

use super::tests::{formats, read, tools};
use super::{AnswerPart, OutputReading, ToolCallParser};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Writes calls as templates of this format do.
fn rendered(format: &str, calls: &[(&str, Value)]) -> String {
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
        "llama3_json" => objects.join(";"),
        "mistral" => format!("[TOOL_CALLS][{}]", objects.join(", ")),
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
        "qwen3_coder" => {
            let calls = tagged(
                "<function=",
                ">\n",
                ["<parameter=", ">"],
                ["\n", "\n</parameter>"],
                "\n</function>",
            );
            format!("<tool_call>\n{calls}\n</tool_call>")
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

/// Calls that a reader found.
fn found(parts: &[AnswerPart]) -> Vec<(String, Value)> {
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

const RENDERED: [&str; 9] = [
    "gemma4",
    "hermes",
    "llama3_json",
    "mistral",
    "kimi_k2",
    "openai",
    "qwen3_coder",
    "minimax_m2",
    "glm45",
];

fn pieces_of<'a>(text: &'a str, cuts: &[usize]) -> Vec<&'a str> {
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
    #[test]
    fn a_rendered_call_is_read_back(
        format in prop::sample::select(&RENDERED[..]),
        city in "[a-z<>\"\\\\{} \n\u{e9}\u{1f600}]{0,12}",
        days: i32,
        count in 1usize..3,
        cuts in prop::collection::vec(0usize..9, 0..40),
    ) {
        let arguments = json!({"city": city, "days": days, "deep": {"a": [days, null, "x"]}});
        let calls: Vec<(&str, Value)> = vec![("weather", arguments); count];
        let output = rendered(format, &calls);
        let reading = OutputReading::new(&formats("none", format), "", tools()).unwrap();
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
