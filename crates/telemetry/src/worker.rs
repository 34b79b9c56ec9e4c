//! Counts a worker's notes and load into its series.
//!
//! Owns: one worker's labels, and its series at zero. Never concludes anything: the brain's load
//! says whether the worker is stuck, and how busy it is. Invariant: when a worker changes its role,
//! its gauges are shown under the new role alone.

mod adapters;
mod labels;
mod series;
mod tier;
mod utilisation;

pub use adapters::AdapterUse;
pub use series::WorkerSeries;
pub use utilisation::DeviceCeilings;

use crate::buckets::{FloatGauge, HistogramFamily};
use crate::json_field::JsonField;
use crate::observer::WorkerObserver;
use adapters::{ADAPTERS, LOADS, LoraLabels};
use cleave_domain::{Capacity, Role, StepProgress, StepWork, WorkerId, WorkerLoad, WorkerRef};
use cleave_sched::{DraftOutcome, WorkerNote};
use cleave_transfer::{LinkSpeed, Transport};
use labels::{
    CacheConfigLabels, PeerTransportLabels, WorkerKindLabels, WorkerLabels, WorkerModelLabels,
    WorkerPeerLabels,
};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use std::time::Duration;
use tracing::warn;
use utilisation::DeviceUtilisation;

/// The outcomes of hand-offs at one worker.
const HANDOFFS: [&str; 7] = [
    "sealed",
    "landed",
    "joined",
    "recomputed",
    "moved",
    "stayed",
    "failed",
];

/// The states of a pool's blocks; see the help of `cleave_pool_blocks`.
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

/// The states of a state plane's slots; see the help of `cleave_state_slots`.
const STATE_SLOTS: [&str; 4] = ["held", "free", "cached", "leaked"];

/// Counts into one worker's series.
#[derive(Clone, Debug)]
pub struct WorkerMeters {
    series: WorkerSeries,
    worker: WorkerLabels,
    model: String,
    /// The last notes and load, to be shown again under another role.
    pool: Option<WorkerNote>,
    load: WorkerLoad,
    tiers: Option<WorkerNote>,
    block_bytes: u32,
    /// Number of state slots; `None` without states, which have no series then.
    states_count: Option<u32>,
    /// Number of blocks of the window plane; `None` without it, as with states.
    windows_count: Option<u32>,
    /// The device's limits, if they are known.
    ceilings: Option<DeviceCeilings>,
    used: DeviceUtilisation,
    /// The last use of adapters, to be shown again under another role.
    adapters: AdapterUse,
    /// Labels of the line that names the adapters in use.
    loras: Option<LoraLabels>,
}

impl WorkerMeters {
    pub fn new(series: &WorkerSeries, name: &str, role: Role, model: &str) -> Self {
        let meters = Self {
            series: series.clone(),
            worker: WorkerLabels {
                worker: name.to_owned(),
                role: role.to_string(),
            },
            model: model.to_owned(),
            pool: None,
            load: WorkerLoad::default(),
            tiers: None,
            block_bytes: 0,
            states_count: None,
            windows_count: None,
            ceilings: None,
            used: DeviceUtilisation::default(),
            adapters: AdapterUse::default(),
            loras: None,
        };
        meters.create_at_zero();
        meters
    }

    /// Shows from now on how much of the device is used.
    pub fn with_ceilings(mut self, ceilings: Option<DeviceCeilings>) -> Self {
        self.ceilings = ceilings;
        self
    }

    /// Shows from now on the size of its pool.
    pub fn with_capacity(mut self, capacity: Capacity) -> Self {
        self.block_bytes = capacity.block_bytes;
        self.states_count = capacity.states.map(|states| states.count);
        self.windows_count = capacity.windows.map(|windows| windows.count);
        self.begin_planes();
        let shape = CacheConfigLabels {
            worker: self.worker.worker.clone(),
            model_name: self.model.clone(),
            block_size: capacity.block_tokens.to_string(),
            num_gpu_blocks: capacity.blocks_count.to_string(),
        };
        self.series.vllm_cache.get_or_create(&shape).set(1);
        self
    }

    /// Creates every series of the hand-off and of the pool, at zero.
    fn create_at_zero(&self) {
        let series = &self.series;
        for kind in HANDOFFS {
            drop(series.handoffs.get_or_create(&self.kind_labels(kind)));
        }
        for kind in ["sent", "received"] {
            drop(series.handoff_bytes.get_or_create(&self.kind_labels(kind)));
            drop(series.handoff_blocks.get_or_create(&self.kind_labels(kind)));
        }
        for kind in ["out", "in"] {
            drop(series.swap_blocks.get_or_create(&self.kind_labels(kind)));
        }
        for kind in BLOCKS {
            drop(series.blocks.get_or_create(&self.kind_labels(kind)));
        }
        for kind in ADAPTERS {
            drop(series.adapters.get_or_create(&self.kind_labels(kind)));
        }
        for kind in LOADS {
            drop(series.adapter_loads.get_or_create(&self.kind_labels(kind)));
        }
        for counter in [
            &series.frames_discarded,
            &series.writes_refused,
            &series.preemptions,
            &series.recomputed_tokens,
        ] {
            drop(counter.get_or_create(&self.worker));
        }
        self.begin_planes();
        drop(series.stuck.get_or_create(&self.worker));
        drop(series.grants.get_or_create(&self.worker));
        self.begin_tier();
        drop(series.vllm_running.get_or_create(&self.model_labels()));
        drop(series.vllm_waiting.get_or_create(&self.model_labels()));
        drop(series.vllm_usage.get_or_create(&self.model_labels()));
    }

    /// Creates the series of the state plane and the window plane, as far as there are such planes,
    /// at zero.
    fn begin_planes(&self) {
        if self.states_count.is_some() {
            self.state_slots([0; STATE_SLOTS.len()]);
        }
        if self.windows_count.is_some() {
            self.window_blocks([0; STATE_SLOTS.len()]);
        }
    }

    /// The worker serves other legs from now on: counters begin anew under that role, and gauges
    /// keep their values under it.
    pub fn role_changed(&mut self, role: Role) {
        let role = role.to_string();
        if role == self.worker.role {
            return;
        }
        let series = &self.series;
        for kind in BLOCKS {
            series.blocks.remove(&self.kind_labels(kind));
        }
        for kind in ADAPTERS {
            series.adapters.remove(&self.kind_labels(kind));
        }
        for kind in STATE_SLOTS {
            series.state_slots.remove(&self.kind_labels(kind));
            series.window_blocks.remove(&self.kind_labels(kind));
        }
        series.stuck.remove(&self.worker);
        series.grants.remove(&self.worker);
        self.end_tier();
        series.mfu.remove(&self.worker);
        series.mbu.remove(&self.worker);
        let model = self.model_labels();
        series.vllm_running.remove(&model);
        series.vllm_waiting.remove(&model);
        series.vllm_usage.remove(&model);
        self.worker.role = role;
        self.create_at_zero();
        if let Some(pool) = self.pool.take() {
            self.handle_note(&pool);
        }
        if let Some(tiers) = self.tiers.take() {
            self.handle_note(&tiers);
        }
        self.load_changed(self.load);
        let adapters = self.adapters.clone();
        self.adapters_changed(&adapters);
    }

    pub fn link_measured(&self, peer: WorkerRef, speed: LinkSpeed) {
        let labels = self.peer_labels(peer.worker);
        let bandwidth = self.series.link_bandwidth.get_or_create(&labels);
        bandwidth.set(speed.bytes_per_second as f64);
        let latency = self.series.link_latency.get_or_create(&labels);
        latency.set(speed.latency.as_secs_f64());
        for transport in Transport::ALL {
            let labels = self.transport_labels(peer.worker, transport);
            if transport == speed.transport {
                self.series.link_transport.get_or_create(&labels).set(1);
            } else {
                self.series.link_transport.remove(&labels);
            }
        }
    }

    /// No incarnation of that worker is known any more: its series end.
    pub fn link_forgotten(&self, peer: WorkerId) {
        let labels = self.peer_labels(peer);
        self.series.link_bandwidth.remove(&labels);
        self.series.link_latency.remove(&labels);
        self.series.link_fallbacks.remove(&labels);
        for transport in Transport::ALL {
            let labels = self.transport_labels(peer, transport);
            self.series.link_transport.remove(&labels);
        }
    }

    pub fn set_grants(&self, count: usize) {
        let grants = self.series.grants.get_or_create(&self.worker);
        grants.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub fn write_refused(&self) {
        self.series.writes_refused.get_or_create(&self.worker).inc();
    }

    pub fn link_fell_back(&self, peer: WorkerRef) {
        let labels = self.peer_labels(peer.worker);
        self.series.link_fallbacks.get_or_create(&labels).inc();
    }

    fn transport_labels(&self, peer: WorkerId, transport: Transport) -> PeerTransportLabels {
        let WorkerPeerLabels { worker, role, peer } = self.peer_labels(peer);
        PeerTransportLabels {
            worker,
            role,
            peer,
            transport: transport.name(),
        }
    }

    fn peer_labels(&self, peer: WorkerId) -> WorkerPeerLabels {
        WorkerPeerLabels {
            worker: self.worker.worker.clone(),
            role: self.worker.role.clone(),
            peer: peer.to_string(),
        }
    }

    /// The worker's load, or whether it makes progress, changed.
    pub fn load_changed(&mut self, load: WorkerLoad) {
        self.load = load;
        let stuck = u32::from(load.progress == StepProgress::Stuck);
        set(&self.series.stuck, &self.worker, stuck);
        let model = self.model_labels();
        set(&self.series.vllm_running, &model, load.sequences_running);
        set(&self.series.vllm_waiting, &model, load.sequences_waiting);
    }

    fn count_handoff(&self, note: &WorkerNote) {
        let (series, worker) = (&self.series, &self.worker);
        match note {
            WorkerNote::Sealed {
                handoff: _,
                bytes,
                blocks,
                took,
            } => {
                self.count_moved_blocks("sealed", "sent", (*bytes, *blocks));
                observe(&series.send_seconds, worker, *took);
            }
            WorkerNote::Landed {
                handoff: _,
                bytes,
                blocks,
                took,
                exposed,
            } => {
                self.count_moved_blocks("landed", "received", (*bytes, *blocks));
                observe(&series.handoff_seconds, worker, *took);
                observe(&series.exposed_seconds, worker, *exposed);
            }
            WorkerNote::Joined { .. } => add(&series.handoffs, &self.kind_labels("joined"), 1),
            WorkerNote::HandoffFailed { .. } => {
                add(&series.handoffs, &self.kind_labels("failed"), 1)
            }
            WorkerNote::FrameDiscarded { .. } => add(&series.frames_discarded, worker, 1),
            WorkerNote::MigratedOut {
                handoff: _,
                bytes,
                blocks,
                took,
                still,
            } => {
                self.count_moved_blocks("moved", "sent", (*bytes, *blocks));
                observe(&series.move_seconds, worker, *took);
                observe(&series.pause_seconds, worker, *still);
            }
            WorkerNote::MigrationAborted { .. } => {
                add(&series.handoffs, &self.kind_labels("stayed"), 1)
            }
            other => assert_not_counted_here(other),
        }
    }

    fn count_work(&mut self, note: &WorkerNote) {
        let (series, worker) = (&self.series, &self.worker);
        match note {
            WorkerNote::Stepped {
                prefill_tokens,
                decode_sequences,
                took,
                work,
                predicted,
            } => {
                self.stepped(*prefill_tokens, *decode_sequences, *took);
                self.compare(work, *predicted, *took);
            }
            WorkerNote::Drafted {
                drafted_tokens,
                accepted_tokens,
                drafting,
            } => self.drafted([*drafted_tokens, *accepted_tokens], *drafting),
            WorkerNote::PrefixLookedUp {
                prompt_tokens,
                cached_tokens,
            } => {
                add(&series.prompt_tokens, worker, u64::from(*prompt_tokens));
                add(&series.cached_tokens, worker, u64::from(*cached_tokens));
            }
            WorkerNote::PrefillStarted { waited } => observe(&series.prefill_wait, worker, *waited),
            WorkerNote::Repeated { .. } => add(&series.orders_repeated, worker, 1),
            WorkerNote::CancelFreed { took } => observe(&series.cancel_seconds, worker, *took),
            // The gauge follows the load, which also shows when this is over.
            WorkerNote::Stuck { running } => warn!(
                worker = worker.worker,
                running = %JsonField(running),
                "the present step exceeds its time limit"
            ),
            other => assert_not_counted_here(other),
        }
    }

    fn count_blocks(&mut self, note: &WorkerNote) {
        let (series, worker) = (&self.series, &self.worker);
        match note {
            WorkerNote::Preempted {
                handoff: _,
                recomputed_tokens,
            } => {
                add(&series.preemptions, worker, 1);
                add(&series.handoffs, &self.kind_labels("recomputed"), 1);
                let tokens = u64::from(*recomputed_tokens);
                add(&series.recomputed_tokens, worker, tokens);
            }
            WorkerNote::SwappedOut {
                handoff: _,
                blocks,
                took,
            } => self.swapped("out", *blocks, *took),
            WorkerNote::SwappedIn {
                handoff: _,
                blocks,
                took,
            } => self.swapped("in", *blocks, *took),
            WorkerNote::Pool {
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
                states_held,
                states_cached,
                states_leaked,
                windows_held,
                windows_cached,
                windows_leaked,
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
                if let Some(count) = self.states_count {
                    let free = count.saturating_sub(*states_held);
                    self.state_slots([*states_held, free, *states_cached, *states_leaked]);
                }
                if let Some(count) = self.windows_count {
                    let free = count.saturating_sub(*windows_held);
                    self.window_blocks([*windows_held, free, *windows_cached, *windows_leaked]);
                }
                self.pool = Some(note.clone());
            }
            other => assert_not_counted_here(other),
        }
    }

    fn drafted(&self, tokens: [u32; 2], drafting: DraftOutcome) {
        for (kind, tokens) in ["drafted", "accepted"].into_iter().zip(tokens) {
            let tokens = u64::from(tokens);
            add(&self.series.draft_tokens, &self.kind_labels(kind), tokens);
        }
        let kind = match drafting {
            DraftOutcome::Drafted => "drafted",
            DraftOutcome::NoGuess => "no_guess",
            DraftOutcome::NoGain => "no_gain",
            DraftOutcome::NoTime => "no_time",
            DraftOutcome::NoRoom => "no_room",
        };
        add(&self.series.draft_steps, &self.kind_labels(kind), 1);
    }

    fn stepped(&self, prefill_tokens: u32, decode_sequences: u32, took: Duration) {
        let kind = match (prefill_tokens, decode_sequences) {
            (_, 0) => "prefill",
            (0, _) => "decode",
            _ => "mixed",
        };
        observe(&self.series.step_seconds, &self.kind_labels(kind), took);
        for (kind, tokens) in [("prefill", prefill_tokens), ("decode", decode_sequences)] {
            let tokens = u64::from(tokens);
            add(&self.series.step_tokens, &self.kind_labels(kind), tokens);
        }
    }

    /// Compares a step with its prediction, and with the device's limits.
    fn compare(&mut self, work: &StepWork, predicted: Duration, took: Duration) {
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

    fn count_moved_blocks(
        &self,
        outcome: &'static str,
        direction: &'static str,
        moved: (u64, u32),
    ) {
        let (bytes, blocks) = moved;
        add(&self.series.handoffs, &self.kind_labels(outcome), 1);
        let direction = self.kind_labels(direction);
        add(&self.series.handoff_bytes, &direction, bytes);
        add(&self.series.handoff_blocks, &direction, u64::from(blocks));
    }

    fn swapped(&self, direction: &'static str, blocks: u32, took: Duration) {
        let labels = self.kind_labels(direction);
        add(&self.series.swap_blocks, &labels, u64::from(blocks));
        observe(&self.series.swap_seconds, &labels, took);
    }

    /// In the order of [`BLOCKS`].
    fn pool(&self, counts: [u32; BLOCKS.len()]) {
        for (kind, blocks) in BLOCKS.into_iter().zip(counts) {
            set(&self.series.blocks, &self.kind_labels(kind), blocks);
        }
        let [held, free, ..] = counts;
        let count = f64::from(held) + f64::from(free);
        let usage = self.series.vllm_usage.get_or_create(&self.model_labels());
        usage.set(f64::from(held) / count.max(1.0));
    }

    /// In the order of [`STATE_SLOTS`].
    fn state_slots(&self, counts: [u32; STATE_SLOTS.len()]) {
        for (kind, slots) in STATE_SLOTS.into_iter().zip(counts) {
            set(&self.series.state_slots, &self.kind_labels(kind), slots);
        }
    }

    /// Sets the counts of the window plane's blocks, in the order of [`STATE_SLOTS`].
    fn window_blocks(&self, counts: [u32; STATE_SLOTS.len()]) {
        for (kind, slots) in STATE_SLOTS.into_iter().zip(counts) {
            set(&self.series.window_blocks, &self.kind_labels(kind), slots);
        }
    }

    fn kind_labels(&self, kind: &'static str) -> WorkerKindLabels {
        let WorkerLabels { worker, role } = self.worker.clone();
        WorkerKindLabels { worker, role, kind }
    }

    fn model_labels(&self) -> WorkerModelLabels {
        let WorkerLabels { worker, role } = self.worker.clone();
        WorkerModelLabels {
            worker,
            role,
            model_name: self.model.clone(),
        }
    }
}

impl WorkerObserver for WorkerMeters {
    fn handle_note(&mut self, note: &WorkerNote) {
        match note {
            WorkerNote::Sealed { .. }
            | WorkerNote::Landed { .. }
            | WorkerNote::Joined { .. }
            | WorkerNote::HandoffFailed { .. }
            | WorkerNote::FrameDiscarded { .. }
            | WorkerNote::MigratedOut { .. }
            | WorkerNote::MigrationAborted { .. } => self.count_handoff(note),
            WorkerNote::Stepped { .. }
            | WorkerNote::Drafted { .. }
            | WorkerNote::PrefixLookedUp { .. }
            | WorkerNote::PrefillStarted { .. }
            | WorkerNote::Repeated { .. }
            | WorkerNote::CancelFreed { .. }
            | WorkerNote::Stuck { .. } => self.count_work(note),
            WorkerNote::Offloaded { .. }
            | WorkerNote::Fetched { .. }
            | WorkerNote::Tiers { .. } => self.count_tier(note),
            WorkerNote::Preempted { .. }
            | WorkerNote::SwappedOut { .. }
            | WorkerNote::SwappedIn { .. }
            | WorkerNote::Pool { .. } => self.count_blocks(note),
        }
    }
}

/// Only [`WorkerMeters::handle_note`] sorts notes.
fn assert_not_counted_here(note: &WorkerNote) {
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

fn observe<L>(family: &HistogramFamily<L>, labels: &L, span: Duration)
where
    L: Clone + std::hash::Hash + Eq,
{
    family.get_or_create(labels).observe(span.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Telemetry;
    use cleave_domain::HandoffId;

    // Lesson: 34.
    #[test]
    fn transfer_series_keep_their_documented_names() {
        let telemetry = Telemetry::default();
        let mut meters = WorkerMeters::new(&telemetry.workers, "p0", Role::Prefill, "demo");
        let zero = telemetry.text();
        assert!(
            zero.contains(
                "cleave_worker_handoffs_total{worker=\"p0\",role=\"prefill\",kind=\"landed\"} 0"
            ),
            "{zero}"
        );
        meters.handle_note(&WorkerNote::Landed {
            handoff: HandoffId::default(),
            bytes: 4096,
            blocks: 2,
            took: Duration::from_millis(3),
            exposed: Duration::from_millis(1),
        });
        meters.handle_note(&WorkerNote::Pool {
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
            states_held: 0,
            states_cached: 0,
            states_leaked: 0,
            windows_cached: 0,
            windows_held: 0,
            windows_leaked: 0,
        });
        meters.load_changed(WorkerLoad {
            sequences_running: 3,
            sequences_waiting: 4,
            progress: StepProgress::Stuck,
            ..WorkerLoad::default()
        });
        let text = telemetry.text();
        for line in [
            "cleave_worker_handoffs_total{worker=\"p0\",role=\"prefill\",kind=\"landed\"} 1",
            "cleave_worker_handoff_bytes_total{worker=\"p0\",role=\"prefill\",kind=\"received\"} 4096",
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
        meters.role_changed(Role::Both);
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
        meters.load_changed(WorkerLoad::default());
        let text = telemetry.text();
        assert!(text.contains("cleave_worker_stuck{worker=\"p0\",role=\"both\"} 0"));
        assert!(!text.contains("# EOF"));
    }
}
