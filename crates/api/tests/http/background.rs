//! Responses that are made without a connection: `background`.

use crate::scripted_server::{TestServer, done, ended, plain, post, server};
use crate::stored_responses::{
    RESPONSES, answered, answered_as, get_as, id, limited, path, prompt, request, two_routers,
};
use axum::http::{HeaderValue, Method, header};
use cleave_api::ResponseStoreLimits;
use cleave_domain::{Ending, Failure, FinishReason};
use serde_json::{Value, json};

fn body() -> Value {
    json!({"input": "Hi", "background": true})
}

/// The response of this path once it has a status.
async fn once(set: &TestServer, path: &str, status: &str) -> Value {
    for _ in 0..1000 {
        let found = get_as(set, "one", path).await;
        if found.status == 200 && found.json()["status"] == status {
            return found.json();
        }
        tokio::task::yield_now().await;
    }
    panic!("never {status}: {}", get_as(set, "one", path).await.body);
}

#[tokio::test]
async fn a_response_in_the_background_is_found_while_it_runs() {
    let set = server("qwen3");
    let sender = set.script_live();
    let queued = set.post(RESPONSES, body()).await.json();
    assert_eq!(
        (&queued["status"], &queued["output"]),
        (&"queued".into(), &json!([]))
    );
    assert_eq!(
        (&queued["background"], &queued["store"]),
        (&true.into(), &true.into())
    );
    let path = path(&queued);
    assert_eq!(set.get(&path).await.json(), queued);
    let items = set.get(&format!("{path}/input_items")).await.json();
    assert_eq!(items["data"][0]["content"][0]["text"], "Hi");
    let early = json!({"input": "x", "previous_response_id": id(&queued)});
    let early = set.post(RESPONSES, early).await;
    early.is_error(
        400,
        "previous_response_not_found",
        Some("previous_response_id"),
    );
    sender.unbounded_send(plain(0, 64)).unwrap();
    once(&set, &path, "in_progress").await;
    sender
        .unbounded_send(ended(done(FinishReason::Stop)))
        .unwrap();
    let completed = once(&set, &path, "completed").await;
    assert_eq!(completed["output"][0]["type"], "message");
    assert!(completed["usage"]["output_tokens"].as_u64() > Some(0));
    let next = json!({"input": "And?", "previous_response_id": id(&queued)});
    answered(&set, "Yes.", &next).await;
    assert!(prompt(&set).contains("Hi"));
    // Nothing is left to cancel.
    let late = set
        .send(request(Method::POST, &format!("{path}/cancel"), ""))
        .await;
    assert_eq!(late.json(), completed);
}

#[tokio::test]
async fn a_cancelled_response_ends_its_flight() {
    let (sets, _) = two_routers();
    for (index, canceller) in sets.iter().enumerate() {
        let set = &sets[0];
        let sender = set.script_live();
        let mut request_of = post(RESPONSES, body().to_string());
        let key = HeaderValue::from_static("Bearer one");
        request_of.headers_mut().insert(header::AUTHORIZATION, key);
        let path = path(&set.send(request_of).await.json());
        sender.unbounded_send(plain(0, 64)).unwrap();
        once(set, &path, "in_progress").await;
        let cancel = format!("{path}/cancel");
        let stolen = canceller.send(request(Method::POST, &cancel, "two")).await;
        stolen.is_error(404, "response_not_found", Some("response_id"));
        let cancelled = canceller.send(request(Method::POST, &cancel, "one")).await;
        assert_eq!(cancelled.status, 200, "{index}: {}", cancelled.body);
        assert_eq!(cancelled.json()["status"], "cancelled");
        while !sender.is_closed() {
            tokio::task::yield_now().await;
        }
        for set in &sets {
            assert_eq!(get_as(set, "one", &path).await.json(), cancelled.json());
        }
        let again = canceller.send(request(Method::POST, &cancel, "one")).await;
        assert_eq!(again.json(), cancelled.json());
    }
    let plain = answered_as(&sets[0], "one", "a", &json!({"input": "Hi"})).await;
    let cancel = format!("{}/cancel", path(&plain));
    let refused = sets[0].send(request(Method::POST, &cancel, "one")).await;
    refused.is_error(400, "invalid_value", Some("response_id"));
}

#[tokio::test]
async fn a_failure_in_the_background_is_found() {
    let set = server("qwen3");
    let sender = set.script_live();
    let queued = set.post(RESPONSES, body()).await.json();
    for event in [plain(0, 64), ended(Ending::Failed(Failure::WorkerLost))] {
        sender.unbounded_send(event).unwrap();
    }
    let failed = once(&set, &path(&queued), "failed").await;
    assert_eq!(failed["error"]["code"], "server_error");
    // One that is deleted while it runs leaves nothing.
    let sender = set.script_live();
    let queued = set.post(RESPONSES, body()).await.json();
    let removed = set.send(request(Method::DELETE, &path(&queued), "")).await;
    assert_eq!(removed.status, 200);
    while !sender.is_closed() {
        tokio::task::yield_now().await;
    }
    let gone = set.get(&path(&queued)).await;
    gone.is_error(404, "response_not_found", Some("response_id"));
}

#[tokio::test]
async fn the_background_needs_a_store_and_no_stream() {
    let set = server("qwen3");
    for (more, code) in [
        (json!({"stream": true}), "unsupported_parameter"),
        (json!({"store": false}), "invalid_value"),
    ] {
        let mut body = body();
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let refused = set.post(RESPONSES, body).await;
        refused.is_error(400, code, Some("background"));
    }
    let off = limited(ResponseStoreLimits {
        bytes_max: 0,
        ..ResponseStoreLimits::default()
    });
    let refused = off.post(RESPONSES, body()).await;
    refused.is_error(400, "unsupported_parameter", Some("background"));
}
