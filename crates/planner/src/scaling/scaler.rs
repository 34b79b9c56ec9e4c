//! The brain: what it knows, when it looks, what it says.
//!
//! Owns: the order of things in one look: everybody's demand, what it needs, what is wanted, who changes its
//! leg. Never: holds a formula of one of its parts. Invariant: see [`Scaler::check`].

use super::fit::{self, POOLS, Turns};
use super::habits::Habits;
use super::need::{self, Aims, Traffic};
use super::steady::{Need, Steady};
use super::window::Window;
use super::{Came, Decision, Fleet, Input, Member, Output};
use cleave_domain::{
    Capacity, Demand, PoolCounts, Prices, Role, RouterId, Scaling, ScalingMode, ScalingReason,
    SloPolicy, Time, Voice, Wanted, WorkerId,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// How often the fleet is looked at, and others are told.
const EVERY: Duration = Duration::from_secs(1);
/// A router that said nothing for so long is gone.
const SILENT: Duration = Duration::from_secs(5);
/// A router that has just begun answers nothing before it has heard the others and met its workers.
const LISTEN: Duration = Duration::from_secs(5);
/// Not needed for so long, a prefill worker, and a decode worker, may change its leg: streams have to move.
const SPARE_AFTER: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(120)];
/// What came of promises is not learned from for so long after a worker was missing.
const AFTERMATH: Duration = Duration::from_secs(60);
/// Those who wait are to be served within so long, beside what comes.
const CATCH_UP: f64 = 30.0;
/// What is enough to go down to: enough for so much more than there is.
const SLACK: f64 = 1.1;
/// A class with a smaller share of the requests than this does not decide how tight promises are.
const SHARE: u64 = 20;
/// Before any answer was seen.
const OUTPUT_TOKENS: f64 = 256.0;

/// See [`super`].
#[derive(Clone, Debug)]
pub struct Scaler {
    me: RouterId,
    now: Time,
    born: Time,
    scaling: Scaling,
    policy: Arc<SloPolicy>,
    window: Window,
    fleet: Fleet,
    others: BTreeMap<RouterId, (Time, Arc<Voice>)>,
    habits: Habits,
    steady: [Steady; 3],
    turns: [Turns; 3],
    flips: Turns,
    wanted: Wanted,
    /// What it costs is remembered when the last worker has left.
    prefill: Option<(Prices, Capacity)>,
    decode: Option<(Prices, Capacity)>,
    /// Anything was asked.
    asked_at: Time,
    /// A worker was missing.
    short_at: Option<Time>,
    look_at: Time,
    number: u64,
    said: Option<Decision>,
    /// When it decided last, somebody waited.
    saw_waiting: bool,
    outputs: VecDeque<Output>,
}

/// What each leg needs, of one look.
#[derive(Clone, Copy, Debug, Default)]
struct Needs {
    legs: [Need; 3],
    reasons: [ScalingReason; 3],
}

fn index(role: Role) -> usize {
    match role {
        Role::Prefill => 0,
        Role::Decode => 1,
        Role::Both => 2,
    }
}

impl Scaler {
    /// One that knows nothing yet.
    pub fn new(me: RouterId, now: Time, scaling: Scaling, policy: Arc<SloPolicy>) -> Self {
        Self {
            me,
            now,
            born: now,
            scaling,
            policy,
            window: Window::default(),
            fleet: Fleet::default(),
            others: BTreeMap::new(),
            habits: Habits::default(),
            steady: Default::default(),
            turns: Default::default(),
            flips: Turns::default(),
            wanted: Wanted::default(),
            prefill: None,
            decode: None,
            asked_at: now,
            short_at: None,
            look_at: now,
            number: 0,
            said: None,
            saw_waiting: false,
            outputs: VecDeque::new(),
        }
    }

    /// Takes a fact.
    pub fn handle(&mut self, now: Time, input: Input) {
        self.now = self.now.max(now);
        match input {
            Input::Configured(scaling, policy) => self.configure(scaling, policy),
            Input::Arrived {
                class,
                prompt_tokens,
            } => {
                let class = self.class(&class);
                self.window.arrived(self.now, class, prompt_tokens);
                if self.fleet.members.is_empty() {
                    self.look_at = self.now;
                }
            }
            Input::Placed { cached_tokens } => self.window.placed(self.now, cached_tokens),
            Input::Ended {
                class,
                came,
                output_tokens,
            } => self.ended(&class, came, output_tokens),
            Input::Heard(voice) => self.heard(voice),
            Input::Stands(fleet) => self.stands(fleet),
        }
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to hand in [`Input::Stands`] at the latest.
    pub fn deadline(&self) -> Time {
        self.look_at
    }

    /// Asserts every invariant.
    pub fn check(&self) {
        let workers = &self.wanted.workers;
        let devices = fit::devices(workers, &self.scaling);
        let most = u64::from(self.scaling.devices_max);
        assert!(devices <= most, "{workers:?} are more than {most} devices");
        for role in POOLS {
            let pool = self.scaling.pool(role);
            let count = workers.of(role);
            assert!(
                count <= pool.max,
                "{count} {role} workers, over {}",
                pool.max
            );
            let turns = self.turns[index(role)].count(self.now);
            assert!(
                turns <= self.scaling.turns_max,
                "{role} turned {turns} times"
            );
        }
        let flips = self.flips.count(self.now);
        assert!(
            flips <= self.scaling.turns_max,
            "{flips} workers changed their leg"
        );
        let waits = self.saw_waiting && self.scaling.serves();
        assert!(
            !waits || workers.total() > 0,
            "somebody waits and nobody is wanted"
        );
    }

    fn class(&self, name: &str) -> usize {
        let classes = &self.policy.classes;
        let named = |name: &str| classes.iter().position(|class| class.name == name);
        let default = || named(&self.policy.default_class);
        named(name).or_else(default).unwrap_or(0)
    }

    fn configure(&mut self, scaling: Scaling, policy: Arc<SloPolicy>) {
        if self.policy.classes != policy.classes {
            self.window.forget_classes();
        }
        if self.scaling != scaling {
            self.turns = Default::default();
            self.flips = Turns::default();
            let legs = fit::within_bounds(self.wanted.legs, &scaling);
            let legs = fit::within_devices(legs, &scaling);
            let workers = fit::workers(self.wanted.workers, legs, &scaling);
            self.wanted.workers = workers;
            self.wanted.legs = fit::served(legs, workers, &scaling);
        }
        (self.scaling, self.policy) = (scaling, policy);
        self.look_at = self.now;
    }

    fn ended(&mut self, class: &str, came: Came, output_tokens: u32) {
        let short = self.short_at.is_some_and(|at| self.now < at + AFTERMATH);
        let came = if short { Came::Aside } else { came };
        let class = self.class(class);
        self.window.judged(self.now, class, came);
        if came != Came::Aside && output_tokens > 0 {
            self.window.answered(self.now, output_tokens);
        }
    }

    fn heard(&mut self, voice: Arc<Voice>) {
        let known = self.others.get(&voice.router);
        let newer = known.is_none_or(|(_, known)| known.number < voice.number);
        if voice.router != self.me && newer {
            self.others.insert(voice.router, (self.now, voice));
        }
    }

    fn stands(&mut self, fleet: Fleet) {
        let present = |fleet: &Fleet| fleet.members.iter().filter(|m| !m.leaves).count();
        let joined = present(&fleet).saturating_sub(present(&self.fleet));
        let most = self.scaling.start_max;
        self.habits.joined(self.now, joined as u32, most);
        self.fleet = fleet;
        // What is known of costs stays known.
        self.prefill = self.fleet.prefill.take().or(self.prefill.take());
        self.decode = self.fleet.decode.take().or(self.decode.take());
        if self.now >= self.look_at {
            self.look_at = self.now + EVERY;
            self.look();
        }
    }

    // === a look ===

    fn look(&mut self) {
        let silent = self.now - SILENT;
        self.others.retain(|_, (at, _)| *at >= silent);
        let own = Demand {
            waiting: self.fleet.waiting,
            waiting_tokens: self.fleet.waiting_tokens,
            open: self.fleet.open,
            ..self.window.demand(self.now)
        };
        let mut demand = own.clone();
        for (_, voice) in self.others.values() {
            demand += &voice.demand;
        }
        if demand.is_any() {
            self.asked_at = self.now;
        }
        self.note_missing();
        let leader = self.others.first_key_value();
        let leader = leader.filter(|(router, _)| **router < self.me);
        let leader = leader.map(|(_, (_, voice))| Arc::clone(voice));
        let listening = self.now < self.born + LISTEN;
        let decision = match &leader {
            Some(voice) => self.follow(&voice.wanted, &demand),
            None if listening => self.follow(&self.present(), &demand),
            None => self.decide(&demand),
        };
        self.saw_waiting = decision.own && demand.waiting > 0;
        self.number += 1;
        self.outputs.push_back(Output::PassOn(Voice {
            router: self.me,
            number: self.number,
            demand: own,
            wanted: self.wanted,
        }));
        if leader.is_none() && listening {
            return;
        }
        if leader.is_none() && self.scaling.mode == ScalingMode::Act {
            self.flip();
        }
        if self.said != Some(decision) {
            self.said = Some(decision);
            self.outputs.push_back(Output::Want(decision));
        }
    }

    /// What is there is what is wanted, as long as nothing is known.
    fn present(&self) -> Wanted {
        let (mut workers, mut legs) = (PoolCounts::default(), PoolCounts::default());
        for member in self.fleet.members.iter().filter(|member| !member.leaves) {
            *workers.of_mut(member.home) += 1;
            *legs.of_mut(member.role) += 1;
        }
        let legs = fit::within_devices(fit::within_bounds(legs, &self.scaling), &self.scaling);
        let workers = fit::workers(workers, legs, &self.scaling);
        Wanted {
            workers,
            legs: fit::served(legs, workers, &self.scaling),
            ..Wanted::default()
        }
    }

    /// Workers that are wanted and not there.
    fn missing(&self) -> u32 {
        let of = |role: Role| {
            let there = self.fleet.members.iter();
            let there = there.filter(|member| member.home == role && !member.leaves);
            let wanted = self.wanted.workers.of(role);
            wanted.saturating_sub(there.count() as u32)
        };
        POOLS.into_iter().map(of).sum()
    }

    fn note_missing(&mut self) {
        match self.missing() {
            0 => self.habits.whole(),
            _ => self.short_at = Some(self.now),
        }
    }

    /// Repeats what another one said, and learns on.
    fn follow(&mut self, wanted: &Wanted, demand: &Demand) -> Decision {
        let (needs, decision) = self.needs(demand);
        self.remember(&needs);
        self.wanted = *wanted;
        Decision {
            wanted: *wanted,
            own: false,
            ..decision
        }
    }

    fn remember(&mut self, needs: &Needs) {
        for role in POOLS {
            let keep = self.scaling.pool(role).down_after.max(SPARE_AFTER[1]);
            self.steady[index(role)].hear(self.now, needs.legs[index(role)], keep);
        }
    }

    fn decide(&mut self, demand: &Demand) -> Decision {
        let (needs, decision) = self.needs(demand);
        self.remember(&needs);
        let mut wanted = Wanted::default();
        for role in POOLS {
            let current = self.wanted.legs.of(role);
            let pool = self.scaling.pool(role);
            let steady = &self.steady[index(role)];
            let settled = steady.settle(self.now, current, pool);
            *wanted.legs.of_mut(role) = settled;
            let settles = settled > needs.legs[index(role)].down;
            *wanted.reasons.of_mut(role) = match settles {
                true => ScalingReason::Settling,
                false => needs.reasons[index(role)],
            };
        }
        self.lend(&mut wanted.legs);
        self.fit(&mut wanted);
        self.wanted = wanted;
        Decision { wanted, ..decision }
    }

    /// A leg that is to grow is given what the other one has to spare.
    fn lend(&mut self, legs: &mut PoolCounts) {
        let may = fit::can_flip(&self.scaling) && self.flips_left() > 0;
        for (grows, gives) in [(Role::Decode, Role::Prefill), (Role::Prefill, Role::Decode)] {
            let more = legs.of(grows).saturating_sub(self.wanted.legs.of(grows));
            let current = legs.of(gives);
            let within = SPARE_AFTER[index(gives)];
            let spare = self.steady[index(gives)].spare(self.now, current, within);
            let lent = more.min(spare).min(current.saturating_sub(1));
            if may && lent > 0 {
                *legs.of_mut(gives) -= lent;
            }
        }
    }

    fn flips_left(&self) -> u32 {
        let most = self.scaling.turns_max;
        most.saturating_sub(self.flips.count(self.now))
    }

    /// Bounds, devices, who is started, who turns.
    fn fit(&mut self, wanted: &mut Wanted) {
        let legs = fit::within_bounds(wanted.legs, &self.scaling);
        let afforded = fit::within_devices(legs, &self.scaling);
        for role in POOLS {
            if legs.of(role) != wanted.legs.of(role) {
                *wanted.reasons.of_mut(role) = ScalingReason::Bounds;
            }
            if afforded.of(role) != legs.of(role) {
                *wanted.reasons.of_mut(role) = ScalingReason::Devices;
            }
        }
        let before = self.wanted.workers;
        let mut workers = fit::workers(before, afforded, &self.scaling);
        self.supply(&afforded, &mut workers);
        let mut held = Vec::new();
        for role in POOLS {
            let shrinks = workers.of(role) < before.of(role);
            let most = self.scaling.turns_max;
            if shrinks && !self.turns[index(role)].may_shrink(self.now, most) {
                *workers.of_mut(role) = before.of(role).min(self.scaling.pool(role).max);
                held.push(role);
            }
        }
        while fit::devices(&workers, &self.scaling) > u64::from(self.scaling.devices_max) {
            // What was to grow waits for what may not shrink yet.
            let mut grown = POOLS.into_iter().filter(|r| workers.of(*r) > before.of(*r));
            let role = grown
                .next()
                .expect("what was there before was within bounds");
            *workers.of_mut(role) -= 1;
            *wanted.reasons.of_mut(role) = ScalingReason::Devices;
        }
        for role in POOLS {
            let (old, new) = (before.of(role), workers.of(role));
            if old != new {
                self.turns[index(role)].take(self.now, new > old);
            }
            if held.contains(&role) {
                *wanted.reasons.of_mut(role) = ScalingReason::Turns;
            }
            self.habits.wants(self.now, new.saturating_sub(old));
        }
        wanted.workers = workers;
        wanted.legs = fit::served(afforded, workers, &self.scaling);
    }

    /// Where no worker may change its leg any more, the leg that lacks one is given one of its own.
    fn supply(&mut self, legs: &PoolCounts, workers: &mut PoolCounts) {
        if !fit::can_flip(&self.scaling) || self.flips_left() > 0 {
            return;
        }
        for role in [Role::Prefill, Role::Decode] {
            let members = self.fleet.members.iter().filter(|m| !m.leaves);
            let serve = members.clone().filter(|m| m.role == role).count() as u32;
            let home = members.filter(|m| m.home == role).count() as u32;
            let coming = workers.of(role).saturating_sub(home);
            let lacks = legs.of(role).saturating_sub(serve + coming);
            let most = self.scaling.pool(role).max;
            *workers.of_mut(role) = (workers.of(role) + lacks).min(most);
            let devices_max = u64::from(self.scaling.devices_max);
            while fit::devices(workers, &self.scaling) > devices_max {
                *workers.of_mut(role) -= 1;
            }
        }
    }

    /// One worker at a time changes its leg: one that was started for the leg that lacks it first, then the
    /// least busy.
    fn flip(&mut self) {
        if !fit::can_flip(&self.scaling) || self.flips_left() == 0 {
            return;
        }
        let there = |role: Role, of: fn(&Member) -> Role| {
            let members = self.fleet.members.iter();
            members.filter(|m| !m.leaves && of(m) == role).count() as u32
        };
        for (gives, gets) in [(Role::Prefill, Role::Decode), (Role::Decode, Role::Prefill)] {
            let legs = &self.wanted.legs;
            let coming = self.wanted.workers.of(gets);
            let coming = coming.saturating_sub(there(gets, |m| m.home));
            let lacks = there(gets, |m| m.role) + coming < legs.of(gets);
            if !lacks || there(gives, |m| m.role) <= legs.of(gives).max(1) {
                continue;
            }
            let members = self.fleet.members.iter();
            let can = members.filter(|m| !m.leaves && m.role == gives && m.home != Role::Both);
            let chosen = can.min_by_key(|m| (m.home != gets, m.busy_tokens, m.worker));
            if let Some(worker) = chosen.map(|member| member.worker) {
                self.flipped(worker, gets);
                return;
            }
        }
    }

    fn flipped(&mut self, worker: WorkerId, role: Role) {
        self.flips.add(self.now);
        for member in &mut self.fleet.members {
            if member.worker == worker {
                member.role = role;
            }
        }
        self.outputs.push_back(Output::Flip { worker, role });
    }

    // === what is needed ===

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
        let all: u64 = demand.classes.iter().map(|kept| kept.arrivals).sum();
        let mut aims = Aims::default();
        for (class, kept) in self.policy.classes.iter().zip(&demand.classes) {
            if kept.arrivals == 0 || kept.arrivals * SHARE < all {
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

    fn needs(&mut self, demand: &Demand) -> (Needs, Decision) {
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
