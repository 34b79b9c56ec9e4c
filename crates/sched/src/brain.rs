//! The brain itself: its state, its three doors, and what it says of itself.
//!
//! Owns: the order of things within one `handle`: the fact, then leases, then the next step, then
//! what changed. Never: holds a rule of one of its parts; those have their own files.
//! Invariant: see [`Brain::check`].

use crate::crowd::Wish;
use crate::deadline::Deadlines;
use crate::load::Told;
use crate::moves::Move;
use crate::past::Past;
use crate::policy::{Rank, SwapPrices};
use crate::resend::Resends;
use crate::sequence::{Phase, Sequence};
use crate::severed::Severed;
use crate::speculate::Acceptance;
use crate::tier::Tiers;
use crate::{Drafting, Input, Limits, Note, Output};
use cleave_domain::{
    HandoffId, Load, Order, Report, Role, RouterId, SlotIndex, StepId, Time, TokenId, Voice, Work,
};
use cleave_kv::{Packet, Pool};
use cleave_planner::Learner;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Prefixes in one report to a router that joins: a quarter of a megabyte, far below what one
/// message may hold on any stream.
const PREFIXES_MAX: usize = 16 * 1024;

/// A worker's brain. See the crate for how to drive it.
#[derive(Clone, Debug)]
pub struct Brain {
    pub(crate) limits: Limits,
    pub(crate) now: Time,
    pub(crate) pool: Pool,
    /// Every hand-off accepted and not released.
    pub(crate) sequences: BTreeMap<HandoffId, Sequence>,
    /// Those that ended lately.
    pub(crate) past: Past,
    /// Sequences that leave for other decode workers, by the attempt under which they leave.
    pub(crate) moves: BTreeMap<HandoffId, Move>,
    /// Those with tokens to run, the most important first.
    pub(crate) active: BTreeSet<Rank>,
    /// Those nobody has.
    pub(crate) slots: BTreeSet<SlotIndex>,
    /// How long each lives without being renewed.
    pub(crate) leases: Deadlines,
    /// How long those that only wait for their peer may stand still, or wait to be answered.
    pub(crate) stalls: Deadlines,
    /// Packets that are sent again until they are answered.
    pub(crate) resends: Resends,
    /// Said and not answered, the oldest first; it runs, and the one behind it when it is over.
    pub(crate) under_way: VecDeque<Step>,
    /// Those connected, each with how many of its orders were heard; not counted where nothing is
    /// known of prices.
    pub(crate) routers: BTreeMap<RouterId, u64>,
    /// Who can reach nothing here any more.
    pub(crate) severed: Severed,
    /// Steps so far; names the next one.
    pub(crate) steps: u64,
    /// Orders accepted so far.
    pub(crate) arrivals: u64,
    /// How long a step took of late.
    pub(crate) step_mean: Duration,
    pub(crate) swap_prices: SwapPrices,
    /// How often guesses came true, whoever's they were.
    pub(crate) acceptance: Acceptance,
    /// What is kept below the pool.
    pub(crate) tiers: Tiers,
    /// What its work costs.
    pub(crate) learner: Learner,
    pub(crate) told: Told,
    /// Prompt tokens that a step holds at most, by what they cost.
    pub(crate) quantum: u32,
    /// When a step last held any.
    pub(crate) chunked: Option<Time>,
    pub(crate) draining: Draining,
    /// The sequence that a router was asked to have moved, and when.
    pub(crate) wish: Option<Wish>,
    /// Something happened that may allow a step or alter the load.
    pub(crate) stirred: bool,
    pub(crate) load_told: Load,
    pub(crate) pool_told: Option<Note>,
    pub(crate) outputs: VecDeque<Output>,
}

/// What the brain remembers of a step under way.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) id: StepId,
    /// When it was said, or when the one before it was over.
    pub(crate) since: Time,
    /// It takes too long.
    pub(crate) stuck: bool,
    /// What it has to do, and how long that was predicted to take.
    pub(crate) work: Work,
    pub(crate) predicted: Duration,
    /// In the order of the plan's segments.
    pub(crate) placed: Vec<Placed>,
    /// Tokens guessed, in the same order.
    pub(crate) drafts: Vec<TokenId>,
    /// What came of guessing, where it was tried.
    pub(crate) drafting: Option<Drafting>,
    /// The step before it, on which it stands, failed for one sequence: nothing it gives can be used.
    pub(crate) void: bool,
}

/// A segment of a step under way.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) struct Placed {
    pub(crate) handoff: HandoffId,
    pub(crate) slot: SlotIndex,
    /// That it runs, `drafts` included.
    pub(crate) tokens: u32,
    /// Of these, guessed.
    pub(crate) drafts: u32,
    pub(crate) phase: Phase,
    pub(crate) samples: bool,
}

/// Whether the worker takes on anything new.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Draining {
    No,
    Yes,
    /// And nothing is left, which was said.
    Done,
}

impl Brain {
    /// A worker that holds nothing and knows no router.
    pub fn new(limits: Limits) -> Self {
        let capacity = &limits.capacity;
        // Every sequence with a slot can decode in one step.
        let slots = capacity.slots_count.min(capacity.step_tokens_max);
        Self {
            now: Time::ZERO,
            pool: Pool::new(capacity.blocks_count),
            sequences: BTreeMap::new(),
            past: Past::default(),
            moves: BTreeMap::new(),
            active: BTreeSet::new(),
            slots: (0..slots).map(SlotIndex).collect(),
            leases: Deadlines::default(),
            stalls: Deadlines::default(),
            resends: Resends::default(),
            under_way: VecDeque::new(),
            routers: BTreeMap::new(),
            severed: Severed::default(),
            steps: 0,
            arrivals: 0,
            step_mean: Duration::ZERO,
            swap_prices: SwapPrices::default(),
            acceptance: Acceptance::default(),
            tiers: match limits.host_blocks {
                0 => Tiers::new(0, 0),
                blocks => Tiers::new(blocks, limits.disk_blocks),
            },
            learner: Learner::new(limits.prices.clone()),
            told: Told::new(limits.prices.clone()),
            quantum: cleave_planner::quantum(
                &limits.prices,
                capacity.step_tokens_max,
                capacity.block_tokens,
            ),
            chunked: None,
            draining: Draining::No,
            wish: None,
            stirred: false,
            load_told: Load {
                blocks_free: capacity.blocks_count,
                ..Load::default()
            },
            pool_told: None,
            outputs: VecDeque::new(),
            limits,
        }
    }

    // === facts ===

    /// Takes in what happened at `now`; a time before an earlier one counts as that one.
    pub fn handle(&mut self, now: Time, input: Input) {
        let before = self.now;
        self.now = before.max(now);
        // The moment of the step ahead may come with any fact, and `deadline` names it no more then.
        let is_due = |at| before < at && at <= self.now;
        self.stirred |= self.ahead_at().is_some_and(is_due);
        // Bytes on the move change nothing that a step or a router depends on, until they landed.
        self.stirred |= !matches!(
            &input,
            Input::Imported { .. }
                | Input::Exported { .. }
                | Input::Arrived {
                    packet: Packet::Frame { .. },
                    ..
                }
        );
        match input {
            Input::Ordered { router, order } => self.ordered(router, order),
            Input::RouterJoined { router } => self.router_joined(router),
            Input::RouterLost { router } => self.router_lost(router),
            Input::Arrived {
                from,
                packet,
                condition,
            } => self.arrived(from, packet, condition),
            Input::LinkLost { peer } => self.link_lost(peer),
            Input::LinkMeasured { peer, price } => self.link_measured(peer, price),
            Input::Exported {
                handoff,
                ordinal,
                outcome,
            } => self.exported(handoff, ordinal, outcome),
            Input::Imported {
                handoff,
                part,
                outcome,
            } => self.imported(handoff, part, outcome),
            Input::Stepped { result, took } => self.stepped(result, took),
            Input::StepFailed { step, slot, reason } => self.step_failed(step, slot, &reason),
            Input::EngineLost { reason } => self.engine_lost(&reason),
            Input::Woke => {}
            Input::Draining => self.drain(),
            Input::Severed { peer } => self.cut_off(peer),
            Input::SwappedOut {
                handoff,
                outcome,
                took,
            } => self.swapped_out(handoff, outcome, took),
            Input::SwappedIn {
                handoff,
                outcome,
                took,
            } => self.swapped_in(handoff, outcome, took),
            Input::FoundOnDisk { contents } => self.found_on_disk(contents),
            Input::Shelved {
                content,
                outcome,
                took,
            } => self.shelved(content, outcome, took),
            Input::WrittenOn {
                content,
                outcome,
                took,
            } => self.written_on(content, outcome, took),
            Input::Fetched {
                handoff,
                came,
                outcome,
                took,
                worked,
            } => self.fetched(handoff, (came, outcome), (took, worked)),
        }
        self.expire();
        if self.stirred {
            self.stirred = false;
            self.plan();
            self.shelve();
            self.say_changes();
        }
    }

    fn ordered(&mut self, router: RouterId, order: Order) {
        if self.learner.knows()
            && let Some(heard) = self.routers.get_mut(&router)
        {
            *heard += 1;
        }
        match order {
            Order::Reserve(reserve) => self.reserve(router, reserve),
            Order::Prefill(prefill) => self.prefill(router, prefill),
            Order::Renew { handoffs } => self.renew(router, &handoffs),
            Order::Cancel { handoff } => self.cancel(router, handoff),
            Order::Drain => self.drain(),
            Order::Migrate(migrate) => self.migrate(router, migrate),
            Order::Serve { role } => self.serve(role),
            Order::PassOn(voice) => self.pass_on(router, &voice),
        }
    }

    /// Routers reach each other over the workers that they share.
    fn pass_on(&mut self, from: RouterId, voice: &Arc<Voice>) {
        let others: Vec<RouterId> = self.routers.keys().copied().collect();
        for router in others.into_iter().filter(|router| *router != from) {
            self.tell(router, Report::PassedOn(Arc::clone(voice)));
        }
    }

    /// A router that joins hears all that the others were told before.
    fn router_joined(&mut self, router: RouterId) {
        self.say_prefix();
        self.routers.insert(router, 0);
        let contents = self.cache_contents();
        for stored in contents.chunks(PREFIXES_MAX) {
            let (stored, evicted) = (stored.to_vec(), Vec::new());
            self.tell(router, Report::Prefix { stored, evicted });
        }
        self.introduce(router);
        if self.draining() {
            self.tell(router, Report::Draining);
        }
    }

    pub(crate) fn drain(&mut self) {
        if self.draining == Draining::No {
            self.draining = Draining::Yes;
            self.tell_all(&Report::Draining);
        }
    }

    /// What is here of another leg goes on; what comes is of these.
    fn serve(&mut self, role: Role) {
        self.limits.role = role;
        self.tell_all(&Report::Serves { role });
    }

    /// A step that takes longer than any should: the load says so, until it is over.
    pub(crate) fn look_at_step(&mut self) {
        let (now, step_max) = (self.now, self.limits.step_max);
        let late = |step: &&mut Step| !step.stuck && step.since + step_max <= now;
        if let Some(step) = self.under_way.front_mut().filter(late) {
            step.stuck = true;
            self.stirred = true;
            let running = now.since(step.since);
            self.note(Note::Stuck { running });
        }
    }

    /// What follows from the fact: new prefixes (with each step, or at once when none is under way),
    /// a new load, the end of draining.
    fn say_changes(&mut self) {
        if self.under_way.is_empty() {
            self.say_prefix();
        }
        let load = self.say_load();
        let pool = self.audit(load);
        if self.pool_told.as_ref() != Some(&pool) {
            self.pool_told = Some(pool.clone());
            self.note(pool);
        }
        self.note_tiers();
        // Blocks in quarantine alone hold up nothing: what could write to them ends with the process.
        let left = |s: &Sequence| !(s.quarantined() && s.settled_here());
        let copied = self.tiers.leaving().len() > 0;
        if self.draining == Draining::Yes && !copied && !self.sequences.values().any(left) {
            self.draining = Draining::Done;
            self.say(Output::Drained);
        }
    }

    pub(crate) fn say_prefix(&mut self) {
        let (stored, evicted) = self.cache_changes();
        if !stored.is_empty() || !evicted.is_empty() {
            self.tell_all(&Report::Prefix { stored, evicted });
        }
    }

    // === outputs ===

    /// What to do next. Do everything before the next fact is told.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to come back with [`Input::Woke`] if nothing happens before.
    pub fn deadline(&self) -> Option<Time> {
        let (lease, stall) = (self.leases.next(), self.stalls.next());
        let step = self.under_way.front().filter(|step| !step.stuck);
        let step = step.map(|step| step.since + self.limits.step_max);
        let ahead = self.ahead_at().filter(|at| *at > self.now);
        let fetch = self.tiers.patience().next();
        let all = [lease, stall, step, ahead, fetch, self.resends.next()];
        all.into_iter().flatten().min()
    }

    pub(crate) fn say(&mut self, output: Output) {
        self.outputs.push_back(output);
    }

    pub(crate) fn note(&mut self, note: Note) {
        self.say(Output::Note(note));
    }

    pub(crate) fn tell(&mut self, router: RouterId, report: Report) {
        self.say(Output::Tell { router, report });
    }

    pub(crate) fn tell_all(&mut self, report: &Report) {
        for router in self.routers.keys().copied().collect::<Vec<_>>() {
            self.tell(router, report.clone());
        }
    }

    // === looking ===

    /// What it was told at birth.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The pool's book.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Whether nothing is here, no step is under way and no block is copied out.
    pub fn idle(&self) -> bool {
        let copied = self.tiers.leaving().len() > 0;
        self.sequences.is_empty() && self.under_way.is_empty() && !copied
    }

    /// Whether it takes nothing new.
    pub fn draining(&self) -> bool {
        self.draining != Draining::No
    }

    /// Hand-offs accepted and not released.
    pub fn handoffs(&self) -> impl Iterator<Item = HandoffId> + '_ {
        self.sequences.keys().copied()
    }
}
