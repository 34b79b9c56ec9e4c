//! Weights that are floats, `[panel][step][PANEL]`; in bf16 a word is two elements of the inner dimension.
//!
//! Invariant: see [`tile`](crate::kernel::tile): one chain of multiply-adds in the order of the inner dimension.

use super::{Form, PANEL, Product, Sides, Sums, load_sums, store_sums};
use crate::kernel::tile::{Brain, Format, Single};
use crate::simd::{LANES, Simd};

macro_rules! dense {
    ($format:ty) => {
        impl<S: Simd> Form<S> for $format {
            const PHASES: usize = <$format as Format<S>>::PHASES;

            #[inline(always)]
            unsafe fn add<const R: usize, const C: usize>(
                s: S,
                product: &Product<'_>,
                sides: Sides,
                sums: Sums,
            ) {
                // SAFETY: as the caller promises.
                unsafe { add::<S, $format, R, C>(s, product, sides, sums) }
            }
        }
    };
}

dense!(Single);
dense!(Brain);

/// `sums + left · right`.
///
/// # Safety
/// As [`Form::add`].
#[inline(always)]
unsafe fn add<S: Simd, F: Form<S> + Format<S>, const R: usize, const C: usize>(
    s: S,
    product: &Product<'_>,
    sides: Sides,
    kept: Sums,
) {
    // SAFETY: within the sides and the sums, as the caller promises.
    unsafe {
        let mut sums = load_sums::<S, F, R, C>(s, product, sides, kept.from);
        let right = sides.right.add(sides.vector * LANES);
        for step in 0..sides.steps {
            sides.ahead.ask(s, step);
            for phase in 0..<F as Format<S>>::PHASES {
                let left = sides
                    .left
                    .add((step * <F as Format<S>>::PHASES + phase) * R);
                let mut columns = [s.splat(0.0); C];
                for c in 0..C {
                    let words = &*right.add(step * PANEL + LANES * c).cast();
                    columns[c] = F::phase(s, s.load(words), phase);
                }
                for r in 0..R {
                    let row = s.splat_word(*left.add(r));
                    for c in 0..C {
                        sums[r][c] = F::dot(s, sums[r][c], row, columns[c]);
                    }
                }
            }
        }
        store_sums(s, sums, kept.to);
    }
}
