//! What happens when it does not go well.

use crate::stage::{Script, Set, done, ended, files, options, plain, post, set, set_with};
use cleave_api::{ApiOptions, App, ModelText, Readiness};
use cleave_domain::{Ending, Failure, FinishReason, Refusal};
use http_body_util::BodyExt;
use serde_json::json;
use std::time::Duration;
use tower::ServiceExt;

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn refused(retry_after: Duration) -> Ending {
    Ending::Refused(Refusal::QueueFull { retry_after })
}

#[tokio::test]
async fn a_refusal_did_not_say_why_or_when_to_return() {
    let set = set("llama3");
    for stream in [false, true] {
        let body = json!({"prompt": "a", "stream": stream});
        set.plays(vec![], refused(Duration::from_millis(2100)));
        let answer = set.post(TEXT, body.clone()).await;
        answer.is_error(429, "queue_full", None);
        assert_eq!(answer.header("retry-after"), "3");
        assert_eq!(answer.header("x-cleave-refused-reason"), "queue_full");
        assert_eq!(answer.json()["error"]["type"], "rate_limit_error");

        let retry_after = Duration::ZERO;
        set.plays(vec![], Ending::Refused(Refusal::NoBlocks { retry_after }));
        let answer = set.post(TEXT, body.clone()).await;
        answer.is_error(429, "no_blocks", None);
        assert_eq!(answer.header("retry-after"), "1");

        set.plays(vec![], Ending::Refused(Refusal::TooLong { tokens_max: 77 }));
        let answer = set.post(TEXT, body.clone()).await;
        answer.is_error(400, "context_length_exceeded", None);
        assert!(answer.body.contains("77"));

        // Final too: to repeat it would be in vain.
        let vocab_size = 88;
        set.plays(
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
            set.plays(vec![], Ending::Refused(refusal));
            let answer = set.post(TEXT, body.clone()).await;
            answer.is_error(503, code, None);
            assert_eq!(answer.header("retry-after"), "1");
        }

        set.plays(
            vec![],
            Ending::Failed(Failure::RetriesSpent(Box::new(Failure::WorkerLost))),
        );
        set.post(TEXT, body.clone())
            .await
            .is_error(503, "worker_lost", None);
        set.plays(vec![], Ending::Failed(Failure::Engine("NaN".into())));
        set.post(TEXT, body)
            .await
            .is_error(500, "engine_failed", None);
    }
}

#[tokio::test]
async fn lesson_16_a_broken_stream_ended_quietly() {
    let set = set("llama3");
    for failure in [Failure::WorkerLost, Failure::Corrupt] {
        set.plays(set.tokens("half an"), Ending::Failed(failure));
        let answer = set.post(TEXT, json!({"prompt": "a", "stream": true})).await;
        assert_eq!(answer.status, 200);
        let events = answer.events();
        assert!(
            events.last().unwrap()["error"]["message"].is_string(),
            "{events:?}"
        );
        assert!(!answer.body.contains("[DONE]"));
    }
    // Not streamed, the same is a status.
    set.plays(set.tokens("half an"), Ending::Failed(Failure::Corrupt));
    set.post(TEXT, json!({"prompt": "a"}))
        .await
        .is_error(503, "transfer_corrupt", None);
}

#[tokio::test]
async fn lesson_16_a_flight_without_an_end_passed_for_a_whole_answer() {
    let set = set("llama3");
    let tokens = set.tokens("one two");
    // The stream just stops.
    let sender = set.live();
    sender.unbounded_send(plain(0, tokens[0])).unwrap();
    drop(sender);
    set.post(TEXT, json!({"prompt": "a"}))
        .await
        .is_error(500, "stream_broken", None);
    // A token is missing, or comes twice.
    for second in [2, 0] {
        let sender = set.live();
        sender.unbounded_send(plain(0, tokens[0])).unwrap();
        sender.unbounded_send(plain(second, tokens[1])).unwrap();
        let end = ended(done(FinishReason::Length));
        sender.unbounded_send(end).unwrap();
        let answer = set.post(TEXT, json!({"prompt": "a"})).await;
        answer.is_error(500, "stream_broken", None);
    }
}

#[tokio::test]
async fn a_choice_without_an_end_was_noticed_after_the_others() {
    let set = set("llama3");
    let (one, two) = (set.live(), set.live());
    one.unbounded_send(plain(0, 5)).unwrap();
    drop(two);
    set.post(TEXT, json!({"prompt": "a", "n": 2}))
        .await
        .is_error(500, "stream_broken", None);
    assert!(one.is_closed());
}

#[tokio::test]
async fn lesson_16_scores_that_never_came_were_null() {
    let set = set("llama3");
    for body in [
        json!({"prompt": "ab", "logprobs": 1}),
        json!({"prompt": "ab", "logprobs": 1, "echo": true, "max_tokens": 0}),
    ] {
        let sender = set.live();
        sender.unbounded_send(plain(0, 5)).unwrap();
        set.post(TEXT, body)
            .await
            .is_error(500, "scores_missing", None);
    }
}

#[tokio::test]
async fn one_failed_choice_left_the_others_running() {
    let set = set("llama3");
    let (one, two) = (set.live(), set.live());
    one.unbounded_send(plain(0, 5)).unwrap();
    two.unbounded_send(ended(Ending::Failed(Failure::LinkLost)))
        .unwrap();
    set.post(TEXT, json!({"prompt": "a", "n": 2}))
        .await
        .is_error(503, "link_lost", None);
    assert!(one.is_closed() && two.is_closed());
}

#[tokio::test]
async fn lesson_13_a_client_that_left_before_the_first_token_was_ignored() {
    let set = set("llama3");
    let sender = set.live();
    let request = post(TEXT, json!({"prompt": "a", "stream": true}).to_string());
    {
        let response = crate::stage::send(set.router.clone(), request);
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
async fn a_panic_took_more_than_its_own_request() {
    let set = set("llama3");
    let panics = |count| {
        set.stage
            .scripts
            .lock()
            .unwrap()
            .push_back(Script::Panic(count))
    };
    panics(0);
    set.post(TEXT, json!({"prompt": "a"}))
        .await
        .is_error(500, "panicked", None);
    // In the middle of a stream.
    panics(3);
    let answer = set.post(TEXT, json!({"prompt": "a", "stream": true})).await;
    let events = answer.events();
    assert_eq!(events.len(), 4, "{events:?}");
    assert_eq!(events[3]["error"]["code"], "panicked");
    set.says("x");
    assert_eq!(set.post(TEXT, json!({"prompt": "a"})).await.status, 200);
    let metrics = set.get("/metrics").await.body;
    assert!(
        metrics.contains("cleave_request_endings_total{reason=\"failed\"} 2"),
        "{metrics}"
    );
}

#[tokio::test]
async fn one_failed_choice_left_the_others_running_while_the_client_read_on() {
    let set = set("llama3");
    let (one, two) = (set.live(), set.live());
    one.unbounded_send(plain(0, 5)).unwrap();
    two.unbounded_send(plain(0, 5)).unwrap();
    two.unbounded_send(ended(Ending::Failed(Failure::LinkLost)))
        .unwrap();
    let request = post(
        TEXT,
        json!({"prompt": "a", "n": 2, "stream": true}).to_string(),
    );
    let mut body = set
        .router
        .clone()
        .oneshot(request)
        .await
        .unwrap()
        .into_body();
    loop {
        let chunk = body.frame().await.unwrap().unwrap().into_data().unwrap();
        if chunk.starts_with(b"data: {\"error\"") {
            break;
        }
    }
    assert!(one.is_closed() && two.is_closed());
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn what_nobody_read_was_drawn_from_the_flight() {
    let set = set("llama3");
    for path in [TEXT, "/v1/chat/completions"] {
        let sender = set.live();
        for index in 0..100 {
            sender.unbounded_send(plain(index, 5)).unwrap();
        }
        let body = json!({"prompt": "a", "messages": [{"role": "user", "content": "a"}],
                          "max_tokens": 100, "stream": true});
        let mut body = body.as_object().unwrap().clone();
        body.remove(if path == TEXT { "messages" } else { "prompt" });
        let request = post(path, serde_json::Value::Object(body).to_string());
        let mut body = set
            .router
            .clone()
            .oneshot(request)
            .await
            .unwrap()
            .into_body();
        // Headers wait for the first event, and nothing more is taken until somebody reads.
        let taken = || 100 - sender.len();
        assert!(taken() <= 2, "{} events were taken", taken());
        for _ in 0..10 {
            body.frame().await.unwrap().unwrap();
        }
        assert!((5..=14).contains(&taken()), "{} events were taken", taken());
    }
}

#[tokio::test]
async fn nobody_was_there_and_nobody_said_so() {
    let set = set("llama3");
    *set.stage.readiness.lock().unwrap() = Some(Readiness::NotReady("no decode worker".into()));
    let answer = set.post(TEXT, json!({"prompt": "a"})).await;
    answer.is_error(503, "no_worker", None);
    assert!(answer.body.contains("no decode worker"));
    assert_eq!(answer.header("retry-after"), "1");
    assert_eq!(answer.header("x-cleave-refused-reason"), "no_worker");
    set.get("/ready").await.is_error(503, "not_ready", None);
    assert_eq!(set.get("/health").await.status, 200);
    // Bad input is bad input all the same.
    set.post(TEXT, json!({"prompt": 5}))
        .await
        .is_error(400, "invalid_value", Some("prompt"));
}

#[tokio::test(start_paused = true)]
async fn requests_at_start_up_were_refused_too_early_or_waited_for_ever() {
    let waiting = || {
        let set = set("llama3");
        let grace = ApiOptions {
            startup_grace: Duration::from_secs(10),
            ..options()
        };
        let app = App::new(set.stage.clone(), grace);
        Set {
            router: app.router(),
            app,
            ..set
        }
    };
    // Nothing comes.
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

    // The model comes, and then a worker.
    let set = waiting();
    set.says("late");
    *set.stage.readiness.lock().unwrap() = Some(Readiness::NotReady("no worker".into()));
    let request = set.post(TEXT, json!({"prompt": "a"}));
    let arrive = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        set.app
            .serve_model(ModelText::new(files("llama3")).unwrap());
        tokio::time::sleep(Duration::from_secs(3)).await;
        *set.stage.readiness.lock().unwrap() = None;
    };
    let (answer, ()) = futures::join!(request, arrive);
    assert_eq!(answer.json()["choices"][0]["text"], "late");

    // The server shuts down: within the grace too, nobody waits for a worker.
    let set = waiting();
    set.app
        .serve_model(ModelText::new(files("llama3")).unwrap());
    *set.stage.readiness.lock().unwrap() = Some(Readiness::Draining);
    let before = tokio::time::Instant::now();
    set.post(TEXT, json!({"prompt": "a"}))
        .await
        .is_error(503, "draining", None);
    assert!(before.elapsed() < Duration::from_secs(1));
    set.get("/ready").await.is_error(503, "draining", None);
}

/// A server that says something at least every five seconds.
fn talkative() -> Set {
    let keep_alive = Some(Duration::from_secs(5));
    let options = ApiOptions {
        keep_alive,
        ..options()
    };
    set_with(files("llama3"), options)
}

#[tokio::test(start_paused = true)]
async fn a_stream_was_cut_on_its_way_before_its_first_token() {
    let set = talkative();
    let sender = set.live();
    let later = async {
        tokio::time::sleep(Duration::from_secs(12)).await;
        sender.unbounded_send(plain(0, 5)).unwrap();
        let end = ended(done(FinishReason::Length));
        sender.unbounded_send(end).unwrap();
    };
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true});
    let (answer, ()) = futures::join!(set.post(CHAT, body), later);
    assert_eq!(answer.status, 200);
    let (quiet, said) = answer.body.split_once("data: ").unwrap();
    assert_eq!(quiet, ": keep-alive\n\n".repeat(2), "{}", answer.body);
    assert!(said.contains("\"role\":\"assistant\""), "{said}");
    assert_eq!(said.matches("\"role\"").count(), 1);
    assert!(said.ends_with("data: [DONE]\n\n"));
}

#[tokio::test(start_paused = true)]
async fn what_failed_after_a_comment_ended_quietly() {
    let set = talkative();
    let sender = set.live();
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
    // Whoever takes the answer whole has the status in any case.
    let sender = set.live();
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
async fn a_silent_stream_was_taken_for_dead() {
    let set = talkative();
    let sender = set.live();
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
async fn a_request_kept_no_model_when_another_came() {
    let set = set("llama3");
    let sender = set.live();
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
    assert_eq!(set.get("/v1/models").await.json()["data"][0]["id"], "qwen2");
}
