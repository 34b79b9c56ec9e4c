//! The vector of a pooled sequence, as far as its prompt has been run.
//!
//! Owns: what the engine gave for the tokens so far. Never: computes with hidden states.
//! Invariant: it covers exactly the computed tokens that its kind reads; where those are not only
//! the last one, no block of the prompt comes from a cache, and a prompt that begins anew loses it.

use super::WorkerSequence;
use cleave_domain::{Pooling, SegmentPooling, SlotIndex};
use std::sync::Arc;

#[derive(Clone, Debug, Default)]
pub(crate) struct PooledSoFar(Option<Arc<[f64]>>);

impl PooledSoFar {
    /// Takes what a step gave.
    pub(crate) fn take(&mut self, values: Arc<[f64]>) {
        self.0 = Some(values);
    }

    /// Forgets everything: the prompt is run from its first token on.
    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }

    /// Number of values, which tells states apart.
    pub(super) fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |values| values.len())
    }
}

impl WorkerSequence {
    /// Whether it asks for a vector, and so never decodes.
    pub(crate) fn pools(&self) -> bool {
        self.request.pooling.is_some()
    }

    /// Whether every token must be run here, so that none may come from a cache.
    pub(crate) fn runs_every_token(&self) -> bool {
        let pooling = self.request.pooling.as_ref();
        let pools_all = pooling.is_some_and(|pooling| !pooling.reads_last_token_alone());
        pools_all || self.scores_prompt()
    }

    /// Whether the next `tokens` tokens contribute to its vector.
    pub(crate) fn pools_segment(&self, tokens: u32) -> bool {
        let reads = |pooling: &Pooling| pooling.reads(self.kv.computed(), tokens, self.len());
        self.request.pooling.as_ref().is_some_and(reads)
    }

    /// The vector that its next segment contributes to.
    pub(crate) fn segment_pooling(&self, slot: SlotIndex) -> Option<SegmentPooling> {
        let pooling = self.request.pooling.clone()?;
        let sum = self.pooled.0.clone().filter(|_| pooling == Pooling::Mean);
        Some(SegmentPooling { slot, pooling, sum })
    }

    /// The vector, once every token was run.
    pub(crate) fn pooled_result(&self) -> Option<Arc<[f32]>> {
        let pooling = self.request.pooling.as_ref()?;
        let values = self.pooled.0.as_ref()?;
        (self.tokens_to_run() == 0).then(|| pooling.finish(values, self.len()))
    }
}
