//! The checksum of payloads and messages: XXH3-64, seed 0, with the widest instructions of the
//! processor.
//!
//! Owns: the checksum of all links, real and simulated.
//! Never: detects forgery; a sender that chooses both bytes and checksum is believed.
//! Invariant: the value equals that of every other implementation of XXH3-64.

use std::hash::Hasher;
use twox_hash::XxHash3_64;

/// The checksum of a frame's payload, or of a message.
pub fn checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// The checksum of bytes that arrive in pieces.
pub struct Checksum(XxHash3_64);

impl std::fmt::Debug for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Checksum").field(&self.value()).finish()
    }
}

impl Default for Checksum {
    fn default() -> Self {
        Self(XxHash3_64::new())
    }
}

impl Checksum {
    /// Adds the next piece.
    pub fn add(&mut self, piece: &[u8]) {
        self.0.write(piece);
    }

    /// The checksum of all pieces so far.
    pub fn value(&self) -> u64 {
        self.0.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_checksum_matches_another_xxh3_implementation(
            bytes in prop::collection::vec(any::<u8>(), 0..5000),
            cut in 1usize..700,
        ) {
            let expected = xxhash_rust::xxh3::xxh3_64(&bytes);
            prop_assert_eq!(checksum(&bytes), expected);
            let mut pieces = Checksum::default();
            bytes.chunks(cut).for_each(|piece| pieces.add(piece));
            prop_assert_eq!(pieces.value(), expected);
        }
    }
}
