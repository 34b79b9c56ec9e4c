//! Reasoning and tool calls in answers, and the choice among tools.

use crate::input::CHAT;
use crate::scripted_server::{TestServer, server};
use cleave_domain::Grammar;
use cleave_text::SpecialTokens;
use serde_json::{Value, json};

const CALL: &str = "Sure.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"a b\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";

fn body(more: &Value) -> Value {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
    let mut body = json!({
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [tool("f"), tool("g")],
    });
    let all = body.as_object_mut().unwrap();
    all.extend(more.as_object().unwrap().clone());
    body
}

/// The answer to these fields if the model writes this text, and then ends by itself.
async fn answer(set: &TestServer, output: &str, fields: Value) -> Value {
    set.script_stop(output);
    let answer = set.post(CHAT, body(&fields)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

/// The deltas of a stream, and its reasons to end.
async fn deltas(set: &TestServer, output: &str, fields: Value) -> (Vec<Value>, Vec<String>) {
    set.script_stop(output);
    let mut fields = fields;
    fields["stream"] = true.into();
    let answer = set.post(CHAT, body(&fields)).await;
    let events = answer
        .body
        .lines()
        .filter_map(|line| line.strip_prefix("data: {"));
    let (mut deltas, mut reasons) = (Vec::new(), Vec::new());
    for event in events {
        let event: Value = serde_json::from_str(&format!("{{{event}")).unwrap();
        let choice = event["choices"][0].clone();
        deltas.push(choice["delta"].clone());
        reasons.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }
    (deltas, reasons)
}

#[tokio::test]
async fn calls_in_an_answer_are_tool_calls() {
    let set = server("qwen3");
    let answer = answer(&set, CALL, json!({})).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Sure.");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_eq!(
        calls[0]["function"],
        json!({"name": "f", "arguments": "{\"x\": \"a b\"}"})
    );
    assert_eq!(
        calls[1]["function"],
        json!({"name": "g", "arguments": "{}"})
    );
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert!(answer.get("warnings").is_none());
}

#[tokio::test]
async fn a_call_that_a_stop_text_cuts_is_no_reason() {
    let set = server("qwen3");
    for (stop, reason) in [
        (" b", "stop"),
        ("}}", "stop"),
        ("\n</tool_call>\n<tool_call>", "tool_calls"),
        ("g\"", "tool_calls"),
    ] {
        let fields = json!({"stop": [stop]});
        let whole = answer(&set, CALL, fields.clone()).await;
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], reason, "{stop}");
        assert_eq!(choice["stop_reason"], stop);
        assert!(choice["message"]["tool_calls"].is_array(), "{whole}");
        let (_, reasons) = deltas(&set, CALL, fields).await;
        assert_eq!(reasons, [reason], "{stop}");
    }
    // A whole call before it makes no difference.
    let second = CALL.replace("{}}", "{\"y\": \"Rome\"}}");
    let fields = json!({"stop": ["Rome"]});
    let whole = answer(&set, &second, fields.clone()).await;
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls[1]["function"]["arguments"], "{\"y\": \"");
    let (_, reasons) = deltas(&set, &second, fields).await;
    assert_eq!(reasons, ["stop"]);
    // The limit has a word of its own.
    set.script_text(&second[..second.len() - 20]);
    let cut = set.post(CHAT, body(&json!({}))).await.json();
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn a_streamed_call_has_its_name_once_and_first() {
    let set = server("qwen3");
    let (deltas, reasons) = deltas(&set, CALL, json!({})).await;
    assert_eq!(reasons, ["tool_calls"]);
    let mut text = String::new();
    let mut calls: Vec<(String, String)> = Vec::new();
    for delta in &deltas {
        text += delta["content"].as_str().unwrap_or_default();
        let Some(parts) = delta["tool_calls"].as_array() else {
            continue;
        };
        assert_eq!(parts.len(), 1, "{delta}");
        let (part, function) = (&parts[0], &parts[0]["function"]);
        let arguments = function["arguments"].as_str().unwrap();
        if let Some(name) = function["name"].as_str() {
            assert_eq!((part["type"].as_str(), arguments), (Some("function"), ""));
            assert!(part["id"].is_string());
            assert_eq!(part["index"], calls.len());
            calls.push((name.to_owned(), String::new()));
        } else {
            assert_eq!(part.as_object().unwrap().len(), 2, "{part}");
            assert_eq!(part["index"], calls.len() - 1);
            calls.last_mut().unwrap().1 += arguments;
        }
    }
    assert_eq!(text, "Sure.");
    let expected = [("f", "{\"x\": \"a b\"}"), ("g", "{}")];
    assert_eq!(
        calls,
        expected.map(|(name, arguments)| (name.to_owned(), arguments.to_owned()))
    );
    assert_eq!(
        deltas.last().unwrap(),
        &json!({}),
        "the end has a chunk of its own"
    );
}

#[tokio::test]
async fn calls_of_unknown_and_forbidden_tools_stay_text() {
    let set = server("qwen3");
    let call = "<tool_call>{\"name\": \"h\", \"arguments\": {}}</tool_call>";
    let unknown = answer(&set, call, json!({})).await;
    assert_eq!(unknown["choices"][0]["message"]["content"], call);
    assert_eq!(unknown["choices"][0]["finish_reason"], "stop");
    let hidden = answer(&set, CALL, json!({"tool_choice": "none"})).await;
    assert_eq!(hidden["choices"][0]["message"]["content"], CALL);
    let tool = json!({"type": "function", "function": {"name": "g"}});
    let allowed =
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool]}});
    let some = answer(&set, CALL, json!({"tool_choice": allowed})).await;
    let message = &some["choices"][0]["message"];
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1);
    assert!(
        message["content"]
            .as_str()
            .unwrap()
            .contains("\"name\": \"f\"")
    );
}

#[tokio::test]
async fn reasoning_has_a_field_of_its_own() {
    let set = server("qwen3");
    let output = "<think>\nHm.\n</think>\n\nSo.";
    let whole = answer(&set, output, json!({})).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "Hm.");
    assert_eq!(message["content"], "So.");
    let (deltas, reasons) = deltas(&set, output, json!({})).await;
    let joined = |field: &str| -> String {
        deltas
            .iter()
            .filter_map(|delta| delta[field].as_str())
            .collect()
    };
    assert_eq!(joined("reasoning_content"), "Hm.");
    assert_eq!(joined("content"), "So.");
    assert_eq!(reasons, ["stop"]);
    let cut = answer(&set, "<think>\nHm", json!({})).await;
    assert_eq!(cut["choices"][0]["message"]["content"], Value::Null);
}

/// The grammar of the last request, if its output is constrained.
fn grammar(set: &TestServer) -> Option<String> {
    let constraint = set.last_submitted().sampling.constraint?;
    match &constraint.grammar {
        Grammar::Lark(text) | Grammar::JsonSchema(text) => Some(text.to_string()),
        other => panic!("{other:?}"),
    }
}

fn strict_tool(parameters: &Value) -> Value {
    json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": parameters}})
}

// Lesson: 43.
#[tokio::test]
async fn choices_among_tools_constrain_the_output() {
    let set = server("qwen3");
    let named = json!({"type": "function", "function": {"name": "f"}});
    let allowed =
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}});
    let strict = strict_tool(&json!({"type": "object", "properties": {"x": {"type": "string"}}}));
    for (fields, is_bound, reason) in [
        (json!({}), false, "tool_calls"),
        (json!({"tool_choice": "auto"}), false, "tool_calls"),
        (json!({"tool_choice": "required"}), true, "tool_calls"),
        (json!({"tool_choice": named}), true, "stop"),
        (json!({"tool_choice": allowed}), true, "tool_calls"),
        (json!({"parallel_tool_calls": false}), true, "tool_calls"),
        (json!({"tools": [strict]}), true, "tool_calls"),
        (
            json!({"tools": [strict], "tool_choice": "none"}),
            false,
            "stop",
        ),
    ] {
        let answer = answer(&set, CALL, fields.clone()).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], reason, "{fields}");
        let lark = grammar(&set);
        assert_eq!(lark.is_some(), is_bound, "{fields}");
        let names = [r#"\"name\": \"f\""#, r#"\"name\": \"g\""#];
        let has = names.map(|name| lark.as_ref().is_some_and(|lark| lark.contains(name)));
        let is_some =
            fields.get("tools").is_some() || reason == "stop" || fields["tool_choice"].is_object();
        assert_eq!(has, [is_bound, is_bound && !is_some], "{fields}");
    }
}

// Lesson: 43.
#[tokio::test]
async fn choices_that_cannot_be_enforced_are_refused() {
    let set = server("qwen3");
    let pattern =
        json!({"type": "object", "properties": {"x": {"uniqueItems": true, "type": "array"}}});
    let strict = json!({"tools": [strict_tool(&pattern)]});
    let answer = set.post(CHAT, body(&strict)).await;
    answer.is_error(400, "invalid_value", Some("tools"));
    assert!(answer.body.contains("uniqueItems"), "{}", answer.body);
    let mut free = strict.clone();
    free["tools"][0]["function"]["strict"] = false.into();
    free["tool_choice"] = "required".into();
    set.script_stop(CALL);
    assert_eq!(set.post(CHAT, body(&free)).await.status, 200);
    // The format of calls is not known.
    let unknown = server("llama2");
    for (fields, param) in [
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"parallel_tool_calls": false}), "parallel_tool_calls"),
    ] {
        let refused = unknown.post(CHAT, body(&fields)).await;
        refused.is_error(400, "unsupported_parameter", Some(param));
    }
    let missing = json!({"type": "function", "function": {"name": "h"}});
    let allowed =
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [missing]}});
    for (fields, param) in [
        (json!({"tool_choice": "maybe"}), "tool_choice"),
        (json!({"tool_choice": missing}), "tool_choice.function.name"),
        (
            json!({"tool_choice": allowed}),
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        (
            json!({"tool_choice": "required", "tools": []}),
            "tool_choice",
        ),
        (json!({"reasoning_effort": "huge"}), "reasoning_effort"),
    ] {
        set.post(CHAT, body(&fields))
            .await
            .is_error(400, "invalid_value", Some(param));
    }
}

// Lesson: 44.
#[tokio::test]
async fn a_schema_and_a_required_call_are_one_grammar() {
    let set = server("qwen3");
    let schema = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "unmistakable"}}});
    for choice in [
        json!("required"),
        json!({"type": "function", "function": {"name": "f"}}),
    ] {
        let fields = json!({"response_format": schema, "tool_choice": choice});
        answer(&set, CALL.trim_start_matches("Sure.\n"), fields).await;
        let lark = grammar(&set).expect("a constraint");
        // A call is required, so there is no content that the schema could bind.
        assert!(
            lark.contains("\\\"f\\\"") && !lark.contains("unmistakable"),
            "{lark}"
        );
    }
}

// Lesson: 42.
#[tokio::test]
async fn constrained_content_follows_reasoning() {
    let set = server("qwen3");
    let schema =
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}});
    let fields = json!({"response_format": schema, "tool_choice": "none"});
    let whole = answer(&set, "<think>\nHm.\n</think>\n\n7", fields.clone()).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("Hm."), &json!("7"))
    );
    let lark = grammar(&set).unwrap();
    assert!(
        lark.contains("<[414]>") && lark.contains("integer"),
        "{lark}"
    );
    // The template closes the reasoning before the answer.
    let mut closed = fields;
    closed["chat_template_kwargs"] = json!({"enable_thinking": false});
    answer(&set, "7", closed.clone()).await;
    assert_eq!(grammar(&set).unwrap(), "{\"type\":\"integer\"}");
    // With tools the output is content or calls.
    closed["tool_choice"] = "auto".into();
    let called = answer(&set, CALL.trim_start_matches("Sure.\n"), closed).await;
    assert_eq!(called["choices"][0]["finish_reason"], "tool_calls");
    assert!(grammar(&set).unwrap().contains(" | "));
}

#[tokio::test]
async fn reasoning_has_limits_and_may_be_left_out() {
    let set = server("qwen3");
    let output = "<think>\nHm.\n</think>\n\nSo.";
    let left_out = answer(&set, output, json!({"include_reasoning": false})).await;
    let message = &left_out["choices"][0]["message"];
    assert!(message.get("reasoning_content").is_none());
    assert_eq!((&message["content"], grammar(&set)), (&json!("So."), None));
    answer(&set, output, json!({"thinking_token_budget": 5})).await;
    assert!(grammar(&set).unwrap().contains("max_tokens=5"));
    let prompt = |set: &TestServer| {
        set.text
            .tokenizer()
            .decode(&set.last_submitted().prompt, SpecialTokens::Kept)
    };
    let closed = "<think>\n\n</think>\n\n";
    for (fields, is_closed) in [
        (json!({"reasoning_effort": "none"}), true),
        (json!({"reasoning_effort": "low"}), false),
        (
            json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}}),
            false,
        ),
        (
            json!({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": false}}),
            true,
        ),
    ] {
        answer(&set, "So.", fields.clone()).await;
        assert_eq!(prompt(&set).ends_with(closed), is_closed, "{fields}");
    }
}

/// The prompt of a conversation with a call, its result and a further question.
async fn prompt_after(set: &TestServer, assistant: &Value, result: &Value) -> String {
    let user = |text: &str| json!({"role": "user", "content": text});
    set.script_stop("So.");
    let fields = json!({"messages": [user("Hi"), assistant, result, user("And now?")]});
    let answer = set.post(CHAT, body(&fields)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let prompt = set.last_submitted().prompt;
    set.text.tokenizer().decode(&prompt, SpecialTokens::Kept)
}

#[tokio::test]
async fn calls_in_history_render_alike_in_every_form() {
    let set = server("qwen3");
    // The tool is not among those of the request.
    let call = |arguments: Value| json!({"id": "call_1", "type": "function", "function": {"name": "old", "arguments": arguments}});
    let assistant =
        |call: Value| json!({"role": "assistant", "content": null, "tool_calls": [call]});
    let result = json!({"role": "tool", "tool_call_id": "call_1", "content": "sunny"});
    let expected = prompt_after(&set, &assistant(call(json!({"x": "a b", "n": 1}))), &result).await;
    for part in [
        "<tool_call>",
        "\"old\"",
        "{\"x\": \"a b\", \"n\": 1}",
        "sunny",
    ] {
        assert!(expected.contains(part), "{part} in {expected}");
    }
    let text = call(json!("{\"x\": \"a b\", \"n\": 1}"));
    let mut absent = assistant(text.clone());
    absent.as_object_mut().unwrap().remove("content");
    let mut named = result.clone();
    named["name"] = "old".into();
    let parts = json!({"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]});
    for (assistant, result) in [
        (assistant(text), &result),
        (absent.clone(), &named),
        (absent, &parts),
    ] {
        assert_eq!(prompt_after(&set, &assistant, result).await, expected);
    }
}

#[tokio::test]
async fn reasoning_in_history_is_accepted_in_both_fields() {
    let set = server("qwen3");
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let result = json!({"role": "tool", "tool_call_id": "c", "content": "1"});
    let mut prompts = Vec::new();
    for field in ["reasoning_content", "reasoning"] {
        let mut assistant = json!({"role": "assistant", "content": "", "tool_calls": [call]});
        assistant[field] = "I must ask.".into();
        set.script_stop("So.");
        let user = json!({"role": "user", "content": "Hi"});
        let fields = json!({"messages": [user, assistant, result]});
        assert_eq!(set.post(CHAT, body(&fields)).await.status, 200);
        let prompt = set.last_submitted().prompt;
        prompts.push(set.text.tokenizer().decode(&prompt, SpecialTokens::Kept));
    }
    assert!(prompts[0].contains("I must ask."), "{}", prompts[0]);
    assert_eq!(prompts[0], prompts[1]);
}

#[tokio::test]
async fn tokens_of_reasoning_are_counted_with_their_marks() {
    let set = server("qwen3");
    let reasoned = "<think>\nHm.\n</think>";
    for (output, reasoning) in [
        (format!("{reasoned}\n\nYes."), reasoned),
        (format!("{reasoned}{CALL}"), reasoned),
        ("Yes.".to_owned(), ""),
        ("<thin air".to_owned(), ""),
        ("<think>\nHm".to_owned(), "<think>\nHm"),
    ] {
        let count = set.tokens(reasoning).len();
        let answer = answer(&set, &output, json!({})).await;
        let details = &answer["usage"]["completion_tokens_details"];
        assert_eq!(details["reasoning_tokens"], count, "{output}");
        set.script_stop(&output);
        let response = set
            .post("/v1/responses", json!({"input": "Hi"}))
            .await
            .json();
        let details = &response["usage"]["output_tokens_details"];
        assert_eq!(details["reasoning_tokens"], count, "{output}");
    }
}
