//! Workers of one name, workers of another model, and tokens that are none of the model's.

use crate::fleet::failover::post;
use crate::fleet::hash_chain::{StepGate, expected};
use crate::fleet::{
    DONE, TEST_WAIT_MAX, check, collect, end, files, metric, prompt, request, router, until,
    worker, worker_node,
};
use crate::proxy::FaultProxy;
use cleave_api::SubmissionContext;
use cleave_domain::{Ending, Role};
use cleave_node::{RunningRouter, RunningWorker};
use cleave_text::ModelFiles;
use tokio::time::timeout;

fn standing_by(router: &RunningRouter) -> f64 {
    metric(
        &router.frontend().metrics(),
        "cleave_workers_standing_by",
        "",
    )
}

/// A worker of both legs with these files.
async fn worker_with(name: &str, address: &str, files: ModelFiles) -> RunningWorker {
    let mut node = worker_node(name, Role::Both, address, &StepGate::new());
    node.files = files;
    let running = node.start().await.unwrap();
    timeout(TEST_WAIT_MAX, running.ready()).await.unwrap();
    running
}

#[tokio::test]
async fn a_freed_name_goes_to_the_waiting_worker_at_once() {
    let (router, address) = router().await;
    let line = FaultProxy::start().await;
    line.set_target(Some(address.clone()));
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    let (first, _) = worker("d0", Role::Decode, &line.address).await;
    let (second, _) = worker("d0", Role::Decode, &address).await;
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    // The later start has the name. The earlier one stays connected: it does not dial again and
    // again.
    until(|| standing_by(&router) == 1.0).await;
    for salt in 0..20 {
        check(&router.frontend(), &prompt(salt, 21), 9).await;
    }
    assert_eq!((standing_by(&router), line.dialled()), (1.0, 1));
    let holder = || {
        let views = router.frontend().workers();
        let view = views.into_iter().find(|view| view.name == "d0");
        view.map(|view| view.worker)
    };
    let before = holder();
    second.stop().await;
    until(|| holder().is_some_and(|life| Some(life) != before)).await;
    assert_eq!((standing_by(&router), line.dialled()), (0.0, 2));
    check(&router.frontend(), &prompt(9, 21), 9).await;
    end(router, [first, prefill]).await;
}

#[tokio::test]
async fn a_worker_that_waits_for_its_name_brings_no_files() {
    let (router, address) = router().await;
    let with = |template: &str| ModelFiles {
        chat_template: Some(template.into()),
        ..files()
    };
    let elder = worker_with("w0", &address, with("one")).await;
    let younger = worker_with("w0", &address, with("two two two two two two")).await;
    until(|| standing_by(&router) == 1.0).await;
    let tokens = async || {
        let body = r#"{"messages": [{"role": "user", "content": "x"}]}"#;
        let answer = post(&address, "/tokenize", body).await;
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        body["count"].as_u64().unwrap()
    };
    // The template of the worker that serves has more tokens.
    let switches = async {
        while tokens().await < 5 {
            tokio::task::yield_now().await;
        }
    };
    timeout(TEST_WAIT_MAX, switches)
        .await
        .expect("its files serve");
    elder.stop().await;
    younger.drain(TEST_WAIT_MAX).await;
    router.drain(TEST_WAIT_MAX).await;
}

#[tokio::test]
async fn a_second_model_is_served_beside_the_first() {
    let (router, address) = router().await;
    let first = worker_with("w0", &address, files()).await;
    let shorter = ModelFiles {
        name: "another".into(),
        context_tokens_max: Some(64),
        ..files()
    };
    let second = worker_with("w1", &address, shorter).await;
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    until(|| router.frontend().workers().len() == 2).await;
    let answer = async |model: &str| {
        let prompt = prompt(1, 20);
        let of_model = SubmissionContext {
            model: model.into(),
            ..SubmissionContext::default()
        };
        let stream = router.frontend().submit_for(request(&prompt, 4), of_model);
        let (tokens, ending, _) = collect(stream).await;
        assert_eq!((ending, tokens), (DONE, expected(&prompt, 4)), "{model}");
    };
    let steps = |name: &str| {
        let views = router.frontend().workers();
        let view = views.into_iter().find(|view| view.name == name);
        let counters = view.map(|view| view.counters).unwrap_or_default();
        let of = |(name, _): &(&str, u64)| *name == "prefills";
        counters.into_iter().find(of).map_or(0, |(_, count)| count)
    };
    answer(&files().name).await;
    assert_eq!((steps("w0"), steps("w1")), (1, 0));
    answer("another").await;
    answer("another").await;
    assert_eq!((steps("w0"), steps("w1")), (1, 2));
    let models = crate::fleet::http(&address, "/v1/models").await;
    assert!(models.contains("\"another\"") && models.contains(&files().name));
    // The first model is known without its worker, and the second one serves on.
    first.drain(TEST_WAIT_MAX).await;
    until(|| router.frontend().workers().len() == 1).await;
    let body = format!("{{\"model\": \"{}\", \"prompt\": [1, 2]}}", files().name);
    let gone = post(&address, "/v1/completions", &body).await;
    assert!(
        gone.contains(" 503 ") && gone.contains("no_worker"),
        "{gone}"
    );
    answer("another").await;
    second.drain(TEST_WAIT_MAX).await;
    router.drain(TEST_WAIT_MAX).await;
}

#[tokio::test]
async fn a_foreign_token_that_lands_fails_its_stream_alone() {
    let (router, address) = router().await;
    let (prefill, drawn) = worker("p0", Role::Prefill, &address).await;
    let (decode, gate) = worker("d0", Role::Decode, &address).await;
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    let prompts: Vec<_> = (0..8).map(|salt| prompt(salt, 8)).collect();
    // The first token of this one is sealed with a digest that is right, and is none of the
    // model's.
    drawn.spoil_first_token(&prompts[3]);
    gate.shut();
    let frontend = router.frontend();
    let streams: Vec<_> = prompts
        .iter()
        .map(|prompt| tokio::spawn(collect(frontend.submit(request(prompt, 9)))))
        .collect();
    gate.reached().await;
    gate.open();
    for ((index, prompt), stream) in prompts.iter().enumerate().zip(streams) {
        let (tokens, ending, _) = stream.await.unwrap();
        if index == 3 {
            assert!(matches!(ending, Ending::Failed(_)), "{ending:?}");
        } else {
            assert_eq!((ending, tokens), (DONE, expected(prompt, 9)), "{index}");
        }
    }
    end(router, [prefill, decode]).await;
}
