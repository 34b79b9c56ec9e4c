//! The KV memory of a worker: the pools, the tiers below them, and what copies cost.
//!
//! Owns: which block or state slot each sequence gets and gives back, which content is in it, and
//! which contents the tiers keep. Never: chooses the sequence that gets or loses blocks; frees a
//! block of another sequence than the one it is called for.
//! Invariant: each block and slot that the pools count as held is in the table or state of one
//! sequence, or is being copied to a tier; a sequence gets all blocks that it needs together with
//! its state slot, or nothing.

mod held;
mod pressure;
mod states;
mod swap;
mod tiers;
mod window;

pub(crate) use held::SequenceKv;
pub(crate) use pressure::MemoryPressure;
pub(crate) use states::SequenceState;
pub(crate) use swap::{BlockRelease, SwapEnd, SwapState, drop_swap};
pub(crate) use tiers::TierFetch;
pub(crate) use window::SequenceWindow;

use crate::WorkerLimits;
use crate::policy::SwapPrices;
use crate::sequences::WorkerSequence;
use cleave_domain::{KvPlane, KvWindow};
use cleave_kv::{KvPools, PlanePool, PrefixNeed, SecuredKv, WindowNeed};
use std::hash::Hasher;
use tiers::OffloadTiers;

/// Blocks and state slots, and the tiers below them.
#[derive(Clone, Debug)]
pub(crate) struct KvMemory {
    pools: KvPools,
    /// Index of the KV kept in host memory and on disk.
    tiers: OffloadTiers,
    swap_prices: SwapPrices,
    block_tokens: u32,
    /// The most prompt tokens in a step.
    chunk_tokens: u32,
    prefix_cache: bool,
}

/// How much of a sequence may come from the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheReuse {
    /// Every full block: another worker runs the last token.
    EveryFullBlock {
        /// Blocks that the other worker may fill.
        blocks: u32,
    },
    AllButLastToken,
    /// Nothing: the KV of its first `computed` tokens comes from host memory.
    NoBlock {
        computed: u32,
    },
}

impl KvMemory {
    pub(crate) fn new(limits: &WorkerLimits) -> Self {
        Self {
            pools: KvPools::new(&limits.capacity),
            tiers: match limits.host_blocks {
                0 => OffloadTiers::new(0, 0, &limits.capacity),
                blocks => OffloadTiers::new(blocks, limits.disk_blocks, &limits.capacity),
            },
            swap_prices: SwapPrices::default(),
            block_tokens: limits.capacity.block_tokens,
            chunk_tokens: limits.capacity.step_tokens_max,
            prefix_cache: limits.prefix_cache,
        }
    }

    // === blocks of a sequence ===

    /// Leading blocks of a prompt that the cache has and that need not be computed here.
    pub(crate) fn prefix_blocks(&self, sequence: &mut WorkerSequence) -> u32 {
        if !self.prefix_cache {
            return 0;
        }
        let hashes = sequence.reusable(self.block_tokens);
        self.pools.prefix_blocks(hashes, PrefixNeed::EveryPlane)
    }

    /// Holds the cached prefix of `sequence` with its window, takes its state slot, and reserves
    /// the rest of its blocks and `growth` more, and of its window; all or none.
    pub(crate) fn secure(
        &mut self,
        sequence: &mut WorkerSequence,
        reach: CacheReuse,
        growth: u32,
    ) -> bool {
        let size = self.block_tokens;
        let blocks = sequence.len().div_ceil(size) + growth;
        let of_window = self.window_need(sequence, reach);
        let (hashes, need) = match reach {
            _ if !self.prefix_cache => (&[][..], PrefixNeed::EveryPlane),
            CacheReuse::NoBlock { .. } => (&[][..], PrefixNeed::EveryPlane),
            CacheReuse::AllButLastToken => (sequence.reusable(size), PrefixNeed::EveryPlane),
            CacheReuse::EveryFullBlock { .. } => {
                sequence.extend_hashes(size);
                (&sequence.kv.hashes[..], PrefixNeed::Blocks)
            }
        };
        let Some(secured) = self.pools.secure(hashes, need, blocks, of_window) else {
            return false;
        };
        let SecuredKv {
            table,
            reservation,
            state,
            window,
        } = secured;
        sequence.kv.published = u32::try_from(table.len()).expect("a table fits the pool");
        sequence.kv.computed = sequence.kv.published * size;
        sequence.kv.table = table;
        sequence.kv.reservation = reservation;
        // A snapshot serves only prompts that are run here.
        let points = |known_blocks| match reach {
            CacheReuse::AllButLastToken if self.prefix_cache => {
                sequence.snapshot_points(known_blocks, size)
            }
            _ => [0; 2],
        };
        let state = state.map(|state| SequenceState::new(state, points(state.known_blocks)));
        sequence.kv.state = state;
        sequence.kv.window = window.map(SequenceWindow::new);
        true
    }

    /// The part of the window plane that a sequence needs: a prompt that runs here reads back from
    /// where it begins, one that arrives from where it goes on.
    fn window_need(&self, sequence: &WorkerSequence, reach: CacheReuse) -> WindowNeed {
        let (position, tokens) = match reach {
            CacheReuse::AllButLastToken => (None, self.chunk_tokens),
            CacheReuse::NoBlock { computed } => (Some(computed), KvWindow::DECODE_TOKENS),
            CacheReuse::EveryFullBlock { blocks } => {
                let ahead = (blocks * self.block_tokens).saturating_sub(sequence.len());
                (Some(sequence.len()), ahead.max(KvWindow::DECODE_TOKENS))
            }
        };
        WindowNeed { position, tokens }
    }

    /// Takes blocks of the sequence's reservation until it has `count`.
    pub(crate) fn take_reserved(&mut self, sequence: &mut WorkerSequence, count: u32) {
        while sequence.kv.table.len() < count as usize {
            let block = self
                .pools
                .blocks
                .take_reserved(&mut sequence.kv.reservation);
            let block = block.expect("a secured sequence has its blocks reserved");
            sequence.kv.table.push(block);
        }
    }

    /// Takes blocks until the sequence has `count`, of its own reservation first, then any free or
    /// cached one; false if none is left.
    #[must_use]
    pub(crate) fn grow(&mut self, sequence: &mut WorkerSequence, count: u32) -> bool {
        while sequence.kv.table.len() < count as usize {
            let block = self
                .pools
                .blocks
                .take_reserved(&mut sequence.kv.reservation);
            let Some(block) = block.or_else(|| self.pools.blocks.take()) else {
                return false;
            };
            sequence.kv.table.push(block);
        }
        self.grow_window(sequence, count)
    }

    /// Replaces blocks still to be computed by blocks that other sequences have completed
    /// meanwhile.
    pub(crate) fn adopt(&mut self, sequence: &mut WorkerSequence) {
        let size = self.block_tokens;
        // A block alone does not bring the state after it.
        let able = self.prefix_cache && sequence.kv.state.is_none();
        if !able || sequence.kv.computed != sequence.kv.published * size {
            return;
        }
        if sequence.kv.window.is_none() {
            return self.adopt_blocks(sequence, u32::MAX);
        }
        // Blocks without the window before their end are of no use.
        let known = self.prefix_blocks(sequence);
        if known > sequence.kv.published {
            let blocks = known - sequence.kv.published;
            self.adopt_blocks(sequence, blocks);
            self.adopt_window(sequence, known);
        }
    }

    /// Replaces at most `blocks_max` blocks after the published ones by those of the pool, up to
    /// the first that the pool lacks.
    fn adopt_blocks(&mut self, sequence: &mut WorkerSequence, blocks_max: u32) {
        let size = self.block_tokens;
        let pool = &mut self.pools.blocks;
        let published = sequence.kv.published as usize;
        let hashes = sequence.reusable(size).to_vec();
        let hashes = hashes.into_iter().enumerate().skip(published);
        for (i, hash) in hashes.take(blocks_max as usize) {
            if pool.prefix_hits(&[hash]).blocks == 0 {
                return;
            }
            // The released block, or the reservation of one, pays for the adopted block.
            match sequence.kv.table.get(i).copied() {
                Some(own) => pool.release(own),
                None => assert!(
                    pool.release_reservation(&mut sequence.kv.reservation),
                    "a block that is neither held nor reserved"
                ),
            }
            let block = pool.hold(hash).expect("a block was released for it");
            match sequence.kv.table.get_mut(i) {
                Some(own) => *own = block,
                None => sequence.kv.table.push(block),
            }
            sequence.kv.published += 1;
            sequence.kv.computed += size;
        }
    }

    /// Registers the content of blocks that became full.
    pub(crate) fn publish(&mut self, sequence: &mut WorkerSequence) {
        let size = self.block_tokens;
        let is_new = sequence.kv.computed / size > sequence.kv.published
            || self.has_unpublished_window(sequence);
        if !self.prefix_cache || !is_new {
            return;
        }
        sequence.extend_hashes(size);
        while sequence.kv.published < sequence.kv.computed / size {
            let i = sequence.kv.published as usize;
            let pool = &mut self.pools.blocks;
            pool.set_content(sequence.kv.table[i], sequence.kv.hashes[i]);
            sequence.kv.published += 1;
        }
        self.publish_window(sequence);
    }

    /// Takes back every block, reservation and state slot of a sequence, the last blocks first, so
    /// that a cached prefix is evicted from its end.
    pub(crate) fn release(&mut self, sequence: &mut WorkerSequence) {
        for held in sequence.kv.table.drain(..).rev() {
            self.pools.blocks.release(held);
        }
        let reservation = &mut sequence.kv.reservation;
        self.pools.blocks.release_all_reserved(reservation);
        if let Some(state) = sequence.kv.state.take() {
            let states = self.pools.states.as_mut();
            state.release(states.expect("a sequence has a state only where the pool has slots"));
        }
        if let Some(window) = sequence.kv.window.take() {
            let windows = self.pools.windows.as_mut();
            window.release(windows.expect("a sequence has a window only where the pool has one"));
        }
        sequence.kv.computed = 0;
        sequence.kv.published = 0;
    }

    /// Takes a block that no sequence holds.
    #[cfg(test)]
    pub(crate) fn leak_block(&mut self) {
        self.pools.blocks.take().expect("a block is free");
    }

    // === looking ===

    /// The pool of blocks.
    pub(crate) fn blocks(&self) -> &PlanePool {
        &self.pools.blocks
    }

    /// The pool of state slots, if the model has states.
    pub(crate) fn states(&self) -> Option<&PlanePool> {
        self.pools.states.as_ref()
    }

    /// The pool of window blocks, if the model has such a plane.
    pub(crate) fn windows(&self) -> Option<&PlanePool> {
        self.pools.windows.as_ref()
    }

    /// Costs of giving up blocks.
    pub(crate) fn swap_prices(&self) -> &SwapPrices {
        &self.swap_prices
    }

    /// Hashes the pools; see [`KvMemory::hash_tiers`] for the rest.
    pub(crate) fn hash_pools(&self, hasher: &mut impl Hasher) {
        self.pools.fingerprint(hasher);
    }

    /// Asserts that the pools count exactly the blocks and slots of `sequences`, and those being
    /// copied to a tier.
    pub(crate) fn check<'a>(&self, sequences: impl Iterator<Item = &'a WorkerSequence> + Clone) {
        let tables = sequences.clone().flat_map(|s| s.kv.table.iter().copied());
        let offloading = |plane| self.tiers.offloading(plane).map(|pin| pin.held);
        let tables = tables.chain(offloading(KvPlane::Blocks));
        let reserved = sequences.clone().map(|s| s.kv.reservation.count()).sum();
        self.pools.blocks.check(tables, reserved);
        let slots = sequences.clone().filter_map(|s| s.kv.state);
        let slots = slots.flat_map(|state| state.held());
        let slots = slots.chain(offloading(KvPlane::State));
        match &self.pools.states {
            Some(states) => states.check(slots, 0),
            None => assert_eq!(slots.count(), 0, "a state without a plane"),
        }
        let windows = sequences.clone().filter_map(|s| s.kv.window.as_ref());
        let held = windows.clone().flat_map(SequenceWindow::held);
        let held = held.chain(offloading(KvPlane::Window));
        match &self.pools.windows {
            Some(pool) => pool.check(held, windows.map(SequenceWindow::reserved).sum()),
            None => assert_eq!(held.count(), 0, "a window without a plane"),
        }
        let named: u64 = sequences.clone().map(|s| s.kv.table.len() as u64).sum();
        let named = named + offloading(KvPlane::Blocks).count() as u64;
        assert_eq!(self.pools.blocks.holders_total(), named, "blocks leaked");
        for sequence in sequences.clone() {
            // No sequence has blocks and waits for a slot, or the reverse.
            let has_blocks = !sequence.kv.table.is_empty() || sequence.kv.reservation.count() > 0;
            let expects_state = has_blocks && self.pools.states.is_some();
            assert_eq!(sequence.kv.state.is_some(), expects_state, "{sequence:?}");
            let expects_window = has_blocks && self.pools.windows.is_some();
            assert_eq!(sequence.kv.window.is_some(), expects_window, "{sequence:?}");
            assert!(
                sequence.kv.published as usize <= sequence.kv.table.len(),
                "more blocks are published than held: {sequence:?}"
            );
        }
        self.check_tiers(sequences);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::context::WorkerContext;
    use crate::sequences::SequenceTable;
    use crate::sequences::sample::sequence;
    use crate::test_worker::{MS, handoff, limits};
    use crate::{SwapOutcome, WorkerOutput};
    use cleave_domain::Time;

    pub(crate) const NO_BLOCK: CacheReuse = CacheReuse::NoBlock { computed: 0 };

    /// A memory of ten blocks of 16 tokens, with a cache.
    fn memory() -> (KvMemory, WorkerLimits) {
        let mut limits = limits();
        (limits.capacity.blocks_count, limits.prefix_cache) = (10, true);
        limits.swap_blocks = 10;
        (KvMemory::new(&limits), limits)
    }

    #[test]
    fn blocks_are_secured_all_or_none() {
        let (mut memory, _) = memory();
        let (mut first, mut second) = (sequence(1, 100), sequence(2, 100));
        assert!(memory.secure(&mut first, CacheReuse::AllButLastToken, 1));
        assert_eq!(memory.blocks().blocks_available(), 2);
        assert!(!memory.secure(&mut second, CacheReuse::AllButLastToken, 0));
        assert!(second.kv.table.is_empty() && second.kv.reservation.count() == 0);
        memory.check([&first, &second].into_iter());
        memory.release(&mut first);
        memory.check([&first, &second].into_iter());
        assert_eq!(memory.blocks().blocks_available(), 10);
    }

    #[test]
    fn a_sequence_grows_from_its_reservation_first() {
        let (mut memory, _) = memory();
        let mut sequence = sequence(1, 100);
        assert!(memory.secure(&mut sequence, NO_BLOCK, 1));
        memory.take_reserved(&mut sequence, 7);
        assert!(memory.grow(&mut sequence, 8), "one was reserved for growth");
        assert_eq!(memory.blocks().blocks_available(), 2);
        assert!(!memory.grow(&mut sequence, 11), "there are ten");
        memory.check([&sequence].into_iter());
        assert_eq!(sequence.kv.table.len(), 10);
    }

    #[test]
    fn a_waiting_prompt_adopts_blocks_that_others_filled() {
        let (mut memory, _) = memory();
        let (mut first, mut second) = (sequence(1, 40), sequence(2, 40));
        for sequence in [&mut first, &mut second] {
            assert!(memory.secure(sequence, CacheReuse::AllButLastToken, 0));
        }
        memory.take_reserved(&mut first, 3);
        first.kv.computed = 40;
        memory.publish(&mut first);
        memory.adopt(&mut second);
        memory.check([&first, &second].into_iter());
        assert_eq!(
            (second.kv.computed, &second.kv.table[..]),
            (32, &first.kv.table[..2])
        );
        memory.release(&mut first);
        memory.release(&mut second);
        memory.check([&first, &second].into_iter());
        assert_eq!(memory.prefix_blocks(&mut sequence(3, 40)), 2);
    }

    #[test]
    fn a_swapped_sequence_holds_its_blocks_until_they_are_copied() {
        let (mut memory, limits) = memory();
        let mut context = WorkerContext::new(limits);
        let mut table = SequenceTable::new(context.limits());
        let mut one = sequence(1, 40);
        assert!(memory.secure(&mut one, NO_BLOCK, 0));
        memory.take_reserved(&mut one, 3);
        one.tokens.push(1);
        (one.kv.computed, one.phase) = (40, crate::sequences::SequencePhase::Decode);
        table.add(one.activated(), Time::ZERO);
        // Copying is tried once it is known what computing costs.
        memory.prefilled(100, MS);
        let release = memory.preempt(&mut context, &mut table, handoff(1));
        assert_eq!(
            (release, memory.blocks_coming(&table)),
            (BlockRelease::Later, 3)
        );
        memory.check(table.iter());
        let copied = SwapOutcome::Copied;
        memory.swapped_out(&mut context, &mut table, handoff(1), copied, MS);
        memory.check(table.iter());
        assert_eq!(memory.blocks().blocks_available(), 10);
        assert_eq!(table.blocks_swapped(), 3);
        let back = table.get_mut(handoff(1)).expect("it is there");
        assert!(memory.swap_in(&mut context, back));
        let end = memory.swapped_in(&mut context, &mut table, handoff(1), copied, MS);
        assert_eq!((end, table.blocks_swapped()), (SwapEnd::Settled, 0));
        assert_eq!(table.get(handoff(1)).map(|s| s.kv.computed), Some(40));
        memory.check(table.iter());
        let outputs = std::iter::from_fn(|| context.poll());
        let copies = outputs.filter(|output| {
            matches!(
                output,
                WorkerOutput::SwapOut { .. } | WorkerOutput::SwapIn { .. }
            )
        });
        assert_eq!(copies.count(), 2);
    }

    #[test]
    #[should_panic(expected = "holders of a block")]
    fn a_block_without_an_owner_is_found() {
        let (mut memory, _) = memory();
        memory.leak_block();
        memory.check([].into_iter());
    }
}
