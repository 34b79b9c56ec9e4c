//! Pairs of rows and of steps, for sets with an instruction that multiplies two rows of bytes with two columns.
//!
//! Owns: the loop over pairs; what is left over, a last row or a last step, meets dot products as on other sets.
//! Invariant: sides and sums lie as on other sets, inside and outside of this loop alike; sums are whole numbers, so their
//! order costs nothing.

use super::Sides;
use crate::simd::bytes::Bytes;

/// How a form's right side is read.
pub(super) trait Right<S: Bytes> {
    /// Bytes with a sign, sixteen columns of a step for each of C vectors from the sides' on.
    ///
    /// # Safety
    /// The right side has that step.
    unsafe fn columns<const C: usize>(s: S, sides: Sides, step: usize) -> [S::V; C];
}

/// Adds pairs of steps to the sums of R rows and 16·C columns where the set has pairs, and gives the steps done.
///
/// # Safety
/// The sides hold `steps` steps, one word of the left side for each and for each of R rows.
#[inline(always)]
pub(super) unsafe fn add<S: Bytes, F: Right<S>, const R: usize, const C: usize>(
    s: S,
    sides: Sides,
    mut sums: [[S::V; C]; R],
) -> ([[S::V; C]; R], usize) {
    // Decided when compiled: other sets have nothing of this.
    if const { !S::PAIRS || R < 2 } {
        return (sums, 0);
    }
    exchange(s, &mut sums);
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
    exchange(s, &mut sums);
    (sums, steps)
}

/// Sums of pairs of rows as pairs are added to them; and back again.
#[inline(always)]
fn exchange<S: Bytes, const R: usize, const C: usize>(s: S, sums: &mut [[S::V; C]; R]) {
    for r in (0..R / 2 * 2).step_by(2) {
        for c in 0..C {
            [sums[r][c], sums[r + 1][c]] = s.pair_sums([sums[r][c], sums[r + 1][c]]);
        }
    }
}
