//! Routes for operators, and what every answer carries.

use crate::stage::{post, set};
use axum::body::Body;
use axum::http::Request;
use serde_json::json;

#[tokio::test]
async fn tokenize_and_detokenize_did_not_agree() {
    let set = set("llama2");
    let body = json!({"model": "llama2", "prompt": "Hello, wörld", "return_token_strs": true});
    let answer = set.post("/tokenize", body).await.json();
    let tokens = answer["tokens"].as_array().unwrap();
    assert_eq!(tokens[0], 1, "the begin token is added");
    assert_eq!(answer["count"], tokens.len());
    assert_eq!(answer["max_model_len"], set.text.context_tokens_max());
    assert_eq!(answer["token_strs"][0], "<s>");
    let plain = json!({"prompt": "Hello, wörld", "add_special_tokens": false});
    let plain = set.post("/tokenize", plain).await.json();
    assert_eq!(plain["tokens"].as_array().unwrap()[..], tokens[1..]);
    let text = set
        .post("/detokenize", json!({"tokens": plain["tokens"]}))
        .await
        .json();
    assert_eq!(text["prompt"], "Hello, wörld");
    set.post("/detokenize", json!({"tokens": [5, 512]}))
        .await
        .is_error(400, "invalid_value", Some("tokens[1]"));
    set.post("/tokenize", json!({}))
        .await
        .is_error(400, "invalid_value", Some("prompt"));
}

#[tokio::test]
async fn operators_routes_were_not_there() {
    let set = set("llama3");
    for path in ["/health", "/live", "/ping", "/ready", "/version"] {
        assert_eq!(set.get(path).await.status, 200, "{path}");
    }
    let models = set.get("/v1/models").await.json();
    assert_eq!(models["object"], "list");
    assert_eq!(models["data"][0]["id"], "llama3");
    assert_eq!(models["data"][0]["max_model_len"], 512);
    assert_eq!(set.get("/v1/models/llama3").await.json(), models["data"][0]);
}

#[tokio::test]
async fn an_answer_could_not_be_matched_with_its_request() {
    let set = set("llama3");
    let mut request = post("/v1/completions", json!({"prompt": "a"}).to_string());
    request
        .headers_mut()
        .insert("x-request-id", "abc-1".parse().unwrap());
    set.says("x");
    let answer = set.send(request).await;
    assert_eq!(answer.header("x-request-id"), "abc-1");
    assert_eq!(answer.json()["id"], "cmpl-abc-1");
    let one = set.get("/nothing").await;
    let two = set.get("/nothing").await;
    assert_eq!(one.header("x-request-id").len(), 32);
    assert_ne!(one.header("x-request-id"), two.header("x-request-id"));
}

#[tokio::test]
async fn the_metrics_page_was_not_openmetrics() {
    let set = set("llama3");
    set.plays(
        vec![5, 6, 7],
        crate::stage::done(cleave_domain::FinishReason::Length),
    );
    set.post("/v1/completions", json!({"prompt": "a"})).await;
    set.post("/v1/completions", json!({"prompt": 5})).await;
    set.get("/etc/passwd").await;
    let answer = set.get("/metrics").await;
    assert_eq!(
        answer.header("content-type"),
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    );
    for line in [
        "cleave_http_requests_total{route=\"/v1/completions\",status=\"200\"} 1",
        "cleave_http_requests_total{route=\"/v1/completions\",status=\"400\"} 1",
        "cleave_http_requests_total{route=\"other\",status=\"404\"} 1",
        "cleave_request_endings_total{reason=\"completed\"} 1",
        "cleave_request_endings_total{reason=\"invalid\"} 1",
        "cleave_time_to_first_token_seconds_count 1",
        "cleave_inter_token_latency_seconds_count 2",
        "cleave_e2e_request_latency_seconds_count 1",
        "cleave_request_prompt_tokens_sum 2.0",
        "cleave_request_output_tokens_sum 3.0",
        "cleave_steps_total 7",
    ] {
        assert!(
            answer.body.lines().any(|found| found == line),
            "{line} is not in\n{}",
            answer.body
        );
    }
    assert!(answer.body.ends_with("# EOF\n"));
    assert_eq!(answer.body.matches("# EOF").count(), 1);
    let old = Request::get("/metrics").header("accept", "text/plain;version=0.0.4");
    let old = set.send(old.body(Body::empty()).unwrap()).await;
    assert_eq!(
        old.header("content-type"),
        "text/plain; version=0.0.4; charset=utf-8"
    );
}

#[tokio::test]
async fn a_worker_could_not_be_seen_or_told_what_to_do() {
    let set = set("llama3");
    let seen = set.get("/admin/workers").await.json();
    let worker = &seen["data"][0];
    assert_eq!(
        (&worker["name"], &worker["state"]),
        (&json!("d0"), &json!("ready"))
    );
    assert_eq!(
        worker["blocks"],
        json!({"count": 40, "free": 30, "held": 10})
    );
    assert_eq!(worker["links"][0]["transport"], "tcp");
    assert_eq!(worker["links"][0]["latency_seconds"], 0.002);
    assert_eq!(worker["counters"]["decodes"], 9);

    let told = set.post("/admin/drain", json!({"worker": "d0"})).await;
    assert_eq!(
        (told.status.as_u16(), &told.json()["state"]),
        (202, &json!("draining"))
    );
    for role in ["prefill", "decode", "both"] {
        let told = set
            .post("/admin/role", json!({"worker": "d0", "role": role}))
            .await;
        assert_eq!(
            (told.status.as_u16(), &told.json()["role"]),
            (202, &json!(role))
        );
    }
}

#[tokio::test]
async fn a_command_that_makes_no_sense_was_taken() {
    let set = set("llama3");
    let cases = [
        (
            "/admin/drain",
            json!({}),
            400,
            "invalid_value",
            Some("worker"),
        ),
        (
            "/admin/drain",
            json!({"worker": 7}),
            400,
            "invalid_value",
            Some("worker"),
        ),
        (
            "/admin/drain",
            json!({"worker": "x"}),
            404,
            "worker_not_found",
            Some("worker"),
        ),
        (
            "/admin/drain",
            json!({"worker": "d0", "role": "both"}),
            400,
            "invalid_value",
            Some("role"),
        ),
        ("/admin/drain", json!(["d0"]), 400, "invalid_json", None),
        (
            "/admin/drain",
            json!({"worker": "gone"}),
            503,
            "draining",
            None,
        ),
        (
            "/admin/role",
            json!({"worker": "d0"}),
            400,
            "invalid_value",
            Some("role"),
        ),
        (
            "/admin/role",
            json!({"worker": "d0", "role": "chief"}),
            400,
            "invalid_value",
            Some("role"),
        ),
        (
            "/admin/role",
            json!({"worker": "x", "role": "both"}),
            404,
            "worker_not_found",
            Some("worker"),
        ),
    ];
    for (path, body, status, code, param) in cases {
        set.post(path, body).await.is_error(status, code, param);
    }
    set.get("/admin/drain")
        .await
        .is_error(405, "method_not_allowed", None);
}
