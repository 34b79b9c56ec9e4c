//! The router's brain, by scripts. A file in `scenarios/` has what happens on lines that begin with
//! `>`, and below each the outputs; `UPDATE=1 cargo test` writes them anew. The brain checks itself
//! after each line.

// A script that cannot be read is the script's mistake, and says where.
#![allow(clippy::unwrap_used)]

use cleave_domain::{
    Aim, Backlog, BlockIndex, BlockRef, Capacity, DecodeTiming, DeviceId, Failure, Fingerprint,
    FinishReason, FlightId, Generation, HandoffId, Incarnation, LinkPrice, Load, Order,
    PrefillTiming, Prices, Progress, Quota, Refusal, Report, Request, Role, RowPrice, Sampling,
    Slo, SloClass, SloPolicy, Stage, StopRules, Tenant, Time, Unmet, WorkerDescription, WorkerId,
    WorkerRef,
};
use cleave_kv::block_hashes;
use cleave_router::{
    Brain, CancelReason, Command, Decided, Decision, Input, Limits, Mode, Note, Output, Placement,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const BLOCK_TOKENS: u32 = 4;

/// Plays one script; gives it back with the outputs that really came.
fn play(script: &str) -> String {
    let mut brain = Brain::new(limits(script));
    let mut said = Said {
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
        brain.handle(now, input(&words[1..], &mut said));
        while let Some(output) = brain.poll() {
            check_moves(&mut moving, &output);
            let hidden = matches!(output, Output::Note(Note::Decided(_) | Note::Judged { .. }));
            if let Some(words) = output_words(&output).filter(|_| decisions || !hidden) {
                text.push_str(&format!("    {words}\n"));
            }
        }
        brain.check();
    }
    text
}

/// What a script's later lines refer to.
struct Said {
    policy: SloPolicy,
    requests: BTreeMap<u64, Arc<Request>>,
}

/// Each move that began came to an end, one way or the other, before its flight did.
fn check_moves(moving: &mut BTreeSet<HandoffId>, output: &Output) {
    match output {
        Output::Note(Note::Moving { handoff, .. }) => assert!(moving.insert(*handoff)),
        Output::Note(Note::Moved { handoff, .. } | Note::Stayed { handoff, .. }) => {
            assert!(moving.remove(handoff), "{handoff} ended its move twice");
        }
        Output::End { flight, .. } => {
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

/// Defaults, and what a line `# limits key=value …` says otherwise.
fn limits(script: &str) -> Limits {
    let line = script.lines().find_map(|l| l.strip_prefix("# limits "));
    let words: Vec<&str> = line.unwrap_or_default().split_whitespace().collect();
    let number = |key, default| number(&words, key).unwrap_or(default);
    Limits {
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

fn mode(words: &[&str]) -> Mode {
    match text(words, "mode") {
        Some("load") => Mode::Load,
        Some("turns") => Mode::RoundRobin,
        _ => Mode::Slo,
    }
}

fn placement(words: &[&str]) -> Placement {
    match text(words, "placement") {
        Some("split") => Placement::Split,
        Some("whole") => Placement::Whole,
        _ => Placement::Auto,
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
                quota: Quota::default(),
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
            (Some(wait), _) => Unmet::Queue(wait),
            (None, Some(class)) => Unmet::Downgrade(class.to_owned()),
            (None, None) => Unmet::Reject,
        },
        ..default
    }
}

fn number(words: &[&str], key: &str) -> Option<u32> {
    let value = |word: &&str| Some(word.strip_prefix(key)?.strip_prefix('=')?.parse().unwrap());
    words.iter().find_map(value)
}

fn worker(word: &str) -> WorkerRef {
    let (worker, life) = word.split_once("/i").unwrap_or((word, "1"));
    WorkerRef {
        worker: WorkerId(worker[1..].parse().unwrap()),
        incarnation: Incarnation(life.parse().unwrap()),
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

/// Output tokens are told from prompt tokens by their size.
fn output_token(index: u32) -> u32 {
    1000 + index
}

fn failure(word: &str) -> Failure {
    match word {
        "link" => Failure::LinkLost,
        "corrupt" => Failure::Corrupt,
        "lease" => Failure::LeaseExpired,
        _ => Failure::Rejected,
    }
}

fn input(words: &[&str], said: &mut Said) -> Input {
    match words[0] {
        "join" => Input::WorkerJoined {
            worker: worker(words[1]),
            description: description(&words[2..]),
        },
        "lost" => Input::WorkerLost {
            worker: worker(words[1]),
        },
        "submit" => {
            let number = words[1][1..].parse().unwrap();
            let request = Arc::new(request(&words[2..], &said.policy));
            said.requests.insert(number, Arc::clone(&request));
            Input::Submitted {
                flight: FlightId(number),
                request,
            }
        }
        "cancel" => Input::Cancelled {
            flight: flight(words[1]),
            why: match number(words, "enough") {
                Some(output_tokens) => CancelReason::Enough { output_tokens },
                None => CancelReason::Left,
            },
        },
        "counted" => Input::Counted {
            handoff: handoff(words[1]),
            generated: (0..number(words, "tokens").unwrap())
                .map(output_token)
                .collect(),
        },
        "stalled" => Input::Stalled {
            flight: flight(words[1]),
        },
        "flowing" => Input::Flowing {
            flight: flight(words[1]),
        },
        "command" => Input::Commanded {
            worker: worker(words[1]).worker,
            command: match words[2] {
                "drain" => Command::Drain,
                other => Command::Serve(role(other)),
            },
        },
        "policy" => {
            match words[1] {
                "class" => {
                    let class = class(&words[2..]);
                    said.policy.classes.retain(|old| old.name != class.name);
                    said.policy.classes.push(class);
                }
                _ => panic!("no policy of {}", words[1]),
            }
            let policy = Arc::new(said.policy.clone());
            Input::PolicyChanged { policy }
        }
        "woke" => Input::Woke,
        "drain" => Input::Draining,
        who => Input::Told {
            worker: worker(who),
            report: report(&words[1..], &said.requests),
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
        },
        queue_max: number("queue", 8),
        device: text(words, "device").map(|device| DeviceId(device.to_owned())),
    }
}

fn request(words: &[&str], policy: &SloPolicy) -> Request {
    let class = policy.class(text(words, "class").unwrap_or_default());
    let number = |key, default| number(words, key).unwrap_or(default);
    let from = number("from", 0);
    Request {
        prompt: (from..from + number("prompt", 10)).collect(),
        generated: Arc::new([]),
        sampling: Sampling::greedy(),
        stop: StopRules {
            max_tokens: number("max", 4),
            min_tokens: number("min", 0),
            // The so-manieth output token stops.
            stop_tokens: words
                .iter()
                .filter_map(|w| w.strip_prefix("stop="))
                .map(|w| output_token(w.parse::<u32>().unwrap() - 1))
                .collect(),
        },
        priority: number("priority", 1) as i32 - 1,
        cache_salt: number("salt", 0).into(),
        slo: Slo {
            class: class.name.clone(),
            tenant: text(words, "tenant").unwrap_or_default().to_owned(),
            ttft: millis(words, "ttft").or(class.ttft),
            tpot: millis(words, "tpot").or(class.tpot),
            e2e: millis(words, "e2e").or(class.e2e),
            priority: class.priority,
        },
    }
}

/// A step takes `base` and `row` for each of its tokens, in microseconds; a block's way `link` and
/// nothing else.
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

/// `backlog=10,0,…` in milliseconds.
fn backlog(words: &[&str]) -> Backlog {
    let mut backlog = Backlog::default();
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
        },
        "refused" => Report::Refused {
            handoff: id(),
            refusal: match words[2] {
                "queue" => Refusal::QueueFull { retry_after },
                "blocks" => Refusal::NoBlocks { retry_after },
                "draining" => Refusal::Draining,
                "long" => Refusal::TooLong { tokens_max: 7 },
                "late" => Refusal::Late {
                    aim: Aim::Ttft,
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
        "stayed" => Report::Stayed {
            handoff: id(),
            failure: failure(words[2]),
        },
        "crowded" => Report::Crowded { handoff: id() },
        "serves" => Report::Serves {
            role: role(words[1]),
        },
        "released" => Report::Released { handoff: id() },
        "draining" => Report::Draining,
        "load" => Report::Load(Load {
            queue_tokens: number("queue").into(),
            sequences_waiting: number("waiting"),
            sequences_running: number("running"),
            blocks_free: number("free"),
            progress: match words.contains(&"stuck") {
                true => Progress::Stuck,
                false => Progress::Moving,
            },
            context_tokens: number("context").into(),
            streams: number("streams"),
            backlog: backlog(words),
            tpot_least: millis(words, "tpot"),
            step_left: Duration::from_millis(number("step").into()),
            orders_heard: number("heard").into(),
        }),
        // The first so many blocks of a flight's prompt and output.
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
    let mut hashes = block_hashes(request.cache_salt, &tokens, BLOCK_TOKENS);
    hashes.truncate(number(words, "blocks").unwrap() as usize);
    hashes
}

fn output_words(output: &Output) -> Option<String> {
    Some(match output {
        Output::Tell { worker, order } => format!("{worker} {}", order_words(order)),
        Output::End {
            flight,
            ending,
            output_tokens,
            timing: _,
        } => {
            let tokens = output_tokens.map(|count| format!(" after {count} tokens"));
            format!("{flight} ends: {ending:?}{}", tokens.unwrap_or_default())
        }
        Output::Drained => "drained".to_owned(),
        Output::Fence { handoff } => format!("fence {handoff}"),
        Output::Count { handoff } => format!("count for {handoff}"),
        Output::Readiness(readiness) => format!("{readiness:?}"),
        Output::Want(decision) => format!("want {:?}", decision.wanted.workers),
        Output::Note(Note::Fleet { .. }) => return None,
        Output::Note(note) => format!("note {}", note_words(note)),
    })
}

fn note_words(note: &Note) -> String {
    match note {
        Note::Placed {
            handoff,
            prefill,
            decode,
            cached_tokens,
            waited,
        } => format!(
            "{handoff} placed on {prefill} and {decode}, {cached_tokens} cached, {waited:?}"
        ),
        Note::PassedOver {
            handoff,
            worker,
            refusal,
        } => format!("{handoff} passed over {worker}: {refusal:?}"),
        Note::Stale { worker } => format!("stale word of {worker}"),
        Note::Retried {
            handoff,
            failure,
            generated_tokens,
        } => format!("{handoff} failed: {failure:?}, the client has {generated_tokens}"),
        Note::Moving {
            handoff,
            from,
            to,
            why,
        } => format!("{handoff} moves from {from} to {to}: {why:?}"),
        Note::Moved { handoff, took } => format!("{handoff} moved in {took:?}"),
        Note::Stayed { handoff, failure } => format!("{handoff} did not move: {failure:?}"),
        Note::CancelFreed {
            flight,
            took,
            stage,
        } => format!("{flight} was cancelled while {stage:?} and free in {took:?}"),
        Note::WorkerStuck { worker } => format!("{worker} is stuck"),
        Note::Fleet { .. } => String::new(),
        Note::Decided(decision) => decision_words(decision),
        Note::Judged {
            flight,
            class,
            tenant: _,
            verdict,
            timing,
            output_tokens,
            forecast,
        } => {
            let stages = Stage::ALL.iter().filter(|s| !timing.of(**s).is_zero());
            let stages: Vec<String> = stages
                .map(|stage| format!("{stage} {:?}", timing.of(*stage)))
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

fn decision_words(decision: &Decision) -> String {
    let Decision {
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
        Decided::Placed(reason) => format!("is placed {reason:?}"),
        Decided::Waits => "waits".to_owned(),
        Decided::Downgraded { class } => format!("becomes one of {class}"),
        Decided::Refused(refusal) => format!("is refused, {refusal:?}"),
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

fn order_words(order: &Order) -> String {
    match order {
        Order::Reserve(order) => {
            let generated = match order.request.generated.len() {
                0 => String::new(),
                count => format!(" and {count} generated"),
            };
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
        Order::PassOn(_) => "<- pass on".to_owned(),
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
    first_token_is_the_last
    receiver_hears_of_the_end_before_the_router
    decode_worker_finishes_before_the_first_token_is_heard
    burst_does_not_herd
    dedicated_pools_come_before_workers_of_both_roles
    cached_prefix_draws_its_kind
    refusal_goes_to_the_next_worker
    blocks_let_go_open_the_door
    a_word_after_the_last_one_is_stale
    line_keeps_urgency_and_arrival
    refused_when_nobody_could_ever
    lesson_13_cancel_is_heard_at_each_stage
    draining_worker_gets_nothing_new
    router_drains
    retry_before_the_first_token
    lesson_09_a_stream_outlives_its_worker
    late_words_of_a_past_attempt
    leases_are_renewed
    lesson_03_refused_prompt_frees_the_reservation
    lesson_06_restart_forgets_what_was_cached
    lesson_08_failed_prefill_frees_the_decode_worker_at_once
    lesson_09_silent_decode_worker_is_passed_over
    lesson_10_both_legs_are_promised_before_either_starts
    lesson_15_rejoined_worker_is_a_new_one
    lesson_19_different_fingerprints_are_never_paired
    lesson_19_a_stream_is_not_resumed_by_other_weights
    lesson_01_sender_is_released_when_everything_landed
    lesson_09_source_lost_at_each_stage_of_a_move
    lesson_09_target_lost_at_each_stage_of_a_move
    source_hears_of_the_landing_before_the_router
    a_move_is_taken_back_after_it_stood_still
    finish_during_a_move
    drain_waits_for_room
    a_flight_that_lands_on_a_draining_worker_moves_then
    roles_change_at_run_time
    an_operators_words_are_passed_on
    a_prefill_worker_that_began_to_leave_gets_no_prompt
    lesson_16_a_stream_resumed_at_its_end_is_done
    lesson_16_a_spent_budget_is_an_error
    a_stream_too_long_for_anybody_holds_nobody_up
    lesson_12_a_stuck_worker_is_passed_over
    lesson_12_nobody_waits_for_ever_for_a_stuck_worker
    lesson_12_a_stuck_prefill_worker_is_left
    two_moves_of_one_flight_do_not_overlap
    a_target_that_refuses_or_says_nothing
    a_crowded_worker_is_relieved_if_another_has_room
    a_slow_reader_is_not_waited_for
    cancel_while_counted_or_in_line
    a_promise_that_ends_in_silence_makes_room
    a_broken_link_is_not_tried_again_at_once
    lesson_27_drain_moves_running_sequences
    lesson_13_cancel_is_heard_at_each_stage_of_a_move
    lesson_09_many_flights_are_lost_with_one_worker
    lesson_12_a_stuck_target_is_given_up
    lesson_15_late_words_of_a_move_are_stale
    a_resumed_stream_finds_its_own_prefix
    a_load_beyond_all_bounds_is_a_full_worker
    what_cannot_be_met_is_refused_at_once
    what_is_not_met_waits_or_becomes_another
    a_policy_changes_under_those_who_wait
    a_guest_is_not_moved_by_its_hosts_role
    lesson_27_a_guest_is_moved_by_a_drain
    a_worker_that_would_be_late_is_not_asked_twice
    lesson_25_refused_and_failed_are_no_successes
    lesson_23_the_stage_that_broke_the_promise_is_named
    legs_are_given_out_by_turns
    whole_requests_go_to_any_worker
    a_resumed_stream_goes_before_everybody_and_is_never_late
    who_is_let_wait_makes_room_for_who_is_more_urgent
    a_prompt_that_stays_needs_a_seat
    seats_of_who_comes_later_are_free_until_then
    a_short_prompt_waits_as_long_as_what_is_before_it
    guests_of_other_routers_slow_prompts
    one_seat_is_enough_for_who_gives_way
    workers_of_one_device_do_not_divide_it
    workers_lost_together_are_no_failure_of_a_flight
    a_pause_outlasts_the_queue_limit_of_a_class
    a_paused_stream_avoids_the_worker_that_failed_it
    a_drained_worker_is_not_counted_as_a_loss
    one_workers_state_is_not_the_fleets_answer
    retries_pause_longer_after_each_lost_worker
    a_workers_refusal_is_the_clients_answer
    a_large_request_is_overtaken_sixteen_times
    a_request_that_gives_way_is_overtaken_uncounted
    by_load_nobody_overtakes
    a_class_has_its_own_part_of_the_queue
}
