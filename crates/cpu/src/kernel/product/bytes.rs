//! Weights of eight bits, `[panel][step of four][PANEL]`, a scale for each column.
//!
//! Invariant: sums are whole numbers, exact whatever the order. The result is rounded twice: times the column's scale,
//! then times the row's.

use super::{Form, PANEL, Product, Sides, Sums, load_sums, store_sums};
use crate::simd::LANES;
use crate::simd::bytes::{Bytes, LeftBytes};

/// See the module.
#[derive(Clone, Copy)]
pub(crate) struct Byte;

impl<S: Bytes> Form<S> for Byte {
    const PHASES: usize = S::LEFT.phases();

    #[inline(always)]
    fn start(s: S, product: &Product<'_>, column: usize) -> S::V {
        match S::LEFT {
            LeftBytes::Offset => {
                let starts = &product.whole.starts[column..column + LANES];
                // SAFETY: sixteen words are there; as bits they are whole numbers again.
                s.load(unsafe { &*starts.as_ptr().cast() })
            }
            LeftBytes::Signed | LeftBytes::Halves => s.splat(0.0),
        }
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        s: S,
        product: &Product<'_>,
        sides: Sides,
        kept: Sums,
    ) {
        let phases = S::LEFT.phases();
        // SAFETY: within the sides and the sums, as the caller promises.
        unsafe {
            let mut sums = load_sums::<S, Self, R, C>(s, product, sides, kept.from);
            let right = sides.right.add(sides.vector * LANES);
            for step in 0..sides.steps {
                sides.ahead.ask(s, step);
                for phase in 0..phases {
                    let left = sides.left.add((step * phases + phase) * R);
                    let mut columns = [s.splat(0.0); C];
                    for c in 0..C {
                        let words = &*right.add(step * PANEL + LANES * c).cast();
                        columns[c] = s.byte_phase(s.load(words), phase);
                    }
                    for r in 0..R {
                        let row = s.splat_word(*left.add(r));
                        for c in 0..C {
                            sums[r][c] = s.byte_dot(sums[r][c], row, columns[c]);
                        }
                    }
                }
            }
            store_sums(s, sums, kept.to);
        }
    }

    #[inline(always)]
    fn finish(s: S, product: &Product<'_>, sum: S::V, (row, column): (usize, usize)) -> S::V {
        let scales = &product.whole.scales[column..column + LANES];
        let scaled = s.mul(s.float(sum), s.load_part(scales));
        s.mul(scaled, s.splat(product.left_scales[row]))
    }
}
