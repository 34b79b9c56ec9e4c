//! The policy's file changes while requests are served.

use crate::fleet::hash_chain::{HashChainEngine, StepGate, expected};
use crate::fleet::{DONE, TEST_WAIT_MAX, check, collect, files, metric, prompt, request, until};
use cleave_api::{FlightEvent, Frontend};
use cleave_domain::{Request, RequestOrigin, Role, TapeRecord};
use cleave_node::{FleetModel, FleetNode, RouterOptions, RunningFleet};
use cleave_policy::PolicyFile;
use cleave_router::{PoolInput, PoolOutput, RouterInput, RouterLimits};
use cleave_worker::WorkerOptions;
use futures::StreamExt;
use std::path::Path;
use std::sync::Arc;
use tokio::time::timeout;

/// A fleet of two that follows this file.
async fn serve(policy: &Path, tape: &Path, gates: &[StepGate; 2]) -> RunningFleet {
    let worker = |(role, gate): (Role, &StepGate)| {
        let engine: Box<dyn cleave_engine::Engine> = Box::new(HashChainEngine::new(gate));
        (WorkerOptions::new(role.to_string(), role), engine)
    };
    let serve = FleetNode {
        listen: "127.0.0.1:0".into(),
        router: RouterOptions {
            policy: Some(PolicyFile::open(policy).unwrap()),
            tape: Some(tape.to_owned()),
            ..RouterOptions::default()
        },
        models: vec![FleetModel {
            workers: [Role::Prefill, Role::Decode]
                .into_iter()
                .zip(gates)
                .map(worker)
                .collect(),
            files: files(),
        }],
    };
    let running = serve.start().await.unwrap();
    timeout(TEST_WAIT_MAX, running.ready()).await.unwrap();
    running
}

fn classes(names: &str) -> String {
    let names = names.split(' ');
    let classes = names.map(|name| format!("- name: {name}\n"));
    format!(
        "default_class: a\nclasses:\n{}",
        classes.collect::<String>()
    )
}

/// A request that goes by the policy as it stands.
fn request_by_policy(frontend: &Arc<dyn Frontend>, tokens: &[u32]) -> Request {
    let slo = frontend
        .policy()
        .resolve(&RequestOrigin::default(), "m", 20)
        .unwrap();
    Request {
        slo,
        ..request(tokens, 9)
    }
}

fn reloads(frontend: &Arc<dyn Frontend>, outcome: &str) -> f64 {
    metric(&frontend.metrics(), "cleave_policy_reloads_total", outcome)
}

// Invariant: I35.
#[tokio::test]
async fn a_policy_change_loses_no_request() {
    let folder = tempfile::tempdir().unwrap();
    let (policy, tape) = (
        folder.path().join("policy.yaml"),
        folder.path().join("tape"),
    );
    let write = |text: &str| {
        let next = folder.path().join("next");
        std::fs::write(&next, text).unwrap();
        std::fs::rename(&next, &policy).unwrap();
    };
    write(&classes("a b"));
    let gates = [StepGate::new(), StepGate::new()];
    let running = serve(&policy, &tape, &gates).await;
    let frontend = running.frontend();
    // One flight is in mid-stream, while others come and go.
    gates[1].shut();
    let long = prompt(1, 30);
    let mut stream = frontend.submit(request(&long, 40));
    let first = timeout(TEST_WAIT_MAX, stream.next()).await.unwrap();
    assert!(matches!(first, Some(FlightEvent::Token(_))));

    write("default_class: c\nclasses:\n- name: c\n  ttft: 10m\n  tpot: 10m\n");
    until(|| reloads(&frontend, "changed") == 1.0).await;
    assert_eq!(frontend.policy().default_class, "c");
    let short = prompt(2, 20);
    let after = frontend.submit(request_by_policy(&frontend, &short));
    // A file with a mistake is reported, and changes nothing.
    write("default_class: c\nclasses:\n- name: c\n  tttf: 10m\n");
    until(|| reloads(&frontend, "rejected") == 1.0).await;
    assert_eq!(frontend.policy().default_class, "c");

    gates[1].open();
    let (tokens, ending, _) = collect(after).await;
    assert_eq!((tokens, ending), (expected(&short, 9), DONE));
    let rest: Vec<FlightEvent> = timeout(TEST_WAIT_MAX, stream.collect()).await.unwrap();
    assert!(matches!(rest.last(), Some(FlightEvent::Ended { ending, .. }) if *ending == DONE));
    assert_eq!(rest.len(), 40, "39 tokens and the ending");

    write(&classes("a b c"));
    let flights = (0..40).map(|salt| {
        let frontend = Arc::clone(&frontend);
        async move { check(&frontend, &prompt(salt, 20), 6).await }
    });
    let changed = until(|| reloads(&frontend, "changed") == 2.0);
    tokio::join!(futures::future::join_all(flights), changed);
    let text = frontend.metrics();
    assert_eq!(metric(&text, "cleave_flights_ended_total", "done"), 42.0);
    assert_eq!(metric(&text, "cleave_policy_info", "digest"), 1.0);
    running.drain(TEST_WAIT_MAX).await;
    check_policy_reached_brain_first(&tape);
}

/// No request that goes by a policy reaches the brain before the policy.
fn check_policy_reached_brain_first(tape: &Path) {
    let text = std::fs::read_to_string(tape).unwrap();
    let mut changed = 0;
    let mut submitted = 0;
    for line in text.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let TapeRecord::<RouterLimits, PoolInput, PoolOutput>::Received { input, .. } =
            serde_json::from_value(line["Router"].clone()).unwrap()
        else {
            continue;
        };
        match input.input {
            RouterInput::PolicyChanged { .. } => changed += 1,
            RouterInput::Submitted { request, .. } if request.slo.class == "c" => {
                assert_eq!(changed, 1);
                submitted += 1;
            }
            _ => {}
        }
    }
    assert_eq!((changed, submitted), (2, 1));
}
