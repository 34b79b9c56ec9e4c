//! Who is let in, how much of it, and whose cached prefixes it finds.

use crate::stage::{Answer, Set, done, ended, plain, post, set};
use axum::body::Body;
use axum::http::{HeaderValue, Request, header};
use cleave_domain::{Ending, FinishReason, Quota, Refusal, SloPolicy, Tenant, Trust};
use futures::StreamExt;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, advance};

const TEXT: &str = "/v1/completions";

/// SHA-256 of the keys `one` and `two`, as `sha256sum` has them.
const ONE: &str = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
const TWO: &str = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3";

fn digest(hex: &str) -> [u8; 32] {
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
    std::array::from_fn(byte)
}

fn tenant(name: &str, key: &str, quota: Quota) -> Tenant {
    Tenant {
        name: name.to_owned(),
        key_digests: vec![digest(key)],
        share: 1,
        quota,
    }
}

/// A server on which `acme` has the key `one` and that quota, and `blue` the key `two`.
fn server(quota: Quota, trust: Trust) -> Set {
    let set = set("llama3");
    let policy = SloPolicy {
        tenants: vec![
            tenant("acme", ONE, quota),
            tenant("blue", TWO, Quota::default()),
        ],
        trust,
        ..SloPolicy::default()
    };
    *set.stage.policy.lock().unwrap() = Arc::new(policy);
    set
}

fn keyed(key: &str, mut request: Request<Body>) -> Request<Body> {
    let key = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
    request.headers_mut().insert(header::AUTHORIZATION, key);
    request
}

async fn ask(set: &Set, key: &str, body: &Value) -> Answer {
    set.send(keyed(key, post(TEXT, body.to_string()))).await
}

fn short() -> Value {
    json!({"prompt": "a", "max_tokens": 3})
}

#[tokio::test]
async fn without_a_key_anybody_was_served() {
    let trust = Trust {
        require_key: true,
        ..Trust::default()
    };
    let set = server(Quota::default(), trust);
    for request in [
        post(TEXT, short().to_string()),
        post("/v1/chat/completions", "{}"),
        post("/tokenize", "{}"),
        post("/detokenize", "{}"),
        Request::get("/v1/models").body(Body::empty()).unwrap(),
        Request::get("/v1/models/x").body(Body::empty()).unwrap(),
        keyed("three", post(TEXT, short().to_string())),
        // The digest of a key is no key.
        keyed(ONE, post(TEXT, short().to_string())),
    ] {
        let answer = set.send(request).await;
        answer.is_error(401, "invalid_api_key", None);
        assert_eq!(answer.header("www-authenticate"), "Bearer");
    }
    assert!(set.stage.submitted.lock().unwrap().is_empty());
    // What probes ask for is for everybody.
    for path in ["/health", "/ready", "/live", "/metrics", "/version"] {
        assert_eq!(set.get(path).await.status, 200, "{path}");
    }
    set.says("x");
    assert_eq!(ask(&set, "one", &short()).await.status, 200);
    let models = Request::get("/v1/models").body(Body::empty()).unwrap();
    assert_eq!(set.send(keyed("two", models)).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_tenant_sends_as_many_requests_as_it_may_and_is_told_when_there_are_more() {
    let quota = Quota {
        requests_per_minute: Some(3),
        ..Quota::default()
    };
    let set = server(quota, Trust::default());
    for left in ["2", "1", "0"] {
        set.says("x");
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
    // It is this tenant's limit and nobody else's.
    set.says("x");
    assert_eq!(ask(&set, "two", &short()).await.status, 200);
    let metrics = set.get("/metrics").await.body;
    let counted = "cleave_tenant_refusals_total{tenant=\"acme\",limit=\"tenant_rate\"} 1";
    assert!(metrics.contains(counted), "{metrics}");
    // And who comes back when told is served.
    advance(Duration::from_secs(15)).await;
    set.says("x");
    assert_eq!(ask(&set, "one", &short()).await.status, 200);
    ask(&set, "one", &short())
        .await
        .is_error(429, "tenant_rate", None);
}

#[tokio::test(start_paused = true)]
async fn a_tenants_tokens_are_those_of_prompts_and_answers() {
    let quota = Quota {
        tokens_per_minute: Some(60),
        ..Quota::default()
    };
    let set = server(quota, Trust::default());
    let prompt: Vec<u32> = (64..104).collect();
    let long = json!({"prompt": prompt, "max_tokens": 3});
    let last = done(FinishReason::Length);
    // 40 of a prompt, and 3 of the answer.
    set.plays(vec![64, 65, 66], last.clone());
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
    // What was not served costs nothing.
    set.plays(vec![], Ending::Refused(Refusal::NoWorker));
    ask(&set, "one", &long)
        .await
        .is_error(503, "no_worker", None);
    set.plays(vec![64, 65, 66], last);
    assert_eq!(ask(&set, "one", &long).await.status, 200);
    ask(&set, "one", &long)
        .await
        .is_error(429, "tenant_tokens", None);
}

#[tokio::test(start_paused = true)]
async fn a_tenant_has_as_many_streams_at_once_as_it_may() {
    let quota = Quota {
        streams_max: Some(2),
        ..Quota::default()
    };
    let set = server(quota, Trust::default());
    let many = json!({"prompt": ["a", "b"], "n": 2, "max_tokens": 3});
    let answer = ask(&set, "one", &many).await;
    answer.is_error(400, "invalid_value", Some("n"));
    let flight = set.live();
    let live = json!({"prompt": "a", "max_tokens": 2, "stream": true});
    let script = async {
        flight.unbounded_send(plain(0, 64)).unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let two = json!({"prompt": "a", "n": 2, "max_tokens": 3});
        let answer = ask(&set, "one", &two).await;
        answer.is_error(429, "tenant_concurrency", None);
        assert_eq!(answer.header("retry-after"), "1");
        set.says("x");
        assert_eq!(ask(&set, "one", &short()).await.status, 200);
        for event in [plain(1, 65), ended(done(FinishReason::Length))] {
            flight.unbounded_send(event).unwrap();
        }
    };
    let (answer, ()) = tokio::join!(ask(&set, "one", &live), script);
    assert_eq!(answer.status, 200);
    // Every stream is over, and has given its place back.
    set.says("x");
    set.says("x");
    let two = json!({"prompt": "a", "n": 2, "max_tokens": 3});
    assert_eq!(ask(&set, "one", &two).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_left_kept_its_tenants_place() {
    let quota = Quota {
        streams_max: Some(1),
        ..Quota::default()
    };
    let set = server(quota, Trust::default());
    let _flight = set.live();
    let body = short();
    let left = tokio::time::timeout(Duration::from_millis(50), ask(&set, "one", &body));
    assert!(left.await.is_err(), "nobody answers it");
    set.says("x");
    assert_eq!(ask(&set, "one", &short()).await.status, 200);
}

#[tokio::test]
async fn requests_are_no_more_urgent_than_their_tenant_may_be() {
    let quota = Quota {
        priority_min: Some(-3),
        ..Quota::default()
    };
    let set = server(quota, Trust::default());
    for (key, asked, is) in [("one", -9, -3), ("one", 4, 4), ("two", -9, -9)] {
        set.says("x");
        let body = json!({"prompt": "a", "max_tokens": 3, "priority": asked});
        assert_eq!(ask(&set, key, &body).await.status, 200);
        assert_eq!(set.asked().priority, is, "{key} {asked}");
    }
}

#[tokio::test]
async fn lesson_07_a_tenant_found_what_another_one_had_cached() {
    let salt = async |set: &Set, key: &str, salt: Option<&str>| {
        set.says("x");
        let mut body = short();
        if let Some(salt) = salt {
            body["cache_salt"] = salt.into();
        }
        assert_eq!(ask(set, key, &body).await.status, 200);
        set.asked().cache_salt
    };
    let set = server(Quota::default(), Trust::default());
    let mut seen = Vec::new();
    for key in ["one", "two", "nobody's"] {
        for own in [None, Some("s"), Some("acme")] {
            let first = salt(&set, key, own).await;
            assert_eq!(first, salt(&set, key, own).await, "its own are found again");
            assert!(!seen.contains(&first), "{key} {own:?}");
            seen.push(first);
        }
    }
    assert_eq!(seen[6], 0, "those without a tenant share what has no salt");
    let shared = Trust {
        shared_prefixes: true,
        ..Trust::default()
    };
    let set = server(Quota::default(), shared);
    for own in [None, Some("s")] {
        assert_eq!(salt(&set, "one", own).await, salt(&set, "two", own).await);
    }
}

#[tokio::test(start_paused = true)]
async fn half_a_body_was_waited_for_for_ever() {
    let set = server(Quota::default(), Trust::default());
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
    // Nor is it waited for where it is read for the answer's sake alone.
    let quota = Quota {
        requests_per_minute: Some(1),
        ..Quota::default()
    };
    let set = server(quota, Trust::default());
    set.says("x");
    assert_eq!(ask(&set, "one", &short()).await.status, 200);
    let never = futures::stream::pending::<Result<&str, std::io::Error>>();
    let request = keyed("one", post(TEXT, Body::from_stream(never)));
    let began = Instant::now();
    set.send(request).await.is_error(429, "tenant_rate", None);
    assert_eq!(began.elapsed().as_secs(), 5);
}

#[tokio::test(start_paused = true)]
async fn one_tenants_requests_were_counted_as_anothers() {
    let quota = Quota {
        requests_per_minute: Some(1),
        tokens_per_minute: Some(60),
        streams_max: Some(1),
        ..Quota::default()
    };
    let set = set("llama3");
    let policy = SloPolicy {
        tenants: vec![tenant("acme", ONE, quota), tenant("blue", TWO, quota)],
        ..SloPolicy::default()
    };
    *set.stage.policy.lock().unwrap() = Arc::new(policy);
    for key in ["one", "two"] {
        set.says("x");
        assert_eq!(ask(&set, key, &short()).await.status, 200, "{key}");
    }
    for key in ["one", "two"] {
        let answer = ask(&set, key, &short()).await;
        answer.is_error(429, "tenant_rate", None);
    }
}
