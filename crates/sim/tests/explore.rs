//! Exhaustive exploration of small worlds, and the properties that break without each guard.
//! `EXPLORE_WORLD` explores only one world, `EXPLORE_SURPRISES` sets the number of surprises,
//! `EXPLORE_GUARD` disables one guard and prints the counterexample. `EXPLORE_LARGE` explores
//! two of the largest worlds with all their surprises.

use cleave_sim::explore::{self, ExploreScope, Guard, explore};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Two of the largest worlds, a third of all states: one surprise fewer unless `EXPLORE_LARGE` is
/// set.
const LARGE: [&str; 2] = ["constrained", "role"];

// Invariant: I21.
#[test]
fn small_worlds_break_no_property() {
    let surprises = variable("EXPLORE_SURPRISES").map(|n| n.parse().expect("a number"));
    let only = variable("EXPLORE_WORLD");
    let large = only.is_some() || variable("EXPLORE_LARGE").is_some();
    let is_chosen = |world: &&str| only.as_ref().is_none_or(|only| only == world);
    let worlds: Vec<_> = explore::worlds().into_iter().filter(is_chosen).collect();
    // Worlds differ in size, so each thread takes the next one that nobody has begun.
    let (next, states) = (AtomicUsize::new(0), AtomicU64::new(0));
    let explore_all = || {
        while let Some(world) = worlds.get(next.fetch_add(1, Ordering::Relaxed)) {
            let fewer = !large && LARGE.contains(world);
            let scope = ExploreScope {
                surprises_max: surprises.or(fewer.then_some(1)),
                ..ExploreScope::default()
            };
            let explored = explore(world, &scope).unwrap_or_else(|broken| panic!("{broken}"));
            for explored in explored {
                println!("{explored}");
                assert!(explored.whole && explored.rests > 0);
                states.fetch_add(explored.states, Ordering::Relaxed);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(explore_all);
        }
    });
    let states = states.into_inner();
    println!("{states} states in all");
    if only.is_none() {
        let least = if large { 9_000_000 } else { 6_000_000 };
        assert!(states > least, "only {states} states");
    }
}

/// For each guard, a world in which its absence shows, and the property that breaks.
const WITHOUT: [(Guard, &str, &str); 13] = [
    (Guard::Generation, "astray", "S2"),
    (Guard::Place, "astray", "S2"),
    (Guard::Plane, "state", "S2"),
    (Guard::Sender, "astray", "S2"),
    (Guard::Quarantine, "one-sided", "S3"),
    (Guard::Incarnation, "one", "L1"),
    (Guard::Renewal, "leases", "S8"),
    (Guard::SecondLeg, "one", "S8"),
    (Guard::RouterLost, "three", "L2"),
    (Guard::LinkLost, "one", "L2"),
    (Guard::LandedCancels, "one", "L2"),
    (Guard::Fence, "three", "S7"),
    (Guard::RunOn, "drain", "S"),
];

// Invariant: I2.
#[test]
fn removing_any_guard_breaks_a_property() {
    let only = variable("EXPLORE_GUARD");
    for (guard, world, property) in WITHOUT {
        if only.as_ref().is_some_and(|only| *only != guard.to_string()) {
            continue;
        }
        let scope = ExploreScope {
            without: Some(guard),
            ..ExploreScope::default()
        };
        let broken = explore(world, &scope).expect_err("a guard that nobody needs");
        println!(
            "without {guard}: {world}, {} states: {}",
            broken.states, broken.problem
        );
        if only.is_some() {
            println!("{broken}");
        }
        assert!(broken.problem.starts_with(property), "{broken}");
    }
}

/// A lost answer to an unknown frame or seal is covered: the receiver of the ended hand-off
/// reported it to the router too, which releases the sender. The answer only comes sooner.
#[test]
fn an_unanswered_sender_is_released_by_its_router() {
    let scope = ExploreScope {
        surprises_max: Some(1),
        without: Some(Guard::UnknownAnswered),
        ..ExploreScope::default()
    };
    for world in ["three", "drains", "role", "one-sided"] {
        explore(world, &scope).unwrap_or_else(|broken| panic!("{broken}"));
    }
}

#[test]
fn exploration_is_deterministic() {
    let scope = ExploreScope {
        surprises_max: Some(1),
        ..ExploreScope::default()
    };
    let explored = explore("drain", &scope).expect("nothing breaks");
    assert_eq!(Ok(explored), explore("drain", &scope));
    let unknown = explore("no such world", &scope).expect_err("there is none");
    assert!(unknown.problem.contains("drains"), "{unknown}");
}
