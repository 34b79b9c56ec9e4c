//! Random numbers from a seed: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
//!
//! Owns: the generator and its hash of one word. Never: reads a random source. Invariant: the same
//! seed gives the same numbers on every machine, in every release: tapes, seeded worlds, digests of
//! hand-offs and synthetic weights depend on the bits.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Increment of the generator's counter.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// A seeded generator. It has no weak seeds; its period is 2^64 numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A generator that begins at `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The `n`-th number of the generator that begins at `seed`, without those before it. The first
    /// one is number 1; number 0 is the seed, finalized.
    #[inline]
    pub const fn nth(seed: u64, n: u64) -> u64 {
        Self::finalize(seed.wrapping_add(n.wrapping_mul(INCREMENT)))
    }

    /// Hashes one word: the first number of the generator that begins at `word`.
    #[inline]
    pub const fn hash(word: u64) -> u64 {
        Self::nth(word, 1)
    }

    /// The output function alone: a cheap hash that maps 0 to 0.
    #[inline]
    pub const fn finalize(word: u64) -> u64 {
        let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// The next number of the sequence, evenly among all of 64 bits.
    #[inline]
    pub const fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(INCREMENT);
        Self::finalize(self.0)
    }

    /// A number in `0..end`; `end` is at least 1. Evenly, but for a bias of `end` in 2^64.
    pub const fn below(&mut self, end: u64) -> u64 {
        self.draw() % end
    }

    /// A number in `from..=to`.
    pub const fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// A number in `from..=to`.
    pub const fn count(&mut self, from: u32, to: u32) -> u32 {
        self.range(from as u64, to as u64) as u32
    }

    /// An index of a list of `len` elements; `len` is at least 1.
    pub const fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// An element of a list that is not empty.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.index(of.len())]
    }

    /// True with a probability of `permille` in a thousand.
    pub const fn chance(&mut self, permille: u32) -> bool {
        self.below(1000) < permille as u64
    }

    /// A duration of `from..=to` microseconds.
    pub fn micros(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_micros(self.range(from, to))
    }
}

#[cfg(test)]
mod tests {
    use super::SplitMix64;

    #[test]
    fn numbers_match_the_published_vectors() {
        // First outputs for the seed 1234567, as in the generator's public test vectors.
        let published = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ];
        let mut rng = SplitMix64::new(1_234_567);
        for (n, number) in (1..).zip(published) {
            assert_eq!(rng.draw(), number);
            assert_eq!(SplitMix64::nth(1_234_567, n), number);
        }
        assert_eq!(SplitMix64::hash(0), 0xe220_a839_7b1d_cdaf);
    }
}
