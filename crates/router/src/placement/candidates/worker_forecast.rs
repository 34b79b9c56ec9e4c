//! The forecast of one worker.
//!
//! Owns: the estimate of a worker's prompts and streams, from its last load and this router's
//! claims.
//! Never: compares workers.

use crate::fleet::FleetWorker;
use crate::fleet::ledger::URGENCIES;
use crate::placement::forecast::{PlacementPriority, RequestNeed, WorkerForecast, nanos};
use crate::placement::policy::WorkerSnapshot;
use cleave_domain::{AdapterPlace, PrefillBacklog, Prices, Role, Time};
use cleave_planner::Predict;
use std::time::Duration;

/// A request without targets leaves one part in this many of a worker's slots and blocks to those
/// with targets, where the policy has such classes.
const LEFT_FREE_PARTS: u32 = 2;
/// Its prompt is not sent to a worker with a longer backlog than this either: it would occupy a
/// slot and blocks without progress.
const YIELDING_BACKLOG_MAX: Duration = Duration::from_millis(100);

/// The time until an adapter is loaded that is not, assumed: tens of megabytes from a disk, and
/// packed.
const ADAPTER_LOAD: Duration = Duration::from_millis(50);
/// The same where a copy is in host memory, assumed too: packed, or sent to the device.
const ADAPTER_LOAD_FROM_HOST: Duration = Duration::from_millis(12);

/// Prompt work of a worker.
struct PromptBacklog {
    /// Work at least as urgent as each urgency, in nanoseconds.
    backlog: [u64; URGENCIES],
    /// Rest of the step under way.
    step_left: Duration,
}

impl PromptBacklog {
    /// Estimates the work since the last load. The worker's prompts of this router progress with
    /// time; work that other routers sent meanwhile is unknown, and is assumed to equal what it
    /// finished of theirs. Open claims of this router are a lower bound.
    fn of(worker: &FleetWorker, now: Time) -> Self {
        let totals = worker.ledger.totals();
        let load = &worker.load;
        let reported_backlog = load.backlog.micros.as_flattened();
        let mut backlog = [0; URGENCIES];
        // Most decode workers have no prompts to run.
        if reported_backlog.iter().any(|micros| *micros > 0)
            || totals.work.iter().any(|work| *work > 0)
        {
            let at_work_since = worker.ledger.at_work_since;
            let at_work = nanos(now.since(at_work_since));
            let since_load = nanos(now.since(at_work_since.max(worker.load_received_at)));
            let (mut own, mut fresh, mut reported) = (0, 0, 0);
            for (urgency, ahead) in backlog.iter_mut().enumerate() {
                own += totals.work[urgency];
                fresh += totals.work_fresh[urgency];
                reported += 1000 * u64::from(reported_backlog.get(urgency).copied().unwrap_or(0));
                let expected = (reported + fresh).saturating_sub(since_load.min(own));
                *ahead = expected.max(own.saturating_sub(at_work));
            }
        }
        Self {
            backlog,
            step_left: load
                .step_left
                .saturating_sub(now.since(worker.load_received_at)),
        }
    }

    fn all(&self) -> Duration {
        Duration::from_nanos(self.backlog[URGENCIES - 1])
    }

    /// Time until work of this urgency begins: prompts ahead run in the step under way and after
    /// it; with none ahead, only that step counts.
    fn wait(&self, urgency: usize) -> Duration {
        Duration::from_nanos(self.backlog[urgency]).max(self.step_left)
    }

    /// Lateness caused to less urgent prompts if this much work of that urgency goes before them:
    /// each of those still has to begin within the bound of its urgency.
    fn lateness_caused(&self, urgency: usize, work: Duration) -> Duration {
        let mut lateness = Duration::ZERO;
        for later in urgency + 1..URGENCIES {
            let waits = self.backlog[later] > self.backlog[later - 1];
            let bound = PrefillBacklog::BOUNDS.get(later % (URGENCIES / 3));
            if let Some(bound) = bound.filter(|_| waits) {
                let begins = self.wait(later) + work;
                lateness = lateness.max(begins.saturating_sub(*bound));
            }
        }
        lateness
    }
}

/// Sequences that decode on a worker.
struct StreamLoad {
    /// Streams in its steps now.
    running: u32,
    /// These, and those still to come.
    sequences_expected: u32,
    context_tokens: u64,
}

impl StreamLoad {
    /// From a worker with `busy` sequences of any kind: on a worker with the prefill role some of
    /// these leave.
    fn of(worker: &FleetWorker, busy: u32) -> Self {
        let totals = worker.ledger.totals();
        let load = &worker.load;
        let block_tokens = worker.description.capacity.block_tokens;
        let own_tokens = totals.blocks * u64::from(block_tokens);
        // Tokens without streams come from a worker of an older release, which does not count
        // streams.
        let reported_streams = match load.streams {
            0 if load.context_tokens > 0 => load.sequences_running.max(1),
            streams => streams,
        };
        let sequences_here = reported_streams.saturating_add(totals.sequences_fresh);
        let sequences = match worker.description.role {
            Role::Prefill | Role::Both => sequences_here.max(totals.sequences),
            Role::Decode => busy,
        };
        Self {
            running: reported_streams
                .min(load.sequences_running)
                .max(totals.streams),
            sequences_expected: sequences,
            // Sequences that the load does not include yet are assumed to be as long as the others.
            context_tokens: match reported_streams {
                0 => own_tokens,
                some => load.context_tokens.saturating_mul(u64::from(sequences)) / u64::from(some),
            },
        }
    }
}

/// The forecast of a worker, with the given prices.
pub(super) fn worker_forecast<'a>(
    worker: &'a FleetWorker,
    prices: &'a Prices,
    mut snapshot: WorkerSnapshot,
    need: &RequestNeed,
) -> WorkerForecast<'a> {
    let capacity = &worker.description.capacity;
    let totals = worker.ledger.totals();
    let cached = snapshot.cached_tokens(&need.ask);
    let tokens = need.ask.prompt_tokens - cached;
    let chunk = capacity.step_tokens_max;
    let alone = prices.prefill(cached, tokens, chunk);
    let work = prices.prefill_added(cached, tokens, chunk).min(alone);
    let place = PrefillBacklog::slack_index(need.slack(alone));
    let urgency = PrefillBacklog::priority_band(need.priority) * (URGENCIES / 3) + place;
    let ahead = PromptBacklog::of(worker, need.now);
    let load = match snapshot.adapter_place {
        AdapterPlace::Resident => Duration::ZERO,
        AdapterPlace::InHost => ADAPTER_LOAD_FROM_HOST,
        AdapterPlace::OnDisk => ADAPTER_LOAD,
    };
    let streaming = StreamLoad::of(worker, snapshot.sequences);
    // A yielding request sees only the part of the worker that requests with targets do not need.
    if need.priority_over_others == PlacementPriority::Yielding {
        let slots_left_free = capacity.slots_count / LEFT_FREE_PARTS;
        let blocks = capacity.blocks_count / LEFT_FREE_PARTS;
        snapshot.sequences = snapshot.sequences.saturating_add(slots_left_free);
        snapshot.blocks_free = snapshot.blocks_free.saturating_sub(blocks);
        let states = capacity
            .states
            .map_or(0, |states| states.count / LEFT_FREE_PARTS);
        snapshot.states_free = snapshot.states_free.saturating_sub(states);
        let windows = capacity
            .windows
            .map_or(0, |windows| windows.count / LEFT_FREE_PARTS);
        snapshot.windows_free = snapshot.windows_free.saturating_sub(windows);
        if ahead.all() > YIELDING_BACKLOG_MAX {
            snapshot.prompts_open = u32::MAX;
        }
    }
    // Sequences without a target for their gap make room for one that has a target.
    let unpaced = need.tpot.map_or(0, |_| totals.without_tpot);
    let blocks = need.tpot.map_or(0, |_| totals.unpaced_blocks);
    let unpaced_tokens = blocks * u64::from(capacity.block_tokens);
    let shortest = prices.decode(1, 1);
    let gaps = [worker.load.tpot_least, worker.ledger.tpot_least(shortest)];
    WorkerForecast {
        snapshot,
        prices,
        alone,
        work,
        urgency,
        wait: ahead.wait(urgency) + load,
        backlog: ahead.all(),
        streams: streaming.running,
        sequences: streaming.sequences_expected.saturating_sub(unpaced),
        context_tokens: streaming.context_tokens.saturating_sub(unpaced_tokens),
        foreign_sequences: streaming
            .sequences_expected
            .saturating_sub(totals.sequences),
        sequences_arriving: totals.arriving - need.tpot.map_or(0, |_| totals.unpaced_arriving),
        ledger: &worker.ledger,
        tpot_least: gaps.into_iter().flatten().min(),
        lateness_caused: match need.priority_over_others {
            PlacementPriority::Resumed => Duration::ZERO,
            PlacementPriority::New | PlacementPriority::Yielding => {
                ahead.lateness_caused(urgency, work)
            }
        },
    }
}
