//! Names and help texts of a worker's series.
//!
//! Owns: each name with its help. Never counts. Invariant: every series is registered once.

use super::adapters::LoraLabels;
use super::{
    CacheConfigLabels, FloatGauge, PeerTransportLabels, WorkerKindLabels, WorkerLabels,
    WorkerModelLabels, WorkerPeerLabels,
};
use crate::buckets::{HistogramFamily, histograms, ratio_histograms};
use crate::series_table::series_table;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

series_table! {
    /// The series of all workers of this process.
    pub struct WorkerSeries;

    pub(super) handoffs: Family<WorkerKindLabels, Counter>, "cleave_worker_handoffs",
        "Hand-offs at this worker, so that one counts at its sender and at its receiver: sealed (sent), landed (received and used), joined (both legs here, \
         no transfer), recomputed (a preempted sequence is computed again, as in \
         cleave_preemptions_total), moved (a running sequence migrated away), stayed (its migration was \
         given up), failed";
    pub(super) handoff_bytes: Family<WorkerKindLabels, Counter>, "cleave_worker_handoff_bytes",
        "KV bytes of finished hand-offs that this worker sent and received";
    pub(super) handoff_blocks: Family<WorkerKindLabels, Counter>, "cleave_worker_handoff_blocks",
        "KV blocks of finished hand-offs that this worker sent and received";
    pub(super) handoff_seconds: HistogramFamily<WorkerLabels> = histograms(), "cleave_handoff_seconds",
        "Time from reservation to landing";
    pub(super) exposed_seconds: HistogramFamily<WorkerLabels> = histograms(), "cleave_handoff_exposed_seconds",
        "Time from the seal's arrival to landing, which the overlap with prefill did not hide";
    pub(super) send_seconds: HistogramFamily<WorkerLabels> = histograms(), "cleave_handoff_send_seconds",
        "Time from the first frame to the seal";
    pub(super) frames_discarded: Family<WorkerLabels, Counter>, "cleave_frames_discarded",
        "Frames dropped because they were late, foreign or duplicates";
    pub(super) link_bandwidth: Family<WorkerPeerLabels, FloatGauge>, "cleave_link_bytes_per_second",
        "Bandwidth of the link to a peer, measured at its start";
    pub(super) link_latency: Family<WorkerPeerLabels, FloatGauge>, "cleave_link_latency_seconds",
        "Round trip of the link to a peer, measured at its start";
    pub(super) link_transport: Family<PeerTransportLabels, Gauge>, "cleave_link_transport",
        "1 for the transport of blocks to a peer now: local, cuda-ipc, shm, nixl or tcp";
    pub(super) grants: Family<WorkerLabels, Gauge>, "cleave_worker_write_grants",
        "Write grants that this worker has for other workers' pools, of hand-offs that have not ended here";
    pub(super) writes_refused: Family<WorkerLabels, Counter>, "cleave_worker_writes_refused",
        "Links that ended because the peer attempted a write without a valid grant";
    pub(super) link_fallbacks: Family<WorkerPeerLabels, Counter>, "cleave_link_fallbacks",
        "Links to a peer that fell back to a slower transport, because a faster one of both ends did \
         not work";
    pub(super) step_tokens: Family<WorkerKindLabels, Counter>, "cleave_step_tokens",
        "Tokens computed, by leg";
    pub(super) step_seconds: HistogramFamily<WorkerKindLabels> = histograms(), "cleave_step_seconds",
        "Engine time per step, by its content: prefill, decode or mixed";
    pub(super) prompt_tokens: Family<WorkerLabels, Counter>, "cleave_prefix_looked_up_tokens",
        "Prompt tokens that this worker looked up in its prefix cache, at each attempt and after a preemption again";
    pub(super) cached_tokens: Family<WorkerLabels, Counter>, "cleave_prefix_cached_tokens",
        "Part of cleave_prefix_looked_up_tokens_total that was found";
    pub(super) prefill_wait: HistogramFamily<WorkerLabels> = histograms(), "cleave_prefill_wait_seconds",
        "Time from the order to the first chunk of a prompt";
    pub(super) draft_tokens: Family<WorkerKindLabels, Counter>, "cleave_draft_tokens",
        "Draft tokens verified (kind `drafted`), and those of them accepted (kind `accepted`)";
    pub(super) draft_steps: Family<WorkerKindLabels, Counter>, "cleave_draft_steps",
        "Steps that could verify drafts: `drafted`, or why none did (`no_guess`: none was proposed, `no_gain`: rows cost more than they bring, `no_time`: a stream's target leaves no time, `no_room`: blocks or rows are short)";
    pub(super) orders_repeated: Family<WorkerLabels, Counter>, "cleave_orders_repeated",
        "Repeated orders, for a hand-off that was here already";
    pub(super) cancel_seconds: HistogramFamily<WorkerLabels> = histograms(), "cleave_worker_cancel_to_free_seconds",
        "Time from the order to cancel until every block of the hand-off is free at this worker";
    pub(super) step_ratio: HistogramFamily<WorkerLabels> = ratio_histograms(), "cleave_step_forecast_ratio",
        "Real times of steps divided by those predicted from the worker's prices; 1 is exact";
    pub(super) mfu: Family<WorkerLabels, FloatGauge>, "cleave_mfu_ratio",
        "Share of the device's arithmetic used in recent steps (an estimate, without idle time)";
    pub(super) mbu: Family<WorkerLabels, FloatGauge>, "cleave_mbu_ratio",
        "Share of the device's memory bandwidth used in recent steps (an estimate, without idle \
         time)";
    pub(super) blocks: Family<WorkerKindLabels, Gauge>, "cleave_pool_blocks",
        "KV blocks: held, free (cached ones too), cached; of those held: reserved (not landed), leased \
         (to be handed on), quarantined (ended, and a writer may still reach them), leaked (no owner: a \
         defect); swapped ones are in host memory";
    pub(super) state_slots: Family<WorkerKindLabels, Gauge>, "cleave_state_slots",
        "Slots for states of sequences, where the model has states: held (by sequences, hand-offs and copies), \
         free (cached ones too), cached (snapshots kept for reuse); leaked ones are held without an owner (a \
         defect)";
    pub(super) window_blocks: Family<WorkerKindLabels, Gauge>, "cleave_window_blocks",
        "KV blocks of layers with a sliding window, where the model has such a plane: held (by sequences, \
         hand-offs and copies), free (cached ones too), cached (kept for reuse); leaked ones are held without \
         an owner (a defect)";
    pub(super) vllm_running: Family<WorkerModelLabels, Gauge>, "vllm:num_requests_running",
        "Sequences in the running batch";
    pub(super) vllm_waiting: Family<WorkerModelLabels, Gauge>, "vllm:num_requests_waiting",
        "Sequences waiting to run";
    pub(super) vllm_usage: Family<WorkerModelLabels, FloatGauge>, "vllm:kv_cache_usage_perc",
        "Share of KV blocks held, 0 to 1";
    pub(super) vllm_cache: Family<CacheConfigLabels, Gauge>, "vllm:cache_config_info",
        "1, with the size of the KV cache: tokens of a block, and the number of blocks";
    pub(super) vllm_loras: Family<LoraLabels, FloatGauge>, "vllm:lora_requests_info",
        "Unix time of the last change of the LoRA adapters in use, whose names are in the labels: those \
         that requests run with, those that they wait for, and how many may be loaded";
    pub(super) adapters: Family<WorkerKindLabels, Gauge>, "cleave_adapters",
        "LoRA adapters: served (under a name), loaded (for steps), in_use (by a hand-off), in_host (a copy in \
         host memory alone)";
    pub(super) adapter_loads: Family<WorkerKindLabels, Counter>, "cleave_adapter_loads",
        "Loads of LoRA adapters: loaded, failed; from_host ones read no disk; evicted ones left for another \
         one, dropped ones left host memory";
    pub(super) preemptions: Family<WorkerLabels, Counter>, "cleave_preemptions",
        "Running sequences that lost their blocks and were computed again";
    pub(super) recomputed_tokens: Family<WorkerLabels, Counter>, "cleave_recomputed_tokens",
        "Tokens computed again after a preemption (cleave_resumed_tokens_total is for lost workers)";
    pub(super) swap_blocks: Family<WorkerKindLabels, Counter>, "cleave_swap_blocks",
        "KV blocks copied to host memory (out) and back (in)";
    pub(super) swap_seconds: HistogramFamily<WorkerKindLabels> = histograms(), "cleave_swap_seconds",
        "Time to copy one sequence's blocks to host memory (out) or back (in)";
    pub(super) move_seconds: HistogramFamily<WorkerLabels> = histograms(), "cleave_worker_move_seconds",
        "Time at the sender from the order to migrate a running sequence until it landed elsewhere";
    pub(super) pause_seconds: HistogramFamily<WorkerLabels> = histograms(), "cleave_worker_move_pause_seconds",
        "Part of cleave_worker_move_seconds for which the sequence was paused";
    pub(super) stuck: Family<WorkerLabels, Gauge>, "cleave_worker_stuck",
        "1 while this worker's present step exceeds its time limit";
    pub(super) tier_blocks: Family<WorkerKindLabels, Gauge>, "cleave_kv_tier_blocks",
        "KV blocks kept below the pool: in host memory (host), on disk (disk), those on their way there \
         included; a block may be in both, and in the pool";
    pub(super) tier_bytes: Family<WorkerKindLabels, Gauge>, "cleave_kv_tier_bytes",
        "Bytes of the KV blocks kept below the pool, in host memory (host) or on disk (disk)";
    pub(super) tier_copied: Family<WorkerKindLabels, Counter>, "cleave_kv_tier_kept_blocks",
        "KV blocks copied from the pool to host memory (host), and from there to disk (disk)";
    pub(super) tier_keep_seconds: HistogramFamily<WorkerKindLabels> = histograms(), "cleave_kv_tier_keep_seconds",
        "Time to copy one KV block to host memory (host) or to disk (disk)";
    pub(super) tier_fetched: Family<WorkerLabels, Counter>, "cleave_kv_tier_fetched_blocks",
        "KV blocks loaded back into the pool instead of being computed";
    pub(super) tier_fetch_seconds: HistogramFamily<WorkerLabels> = histograms(), "cleave_kv_tier_fetch_seconds",
        "Time to load one sequence's KV blocks back, with waits for steps";
    pub(super) tier_failures: Family<WorkerKindLabels, Counter>, "cleave_kv_tier_failures",
        "KV blocks not kept or not loaded back, and computed instead: no memory, or a block that could \
         not be read (host_full), a failed write to disk (disk_failed), too slow, cancelled, or blocks were needed (stopped), \
         gone (missing), changed since (corrupt), a failed read from disk (unreadable), a failed write \
         into the pool (engine)";
}
