//! API keys, quotas of tenants, and separation of their cached prefixes.

use crate::scripted_server::{HttpAnswer, TestServer, done, ended, plain, post, server};
use axum::body::Body;
use axum::http::{HeaderValue, Request, header};
use cleave_domain::{Ending, FinishReason, HeaderTrust, Refusal, SloPolicy, Tenant, TenantQuota};
use futures::StreamExt;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, advance};

const TEXT: &str = "/v1/completions";

/// SHA-256 of the keys `one` and `two`, as printed by `sha256sum`.
const ONE: &str = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
const TWO: &str = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3";

fn digest(hex: &str) -> [u8; 32] {
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
    std::array::from_fn(byte)
}

fn tenant(name: &str, key: &str, quota: TenantQuota) -> Tenant {
    Tenant {
        name: name.to_owned(),
        key_digests: vec![digest(key)],
        share: 1,
        quota,
    }
}

/// A server on which `acme` has the key `one` and this quota, and `blue` has the key `two`.
fn tenant_server(quota: TenantQuota, trust: HeaderTrust) -> TestServer {
    let set = server("llama3");
    let policy = SloPolicy {
        tenants: vec![
            tenant("acme", ONE, quota),
            tenant("blue", TWO, TenantQuota::default()),
        ],
        trust,
        ..SloPolicy::default()
    };
    *set.frontend.policy.lock().unwrap() = Arc::new(policy);
    set
}

fn keyed(key: &str, mut request: Request<Body>) -> Request<Body> {
    let key = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
    request.headers_mut().insert(header::AUTHORIZATION, key);
    request
}

async fn ask(set: &TestServer, key: &str, body: &Value) -> HttpAnswer {
    set.send(keyed(key, post(TEXT, body.to_string()))).await
}

fn short() -> Value {
    json!({"prompt": "a", "max_tokens": 3})
}

#[tokio::test]
async fn a_required_key_guards_every_client_route() {
    let trust = HeaderTrust {
        require_key: true,
        ..HeaderTrust::default()
    };
    let set = tenant_server(TenantQuota::default(), trust);
    for request in [
        post(TEXT, short().to_string()),
        post("/v1/chat/completions", "{}"),
        post("/tokenize", "{}"),
        post("/detokenize", "{}"),
        post("/v1/messages", "{}"),
        post("/v1/responses", "{}"),
        post("/v1/messages/count_tokens", "{}"),
        Request::get("/v1/models").body(Body::empty()).unwrap(),
        Request::get("/v1/models/x").body(Body::empty()).unwrap(),
        keyed("three", post(TEXT, short().to_string())),
        // The digest of a key is not a key.
        keyed(ONE, post(TEXT, short().to_string())),
    ] {
        let answer = set.send(request).await;
        answer.is_error(401, "invalid_api_key", None);
        assert_eq!(answer.header("www-authenticate"), "Bearer");
    }
    assert!(set.frontend.submitted.lock().unwrap().is_empty());
    // Probes need no key.
    for path in ["/health", "/ready", "/live", "/metrics", "/version"] {
        assert_eq!(set.get(path).await.status, 200, "{path}");
    }
    set.script_text("x");
    assert_eq!(ask(&set, "one", &short()).await.status, 200);
    let models = Request::get("/v1/models").body(Body::empty()).unwrap();
    assert_eq!(set.send(keyed("two", models)).await.status, 200);
}

// Invariant: I44.
#[tokio::test(start_paused = true)]
async fn retry_after_leads_to_admission() {
    let quota = TenantQuota {
        requests_per_minute: Some(3),
        ..TenantQuota::default()
    };
    let set = tenant_server(quota, HeaderTrust::default());
    for left in ["2", "1", "0"] {
        set.script_text("x");
        let answer = ask(&set, "one", &short()).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("x-ratelimit-limit-requests"), "3");
        assert_eq!(answer.header("x-ratelimit-remaining-requests"), left);
        assert_eq!(answer.header("x-ratelimit-limit-tokens"), "");
    }
    advance(Duration::from_millis(5000)).await;
    let answer = ask(&set, "one", &short()).await;
    answer.is_error(429, "tenant_rate", None);
    assert_eq!(answer.header("retry-after"), "15");
    assert_eq!(answer.header("retry-after-ms"), "15000");
    assert_eq!(answer.header("x-cleave-refused-reason"), "tenant_rate");
    assert_eq!(answer.header("x-ratelimit-reset-requests"), "55s");
    assert_eq!(answer.header("x-llm-d-request-dropped-reason"), "");
    // The limit applies to this tenant only.
    set.script_text("x");
    assert_eq!(ask(&set, "two", &short()).await.status, 200);
    let metrics = set.get("/metrics").await.body;
    let counted = "cleave_tenant_refusals_total{tenant=\"acme\",limit=\"tenant_rate\"} 1";
    assert!(metrics.contains(counted), "{metrics}");
    // A client that waits for the given time is admitted.
    advance(Duration::from_secs(15)).await;
    set.script_text("x");
    assert_eq!(ask(&set, "one", &short()).await.status, 200);
    ask(&set, "one", &short())
        .await
        .is_error(429, "tenant_rate", None);
}

#[tokio::test(start_paused = true)]
async fn token_quota_counts_prompts_and_answers() {
    let quota = TenantQuota {
        tokens_per_minute: Some(60),
        ..TenantQuota::default()
    };
    let set = tenant_server(quota, HeaderTrust::default());
    let prompt: Vec<u32> = (64..104).collect();
    let long = json!({"prompt": prompt, "max_tokens": 3});
    let last = done(FinishReason::Length);
    // The prompt counts 40 tokens, and the answer 3.
    set.script_tokens(vec![64, 65, 66], last.clone());
    assert_eq!(ask(&set, "one", &long).await.status, 200);
    let answer = ask(&set, "one", &long).await;
    answer.is_error(429, "tenant_tokens", None);
    assert_eq!(answer.header("x-ratelimit-remaining-tokens"), "17");
    assert_eq!(
        answer.header("retry-after"),
        "23",
        "a token comes back a second"
    );
    advance(Duration::from_secs(23)).await;
    // A refused request costs nothing.
    set.script_tokens(vec![], Ending::Refused(Refusal::NoWorker));
    ask(&set, "one", &long)
        .await
        .is_error(503, "no_worker", None);
    set.script_tokens(vec![64, 65, 66], last);
    assert_eq!(ask(&set, "one", &long).await.status, 200);
    ask(&set, "one", &long)
        .await
        .is_error(429, "tenant_tokens", None);
}

#[tokio::test(start_paused = true)]
async fn concurrent_streams_of_a_tenant_are_limited() {
    let quota = TenantQuota {
        streams_max: Some(2),
        ..TenantQuota::default()
    };
    let set = tenant_server(quota, HeaderTrust::default());
    let many = json!({"prompt": ["a", "b"], "n": 2, "max_tokens": 3});
    let answer = ask(&set, "one", &many).await;
    answer.is_error(400, "invalid_value", Some("n"));
    let flight = set.script_live();
    let live = json!({"prompt": "a", "max_tokens": 2, "stream": true});
    let script = async {
        flight.unbounded_send(plain(0, 64)).unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let two = json!({"prompt": "a", "n": 2, "max_tokens": 3});
        let answer = ask(&set, "one", &two).await;
        answer.is_error(429, "tenant_concurrency", None);
        assert_eq!(answer.header("retry-after"), "1");
        set.script_text("x");
        assert_eq!(ask(&set, "one", &short()).await.status, 200);
        for event in [plain(1, 65), ended(done(FinishReason::Length))] {
            flight.unbounded_send(event).unwrap();
        }
    };
    let (answer, ()) = tokio::join!(ask(&set, "one", &live), script);
    assert_eq!(answer.status, 200);
    // Every stream has ended and returned its place.
    set.script_text("x");
    set.script_text("x");
    let two = json!({"prompt": "a", "n": 2, "max_tokens": 3});
    assert_eq!(ask(&set, "one", &two).await.status, 200);
}

// Invariant: I44.
#[tokio::test(start_paused = true)]
async fn a_client_that_disconnects_frees_its_stream_quota() {
    let quota = TenantQuota {
        streams_max: Some(1),
        ..TenantQuota::default()
    };
    let set = tenant_server(quota, HeaderTrust::default());
    let _flight = set.script_live();
    let body = short();
    let left = tokio::time::timeout(Duration::from_millis(50), ask(&set, "one", &body));
    assert!(left.await.is_err(), "nobody answers it");
    set.script_text("x");
    assert_eq!(ask(&set, "one", &short()).await.status, 200);
}

#[tokio::test]
async fn priority_is_limited_by_the_tenant() {
    let quota = TenantQuota {
        priority_min: Some(-3),
        ..TenantQuota::default()
    };
    let set = tenant_server(quota, HeaderTrust::default());
    for (key, requested, resolved) in [("one", -9, -3), ("one", 4, 4), ("two", -9, -9)] {
        set.script_text("x");
        let body = json!({"prompt": "a", "max_tokens": 3, "priority": requested});
        assert_eq!(ask(&set, key, &body).await.status, 200);
        assert_eq!(set.last_submitted().priority, resolved, "{key} {requested}");
    }
}

// Lesson: 7.
#[tokio::test]
async fn tenants_share_no_cached_prefixes() {
    let salt = async |set: &TestServer, key: &str, salt: Option<&str>| {
        set.script_text("x");
        let mut body = short();
        if let Some(salt) = salt {
            body["cache_salt"] = salt.into();
        }
        assert_eq!(ask(set, key, &body).await.status, 200);
        set.last_submitted().cache_salt
    };
    let set = tenant_server(TenantQuota::default(), HeaderTrust::default());
    let mut salts = Vec::new();
    for key in ["one", "two", "nobody's"] {
        for own in [None, Some("s"), Some("acme")] {
            let first = salt(&set, key, own).await;
            assert_eq!(first, salt(&set, key, own).await, "its own are found again");
            assert!(!salts.contains(&first), "{key} {own:?}");
            salts.push(first);
        }
    }
    assert_eq!(salts[6], 0, "those without a tenant share what has no salt");
    let shared = HeaderTrust {
        shared_prefixes: true,
        ..HeaderTrust::default()
    };
    let set = tenant_server(TenantQuota::default(), shared);
    for own in [None, Some("s")] {
        assert_eq!(salt(&set, "one", own).await, salt(&set, "two", own).await);
    }
}

#[tokio::test(start_paused = true)]
async fn an_incomplete_body_times_out() {
    let set = tenant_server(TenantQuota::default(), HeaderTrust::default());
    let half = futures::stream::iter([Ok::<_, std::io::Error>("{\"prompt\": \"")]);
    let half = half.chain(futures::stream::pending());
    let began = Instant::now();
    let answer = set.send(post(TEXT, Body::from_stream(half))).await;
    answer.is_error(408, "body_too_slow", None);
    assert_eq!(
        began.elapsed().as_secs(),
        60,
        "of a clock that does not run"
    );
    assert_eq!(answer.header("connection"), "close");
    // A body that is read only for the sake of the answer has a time limit, too.
    let quota = TenantQuota {
        requests_per_minute: Some(1),
        ..TenantQuota::default()
    };
    let set = tenant_server(quota, HeaderTrust::default());
    set.script_text("x");
    assert_eq!(ask(&set, "one", &short()).await.status, 200);
    let never = futures::stream::pending::<Result<&str, std::io::Error>>();
    let request = keyed("one", post(TEXT, Body::from_stream(never)));
    let began = Instant::now();
    set.send(request).await.is_error(429, "tenant_rate", None);
    assert_eq!(began.elapsed().as_secs(), 5);
}

#[tokio::test(start_paused = true)]
async fn each_tenant_has_its_own_quota() {
    let quota = TenantQuota {
        requests_per_minute: Some(1),
        tokens_per_minute: Some(60),
        streams_max: Some(1),
        ..TenantQuota::default()
    };
    let set = server("llama3");
    let policy = SloPolicy {
        tenants: vec![tenant("acme", ONE, quota), tenant("blue", TWO, quota)],
        ..SloPolicy::default()
    };
    *set.frontend.policy.lock().unwrap() = Arc::new(policy);
    for key in ["one", "two"] {
        set.script_text("x");
        assert_eq!(ask(&set, key, &short()).await.status, 200, "{key}");
    }
    for key in ["one", "two"] {
        let answer = ask(&set, key, &short()).await;
        answer.is_error(429, "tenant_rate", None);
    }
}
