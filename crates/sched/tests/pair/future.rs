//! Fingerprints: equal for what will behave equally, different for what can be told apart.

use super::{Chaos, Input};
use cleave_domain::Time;
use cleave_sched::{Brain, Output};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::time::Duration;

fn print(brain: &Brain) -> u64 {
    let mut hasher = DefaultHasher::new();
    brain.fingerprint(&mut hasher);
    hasher.finish()
}

/// What anybody can see of a brain.
fn face(brain: &Brain, now: Time) -> String {
    let handoffs: Vec<_> = brain.handoffs().collect();
    let due = brain.deadline().map(|due| due.since(now));
    let (load, draining) = (brain.load(), brain.draining());
    let pool = (brain.pool().blocks_cached(), brain.pool().holdings());
    format!("{handoffs:?} {due:?} {load:?} {draining} {pool:?}")
}

fn outputs(brain: &mut Brain) -> Vec<Output> {
    std::iter::from_fn(|| brain.poll()).collect()
}

/// The same facts an hour later: the same fingerprints after each. And whenever two states of a life
/// have one fingerprint, nothing that can be seen tells them apart, nor does their next fact.
#[test]
fn a_fingerprint_tells_what_matters_and_not_the_hour() {
    let late = Duration::from_secs(3600);
    let mut states = 0;
    for seed in 0..40 {
        let mut chaos = Chaos::new(seed);
        let limits: Vec<_> = chaos
            .world
            .machines
            .iter()
            .map(|machine| machine.brain.limits().clone())
            .collect();
        // Lives that end are another test's.
        chaos.faults = false;
        // A span that is longer than the clock has run is cut off at its beginning.
        chaos.lies = None;
        chaos.world.tape = Some(Vec::new());
        for _ in 0..300 {
            chaos.act();
        }
        let tape = chaos.world.tape.take().expect("kept");
        for (at, limits) in limits.into_iter().enumerate() {
            let (mut one, mut other) = (Brain::new(limits.clone()), Brain::new(limits));
            let mut faces: BTreeMap<u64, (String, Brain)> = BTreeMap::new();
            for (machine, now, input) in &tape {
                if *machine != at {
                    continue;
                }
                one.handle(*now, input.clone());
                other.handle(*now + late, input.clone());
                assert_eq!(outputs(&mut one), outputs(&mut other));
                assert_eq!(print(&one), print(&other), "told by the clock: {input:?}");
                let known = faces.insert(print(&one), (face(&one, *now), one.clone()));
                states += 1;
                if let Some((known, before)) = known {
                    assert_eq!(known, face(&one, *now), "one fingerprint, two faces");
                    same_future(&before, &one, *now);
                }
            }
        }
    }
    assert!(states > 2000, "{states} states");
}

/// Two states that a checker takes for one say the same to a router that joins, and to one that
/// leaves.
fn same_future(before: &Brain, after: &Brain, now: Time) {
    let router = super::ROUTER;
    for input in [Input::RouterJoined { router }, Input::RouterLost { router }] {
        let said = |brain: &Brain| {
            let mut brain = brain.clone();
            brain.handle(now, input.clone());
            let notes = |output: &Output| !matches!(output, Output::Note(_));
            let said: Vec<_> = outputs(&mut brain).into_iter().filter(notes).collect();
            (said, print(&brain))
        };
        // The earlier one is behind its own clock, and catches up.
        assert_eq!(said(before).0, said(after).0);
    }
}
