//! Names and help texts of a worker's series.
//!
//! Owns: each name with its help. Never counts. Invariant: every series is registered once.

use super::{
    CacheConfigLabels, FloatGauge, PeerTransportLabels, WorkerKindLabels, WorkerLabels,
    WorkerModelLabels, WorkerPeerLabels,
};
use crate::buckets::{HistogramFamily, histograms, ratio_histograms};
use cleave_api::MetricRegistry;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

/// The series of all workers of this process.
#[derive(Clone, Debug)]
pub struct WorkerSeries {
    pub(super) handoffs: Family<WorkerKindLabels, Counter>,
    pub(super) handoff_bytes: Family<WorkerKindLabels, Counter>,
    pub(super) handoff_blocks: Family<WorkerKindLabels, Counter>,
    pub(super) handoff_seconds: HistogramFamily<WorkerLabels>,
    pub(super) exposed_seconds: HistogramFamily<WorkerLabels>,
    pub(super) send_seconds: HistogramFamily<WorkerLabels>,
    pub(super) frames_discarded: Family<WorkerLabels, Counter>,
    pub(super) grants: Family<WorkerLabels, Gauge>,
    pub(super) writes_refused: Family<WorkerLabels, Counter>,
    pub(super) step_tokens: Family<WorkerKindLabels, Counter>,
    pub(super) step_seconds: HistogramFamily<WorkerKindLabels>,
    pub(super) step_ratio: HistogramFamily<WorkerLabels>,
    pub(super) draft_tokens: Family<WorkerKindLabels, Counter>,
    pub(super) draft_steps: Family<WorkerKindLabels, Counter>,
    pub(super) mfu: Family<WorkerLabels, FloatGauge>,
    pub(super) mbu: Family<WorkerLabels, FloatGauge>,
    pub(super) prompt_tokens: Family<WorkerLabels, Counter>,
    pub(super) cached_tokens: Family<WorkerLabels, Counter>,
    pub(super) prefill_wait: HistogramFamily<WorkerLabels>,
    pub(super) preemptions: Family<WorkerLabels, Counter>,
    pub(super) recomputed_tokens: Family<WorkerLabels, Counter>,
    pub(super) orders_repeated: Family<WorkerLabels, Counter>,
    pub(super) cancel_seconds: HistogramFamily<WorkerLabels>,
    pub(super) swap_blocks: Family<WorkerKindLabels, Counter>,
    pub(super) swap_seconds: HistogramFamily<WorkerKindLabels>,
    pub(super) tier_blocks: Family<WorkerKindLabels, Gauge>,
    pub(super) tier_bytes: Family<WorkerKindLabels, Gauge>,
    pub(super) tier_copied: Family<WorkerKindLabels, Counter>,
    pub(super) tier_keep_seconds: HistogramFamily<WorkerKindLabels>,
    pub(super) tier_fetched: Family<WorkerLabels, Counter>,
    pub(super) tier_fetch_seconds: HistogramFamily<WorkerLabels>,
    pub(super) tier_failures: Family<WorkerKindLabels, Counter>,
    pub(super) move_seconds: HistogramFamily<WorkerLabels>,
    pub(super) pause_seconds: HistogramFamily<WorkerLabels>,
    pub(super) stuck: Family<WorkerLabels, Gauge>,
    pub(super) blocks: Family<WorkerKindLabels, Gauge>,
    pub(super) state_slots: Family<WorkerKindLabels, Gauge>,
    pub(super) link_bandwidth: Family<WorkerPeerLabels, FloatGauge>,
    pub(super) link_latency: Family<WorkerPeerLabels, FloatGauge>,
    pub(super) link_fallbacks: Family<WorkerPeerLabels, Counter>,
    pub(super) link_transport: Family<PeerTransportLabels, Gauge>,
    pub(super) vllm_running: Family<WorkerModelLabels, Gauge>,
    pub(super) vllm_waiting: Family<WorkerModelLabels, Gauge>,
    pub(super) vllm_usage: Family<WorkerModelLabels, FloatGauge>,
    pub(super) vllm_cache: Family<CacheConfigLabels, Gauge>,
}

impl WorkerSeries {
    pub(crate) fn register(registry: &mut MetricRegistry) -> Self {
        let series = Self {
            handoffs: Family::default(),
            handoff_bytes: Family::default(),
            handoff_blocks: Family::default(),
            handoff_seconds: histograms(),
            exposed_seconds: histograms(),
            send_seconds: histograms(),
            frames_discarded: Family::default(),
            grants: Family::default(),
            writes_refused: Family::default(),
            step_tokens: Family::default(),
            step_seconds: histograms(),
            step_ratio: ratio_histograms(),
            mfu: Family::default(),
            mbu: Family::default(),
            prompt_tokens: Family::default(),
            cached_tokens: Family::default(),
            draft_tokens: Family::default(),
            draft_steps: Family::default(),
            prefill_wait: histograms(),
            preemptions: Family::default(),
            recomputed_tokens: Family::default(),
            orders_repeated: Family::default(),
            cancel_seconds: histograms(),
            swap_blocks: Family::default(),
            swap_seconds: histograms(),
            tier_blocks: Family::default(),
            tier_bytes: Family::default(),
            tier_copied: Family::default(),
            tier_keep_seconds: histograms(),
            tier_fetched: Family::default(),
            tier_fetch_seconds: histograms(),
            tier_failures: Family::default(),
            move_seconds: histograms(),
            pause_seconds: histograms(),
            stuck: Family::default(),
            blocks: Family::default(),
            state_slots: Family::default(),
            link_bandwidth: Family::default(),
            link_latency: Family::default(),
            link_fallbacks: Family::default(),
            link_transport: Family::default(),
            vllm_running: Family::default(),
            vllm_waiting: Family::default(),
            vllm_usage: Family::default(),
            vllm_cache: Family::default(),
        };
        series.register_handoffs(registry);
        series.register_steps(registry);
        series.register_prices(registry);
        series.register_pool(registry);
        series.register_pressure(registry);
        series.register_tier(registry);
        series
    }

    fn register_handoffs(&self, registry: &mut MetricRegistry) {
        registry.register(
            "cleave_handoffs",
            "Hand-offs at this worker: sealed (sent), landed (received and used), joined (both legs here, \
             no transfer), recomputed (a preempted sequence is computed again, as in \
             cleave_preemptions_total), moved (a running sequence migrated away), stayed (its migration was \
             given up), failed",
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
            "Time from reservation to landing",
            self.handoff_seconds.clone(),
        );
        registry.register(
            "cleave_handoff_exposed_seconds",
            "Time from the seal's arrival to landing, which the overlap with prefill did not hide",
            self.exposed_seconds.clone(),
        );
        registry.register(
            "cleave_handoff_send_seconds",
            "Time from the first frame to the seal",
            self.send_seconds.clone(),
        );
        registry.register(
            "cleave_frames_discarded",
            "Frames dropped because they were late, foreign or duplicates",
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
            "cleave_link_transport",
            "1 for the transport of blocks to a peer now: local, cuda-ipc, shm, nixl or tcp",
            self.link_transport.clone(),
        );
        registry.register(
            "cleave_handoff_passes",
            "Write grants for other workers' pools, of hand-offs that have not ended here",
            self.grants.clone(),
        );
        registry.register(
            "cleave_handoff_passes_refused",
            "Links that ended because the peer attempted a write without a valid grant",
            self.writes_refused.clone(),
        );
        registry.register(
            "cleave_link_fallbacks",
            "Links to a peer that fell back to a slower transport, because a faster one of both ends did \
             not work",
            self.link_fallbacks.clone(),
        );
    }

    fn register_steps(&self, registry: &mut MetricRegistry) {
        registry.register(
            "cleave_step_tokens",
            "Tokens computed, by leg",
            self.step_tokens.clone(),
        );
        registry.register(
            "cleave_step_seconds",
            "Engine time per step, by its content: prefill, decode or mixed",
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
            "Time from the order to the first chunk of a prompt",
            self.prefill_wait.clone(),
        );
        registry.register(
            "cleave_draft_tokens",
            "Draft tokens verified (kind `drafted`), and those of them accepted (kind `accepted`)",
            self.draft_tokens.clone(),
        );
        registry.register(
            "cleave_draft_steps",
            "Steps that could verify drafts: `drafted`, or why none did (`no_guess`: none was proposed, `no_gain`: rows cost more than they bring, `no_time`: a stream's target leaves no time, `no_room`: blocks or rows are short)",
            self.draft_steps.clone(),
        );
        registry.register(
            "cleave_orders_repeated",
            "Repeated orders, for a hand-off that was here already",
            self.orders_repeated.clone(),
        );
        registry.register(
            "cleave_worker_cancel_to_free_seconds",
            "Time from the order to cancel until every block is free",
            self.cancel_seconds.clone(),
        );
    }

    fn register_pressure(&self, registry: &mut MetricRegistry) {
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
            "Time to copy one sequence's blocks to host memory (out) or back (in)",
            self.swap_seconds.clone(),
        );
        registry.register(
            "cleave_handoff_move_seconds",
            "Time from the order to migrate a running sequence until it landed elsewhere",
            self.move_seconds.clone(),
        );
        registry.register(
            "cleave_handoff_still_seconds",
            "Part of cleave_handoff_move_seconds for which the sequence was paused",
            self.pause_seconds.clone(),
        );
        registry.register(
            "cleave_worker_stuck",
            "1 while the present step exceeds its time limit",
            self.stuck.clone(),
        );
    }

    fn register_tier(&self, registry: &mut MetricRegistry) {
        registry.register(
            "cleave_kv_tier_blocks",
            "KV blocks kept below the pool: in host memory (host), on disk (disk), those on their way there \
             included; a block may be in both, and in the pool",
            self.tier_blocks.clone(),
        );
        registry.register(
            "cleave_kv_tier_bytes",
            "Bytes of the KV blocks kept below the pool, in host memory (host) or on disk (disk)",
            self.tier_bytes.clone(),
        );
        registry.register(
            "cleave_kv_tier_kept_blocks",
            "KV blocks copied from the pool to host memory (host), and from there to disk (disk)",
            self.tier_copied.clone(),
        );
        registry.register(
            "cleave_kv_tier_keep_seconds",
            "Time to copy one KV block to host memory (host) or to disk (disk)",
            self.tier_keep_seconds.clone(),
        );
        registry.register(
            "cleave_kv_tier_fetched_blocks",
            "KV blocks loaded back into the pool instead of being computed",
            self.tier_fetched.clone(),
        );
        registry.register(
            "cleave_kv_tier_fetch_seconds",
            "Time to load one sequence's KV blocks back, with waits for steps",
            self.tier_fetch_seconds.clone(),
        );
        registry.register(
            "cleave_kv_tier_failures",
            "KV blocks not kept or not loaded back, and computed instead: no memory, or a block that could \
             not be read (host_full), a failed write to disk (disk_failed), too slow, cancelled, or blocks were needed (stopped), \
             gone (missing), changed since (corrupt), a failed read from disk (unreadable), a failed write \
             into the pool (engine)",
            self.tier_failures.clone(),
        );
    }

    fn register_prices(&self, registry: &mut MetricRegistry) {
        registry.register(
            "cleave_step_forecast_ratio",
            "Real times of steps divided by those predicted from the worker's prices; 1 is exact",
            self.step_ratio.clone(),
        );
        registry.register(
            "cleave_mfu_ratio",
            "Share of the device's arithmetic used in recent steps (an estimate, without idle time)",
            self.mfu.clone(),
        );
        registry.register(
            "cleave_mbu_ratio",
            "Share of the device's memory bandwidth used in recent steps (an estimate, without idle \
             time)",
            self.mbu.clone(),
        );
    }

    fn register_pool(&self, registry: &mut MetricRegistry) {
        registry.register(
            "cleave_pool_blocks",
            "KV blocks: held, free (cached ones too), cached; of those held: reserved (not landed), leased \
             (to be handed on), quarantined (ended, and a writer may still reach them), leaked (no owner: a \
             defect); swapped ones are in host memory",
            self.blocks.clone(),
        );
        registry.register(
            "cleave_state_slots",
            "Slots for states of sequences, where the model has states: held (by sequences, hand-offs and copies), \
             free (cached ones too), cached (snapshots kept for reuse); leaked ones are held without an owner (a \
             defect)",
            self.state_slots.clone(),
        );
        registry.register(
            "vllm:num_requests_running",
            "Sequences in the running batch",
            self.vllm_running.clone(),
        );
        registry.register(
            "vllm:num_requests_waiting",
            "Sequences waiting to run",
            self.vllm_waiting.clone(),
        );
        registry.register(
            "vllm:kv_cache_usage_perc",
            "Share of KV blocks held, 0 to 1",
            self.vllm_usage.clone(),
        );
        registry.register(
            "vllm:cache_config_info",
            "1, with the size of the KV cache: tokens of a block, and the number of blocks",
            self.vllm_cache.clone(),
        );
    }
}
