//! What is asked of the fleet, and what that takes.
//!
//! Owns: the way from everybody's demand to what each leg needs at this moment. Never: holds or bounds
//! anything. Invariant: as long as anybody asks, one worker of each leg is needed at least.

use super::Decision;
use super::Fleet;
use super::fit::{self, POOLS};
use super::need::{self, Aims, Traffic};
use super::scaler::{Needs, Scaler, index};
use super::steady::Need;
use cleave_domain::{Demand, Kept, PoolCounts, Role, ScalingReason};
use std::time::Duration;

/// Those who wait are to be served within so long, beside what comes.
const CATCH_UP: f64 = 30.0;
/// What is enough to go down to: enough for so much more than there is.
const SLACK: f64 = 1.1;
/// A class with a smaller share of the requests than this does not decide how tight promises are.
const SHARE: u128 = 20;
/// Before any answer was seen.
const OUTPUT_TOKENS: f64 = 256.0;

impl Scaler {
    fn traffic(&self, demand: &Demand) -> Traffic {
        let slow = &demand.slow;
        let age = self.now.since(self.born).as_secs_f64().max(1.0);
        let span = |most: Duration| most.as_secs_f64().min(age);
        let arrivals = slow.arrivals.max(1) as f64;
        let quick = demand.quick.arrivals as f64;
        // No more than chance leaves of a short time's count.
        let sure = (1.0 - (2.0 / quick.max(2.0)).sqrt()) * quick / span(Demand::QUICK);
        let steady = slow.arrivals as f64 / span(Demand::SLOW);
        let mut rate = steady.max(sure) * self.habits.growth();
        if self.missing() == 0 {
            rate += f64::from(demand.waiting) / CATCH_UP;
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
            output: self.habits.output(OUTPUT_TOKENS),
        }
    }

    /// The tightest promises of the classes that have a share worth it.
    fn aims(&self, demand: &Demand) -> Aims {
        // What other routers say may be any number.
        let arrivals = |kept: &Kept| u128::from(kept.arrivals);
        let all: u128 = demand.classes.iter().map(arrivals).sum();
        let mut aims = Aims::default();
        for (class, kept) in self.policy.classes.iter().zip(&demand.classes) {
            if kept.arrivals == 0 || arrivals(kept) * SHARE < all {
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

    pub(super) fn needs(&mut self, demand: &Demand) -> (Needs, Decision) {
        let classes = self.policy.classes.iter();
        let goals: Vec<u32> = classes.map(|class| class.attainment_permille).collect();
        self.habits.learn(self.now, demand, &goals);
        let traffic = self.traffic(demand);
        let aims = self.aims(demand);
        let fuller = Traffic {
            rate: traffic.rate * SLACK,
            ..traffic
        };
        let (up, loads) = self.legs(&traffic, &aims);
        let (down, _) = self.legs(&fuller, &aims);
        let mut needs = Needs::default();
        let idle = self.now.since(self.asked_at) >= self.scaling.idle_after;
        for role in POOLS {
            let i = index(role);
            let least = if idle { 0 } else { self.least(role, down) };
            let up = if idle { 0 } else { up.of(role).max(least) };
            let down = if idle { 0 } else { down.of(role).max(up) };
            needs.legs[i] = Need { up, down };
            needs.reasons[i] = self.reason(role, demand, idle);
        }
        self.hold_memory(&mut needs);
        let decision = Decision {
            wanted: self.wanted,
            own: true,
            rate: round(traffic.rate),
            prefill_load: round(loads.0),
            decode_load: round(loads.1),
            waiting: demand.waiting,
            starting: self.missing(),
        };
        (needs, decision)
    }

    fn reason(&self, role: Role, demand: &Demand, idle: bool) -> ScalingReason {
        match role {
            _ if idle => ScalingReason::Idle,
            _ if demand.waiting > 0 && self.fleet.members.is_empty() => ScalingReason::First,
            Role::Prefill | Role::Decode if self.habits.factor(role) > 1.0 => ScalingReason::Missed,
            Role::Decode => ScalingReason::Streams,
            Role::Prefill | Role::Both => ScalingReason::Prompts,
        }
    }

    /// One of each leg as long as anybody asks; where one that does both is enough, that one.
    fn least(&self, role: Role, needed: PoolCounts) -> u32 {
        let split = self.scaling.prefill.max > 0 && self.scaling.decode.max > 0;
        let whole = !split || (self.scaling.both.max > 0 && needed.prefill + needed.decode == 0);
        u32::from(whole == (role == Role::Both))
    }

    /// Workers of each leg for such traffic, and what prompts and streams take of them.
    fn legs(&self, traffic: &Traffic, aims: &Aims) -> (PoolCounts, (f64, f64)) {
        let known = self.prefill.as_ref().or(self.decode.as_ref());
        let Some(prefill) = known else {
            return (PoolCounts::default(), (0.0, 0.0));
        };
        let decode = self.decode.as_ref().unwrap_or(prefill);
        let factor = |role| self.habits.factor(role);
        let work = need::prompt_work(traffic, &prefill.0, &prefill.1) * factor(Role::Prefill);
        let servers = need::prefill(traffic, aims, prefill, factor(Role::Prefill));
        let streams = need::decode(traffic, aims, decode, factor(Role::Decode));
        let all = need::both(work, streams);
        let scaling = &self.scaling;
        let split = scaling.prefill.max > 0 && scaling.decode.max > 0;
        let whole = scaling.both.max > 0 && (!split || (all <= 1.0 && servers <= 1));
        let mut legs = PoolCounts::default();
        if whole {
            legs.both = need::whole(all).max(if split { 0 } else { servers });
        } else {
            (legs.prefill, legs.decode) = (servers, need::whole(streams));
            // What the others may not have is left to those that do both.
            let over = |role: Role| legs.of(role).saturating_sub(scaling.pool(role).max);
            legs.both = match fit::can_flip(scaling) {
                true => 0,
                false => over(Role::Prefill) + over(Role::Decode),
            };
        }
        (legs, (work, streams))
    }

    /// What streams hold now needs room whatever comes.
    fn hold_memory(&self, needs: &mut Needs) {
        let Some((_, capacity)) = &self.decode else {
            return;
        };
        let held = need::whole(need::memory(self.fleet.context_tokens, capacity));
        let split = self.scaling.prefill.max > 0 && self.scaling.decode.max > 0;
        let role = if split { Role::Decode } else { Role::Both };
        let need = &mut needs.legs[index(role)];
        let there = if split { needs_both(&self.fleet) } else { 0 };
        let held = held.saturating_sub(there);
        if held > need.up {
            needs.reasons[index(role)] = ScalingReason::Memory;
        }
        need.up = need.up.max(held);
        need.down = need.down.max(held);
    }
}

/// Workers of the mixed pool, which hold streams too.
fn needs_both(fleet: &Fleet) -> u32 {
    let both = fleet.members.iter().filter(|m| m.role == Role::Both);
    both.count() as u32
}

/// To hundredths, so that an answer is not another one for a breath.
fn round(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}
