//! Blocks for a sequence that is new here.
//!
//! Owns: how many blocks it needs, and when it may have them. Never: frees a block of another
//! sequence. Invariant: a sequence gets all that it needs, or nothing.

use super::Admission;
use crate::WorkerLimits;
use crate::memory::CacheReuse;
use crate::sequences::WorkerSequence;
use cleave_domain::Refusal;

impl Admission<'_> {
    /// Calls [`crate::memory::KvMemory::secure`] for a sequence that is new here. Nothing is given
    /// out while a preempted or swapped sequence waits for blocks: new ones would starve it.
    pub(crate) fn hold(
        &mut self,
        sequence: &mut WorkerSequence,
        reach: CacheReuse,
        growth: u32,
    ) -> Result<(), Refusal> {
        let waits = |s: &WorkerSequence| s.starved() || s.kv.swap().is_some();
        let starved = self.sequences.iter().any(waits);
        if !starved && self.memory.secure(sequence, reach, growth) {
            return Ok(());
        }
        let retry_after = self.snapshot().soonest_end();
        Err(Refusal::NoBlocks { retry_after })
    }
}

/// Blocks for a sequence and the tokens that its sender may draw before it seals; no more than
/// the pool has.
pub(crate) fn ahead(limits: &WorkerLimits, sequence: &WorkerSequence, ahead_tokens: u32) -> u32 {
    let left = sequence.request.stop.max_tokens - sequence.output_count();
    blocks_of(
        limits,
        sequence.len().saturating_add(left.min(ahead_tokens)),
    )
}

/// Blocks for the expected length of a sequence; no more than the pool has. The last token
/// drawn is never run, so it needs no block.
pub(crate) fn growth(
    limits: &WorkerLimits,
    sequence: &WorkerSequence,
    expected_output_tokens: u32,
) -> u32 {
    let left = sequence.request.stop.max_tokens - sequence.output_count();
    let run = left.min(expected_output_tokens).saturating_sub(1);
    blocks_of(limits, sequence.len().saturating_add(run))
}

fn blocks_of(limits: &WorkerLimits, tokens: u32) -> u32 {
    let capacity = &limits.capacity;
    tokens
        .min(capacity.context_tokens_max)
        .div_ceil(capacity.block_tokens)
        .min(capacity.blocks_count)
}
