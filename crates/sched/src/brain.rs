//! The brain itself: its state, its three entry points (`handle`, `poll`, `deadline`), and its
//! getters.
//!
//! Owns: the order of work within one `handle`: the fact, then expired deadlines, then the next
//! step, then reports of what changed. Never: holds a rule of one of its parts; those have their
//! own files.
//! Invariant: see [`WorkerBrain::check`].

use crate::deadline::Deadlines;
use crate::fenced::FencedPeers;
use crate::load::LastReport;
use crate::memory_pressure::MigrationRequest;
use crate::moves::OutboundMigration;
use crate::policy::{ServiceRank, SwapPrices};
use crate::recently_ended::RecentlyEnded;
use crate::resend::Resends;
use crate::sequence::{SequencePhase, WorkerSequence};
use crate::speculate::DraftAcceptance;
use crate::tier::OffloadTiers;
use crate::{DraftOutcome, WorkerInput, WorkerLimits, WorkerNote, WorkerOutput};
use cleave_domain::{
    HandoffId, KvUnit, Order, Report, Role, RouterId, ScalingGossip, SlotIndex, StepId, StepWork,
    Time, TokenId, WorkerLoad,
};
use cleave_kv::{KvPools, Packet, PlanePool};
use cleave_planner::PriceLearner;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Prefixes in one report to a router that joins: a quarter of a megabyte, far below the size limit
/// of a message on any stream.
const PREFIXES_MAX: usize = 16 * 1024;

/// A worker's brain. See the crate for how to drive it.
#[derive(Clone, Debug)]
pub struct WorkerBrain {
    pub(crate) limits: WorkerLimits,
    pub(crate) now: Time,
    pub(crate) pools: KvPools,
    /// Every hand-off accepted and not released.
    pub(crate) sequences: BTreeMap<HandoffId, WorkerSequence>,
    /// Hand-offs that ended lately, to recognise repeated orders and late packets.
    pub(crate) recently_ended: RecentlyEnded,
    /// Sequences that leave for other decode workers, by the attempt under which they leave.
    pub(crate) moves: BTreeMap<HandoffId, OutboundMigration>,
    /// Sequences with tokens to run, the most important first.
    pub(crate) active: BTreeSet<ServiceRank>,
    pub(crate) slots_free: BTreeSet<SlotIndex>,
    /// Leases: a hand-off that its router does not renew in time ends.
    pub(crate) leases: Deadlines,
    /// Deadlines of hand-offs that only wait for their peer, or for an answer from it.
    pub(crate) stalls: Deadlines,
    /// Packets that are sent again until they are answered.
    pub(crate) resends: Resends,
    /// Steps given to the engine and not answered, the oldest first; the first one runs, the second
    /// one follows it.
    pub(crate) steps_in_flight: VecDeque<StepInFlight>,
    /// Connected routers, each with the number of its orders handled so far; orders are not counted
    /// where prices are unknown.
    pub(crate) routers: BTreeMap<RouterId, u64>,
    /// Workers that can write nothing here any more.
    pub(crate) fenced: FencedPeers,
    /// Steps so far; numbers the next one.
    pub(crate) steps: u64,
    /// Orders accepted so far.
    pub(crate) arrivals: u64,
    /// Running mean of the time that recent steps took.
    pub(crate) step_mean: Duration,
    pub(crate) swap_prices: SwapPrices,
    /// Share of drafts that were accepted, over all sequences.
    pub(crate) acceptance: DraftAcceptance,
    /// Index of the KV kept in host memory and on disk.
    pub(crate) tiers: OffloadTiers,
    /// Prices of this worker's work, learned from its steps.
    pub(crate) learner: PriceLearner,
    pub(crate) last_report: LastReport,
    /// Prompt tokens that one step runs at most, derived from prices.
    pub(crate) quantum: u32,
    /// Time at which a step last held prompt tokens.
    pub(crate) last_chunk_at: Option<Time>,
    pub(crate) draining: WorkerDrainState,
    /// The last request to a router that a sequence be moved, and its time.
    pub(crate) migration_request: Option<MigrationRequest>,
    /// Set by a fact that may allow a step or alter the load; `handle` then plans and reports.
    pub(crate) dirty: bool,
    pub(crate) load_reported: WorkerLoad,
    pub(crate) pool_noted: Option<WorkerNote>,
    pub(crate) outputs: VecDeque<WorkerOutput>,
}

/// The brain's record of a step under way.
#[derive(Clone, Debug)]
pub(crate) struct StepInFlight {
    pub(crate) id: StepId,
    /// When it was given to the engine, or when the one before it ended.
    pub(crate) started_at: Time,
    /// Whether it exceeded `step_max`.
    pub(crate) stuck: bool,
    /// Its work, and the time predicted for it.
    pub(crate) work: StepWork,
    pub(crate) predicted: Duration,
    /// In the order of the plan's segments.
    pub(crate) segments: Vec<SegmentInFlight>,
    /// Draft tokens, in the same order.
    pub(crate) drafts: Vec<TokenId>,
    /// Outcome of speculation, where it is enabled.
    pub(crate) drafting: Option<DraftOutcome>,
    /// The step before it, on which it builds, failed for one sequence: none of its results can be
    /// used.
    pub(crate) unusable: bool,
}

/// A segment of a step under way.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) struct SegmentInFlight {
    pub(crate) handoff: HandoffId,
    pub(crate) slot: SlotIndex,
    /// Tokens that it runs, `drafts` included.
    pub(crate) tokens: u32,
    pub(crate) drafts: u32,
    pub(crate) phase: SequencePhase,
    pub(crate) samples: bool,
}

/// Whether the worker accepts new work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum WorkerDrainState {
    No,
    Yes,
    /// Draining, nothing is left here, and `Drained` was emitted.
    Done,
}

impl WorkerBrain {
    /// A worker that holds nothing and knows no router.
    pub fn new(limits: WorkerLimits) -> Self {
        let limits = limits.possible();
        let capacity = &limits.capacity;
        // Every sequence with a slot can decode in one step.
        let slots = capacity.slots_count.min(capacity.step_tokens_max);
        Self {
            now: Time::ZERO,
            pools: KvPools::new(capacity),
            sequences: BTreeMap::new(),
            recently_ended: RecentlyEnded::default(),
            moves: BTreeMap::new(),
            active: BTreeSet::new(),
            slots_free: (0..slots).map(SlotIndex).collect(),
            leases: Deadlines::default(),
            stalls: Deadlines::default(),
            resends: Resends::default(),
            steps_in_flight: VecDeque::new(),
            routers: BTreeMap::new(),
            fenced: FencedPeers::default(),
            steps: 0,
            arrivals: 0,
            step_mean: Duration::ZERO,
            swap_prices: SwapPrices::default(),
            acceptance: DraftAcceptance::default(),
            tiers: match limits.host_blocks {
                0 => OffloadTiers::new(0, 0),
                blocks => OffloadTiers::new(blocks, limits.disk_blocks),
            },
            learner: PriceLearner::new(limits.prices.clone()),
            last_report: LastReport::new(limits.prices.clone()),
            quantum: cleave_planner::quantum(
                &limits.prices,
                capacity.step_tokens_max,
                capacity.block_tokens,
            ),
            last_chunk_at: None,
            draining: WorkerDrainState::No,
            migration_request: None,
            dirty: false,
            load_reported: WorkerLoad {
                blocks_free: capacity.blocks_count,
                states_free: capacity.states.map_or(0, |states| states.count),
                ..WorkerLoad::default()
            },
            pool_noted: None,
            outputs: VecDeque::new(),
            limits,
        }
    }

    // === facts ===

    /// Handles what happened at `now`; a time before an earlier one counts as that one.
    pub fn handle(&mut self, now: Time, input: WorkerInput) {
        let before = self.now;
        self.now = before.max(now);
        // The due time of the step ahead may come with any fact, and `deadline` then names it no
        // more.
        let is_due = |at| before < at && at <= self.now;
        self.dirty |= self.ahead_at().is_some_and(is_due);
        // Copies under way change nothing that a step or a router depends on, until they have
        // landed.
        self.dirty |= !matches!(
            &input,
            WorkerInput::Imported { .. }
                | WorkerInput::Exported { .. }
                | WorkerInput::Arrived {
                    packet: Packet::Frame { .. },
                    ..
                }
        );
        match input {
            WorkerInput::Ordered { router, order } => self.handle_order(router, order),
            WorkerInput::RouterJoined { router } => self.router_joined(router),
            WorkerInput::RouterLost { router } => self.router_lost(router),
            WorkerInput::Arrived {
                from,
                packet,
                condition,
            } => self.arrived(from, packet, condition),
            WorkerInput::LinkLost { peer } => self.link_lost(peer),
            WorkerInput::LinkMeasured { peer, price } => self.link_measured(peer, price),
            WorkerInput::Exported {
                handoff,
                plane,
                ordinal,
                outcome,
            } => self.exported(handoff, KvUnit { plane, ordinal }, outcome),
            WorkerInput::Imported {
                handoff,
                part,
                outcome,
            } => self.imported(handoff, part, outcome),
            WorkerInput::Stepped { result, took } => self.stepped(result, took),
            WorkerInput::StepFailed {
                step,
                slots,
                reason,
            } => self.step_failed(step, &slots, &reason),
            WorkerInput::EngineLost { reason } => self.engine_lost(&reason),
            WorkerInput::Woke => {}
            WorkerInput::Draining => self.drain(),
            WorkerInput::Fenced { peer } => self.cut_off(peer),
            WorkerInput::SwappedOut {
                handoff,
                outcome,
                took,
            } => self.swapped_out(handoff, outcome, took),
            WorkerInput::SwappedIn {
                handoff,
                outcome,
                took,
            } => self.swapped_in(handoff, outcome, took),
            WorkerInput::FoundOnDisk { contents } => self.found_on_disk(contents),
            WorkerInput::Offloaded {
                content,
                outcome,
                took,
            } => self.offloaded(content, outcome, took),
            WorkerInput::SpilledToDisk {
                content,
                outcome,
                took,
            } => self.written_on(content, outcome, took),
            WorkerInput::Fetched {
                handoff,
                came: blocks_fetched,
                outcome,
                took,
                worked,
            } => self.fetched(handoff, blocks_fetched, outcome, took, worked),
        }
        self.expire();
        if self.dirty {
            self.dirty = false;
            self.plan();
            self.offload();
            self.report_changes();
        }
    }

    fn handle_order(&mut self, router: RouterId, order: Order) {
        if self.learner.has_prices()
            && let Some(orders_received) = self.routers.get_mut(&router)
        {
            *orders_received += 1;
        }
        match order {
            Order::Reserve(reserve) => self.reserve(router, reserve),
            Order::Prefill(prefill) => self.prefill(router, prefill),
            Order::Run(run) => self.run(router, run),
            Order::Renew { handoffs } => self.renew(router, &handoffs),
            Order::Cancel { handoff } => self.cancel(router, handoff),
            Order::Drain => self.drain(),
            Order::Migrate(migrate) => self.migrate(router, migrate),
            Order::Serve { role } => self.change_role(role),
            Order::Relay(gossip) => self.relay(router, &gossip),
        }
    }

    /// Relays a message between routers, which reach each other over the workers that they share.
    fn relay(&mut self, from: RouterId, gossip: &Arc<ScalingGossip>) {
        let others: Vec<RouterId> = self.routers.keys().copied().collect();
        for router in others.into_iter().filter(|router| *router != from) {
            self.report(router, Report::Relayed(Arc::clone(gossip)));
        }
    }

    /// Sends a new router everything that the others were sent before.
    fn router_joined(&mut self, router: RouterId) {
        self.report_prefix_changes();
        self.routers.insert(router, 0);
        let contents = self.cache_contents();
        for stored in contents.chunks(PREFIXES_MAX) {
            let (stored, evicted) = (stored.to_vec(), Vec::new());
            self.report(router, Report::Prefix { stored, evicted });
        }
        self.introduce(router);
        if self.draining() {
            self.report(router, Report::Draining);
        }
    }

    pub(crate) fn drain(&mut self) {
        if self.draining == WorkerDrainState::No {
            self.draining = WorkerDrainState::Yes;
            self.report_to_all(&Report::Draining);
        }
    }

    /// Changes the role. Work of another leg that is here goes on; new orders are judged by the new
    /// role.
    fn change_role(&mut self, role: Role) {
        self.limits.role = role;
        self.report_to_all(&Report::Serves { role });
    }

    /// Reports a step that exceeds `step_max` as stuck, until it ends.
    pub(crate) fn detect_stuck_step(&mut self) {
        let (now, step_max) = (self.now, self.limits.step_max);
        let late = |step: &&mut StepInFlight| !step.stuck && step.started_at + step_max <= now;
        if let Some(step) = self.steps_in_flight.front_mut().filter(late) {
            step.stuck = true;
            self.dirty = true;
            let running = now.since(step.started_at);
            self.note(WorkerNote::Stuck { running });
        }
    }

    /// Reports the consequences of the fact: new prefixes (with each step, or at once when none is
    /// under way), a new load, the end of draining.
    fn report_changes(&mut self) {
        if self.steps_in_flight.is_empty() {
            self.report_prefix_changes();
        }
        let load = self.report_load();
        let pool = self.audit(load);
        if self.pool_noted.as_ref() != Some(&pool) {
            self.pool_noted = Some(pool.clone());
            self.note(pool);
        }
        self.note_tiers();
        // Blocks in quarantine alone do not delay the end of draining: their writers lose access
        // when the process ends.
        let left = |s: &WorkerSequence| !(s.quarantined() && s.settled_here());
        let copied = self.tiers.offloading().len() > 0;
        if self.draining == WorkerDrainState::Yes && !copied && !self.sequences.values().any(left) {
            self.draining = WorkerDrainState::Done;
            self.emit_output(WorkerOutput::Drained);
        }
    }

    pub(crate) fn report_prefix_changes(&mut self) {
        let (stored, evicted) = self.cache_changes();
        if !stored.is_empty() || !evicted.is_empty() {
            self.report_to_all(&Report::Prefix { stored, evicted });
        }
    }

    // === outputs ===

    /// Returns the next thing to do. The body performs all of them before it handles the next fact.
    pub fn poll(&mut self) -> Option<WorkerOutput> {
        self.outputs.pop_front()
    }

    /// When to come back with [`WorkerInput::Woke`] if nothing happens before.
    pub fn deadline(&self) -> Option<Time> {
        let (lease, stall) = (self.leases.next(), self.stalls.next());
        let step = self.steps_in_flight.front().filter(|step| !step.stuck);
        let step = step.map(|step| step.started_at + self.limits.step_max);
        let ahead = self.ahead_at().filter(|at| *at > self.now);
        let fetch = self.tiers.fetch_deadlines().next();
        let all = [lease, stall, step, ahead, fetch, self.resends.next()];
        all.into_iter().flatten().min()
    }

    pub(crate) fn emit_output(&mut self, output: WorkerOutput) {
        self.outputs.push_back(output);
    }

    pub(crate) fn note(&mut self, note: WorkerNote) {
        self.emit_output(WorkerOutput::Note(note));
    }

    pub(crate) fn report(&mut self, router: RouterId, report: Report) {
        self.emit_output(WorkerOutput::Report { router, report });
    }

    pub(crate) fn report_to_all(&mut self, report: &Report) {
        for router in self.routers.keys().copied().collect::<Vec<_>>() {
            self.report(router, report.clone());
        }
    }

    // === looking ===

    /// The limits given at construction.
    pub fn limits(&self) -> &WorkerLimits {
        &self.limits
    }

    /// The pool of blocks.
    pub fn pool(&self) -> &PlanePool {
        &self.pools.blocks
    }

    /// The pool of state slots, if the model has states.
    pub fn states(&self) -> Option<&PlanePool> {
        self.pools.states.as_ref()
    }

    /// Whether there is no sequence, no step under way and no block being copied out.
    pub fn idle(&self) -> bool {
        let copied = self.tiers.offloading().len() > 0;
        self.sequences.is_empty() && self.steps_in_flight.is_empty() && !copied
    }

    /// Whether it accepts nothing new.
    pub fn draining(&self) -> bool {
        self.draining != WorkerDrainState::No
    }

    /// Hand-offs accepted and not released.
    pub fn handoffs(&self) -> impl Iterator<Item = HandoffId> + '_ {
        self.sequences.keys().copied()
    }
}
