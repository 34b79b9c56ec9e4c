//! Tests of placements on workers whose sequences have a state: slots, and prefixes with a
//! snapshot.

use super::*;
use crate::accounting::tally::PredictionStretch;
use crate::event::{LegPlacement, RoutingMode};
use crate::placement::candidates::PlacementQuery;
use crate::placement::forecast::{PlacementPriority, RequestNeed};
use crate::placement::policy::{AttemptSize, LegChoice, NoPlacement, RoutingTerms};
use crate::placement::prefix::PrefixHashes;
use cleave_domain::{
    AdapterId, AdapterOffer, AdapterPlace, CacheScope, Incarnation, Request, RequestSlo, RowPrice,
    SamplingParams, StateCapacity, StopRules,
};
use cleave_kv::{block_hashes, snapshot_hash};

fn worker_ref(number: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(number),
        incarnation: Incarnation(1),
    }
}

fn handoff(number: u64) -> HandoffId {
    HandoffId {
        flight: FlightId(number),
        attempt: 0,
    }
}

/// Workers of these roles, numbered from 1, each with so many state slots, or without states.
fn fleet(roles: &[Role], states: Option<u32>) -> RouterFleet {
    let mut fleet = RouterFleet::default();
    for (number, role) in (1..).zip(roles) {
        let capacity = Capacity {
            block_tokens: 16,
            block_bytes: 64,
            blocks_count: 50,
            slots_count: 4,
            step_tokens_max: 64,
            context_tokens_max: 500,
            states: states.map(|count| StateCapacity { bytes: 100, count }),
            windows: None,
        };
        let description = WorkerDescription {
            role: *role,
            home: *role,
            model: String::new(),
            fingerprint: Fingerprint::default(),
            capacity,
            queue_max: 8,
            device: None,
        };
        fleet.join(worker_ref(number), description);
    }
    fleet
}

/// A prompt of 100 tokens, six full blocks.
fn prompt() -> Vec<u32> {
    (0..100).collect()
}

fn place(fleet: &RouterFleet, placement: LegPlacement) -> Result<LegChoice, NoPlacement> {
    place_by_need(fleet, placement, None)
}

fn place_by_need(
    fleet: &RouterFleet,
    placement: LegPlacement,
    need: Option<&RequestNeed>,
) -> Result<LegChoice, NoPlacement> {
    place_adapted(fleet, placement, need, None)
}

fn place_adapted(
    fleet: &RouterFleet,
    placement: LegPlacement,
    need: Option<&RequestNeed>,
    adapter: Option<AdapterId>,
) -> Result<LegChoice, NoPlacement> {
    let request = Request {
        prompt: prompt().into(),
        generated: [].into(),
        sampling: SamplingParams::greedy(),
        stop: StopRules {
            max_tokens: 30,
            min_tokens: 0,
            stop_tokens: [].into(),
        },
        priority: 0,
        cache_salt: 0,
        adapter: None,
        pooling: None,
        slo: RequestSlo::default(),
    };
    let query = PlacementQuery {
        ask: AttemptSize {
            prompt_tokens: 100,
            tokens_max: 130,
            tokens_expected: 130,
            prefill_only: false,
        },
        content: &PrefixHashes::of(&request, fleet.block_sizes()),
        adapter,
        excluded: &BTreeSet::new(),
        failures: 0,
        drawn_by: None,
        now: fleet.now,
        terms: RoutingTerms {
            mode: RoutingMode::Load,
            placement,
        },
        need,
    };
    fleet.choose(&query).map(|chosen| chosen.choice)
}

/// Places a request, and claims what its legs take.
fn claim(fleet: &mut RouterFleet, number: u64, placement: LegPlacement) {
    let choice = place(fleet, placement).expect("there is room");
    let ask = AttemptSize {
        prompt_tokens: 100,
        tokens_max: 130,
        tokens_expected: 130,
        prefill_only: false,
    };
    let chosen = crate::placement::candidates::ChosenPlacement {
        choice,
        forecast: None,
        considered: Vec::new(),
        tpot: None,
    };
    fleet.claim_legs(handoff(number), &chosen, &ask);
}

fn report(fleet: &mut RouterFleet, worker: u64, states_free: u32, orders_received: u64) {
    let load = WorkerLoad {
        blocks_free: 50,
        states_free,
        orders_received,
        ..WorkerLoad::default()
    };
    fleet.update_worker(worker_ref(worker), &Report::Load(load));
}

#[test]
fn each_leg_takes_a_state_slot_of_its_worker() {
    let mut fleet = fleet(&[Role::Prefill, Role::Decode], Some(2));
    for number in 1..=2 {
        claim(&mut fleet, number, LegPlacement::Split);
    }
    assert_eq!(
        place(&fleet, LegPlacement::Split),
        Err(NoPlacement::Busy),
        "both workers have claims for all their slots"
    );
    fleet.release(worker_ref(1), handoff(1));
    let split = place(&fleet, LegPlacement::Split);
    assert_eq!(split, Err(NoPlacement::Busy), "the other leg has no slot");
    fleet.release(worker_ref(2), handoff(1));
    assert!(place(&fleet, LegPlacement::Split).is_ok());
    fleet.check();
}

fn offer(adapter: u8, place: AdapterPlace) -> AdapterOffer {
    AdapterOffer {
        name: adapter.to_string(),
        adapter: AdapterId([adapter; 16]),
        root: String::new(),
        loaded_from: None,
        change: None,
        place,
        problem: None,
    }
}

#[test]
fn a_worker_with_a_problem_does_not_serve_the_adapter() {
    let mut fleet = fleet(&[Role::Both, Role::Both], None);
    let adapter = AdapterId([7; 16]);
    let place = |fleet: &RouterFleet| {
        let choice = place_adapted(fleet, LegPlacement::Whole, None, Some(adapter))?;
        Ok(choice.prefill)
    };
    let reason = |fleet: &RouterFleet| fleet.adapter_problem(adapter).map(str::to_owned);
    assert_eq!(reason(&fleet), None, "one may still open its folder");
    let served = offer(7, AdapterPlace::OnDisk);
    let broken = AdapterOffer {
        problem: Some("its file is shorter".to_owned()),
        ..served.clone()
    };
    let version = fleet.version();
    fleet.set_adapters(worker_ref(1), std::slice::from_ref(&served));
    assert!(
        fleet.version() > version,
        "requests that wait for it are placed"
    );
    assert_eq!((place(&fleet), reason(&fleet)), (Ok(worker_ref(1)), None));
    fleet.set_adapters(worker_ref(1), std::slice::from_ref(&broken));
    assert_eq!(place(&fleet), Err(NoPlacement::NoWorker));
    assert_eq!(reason(&fleet).as_deref(), Some("its file is shorter"));
    fleet.set_adapters(worker_ref(2), &[served]);
    assert_eq!((place(&fleet), reason(&fleet)), (Ok(worker_ref(2)), None));
    fleet.get_mut(worker_ref(2)).unwrap().draining = true;
    assert_eq!(place(&fleet), Err(NoPlacement::NoWorker));
    assert_eq!(reason(&fleet), None, "another worker serves the adapter");
}

#[test]
fn a_problem_of_one_leg_is_not_hidden_by_the_other_leg() {
    let mut fleet = fleet(&[Role::Prefill, Role::Prefill, Role::Decode], None);
    let adapter = AdapterId([7; 16]);
    let served = offer(7, AdapterPlace::OnDisk);
    let broken = AdapterOffer {
        problem: Some("its file is shorter".to_owned()),
        ..served.clone()
    };
    fleet.set_adapters(worker_ref(1), &[served]);
    fleet.set_adapters(worker_ref(2), std::slice::from_ref(&broken));
    assert_eq!(fleet.adapter_problem(adapter), None, "worker 3 may open it");
    fleet.set_adapters(worker_ref(3), &[broken]);
    let problem = fleet.adapter_problem(adapter);
    assert_eq!(problem, Some("its file is shorter"));
}

#[test]
fn only_workers_with_the_adapter_are_chosen() {
    let mut fleet = fleet(
        &[Role::Prefill, Role::Prefill, Role::Decode, Role::Decode],
        None,
    );
    let place = |fleet: &RouterFleet| {
        let adapter = Some(AdapterId([7; 16]));
        let choice = place_adapted(fleet, LegPlacement::Split, None, adapter)?;
        Ok([choice.prefill, choice.decode])
    };
    assert_eq!(place(&fleet), Err(NoPlacement::NoWorker));
    fleet.set_adapters(worker_ref(2), &[offer(7, AdapterPlace::OnDisk)]);
    assert_eq!(
        place(&fleet),
        Err(NoPlacement::NoWorker),
        "one leg has none"
    );
    fleet.set_adapters(worker_ref(4), &[offer(7, AdapterPlace::OnDisk)]);
    assert_eq!(place(&fleet), Ok([worker_ref(2), worker_ref(4)]));
    // A copy in host memory comes before a disk.
    for worker in [1, 3] {
        fleet.set_adapters(worker_ref(worker), &[offer(7, AdapterPlace::InHost)]);
    }
    assert_eq!(place(&fleet), Ok([worker_ref(1), worker_ref(3)]));
    for worker in [2, 4] {
        fleet.set_adapters(worker_ref(worker), &[offer(7, AdapterPlace::Resident)]);
    }
    assert_eq!(place(&fleet), Ok([worker_ref(2), worker_ref(4)]));
    for worker in [2, 4] {
        fleet.set_adapters(worker_ref(worker), &[offer(7, AdapterPlace::OnDisk)]);
    }
    // A worker that has it in memory comes before one that would load it.
    for worker in [1, 3] {
        fleet.set_adapters(worker_ref(worker), &[offer(7, AdapterPlace::Resident)]);
    }
    assert_eq!(place(&fleet), Ok([worker_ref(1), worker_ref(3)]));
    fleet.set_adapters(worker_ref(1), &[offer(8, AdapterPlace::Resident)]);
    assert_eq!(place(&fleet), Ok([worker_ref(2), worker_ref(3)]));
}

#[test]
fn a_claim_in_the_load_is_counted_once() {
    let mut fleet = fleet(&[Role::Both], Some(2));
    claim(&mut fleet, 1, LegPlacement::Whole);
    fleet.count_order(worker_ref(1), Some(handoff(1)));
    // The load is older than the order.
    report(&mut fleet, 1, 1, 0);
    assert_eq!(place(&fleet, LegPlacement::Whole), Err(NoPlacement::Busy));
    report(&mut fleet, 1, 1, 1);
    assert!(place(&fleet, LegPlacement::Whole).is_ok());
    let eased = WorkerLoad {
        states_free: 2,
        orders_received: 1,
        blocks_free: 50,
        ..WorkerLoad::default()
    };
    assert!(fleet.load_eased(worker_ref(1), &eased));
    fleet.check();
}

#[test]
fn a_cached_prefix_counts_up_to_its_last_snapshot() {
    let blocks = block_hashes(CacheScope::default(), &prompt(), 16);
    let snapshots: Vec<BlockHash> = blocks.iter().map(|hash| snapshot_hash(*hash)).collect();
    let cached = |fleet: &RouterFleet| {
        let choice = place(fleet, LegPlacement::Whole);
        choice.expect("there is room").cached_tokens
    };
    let mut plain = fleet(&[Role::Both], None);
    plain.update_prefixes(worker_ref(1), &blocks, &[]);
    assert_eq!(cached(&plain), 96);
    let mut fleet = fleet(&[Role::Both], Some(2));
    fleet.update_prefixes(worker_ref(1), &blocks, &[]);
    assert_eq!(cached(&fleet), 0);
    fleet.update_prefixes(worker_ref(1), &[snapshots[1], snapshots[3]], &[]);
    assert_eq!(cached(&fleet), 64);
    fleet.update_prefixes(worker_ref(1), &[], &[snapshots[3]]);
    assert_eq!(cached(&fleet), 32);
    // A snapshot without the blocks before it is of no use.
    fleet.update_prefixes(worker_ref(1), &[], &[blocks[0]]);
    assert_eq!(cached(&fleet), 0);
}

/// A request without targets, among others with some.
fn need(priority_over_others: PlacementPriority) -> RequestNeed {
    RequestNeed {
        ask: AttemptSize {
            prompt_tokens: 100,
            tokens_max: 130,
            tokens_expected: 130,
            prefill_only: false,
        },
        now: Time::ZERO,
        priority: 0,
        output: 30,
        output_long: 30,
        waited: Duration::ZERO,
        counted_wait: Duration::ZERO,
        ttft: None,
        tpot: None,
        e2e: None,
        ttft_by: PredictionStretch::NONE,
        tpot_by: PredictionStretch::NONE,
        tpot_by_worst: PredictionStretch::NONE,
        priority_over_others,
        gap_left_to_others: None,
    }
}

#[test]
fn half_the_state_slots_are_kept_for_requests_with_targets() {
    let mut fleet = fleet(&[Role::Both], Some(4));
    let rows = [(1, 11_000_000), (512, 522_000_000)];
    let prices = Prices {
        rows: rows.map(|(rows, nanos)| RowPrice { rows, nanos }).to_vec(),
        ..Prices::default()
    };
    fleet.update_worker(worker_ref(1), &Report::Prices(prices));
    let mut is_placed = |states_free, priority| {
        report(&mut fleet, 1, states_free, 0);
        place_by_need(&fleet, LegPlacement::Whole, Some(&need(priority))).is_ok()
    };
    assert!(is_placed(3, PlacementPriority::Yielding));
    assert!(!is_placed(2, PlacementPriority::Yielding));
    assert!(is_placed(2, PlacementPriority::New));
    assert!(!is_placed(0, PlacementPriority::New));
}
