//! Pools too small for prompts that come again and again, with tiers below them.

use super::router_stub::StubFlight;
use super::{PairRng, PairWorld, RouterStub, StageWorld};
use crate::stage::limits;
use crate::stage::script::prompt;
use cleave_domain::Role;

fn world(seed: u64) -> PairWorld {
    let mut chaos = PairWorld {
        rng: PairRng::new(seed),
        world: StageWorld::default(),
        router: RouterStub::default(),
        faults: false,
        slo_rng: None,
        slow_disks: PairRng::new(seed ^ 0x9fb2_1c65_1e98_df25),
        absurd_orders: None,
        draft_rng: None,
        state_rng: None,
    };
    let rng = &mut chaos.rng;
    chaos.faults = rng.percent(70);
    let below = (rng.between(2, 20), rng.between(0, 1) * rng.between(1, 30));
    let roles: &[Role] = match rng.roll(3) {
        0 => &[Role::Both],
        1 => &[Role::Both, Role::Both],
        _ => &[Role::Prefill, Role::Decode],
    };
    for (i, role) in roles.iter().enumerate() {
        let mut limits = limits(i as u64 + 1, *role);
        limits.capacity.blocks_count = rng.between(8, 16);
        (limits.host_blocks, limits.disk_blocks) = below;
        limits.swap_blocks = rng.between(0, 4);
        limits.queue_max = 8;
        limits.steps_in_flight = 1 + u32::from(seed % 2 == 1);
        chaos.world.add(['a', 'b'][i], limits);
    }
    chaos
}

fn live(seed: u64, acts: u32) -> Vec<String> {
    let mut chaos = world(seed);
    for _ in 0..acts {
        let going = chaos.router.flights.iter().filter(|of| !of.ended).count();
        if going < 4 && chaos.rng.percent(15) {
            let rng = &mut chaos.rng;
            let family = rng.between(1, 4);
            let text = prompt(family, rng.between(6, 30));
            let max_tokens = rng.between(1, 6);
            chaos.router.flights.push(StubFlight::new(text, max_tokens));
            chaos.attempt(chaos.router.flights.len() - 1);
        }
        match chaos.rng.roll(100) {
            0..=1 => chaos.cancel_any(),
            2 if chaos.faults && chaos.rng.percent(20) => chaos.restart_any(),
            _ => {
                chaos.hold_up_fetch();
                chaos.perform_any();
            }
        }
        if chaos.world.pending.is_empty() {
            chaos.advance();
        }
    }
    chaos.heal();
    chaos.world.log
}

// Invariant: I49.
/// The stage's engine panics at KV that is not the sequence's own, the router stub at a token that
/// is not the oracle's, and in the end no block is held.
#[test]
fn fetched_kv_is_always_the_sequences_own() {
    let mut lines = Vec::new();
    for seed in 0..200 {
        lines.extend(live(seed, 500));
    }
    for corner in [
        "> shelve ",
        "Broken",
        "> write on ",
        "written on",
        "> fetch #",
        "> fetch stop #",
        "found on disk",
        " Host",
        " Disk",
        " Missing",
        " Corrupt",
        " Unreadable",
        " Stopped",
        "cancel freed",
        "swapped in",
    ] {
        let count = lines.iter().filter(|line| line.contains(corner)).count();
        assert!(count > 0, "no world had {corner:?}");
    }
    let is_fetch = |line: &&String| line.contains("< fetched #") && line.ends_with("Copied");
    assert!(lines.iter().filter(is_fetch).count() > 300);
}

#[test]
fn a_world_with_tiers_is_deterministic() {
    for seed in 0..10 {
        assert_eq!(live(seed, 300), live(seed, 300));
    }
}
