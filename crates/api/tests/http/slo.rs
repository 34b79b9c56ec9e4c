//! SLOs from headers and rules, refusals with a time to retry, and the timing of answers.

use crate::scripted_server::{FlightScript, TestServer, done, plain, post, server};
use axum::http::{HeaderName, HeaderValue};
use cleave_api::FlightEvent;
use cleave_domain::{
    Emission, Ending, FinishReason, HeaderTrust, OnSloMiss, PrefillTiming, PromptFacts, Refusal,
    RequestSlo, RequestStageTimes, SampledToken, SloClass, SloMetric, SloPolicy, SloRule, Tenant,
    TenantQuota, TokenUsage,
};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

const TEXT: &str = "/v1/completions";

/// SHA-256 of `secret`, as printed by `sha256sum`.
const SECRET: [u8; 32] = [
    0x2b, 0xb8, 0x0d, 0x53, 0x7b, 0x1d, 0xa3, 0xe3, 0x8b, 0xd3, 0x03, 0x61, 0xaa, 0x85, 0x56, 0x86,
    0xbd, 0xe0, 0xea, 0xcd, 0x71, 0x62, 0xfe, 0xf6, 0xa2, 0x5f, 0xe9, 0x7b, 0xf5, 0x27, 0xa2, 0x5b,
];

fn policy() -> SloPolicy {
    let class = |name: &str, millis: u64, priority: i32| SloClass {
        name: name.to_owned(),
        ttft: Some(Duration::from_millis(millis)),
        priority,
        unmet: OnSloMiss::Reject,
        ..SloClass::default()
    };
    let rule = |class: &str| SloRule {
        class: class.to_owned(),
        ..SloRule::default()
    };
    SloPolicy {
        classes: vec![
            class("fast", 100, -5),
            class("plain", 900, 0),
            class("long", 9000, 7),
            SloClass {
                by_name: false,
                ..class("vip", 50, -9)
            },
        ],
        default_class: "plain".to_owned(),
        rules: vec![
            SloRule {
                tenant: Some("acme".to_owned()),
                ..rule("vip")
            },
            SloRule {
                header: Some(("x-app".to_owned(), Some("chat".to_owned()))),
                ..rule("fast")
            },
            SloRule {
                prompt_tokens: Some(20..=u32::MAX),
                ..rule("long")
            },
        ],
        tenants: vec![
            Tenant {
                name: "acme".to_owned(),
                key_digests: vec![SECRET],
                share: 2,
                quota: TenantQuota::default(),
            },
            Tenant {
                name: "blue".to_owned(),
                key_digests: Vec::new(),
                share: 1,
                quota: TenantQuota::default(),
            },
        ],
        trust: HeaderTrust {
            tenant: true,
            ..HeaderTrust::default()
        },
        scaling: None,
        models: Vec::new(),
    }
}

fn slo_server() -> TestServer {
    let set = server("llama3");
    *set.frontend.policy.lock().unwrap() = Arc::new(policy());
    set
}

fn with(body: &Value, headers: &[(&str, &str)]) -> axum::http::Request<axum::body::Body> {
    let mut request = post(TEXT, body.to_string());
    for (name, value) in headers {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        let value = HeaderValue::from_str(value).unwrap();
        request.headers_mut().append(name, value);
    }
    request
}

/// Returns the SLO of a request with these headers.
async fn resolved_slo(headers: &[(&str, &str)]) -> RequestSlo {
    let set = slo_server();
    set.script_text("x");
    let body = json!({"prompt": "a", "priority": 1});
    let answer = set.send(with(&body, headers)).await;
    assert_eq!(answer.status, 200, "{headers:?} {}", answer.body);
    let submitted = set.last_submitted();
    assert_eq!(submitted.priority, 1, "its own, whatever its class's");
    submitted.slo
}

#[tokio::test]
async fn headers_rules_and_keys_set_class_tenant_and_targets() {
    let class_of = async |headers: &[(&str, &str)]| {
        let slo = resolved_slo(headers).await;
        (slo.class, slo.tenant, slo.priority)
    };
    let is = |class: &str, tenant: &str, priority| (class.to_owned(), tenant.to_owned(), priority);
    assert_eq!(class_of(&[]).await, is("plain", "", 0));
    assert_eq!(
        class_of(&[("x-slo-class", "fast")]).await,
        is("fast", "", -5)
    );
    assert_eq!(
        class_of(&[("x-llm-d-slo-class", "long")]).await,
        is("long", "", 7)
    );
    assert_eq!(
        class_of(&[("x-app", "other"), ("x-app", "chat")]).await,
        is("fast", "", -5)
    );
    // A foreign objective counts only where it equals a class, and is otherwise no error.
    let objective = "x-llm-d-inference-objective";
    assert_eq!(class_of(&[(objective, "fast")]).await, is("fast", "", -5));
    assert_eq!(class_of(&[(objective, "vip")]).await, is("plain", "", 0));
    for name in ["x-tenant-id", "x-llm-d-inference-fairness-id"] {
        assert_eq!(class_of(&[(name, "blue")]).await, is("plain", "blue", 0));
        assert_eq!(
            class_of(&[(name, "acme")]).await,
            is("plain", "", 0),
            "it has a key"
        );
    }
    for (name, key) in [("authorization", "Bearer secret"), ("x-api-key", "secret")] {
        assert_eq!(class_of(&[(name, key)]).await, is("vip", "acme", -9));
    }
    assert_eq!(
        class_of(&[("authorization", "Bearer other")]).await,
        is("plain", "", 0)
    );

    let own = [
        ("x-slo-ttft-ms", "20"),
        ("x-llm-d-slo-tpot-ms", "7.5"),
        ("x-slo-e2e-ms", "3000"),
    ];
    let slo = resolved_slo(&own).await;
    let millis = |millis: f64| Some(Duration::from_secs_f64(millis / 1e3));
    assert_eq!(
        (slo.ttft, slo.tpot, slo.e2e),
        (millis(20.0), millis(7.5), millis(3000.0))
    );
    let slo = resolved_slo(&[]).await;
    assert_eq!((slo.ttft, slo.tpot), (millis(900.0), None));
}

#[tokio::test]
async fn each_prompt_of_a_request_has_its_own_slo() {
    let set = slo_server();
    let long = "a b c d e f g h i j k l m n o p q r s t u v w x y z";
    set.script_text("x");
    set.script_text("x");
    set.post(TEXT, json!({"prompt": ["a", long]})).await;
    let submitted = set.frontend.submitted.lock().unwrap();
    let classes: Vec<_> = submitted.iter().map(|one| one.slo.class.as_str()).collect();
    assert_eq!(classes, ["plain", "long"]);
}

#[tokio::test]
async fn an_unknown_slo_class_is_refused() {
    let set = slo_server();
    for (name, class) in [("x-slo-class", "vip"), ("x-llm-d-slo-class", "gold")] {
        let answer = set
            .send(with(&json!({"prompt": "a"}), &[(name, class)]))
            .await;
        answer.is_error(400, "invalid_value", Some("x-slo-class"));
        assert!(
            answer.body.contains("there is fast, plain, long"),
            "{}",
            answer.body
        );
        assert!(
            !answer.body.contains("vip,"),
            "what is not for everybody is not shown"
        );
    }
    for (name, value) in [
        ("x-slo-e2e-ms", "-1"),
        ("x-tenant-id", ""),
        ("x-cleave-timing", "perhaps"),
    ] {
        let answer = set
            .send(with(&json!({"prompt": "a"}), &[(name, value)]))
            .await;
        answer.is_error(400, "invalid_value", Some(name));
    }
}

#[tokio::test]
async fn an_unreachable_slo_names_the_prediction_and_retry_after() {
    let set = server("llama3");
    for (aim, code) in [
        (SloMetric::Ttft, "slo_ttft_unreachable"),
        (SloMetric::Tpot, "slo_tpot_unreachable"),
        (SloMetric::EndToEnd, "slo_e2e_unreachable"),
    ] {
        for stream in [false, true] {
            let late = Refusal::Late {
                aim,
                predicted: Duration::from_micros(812_340),
                retry_after: Duration::from_micros(1_200_100),
            };
            set.script_tokens(vec![], Ending::Refused(late));
            let answer = set
                .post(TEXT, json!({"prompt": "a", "stream": stream}))
                .await;
            answer.is_error(429, code, None);
            assert!(answer.body.contains("812.3 ms"), "{}", answer.body);
            assert_eq!(answer.header("retry-after"), "2");
            assert_eq!(answer.header("retry-after-ms"), "1201");
            assert_eq!(answer.header("x-cleave-refused-reason"), code);
            let dropped = answer.header("x-llm-d-request-dropped-reason");
            assert_eq!(dropped, "rejected-saturated");
        }
    }
    set.script_tokens(vec![], Ending::Refused(Refusal::NoWorker));
    let answer = set.post(TEXT, json!({"prompt": "a"})).await;
    answer.is_error(503, "no_worker", None);
    assert_eq!(
        answer.header("retry-after-ms"),
        "",
        "not busy: nobody is there"
    );
}

fn first() -> FlightEvent {
    let timing = PrefillTiming {
        wait: Duration::from_millis(2),
        run: Duration::from_millis(30),
    };
    FlightEvent::Token(Emission {
        index: 0,
        sampled: SampledToken {
            token: 64,
            scores: None,
        },
        prompt: Some(PromptFacts {
            cached_tokens: 0,
            scores: Vec::new(),
            timing,
            pooled: None,
        }),
    })
}

fn over() -> FlightEvent {
    let ms = Duration::from_millis;
    FlightEvent::Ended {
        ending: done(FinishReason::Length),
        usage: TokenUsage {
            prompt_tokens: 1,
            output_tokens: 3,
            cached_tokens: 0,
        },
        timing: RequestStageTimes {
            router_queue: ms(6),
            retry: ms(2),
            prefill_wait: ms(2),
            prefill: ms(30),
            transfer: ms(4),
            decode_wait: ms(1),
            first_decode: ms(5),
            decode: ms(10),
        },
    }
}

// Lesson: 23.
#[tokio::test(start_paused = true)]
async fn timing_is_returned_on_request() {
    let set = server("llama3");
    let timing_header = [("x-cleave-timing", "1")];
    for usage in [false, true] {
        let flight = set.script_live();
        let mut body = json!({"prompt": "a", "stream": true});
        if usage {
            body["stream_options"] = json!({"include_usage": true});
        }
        let request = with(&body, &timing_header);
        let script = async {
            tokio::time::sleep(Duration::from_millis(40)).await;
            for event in [first(), plain(1, 65), plain(2, 66), over()] {
                flight.unbounded_send(event).unwrap();
            }
        };
        let (answer, ()) = tokio::join!(set.send(request), script);
        let header = answer.header("x-cleave-timing");
        assert_eq!(
            header,
            "router_queue;dur=8, prefill_wait;dur=2, prefill;dur=30"
        );
        let events = answer.events();
        let (last, chunk) = (&events[events.len() - 1], &events[events.len() - 2]);
        assert_eq!(last, "[DONE]");
        assert_eq!(chunk["choices"], json!([]));
        assert_eq!(chunk["usage"].is_object(), usage);
        let expected = json!({
            "router_queue_ms": 6.0, "retry_ms": 2.0, "prefill_wait_ms": 2.0, "prefill_ms": 30.0,
            "transfer_ms": 4.0, "decode_wait_ms": 1.0, "first_decode_ms": 5.0, "decode_ms": 10.0,
            "ttft_ms": 40.0, "tpot_ms": 10.0, "e2e_ms": 60.0,
        });
        assert_eq!(chunk["timing"], expected);
    }
    // Without streaming everything is known when the header is sent.
    let flight = set.script_live();
    for event in [first(), plain(1, 65), plain(2, 66), over()] {
        flight.unbounded_send(event).unwrap();
    }
    let answer = set
        .send(with(&json!({"prompt": "a"}), &timing_header))
        .await;
    assert!(
        answer
            .header("x-cleave-timing")
            .ends_with("first_decode;dur=5, decode;dur=10")
    );
    assert_eq!(answer.json()["timing"]["e2e_ms"], 60.0);
    // Without the header no timing is sent.
    set.script_text("x");
    let answer = set.post(TEXT, json!({"prompt": "a"})).await;
    assert_eq!(answer.header("x-cleave-timing"), "");
    assert_eq!(answer.json().get("timing"), None);
    let stream = json!({"prompt": "a", "stream": true});
    set.script_text("x");
    assert!(!set.post(TEXT, stream).await.body.contains("timing"));
}

#[tokio::test]
async fn timing_after_a_stop_string_covers_the_first_token() {
    let set = server("llama3");
    let (sender, receiver) = futures::channel::mpsc::unbounded();
    let script = FlightScript::Live(receiver);
    set.frontend.scripts.lock().unwrap().push_back(script);
    sender.unbounded_send(first()).unwrap();
    let stop = set
        .text
        .tokenizer()
        .decode(&[64], cleave_text::SpecialTokens::Skipped);
    let body = json!({"prompt": "a", "stop": [stop]});
    let answer = set.send(with(&body, &[("x-cleave-timing", "1")])).await;
    let timing = &answer.json()["timing"];
    assert_eq!(timing["prefill_ms"], 30.0, "{timing}");
    assert_eq!(timing.get("decode_ms"), None);
}
