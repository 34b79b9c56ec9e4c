//! Anthropic's Messages API.

use crate::scripted_server::{
    CACHED, HttpAnswer, TestServer, done, ended, files, next_chunk, options, plain, post, server,
    server_with,
};
use axum::body::Body;
use axum::http::Request;
use cleave_domain::{Ending, Failure, FinishReason, Grammar, Refusal};
use cleave_text::SpecialTokens;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::{Instant, advance};

pub(crate) const MESSAGES: &str = "/v1/messages";
const PING: &[u8] = b"event: ping\ndata: {\"type\":\"ping\"}\n\n";
const COUNT: &str = "/v1/messages/count_tokens";
const CALL: &str = "Sure.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"a b\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";

/// A body with these fields, which replace its own.
fn body(more: &Value) -> Value {
    let tool = |name: &str| json!({"name": name, "description": "Does it.", "input_schema": {"type": "object"}});
    let mut body = json!({
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [tool("f"), tool("g")],
    });
    let all = body.as_object_mut().unwrap();
    all.extend(more.as_object().unwrap().clone());
    body
}

async fn answer(set: &TestServer, output: &str, fields: &Value) -> Value {
    set.script_stop(output);
    let answer = set.post(MESSAGES, body(fields)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

/// The events of a stream; each has its type as its name, too.
fn events(answer: &HttpAnswer) -> Vec<Value> {
    let events = answer.body.split("\n\n").filter(|event| !event.is_empty());
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        data
    };
    events.map(event).collect()
}

async fn streamed(set: &TestServer, output: &str, fields: &Value) -> Vec<Value> {
    set.script_stop(output);
    let mut body = body(fields);
    body["stream"] = true.into();
    let answer = set.post(MESSAGES, body).await;
    assert_eq!(
        answer.header("content-type"),
        "text/event-stream; charset=utf-8"
    );
    events(&answer)
}

/// Puts the events of a stream together, as Anthropic's clients do.
fn assembled(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    let (mut partial, mut open) = (String::new(), false);
    for event in &events[1..] {
        let blocks = message["content"].as_array_mut().unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert!(!open && event["index"] == blocks.len(), "{event}");
                blocks.push(event["content_block"].clone());
                (open, partial) = (true, String::new());
            }
            "content_block_delta" => {
                assert!(open && event["index"] == blocks.len() - 1, "{event}");
                let (block, delta) = (blocks.last_mut().unwrap(), &event["delta"]);
                match delta["type"].as_str().unwrap() {
                    "input_json_delta" => partial += delta["partial_json"].as_str().unwrap(),
                    kind => {
                        let field = kind.strip_suffix("_delta").unwrap();
                        let text = block[field].as_str().unwrap().to_owned();
                        block[field] = (text + delta[field].as_str().unwrap()).into();
                    }
                }
            }
            "content_block_stop" => {
                assert!(std::mem::take(&mut open));
                let block = blocks.last_mut().unwrap();
                if block["type"] == "tool_use" {
                    block["input"] = serde_json::from_str(&partial).unwrap();
                }
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => assert_eq!(event, events.last().unwrap()),
            other => panic!("{other}"),
        }
    }
    assert!(!open);
    message
}

/// Text of the prompt of the last request.
fn prompt(set: &TestServer) -> String {
    let tokens = set.last_submitted().prompt;
    set.text.tokenizer().decode(&tokens, SpecialTokens::Kept)
}

#[tokio::test]
async fn answers_are_blocks_in_the_order_of_the_output() {
    let set = server("qwen3");
    let output = format!("<think>\nHm.\n</think>\n\n{CALL}");
    let fields = json!({"thinking": {"type": "enabled", "budget_tokens": 50}});
    let message = answer(&set, &output, &fields).await;
    assert_eq!(message["type"], "message");
    assert_eq!(message["role"], "assistant");
    assert!(message["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(message["stop_reason"], "tool_use");
    assert_eq!(message["stop_sequence"], Value::Null);
    let content = message["content"].as_array().unwrap();
    assert_eq!(content[0]["thinking"], "Hm.");
    assert!(!content[0]["signature"].as_str().unwrap().is_empty());
    assert_eq!(content[1], json!({"type": "text", "text": "Sure."}));
    assert_eq!(content[2]["name"], "f");
    assert_eq!(content[2]["input"], json!({"x": "a b"}));
    assert_eq!(content[3]["input"], json!({}));
    assert_ne!(content[2]["id"], content[3]["id"]);
    let usage = &message["usage"];
    let prompt_tokens = set.last_submitted().prompt.len() as u64;
    assert_eq!(usage["input_tokens"], prompt_tokens - u64::from(CACHED));
    assert_eq!(usage["cache_read_input_tokens"], CACHED);
    assert_eq!(usage["cache_creation_input_tokens"], 0);
    assert_eq!(usage["output_tokens"], set.tokens(&output).len());
}

#[tokio::test]
async fn streams_put_together_are_the_whole_message() {
    let set = server("qwen3");
    let output = format!("<think>\nHm.\n</think>\n\n{CALL}");
    let fields = json!({"thinking": {"type": "adaptive"}});
    let mut whole = answer(&set, &output, &fields).await;
    let events = streamed(&set, &output, &fields).await;
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!(
        events[0]["message"]["usage"]["cache_read_input_tokens"],
        CACHED
    );
    let mut put_together = assembled(&events);
    for message in [&mut whole, &mut put_together] {
        message["id"] = Value::Null;
        for block in message["content"].as_array_mut().unwrap() {
            block.as_object_mut().unwrap().remove("id");
        }
    }
    assert_eq!(put_together, whole);
}

#[tokio::test]
async fn reasoning_that_was_not_asked_for_is_left_out() {
    let set = server("qwen3");
    let output = "<think>\nHm.\n</think>\n\nSo.";
    let expected = json!([{"type": "text", "text": "So."}]);
    for fields in [json!({}), json!({"thinking": {"type": "disabled"}})] {
        assert_eq!(answer(&set, output, &fields).await["content"], expected);
        let events = streamed(&set, output, &fields).await;
        assert_eq!(assembled(&events)["content"], expected);
    }
    // The template of Qwen3 closes the reasoning where the model is not to reason.
    assert!(prompt(&set).ends_with("<think>\n\n</think>\n\n"));
    answer(&set, output, &json!({"thinking": {"type": "adaptive"}})).await;
    assert!(prompt(&set).ends_with("<|im_start|>assistant\n"));
}

/// Qwen3's template, with another text where `enable_thinking` is false.
fn thinking_otherwise(text: &str) -> TestServer {
    let mut files = files("qwen3");
    let template = files.chat_template.take().unwrap();
    let closed = r"'<think>\n\n</think>\n\n'";
    assert!(template.contains(closed));
    files.chat_template = Some(template.replace(closed, text));
    server_with(files, options())
}

#[tokio::test]
async fn a_forced_call_follows_reasoning_that_the_prompt_allows() {
    let call = &CALL["Sure.\n".len()..];
    let closes = server("qwen3");
    let end = format!("<[{}]>", closes.tokens("</think>")[0]);
    // Without `thinking` the template is told that the model is not to reason; some do not listen.
    for (set, output, leaves_room) in [
        (closes, call.to_owned(), false),
        (
            thinking_otherwise(r"'<think>\n'"),
            format!("Hm.\n</think>\n\n{call}"),
            true,
        ),
        (
            thinking_otherwise("''"),
            format!("<think>\nHm.\n</think>\n\n{call}"),
            true,
        ),
        (thinking_otherwise("''"), call.to_owned(), true),
    ] {
        for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "f"})] {
            let message = answer(&set, &output, &json!({"tool_choice": choice})).await;
            let content = message["content"].as_array().unwrap();
            assert_eq!(content[0]["type"], "tool_use", "{message}");
            assert_eq!(message["stop_reason"], "tool_use", "{message}");
            let constraint = set.last_submitted().sampling.constraint.unwrap();
            let Grammar::Lark(grammar) = &constraint.grammar else {
                panic!("{constraint:?}");
            };
            assert_eq!(grammar.contains(&end), leaves_room, "{grammar}");
        }
    }
}

#[tokio::test]
async fn ends_have_the_words_of_this_api() {
    let set = server("qwen3");
    let end = |message: &Value| {
        let sequence = message["stop_sequence"].clone();
        (
            message["stop_reason"].as_str().unwrap().to_owned(),
            sequence,
        )
    };
    let ended = answer(&set, "Hello", &json!({})).await;
    assert_eq!(end(&ended), ("end_turn".to_owned(), Value::Null));
    let fields = json!({"stop_sequences": ["lo"]});
    let stopped = answer(&set, "Hello", &fields).await;
    assert_eq!(end(&stopped), ("stop_sequence".to_owned(), "lo".into()));
    assert_eq!(stopped["content"][0]["text"], "Hel");
    let stopped = assembled(&streamed(&set, "Hello", &fields).await);
    assert_eq!(end(&stopped), ("stop_sequence".to_owned(), "lo".into()));
    for (tokens_max, reason) in [(2, "max_tokens"), (90_000, "model_context_window_exceeded")] {
        set.script_tokens(vec![64, 65], done(FinishReason::Length));
        let cut = set
            .post(MESSAGES, body(&json!({"max_tokens": tokens_max})))
            .await;
        assert_eq!(end(&cut.json()), (reason.to_owned(), Value::Null));
    }
    let limits: Vec<u32> = {
        let submitted = set.frontend.submitted.lock().unwrap();
        let limits = submitted.iter().rev();
        limits.map(|request| request.stop.max_tokens).collect()
    };
    assert!(limits[0] < 90_000, "the rest of the context");
    assert_eq!(limits[1], 2);
    // A call that was cut keeps its text.
    set.script_text("<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"a");
    let cut = set
        .post(MESSAGES, body(&json!({"max_tokens": 5})))
        .await
        .json();
    assert_eq!(
        cut["content"][0]["input"],
        json!({"INVALID_JSON": "{\"x\": \"a"})
    );
    assert_eq!(cut["stop_reason"], "max_tokens");
    // One that a stop sequence cut is none to execute.
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"Rome\"}}</tool_call>";
    let fields = json!({"stop_sequences": ["Rome"]});
    let stopped = answer(&set, call, &fields).await;
    assert_eq!(stopped["content"][0]["type"], "tool_use");
    let expected = ("stop_sequence".to_owned(), "Rome".into());
    assert_eq!(end(&stopped), expected);
    let events = streamed(&set, call, &fields).await;
    let last = events.iter().find(|event| event["type"] == "message_delta");
    assert_eq!(end(&last.unwrap()["delta"]), expected);
    let whole = answer(&set, call, &json!({})).await;
    assert_eq!(end(&whole), ("tool_use".to_owned(), Value::Null));
}

#[tokio::test]
async fn conversations_render_as_those_of_chat() {
    let set = server("qwen3");
    let messages = json!([
        {"role": "user", "content": [
            {"type": "text", "text": "Look \"here\"", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "and there"},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.\nSo.", "signature": "x"},
            {"type": "redacted_thinking", "data": "zzz"},
            {"type": "text", "text": "Yes."},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "found"},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": true,
             "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"type": "text", "text": "Go on."},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Once more.", "signature": "x"},
            {"type": "tool_use", "id": "t3", "name": "g", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3"}]},
    ]);
    let fields = json!({
        "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        "messages": messages,
        "thinking": {"type": "adaptive"},
    });
    answer(&set, "Ok", &fields).await;
    let ours = set.last_submitted();
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "description": "Does it.", "parameters": {"type": "object"}}});
    let chat = json!({
        "messages": [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "Look \"here\"\nand there"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.\nSo.",
             "tool_calls": [call("t1", "f", "{\"x\": 1}"), call("t2", "g", "{}")]},
            {"role": "tool", "tool_call_id": "t1", "content": "found"},
            {"role": "tool", "tool_call_id": "t2", "content": "a\nb"},
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": "", "reasoning_content": "Once more.",
             "tool_calls": [call("t3", "g", "{}")]},
            {"role": "tool", "tool_call_id": "t3", "content": ""},
        ],
        "tools": [tool("f"), tool("g")],
    });
    set.script_stop("Ok");
    assert_eq!(
        set.post("/v1/chat/completions", chat.clone()).await.status,
        200
    );
    assert_eq!(ours.prompt, set.last_submitted().prompt, "{}", prompt(&set));
    // The count is of the same prompt.
    let mut counted = fields;
    counted["tools"] = body(&json!({}))["tools"].take();
    let counted = set.post(COUNT, counted).await;
    assert_eq!(counted.json(), json!({"input_tokens": ours.prompt.len()}));
}

#[tokio::test]
async fn the_billing_line_of_a_client_is_not_in_the_prompt() {
    let set = server("qwen3");
    let mut prompts = Vec::new();
    for session in ["1", "2"] {
        let billing = format!("x-anthropic-billing-header: cc_version=2; cch={session};");
        for first in [billing.clone(), format!("{billing}\nBe \"brief\".")] {
            let blocks = [first, "Be kind.".to_owned()];
            let blocks = blocks.map(|text| json!({"type": "text", "text": text}));
            answer(&set, "Ok", &json!({"system": blocks, "tools": []})).await;
            prompts.push(prompt(&set));
        }
    }
    assert!(!prompts[0].contains("billing") && prompts[0].contains("Be kind."));
    assert!(prompts[1].contains("Be \"brief\".\nBe kind."));
    assert_eq!(prompts[..2], prompts[2..]);
}

#[tokio::test]
async fn an_assistants_last_text_is_continued() {
    let set = server("qwen3");
    let messages = json!([
        {"role": "user", "content": "A list"},
        {"role": "assistant", "content": [{"type": "text", "text": "1. One"}]},
    ]);
    answer(&set, "Ok", &json!({"messages": messages})).await;
    assert!(prompt(&set).ends_with("1. One"));
}

#[tokio::test]
async fn hosted_tools_are_left_out_with_a_warning() {
    let set = server("qwen3");
    let tools = json!([
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "custom", "name": "f", "input_schema": {"type": "object"}},
    ]);
    let fields = json!({"tools": tools});
    let message = answer(&set, CALL, &fields).await;
    assert_eq!(message["warnings"][0]["param"], "tools");
    assert!(!prompt(&set).contains("web_search"));
    let events = streamed(&set, CALL, &fields).await;
    let warned = events.iter().find(|event| event["type"] == "message_delta");
    assert_eq!(warned.unwrap()["warnings"][0]["param"], "tools");
    let chosen =
        json!({"tools": fields["tools"], "tool_choice": {"type": "tool", "name": "web_search"}});
    set.post(MESSAGES, body(&chosen)).await.is_error(
        400,
        "invalid_value",
        Some("tool_choice.name"),
    );
}

#[tokio::test]
async fn what_cannot_be_served_is_refused_in_this_shape() {
    let set = server("qwen3");
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}});
    let with_block = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": [image]});
    for (fields, param) in [
        (with_block(image.clone()), "messages[0].content[0].type"),
        (with_block(result), "messages[0].content[0].content[0].type"),
        (
            with_block(json!({"type": "tool_use", "id": "t", "name": "f", "input": {}})),
            "messages[0].content[0].type",
        ),
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (
            json!({"messages": [{"role": "tool", "content": ""}]}),
            "messages[0].role",
        ),
        (json!({"system": 5}), "system"),
        (json!({"stop_sequences": [5]}), "stop_sequences[0]"),
        (json!({"temperature": 3}), "temperature"),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": 100}}),
            "thinking.budget_tokens",
        ),
        (json!({"thinking": {"type": "maybe"}}), "thinking.type"),
        (
            json!({"tool_choice": {"type": "tool", "name": "h"}}),
            "tool_choice.name",
        ),
        (json!({"tool_choice": {"type": "some"}}), "tool_choice.type"),
        (json!({"mcp_servers": [{"url": "x"}]}), "mcp_servers"),
        (
            json!({"output_config": {"effort": "much"}}),
            "output_config.effort",
        ),
    ] {
        let answer = set.post(MESSAGES, body(&fields)).await;
        assert_eq!(answer.status, 400, "{fields}: {}", answer.body);
        let error = answer.json();
        assert_eq!(error["type"], "error");
        assert_eq!(error["error"]["type"], "invalid_request_error");
        assert_eq!(error["error"]["param"], param, "{}", answer.body);
        assert_eq!(error["request_id"], answer.header("x-request-id"));
    }
}

/// The type of an answer's error, and its status.
fn error_of(answer: &HttpAnswer) -> (u16, String) {
    let error = answer.json();
    assert_eq!(error["type"], "error", "{}", answer.body);
    assert_eq!(error["request_id"], answer.header("x-request-id"));
    let kind = error["error"]["type"].as_str().unwrap();
    (answer.status.as_u16(), kind.to_owned())
}

#[tokio::test]
async fn every_error_of_a_path_has_the_shape_of_its_api() {
    let set = server_with(files("qwen3"), {
        let mut options = options();
        options.body_bytes_max = 10_000;
        options
    });
    let is = |answer: &HttpAnswer, status: u16, kind: &str| {
        assert_eq!(
            error_of(answer),
            (status, kind.to_owned()),
            "{}",
            answer.body
        );
    };
    is(&set.get(MESSAGES).await, 405, "invalid_request_error");
    assert_eq!(set.get(MESSAGES).await.header("allow"), "POST");
    is(
        &set.get("/v1/messages/batches").await,
        404,
        "not_found_error",
    );
    let unknown = set.post(MESSAGES, body(&json!({"model": "claude"}))).await;
    is(&unknown, 404, "not_found_error");
    is(
        &set.post(COUNT, json!({"model": "claude"})).await,
        404,
        "not_found_error",
    );
    is(
        &set.post(COUNT, json!({"messages": 5})).await,
        400,
        "invalid_request_error",
    );
    is(
        &set.send(post(MESSAGES, "x".repeat(20_000))).await,
        413,
        "request_too_large",
    );
    is(
        &set.send(post(MESSAGES, "{")).await,
        400,
        "invalid_request_error",
    );
    let mut form = post(MESSAGES, "a=b");
    form.headers_mut()
        .insert("content-type", "text/plain".parse().unwrap());
    is(&set.send(form).await, 415, "invalid_request_error");
    let retry_after = Duration::from_secs(7);
    set.script_tokens(
        Vec::new(),
        Ending::Refused(Refusal::QueueFull { retry_after }),
    );
    let busy = set.post(MESSAGES, body(&json!({}))).await;
    is(&busy, 529, "overloaded_error");
    assert_eq!(busy.header("retry-after"), "7");
    set.script_tokens(Vec::new(), Ending::Failed(Failure::WorkerLost));
    is(
        &set.post(MESSAGES, body(&json!({}))).await,
        503,
        "api_error",
    );
    let metrics = set.get("/metrics").await.body;
    let counted = "cleave_http_requests_total{route=\"/v1/messages\",status=\"529\"} 1";
    assert!(metrics.contains(counted), "{metrics}");
    // Other paths keep their own.
    set.get("/v1/messagesx")
        .await
        .is_error(404, "unknown_url", None);
    assert!(set.get("/v1/messagesx").await.json().get("type").is_none());
}

#[tokio::test]
async fn a_broken_stream_ends_with_an_error_event() {
    let set = server("qwen3");
    let sender = set.script_live();
    for event in [plain(0, 64), ended(Ending::Failed(Failure::WorkerLost))] {
        sender.unbounded_send(event).unwrap();
    }
    let answer = set.post(MESSAGES, body(&json!({"stream": true}))).await;
    let events = events(&answer);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "error");
    assert_eq!(last["error"]["type"], "api_error");
    assert_eq!(last["error"]["code"], "worker_lost");
    assert!(events.iter().all(|event| event["type"] != "message_stop"));
}

#[tokio::test(start_paused = true)]
async fn a_silent_stream_pings() {
    let mut options = options();
    options.keep_alive = Some(Duration::from_secs(15));
    let set = server_with(files("qwen3"), options);
    let sender = set.script_live();
    let mut stream = set.stream(MESSAGES, body(&json!({"stream": true}))).await;
    assert_eq!(next_chunk(&mut stream).await, PING[..]);
    sender.unbounded_send(plain(0, 64)).unwrap();
    let first = next_chunk(&mut stream).await;
    assert!(first.starts_with(b"event: message_start\n"));
    assert_eq!(next_chunk(&mut stream).await, PING[..]);
}

#[tokio::test(start_paused = true)]
async fn a_stream_pings_during_reasoning_that_is_left_out() {
    let mut options = options();
    options.keep_alive = Some(Duration::from_secs(15));
    let set = server_with(files("qwen3"), options);
    let sender = set.script_live();
    let tokens = set.tokens("<think>\nHm hm hm hm hm");
    assert!(tokens.len() > 4);
    sender.unbounded_send(plain(0, tokens[0])).unwrap();
    let mut stream = set.stream(MESSAGES, body(&json!({"stream": true}))).await;
    let first = next_chunk(&mut stream).await;
    assert!(first.starts_with(b"event: message_start\n"));
    let think = async {
        for (index, &token) in tokens.iter().enumerate().skip(1) {
            advance(Duration::from_secs(10)).await;
            sender.unbounded_send(plain(index as u32, token)).unwrap();
        }
    };
    let start = Instant::now();
    let ping = async { (next_chunk(&mut stream).await, start.elapsed()) };
    let ((), (second, waited)) = futures::join!(think, ping);
    assert_eq!(second, PING[..]);
    assert!(waited <= Duration::from_secs(30), "{waited:?}");
}

#[tokio::test]
async fn a_schema_constrains_the_answer() {
    let set = server("qwen3");
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let format = json!({"format": {"type": "json_schema", "schema": schema}});
    answer(&set, "{}", &json!({"output_config": format, "tools": []})).await;
    assert!(set.last_submitted().sampling.constraint.is_some());
    let broken = json!({"format": {"type": "json_schema", "schema": {"type": "objekt"}}});
    let refused = set
        .post(
            MESSAGES,
            body(&json!({"output_config": broken, "tools": []})),
        )
        .await;
    assert_eq!(refused.status, 400, "{}", refused.body);
    let param = refused.json()["error"]["param"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(param.starts_with("output_config.format"), "{param}");
}

#[tokio::test]
async fn models_have_the_shape_of_the_clients_api() {
    let set = server("qwen3");
    let get = |path: &str| {
        let request = Request::get(path).header("anthropic-version", "2023-06-01");
        set.send(request.body(Body::empty()).unwrap())
    };
    let list = get("/v1/models").await.json();
    let model = &list["data"][0];
    assert_eq!(
        (&model["type"], &model["id"]),
        (&"model".into(), &"qwen3".into())
    );
    assert_eq!(list["has_more"], false);
    assert_eq!(
        (&list["first_id"], &list["last_id"]),
        (&model["id"], &model["id"])
    );
    assert_eq!(get("/v1/models/qwen3").await.json(), *model);
    let unknown = get("/v1/models/other").await;
    assert_eq!(unknown.status, 404);
    assert_eq!(unknown.json()["error"]["type"], "not_found_error");
    assert_eq!(unknown.header("request-id"), unknown.header("x-request-id"));
    let plain = set.get("/v1/models").await;
    assert_eq!(plain.json()["object"], "list");
    assert_eq!(plain.json()["models"], json!([]));
    assert_eq!(plain.header("request-id"), "");
    let message = set.post("/v1/messages", json!({})).await;
    assert_eq!(message.header("request-id"), message.header("x-request-id"));
}
