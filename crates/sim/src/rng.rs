//! Random draws from a seed.
//!
//! Owns: the only source of randomness of the simulator. Never: looks at anything but its seed.
//! Invariant: the same seed gives the same draws on every machine. The generator is SplitMix64
//! (Steele, Lea, Flood 2014).

use std::time::Duration;

#[derive(Clone, Debug)]
pub(crate) struct SimRng(u64);

impl SimRng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `from..=to`, evenly.
    pub(crate) fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from + 1)
    }

    /// A number in `from..=to`, evenly.
    pub(crate) fn count(&mut self, from: u32, to: u32) -> u32 {
        self.range(u64::from(from), u64::from(to)) as u32
    }

    /// True with a probability of `per_mille` in a thousand.
    pub(crate) fn chance(&mut self, per_mille: u32) -> bool {
        self.next() % 1000 < u64::from(per_mille)
    }

    /// A duration between two numbers of microseconds.
    pub(crate) fn micros(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_micros(self.range(from, to))
    }

    pub(crate) fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.next() as usize % of.len()]
    }
}

/// SplitMix64's finaliser: a cheap hash of one word.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
