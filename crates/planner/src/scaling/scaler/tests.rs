//! Tests of leadership, bounds, late workers and learned lengths, each as a script of inputs.

use super::*;
use cleave_domain::{PoolScaling, RequestFlow, SloOutcomes};

fn scaling(devices_max: u32) -> ScalingPolicy {
    let pool = |role| PoolScaling {
        max: 8,
        ..PoolScaling::absent(role)
    };
    ScalingPolicy {
        prefill: pool(Role::Prefill),
        decode: pool(Role::Decode),
        ..ScalingPolicy::new(devices_max)
    }
}

/// A router answers after this time.
const BEGUN: u64 = LISTENING_TIME.as_secs();

fn at(second: u64) -> Time {
    Time::from_nanos(second * 1_000_000_000)
}

fn scaler(me: u64) -> Scaler {
    Scaler::new(RouterId(me), at(0), scaling(10), Arc::default())
}

fn fleet(prefill: u64, decode: u64, waiting: u32) -> ScalerFleet {
    let member = |number: u64| {
        let role = if number < prefill {
            Role::Prefill
        } else {
            Role::Decode
        };
        ScalerMember {
            worker: WorkerId(number),
            role,
            home_role: role,
            leaving: false,
            busy_tokens: 0,
        }
    };
    ScalerFleet {
        members: (0..prefill + decode).map(member).collect(),
        waiting,
        ..ScalerFleet::default()
    }
}

/// Evaluates once a second; returns the last wanted numbers, if any were emitted.
fn run(scaler: &mut Scaler, from: u64, until: u64, fleet: &ScalerFleet) -> Option<FleetTarget> {
    let mut target = None;
    for second in from..until {
        scaler.handle(at(second), ScalerInput::FleetChanged(fleet.clone()));
        scaler.check();
        while let Some(output) = scaler.poll() {
            if let ScalerOutput::Decided(decision) = output
                && !decision.first
            {
                target = Some(decision.wanted);
            }
        }
    }
    target
}

fn gossip(router: u64, number: u64, prefill: u32, decode: u32) -> ScalerInput {
    let counts = PoolCounts {
        prefill,
        decode,
        both: 0,
    };
    ScalerInput::GossipReceived(Arc::new(ScalingGossip {
        router: RouterId(router),
        number,
        wanted: FleetTarget {
            workers: counts,
            legs: counts,
            ..FleetTarget::default()
        },
        ..ScalingGossip::default()
    }))
}

#[test]
fn a_restarted_router_keeps_the_workers_that_serve() {
    let mut scaler = scaler(1);
    assert_eq!(
        run(&mut scaler, 0, BEGUN, &fleet(3, 4, 0)),
        None,
        "it answers nothing while listening"
    );
    let target = run(&mut scaler, BEGUN, 60, &fleet(3, 4, 0)).expect("it decides");
    assert_eq!((target.workers.prefill, target.workers.decode), (3, 4));
}

#[test]
fn a_new_router_waits_for_late_workers_to_connect() {
    let mut scaler = scaler(1);
    // A request waits already. Workers look up routers every ten seconds.
    for (from, until, there) in [(0, 9, 0), (9, 12, 2), (12, BEGUN, 3)] {
        let decision = run(&mut scaler, from, until, &fleet(there, there, 3));
        assert_eq!(decision, None, "of {there} prefill workers that it knew of");
    }
    let target = run(&mut scaler, BEGUN, 40, &fleet(3, 3, 0)).expect("it decides");
    assert_eq!((target.workers.prefill, target.workers.decode), (3, 3));
}

#[test]
fn a_new_leader_keeps_its_predecessors_decision() {
    let mut scaler = scaler(1);
    // Two of the workers that router 5 wants have not started yet, and router 1 has the smaller
    // id.
    for second in 0..=BEGUN {
        scaler.handle(at(second), gossip(5, second + 1, 4, 5));
        run(&mut scaler, second, second + 1, &fleet(3, 4, 0));
    }
    run(&mut scaler, BEGUN + 1, 45, &fleet(3, 4, 0));
    assert!(scaler.last_decision.expect("it leads now").own);
    let target = scaler.target;
    assert_eq!((target.workers.prefill, target.workers.decode), (4, 5));
}

#[test]
fn the_leader_is_followed_within_bounds_until_silent() {
    let mut scaler = scaler(9);
    run(&mut scaler, 0, 21, &fleet(1, 1, 0));
    scaler.handle(at(21), gossip(2, 1, 5, 5));
    let target = run(&mut scaler, 21, 23, &fleet(1, 1, 0)).expect("another answer");
    assert_eq!((target.workers.prefill, target.workers.decode), (5, 5));
    scaler.handle(at(23), gossip(2, 2, 8, 8));
    run(&mut scaler, 23, 24, &fleet(1, 1, 0));
    let total = scaler.target.workers.total();
    assert_eq!(total, 10, "it wants sixteen, of ten devices");
    run(&mut scaler, 24, 55, &fleet(1, 1, 0));
    assert!(
        scaler.last_decision.expect("it said something").own,
        "the other one is silent"
    );
}

#[test]
fn absurd_gossip_neither_panics_nor_breaks_bounds() {
    let prices = Prices {
        rows: vec![cleave_domain::RowPrice {
            rows: 1,
            nanos: 10_000_000,
        }],
        ..Prices::default()
    };
    let capacity = Capacity {
        block_tokens: 16,
        block_bytes: 1,
        blocks_count: 100,
        slots_count: 8,
        step_tokens_max: 512,
        context_tokens_max: 1600,
        states: None,
        windows: None,
    };
    let present = ScalerFleet {
        prefill: Some((prices.clone(), capacity)),
        decode: Some((prices, capacity)),
        ..fleet(2, 2, 0)
    };
    let mut state = 1u64;
    let mut draw = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        [0, 1, 7, 1000, u64::from(u32::MAX), u64::MAX][(state >> 33) as usize % 6]
    };
    for turn in 0..300 {
        let mut flow = || RequestFlow {
            arrivals: draw(),
            prompt_tokens: draw(),
            pairs: draw(),
            placed: draw(),
            cached_tokens: draw(),
            answers: draw(),
            output_tokens: draw(),
        };
        let (slow, quick) = (flow(), flow());
        let mut small = || u32::try_from(draw()).unwrap_or(u32::MAX);
        let mut counts = || PoolCounts {
            prefill: small(),
            decode: small(),
            both: small(),
        };
        let target = FleetTarget {
            workers: counts(),
            legs: counts(),
            ..FleetTarget::default()
        };
        let (waiting, open) = (small(), small());
        let outcomes = SloOutcomes {
            arrivals: draw(),
            judged: draw(),
            missed_prefill: draw(),
            missed_decode: draw(),
        };
        let demand = FleetDemand {
            slow,
            quick,
            classes: vec![outcomes; 2],
            waiting,
            waiting_tokens: draw(),
            open,
        };
        let gossip = |router, number| ScalingGossip {
            router: RouterId(router),
            number,
            demand: demand.clone(),
            wanted: target,
        };
        // Once from the leader, and once from two followers.
        for (me, others) in [(9, [2, 3]), (1, [2, 3])] {
            let mut scaler = scaler(me);
            run(&mut scaler, 0, BEGUN, &present);
            for number in 1..=10 {
                let second = BEGUN + 4 * number;
                for other in others {
                    let gossip = gossip(other, number);
                    scaler.handle(at(second), ScalerInput::GossipReceived(Arc::new(gossip)));
                }
                run(&mut scaler, second, second + 4, &present);
                let decision = scaler
                    .last_decision
                    .as_ref()
                    .expect("it has received enough");
                assert_eq!(decision.own, me == 1, "turn {turn}");
                let target = &scaler.target.workers;
                assert!(
                    target.total() <= 10,
                    "turn {turn}: {target:?} of ten devices"
                );
            }
        }
    }
}

/// Answer lengths were once not learned for a minute after a worker was missing, nor from
/// retried requests, so decode workers were planned for the answers of an earlier hour.
#[test]
fn answer_lengths_are_learned_during_a_shortage() {
    let mut scaler = scaler(1);
    run(&mut scaler, 0, 25, &fleet(0, 0, 1)).expect("somebody waits");
    assert!(
        scaler.missing() > 0,
        "the wanted workers have not joined yet"
    );
    for (outcome, output_tokens) in [
        (PromiseOutcome::Met, 700),
        (PromiseOutcome::Missed(Role::Decode), 500),
        (PromiseOutcome::NotCounted, 300),
        (PromiseOutcome::NotCounted, 0),
    ] {
        scaler.handle(
            at(25),
            ScalerInput::Ended {
                class: String::new(),
                outcome,
                output_tokens,
            },
        );
    }
    let demand = scaler.window.demand(at(25));
    assert_eq!((demand.slow.answers, demand.slow.output_tokens), (3, 1500));
    let judged = demand.classes.iter().map(|outcomes| outcomes.judged);
    assert_eq!(
        judged.sum::<u64>(),
        0,
        "no target is judged during a shortage"
    );
}

#[test]
fn a_request_at_a_new_router_starts_first_workers() {
    let mut scaler = scaler(1);
    let mut first = |second, fleet: &ScalerFleet| {
        scaler.handle(at(second), ScalerInput::FleetChanged(fleet.clone()));
        scaler.check();
        let outputs = std::iter::from_fn(|| scaler.poll());
        let decided = outputs.filter_map(|output| match output {
            ScalerOutput::Decided(decision) if decision.first => Some(decision.wanted.workers),
            _ => None,
        });
        decided.last()
    };
    let one_each = PoolCounts {
        prefill: 1,
        decode: 1,
        both: 0,
    };
    assert_eq!(first(1, &fleet(0, 0, 0)), None, "nothing waits");
    assert_eq!(first(2, &fleet(0, 0, 1)), Some(one_each));
    assert_eq!(first(3, &fleet(0, 0, 1)), None, "it said so");
    assert_eq!(first(4, &fleet(2, 0, 9)), None, "the fleet is there");
}

#[test]
fn an_idle_fleet_shrinks_after_idle_after_at_once() {
    let mut policy = scaling(10);
    policy.idle_after = Duration::from_secs(90);
    policy.decode.min = 1;
    let mut scaler = Scaler::new(RouterId(1), at(0), policy, Arc::default());
    run(&mut scaler, 0, 100, &fleet(1, 1, 0));
    let arrived = ScalerInput::Arrived {
        class: String::new(),
        prompt_tokens: 10,
    };
    scaler.handle(at(100), arrived);
    let busy = run(&mut scaler, 101, 190, &fleet(1, 1, 0));
    let busy = busy.unwrap_or(scaler.target).workers;
    assert_eq!((busy.prefill, busy.decode), (1, 1), "90 s are not over");
    let idle = run(&mut scaler, 190, 192, &fleet(1, 1, 0)).expect("it decides anew");
    assert_eq!((idle.workers.prefill, idle.workers.decode), (0, 1));
    assert_eq!(idle.reasons.prefill, ScalingReason::Idle);
}

#[test]
fn a_request_at_an_empty_fleet_starts_workers() {
    let mut scaler = scaler(1);
    let target = run(&mut scaler, 0, 25, &fleet(0, 0, 1)).expect("somebody waits");
    assert_eq!((target.workers.prefill, target.workers.decode), (1, 1));
    assert_eq!(target.reasons.prefill, ScalingReason::First);
    let target = run(&mut scaler, 25, 1500, &fleet(1, 1, 0)).expect("idle in the end");
    assert_eq!(target.workers.total(), 0, "{target:?}");
}
