//! The window of a sequence, where the model has layers with a sliding window.
//!
//! Owns: the blocks of the window plane that one sequence holds, and when it gives them up.
//! Never: gives up a block that the next token still reads, or that may be being sent: callers say
//! when nothing reads it.
//! Invariant: a sequence with blocks has a window, which begins with the first block that its next
//! token reads or before; held and reserved, it has enough for its next step.

use super::KvMemory;
use crate::sequences::WorkerSequence;
use cleave_domain::{BlockRef, KvWindow, WindowTable, WindowTarget};
use cleave_kv::{BlockReservation, PlanePool, SecuredWindow, window_hash};
use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::ops::Range;

#[derive(Clone, Debug)]
pub(crate) struct SequenceWindow {
    /// The ordinal of the first block of `table`; the sequence gave up those before it.
    first: u32,
    table: VecDeque<BlockRef>,
    reservation: BlockReservation,
    /// Leading blocks of the sequence whose content in this plane the pool knows, as far as it
    /// still has them.
    published: u32,
    /// Its blocks have not the content that the next token reads: a fetch of it failed.
    is_lost: bool,
}

impl SequenceWindow {
    pub(super) fn new(secured: SecuredWindow) -> Self {
        let SecuredWindow {
            first,
            table,
            reservation,
        } = secured;
        let mut window = Self {
            first,
            table,
            reservation,
            published: first,
            is_lost: false,
        };
        window.published = window.end();
        window
    }

    /// The ordinal after its last block.
    pub(crate) fn end(&self) -> u32 {
        self.first + u32::try_from(self.table.len()).expect("a table fits the pool")
    }

    /// The ordinal after the last block that it has, held or reserved.
    pub(crate) fn reach(&self) -> u32 {
        self.end() + self.reservation.count()
    }

    /// The blocks that it holds.
    pub(crate) fn held(&self) -> impl Iterator<Item = BlockRef> + '_ {
        self.table.iter().copied()
    }

    /// Whether no step can go on with it.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// The number of blocks that it holds.
    pub(crate) fn blocks_held(&self) -> u64 {
        self.table.len() as u64
    }

    pub(super) fn reserved(&self) -> u32 {
        self.reservation.count()
    }

    /// Its table, for steps and copies.
    pub(crate) fn table(&self) -> WindowTable {
        WindowTable {
            first: self.first,
            blocks: self.table.iter().map(|held| held.block).collect(),
        }
    }

    /// Its table, for a sender.
    pub(crate) fn target(&self) -> WindowTarget {
        WindowTarget {
            first: self.first,
            blocks: self.table.iter().copied().collect(),
        }
    }

    /// Returns every block and the reservation to the pool, the last blocks first.
    pub(super) fn release(mut self, pool: &mut PlanePool) {
        for held in self.table.drain(..).rev() {
            pool.release(held);
        }
        pool.release_all_reserved(&mut self.reservation);
    }

    /// Takes blocks until it has those before the ordinal `end`, of its reservation first, then
    /// any; false if none is left.
    fn grow(&mut self, pool: &mut PlanePool, end: u32) -> bool {
        while self.end() < end {
            let block = pool.take_reserved(&mut self.reservation);
            let Some(block) = block.or_else(|| pool.take()) else {
                return false;
            };
            self.table.push_back(block);
        }
        true
    }

    pub(super) fn fingerprint(&self, hasher: &mut impl Hasher) {
        let Self {
            first,
            table,
            reservation,
            published,
            is_lost,
        } = self;
        (first, table, reservation, published, is_lost).hash(hasher);
    }
}

impl KvMemory {
    /// Takes the blocks of the window plane before the ordinal `end` from the sequence's
    /// reservation.
    pub(crate) fn take_window(&mut self, sequence: &mut WorkerSequence, end: u32) {
        let (Some(window), Some(pool)) = (&mut sequence.kv.window, &mut self.pools.windows) else {
            return;
        };
        let taken = end.saturating_sub(window.end());
        assert!(
            taken <= window.reservation.count(),
            "a secured sequence has its window reserved: {window:?} to {end}"
        );
        assert!(window.grow(pool, end), "a reservation was counted");
    }

    /// Takes blocks of the window plane as [`KvMemory::grow`] does; true without such a plane.
    #[must_use]
    pub(super) fn grow_window(&mut self, sequence: &mut WorkerSequence, end: u32) -> bool {
        match (&mut sequence.kv.window, &mut self.pools.windows) {
            (Some(window), Some(pool)) => window.grow(pool, end),
            _ => true,
        }
    }

    /// Gives up the blocks behind the window of the next token, and keeps as many in reserve as
    /// the rest of the sequence needs. Nothing may be reading them.
    pub(crate) fn slide(&mut self, sequence: &mut WorkerSequence) {
        let Some(of_model) = self.pools.window() else {
            return;
        };
        let blocks = u32::try_from(sequence.kv.blocks()).expect("blocks are counted in 32 bits");
        let computed = sequence.kv.computed;
        let tokens = if sequence.len() > computed + 1 {
            self.chunk_tokens
        } else {
            KvWindow::DECODE_TOKENS
        };
        let (Some(window), Some(pool)) = (&mut sequence.kv.window, &mut self.pools.windows) else {
            return;
        };
        let first = of_model.first_block(computed).min(window.end());
        while window.first < first
            && let Some(held) = window.table.pop_front()
        {
            pool.exchange(held, &mut window.reservation);
            window.first += 1;
        }
        let most = of_model.blocks_max(tokens).min(blocks - window.first);
        let held = window.end() - window.first;
        pool.reduce(&mut window.reservation, most.saturating_sub(held));
    }

    /// Registers the content of the window's blocks that became full.
    pub(super) fn publish_window(&mut self, sequence: &mut WorkerSequence) {
        let full = sequence.kv.computed / self.block_tokens;
        let (Some(window), Some(pool)) = (&mut sequence.kv.window, &mut self.pools.windows) else {
            return;
        };
        if window.is_lost {
            return;
        }
        window.published = window.published.max(window.first);
        while window.published < full {
            let ordinal = window.published;
            let content = window_hash(sequence.kv.hashes[ordinal as usize]);
            pool.set_content(window.table[(ordinal - window.first) as usize], content);
            window.published += 1;
        }
    }

    /// Whether the pool lacks the content of a full block of the sequence's window.
    pub(super) fn has_unpublished_window(&self, sequence: &WorkerSequence) -> bool {
        let full = sequence.kv.computed / self.block_tokens;
        let window = sequence.kv.window.as_ref();
        window.is_some_and(|window| !window.is_lost && window.published.max(window.first) < full)
    }

    /// Replaces the sequence's window by that before the end of its first `blocks` blocks, which
    /// the pool has. The blocks given up pay for it.
    pub(super) fn adopt_window(&mut self, sequence: &mut WorkerSequence, blocks: u32) {
        let Some(of_model) = self.pools.window() else {
            return;
        };
        let (Some(window), Some(pool)) = (&mut sequence.kv.window, &mut self.pools.windows) else {
            return;
        };
        for held in window.table.drain(..) {
            pool.exchange(held, &mut window.reservation);
        }
        window.first = of_model.first_block(blocks * self.block_tokens);
        window.published = blocks;
        let hashes = &sequence.kv.hashes[window.first as usize..blocks as usize];
        for hash in hashes {
            let paid = pool.release_reservation(&mut window.reservation);
            assert!(paid, "a block that is neither held nor reserved");
            let held = pool.hold(window_hash(*hash));
            window
                .table
                .push_back(held.expect("a block was released for it"));
        }
    }
}

impl KvMemory {
    /// Replaces the sequence's window by blocks with undefined content for these ordinals. The
    /// blocks given up pay for them.
    pub(super) fn renew_window(&mut self, sequence: &mut WorkerSequence, ordinals: Range<u32>) {
        let (Some(window), Some(pool)) = (&mut sequence.kv.window, &mut self.pools.windows) else {
            return;
        };
        for held in window.table.drain(..) {
            pool.exchange(held, &mut window.reservation);
        }
        window.first = ordinals.start;
        window.published = ordinals.start;
        assert!(window.grow(pool, ordinals.end), "given up, or reserved");
    }

    /// Records that a sequence's window was not fetched.
    pub(super) fn window_lost(&mut self, sequence: &mut WorkerSequence) {
        if let Some(window) = &mut sequence.kv.window {
            window.is_lost = true;
        }
    }
}

impl WorkerSequence {
    /// Blocks of the window plane beyond its own, held and reserved, that its next `steps` tokens
    /// need; 0 without such a plane.
    pub(crate) fn window_lacks(&self, steps: u32, block_tokens: u32) -> u64 {
        let end = self.tokens_ahead(steps).div_ceil(block_tokens);
        let window = self.kv.window.as_ref();
        window.map_or(0, |window| u64::from(end.saturating_sub(window.reach())))
    }
}
