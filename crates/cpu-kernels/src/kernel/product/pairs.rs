//! Products of pairs of rows and steps, for instruction sets that multiply two rows of bytes with
//! two columns at once.
//!
//! Owns: the loop over pairs; an odd last row or step uses dot products as on other sets.
//! Invariant: operands and sums have the same layout as on other sets; sums are integers, so that
//! another order gives the same bits.

use super::BlockSides;
use crate::simd::bytes::IntegerSimd;

/// Reading the right side of a format.
pub(super) trait RightSide<S: IntegerSimd> {
    /// Signed bytes of a step: sixteen columns for each of C vectors from the sides' vector on.
    ///
    /// # Safety
    /// The right side has that step.
    unsafe fn columns<const C: usize>(s: S, sides: BlockSides, step: usize) -> [S::V; C];
}

/// Adds pairs of steps to the sums of R rows and 16·C columns if the set has pair products; returns
/// the sums and the number of steps done.
///
/// # Safety
/// The sides hold `steps` steps, one word of the left side for each and for each of R rows.
#[inline(always)]
pub(super) unsafe fn add<S: IntegerSimd, F: RightSide<S>, const R: usize, const C: usize>(
    s: S,
    sides: BlockSides,
    mut sums: [[S::V; C]; R],
) -> ([[S::V; C]; R], usize) {
    // Decided at compile time: other sets have no code here.
    if const { !S::PAIRS || R < 2 } {
        return (sums, 0);
    }
    exchange_pair_sums(s, &mut sums);
    let steps = sides.steps / 2 * 2;
    for step in (0..steps).step_by(2) {
        // SAFETY: within the sides, as the caller promises.
        unsafe {
            let left = [sides.left.add(step * R), sides.left.add((step + 1) * R)];
            let columns = [
                F::columns::<C>(s, sides, step),
                F::columns::<C>(s, sides, step + 1),
            ];
            for c in 0..C {
                let both = [columns[0][c], columns[1][c]];
                let right = s.right_pair(both);
                for r in (0..R / 2 * 2).step_by(2) {
                    let rows = s.left_pair([left[0].add(r), left[1].add(r)]);
                    let pair = s.pair_dots([sums[r][c], sums[r + 1][c]], rows, right);
                    [sums[r][c], sums[r + 1][c]] = pair;
                }
                if R % 2 == 1 {
                    for phase in 0..2 {
                        let row = s.splat_word(*left[phase].add(R - 1));
                        sums[R - 1][c] = s.byte_dot(sums[R - 1][c], row, both[phase]);
                    }
                }
            }
        }
    }
    exchange_pair_sums(s, &mut sums);
    (sums, steps)
}

/// Exchanges halves of pairs of rows' sums, to the layout of pair products and back.
#[inline(always)]
fn exchange_pair_sums<S: IntegerSimd, const R: usize, const C: usize>(
    s: S,
    sums: &mut [[S::V; C]; R],
) {
    for r in (0..R / 2 * 2).step_by(2) {
        for c in 0..C {
            [sums[r][c], sums[r + 1][c]] = s.pair_sums([sums[r][c], sums[r + 1][c]]);
        }
    }
}
