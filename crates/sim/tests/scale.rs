//! Fleets that grow and shrink while they serve: the production brains, an orchestrator as prices,
//! and the thresholds of existing autoscalers on the same arrivals.

use cleave_domain::{PoolCounts, PoolScaling, Role, ScalingPolicy, SloClass, SloPolicy};
use cleave_sim::goodput::{
    FleetHistory, FleetSpec, GoodputOutcome, Orchestrator, RequestArrival, RoutingComparison,
    RoutingScheme, ScalingAuthority, Scenario, SyntheticWorkload, WorkerProfile, run,
    thinned_by_curve,
};
use std::sync::Arc;
use std::time::Duration;

const PROFILE: &str = "a100-llama-3-8b";
const MINUTE: u64 = 60;

fn pools(prefill: u32, decode: u32) -> PoolCounts {
    PoolCounts {
        prefill,
        decode,
        both: 0,
    }
}

fn scaling(most: PoolCounts, devices_max: u32) -> ScalingPolicy {
    let pool = |role| PoolScaling {
        max: most.for_role(role),
        up_after: Duration::from_secs(5),
        down_after: Duration::from_secs(if role.decodes() { 120 } else { 60 }),
        ..PoolScaling::absent(role)
    };
    ScalingPolicy {
        prefill: pool(Role::Prefill),
        decode: pool(Role::Decode),
        both: pool(Role::Both),
        ..ScalingPolicy::new(devices_max)
    }
}

fn policy(scaling: Option<ScalingPolicy>) -> Arc<SloPolicy> {
    let class = SloClass {
        ttft: Some(Duration::from_secs(3)),
        tpot: Some(Duration::from_millis(80)),
        ..SloClass::default()
    };
    Arc::new(SloPolicy {
        classes: vec![class],
        scaling,
        ..SloPolicy::default()
    })
}

fn starter(authority: ScalingAuthority, first: PoolCounts) -> Orchestrator {
    Orchestrator {
        profile: WorkerProfile::named(PROFILE).expect("it is in the table"),
        workers_first: first,
        start_time: Duration::from_secs(30),
        authority,
        kill_times: Vec::new(),
        tail: Duration::from_secs(30),
    }
}

fn arrivals(workload: &str, curve: &[(u64, u32)], seed: u64) -> Vec<RequestArrival> {
    let workload: SyntheticWorkload = workload.parse().expect("it is one");
    thinned_by_curve(workload.arrivals(&policy(None)), curve, seed)
}

fn world(
    starter: Orchestrator,
    scaling: Option<ScalingPolicy>,
    arrivals: Vec<RequestArrival>,
) -> Scenario {
    let comparison = RoutingComparison {
        fleet: FleetSpec {
            profile: starter.profile.clone(),
            prefill: 1,
            decode: 1,
            both: 0,
        },
        policy: policy(scaling.filter(|_| starter.authority == ScalingAuthority::Router)),
        adapters: None,
        noise_permille: 50,
        seed: 7,
    };
    Scenario {
        orchestrator: Some(starter),
        ..comparison.scenario(RoutingScheme::Auto, arrivals)
    }
}

fn growth(outcome: &GoodputOutcome) -> &FleetHistory {
    outcome.growth.as_ref().expect("somebody starts workers")
}

/// Limits that hold under any load.
fn check(outcome: &GoodputOutcome, scaling: &ScalingPolicy) {
    let (growth, all) = (growth(outcome), &outcome.score.all);
    assert!(growth.devices_most <= scaling.devices_max, "{growth:?}");
    assert!(
        growth.turns_most() <= scaling.turns_max as usize,
        "{growth:?}"
    );
    assert!(growth.flipped <= u64::from(scaling.turns_max), "{growth:?}");
    let late: u64 = all.late.iter().sum();
    assert_eq!(all.good + late + all.refused + all.failed, all.arrivals);
    assert_eq!(all.failed, 0, "a stream was lost: {growth:?}");
}

const CURVE: [(u64, u32); 5] = [
    (0, 100),
    (3 * MINUTE, 150),
    (9 * MINUTE, 1000),
    (12 * MINUTE, 1000),
    (17 * MINUTE, 100),
];

/// A day's load curve in twenty minutes. Existing autoscalers use queues and occupancy, so their
/// router refuses no request.
#[test]
fn scaling_meets_targets_with_fewer_devices_than_the_peak() {
    let load = arrivals("heavy-heavy,rate=8,seconds=1200,seed=3", &CURVE, 1);
    let scaling = scaling(pools(8, 8), 16);
    let most = pools(8, 8);
    let of = |name: &str, authority, first, scheme| {
        let mut scenario = world(
            starter(authority, first),
            Some(scaling.clone()),
            load.clone(),
        );
        let policy = Arc::clone(&scenario.router.policy);
        scenario.router = RoutingScheme::router_limits(scheme, &policy);
        let outcome = run(&scenario);
        let (growth, all) = (growth(&outcome), &outcome.score.all);
        println!(
            "{name}: {} of 1000 in time, {:.2} device-hours, at most {}, {} turns, p90 {:?} {:?}",
            all.attainment_permille(),
            growth.device_time.as_secs_f64() / 3600.0,
            growth.devices_most,
            growth.turns_most(),
            all.ttft.p90,
            all.tpot.p90,
        );
        outcome
    };
    let router = of(
        "by the promises",
        ScalingAuthority::Router,
        pools(1, 1),
        RoutingScheme::Auto,
    );
    let peak = of(
        "fixed for the peak",
        ScalingAuthority::Fixed,
        pools(4, 4),
        RoutingScheme::Auto,
    );
    let mean = of(
        "fixed for the mean",
        ScalingAuthority::Fixed,
        pools(2, 2),
        RoutingScheme::Auto,
    );
    let devices_max = scaling.devices_max;
    let authority = ScalingAuthority::Thresholds { most, devices_max };
    let naive = of(
        "thresholds",
        authority,
        pools(1, 1),
        RoutingScheme::LoadSplit,
    );
    check(&router, &scaling);
    let attainment = |outcome: &GoodputOutcome| outcome.score.all.attainment_permille();
    assert!(attainment(&router) >= 970, "{}", attainment(&router));
    assert!(attainment(&router) > attainment(&mean) && attainment(&router) > attainment(&naive));
    let (scaled, fixed) = (growth(&router).device_time, growth(&peak).device_time);
    assert!(scaled * 10 < fixed * 7, "{scaled:?} of {fixed:?}");
}

/// The baseline once used devices that the compared fleet may not use.
#[test]
fn threshold_scaling_keeps_the_device_limit() {
    let load = arrivals("heavy-heavy,rate=8,seconds=600,seed=3", &[(0, 1000)], 1);
    let most = |devices_max| {
        let authority = ScalingAuthority::Thresholds {
            most: pools(8, 8),
            devices_max,
        };
        let mut scenario = world(starter(authority, pools(1, 1)), None, load.clone());
        let policy = Arc::clone(&scenario.router.policy);
        scenario.router = RoutingScheme::router_limits(RoutingScheme::LoadSplit, &policy);
        growth(&run(&scenario)).devices_most
    };
    assert!(most(16) > 6, "the load asks for more than six");
    assert_eq!(most(6), 6);
}

// Invariant: I40, I41.
/// Steps, bursts, workers that die and start late, from zero workers and back: limits hold, no
/// stream is lost, and waiting requests are served.
#[test]
fn scaling_keeps_its_bounds_and_every_waiting_request() {
    for seed in 0..4 {
        let curve: &[(u64, u32)] = match seed % 4 {
            0 => &[(0, 300), (120, 300), (121, 1000), (300, 1000), (301, 0)],
            1 => &[
                (0, 100),
                (60, 100),
                (61, 1000),
                (75, 1000),
                (76, 100),
                (299, 100),
                (300, 0),
            ],
            2 => &[(0, 600), (300, 600), (301, 0)],
            _ => &[(0, 0), (100, 0), (101, 500), (300, 500), (301, 0)],
        };
        let scaling = ScalingPolicy {
            idle_after: Duration::from_secs(60),
            ..scaling(pools(5, 5), 7)
        };
        let load = arrivals(
            &format!("heavy-heavy,rate=6,seconds=300,seed={seed}"),
            curve,
            seed,
        );
        let mut starter = starter(ScalingAuthority::Router, pools(0, 0));
        starter.tail = Duration::from_secs(400);
        starter.kill_times = [150, 200].map(Duration::from_secs).into();
        let outcome = run(&world(starter, Some(scaling.clone()), load));
        check(&outcome, &scaling);
        let growth = growth(&outcome);
        let (_, last) = growth.wanted.last().expect("the first at least");
        assert_eq!(*last, pools(0, 0), "seed {seed}: nobody asks any more");
        assert_eq!(growth.killed, 2, "seed {seed}");
        let all = &outcome.score.all;
        assert!(all.refused * 2 < all.arrivals, "seed {seed}: {all:?}");
    }
}

/// First prompts take most time, then answers: idle prefill workers change to decode, and few
/// workers are started.
#[test]
fn an_idle_worker_changes_role_before_another_starts() {
    let mut load = arrivals("heavy-light,rate=8,seconds=300,seed=1", &[(0, 1000)], 1);
    let mut later = arrivals("light-heavy,rate=20,seconds=300,seed=2", &[(0, 1000)], 2);
    for arrival in &mut later {
        arrival.at = arrival.at + Duration::from_secs(300);
    }
    load.append(&mut later);
    let mut scaling = scaling(pools(6, 6), 6);
    scaling.prefill.down_after = Duration::from_secs(600);
    let outcome = run(&world(
        starter(ScalingAuthority::Router, pools(3, 1)),
        Some(scaling.clone()),
        load,
    ));
    check(&outcome, &scaling);
    let growth = growth(&outcome);
    assert!(growth.flipped > 0, "{growth:?}");
}

// Invariant: I42.
#[test]
fn two_routers_agree_on_the_fleet() {
    let curve = [(0, 200), (100, 200), (101, 1000), (300, 1000)];
    let load = arrivals("heavy-heavy,rate=6,seconds=300,seed=5", &curve, 5);
    let scaling = scaling(pools(5, 5), 10);
    let mut scenario = world(
        starter(ScalingAuthority::Router, pools(1, 1)),
        Some(scaling.clone()),
        load,
    );
    scenario.routers_count = 2;
    let outcome = run(&scenario);
    check(&outcome, &scaling);
    let growth = growth(&outcome);
    assert_eq!(growth.last[0].wanted.workers, growth.last[1].wanted.workers);
    assert!(growth.disputed * 20 < growth.looks, "{growth:?}");
    let (_, most) = growth
        .wanted
        .iter()
        .max_by_key(|(_, w)| w.total())
        .expect("some");
    assert!(most.total() > 4, "each saw half of the load: {most:?}");
}
