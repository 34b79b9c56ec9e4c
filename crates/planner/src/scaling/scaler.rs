//! The state machine itself: its state, and one evaluation of the fleet.
//!
//! Owns: the order of an evaluation: all routers' demand, the needs, the wanted workers, the
//! workers to flip. Never: holds a formula of one of its parts. Invariant: see [`Scaler::check`].

use super::bounds::{self, POOLS, Reversals};
use super::need_history::{NeedHistory, WorkersNeeded};
use super::trends::LearnedTrends;
use super::window::DemandWindow;
use super::{PromiseOutcome, ScalerDecision, ScalerFleet, ScalerInput, ScalerMember, ScalerOutput};
use cleave_domain::{
    Capacity, FleetDemand, FleetTarget, PoolCounts, Prices, Role, RouterId, ScalingGossip,
    ScalingMode, ScalingPolicy, ScalingReason, SloPolicy, Time, WorkerId,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Interval of evaluations, and of gossip to other routers.
const EVALUATION_INTERVAL: Duration = Duration::from_secs(1);
/// A router without gossip for this long is gone.
const ROUTER_TIMEOUT: Duration = Duration::from_secs(5);
/// A new router answers nothing before it has received the others' gossip and its workers have
/// connected: workers look up routers every ten seconds, and redial after at most five.
const LISTENING_TIME: Duration = Duration::from_secs(20);
/// A prefill worker, and a decode worker, may be flipped if it was not needed for this long: its
/// streams have to move.
const SPARE_AFTER: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(120)];
/// Outcomes are not learned from for this long after a worker was missing.
const SHORTAGE_RECOVERY: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
pub struct Scaler {
    pub(super) me: RouterId,
    pub(super) now: Time,
    pub(super) started_at: Time,
    pub(super) scaling: ScalingPolicy,
    pub(super) policy: Arc<SloPolicy>,
    pub(super) window: DemandWindow,
    pub(super) fleet: ScalerFleet,
    pub(super) peer_routers: BTreeMap<RouterId, (Time, Arc<ScalingGossip>)>,
    pub(super) trends: LearnedTrends,
    pub(super) steady: [NeedHistory; 3],
    pub(super) turns: [Reversals; 3],
    pub(super) flips: Reversals,
    pub(super) target: FleetTarget,
    /// Prices and capacity outlast the last worker of the leg.
    pub(super) prefill: Option<(Prices, Capacity)>,
    pub(super) decode: Option<(Prices, Capacity)>,
    pub(super) last_demand_at: Time,
    /// When a worker was last missing.
    pub(super) last_short_at: Option<Time>,
    pub(super) next_evaluation: Time,
    pub(super) gossip_count: u64,
    pub(super) last_decision: Option<ScalerDecision>,
    /// At its last decision a request was waiting.
    pub(super) saw_waiting: bool,
    pub(super) outputs: VecDeque<ScalerOutput>,
}

/// Needs of each leg, of one evaluation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LegNeeds {
    /// No request came within the policy's `idle_after`.
    pub(super) is_idle: bool,
    pub(super) legs: [WorkersNeeded; 3],
    pub(super) reasons: [ScalingReason; 3],
}

pub(super) fn pool_index(role: Role) -> usize {
    match role {
        Role::Prefill => 0,
        Role::Decode => 1,
        Role::Both => 2,
    }
}

impl Scaler {
    /// A scaler that knows nothing yet.
    pub fn new(me: RouterId, now: Time, scaling: ScalingPolicy, policy: Arc<SloPolicy>) -> Self {
        Self {
            me,
            now,
            started_at: now,
            scaling,
            policy,
            window: DemandWindow::default(),
            fleet: ScalerFleet::default(),
            peer_routers: BTreeMap::new(),
            trends: LearnedTrends::default(),
            steady: Default::default(),
            turns: Default::default(),
            flips: Reversals::default(),
            target: FleetTarget::default(),
            prefill: None,
            decode: None,
            last_demand_at: now,
            last_short_at: None,
            next_evaluation: now,
            gossip_count: 0,
            last_decision: None,
            saw_waiting: false,
            outputs: VecDeque::new(),
        }
    }

    pub fn handle(&mut self, now: Time, input: ScalerInput) {
        self.now = self.now.max(now);
        match input {
            ScalerInput::Configured(scaling, policy) => self.configure(scaling, policy),
            ScalerInput::Arrived {
                class,
                prompt_tokens,
            } => {
                let class = self.class(&class);
                self.window.arrived(self.now, class, prompt_tokens);
                self.last_demand_at = self.now;
                if self.fleet.members.is_empty() {
                    self.next_evaluation = self.now;
                }
            }
            ScalerInput::Placed { cached_tokens } => self.window.placed(self.now, cached_tokens),
            ScalerInput::Ended {
                class,
                outcome,
                output_tokens,
            } => self.ended(&class, outcome, output_tokens),
            ScalerInput::GossipReceived(gossip) => self.handle_gossip(gossip),
            ScalerInput::FleetChanged(fleet) => self.handle_fleet(fleet),
        }
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<ScalerOutput> {
        self.outputs.pop_front()
    }

    /// When to hand in [`ScalerInput::FleetChanged`] at the latest.
    pub fn deadline(&self) -> Time {
        self.next_evaluation
    }

    pub fn check(&self) {
        let workers = &self.target.workers;
        let devices = bounds::devices(workers, &self.scaling);
        let most = u64::from(self.scaling.devices_max);
        assert!(devices <= most, "{workers:?} are more than {most} devices");
        for role in POOLS {
            let pool = self.scaling.pool(role);
            let count = workers.for_role(role);
            assert!(
                count <= pool.max,
                "{count} {role} workers, over {}",
                pool.max
            );
            let turns = self.turns[pool_index(role)].count(self.now);
            assert!(
                turns <= self.scaling.turns_max,
                "the {role} pool reversed {turns} times within an hour, above turns_max"
            );
        }
        let flips = self.flips.count(self.now);
        assert!(
            flips <= self.scaling.turns_max,
            "{flips} workers were flipped within an hour, above turns_max"
        );
        let waits = self.saw_waiting && self.scaling.can_serve();
        assert!(
            !waits || workers.total() > 0,
            "a request waits and no worker is wanted"
        );
    }

    fn class(&self, name: &str) -> usize {
        let classes = &self.policy.classes;
        let named = |name: &str| classes.iter().position(|class| class.name == name);
        let default = || named(&self.policy.default_class);
        named(name).or_else(default).unwrap_or(0)
    }

    fn configure(&mut self, scaling: ScalingPolicy, policy: Arc<SloPolicy>) {
        if self.policy.classes != policy.classes {
            self.window.forget_classes();
        }
        if self.scaling != scaling {
            self.turns = Default::default();
            self.flips = Reversals::default();
            self.target = bounded(&self.target, &scaling);
        }
        (self.scaling, self.policy) = (scaling, policy);
        self.next_evaluation = self.now;
    }

    fn ended(&mut self, class: &str, outcome: PromiseOutcome, output_tokens: u32) {
        let short = self
            .last_short_at
            .is_some_and(|at| self.now < at + SHORTAGE_RECOVERY);
        let outcome = if short {
            PromiseOutcome::NotCounted
        } else {
            outcome
        };
        let class = self.class(class);
        self.window.judged(self.now, class, outcome);
        // Any completed answer teaches its length, whatever its outcome.
        if output_tokens > 0 {
            self.window.answered(self.now, output_tokens);
        }
    }

    fn handle_gossip(&mut self, gossip: Arc<ScalingGossip>) {
        let newest = self.peer_routers.get(&gossip.router);
        let newer = newest.is_none_or(|(_, newest)| newest.number < gossip.number);
        if gossip.router != self.me && newer {
            self.peer_routers.insert(gossip.router, (self.now, gossip));
        }
    }

    fn handle_fleet(&mut self, fleet: ScalerFleet) {
        let present = |fleet: &ScalerFleet| fleet.members.iter().filter(|m| !m.leaving).count();
        let joined = present(&fleet).saturating_sub(present(&self.fleet));
        let most = self.scaling.start_max;
        self.trends.workers_joined(self.now, joined as u32, most);
        self.fleet = fleet;
        // Known prices stay known.
        self.prefill = self.fleet.prefill.take().or(self.prefill.take());
        self.decode = self.fleet.decode.take().or(self.decode.take());
        if self.now >= self.next_evaluation {
            self.next_evaluation = self.now + EVALUATION_INTERVAL;
            self.evaluate();
        }
    }

    // === a look ===

    fn evaluate(&mut self) {
        let silent = self.now - ROUTER_TIMEOUT;
        self.peer_routers.retain(|_, (at, _)| *at >= silent);
        let own = FleetDemand {
            waiting: self.fleet.waiting,
            waiting_tokens: self.fleet.waiting_tokens,
            open: self.fleet.open,
            ..self.window.demand(self.now)
        };
        let mut demand = own.clone();
        // Requests that came here are known to the moment, those of others by the quick window.
        let mut has_requests = own.has_open_requests();
        for (_, gossip) in self.peer_routers.values() {
            demand += &gossip.demand;
            has_requests |= gossip.demand.has_recent_requests();
        }
        if has_requests {
            self.last_demand_at = self.now;
        }
        self.note_missing();
        // A router that has just started has nothing to contribute yet, and follows any other
        // router.
        let listening = self.now < self.started_at + LISTENING_TIME;
        let leader = self.peer_routers.first_key_value();
        let leader = leader.filter(|(router, _)| listening || **router < self.me);
        let leader = leader.map(|(_, (_, gossip))| Arc::clone(gossip));
        let decision = match &leader {
            // The leader's answer wins; without a leader a listening router keeps what is present,
            // since workers may not have found it yet; otherwise it decides.
            Some(gossip) => self.follow_leader(&gossip.wanted, &demand),
            None if listening => self.follow_leader(&self.present_as_target(), &demand),
            None => self.decide(&demand),
        };
        self.saw_waiting = decision.own && demand.waiting > 0;
        if listening {
            if leader.is_none() && demand.waiting > 0 && self.fleet.members.is_empty() {
                self.ask_for_first_workers(decision);
            }
            return;
        }
        self.gossip_count += 1;
        self.outputs
            .push_back(ScalerOutput::SendGossip(ScalingGossip {
                router: self.me,
                number: self.gossip_count,
                demand: own,
                wanted: self.target,
            }));
        if leader.is_none() && self.scaling.mode == ScalingMode::Act {
            self.flip_one_worker();
        }
        if self.last_decision != Some(decision) {
            self.last_decision = Some(decision);
            self.outputs.push_back(ScalerOutput::Decided(decision));
        }
    }

    /// A request waits at a router that has just started. Workers of an earlier router may be about
    /// to connect, so this may only start some where there are none.
    fn ask_for_first_workers(&mut self, decision: ScalerDecision) {
        let mut wanted = FleetTarget::default();
        for role in POOLS {
            let count = self.least(role, PoolCounts::default());
            *wanted.legs.for_role_mut(role) = count;
            *wanted.reasons.for_role_mut(role) = ScalingReason::First;
        }
        wanted.legs = bounds::within_bounds(wanted.legs, &self.scaling);
        wanted.legs = bounds::within_devices(wanted.legs, &self.scaling);
        wanted.workers = wanted.legs;
        let decision = ScalerDecision {
            wanted,
            first: true,
            starting: wanted.workers.total(),
            ..decision
        };
        if self.last_decision != Some(decision) {
            self.last_decision = Some(decision);
            self.outputs.push_back(ScalerOutput::Decided(decision));
        }
    }

    /// The present workers as the wanted ones, as long as the demand is unknown.
    fn present_as_target(&self) -> FleetTarget {
        let (mut workers, mut legs) = (PoolCounts::default(), PoolCounts::default());
        for member in self.fleet.members.iter().filter(|member| !member.leaving) {
            *workers.for_role_mut(member.home_role) += 1;
            *legs.for_role_mut(member.role) += 1;
        }
        FleetTarget {
            workers,
            legs,
            ..FleetTarget::default()
        }
    }

    /// Workers that are wanted and not present.
    pub(super) fn missing(&self) -> u32 {
        let of = |role: Role| {
            let there = self.fleet.members.iter();
            let there = there.filter(|member| member.home_role == role && !member.leaving);
            let target = self.target.workers.for_role(role);
            target.saturating_sub(there.count() as u32)
        };
        POOLS.into_iter().map(of).sum()
    }

    fn note_missing(&mut self) {
        match self.missing() {
            0 => self.trends.none_missing(),
            _ => self.last_short_at = Some(self.now),
        }
    }

    /// Repeats the leader's answer, and still learns from the demand.
    fn follow_leader(&mut self, target: &FleetTarget, demand: &FleetDemand) -> ScalerDecision {
        let (needs, decision) = self.needs(demand);
        self.record_needs(&needs);
        // The leader may have an earlier or a later policy.
        self.target = bounded(target, &self.scaling);
        ScalerDecision {
            wanted: self.target,
            own: false,
            ..decision
        }
    }

    fn record_needs(&mut self, needs: &LegNeeds) {
        for role in POOLS {
            let keep = self.scaling.pool(role).down_after.max(SPARE_AFTER[1]);
            self.steady[pool_index(role)].record(self.now, needs.legs[pool_index(role)], keep);
        }
    }

    fn decide(&mut self, demand: &FleetDemand) -> ScalerDecision {
        let (needs, decision) = self.needs(demand);
        self.record_needs(&needs);
        let mut target = FleetTarget::default();
        for role in POOLS {
            let current = self.target.legs.for_role(role);
            let pool = self.scaling.pool(role);
            let steady = &self.steady[pool_index(role)];
            // `idle_after` is the delay of a fleet without requests, in place of `down_after`.
            let settled = if needs.is_idle {
                0
            } else {
                steady.stabilised(self.now, current, pool)
            };
            *target.legs.for_role_mut(role) = settled;
            let settles = settled > needs.legs[pool_index(role)].down;
            // A count above the present need is held only by the shrink delay.
            *target.reasons.for_role_mut(role) = if settles {
                ScalingReason::Settling
            } else {
                needs.reasons[pool_index(role)]
            };
        }
        self.take_from_spare_leg(&mut target.legs);
        self.fit(&mut target);
        self.target = target;
        ScalerDecision {
            wanted: target,
            ..decision
        }
    }

    /// Reduces a leg with spare workers where the other one is to grow: flipping is quicker than
    /// starting.
    fn take_from_spare_leg(&mut self, legs: &mut PoolCounts) {
        let may = bounds::can_flip(&self.scaling) && self.flips_left() > 0;
        for (to, from) in [(Role::Decode, Role::Prefill), (Role::Prefill, Role::Decode)] {
            let more = legs
                .for_role(to)
                .saturating_sub(self.target.legs.for_role(to));
            let current = legs.for_role(from);
            let within = SPARE_AFTER[pool_index(from)];
            let spare = self.steady[pool_index(from)].spare(self.now, current, within);
            let moved = more.min(spare).min(current.saturating_sub(1));
            if may && moved > 0 {
                *legs.for_role_mut(from) -= moved;
            }
        }
    }

    fn flips_left(&self) -> u32 {
        let most = self.scaling.turns_max;
        most.saturating_sub(self.flips.count(self.now))
    }

    /// Applies bounds, devices, limits on reversals, and chooses the pools in which workers are
    /// started.
    fn fit(&mut self, target: &mut FleetTarget) {
        let legs = bounds::within_bounds(target.legs, &self.scaling);
        let afforded = bounds::within_devices(legs, &self.scaling);
        for role in POOLS {
            if legs.for_role(role) != target.legs.for_role(role) {
                *target.reasons.for_role_mut(role) = ScalingReason::Bounds;
            }
            if afforded.for_role(role) != legs.for_role(role) {
                *target.reasons.for_role_mut(role) = ScalingReason::Devices;
            }
        }
        let before = self.target.workers;
        let mut workers = bounds::workers_to_start(before, afforded, &self.scaling);
        self.start_for_short_leg(&afforded, &mut workers);
        // A pool that has reversed too often keeps its workers, within its maximum.
        let mut held = Vec::new();
        for role in POOLS {
            let shrinks = workers.for_role(role) < before.for_role(role);
            let most = self.scaling.turns_max;
            if shrinks && !self.turns[pool_index(role)].may_shrink(self.now, most) {
                *workers.for_role_mut(role) =
                    before.for_role(role).min(self.scaling.pool(role).max);
                held.push(role);
            }
        }
        while bounds::devices(&workers, &self.scaling) > u64::from(self.scaling.devices_max) {
            // A pool that was to grow waits for one that may not shrink yet.
            let mut grown = POOLS
                .into_iter()
                .filter(|r| workers.for_role(*r) > before.for_role(*r));
            let role = grown
                .next()
                .expect("the previous numbers were within bounds");
            *workers.for_role_mut(role) -= 1;
            *target.reasons.for_role_mut(role) = ScalingReason::Devices;
        }
        for role in POOLS {
            let (old, new) = (before.for_role(role), workers.for_role(role));
            if old != new {
                self.turns[pool_index(role)].record_change(self.now, new > old);
            }
            if held.contains(&role) {
                *target.reasons.for_role_mut(role) = ScalingReason::Turns;
            }
            self.trends
                .starts_requested(self.now, new.saturating_sub(old));
        }
        target.workers = workers;
        target.legs = bounds::legs_served(afforded, workers, &self.scaling);
    }

    /// Starts a worker of the lacking leg where no more flips are allowed.
    fn start_for_short_leg(&mut self, legs: &PoolCounts, workers: &mut PoolCounts) {
        if !bounds::can_flip(&self.scaling) || self.flips_left() > 0 {
            return;
        }
        for role in [Role::Prefill, Role::Decode] {
            let members = self.fleet.members.iter().filter(|m| !m.leaving);
            let serve = members.clone().filter(|m| m.role == role).count() as u32;
            let home = members.filter(|m| m.home_role == role).count() as u32;
            let coming = workers.for_role(role).saturating_sub(home);
            let lacks = legs.for_role(role).saturating_sub(serve + coming);
            let most = self.scaling.pool(role).max;
            *workers.for_role_mut(role) = (workers.for_role(role) + lacks).min(most);
            let devices_max = u64::from(self.scaling.devices_max);
            while bounds::devices(workers, &self.scaling) > devices_max {
                *workers.for_role_mut(role) -= 1;
            }
        }
    }

    /// Flips one worker at a time: first one that was started for the lacking leg, then the least
    /// busy one.
    fn flip_one_worker(&mut self) {
        if !bounds::can_flip(&self.scaling) || self.flips_left() == 0 {
            return;
        }
        let there = |role: Role, of: fn(&ScalerMember) -> Role| {
            let members = self.fleet.members.iter();
            members.filter(|m| !m.leaving && of(m) == role).count() as u32
        };
        for (from, to) in [(Role::Prefill, Role::Decode), (Role::Decode, Role::Prefill)] {
            let legs = &self.target.legs;
            let coming = self.target.workers.for_role(to);
            let coming = coming.saturating_sub(there(to, |m| m.home_role));
            let lacks = there(to, |m| m.role) + coming < legs.for_role(to);
            if !lacks || there(from, |m| m.role) <= legs.for_role(from).max(1) {
                continue;
            }
            let members = self.fleet.members.iter();
            let can = members.filter(|m| !m.leaving && m.role == from && m.home_role != Role::Both);
            let chosen = can.min_by_key(|m| (m.home_role != to, m.busy_tokens, m.worker));
            if let Some(worker) = chosen.map(|member| member.worker) {
                self.record_flip(worker, to);
                return;
            }
        }
    }

    fn record_flip(&mut self, worker: WorkerId, role: Role) {
        self.flips.record(self.now);
        for member in &mut self.fleet.members {
            if member.worker == worker {
                member.role = role;
            }
        }
        self.outputs.push_back(ScalerOutput::Flip { worker, role });
    }
}

/// The same within these bounds; unchanged if it is within them already.
fn bounded(target: &FleetTarget, scaling: &ScalingPolicy) -> FleetTarget {
    let fits = |role| target.workers.for_role(role) <= scaling.pool(role).max;
    let devices = bounds::devices(&target.workers, scaling);
    let fits = POOLS.into_iter().all(fits) && devices <= u64::from(scaling.devices_max);
    let above = |role| target.workers.for_role(role) >= scaling.pool(role).min;
    if fits && POOLS.into_iter().all(above) {
        return *target;
    }
    let legs = bounds::within_bounds(target.legs, scaling);
    let legs = bounds::within_devices(legs, scaling);
    let workers = bounds::workers_to_start(target.workers, legs, scaling);
    FleetTarget {
        workers,
        legs: bounds::legs_served(legs, workers, scaling),
        ..*target
    }
}

#[cfg(test)]
mod flip_tests;

#[cfg(test)]
mod tests;
