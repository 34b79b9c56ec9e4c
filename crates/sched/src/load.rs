//! What a worker says of itself: how busy it is, what its work costs, how fast its links are.
//!
//! Owns: the sums that a [`Load`] is, and when a change is worth a message. Never: changes a sequence.
//! Invariant: without prices a load is told exactly when what it counts has changed; with prices what
//! changes with every token is told now and then, or when it has moved noticeably.

use crate::Brain;
use crate::brain::Step;
use crate::sequence::{Sequence, Stage};
use cleave_domain::{
    Backlog, HandoffId, LinkPrice, Load, Prices, Progress, Report, RouterId, Time, WorkerRef,
};
use cleave_planner::Predict;
use std::time::Duration;

/// Prices are told again after so long at the earliest: routers need them no fresher.
const PRICES_AFTER: Duration = Duration::from_secs(1);
/// A price has moved when it is off by more than one part in this many.
const PRICE_PARTS: u64 = 10;
/// And the error of predictions, by so many thousandths.
const ERROR_PERMILLE: u32 = 50;
/// What is left of prompts is told at once when it is off by more than one part in this many, and by
/// more than a step.
const BACKLOG_PARTS: u32 = 20;
/// Everything else after so long at the earliest.
const LOAD_AFTER: Duration = Duration::from_millis(100);
/// A stream that ends within this is gone before one that is placed now comes.
const GONE_SOON: Duration = Duration::from_millis(500);
/// Fewer blocks than these say more of the way's latency than of its speed.
const BLOCKS_LEAST: u64 = 4;

/// What routers were told last of prices, and when.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    prices: Prices,
    at: Option<Time>,
    /// When the load was told last.
    load_at: Option<Time>,
}

impl Told {
    /// Routers that join are told these.
    pub(crate) fn new(prices: Prices) -> Self {
        Self {
            prices,
            at: None,
            load_at: None,
        }
    }

    /// What of it decides when something is told again.
    pub(crate) fn fingerprint(&self, now: Time) -> (&Prices, Option<Duration>, Option<Duration>) {
        let ago = |at: Option<Time>, most: Duration| at.map(|at| now.since(at).min(most));
        (
            &self.prices,
            ago(self.at, PRICES_AFTER),
            ago(self.load_at, LOAD_AFTER),
        )
    }
}

impl Brain {
    /// How busy it is.
    pub fn load(&self) -> Load {
        let stuck = self.under_way.iter().any(|step| step.stuck);
        let mut load = Load {
            progress: if stuck {
                Progress::Stuck
            } else {
                Progress::Moving
            },
            step_left: self.step_left(),
            blocks_free: self.pool.blocks_available(),
            ..Load::default()
        };
        for sequence in self.sequences.values() {
            match sequence.stage {
                Stage::Active if sequence.slot.is_some() => load.sequences_running += 1,
                Stage::Active | Stage::Reserved => load.sequences_waiting += 1,
                Stage::Sending | Stage::Still | Stage::Closing { .. } => continue,
            }
            if sequence.decodes_here() {
                let ends_soon = |gap: &Duration| {
                    sequence.generates() && *gap * sequence.tokens_left() < GONE_SOON
                };
                let gap = self.gap_kept(sequence).filter(|gap| !ends_soon(gap));
                load.tpot_least = load.tpot_least.into_iter().chain(gap).min();
                load.context_tokens += u64::from(sequence.len());
                load.streams += 1;
            }
            if sequence.computes() {
                let size = self.limits.capacity.block_tokens;
                let rest = sequence.len() - sequence.computed_soon(size);
                load.queue_tokens += u64::from(rest);
                let work = self.prompt_adds(sequence);
                let slack = self.prompt_slack(sequence);
                let priority = sequence.request.slo.priority;
                load.backlog.add(priority, slack, work);
            }
        }
        match self.learner.knows() {
            true => load,
            // Nothing is predicted, so nothing that only predictions need is told.
            false => Load {
                context_tokens: 0,
                streams: 0,
                tpot_least: None,
                backlog: Backlog::default(),
                ..load
            },
        }
    }

    /// How long the steps under way still take.
    pub(crate) fn step_left(&self) -> Duration {
        let left = |step: &Step| step.predicted.saturating_sub(self.now.since(step.since));
        // Of one that waits for another nothing has passed.
        let mut steps = self.under_way.iter();
        let first = steps.next().map_or(Duration::ZERO, left);
        steps.fold(first, |left, step| left + step.predicted)
    }

    /// How long the rest of a prompt takes, alone.
    pub(crate) fn prompt_takes(&self, sequence: &Sequence) -> Duration {
        let prices = self.learner.prices();
        let done = sequence.computed_soon(self.limits.capacity.block_tokens);
        prices.prefill(done, sequence.len() - done, self.quantum)
    }

    /// And how long it takes others that share steps with it.
    pub(crate) fn prompt_adds(&self, sequence: &Sequence) -> Duration {
        let prices = self.learner.prices();
        let done = sequence.computed_soon(self.limits.capacity.block_tokens);
        prices.adds(done, sequence.len() - done, self.quantum)
    }

    /// How long a prompt that is due may still wait; `None` for one that is not, or is late anyway.
    pub(crate) fn prompt_slack(&self, sequence: &Sequence) -> Option<Duration> {
        sequence.unmet?;
        let left = sequence.rank.due.since(self.now);
        left.checked_sub(self.prompt_takes(sequence))
    }

    /// The mean gap with which a stream keeps its promise, if it still can.
    pub(crate) fn gap_kept(&self, sequence: &Sequence) -> Option<Duration> {
        let gap = sequence.gap_left(self.now)?;
        let context = u64::from(sequence.len());
        (gap >= self.learner.prices().decode(1, context)).then_some(gap)
    }

    /// Whether routers should hear of this load now.
    fn noticeable(&self, load: &Load) -> bool {
        let told = &self.load_told;
        let coarse = Load {
            queue_tokens: load.queue_tokens,
            context_tokens: load.context_tokens,
            backlog: load.backlog,
            step_left: load.step_left,
            tpot_least: load.tpot_least,
            ..*told
        };
        if coarse != *load || gap_moved(told.tpot_least, load.tpot_least) {
            return true;
        }
        if !self.learner.knows() {
            return told.queue_tokens != load.queue_tokens;
        }
        let work = |load: &Load| load.backlog.ahead(i32::MAX, None);
        let moved = work(told).abs_diff(work(load));
        let step = self.under_way.front().map(|step| step.predicted);
        let coarsely = moved > step.unwrap_or_default().max(work(told) / BACKLOG_PARTS);
        let said = self.told.load_at;
        let fresh = said.is_some_and(|at| self.now < at + LOAD_AFTER);
        let step_left = told.step_left;
        coarsely || !fresh && Load { step_left, ..*load } != *told
    }

    /// Tells routers of a new load and of new prices, if there are any.
    pub(crate) fn say_load(&mut self) -> Load {
        let said = self.told.at;
        let fresh = said.is_some_and(|at| self.now < at + PRICES_AFTER);
        if self.learner.knows() && !fresh && prices_moved(&self.told.prices, self.learner.prices())
        {
            let prices = self.learner.prices().clone();
            self.told.prices.clone_from(&prices);
            self.told.at = Some(self.now);
            self.tell_all(&Report::Prices(prices));
        }
        let load = self.load();
        if self.noticeable(&load) {
            self.load_told = load;
            self.told.load_at = Some(self.now);
            for router in self.routers.keys().copied().collect::<Vec<_>>() {
                self.tell_load(router);
            }
        }
        load
    }

    /// A load says how many of the router's own orders are in it.
    fn tell_load(&mut self, router: RouterId) {
        let orders_heard = self.routers.get(&router).copied().unwrap_or_default();
        let load = Load {
            orders_heard,
            ..self.load_told
        };
        self.tell(router, Report::Load(load));
    }

    /// A router that joins hears what the others know; prices first, because a load means little
    /// without them.
    pub(crate) fn introduce(&mut self, router: RouterId) {
        if self.learner.knows() {
            let prices = self.learner.prices().clone();
            self.tell(router, Report::Prices(prices));
        }
        let role = self.limits.role;
        self.tell(router, Report::Serves { role });
        self.tell_load(router);
    }

    // === links ===

    pub(crate) fn link_measured(&mut self, peer: WorkerRef, price: LinkPrice) {
        if self.learner.knows() {
            self.learner.link_measured(peer.worker, price);
        }
    }

    /// Everything that was left to send of a prompt when its last token was drawn has left.
    pub(crate) fn measure_link(&mut self, handoff: HandoffId) {
        let Some(sequence) = self.sequences.get(&handoff) else {
            return;
        };
        let (Some((drawn, before)), Some(sender)) = (sequence.times.drawn, &sequence.outgoing)
        else {
            return;
        };
        let bytes = sender.bytes().saturating_sub(before);
        if bytes >= BLOCKS_LEAST * u64::from(self.limits.capacity.block_bytes) {
            let took = self.now.since(drawn);
            self.learner.sent(sender.receiver().worker, bytes, took);
        }
    }
}

fn moved(told: u64, is: u64, parts: u64) -> bool {
    told.abs_diff(is) > told.max(is) / parts
}

/// The mean gap that a stream has left changes with each of its tokens.
fn gap_moved(told: Option<Duration>, is: Option<Duration>) -> bool {
    let nanos = |gap: Duration| u64::try_from(gap.as_nanos()).unwrap_or(u64::MAX);
    match (told, is) {
        (Some(told), Some(is)) => moved(nanos(told), nanos(is), PRICE_PARTS),
        (told, is) => told != is,
    }
}

/// Whether a router that goes by `told` would predict badly.
fn prices_moved(told: &Prices, is: &Prices) -> bool {
    let amounts = |prices: &Prices| [prices.pair_picos, prices.context_picos, prices.draw_nanos];
    let changed = |(told, is): (u64, u64)| moved(told, is, PRICE_PARTS);
    let rows = told.rows.iter().zip(&is.rows);
    let rows = rows.map(|(told, is)| (told.nanos, is.nanos));
    let links = told.links.iter().zip(&is.links);
    let links = links.map(|(told, is)| (told.1.byte_picos, is.1.byte_picos));
    let (told_to, is_to) = (told.links.iter(), is.links.iter());
    told.rows.len() != is.rows.len()
        || told_to.map(|(to, _)| to).ne(is_to.map(|(to, _)| to))
        || told.error_permille.abs_diff(is.error_permille) > ERROR_PERMILLE
        || rows.chain(links).any(changed)
        || amounts(told).into_iter().zip(amounts(is)).any(changed)
}
