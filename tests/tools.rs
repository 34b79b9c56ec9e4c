//! Tool calls and reasoning of real processes: they are valid, and no path changes a byte of them.
//!
//! The model is a random one, so that only the grammars make its outputs calls.

use crate::harness::{CleaveProcess, HttpClient};
use crate::serving::{AskedStreams, GUESSES, ServingFleet, fleet_of_model, serve};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

const CHAT: &str = "/v1/chat/completions";

/// A checkpoint with Qwen3's template and tokens, in a folder of its own, with room for tools in
/// its context.
pub(crate) fn model() -> TempDir {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/qwen3");
    let folder = tempfile::tempdir().expect("a folder");
    for file in fs::read_dir(&from).expect("a checkpoint") {
        let path = file.expect("a file").path();
        let name = path.file_name().expect("a name");
        fs::copy(&path, folder.path().join(name)).expect("a copy");
    }
    let config = folder.path().join("config.json");
    let text = fs::read_to_string(&config).expect("a text");
    let (short, long) = (
        "\"max_position_embeddings\": 512",
        "\"max_position_embeddings\": 4096",
    );
    assert!(text.contains(short));
    fs::write(&config, text.replace(short, long)).expect("a file");
    // Other checkpoints of the family open the reasoning themselves.
    let template = folder.path().join("chat_template.jinja");
    let text = fs::read_to_string(&template).expect("a text");
    let closing = r"{{- '<think>\n\n</think>\n\n' }}";
    assert!(text.contains(closing));
    let opening = r"{%- elif opens_thinking %}{{- '<think>\n' }}";
    let both = format!("{closing}{opening}");
    fs::write(&template, text.replace(closing, &both)).expect("a file");
    folder
}

pub(crate) fn tool(name: &str, count: u32) -> Value {
    json!({"type": "function", "function": {"name": name, "strict": true, "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "array", "items": {"enum": ["monday", "tuesday"]}, "minItems": count, "maxItems": count},
        },
        "required": ["city", "days"],
        "additionalProperties": false,
    }}})
}

fn body(seed: u32, fields: &Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": format!("{seed}: what is the weather?")}],
        "max_tokens": 900,
        "seed": seed,
        "temperature": f64::from(seed % 2) * 0.8,
        "thinking_token_budget": 20 + seed,
    });
    let members = fields.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(members);
    body
}

/// The parts of a choice, without the ids of its calls, which are random.
#[derive(Default)]
struct ChoiceContent {
    content: String,
    reasoning: String,
    calls: Vec<(String, String)>,
    reason: String,
}

impl ChoiceContent {
    fn line(&self) -> String {
        let Self {
            content,
            reasoning,
            calls,
            reason,
        } = self;
        format!("{reasoning:?} {content:?} {calls:?} {reason}")
    }

    fn of_choice(choice: &Value) -> Self {
        let message = &choice["message"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let calls = message["tool_calls"].as_array().into_iter().flatten();
        let calls = calls.map(|call| {
            (
                text(&call["function"]["name"]),
                text(&call["function"]["arguments"]),
            )
        });
        Self {
            content: text(&message["content"]),
            reasoning: text(&message["reasoning_content"]),
            calls: calls.collect(),
            reason: text(&choice["finish_reason"]),
        }
    }
}

fn wholes(client: &HttpClient, body: &Value) -> Vec<ChoiceContent> {
    let (status, answer) = client.post(CHAT, body);
    assert_eq!(status, 200, "{answer}");
    let choices = answer["choices"].as_array().expect("choices");
    choices.iter().map(ChoiceContent::of_choice).collect()
}

fn whole(client: &HttpClient, body: &Value) -> String {
    wholes(client, body)[0].line()
}

fn streamed(client: &HttpClient, body: &Value) -> String {
    let mut body = body.clone();
    body["stream"] = true.into();
    let mut parts = ChoiceContent::default();
    for event in client
        .stream(CHAT, &body)
        .take_while(|event| event != "[DONE]")
    {
        let chunk: Value = serde_json::from_str(&event).expect("each event is JSON");
        let choice = &chunk["choices"][0];
        let delta = &choice["delta"];
        parts.content += delta["content"].as_str().unwrap_or_default();
        parts.reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
        parts.reason += choice["finish_reason"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let function = &call["function"];
            if let Some(name) = function["name"].as_str() {
                parts.calls.push((name.to_owned(), String::new()));
            }
            let last = parts.calls.last_mut().expect("a call has begun");
            last.1 += function["arguments"].as_str().unwrap_or_default();
        }
    }
    parts.line()
}

fn is_call(call: &(String, String), count: usize) -> bool {
    let Ok(arguments) = serde_json::from_str::<Value>(&call.1) else {
        return false;
    };
    let days = arguments["days"].as_array().map(Vec::len);
    let has_city = arguments["city"]
        .as_str()
        .is_some_and(|city| city.chars().count() <= 20);
    ["weather", "climate"].contains(&&*call.0) && days == Some(count) && has_city
}

type IsAnswer = fn(&ChoiceContent) -> bool;

/// Requests of every kind, each with the answers that it allows.
fn requests() -> Vec<(Value, IsAnswer)> {
    let tools = json!([tool("weather", 3), tool("climate", 3)]);
    let schema = json!({"type": "json_schema", "json_schema": {"name": "n", "schema":
        {"type": "object", "properties": {"n": {"type": "integer", "maximum": 999, "minimum": 0}},
         "required": ["n"], "additionalProperties": false}}});
    let has_number: IsAnswer = |parts| {
        let content = serde_json::from_str::<Value>(&parts.content);
        content.is_ok_and(|content| content["n"].is_u64()) && parts.reason == "stop"
    };
    vec![
        (
            json!({"tools": tools, "tool_choice": "required", "parallel_tool_calls": false}),
            |parts| {
                parts.reason == "tool_calls"
                    && parts.calls.len() == 1
                    && is_call(&parts.calls[0], 3)
            },
        ),
        (
            json!({"tools": tools, "tool_choice": {"type": "function", "function": {"name": "climate"}}}),
            |parts| {
                parts.reason == "stop"
                    && parts.calls.len() == 1
                    && parts.calls[0].0 == "climate"
                    && is_call(&parts.calls[0], 3)
                    && parts.content.is_empty()
            },
        ),
        (json!({"tools": tools, "max_tokens": 120}), |parts| {
            parts
                .calls
                .iter()
                .rev()
                .skip(1)
                .all(|call| is_call(call, 3))
        }),
        (json!({"response_format": schema}), has_number),
        (
            json!({"response_format": schema, "chat_template_kwargs": {"enable_thinking": false}}),
            has_number,
        ),
        (json!({"max_tokens": 60, "ignore_eos": true}), |parts| {
            parts.reason == "length"
        }),
    ]
}

// Invariant: I11, I54.
// Lesson: 35, 42, 43, 45.
#[test]
fn calls_and_reasoning_are_valid_and_alike_everywhere() {
    let folder = model();
    let model = ["--model", folder.path().to_str().expect("a path")];
    let off = ["--calibrate", "0", "--speculative-config", "off"];
    let (_one, one) = serve(&[&off[..], &model].concat());
    let both = ["--prefill", "0", "--decode", "0", "--both", "1"];
    let (_guessing, guessing) = serve(&[&both[..], &GUESSES, &model].concat());
    let five: ServingFleet = fleet_of_model(&model, &GUESSES);
    let mut has_reasoned = false;
    for (seed, (fields, is_answer)) in requests().into_iter().enumerate() {
        for seed in [seed as u32, seed as u32 + 7] {
            let mut body = body(seed, &fields);
            body["n"] = 2.into();
            if seed > 6 && body.get("chat_template_kwargs").is_none() {
                body["chat_template_kwargs"] = json!({"opens_thinking": true});
            }
            let answers = wholes(&one, &body);
            assert!(
                answers.iter().all(is_answer),
                "{body}: {}",
                answers[0].line()
            );
            has_reasoned |= answers.iter().any(|parts| !parts.reasoning.is_empty());
            let lines = |client: &HttpClient| -> Vec<String> {
                wholes(client, &body)
                    .iter()
                    .map(ChoiceContent::line)
                    .collect()
            };
            let expected = lines(&one);
            assert_eq!(expected, lines(&guessing), "{body}");
            assert_eq!(expected, lines(&five.client), "{body}");
            let mut single = body.clone();
            single["n"] = 1.into();
            assert_eq!(expected[0], streamed(&one, &single), "{body}");
            assert_eq!(expected[0], streamed(&five.client, &single), "{body}");
        }
    }
    assert!(has_reasoned, "some answer has reasoning");
    let accepted = guessing.metric("cleave_draft_tokens_total", &["\"accepted\""]);
    assert!(accepted > 0.0, "what a grammar forces is drafted");
    let logs = [&five.router, &five.prefill[0], &five.decode[0]].map(CleaveProcess::logs);
    assert!(
        logs.iter().all(|logs| !logs.contains("monday")),
        "no grammar is logged"
    );
}

// Invariant: I11, I54.
// Lesson: 35.
/// A decode worker dies, or drains, in the middle of calls.
#[test]
fn streamed_calls_survive_resumes_and_migrations() {
    let folder = model();
    let model = ["--model", folder.path().to_str().expect("a path")];
    let stream = |seed: u32| {
        let tools = json!([tool("weather", 150)]);
        let choice = if seed.is_multiple_of(2) {
            "required"
        } else {
            "auto"
        };
        let fields =
            json!({"tools": tools, "tool_choice": choice, "max_tokens": 1500, "ignore_eos": true});
        body(seed, &fields)
    };
    let bodies: Vec<Value> = (0..8).map(stream).collect();
    let asked = AskedStreams {
        model: &model,
        whole,
        streamed,
    };
    asked.check_survival(&bodies, |_| {});
}
