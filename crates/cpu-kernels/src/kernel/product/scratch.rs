//! Layout of a thread's scratch memory: sums of the walk, final sums of a tile or an unpacked
//! block, and sums of slices that wait.
//!
//! Invariant: in the lower twelve bits of their addresses, a tile's final sums and its levels of
//! waiting sums differ.

use super::{BLOCK_STEPS, GROUP_PANELS, PANEL, ROWS_PER_PASS, ROWS_PER_SLICED_PASS};
use crate::simd::LANES;

/// Sums of slices that wait for their neighbour's: of one slice, of two, and of four.
pub(super) const WAITING_LEVELS: usize = 3;
/// Words of sums between blocks.
pub(super) const SUMS_WORDS: usize = GROUP_PANELS * (ROWS_PER_PASS + 2 * LANES) * PANEL;
/// Words of either an unpacked block of a panel or a tile's final sums.
pub(super) const SPREAD_WORDS: usize = BLOCK_STEPS * PANEL;
/// Words after which the lower twelve bits of addresses repeat. A processor that compares only
/// these holds a load back while a store with the same bits waits.
pub(super) const PAGE_WORDS: usize = 1024;
/// Words by which levels of a tile differ in these bits.
const STAGGER_WORDS: usize = 4 * LANES;
/// Words before the first level: at most 28 vectors of a tile's final sums, and two staggers.
pub(super) const WAITING_GAP_WORDS: usize = 28 * LANES + 2 * STAGGER_WORDS;
/// Words of one level of waiting sums; the next one lies a stagger before it, but for whole pages.
pub(super) const LEVEL_WORDS: usize =
    GROUP_PANELS * (ROWS_PER_SLICED_PASS + 2 * LANES) * PANEL + PAGE_WORDS - STAGGER_WORDS;
const _: () = assert!(
    SUMS_WORDS.is_multiple_of(PAGE_WORDS)
        && SPREAD_WORDS.is_multiple_of(PAGE_WORDS)
        && (LEVEL_WORDS + STAGGER_WORDS).is_multiple_of(PAGE_WORDS)
);
/// Words of one thread's scratch memory.
pub const SCRATCH_WORDS: usize =
    SUMS_WORDS + SPREAD_WORDS + WAITING_GAP_WORDS + WAITING_LEVELS * LEVEL_WORDS;
