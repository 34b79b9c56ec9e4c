//! Answers to requests that fail.

use crate::scripted_server::{
    FlightScript, TestServer, done, ended, files, next_chunk, options, plain, post, server,
    server_with,
};
use cleave_api::{ApiOptions, App, ServingReadiness};
use cleave_domain::{Ending, Failure, FinishReason, Refusal};
use cleave_text::ModelText;
use http_body_util::BodyExt;
use serde_json::json;
use std::time::Duration;

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn refused(retry_after: Duration) -> Ending {
    Ending::Refused(Refusal::QueueFull { retry_after })
}

#[tokio::test]
async fn a_refusal_has_a_reason_and_retry_after() {
    let set = server("llama3");
    for stream in [false, true] {
        let body = json!({"prompt": "a", "stream": stream});
        set.script_tokens(vec![], refused(Duration::from_millis(2100)));
        let answer = set.post(TEXT, body.clone()).await;
        answer.is_error(429, "queue_full", None);
        assert_eq!(answer.header("retry-after"), "3");
        assert_eq!(answer.header("x-cleave-refused-reason"), "queue_full");
        assert_eq!(answer.json()["error"]["type"], "rate_limit_error");

        let retry_after = Duration::ZERO;
        set.script_tokens(vec![], Ending::Refused(Refusal::NoBlocks { retry_after }));
        let answer = set.post(TEXT, body.clone()).await;
        answer.is_error(429, "no_blocks", None);
        assert_eq!(answer.header("retry-after"), "1");

        set.script_tokens(vec![], Ending::Refused(Refusal::TooLong { tokens_max: 77 }));
        let answer = set.post(TEXT, body.clone()).await;
        answer.is_error(400, "context_length_exceeded", None);
        assert!(answer.body.contains("77"));

        // This refusal is final, too: a repetition would fail again.
        let vocab_size = 88;
        set.script_tokens(
            vec![],
            Ending::Refused(Refusal::OutOfVocabulary { vocab_size }),
        );
        let answer = set.post(TEXT, body.clone()).await;
        answer.is_error(400, "out_of_vocabulary", None);
        assert!(answer.body.contains("88"));

        for (refusal, code) in [
            (Refusal::NoWorker, "no_worker"),
            (Refusal::Draining, "draining"),
            (Refusal::WrongWorker, "worker_restarted"),
        ] {
            set.script_tokens(vec![], Ending::Refused(refusal));
            let answer = set.post(TEXT, body.clone()).await;
            answer.is_error(503, code, None);
            assert_eq!(answer.header("retry-after"), "1");
        }

        set.script_tokens(
            vec![],
            Ending::Failed(Failure::RetriesSpent(Box::new(Failure::WorkerLost))),
        );
        set.post(TEXT, body.clone())
            .await
            .is_error(503, "worker_lost", None);
        set.script_tokens(vec![], Ending::Failed(Failure::Engine("NaN".into())));
        set.post(TEXT, body)
            .await
            .is_error(500, "engine_failed", None);
    }
}

#[tokio::test]
async fn a_failed_constraint_is_the_error_of_its_field() {
    let set = server("llama3");
    let failed = || Ending::Failed(Failure::Constraint("it became too complex".into()));
    let message = "`guided_regex` cannot be enforced any further: it became too complex.";
    // Before the first token a stream is an HTTP status too.
    for (text, stream) in [("", false), ("half an", false), ("", true)] {
        set.script_tokens(set.tokens(text), failed());
        let body = json!({"prompt": "a", "guided_regex": "[a-z ]+", "stream": stream});
        let answer = set.post(TEXT, body).await;
        answer.is_error(400, "invalid_value", Some("guided_regex"));
        let error = &answer.json()["error"];
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["message"], message);
    }
    set.script_tokens(set.tokens("half an"), failed());
    let body = json!({"prompt": "a", "guided_regex": "[a-z ]+", "stream": true});
    let answer = set.post(TEXT, body).await;
    assert_eq!(answer.status, 200);
    let events = answer.events();
    let error = &events.last().unwrap()["error"];
    assert_eq!(error["message"], message);
    assert_eq!(error["param"], "guided_regex");
    assert!(!answer.body.contains("[DONE]"));
}

// Invariant: I13.
// Lesson: 16.
#[tokio::test]
async fn a_broken_stream_ends_with_an_error_event() {
    let set = server("llama3");
    for failure in [Failure::WorkerLost, Failure::Corrupt] {
        set.script_tokens(set.tokens("half an"), Ending::Failed(failure));
        let answer = set.post(TEXT, json!({"prompt": "a", "stream": true})).await;
        assert_eq!(answer.status, 200);
        let events = answer.events();
        assert!(
            events.last().unwrap()["error"]["message"].is_string(),
            "{events:?}"
        );
        assert!(!answer.body.contains("[DONE]"));
    }
    // Without streaming the same failure is an HTTP status.
    set.script_tokens(set.tokens("half an"), Ending::Failed(Failure::Corrupt));
    set.post(TEXT, json!({"prompt": "a"}))
        .await
        .is_error(503, "transfer_corrupt", None);
}

// Invariant: I13.
// Lesson: 16.
#[tokio::test]
async fn a_flight_without_an_ending_is_an_error() {
    let set = server("llama3");
    let tokens = set.tokens("one two");
    // The stream stops without a last event.
    let sender = set.script_live();
    sender.unbounded_send(plain(0, tokens[0])).unwrap();
    drop(sender);
    set.post(TEXT, json!({"prompt": "a"}))
        .await
        .is_error(500, "stream_broken", None);
    // A token is missing, or arrives twice.
    for second in [2, 0] {
        let sender = set.script_live();
        sender.unbounded_send(plain(0, tokens[0])).unwrap();
        sender.unbounded_send(plain(second, tokens[1])).unwrap();
        let end = ended(done(FinishReason::Length));
        sender.unbounded_send(end).unwrap();
        let answer = set.post(TEXT, json!({"prompt": "a"})).await;
        answer.is_error(500, "stream_broken", None);
    }
}

#[tokio::test]
async fn a_choice_without_an_ending_fails_the_answer_at_once() {
    let set = server("llama3");
    let (one, two) = (set.script_live(), set.script_live());
    one.unbounded_send(plain(0, 5)).unwrap();
    drop(two);
    set.post(TEXT, json!({"prompt": "a", "n": 2}))
        .await
        .is_error(500, "stream_broken", None);
    assert!(one.is_closed());
}

// Lesson: 16.
#[tokio::test]
async fn missing_logprobs_are_an_error() {
    let set = server("llama3");
    for body in [
        json!({"prompt": "ab", "logprobs": 1}),
        json!({"prompt": "ab", "logprobs": 1, "echo": true, "max_tokens": 0}),
    ] {
        let sender = set.script_live();
        sender.unbounded_send(plain(0, 5)).unwrap();
        set.post(TEXT, body)
            .await
            .is_error(500, "scores_missing", None);
    }
}

#[tokio::test]
async fn one_failed_choice_cancels_the_others() {
    let set = server("llama3");
    let (one, two) = (set.script_live(), set.script_live());
    one.unbounded_send(plain(0, 5)).unwrap();
    two.unbounded_send(ended(Ending::Failed(Failure::LinkLost)))
        .unwrap();
    set.post(TEXT, json!({"prompt": "a", "n": 2}))
        .await
        .is_error(503, "link_lost", None);
    assert!(one.is_closed() && two.is_closed());
}

// Lesson: 13.
#[tokio::test]
async fn disconnecting_before_the_first_token_cancels_the_flight() {
    let set = server("llama3");
    let sender = set.script_live();
    let request = post(TEXT, json!({"prompt": "a", "stream": true}).to_string());
    {
        let response = crate::scripted_server::send(set.router.clone(), request);
        futures::pin_mut!(response);
        assert!(futures::poll!(&mut response).is_pending());
        assert!(!sender.is_closed());
    }
    assert!(sender.is_closed());
    let metrics = set.get("/metrics").await.body;
    assert!(
        metrics.contains("cleave_request_endings_total{reason=\"cancelled\"} 1"),
        "{metrics}"
    );
    assert!(
        metrics.contains("cleave_http_requests_in_flight 0"),
        "{metrics}"
    );
}

#[tokio::test]
async fn a_panic_fails_only_its_own_request() {
    let set = server("llama3");
    let panics = |count| {
        set.frontend
            .scripts
            .lock()
            .unwrap()
            .push_back(FlightScript::Panic(count))
    };
    panics(0);
    set.post(TEXT, json!({"prompt": "a"}))
        .await
        .is_error(500, "panicked", None);
    // The panic occurs in the middle of a stream.
    panics(3);
    let answer = set.post(TEXT, json!({"prompt": "a", "stream": true})).await;
    let events = answer.events();
    assert_eq!(events.len(), 4, "{events:?}");
    assert_eq!(events[3]["error"]["code"], "panicked");
    set.script_text("x");
    assert_eq!(set.post(TEXT, json!({"prompt": "a"})).await.status, 200);
    let metrics = set.get("/metrics").await.body;
    assert!(
        metrics.contains("cleave_request_endings_total{reason=\"failed\"} 2"),
        "{metrics}"
    );
}

#[tokio::test]
async fn one_failed_choice_ends_the_stream_and_cancels_the_others() {
    let set = server("llama3");
    let (one, two) = (set.script_live(), set.script_live());
    one.unbounded_send(plain(0, 5)).unwrap();
    two.unbounded_send(plain(0, 5)).unwrap();
    two.unbounded_send(ended(Ending::Failed(Failure::LinkLost)))
        .unwrap();
    let mut body = set
        .stream(TEXT, json!({"prompt": "a", "n": 2, "stream": true}))
        .await;
    while !next_chunk(&mut body).await.starts_with(b"data: {\"error\"") {}
    assert!(one.is_closed() && two.is_closed());
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn events_wait_in_the_flight_until_the_client_reads() {
    let set = server("llama3");
    for path in [TEXT, "/v1/chat/completions"] {
        let sender = set.script_live();
        for index in 0..100 {
            sender.unbounded_send(plain(index, 5)).unwrap();
        }
        let body = json!({"prompt": "a", "messages": [{"role": "user", "content": "a"}],
                          "max_tokens": 100, "stream": true});
        let mut body = body.as_object().unwrap().clone();
        body.remove(if path == TEXT { "messages" } else { "prompt" });
        let mut body = set.stream(path, body.into()).await;
        // The headers wait for the first event; nothing more is taken before the client reads.
        let taken_count = || 100 - sender.len();
        assert!(taken_count() <= 2, "{} events were taken", taken_count());
        for _ in 0..10 {
            next_chunk(&mut body).await;
        }
        assert!(
            (5..=14).contains(&taken_count()),
            "{} events were taken",
            taken_count()
        );
    }
}

#[tokio::test]
async fn requests_without_a_worker_are_refused_with_the_reason() {
    let set = server("llama3");
    *set.frontend.readiness.lock().unwrap() =
        Some(ServingReadiness::NotReady("no decode worker".into()));
    let answer = set.post(TEXT, json!({"prompt": "a"})).await;
    answer.is_error(503, "no_worker", None);
    assert!(answer.body.contains("no decode worker"));
    assert_eq!(answer.header("retry-after"), "1");
    assert_eq!(answer.header("x-cleave-refused-reason"), "no_worker");
    set.get("/ready").await.is_error(503, "not_ready", None);
    assert_eq!(set.get("/health").await.status, 200);
    // Invalid input is refused as such all the same.
    set.post(TEXT, json!({"prompt": 5}))
        .await
        .is_error(400, "invalid_value", Some("prompt"));
}

#[tokio::test(start_paused = true)]
async fn requests_at_startup_wait_for_the_grace_period() {
    let waiting = || {
        let set = server("llama3");
        let grace = ApiOptions {
            startup_grace: Duration::from_secs(10),
            ..options()
        };
        let app = App::new(set.frontend.clone(), grace);
        TestServer {
            router: app.router(),
            app,
            ..set
        }
    };
    // In this case no worker ever joins.
    let set = waiting();
    let before = tokio::time::Instant::now();
    set.post(TEXT, json!({"prompt": "a"}))
        .await
        .is_error(503, "no_worker", None);
    assert!(
        before.elapsed() >= Duration::from_secs(10) && before.elapsed() < Duration::from_secs(11)
    );
    let again = tokio::time::Instant::now();
    set.post(TEXT, json!({"prompt": "a"}))
        .await
        .is_error(503, "no_worker", None);
    assert!(
        again.elapsed() < Duration::from_secs(1),
        "the grace counts from the start"
    );
    set.get("/ready").await.is_error(503, "not_ready", None);
    assert_eq!(set.get("/v1/models").await.json()["data"], json!([]));

    // The model arrives, and later a worker.
    let set = waiting();
    set.script_text("late");
    *set.frontend.readiness.lock().unwrap() = Some(ServingReadiness::NotReady("no worker".into()));
    let request = set.post(TEXT, json!({"prompt": "a"}));
    let arrive = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        set.app
            .serve_model(ModelText::new(files("llama3")).unwrap());
        tokio::time::sleep(Duration::from_secs(3)).await;
        *set.frontend.readiness.lock().unwrap() = None;
    };
    let (answer, ()) = futures::join!(request, arrive);
    assert_eq!(answer.json()["choices"][0]["text"], "late");

    // The server shuts down: a request does not wait for a worker, not even within the grace
    // period.
    let set = waiting();
    set.app
        .serve_model(ModelText::new(files("llama3")).unwrap());
    *set.frontend.readiness.lock().unwrap() = Some(ServingReadiness::Draining);
    let before = tokio::time::Instant::now();
    set.post(TEXT, json!({"prompt": "a"}))
        .await
        .is_error(503, "draining", None);
    assert!(before.elapsed() < Duration::from_secs(1));
    set.get("/ready").await.is_error(503, "draining", None);
}

/// A server that sends a comment after five seconds of silence.
fn server_with_keep_alive() -> TestServer {
    let keep_alive = Some(Duration::from_secs(5));
    let options = ApiOptions {
        keep_alive,
        ..options()
    };
    server_with(files("llama3"), options)
}

#[tokio::test(start_paused = true)]
async fn a_stream_gets_comments_before_its_first_token() {
    let set = server_with_keep_alive();
    let sender = set.script_live();
    let later = async {
        tokio::time::sleep(Duration::from_secs(12)).await;
        sender.unbounded_send(plain(0, 5)).unwrap();
        let end = ended(done(FinishReason::Length));
        sender.unbounded_send(end).unwrap();
    };
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true});
    let (answer, ()) = futures::join!(set.post(CHAT, body), later);
    assert_eq!(answer.status, 200);
    let (quiet, events) = answer.body.split_once("data: ").unwrap();
    assert_eq!(quiet, ": keep-alive\n\n".repeat(2), "{}", answer.body);
    assert!(events.contains("\"role\":\"assistant\""), "{events}");
    assert_eq!(events.matches("\"role\"").count(), 1);
    assert!(events.ends_with("data: [DONE]\n\n"));
}

#[tokio::test(start_paused = true)]
async fn a_failure_after_a_comment_is_an_error_event() {
    let set = server_with_keep_alive();
    let sender = set.script_live();
    let later = async {
        tokio::time::sleep(Duration::from_secs(6)).await;
        let retry_after = Duration::from_secs(2);
        let refused = Ending::Refused(Refusal::QueueFull { retry_after });
        sender.unbounded_send(ended(refused)).unwrap();
    };
    let request = set.post(TEXT, json!({"prompt": "a", "stream": true}));
    let (answer, ()) = futures::join!(request, later);
    assert!(
        answer.body.contains("\"code\":\"queue_full\""),
        "{}",
        answer.body
    );
    assert!(!answer.body.contains("[DONE]"));
    // An answer without streaming has the HTTP status in any case.
    let sender = set.script_live();
    let later = async {
        tokio::time::sleep(Duration::from_secs(20)).await;
        let retry_after = Duration::from_secs(2);
        let refused = Ending::Refused(Refusal::QueueFull { retry_after });
        sender.unbounded_send(ended(refused)).unwrap();
    };
    let (answer, ()) = futures::join!(set.post(TEXT, json!({"prompt": "a"})), later);
    answer.is_error(429, "queue_full", None);
}

#[tokio::test(start_paused = true)]
async fn a_silent_stream_gets_keep_alive_comments() {
    let set = server_with_keep_alive();
    let sender = set.script_live();
    sender.unbounded_send(plain(0, 5)).unwrap();
    let later = async {
        tokio::time::sleep(Duration::from_secs(12)).await;
        sender.unbounded_send(plain(1, 6)).unwrap();
        sender
            .unbounded_send(ended(done(FinishReason::Length)))
            .unwrap();
    };
    let request = set.post(TEXT, json!({"prompt": "a", "stream": true}));
    let (answer, ()) = futures::join!(request, later);
    assert_eq!(
        answer.body.matches(": keep-alive\n\n").count(),
        2,
        "{}",
        answer.body
    );
    assert!(answer.body.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn a_request_keeps_its_model_when_another_is_served() {
    let set = server("llama3");
    let sender = set.script_live();
    let request = set.post(TEXT, json!({"prompt": "a"}));
    let change = async {
        set.app.serve_model(ModelText::new(files("qwen2")).unwrap());
        for (index, token) in set.tokens("same").into_iter().enumerate() {
            sender.unbounded_send(plain(index as u32, token)).unwrap();
        }
        sender
            .unbounded_send(ended(done(FinishReason::Length)))
            .unwrap();
    };
    let (answer, ()) = futures::join!(request, change);
    let answer = answer.json();
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["model"]),
        (&json!("same"), &json!("llama3"))
    );
    let models = set.get("/v1/models").await.json();
    assert_eq!(models["data"].as_array().map(Vec::len), Some(2));
}
