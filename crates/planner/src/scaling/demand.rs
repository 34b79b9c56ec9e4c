//! Demand of the fleet, and the workers that it takes.
//!
//! Owns: the way from the sum of all routers' demand to the momentary need of each leg. Never:
//! delays or bounds a need. Invariant: while there is demand, at least one worker of each leg is
//! needed.

use super::ScalerDecision;
use super::ScalerFleet;
use super::bounds::{self, POOLS};
use super::need::{self, LegTargets, Traffic};
use super::need_history::WorkersNeeded;
use super::scaler::{LegNeeds, Scaler, pool_index};
use cleave_domain::{FleetDemand, PoolCounts, Role, ScalingReason, SloOutcomes};
use std::time::Duration;

/// Seconds within which waiting requests are to be served, beside new ones.
const BACKLOG_SECONDS: f64 = 30.0;
/// Margin for shrinking: a smaller fleet must suffice for this multiple of the load.
const DOWN_MARGIN: f64 = 1.1;
/// A class with less than one part in this many of the requests does not tighten the targets.
const CLASS_SHARE_PARTS: u128 = 20;
/// Output tokens of a request before any answer was seen.
const OUTPUT_TOKENS_DEFAULT: f64 = 256.0;

impl Scaler {
    fn traffic(&self, demand: &FleetDemand) -> Traffic {
        let slow = &demand.slow;
        let age = self.now.since(self.started_at).as_secs_f64().max(1.0);
        let span = |most: Duration| most.as_secs_f64().min(age);
        let arrivals = slow.arrivals.max(1) as f64;
        let quick = demand.quick.arrivals as f64;
        // The lower bound of a short time's rate, so that chance alone starts no worker.
        let sure = (1.0 - (2.0 / quick.max(2.0)).sqrt()) * quick / span(FleetDemand::QUICK);
        let steady = slow.arrivals as f64 / span(FleetDemand::SLOW);
        let mut rate = steady.max(sure) * self.trends.forecast_growth();
        // While workers are still starting, the backlog is already accounted for.
        if self.missing() == 0 {
            rate += f64::from(demand.waiting) / BACKLOG_SECONDS;
        }
        let prompt = slow.prompt_tokens as f64 / arrivals;
        let cached = slow.cached_tokens as f64 / slow.placed.max(1) as f64;
        let cached = cached.min(prompt);
        let share = cached / prompt.max(1.0);
        Traffic {
            rate,
            prompt,
            fresh: (prompt - cached).max(1.0),
            pairs: slow.pairs as f64 / arrivals * (1.0 - share * share),
            output: self.trends.output(OUTPUT_TOKENS_DEFAULT),
        }
    }

    /// The tightest targets of the classes with a sufficient share.
    fn aims(&self, demand: &FleetDemand) -> LegTargets {
        // Reports of other routers may hold any number, hence 128 bits.
        let arrivals = |outcomes: &SloOutcomes| u128::from(outcomes.arrivals);
        let all: u128 = demand.classes.iter().map(arrivals).sum();
        let mut aims = LegTargets::default();
        for (class, outcomes) in self.policy.classes.iter().zip(&demand.classes) {
            if outcomes.arrivals == 0 || arrivals(outcomes) * CLASS_SHARE_PARTS < all {
                continue;
            }
            let tighter =
                |one: Option<Duration>, other: Option<Duration>| one.into_iter().chain(other).min();
            aims.ttft = tighter(aims.ttft, class.ttft.or(class.e2e));
            aims.tpot = tighter(aims.tpot, class.tpot);
            aims.goal_permille = aims.goal_permille.max(class.attainment_permille);
        }
        aims
    }

    pub(super) fn needs(&mut self, demand: &FleetDemand) -> (LegNeeds, ScalerDecision) {
        let classes = self.policy.classes.iter();
        let goals: Vec<u32> = classes.map(|class| class.attainment_permille).collect();
        self.trends.learn(self.now, demand, &goals);
        let traffic = self.traffic(demand);
        let aims = self.aims(demand);
        let fuller = Traffic {
            rate: traffic.rate * DOWN_MARGIN,
            ..traffic
        };
        let (up, loads) = self.legs(&traffic, &aims);
        let (down, _) = self.legs(&fuller, &aims);
        let mut needs = LegNeeds::default();
        let idle = self.now.since(self.last_demand_at) >= self.scaling.idle_after;
        needs.is_idle = idle;
        for role in POOLS {
            let i = pool_index(role);
            let least = if idle { 0 } else { self.least(role, down) };
            let up = if idle {
                0
            } else {
                up.for_role(role).max(least)
            };
            let down = if idle { 0 } else { down.for_role(role).max(up) };
            needs.legs[i] = WorkersNeeded { up, down };
            needs.reasons[i] = self.reason(role, demand, idle);
        }
        self.hold_memory(&mut needs);
        let decision = ScalerDecision {
            wanted: self.target,
            own: true,
            first: false,
            rate: round_to_hundredths(traffic.rate),
            prefill_load: round_to_hundredths(loads.0),
            decode_load: round_to_hundredths(loads.1),
            waiting: demand.waiting,
            starting: self.missing(),
        };
        (needs, decision)
    }

    fn reason(&self, role: Role, demand: &FleetDemand, idle: bool) -> ScalingReason {
        match role {
            _ if idle => ScalingReason::Idle,
            _ if demand.waiting > 0 && self.fleet.members.is_empty() => ScalingReason::First,
            Role::Prefill | Role::Decode if self.trends.correction(role) > 1.0 => {
                ScalingReason::Missed
            }
            Role::Decode => ScalingReason::Streams,
            Role::Prefill | Role::Both => ScalingReason::Prompts,
        }
    }

    /// At least one worker of each leg while there is demand; a single mixed one where that is
    /// enough.
    pub(super) fn least(&self, role: Role, needed: PoolCounts) -> u32 {
        let split = self.scaling.prefill.max > 0 && self.scaling.decode.max > 0;
        let whole = !split || (self.scaling.both.max > 0 && needed.prefill + needed.decode == 0);
        u32::from(whole == (role == Role::Both))
    }

    /// Workers of each leg for this traffic, and the load of prompts and of streams in workers.
    fn legs(&self, traffic: &Traffic, aims: &LegTargets) -> (PoolCounts, (f64, f64)) {
        let any_leg = self.prefill.as_ref().or(self.decode.as_ref());
        let Some(prefill) = any_leg else {
            return (PoolCounts::default(), (0.0, 0.0));
        };
        let decode = self.decode.as_ref().unwrap_or(prefill);
        let factor = |role| self.trends.correction(role);
        let work = need::prompt_work(traffic, &prefill.0, &prefill.1) * factor(Role::Prefill);
        let servers = need::prefill_workers(traffic, aims, prefill, factor(Role::Prefill));
        let streams = need::decode_workers(traffic, aims, decode, factor(Role::Decode));
        let all = need::mixed_workers_for(work, streams);
        let scaling = &self.scaling;
        let split = scaling.prefill.max > 0 && scaling.decode.max > 0;
        let whole = scaling.both.max > 0 && (!split || (all <= 1.0 && servers <= 1));
        let mut legs = PoolCounts::default();
        if whole {
            legs.both = need::round_up(all).max(if split { 0 } else { servers });
        } else {
            (legs.prefill, legs.decode) = (servers, need::round_up(streams));
            // Workers beyond the limits of the split pools go to the mixed pool.
            let over = |role: Role| legs.for_role(role).saturating_sub(scaling.pool(role).max);
            legs.both = if bounds::can_flip(scaling) {
                0
            } else {
                over(Role::Prefill) + over(Role::Decode)
            };
        }
        (legs, (work, streams))
    }

    /// Raises the need of decode workers to those whose memory the present streams occupy.
    fn hold_memory(&self, needs: &mut LegNeeds) {
        let Some((_, capacity)) = &self.decode else {
            return;
        };
        let held = need::round_up(need::workers_for_memory(
            self.fleet.context_tokens,
            capacity,
        ));
        let split = self.scaling.prefill.max > 0 && self.scaling.decode.max > 0;
        let role = if split { Role::Decode } else { Role::Both };
        let need = &mut needs.legs[pool_index(role)];
        let there = if split { mixed_workers(&self.fleet) } else { 0 };
        let held = held.saturating_sub(there);
        if held > need.up {
            needs.reasons[pool_index(role)] = ScalingReason::Memory;
        }
        need.up = need.up.max(held);
        need.down = need.down.max(held);
    }
}

/// Workers of the mixed pool, which hold streams too.
fn mixed_workers(fleet: &ScalerFleet) -> u32 {
    let both = fleet.members.iter().filter(|m| m.role == Role::Both);
    both.count() as u32
}

/// To hundredths, so that a negligible change does not produce a new answer.
fn round_to_hundredths(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::super::ScalerMember;
    use super::super::bounds::tests::counts;
    use super::super::need::tests::{aims, traffic, worker};
    use super::*;
    use cleave_domain::{
        FleetTarget, PoolScaling, RequestFlow, RouterId, ScalingPolicy, SloClass, SloPolicy, Time,
        WorkerId,
    };
    use std::sync::Arc;

    fn at(second: u64) -> Time {
        Time::from_nanos(second * 1_000_000_000)
    }

    /// Pools of at most so many workers.
    fn scaling(prefill: u32, decode: u32, both: u32) -> ScalingPolicy {
        let pool = |role, max| PoolScaling {
            max,
            ..PoolScaling::absent(role)
        };
        ScalingPolicy {
            prefill: pool(Role::Prefill, prefill),
            decode: pool(Role::Decode, decode),
            both: pool(Role::Both, both),
            ..ScalingPolicy::new(99)
        }
    }

    fn scaler(scaling: ScalingPolicy, second: u64) -> Scaler {
        let mut scaler = Scaler::new(RouterId(1), at(0), scaling, Arc::default());
        scaler.now = at(second);
        (scaler.prefill, scaler.decode) = (Some(worker()), Some(worker()));
        scaler
    }

    fn member(number: u64, role: Role) -> ScalerMember {
        ScalerMember {
            worker: WorkerId(number),
            role,
            home_role: role,
            leaving: false,
            busy_tokens: 0,
        }
    }

    fn demand() -> FleetDemand {
        FleetDemand {
            slow: RequestFlow {
                arrivals: 120,
                prompt_tokens: 120_000,
                pairs: 60_000_000,
                placed: 60,
                cached_tokens: 30_000,
                ..RequestFlow::default()
            },
            quick: RequestFlow {
                arrivals: 8,
                ..RequestFlow::default()
            },
            ..FleetDemand::default()
        }
    }

    #[test]
    fn traffic_is_the_mean_of_arrivals() {
        let traffic = scaler(scaling(8, 8, 0), 100).traffic(&demand());
        let expected = Traffic {
            rate: 2.0,
            prompt: 1000.0,
            // Half of what was placed was cached.
            fresh: 500.0,
            // The cached half of a prompt has a quarter of its pairs.
            pairs: 375_000.0,
            output: OUTPUT_TOKENS_DEFAULT,
        };
        assert_eq!(traffic, expected);
    }

    #[test]
    fn a_rate_is_counted_over_the_time_a_router_has_lived() {
        let rate = |second, demand: &FleetDemand| {
            let scaler = scaler(scaling(8, 8, 0), second);
            scaler.traffic(demand).rate
        };
        assert_eq!([rate(10, &demand()), rate(0, &demand())], [12.0, 120.0]);
        assert_eq!([rate(60, &demand()), rate(600, &demand())], [2.0, 2.0]);
        let rising = FleetDemand {
            quick: RequestFlow {
                arrivals: 128,
                ..RequestFlow::default()
            },
            ..demand()
        };
        // Of 128 in 15 s an eighth may be chance.
        assert_eq!(rate(100, &rising), 112.0 / 15.0);
    }

    #[test]
    fn a_queue_adds_to_the_rate_unless_workers_are_missing() {
        let waiting = FleetDemand {
            waiting: 60,
            ..demand()
        };
        let mut scaler = scaler(scaling(8, 8, 0), 100);
        assert_eq!(scaler.traffic(&waiting).rate, 2.0 + 60.0 / 30.0);
        scaler.target.workers = counts(1, 0, 0);
        assert_eq!(scaler.traffic(&waiting).rate, 2.0);
    }

    #[test]
    fn no_more_of_a_prompt_is_cached_than_there_is() {
        let mut whole = demand();
        whole.slow.cached_tokens = 600_000;
        let traffic = scaler(scaling(8, 8, 0), 100).traffic(&whole);
        assert_eq!((traffic.fresh, traffic.pairs), (1.0, 0.0));
        let none = scaler(scaling(8, 8, 0), 100).traffic(&FleetDemand::default());
        assert_eq!((none.rate, none.prompt, none.pairs), (0.0, 0.0, 0.0));
    }

    #[test]
    fn classes_with_a_share_decide_the_tightest_targets() {
        let millis = |millis| Some(Duration::from_millis(millis));
        let class = |ttft, e2e, tpot, attainment_permille| SloClass {
            ttft,
            e2e,
            tpot,
            attainment_permille,
            ..SloClass::default()
        };
        let mut scaler = scaler(scaling(8, 8, 0), 100);
        scaler.policy = Arc::new(SloPolicy {
            classes: vec![
                class(millis(2000), millis(500), None, 900),
                class(None, millis(1000), millis(50), 990),
                class(millis(10), None, millis(5), 999),
            ],
            ..SloPolicy::default()
        });
        let of = |arrivals: [u64; 3]| {
            let outcomes = |arrivals| SloOutcomes {
                arrivals,
                ..SloOutcomes::default()
            };
            let classes = arrivals.map(outcomes).to_vec();
            let aims = scaler.aims(&FleetDemand {
                classes,
                ..FleetDemand::default()
            });
            (aims.ttft, aims.tpot, aims.goal_permille)
        };
        // One of twenty is a share.
        assert_eq!(of([110, 6, 4]), (millis(1000), millis(50), 990));
        assert_eq!(of([110, 5, 5]), (millis(2000), None, 900));
        assert_eq!(of([0, 0, 1]), (millis(10), millis(5), 999));
        assert_eq!(of([0, 0, 0]), (None, None, 0));
    }

    #[test]
    fn each_leg_gets_the_workers_of_its_formula() {
        let of = |scaling: ScalingPolicy, rate| {
            let scaler = scaler(scaling, 100);
            scaler.legs(&traffic(rate), &aims(3000, 20)).0
        };
        assert_eq!(of(scaling(8, 8, 0), 20.0), counts(3, 2, 0));
        assert_eq!(of(scaling(8, 8, 0), 2.0), counts(1, 1, 0));
        // One that does both is enough, or it is not.
        assert_eq!(of(scaling(8, 8, 8), 2.0), counts(0, 0, 1));
        assert_eq!(of(scaling(8, 8, 8), 20.0), counts(3, 2, 0));
        assert_eq!(of(scaling(0, 0, 8), 20.0), counts(0, 0, 4));
        assert_eq!(of(scaling(0, 8, 8), 20.0), counts(0, 0, 4));
        assert_eq!(of(scaling(8, 0, 8), 20.0), counts(0, 0, 4));
        // The others take what pools without flips may not have.
        let mut fixed = scaling(1, 1, 8);
        fixed.flip = false;
        assert_eq!(of(fixed, 20.0), counts(3, 2, 3));
        assert_eq!(of(scaling(1, 1, 8), 20.0), counts(3, 2, 0));
    }

    #[test]
    fn loads_are_real_numbers() {
        let mut scaler = scaler(scaling(8, 8, 0), 100);
        let (_, loads) = scaler.legs(&traffic(20.0), &aims(3000, 20));
        assert_eq!(
            (round_to_hundredths(loads.0), round_to_hundredths(loads.1)),
            (2.1, 1.13)
        );
        // One leg's costs are those of the other as long as they are not known.
        scaler.decode = None;
        assert_eq!(scaler.legs(&traffic(20.0), &aims(3000, 20)).1, loads);
        (scaler.decode, scaler.prefill) = (scaler.prefill.take(), None);
        assert_eq!(scaler.legs(&traffic(20.0), &aims(3000, 20)).1, loads);
        scaler.decode = None;
        let unknown = scaler.legs(&traffic(20.0), &aims(3000, 20));
        assert_eq!(unknown, (counts(0, 0, 0), (0.0, 0.0)));
    }

    #[test]
    fn a_tight_target_takes_more_servers_that_do_both() {
        let scaler = scaler(scaling(0, 0, 8), 100);
        let tight = LegTargets {
            goal_permille: 999,
            ..aims(1, 20)
        };
        let (legs, _) = scaler.legs(&traffic(20.0), &tight);
        let servers = need::prefill_workers(&traffic(20.0), &tight, &worker(), 1.0);
        assert!(servers > 4, "{servers}");
        assert_eq!(legs, counts(0, 0, servers));
    }

    #[test]
    fn one_worker_of_each_leg_is_the_least() {
        let of = |scaling: ScalingPolicy, needed| {
            let scaler = scaler(scaling, 100);
            POOLS.map(|role| scaler.least(role, needed))
        };
        let none = counts(0, 0, 0);
        assert_eq!(of(scaling(8, 8, 0), none), [1, 1, 0]);
        assert_eq!(of(scaling(8, 8, 8), none), [0, 0, 1]);
        assert_eq!(of(scaling(8, 8, 8), counts(1, 1, 0)), [1, 1, 0]);
        assert_eq!(of(scaling(0, 8, 8), counts(1, 1, 0)), [0, 0, 1]);
        assert_eq!(of(scaling(8, 0, 8), none), [0, 0, 1]);
    }

    #[test]
    fn a_reason_names_the_load_of_its_leg() {
        let mut scaler = scaler(scaling(8, 8, 0), 100);
        let waiting = FleetDemand {
            waiting: 1,
            ..FleetDemand::default()
        };
        let quiet = FleetDemand::default();
        let of = |scaler: &Scaler, demand| POOLS.map(|role| scaler.reason(role, demand, false));
        assert_eq!(of(&scaler, &waiting), [ScalingReason::First; 3]);
        let usual = [
            ScalingReason::Prompts,
            ScalingReason::Streams,
            ScalingReason::Prompts,
        ];
        assert_eq!(of(&scaler, &quiet), usual);
        scaler.fleet.members = vec![member(1, Role::Prefill)];
        assert_eq!(of(&scaler, &waiting), usual);
        let idle = scaler.reason(Role::Decode, &waiting, true);
        assert_eq!(idle, ScalingReason::Idle);
        let missed = FleetDemand {
            classes: vec![SloOutcomes {
                judged: 100,
                missed_decode: 100,
                ..SloOutcomes::default()
            }],
            ..FleetDemand::default()
        };
        scaler.trends.learn(at(100), &missed, &[900]);
        let [prefill, decode, both] = of(&scaler, &waiting);
        assert_eq!([prefill, both], [ScalingReason::Prompts; 2]);
        assert_eq!(decode, ScalingReason::Missed);
    }

    #[test]
    fn streams_hold_as_many_workers_as_their_tokens_take() {
        let held = |scaling: ScalingPolicy, context_tokens, both: u64| {
            let mut scaler = scaler(scaling, 100);
            scaler.fleet.context_tokens = context_tokens;
            let others = [member(90, Role::Decode), member(91, Role::Prefill)];
            let both = (0..both).map(|number| member(number, Role::Both));
            scaler.fleet.members = both.chain(others).collect();
            let mut needs = LegNeeds::default();
            needs.legs[pool_index(Role::Decode)] = WorkersNeeded { up: 2, down: 2 };
            scaler.hold_memory(&mut needs);
            let legs = needs.legs.map(|need| (need.up, need.down));
            let memory = needs.reasons.map(|reason| reason == ScalingReason::Memory);
            (legs, memory)
        };
        // A worker holds 144,000 tokens as planned.
        let of_decode = |count, memory| ([(0, 0), (count, count), (0, 0)], [false, memory, false]);
        assert_eq!(held(scaling(8, 8, 0), 288_000, 0), of_decode(2, false));
        assert_eq!(held(scaling(8, 8, 0), 288_001, 0), of_decode(3, true));
        assert_eq!(held(scaling(8, 8, 8), 432_001, 1), of_decode(3, true));
        assert_eq!(held(scaling(8, 8, 8), 432_001, 2), of_decode(2, false));
        let of_both = ([(0, 0), (2, 2), (3, 3)], [false, false, true]);
        assert_eq!(held(scaling(0, 0, 8), 288_001, 3), of_both);
        assert_eq!(held(scaling(8, 0, 8), 288_001, 3), of_both);
    }

    #[test]
    fn an_idle_fleet_needs_none_and_a_busy_one_a_tenth_more() {
        let mut scaler = scaler(scaling(8, 8, 0), 599);
        scaler.last_demand_at = at(0);
        let (needs, decision) = scaler.needs(&demand());
        assert_eq!(needs.legs[..2], [WorkersNeeded { up: 1, down: 1 }; 2]);
        // 2 in a second, of 500 tokens and 256 tokens of answer.
        assert_eq!((decision.rate, decision.own), (2.0, true));
        assert_eq!(decision.prefill_load, 0.1);
        scaler.now = at(600);
        let (needs, _) = scaler.needs(&demand());
        assert_eq!(needs.legs, [WorkersNeeded::default(); 3]);
        assert_eq!(needs.reasons, [ScalingReason::Idle; 3]);
        scaler.last_demand_at = scaler.now;
        let mut busy = demand();
        busy.slow.arrivals = 1380;
        busy.slow.prompt_tokens = 1_380_000;
        busy.slow.cached_tokens = 0;
        let (needs, decision) = scaler.needs(&busy);
        // 23 in a second take 2.41 workers, a tenth more takes 2.65: three are busy for 0.85 at
        // most.
        assert_eq!((decision.rate, decision.prefill_load), (23.0, 2.41));
        assert_eq!(needs.legs[0], WorkersNeeded { up: 3, down: 4 });
        assert_eq!(decision.decode_load, 1.31);
    }

    #[test]
    fn a_decision_counts_waiting_requests_and_missing_workers() {
        let mut scaler = scaler(scaling(8, 8, 0), 100);
        scaler.last_demand_at = scaler.now;
        scaler.target = FleetTarget {
            workers: counts(2, 3, 0),
            ..FleetTarget::default()
        };
        scaler.fleet.members = vec![member(1, Role::Prefill)];
        let waiting = FleetDemand {
            waiting: 7,
            ..demand()
        };
        let (_, decision) = scaler.needs(&waiting);
        assert_eq!((decision.waiting, decision.starting), (7, 4));
        assert_eq!(decision.wanted, scaler.target);
        assert_eq!(
            [round_to_hundredths(2.344), round_to_hundredths(2.346)],
            [2.34, 2.35]
        );
    }
}
