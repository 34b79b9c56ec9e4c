//! Both pools are full to their last block, and no sequence waits for ever.

use super::router_stub::StubFlight;
use super::{PairRng, PairWorld, RouterStub, StageWorld};
use crate::stage::limits;
use crate::stage::script::prompt;
use cleave_domain::Role;
use std::time::Duration;

/// A prefill and a decode worker, or a second decode worker too, with too few blocks for their
/// load.
fn world(seed: u64) -> PairWorld {
    let mut chaos = PairWorld {
        rng: PairRng::new(seed),
        world: StageWorld::default(),
        router: RouterStub::default(),
        faults: false,
        slo_rng: None,
        slow_disks: PairRng::new(seed),
        absurd_orders: None,
        draft_rng: None,
        state_rng: None,
    };
    let rng = &mut chaos.rng;
    let swap_blocks = [0, 6, 20][rng.index(3)];
    let more = rng.percent(50);
    let roles = [Role::Prefill, Role::Decode, Role::Decode];
    for i in 0..if more { 3 } else { 2 } {
        let mut limits = limits(i as u64 + 1, roles[i]);
        limits.capacity.blocks_count = match roles[i] {
            Role::Prefill => 4,
            _ => rng.between(6, 9),
        };
        limits.swap_blocks = swap_blocks;
        limits.queue_max = 8;
        limits.steps_in_flight = 1 + u32::from(seed % 2 == 1);
        chaos.world.add(['p', 'd', 'e'][i], limits);
    }
    chaos
}

// Invariant: I22.
// Lesson: 10, 11.
/// Growth is underestimated on purpose, moves are tried at any time, and every request to move is
/// served. Lessons 10 and 11.
#[test]
fn full_pools_make_progress() {
    let (mut swaps, mut preempted) = (0, 0);
    for seed in 0..16 {
        let mut chaos = world(seed);
        let mut full = vec![false; chaos.world.machines.len()];
        let whole = |chaos: &PairWorld| {
            let flights = chaos.router.flights.iter();
            flights.filter(|of| of.got == of.expected.len()).count()
        };
        while whole(&chaos) < 30 {
            let going = chaos.router.flights.iter().filter(|of| !of.ended).count();
            if going < 8 && chaos.rng.percent(20) {
                let rng = &mut chaos.rng;
                let family = rng.between(1, 9);
                let text = prompt(family, rng.between(2, 15));
                let max_tokens = rng.between(1, 12);
                chaos.router.flights.push(StubFlight::new(text, max_tokens));
                chaos.attempt(chaos.router.flights.len() - 1);
            }
            if chaos.rng.percent(5) {
                chaos.move_any();
            }
            chaos.advance();
            for (at, machine) in chaos.world.machines.iter().enumerate() {
                full[at] |= machine.cells.brain.pool().blocks_available() == 0;
            }
            let deadline = Duration::from_secs(60);
            let late = chaos.world.now.since(cleave_domain::Time::ZERO) > deadline;
            assert!(!late, "seed {seed}: {} of 30 came through", whole(&chaos));
        }
        chaos.heal();
        assert!(full.iter().all(|full| *full), "seed {seed}: {full:?}");
        let count = |part: &str| chaos.world.log.iter().filter(|l| l.contains(part)).count();
        swaps += count("swapped in");
        preempted += count("note preempted");
    }
    assert!(swaps > 0 && preempted > 0, "{swaps} and {preempted}");
}
