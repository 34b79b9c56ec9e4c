//! Small worlds, explored whole, and what breaks in them without one guard. `EXPLORE_WORLD` explores
//! only one, `EXPLORE_SURPRISES` further than what fits two minutes, `EXPLORE_GUARD` takes one guard
//! away and tells the whole story.

use cleave_sim::explore::{self, Guard, Scope, explore};

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[test]
fn nothing_breaks_in_any_small_world() {
    let scope = Scope {
        surprises_max: variable("EXPLORE_SURPRISES").map(|n| n.parse().expect("a number")),
        ..Scope::default()
    };
    let only = variable("EXPLORE_WORLD");
    let mut states = 0;
    for world in explore::worlds() {
        if only.as_ref().is_some_and(|only| only != world) {
            continue;
        }
        let explored = explore(world, &scope).unwrap_or_else(|broken| panic!("{broken}"));
        for explored in explored {
            println!("{explored}");
            assert!(explored.whole && explored.rests > 0);
            states += explored.states;
        }
    }
    println!("{states} states in all");
    if only.is_none() {
        assert!(states > 5_000_000, "only {states} states");
    }
}

/// For each guard, the world in which its absence shows, and the promise that it breaks.
const WITHOUT: [(Guard, &str, &str); 12] = [
    (Guard::Generation, "astray", "S2"),
    (Guard::Place, "astray", "S2"),
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

#[test]
fn without_any_one_guard_something_breaks() {
    let only = variable("EXPLORE_GUARD");
    for (guard, world, promise) in WITHOUT {
        if only.as_ref().is_some_and(|only| *only != guard.to_string()) {
            continue;
        }
        let scope = Scope {
            without: Some(guard),
            ..Scope::default()
        };
        let broken = explore(world, &scope).expect_err("a guard that nobody needs");
        println!(
            "without {guard}: {world}, {} states: {}",
            broken.states, broken.what
        );
        if only.is_some() {
            println!("{broken}");
        }
        assert!(broken.what.starts_with(promise), "{broken}");
    }
}

/// That the answer to an unknown frame or seal is lost is covered: whoever ended the hand-off told
/// its router too, which lets the sender go. The answer only comes sooner.
#[test]
fn a_sender_that_hears_nothing_is_let_go_by_its_router() {
    let scope = Scope {
        surprises_max: Some(1),
        without: Some(Guard::UnknownAnswered),
        ..Scope::default()
    };
    for world in ["three", "drains", "role", "one-sided"] {
        explore(world, &scope).unwrap_or_else(|broken| panic!("{broken}"));
    }
}

#[test]
fn the_same_world_is_explored_the_same_way() {
    let scope = Scope {
        surprises_max: Some(1),
        ..Scope::default()
    };
    let explored = explore("drain", &scope).expect("nothing breaks");
    assert_eq!(Ok(explored), explore("drain", &scope));
    let unknown = explore("no such world", &scope).expect_err("there is none");
    assert!(unknown.what.contains("drains"), "{unknown}");
}
