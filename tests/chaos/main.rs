//! Real processes under load, and everything that can happen to them.
//!
//! A router, two prefill and three decode workers serve a steady load on the bundled checkpoint while
//! they are killed, stopped, drained, re-purposed and cut off, one after the other, in an order that
//! the seed draws. Every answer must be, byte for byte, what an undisturbed process answers.
//!
//! `CLEAVE_CHAOS_SEED` (default 1), `CLEAVE_CHAOS_FAULTS` (default one of each kind) and
//! `CLEAVE_CHAOS_CLIENTS` (default 8) choose the run; `scripts/chaos.sh` makes a long one.
#![allow(missing_docs)]

mod dice;
mod faults;
mod fleet;
#[path = "../harness/mod.rs"]
mod harness;
mod load;
mod proxy;

use dice::Dice;
use faults::{KINDS, Kind};
use fleet::Fleet;
use harness::{Client, Process, wait_for};
use load::{Ask, Ledger, Outcome, Stay, bodies, streamed, with_stop};
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

/// Past the capture of a passing test's output: a long run is watched.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The questions with their answers, from a process that nothing happens to.
fn undisturbed(dice: &mut Dice) -> Vec<Ask> {
    let mut process = Process::start(&[
        "serve",
        "--port",
        "0",
        "--prefill",
        "0",
        "--decode",
        "0",
        "--both",
        "1",
        "--threads",
        "2",
        "--kv-cache",
        "64MiB",
    ]);
    let address = process.address();
    Client::new(&address).wait_ready();
    let (base, http) = (format!("http://{address}"), load::http());
    let answer =
        |path: &str, body: &serde_json::Value| match load::ask(&http, (&base, path, body), || {
            Stay::Yes
        }) {
            Outcome::Answered(answer) => answer,
            other => panic!("{path} {body}: {other:?}"),
        };
    let mut asks = Vec::new();
    for (path, body) in bodies(dice) {
        let expected = answer(path, &body);
        assert!(expected.output_tokens() > 0);
        let stopped = with_stop(&body, &expected);
        for body in [streamed(&body), body, streamed(&stopped)] {
            let expected = answer(path, &body);
            asks.push(Ask {
                path,
                body,
                expected,
            });
        }
    }
    asks
}

#[test]
fn streams_survive_their_workers() {
    let seed = number("CLEAVE_CHAOS_SEED", 1);
    let count = number("CLEAVE_CHAOS_FAULTS", KINDS.len() as u64) as usize;
    let clients = number("CLEAVE_CHAOS_CLIENTS", 8);
    say(&format!(
        "chaos: CLEAVE_CHAOS_SEED={seed}, {count} faults, {clients} clients"
    ));
    let mut dice = Dice::new(seed);
    let asks = undisturbed(&mut dice);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let mut fleet = Fleet::start(runtime.handle());
    let ledger = Ledger::default();
    let plan = faults::schedule(&mut dice, count);
    let mut struck: BTreeMap<Kind, u64> = BTreeMap::new();
    let began = Instant::now();
    let base = fleet.base.clone();
    std::thread::scope(|scope| {
        for _ in 0..clients {
            let dice = Dice::new(dice.roll());
            let (base, asks, ledger) = (&base, &asks, &ledger);
            scope.spawn(move || load::client(base, asks, ledger, dice));
        }
        // Dropped last, also by a panic: clients must not go on for ever.
        let _over = Over(&ledger);
        for (index, (kind, seat)) in plan.into_iter().enumerate() {
            get_on(&ledger, 200 + dice.below(400) as u64);
            let at = began.elapsed();
            let name = fleet.seats[seat].name;
            faults::strike(&mut fleet, (kind, seat), &ledger);
            *struck.entry(kind).or_default() += 1;
            let took = began.elapsed() - at;
            say(&format!(
                "{index:>4} {at:>9.1?} {kind:?} {name}: whole again after {took:.1?}"
            ));
            let failures = ledger.failures.lock().expect("no panic holds it").len();
            assert_eq!(failures, 0, "seed {seed}: {}", report(&ledger, &fleet));
        }
        get_on(&ledger, 400);
    });
    settle(&fleet);
    let failures = ledger.failures.lock().expect("no panic holds it").len();
    say(&table(&struck, &ledger, &fleet));
    assert_eq!(failures, 0, "seed {seed}: {}", report(&ledger, &fleet));
}

/// Every kind of stream at once, and two of three decode workers killed in the midst of all of them.
#[test]
fn two_killed_decode_workers_change_no_byte_of_any_kind_of_stream() {
    let asks: Vec<Ask> = undisturbed(&mut Dice::new(2))
        .into_iter()
        .filter(|ask| ask.body["stream"] == true && ask.expected.output_tokens() > 100)
        .collect();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let mut fleet = Fleet::start(runtime.handle());
    let base = fleet.base.clone();
    let progress: Vec<AtomicU64> = asks.iter().map(|_| AtomicU64::new(0)).collect();
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let streams: Vec<_> = asks
            .iter()
            .zip(&progress)
            .map(|(ask, progress)| {
                let (base, http) = (&base, load::http());
                let on_event = || {
                    progress.fetch_add(1, Ordering::Relaxed);
                    Stay::Yes
                };
                scope.spawn(move || load::ask(&http, (base, ask.path, &ask.body), on_event))
            })
            .collect();
        for (seat, events) in [(2, 5), (3, 20)] {
            wait_for("every stream to get on", || {
                let mut all = progress.iter();
                let on = all.all(|seen| seen.load(Ordering::Relaxed) >= events);
                (on || streams.iter().any(|stream| stream.is_finished())).then_some(())
            });
            fleet.seats[seat].process().signal("KILL");
        }
        let ended = streams.into_iter().map(|stream| stream.join());
        ended.map(|outcome| outcome.expect("no panic")).collect()
    });
    for (ask, outcome) in asks.iter().zip(outcomes) {
        match outcome {
            Outcome::Answered(answer) => assert_eq!(answer, ask.expected, "{}", ask.body),
            other => panic!("{}: {other:?}", ask.body),
        }
    }
    let resumed = fleet.client.metric("cleave_streams_resumed_total", &[]);
    assert!(resumed >= 5.0, "{resumed} streams were resumed");
}

/// Ends the load when it goes.
struct Over<'a>(&'a Ledger);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

/// Waits until clients have heard so much more.
fn get_on(ledger: &Ledger, events: u64) {
    let from = ledger.events.load(Ordering::Relaxed);
    wait_for("load to get on", || {
        (ledger.events.load(Ordering::Relaxed) >= from + events).then_some(())
    });
}

/// Waits until no worker holds anything, and audits all of them.
fn settle(fleet: &Fleet) {
    for seat in &fleet.seats {
        let page = seat.page();
        let blocks = |kind: &str| page.metric("cleave_pool_blocks", &[&format!("kind=\"{kind}\"")]);
        let began = Instant::now();
        wait_for("free blocks", || {
            let held = blocks("held") + blocks("swapped");
            assert!(
                held == 0.0 || began.elapsed() < Duration::from_secs(60),
                "{} holds {held} blocks: {}",
                seat.name,
                seat.logs()
            );
            (held == 0.0).then_some(())
        });
        for kind in ["leaked", "reserved", "leased", "quarantined"] {
            assert_eq!(blocks(kind), 0.0, "{} has {kind} blocks", seat.name);
        }
    }
}

/// What went wrong, with what the processes said.
fn report(ledger: &Ledger, fleet: &Fleet) -> String {
    let failures = ledger.failures.lock().expect("no panic holds it");
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
    for seat in &fleet.seats {
        let _ = write!(text, "\n=== {}\n{}", seat.name, tail(seat.logs()));
    }
    text
}

/// In Markdown.
fn table(struck: &BTreeMap<Kind, u64>, ledger: &Ledger, fleet: &Fleet) -> String {
    let mut rows: Vec<(String, String)> = Vec::new();
    for (kind, name) in KINDS {
        let count = struck.get(&kind).copied().unwrap_or(0);
        rows.push((name.to_owned(), count.to_string()));
    }
    let seen = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let counted = |name: &str, labels: &[&str]| {
        let count = fleet.client.metric(name, labels);
        (count as u64).to_string()
    };
    let pause = Duration::from_micros(seen(&ledger.pause_micros));
    let failures = ledger.failures.lock().expect("no panic holds it").len();
    let leaked = fleet
        .seats
        .iter()
        .map(|seat| {
            seat.page()
                .metric("cleave_pool_blocks", &["kind=\"leaked\""])
        })
        .sum::<f64>();
    for (name, value) in [
        (
            "clients that left in mid-stream",
            seen(&ledger.left).to_string(),
        ),
        ("answers compared", seen(&ledger.answered).to_string()),
        ("tokens compared", seen(&ledger.tokens).to_string()),
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
            seen(&ledger.refused).to_string(),
        ),
        ("longest pause in a stream", format!("{pause:.2?}")),
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
