//! The brain itself: its machines, its three entry points (`handle`, `poll`, `deadline`), and its
//! getters.
//!
//! Owns: the order of work within one `handle`: the fact, then expired deadlines, then the next
//! step, then reports of what changed. Never: holds a rule or an invariant of one of its parts;
//! those have their own files.
//! Invariant: see [`WorkerBrain::check`].

use crate::machines::WorkerMachines;
use crate::memory::SwapEnd;
use crate::sequences::WorkerSequence;
use crate::{SwapOutcome, WorkerInput, WorkerLimits, WorkerOutput};
use cleave_domain::{HandoffId, KvUnit, Order, RouterId, Time, WorkerLoad};
use cleave_kv::PlanePool;
use std::hash::Hasher;
use std::time::Duration;

/// A worker's brain. See the crate for how to drive it.
#[derive(Clone, Debug)]
pub struct WorkerBrain {
    pub(crate) machines: WorkerMachines,
}

impl WorkerBrain {
    /// A worker that holds nothing and knows no router.
    pub fn new(limits: WorkerLimits) -> Self {
        let machines = WorkerMachines::new(limits.possible());
        Self { machines }
    }

    // === facts ===

    /// Handles what happened at `now`; a time before an earlier one counts as that one.
    pub fn handle(&mut self, now: Time, input: WorkerInput) {
        let WorkerMachines { context, steps, .. } = &mut self.machines;
        let before = context.advance(now);
        // The due time of the step ahead may come with any fact, and `deadline` then names it no
        // more.
        let ahead = steps.ahead_at(context.limits());
        let is_due = ahead.is_some_and(|at| before < at && at <= context.now());
        context.changed_if(is_due || !input.is_copy_under_way());
        self.handle_fact(input);
        self.expire();
        if self.machines.context.take_changed() {
            self.plan();
            self.report_changes();
        }
    }

    fn handle_fact(&mut self, input: WorkerInput) {
        let machines = &mut self.machines;
        let context = &mut machines.context;
        match input {
            WorkerInput::Ordered { router, order } => self.handle_order(router, order),
            WorkerInput::RouterJoined { router } => self.router_joined(router),
            WorkerInput::RouterLost { router } => {
                machines.reports.leave(router);
                machines.handoffs().router_lost(router);
            }
            WorkerInput::Arrived {
                from,
                packet,
                condition,
            } => machines.handoffs().arrived(from, packet, condition),
            WorkerInput::LinkLost { peer } => machines.handoffs().link_lost(peer),
            WorkerInput::LinkMeasured { peer, price } => {
                machines.forecast.link_measured(peer.worker, price)
            }
            WorkerInput::Exported {
                handoff,
                plane,
                ordinal,
                outcome,
            } => {
                let unit = KvUnit { plane, ordinal };
                machines.handoffs().exported(handoff, unit, outcome)
            }
            WorkerInput::Imported {
                handoff,
                part,
                outcome,
            } => machines.handoffs().imported(handoff, part, outcome),
            WorkerInput::Stepped { result, took } => {
                if machines.step_results().stepped(result, took) {
                    self.report_prefixes();
                }
            }
            WorkerInput::StepFailed {
                step,
                slots,
                fault,
                reason,
            } => {
                let mut results = machines.step_results();
                results.step_failed(step, &slots, fault, reason);
            }
            WorkerInput::EngineLost { reason } => {
                machines.reports.drain(context);
                machines.handoffs().engine_lost(&reason);
            }
            WorkerInput::Woke => {}
            WorkerInput::Draining => machines.reports.drain(context),
            WorkerInput::Fenced { peer } => machines.handoffs().fenced(peer),
            WorkerInput::SwappedOut {
                handoff,
                outcome,
                took,
            } => {
                let (memory, sequences) = (&mut machines.memory, &mut machines.sequences);
                memory.swapped_out(context, sequences, handoff, outcome, took);
                machines.handoffs().release_if_settled(handoff);
            }
            WorkerInput::SwappedIn {
                handoff,
                outcome,
                took,
            } => self.swapped_in(handoff, outcome, took),
            WorkerInput::FoundOnDisk { contents } => {
                machines.memory.found_on_disk(context, contents)
            }
            WorkerInput::Offloaded {
                content,
                outcome,
                took,
            } => machines.memory.offloaded(context, content, outcome, took),
            WorkerInput::SpilledToDisk {
                content,
                outcome,
                took,
            } => machines.memory.written_on(context, content, outcome, took),
            WorkerInput::Fetched {
                handoff,
                came: blocks,
                outcome,
                took,
                worked,
            } => {
                let memory = &mut machines.memory;
                if let Some(sequence) = machines.sequences.get_mut(handoff) {
                    memory.fetched(context, sequence, blocks, outcome, took, worked);
                }
                machines.handoffs().release_if_settled(handoff);
            }
        }
    }

    fn handle_order(&mut self, router: RouterId, order: Order) {
        let machines = &mut self.machines;
        let context = &mut machines.context;
        if machines.forecast.has_prices() {
            machines.reports.order_received(router);
        }
        match order {
            Order::Reserve(reserve) => machines.admission().reserve(router, reserve),
            Order::Prefill(prefill) => machines.admission().prefill(router, prefill),
            Order::Run(run) => machines.admission().run(router, run),
            Order::Renew { handoffs } => machines.admission().renew(router, &handoffs),
            Order::Cancel { handoff } => machines.handoffs().cancel(router, handoff),
            Order::Drain => machines.reports.drain(context),
            Order::Migrate(migrate) => machines.handoffs().migrate(router, migrate),
            Order::Serve { role } => machines.reports.serve(context, role),
            Order::Relay(gossip) => machines.reports.relay(context, router, &gossip),
            // Adapters are loaded beside the brain.
            Order::FetchAdapter { adapter: _ } => {}
        }
    }

    /// Content that could not be copied back from host memory may still be in a tier.
    fn swapped_in(&mut self, handoff: HandoffId, outcome: SwapOutcome, took: Duration) {
        let machines = &mut self.machines;
        let (context, sequences) = (&mut machines.context, &mut machines.sequences);
        let memory = &mut machines.memory;
        let end = memory.swapped_in(context, sequences, handoff, outcome, took);
        if end == SwapEnd::Lost
            && let Some(sequence) = sequences.get_mut(handoff)
        {
            memory.fetch(context, sequence, &machines.steps, &machines.forecast);
        }
        machines.handoffs().release_if_settled(handoff);
    }

    fn router_joined(&mut self, router: RouterId) {
        // The others know of these changes before the new one is sent everything.
        self.report_prefixes();
        let machines = &mut self.machines;
        let contents = machines.memory.cache_contents();
        let (context, forecast) = (&mut machines.context, &machines.forecast);
        machines.reports.join(context, router, &contents, forecast);
    }

    /// Ends hand-offs with an expired lease or stall deadline, repeats packets, stops late fetches,
    /// and checks the step under way.
    fn expire(&mut self) {
        let machines = &mut self.machines;
        machines.handoffs().end_expired();
        machines.handoffs().end_stalled();
        let (context, sequences) = (&mut machines.context, &mut machines.sequences);
        machines.peers.resend_due(context, sequences);
        machines.memory.stop_late_fetches(context, sequences);
        machines.steps.detect_stuck(context);
    }

    /// Emits a step if none is under way and there is something to run, and the one after it if
    /// that is already determined; then copies blocks to the tiers.
    fn plan(&mut self) {
        if self.machines.steps.is_empty() && self.machines.step_planner().plan() {
            self.step_emitted();
        }
        if self.machines.step_ahead().plan() {
            self.step_emitted();
        }
        let machines = &mut self.machines;
        if !machines.reports.draining() {
            let context = &mut machines.context;
            machines.memory.offload(context, &machines.steps);
        }
    }

    fn step_emitted(&mut self) {
        let machines = &mut self.machines;
        let (context, sequences) = (&mut machines.context, &mut machines.sequences);
        let memory = &mut machines.memory;
        memory.fetches_wait_for_step(sequences, &machines.steps);
        machines
            .pressure
            .request_migration(context, sequences, memory);
    }

    /// Reports the consequences of the fact: new prefixes (with each step, or at once when none is
    /// under way), a new load, the end of draining.
    fn report_changes(&mut self) {
        if self.machines.steps.is_empty() {
            self.report_prefixes();
        }
        let load = self.load();
        let pool = self.machines.snapshot().audit(load);
        let machines = &mut self.machines;
        let (context, reports) = (&mut machines.context, &mut machines.reports);
        reports.report_load(context, load, &machines.forecast, &machines.steps);
        reports.note_pool(context, pool);
        machines.memory.note_tiers(context);
        // Blocks in quarantine alone do not delay the end of draining: their writers lose access
        // when the process ends.
        let left = |s: &WorkerSequence| !(s.quarantined() && s.settled_here());
        if !machines.memory.is_offloading() && !machines.sequences.iter().any(left) {
            reports.nothing_left(context);
        }
    }

    fn report_prefixes(&mut self) {
        let machines = &mut self.machines;
        let (stored, evicted) = machines.memory.cache_changes();
        let context = &mut machines.context;
        machines.reports.report_prefixes(context, stored, evicted);
    }

    // === outputs ===

    /// Returns the next thing to do. The body performs all of them before it handles the next fact.
    pub fn poll(&mut self) -> Option<WorkerOutput> {
        self.machines.context.poll()
    }

    /// When to come back with [`WorkerInput::Woke`] if nothing happens before.
    pub fn deadline(&self) -> Option<Time> {
        let limits = self.machines.context.limits();
        let ahead = self.machines.steps.ahead_at(limits);
        let all = [
            self.machines.sequences.lease_end(),
            self.machines.peers.deadline(),
            self.machines.memory.fetch_end(),
            self.machines.steps.stuck_at(limits.step_max),
            ahead.filter(|at| *at > self.machines.context.now()),
        ];
        all.into_iter().flatten().min()
    }

    // === looking ===

    /// The limits given at construction.
    pub fn limits(&self) -> &WorkerLimits {
        self.machines.context.limits()
    }

    /// The worker's current load.
    pub fn load(&self) -> WorkerLoad {
        self.machines.snapshot().load()
    }

    /// The pool of blocks.
    pub fn pool(&self) -> &PlanePool {
        self.machines.memory.blocks()
    }

    /// The pool of state slots, if the model has states.
    pub fn states(&self) -> Option<&PlanePool> {
        self.machines.memory.states()
    }

    /// The pool of window blocks, if the model has such a plane.
    pub fn windows(&self) -> Option<&PlanePool> {
        self.machines.memory.windows()
    }

    /// Whether there is no sequence, no step under way and no block being copied out.
    pub fn idle(&self) -> bool {
        let copied = self.machines.memory.is_offloading();
        self.machines.sequences.is_empty() && self.machines.steps.is_empty() && !copied
    }

    /// Whether it accepts nothing new.
    pub fn draining(&self) -> bool {
        self.machines.reports.draining()
    }

    /// Hand-offs accepted and not released.
    pub fn handoffs(&self) -> impl Iterator<Item = HandoffId> + '_ {
        self.machines.sequences.handoffs()
    }

    /// Asserts every invariant of this brain; for tests and simulators, after each
    /// [`WorkerBrain::handle`].
    pub fn check(&self) {
        self.machines.check();
    }

    /// Hashes exactly the state that decides the brain's future, so that a model checker may merge
    /// two states with equal fingerprints. Times count from now, arrivals by their order alone; the
    /// number of steps counts where prices are known, modulo the turn of late prompts, and
    /// otherwise not at all (steps under way are answered in order, and an answer to an earlier one
    /// is ignored). The caller polls every output before.
    ///
    /// Left out: the limits, except its own identity and current role; the times that steps took,
    /// which only decide when to come back; times that are only noted; the order in which the
    /// thousands of past hand-offs will be forgotten.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        self.machines.fingerprint(hasher);
    }
}
