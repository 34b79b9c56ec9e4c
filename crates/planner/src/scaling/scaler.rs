//! The brain: what it knows, when it looks, what it says.
//!
//! Owns: the order of things in one look: everybody's demand, what it needs, what is wanted, who changes its
//! leg. Never: holds a formula of one of its parts. Invariant: see [`Scaler::check`].

use super::fit::{self, POOLS, Turns};
use super::habits::Habits;
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
/// A router that has just begun answers nothing before it has heard the others and met its workers, which look
/// up where routers are every ten seconds and dial one that was gone again after five at the latest.
const LISTEN: Duration = Duration::from_secs(20);
/// Not needed for so long, a prefill worker, and a decode worker, may change its leg: streams have to move.
const SPARE_AFTER: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(120)];
/// What came of promises is not learned from for so long after a worker was missing.
const AFTERMATH: Duration = Duration::from_secs(60);

/// See [`super`].
#[derive(Clone, Debug)]
pub struct Scaler {
    pub(super) me: RouterId,
    pub(super) now: Time,
    pub(super) born: Time,
    pub(super) scaling: Scaling,
    pub(super) policy: Arc<SloPolicy>,
    pub(super) window: Window,
    pub(super) fleet: Fleet,
    pub(super) others: BTreeMap<RouterId, (Time, Arc<Voice>)>,
    pub(super) habits: Habits,
    pub(super) steady: [Steady; 3],
    pub(super) turns: [Turns; 3],
    pub(super) flips: Turns,
    pub(super) wanted: Wanted,
    /// What it costs is remembered when the last worker has left.
    pub(super) prefill: Option<(Prices, Capacity)>,
    pub(super) decode: Option<(Prices, Capacity)>,
    /// Anything was asked.
    pub(super) asked_at: Time,
    /// A worker was missing.
    pub(super) short_at: Option<Time>,
    pub(super) look_at: Time,
    pub(super) number: u64,
    pub(super) said: Option<Decision>,
    /// When it decided last, somebody waited.
    pub(super) saw_waiting: bool,
    pub(super) outputs: VecDeque<Output>,
}

/// What each leg needs, of one look.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Needs {
    pub(super) legs: [Need; 3],
    pub(super) reasons: [ScalingReason; 3],
}

pub(super) fn index(role: Role) -> usize {
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
            self.wanted = bounded(&self.wanted, &scaling);
        }
        (self.scaling, self.policy) = (scaling, policy);
        self.look_at = self.now;
    }

    fn ended(&mut self, class: &str, came: Came, output_tokens: u32) {
        let short = self.short_at.is_some_and(|at| self.now < at + AFTERMATH);
        let came = if short { Came::Aside } else { came };
        let class = self.class(class);
        self.window.judged(self.now, class, came);
        // However it came to its end, that is how long it is.
        if output_tokens > 0 {
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
        // Who has just begun has nothing to say yet, and goes by whoever has.
        let listening = self.now < self.born + LISTEN;
        let leader = self.others.first_key_value();
        let leader = leader.filter(|(router, _)| listening || **router < self.me);
        let leader = leader.map(|(_, (_, voice))| Arc::clone(voice));
        let decision = match &leader {
            Some(voice) => self.follow(&voice.wanted, &demand),
            None if listening => self.follow(&self.present(), &demand),
            None => self.decide(&demand),
        };
        self.saw_waiting = decision.own && demand.waiting > 0;
        if listening {
            return;
        }
        self.number += 1;
        self.outputs.push_back(Output::PassOn(Voice {
            router: self.me,
            number: self.number,
            demand: own,
            wanted: self.wanted,
        }));
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
        Wanted {
            workers,
            legs,
            ..Wanted::default()
        }
    }

    /// Workers that are wanted and not there.
    pub(super) fn missing(&self) -> u32 {
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
        // The other one may go by an earlier or a later policy.
        self.wanted = bounded(wanted, &self.scaling);
        Decision {
            wanted: self.wanted,
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
}

/// The same within these bounds; what is within them is left as it is.
fn bounded(wanted: &Wanted, scaling: &Scaling) -> Wanted {
    let fits = |role| wanted.workers.of(role) <= scaling.pool(role).max;
    let devices = fit::devices(&wanted.workers, scaling);
    let fits = POOLS.into_iter().all(fits) && devices <= u64::from(scaling.devices_max);
    let above = |role| wanted.workers.of(role) >= scaling.pool(role).min;
    if fits && POOLS.into_iter().all(above) {
        return *wanted;
    }
    let legs = fit::within_bounds(wanted.legs, scaling);
    let legs = fit::within_devices(legs, scaling);
    let workers = fit::workers(wanted.workers, legs, scaling);
    Wanted {
        workers,
        legs: fit::served(legs, workers, scaling),
        ..*wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{Flow, Kept, PoolScaling};

    fn scaling(devices_max: u32) -> Scaling {
        let pool = |role| PoolScaling {
            max: 8,
            ..PoolScaling::none(role)
        };
        Scaling {
            prefill: pool(Role::Prefill),
            decode: pool(Role::Decode),
            ..Scaling::new(devices_max)
        }
    }

    /// A router speaks from then on.
    const BEGUN: u64 = LISTEN.as_secs();

    fn at(second: u64) -> Time {
        Time::from_nanos(second * 1_000_000_000)
    }

    fn scaler(me: u64) -> Scaler {
        Scaler::new(RouterId(me), at(0), scaling(10), Arc::default())
    }

    fn fleet(prefill: u64, decode: u64, waiting: u32) -> Fleet {
        let member = |number: u64| {
            let role = if number < prefill {
                Role::Prefill
            } else {
                Role::Decode
            };
            Member {
                worker: WorkerId(number),
                role,
                home: role,
                leaves: false,
                busy_tokens: 0,
            }
        };
        Fleet {
            members: (0..prefill + decode).map(member).collect(),
            waiting,
            ..Fleet::default()
        }
    }

    /// Looks once a second; what was wanted last, if anything was said.
    fn run(scaler: &mut Scaler, (from, until): (u64, u64), fleet: &Fleet) -> Option<Wanted> {
        let mut wanted = None;
        for second in from..until {
            scaler.handle(at(second), Input::Stands(fleet.clone()));
            scaler.check();
            while let Some(output) = scaler.poll() {
                if let Output::Want(decision) = output {
                    wanted = Some(decision.wanted);
                }
            }
        }
        wanted
    }

    fn voice(router: u64, number: u64, prefill: u32, decode: u32) -> Input {
        let counts = PoolCounts {
            prefill,
            decode,
            both: 0,
        };
        Input::Heard(Arc::new(Voice {
            router: RouterId(router),
            number,
            wanted: Wanted {
                workers: counts,
                legs: counts,
                ..Wanted::default()
            },
            ..Voice::default()
        }))
    }

    #[test]
    fn a_router_that_began_again_wanted_nobody_while_workers_served() {
        let mut scaler = scaler(1);
        assert_eq!(
            run(&mut scaler, (0, BEGUN), &fleet(3, 4, 0)),
            None,
            "it listens"
        );
        let wanted = run(&mut scaler, (BEGUN, 60), &fleet(3, 4, 0)).expect("it says something");
        assert_eq!((wanted.workers.prefill, wanted.workers.decode), (3, 4));
    }

    #[test]
    fn workers_that_found_a_new_router_late_were_to_be_stopped() {
        let mut scaler = scaler(1);
        // Somebody waits there already. Workers look up where routers are every ten seconds.
        for (span, there) in [((0, 9), 0), ((9, 12), 2), ((12, BEGUN), 3)] {
            let said = run(&mut scaler, span, &fleet(there, there, 3));
            assert_eq!(said, None, "of {there} prefill workers that it knew of");
        }
        let wanted = run(&mut scaler, (BEGUN, 40), &fleet(3, 3, 0)).expect("it says something");
        assert_eq!((wanted.workers.prefill, wanted.workers.decode), (3, 3));
    }

    #[test]
    fn a_router_that_began_took_back_what_another_had_wanted() {
        let mut scaler = scaler(1);
        // Two of the workers that router 5 wants have not started yet, and router 1 has the smaller name.
        for second in 0..=BEGUN {
            scaler.handle(at(second), voice(5, second + 1, 4, 5));
            run(&mut scaler, (second, second + 1), &fleet(3, 4, 0));
        }
        run(&mut scaler, (BEGUN + 1, 45), &fleet(3, 4, 0));
        assert!(scaler.said.expect("it leads now").own);
        let wanted = scaler.wanted;
        assert_eq!((wanted.workers.prefill, wanted.workers.decode), (4, 5));
    }

    #[test]
    fn whoever_has_the_smaller_name_is_followed_until_it_is_silent_and_no_further_than_bounds() {
        let mut scaler = scaler(9);
        run(&mut scaler, (0, 21), &fleet(1, 1, 0));
        scaler.handle(at(21), voice(2, 1, 5, 5));
        let wanted = run(&mut scaler, (21, 23), &fleet(1, 1, 0)).expect("another answer");
        assert_eq!((wanted.workers.prefill, wanted.workers.decode), (5, 5));
        scaler.handle(at(23), voice(2, 2, 8, 8));
        run(&mut scaler, (23, 24), &fleet(1, 1, 0));
        let total = scaler.wanted.workers.total();
        assert_eq!(total, 10, "it wants sixteen, of ten devices");
        run(&mut scaler, (24, 55), &fleet(1, 1, 0));
        assert!(
            scaler.said.expect("it said something").own,
            "the other one is silent"
        );
    }

    #[test]
    fn a_voice_that_makes_no_sense_stopped_its_router_or_broke_its_bounds() {
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
        };
        let known = Fleet {
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
            let mut flow = || Flow {
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
            let wanted = Wanted {
                workers: counts(),
                legs: counts(),
                ..Wanted::default()
            };
            let (waiting, open) = (small(), small());
            let kept = Kept {
                arrivals: draw(),
                judged: draw(),
                missed_prefill: draw(),
                missed_decode: draw(),
            };
            let demand = Demand {
                slow,
                quick,
                classes: vec![kept; 2],
                waiting,
                waiting_tokens: draw(),
                open,
            };
            let voice = |router, number| Voice {
                router: RouterId(router),
                number,
                demand: demand.clone(),
                wanted,
            };
            // From one that is followed, and from two that are heard only.
            for (me, others) in [(9, [2, 3]), (1, [2, 3])] {
                let mut scaler = scaler(me);
                run(&mut scaler, (0, BEGUN), &known);
                for number in 1..=10 {
                    let second = BEGUN + 4 * number;
                    for other in others {
                        let voice = voice(other, number);
                        scaler.handle(at(second), Input::Heard(Arc::new(voice)));
                    }
                    run(&mut scaler, (second, second + 4), &known);
                    let said = scaler.said.as_ref().expect("it has heard enough");
                    assert_eq!(said.own, me == 1, "turn {turn}");
                    let wanted = &scaler.wanted.workers;
                    assert!(
                        wanted.total() <= 10,
                        "turn {turn}: {wanted:?} of ten devices"
                    );
                }
            }
        }
    }

    /// Lengths were not learned for a minute after a worker was missing, nor from whoever outlived one: so
    /// decode workers were wanted for answers of an earlier hour.
    #[test]
    fn how_long_answers_are_was_not_learned_while_a_worker_was_missing() {
        let mut scaler = scaler(1);
        run(&mut scaler, (0, 25), &fleet(0, 0, 1)).expect("somebody waits");
        assert!(scaler.missing() > 0, "who was asked for is not there yet");
        for (came, output_tokens) in [
            (Came::Good, 700),
            (Came::Missed(Role::Decode), 500),
            (Came::Aside, 300),
            (Came::Aside, 0),
        ] {
            scaler.handle(
                at(25),
                Input::Ended {
                    class: String::new(),
                    came,
                    output_tokens,
                },
            );
        }
        let demand = scaler.window.demand(at(25));
        assert_eq!((demand.slow.answers, demand.slow.output_tokens), (3, 1500));
        let judged = demand.classes.iter().map(|kept| kept.judged);
        assert_eq!(judged.sum::<u64>(), 0, "but nobody's promise is judged");
    }

    #[test]
    fn who_waited_at_an_empty_fleet_was_nobodys_demand() {
        let mut scaler = scaler(1);
        let wanted = run(&mut scaler, (0, 25), &fleet(0, 0, 1)).expect("somebody waits");
        assert_eq!((wanted.workers.prefill, wanted.workers.decode), (1, 1));
        assert_eq!(wanted.reasons.prefill, ScalingReason::First);
        let wanted = run(&mut scaler, (25, 1500), &fleet(1, 1, 0)).expect("idle in the end");
        assert_eq!(wanted.workers.total(), 0, "{wanted:?}");
    }
}
