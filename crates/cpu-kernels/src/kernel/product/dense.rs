//! Weights of floats, `[panel][step][PANEL]`; in bf16 a word has two elements of the inner
//! dimension.
//!
//! Invariant: see [`tile`](crate::kernel::tile): one chain of multiply-adds in the order of the
//! inner dimension.

use super::{BlockSides, PANEL, PackedProduct, TileSums, WeightForm, load_sums, store_sums};
use crate::kernel::tile::{Bf16Format, ElementFormat, F32Format};
use crate::simd::{LANES, Simd};

macro_rules! dense {
    ($format:ty) => {
        impl<S: Simd> WeightForm<S> for $format {
            const PHASES: usize = <$format as ElementFormat<S>>::PHASES;

            #[inline(always)]
            unsafe fn add<const R: usize, const C: usize>(
                s: S,
                product: &PackedProduct<'_>,
                sides: BlockSides,
                sums: TileSums,
            ) {
                // SAFETY: as the caller promises.
                unsafe { add::<S, $format, R, C>(s, product, sides, sums) }
            }
        }
    };
}

dense!(F32Format);
dense!(Bf16Format);

/// `sums + left · right`.
///
/// # Safety
/// As [`WeightForm::add`].
#[inline(always)]
unsafe fn add<S: Simd, F: WeightForm<S> + ElementFormat<S>, const R: usize, const C: usize>(
    s: S,
    product: &PackedProduct<'_>,
    sides: BlockSides,
    tile_sums: TileSums,
) {
    // SAFETY: within the sides and the sums, as the caller promises.
    unsafe {
        let mut sums = load_sums::<S, F, R, C>(s, product, sides, tile_sums.from);
        let right = sides.right.add(sides.vector * LANES);
        for step in 0..sides.steps {
            sides.prefetch.prefetch_step::<S, R>(s, step);
            for phase in 0..<F as ElementFormat<S>>::PHASES {
                let left = sides
                    .left
                    .add((step * <F as ElementFormat<S>>::PHASES + phase) * R);
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
        store_sums(s, sums, tile_sums.to);
    }
}
