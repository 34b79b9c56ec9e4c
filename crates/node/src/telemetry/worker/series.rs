//! The names of a worker's series.
//!
//! Owns: each name with its help. Never: counts. Invariant: every series is registered once.

use super::{CacheShape, Carried, FloatGauge, Model, Peer, Sorted, Worker};
use crate::telemetry::{Histograms, histograms, ratio_histograms};
use cleave_api::Book;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

/// The series of all workers of this process.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(super) handoffs: Family<Sorted, Counter>,
    pub(super) handoff_bytes: Family<Sorted, Counter>,
    pub(super) handoff_blocks: Family<Sorted, Counter>,
    pub(super) handoff_seconds: Histograms<Worker>,
    pub(super) exposed_seconds: Histograms<Worker>,
    pub(super) send_seconds: Histograms<Worker>,
    pub(super) frames_discarded: Family<Worker, Counter>,
    pub(super) passes: Family<Worker, Gauge>,
    pub(super) passes_refused: Family<Worker, Counter>,
    pub(super) step_tokens: Family<Sorted, Counter>,
    pub(super) step_seconds: Histograms<Sorted>,
    pub(super) step_ratio: Histograms<Worker>,
    pub(super) draft_tokens: Family<Sorted, Counter>,
    pub(super) draft_steps: Family<Sorted, Counter>,
    pub(super) mfu: Family<Worker, FloatGauge>,
    pub(super) mbu: Family<Worker, FloatGauge>,
    pub(super) prompt_tokens: Family<Worker, Counter>,
    pub(super) cached_tokens: Family<Worker, Counter>,
    pub(super) prefill_wait: Histograms<Worker>,
    pub(super) preemptions: Family<Worker, Counter>,
    pub(super) recomputed_tokens: Family<Worker, Counter>,
    pub(super) orders_repeated: Family<Worker, Counter>,
    pub(super) cancel_seconds: Histograms<Worker>,
    pub(super) swap_blocks: Family<Sorted, Counter>,
    pub(super) swap_seconds: Histograms<Sorted>,
    pub(super) tier_blocks: Family<Sorted, Gauge>,
    pub(super) tier_bytes: Family<Sorted, Gauge>,
    pub(super) tier_kept: Family<Sorted, Counter>,
    pub(super) tier_keep_seconds: Histograms<Sorted>,
    pub(super) tier_fetched: Family<Worker, Counter>,
    pub(super) tier_fetch_seconds: Histograms<Worker>,
    pub(super) tier_failures: Family<Sorted, Counter>,
    pub(super) move_seconds: Histograms<Worker>,
    pub(super) still_seconds: Histograms<Worker>,
    pub(super) stuck: Family<Worker, Gauge>,
    pub(super) blocks: Family<Sorted, Gauge>,
    pub(super) link_bandwidth: Family<Peer, FloatGauge>,
    pub(super) link_latency: Family<Peer, FloatGauge>,
    pub(super) link_fallbacks: Family<Peer, Counter>,
    pub(super) link_transport: Family<Carried, Gauge>,
    pub(super) vllm_running: Family<Model, Gauge>,
    pub(super) vllm_waiting: Family<Model, Gauge>,
    pub(super) vllm_usage: Family<Model, FloatGauge>,
    pub(super) vllm_cache: Family<CacheShape, Gauge>,
}

impl Series {
    pub(crate) fn register(book: &mut Book) -> Self {
        let series = Self {
            handoffs: Family::default(),
            handoff_bytes: Family::default(),
            handoff_blocks: Family::default(),
            handoff_seconds: histograms(),
            exposed_seconds: histograms(),
            send_seconds: histograms(),
            frames_discarded: Family::default(),
            passes: Family::default(),
            passes_refused: Family::default(),
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
            tier_kept: Family::default(),
            tier_keep_seconds: histograms(),
            tier_fetched: Family::default(),
            tier_fetch_seconds: histograms(),
            tier_failures: Family::default(),
            move_seconds: histograms(),
            still_seconds: histograms(),
            stuck: Family::default(),
            blocks: Family::default(),
            link_bandwidth: Family::default(),
            link_latency: Family::default(),
            link_fallbacks: Family::default(),
            link_transport: Family::default(),
            vllm_running: Family::default(),
            vllm_waiting: Family::default(),
            vllm_usage: Family::default(),
            vllm_cache: Family::default(),
        };
        series.register_handoffs(book);
        series.register_steps(book);
        series.register_prices(book);
        series.register_pool(book);
        series.register_pressure(book);
        series.register_tier(book);
        series
    }

    fn register_handoffs(&self, book: &mut Book) {
        book.register(
            "cleave_handoffs",
            "Hand-offs at this end: sealed (sent), landed (received and used), joined (both legs here, \
             nothing moved), recomputed (landed, and computed again here), moved (a running sequence \
             left), stayed (it was to, and did not), failed",
            self.handoffs.clone(),
        );
        book.register(
            "cleave_handoff_bytes",
            "KV bytes of finished hand-offs, sent and received",
            self.handoff_bytes.clone(),
        );
        book.register(
            "cleave_handoff_blocks",
            "KV blocks of finished hand-offs, sent and received",
            self.handoff_blocks.clone(),
        );
        book.register(
            "cleave_handoff_seconds",
            "From reservation to landing",
            self.handoff_seconds.clone(),
        );
        book.register(
            "cleave_handoff_exposed_seconds",
            "From the seal's arrival to landing: what the overlap with prefill did not hide",
            self.exposed_seconds.clone(),
        );
        book.register(
            "cleave_handoff_send_seconds",
            "From the first frame to the seal",
            self.send_seconds.clone(),
        );
        book.register(
            "cleave_frames_discarded",
            "Late, foreign or doubled frames dropped",
            self.frames_discarded.clone(),
        );
        book.register(
            "cleave_link_bytes_per_second",
            "Bandwidth of the link to a peer, measured at its start",
            self.link_bandwidth.clone(),
        );
        book.register(
            "cleave_link_latency_seconds",
            "Round trip of the link to a peer, measured at its start",
            self.link_latency.clone(),
        );
        book.register(
            "cleave_link_transport",
            "1 for what carries blocks to a peer now: local, cuda-ipc, shm or tcp",
            self.link_transport.clone(),
        );
        book.register(
            "cleave_handoff_passes",
            "Passes to write to other workers' pools, of hand-offs that have not ended here",
            self.passes.clone(),
        );
        book.register(
            "cleave_handoff_passes_refused",
            "Links that ended because the peer wanted to write what it had no pass for, or an old one",
            self.passes_refused.clone(),
        );
        book.register(
            "cleave_link_fallbacks",
            "Links to a peer that run over a slower transport than both ends have, because that did \
             not work",
            self.link_fallbacks.clone(),
        );
    }

    fn register_steps(&self, book: &mut Book) {
        book.register(
            "cleave_step_tokens",
            "Tokens run, by leg",
            self.step_tokens.clone(),
        );
        book.register(
            "cleave_step_seconds",
            "Engine time per step, by what was in it",
            self.step_seconds.clone(),
        );
        book.register(
            "cleave_prompt_tokens",
            "Prompt tokens looked up in the prefix cache",
            self.prompt_tokens.clone(),
        );
        book.register(
            "cleave_prefix_cached_tokens",
            "Prompt tokens found in the prefix cache",
            self.cached_tokens.clone(),
        );
        book.register(
            "cleave_prefill_wait_seconds",
            "From the order to a prompt's first chunk",
            self.prefill_wait.clone(),
        );
        book.register(
            "cleave_draft_tokens",
            "Tokens guessed and verified (kind `drafted`) and of these those that came true (kind `accepted`)",
            self.draft_tokens.clone(),
        );
        book.register(
            "cleave_draft_steps",
            "Steps that could verify guesses: `drafted`, or why none (`no_guess`, `no_gain`: rows cost more than they bring, `no_time`: a stream's promise, `no_room`)",
            self.draft_steps.clone(),
        );
        book.register(
            "cleave_orders_repeated",
            "Orders that named what was here already",
            self.orders_repeated.clone(),
        );
        book.register(
            "cleave_worker_cancel_to_free_seconds",
            "From the order to cancel to every block free",
            self.cancel_seconds.clone(),
        );
    }

    fn register_pressure(&self, book: &mut Book) {
        book.register(
            "cleave_preemptions",
            "Running sequences that lost their blocks and were computed again",
            self.preemptions.clone(),
        );
        book.register(
            "cleave_recomputed_tokens",
            "Tokens computed again after a preemption",
            self.recomputed_tokens.clone(),
        );
        book.register(
            "cleave_swap_blocks",
            "KV blocks copied to host memory (out) and back (in)",
            self.swap_blocks.clone(),
        );
        book.register(
            "cleave_swap_seconds",
            "Copying one sequence's blocks to host memory (out) or back (in)",
            self.swap_seconds.clone(),
        );
        book.register(
            "cleave_handoff_move_seconds",
            "From the order to move a running sequence to its landing elsewhere",
            self.move_seconds.clone(),
        );
        book.register(
            "cleave_handoff_still_seconds",
            "Of that, how long the sequence stood still",
            self.still_seconds.clone(),
        );
        book.register(
            "cleave_worker_stuck",
            "1 while the step under way takes too long",
            self.stuck.clone(),
        );
    }

    fn register_tier(&self, book: &mut Book) {
        book.register(
            "cleave_kv_tier_blocks",
            "KV blocks kept below the pool: in host memory (host), on disk (disk), those on their way there \
             included; a block may be in both, and in the pool",
            self.tier_blocks.clone(),
        );
        book.register(
            "cleave_kv_tier_bytes",
            "The same in bytes",
            self.tier_bytes.clone(),
        );
        book.register(
            "cleave_kv_tier_kept_blocks",
            "KV blocks copied from the pool to host memory (host), and from there to disk (disk)",
            self.tier_kept.clone(),
        );
        book.register(
            "cleave_kv_tier_keep_seconds",
            "Copying one block there",
            self.tier_keep_seconds.clone(),
        );
        book.register(
            "cleave_kv_tier_fetched_blocks",
            "KV blocks brought back to the pool in place of computing them",
            self.tier_fetched.clone(),
        );
        book.register(
            "cleave_kv_tier_fetch_seconds",
            "Bringing one sequence's blocks back, waits for steps included",
            self.tier_fetch_seconds.clone(),
        );
        book.register(
            "cleave_kv_tier_failures",
            "What was not kept or not brought back, and was computed instead: no memory or a block that could \
             not be read (host_full), a disk that took no more (disk_failed), too slow, cancelled, or its blocks were needed (stopped), \
             gone (missing), changed since (corrupt), a disk that could not read (unreadable), an engine that \
             could not write (engine)",
            self.tier_failures.clone(),
        );
    }

    fn register_prices(&self, book: &mut Book) {
        book.register(
            "cleave_step_forecast_ratio",
            "Real times of steps by those predicted from the worker's prices; 1 is right",
            self.step_ratio.clone(),
        );
        book.register(
            "cleave_mfu_ratio",
            "Part of the device's arithmetic used in the steps of late (an estimate; idle time aside)",
            self.mfu.clone(),
        );
        book.register(
            "cleave_mbu_ratio",
            "Part of the device's memory bandwidth used in the steps of late (an estimate; idle time \
             aside)",
            self.mbu.clone(),
        );
    }

    fn register_pool(&self, book: &mut Book) {
        book.register(
            "cleave_pool_blocks",
            "KV blocks: held, free (or only cached), cached; of those held: reserved (not landed), leased \
             (to be handed on), quarantined (over, and the writer has not stopped), leaked (nobody's: a \
             defect); swapped are in host memory",
            self.blocks.clone(),
        );
        book.register(
            "vllm:num_requests_running",
            "Sequences in the running batch",
            self.vllm_running.clone(),
        );
        book.register(
            "vllm:num_requests_waiting",
            "Sequences waiting",
            self.vllm_waiting.clone(),
        );
        book.register(
            "vllm:kv_cache_usage_perc",
            "Share of KV blocks held, 0 to 1",
            self.vllm_usage.clone(),
        );
        book.register(
            "vllm:cache_config_info",
            "1 for the size of the KV cache: tokens of a block, and blocks",
            self.vllm_cache.clone(),
        );
    }
}
