//! What a worker was promised and has not released.
//!
//! Owns: the promises of one worker in one life, and their sums. Never: sends anything.
//! Invariant: the sums equal what adding up the promises gives; a promise goes only when the
//! worker said that nothing of it is left, refused it, or is gone.
//!
//! A worker's `Load` is older than the orders still on their way to it. What was promised since is
//! therefore counted on top, or a burst would all go to the worker that was idle a moment ago.

use cleave_domain::HandoffId;
use std::collections::{BTreeMap, BTreeSet};

/// One hand-off's claim on one worker. A worker that serves both legs has one promise for both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Promise {
    /// Prompt tokens to compute here; 0 once they are.
    pub(crate) tokens: u64,
    /// Blocks to hold here as decode leg; 0 on a pure prefill leg.
    pub(crate) blocks: u32,
    /// An order of this hand-off was sent; before that nothing needs to be taken back.
    pub(crate) told: bool,
    /// The worker spoke of it.
    pub(crate) answered: bool,
    /// The worker's last `Load` may not include it.
    pub(crate) fresh: bool,
    /// Its lease is renewed.
    pub(crate) live: bool,
}

impl Promise {
    /// One that the worker has yet to hear of.
    pub(crate) const NEW: Self = Self {
        tokens: 0,
        blocks: 0,
        told: false,
        answered: false,
        fresh: true,
        live: true,
    };

    fn is_heard(&self) -> bool {
        self.answered || (self.told && self.blocks == 0)
    }
}

/// Sums over a worker's promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) prompts: u32,
    pub(crate) tokens: u64,
    pub(crate) tokens_fresh: u64,
    pub(crate) sequences: u32,
    pub(crate) sequences_fresh: u32,
    pub(crate) blocks_fresh: u32,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    promises: BTreeMap<HandoffId, Promise>,
    /// Those with `fresh`, so that a `Load` costs no walk over the others.
    fresh: BTreeSet<HandoffId>,
    totals: Totals,
}

impl Ledger {
    pub(crate) fn totals(&self) -> &Totals {
        &self.totals
    }

    pub(crate) fn get(&self, handoff: HandoffId) -> Option<&Promise> {
        self.promises.get(&handoff)
    }

    pub(crate) fn handoffs(&self) -> impl Iterator<Item = (HandoffId, &Promise)> {
        self.promises.iter().map(|(id, promise)| (*id, promise))
    }

    pub(crate) fn open(&mut self, handoff: HandoffId, promise: Promise) {
        let before = self.promises.insert(handoff, promise);
        assert!(before.is_none(), "{handoff} was promised twice");
        self.totals.add(&promise);
        if promise.fresh {
            self.fresh.insert(handoff);
        }
    }

    pub(crate) fn close(&mut self, handoff: HandoffId) -> Option<Promise> {
        let promise = self.promises.remove(&handoff)?;
        self.totals.take(&promise);
        self.fresh.remove(&handoff);
        Some(promise)
    }

    /// Changes a promise, if it is there.
    pub(crate) fn change(&mut self, handoff: HandoffId, edit: impl FnOnce(&mut Promise)) {
        let Some(promise) = self.promises.get_mut(&handoff) else {
            return;
        };
        self.totals.take(promise);
        edit(promise);
        self.totals.add(promise);
        if promise.fresh {
            self.fresh.insert(handoff);
        } else {
            self.fresh.remove(&handoff);
        }
    }

    /// The worker reported its load. It includes every reservation the worker answered before, for
    /// links keep their order; a prompt is not answered, so its order counts as heard, and what
    /// that gets wrong is bounded from below by the promises still open.
    pub(crate) fn settle(&mut self) {
        let settled: Vec<HandoffId> = self
            .fresh
            .iter()
            .filter(|id| self.promises.get(id).is_some_and(Promise::is_heard))
            .copied()
            .collect();
        for handoff in settled {
            self.change(handoff, |promise| promise.fresh = false);
        }
    }

    pub(crate) fn check(&self) {
        let mut totals = Totals::default();
        for (handoff, promise) in &self.promises {
            totals.add(promise);
            assert_eq!(promise.fresh, self.fresh.contains(handoff), "{handoff}");
        }
        assert_eq!(totals, self.totals, "a worker's sums are off");
    }
}

impl Totals {
    fn add(&mut self, promise: &Promise) {
        let fresh = u32::from(promise.fresh);
        let sequence = u32::from(promise.blocks > 0);
        self.prompts += u32::from(promise.tokens > 0);
        self.tokens += promise.tokens;
        self.tokens_fresh += promise.tokens * u64::from(fresh);
        self.sequences += sequence;
        self.sequences_fresh += sequence * fresh;
        self.blocks_fresh += promise.blocks * fresh;
    }

    fn take(&mut self, promise: &Promise) {
        let fresh = u32::from(promise.fresh);
        let sequence = u32::from(promise.blocks > 0);
        self.prompts -= u32::from(promise.tokens > 0);
        self.tokens -= promise.tokens;
        self.tokens_fresh -= promise.tokens * u64::from(fresh);
        self.sequences -= sequence;
        self.sequences_fresh -= sequence * fresh;
        self.blocks_fresh -= promise.blocks * fresh;
    }
}
