//! Tests of single choices of the scaler: which worker changes its leg, which leg lends or is
//! supplied, what bounds leave, and whose word counts.

use super::*;
use cleave_domain::{PoolScaling, SloClass};

fn at(second: u64) -> Time {
    Time::from_nanos(second * 1_000_000_000)
}

fn counts(prefill: u32, decode: u32) -> PoolCounts {
    PoolCounts {
        prefill,
        decode,
        both: 0,
    }
}

fn target(workers: PoolCounts, legs: PoolCounts) -> FleetTarget {
    FleetTarget {
        workers,
        legs,
        ..FleetTarget::default()
    }
}

fn scaling(max: u32, devices_max: u32) -> ScalingPolicy {
    let pool = |role| PoolScaling {
        max,
        ..PoolScaling::absent(role)
    };
    ScalingPolicy {
        prefill: pool(Role::Prefill),
        decode: pool(Role::Decode),
        ..ScalingPolicy::new(devices_max)
    }
}

fn scaler() -> Scaler {
    Scaler::new(RouterId(5), at(0), scaling(8, 10), Arc::default())
}

fn member(number: u64, role: Role, home: Role, busy_tokens: u64) -> ScalerMember {
    ScalerMember {
        worker: WorkerId(number),
        role,
        home_role: home,
        leaving: false,
        busy_tokens,
    }
}

/// Workers that serve the leg they were started for, the first ones the busiest.
fn members(prefill: u64, decode: u64) -> Vec<ScalerMember> {
    let of = |number| {
        let first = number < prefill;
        let role = if first { Role::Prefill } else { Role::Decode };
        member(number, role, role, 100 - number)
    };
    (0..prefill + decode).map(of).collect()
}

/// The worker that changes its leg, if one does.
fn flipped(
    workers: PoolCounts,
    legs: PoolCounts,
    members: Vec<ScalerMember>,
) -> Option<(u64, Role)> {
    let mut scaler = scaler();
    scaler.target = target(workers, legs);
    scaler.fleet.members = members;
    scaler.flip_one_worker();
    let ScalerOutput::Flip { worker, role } = scaler.poll()? else {
        panic!("nothing else is said");
    };
    assert_eq!(scaler.flips.count(at(0)), 1);
    let changed = scaler.fleet.members.iter().find(|m| m.worker == worker);
    assert_eq!(changed.map(|member| member.role), Some(role));
    assert_eq!(scaler.poll(), None, "one at a time");
    Some((worker.0, role))
}

#[test]
fn the_least_busy_worker_of_the_larger_leg_changes_it() {
    let to_decode = flipped(counts(3, 1), counts(2, 2), members(3, 1));
    assert_eq!(to_decode, Some((2, Role::Decode)));
    let to_prefill = flipped(counts(1, 3), counts(2, 2), members(1, 3));
    assert_eq!(to_prefill, Some((3, Role::Prefill)));
}

#[test]
fn a_worker_flips_back_before_another_flips() {
    let mut there = members(3, 1);
    there[0].home_role = Role::Decode;
    let back = flipped(counts(2, 2), counts(2, 2), there);
    assert_eq!(back, Some((0, Role::Decode)));
}

#[test]
fn no_worker_changes_a_leg_that_is_large_enough() {
    assert_eq!(flipped(counts(3, 2), counts(2, 2), members(3, 2)), None);
    // Another one is about to start for that leg.
    assert_eq!(flipped(counts(3, 2), counts(2, 2), members(3, 1)), None);
    // The other leg has none to give.
    assert_eq!(flipped(counts(2, 1), counts(2, 2), members(2, 1)), None);
    assert_eq!(flipped(counts(1, 1), counts(0, 2), members(1, 1)), None);
}

#[test]
fn leaving_workers_are_neither_counted_nor_chosen() {
    let mut there = members(3, 1);
    there[2].leaving = true;
    assert_eq!(
        flipped(counts(3, 1), counts(2, 2), there.clone()),
        None,
        "two are left"
    );
    there.push(member(9, Role::Prefill, Role::Prefill, 500));
    let chosen = flipped(counts(3, 1), counts(2, 2), there);
    assert_eq!(chosen, Some((1, Role::Decode)));
    let mut mixed = members(3, 1);
    mixed[2].home_role = Role::Both;
    let chosen = flipped(counts(3, 1), counts(2, 2), mixed);
    assert_eq!(chosen, Some((1, Role::Decode)), "one for both stays");
}

#[test]
fn no_worker_changes_its_leg_once_the_hour_is_used_up() {
    let mut scaler = scaler();
    scaler.scaling.turns_max = 2;
    scaler.target = target(counts(5, 1), counts(2, 4));
    scaler.fleet.members = members(5, 1);
    assert_eq!(scaler.flips_left(), 2);
    for _ in 0..3 {
        scaler.flip_one_worker();
    }
    assert_eq!((scaler.outputs.len(), scaler.flips_left()), (2, 0));
}

#[test]
fn a_leg_gives_up_workers_it_did_not_need_for_a_while() {
    let legs_after = |turns_max, seconds, legs| {
        let mut scaler = scaler();
        scaler.scaling.turns_max = turns_max;
        scaler.now = at(seconds);
        scaler.target.legs = counts(4, 2);
        let need = WorkersNeeded { up: 2, down: 2 };
        let keep = Duration::from_secs(600);
        scaler.steady[pool_index(Role::Prefill)].record(at(0), need, keep);
        let mut legs = legs;
        scaler.take_from_spare_leg(&mut legs);
        legs
    };
    assert_eq!(legs_after(6, 60, counts(4, 3)), counts(3, 3));
    assert_eq!(
        legs_after(6, 60, counts(4, 7)),
        counts(2, 7),
        "two are to spare"
    );
    assert_eq!(legs_after(6, 60, counts(4, 2)), counts(4, 2));
    assert_eq!(
        legs_after(6, 59, counts(4, 3)),
        counts(4, 3),
        "for too short"
    );
    assert_eq!(legs_after(0, 60, counts(4, 3)), counts(4, 3));
}

#[test]
fn the_last_worker_of_a_leg_is_not_given_up() {
    let mut scaler = scaler();
    scaler.now = at(200);
    scaler.target.legs = counts(1, 1);
    scaler.steady[0].record(at(0), WorkersNeeded::default(), Duration::from_secs(600));
    let mut legs = counts(2, 5);
    scaler.take_from_spare_leg(&mut legs);
    assert_eq!(legs, counts(1, 5));
}

#[test]
fn a_leg_is_supplied_where_no_worker_may_change_it() {
    let supplied = |turns_max, devices_max, legs, there: Vec<ScalerMember>, before| {
        let mut scaler = scaler();
        scaler.scaling = scaling(8, devices_max);
        scaler.scaling.turns_max = turns_max;
        scaler.fleet.members = there;
        let mut workers = before;
        scaler.start_for_short_leg(&legs, &mut workers);
        workers
    };
    let legs = counts(2, 4);
    let before = counts(3, 3);
    assert_eq!(supplied(0, 10, legs, members(3, 3), before), counts(3, 4));
    assert_eq!(supplied(1, 10, legs, members(3, 3), before), before);
    assert_eq!(supplied(0, 6, legs, members(3, 3), before), before);
    // It starts already.
    let starts = counts(3, 4);
    assert_eq!(supplied(0, 10, legs, members(3, 3), starts), starts);
    // A worker of the other pool serves it.
    let mut there = members(3, 3);
    there[0].role = Role::Decode;
    assert_eq!(supplied(0, 10, legs, there.clone(), before), before);
    there[0].leaving = true;
    assert_eq!(supplied(0, 10, legs, there, before), counts(3, 4));
    let most = supplied(0, 99, counts(2, 20), members(3, 3), before);
    assert_eq!(most, counts(3, 8));
    let prefill = supplied(0, 10, counts(5, 3), members(3, 3), before);
    assert_eq!(prefill, counts(5, 3));
}

#[test]
fn a_target_above_a_limit_is_cut_with_its_reason() {
    let fit = |scaling: ScalingPolicy, legs| {
        let mut scaler = scaler();
        scaler.scaling = scaling;
        let mut answer = target(PoolCounts::default(), legs);
        scaler.fit(&mut answer);
        let reasons = [answer.reasons.prefill, answer.reasons.decode];
        (answer.workers, answer.legs, reasons)
    };
    let none = ScalingReason::default();
    let (cut, bounds) = (ScalingReason::Devices, ScalingReason::Bounds);
    let same = |counts, reasons| (counts, counts, reasons);
    assert_eq!(
        fit(scaling(8, 10), counts(6, 6)),
        same(counts(5, 5), [cut; 2])
    );
    assert_eq!(
        fit(scaling(8, 10), counts(4, 6)),
        same(counts(4, 6), [none; 2])
    );
    let fixed = ScalingPolicy {
        flip: false,
        ..scaling(3, 10)
    };
    assert_eq!(fit(fixed, counts(2, 9)), same(counts(2, 3), [none, bounds]));
}

#[test]
fn a_pool_that_turned_too_often_is_held() {
    let mut scaler = scaler();
    scaler.scaling.turns_max = 1;
    scaler.target = target(counts(2, 2), counts(2, 2));
    scaler.turns[pool_index(Role::Prefill)].record_change(at(0), true);
    let mut answer = target(PoolCounts::default(), counts(1, 1));
    scaler.fit(&mut answer);
    assert_eq!(answer.workers, counts(2, 1));
    assert_eq!(answer.reasons.prefill, ScalingReason::Turns);
    assert_eq!(answer.reasons.decode, ScalingReason::default());
    assert_eq!(scaler.turns[pool_index(Role::Decode)].count(at(0)), 0);
}

#[test]
fn growth_waits_for_devices_of_a_pool_that_is_held() {
    let mut scaler = scaler();
    scaler.scaling.flip = false;
    scaler.scaling.turns_max = 1;
    scaler.target = target(counts(6, 2), counts(6, 2));
    scaler.turns[pool_index(Role::Prefill)].record_change(at(0), true);
    let mut answer = target(PoolCounts::default(), counts(2, 7));
    scaler.fit(&mut answer);
    assert_eq!(answer.workers, counts(6, 4), "ten devices");
    assert_eq!(answer.reasons.prefill, ScalingReason::Turns);
    assert_eq!(answer.reasons.decode, ScalingReason::Devices);
}

#[test]
fn a_target_within_bounds_is_unchanged() {
    let narrow = |min| {
        let mut scaling = scaling(8, 10);
        (scaling.prefill.min, scaling.decode.min) = (min, min);
        scaling
    };
    let odd = target(counts(1, 1), counts(5, 4));
    assert_eq!(bounded(&odd, &narrow(0)), odd);
    assert_eq!(bounded(&odd, &narrow(1)), odd);
    let raised = bounded(&target(counts(1, 1), counts(1, 1)), &narrow(2));
    assert_eq!(raised, target(counts(2, 2), counts(2, 2)));
    let cut = bounded(&target(counts(9, 1), counts(1, 1)), &narrow(0));
    assert_eq!(cut, target(counts(1, 1), counts(1, 1)));
    let devices = bounded(&target(counts(8, 8), counts(8, 8)), &narrow(0));
    assert_eq!(devices, target(counts(5, 5), counts(5, 5)));
}

#[test]
fn the_scaler_is_due_each_second_and_at_a_first_request() {
    let mut scaler = scaler();
    assert_eq!(scaler.deadline(), at(0));
    let stands = || {
        ScalerInput::FleetChanged(ScalerFleet {
            members: members(1, 1),
            ..ScalerFleet::default()
        })
    };
    let arrived = || ScalerInput::Arrived {
        class: String::new(),
        prompt_tokens: 10,
    };
    scaler.handle(at(3), stands());
    assert_eq!(scaler.deadline(), at(4));
    scaler.handle(at(3), arrived());
    assert_eq!(scaler.deadline(), at(4), "there are workers");
    scaler.handle(at(4), ScalerInput::FleetChanged(ScalerFleet::default()));
    assert_eq!(scaler.deadline(), at(5));
    scaler.handle(Time::from_nanos(4_500_000_000), arrived());
    assert_eq!(scaler.deadline(), Time::from_nanos(4_500_000_000));
}

#[test]
fn the_latest_gossip_of_each_router_counts() {
    let mut scaler = scaler();
    let gossip = |router, number, waiting| {
        let demand = FleetDemand {
            waiting,
            ..FleetDemand::default()
        };
        ScalerInput::GossipReceived(Arc::new(ScalingGossip {
            router: RouterId(router),
            number,
            demand,
            ..ScalingGossip::default()
        }))
    };
    let messages = [(7, 2, 1), (7, 1, 2), (7, 2, 3), (5, 9, 4), (8, 1, 5)];
    for (router, number, waiting) in messages {
        scaler.handle(at(1), gossip(router, number, waiting));
    }
    let latest = |scaler: &Scaler| {
        let others = scaler.peer_routers.values();
        let latest = others.map(|(_, gossip)| (gossip.router.0, gossip.demand.waiting));
        latest.collect::<Vec<_>>()
    };
    assert_eq!(latest(&scaler), [(7, 1), (8, 5)]);
    scaler.handle(at(2), gossip(7, 3, 6));
    assert_eq!(latest(&scaler), [(7, 6), (8, 5)]);
    scaler.handle(at(6), ScalerInput::FleetChanged(ScalerFleet::default()));
    assert_eq!(latest(&scaler), [(7, 6), (8, 5)], "silent for five seconds");
    scaler.handle(at(7), ScalerInput::FleetChanged(ScalerFleet::default()));
    assert_eq!(latest(&scaler), [(7, 6)]);
}

#[test]
fn requests_are_judged_again_a_minute_after_a_shortage() {
    let judged = |short_at, second| {
        let mut scaler = scaler();
        scaler.last_short_at = short_at;
        let ended = ScalerInput::Ended {
            class: String::new(),
            outcome: PromiseOutcome::Met,
            output_tokens: 0,
        };
        scaler.handle(at(second), ended);
        let demand = scaler.window.demand(at(second));
        assert_eq!(demand.slow.answers, 0, "it had no answer");
        demand.classes[0].judged
    };
    let short = Some(at(10));
    assert_eq!([judged(short, 40), judged(short, 69)], [0, 0]);
    assert_eq!([judged(short, 70), judged(None, 10)], [1, 1]);
}

#[test]
fn an_unknown_class_is_the_default_one() {
    let mut scaler = scaler();
    let class = |name: &str| SloClass {
        name: name.to_owned(),
        ..SloClass::default()
    };
    scaler.policy = Arc::new(SloPolicy {
        classes: vec![class("a"), class("b"), class("c")],
        default_class: "b".to_owned(),
        ..SloPolicy::default()
    });
    assert_eq!(
        ["c", "a", "other"].map(|name| scaler.class(name)),
        [2, 0, 1]
    );
}

#[test]
fn changed_classes_start_without_outcomes() {
    let mut scaler = scaler();
    scaler.window.arrived(at(1), 0, 10);
    let (same, policy) = (scaler.scaling.clone(), Arc::clone(&scaler.policy));
    scaler.turns[0].record(at(1));
    scaler.handle(
        at(2),
        ScalerInput::Configured(same.clone(), Arc::clone(&policy)),
    );
    assert_eq!(scaler.window.demand(at(2)).classes.len(), 1);
    assert_eq!(scaler.turns[0].count(at(2)), 1);
    let mut other = SloPolicy::clone(&policy);
    other.classes[0].attainment_permille = 999;
    scaler.handle(at(3), ScalerInput::Configured(same, Arc::new(other)));
    assert_eq!(scaler.window.demand(at(3)).classes.len(), 0);
    assert_eq!(scaler.turns[0].count(at(3)), 1);
    scaler.handle(at(4), ScalerInput::Configured(scaling(8, 9), policy));
    assert_eq!(
        (scaler.turns[0].count(at(4)), scaler.deadline()),
        (0, at(4))
    );
}

#[test]
fn workers_are_missing_from_the_pool_they_start_in() {
    let mut scaler = scaler();
    scaler.target.workers = counts(2, 3);
    let mut there = members(1, 3);
    there[0].leaving = true;
    there[1].home_role = Role::Prefill;
    scaler.fleet.members = there;
    assert_eq!(scaler.missing(), 1 + 1);
    scaler.note_missing();
    assert_eq!(scaler.last_short_at, Some(at(0)));
    let present = scaler.present_as_target();
    assert_eq!(
        (present.workers, present.legs),
        (counts(1, 2), counts(0, 3))
    );
}

#[test]
fn advice_changes_no_worker() {
    let run = |mode| {
        let mut scaler = scaler();
        scaler.scaling.mode = mode;
        scaler.target = target(counts(3, 1), counts(2, 2));
        scaler.handle(
            at(30),
            ScalerInput::FleetChanged(ScalerFleet {
                members: members(3, 1),
                waiting: 1,
                ..ScalerFleet::default()
            }),
        );
        let flips = |output: &ScalerOutput| matches!(output, ScalerOutput::Flip { .. });
        scaler.outputs.iter().filter(|output| flips(output)).count()
    };
    assert_eq!(run(ScalingMode::Act), 1);
    assert_eq!(run(ScalingMode::Advise), 0);
}

#[test]
fn gossip_holds_the_demand_and_the_target() {
    let mut scaler = scaler();
    let fleet = || ScalerFleet {
        waiting: 3,
        waiting_tokens: 700,
        open: 4,
        ..ScalerFleet::default()
    };
    let decide = |scaler: &mut Scaler, second| {
        scaler.handle(at(second), ScalerInput::FleetChanged(fleet()));
        let (Some(ScalerOutput::SendGossip(gossip)), Some(ScalerOutput::Decided(decision))) =
            (scaler.poll(), scaler.poll())
        else {
            panic!("gossip, and then a decision");
        };
        let demand = gossip.demand;
        let counts_sent = (demand.waiting, demand.waiting_tokens, demand.open);
        assert_eq!((counts_sent, decision.wanted), ((3, 700, 4), gossip.wanted));
        (gossip.number, decision.wanted.workers, decision.own)
    };
    assert_eq!(decide(&mut scaler, 20), (1, counts(1, 1), true));
    let other = ScalingGossip {
        router: RouterId(2),
        number: 1,
        wanted: target(counts(3, 2), counts(3, 2)),
        ..ScalingGossip::default()
    };
    scaler.handle(at(21), ScalerInput::GossipReceived(Arc::new(other)));
    assert_eq!(decide(&mut scaler, 21), (2, counts(3, 2), false));
}
