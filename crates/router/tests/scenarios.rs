//! The router's brain, by scripts. A file in `scenarios/` has the events on lines that begin with
//! `>`, and below each the outputs; `UPDATE=1 cargo test` writes them anew. The brain checks itself
//! after each line.

// A script that cannot be read is a mistake in the script, and the panic names the place.
#![allow(clippy::unwrap_used)]

use cleave_domain::{
    BlockIndex, BlockRef, Capacity, DecodeTiming, DeviceId, Failure, Fingerprint, FinishReason,
    FlightId, Generation, HandoffId, Incarnation, LinkPrice, OnSloMiss, Order, Pooling,
    PrefillBacklog, PrefillTiming, Prices, Refusal, Report, Request, RequestSlo, RequestStage,
    Role, RowPrice, SloClass, SloMetric, SloPolicy, StepProgress, Tenant, TenantQuota, Time,
    WorkerDescription, WorkerId, WorkerLoad, WorkerRef,
};
use cleave_kv::block_hashes;
use cleave_router::{
    CancelReason, DecisionOutcome, LegPlacement, OperatorRequest, PlacementDecision, RouterBrain,
    RouterInput, RouterLimits, RouterNote, RouterOutput, RoutingMode,
};
use cleave_testkit::build;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const BLOCK_TOKENS: u32 = 4;

/// Plays one script; returns it with the real outputs.
fn play(script: &str) -> String {
    let mut brain = RouterBrain::new(limits(script));
    let mut state = ScriptState {
        policy: policy(script),
        requests: BTreeMap::new(),
    };
    let decisions = script.lines().any(|line| line == "# show decisions");
    let mut moving = BTreeSet::new();
    let mut text = String::new();
    for line in script.lines() {
        if line.starts_with('#') || line.is_empty() {
            text.push_str(line);
            text.push('\n');
        }
        let Some(happens) = line.strip_prefix("> ") else {
            continue;
        };
        text.push_str(line);
        text.push('\n');
        let words: Vec<&str> = happens.split_whitespace().collect();
        let millis = words[0].strip_suffix("ms").expect("a time in ms");
        let now = Time::from_nanos(millis.parse::<u64>().unwrap() * 1_000_000);
        brain.handle(now, input(&words[1..], &mut state));
        while let Some(output) = brain.poll() {
            check_moves(&mut moving, &output);
            let hidden = matches!(
                output,
                RouterOutput::Note(RouterNote::Decided(_) | RouterNote::Judged { .. })
            );
            if let Some(words) = output_words(&output).filter(|_| decisions || !hidden) {
                text.push_str(&format!("    {words}\n"));
            }
        }
        brain.check();
    }
    text
}

/// The part of a script that its later lines refer to.
struct ScriptState {
    policy: SloPolicy,
    requests: BTreeMap<u64, Arc<Request>>,
}

/// Asserts that each move that began has ended, one way or the other, before its flight does.
fn check_moves(moving: &mut BTreeSet<HandoffId>, output: &RouterOutput) {
    match output {
        RouterOutput::Note(RouterNote::Moving { handoff, .. }) => assert!(moving.insert(*handoff)),
        RouterOutput::Note(
            RouterNote::Moved { handoff, .. } | RouterNote::MigrationAborted { handoff, .. },
        ) => {
            assert!(moving.remove(handoff), "{handoff} ended its move twice");
        }
        RouterOutput::End { flight, .. } => {
            let open = moving.iter().find(|handoff| handoff.flight == *flight);
            assert_eq!(open, None, "a move that neither came nor stayed");
        }
        _ => {}
    }
}

fn check(name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/scenarios")
        .join(format!("{name}.txt"));
    let script = std::fs::read_to_string(&path).unwrap();
    let played = play(&script);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, played).unwrap();
    } else {
        assert_eq!(script, played, "{name}");
    }
}

/// Defaults, changed by a line `# limits key=value …`.
fn limits(script: &str) -> RouterLimits {
    let line = script.lines().find_map(|l| l.strip_prefix("# limits "));
    let words: Vec<&str> = line.unwrap_or_default().split_whitespace().collect();
    let number = |key, default| number(&words, key).unwrap_or(default);
    RouterLimits {
        me: cleave_domain::RouterId(0),
        flights_max: number("flights", 100),
        queue_max: number("queue", 10),
        queue_wait_max: Duration::from_millis(number("wait", 1000).into()),
        failures_max: number("failures", 2),
        retry_pause: Duration::from_millis(number("pause", 0).into()),
        losses_together: Duration::from_millis(number("together", 0).into()),
        renew_every: Duration::from_millis(number("renew", 100_000).into()),
        reserve_timeout: Duration::from_millis(number("reserve", 500).into()),
        expected_output_tokens: 8,
        moves_max: number("moves", 4),
        move_ahead_tokens: number("ahead", 8),
        stuck_max: Duration::from_millis(number("stuck", 2000).into()),
        reader_wait_max: Duration::from_millis(number("reader", 1000).into()),
        mode: mode(&words),
        placement: placement(&words),
        policy: Arc::new(policy(script)),
    }
}

fn text<'a>(words: &[&'a str], key: &str) -> Option<&'a str> {
    let value = |word: &&'a str| word.strip_prefix(key)?.strip_prefix('=');
    words.iter().find_map(value)
}

fn millis(words: &[&str], key: &str) -> Option<Duration> {
    number(words, key).map(|ms| Duration::from_millis(ms.into()))
}

fn mode(words: &[&str]) -> RoutingMode {
    match text(words, "mode") {
        Some("load") => RoutingMode::Load,
        Some("turns") => RoutingMode::RoundRobin,
        _ => RoutingMode::Slo,
    }
}

fn placement(words: &[&str]) -> LegPlacement {
    match text(words, "placement") {
        Some("split") => LegPlacement::Split,
        Some("whole") => LegPlacement::Whole,
        _ => LegPlacement::Auto,
    }
}

/// Lines `# class NAME key=value …` and `# tenant NAME share=N`; the first class is the default.
fn policy(script: &str) -> SloPolicy {
    let lines = script.lines().filter_map(|line| line.strip_prefix("# "));
    let mut policy = SloPolicy::default();
    let mut classes = Vec::new();
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.first() {
            Some(&"class") => classes.push(class(&words[1..])),
            Some(&"tenant") => policy.tenants.push(Tenant {
                name: words[1].to_owned(),
                key_digests: Vec::new(),
                share: number(&words, "share").unwrap(),
                quota: TenantQuota::default(),
            }),
            _ => {}
        }
    }
    if let Some(first) = classes.first() {
        policy.default_class.clone_from(&first.name);
        policy.classes = classes;
    }
    policy
}

fn class(words: &[&str]) -> SloClass {
    let default = SloClass::default();
    SloClass {
        name: words[0].to_owned(),
        ttft: millis(words, "ttft"),
        tpot: millis(words, "tpot"),
        e2e: millis(words, "e2e"),
        priority: number(words, "priority").map_or(0, |p| p as i32),
        weight: number(words, "weight").unwrap_or(default.weight),
        queue_max: number(words, "queue"),
        unmet: match (millis(words, "wait"), text(words, "else")) {
            (Some(wait), _) => OnSloMiss::Queue(wait),
            (None, Some(class)) => OnSloMiss::Downgrade(class.to_owned()),
            (None, None) => OnSloMiss::Reject,
        },
        ..default
    }
}

fn number(words: &[&str], key: &str) -> Option<u32> {
    let value = |word: &&str| Some(word.strip_prefix(key)?.strip_prefix('=')?.parse().unwrap());
    words.iter().find_map(value)
}

fn worker(word: &str) -> WorkerRef {
    let (worker, incarnation) = word.split_once("/i").unwrap_or((word, "1"));
    WorkerRef {
        worker: WorkerId(worker[1..].parse().unwrap()),
        incarnation: Incarnation(incarnation.parse().unwrap()),
    }
}

fn handoff(word: &str) -> HandoffId {
    let (flight, attempt) = word[1..].split_once('.').unwrap();
    HandoffId {
        flight: FlightId(flight.parse().unwrap()),
        attempt: attempt.parse().unwrap(),
    }
}

fn flight(word: &str) -> FlightId {
    FlightId(word[1..].parse().unwrap())
}

fn role(word: &str) -> Role {
    match word {
        "prefill" => Role::Prefill,
        "decode" => Role::Decode,
        "both" => Role::Both,
        other => panic!("no role {other}"),
    }
}

/// Output tokens are distinguished from prompt tokens by their size.
fn output_token(index: u32) -> u32 {
    1000 + index
}

fn failure(word: &str) -> Failure {
    match word {
        "link" => Failure::LinkLost,
        "corrupt" => Failure::Corrupt,
        "lease" => Failure::LeaseExpired,
        "constraint" => Failure::Constraint("too complex".to_owned()),
        _ => Failure::Rejected,
    }
}

fn input(words: &[&str], state: &mut ScriptState) -> RouterInput {
    match words[0] {
        "join" => RouterInput::WorkerJoined {
            worker: worker(words[1]),
            description: description(&words[2..]),
        },
        "lost" => RouterInput::WorkerLost {
            worker: worker(words[1]),
        },
        "submit" => {
            let number = words[1][1..].parse().unwrap();
            let request = Arc::new(request(&words[2..], &state.policy));
            state.requests.insert(number, Arc::clone(&request));
            RouterInput::Submitted {
                flight: FlightId(number),
                request,
            }
        }
        "cancel" => RouterInput::Cancelled {
            flight: flight(words[1]),
            why: match number(words, "enough") {
                Some(output_tokens) => CancelReason::Enough { output_tokens },
                None => CancelReason::Left,
            },
        },
        "counted" => RouterInput::Counted {
            handoff: handoff(words[1]),
            generated: (0..number(words, "tokens").unwrap())
                .map(output_token)
                .collect(),
        },
        "stalled" => RouterInput::ReaderStalled {
            flight: flight(words[1]),
        },
        "flowing" => RouterInput::ReaderResumed {
            flight: flight(words[1]),
        },
        "command" => RouterInput::Commanded {
            worker: worker(words[1]).worker,
            command: match words[2] {
                "drain" => OperatorRequest::Drain,
                other => OperatorRequest::Serve(role(other)),
            },
        },
        "policy" => {
            match words[1] {
                "class" => {
                    let class = class(&words[2..]);
                    state.policy.classes.retain(|old| old.name != class.name);
                    state.policy.classes.push(class);
                }
                _ => panic!("no policy of {}", words[1]),
            }
            let policy = Arc::new(state.policy.clone());
            RouterInput::PolicyChanged { policy }
        }
        "woke" => RouterInput::Woke,
        "drain" => RouterInput::Draining,
        name => RouterInput::WorkerReported {
            worker: worker(name),
            report: report(&words[1..], &state.requests),
        },
    }
}

fn description(words: &[&str]) -> WorkerDescription {
    let number = |key, default| number(words, key).unwrap_or(default);
    let revision = words.iter().find_map(|w| w.strip_prefix("rev="));
    WorkerDescription {
        role: role(words[0]),
        home: role(words[0]),
        model: "m".to_owned(),
        fingerprint: Fingerprint(revision.unwrap_or("a").to_owned()),
        capacity: Capacity {
            block_tokens: BLOCK_TOKENS,
            block_bytes: 64,
            blocks_count: number("blocks", 100),
            slots_count: number("slots", 8),
            step_tokens_max: 64,
            context_tokens_max: number("context", 200),
            states: None,
            windows: None,
        },
        queue_max: number("queue", 8),
        device: text(words, "device").map(|device| DeviceId(device.to_owned())),
    }
}

fn request(words: &[&str], policy: &SloPolicy) -> Request {
    let class = policy.class(text(words, "class").unwrap_or_default());
    let number = |key, default| number(words, key).unwrap_or(default);
    let from = number("from", 0);
    let prompt = from..from + number("prompt", 10);
    let mut request = build::request(prompt, number("max", 4));
    if words.contains(&"vector") {
        request.pooling = Some(Pooling::Mean);
        request.stop.max_tokens = 1;
    }
    request.stop.min_tokens = number("min", 0);
    // The output token with this number stops.
    let stops = words.iter().filter_map(|w| w.strip_prefix("stop="));
    let stops = stops.map(|w| output_token(w.parse::<u32>().unwrap() - 1));
    request.stop.stop_tokens = stops.collect();
    request.priority = number("priority", 1) as i32 - 1;
    request.cache_salt = number("salt", 0).into();
    request.slo = RequestSlo {
        class: class.name.clone(),
        tenant: text(words, "tenant").unwrap_or_default().to_owned(),
        ttft: millis(words, "ttft").or(class.ttft),
        tpot: millis(words, "tpot").or(class.tpot),
        e2e: millis(words, "e2e").or(class.e2e),
        priority: class.priority,
    };
    request
}

/// A step takes `base` and `row` for each of its tokens, in microseconds; a block's transfer takes
/// `link`.
fn prices(words: &[&str]) -> Prices {
    let micros = |key| u64::from(number(words, key).unwrap_or(0));
    let knot = |rows: u32| RowPrice {
        rows,
        nanos: 1000 * (micros("base") + micros("row") * u64::from(rows)),
    };
    Prices {
        rows: vec![knot(1), knot(1_000_000)],
        link: LinkPrice {
            latency_nanos: 1000 * micros("link"),
            byte_picos: 0,
        },
        ..Prices::default()
    }
}

fn backlog(words: &[&str]) -> PrefillBacklog {
    let mut backlog = PrefillBacklog::default();
    let numbers = text(words, "backlog").unwrap_or_default().split(',');
    for (entry, millis) in backlog.micros[1].iter_mut().zip(numbers) {
        *entry = 1000 * millis.parse::<u32>().unwrap_or(0);
    }
    backlog
}

fn report(words: &[&str], requests: &BTreeMap<u64, Arc<Request>>) -> Report {
    let number = |key| number(words, key).unwrap_or(0);
    let retry_after = Duration::from_millis(200);
    let id = || handoff(words[1]);
    match words[0] {
        "reserved" => Report::Reserved {
            handoff: id(),
            present: number("present"),
            blocks: (0..number("blocks"))
                .map(|index| BlockRef {
                    block: BlockIndex(index),
                    generation: Generation(0),
                })
                .collect(),
            state: None,
            window: None,
        },
        "running" => Report::Running {
            handoff: id(),
            present: number("present"),
        },
        "refused" => Report::Refused {
            handoff: id(),
            refusal: match words[2] {
                "queue" => Refusal::QueueFull { retry_after },
                "blocks" => Refusal::NoBlocks { retry_after },
                "draining" => Refusal::Draining,
                "long" => Refusal::TooLong { tokens_max: 7 },
                "late" => Refusal::Late {
                    aim: SloMetric::Ttft,
                    predicted: Duration::from_millis(number("predicted").into()),
                    retry_after,
                },
                "vocabulary" => Refusal::OutOfVocabulary { vocab_size: 9 },
                _ => Refusal::WrongWorker,
            },
        },
        "prefilled" => Report::Prefilled {
            handoff: id(),
            timing: PrefillTiming {
                wait: Duration::from_millis(number("wait").into()),
                run: Duration::from_millis(number("run").into()),
            },
        },
        "prices" => Report::Prices(prices(words)),
        "landed" => Report::Landed { handoff: id() },
        "finished" => Report::Finished {
            handoff: id(),
            reason: FinishReason::Length,
            output_tokens: number("tokens").max(1),
            timing: DecodeTiming {
                wait: Duration::from_millis(number("wait").into()),
                first: Duration::from_millis(number("first").into()),
            },
            prefill: None,
        },
        "failed" => Report::LegFailed {
            handoff: id(),
            failure: failure(words[2]),
        },
        "stayed" => Report::MigrationAborted {
            handoff: id(),
            failure: failure(words[2]),
        },
        "crowded" => Report::MemoryPressure { handoff: id() },
        "serves" => Report::Serves {
            role: role(words[1]),
        },
        "released" => Report::Released { handoff: id() },
        "draining" => Report::Draining,
        "load" => Report::Load(WorkerLoad {
            queue_tokens: number("queue").into(),
            sequences_waiting: number("waiting"),
            sequences_running: number("running"),
            blocks_free: number("free"),
            progress: if words.contains(&"stuck") {
                StepProgress::Stuck
            } else {
                StepProgress::Moving
            },
            context_tokens: number("context").into(),
            streams: number("streams"),
            backlog: backlog(words),
            tpot_least: millis(words, "tpot"),
            step_left: Duration::from_millis(number("step").into()),
            orders_received: number("heard").into(),
            states_free: 0,
            windows_free: 0,
        }),
        // The first blocks of a flight's prompt and output.
        "stored" => Report::Prefix {
            stored: hashes(words, requests),
            evicted: Vec::new(),
        },
        "evicted" => Report::Prefix {
            stored: Vec::new(),
            evicted: hashes(words, requests),
        },
        other => panic!("no report {other}"),
    }
}

fn hashes(words: &[&str], requests: &BTreeMap<u64, Arc<Request>>) -> Vec<cleave_domain::BlockHash> {
    let request = &requests[&words[1][1..].parse().unwrap()];
    let output = (0..number(words, "tokens").unwrap_or(0)).map(output_token);
    let tokens: Vec<u32> = request.prompt.iter().copied().chain(output).collect();
    let mut hashes = block_hashes(request.cache_scope(), &tokens, BLOCK_TOKENS);
    hashes.truncate(number(words, "blocks").unwrap() as usize);
    hashes
}

fn output_words(output: &RouterOutput) -> Option<String> {
    Some(match output {
        RouterOutput::Order { worker, order } => format!("{worker} {}", order_words(order)),
        RouterOutput::End {
            flight,
            ending,
            output_tokens,
            timing: _,
        } => {
            let tokens = output_tokens.map(|count| format!(" after {count} tokens"));
            format!("{flight} ends: {ending:?}{}", tokens.unwrap_or_default())
        }
        RouterOutput::Drained => "drained".to_owned(),
        RouterOutput::Fence { handoff } => format!("fence {handoff}"),
        RouterOutput::Count { handoff } => format!("count for {handoff}"),
        RouterOutput::Readiness(readiness) => format!("{readiness:?}"),
        RouterOutput::WorkersWanted(decision) => format!("want {:?}", decision.wanted.workers),
        RouterOutput::Note(RouterNote::Fleet { .. }) => return None,
        RouterOutput::Note(note) => format!("note {}", note_words(note)),
    })
}

fn note_words(note: &RouterNote) -> String {
    match note {
        RouterNote::Placed {
            handoff,
            prefill,
            decode,
            cached_tokens,
            waited,
        } => format!(
            "{handoff} placed on {prefill} and {decode}, {cached_tokens} cached, {waited:?}"
        ),
        RouterNote::PassedOver {
            handoff,
            worker,
            refusal,
        } => format!("{handoff} passed over {worker}: {refusal:?}"),
        RouterNote::Stale { worker } => format!("stale word of {worker}"),
        RouterNote::Retried {
            handoff,
            failure,
            generated_tokens,
        } => format!("{handoff} failed: {failure:?}, the client has {generated_tokens}"),
        RouterNote::Moving {
            handoff,
            from,
            to,
            why,
        } => format!("{handoff} moves from {from} to {to}: {why:?}"),
        RouterNote::Moved { handoff, took } => format!("{handoff} moved in {took:?}"),
        RouterNote::MigrationAborted { handoff, failure } => {
            format!("{handoff} did not move: {failure:?}")
        }
        RouterNote::CancelFreed {
            flight,
            took,
            stage,
        } => format!("{flight} was cancelled while {stage:?} and free in {took:?}"),
        RouterNote::WorkerStuck { worker } => format!("{worker} is stuck"),
        RouterNote::PrefixDropped {
            worker,
            dropped_count,
        } => format!("{dropped_count} prefixes of {worker} dropped"),
        RouterNote::Fleet { .. } => String::new(),
        RouterNote::Decided(decision) => decision_words(decision),
        RouterNote::Judged {
            flight,
            class,
            tenant: _,
            verdict,
            timing,
            output_tokens,
            forecast,
        } => {
            let stages = RequestStage::ALL
                .iter()
                .filter(|s| !timing.stage(**s).is_zero());
            let stages: Vec<String> = stages
                .map(|stage| format!("{stage} {:?}", timing.stage(*stage)))
                .collect();
            let stages = stages.join(", ");
            let forecast = forecast
                .as_ref()
                .map(|f| format!("; {:?} and {:?} predicted", f.ttft, f.tpot));
            format!(
                "{flight} of {class} was {verdict:?} with {output_tokens} tokens: {stages}{}",
                forecast.unwrap_or_default()
            )
        }
    }
}

fn decision_words(decision: &PlacementDecision) -> String {
    let PlacementDecision {
        flight,
        class,
        tenant: _,
        waited,
        ttft_permille,
        tpot_permille,
        considered,
        outcome,
    } = decision;
    let verdict = match outcome {
        DecisionOutcome::Placed(reason) => format!("is placed {reason:?}"),
        DecisionOutcome::Waits => "waits".to_owned(),
        DecisionOutcome::Downgraded { class } => format!("becomes one of {class}"),
        DecisionOutcome::Refused(refusal) => format!("is refused, {refusal:?}"),
    };
    let factors = match (ttft_permille, tpot_permille) {
        (1000, 1000) => String::new(),
        (ttft, tpot) => format!(" by {ttft} and {tpot} ‰"),
    };
    let considered: Vec<String> = considered
        .iter()
        .map(|f| {
            let (p, d) = (f.prefill.worker, f.decode.worker);
            format!("; {p} {d}: {:?} + {:?} = {:?}", f.ttft, f.tpot, f.e2e)
        })
        .collect();
    let considered = considered.concat();
    format!("{flight} of {class} {verdict} after {waited:?}{factors}{considered}")
}

/// The tokens that a client has already.
fn generated(request: &Request) -> String {
    match request.generated.len() {
        0 => String::new(),
        count => format!(" and {count} generated"),
    }
}

fn order_words(order: &Order) -> String {
    match order {
        Order::Reserve(order) => {
            let generated = generated(&order.request);
            let ahead = match order.ahead_tokens {
                0 => String::new(),
                count => format!(", {count} ahead"),
            };
            format!(
                "<- reserve {} for {}{generated} + {} tokens from {}{ahead}",
                order.handoff,
                order.request.prompt.len(),
                order.expected_output_tokens,
                order.sender
            )
        }
        Order::Run(order) => format!(
            "<- run {} of {}{} + {} tokens",
            order.handoff,
            order.request.prompt.len(),
            generated(&order.request),
            order.expected_output_tokens
        ),
        Order::Prefill(order) => format!(
            "<- prefill {} to {}, {} blocks there and {} to fill",
            order.handoff,
            order.target.worker,
            order.target.present,
            order.target.blocks.len()
        ),
        Order::Renew { handoffs } => {
            let names: Vec<String> = handoffs.iter().map(HandoffId::to_string).collect();
            format!("<- renew {}", names.join(" "))
        }
        Order::Migrate(order) => format!(
            "<- migrate {} as {} to {} after {} tokens, {} blocks to fill",
            order.of,
            order.handoff,
            order.target.worker,
            order.tokens,
            order.target.blocks.len()
        ),
        Order::Drain => "<- drain".to_owned(),
        Order::Serve { role } => format!("<- serve {role}"),
        Order::Relay(_) => "<- pass on".to_owned(),
        Order::FetchAdapter { adapter } => format!("<- fetch {adapter}"),
        Order::Cancel { handoff } => format!("<- cancel {handoff}"),
    }
}

macro_rules! scenarios {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            check(stringify!($name));
        })*

        #[test]
        fn every_script_is_played() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios");
            let count = std::fs::read_dir(folder).unwrap().count();
            assert_eq!(count, [$(stringify!($name)),*].len());
        }
    };
}

scenarios! {
    one_flight_on_two_workers
    one_flight_on_one_worker
    an_unanswered_order_to_run_is_fenced
    a_lost_worker_ordered_to_run_is_fenced
    a_first_token_may_be_the_last
    a_decode_worker_may_know_the_end_before_the_router
    a_finish_before_the_first_token_waits_for_it
    a_burst_spreads_over_workers
    dedicated_workers_are_preferred_to_mixed_ones
    a_cached_prefix_attracts_its_requests
    a_refused_leg_goes_to_the_next_worker
    released_blocks_reopen_a_closed_worker
    a_report_after_released_is_stale
    // Lesson: 32.
    the_queue_keeps_priority_then_arrival
    a_request_no_worker_can_hold_is_refused
    // Lesson: 13.
    a_cancel_is_handled_at_each_stage
    a_draining_worker_gets_no_new_flight
    a_draining_router_refuses_and_finishes
    a_failure_before_the_first_token_is_retried
    // Lesson: 9.
    a_stream_outlives_its_worker
    late_reports_of_a_past_attempt_are_stale
    leases_are_renewed
    // Lesson: 3.
    a_refused_prompt_frees_the_reservation
    // Lesson: 6.
    a_restarted_worker_has_no_cached_prefixes
    // Lesson: 8.
    a_failed_constraint_ends_its_flight_at_once
    a_failed_prefill_frees_the_decode_worker_at_once
    // Lesson: 9.
    a_silent_decode_worker_is_passed_over
    silent_workers_do_not_count_as_a_full_queue
    a_stream_with_an_unknown_token_fails_at_once
    // Lesson: 10.
    both_legs_are_claimed_before_either_starts
    // Lesson: 15.
    a_rejoined_worker_is_a_new_incarnation
    // Lesson: 19, 30.
    different_fingerprints_are_never_paired
    // Invariant: I20.
    // Lesson: 19.
    a_stream_is_never_resumed_by_other_weights
    // Lesson: 1.
    the_sender_is_released_after_the_landing
    // Lesson: 9.
    a_source_may_be_lost_at_each_stage_of_a_move
    // Lesson: 9.
    a_target_may_be_lost_at_each_stage_of_a_move
    a_source_may_know_the_landing_before_the_router
    an_aborted_move_resumes_the_paused_sequence
    a_sequence_may_finish_during_its_move
    a_drain_waits_for_room_elsewhere
    a_flight_landed_on_a_draining_worker_moves_on
    roles_change_at_run_time
    operator_commands_are_sent_to_the_worker
    a_draining_prefill_worker_gets_no_reserved_prompt
    // Lesson: 16.
    a_stream_resumed_at_its_end_is_done
    // Lesson: 16.
    a_spent_retry_budget_ends_in_an_error
    a_stream_too_long_for_all_blocks_no_other
    // Lesson: 12.
    a_stuck_worker_is_passed_over
    // Lesson: 12.
    flights_leave_a_stuck_worker_after_its_limit
    // Lesson: 12.
    flights_leave_a_stuck_prefill_worker
    two_moves_of_one_flight_do_not_overlap
    a_target_that_refuses_or_is_silent_aborts_the_move
    a_worker_short_of_memory_moves_a_sequence_away
    a_client_that_never_reads_is_failed
    a_cancel_works_while_counting_and_queued
    a_claim_dropped_without_release_makes_room
    a_retry_avoids_a_broken_link
    // Lesson: 27.
    a_drain_moves_running_sequences
    // Lesson: 13.
    a_cancel_is_handled_at_each_stage_of_a_move
    // Lesson: 9.
    all_flights_of_a_lost_worker_are_resumed
    // Lesson: 12.
    a_move_to_a_stuck_target_is_aborted
    // Lesson: 15.
    late_reports_of_a_move_are_stale
    a_resumed_stream_finds_its_own_prefix
    an_absurd_load_counts_as_a_full_worker
    an_unreachable_target_is_refused_at_once
    an_unmet_target_waits_or_downgrades
    a_policy_change_applies_to_waiting_flights
    a_guest_is_not_moved_because_of_the_role
    // Lesson: 27.
    a_guest_is_moved_by_a_drain
    a_worker_that_refused_as_late_is_not_asked_twice
    // Lesson: 25.
    refused_and_failed_flights_are_not_good
    // Lesson: 23.
    a_late_verdict_names_the_stage_at_fault
    round_robin_takes_turns_for_each_leg
    whole_placement_uses_any_worker
    a_resumed_stream_goes_first_and_is_never_refused_late
    a_full_queue_drops_the_least_urgent_flight
    a_prompt_that_stays_needs_a_slot
    slots_of_streams_still_to_come_are_free
    a_short_prompt_waits_for_the_work_before_it
    streams_of_other_routers_slow_prompts
    a_yielding_request_fits_into_one_slot
    workers_sharing_a_device_do_not_split_a_request
    workers_lost_together_count_no_failure
    a_pause_outlasts_the_queue_limit_of_a_class
    a_paused_stream_avoids_the_worker_that_failed_it
    a_drained_worker_is_not_counted_as_a_loss
    one_workers_refusal_is_not_the_fleets_answer
    retries_pause_longer_after_each_lost_worker
    a_final_refusal_of_a_worker_reaches_the_client
    a_large_request_is_overtaken_at_most_sixteen_times
    a_yielding_request_is_overtaken_without_limit
    no_flight_overtakes_in_load_mode
    a_class_has_its_own_queue_limit
    a_vector_runs_on_one_prefill_worker
    a_vector_of_a_lost_worker_is_computed_elsewhere
    a_vector_is_refused_for_its_first_target_alone
}
