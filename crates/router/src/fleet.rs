//! The workers, as far as a router knows them.
//!
//! Owns: who is connected in which life, how busy, with what cached, and what was promised to
//! each. Never: sends anything, or knows what a flight is about.
//! Invariant: nothing of an earlier life is kept: load, promises and prefixes go with it.

mod check;

use crate::candidates::{Burden, Placing};
use crate::devices::Devices;
use crate::event::{Census, MoveReason};
use crate::ledger::{Ledger, Promise, Span};
use crate::policy::Ask;
use cleave_domain::{
    Fingerprint, FlightId, HandoffId, Load, Prices, Progress, Report, Role, Time,
    WorkerDescription, WorkerId, WorkerRef,
};
use cleave_kv::FleetIndex;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::time::Duration;

#[derive(Clone, Debug)]
pub(crate) struct Worker {
    pub(crate) me: WorkerRef,
    pub(crate) description: WorkerDescription,
    pub(crate) load: Load,
    pub(crate) ledger: Ledger,
    /// It said that it accepts nothing new.
    pub(crate) draining: bool,
    /// What it said of its steps.
    pub(crate) progress: Progress,
    /// It refused; not asked again before this.
    pub(crate) shut_until: Time,
    /// The count of placements when it was last chosen.
    pub(crate) chosen: u64,
    /// What its work costs, as it said; empty before it did.
    pub(crate) prices: Prices,
    /// Orders that were sent to it.
    pub(crate) orders: u64,
    /// When its load was heard.
    pub(crate) heard: Time,
}

/// Contents that a worker is believed to hold at most, for each block of its pool. It does not announce how much
/// it keeps below the pool; memory and disk of a server hold some ten times what its devices do. A worker that
/// reports without end so takes some two kilobytes of this router's memory for each block it announced.
const CONTENTS_PER_BLOCK: usize = 16;

/// Workers that may exchange blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Group {
    pub(crate) workers: BTreeSet<WorkerId>,
    pub(crate) prefixes: FleetIndex,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Fleet {
    /// When the present fact happened.
    pub(crate) now: Time,
    workers: BTreeMap<WorkerId, Worker>,
    pub(crate) groups: BTreeMap<Fingerprint, Group>,
    pub(crate) devices: Devices,
    /// Open promises by flight, over all attempts and workers.
    legs: BTreeMap<FlightId, u32>,
    placements: u64,
    /// Everybody, those who drain too.
    census: Census,
    /// Counts who came, went, began to drain, changed its role, got stuck or came free.
    turns: u64,
    /// Who drains, or stopped decoding: what runs there is to move.
    leaving: BTreeSet<WorkerId>,
    stuck: BTreeSet<WorkerId>,
    /// Who is about to run out of blocks, and what it wishes to be rid of.
    pub(crate) wishes: BTreeMap<WorkerId, HandoffId>,
}

impl Worker {
    /// Whether it is there for new requests.
    pub(crate) fn accepts(&self) -> bool {
        !self.draining && !self.stuck()
    }

    pub(crate) fn stuck(&self) -> bool {
        self.progress == Progress::Stuck
    }

    /// Whether anything is known of what its work costs.
    pub(crate) fn priced(&self) -> bool {
        !self.prices.rows.is_empty()
    }

    /// Why its running sequences are to move, if they are.
    fn leaves(&self) -> Option<MoveReason> {
        match self.draining {
            true => Some(MoveReason::Drain),
            false => (!self.description.role.decodes()).then_some(MoveReason::Role),
        }
    }
}

impl Fleet {
    pub(crate) fn census(&self) -> Census {
        Census {
            devices: self.census.total() - self.devices.spare(),
            ..self.census
        }
    }

    /// Moves when readiness may have changed.
    pub(crate) fn turns(&self) -> u64 {
        self.turns
    }

    pub(crate) fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.values()
    }

    /// The worker, if it is connected in this life.
    pub(crate) fn get(&self, who: WorkerRef) -> Option<&Worker> {
        self.workers.get(&who.worker).filter(|w| w.me == who)
    }

    fn get_mut(&mut self, who: WorkerRef) -> Option<&mut Worker> {
        self.workers.get_mut(&who.worker).filter(|w| w.me == who)
    }

    pub(crate) fn legs_open(&self, flight: FlightId) -> u32 {
        self.legs.get(&flight).copied().unwrap_or(0)
    }

    pub(crate) fn legs_open_in_all(&self) -> u32 {
        self.legs.values().sum()
    }

    /// Adds a worker; the caller has removed its earlier life.
    pub(crate) fn join(&mut self, me: WorkerRef, description: WorkerDescription) {
        let group = self
            .groups
            .entry(description.fingerprint.clone())
            .or_default();
        group.workers.insert(me.worker);
        self.devices.join(me.worker, description.device.as_ref());
        let role = description.role;
        let load = Load {
            blocks_free: description.capacity.blocks_count,
            ..Load::default()
        };
        let worker = Worker {
            me,
            description,
            load,
            ledger: Ledger::default(),
            draining: false,
            progress: Progress::Moving,
            shut_until: Time::ZERO,
            chosen: 0,
            prices: Prices::default(),
            orders: 0,
            heard: self.now,
        };
        let before = self.workers.insert(me.worker, worker);
        assert!(before.is_none(), "{me} joined while connected");
        *self.census.of_role(role) += 1;
        self.turns += 1;
    }

    /// Forgets a worker in whatever life it is. Gives the hand-offs it had.
    pub(crate) fn leave(&mut self, worker: WorkerId) -> Vec<HandoffId> {
        let Some(gone) = self.workers.remove(&worker) else {
            return Vec::new();
        };
        *self.census.of_role(gone.description.role) -= 1;
        self.turns += 1;
        self.leaving.remove(&worker);
        self.stuck.remove(&worker);
        self.wishes.remove(&worker);
        self.devices.leave(worker, gone.description.device.as_ref());
        let fingerprint = &gone.description.fingerprint;
        if let Some(group) = self.groups.get_mut(fingerprint) {
            group.workers.remove(&worker);
            group.prefixes.lost(gone.me);
            if group.workers.is_empty() {
                self.groups.remove(fingerprint);
            }
        }
        let handoffs: Vec<HandoffId> = gone.ledger.handoffs().map(|(id, _)| id).collect();
        for handoff in &handoffs {
            self.drop_leg(handoff.flight);
        }
        handoffs
    }

    /// Takes a worker's `Load`, `Prices` or `Prefix`; other reports are not the fleet's.
    pub(crate) fn hear(&mut self, who: WorkerRef, report: &Report) {
        let Some(worker) = self.workers.get_mut(&who.worker).filter(|w| w.me == who) else {
            return;
        };
        match report {
            Report::Load(load) => {
                worker.load = *load;
                worker.heard = self.now;
                worker.ledger.settle(load.orders_heard);
            }
            Report::Prices(prices) => {
                let news = worker.prices.rows.is_empty() != prices.rows.is_empty();
                worker.prices.clone_from(prices);
                // Who could serve what changes with it.
                self.turns += u64::from(news);
            }
            Report::Prefix { stored, evicted } => {
                if let Some(group) = self.groups.get_mut(&worker.description.fingerprint) {
                    // What was evicted and stored again in one report is there.
                    let blocks = worker.description.capacity.blocks_count as usize;
                    let most = blocks.saturating_mul(CONTENTS_PER_BLOCK);
                    group.prefixes.evicted(who, evicted);
                    group.prefixes.stored(who, stored, most);
                }
            }
            _ => {}
        }
    }

    pub(crate) fn shut(&mut self, who: WorkerRef, until: Time) {
        if let Some(worker) = self.get_mut(who) {
            worker.shut_until = worker.shut_until.max(until);
        }
    }

    /// Whether a load tells of anything that became less there than it was thought to be: only then
    /// may it make room.
    pub(crate) fn eased_by(&self, who: WorkerRef, load: &Load) -> bool {
        let Some(worker) = self.get(who) else {
            return false;
        };
        let old = &worker.load;
        let sequences = |load: &Load| {
            load.sequences_waiting
                .saturating_add(load.sequences_running)
        };
        let gap = |load: &Load| load.tpot_least.unwrap_or(Duration::MAX);
        let new = load.backlog.micros.iter().flatten();
        let mut backlog = old.backlog.micros.iter().flatten().zip(new);
        !worker.ledger.settled_by(load.orders_heard).is_empty()
            || load.blocks_free > old.blocks_free
            || sequences(load) < sequences(old)
            || load.queue_tokens < old.queue_tokens
            || load.context_tokens < old.context_tokens
            || load.streams < old.streams
            || gap(load) > gap(old)
            || load.progress != old.progress
            || backlog.any(|(old, new)| new < old)
    }

    /// Whether any worker said what its work costs.
    pub(crate) fn priced(&self) -> bool {
        self.workers.values().any(Worker::priced)
    }

    /// Something was let go there: what the worker estimated when it refused is out of date.
    pub(crate) fn open(&mut self, who: WorkerRef) {
        if let Some(worker) = self.get_mut(who) {
            worker.shut_until = Time::ZERO;
        }
    }

    pub(crate) fn drain(&mut self, who: WorkerRef) {
        if let Some(worker) = self.get_mut(who) {
            worker.draining = true;
            self.turns += 1;
            self.leaving.insert(who.worker);
        }
    }

    /// The worker serves these legs from now on.
    pub(crate) fn serve(&mut self, who: WorkerRef, role: Role) {
        let Some(worker) = self.get_mut(who) else {
            return;
        };
        let before = std::mem::replace(&mut worker.description.role, role);
        if before.decodes() && !role.decodes() {
            // What came as a guest came to another worker than this one is now.
            worker.ledger.no_guests();
        }
        let leaves = worker.leaves().is_some();
        *self.census.of_role(before) -= 1;
        *self.census.of_role(role) += 1;
        self.turns += 1;
        if !leaves {
            self.leaving.remove(&who.worker);
        } else if before != role {
            // Said again, as everybody does who joins, it leaves nothing behind: what would have to move
            // was placed there for another role.
            self.leaving.insert(who.worker);
        }
    }

    /// Says whether that is new.
    pub(crate) fn progresses(&mut self, who: WorkerRef, progress: Progress) -> bool {
        let Some(worker) = self.get_mut(who).filter(|w| w.progress != progress) else {
            return false;
        };
        worker.progress = progress;
        self.turns += 1;
        match progress {
            Progress::Stuck => self.stuck.insert(who.worker),
            Progress::Moving => self.stuck.remove(&who.worker),
        };
        true
    }

    /// Whether that worker, in whatever life, makes no progress.
    pub(crate) fn is_at_a_stand(&self, worker: WorkerId) -> bool {
        self.stuck.contains(&worker)
    }

    /// Workers that make no progress.
    pub(crate) fn stuck(&self) -> Vec<WorkerRef> {
        self.lives(&self.stuck).map(|worker| worker.me).collect()
    }

    /// Workers from which running sequences are to move, and why.
    pub(crate) fn leaving(&self) -> Vec<(WorkerRef, MoveReason)> {
        let lives = self.lives(&self.leaving);
        let leaving = lives.filter_map(|worker| Some((worker, worker.leaves()?)));
        let with_some = leaving.filter(|(worker, why)| {
            let totals = worker.ledger.totals();
            let stay = if *why == MoveReason::Role {
                totals.guests
            } else {
                0
            };
            totals.sequences > stay
        });
        with_some.map(|(worker, why)| (worker.me, why)).collect()
    }

    /// Whether the worker drains and holds nothing of a flight any more.
    pub(crate) fn has_drained(&self, who: WorkerRef) -> bool {
        let worker = self.get(who);
        worker.is_some_and(|worker| worker.draining && worker.ledger.handoffs().next().is_none())
    }

    pub(crate) fn leaves(&self, who: WorkerRef) -> Option<MoveReason> {
        let worker = self.get(who)?;
        worker
            .leaves()
            .filter(|_| self.leaving.contains(&who.worker))
    }

    pub(crate) fn is_stuck(&self, who: WorkerRef) -> bool {
        self.get(who).is_some_and(Worker::stuck)
    }

    pub(crate) fn wish(&mut self, who: WorkerRef, handoff: HandoffId) {
        if self.promised(who, handoff).is_some() {
            self.wishes.insert(who.worker, handoff);
        }
    }

    pub(crate) fn unwish(&mut self, who: WorkerRef) {
        if self.get(who).is_some() {
            self.wishes.remove(&who.worker);
        }
    }

    pub(crate) fn wishes(&self) -> Vec<(WorkerRef, HandoffId)> {
        let live = |(id, handoff): (&WorkerId, &HandoffId)| Some((self.life_of(*id)?, *handoff));
        self.wishes.iter().filter_map(live).collect()
    }

    /// How many of the worker's blocks so many tokens fill.
    pub(crate) fn blocks(&self, who: WorkerRef, tokens: u32) -> Option<u32> {
        let capacity = &self.get(who)?.description.capacity;
        Some(tokens.div_ceil(capacity.block_tokens))
    }

    pub(crate) fn lives<'a>(
        &'a self,
        ids: &'a BTreeSet<WorkerId>,
    ) -> impl Iterator<Item = &'a Worker> {
        ids.iter().filter_map(|id| self.workers.get(id))
    }

    /// The group's workers in the order of their names: where there is but one group without looking up each.
    pub(crate) fn members<'a>(&'a self, group: &'a Group) -> impl Iterator<Item = &'a Worker> {
        let only = group.workers.len() == self.workers.len();
        let all = only.then(|| self.workers.values());
        let some = (!only).then(|| self.lives(&group.workers));
        let all = all.into_iter().flatten();
        all.chain(some.into_iter().flatten())
    }

    /// The worker in the life in which it is connected.
    pub(crate) fn life_of(&self, worker: WorkerId) -> Option<WorkerRef> {
        self.workers.get(&worker).map(|worker| worker.me)
    }

    /// Whether there are workers, and none could hold so many tokens.
    pub(crate) fn is_too_long(&self, tokens: usize) -> bool {
        let holds =
            |worker: &Worker| tokens < worker.description.capacity.context_tokens_max as usize;
        !self.workers.is_empty() && !self.workers.values().any(holds)
    }

    /// The longest sequence that a worker can hold; nothing is known of one that is gone.
    pub(crate) fn context_tokens_max(&self, who: WorkerRef) -> u32 {
        let about = self.get(who).map(|worker| &worker.description.capacity);
        about.map_or(u32::MAX, |capacity| capacity.context_tokens_max)
    }

    pub(crate) fn fingerprint(&self, who: WorkerRef) -> Option<&Fingerprint> {
        self.get(who).map(|worker| &worker.description.fingerprint)
    }

    /// Hand-offs of which the worker holds something.
    pub(crate) fn handoffs(&self, who: WorkerRef) -> Vec<HandoffId> {
        let ledger = self.get(who).map(|worker| &worker.ledger);
        let all = ledger.into_iter().flat_map(Ledger::handoffs);
        all.map(|(handoff, _)| handoff).collect()
    }

    /// Of these, those that generate there or will and are to go for that reason: guests stay where the
    /// role was not theirs to begin with.
    pub(crate) fn sequences_to_move(&self, who: WorkerRef, why: MoveReason) -> Vec<HandoffId> {
        let stays = |handoff: &HandoffId| self.promised(who, *handoff).is_some_and(|p| p.guest);
        let mut sequences = self.sequences(who);
        sequences.retain(|handoff| why != MoveReason::Role || !stays(handoff));
        sequences
    }

    /// Of these, those that generate there or will.
    pub(crate) fn sequences(&self, who: WorkerRef) -> Vec<HandoffId> {
        let ledger = self.get(who).map(|worker| &worker.ledger);
        let all = ledger.into_iter().flat_map(Ledger::handoffs);
        all.filter(|(_, promise)| promise.blocks > 0)
            .map(|(handoff, _)| handoff)
            .collect()
    }

    // === promises ===

    /// Counts a placement: what each leg was promised, before anything is sent.
    pub(crate) fn promise(&mut self, handoff: HandoffId, placing: &Placing, ask: &Ask) {
        self.placements += 1;
        let Placing {
            choice, outlook, ..
        } = placing;
        let work = outlook.map_or(Duration::ZERO, |outlook| outlook.work);
        let urgency = outlook.map_or(0, |outlook| outlook.urgency);
        let tokens = u64::from(ask.prompt_tokens - choice.cached_tokens);
        let mut legs = vec![choice.decode];
        if choice.prefill != choice.decode {
            legs.push(choice.prefill);
        }
        for who in legs {
            let decodes = who == choice.decode;
            let computes = who == choice.prefill;
            let blocks = self.blocks(who, ask.tokens_expected).unwrap_or(0);
            let role = self.get(who).map(|worker| worker.description.role);
            let part = Promise {
                tokens: if computes { tokens } else { 0 },
                blocks: if decodes { blocks } else { 0 },
                told: decodes,
                work: if computes { work } else { Duration::ZERO },
                urgency: if computes { urgency } else { 0 },
                tpot: placing.tpot.filter(|_| decodes),
                span: match outlook.filter(|_| decodes) {
                    Some(outlook) => outlook.span(self.now, placing.tpot.unwrap_or_default()),
                    None => Span::NONE,
                },
                guest: decodes && role.is_some_and(|role| !role.decodes()),
                ..Promise::NEW
            };
            self.promise_to(who, handoff, part);
        }
    }

    /// The same for a sequence that moves: its sender has it already.
    pub(crate) fn promise_move(&mut self, handoff: HandoffId, target: WorkerRef, burden: &Burden) {
        self.placements += 1;
        let part = Promise {
            blocks: self.blocks(target, burden.ask.tokens_expected).unwrap_or(0),
            told: true,
            tpot: burden.tpot,
            ..Promise::NEW
        };
        self.promise_to(target, handoff, part);
    }

    fn promise_to(&mut self, who: WorkerRef, handoff: HandoffId, promise: Promise) {
        let (placements, now) = (self.placements, self.now);
        if let Some(worker) = self.get_mut(who) {
            worker.chosen = placements;
            worker.ledger.open(handoff, promise, now);
            *self.legs.entry(handoff.flight).or_default() += 1;
        }
    }

    pub(crate) fn promised(&self, who: WorkerRef, handoff: HandoffId) -> Option<&Promise> {
        self.get(who)?.ledger.get(handoff)
    }

    pub(crate) fn change(
        &mut self,
        who: WorkerRef,
        handoff: HandoffId,
        edit: impl FnOnce(&mut Promise),
    ) {
        if let Some(worker) = self.get_mut(who) {
            worker.ledger.change(handoff, edit);
        }
    }

    /// Counts an order to the worker; `last` is that of the hand-off which tells it all.
    pub(crate) fn ordered(&mut self, who: WorkerRef, last: Option<HandoffId>) {
        if let Some(worker) = self.get_mut(who) {
            worker.orders += 1;
            let number = worker.orders;
            if let Some(handoff) = last {
                let number = |p: &mut Promise| p.order = Some(number);
                worker.ledger.change(handoff, number);
            }
        }
    }

    /// The hand-off's stream runs there now.
    pub(crate) fn began(&mut self, who: WorkerRef, handoff: HandoffId) {
        let now = self.now;
        if let Some(worker) = self.get_mut(who) {
            worker.ledger.began(handoff, now);
        }
    }

    /// The worker computed its prompt.
    pub(crate) fn prompt_done(&mut self, who: WorkerRef, handoff: HandoffId) {
        let now = self.now;
        if let Some(worker) = self.get_mut(who) {
            worker.ledger.prompt_done(handoff, now);
        }
    }

    /// Nothing of the hand-off is on this worker any more. Says whether there was.
    pub(crate) fn release(&mut self, who: WorkerRef, handoff: HandoffId) -> Option<Promise> {
        let now = self.now;
        let promise = self.get_mut(who)?.ledger.close(handoff, now)?;
        if self.wishes.get(&who.worker) == Some(&handoff) {
            self.wishes.remove(&who.worker);
        }
        self.drop_leg(handoff.flight);
        Some(promise)
    }

    fn drop_leg(&mut self, flight: FlightId) {
        if let Some(count) = self.legs.get_mut(&flight) {
            *count -= 1;
            if *count == 0 {
                self.legs.remove(&flight);
            }
        }
    }

    // === contents ===

    /// Each group's block size; it is part of what makes a fingerprint.
    pub(crate) fn block_sizes(&self) -> impl Iterator<Item = u32> {
        self.groups.values().filter_map(|g| self.block_tokens(g))
    }

    pub(crate) fn block_tokens(&self, group: &Group) -> Option<u32> {
        let worker = self.workers.get(group.workers.first()?)?;
        Some(worker.description.capacity.block_tokens)
    }

    /// See [`crate::Brain::fingerprint`].
    pub(crate) fn hash_groups(&self, hasher: &mut impl Hasher) {
        for group in self.groups.values() {
            group.prefixes.hash(hasher);
        }
        self.leaving.hash(hasher);
        self.wishes.hash(hasher);
    }
}

#[cfg(test)]
mod tests {
    use super::{CONTENTS_PER_BLOCK, Fleet};
    use cleave_domain::{
        BlockHash, Capacity, Fingerprint, Report, Role, WorkerDescription, WorkerId, WorkerRef,
    };

    #[test]
    fn prefix_reports_are_bounded_by_the_workers_blocks() {
        let me = WorkerRef {
            worker: WorkerId(1),
            ..WorkerRef::default()
        };
        let capacity = Capacity {
            block_tokens: 16,
            block_bytes: 64,
            blocks_count: 4,
            slots_count: 1,
            step_tokens_max: 16,
            context_tokens_max: 64,
        };
        let description = WorkerDescription {
            role: Role::Both,
            home: Role::Both,
            model: String::new(),
            fingerprint: Fingerprint::default(),
            capacity,
            queue_max: 1,
            device: None,
        };
        let mut fleet = Fleet::default();
        fleet.join(me, description);
        for number in 0..10_000_u128 {
            let stored = vec![BlockHash(number.wrapping_mul(0x9e37_79b9).to_be_bytes())];
            let evicted = Vec::new();
            fleet.hear(me, &Report::Prefix { stored, evicted });
        }
        let prefixes = &fleet.groups[&Fingerprint::default()].prefixes;
        assert_eq!(prefixes.blocks_count(me), 4 * CONTENTS_PER_BLOCK);
        prefixes.check();
    }
}
