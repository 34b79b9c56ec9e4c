//! The brain itself: its state, its three entry points (`handle`, `poll`, `deadline`), and its
//! getters.
//!
//! Owns: the order of work within one `handle`: the fact, then expired deadlines, then the next
//! step, then reports of what changed. Never: holds a rule of one of its parts; those have their
//! own files.
//! Invariant: see [`WorkerBrain::check`].

use crate::batch::StepPipeline;
use crate::context::WorkerContext;
use crate::deadline::Deadlines;
use crate::forecast::WorkForecast;
use crate::handoff::FencedPeers;
use crate::handoff::OutboundMigration;
use crate::handoff::RecentlyEnded;
use crate::handoff::Resends;
use crate::memory::MemoryPressure;
use crate::memory::OffloadTiers;
use crate::policy::{ServiceRank, SwapPrices};
use crate::report::RouterReports;
use crate::sequences::WorkerSequence;
use crate::speculate::DraftAcceptance;
use crate::{WorkerInput, WorkerLimits, WorkerOutput};
use cleave_domain::{HandoffId, KvUnit, Order, RouterId, SlotIndex, Time};
use cleave_kv::{KvPools, Packet, PlanePool};
use std::collections::{BTreeMap, BTreeSet};

/// A worker's brain. See the crate for how to drive it.
#[derive(Clone, Debug)]
pub struct WorkerBrain {
    pub(crate) context: WorkerContext,
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
    /// Steps given to the engine and not answered.
    pub(crate) steps: StepPipeline,
    /// Workers that can write nothing here any more.
    pub(crate) fenced: FencedPeers,
    /// Orders accepted so far.
    pub(crate) arrivals: u64,
    pub(crate) swap_prices: SwapPrices,
    /// Share of drafts that were accepted, over all sequences.
    pub(crate) acceptance: DraftAcceptance,
    /// Index of the KV kept in host memory and on disk.
    pub(crate) tiers: OffloadTiers,
    /// Prices of this worker's work, and predictions.
    pub(crate) forecast: WorkForecast,
    /// Routers, and what they were sent last.
    pub(crate) reports: RouterReports,
    /// The last request to a router that a sequence be moved.
    pub(crate) pressure: MemoryPressure,
}

impl WorkerBrain {
    /// A worker that holds nothing and knows no router.
    pub fn new(limits: WorkerLimits) -> Self {
        let limits = limits.possible();
        let capacity = &limits.capacity;
        // Every sequence with a slot can decode in one step.
        let slots = capacity.slots_count.min(capacity.step_tokens_max);
        Self {
            pools: KvPools::new(capacity),
            sequences: BTreeMap::new(),
            recently_ended: RecentlyEnded::default(),
            moves: BTreeMap::new(),
            active: BTreeSet::new(),
            slots_free: (0..slots).map(SlotIndex).collect(),
            leases: Deadlines::default(),
            stalls: Deadlines::default(),
            resends: Resends::default(),
            steps: StepPipeline::default(),
            fenced: FencedPeers::default(),
            arrivals: 0,
            swap_prices: SwapPrices::default(),
            acceptance: DraftAcceptance::default(),
            tiers: match limits.host_blocks {
                0 => OffloadTiers::new(0, 0),
                blocks => OffloadTiers::new(blocks, limits.disk_blocks),
            },
            forecast: WorkForecast::new(&limits),
            reports: RouterReports::new(&limits),
            pressure: MemoryPressure::default(),
            context: WorkerContext::new(limits),
        }
    }

    // === facts ===

    /// Handles what happened at `now`; a time before an earlier one counts as that one.
    pub fn handle(&mut self, now: Time, input: WorkerInput) {
        let before = self.context.advance(now);
        let now = self.context.now();
        // The due time of the step ahead may come with any fact, and `deadline` then names it no
        // more.
        let is_due = |at| before < at && at <= now;
        let is_ahead_due = self
            .steps
            .ahead_at(self.context.limits())
            .is_some_and(is_due);
        self.context.changed_if(is_ahead_due);
        // Copies under way change nothing that a step or a router depends on, until they have
        // landed.
        let is_copy = matches!(
            &input,
            WorkerInput::Imported { .. }
                | WorkerInput::Exported { .. }
                | WorkerInput::Arrived {
                    packet: Packet::Frame { .. },
                    ..
                }
        );
        self.context.changed_if(!is_copy);
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
            WorkerInput::LinkMeasured { peer, price } => {
                self.forecast.link_measured(peer.worker, price)
            }
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
            WorkerInput::Draining => self.reports.drain(&mut self.context),
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
        if self.context.take_changed() {
            self.plan();
            self.offload();
            self.report_changes();
        }
    }

    fn handle_order(&mut self, router: RouterId, order: Order) {
        if self.forecast.has_prices() {
            self.reports.order_received(router);
        }
        match order {
            Order::Reserve(reserve) => self.reserve(router, reserve),
            Order::Prefill(prefill) => self.prefill(router, prefill),
            Order::Renew { handoffs } => self.renew(router, &handoffs),
            Order::Cancel { handoff } => self.cancel(router, handoff),
            Order::Drain => self.reports.drain(&mut self.context),
            Order::Migrate(migrate) => self.migrate(router, migrate),
            Order::Serve { role } => self.reports.serve(&mut self.context, role),
            Order::Relay(gossip) => self.reports.relay(&mut self.context, router, &gossip),
        }
    }

    fn router_joined(&mut self, router: RouterId) {
        // The others know of these changes before the new one is sent everything.
        self.report_prefixes();
        let contents = self.cache_contents();
        self.reports
            .join(&mut self.context, router, &contents, &self.forecast);
    }

    /// Reports the consequences of the fact: new prefixes (with each step, or at once when none is
    /// under way), a new load, the end of draining.
    fn report_changes(&mut self) {
        if self.steps.is_empty() {
            self.report_prefixes();
        }
        let load = self.load();
        self.reports
            .report_load(&mut self.context, load, &self.forecast, &self.steps);
        let pool = self.audit(load);
        self.reports.note_pool(&mut self.context, pool);
        self.note_tiers();
        // Blocks in quarantine alone do not delay the end of draining: their writers lose access
        // when the process ends.
        let left = |s: &WorkerSequence| !(s.quarantined() && s.settled_here());
        let copied = self.tiers.offloading().len() > 0;
        if !copied && !self.sequences.values().any(left) {
            self.reports.nothing_left(&mut self.context);
        }
    }

    pub(crate) fn report_prefixes(&mut self) {
        let (stored, evicted) = self.cache_changes();
        self.reports
            .report_prefixes(&mut self.context, stored, evicted);
    }

    // === outputs ===

    /// Returns the next thing to do. The body performs all of them before it handles the next fact.
    pub fn poll(&mut self) -> Option<WorkerOutput> {
        self.context.poll()
    }

    /// When to come back with [`WorkerInput::Woke`] if nothing happens before.
    pub fn deadline(&self) -> Option<Time> {
        let (lease, stall) = (self.leases.next(), self.stalls.next());
        let step = self.steps.stuck_at(self.context.limits().step_max);
        let ahead = self
            .steps
            .ahead_at(self.context.limits())
            .filter(|at| *at > self.context.now());
        let fetch = self.tiers.fetch_deadlines().next();
        let all = [lease, stall, step, ahead, fetch, self.resends.next()];
        all.into_iter().flatten().min()
    }

    // === looking ===

    /// The limits given at construction.
    pub fn limits(&self) -> &WorkerLimits {
        self.context.limits()
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
        self.sequences.is_empty() && self.steps.is_empty() && !copied
    }

    /// Whether it accepts nothing new.
    pub fn draining(&self) -> bool {
        self.reports.draining()
    }

    /// Hand-offs accepted and not released.
    pub fn handoffs(&self) -> impl Iterator<Item = HandoffId> + '_ {
        self.sequences.keys().copied()
    }
}
