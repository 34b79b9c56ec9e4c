//! Custom tools in both of OpenAI's APIs, and namespaces of functions.

use crate::input::CHAT;
use crate::scripted_server::{TestServer, post, server};
use cleave_domain::Grammar;
use cleave_text::SpecialTokens;
use serde_json::{Value, json};

const RESPONSES: &str = "/v1/responses";
const PATCH: &str = "*** Begin\n+a \"b\"\n*** End\n";
/// A grammar as agents have it for patches.
const LARK: &str = "start: line+\nline: \"+\" /(.*)/ LF -> add\n%import common.LF";

fn custom(name: &str, format: &Value) -> Value {
    json!({"type": "custom", "name": name, "description": "Applies it.", "format": format})
}

fn lark(definition: &str) -> Value {
    json!({"type": "grammar", "syntax": "lark", "definition": definition})
}

/// The output by which a model of this format calls a function.
fn written(name: &str, arguments: &Value) -> String {
    let call = json!({"name": name, "arguments": arguments});
    format!("<tool_call>\n{call}\n</tool_call>")
}

fn patch_call() -> String {
    written("patch", &json!({"input": PATCH}))
}

async fn answer(set: &TestServer, output: &str, fields: Value) -> Value {
    set.script_stop(output);
    let mut body = json!({"input": "Hi"});
    body.as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    let answer = set.post(RESPONSES, body).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn prompt(set: &TestServer) -> String {
    let tokens = set.last_submitted().prompt;
    set.text.tokenizer().decode(&tokens, SpecialTokens::Kept)
}

#[tokio::test]
async fn a_call_of_a_custom_tool_has_its_text_as_input() {
    let set = server("qwen3");
    let tools = json!([custom("patch", &json!({"type": "text"}))]);
    let response = answer(&set, &patch_call(), json!({"tools": tools})).await;
    let item = &response["output"][0];
    assert_eq!(item["type"], "custom_tool_call");
    assert_eq!(
        (&item["name"], &item["input"]),
        (&"patch".into(), &PATCH.into())
    );
    assert!(item.get("arguments").is_none());
    assert_eq!(
        response["tools"], tools,
        "the answer repeats the tool as it was given"
    );
    assert!(
        set.last_submitted().sampling.constraint.is_none(),
        "any text"
    );
    // The items go back, and the model sees the same call.
    let result =
        json!({"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"});
    let input = json!([{"role": "user", "content": "Hi"}, item, result]);
    answer(&set, "Yes.", json!({"tools": tools, "input": input})).await;
    let text = prompt(&set);
    let arguments = json!({"input": PATCH}).to_string();
    let shown = text.contains(&arguments) || text.contains(&arguments.replacen(':', ": ", 1));
    assert!(shown && text.contains("done"), "{text}");
}

#[tokio::test]
async fn events_of_a_custom_call_put_together_are_its_item() {
    let set = server("qwen3");
    set.script_stop(&patch_call());
    let body = json!({"input": "Hi", "stream": true, "tools": [custom("patch", &json!({"type": "text"}))]});
    let stream = set.send(post(RESPONSES, body.to_string())).await.body;
    let data = stream
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = data
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let of = |kind: &'static str| events.iter().filter(move |event| event["type"] == kind);
    let deltas = of("response.custom_tool_call_input.delta");
    let text: String = deltas
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!(text, PATCH);
    let done = of("response.custom_tool_call_input.done").next().unwrap();
    assert_eq!(done["input"], PATCH);
    let added = of("response.output_item.added").next().unwrap();
    assert_eq!(
        (&added["item"]["type"], &added["item"]["input"]),
        (&"custom_tool_call".into(), &"".into())
    );
    let item = &of("response.output_item.done").next().unwrap()["item"];
    assert_eq!(item["input"], PATCH);
    assert!(done["item_id"] == item["id"] && added["item"]["id"] == item["id"]);
}

#[tokio::test]
async fn a_grammar_of_a_custom_tool_is_enforced() {
    let set = server("qwen3");
    let regex = json!({"type": "grammar", "syntax": "regex", "definition": "[a-c]{2}"});
    for format in [lark(LARK), regex] {
        let tools = json!([custom("patch", &format)]);
        let response = answer(&set, "Yes.", json!({"tools": tools})).await;
        assert!(response.get("warnings").is_none(), "{response}");
        let constraint = set.last_submitted().sampling.constraint.unwrap();
        let Grammar::Lark(grammar) = &constraint.grammar else {
            panic!("{constraint:?}");
        };
        assert!(grammar.contains("pattern"), "{grammar}");
    }
    // A tool that cannot be enforced is not shown, and a choice of it is refused.
    let recursive = custom("patch", &lark("start: \"(\" start? \")\""));
    let response = answer(&set, "Yes.", json!({"tools": [recursive]})).await;
    assert_eq!(response["warnings"][0]["param"], "tools");
    assert_eq!(response["tools"], json!([]));
    assert!(!prompt(&set).contains("patch"));
    let choice = json!({"type": "custom", "name": "patch"});
    let chosen = json!({"input": "Hi", "tools": [recursive], "tool_choice": choice});
    let refused = set.post(RESPONSES, chosen).await;
    refused.is_error(400, "invalid_value", Some("tool_choice.name"));
    let chosen = json!({"tools": [custom("patch", &lark(LARK))], "tool_choice": choice});
    answer(&set, &patch_call(), chosen).await;
    for (format, param) in [
        (json!({"type": "prose"}), "tools[0].format.type"),
        (
            json!({"type": "grammar", "syntax": "ebnf", "definition": "x"}),
            "tools[0].format.syntax",
        ),
        (
            json!({"type": "grammar", "syntax": "lark"}),
            "tools[0].format.definition",
        ),
    ] {
        let body = json!({"input": "Hi", "tools": [custom("patch", &format)]});
        set.post(RESPONSES, body)
            .await
            .is_error(400, "invalid_value", Some(param));
    }
}

/// A custom tool as chat has it, in the place of the Responses API's.
fn of_chat(mut tool: Value) -> Value {
    let fields = tool.as_object_mut().unwrap();
    fields.remove("type");
    let format = fields.get_mut("format").and_then(Value::as_object_mut);
    if let Some(format) = format.filter(|format| format.len() > 1) {
        let kind = format.remove("type");
        let grammar = std::mem::take(format);
        format.extend([
            ("type".to_owned(), kind.into()),
            ("grammar".to_owned(), grammar.into()),
        ]);
    }
    json!({"type": "custom", "custom": tool})
}

fn chat_body(more: &Value) -> Value {
    let function =
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let tool = of_chat(custom("patch", &json!({"type": "text"})));
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": [function, tool, function]});
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

async fn chat(set: &TestServer, output: &str, fields: &Value) -> Value {
    set.script_stop(output);
    let answer = set.post(CHAT, chat_body(fields)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

#[tokio::test]
async fn chat_calls_custom_tools_as_the_other_api_does() {
    let set = server("qwen3");
    let output = format!("{}\n{}", patch_call(), written("f", &json!({"x": 1})));
    let whole = chat(&set, &output, &json!({})).await;
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls[0]["custom"], json!({"name": "patch", "input": PATCH}));
    assert_eq!(
        (&calls[0]["type"], calls[0].get("function")),
        (&"custom".into(), None)
    );
    assert_eq!(
        (&calls[1]["type"], &calls[1]["function"]["name"]),
        (&"function".into(), &"f".into())
    );
    // The prompt is that of the function that stands for the tool.
    let shown = prompt(&set);
    let input = json!({"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": false});
    let function = json!({"name": "patch", "description": "Applies it.", "parameters": input});
    let function = json!({"tools": [chat_body(&json!({}))["tools"][0], {"type": "function", "function": function}, chat_body(&json!({}))["tools"][0]]});
    chat(&set, "Yes.", &function).await;
    assert_eq!(prompt(&set), shown);
    // The call goes back, and the model sees the same call.
    let user = json!({"role": "user", "content": "Hi"});
    let answered = json!({"role": "assistant", "content": null, "tool_calls": [calls[0]]});
    let result = json!({"role": "tool", "tool_call_id": calls[0]["id"], "content": "done"});
    chat(&set, "Yes.", &json!({"messages": [user, answered, result]})).await;
    let shown = prompt(&set);
    let function = json!({"name": "patch", "arguments": {"input": PATCH}});
    let call = json!({"id": calls[0]["id"], "type": "function", "function": function});
    let answered = json!({"role": "assistant", "content": null, "tool_calls": [call]});
    chat(&set, "Yes.", &json!({"messages": [user, answered, result]})).await;
    assert_eq!(prompt(&set), shown);
    // Without tools in the prompt the call is text.
    let hidden = chat(&set, &patch_call(), &json!({"tool_choice": "none"})).await;
    assert_eq!(hidden["choices"][0]["message"]["content"], patch_call());
}

#[tokio::test]
async fn deltas_of_a_custom_call_put_together_are_its_input() {
    let set = server("qwen3");
    set.script_stop(&patch_call());
    let stream = set
        .post(CHAT, chat_body(&json!({"stream": true})))
        .await
        .body;
    let data = stream
        .lines()
        .filter_map(|line| line.strip_prefix("data: {"));
    let deltas = data.filter_map(|data| {
        let chunk: Value = serde_json::from_str(&format!("{{{data}")).unwrap();
        let call = &chunk["choices"][0]["delta"]["tool_calls"][0];
        (!call.is_null()).then(|| call.clone())
    });
    let deltas: Vec<Value> = deltas.collect();
    assert_eq!(deltas[0]["custom"], json!({"name": "patch", "input": ""}));
    assert_eq!(
        (&deltas[0]["type"], deltas[0]["id"].is_string()),
        (&"custom".into(), true)
    );
    let mut text = String::new();
    for delta in &deltas[1..] {
        assert_eq!(delta.as_object().unwrap().len(), 2, "{delta}");
        assert_eq!(delta["index"], 0);
        text += delta["custom"]["input"].as_str().unwrap();
    }
    assert_eq!(text, PATCH);
}

#[tokio::test]
async fn chat_enforces_grammars_and_choices_of_custom_tools() {
    let set = server("qwen3");
    let constraint = |set: &TestServer| set.last_submitted().sampling.constraint;
    let choice = json!({"type": "custom", "custom": {"name": "patch"}});
    let chosen = chat(&set, &patch_call(), &json!({"tool_choice": choice})).await;
    assert_eq!(chosen["choices"][0]["finish_reason"], "stop");
    assert!(constraint(&set).is_some());
    let allowed = json!({"mode": "required", "tools": [choice]});
    let allowed = json!({"type": "allowed_tools", "allowed_tools": allowed});
    chat(&set, &patch_call(), &json!({"tool_choice": allowed})).await;
    let bound = constraint(&set).unwrap();
    let Grammar::Lark(grammar) = &bound.grammar else {
        panic!("{bound:?}");
    };
    assert!(
        grammar.contains("patch") && !grammar.contains("\\\"f\\\""),
        "{grammar}"
    );
    let tool = of_chat(custom("patch", &lark(LARK)));
    chat(&set, "Yes.", &json!({"tools": [tool]})).await;
    let bound = constraint(&set).unwrap();
    let Grammar::Lark(grammar) = &bound.grammar else {
        panic!("{bound:?}");
    };
    assert!(grammar.contains("pattern"), "{grammar}");
    let recursive = of_chat(custom("patch", &lark("start: \"(\" start? \")\"")));
    let both = json!({"type": "custom", "custom": {"name": "a"}, "function": {"name": "b"}});
    for (tools, param) in [
        (json!([recursive]), "tools[0].custom.format"),
        (json!([{"type": "custom"}]), "tools[0].custom"),
        (json!([{"custom": {"name": "a"}}]), "tools[0].type"),
        (
            json!([{"type": "custom", "custom": {}}]),
            "tools[0].custom.name",
        ),
        (json!([both]), "tools[0].function"),
        (
            json!([of_chat(custom("a", &json!({"type": "grammar"})))]),
            "tools[0].custom.format.grammar",
        ),
    ] {
        let refused = set.post(CHAT, chat_body(&json!({"tools": tools}))).await;
        refused.is_error(400, "invalid_value", Some(param));
    }
    // A choice has the kind of its tool.
    let wrong = json!({"type": "function", "function": {"name": "patch"}});
    let refused = set
        .post(CHAT, chat_body(&json!({"tool_choice": wrong})))
        .await;
    refused.is_error(400, "invalid_value", Some("tool_choice.function.name"));
    let user = json!({"role": "user", "content": "Hi"});
    for (call, param) in [
        (
            json!({"type": "custom", "custom": {"name": "a"}}),
            "custom.input",
        ),
        (json!({"custom": {"name": "a", "input": "b"}}), "type"),
    ] {
        let answered = json!({"role": "assistant", "tool_calls": [call]});
        let fields = json!({"messages": [user, answered]});
        let refused = set.post(CHAT, chat_body(&fields)).await;
        let param = format!("messages[1].tool_calls[0].{param}");
        refused.is_error(400, "invalid_value", Some(&param));
    }
}

#[tokio::test]
async fn functions_of_a_namespace_keep_their_names() {
    let set = server("qwen3");
    let function = json!({"type": "function", "name": "find", "parameters": {"type": "object"}});
    let space = json!({"type": "namespace", "name": "docs", "description": "Documents.", "tools": [function]});
    let fields = json!({"tools": [space, function]});
    let output = format!(
        "{}\n{}",
        written("docs__find", &json!({})),
        written("find", &json!({}))
    );
    let response = answer(&set, &output, fields.clone()).await;
    let calls = response["output"].as_array().unwrap();
    assert_eq!(
        (&calls[0]["name"], &calls[0]["namespace"]),
        (&"find".into(), &"docs".into())
    );
    assert_eq!(calls[1]["name"], "find");
    assert!(calls[1].get("namespace").is_none());
    assert_eq!(response["tools"][0], space);
    let mut input = vec![json!({"role": "user", "content": "Hi"})];
    input.extend(calls.clone());
    let mut fields = fields;
    fields["input"] = input.into();
    answer(&set, "Yes.", fields).await;
    assert!(
        prompt(&set).contains(r#""name": "docs__find""#),
        "{}",
        prompt(&set)
    );
}
