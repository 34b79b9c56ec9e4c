//! The fingerprint of a state.
//!
//! Owns: a 64-bit hash, fed like any `Hasher`. Never: is seeded; the same state has the same hash
//! in every run. Invariant: two of a few million states collide with a chance of about one in a
//! million.

use cleave_domain::SplitMix64;
use std::fmt;
use std::hash::Hasher;

/// Hash state, extended by one word at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct StateHasher(u64);

impl Default for StateHasher {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl StateHasher {
    /// The hash of a value whose `Debug` text shows all of its state.
    pub(super) fn of_debug(words: &impl fmt::Debug) -> u64 {
        let mut print = Self::default();
        // Writing into a hash cannot fail.
        let _ = fmt::write(&mut print, format_args!("{words:?}"));
        print.finish()
    }
}

impl Hasher for StateHasher {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word) ^ (chunk.len() as u64) << 56);
        }
    }

    fn write_u8(&mut self, word: u8) {
        self.write_u64(u64::from(word));
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = SplitMix64::finalize(self.0.rotate_left(23) ^ word);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl fmt::Write for StateHasher {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.write(text.as_bytes());
        Ok(())
    }
}
