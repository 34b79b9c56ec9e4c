//! The brain itself: its state, its three doors, and what it says of itself.
//!
//! Owns: the order of things within one `handle`: the fact, then leases, then the next step, then
//! what changed. Never: holds a rule of one of its parts; those have their own files.
//! Invariant: see [`Brain::check`].

use crate::deadline::Deadlines;
use crate::past::Past;
use crate::policy::Rank;
use crate::sequence::{Phase, Sequence, Stage};
use crate::{Input, Limits, Note, Output};
use cleave_domain::{HandoffId, Load, Order, Report, RouterId, SlotIndex, StepId, Time};
use cleave_kv::{Packet, Pool};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
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
    /// Those released lately.
    pub(crate) past: Past,
    /// Those with tokens to run, the most important first.
    pub(crate) active: BTreeSet<Rank>,
    /// Those nobody has.
    pub(crate) slots: BTreeSet<SlotIndex>,
    /// How long each lives without being renewed.
    pub(crate) leases: Deadlines,
    /// How long those that only wait for their peer may stand still.
    pub(crate) stalls: Deadlines,
    pub(crate) under_way: Option<Step>,
    pub(crate) routers: BTreeSet<RouterId>,
    /// Steps so far; names the next one.
    pub(crate) steps: u64,
    /// Orders accepted so far.
    pub(crate) arrivals: u64,
    /// How long a step took of late.
    pub(crate) step_mean: Duration,
    pub(crate) draining: Draining,
    /// Something happened that may allow a step or alter the load.
    pub(crate) stirred: bool,
    load_told: Load,
    pool_told: Option<Note>,
    outputs: VecDeque<Output>,
}

/// What the brain remembers of the step under way.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) id: StepId,
    /// In the order of the plan's segments.
    pub(crate) placed: Vec<Placed>,
}

/// A segment of the step under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    pub(crate) handoff: HandoffId,
    pub(crate) slot: SlotIndex,
    pub(crate) tokens: u32,
    pub(crate) phase: Phase,
    pub(crate) samples: bool,
}

/// Whether the worker takes on anything new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
            active: BTreeSet::new(),
            slots: (0..slots).map(SlotIndex).collect(),
            leases: Deadlines::default(),
            stalls: Deadlines::default(),
            under_way: None,
            routers: BTreeSet::new(),
            steps: 0,
            arrivals: 0,
            step_mean: Duration::ZERO,
            draining: Draining::No,
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
        self.now = self.now.max(now);
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
            Input::StepFailed { step, reason } => self.step_failed(step, &reason),
            Input::EngineLost { reason } => self.engine_lost(&reason),
            Input::Woke => {}
            Input::Draining => self.drain(),
            Input::Severed { .. } | Input::SwappedOut { .. } | Input::SwappedIn { .. } => {}
        }
        self.expire();
        if self.stirred {
            self.stirred = false;
            self.plan();
            self.say_changes();
        }
    }

    fn ordered(&mut self, router: RouterId, order: Order) {
        match order {
            Order::Reserve(reserve) => self.reserve(router, reserve),
            Order::Prefill(prefill) => self.prefill(router, prefill),
            Order::Renew { handoffs } => self.renew(router, &handoffs),
            Order::Cancel { handoff } => self.cancel(router, handoff),
            Order::Drain => self.drain(),
            Order::Migrate(_) | Order::Serve { .. } => {}
        }
    }

    /// A router that joins hears all that the others were told before.
    fn router_joined(&mut self, router: RouterId) {
        self.say_prefix();
        self.routers.insert(router);
        let contents: Vec<_> = self.pool.contents().collect();
        for stored in contents.chunks(PREFIXES_MAX) {
            let (stored, evicted) = (stored.to_vec(), Vec::new());
            self.tell(router, Report::Prefix { stored, evicted });
        }
        self.tell(router, Report::Load(self.load_told));
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

    /// What follows from the fact: new prefixes (with each step, or at once when none is under way),
    /// a new load, the end of draining.
    fn say_changes(&mut self) {
        if self.under_way.is_none() {
            self.say_prefix();
        }
        let load = self.load();
        if load != self.load_told {
            self.load_told = load;
            self.tell_all(&Report::Load(load));
        }
        let pool = Note::Pool {
            blocks_held: self.pool.blocks_held(),
            blocks_free: load.blocks_free,
            blocks_cached: self.pool.blocks_cached(),
            sequences_running: load.sequences_running,
            sequences_waiting: load.sequences_waiting,
            blocks_reserved: 0,
            blocks_leased: 0,
            blocks_quarantined: 0,
            blocks_leaked: 0,
            blocks_swapped: 0,
        };
        if self.pool_told.as_ref() != Some(&pool) {
            self.pool_told = Some(pool.clone());
            self.note(pool);
        }
        if self.draining == Draining::Yes && self.sequences.is_empty() {
            self.draining = Draining::Done;
            self.say(Output::Drained);
        }
    }

    pub(crate) fn say_prefix(&mut self) {
        let changes = self.pool.changes();
        if !changes.stored.is_empty() || !changes.evicted.is_empty() {
            let (stored, evicted) = (changes.stored, changes.evicted);
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
        lease.into_iter().chain(stall).min()
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

    fn tell_all(&mut self, report: &Report) {
        for router in self.routers.clone() {
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

    /// Whether nothing is here and no step is under way.
    pub fn idle(&self) -> bool {
        self.sequences.is_empty() && self.under_way.is_none()
    }

    /// Whether it takes nothing new.
    pub fn draining(&self) -> bool {
        self.draining != Draining::No
    }

    /// Hand-offs accepted and not released.
    pub fn handoffs(&self) -> impl Iterator<Item = HandoffId> + '_ {
        self.sequences.keys().copied()
    }

    /// How busy it is.
    pub fn load(&self) -> Load {
        let mut load = Load {
            blocks_free: self.pool.blocks_available(),
            ..Load::default()
        };
        for sequence in self.sequences.values() {
            match sequence.stage {
                Stage::Active if sequence.slot.is_some() => load.sequences_running += 1,
                Stage::Active | Stage::Reserved => load.sequences_waiting += 1,
                Stage::Sending | Stage::Closing { .. } => {}
            }
            let decodes = sequence.phase == Phase::Decode && sequence.rest() == 1;
            if sequence.stage == Stage::Active && !decodes {
                load.queue_tokens += u64::from(sequence.rest());
            }
        }
        load
    }
}
