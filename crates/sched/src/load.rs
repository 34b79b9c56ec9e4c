//! The worker's reports: how busy it is, its prices, and how fast its links are.
//!
//! Owns: the sums of a [`WorkerLoad`], and when a change is worth a report. Never: changes a
//! sequence. Invariant: without prices a load is reported exactly when its counts have changed;
//! with prices, values that change with every token are reported at intervals, or when they have
//! moved noticeably.

use cleave_kv::PlanePool;

use crate::WorkerBrain;
use crate::brain::StepInFlight;
use crate::sequence::{SequenceStage, WorkerSequence};
use cleave_domain::{
    HandoffId, LinkPrice, PrefillBacklog, Prices, Report, RouterId, StepProgress, Time, WorkerLoad,
    WorkerRef,
};
use cleave_planner::Predict;
use std::time::Duration;

/// Shortest time between two reports of prices: routers need them no fresher.
const PRICES_AFTER: Duration = Duration::from_secs(1);
/// A price has moved if it is off by more than one part in this many.
const PRICE_PARTS: u64 = 10;
/// The error of predictions has moved if it is off by this many thousandths.
const ERROR_PERMILLE: u32 = 50;
/// A changed backlog is reported at once if it is off by more than one part in this many, and by
/// more than a step.
const BACKLOG_PARTS: u32 = 20;
/// Shortest time between two reports of everything else.
const LOAD_AFTER: Duration = Duration::from_millis(100);
/// A stream that ends within this time is gone before one that is placed now arrives.
const GONE_SOON: Duration = Duration::from_millis(500);
/// A transfer of fewer blocks measures the link's latency rather than its bandwidth.
const BLOCKS_LEAST: u64 = 4;

/// Prices and load as last reported to routers, and when.
#[derive(Clone, Debug)]
pub(crate) struct LastReport {
    prices: Prices,
    prices_at: Option<Time>,
    /// When the load was last reported.
    load_at: Option<Time>,
}

impl LastReport {
    /// Starts from the prices that routers are sent when they join.
    pub(crate) fn new(prices: Prices) -> Self {
        Self {
            prices,
            prices_at: None,
            load_at: None,
        }
    }

    /// The part of it that decides when something is reported again.
    pub(crate) fn fingerprint(&self, now: Time) -> (&Prices, Option<Duration>, Option<Duration>) {
        let ago = |at: Option<Time>, most: Duration| at.map(|at| now.since(at).min(most));
        (
            &self.prices,
            ago(self.prices_at, PRICES_AFTER),
            ago(self.load_at, LOAD_AFTER),
        )
    }
}

impl WorkerBrain {
    /// The worker's current load.
    pub fn load(&self) -> WorkerLoad {
        let stuck = self.steps_in_flight.iter().any(|step| step.stuck);
        let mut load = WorkerLoad {
            progress: if stuck {
                StepProgress::Stuck
            } else {
                StepProgress::Moving
            },
            step_left: self.step_left(),
            blocks_free: self.pools.blocks.blocks_available(),
            states_free: self.states().map_or(0, PlanePool::blocks_available),
            ..WorkerLoad::default()
        };
        for sequence in self.sequences.values() {
            match sequence.stage {
                SequenceStage::Active if sequence.slot.is_some() => load.sequences_running += 1,
                SequenceStage::Active | SequenceStage::Reserved => load.sequences_waiting += 1,
                SequenceStage::Sending | SequenceStage::Paused | SequenceStage::Closing { .. } => {
                    continue;
                }
            }
            if sequence.decodes_here() {
                let ends_soon = |gap: &Duration| {
                    sequence.decodes_next() && *gap * sequence.tokens_left() < GONE_SOON
                };
                let gap = self.keepable_gap(sequence).filter(|gap| !ends_soon(gap));
                load.tpot_least = load.tpot_least.into_iter().chain(gap).min();
                load.context_tokens += u64::from(sequence.len());
                load.streams += 1;
            }
            if sequence.has_prefill_left() {
                let size = self.limits.capacity.block_tokens;
                let rest = sequence.len() - sequence.computed_or_fetching(size);
                load.queue_tokens += u64::from(rest);
                let work = self.prompt_adds(sequence);
                let slack = self.prompt_slack(sequence);
                let priority = sequence.request.slo.priority;
                load.backlog.add(priority, slack, work);
            }
        }
        if self.learner.has_prices() {
            load
        } else {
            // Nothing is predicted, so the fields that only predictions need are not reported.
            WorkerLoad {
                context_tokens: 0,
                streams: 0,
                tpot_least: None,
                backlog: PrefillBacklog::default(),
                ..load
            }
        }
    }

    /// Predicted rest of the steps under way.
    pub(crate) fn step_left(&self) -> Duration {
        let left = |step: &StepInFlight| {
            step.predicted
                .saturating_sub(self.now.since(step.started_at))
        };
        // Nothing of a step that waits for another has passed.
        let mut steps = self.steps_in_flight.iter();
        let first = steps.next().map_or(Duration::ZERO, left);
        steps.fold(first, |left, step| left + step.predicted)
    }

    /// Time that the rest of a prompt takes, alone.
    pub(crate) fn prompt_takes(&self, sequence: &WorkerSequence) -> Duration {
        let prices = self.learner.prices();
        let done = sequence.computed_or_fetching(self.limits.capacity.block_tokens);
        prices.prefill(done, sequence.len() - done, self.quantum)
    }

    /// Time that the rest of a prompt adds to sequences that share its steps.
    pub(crate) fn prompt_adds(&self, sequence: &WorkerSequence) -> Duration {
        let prices = self.learner.prices();
        let done = sequence.computed_or_fetching(self.limits.capacity.block_tokens);
        prices.prefill_added(done, sequence.len() - done, self.quantum)
    }

    /// How long a prompt with a deadline can still wait; `None` for one without, or one that is
    /// late anyway.
    pub(crate) fn prompt_slack(&self, sequence: &WorkerSequence) -> Option<Duration> {
        sequence.on_miss?;
        let left = sequence.rank.due.since(self.now);
        left.checked_sub(self.prompt_takes(sequence))
    }

    /// The mean gap with which a stream keeps its target, if it still can.
    pub(crate) fn keepable_gap(&self, sequence: &WorkerSequence) -> Option<Duration> {
        let gap = sequence.gap_left(self.now)?;
        let context = u64::from(sequence.len());
        (gap >= self.learner.prices().decode(1, context)).then_some(gap)
    }

    /// Whether routers should receive this load now.
    fn noticeable(&self, load: &WorkerLoad) -> bool {
        let reported = &self.load_reported;
        // Counts that differ are reported at once; the fields copied here change with every token.
        let coarse = WorkerLoad {
            queue_tokens: load.queue_tokens,
            context_tokens: load.context_tokens,
            backlog: load.backlog,
            step_left: load.step_left,
            tpot_least: load.tpot_least,
            ..*reported
        };
        if coarse != *load || gap_moved(reported.tpot_least, load.tpot_least) {
            return true;
        }
        if !self.learner.has_prices() {
            return reported.queue_tokens != load.queue_tokens;
        }
        // With prices, a backlog that moved by more than a step changes placements, so it is sent
        // now; smaller changes are bundled.
        let work = |load: &WorkerLoad| load.backlog.work_ahead(i32::MAX, None);
        let moved = work(reported).abs_diff(work(load));
        let step = self.steps_in_flight.front().map(|step| step.predicted);
        let coarsely = moved > step.unwrap_or_default().max(work(reported) / BACKLOG_PARTS);
        let reported_at = self.last_report.load_at;
        let fresh = reported_at.is_some_and(|at| self.now < at + LOAD_AFTER);
        let step_left = reported.step_left;
        coarsely || !fresh && WorkerLoad { step_left, ..*load } != *reported
    }

    /// Reports a new load and new prices to routers, if there are any.
    pub(crate) fn report_load(&mut self) -> WorkerLoad {
        let reported_at = self.last_report.prices_at;
        let fresh = reported_at.is_some_and(|at| self.now < at + PRICES_AFTER);
        if self.learner.has_prices()
            && !fresh
            && prices_moved(&self.last_report.prices, self.learner.prices())
        {
            let prices = self.learner.prices().clone();
            self.last_report.prices.clone_from(&prices);
            self.last_report.prices_at = Some(self.now);
            self.report_to_all(&Report::Prices(prices));
        }
        let load = self.load();
        if self.noticeable(&load) {
            self.load_reported = load;
            self.last_report.load_at = Some(self.now);
            for router in self.routers.keys().copied().collect::<Vec<_>>() {
                self.send_load(router);
            }
        }
        load
    }

    /// Sends the last load, with the number of the router's own orders that it includes.
    fn send_load(&mut self, router: RouterId) {
        let orders_received = self.routers.get(&router).copied().unwrap_or_default();
        let load = WorkerLoad {
            orders_received,
            ..self.load_reported
        };
        self.report(router, Report::Load(load));
    }

    /// Sends a new router what the others know; prices first, because a load means little without
    /// them.
    pub(crate) fn introduce(&mut self, router: RouterId) {
        if self.learner.has_prices() {
            let prices = self.learner.prices().clone();
            self.report(router, Report::Prices(prices));
        }
        let role = self.limits.role;
        self.report(router, Report::Serves { role });
        self.send_load(router);
    }

    // === links ===

    pub(crate) fn link_measured(&mut self, peer: WorkerRef, price: LinkPrice) {
        if self.learner.has_prices() {
            self.learner.link_measured(peer.worker, price);
        }
    }

    /// Learns the link's price: all that was left of a prompt when its last token was drawn has
    /// been sent.
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
            self.learner
                .observe_transfer(sender.receiver().worker, bytes, took);
        }
    }
}

fn moved(reported: u64, current: u64, parts: u64) -> bool {
    reported.abs_diff(current) > reported.max(current) / parts
}

/// A relative limit, because the mean gap left changes with each token of a stream.
fn gap_moved(reported: Option<Duration>, current: Option<Duration>) -> bool {
    let nanos = |gap: Duration| u64::try_from(gap.as_nanos()).unwrap_or(u64::MAX);
    match (reported, current) {
        (Some(reported), Some(current)) => moved(nanos(reported), nanos(current), PRICE_PARTS),
        (reported, current) => reported != current,
    }
}

/// Whether a router that uses the reported prices would predict badly.
fn prices_moved(reported: &Prices, current: &Prices) -> bool {
    let amounts = |prices: &Prices| [prices.pair_picos, prices.context_picos, prices.draw_nanos];
    let changed = |(reported, current): (u64, u64)| moved(reported, current, PRICE_PARTS);
    let rows = reported.rows.iter().zip(&current.rows);
    let rows = rows.map(|(reported, current)| (reported.nanos, current.nanos));
    let links = reported.links.iter().zip(&current.links);
    let links = links.map(|(reported, current)| (reported.1.byte_picos, current.1.byte_picos));
    let (reported_to, current_to) = (reported.links.iter(), current.links.iter());
    reported.rows.len() != current.rows.len()
        || reported_to
            .map(|(to, _)| to)
            .ne(current_to.map(|(to, _)| to))
        || reported.error_permille.abs_diff(current.error_permille) > ERROR_PERMILLE
        || rows.chain(links).any(changed)
        || amounts(reported)
            .into_iter()
            .zip(amounts(current))
            .any(changed)
}

#[cfg(test)]
mod tests;
