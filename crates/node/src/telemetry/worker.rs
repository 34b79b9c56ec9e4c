//! What a worker's notes and load add to its series.
//!
//! Owns: one worker's labels, and the zeros from which its series begin. Never: concludes anything:
//! whether it is stuck, and how busy it is, its brain's load says. Invariant: when a worker changes its
//! role, its gauges are shown under the new one alone.

mod series;
mod tier;
mod used;

pub(crate) use series::Series;
pub use used::Ceilings;

use super::{FloatGauge, Histograms};
use cleave_domain::{Capacity, Load, Progress, Role, Work, WorkerId, WorkerRef};
use cleave_sched::{Drafting, Note};
use cleave_transfer::{LinkSpeed, Transport};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use std::time::Duration;
use tracing::warn;
use used::Used;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Worker {
    worker: String,
    role: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Sorted {
    worker: String,
    role: String,
    kind: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Peer {
    worker: String,
    role: String,
    peer: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Carried {
    worker: String,
    role: String,
    peer: String,
    transport: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Model {
    worker: String,
    role: String,
    model_name: String,
}

/// Named as pickers know it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CacheShape {
    worker: String,
    model_name: String,
    block_size: String,
    num_gpu_blocks: String,
}

/// What becomes of hand-offs at one end.
const HANDOFFS: [&str; 7] = [
    "sealed",
    "landed",
    "joined",
    "recomputed",
    "moved",
    "stayed",
    "failed",
];

/// What a pool's blocks may be; see the help of `cleave_pool_blocks`.
const BLOCKS: [&str; 8] = [
    "held",
    "free",
    "cached",
    "reserved",
    "leased",
    "quarantined",
    "leaked",
    "swapped",
];

/// One worker's hand on its series.
#[derive(Clone, Debug)]
pub(crate) struct WorkerMeters {
    series: Series,
    worker: Worker,
    model: String,
    /// What the gauges show, to be shown again under another role.
    pool: Option<Note>,
    /// Likewise.
    load: Load,
    /// Likewise.
    tiers: Option<Note>,
    /// Of a block.
    block_bytes: u32,
    /// What its device can do, if that is known.
    ceilings: Option<Ceilings>,
    used: Used,
}

impl WorkerMeters {
    pub(crate) fn new(series: &Series, name: &str, role: Role, model: &str) -> Self {
        let meters = Self {
            series: series.clone(),
            worker: Worker {
                worker: name.to_owned(),
                role: role.to_string(),
            },
            model: model.to_owned(),
            pool: None,
            load: Load::default(),
            tiers: None,
            block_bytes: 0,
            ceilings: None,
            used: Used::default(),
        };
        meters.begin();
        meters
    }

    /// How much of this is used is shown from now on.
    pub(crate) fn with_ceilings(mut self, ceilings: Option<Ceilings>) -> Self {
        self.ceilings = ceilings;
        self
    }

    /// The size of its pool is shown from now on.
    pub(crate) fn with_capacity(mut self, capacity: Capacity) -> Self {
        self.block_bytes = capacity.block_bytes;
        let shape = CacheShape {
            worker: self.worker.worker.clone(),
            model_name: self.model.clone(),
            block_size: capacity.block_tokens.to_string(),
            num_gpu_blocks: capacity.blocks_count.to_string(),
        };
        self.series.vllm_cache.get_or_create(&shape).set(1);
        self
    }

    /// Every series of the hand-off and of the pool, at zero.
    fn begin(&self) {
        let series = &self.series;
        for kind in HANDOFFS {
            drop(series.handoffs.get_or_create(&self.sorted(kind)));
        }
        for kind in ["sent", "received"] {
            drop(series.handoff_bytes.get_or_create(&self.sorted(kind)));
            drop(series.handoff_blocks.get_or_create(&self.sorted(kind)));
        }
        for kind in ["out", "in"] {
            drop(series.swap_blocks.get_or_create(&self.sorted(kind)));
        }
        for kind in BLOCKS {
            drop(series.blocks.get_or_create(&self.sorted(kind)));
        }
        for counter in [
            &series.frames_discarded,
            &series.passes_refused,
            &series.preemptions,
            &series.recomputed_tokens,
        ] {
            drop(counter.get_or_create(&self.worker));
        }
        drop(series.stuck.get_or_create(&self.worker));
        drop(series.passes.get_or_create(&self.worker));
        self.begin_tier();
        drop(series.vllm_running.get_or_create(&self.model()));
        drop(series.vllm_waiting.get_or_create(&self.model()));
        drop(series.vllm_usage.get_or_create(&self.model()));
    }

    /// From now on the worker serves other legs: counters begin anew under that role, and gauges
    /// show there what they showed before.
    pub(crate) fn serves(&mut self, role: Role) {
        let role = role.to_string();
        if role == self.worker.role {
            return;
        }
        let series = &self.series;
        for kind in BLOCKS {
            series.blocks.remove(&self.sorted(kind));
        }
        series.stuck.remove(&self.worker);
        series.passes.remove(&self.worker);
        self.end_tier();
        series.mfu.remove(&self.worker);
        series.mbu.remove(&self.worker);
        let model = self.model();
        series.vllm_running.remove(&model);
        series.vllm_waiting.remove(&model);
        series.vllm_usage.remove(&model);
        self.worker.role = role;
        self.begin();
        if let Some(pool) = self.pool.take() {
            self.count(&pool);
        }
        if let Some(tiers) = self.tiers.take() {
            self.count(&tiers);
        }
        self.loaded(self.load);
    }

    pub(crate) fn link_measured(&self, peer: WorkerRef, speed: LinkSpeed) {
        let labels = self.peer(peer.worker);
        let bandwidth = self.series.link_bandwidth.get_or_create(&labels);
        bandwidth.set(speed.bytes_per_second as f64);
        let latency = self.series.link_latency.get_or_create(&labels);
        latency.set(speed.latency.as_secs_f64());
        for transport in Transport::ALL {
            let labels = self.carried(peer.worker, transport);
            match transport == speed.transport {
                true => drop(self.series.link_transport.get_or_create(&labels).set(1)),
                false => drop(self.series.link_transport.remove(&labels)),
            }
        }
    }

    /// No life of that worker is known any more: its series end.
    pub(crate) fn link_forgotten(&self, peer: WorkerId) {
        let labels = self.peer(peer);
        self.series.link_bandwidth.remove(&labels);
        self.series.link_latency.remove(&labels);
        self.series.link_fallbacks.remove(&labels);
        for transport in Transport::ALL {
            let labels = self.carried(peer, transport);
            self.series.link_transport.remove(&labels);
        }
    }

    pub(crate) fn passes(&self, count: usize) {
        let passes = self.series.passes.get_or_create(&self.worker);
        passes.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(crate) fn pass_refused(&self) {
        self.series.passes_refused.get_or_create(&self.worker).inc();
    }

    pub(crate) fn link_fell_back(&self, peer: WorkerRef) {
        let labels = self.peer(peer.worker);
        self.series.link_fallbacks.get_or_create(&labels).inc();
    }

    fn carried(&self, peer: WorkerId, transport: Transport) -> Carried {
        let Peer { worker, role, peer } = self.peer(peer);
        Carried {
            worker,
            role,
            peer,
            transport: transport.name(),
        }
    }

    fn peer(&self, peer: WorkerId) -> Peer {
        Peer {
            worker: self.worker.worker.clone(),
            role: self.worker.role.clone(),
            peer: peer.to_string(),
        }
    }

    /// How busy the worker is, and whether it gets anywhere.
    pub(crate) fn loaded(&mut self, load: Load) {
        self.load = load;
        let stuck = u32::from(load.progress == Progress::Stuck);
        set(&self.series.stuck, &self.worker, stuck);
        let model = self.model();
        set(&self.series.vllm_running, &model, load.sequences_running);
        set(&self.series.vllm_waiting, &model, load.sequences_waiting);
    }

    /// Counts what the brain noted.
    pub(crate) fn count(&mut self, note: &Note) {
        match note {
            Note::Sealed { .. }
            | Note::Landed { .. }
            | Note::Joined { .. }
            | Note::HandoffFailed { .. }
            | Note::FrameDiscarded { .. }
            | Note::MovedOut { .. }
            | Note::Stayed { .. } => self.count_handoff(note),
            Note::Stepped { .. }
            | Note::Drafted { .. }
            | Note::PrefixLooked { .. }
            | Note::PrefillStarted { .. }
            | Note::Repeated { .. }
            | Note::CancelFreed { .. }
            | Note::Stuck { .. } => self.count_work(note),
            Note::Kept { .. } | Note::Fetched { .. } | Note::Tiers { .. } => self.count_tier(note),
            Note::Preempted { .. }
            | Note::SwappedOut { .. }
            | Note::SwappedIn { .. }
            | Note::Pool { .. } => self.count_blocks(note),
        }
    }

    fn count_handoff(&self, note: &Note) {
        let (series, worker) = (&self.series, &self.worker);
        match note {
            Note::Sealed {
                handoff: _,
                bytes,
                blocks,
                took,
            } => {
                self.moved("sealed", "sent", (*bytes, *blocks));
                observe(&series.send_seconds, worker, *took);
            }
            Note::Landed {
                handoff: _,
                bytes,
                blocks,
                took,
                exposed,
            } => {
                self.moved("landed", "received", (*bytes, *blocks));
                observe(&series.handoff_seconds, worker, *took);
                observe(&series.exposed_seconds, worker, *exposed);
            }
            Note::Joined { .. } => add(&series.handoffs, &self.sorted("joined"), 1),
            Note::HandoffFailed { .. } => add(&series.handoffs, &self.sorted("failed"), 1),
            Note::FrameDiscarded { .. } => add(&series.frames_discarded, worker, 1),
            Note::MovedOut {
                handoff: _,
                bytes,
                blocks,
                took,
                still,
            } => {
                self.moved("moved", "sent", (*bytes, *blocks));
                observe(&series.move_seconds, worker, *took);
                observe(&series.still_seconds, worker, *still);
            }
            Note::Stayed { .. } => add(&series.handoffs, &self.sorted("stayed"), 1),
            other => elsewhere(other),
        }
    }

    fn count_work(&mut self, note: &Note) {
        let (series, worker) = (&self.series, &self.worker);
        match note {
            Note::Stepped {
                prefill_tokens,
                decode_sequences,
                took,
                work,
                predicted,
            } => {
                self.stepped(*prefill_tokens, *decode_sequences, *took);
                self.compare(work, *predicted, *took);
            }
            Note::Drafted {
                drafted_tokens,
                accepted_tokens,
                drafting,
            } => self.drafted([*drafted_tokens, *accepted_tokens], *drafting),
            Note::PrefixLooked {
                prompt_tokens,
                cached_tokens,
            } => {
                add(&series.prompt_tokens, worker, u64::from(*prompt_tokens));
                add(&series.cached_tokens, worker, u64::from(*cached_tokens));
            }
            Note::PrefillStarted { waited } => observe(&series.prefill_wait, worker, *waited),
            Note::Repeated { .. } => add(&series.orders_repeated, worker, 1),
            Note::CancelFreed { took } => observe(&series.cancel_seconds, worker, *took),
            // The gauge follows the load, which also says when it is over.
            Note::Stuck { running } => warn!(
                worker = worker.worker,
                ?running,
                "the step under way takes too long"
            ),
            other => elsewhere(other),
        }
    }

    fn count_blocks(&mut self, note: &Note) {
        let (series, worker) = (&self.series, &self.worker);
        match note {
            Note::Preempted {
                handoff: _,
                recomputed_tokens,
            } => {
                add(&series.preemptions, worker, 1);
                add(&series.handoffs, &self.sorted("recomputed"), 1);
                let tokens = u64::from(*recomputed_tokens);
                add(&series.recomputed_tokens, worker, tokens);
            }
            Note::SwappedOut {
                handoff: _,
                blocks,
                took,
            } => self.swapped("out", *blocks, *took),
            Note::SwappedIn {
                handoff: _,
                blocks,
                took,
            } => self.swapped("in", *blocks, *took),
            Note::Pool {
                blocks_held,
                blocks_free,
                blocks_cached,
                sequences_running: _,
                sequences_waiting: _,
                blocks_reserved,
                blocks_leased,
                blocks_quarantined,
                blocks_leaked,
                blocks_swapped,
            } => {
                self.pool([
                    *blocks_held,
                    *blocks_free,
                    *blocks_cached,
                    *blocks_reserved,
                    *blocks_leased,
                    *blocks_quarantined,
                    *blocks_leaked,
                    *blocks_swapped,
                ]);
                self.pool = Some(note.clone());
            }
            other => elsewhere(other),
        }
    }

    fn drafted(&self, tokens: [u32; 2], drafting: Drafting) {
        for (kind, tokens) in ["drafted", "accepted"].into_iter().zip(tokens) {
            let tokens = u64::from(tokens);
            add(&self.series.draft_tokens, &self.sorted(kind), tokens);
        }
        let kind = match drafting {
            Drafting::Drafted => "drafted",
            Drafting::NoGuess => "no_guess",
            Drafting::NoGain => "no_gain",
            Drafting::NoTime => "no_time",
            Drafting::NoRoom => "no_room",
        };
        add(&self.series.draft_steps, &self.sorted(kind), 1);
    }

    fn stepped(&self, prefill_tokens: u32, decode_sequences: u32, took: Duration) {
        let kind = match (prefill_tokens, decode_sequences) {
            (_, 0) => "prefill",
            (0, _) => "decode",
            _ => "mixed",
        };
        observe(&self.series.step_seconds, &self.sorted(kind), took);
        for (kind, tokens) in [("prefill", prefill_tokens), ("decode", decode_sequences)] {
            let tokens = u64::from(tokens);
            add(&self.series.step_tokens, &self.sorted(kind), tokens);
        }
    }

    /// Against what was predicted, and what the device can do.
    fn compare(&mut self, work: &Work, predicted: Duration, took: Duration) {
        if took.is_zero() {
            return;
        }
        if !predicted.is_zero() {
            let ratio = took.as_secs_f64() / predicted.as_secs_f64();
            let ratios = self.series.step_ratio.get_or_create(&self.worker);
            ratios.observe(ratio);
        }
        if let Some(ceilings) = &self.ceilings {
            let (mfu, mbu) = self.used.step(ceilings, work, took);
            self.series.mfu.get_or_create(&self.worker).set(mfu);
            self.series.mbu.get_or_create(&self.worker).set(mbu);
        }
    }

    fn moved(&self, outcome: &'static str, direction: &'static str, moved: (u64, u32)) {
        let (bytes, blocks) = moved;
        add(&self.series.handoffs, &self.sorted(outcome), 1);
        let direction = self.sorted(direction);
        add(&self.series.handoff_bytes, &direction, bytes);
        add(&self.series.handoff_blocks, &direction, u64::from(blocks));
    }

    fn swapped(&self, direction: &'static str, blocks: u32, took: Duration) {
        let labels = self.sorted(direction);
        add(&self.series.swap_blocks, &labels, u64::from(blocks));
        observe(&self.series.swap_seconds, &labels, took);
    }

    /// In the order of [`BLOCKS`].
    fn pool(&self, counts: [u32; BLOCKS.len()]) {
        for (kind, blocks) in BLOCKS.into_iter().zip(counts) {
            set(&self.series.blocks, &self.sorted(kind), blocks);
        }
        let [held, free, ..] = counts;
        let count = f64::from(held) + f64::from(free);
        let usage = self.series.vllm_usage.get_or_create(&self.model());
        usage.set(f64::from(held) / count.max(1.0));
    }

    fn sorted(&self, kind: &'static str) -> Sorted {
        let Worker { worker, role } = self.worker.clone();
        Sorted { worker, role, kind }
    }

    fn model(&self) -> Model {
        let Worker { worker, role } = self.worker.clone();
        Model {
            worker,
            role,
            model_name: self.model.clone(),
        }
    }
}

/// Only [`WorkerMeters::count`] sorts notes.
fn elsewhere(note: &Note) {
    debug_assert!(false, "counted elsewhere: {note:?}");
}

fn add<L>(family: &Family<L, Counter>, labels: &L, count: u64)
where
    L: Clone + std::hash::Hash + Eq,
{
    family.get_or_create(labels).inc_by(count);
}

fn set<L>(family: &Family<L, Gauge>, labels: &L, value: u32)
where
    L: Clone + std::hash::Hash + Eq,
{
    family.get_or_create(labels).set(i64::from(value));
}

fn observe<L>(family: &Histograms<L>, labels: &L, span: Duration)
where
    L: Clone + std::hash::Hash + Eq,
{
    family.get_or_create(labels).observe(span.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Telemetry;
    use cleave_domain::HandoffId;

    #[test]
    fn lesson_34_the_transfer_path_is_counted_under_the_promised_names() {
        let telemetry = Telemetry::default();
        let mut meters = WorkerMeters::new(&telemetry.workers, "p0", Role::Prefill, "demo");
        let zero = telemetry.text();
        assert!(
            zero.contains(
                "cleave_handoffs_total{worker=\"p0\",role=\"prefill\",kind=\"landed\"} 0"
            ),
            "{zero}"
        );
        meters.count(&Note::Landed {
            handoff: HandoffId::default(),
            bytes: 4096,
            blocks: 2,
            took: Duration::from_millis(3),
            exposed: Duration::from_millis(1),
        });
        meters.count(&Note::Pool {
            blocks_held: 25,
            blocks_free: 75,
            blocks_cached: 10,
            sequences_running: 3,
            sequences_waiting: 4,
            blocks_reserved: 5,
            blocks_leased: 6,
            blocks_quarantined: 7,
            blocks_leaked: 0,
            blocks_swapped: 8,
        });
        meters.loaded(Load {
            sequences_running: 3,
            sequences_waiting: 4,
            progress: Progress::Stuck,
            ..Load::default()
        });
        let text = telemetry.text();
        for line in [
            "cleave_handoffs_total{worker=\"p0\",role=\"prefill\",kind=\"landed\"} 1",
            "cleave_handoff_bytes_total{worker=\"p0\",role=\"prefill\",kind=\"received\"} 4096",
            "cleave_handoff_exposed_seconds_count{worker=\"p0\",role=\"prefill\"} 1",
            "vllm:num_requests_running{worker=\"p0\",role=\"prefill\",model_name=\"demo\"} 3",
            "vllm:num_requests_waiting{worker=\"p0\",role=\"prefill\",model_name=\"demo\"} 4",
            "vllm:kv_cache_usage_perc{worker=\"p0\",role=\"prefill\",model_name=\"demo\"} 0.25",
            "cleave_pool_blocks{worker=\"p0\",role=\"prefill\",kind=\"quarantined\"} 7",
            "cleave_pool_blocks{worker=\"p0\",role=\"prefill\",kind=\"leaked\"} 0",
            "cleave_worker_stuck{worker=\"p0\",role=\"prefill\"} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        meters.serves(Role::Both);
        let text = telemetry.text();
        assert!(text.contains("cleave_pool_blocks{worker=\"p0\",role=\"both\",kind=\"held\"} 25"));
        let pools = text
            .lines()
            .filter(|line| line.starts_with("cleave_pool_blocks{"));
        assert!(
            pools.into_iter().all(|line| line.contains("both")),
            "{text}"
        );
        assert!(text.contains(
            "vllm:num_requests_running{worker=\"p0\",role=\"both\",model_name=\"demo\"} 3"
        ));
        assert!(text.contains("cleave_worker_stuck{worker=\"p0\",role=\"both\"} 1"));
        meters.loaded(Load::default());
        let text = telemetry.text();
        assert!(text.contains("cleave_worker_stuck{worker=\"p0\",role=\"both\"} 0"));
        assert!(!text.contains("# EOF"));
    }
}
