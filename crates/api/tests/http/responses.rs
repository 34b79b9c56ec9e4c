//! OpenAI's Responses API.

use crate::scripted_server::{
    CACHED, HttpAnswer, TestServer, done, ended, files, options, plain, server, server_with,
};
use cleave_domain::{Ending, Failure, FinishReason, Refusal};
use cleave_text::SpecialTokens;
use serde_json::{Value, json};
use std::time::Duration;

const RESPONSES: &str = "/v1/responses";
const CALL: &str = "Sure.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"a b\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";

fn tool(name: &str) -> Value {
    json!({"type": "function", "name": name, "description": "Does it.", "parameters": {"type": "object"}})
}

/// A body with these fields, which replace its own.
fn body(more: &Value) -> Value {
    let mut body = json!({"input": "Hi", "tools": [tool("f"), tool("g")]});
    let all = body.as_object_mut().unwrap();
    all.extend(more.as_object().unwrap().clone());
    body
}

async fn answer(set: &TestServer, output: &str, fields: &Value) -> Value {
    set.script_stop(output);
    let answer = set.post(RESPONSES, body(fields)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

/// The events of a stream. Each has its type as its name, and the next number.
fn events(answer: &HttpAnswer) -> Vec<Value> {
    let events = answer.body.split("\n\n").filter(|event| !event.is_empty());
    let event = |event: (usize, &str)| {
        let (name, data) = event.1.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        assert_eq!(data["sequence_number"], event.0);
        data
    };
    events.enumerate().map(event).collect()
}

async fn streamed(set: &TestServer, output: &str, fields: &Value) -> Vec<Value> {
    set.script_stop(output);
    let mut body = body(fields);
    body["stream"] = true.into();
    let answer = set.post(RESPONSES, body).await;
    assert_eq!(
        answer.header("content-type"),
        "text/event-stream; charset=utf-8"
    );
    events(&answer)
}

/// Puts the items of a stream together by its deltas, and checks what `.done` events repeat.
fn assembled(events: &[Value]) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    let (mut text, mut open) = (String::new(), false);
    for event in events {
        let kind = event["type"].as_str().unwrap();
        if kind == "response.output_item.added" {
            assert!(!open && event["output_index"] == items.len(), "{event}");
            assert_eq!(event["item"]["status"], "in_progress");
            (open, text) = (true, String::new());
            items.push(event["item"].clone());
            continue;
        }
        if kind == "response.output_item.done" {
            assert!(std::mem::take(&mut open), "{event}");
            let item = &event["item"];
            assert_eq!(item["id"], items.last().unwrap()["id"]);
            let whole = item.get("arguments").unwrap_or(&item["content"][0]["text"]);
            assert_eq!(*whole, text.as_str());
            *items.last_mut().unwrap() = item.clone();
            continue;
        }
        let Some(id) = event.get("item_id") else {
            continue;
        };
        assert!(open);
        assert_eq!(*id, items.last().unwrap()["id"], "{event}");
        assert_eq!(event["output_index"], items.len() - 1);
        if kind.ends_with(".delta") {
            text += event["delta"].as_str().unwrap();
        } else if let Some(done) = event.get("text").or_else(|| event.get("arguments")) {
            assert_eq!(*done, text.as_str());
        }
    }
    assert!(!open);
    items
}

/// Text of the prompt of the last request.
fn prompt(set: &TestServer) -> String {
    let tokens = set.last_submitted().prompt;
    set.text.tokenizer().decode(&tokens, SpecialTokens::Kept)
}

#[tokio::test]
async fn answers_are_items_in_the_order_of_the_output() {
    let set = server("qwen3");
    let output = format!("<think>\nHm.\n</think>\n\n{CALL}");
    let fields = json!({
        "metadata": {"k": "v"}, "store": true, "instructions": "Be brief.",
        "temperature": 0.5, "prompt_cache_key": "p", "client_metadata": {"x": 1},
    });
    let response = answer(&set, &output, &fields).await;
    assert_eq!(response["object"], "response");
    assert_eq!(response["status"], "completed");
    assert!(response["id"].as_str().unwrap().starts_with("resp_"));
    let items = response["output"].as_array().unwrap();
    let kinds: Vec<&str> = items
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        ["reasoning", "message", "function_call", "function_call"]
    );
    assert_eq!(
        items[0]["content"],
        json!([{"type": "reasoning_text", "text": "Hm."}])
    );
    assert_eq!(items[1]["content"][0]["text"], "Sure.");
    assert_eq!(items[2]["name"], "f");
    assert_eq!(items[2]["arguments"], "{\"x\": \"a b\"}");
    assert_ne!(items[2]["call_id"], items[3]["call_id"]);
    let usage = &response["usage"];
    assert_eq!(usage["input_tokens"], set.last_submitted().prompt.len());
    assert_eq!(usage["input_tokens_details"]["cached_tokens"], CACHED);
    assert_eq!(usage["output_tokens"], set.tokens(&output).len());
    // The request is repeated, and what was not done is not claimed.
    assert_eq!(response["metadata"], json!({"k": "v"}));
    assert_eq!(response["instructions"], "Be brief.");
    assert_eq!(response["tools"].as_array().unwrap().len(), 2);
    assert_eq!(response["temperature"], 0.5);
    assert_eq!(response["prompt_cache_key"], "p");
    assert_eq!(response["store"], true);
    assert!(response.get("client_metadata").is_none());
}

#[tokio::test]
async fn streams_put_together_are_the_whole_response() {
    let set = server("qwen3");
    let output = format!("<think>\nHm.\n</think>\n\n{CALL}");
    let mut whole = answer(&set, &output, &json!({})).await;
    let events = streamed(&set, &output, &json!({})).await;
    assert_eq!(events[0]["type"], "response.created");
    assert_eq!(events[1]["type"], "response.in_progress");
    assert_eq!(events[0]["response"]["status"], "in_progress");
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    let mut response = last["response"].clone();
    assert_eq!(response["output"], Value::from(assembled(&events)));
    for response in [&mut whole, &mut response] {
        for field in ["id", "created_at", "completed_at"] {
            response[field] = Value::Null;
        }
        for item in response["output"].as_array_mut().unwrap() {
            item["id"] = Value::Null;
            item.as_object_mut().unwrap().remove("call_id");
        }
    }
    assert_eq!(response, whole);
}

#[tokio::test]
async fn a_cut_answer_is_incomplete() {
    let set = server("qwen3");
    for stream in [false, true] {
        set.script_tokens(vec![64, 65], done(FinishReason::Length));
        let fields = json!({"max_output_tokens": 2, "stream": stream});
        let answer = set.post(RESPONSES, body(&fields)).await;
        let response = if stream {
            let events = events(&answer);
            let last = events.last().unwrap();
            assert_eq!(last["type"], "response.incomplete");
            last["response"].clone()
        } else {
            answer.json()
        };
        assert_eq!(response["status"], "incomplete");
        assert_eq!(
            response["incomplete_details"]["reason"],
            "max_output_tokens"
        );
        assert_eq!(response["output"][0]["status"], "incomplete");
        assert_eq!(set.last_submitted().stop.max_tokens, 2);
    }
}

#[tokio::test]
async fn items_of_one_answer_are_one_message() {
    let set = server("qwen3");
    let call = |id: &str, name: &str, arguments: &str| json!({"type": "function_call", "id": "fc", "call_id": id, "name": name, "arguments": arguments, "status": "completed"});
    let result = |id: &str, output: Value| json!({"type": "function_call_output", "call_id": id, "output": output});
    let fields = json!({
        "instructions": "Be brief.",
        "tools": [tool("f")],
        "input": [
            {"role": "developer", "content": "Be kind."},
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "Look \"here\""}, {"type": "input_text", "text": "and there"},
            ]},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "S"}],
             "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": "zzz"},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed",
             "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
            call("t1", "f", "{\"x\": 1}"),
            call("t2", "g", "not JSON"),
            result("t1", "found".into()),
            result("t2", json!([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])),
            {"role": "assistant", "content": "One."},
            {"role": "assistant", "content": "Two."},
            {"role": "user", "content": "Go on."},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Less"}],
             "content": [{"type": "reasoning_text", "text": "More"}]},
            call("t3", "g", ""),
            result("t3", "x".into()),
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Only"}]},
            call("t4", "g", ""),
            result("t4", "y".into()),
        ],
    });
    answer(&set, "Ok", &fields).await;
    let ours = set.last_submitted();
    let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "description": "Does it.", "parameters": {"type": "object"}}});
    let chat = json!({
        "messages": [
            {"role": "system", "content": "Be brief.\n\nBe kind."},
            {"role": "user", "content": "Look \"here\"\nand there"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "tool_calls": [
                call("t1", "f", json!({"x": 1})), call("t2", "g", json!({"INVALID_JSON": "not JSON"})),
            ]},
            {"role": "tool", "tool_call_id": "t1", "content": "found"},
            {"role": "tool", "tool_call_id": "t2", "content": "a\nb"},
            {"role": "assistant", "content": "One."},
            {"role": "assistant", "content": "Two."},
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": "", "reasoning_content": "More",
             "tool_calls": [call("t3", "g", json!({}))]},
            {"role": "tool", "tool_call_id": "t3", "content": "x"},
            {"role": "assistant", "content": "", "reasoning_content": "Only",
             "tool_calls": [call("t4", "g", json!({}))]},
            {"role": "tool", "tool_call_id": "t4", "content": "y"},
        ],
        "tools": [tool("f")],
    });
    set.script_stop("Ok");
    assert_eq!(set.post("/v1/chat/completions", chat).await.status, 200);
    assert_eq!(ours.prompt, set.last_submitted().prompt, "{}", prompt(&set));
}

#[tokio::test]
async fn hosted_tools_are_left_out_unless_chosen() {
    let set = server("qwen3");
    let tools = json!([
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"(\" start? \")\""}},
        tool("f"),
    ]);
    let fields = json!({"tools": tools});
    let response = answer(&set, CALL, &fields).await;
    assert_eq!(response["warnings"][0]["param"], "tools");
    assert!(!prompt(&set).contains("apply_patch"));
    for (choice, param) in [
        (json!({"type": "web_search"}), "tool_choice.type"),
        (
            json!({"type": "function", "name": "apply_patch"}),
            "tool_choice.name",
        ),
        (
            json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}),
            "tool_choice.tools[0].name",
        ),
    ] {
        let refused = set
            .post(
                RESPONSES,
                body(&json!({"tools": tools, "tool_choice": choice})),
            )
            .await;
        assert_eq!(refused.status, 400);
        assert_eq!(refused.json()["error"]["param"], param, "{}", refused.body);
    }
    let some = json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]});
    let response = answer(&set, CALL, &json!({"tool_choice": some})).await;
    let items = response["output"].as_array().unwrap();
    let calls = items.iter().filter(|item| item["type"] == "function_call");
    assert_eq!(calls.count(), 1, "{items:?}");
}

#[tokio::test]
async fn state_that_is_not_kept_is_refused() {
    let set = server("qwen3");
    let item = |item: Value| json!({"input": [item]});
    let image = json!({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]});
    for (fields, code, param) in [
        (
            json!({"conversation": "conv_1"}),
            "unsupported_parameter",
            "conversation",
        ),
        (
            json!({"prompt": {"id": "p"}}),
            "unsupported_parameter",
            "prompt",
        ),
        (
            json!({"truncation": "auto"}),
            "unsupported_parameter",
            "truncation",
        ),
        (
            json!({"top_logprobs": 2}),
            "unsupported_parameter",
            "top_logprobs",
        ),
        (
            json!({"include": ["message.output_text.logprobs"]}),
            "unsupported_parameter",
            "include",
        ),
        (
            item(image),
            "unsupported_parameter",
            "input[0].content[0].type",
        ),
        (
            item(json!({"role": "tool", "content": ""})),
            "invalid_value",
            "input[0].role",
        ),
        (
            item(json!({"type": "function_call", "call_id": "1", "name": "f"})),
            "invalid_value",
            "input[0].arguments",
        ),
        (json!({"input": []}), "invalid_value", "input"),
        (json!({"input": null}), "invalid_value", "input"),
        (
            json!({"max_output_tokens": 900_000}),
            "context_length_exceeded",
            "max_output_tokens",
        ),
        (
            json!({"text": {"format": {"type": "json_schema"}}}),
            "invalid_value",
            "text.format.schema",
        ),
    ] {
        let answer = set.post(RESPONSES, body(&fields)).await;
        answer.is_error(400, code, Some(param));
    }
    let too_long = set
        .post(RESPONSES, body(&json!({"max_output_tokens": 900_000})))
        .await;
    assert!(
        too_long.body.contains("`max_output_tokens`"),
        "{}",
        too_long.body
    );
}

#[tokio::test]
async fn a_schema_constrains_the_output() {
    let set = server("qwen3");
    let format = |schema: Value| json!({"text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": true}}, "tools": []});
    let response = answer(&set, "{}", &format(json!({"type": "object"}))).await;
    assert!(set.last_submitted().sampling.constraint.is_some());
    assert_eq!(response["text"]["format"]["name"], "n");
    set.post(RESPONSES, body(&format(json!({"type": "objekt"}))))
        .await
        .is_error(400, "invalid_value", Some("text.format.schema"));
}

#[tokio::test(start_paused = true)]
async fn a_broken_stream_ends_with_a_failed_response() {
    let mut options = options();
    options.keep_alive = Some(Duration::from_secs(15));
    let set = server_with(files("qwen3"), options);
    let retry_after = Duration::from_millis(7500);
    for (ending, code, wait) in [
        (Ending::Failed(Failure::WorkerLost), "server_error", ""),
        (
            Ending::Failed(Failure::Constraint("it is too complex".into())),
            "invalid_prompt",
            "it is too complex.",
        ),
        (
            Ending::Refused(Refusal::QueueFull { retry_after }),
            "rate_limit_exceeded",
            "Try again in 7.5 s.",
        ),
    ] {
        let sender = set.script_live();
        for event in [plain(0, 64), ended(ending)] {
            sender.unbounded_send(event).unwrap();
        }
        let answer = set.post(RESPONSES, body(&json!({"stream": true}))).await;
        let events = events(&answer);
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.failed");
        assert_eq!(last["response"]["status"], "failed");
        assert_eq!(last["response"]["error"]["code"], code);
        let message = last["response"]["error"]["message"].as_str().unwrap();
        assert!(message.ends_with(wait), "{message}");
        let is_end = |event: &Value| event["type"] == "response.completed";
        assert!(!events.iter().any(is_end));
    }
}

#[tokio::test]
async fn input_tokens_are_those_of_the_prompt() {
    let set = server("qwen3");
    let fields = json!({"instructions": "Be brief.", "max_output_tokens": 5});
    let first = answer(&set, "Yes.", &fields).await;
    for previous in [Value::Null, first["id"].clone()] {
        let mut fields = fields.clone();
        fields["previous_response_id"] = previous;
        answer(&set, "Yes.", &fields).await;
        let counted = set.post("/v1/responses/input_tokens", body(&fields)).await;
        let count = set.last_submitted().prompt.len();
        let expected = json!({"object": "response.input_tokens", "input_tokens": count});
        assert_eq!(counted.json(), expected);
    }
    let lost = body(&json!({"previous_response_id": "resp_1"}));
    let lost = set.post("/v1/responses/input_tokens", lost).await;
    lost.is_error(
        400,
        "previous_response_not_found",
        Some("previous_response_id"),
    );
}

#[tokio::test]
async fn a_response_repeats_its_request_in_full() {
    let set = server("qwen3");
    let schema = json!({"type": "object"});
    let fields = json!({
        "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
        "max_tool_calls": 3, "service_tier": "flex", "truncation": "disabled",
    });
    set.script_stop("{}");
    let response = set.post(RESPONSES, body(&fields)).await.json();
    let tool = json!({"type": "function", "name": "f", "description": null, "parameters": null, "strict": false});
    assert_eq!(
        response["tools"],
        json!([tool]),
        "only what the model knows"
    );
    let format = json!({"type": "json_schema", "name": "n", "description": null, "schema": schema, "strict": true});
    assert_eq!(response["text"]["format"], format);
    assert_eq!(response["max_tool_calls"], 3);
    assert_eq!(response["service_tier"], "default", "what was done");
    assert!(response["completed_at"].as_u64() >= response["created_at"].as_u64());
}

#[tokio::test]
async fn messages_have_log_probabilities_if_they_are_asked_for() {
    let set = server("qwen3");
    let output = "<think>\nHm.\n</think>\n\nYes, it is.";
    let fields =
        json!({"tools": [], "include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let response = answer(&set, output, &fields).await;
    assert_eq!(set.last_submitted().sampling.logprobs, Some(2));
    let part = &response["output"][1]["content"][0];
    let scores = part["logprobs"].as_array().unwrap();
    let tokens: String = scores
        .iter()
        .map(|score| score["token"].as_str().unwrap())
        .collect();
    assert_eq!(
        tokens.trim_start(),
        part["text"],
        "those of the message, not of the reasoning"
    );
    for score in scores {
        assert!(score["logprob"].is_number() && score["bytes"].is_array());
        assert_eq!(score["top_logprobs"].as_array().unwrap().len(), 2);
    }
    let events = streamed(&set, output, &fields).await;
    let of = |kind: &str| {
        let events = events.iter().filter(|event| event["type"] == kind);
        let scores = events.flat_map(|event| event["logprobs"].as_array().unwrap().clone());
        Value::from(scores.collect::<Vec<Value>>())
    };
    assert_eq!(of("response.output_text.delta"), part["logprobs"]);
    assert_eq!(of("response.output_text.done"), part["logprobs"]);
    assert_eq!(response["top_logprobs"], 2);
}
