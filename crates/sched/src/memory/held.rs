//! The KV that one sequence holds.
//!
//! Owns: its blocks, its state, and how many of its tokens are computed. Never: takes a block or
//! gives one back: [`super::KvMemory`] does, and alone may change what is here, except that results
//! of steps and hand-offs advance the computed tokens.
//! Invariant: the KV of the first `computed` tokens is in `table`; the content of the first
//! `published` blocks is known to the pool.

use super::{SequenceState, SequenceWindow, SwapState, TierFetch};
use crate::sequences::WorkerSequence;
use cleave_domain::{BlockHash, BlockRef};
use cleave_kv::{BlockReservation, extend_hashes};
use std::hash::{Hash, Hasher};

#[derive(Clone, Debug, Default)]
pub(crate) struct SequenceKv {
    /// Leading tokens whose KV is in the table's blocks.
    pub(super) computed: u32,
    pub(super) table: Vec<BlockRef>,
    /// Blocks reserved for it alone.
    pub(super) reservation: BlockReservation,
    /// Its state; `None` if the model has none, or it holds nothing.
    pub(super) state: Option<SequenceState>,
    /// Its window; `None` if the model has no such plane, or it holds nothing.
    pub(super) window: Option<SequenceWindow>,
    /// Hashes of its leading full blocks, as far as they were needed.
    pub(super) hashes: Vec<BlockHash>,
    /// Leading blocks whose content the pool knows.
    pub(super) published: u32,
    /// Set while it is in host memory, or being copied there or back.
    pub(super) swap: Option<SwapState>,
    /// Set while leading blocks are being copied back from a tier.
    pub(super) fetch: Option<TierFetch>,
    /// Whether a fetch of a state failed: the sequence computes everything from then on.
    pub(super) state_fetch_failed: bool,
}

impl SequenceKv {
    /// Records that `tokens` more tokens were computed into its blocks.
    pub(crate) fn advance(&mut self, tokens: u32) {
        self.computed += tokens;
    }

    /// Records that the KV of the first `computed` tokens arrived from another worker.
    pub(crate) fn arrived(&mut self, computed: u32) {
        self.computed = computed;
    }

    pub(crate) fn computed(&self) -> u32 {
        self.computed
    }

    pub(crate) fn table(&self) -> &[BlockRef] {
        &self.table
    }

    pub(crate) fn state(&self) -> Option<SequenceState> {
        self.state
    }

    pub(crate) fn window(&self) -> Option<&SequenceWindow> {
        self.window.as_ref()
    }

    pub(crate) fn published(&self) -> u32 {
        self.published
    }

    /// Blocks that it has, held and reserved.
    pub(crate) fn blocks(&self) -> u64 {
        self.table.len() as u64 + u64::from(self.reservation.count())
    }

    /// Whether it is in host memory, or being copied there or back.
    pub(crate) fn swap(&self) -> Option<SwapState> {
        self.swap
    }

    /// The fetch of its leading blocks from a tier, while it goes on.
    pub(crate) fn fetch(&self) -> Option<TierFetch> {
        self.fetch
    }

    /// Hashes everything but what follows from the tokens.
    pub(crate) fn fingerprint(&self, hasher: &mut impl Hasher) {
        let Self {
            computed,
            table,
            reservation,
            state,
            window,
            // Derived from the tokens.
            hashes: _,
            // Hashed by the caller.
            published: _,
            swap: _,
            fetch: _,
            state_fetch_failed,
        } = self;
        (computed, table, reservation, state, state_fetch_failed).hash(hasher);
        if let Some(window) = window {
            window.fingerprint(hasher);
        }
    }
}

impl WorkerSequence {
    /// Hashes of the leading blocks it could take from the cache if it is to run here: never the
    /// last token's block, because running that token gives the next one.
    pub(super) fn reusable(&mut self, block_tokens: u32) -> &[BlockHash] {
        if self.runs_every_token() {
            return &[];
        }
        self.extend_hashes(block_tokens);
        &self.kv.hashes[..((self.len() - 1) / block_tokens) as usize]
    }

    /// Hashes every full block that was not hashed before.
    pub(super) fn extend_hashes(&mut self, block_tokens: u32) {
        let scope = self.request.cache_scope();
        extend_hashes(&mut self.kv.hashes, scope, &self.tokens, block_tokens);
    }
}
