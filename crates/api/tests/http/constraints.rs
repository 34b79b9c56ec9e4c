//! Constraints: what reaches a worker, and what is refused before.

use crate::input::{CHAT, TEXT, wrong_in_both};
use crate::scripted_server::{TestServer, server};
use cleave_domain::{Constraint, ConstraintEnd, GRAMMAR_BYTES_MAX, Grammar, Request};
use serde_json::{Value, json};

/// The request that these fields of a completion lead to.
async fn submitted(set: &TestServer, mut fields: Value) -> Request {
    set.script_text("x");
    fields["prompt"] = json!("Hi");
    let answer = set.post(TEXT, fields).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let mut submitted = set.frontend.submitted.lock().unwrap();
    submitted.pop().expect("one prompt is one request")
}

async fn constraint_of(set: &TestServer, fields: Value) -> Constraint {
    let request = submitted(set, fields).await;
    let constraint = request.sampling.constraint.expect("it is constrained");
    (*constraint).clone()
}

const SCHEMA: &str = r#"{"type": "object", "properties": {"b": {}, "a": {"const": 1}}}"#;

fn schema() -> Value {
    serde_json::from_str(SCHEMA).unwrap()
}

#[tokio::test]
async fn each_field_of_a_schema_is_the_same_constraint() {
    let set = server("llama3");
    // Properties keep their order, so the text is that of the body.
    let expected = Grammar::JsonSchema(schema().to_string().into());
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema()}});
    for fields in [
        json!({"response_format": format}),
        json!({"structured_outputs": {"json": schema()}}),
        json!({"structured_outputs": {"json": schema().to_string()}}),
        json!({"guided_json": schema()}),
        json!({"json_schema": schema().to_string()}),
    ] {
        let constraint = constraint_of(&set, fields).await;
        assert!(constraint.grammar == expected, "another text");
        assert_eq!(constraint.end, ConstraintEnd::Allowed);
    }
    for fields in [
        json!({"response_format": {"type": "json_object"}}),
        json!({"structured_outputs": {"json_object": true}}),
    ] {
        let object = Grammar::JsonSchema(r#"{"type":"object"}"#.into());
        assert!(constraint_of(&set, fields).await.grammar == object);
    }
}

#[tokio::test]
async fn expressions_choices_and_grammars_travel_as_they_are() {
    let set = server("llama3");
    let choice = Grammar::Choice(["yes".to_owned(), "no".to_owned()].into());
    for (fields, grammar) in [
        (
            json!({"guided_regex": "[a-c]+"}),
            Grammar::Regex("[a-c]+".into()),
        ),
        (json!({"regex": "[a-c]+"}), Grammar::Regex("[a-c]+".into())),
        (json!({"guided_choice": ["yes", "no"]}), choice.clone()),
        (
            json!({"structured_outputs": {"choice": ["yes", "no"]}}),
            choice,
        ),
        (
            json!({"guided_grammar": "start: \"a\""}),
            Grammar::Lark("start: \"a\"".into()),
        ),
    ] {
        let constraint = constraint_of(&set, fields.clone()).await;
        assert!(constraint.grammar == grammar, "{fields}");
    }
    for fields in [
        json!({"response_format": {"type": "text"}}),
        json!({"structured_outputs": {}}),
        json!({"structured_outputs": {"json_object": false}}),
    ] {
        assert_eq!(submitted(&set, fields).await.sampling.constraint, None);
    }
}

#[tokio::test]
async fn a_constraint_keeps_the_end_tokens_of_the_model() {
    let set = server("llama3");
    let free = submitted(&set, json!({"ignore_eos": true})).await;
    assert_eq!(free.stop.stop_tokens.len(), 0);
    let fields = json!({"ignore_eos": true, "regex": "[a-c]+"});
    let request = submitted(&set, fields).await;
    assert_eq!(request.stop.stop_tokens, *set.text.eos());
    let constraint = request.sampling.constraint.unwrap();
    assert_eq!(constraint.end, ConstraintEnd::Forced);
}

// Lesson: 41.
#[tokio::test]
async fn a_grammar_that_cannot_be_enforced_is_refused_by_field() {
    let set = server("llama3");
    for (fields, param, reason) in [
        (
            json!({"guided_json": {"type": "array", "uniqueItems": true}}),
            "guided_json",
            "uniqueItems",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}),
            "response_format.json_schema.schema",
            "not",
        ),
        (json!({"json_schema": "{"}), "json_schema", "EOF"),
        (
            json!({"structured_outputs": {"regex": "("}}),
            "structured_outputs.regex",
            "(",
        ),
        (
            json!({"guided_grammar": "start: other"}),
            "guided_grammar",
            "other",
        ),
    ] {
        let mut body = fields;
        body["prompt"] = json!("Hi");
        let answer = set.post(TEXT, body).await;
        answer.is_error(400, "invalid_value", Some(param));
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains(reason), "{message}");
        assert!(set.frontend.submitted.lock().unwrap().is_empty());
    }
}

// Lesson: 44.
#[tokio::test]
async fn constraints_of_the_wrong_shape_are_refused_by_field() {
    let set = server("llama3");
    let long = "a".repeat(GRAMMAR_BYTES_MAX + 1);
    let half = "a".repeat(GRAMMAR_BYTES_MAX / 2);
    for (fields, param) in [
        (json!({"guided_json": 3}), "guided_json"),
        (json!({"guided_json": {"title": long}}), "guided_json"),
        (
            json!({"structured_outputs": {"json": {"title": long}}}),
            "structured_outputs.json",
        ),
        (json!({"guided_regex": ""}), "guided_regex"),
        (json!({"guided_regex": long}), "guided_regex"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"guided_choice": ["a", 3]}), "guided_choice[1]"),
        (json!({"guided_choice": [half, half]}), "guided_choice"),
        (json!({"guided_regex": "a", "regex": "a"}), "regex"),
        (
            json!({"structured_outputs": {"regex": "a", "json_object": true}}),
            "structured_outputs.json_object",
        ),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format.json_schema",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
            "response_format.json_schema.schema",
        ),
        (
            json!({"response_format": {"type": "text", "json_schema": {"schema": {}}}}),
            "response_format.json_schema",
        ),
    ] {
        wrong_in_both(&set, fields, "invalid_value", param).await;
    }
}

/// The grammar of the output begins with reasoning, which is possible.
#[tokio::test]
async fn impossible_content_behind_reasoning_is_refused() {
    let set = server("qwen3");
    for budget in [None, Some(0), Some(5)] {
        for (param, value) in [
            ("guided_json", json!({"$ref": "#"})),
            ("guided_grammar", json!("start: start")),
            ("guided_json", json!({"multipleOf": 999_983})),
        ] {
            let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], param: value});
            if let Some(budget) = budget {
                body["thinking_token_budget"] = json!(budget);
            }
            let answer = set.post(CHAT, body).await;
            answer.is_error(400, "invalid_value", Some(param));
        }
    }
    assert!(set.frontend.submitted.lock().unwrap().is_empty());
}
