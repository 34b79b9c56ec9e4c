//! The tables of kernels, compiled for each instruction set.
//!
//! Owns: the macros that compile all kernels for a set, and the choice of a set's table.
//! Never: asks the processor; see `CpuKernels::of`.
//!
//! Each table is a module, because the compiler optimises a crate's modules at the same time. A set
//! that differs from another in few kernels takes the rest from the other's table, so that none is
//! compiled twice.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(super) use aarch64::{bytes_table, table};
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) use portable::{bytes_table, table};
#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::{bytes_table, table};

/// The module of one number format's kernels, compiled for one instruction set.
macro_rules! format_kernels {
    ($set:ident, $simd:ty, $format:ident, $stored:ty $(, $features:literal)?) => {
        mod $set {
            use crate::kernel::attention::{
                self, AttentionScratch, LayerAttention, Queries, SpanShare,
            };
            use crate::kernel::product::left::LeftSide;
            use crate::kernel::product::{self, PackedProduct, ProductPiece};
            use crate::kernel::tile::{$format, ElementFormat};
            use crate::kernel::{FormatKernels, ProductKernels, rows};
            use std::ops::Range;

            $(#[target_feature(enable = $features)])?
            unsafe fn pack(left: &LeftSide<'_>, tiles: Range<usize>) {
                // SAFETY: this function is called only where the processor has its instructions.
                product::left::pack::<$simd, $format>(unsafe { <$simd>::new() }, left, tiles);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn multiply(product: &PackedProduct<'_>, piece: &ProductPiece, scratch: &mut [f32]) {
                // SAFETY: as in `pack`.
                product::multiply::<$simd, $format>(unsafe { <$simd>::new() }, product, piece, scratch);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn store(x: &[f32], to: &mut [$stored]) {
                // SAFETY: as in `pack`.
                rows::store::<$simd, $format>(unsafe { <$simd>::new() }, x, to);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn attend(
                attend: &LayerAttention<'_, $stored>,
                queries: Queries<'_>,
                share: &SpanShare,
                scratch: &mut AttentionScratch,
            ) {
                // SAFETY: as in `pack`.
                let simd = unsafe { <$simd>::new() };
                attention::attend::<$simd, $format>(simd, attend, queries, share, scratch);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn combine(
                attend: &LayerAttention<'_, $stored>,
                queries: Queries<'_>,
                partial: usize,
                scratch: &mut AttentionScratch,
            ) {
                // SAFETY: as in `pack`.
                let simd = unsafe { <$simd>::new() };
                attention::merge_spans::<$simd, $stored>(simd, attend, queries, partial, scratch);
            }
            pub(in crate::kernel::compiled) const KERNELS: FormatKernels<$stored> = FormatKernels {
                product: ProductKernels {
                    phases: <$format as ElementFormat<$simd>>::PHASES,
                    pack,
                    multiply,
                },
                store,
                attend,
                combine,
            };
        }
    };
}
use format_kernels;

/// The module of all kernels but those of quantised weights, compiled for one instruction set.
macro_rules! kernels {
    ($set:ident, $simd:ty $(, $features:literal)?) => {
        mod $set {
            use crate::kernel::product::halves::{self, HalfForm};
            use crate::kernel::product::left::LeftSide;
            use crate::kernel::product::{self, PackedProduct, ProductPiece, WeightForm};
            use crate::kernel::{CpuKernels, ProductKernels, SoftCap, rows};
            use crate::simd::{Simd, TransposeTarget};
            use std::ops::Range;

            $crate::kernel::compiled::format_kernels!(
                of_f32, $simd, F32Format, f32 $(, $features)?
            );
            $crate::kernel::compiled::format_kernels!(
                of_bf16, $simd, Bf16Format, u16 $(, $features)?
            );

            $(#[target_feature(enable = $features)])?
            unsafe fn interleave(columns: &[u32], stride: usize, panel: &mut [u32]) {
                // SAFETY: as in `norm`.
                product::interleave(unsafe { <$simd>::new() }, columns, stride, panel);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn norm(x: &mut [f32], weight: &[f32], epsilon: f32) {
                // SAFETY: this function is called only where the processor has its instructions.
                rows::norm(unsafe { <$simd>::new() }, x, weight, epsilon);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn remove_mean(x: &mut [f32]) {
                // SAFETY: as in `norm`.
                rows::remove_mean(unsafe { <$simd>::new() }, x);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn add(x: &mut [f32], delta: &[f32]) {
                // SAFETY: as in `norm`.
                rows::add(unsafe { <$simd>::new() }, x, delta);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn add_scaled(x: &mut [f32], addend: &[f32], factor: f32) {
                // SAFETY: as in `norm`.
                rows::add_scaled(unsafe { <$simd>::new() }, x, addend, factor);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn softmax(x: &mut [f32]) {
                // SAFETY: as in `norm`.
                rows::softmax(unsafe { <$simd>::new() }, x);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn sigmoid(x: &mut [f32]) {
                // SAFETY: as in `norm`.
                rows::sigmoid(unsafe { <$simd>::new() }, x);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn expect(bytes: &[u8]) {
                // SAFETY: as in `norm`.
                rows::prefetch_lines(unsafe { <$simd>::new() }, bytes);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn turn(from: &[u32], rows: [usize; 3], to: TransposeTarget<'_>) {
                // SAFETY: as in `norm`.
                Simd::transpose_rows(unsafe { <$simd>::new() }, from, rows, to);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn cap_row(x: &mut [f32], cap: SoftCap) {
                // SAFETY: as in `norm`.
                rows::cap_row(unsafe { <$simd>::new() }, x, cap);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
                // SAFETY: as in `norm`.
                rows::rotate(unsafe { <$simd>::new() }, head, cos, sin);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn pack_half(left: &LeftSide<'_>, tiles: Range<usize>) {
                // SAFETY: as in `norm`.
                halves::pack::<$simd>(unsafe { <$simd>::new() }, left, tiles);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_half(product: &PackedProduct<'_>, piece: &ProductPiece, scratch: &mut [f32]) {
                // SAFETY: as in `norm`.
                product::multiply::<$simd, HalfForm>(unsafe { <$simd>::new() }, product, piece, scratch);
            }
            pub(in crate::kernel::compiled) const KERNELS: CpuKernels = CpuKernels {
                rows_max: <$simd as Simd>::ROWS,
                interleave,
                norm,
                remove_mean,
                add,
                add_scaled,
                softmax,
                sigmoid,
                prefetch_lines: expect,
                transpose_rows: turn,
                cap_row,
                rotate,
                of_f16: ProductKernels {
                    phases: <HalfForm as WeightForm<$simd>>::PHASES,
                    pack: pack_half,
                    multiply: multiply_half,
                },
                of_f32: of_f32::KERNELS,
                of_bf16: of_bf16::KERNELS,
            };
        }
    };
}
use kernels;

/// The module of products with quantised weights, compiled for one instruction set.
macro_rules! bytes_kernels {
    ($set:ident, $simd:ty $(, $features:literal)?) => {
        mod $set {
            use crate::kernel::product::bytes::ByteForm;
            use crate::kernel::product::groups::{GroupCodes, GroupedByteForm};
            use crate::kernel::product::left::{self, LeftSide};
            use crate::kernel::product::nibbles::{
                FloatNibbles, NibbleForm, UnpackedNibbleForm, WholeNibbles,
            };
            use crate::kernel::product::{self, PackedProduct, ProductPiece, WeightForm};
            use crate::kernel::{IntegerKernels, ProductKernels};
            use cleave_checkpoint::rounding;
            use std::ops::Range;

            $(#[target_feature(enable = $features)])?
            unsafe fn pack_int8(left: &LeftSide<'_>, tiles: Range<usize>) {
                // SAFETY: this function is called only where the processor has its instructions.
                left::pack_bytes::<$simd>(unsafe { <$simd>::new() }, left, tiles);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_int8(product: &PackedProduct<'_>, piece: &ProductPiece, scratch: &mut [f32]) {
                // SAFETY: as in `pack_int8`.
                product::multiply::<$simd, ByteForm>(unsafe { <$simd>::new() }, product, piece, scratch);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn pack_int8_groups(left: &LeftSide<'_>, tiles: Range<usize>) {
                // SAFETY: as in `pack_int8`.
                left::pack_grouped_bytes::<$simd>(unsafe { <$simd>::new() }, left, tiles);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_int8_groups(product: &PackedProduct<'_>, piece: &ProductPiece, scratch: &mut [f32]) {
                // SAFETY: as in `pack_int8`.
                product::multiply::<$simd, GroupedByteForm>(unsafe { <$simd>::new() }, product, piece, scratch);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn pack_for_nibbles(left: &LeftSide<'_>, tiles: Range<usize>) {
                // SAFETY: as in `pack_int8`.
                left::pack_for_nibbles::<$simd>(unsafe { <$simd>::new() }, left, tiles);
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn multiply_nibbles(product: &PackedProduct<'_>, piece: &ProductPiece, scratch: &mut [f32]) {
                // SAFETY: as in `pack_int8`.
                let simd = unsafe { <$simd>::new() };
                // A single tile unpacks codes in its innermost loop, where kinds are compiled
                // apart.
                match (piece.tiles.len(), product.integer.units.codes) {
                    (2.., _) => {
                        product::multiply::<$simd, UnpackedNibbleForm>(simd, product, piece, scratch);
                    }
                    (_, GroupCodes::Float4) => {
                        product::multiply::<$simd, NibbleForm<FloatNibbles>>(simd, product, piece, scratch);
                    }
                    (_, GroupCodes::Four | GroupCodes::Eight) => {
                        product::multiply::<$simd, NibbleForm<WholeNibbles>>(simd, product, piece, scratch);
                    }
                }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn round_int8(x: &[f32], codes: &mut [u8]) -> f32 {
                rounding::int8(x, codes)
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn round_int4(x: &[f32], codes: &mut [u8]) -> f32 {
                rounding::int4(x, codes)
            }
            pub(in crate::kernel::compiled) static KERNELS: IntegerKernels = IntegerKernels {
                int8: ProductKernels {
                    phases: <ByteForm as WeightForm<$simd>>::PHASES,
                    pack: pack_int8,
                    multiply: multiply_int8,
                },
                int8_groups: ProductKernels {
                    phases: <GroupedByteForm as WeightForm<$simd>>::PHASES,
                    pack: pack_int8_groups,
                    multiply: multiply_int8_groups,
                },
                nibbles: ProductKernels {
                    phases: <UnpackedNibbleForm as WeightForm<$simd>>::PHASES,
                    pack: pack_for_nibbles,
                    multiply: multiply_nibbles,
                },
                round_int8,
                round_int4,
            };
        }
    };
}
use bytes_kernels;
