//! Worlds by seed. `CHAOS_SEEDS` and `CHAOS_FROM` choose other seeds than the fixed ones,
//! `CHAOS_LOG` keeps every line of a violation, and `CHAOS_FRESH` (any text: CI gives the commit)
//! adds seeds that never ran before.

use cleave_sim::{ChaosOptions, LinkChecks, MatcherFault, run_chaos, tape};
use std::collections::BTreeMap;

fn variable(name: &str, default: u64) -> u64 {
    let value = std::env::var(name).ok();
    value.map_or(default, |v| v.parse().expect("a number"))
}

/// Asserts that each of these happened in some of `count` worlds, if there were many.
fn assert_reached(sums: &BTreeMap<&'static str, u64>, corners: &[&str], count: u64) {
    for corner in corners {
        let reached = sums.get(corner).is_some_and(|times| *times > 0);
        assert!(reached || count < 200, "no world had {corner:?}");
    }
}

/// Runs the worlds of these seeds; returns how often each thing happened in them.
fn run_worlds(seeds: std::ops::Range<u64>, options: &ChaosOptions) -> BTreeMap<&'static str, u64> {
    let count = seeds.end - seeds.start;
    let mut sums: BTreeMap<&'static str, u64> = BTreeMap::new();
    let mut broken = Vec::new();
    for seed in seeds {
        match run_chaos(seed, options) {
            Ok(report) => {
                for (name, times) in report.counts {
                    *sums.entry(name).or_default() += times;
                }
                let endings = report.endings;
                *sums.entry("ended done").or_default() += u64::from(endings.done);
                *sums.entry("ended refused").or_default() += u64::from(endings.refused);
                *sums.entry("ended cancelled").or_default() += u64::from(endings.cancelled);
                *sums.entry("ended failed").or_default() += u64::from(endings.failed);
                *sums.entry("events").or_default() += report.events;
                *sums.entry("tokens").or_default() += report.tokens;
            }
            Err(violation) => {
                eprintln!("seed {seed}: {}", violation.problem);
                broken.push(violation);
            }
        }
    }
    eprintln!("{sums:#?}");
    if let Some(first) = broken.first() {
        panic!("{first}\n{} of {count} seeds broke something", broken.len());
    }
    sums
}

// Invariant: I49.
#[test]
fn seeded_worlds_break_no_property() {
    let from = variable("CHAOS_FROM", 0);
    let count = variable("CHAOS_SEEDS", 500);
    let options = ChaosOptions {
        log: std::env::var("CHAOS_LOG").is_ok(),
        ..ChaosOptions::default()
    };
    let sums = run_worlds(from..from + count, &options);
    // Each of these must occur, or the test would pass because nothing happened.
    for corner in [
        "kept in memory",
        "kept on disk",
        "fetched",
        "fetches stopped",
        "fetches failed",
        "fetched in part",
        "found on disk",
        "moved",
        "stayed",
        "fenced",
        "retried",
        "preempted",
        "swapped out",
        "swapped in",
        "stuck",
        "workers stuck",
        "silent",
        "stalled",
        "wishes",
        "drained",
        "engines lost",
        "routers restarted",
        "one-sided writes",
        "frames astray",
        "frames damaged",
        "packets lost",
        "links ended by damage",
        "streams ended by damage",
        "seals changed",
        "guesses true",
        "guesses wrong",
    ] {
        let reached = sums.get(corner).is_some_and(|times| *times > 0);
        assert!(reached || count < 500, "no world had {corner:?}");
    }
}

// Invariant: I53.
/// The same worlds, for a model with a state.
#[test]
fn seeded_worlds_with_states_break_no_property() {
    let from = variable("CHAOS_FROM", 0);
    let count = variable("CHAOS_SEEDS", 500) * 2 / 5;
    let options = ChaosOptions {
        log: std::env::var("CHAOS_LOG").is_ok(),
        states: true,
        ..ChaosOptions::default()
    };
    let sums = run_worlds(from..from + count, &options);
    let corners = [
        "moved",
        "preempted",
        "one-sided writes",
        "seals changed",
        "fetched",
        "fetches failed",
    ];
    assert_reached(&sums, &corners, count);
}

// Invariant: I57.
/// The same worlds, for a model with windows.
#[test]
fn seeded_worlds_with_windows_break_no_property() {
    let from = variable("CHAOS_FROM", 0);
    let count = variable("CHAOS_SEEDS", 500) * 2 / 5;
    for states in [false, true] {
        let options = ChaosOptions {
            log: std::env::var("CHAOS_LOG").is_ok(),
            windows: true,
            states,
            ..ChaosOptions::default()
        };
        // A model with both is rare.
        let count = if states { count / 4 } else { count };
        let sums = run_worlds(from..from + count, &options);
        let corners = [
            "moved",
            "preempted",
            "one-sided writes",
            "seals changed",
            "fetched",
        ];
        assert_reached(&sums, &corners, count);
    }
}

// Invariant: I55.
/// The same worlds, for fleets of one to three models. Workers of two models have equal
/// fingerprints, and some change their model as they restart.
#[test]
fn seeded_worlds_of_several_models_break_no_property() {
    let from = variable("CHAOS_FROM", 0);
    let count = variable("CHAOS_SEEDS", 500) * 2 / 5;
    let options = ChaosOptions {
        log: std::env::var("CHAOS_LOG").is_ok(),
        models: true,
        ..ChaosOptions::default()
    };
    let sums = run_worlds(from..from + count, &options);
    for corner in ["moved", "retried", "fenced", "drained", "routers restarted"] {
        let reached = sums.get(corner).is_some_and(|times| *times > 0);
        assert!(reached || count < 200, "no world had {corner:?}");
    }
}

// Invariant: I54.
// Lesson: 35, 36, 39, 40, 45.
/// The same worlds with constrained requests among the others, every other one for a model with a
/// state. Rows without a constraint run in the same steps, and are compared too.
#[test]
fn constrained_streams_are_alike_in_every_world() {
    let from = variable("CHAOS_FROM", 0);
    let count = variable("CHAOS_SEEDS", 500) / 2;
    let mut sums: BTreeMap<&'static str, u64> = BTreeMap::new();
    for (part, states) in [false, true].into_iter().enumerate() {
        let options = ChaosOptions {
            log: std::env::var("CHAOS_LOG").is_ok(),
            states,
            constraints: true,
            ..ChaosOptions::default()
        };
        let first = from + part as u64 * count;
        for (name, times) in run_worlds(first..first + count, &options) {
            *sums.entry(name).or_default() += times;
        }
    }
    for corner in [
        "constrained joined",
        "constrained moved",
        "constrained preempted",
        "constrained resumed",
        "constrained swapped in",
        "constrained with cached tokens",
        "guesses true",
        "guesses wrong",
        "steps that forced tokens",
    ] {
        let reached = sums.get(corner).is_some_and(|times| *times > 0);
        assert!(reached || count < 250, "no world had {corner:?}");
    }
}

// Invariant: I54.
// Lesson: 35, 36, 39.
/// Shows that the comparison notices each mistake that an engine could make with a constraint.
#[test]
fn every_mistake_with_a_constraint_is_noticed() {
    for fault in [
        MatcherFault::FirstTokenTwice,
        MatcherFault::NotRebuilt,
        MatcherFault::StaleMask,
        MatcherFault::LeakedMask,
        MatcherFault::ThinkingEndMissed,
    ] {
        let options = ChaosOptions {
            constraints: true,
            matcher_fault: Some(fault),
            ..ChaosOptions::default()
        };
        let problems = (0..60).filter_map(|seed| run_chaos(seed, &options).err());
        let problems: Vec<String> = problems.map(|violation| violation.problem).collect();
        println!("{fault:?}: {} of 60 worlds break", problems.len());
        let is_wrong = |problem: &&String| {
            problem.contains("the reference is") || problem.contains("leaves its constraint")
        };
        let wrong_count = problems.iter().filter(is_wrong).count();
        assert!(wrong_count >= 2, "{fault:?}: {problems:#?}");
    }
}

// Invariant: I50.
/// Shows that the flips are real: without the links' check, clients receive wrong tokens.
#[test]
fn without_link_checksums_clients_get_wrong_tokens() {
    let options = ChaosOptions {
        link_checks: LinkChecks::Trust,
        ..ChaosOptions::default()
    };
    let broken = (0..300).filter_map(|seed| run_chaos(seed, &options).err());
    let broken: Vec<_> = broken.map(|violation| violation.problem).collect();
    let wrong = |name: &&String| name.contains("the reference is");
    let wrong = broken.iter().filter(wrong).count();
    println!(
        "{} of 300 worlds break, {wrong} by wrong tokens",
        broken.len()
    );
    assert!(wrong >= 3, "{broken:#?}");
}

/// The first seed is printed, so that a failure can be run again by number.
#[test]
fn fresh_worlds_break_no_property() {
    let Ok(text) = std::env::var("CHAOS_FRESH") else {
        return;
    };
    // FNV-1a, reduced to a seed that is easy to copy.
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let from = text.bytes().fold(0xcbf2_9ce4_8422_2325, hash) % 1_000_000_000_000;
    println!("fresh worlds for {text}: CHAOS_FROM={from} CHAOS_SEEDS=300");
    for seed in from..from + 300 {
        // Every other one has constraints.
        let options = ChaosOptions {
            constraints: seed % 2 == 1,
            ..ChaosOptions::default()
        };
        if let Err(violation) = run_chaos(seed, &options) {
            panic!("{violation}");
        }
    }
}

// Invariant: I14.
#[test]
fn the_same_seed_gives_the_same_bytes() {
    let options = ChaosOptions {
        log: true,
        tape: true,
        ..ChaosOptions::default()
    };
    for seed in 1..8 {
        let first = run_chaos(seed, &options).expect("nothing breaks");
        let second = run_chaos(seed, &options).expect("nothing breaks");
        assert!(first.log.lines().count() > 10);
        assert_eq!(first, second, "seed {seed}");
    }
}

// Invariant: I14.
#[test]
fn every_tape_replays_to_equal_outputs() {
    let options = ChaosOptions {
        tape: true,
        ..ChaosOptions::default()
    };
    for seed in 10..18 {
        let report = run_chaos(seed, &options).expect("nothing breaks");
        assert!(report.tapes.len() > 1);
        for lines in &report.tapes {
            let replayed = tape::replay(lines.iter().map(String::as_str));
            let replayed = replayed.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            assert!(replayed.inputs > 0);
        }
    }
}

/// Tapes of earlier versions have no `steps_in_flight`; it is 1 then.
#[test]
fn a_tape_without_steps_in_flight_replays() {
    let options = ChaosOptions {
        tape: true,
        ..ChaosOptions::default()
    };
    let mut silent = 0;
    for seed in 10..14 {
        let report = run_chaos(seed, &options).expect("nothing breaks");
        for lines in &report.tapes {
            let is_one = lines[0].contains(",\"steps_in_flight\":1");
            let start = lines[0].replace(",\"steps_in_flight\":1", "");
            let lines =
                std::iter::once(start.as_str()).chain(lines[1..].iter().map(String::as_str));
            let replayed = tape::replay(lines);
            replayed.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            silent += u32::from(is_one);
        }
    }
    assert!(silent > 0, "all of them took two");
}

/// Tapes of earlier versions name no plane and no state; all their blocks are blocks.
#[test]
fn a_tape_without_planes_replays() {
    let options = ChaosOptions {
        tape: true,
        ..ChaosOptions::default()
    };
    let absent = [
        "\"plane\":\"Blocks\",",
        ",\"states\":null",
        ",\"states_free\":0",
        ",\"state\":null",
        ",\"states_held\":0,\"states_cached\":0,\"states_leaked\":0",
    ];
    let mut removed = [0; 5];
    for seed in 10..14 {
        let report = run_chaos(seed, &options).expect("nothing breaks");
        for lines in &report.tapes {
            let mut tape = lines.join("\n");
            for (field, count) in absent.iter().zip(&mut removed) {
                *count += tape.matches(field).count();
                tape = tape.replace(field, "");
            }
            assert!(
                !tape.contains("state\":") && !tape.contains("plane"),
                "{tape}"
            );
            let replayed = tape::replay(tape.lines());
            replayed.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
    }
    assert!(removed.iter().all(|count| *count > 0), "{removed:?}");
}

#[test]
fn a_changed_tape_does_not_replay() {
    let options = ChaosOptions {
        tape: true,
        ..ChaosOptions::default()
    };
    let report = run_chaos(10, &options).expect("nothing breaks");
    let mut lines = report.tapes[0].clone();
    let output = lines.iter().position(|line| line.contains("\"Said\""));
    lines.remove(output.expect("the brain emitted something"));
    let error = tape::replay(lines.iter().map(String::as_str)).expect_err("a line is gone");
    assert!(error.to_string().contains("the brain emitted"), "{error}");
    let error = tape::replay(lines[1..].iter().map(String::as_str)).expect_err("no start");
    assert!(error.to_string().contains("one start"), "{error}");
    let error = tape::replay(["{}"].into_iter()).expect_err("no tape");
    assert!(error.to_string().contains("not a tape line"), "{error}");
}
