//! A small random generator, equal on every platform, for the suites' inputs.
//!
//! Owns: its state. Never: serves an engine's own draws.
//! Invariant: the same seed gives the same numbers.

/// SplitMix64; the field is its state.
pub(super) struct ConformanceRng(pub(super) u64);

impl ConformanceRng {
    pub(super) fn next(&mut self) -> u64 {
        // SplitMix64 has no weak seeds.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
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
