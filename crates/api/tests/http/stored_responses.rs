//! Stored responses: found, continued, removed, and never given to another tenant.

use crate::scripted_server::{
    HttpAnswer, TestServer, done, ended, files, options, plain, post, respond, server, server_with,
};
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use cleave_api::{PeerReply, ResponsePeers, ResponseStoreLimits};
use cleave_domain::{Ending, Failure, FinishReason, SloPolicy, Tenant, TenantQuota};
use cleave_text::SpecialTokens;
use futures::future::BoxFuture;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::advance;

pub(crate) const RESPONSES: &str = "/v1/responses";

/// SHA-256 of the keys `one` and `two`, as printed by `sha256sum`.
const DIGESTS: [(&str, &str); 2] = [
    (
        "acme",
        "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",
    ),
    (
        "blue",
        "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3",
    ),
];

fn digest(hex: &str) -> [u8; 32] {
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
    std::array::from_fn(byte)
}

/// A policy in which `acme` has the key `one`, and `blue` the key `two`.
pub(crate) fn two_tenants() -> Arc<SloPolicy> {
    let tenant = |(name, key): (&str, &str)| Tenant {
        name: name.to_owned(),
        key_digests: vec![digest(key)],
        share: 1,
        quota: TenantQuota::default(),
    };
    Arc::new(SloPolicy {
        tenants: DIGESTS.into_iter().map(tenant).collect(),
        ..SloPolicy::default()
    })
}

pub(crate) fn limited(limits: ResponseStoreLimits) -> TestServer {
    let mut options = options();
    options.responses = limits;
    server_with(files("qwen3"), options)
}

pub(crate) fn request(method: Method, path: &str, key: &str) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    if !key.is_empty() {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    request.body(Body::empty()).unwrap()
}

pub(crate) async fn get_as(set: &TestServer, key: &str, path: &str) -> HttpAnswer {
    set.send(request(Method::GET, path, key)).await
}

/// Answers a request with this output, as the holder of this key.
pub(crate) async fn answered_as(set: &TestServer, key: &str, output: &str, body: &Value) -> Value {
    set.script_stop(output);
    let mut request = post(RESPONSES, body.to_string());
    if !key.is_empty() {
        let key = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
        request.headers_mut().insert(header::AUTHORIZATION, key);
    }
    let answer = set.send(request).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

pub(crate) async fn answered(set: &TestServer, output: &str, body: &Value) -> Value {
    answered_as(set, "", output, body).await
}

pub(crate) fn id(response: &Value) -> &str {
    response["id"].as_str().unwrap()
}

pub(crate) fn path(response: &Value) -> String {
    format!("{RESPONSES}/{}", id(response))
}

/// Text of the prompt of the last request.
pub(crate) fn prompt(set: &TestServer) -> String {
    let tokens = set.last_submitted().prompt;
    set.text.tokenizer().decode(&tokens, SpecialTokens::Kept)
}

async fn series(set: &TestServer, name: &str) -> i64 {
    let text = set.get("/metrics").await.body;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0, |value| value.trim().parse().unwrap())
}

#[tokio::test]
async fn a_stored_response_is_found_and_deleted() {
    let set = server("qwen3");
    let body = json!({"input": "Hi", "metadata": {"k": "v"}});
    let response = answered(&set, "Hello.", &body).await;
    assert_eq!(response["store"], true);
    assert_eq!(response["previous_response_id"], Value::Null);
    let found = set.get(&path(&response)).await;
    assert_eq!(found.json(), response);
    assert!(series(&set, "cleave_stored_responses_bytes ").await > 0);
    assert_eq!(series(&set, "cleave_stored_responses ").await, 1);
    set.get(&format!("{}?stream=true", path(&response)))
        .await
        .is_error(400, "unsupported_parameter", Some("stream"));
    let removed = set
        .send(request(Method::DELETE, &path(&response), ""))
        .await;
    assert_eq!(
        removed.json(),
        json!({"id": id(&response), "object": "response", "deleted": true})
    );
    for method in [Method::GET, Method::DELETE] {
        let gone = set.send(request(method, &path(&response), "")).await;
        gone.is_error(404, "response_not_found", Some("response_id"));
    }
    assert_eq!(series(&set, "cleave_stored_responses_bytes ").await, 0);
    let deleted = "cleave_stored_response_evictions_total{reason=\"deleted\"} ";
    assert_eq!(series(&set, deleted).await, 1);
}

#[tokio::test]
async fn input_items_come_in_pages() {
    let set = server("qwen3");
    let call = json!({"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"});
    let input = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "d"},
    ]);
    let response = answered(&set, "e", &json!({"input": input})).await;
    let list = |query: &str| {
        let path = format!("{}/input_items{query}", path(&response));
        let set = &set;
        async move { set.get(&path).await }
    };
    let all = list("?order=asc").await.json();
    assert_eq!(
        (&all["object"], &all["has_more"]),
        (&"list".into(), &false.into())
    );
    let data = all["data"].as_array().unwrap();
    assert_eq!(
        data[0]["content"],
        json!([{"type": "input_text", "text": "a"}])
    );
    assert_eq!(data[1]["content"][0]["type"], "output_text");
    assert_eq!(data[2], call);
    assert!(
        data.iter()
            .all(|item| item["id"].is_string() && item["type"].is_string())
    );
    // The newest come first by default, and pages together are all.
    let mut pages = Vec::new();
    let mut query = "?limit=3".to_owned();
    loop {
        let page = list(&query).await.json();
        pages.extend(page["data"].as_array().unwrap().clone());
        assert_eq!(page["last_id"], pages.last().unwrap()["id"]);
        if page["has_more"] == false {
            break;
        }
        query = format!("?limit=3&after={}", page["last_id"].as_str().unwrap());
    }
    pages.reverse();
    assert_eq!(pages, *data);
    list("?limit=0")
        .await
        .is_error(400, "invalid_value", Some("limit"));
    list("?limit=x")
        .await
        .is_error(400, "invalid_value", Some("limit"));
    list("?order=up")
        .await
        .is_error(400, "invalid_value", Some("order"));
    list("?after=x")
        .await
        .is_error(400, "invalid_value", Some("after"));
    let text = answered(&set, "e", &json!({"input": "a \"b\""})).await;
    let items = set
        .get(&format!("{}/input_items", path(&text)))
        .await
        .json();
    assert_eq!(items["data"][0]["content"][0]["text"], "a \"b\"");
}

#[tokio::test]
async fn a_request_goes_on_from_a_stored_conversation() {
    let set = server("qwen3");
    let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
    let first = json!({"input": "First?", "instructions": "Be odd.", "tools": [tool]});
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    let one = answered(&set, call, &first).await;
    let result = json!({"type": "function_call_output", "call_id": one["output"][0]["call_id"], "output": "found"});
    let second = json!({"input": [result], "previous_response_id": id(&one)});
    let two = answered(&set, "Second.", &second).await;
    assert_eq!(two["previous_response_id"], id(&one));
    let third =
        json!({"input": "Third?", "instructions": "Be even.", "previous_response_id": id(&two)});
    let three = answered(&set, "Fourth.", &third).await;
    let chained = prompt(&set);
    assert!(
        !chained.contains("Be odd."),
        "instructions are not carried over"
    );
    // The same conversation in one request has the same prompt.
    let mut input = vec![json!({"role": "user", "content": "First?"})];
    input.extend(one["output"].as_array().unwrap().clone());
    input.push(second["input"][0].clone());
    input.extend(two["output"].as_array().unwrap().clone());
    input.push(json!({"role": "user", "content": "Third?"}));
    let whole = json!({"input": input, "instructions": "Be even.", "store": false});
    let whole = answered(&set, "Fourth.", &whole).await;
    assert_eq!(prompt(&set), chained);
    assert_eq!(whole["store"], false);
    set.get(&path(&whole))
        .await
        .is_error(404, "response_not_found", Some("response_id"));
    // Earlier responses may go; what goes on from them keeps their items.
    for response in [&one, &two] {
        let path = path(response);
        assert_eq!(
            set.send(request(Method::DELETE, &path, "")).await.status,
            200
        );
    }
    let missing = json!({"input": "x", "previous_response_id": id(&two)});
    let missing = set.post(RESPONSES, missing).await;
    missing.is_error(
        400,
        "previous_response_not_found",
        Some("previous_response_id"),
    );
    let fourth = json!({"input": "Fifth?", "previous_response_id": id(&three), "stream": true});
    set.script_stop("Sixth.");
    assert_eq!(set.post(RESPONSES, fourth).await.status, 200);
    let long = prompt(&set);
    for text in ["First?", "found", "Second.", "Third?", "Fourth.", "Fifth?"] {
        assert!(long.contains(text), "{text} in {long}");
    }
}

#[tokio::test]
async fn running_and_failed_responses_are_not_stored() {
    let set = server("qwen3");
    let sender = set.script_live();
    sender.unbounded_send(plain(0, 64)).unwrap();
    let mut body = set
        .stream(RESPONSES, json!({"input": "Hi", "stream": true}))
        .await;
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    let first = String::from_utf8(first.to_vec()).unwrap();
    let data = first
        .lines()
        .find_map(|line| line.strip_prefix("data: "))
        .unwrap();
    let created: Value = serde_json::from_str(data).unwrap();
    let running = created["response"].clone();
    assert_eq!(running["store"], true);
    let goes_on = json!({"input": "x", "previous_response_id": id(&running)});
    let early = set.post(RESPONSES, goes_on.clone()).await;
    early.is_error(
        400,
        "previous_response_not_found",
        Some("previous_response_id"),
    );
    // Another conversation goes on meanwhile.
    let other = answered(&set, "y", &json!({"input": "x"})).await;
    let next = json!({"input": "z", "previous_response_id": id(&other)});
    answered(&set, "w", &next).await;
    sender
        .unbounded_send(ended(done(FinishReason::Stop)))
        .unwrap();
    let rest = body.collect().await.unwrap().to_bytes();
    assert!(String::from_utf8_lossy(&rest).contains("response.completed"));
    answered(&set, "v", &goes_on).await;
    // A failed one leaves nothing.
    let bytes = series(&set, "cleave_stored_responses_bytes ").await;
    let sender = set.script_live();
    for event in [plain(0, 64), ended(Ending::Failed(Failure::WorkerLost))] {
        sender.unbounded_send(event).unwrap();
    }
    let failed = set
        .post(RESPONSES, json!({"input": "Hi", "stream": true}))
        .await;
    let last = failed.body.rsplit("data: ").next().unwrap();
    let last: Value = serde_json::from_str(last.trim()).unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["store"], false);
    set.get(&path(&last["response"])).await.is_error(
        404,
        "response_not_found",
        Some("response_id"),
    );
    assert_eq!(series(&set, "cleave_stored_responses_bytes ").await, bytes);
}

#[tokio::test]
async fn tenants_never_find_each_others_responses() {
    let set = server("qwen3");
    *set.frontend.policy.lock().unwrap() = two_tenants();
    let response = answered_as(&set, "one", "Hello.", &json!({"input": "Hi"})).await;
    let (path, items) = (path(&response), format!("{}/input_items", path(&response)));
    for other in ["two", ""] {
        for path in [&path, &items] {
            let hidden = get_as(&set, other, path).await;
            hidden.is_error(404, "response_not_found", Some("response_id"));
        }
        let kept = set.send(request(Method::DELETE, &path, other)).await;
        kept.is_error(404, "response_not_found", Some("response_id"));
        let inside = format!("/fleet/responses/{}", id(&response));
        assert_eq!(get_as(&set, other, &inside).await.status, 404);
        let inside = format!("{inside}/conversation");
        assert_eq!(get_as(&set, other, &inside).await.status, 404);
    }
    let next = json!({"input": "x", "previous_response_id": id(&response)});
    let stolen = set.post(RESPONSES, next.clone()).await;
    stolen.is_error(
        400,
        "previous_response_not_found",
        Some("previous_response_id"),
    );
    assert_eq!(get_as(&set, "one", &path).await.status, 200);
    answered_as(&set, "one", "y", &next).await;
}

#[tokio::test(start_paused = true)]
async fn old_responses_go_and_their_bytes_are_free() {
    let age_max = Duration::from_secs(60);
    let set = limited(ResponseStoreLimits {
        age_max,
        ..ResponseStoreLimits::default()
    });
    let one = answered(&set, "a", &json!({"input": "Hi"})).await;
    advance(age_max / 2).await;
    let next = json!({"input": "b", "previous_response_id": id(&one)});
    let two = answered(&set, "c", &next).await;
    advance(age_max / 2).await;
    set.get(&path(&one))
        .await
        .is_error(404, "response_not_found", Some("response_id"));
    assert_eq!(set.get(&path(&two)).await.status, 200);
    let long = json!({"input": "d", "previous_response_id": id(&two)});
    answered(&set, "e", &long).await;
    assert!(
        prompt(&set).contains("Hi"),
        "a conversation is as young as its last response"
    );
    // No request is needed for the rest to go.
    tokio::time::sleep(age_max).await;
    tokio::task::yield_now().await;
    assert_eq!(series(&set, "cleave_stored_responses ").await, 0);
    assert_eq!(series(&set, "cleave_stored_responses_bytes ").await, 0);
    let aged = "cleave_stored_response_evictions_total{reason=\"age\"} ";
    assert_eq!(series(&set, aged).await, 3);
}

#[tokio::test]
async fn a_full_store_evicts_the_oldest_and_counts_it() {
    let set = limited(ResponseStoreLimits {
        bytes_max: 20_000,
        tenant_bytes_max: 10_000,
        ..ResponseStoreLimits::default()
    });
    let body = json!({"input": "x", "metadata": {"k": "v".repeat(2000)}});
    let mut responses = Vec::new();
    for _ in 0..4 {
        responses.push(answered(&set, "y", &body).await);
    }
    set.get(&path(&responses[0]))
        .await
        .is_error(404, "response_not_found", Some("response_id"));
    assert_eq!(set.get(&path(&responses[3])).await.status, 200);
    let evicted = "cleave_stored_response_evictions_total{reason=\"tenant_bytes\"} ";
    assert!(series(&set, evicted).await > 0);
    assert!(series(&set, "cleave_stored_responses_bytes ").await <= 10_000);
    // One that never fits is not stored, and says so.
    let long = answered(
        &set,
        "y",
        &json!({"input": "x", "metadata": {"k": "v".repeat(12_000)}}),
    )
    .await;
    assert_eq!(long["store"], false);
    assert_eq!(long["warnings"][0]["param"], "store");
    assert_eq!(set.get(&path(&responses[3])).await.status, 200);
    assert_eq!(series(&set, "cleave_responses_not_stored_total ").await, 1);
}

#[tokio::test]
async fn without_memory_nothing_is_stored() {
    let set = limited(ResponseStoreLimits {
        bytes_max: 0,
        ..ResponseStoreLimits::default()
    });
    let response = answered(&set, "a", &json!({"input": "Hi", "store": true})).await;
    assert_eq!(response["store"], false);
    set.get(&path(&response))
        .await
        .is_error(404, "response_not_found", Some("response_id"));
    let next = json!({"input": "x", "previous_response_id": id(&response)});
    let refused = set.post(RESPONSES, next).await;
    refused.is_error(400, "unsupported_parameter", Some("previous_response_id"));
    assert!(
        refused.body.contains("--response-store-memory"),
        "{}",
        refused.body
    );
}

#[tokio::test]
async fn a_stored_conversation_counts_as_a_part_of_the_body() {
    let mut options = options();
    options.body_bytes_max = 4000;
    let set = server_with(files("qwen3"), options);
    // No template shows what only OpenAI can read.
    let item = json!({"type": "reasoning", "summary": [], "encrypted_content": "x".repeat(2500)});
    let input = json!([item, {"role": "user", "content": "Hi"}]);
    let one = answered(&set, "a", &json!({"input": input})).await;
    let next = json!({"input": input, "previous_response_id": id(&one)});
    let long = set.post(RESPONSES, next).await;
    long.is_error(400, "context_length_exceeded", Some("previous_response_id"));
    let twice = format!(
        r#"{{"input": "x", "previous_response_id": "{0}", "previous_response_id": "{0}"}}"#,
        id(&one)
    );
    let twice = set.send(post(RESPONSES, twice)).await;
    twice.is_error(
        400,
        "previous_response_not_found",
        Some("previous_response_id"),
    );
}

#[tokio::test(start_paused = true)]
async fn what_a_response_repeats_is_in_the_memory_of_bodies() {
    let mut options = options();
    options.body_memory_bytes = 1;
    let set = server_with(files("qwen3"), options);
    // 256 KiB are for short bodies, four times the longest.
    let body = json!({"input": "Hi", "metadata": {"k": "v".repeat(50 << 10)}, "stream": true, "store": false});
    let mut running = Vec::new();
    let refused = loop {
        let sender = set.script_live();
        sender.unbounded_send(plain(0, 64)).unwrap();
        let answer = respond(set.router.clone(), post(RESPONSES, body.to_string())).await;
        if answer.status() != StatusCode::OK {
            break answer;
        }
        running.push((sender, answer));
        assert!(
            running.len() < 10,
            "what running responses repeat is not counted"
        );
    };
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(running.len() >= 2);
    running.clear();
    set.frontend.scripts.lock().unwrap().clear();
    answered(
        &set,
        "a",
        &json!({"input": "Hi", "metadata": {"k": "v".repeat(50 << 10)}}),
    )
    .await;
}

/// The other routers of a test, which are asked without a network.
#[derive(Default)]
pub(crate) struct TestPeers {
    /// Routes for peers; `None` for a router that is gone.
    pub(crate) routers: Mutex<Vec<Option<Router>>>,
    /// Paths that were asked.
    pub(crate) asked: Mutex<Vec<String>>,
}

impl ResponsePeers for TestPeers {
    fn ask(
        &self,
        method: Method,
        path: String,
        headers: HeaderMap,
        bytes_max: usize,
    ) -> BoxFuture<'static, Vec<PeerReply>> {
        self.asked.lock().unwrap().push(path.clone());
        let routers = self.routers.lock().unwrap().clone();
        Box::pin(async move {
            let mut replies = Vec::new();
            for router in routers {
                let Some(router) = router else {
                    replies.push(PeerReply::Silent("gone".into()));
                    continue;
                };
                let mut request = Request::builder().method(&method).uri(&path);
                *request.headers_mut().unwrap() = headers.clone();
                let answer = respond(router, request.body(Body::empty()).unwrap()).await;
                let status = answer.status();
                let body = answer.into_body().collect().await.unwrap().to_bytes();
                assert!(body.len() <= bytes_max);
                replies.push(PeerReply::Answered(status, body));
            }
            replies
        })
    }
}

/// Two routers of one fleet that know each other.
pub(crate) fn two_routers() -> ([TestServer; 2], [Arc<TestPeers>; 2]) {
    let sets = [server("qwen3"), server("qwen3")];
    let peers = [Arc::<TestPeers>::default(), Arc::default()];
    for (index, set) in sets.iter().enumerate() {
        let number = 0x00ab_c000 + index as u32;
        set.frontend.router_number.store(number, Ordering::Relaxed);
        *set.frontend.policy.lock().unwrap() = two_tenants();
        let own = set.app.fellow_router();
        // A name may stand for the router that asks, too.
        let other = sets[1 - index].app.fellow_router();
        *peers[index].routers.lock().unwrap() = vec![Some(own), Some(other)];
        set.app.ask_peers(peers[index].clone());
    }
    (sets, peers)
}

#[tokio::test]
async fn two_routers_behind_a_round_robin_serve_one_conversation() {
    let (sets, peers) = two_routers();
    let mut previous = Value::Null;
    let mut responses = Vec::new();
    for turn in 0..6 {
        let set = &sets[turn % 2];
        let body = json!({"input": format!("Question {turn}?"), "previous_response_id": previous});
        let response = answered_as(set, "one", &format!("Answer {turn}."), &body).await;
        previous = response["id"].clone();
        responses.push(response);
    }
    let text = prompt(&sets[1]);
    for turn in 0..5 {
        assert!(text.contains(&format!("Question {turn}?")), "{text}");
        assert!(text.contains(&format!("Answer {turn}.")), "{text}");
    }
    // Each router finds every response, whoever stored it, for its tenant only.
    for set in &sets {
        for response in &responses {
            let found = get_as(set, "one", &path(response)).await;
            assert_eq!(found.json(), *response);
            let items = format!("{}/input_items", path(response));
            assert_eq!(get_as(set, "one", &items).await.status, 200);
            let hidden = get_as(set, "two", &path(response)).await;
            hidden.is_error(404, "response_not_found", Some("response_id"));
        }
    }
    // A removal reaches the router that stored it, and is told apart from a lost router.
    let (first, other) = (&responses[0], &sets[1]);
    let stolen = other
        .send(request(Method::DELETE, &path(first), "two"))
        .await;
    stolen.is_error(404, "response_not_found", Some("response_id"));
    let removed = other
        .send(request(Method::DELETE, &path(first), "one"))
        .await;
    assert_eq!(removed.status, 200);
    for set in &sets {
        let gone = get_as(set, "one", &path(first)).await;
        gone.is_error(404, "response_not_found", Some("response_id"));
        assert!(gone.body.contains("was deleted"), "{}", gone.body);
    }
    // Nobody is asked for ids that no router draws, or for the own ones.
    peers[1].asked.lock().unwrap().clear();
    for odd in [
        "resp_1",
        "x%2F..%2Fy",
        &id(&responses[1]).replace("resp_", "msg_"),
    ] {
        let odd = get_as(&sets[1], "one", &format!("{RESPONSES}/{odd}")).await;
        odd.is_error(404, "response_not_found", Some("response_id"));
    }
    get_as(&sets[1], "two", &path(&responses[1])).await;
    assert!(peers[1].asked.lock().unwrap().is_empty());
    // A router that is gone takes its responses with it; conversations elsewhere have all turns.
    *peers[1].routers.lock().unwrap() = vec![None];
    let lost = get_as(&sets[1], "one", &path(&responses[2])).await;
    lost.is_error(404, "response_not_found", Some("response_id"));
    assert!(
        lost.body.contains("cannot be reached or was restarted"),
        "{}",
        lost.body
    );
    let body = json!({"input": "Last?", "previous_response_id": previous});
    answered_as(&sets[1], "one", "Yes.", &body).await;
    assert!(prompt(&sets[1]).contains("Question 0?"));
}
