//! The reports that concern no single hand-off: load, prices, role, prefixes, draining.
//!
//! Owns: the connected routers, the last report of each kind, and when a change is worth another
//! one. Never: changes a sequence, or sums a load itself.
//! Invariant: without prices a load is reported exactly when its counts have changed; with prices,
//! values that change with every token are reported at intervals, or when they have moved
//! noticeably. `Drained` is emitted at most once.

mod audit;
mod load;

#[cfg(test)]
pub(crate) use audit::tests as audit_tests;

use crate::batch::StepPipeline;
use crate::context::WorkerContext;
use crate::forecast::WorkForecast;
use crate::{WorkerLimits, WorkerNote, WorkerOutput};
use cleave_domain::{BlockHash, Prices, Report, Role, RouterId, ScalingGossip, Time, WorkerLoad};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

/// Prefixes in one report to a router that joins: a quarter of a megabyte, far below the size limit
/// of a message on any stream.
const PREFIXES_MAX: usize = 16 * 1024;
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

/// The routers, and what they were sent last.
#[derive(Clone, Debug)]
pub(crate) struct RouterReports {
    /// Connected routers, each with the number of its orders handled so far; orders are not counted
    /// where prices are unknown.
    routers: BTreeMap<RouterId, u64>,
    /// Prices as last reported, and when.
    prices: Prices,
    prices_at: Option<Time>,
    /// The load as last reported, and when.
    load: WorkerLoad,
    load_at: Option<Time>,
    pool_noted: Option<WorkerNote>,
    drain: WorkerDrainState,
}

/// Whether the worker accepts new work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum WorkerDrainState {
    No,
    Yes,
    /// Draining, nothing is left here, and `Drained` was emitted.
    Done,
}

impl RouterReports {
    /// Knows no router. Starts from the prices and the load that routers are sent when they join.
    pub(crate) fn new(limits: &WorkerLimits) -> Self {
        let capacity = &limits.capacity;
        Self {
            routers: BTreeMap::new(),
            prices: limits.prices.clone(),
            prices_at: None,
            load: WorkerLoad {
                blocks_free: capacity.blocks_count,
                states_free: capacity.states.map_or(0, |states| states.count),
                windows_free: capacity.windows.map_or(0, |windows| windows.count),
                ..WorkerLoad::default()
            },
            load_at: None,
            pool_noted: None,
            drain: WorkerDrainState::No,
        }
    }

    // === routers ===

    /// Sends a new router everything that the others were sent before; prices first, because a load
    /// means little without them.
    pub(crate) fn join(
        &mut self,
        context: &mut WorkerContext,
        router: RouterId,
        contents: &[BlockHash],
        forecast: &WorkForecast,
    ) {
        self.routers.insert(router, 0);
        for stored in contents.chunks(PREFIXES_MAX) {
            let (stored, evicted) = (stored.to_vec(), Vec::new());
            context.report(router, Report::Prefix { stored, evicted });
        }
        if forecast.has_prices() {
            let prices = forecast.prices().clone();
            context.report(router, Report::Prices(prices));
        }
        let role = context.limits().role;
        context.report(router, Report::Serves { role });
        self.send_load(context, router);
        if self.draining() {
            context.report(router, Report::Draining);
        }
    }

    pub(crate) fn leave(&mut self, router: RouterId) {
        self.routers.remove(&router);
    }

    /// Counts an order of a connected router.
    pub(crate) fn order_received(&mut self, router: RouterId) {
        if let Some(orders_received) = self.routers.get_mut(&router) {
            *orders_received += 1;
        }
    }

    /// Relays a message between routers, which reach each other over the workers that they share.
    pub(crate) fn relay(
        &self,
        context: &mut WorkerContext,
        from: RouterId,
        gossip: &Arc<ScalingGossip>,
    ) {
        for router in self.routers.keys().filter(|router| **router != from) {
            context.report(*router, Report::Relayed(Arc::clone(gossip)));
        }
    }

    fn report_to_all(&self, context: &mut WorkerContext, report: &Report) {
        for router in self.routers.keys() {
            context.report(*router, report.clone());
        }
    }

    // === draining ===

    /// Accepts nothing new from now on.
    pub(crate) fn drain(&mut self, context: &mut WorkerContext) {
        if self.drain == WorkerDrainState::No {
            self.drain = WorkerDrainState::Yes;
            self.report_to_all(context, &Report::Draining);
        }
    }

    /// Emits `Drained`, once, if it drains; nothing is left here.
    pub(crate) fn nothing_left(&mut self, context: &mut WorkerContext) {
        if self.drain == WorkerDrainState::Yes {
            self.drain = WorkerDrainState::Done;
            context.emit(WorkerOutput::Drained);
        }
    }

    /// Whether it accepts nothing new.
    pub(crate) fn draining(&self) -> bool {
        self.drain != WorkerDrainState::No
    }

    // === changes ===

    /// Changes the role. Work of another leg that is here goes on; new orders are judged by the new
    /// role.
    pub(crate) fn serve(&self, context: &mut WorkerContext, role: Role) {
        context.set_role(role);
        self.report_to_all(context, &Report::Serves { role });
    }

    /// Reports contents that the cache gained and lost, if there are any.
    pub(crate) fn report_prefixes(
        &self,
        context: &mut WorkerContext,
        stored: Vec<BlockHash>,
        evicted: Vec<BlockHash>,
    ) {
        if !stored.is_empty() || !evicted.is_empty() {
            self.report_to_all(context, &Report::Prefix { stored, evicted });
        }
    }

    /// Notes the use of the pool, if it has changed.
    pub(crate) fn note_pool(&mut self, context: &mut WorkerContext, pool: WorkerNote) {
        if self.pool_noted.as_ref() != Some(&pool) {
            self.pool_noted = Some(pool.clone());
            context.note(pool);
        }
    }

    /// Reports a new load and new prices to routers, if there are any.
    pub(crate) fn report_load(
        &mut self,
        context: &mut WorkerContext,
        load: WorkerLoad,
        forecast: &WorkForecast,
        steps: &StepPipeline,
    ) {
        let now = context.now();
        let fresh = self.prices_at.is_some_and(|at| now < at + PRICES_AFTER);
        if forecast.has_prices() && !fresh && prices_moved(&self.prices, forecast.prices()) {
            self.prices.clone_from(forecast.prices());
            self.prices_at = Some(now);
            self.report_to_all(context, &Report::Prices(self.prices.clone()));
        }
        if self.noticeable(&load, now, forecast, steps) {
            self.load = load;
            self.load_at = Some(now);
            for router in self.routers.keys() {
                self.send_load(context, *router);
            }
        }
    }

    /// Sends the last load, with the number of the router's own orders that it includes.
    fn send_load(&self, context: &mut WorkerContext, router: RouterId) {
        let orders_received = self.routers.get(&router).copied().unwrap_or_default();
        let load = WorkerLoad {
            orders_received,
            ..self.load
        };
        context.report(router, Report::Load(load));
    }

    /// Whether routers should receive this load now.
    fn noticeable(
        &self,
        load: &WorkerLoad,
        now: Time,
        forecast: &WorkForecast,
        steps: &StepPipeline,
    ) -> bool {
        let reported = &self.load;
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
        if !forecast.has_prices() {
            return reported.queue_tokens != load.queue_tokens;
        }
        // With prices, a backlog that moved by more than a step changes placements, so it is sent
        // now; smaller changes are bundled.
        let work = |load: &WorkerLoad| load.backlog.work_ahead(i32::MAX, None);
        let moved = work(reported).abs_diff(work(load));
        let step = steps.running().map(|step| step.predicted);
        let coarsely = moved > step.unwrap_or_default().max(work(reported) / BACKLOG_PARTS);
        let fresh = self.load_at.is_some_and(|at| now < at + LOAD_AFTER);
        let step_left = reported.step_left;
        coarsely || !fresh && WorkerLoad { step_left, ..*load } != *reported
    }

    // === looking ===

    pub(crate) fn routers(&self) -> &BTreeMap<RouterId, u64> {
        &self.routers
    }

    /// Hashes whether it drains.
    pub(crate) fn hash_drain(&self, hasher: &mut impl Hasher) {
        self.drain.hash(hasher);
    }

    /// The load as last reported.
    pub(crate) fn load_reported(&self) -> &WorkerLoad {
        &self.load
    }

    /// The part of it that decides when something is reported again.
    pub(crate) fn turn(&self, now: Time) -> (&Prices, Option<Duration>, Option<Duration>) {
        let ago = |at: Option<Time>, most: Duration| at.map(|at| now.since(at).min(most));
        (
            &self.prices,
            ago(self.prices_at, PRICES_AFTER),
            ago(self.load_at, LOAD_AFTER),
        )
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
