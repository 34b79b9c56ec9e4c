//! Fingerprints: equal for states that behave equally, different for states that can be
//! distinguished.

use super::{PairWorld, WorkerInput};
use cleave_domain::Time;
use cleave_sched::{WorkerBrain, WorkerOutput};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::time::Duration;

fn print(brain: &WorkerBrain) -> u64 {
    let mut hasher = DefaultHasher::new();
    brain.fingerprint(&mut hasher);
    hasher.finish()
}

/// Everything that is visible of a brain from outside.
fn visible_state(brain: &WorkerBrain, now: Time) -> String {
    let handoffs: Vec<_> = brain.handoffs().collect();
    let due = brain.deadline().map(|due| due.since(now));
    let (load, draining) = (brain.load(), brain.draining());
    let pool = (brain.pool().blocks_cached(), brain.pool().holders_total());
    format!("{handoffs:?} {due:?} {load:?} {draining} {pool:?}")
}

fn outputs(brain: &mut WorkerBrain) -> Vec<WorkerOutput> {
    std::iter::from_fn(|| brain.poll()).collect()
}

/// The same facts an hour later give the same fingerprints after each. And whenever two states of a
/// run have one fingerprint, nothing visible distinguishes them, nor does their next fact.
#[test]
fn equal_fingerprints_mean_equal_behaviour_at_any_time() {
    let late = Duration::from_secs(3600);
    let mut states = 0;
    for seed in 0..40 {
        let mut chaos = PairWorld::new(seed);
        let limits: Vec<_> = chaos
            .world
            .machines
            .iter()
            .map(|machine| machine.cells.brain.limits().clone())
            .collect();
        // Restarts are covered by other tests.
        chaos.faults = false;
        // A span that is longer than the clock has run is cut off at its beginning.
        chaos.absurd_orders = None;
        chaos.world.tape = Some(Vec::new());
        for _ in 0..300 {
            chaos.act();
        }
        let tape = chaos.world.tape.take().expect("kept");
        for (at, limits) in limits.into_iter().enumerate() {
            let (mut one, mut other) = (WorkerBrain::new(limits.clone()), WorkerBrain::new(limits));
            let mut states_seen: BTreeMap<u64, (String, WorkerBrain)> = BTreeMap::new();
            for (machine, now, input) in &tape {
                if *machine != at {
                    continue;
                }
                one.handle(*now, input.clone());
                other.handle(*now + late, input.clone());
                assert_eq!(outputs(&mut one), outputs(&mut other));
                assert_eq!(print(&one), print(&other), "told by the clock: {input:?}");
                let visible_before =
                    states_seen.insert(print(&one), (visible_state(&one, *now), one.clone()));
                states += 1;
                if let Some((visible_before, before)) = visible_before {
                    assert_eq!(
                        visible_before,
                        visible_state(&one, *now),
                        "one fingerprint, two faces"
                    );
                    same_future(&before, &one, *now);
                }
            }
        }
    }
    assert!(states > 2000, "{states} states");
}

/// Two states that a checker merges give the same outputs to a router that joins, and to one that
/// leaves.
fn same_future(before: &WorkerBrain, after: &WorkerBrain, now: Time) {
    let router = super::ROUTER;
    for input in [
        WorkerInput::RouterJoined { router },
        WorkerInput::RouterLost { router },
    ] {
        let notes_of = |brain: &WorkerBrain| {
            let mut brain = brain.clone();
            brain.handle(now, input.clone());
            let notes = |output: &WorkerOutput| !matches!(output, WorkerOutput::Note(_));
            let notes_of: Vec<_> = outputs(&mut brain).into_iter().filter(notes).collect();
            (notes_of, print(&brain))
        };
        // The earlier one is behind its own clock, and catches up.
        assert_eq!(notes_of(before).0, notes_of(after).0);
    }
}
