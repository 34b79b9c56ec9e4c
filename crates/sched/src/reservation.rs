//! KV for a sequence: blocks and a snapshot that the prefix cache has, a reservation for the other
//! blocks, and a state slot.
//!
//! Owns: how many blocks a sequence needs, and taking them. Never: frees a block of another
//! sequence. Invariant: a sequence gets all that it needs, or nothing.

use crate::WorkerBrain;
use crate::policy;
use crate::sequence::WorkerSequence;
use crate::state::SequenceState;
use cleave_domain::Refusal;
use cleave_kv::{PrefixNeed, SecuredKv};
use std::time::Duration;

/// How much of a sequence may come from the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheReuse {
    /// Every full block: another worker runs the last token.
    EveryFullBlock,
    AllButLastToken,
    /// Nothing: its KV comes from host memory.
    NoBlock,
}

impl WorkerBrain {
    /// Calls [`WorkerBrain::secure`] for a sequence that is new here. Nothing is given out while a
    /// preempted or swapped sequence waits for blocks: new ones would starve it.
    pub(crate) fn hold(
        &mut self,
        sequence: &mut WorkerSequence,
        reach: CacheReuse,
        growth: u32,
    ) -> Result<(), Refusal> {
        let waits = |s: &WorkerSequence| s.starved() || s.swap.is_some();
        let starved = self.sequences.values().any(waits);
        if !starved && self.secure(sequence, reach, growth) {
            return Ok(());
        }
        let retry_after = self.soonest_end();
        Err(Refusal::NoBlocks { retry_after })
    }

    /// Holds the cached prefix of `sequence` and takes its state slot, and reserves the rest of its
    /// blocks and `growth` more; all or none.
    pub(crate) fn secure(
        &mut self,
        sequence: &mut WorkerSequence,
        reach: CacheReuse,
        growth: u32,
    ) -> bool {
        let size = self.limits.capacity.block_tokens;
        let blocks = sequence.len().div_ceil(size) + growth;
        let reach = if self.limits.prefix_cache {
            reach
        } else {
            CacheReuse::NoBlock
        };
        let (hashes, need) = match reach {
            CacheReuse::NoBlock => (&[][..], PrefixNeed::EveryPlane),
            CacheReuse::AllButLastToken => (sequence.reusable(size), PrefixNeed::EveryPlane),
            CacheReuse::EveryFullBlock => {
                sequence.extend_hashes(size);
                (&sequence.hashes[..], PrefixNeed::Blocks)
            }
        };
        let Some(secured) = self.pools.secure(hashes, need, blocks) else {
            return false;
        };
        let SecuredKv {
            table,
            reservation,
            state,
        } = secured;
        sequence.published = u32::try_from(table.len()).expect("a table fits the pool");
        sequence.computed = sequence.published * size;
        sequence.table = table;
        sequence.reservation = reservation;
        // A snapshot serves only prompts that are run here.
        let points = |known_blocks| match (reach, need) {
            (CacheReuse::NoBlock, _) | (_, PrefixNeed::Blocks) => [0; 2],
            _ => sequence.snapshot_points(known_blocks, size),
        };
        let state = state.map(|state| SequenceState::new(state, points(state.known_blocks)));
        sequence.state = state;
        true
    }

    /// Takes blocks of the sequence's reservation until it has `count`.
    pub(crate) fn take_blocks(&mut self, sequence: &mut WorkerSequence, count: u32) {
        while sequence.table.len() < count as usize {
            let block = self.pools.blocks.take_reserved(&mut sequence.reservation);
            sequence.table.push(block.expect("reserved just now"));
        }
    }

    /// Blocks for a sequence and the tokens that its sender may draw before it seals; no more than
    /// the pool has.
    pub(crate) fn ahead(&self, sequence: &WorkerSequence, ahead_tokens: u32) -> u32 {
        let left = sequence.request.stop.max_tokens - sequence.output_count();
        self.blocks_of(sequence.len().saturating_add(left.min(ahead_tokens)))
    }

    /// Blocks for the expected length of a sequence; no more than the pool has. The last token
    /// drawn is never run, so it needs no block.
    pub(crate) fn growth(&self, sequence: &WorkerSequence, expected_output_tokens: u32) -> u32 {
        let left = sequence.request.stop.max_tokens - sequence.output_count();
        let run = left.min(expected_output_tokens).saturating_sub(1);
        self.blocks_of(sequence.len().saturating_add(run))
    }

    fn blocks_of(&self, tokens: u32) -> u32 {
        let capacity = &self.limits.capacity;
        tokens
            .min(capacity.context_tokens_max)
            .div_ceil(capacity.block_tokens)
            .min(capacity.blocks_count)
    }

    /// Upper bound of the time until the first running sequence ends.
    pub(crate) fn soonest_end(&self) -> Duration {
        let left = |s: &WorkerSequence| s.request.stop.max_tokens.saturating_sub(s.output_count());
        let running = self.sequences.values().filter(|s| s.slot.is_some());
        let steps = running.map(left).min().unwrap_or(1);
        policy::retry_after(steps, self.step_mean)
    }
}
