//! The load of a worker.
//!
//! Owns: the sums of a [`WorkerLoad`]. Never: changes anything, or decides what is reported.

use crate::sequences::SequenceStage;
use crate::snapshot::LoadSnapshot;
use cleave_domain::{PrefillBacklog, StepProgress, WorkerLoad};
use cleave_kv::PlanePool;
use std::time::Duration;

/// A stream that ends within this time is gone before one that is placed now arrives.
const GONE_SOON: Duration = Duration::from_millis(500);

impl LoadSnapshot<'_> {
    /// The worker's current load.
    pub(crate) fn load(&self) -> WorkerLoad {
        let now = self.context.now();
        let stuck = self.steps.is_stuck();
        let mut load = WorkerLoad {
            progress: if stuck {
                StepProgress::Stuck
            } else {
                StepProgress::Moving
            },
            step_left: self.steps.left(now),
            blocks_free: self.memory.blocks().blocks_available(),
            states_free: self.memory.states().map_or(0, PlanePool::blocks_available),
            windows_free: self.memory.windows().map_or(0, PlanePool::blocks_available),
            ..WorkerLoad::default()
        };
        for sequence in self.sequences.iter() {
            match sequence.stage() {
                SequenceStage::Active if sequence.slot().is_some() => load.sequences_running += 1,
                SequenceStage::Active | SequenceStage::Reserved => load.sequences_waiting += 1,
                SequenceStage::Sending | SequenceStage::Paused | SequenceStage::Closing { .. } => {
                    continue;
                }
            }
            if sequence.decodes_here() {
                let ends_soon = |gap: &Duration| {
                    sequence.decodes_next() && *gap * sequence.tokens_left() < GONE_SOON
                };
                let gap = self
                    .forecast
                    .keepable_gap(sequence, now)
                    .filter(|gap| !ends_soon(gap));
                load.tpot_least = load.tpot_least.into_iter().chain(gap).min();
                load.context_tokens += u64::from(sequence.len());
                load.streams += 1;
            }
            if sequence.has_prefill_left() {
                let size = self.context.block_tokens();
                let rest = sequence.len() - sequence.computed_or_fetching(size);
                load.queue_tokens += u64::from(rest);
                let work = self.forecast.prompt_adds(sequence);
                let slack = self.forecast.prompt_slack(sequence, now);
                let priority = sequence.request.slo.priority;
                load.backlog.add(priority, slack, work);
            }
        }
        if self.forecast.has_prices() {
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
}
