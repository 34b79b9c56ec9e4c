//! Items of stored responses that a request has by reference.

use crate::scripted_server::{TestServer, files, options, post, server, server_with};
use crate::stored_responses::{
    RESPONSES, answered, answered_as, id, limited, path, prompt, request, two_routers, two_tenants,
};
use axum::http::{HeaderValue, Method, header};
use cleave_api::ResponseStoreLimits;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::advance;

const CALL: &str = "<think>\nHm.\n</think>\n\nSure.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";

fn tools() -> Value {
    json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}])
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// References to the items of a response's output.
fn references(response: &Value) -> Vec<Value> {
    let items = response["output"].as_array().unwrap().iter();
    items
        .map(|item| json!({"type": "item_reference", "id": item["id"]}))
        .collect()
}

fn result_of(response: &Value) -> Value {
    let items = response["output"].as_array().unwrap();
    let call = items.iter().find(|item| item["type"] == "function_call");
    json!({"type": "function_call_output", "call_id": call.unwrap()["call_id"], "output": "found"})
}

/// A first turn with a call, as the holder of this key.
async fn first_turn(set: &TestServer, key: &str) -> Value {
    let body = json!({"input": [user("First?")], "tools": tools()});
    answered_as(set, key, CALL, &body).await
}

/// The body of the second turn, with the first one by reference.
fn second_body(first: &Value) -> Value {
    let mut input = vec![user("First?")];
    input.extend(references(first));
    input.push(result_of(first));
    json!({"input": input, "tools": tools()})
}

async fn refused_as(set: &TestServer, key: &str, body: &Value, id: &str) {
    let mut request = post(RESPONSES, body.to_string());
    let key = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
    request.headers_mut().insert(header::AUTHORIZATION, key);
    let refused = set.send(request).await;
    refused.is_error(404, "item_not_found", Some("input"));
    let message = format!("Item with id '{id}' not found");
    assert!(refused.body.contains(&message), "{}", refused.body);
}

#[tokio::test]
async fn references_stand_for_the_items_of_earlier_turns() {
    let set = server("qwen3");
    let one = first_turn(&set, "").await;
    let kinds: Vec<&Value> = one["output"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| &item["type"])
        .collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    // The items themselves make the prompt that references make.
    let mut whole = vec![user("First?")];
    whole.extend(one["output"].as_array().unwrap().clone());
    whole.push(result_of(&one));
    let unstored = |input: &[Value]| json!({"input": input, "tools": tools(), "store": false});
    answered(&set, "Second.", &unstored(&whole)).await;
    let expected = prompt(&set);
    let two = answered(&set, "Second.", &second_body(&one)).await;
    assert_eq!(prompt(&set), expected);
    // The stored input has the items, so that it outlives the first response.
    let items = set
        .get(&format!("{}/input_items?order=asc", path(&two)))
        .await
        .json();
    assert_eq!(items["data"][2], one["output"][1]);
    let removed = set.send(request(Method::DELETE, &path(&one), "")).await;
    assert_eq!(removed.status, 200);
    let mut third = second_body(&one);
    let input = third["input"].as_array_mut().unwrap();
    // A reference needs no type, and an item of a request is named as its list shows it.
    input[0] = json!({"id": items["data"][0]["id"]});
    input[1]["type"] = Value::Null;
    input.extend(references(&two));
    input.push(user("Third?"));
    let three = answered(&set, "Fourth.", &third).await;
    let long = prompt(&set);
    whole.extend(two["output"].as_array().unwrap().clone());
    whole.push(user("Third?"));
    answered(&set, "Fourth.", &unstored(&whole)).await;
    assert_eq!(prompt(&set), long);
    // A conversation that goes on from it has them, too.
    let next = json!({"input": "Fifth?", "previous_response_id": id(&three)});
    answered(&set, "Sixth.", &next).await;
    assert!(prompt(&set).contains("found"));
    let count = set.post("/v1/responses/input_tokens", third).await.json();
    assert_eq!(count["input_tokens"], three["usage"]["input_tokens"]);
}

#[tokio::test(start_paused = true)]
async fn a_reference_without_its_item_is_not_found() {
    let age_max = Duration::from_secs(60);
    let set = limited(ResponseStoreLimits {
        age_max,
        ..ResponseStoreLimits::default()
    });
    *set.frontend.policy.lock().unwrap() = two_tenants();
    let one = first_turn(&set, "one").await;
    let first_id = one["output"][0]["id"].as_str().unwrap();
    refused_as(&set, "two", &second_body(&one), first_id).await;
    let hidden = format!("/fleet/response_items?id={first_id}");
    let inside = set.send(request(Method::GET, &hidden, "two")).await;
    assert_eq!(
        (inside.status.as_u16(), inside.json()),
        (404, json!({"items": []}))
    );
    let inside = set.send(request(Method::GET, &hidden, "one")).await;
    assert_eq!(inside.json()["items"][0]["item"], one["output"][0]);
    for unknown in ["msg_1", "x/../y", "fc_00abc0000123456789abcdef0123456_0"] {
        let input = json!([user("a"), {"type": "item_reference", "id": unknown}]);
        refused_as(&set, "one", &json!({"input": input}), unknown).await;
    }
    let unstored = json!({"input": "a", "store": false});
    let unstored = answered_as(&set, "one", "b", &unstored).await;
    let input = json!({"input": references(&unstored)});
    refused_as(
        &set,
        "one",
        &input,
        unstored["output"][0]["id"].as_str().unwrap(),
    )
    .await;
    advance(age_max).await;
    refused_as(&set, "one", &second_body(&one), first_id).await;
    let off = limited(ResponseStoreLimits {
        bytes_max: 0,
        ..ResponseStoreLimits::default()
    });
    let refused = off.post(RESPONSES, second_body(&one)).await;
    refused.is_error(400, "unsupported_parameter", Some("input"));
}

#[tokio::test]
async fn items_by_reference_count_as_a_part_of_the_body() {
    let mut options = options();
    options.body_bytes_max = 4000;
    let set = server_with(files("qwen3"), options);
    let item = json!({"type": "reasoning", "id": "rs_own", "summary": [], "encrypted_content": "x".repeat(1500)});
    let one = answered(&set, "a", &json!({"input": [item, user("Hi")]})).await;
    let reference = json!({"type": "item_reference", "id": "rs_own"});
    let once = json!({"input": [reference, user("Hi")]});
    answered(&set, "b", &once).await;
    let long = json!({"input": [reference, reference, reference, user("Hi")]});
    let long = set.post(RESPONSES, long).await;
    long.is_error(400, "context_length_exceeded", Some("input"));
    let both =
        json!({"input": [reference, reference, user("Hi")], "previous_response_id": id(&one)});
    let both = set.post(RESPONSES, both).await;
    both.is_error(400, "context_length_exceeded", Some("previous_response_id"));
}

#[tokio::test]
async fn references_lead_to_the_items_of_another_router() {
    let (sets, peers) = two_routers();
    let one = first_turn(&sets[0], "one").await;
    let first_id = one["output"][0]["id"].as_str().unwrap();
    refused_as(&sets[1], "two", &second_body(&one), first_id).await;
    let two = answered_as(&sets[1], "one", "Second.", &second_body(&one)).await;
    let there = prompt(&sets[1]);
    answered_as(&sets[0], "one", "Second.", &second_body(&one)).await;
    assert_eq!(prompt(&sets[0]), there);
    // More items than one question has.
    let many: Vec<Value> = (0..40).map(|_| user("x")).collect();
    let many = answered_as(&sets[0], "one", "y", &json!({"input": many})).await;
    let digits = id(&many).trim_start_matches("resp_");
    let named = |index: usize| json!({"id": format!("msg_{digits}_in{index}")});
    let input: Vec<Value> = (0..40).map(named).collect();
    answered_as(&sets[1], "one", "z", &json!({"input": input})).await;
    assert_eq!(prompt(&sets[1]).matches("<|im_start|>user\nx").count(), 40);
    // Nobody is asked for ids that no router draws.
    peers[1].asked.lock().unwrap().clear();
    refused_as(
        &sets[1],
        "one",
        &json!({"input": [{"id": "own-1"}]}),
        "own-1",
    )
    .await;
    assert!(peers[1].asked.lock().unwrap().is_empty());
    // Items of a lost router are in the responses that had them by reference.
    *peers[1].routers.lock().unwrap() = vec![None];
    let mut third = second_body(&one);
    third["input"]
        .as_array_mut()
        .unwrap()
        .extend(references(&two));
    answered_as(&sets[1], "one", "Third.", &third).await;
    let lost = json!({"input": references(&many)});
    refused_as(
        &sets[1],
        "one",
        &lost,
        many["output"][0]["id"].as_str().unwrap(),
    )
    .await;
}
