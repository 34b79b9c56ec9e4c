//! Streams outlive their workers: killed, drained, re-purposed, stuck, silent.

use crate::fleet::hash_chain::{HashChainEngine, StepGate, expected, expected_with_state};
use crate::fleet::{
    DONE, TEST_WAIT_MAX, check, collect, end, files, health_of, http, metric, prompt, request,
    router, router_with, until, worker, worker_node,
};
use crate::proxy::{FaultProxy, LinkCondition};
use cleave_api::{FlightEvent, FlightStream, WorkerCommand, WorkerState};
use cleave_domain::{Ending, Failure, Role, TokenId};
use cleave_node::{RouterOptions, RunningRouter, RunningWorker};
use futures::StreamExt;
use std::time::Duration;
use tokio::time::timeout;

/// A decode worker and the gate before its steps.
struct GatedDecoder {
    worker: RunningWorker,
    gate: StepGate,
}

/// A router, a prefill worker and two decode workers.
struct SurvivalFleet {
    router: RunningRouter,
    prefill: RunningWorker,
    decoders: Vec<GatedDecoder>,
}

impl SurvivalFleet {
    async fn new(options: RouterOptions) -> Self {
        Self::with_engines(options, |engine| engine).await
    }

    async fn with_engines(
        options: RouterOptions,
        edit: impl Fn(HashChainEngine) -> HashChainEngine,
    ) -> Self {
        let router = router_with(options).await;
        let address = router.address().to_string();
        let start = async |name: &str, role| {
            let gate = StepGate::new();
            let mut node = worker_node(name, role, &address, &gate);
            node.engine = Box::new(edit(HashChainEngine::new(&gate)));
            let worker = node.start().await.unwrap();
            timeout(TEST_WAIT_MAX, worker.ready()).await.unwrap();
            GatedDecoder { worker, gate }
        };
        let prefill = start("p0", Role::Prefill).await.worker;
        let decoders = vec![
            start("d0", Role::Decode).await,
            start("d1", Role::Decode).await,
        ];
        timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
        Self {
            router,
            prefill,
            decoders,
        }
    }

    /// A flight that has given `given` tokens and goes no further; and where it is.
    async fn flight(
        &self,
        prompt: &[TokenId],
        given: usize,
    ) -> (FlightStream, Vec<TokenId>, usize) {
        for decoder in &self.decoders {
            // The first token is the prefill worker's.
            decoder.gate.shut_after(given as u64 - 1);
        }
        let mut stream = self.router.frontend().submit(request(prompt, 40));
        let mut tokens = Vec::new();
        while tokens.len() < given {
            let event = timeout(TEST_WAIT_MAX, stream.next()).await.unwrap();
            let Some(FlightEvent::Token(emission)) = event else {
                panic!("{event:?}");
            };
            tokens.push(emission.sampled.token);
        }
        let runs = |decoder: &&GatedDecoder| {
            let text = decoder.worker.metrics();
            metric(&text, "vllm:num_requests_running", "") == 1.0
        };
        until(|| self.decoders.iter().any(|decoder| runs(&decoder))).await;
        let at = self.decoders.iter().position(|decoder| runs(&decoder));
        (stream, tokens, at.unwrap())
    }

    /// Lets one worker draw token by token, and the other as it likes, until a sequence has moved:
    /// unhindered it would be through before the order to move could reach it.
    async fn until_moved(&self, from: usize, stream: &mut FlightStream) -> Vec<TokenId> {
        self.decoders[1 - from].gate.open();
        // The order to move tells where to, and that link is measured before it is used.
        let (source, target) = (format!("d{from}"), format!("d{}", 1 - from));
        until(|| {
            let views = self.router.frontend().workers();
            let view = views.iter().find(|view| view.name == source);
            view.is_some_and(|view| view.links.iter().any(|link| link.peer == target))
        })
        .await;
        let mut tokens = Vec::new();
        while self.counted("cleave_moves_done_total", "") == 0.0 {
            self.decoders[from].gate.allow_one();
            let event = timeout(TEST_WAIT_MAX, stream.next()).await.unwrap();
            let Some(FlightEvent::Token(emission)) = event else {
                panic!("it moves before it ends: {event:?}");
            };
            tokens.push(emission.sampled.token);
        }
        tokens
    }

    fn open(&self) {
        for decoder in &self.decoders {
            decoder.gate.open();
        }
    }

    fn counted(&self, name: &str, label: &str) -> f64 {
        metric(&self.router.frontend().metrics(), name, label)
    }

    fn state(&self, name: &str) -> Option<WorkerState> {
        let views = self.router.frontend().workers();
        let view = views.into_iter().find(|view| view.name == name)?;
        Some(view.state)
    }

    async fn end(self) {
        self.open();
        for decoder in self.decoders {
            decoder.worker.drain(TEST_WAIT_MAX).await;
        }
        self.prefill.drain(TEST_WAIT_MAX).await;
        self.router.drain(TEST_WAIT_MAX).await;
    }
}

/// The rest of the stream makes it whole.
async fn check_rest(stream: FlightStream, tokens: Vec<TokenId>, prompt: &[TokenId]) {
    let all = whole_stream(stream, tokens, prompt).await;
    assert_eq!(all, expected(prompt, 40));
}

/// The tokens of a stream that is read to its end, after those that were read already.
async fn whole_stream(
    stream: FlightStream,
    mut tokens: Vec<TokenId>,
    prompt: &[TokenId],
) -> Vec<TokenId> {
    let rest: Vec<FlightEvent> = timeout(TEST_WAIT_MAX, stream.collect()).await.unwrap();
    let mut ended = None;
    for event in rest {
        match event {
            FlightEvent::Token(emission) => {
                assert_eq!(emission.index as usize, tokens.len());
                assert_eq!(emission.prompt.is_some(), emission.index == 0);
                tokens.push(emission.sampled.token);
            }
            FlightEvent::Ended { ending, usage, .. } => {
                assert_eq!(usage.output_tokens as usize, tokens.len());
                assert_eq!(usage.prompt_tokens as usize, prompt.len());
                ended = Some(ending);
            }
        }
    }
    assert_eq!(ended, Some(DONE));
    tokens
}

#[tokio::test]
async fn a_stream_resumes_when_its_decode_worker_dies() {
    let mut stage = SurvivalFleet::new(RouterOptions::default()).await;
    let prompt = prompt(1, 21);
    let (stream, tokens, at) = stage.flight(&prompt, 7).await;
    let lost = stage.decoders.remove(at);
    lost.worker.stop().await;
    lost.gate.open();
    stage.open();
    check_rest(stream, tokens, &prompt).await;
    assert_eq!(stage.counted("cleave_retries_total", "worker_lost"), 1.0);
    assert_eq!(stage.counted("cleave_streams_resumed_total", ""), 1.0);
    assert_eq!(stage.counted("cleave_resumed_tokens_total", ""), 7.0);
    let pauses = stage.counted("cleave_stream_pause_seconds_count", "resumed");
    assert_eq!(pauses, 1.0);
    stage.end().await;
}

#[tokio::test]
async fn a_stream_survives_a_prefill_worker_lost_at_any_step() {
    // The prompt runs in three chunks; after the last one its blocks are still leaving.
    for steps in 0..4 {
        let (router, address) = router().await;
        let (first, gate) = worker("p0", Role::Prefill, &address).await;
        let (decode, _) = worker("d0", Role::Decode, &address).await;
        timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
        gate.shut_after(steps);
        let prompt = prompt(2, 40);
        let stream = router.frontend().submit(request(&prompt, 40));
        gate.reached().await;
        let (second, _) = worker("p1", Role::Prefill, &address).await;
        first.stop().await;
        gate.open();
        check_rest(stream, Vec::new(), &prompt).await;
        end(router, [second, decode]).await;
    }
}

// Invariant: I18.
// Lesson: 27.
#[tokio::test]
async fn a_drained_worker_migrates_its_streams_and_leaves() {
    let mut stage = SurvivalFleet::new(RouterOptions::default()).await;
    let prompt = prompt(3, 21);
    let (mut stream, mut tokens, at) = stage.flight(&prompt, 7).await;
    let name = format!("d{at}");
    let frontend = stage.router.frontend();
    let view = frontend.command(&name, WorkerCommand::Drain).unwrap();
    assert_eq!(view.state, WorkerState::Draining);
    let drain_request = stage.decoders[at].worker.wait_for_drain_request();
    timeout(TEST_WAIT_MAX, drain_request).await.unwrap();
    tokens.extend(stage.until_moved(at, &mut stream).await);
    stage.open();
    let leaving = stage.decoders.remove(at);
    timeout(TEST_WAIT_MAX, leaving.worker.drain(TEST_WAIT_MAX))
        .await
        .unwrap();
    check_rest(stream, tokens, &prompt).await;
    assert_eq!(stage.counted("cleave_moves_total", "drain"), 1.0);
    assert_eq!(stage.counted("cleave_moves_done_total", ""), 1.0);
    assert_eq!(stage.counted("cleave_retries_total", ""), 0.0);
    let pauses = stage.counted("cleave_stream_pause_seconds_count", "migrated");
    assert_eq!(pauses, 1.0);
    stage.end().await;
}

#[tokio::test]
async fn a_migrated_stream_keeps_its_state() {
    let engines = |engine: HashChainEngine| engine.with_states(8);
    let stage = SurvivalFleet::with_engines(RouterOptions::default(), engines).await;
    let prompt = prompt(3, 21);
    let (mut stream, mut tokens, at) = stage.flight(&prompt, 7).await;
    let frontend = stage.router.frontend();
    let drain = frontend.command(&format!("d{at}"), WorkerCommand::Drain);
    assert_eq!(drain.unwrap().state, WorkerState::Draining);
    tokens.extend(stage.until_moved(at, &mut stream).await);
    stage.open();
    let all = whole_stream(stream, tokens, &prompt).await;
    assert_eq!(all, expected_with_state(&prompt, 40));
    assert_eq!(stage.counted("cleave_retries_total", ""), 0.0);
    stage.end().await;
}

#[tokio::test]
async fn a_worker_with_a_new_role_migrates_its_streams() {
    let stage = SurvivalFleet::new(RouterOptions::default()).await;
    let prompt = prompt(4, 21);
    let (mut stream, mut tokens, at) = stage.flight(&prompt, 7).await;
    let name = format!("d{at}");
    let frontend = stage.router.frontend();
    let role = || {
        let views = frontend.workers();
        views.iter().find(|view| view.name == name).unwrap().role
    };
    let command = WorkerCommand::SetRole(Role::Prefill);
    assert_eq!(
        frontend.command(&name, command).unwrap().role,
        Role::Prefill
    );
    until(|| role() == Role::Prefill).await;
    tokens.extend(stage.until_moved(at, &mut stream).await);
    stage.open();
    check_rest(stream, tokens, &prompt).await;
    assert_eq!(stage.counted("cleave_moves_total", "role"), 1.0);
    assert_eq!(stage.counted("cleave_workers", "prefill"), 2.0);
    let text = stage.decoders[at].worker.metrics();
    assert!(text.contains("role=\"prefill\",kind=\"held\""), "{text}");
    // It runs prompts now: the other prefill worker is not needed.
    let SurvivalFleet {
        router,
        prefill,
        decoders,
    } = stage;
    prefill.drain(TEST_WAIT_MAX).await;
    until(|| frontend.workers().len() == 2).await;
    check(&frontend, &crate::fleet::prompt(5, 21), 9).await;
    // And back, at its own port.
    let page = decoders[at].worker.metrics_address().unwrap().to_string();
    let answer = post(&page, "/admin/role", r#"{"role": "both"}"#).await;
    assert!(answer.starts_with("HTTP/1.1 202"), "{answer}");
    until(|| role() == Role::Both).await;
    for decoder in decoders {
        decoder.worker.drain(TEST_WAIT_MAX).await;
    }
    router.drain(TEST_WAIT_MAX).await;
}

#[tokio::test]
async fn a_drain_at_the_workers_own_port_ends_the_worker() {
    let stage = SurvivalFleet::new(RouterOptions::default()).await;
    let page = stage.decoders[0].worker.metrics_address().unwrap();
    let page = page.to_string();
    let unknown = post(&page, "/admin/drain", r#"{"worker": "d9"}"#).await;
    assert!(unknown.starts_with("HTTP/1.1 404"), "{unknown}");
    assert!(unknown.contains("worker_not_found"), "{unknown}");
    let answer = post(&page, "/admin/drain", "").await;
    assert!(answer.starts_with("HTTP/1.1 202"), "{answer}");
    let drain_request = stage.decoders[0].worker.wait_for_drain_request();
    timeout(TEST_WAIT_MAX, drain_request).await.unwrap();
    until(|| stage.state("d0") == Some(WorkerState::Draining)).await;
    check(&stage.router.frontend(), &prompt(6, 21), 9).await;
    stage.end().await;
}

// Invariant: I24.
// Lesson: 12.
#[tokio::test]
async fn streams_of_a_stuck_worker_resume_on_another() {
    let (router, address) = router().await;
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    let mut decoders = Vec::new();
    for name in ["d0", "d1"] {
        let gate = StepGate::new();
        let mut node = worker_node(name, Role::Decode, &address, &gate);
        node.options.step_max = Duration::from_millis(200);
        let worker = node.start().await.unwrap();
        timeout(TEST_WAIT_MAX, worker.ready()).await.unwrap();
        decoders.push(GatedDecoder { worker, gate });
    }
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    let stage = SurvivalFleet {
        router,
        prefill,
        decoders,
    };
    let prompt = prompt(7, 21);
    let (stream, tokens, at) = stage.flight(&prompt, 7).await;
    let name = format!("d{at}");
    stage.decoders[1 - at].gate.open();
    check_rest(stream, tokens, &prompt).await;
    assert_eq!(stage.state(&name), Some(WorkerState::Stuck));
    assert_eq!(stage.counted("cleave_router_workers_stuck_total", ""), 1.0);
    assert_eq!(stage.counted("cleave_retries_total", "worker_stuck"), 1.0);
    let health = health_of(&stage.decoders[at].worker).await;
    assert!(health.starts_with("HTTP/1.1 503"), "{health}");
    // Once it moves again it is one of the fleet.
    stage.decoders[at].gate.open();
    until(|| stage.state(&name) == Some(WorkerState::Ready)).await;
    let health = health_of(&stage.decoders[at].worker).await;
    assert!(health.starts_with("HTTP/1.1 200"), "{health}");
    stage.end().await;
}

// Invariant: I18.
#[tokio::test]
async fn streams_of_a_silent_worker_resume_and_it_rejoins() {
    let silence_max = Duration::from_millis(500);
    let router = router_with(RouterOptions {
        silence_max,
        ..RouterOptions::default()
    })
    .await;
    let address = router.address().to_string();
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    let (mut decoders, mut lines) = (Vec::new(), Vec::new());
    for name in ["d0", "d1"] {
        let line = FaultProxy::start().await;
        line.set_target(Some(address.clone()));
        let gate = StepGate::new();
        let mut node = worker_node(name, Role::Decode, &line.address, &gate);
        node.options.silence_max = silence_max;
        let worker = node.start().await.unwrap();
        timeout(TEST_WAIT_MAX, worker.ready()).await.unwrap();
        decoders.push(GatedDecoder { worker, gate });
        lines.push(line);
    }
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    let stage = SurvivalFleet {
        router,
        prefill,
        decoders,
    };
    let prompt = prompt(8, 21);
    let (stream, tokens, at) = stage.flight(&prompt, 7).await;
    let name = format!("d{at}");
    lines[at].set_condition(LinkCondition::Frozen);
    until(|| stage.state(&name).is_none()).await;
    // Nobody wants the tokens that it samples now, and its messages after the thaw belong to a
    // connection that has ended.
    stage.open();
    check_rest(stream, tokens, &prompt).await;
    lines[at].set_condition(LinkCondition::Normal);
    until(|| stage.state(&name) == Some(WorkerState::Ready)).await;
    assert_eq!(stage.counted("cleave_streams_resumed_total", ""), 1.0);
    for salt in 10..14 {
        check(&stage.router.frontend(), &crate::fleet::prompt(salt, 21), 9).await;
    }
    stage.end().await;
}

// Invariant: I50.
#[tokio::test]
async fn a_flipped_bit_between_router_and_worker_changes_no_token() {
    let router = router_with(RouterOptions::default()).await;
    let address = router.address().to_string();
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    let line = FaultProxy::start().await;
    line.set_target(Some(address));
    let node = worker_node("d0", Role::Decode, &line.address, &StepGate::new());
    let decode = node.start().await.unwrap();
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    let (frontend, prompt) = (router.frontend(), prompt(8, 21));
    // In the checksum, in tokens and orders, in what frames them.
    for from_end in [0, 5, 9, 12, 20, 33, 60] {
        line.flip(from_end);
        while !line.flipped() {
            let mut stream = frontend.submit(request(&prompt, 20));
            let mut given = Vec::new();
            while let Some(event) = timeout(TEST_WAIT_MAX, stream.next()).await.unwrap() {
                match event {
                    FlightEvent::Token(token) => given.push(token.sampled.token),
                    // A lone worker is away for as long as it dials again, and retries may be
                    // spent.
                    FlightEvent::Ended { ending, .. } => {
                        let whole = given.len() == 20;
                        assert_eq!(matches!(ending, Ending::Done { .. }), whole, "{ending:?}");
                    }
                }
            }
            let right = expected(&prompt, 20);
            assert_eq!(given, right[..given.len()], "{from_end}");
        }
        timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    }
    check(&frontend, &prompt, 20).await;
    end(router, [prefill, decode]).await;
}

#[tokio::test]
async fn a_faulty_network_between_workers_changes_no_token() {
    let (router, address) = router().await;
    let data = FaultProxy::start().await;
    let mut node = worker_node("d0", Role::Decode, &address, &StepGate::new());
    node.data_address = Some(data.address.clone());
    let decode = node.start().await.unwrap();
    data.set_target(Some(decode.data_address().to_string()));
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    let conditions = [
        LinkCondition::Normal,
        LinkCondition::Delayed(Duration::from_millis(5)),
        LinkCondition::Throttled(4_000_000),
    ];
    for (salt, condition) in (40..).zip(conditions) {
        data.set_condition(condition);
        check(&router.frontend(), &prompt(salt, 40), 9).await;
        data.cut();
        check(&router.frontend(), &prompt(salt + 10, 40), 9).await;
        data.half_close();
        check(&router.frontend(), &prompt(salt + 20, 40), 9).await;
        data.flip(3);
        check(&router.frontend(), &prompt(salt + 30, 40), 9).await;
    }
    end(router, [prefill, decode]).await;
}

// Lesson: 16.
#[tokio::test]
async fn spent_retries_end_the_stream_as_failed() {
    let mut options = RouterOptions::default();
    options.limits.failures_max = 0;
    let mut stage = SurvivalFleet::new(options).await;
    let (stream, tokens, at) = stage.flight(&prompt(9, 21), 7).await;
    let lost = stage.decoders.remove(at);
    lost.worker.stop().await;
    lost.gate.open();
    let rest: Vec<FlightEvent> = timeout(TEST_WAIT_MAX, stream.collect()).await.unwrap();
    let Some(FlightEvent::Ended { ending, usage, .. }) = rest.last() else {
        panic!("{rest:?}");
    };
    let last = Box::new(Failure::WorkerLost);
    assert_eq!(*ending, Ending::Failed(Failure::RetriesSpent(last)));
    assert_eq!(usage.output_tokens as usize, tokens.len());
    stage.end().await;
}

// Invariant: I23.
#[tokio::test]
async fn a_slow_reader_is_ended_and_delays_no_other() {
    let mut options = RouterOptions {
        reader_backlog_max: 4,
        ..RouterOptions::default()
    };
    options.limits.reader_wait_max = Duration::from_millis(300);
    let stage = SurvivalFleet::new(options).await;
    let frontend = stage.router.frontend();
    let failed = || stage.counted("cleave_flights_ended_total", "failed");
    // Short enough to be drawn whole, and long enough to be too much for who does not read.
    let slow = frontend.submit(request(&prompt(10, 21), 80));
    let endless = frontend.submit(request(&prompt(11, 21), 80));
    stage.decoders.iter().for_each(|d| d.gate.shut_after(20));
    // Others get on meanwhile.
    stage.open();
    check(&frontend, &prompt(12, 21), 9).await;
    drop((slow, endless));
    assert_eq!(failed(), 0.0);

    for decoder in &stage.decoders {
        decoder.gate.shut_after(30);
    }
    let mut slow = frontend.submit(request(&prompt(13, 21), 80));
    until(|| failed() == 1.0).await;
    stage.open();
    let mut last = None;
    while let Some(event) = timeout(TEST_WAIT_MAX, slow.next()).await.unwrap() {
        last = Some(event);
    }
    let Some(FlightEvent::Ended { ending, .. }) = last else {
        panic!("{last:?}");
    };
    assert_eq!(ending, Ending::Failed(Failure::SlowReader));
    let held =
        |decoder: &GatedDecoder| metric(&decoder.worker.metrics(), "cleave_pool_blocks", "held");
    until(|| stage.decoders.iter().all(|decoder| held(decoder) == 0.0)).await;
    stage.end().await;
}

// Invariant: I22.
#[tokio::test]
async fn a_short_pool_loses_no_stream() {
    let mut options = RouterOptions::default();
    // So little is set aside that more is admitted than the pool can hold.
    options.limits.expected_output_tokens = 1;
    let router = router_with(options).await;
    let address = router.address().to_string();
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    let (decode, _) = worker("d0", Role::Decode, &address).await;
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    let frontend = router.frontend();
    let flights = (0..6).map(|salt| {
        let frontend = std::sync::Arc::clone(&frontend);
        async move { check(&frontend, &prompt(20 + salt, 10), 60).await }
    });
    futures::future::join_all(flights).await;
    let text = decode.metrics();
    let out = metric(&text, "cleave_swap_blocks_total", "kind=\"out\"");
    assert_eq!(
        out,
        metric(&text, "cleave_swap_blocks_total", "kind=\"in\""),
        "{text}"
    );
    let recomputed = metric(&text, "cleave_preemptions_total", "");
    assert!(out + recomputed > 0.0, "the pool was never short\n{text}");
    for kind in ["held", "swapped", "leaked", "quarantined"] {
        let kind = format!("kind=\"{kind}\"");
        until(|| metric(&decode.metrics(), "cleave_pool_blocks", &kind) == 0.0).await;
    }
    end(router, [prefill, decode]).await;
}

// Lesson: 17.
#[tokio::test]
async fn every_hand_off_is_used_and_none_is_recomputed() {
    let stage = SurvivalFleet::new(RouterOptions::default()).await;
    for salt in 0..6 {
        check(&stage.router.frontend(), &prompt(30 + salt, 23), 9).await;
    }
    let texts: Vec<String> = stage.decoders.iter().map(|d| d.worker.metrics()).collect();
    let sum = |name: &str, label: &str| {
        let counts = texts.iter().map(|text| metric(text, name, label));
        counts.sum::<f64>()
    };
    assert_eq!(sum("cleave_worker_handoffs_total", "kind=\"landed\""), 6.0);
    assert_eq!(
        sum("cleave_worker_handoffs_total", "kind=\"recomputed\""),
        0.0
    );
    // A decode worker that ran prompts would answer just as well, and only this would tell.
    assert_eq!(
        sum("cleave_step_tokens_total", "kind=\"prefill\""),
        0.0,
        "{texts:?}"
    );
    assert_eq!(
        stage.counted("cleave_placements_total", "\"aggregated\""),
        0.0
    );
    stage.end().await;
}

// Lesson: 19.
#[tokio::test]
async fn a_worker_of_another_context_is_refused() {
    let (router, address) = router().await;
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    let mut node = worker_node("d0", Role::Decode, &address, &StepGate::new());
    node.files = files();
    node.files.context_tokens_max = Some(64);
    let other = node.start().await.unwrap();
    // It is never let in; the router's log and its own say why.
    check_refused(&router, &other).await;
    other.stop().await;
    prefill.drain(TEST_WAIT_MAX).await;
    router.drain(TEST_WAIT_MAX).await;
}

async fn check_refused(router: &RunningRouter, other: &RunningWorker) {
    let page = other.metrics_address().unwrap().to_string();
    let ready = http(&page, "/ready").await;
    assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
    assert_eq!(router.frontend().workers().len(), 1);
    let (_, ending, _) = collect(router.frontend().submit(request(&prompt(1, 9), 2))).await;
    assert!(matches!(ending, Ending::Refused(_)), "{ending:?}");
}

pub(crate) async fn post(address: &str, path: &str, body: &str) -> String {
    let length = body.len();
    crate::fleet::exchange(
        address,
        format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        ),
    )
    .await
}
