//! Real processes under load and faults.
//!
//! A router, two prefill and three decode workers serve a steady load on the bundled checkpoint
//! while they are killed, stopped, drained, given other roles and cut off, one after the other, in
//! an order drawn from the seed. Every answer must equal, byte for byte, that of an undisturbed
//! process.
//!
//! `CLEAVE_CHAOS_SEED` (default 1), `CLEAVE_CHAOS_FAULTS` (default one of each kind) and
//! `CLEAVE_CHAOS_CLIENTS` (default 8) configure the run; `scripts/lab/chaos.sh` makes a long one.

mod faults;
mod fleet;
mod load;
mod proxy;
mod rng;
mod stopped_router;

use crate::harness::{HttpClient, serve, wait_for};
use crate::serving::GUESSES;
use faults::{FaultKind, KINDS};
use fleet::ChaosFleet;
use load::{LoadCounters, LoadQuestion, QuestionOutcome, ReadOn, bodies, streamed, with_stop};
use rng::FaultRng;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn number(name: &str, default: u64) -> u64 {
    let given = std::env::var(name).ok();
    given.map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text}: expected a number"))
    })
}

/// Writes to stderr directly, past the capture of a passing test's output, so that a long run can
/// be watched.
fn print_progress(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The questions with their answers, from an undisturbed process.
fn expected_answers(rng: &mut FaultRng) -> Vec<LoadQuestion> {
    answered(bodies(rng), &[])
}

/// Each body, also as a stream and with a stop string, with the answers of an undisturbed process
/// with these flags.
fn answered(bodies: Vec<(&'static str, serde_json::Value)>, more: &[&str]) -> Vec<LoadQuestion> {
    let both = ["--prefill", "0", "--decode", "0", "--both", "1"];
    let mut process = serve(&[&both[..], more].concat());
    let address = process.address();
    HttpClient::new(&address).wait_ready();
    let (base, http) = (format!("http://{address}"), load::http());
    let answer =
        |path: &str, body: &serde_json::Value| match load::ask(&http, &base, path, body, || {
            ReadOn::Continue
        }) {
            QuestionOutcome::Answered(answer) => answer,
            other => panic!("{path} {body}: {other:?}"),
        };
    let mut asks = Vec::new();
    for (path, body) in bodies {
        let expected = answer(path, &body);
        assert!(expected.output_tokens() > 0);
        let stopped = with_stop(&body, &expected).map(|body| streamed(&body));
        for body in [streamed(&body), body].into_iter().chain(stopped) {
            let expected = answer(path, &body);
            asks.push(LoadQuestion {
                path,
                body,
                expected,
            });
        }
    }
    asks
}

// Invariant: I18.
#[test]
fn streams_survive_their_workers_faults() {
    let seed = number("CLEAVE_CHAOS_SEED", 1);
    let mut rng = FaultRng::new(seed);
    let asks = expected_answers(&mut rng);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let fleet = ChaosFleet::start(runtime.handle());
    let faults_count = number("CLEAVE_CHAOS_FAULTS", KINDS.len() as u64) as usize;
    ChaosLoad {
        seed,
        rng,
        asks,
        faults_count,
    }
    .run(fleet);
}

// Invariant: I18, I54.
// Lesson: 35, 39, 40, 45.
/// Calls, schemas and reasoning. One of the decode workers does not draft, and all have pools so
/// short that they swap.
#[test]
fn constrained_streams_survive_their_workers_faults() {
    let seed = number("CLEAVE_CHAOS_SEED", 1);
    let mut rng = FaultRng::new(seed);
    let folder = crate::tools::model();
    let model = folder.path().to_str().expect("a path");
    let off = [
        "--calibrate",
        "0",
        "--speculative-config",
        "off",
        "--model",
        model,
    ];
    let asks = answered(load::constrained_bodies(&mut rng), &off);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let flags = |worker: usize| {
        let own: &[&str] = match worker {
            3 => &["--calibrate", "0", "--speculative-config", "off"],
            _ => &GUESSES,
        };
        let pool = ["--kv-cache", if worker < 2 { "12MiB" } else { SHORT_POOL }];
        let all = [&["--model", model][..], &pool, own].concat();
        all.into_iter().map(str::to_owned).collect()
    };
    let fleet = ChaosFleet::start_flagged(runtime.handle(), fleet::SHORT_SILENCE, flags);
    // A part of the kinds of faults in each run; which ones, the seed says.
    let faults_count = number("CLEAVE_CHAOS_FAULTS", 8) as usize;
    ChaosLoad {
        seed,
        rng,
        asks,
        faults_count,
    }
    .run(fleet);
}

/// KV of little more than the longest sequence that the model allows.
const SHORT_POOL: &str = "3200KiB";

/// A load on a fleet, and the faults that strike it.
struct ChaosLoad {
    seed: u64,
    rng: FaultRng,
    asks: Vec<LoadQuestion>,
    faults_count: usize,
}

impl ChaosLoad {
    fn run(self, mut fleet: ChaosFleet) {
        let Self {
            seed,
            mut rng,
            asks,
            faults_count: count,
        } = self;
        let clients = number("CLEAVE_CHAOS_CLIENTS", 8);
        print_progress(&format!(
            "chaos: CLEAVE_CHAOS_SEED={seed}, {count} faults, {clients} clients"
        ));
        let counters = LoadCounters::default();
        let plan = faults::schedule(&mut rng, count);
        let mut struck: BTreeMap<FaultKind, u64> = BTreeMap::new();
        let began = Instant::now();
        let base = fleet.base.clone();
        std::thread::scope(|scope| {
            for _ in 0..clients {
                let rng = FaultRng::new(rng.next());
                let (base, asks, counters) = (&base, &asks, &counters);
                scope.spawn(move || load::run_client(base, asks, counters, rng));
            }
            // Dropped last, also by a panic, so that the clients end.
            let _over = StopLoadOnDrop(&counters);
            for (index, (kind, worker_index)) in plan.into_iter().enumerate() {
                wait_for_events(&counters, 200 + rng.below(400) as u64);
                let at = began.elapsed();
                let name = fleet.workers[worker_index].name;
                faults::inject(&mut fleet, kind, worker_index, &counters);
                *struck.entry(kind).or_default() += 1;
                let took = began.elapsed() - at;
                print_progress(&format!(
                    "{index:>4} {at:>9.1?} {kind:?} {name}: whole again after {took:.1?}"
                ));
                let failures = counters.failures.lock().expect("no panic holds it").len();
                assert_eq!(
                    failures,
                    0,
                    "seed {seed}: {}",
                    failure_report(&counters, &fleet)
                );
            }
            wait_for_events(&counters, 400);
        });
        wait_until_blocks_are_free(&fleet);
        let failures = counters.failures.lock().expect("no panic holds it").len();
        print_progress(&table(&struck, &counters, &fleet));
        assert_eq!(
            failures,
            0,
            "seed {seed}: {}",
            failure_report(&counters, &fleet)
        );
    }
}

// Invariant: I18.
/// Runs every kind of stream at once, and kills two of three decode workers in mid-stream.
#[test]
fn two_killed_decode_workers_change_no_byte_of_any_stream() {
    let asks: Vec<LoadQuestion> = expected_answers(&mut FaultRng::new(2))
        .into_iter()
        .filter(|ask| ask.body["stream"] == true && ask.expected.output_tokens() > 100)
        .collect();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let mut fleet = ChaosFleet::start(runtime.handle());
    let base = fleet.base.clone();
    let progress: Vec<AtomicU64> = asks.iter().map(|_| AtomicU64::new(0)).collect();
    let outcomes: Vec<QuestionOutcome> = std::thread::scope(|scope| {
        let streams: Vec<_> = asks
            .iter()
            .zip(&progress)
            .map(|(ask, progress)| {
                let (base, http) = (&base, load::http());
                let on_event = || {
                    progress.fetch_add(1, Ordering::Relaxed);
                    ReadOn::Continue
                };
                scope.spawn(move || load::ask(&http, base, ask.path, &ask.body, on_event))
            })
            .collect();
        for (worker_index, events) in [(2, 5), (3, 20)] {
            wait_for("every stream to get on", || {
                let mut all = progress.iter();
                let on = all.all(|count| count.load(Ordering::Relaxed) >= events);
                (on || streams.iter().any(|stream| stream.is_finished())).then_some(())
            });
            fleet.workers[worker_index].process().signal("KILL");
        }
        let ended = streams.into_iter().map(|stream| stream.join());
        ended.map(|outcome| outcome.expect("no panic")).collect()
    });
    for (ask, outcome) in asks.iter().zip(outcomes) {
        match outcome {
            QuestionOutcome::Answered(answer) => assert_eq!(answer, ask.expected, "{}", ask.body),
            other => panic!("{}: {other:?}", ask.body),
        }
    }
    let resumed = fleet.client.metric("cleave_streams_resumed_total", &[]);
    assert!(resumed >= 5.0, "{resumed} streams were resumed");
}

/// Stops the load on drop.
struct StopLoadOnDrop<'a>(&'a LoadCounters);

impl Drop for StopLoadOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

/// Waits until clients have received this many more events.
fn wait_for_events(counters: &LoadCounters, events: u64) {
    let from = counters.events.load(Ordering::Relaxed);
    wait_for("load to get on", || {
        (counters.events.load(Ordering::Relaxed) >= from + events).then_some(())
    });
}

/// Waits until no worker holds a block, and checks the pools of all.
fn wait_until_blocks_are_free(fleet: &ChaosFleet) {
    for worker in &fleet.workers {
        let page = worker.metrics_client();
        let blocks = |kind: &str| page.metric("cleave_pool_blocks", &[&format!("kind=\"{kind}\"")]);
        let began = Instant::now();
        wait_for("free blocks", || {
            let held = blocks("held") + blocks("swapped");
            assert!(
                held == 0.0 || began.elapsed() < Duration::from_secs(60),
                "{} holds {held} blocks: {}",
                worker.name,
                worker.logs()
            );
            (held == 0.0).then_some(())
        });
        for kind in ["leaked", "reserved", "leased", "quarantined"] {
            assert_eq!(blocks(kind), 0.0, "{} has {kind} blocks", worker.name);
        }
    }
}

/// The first failures, with the last log lines of all processes.
fn failure_report(counters: &LoadCounters, fleet: &ChaosFleet) -> String {
    let failures = counters.failures.lock().expect("no panic holds it");
    let mut text = failures
        .iter()
        .take(3)
        .cloned()
        .collect::<Vec<_>>()
        .join("\n");
    let tail = |logs: String| {
        let lines: Vec<&str> = logs.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    };
    let _ = write!(text, "\n=== router\n{}", tail(fleet.router.logs()));
    for worker in &fleet.workers {
        let _ = write!(text, "\n=== {}\n{}", worker.name, tail(worker.logs()));
    }
    text
}

/// The results as a Markdown table.
fn table(struck: &BTreeMap<FaultKind, u64>, counters: &LoadCounters, fleet: &ChaosFleet) -> String {
    let mut rows: Vec<(String, String)> = Vec::new();
    for (kind, name) in KINDS {
        let count = struck.get(&kind).copied().unwrap_or(0);
        rows.push((name.to_owned(), count.to_string()));
    }
    let value_of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let counted = |name: &str, labels: &[&str]| {
        let count = fleet.client.metric(name, labels);
        (count as u64).to_string()
    };
    let pause = Duration::from_micros(value_of(&counters.pause_micros));
    let failures = counters.failures.lock().expect("no panic holds it").len();
    let of_workers = |name: &str, kind: &str| {
        let workers = fleet.workers.iter();
        let values = workers.map(|worker| worker.metrics_client().metric(name, &[kind]));
        values.sum::<f64>()
    };
    let leaked = of_workers("cleave_pool_blocks", "kind=\"leaked\"");
    // Of the workers' present lives.
    let swapped = of_workers("cleave_swap_blocks_total", "kind=\"in\"");
    for (name, value) in [
        (
            "clients that left in mid-stream",
            value_of(&counters.left).to_string(),
        ),
        ("answers compared", value_of(&counters.answered).to_string()),
        ("tokens compared", value_of(&counters.tokens).to_string()),
        (
            "attempts that failed and were retried",
            counted("cleave_retries_total", &[]),
        ),
        (
            "streams resumed on another worker",
            counted("cleave_streams_resumed_total", &[]),
        ),
        (
            "running sequences moved",
            counted("cleave_moves_done_total", &[]),
        ),
        (
            "moves taken back",
            counted("cleave_moves_stayed_total", &[]),
        ),
        (
            "refused before any work, and asked again",
            value_of(&counters.refused).to_string(),
        ),
        ("longest pause in a stream", format!("{pause:.2?}")),
        ("blocks swapped in", swapped.to_string()),
        ("blocks leaked", leaked.to_string()),
        ("answers that differed or broke off", failures.to_string()),
    ] {
        rows.push((name.to_owned(), value));
    }
    let mut text = String::from("| | |\n|---|---|\n");
    for (name, value) in rows {
        let _ = writeln!(text, "| {name} | {value} |");
    }
    text
}
