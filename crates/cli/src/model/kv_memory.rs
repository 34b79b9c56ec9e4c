//! The division of a worker's KV memory between the plane of blocks and the window plane.
//!
//! Owns: the rule of docs/design/decisions/0127-windows-are-a-plane.md. Never: reads how much
//! memory there is. Invariant: both planes together fit the memory, and a sequence that fits the
//! plane of blocks has its window beside it.

use cleave_domain::{KvSpec, KvWindow};

/// Limits on the sequences of a worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequenceLimits {
    /// Sequences that run at once.
    pub(super) slots_count: u32,
    /// Tokens of one step.
    pub(super) step_tokens_max: u32,
    /// Blocks of either plane that are of use.
    pub(super) blocks_max: u32,
}

/// The blocks of each plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlaneBlocks {
    pub(super) blocks_count: u32,
    /// 0 without a window plane.
    pub(super) windows_count: u32,
}

impl PlaneBlocks {
    /// Divides `bytes` of memory. No blocks if it holds not one of each plane.
    pub(super) fn divide(bytes: u64, spec: &KvSpec, limits: SequenceLimits) -> Self {
        let SequenceLimits {
            slots_count,
            step_tokens_max,
            blocks_max,
        } = limits;
        let counted = |count: u64| u32::try_from(count).unwrap_or(u32::MAX).min(blocks_max);
        let Some(layout) = &spec.window else {
            return Self {
                blocks_count: counted(bytes / spec.blocks.bytes),
                windows_count: 0,
            };
        };
        let window = KvWindow {
            tokens: layout.tokens,
            block_tokens: spec.block_tokens,
        };
        let (each, window_each) = (spec.blocks.bytes, layout.layout.bytes);
        // A sequence shorter than the window takes as many blocks of one plane as of the other.
        let pairs = bytes / (each + window_each);
        let of_chunk = u64::from(window.blocks_max(step_tokens_max));
        let of_stream = u64::from(window.blocks_max(KvWindow::DECODE_TOKENS));
        // Half of the streams' part is for windows of cached prefixes.
        let enough = 2 * u64::from(slots_count) * of_stream + of_chunk;
        let windows = enough.min(pairs * 3 / 4).max(of_chunk.min(pairs));
        let windows_count = counted(windows);
        let left = bytes - u64::from(windows_count) * window_each;
        let blocks_count = counted(left / each);
        let has_chunk = u64::from(windows_count) >= of_chunk;
        Self {
            blocks_count: if has_chunk {
                blocks_count
            } else {
                blocks_count.min(windows_count)
            },
            windows_count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{PlaneBlocks, SequenceLimits};
    use cleave_domain::{KvSpec, KvWindow, PlaneLayout, SplitMix64, WindowLayout};

    fn spec(tokens: u32, block_bytes: u64, window_bytes: u64) -> KvSpec {
        KvSpec {
            block_tokens: 16,
            blocks: PlaneLayout::packed([(0, block_bytes)]),
            state: None,
            window: (window_bytes > 0).then(|| WindowLayout {
                tokens,
                layout: PlaneLayout::packed([(1, window_bytes)]),
            }),
        }
    }

    /// A block and a window block of Gemma 3 27B in bf16: 10 and 52 layers, 16 heads of 128.
    fn gemma3() -> KvSpec {
        let layer = 16 * 2 * 16 * 128 * 2;
        spec(1024, 10 * layer, 52 * layer)
    }

    fn limits(slots_count: u32) -> SequenceLimits {
        SequenceLimits {
            slots_count,
            step_tokens_max: 2048,
            blocks_max: u32::MAX,
        }
    }

    #[test]
    fn few_sequences_leave_memory_to_the_plane_that_grows() {
        let spec = gemma3();
        let bytes = 64 << 30;
        let found = PlaneBlocks::divide(bytes, &spec, limits(8));
        let window = KvWindow {
            tokens: 1024,
            block_tokens: 16,
        };
        assert_eq!((window.blocks_max(2), window.blocks_max(2048)), (65, 193));
        assert_eq!(found.windows_count, 2 * 8 * 65 + 193);
        let in_one_plane = bytes / (62 * spec.blocks.bytes / 10);
        let times = f64::from(found.blocks_count) / in_one_plane as f64;
        assert!(times > 5.0, "{times}");
    }

    #[test]
    fn short_sequences_keep_three_quarters_of_their_places() {
        let spec = gemma3();
        let bytes = 64 << 30;
        let in_one_plane = bytes / (62 * spec.blocks.bytes / 10);
        let found = PlaneBlocks::divide(bytes, &spec, limits(4096));
        assert_eq!(u64::from(found.windows_count), in_one_plane * 3 / 4);
        assert!(u64::from(found.blocks_count) > 2 * in_one_plane);
    }

    #[test]
    fn a_model_without_windows_gets_blocks_alone() {
        let found = PlaneBlocks::divide(1001, &spec(1, 100, 0), limits(8));
        let expected = PlaneBlocks {
            blocks_count: 10,
            windows_count: 0,
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn any_memory_is_divided_so_that_sequences_have_windows() {
        let mut rng = SplitMix64::new(7);
        let mut below = |bound: u64| rng.draw() % bound;
        for _ in 0..20_000 {
            let spec = spec(
                1 + below(4096) as u32,
                16 * (1 + below(64)),
                16 * below(512),
            );
            let limits = SequenceLimits {
                slots_count: 1 + below(300) as u32,
                step_tokens_max: 1 + below(4096) as u32,
                blocks_max: 1 + below(5000) as u32,
            };
            let bytes = below(4 << 20);
            let found = PlaneBlocks::divide(bytes, &spec, limits);
            let window_bytes = spec.window.as_ref().map_or(0, |window| window.layout.bytes);
            let taken = u64::from(found.blocks_count) * spec.blocks.bytes
                + u64::from(found.windows_count) * window_bytes;
            assert!(taken <= bytes, "{found:?} of {bytes}");
            let pairs = bytes / (spec.blocks.bytes + window_bytes);
            assert_eq!(found.blocks_count > 0, pairs > 0);
            assert!(found.blocks_count.max(found.windows_count) <= limits.blocks_max);
            if let Some(layout) = &spec.window {
                let window = KvWindow {
                    tokens: layout.tokens,
                    block_tokens: 16,
                };
                let longest = window.blocks_max(limits.step_tokens_max);
                assert!(found.windows_count >= longest.min(found.blocks_count));
                // No sequence that one plane would hold is refused.
                assert!(u64::from(found.blocks_count) >= pairs.min(limits.blocks_max.into()));
            }
        }
    }
}
