//! A small random generator, equal on every platform, for the suites' inputs.
//!
//! Owns: its state. Never: serves an engine's own draws.
//! Invariant: the same seed gives the same numbers.

use cleave_domain::SplitMix64;

pub(super) struct ConformanceRng(SplitMix64);

impl ConformanceRng {
    pub(super) fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0.draw()
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A uniform number in 0..1.
    pub(super) fn share(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    pub(super) fn chance(&mut self, share: f32) -> bool {
        self.share() < share
    }
}
