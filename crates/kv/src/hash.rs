//! Defines "same content" of blocks.
//!
//! Owns: the only definition of a [`BlockHash`], for routers and workers alike.
//! Never: hashes a block that is not full; a partial block cannot be shared.
//! Invariant: two blocks have equal hashes only if their tokens, all tokens before them, the cache
//! salt and the adapter are equal. The salt is in the key, so no tenant can name the blocks of
//! another; the adapter's content stands before the first block.

use cleave_domain::{BlockHash, CacheScope, TokenId};

/// The first 24 bytes of the key. A new definition changes them, and so every hash.
const KEY_PREFIX: &[u8; 24] = b"cleave kv block, 1st ed.";

/// The key of states: no block's, because the salt that follows a block's key is in the prefix.
const SNAPSHOT_KEY: &[u8; 32] = b"cleave kv snapshot, 1st edition.";

/// The key of blocks of the window plane, apart from both for the same reason.
const WINDOW_KEY: &[u8; 32] = b"cleave kv window,   1st edition.";

/// The longest block that is hashed without allocation.
const USUAL_TOKENS: usize = 32;

/// The hash of one full block: `previous` is the hash of the block before it, `None` at the start
/// of a sequence.
pub fn block_hash(scope: CacheScope, previous: Option<BlockHash>, tokens: &[TokenId]) -> BlockHash {
    let mut key = [0; 32];
    key[..24].copy_from_slice(KEY_PREFIX);
    key[24..].copy_from_slice(&scope.salt.to_le_bytes());
    // Thousands of blocks are hashed for one prompt; blocks of usual sizes need no allocation.
    let length = 16 + 4 * tokens.len();
    let (mut stack, mut heap) = ([0; 16 + 4 * USUAL_TOKENS], Vec::new());
    let bytes = match stack.get_mut(..length) {
        Some(bytes) => bytes,
        None => {
            heap.resize(length, 0);
            &mut heap[..]
        }
    };
    let (past, own) = bytes.split_at_mut(16);
    past.copy_from_slice(&previous.unwrap_or(scope.root()).0);
    for (bytes, token) in own.chunks_exact_mut(4).zip(tokens) {
        bytes.copy_from_slice(&token.to_le_bytes());
    }
    let digest = blake3::keyed_hash(&key, bytes);
    let mut hash = BlockHash::default();
    hash.0.copy_from_slice(&digest.as_bytes()[..16]);
    hash
}

/// The content of a state after the last token of a full block, given that block's hash.
pub fn snapshot_hash(prefix: BlockHash) -> BlockHash {
    derived(SNAPSHOT_KEY, &prefix.0)
}

/// The content of a block of the window plane, given the hash of the block of the same tokens.
pub fn window_hash(block: BlockHash) -> BlockHash {
    derived(WINDOW_KEY, &block.0)
}

fn derived(key: &[u8; 32], bytes: &[u8]) -> BlockHash {
    let digest = blake3::keyed_hash(key, bytes);
    let mut hash = BlockHash::default();
    hash.0.copy_from_slice(&digest.as_bytes()[..16]);
    hash
}

/// The content of a piece of a snapshot or of a block of the window plane, where it is stored
/// apart: that of the first piece is the whole's own.
pub fn piece_hash(whole: BlockHash, ordinal: u32) -> BlockHash {
    if ordinal == 0 {
        return whole;
    }
    let mut bytes = [0; 20];
    bytes[..16].copy_from_slice(&whole.0);
    bytes[16..].copy_from_slice(&ordinal.to_le_bytes());
    derived(SNAPSHOT_KEY, &bytes)
}

/// The hashes of every full block of `tokens`, in order: `[tokens.len() / block_tokens]`.
pub fn block_hashes(scope: CacheScope, tokens: &[TokenId], block_tokens: u32) -> Vec<BlockHash> {
    let mut hashes = Vec::new();
    extend_hashes(&mut hashes, scope, tokens, block_tokens);
    hashes
}

/// Extends `hashes`, which covers the first blocks of `tokens`, by the full blocks that follow. A
/// growing sequence hashes each block once.
pub fn extend_hashes(
    hashes: &mut Vec<BlockHash>,
    scope: CacheScope,
    tokens: &[TokenId],
    block_tokens: u32,
) {
    let size = block_tokens as usize;
    for block in tokens.chunks_exact(size).skip(hashes.len()) {
        hashes.push(block_hash(scope, hashes.last().copied(), block));
    }
}

#[cfg(test)]
mod tests {
    use super::{block_hash, block_hashes, extend_hashes, snapshot_hash, window_hash};
    use cleave_domain::{AdapterId, BlockHash, CacheScope};

    const PUBLIC: CacheScope = CacheScope::of_salt(0);
    const SALTED: CacheScope = CacheScope::of_salt(7);

    /// From the `blake3` package for Python: `blake3(previous + tokens, key=b"cleave kv block, 1st
    /// ed." + salt).digest()[:16]`.
    #[test]
    fn the_hash_matches_another_implementation() {
        let hashes = block_hashes(SALTED, &[1, 2, 3, 4, 5, 6, 7, u32::MAX], 4);
        let expected = [
            0x0bbe_7c51_fa7c_a065_cefc_4023_5f9b_d124_u128,
            0x3ad3_33ab_335d_c258_0e82_e718_74e0_ee83,
        ];
        assert_eq!(hashes, expected.map(|hash| BlockHash(hash.to_be_bytes())));
    }

    #[test]
    fn a_partial_block_has_no_hash() {
        assert_eq!(block_hashes(PUBLIC, &[1, 2, 3], 4), []);
        assert_eq!(block_hashes(PUBLIC, &[1, 2, 3, 4, 5], 4).len(), 1);
    }

    // Invariant: I10.
    // Lesson: 7.
    #[test]
    fn the_hash_depends_on_salt_and_preceding_tokens() {
        let plain = block_hashes(PUBLIC, &[1, 2, 3, 4], 2);
        assert_ne!(
            plain[1],
            block_hashes(CacheScope::of_salt(1), &[1, 2, 3, 4], 2)[1]
        );
        assert_ne!(plain[1], block_hashes(PUBLIC, &[1, 9, 3, 4], 2)[1]);
        assert_ne!(plain[1], block_hash(PUBLIC, None, &[3, 4]));
        assert_eq!(plain, block_hashes(PUBLIC, &[1, 2, 3, 4, 5], 2));
    }

    // Lesson: 7.
    #[test]
    fn the_hash_depends_on_the_content_of_the_adapter() {
        let tokens = [1, 2, 3, 4];
        let of = |digest: u8| CacheScope {
            adapter: Some(AdapterId([digest; 16])),
            ..SALTED
        };
        let (one, other) = (
            block_hashes(of(1), &tokens, 2),
            block_hashes(of(2), &tokens, 2),
        );
        let base = block_hashes(SALTED, &tokens, 2);
        for at in 0..2 {
            assert_ne!(one[at], other[at]);
            assert_ne!(one[at], base[at]);
        }
        assert_eq!(one, block_hashes(of(1), &tokens, 2));
    }

    #[test]
    fn planes_of_one_prefix_have_different_contents() {
        let hashes = block_hashes(PUBLIC, &[1, 2, 3, 4], 2);
        let states: Vec<_> = hashes.iter().map(|hash| snapshot_hash(*hash)).collect();
        let windows: Vec<_> = hashes.iter().map(|hash| window_hash(*hash)).collect();
        let all = hashes.iter().chain(&states).chain(&windows);
        let different: std::collections::BTreeSet<_> = all.collect();
        assert_eq!(different.len(), 6);
        assert_eq!(snapshot_hash(hashes[0]), states[0]);
    }

    #[test]
    fn incremental_hashing_gives_the_same_hashes() {
        let tokens: Vec<u32> = (0..23).collect();
        let mut grown = Vec::new();
        for end in 0..=tokens.len() {
            extend_hashes(&mut grown, SALTED, &tokens[..end], 4);
        }
        assert_eq!(grown, block_hashes(SALTED, &tokens, 4));
    }
}
