//! The hashes under which a request's prefix would be cached.
//!
//! Owns: when they are computed. Never: defines them; `kv` does, for workers too.
//! Invariant: hashed for each block size in the fleet, at submission and whenever tokens were
//! counted. A block size that appears later finds nothing cached, which is also true of a worker
//! that has just started.

use cleave_domain::{BlockHash, Request, TokenId};
use cleave_kv::block_hashes;
use std::collections::BTreeMap;

/// Hashes of a request's sequence, by block size.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefixHashes {
    hashes: BTreeMap<u32, Vec<BlockHash>>,
}

impl PrefixHashes {
    pub(crate) fn of(request: &Request, block_sizes: impl Iterator<Item = u32>) -> Self {
        let tokens: Vec<TokenId> = request
            .prompt
            .iter()
            .chain(request.generated.iter())
            .copied()
            .collect();
        let mut hashes = BTreeMap::new();
        for size in block_sizes {
            hashes
                .entry(size)
                .or_insert_with(|| block_hashes(request.cache_scope(), &tokens, size));
        }
        Self { hashes }
    }

    pub(crate) fn hashes(&self, block_tokens: u32) -> &[BlockHash] {
        self.hashes.get(&block_tokens).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn block_sizes(&self) -> impl Iterator<Item = u32> {
        self.hashes.keys().copied()
    }
}
