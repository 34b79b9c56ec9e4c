//! Tests of the claims of a placement on each worker, and of the counts of the fleet.

use super::*;
use crate::event::{PlacementReason, RequestForecast};
use crate::fleet::ledger::{LegClaim, StreamSpan};
use crate::placement::candidates::{ChosenPlacement, MigrationCost};
use crate::placement::forecast::PlacementForecast;
use crate::placement::policy::{AttemptSize, LegChoice};
use cleave_domain::{Capacity, DeviceId, Incarnation, PrefillBacklog, RequestStageTimes};
use cleave_testkit::build;

const MS: Duration = Duration::from_millis(1);

fn handoff(number: u64) -> HandoffId {
    build::handoff(FlightId(number))
}

fn description(role: Role) -> WorkerDescription {
    let capacity = Capacity {
        block_tokens: 16,
        block_bytes: 64,
        blocks_count: 50,
        slots_count: 4,
        step_tokens_max: 64,
        context_tokens_max: 500,
        states: None,
        windows: None,
    };
    WorkerDescription {
        queue_max: 1,
        ..build::description(role, capacity)
    }
}

/// Worker 1 runs prompts, 2 generates, 3 does both.
fn fleet() -> RouterFleet {
    let mut fleet = RouterFleet::default();
    let roles = [Role::Prefill, Role::Decode, Role::Both];
    for (number, role) in (1..).zip(roles) {
        fleet.join(build::worker(number), description(role));
    }
    fleet
}

const ASK: AttemptSize = AttemptSize {
    prompt_tokens: 100,
    tokens_max: 400,
    tokens_expected: 130,
    prefill_only: false,
};

fn placement(prefill: u64, decode: u64, forecast: Option<PlacementForecast>) -> ChosenPlacement {
    ChosenPlacement {
        choice: LegChoice {
            prefill: build::worker(prefill),
            decode: build::worker(decode),
            cached_tokens: 32,
            cost: 0,
            reason: PlacementReason::Split,
        },
        forecast,
        considered: Vec::new(),
        tpot: Some(MS * 20),
    }
}

fn forecast() -> PlacementForecast {
    let request = RequestForecast {
        prefill: build::worker(1),
        decode: build::worker(2),
        cached_tokens: 0,
        ttft: MS,
        tpot: MS,
        e2e: MS,
        output_tokens: 30,
    };
    PlacementForecast {
        request,
        stages: RequestStageTimes {
            prefill_wait: MS * 3,
            prefill: MS * 4,
            transfer: MS * 5,
            ..RequestStageTimes::default()
        },
        step: MS * 10,
        once: Duration::ZERO,
        tokens: 115,
        output_long: 40,
        work: MS * 4,
        urgency: 11,
        reason: PlacementReason::Split,
        miss: None,
    }
}

#[test]
fn each_leg_claims_its_own_part() {
    let mut fleet = fleet();
    fleet.now = Time::ZERO + MS * 100;
    fleet.claim_legs(handoff(1), &placement(1, 2, Some(forecast())), &ASK);
    let prompt = LegClaim {
        tokens: 68,
        work: MS * 4,
        urgency: 11,
        ..LegClaim::NEW
    };
    assert_eq!(fleet.claim(build::worker(1), handoff(1)), Some(&prompt));
    let from = fleet.now + MS * 12;
    let stream = LegClaim {
        // 130 tokens in blocks of 16.
        blocks: 9,
        ordered: true,
        tpot: Some(MS * 20),
        span: StreamSpan {
            from,
            // The promised gap is longer than a step.
            until: from + MS * 20 * 40,
            tokens: 115,
        },
        ..LegClaim::NEW
    };
    assert_eq!(fleet.claim(build::worker(2), handoff(1)), Some(&stream));
    fleet.check();
    assert_eq!(
        (fleet.legs_open(FlightId(1)), fleet.legs_open_in_all()),
        (2, 2)
    );
    assert!(fleet.release(build::worker(2), handoff(1)).is_some());
    assert_eq!(
        (fleet.legs_open(FlightId(1)), fleet.legs_open(FlightId(2))),
        (1, 0)
    );
    assert!(fleet.release(build::worker(2), handoff(1)).is_none());
    fleet.check();
}

#[test]
fn a_whole_request_is_one_claim() {
    let mut fleet = fleet();
    fleet.claim_legs(handoff(1), &placement(3, 3, None), &ASK);
    let whole = LegClaim {
        tokens: 68,
        blocks: 9,
        ordered: true,
        tpot: Some(MS * 20),
        ..LegClaim::NEW
    };
    assert_eq!(fleet.claim(build::worker(3), handoff(1)), Some(&whole));
    fleet.claim_legs(handoff(2), &placement(1, 1, None), &ASK);
    let is_guest = fleet.claim(build::worker(1), handoff(2)).map(|p| p.guest);
    assert_eq!(is_guest, Some(true), "its role is to run prompts");
    assert_eq!(
        fleet.sequences_to_move(build::worker(1), MoveReason::Role),
        []
    );
    assert_eq!(
        fleet.sequences_to_move(build::worker(1), MoveReason::Drain),
        [handoff(2)]
    );
    fleet.check();
}

#[test]
fn a_move_claims_room_and_pace_at_its_target() {
    let mut fleet = fleet();
    let cost = MigrationCost {
        ask: ASK,
        tpot: Some(MS * 30),
    };
    fleet.claim_move_target(handoff(1), build::worker(2), &cost);
    let moved = LegClaim {
        blocks: 9,
        ordered: true,
        tpot: Some(MS * 30),
        ..LegClaim::NEW
    };
    assert_eq!(fleet.claim(build::worker(2), handoff(1)), Some(&moved));
    assert_eq!(fleet.sequences(build::worker(2)), [handoff(1)]);
    fleet.check();
}

#[test]
fn a_census_counts_roles_and_devices() {
    let mut fleet = fleet();
    let census = |prefill, decode, both, devices| RoleCounts {
        prefill,
        decode,
        both,
        devices,
    };
    assert_eq!(fleet.census(), census(1, 1, 1, 3));
    for number in [4, 5] {
        let device = Some(DeviceId("gpu".to_owned()));
        let shares = WorkerDescription {
            device,
            ..description(Role::Decode)
        };
        fleet.join(build::worker(number), shares);
    }
    assert_eq!(fleet.census(), census(1, 3, 1, 4));
    fleet.set_role(build::worker(3), Role::Decode);
    assert_eq!(fleet.census(), census(1, 4, 0, 4));
    let turns = fleet.version();
    assert_eq!(fleet.leave(WorkerId(5)), []);
    assert_eq!(fleet.census(), census(1, 3, 0, 4));
    assert_eq!((fleet.version(), fleet.workers().count()), (turns + 1, 4));
    fleet.check();
}

#[test]
fn a_new_worker_has_all_its_blocks_free() {
    let fleet = fleet();
    let load = fleet
        .get(build::worker(1))
        .map(|worker| worker.load.blocks_free);
    assert_eq!(load, Some(50));
    let mut earlier = build::worker(1);
    earlier.incarnation = Incarnation(0);
    assert!(fleet.get(earlier).is_none(), "it is another life");
    let blocks = [16, 17, 0].map(|tokens| fleet.blocks(build::worker(1), tokens));
    assert_eq!(blocks, [Some(1), Some(2), Some(0)]);
    assert!(fleet.is_too_long(500) && !fleet.is_too_long(499));
    assert!(
        !RouterFleet::default().is_too_long(500),
        "no worker is known"
    );
    let context =
        [build::worker(1), build::worker(9)].map(|worker_ref| fleet.context_tokens_max(worker_ref));
    assert_eq!(context, [500, u32::MAX]);
    assert_eq!(
        fleet.fingerprint(build::worker(1)),
        Some(&Fingerprint::default())
    );
}

#[test]
fn a_load_eases_where_anything_became_less() {
    let mut fleet = fleet();
    let load = WorkerLoad {
        queue_tokens: 10,
        sequences_waiting: 2,
        sequences_running: 2,
        blocks_free: 20,
        context_tokens: 90,
        streams: 3,
        tpot_least: Some(MS * 20),
        backlog: PrefillBacklog {
            micros: [[5; 9]; 3],
        },
        ..WorkerLoad::default()
    };
    fleet.update_worker(build::worker(2), &Report::Load(load));
    let eased = |change: fn(&mut WorkerLoad)| {
        let mut new = load;
        change(&mut new);
        fleet.load_eased(build::worker(2), &new)
    };
    assert!(!eased(|_| ()));
    assert!(eased(|new| new.queue_tokens -= 1) && !eased(|new| new.queue_tokens += 1));
    assert!(eased(|new| new.sequences_waiting -= 1));
    assert!(eased(|new| new.sequences_running -= 1));
    assert!(!eased(|new| {
        new.sequences_running += 1;
        new.sequences_waiting -= 1;
    }));
    assert!(eased(|new| new.blocks_free += 1) && !eased(|new| new.blocks_free -= 1));
    assert!(eased(|new| new.context_tokens -= 1) && !eased(|new| new.context_tokens += 1));
    assert!(eased(|new| new.streams -= 1) && !eased(|new| new.streams += 1));
    assert!(eased(|new| new.tpot_least = None));
    assert!(!eased(|new| new.tpot_least = Some(MS * 19)));
    assert!(eased(|new| new.progress = StepProgress::Stuck));
    assert!(eased(|new| new.backlog.micros[2][8] = 4));
    assert!(!eased(|new| new.backlog.micros[2][8] = 6));
    assert!(
        !fleet.load_eased(build::worker(9), &load),
        "it is not connected"
    );
}

#[test]
fn streams_leave_a_worker_that_changes_its_role() {
    let mut fleet = fleet();
    fleet.claim_legs(handoff(1), &placement(3, 3, None), &ASK);
    assert_eq!(fleet.workers_to_leave(), []);
    fleet.set_role(build::worker(3), Role::Prefill);
    assert_eq!(
        fleet.workers_to_leave(),
        [(build::worker(3), MoveReason::Role)]
    );
    fleet.set_role(build::worker(3), Role::Both);
    assert_eq!(fleet.workers_to_leave(), []);
    fleet.drain(build::worker(3));
    assert_eq!(
        fleet.workers_to_leave(),
        [(build::worker(3), MoveReason::Drain)]
    );
    assert!(!fleet.has_drained(build::worker(3)));
    fleet.release(build::worker(3), handoff(1));
    assert!(fleet.has_drained(build::worker(3)) && fleet.workers_to_leave().is_empty());
    fleet.check();
}

#[test]
fn progress_is_reported_when_it_changes() {
    let mut fleet = fleet();
    let turns = fleet.version();
    assert!(!fleet.set_progress(build::worker(1), StepProgress::Moving));
    assert!(fleet.set_progress(build::worker(1), StepProgress::Stuck));
    assert!(!fleet.set_progress(build::worker(1), StepProgress::Stuck));
    assert_eq!(
        (fleet.version(), fleet.stuck()),
        (turns + 1, vec![build::worker(1)])
    );
    assert!(fleet.is_stuck(build::worker(1)) && fleet.is_stuck_worker(WorkerId(1)));
    assert!(fleet.set_progress(build::worker(1), StepProgress::Moving));
    assert_eq!(fleet.stuck(), []);
    assert!(!fleet.is_stuck_worker(WorkerId(1)));
    fleet.check();
}

#[test]
fn an_order_numbers_its_claim() {
    let mut fleet = fleet();
    fleet.claim_legs(handoff(1), &placement(3, 3, None), &ASK);
    fleet.count_order(build::worker(3), None);
    fleet.count_order(build::worker(3), Some(handoff(1)));
    let order = fleet
        .claim(build::worker(3), handoff(1))
        .and_then(|p| p.order);
    assert_eq!(order, Some(2));
    let unreported_after = |fleet: &mut RouterFleet, orders_received| {
        let load = WorkerLoad {
            orders_received,
            ..WorkerLoad::default()
        };
        fleet.update_worker(build::worker(3), &Report::Load(load));
        fleet
            .claim(build::worker(3), handoff(1))
            .map(|p| p.unreported)
    };
    assert_eq!(unreported_after(&mut fleet, 1), Some(true));
    assert_eq!(unreported_after(&mut fleet, 2), Some(false));
    fleet.check();
}
