//! Routes for operators, and the headers of every answer.

use crate::scripted_server::{files, options, post, server, server_with};
use axum::body::{Body, Bytes};
use axum::extract::ConnectInfo;
use axum::http::Request;
use cleave_api::{AdminKey, ApiOptions};
use serde_json::json;
use std::net::SocketAddr;

#[tokio::test]
async fn detokenize_reverses_tokenize() {
    let set = server("llama2");
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
async fn probe_and_model_routes_answer() {
    let set = server("llama3");
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
async fn load_shows_open_and_maximum_streams() {
    let set = server("llama3");
    let load = set.get("/load").await.json();
    assert_eq!(
        load,
        json!({"server_load": 3, "server_load_max": 8, "models": {}})
    );
}

#[tokio::test]
async fn openapi_document_is_served() {
    let answer = server("llama3").get("/openapi.json").await;
    assert_eq!(answer.header("content-type"), "application/json");
    assert_eq!(answer.json()["openapi"], "3.1.0");
}

#[tokio::test]
async fn a_request_joins_the_clients_trace() {
    let set = server("llama3");
    let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    for header in [good, "nonsense"] {
        let mut request = post("/v1/completions", json!({"prompt": "a"}).to_string());
        let headers = request.headers_mut();
        headers.insert("traceparent", header.parse().unwrap());
        set.script_text("x");
        assert_eq!(set.send(request).await.status, 200);
    }
    let traces = set.frontend.traces.lock().unwrap();
    assert_eq!(traces[0].unwrap().span, 0x00f0_67aa_0ba9_02b7);
    assert_eq!(traces[1], None);
}

#[tokio::test]
async fn answers_carry_the_request_id() {
    let set = server("llama3");
    let mut request = post("/v1/completions", json!({"prompt": "a"}).to_string());
    request
        .headers_mut()
        .insert("x-request-id", "abc-1".parse().unwrap());
    set.script_text("x");
    let answer = set.send(request).await;
    assert_eq!(answer.header("x-request-id"), "abc-1");
    assert_eq!(answer.json()["id"], "cmpl-abc-1");
    // An id that could break or flood a log line is replaced.
    for foul in ["two words", "a\tb", &"x".repeat(129)] {
        let request = Request::get("/nothing").header("x-request-id", foul);
        let answer = set.send(request.body(Body::empty()).unwrap()).await;
        assert_eq!(answer.header("x-request-id").len(), 32, "{foul}");
    }
    let one = set.get("/nothing").await;
    let two = set.get("/nothing").await;
    assert_eq!(one.header("x-request-id").len(), 32);
    assert_ne!(one.header("x-request-id"), two.header("x-request-id"));
}

#[tokio::test]
async fn metrics_are_openmetrics_or_prometheus_text() {
    let set = server("llama3");
    set.script_tokens(
        vec![5, 6, 7],
        crate::scripted_server::done(cleave_domain::FinishReason::Length),
    );
    set.post("/v1/completions", json!({"prompt": "a"})).await;
    set.post("/v1/completions", json!({"prompt": 5})).await;
    set.get("/etc/passwd").await;
    let accept = "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;q=0.5";
    let new = Request::get("/metrics").header("accept", accept);
    let answer = set.send(new.body(Body::empty()).unwrap()).await;
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
        "cleave_http_time_to_first_token_seconds_count 1",
        "cleave_http_inter_token_latency_seconds_count 2",
        "cleave_http_e2e_request_latency_seconds_count 1",
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
    // A reader without preference gets the format that every reader knows.
    let old = set.get("/metrics").await;
    assert_eq!(
        old.header("content-type"),
        "text/plain; version=0.0.4; charset=utf-8"
    );
    let typed = "# TYPE cleave_http_requests_total counter\n";
    assert!(old.body.contains(typed) && !old.body.contains("# EOF"));
}

#[tokio::test]
async fn admin_routes_list_and_command_workers() {
    let set = server("llama3");
    let workers = set.get("/admin/workers").await.json();
    let worker = &workers["data"][0];
    assert_eq!(
        (&worker["name"], &worker["state"]),
        (&json!("d0"), &json!("ready"))
    );
    assert_eq!(
        worker["blocks"],
        json!({"count": 40, "free": 30, "held": 10})
    );
    let load = json!({
        "queue_tokens": 0, "sequences_waiting": 0, "sequences_running": 2, "context_tokens": 500, "streams": 2,
        "backlog_seconds": 0.75, "tpot_least_seconds": 0.02,
    });
    assert_eq!(worker["load"], load);
    assert_eq!(worker["device"], "cores 0-1");
    assert_eq!(worker["price_error"], 0.042);
    assert_eq!(worker["links"][0]["transport"], "tcp");
    assert_eq!(worker["links"][0]["latency_seconds"], 0.002);
    assert_eq!(worker["counters"]["decodes"], 9);

    let answer = set.post("/admin/drain", json!({"worker": "d0"})).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["state"]),
        (202, &json!("draining"))
    );
    for role in ["prefill", "decode", "both"] {
        let answer = set
            .post("/admin/role", json!({"worker": "d0", "role": role}))
            .await;
        assert_eq!(
            (answer.status.as_u16(), &answer.json()["role"]),
            (202, &json!(role))
        );
    }
}

#[tokio::test]
async fn invalid_commands_are_refused() {
    let set = server("llama3");
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
            "/admin/drain",
            json!({"worker": "near"}),
            409,
            "same_process",
            None,
        ),
        (
            "/admin/drain",
            json!({"worker": "busy"}),
            503,
            "worker_busy",
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

/// A drain command from a peer with this address.
fn drain_from(peer: &str) -> Request<Body> {
    let mut request = post("/admin/drain", json!({"worker": "d0"}).to_string());
    let peer: SocketAddr = peer.parse().unwrap();
    request.extensions_mut().insert(ConnectInfo(peer));
    request
}

#[tokio::test]
async fn without_a_key_admin_accepts_only_local_requests() {
    let set = server("llama3");
    for near in ["127.0.0.1:5", "[::1]:5", "[::ffff:127.0.0.1]:5"] {
        assert_eq!(set.send(drain_from(near)).await.status, 202, "{near}");
    }
    for far in ["10.0.0.7:5", "[2001:db8::1]:5"] {
        let refused = set.send(drain_from(far)).await;
        refused.is_error(403, "forbidden", None);
        assert!(refused.body.contains("--admin-key"), "{}", refused.body);
    }
    // A local proxy forwards the request, or a page in a browser sends it.
    for header in ["forwarded", "x-forwarded-for", "origin"] {
        let mut request = drain_from("127.0.0.1:5");
        let value = "for=10.0.0.7".parse().unwrap();
        request.headers_mut().insert(header, value);
        set.send(request).await.is_error(403, "forbidden", None);
    }
    let mut request = Request::get("/admin/workers").body(Body::empty()).unwrap();
    let far: SocketAddr = "10.0.0.7:5".parse().unwrap();
    request.extensions_mut().insert(ConnectInfo(far));
    set.send(request).await.is_error(403, "forbidden", None);
}

#[tokio::test]
async fn commands_need_a_json_content_type() {
    let set = server("llama3");
    let body = json!({"worker": "d0"}).to_string();
    for kind in [
        None,
        Some("text/plain"),
        Some("application/x-www-form-urlencoded"),
    ] {
        let mut request = post("/admin/drain", body.clone());
        request.headers_mut().remove("content-type");
        if let Some(kind) = kind {
            let kind = kind.parse().unwrap();
            request.headers_mut().insert("content-type", kind);
        }
        let refused = set.send(request).await;
        refused.is_error(415, "unsupported_media_type", None);
    }
}

#[tokio::test]
async fn a_wrong_admin_key_is_refused() {
    let options = ApiOptions {
        admin_key: Some(AdminKey::new("s3cret").unwrap()),
        ..options()
    };
    let set = server_with(files("llama3"), options);
    let shows = |shown: Option<&str>| {
        let mut request = drain_from("10.0.0.7:5");
        if let Some(shown) = shown {
            let shown = shown.parse().unwrap();
            request.headers_mut().insert("authorization", shown);
        }
        request
    };
    for right in ["Bearer s3cret", "bearer  s3cret"] {
        let answer = set.send(shows(Some(right))).await;
        assert_eq!(answer.status, 202, "{right}: {}", answer.body);
    }
    let wrong = [
        "s3cret",
        "Bearer",
        "Bearer ",
        "Bearer s3cre",
        "Basic s3cret",
    ];
    for wrong in wrong.into_iter().map(Some).chain([None]) {
        let refused = set.send(shows(wrong)).await;
        refused.is_error(401, "invalid_api_key", None);
        assert_eq!(refused.header("www-authenticate"), "Bearer");
    }
    // A local request needs the key as well, where there is one.
    let near = set.send(drain_from("127.0.0.1:5")).await;
    near.is_error(401, "invalid_api_key", None);
    // Client routes need no admin key.
    assert_eq!(set.get("/v1/models").await.status, 200);
    for bad in ["", "two words", "schlüssel", "line\n"] {
        assert!(AdminKey::new(bad).is_err(), "{bad:?}");
    }
    let shown = format!("{:?}", AdminKey::new("s3cret"));
    assert!(!shown.contains("s3cret"), "{shown}");
}

#[tokio::test]
async fn a_broken_command_body_is_not_called_too_large() {
    let set = server("llama3");
    let pieces = [
        Ok(Bytes::from_static(b"{\"worker\":")),
        Err(std::io::Error::other("reset")),
    ];
    let body = Body::from_stream(futures::stream::iter(pieces));
    let broken = set.send(post("/admin/drain", body)).await;
    broken.is_error(400, "body_broken", None);
    let large = vec![b' '; 70_000];
    let large = set.send(post("/admin/drain", large)).await;
    large.is_error(413, "body_too_large", None);
}
