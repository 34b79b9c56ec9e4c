//! A worker's series.

use super::{Histograms, histograms};
use cleave_domain::{Role, WorkerId, WorkerRef};
use cleave_sched::Note;
use cleave_transfer::LinkSpeed;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tracing::{debug, warn};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Worker {
    worker: String,
    role: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Sorted {
    worker: String,
    role: String,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Peer {
    worker: String,
    role: String,
    peer: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Model {
    worker: String,
    role: String,
    model_name: String,
}

type FloatGauge = Gauge<f64, AtomicU64>;

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

/// The series of all workers of this process.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    handoffs: Family<Sorted, Counter>,
    handoff_bytes: Family<Sorted, Counter>,
    handoff_blocks: Family<Sorted, Counter>,
    handoff_seconds: Histograms<Worker>,
    exposed_seconds: Histograms<Worker>,
    send_seconds: Histograms<Worker>,
    frames_discarded: Family<Worker, Counter>,
    step_tokens: Family<Sorted, Counter>,
    step_seconds: Histograms<Sorted>,
    prompt_tokens: Family<Worker, Counter>,
    cached_tokens: Family<Worker, Counter>,
    prefill_wait: Histograms<Worker>,
    preemptions: Family<Worker, Counter>,
    recomputed_tokens: Family<Worker, Counter>,
    orders_repeated: Family<Worker, Counter>,
    cancel_seconds: Histograms<Worker>,
    swap_blocks: Family<Sorted, Counter>,
    swap_seconds: Histograms<Sorted>,
    move_seconds: Histograms<Worker>,
    still_seconds: Histograms<Worker>,
    stuck: Family<Worker, Gauge>,
    blocks: Family<Sorted, Gauge>,
    link_bandwidth: Family<Peer, FloatGauge>,
    link_latency: Family<Peer, FloatGauge>,
    link_fallbacks: Family<Peer, Counter>,
    vllm_running: Family<Model, Gauge>,
    vllm_waiting: Family<Model, Gauge>,
    vllm_usage: Family<Model, FloatGauge>,
}

impl Series {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let series = Self {
            handoffs: Family::default(),
            handoff_bytes: Family::default(),
            handoff_blocks: Family::default(),
            handoff_seconds: histograms(),
            exposed_seconds: histograms(),
            send_seconds: histograms(),
            frames_discarded: Family::default(),
            step_tokens: Family::default(),
            step_seconds: histograms(),
            prompt_tokens: Family::default(),
            cached_tokens: Family::default(),
            prefill_wait: histograms(),
            preemptions: Family::default(),
            recomputed_tokens: Family::default(),
            orders_repeated: Family::default(),
            cancel_seconds: histograms(),
            swap_blocks: Family::default(),
            swap_seconds: histograms(),
            move_seconds: histograms(),
            still_seconds: histograms(),
            stuck: Family::default(),
            blocks: Family::default(),
            link_bandwidth: Family::default(),
            link_latency: Family::default(),
            link_fallbacks: Family::default(),
            vllm_running: Family::default(),
            vllm_waiting: Family::default(),
            vllm_usage: Family::default(),
        };
        series.register_handoffs(registry);
        series.register_steps(registry);
        series.register_pool(registry);
        series.register_pressure(registry);
        series
    }

    fn register_handoffs(&self, registry: &mut Registry) {
        registry.register(
            "cleave_handoffs",
            "Hand-offs at this end: sealed (sent), landed (received and used), joined (both legs here, nothing moved), \
             recomputed (landed, and computed again here), moved (a running sequence left), stayed (it was to, and did not), failed",
            self.handoffs.clone(),
        );
        registry.register(
            "cleave_handoff_bytes",
            "KV bytes of finished hand-offs, sent and received",
            self.handoff_bytes.clone(),
        );
        registry.register(
            "cleave_handoff_blocks",
            "KV blocks of finished hand-offs, sent and received",
            self.handoff_blocks.clone(),
        );
        registry.register(
            "cleave_handoff_seconds",
            "From reservation to landing",
            self.handoff_seconds.clone(),
        );
        registry.register(
            "cleave_handoff_exposed_seconds",
            "From the seal's arrival to landing: what the overlap with prefill did not hide",
            self.exposed_seconds.clone(),
        );
        registry.register(
            "cleave_handoff_send_seconds",
            "From the first frame to the seal",
            self.send_seconds.clone(),
        );
        registry.register(
            "cleave_frames_discarded",
            "Late, foreign or doubled frames dropped",
            self.frames_discarded.clone(),
        );
        registry.register(
            "cleave_link_bytes_per_second",
            "Bandwidth of the link to a peer, measured at its start",
            self.link_bandwidth.clone(),
        );
        registry.register(
            "cleave_link_latency_seconds",
            "Round trip of the link to a peer, measured at its start",
            self.link_latency.clone(),
        );
        registry.register(
            "cleave_link_fallbacks",
            "Links to a peer that run over a slower transport than both ends have, because that did not work",
            self.link_fallbacks.clone(),
        );
    }

    fn register_steps(&self, registry: &mut Registry) {
        registry.register(
            "cleave_step_tokens",
            "Tokens run, by leg",
            self.step_tokens.clone(),
        );
        registry.register(
            "cleave_step_seconds",
            "Engine time per step, by what was in it",
            self.step_seconds.clone(),
        );
        registry.register(
            "cleave_prompt_tokens",
            "Prompt tokens looked up in the prefix cache",
            self.prompt_tokens.clone(),
        );
        registry.register(
            "cleave_prefix_cached_tokens",
            "Prompt tokens found in the prefix cache",
            self.cached_tokens.clone(),
        );
        registry.register(
            "cleave_prefill_wait_seconds",
            "From the order to a prompt's first chunk",
            self.prefill_wait.clone(),
        );
        registry.register(
            "cleave_orders_repeated",
            "Orders that named what was here already",
            self.orders_repeated.clone(),
        );
        registry.register(
            "cleave_worker_cancel_to_free_seconds",
            "From the order to cancel to every block free",
            self.cancel_seconds.clone(),
        );
    }

    fn register_pressure(&self, registry: &mut Registry) {
        registry.register(
            "cleave_preemptions",
            "Running sequences that lost their blocks and were computed again",
            self.preemptions.clone(),
        );
        registry.register(
            "cleave_recomputed_tokens",
            "Tokens computed again after a preemption",
            self.recomputed_tokens.clone(),
        );
        registry.register(
            "cleave_swap_blocks",
            "KV blocks copied to host memory (out) and back (in)",
            self.swap_blocks.clone(),
        );
        registry.register(
            "cleave_swap_seconds",
            "Copying one sequence's blocks to host memory (out) or back (in)",
            self.swap_seconds.clone(),
        );
        registry.register(
            "cleave_handoff_move_seconds",
            "From the order to move a running sequence to its landing elsewhere",
            self.move_seconds.clone(),
        );
        registry.register(
            "cleave_handoff_still_seconds",
            "Of that, how long the sequence stood still",
            self.still_seconds.clone(),
        );
        registry.register(
            "cleave_worker_stuck",
            "1 while the step under way takes too long",
            self.stuck.clone(),
        );
    }

    fn register_pool(&self, registry: &mut Registry) {
        registry.register(
            "cleave_pool_blocks",
            "KV blocks: held, free (or only cached), cached; of those held: reserved (not landed), leased \
             (to be handed on), quarantined (over, and the writer has not stopped), leaked (nobody's: a \
             defect); swapped are in host memory",
            self.blocks.clone(),
        );
        registry.register(
            "vllm:num_requests_running",
            "Sequences in the running batch",
            self.vllm_running.clone(),
        );
        registry.register(
            "vllm:num_requests_waiting",
            "Sequences waiting",
            self.vllm_waiting.clone(),
        );
        registry.register(
            "vllm:kv_cache_usage_perc",
            "Share of KV blocks held, 0 to 1",
            self.vllm_usage.clone(),
        );
    }
}

/// One worker's hand on its series.
#[derive(Clone, Debug)]
pub(crate) struct WorkerMeters {
    series: Series,
    worker: Worker,
    model: String,
    /// What the gauges show, to be shown again under another role.
    pool: Option<Note>,
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
        };
        meters.begin();
        meters
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
            &series.preemptions,
            &series.recomputed_tokens,
        ] {
            drop(counter.get_or_create(&self.worker));
        }
        drop(series.stuck.get_or_create(&self.worker));
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
        let model = self.model();
        series.vllm_running.remove(&model);
        series.vllm_waiting.remove(&model);
        series.vllm_usage.remove(&model);
        self.worker.role = role;
        self.begin();
        if let Some(pool) = self.pool.take() {
            self.count(&pool);
        }
    }

    pub(crate) fn link_measured(&self, peer: WorkerRef, speed: LinkSpeed) {
        let labels = self.peer(peer.worker);
        let bandwidth = self.series.link_bandwidth.get_or_create(&labels);
        bandwidth.set(speed.bytes_per_second as f64);
        let latency = self.series.link_latency.get_or_create(&labels);
        latency.set(speed.latency.as_secs_f64());
    }

    /// No life of that worker is known any more: its series end.
    pub(crate) fn link_forgotten(&self, peer: WorkerId) {
        let labels = self.peer(peer);
        self.series.link_bandwidth.remove(&labels);
        self.series.link_latency.remove(&labels);
        self.series.link_fallbacks.remove(&labels);
    }

    pub(crate) fn link_fell_back(&self, peer: WorkerRef) {
        let labels = self.peer(peer.worker);
        self.series.link_fallbacks.get_or_create(&labels).inc();
    }

    fn peer(&self, peer: WorkerId) -> Peer {
        Peer {
            worker: self.worker.worker.clone(),
            role: self.worker.role.clone(),
            peer: peer.to_string(),
        }
    }

    /// Counts what the brain noted, and logs it at `debug`.
    pub(crate) fn count(&mut self, note: &Note) {
        debug!(worker = self.worker.worker, ?note);
        let (series, worker) = (&self.series, &self.worker);
        match note {
            Note::Stepped {
                prefill_tokens,
                decode_sequences,
                took,
            } => {
                set(&series.stuck, worker, 0);
                self.stepped(*prefill_tokens, *decode_sequences, *took);
            }
            Note::PrefixLooked {
                prompt_tokens,
                cached_tokens,
            } => {
                add(&series.prompt_tokens, worker, u64::from(*prompt_tokens));
                add(&series.cached_tokens, worker, u64::from(*cached_tokens));
            }
            Note::PrefillStarted { waited } => observe(&series.prefill_wait, worker, *waited),
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
            Note::Repeated { .. } => add(&series.orders_repeated, worker, 1),
            Note::FrameDiscarded { .. } => add(&series.frames_discarded, worker, 1),
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
            Note::Stuck { running } => {
                warn!(
                    worker = worker.worker,
                    ?running,
                    "the step under way takes too long"
                );
                set(&series.stuck, worker, 1);
            }
            Note::CancelFreed { took } => observe(&series.cancel_seconds, worker, *took),
            Note::Pool {
                blocks_held,
                blocks_free,
                blocks_cached,
                sequences_running,
                sequences_waiting,
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
                let labels = self.model();
                set(&series.vllm_running, &labels, *sequences_running);
                set(&series.vllm_waiting, &labels, *sequences_waiting);
                self.pool = Some(note.clone());
            }
        }
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
        assert!(!text.contains("# EOF"));
    }
}
