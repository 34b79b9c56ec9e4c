//! The arithmetic, written once over [`Simd`](crate::simd::Simd) and compiled for each instruction
//! set.
//!
//! Owns: [`CpuKernels`], the table through which everything else calls it.
//! Never: knows threads or buffers.
//! Invariant: a table for an instruction set is handed out only where the processor has it.

pub mod attention;
mod kv_codes;
mod kv_sources;
pub mod product;
pub mod rounding;
mod rows;
pub mod tile;

use crate::isa::Isa;
use crate::memory::PlainData;
use crate::simd::{Simd, TransposeTarget};
use attention::{AttentionScratch, LayerAttention, Queries, SpanShare};
use cleave_checkpoint::e4m3;
use product::bytes::ByteForm;
use product::groups::GroupedByteForm;
use product::halves::HalfForm;
use product::left::LeftSide;
use product::nibbles::{FloatNibbles, NibbleForm, UnpackedNibbleForm, WholeNibbles};
use product::{PackedProduct, ProductPiece, WeightForm};
use std::ops::Range;
use tile::{Bf16Format, F32Format};

/// Kernels of an instruction set. They are `unsafe` only because the processor must have the
/// instructions, which [`CpuKernels::of`] checked.
pub struct CpuKernels {
    /// Rows of the largest register tile.
    pub rows_max: usize,
    /// Transposes a panel, see [`product::interleave`].
    pub interleave: unsafe fn(&[u32], usize, &mut [u32]),
    /// Normalises a row, see [`rows::norm`].
    pub norm: unsafe fn(&mut [f32], &[f32], f32),
    /// Subtracts a row's mean, see [`rows::remove_mean`].
    pub remove_mean: unsafe fn(&mut [f32]),
    /// Adds a row to another, see [`rows::add`].
    pub add: unsafe fn(&mut [f32], &[f32]),
    /// Adds a multiple of a row to another, see [`rows::add_scaled`].
    pub add_scaled: unsafe fn(&mut [f32], &[f32], f32),
    /// Softmax of a row, see [`rows::softmax`].
    pub softmax: unsafe fn(&mut [f32]),
    /// Sigmoid of each element, see [`rows::sigmoid`].
    pub sigmoid: unsafe fn(&mut [f32]),
    /// Prefetches memory to be written, see [`rows::prefetch_lines`].
    pub prefetch_lines: unsafe fn(&[u8]),
    /// Transposes rows of words, see [`Simd::transpose_rows`].
    pub transpose_rows: unsafe fn(&[u32], [usize; 3], TransposeTarget<'_>),
    /// Caps a row, see [`rows::cap_row`].
    pub cap_row: unsafe fn(&mut [f32], SoftCap),
    /// Rotates one head, see [`rows::rotate`].
    pub rotate: unsafe fn(&mut [f32], &[f32], &[f32]),
    /// Products with weights of f16.
    pub of_f16: ProductKernels,
    /// Kernels for 32-bit floats.
    pub of_f32: FormatKernels<f32>,
    /// Kernels for bfloat16, stored as 16 bits.
    pub of_bf16: FormatKernels<u16>,
}

/// A cap of numbers, `cap · tanh(x / cap)`, that come and go multiplied by a scale.
#[derive(Clone, Copy, Debug)]
pub struct SoftCap {
    /// Largest magnitude of a result: the cap times the scale.
    limit: f32,
    /// `2 · log2(e) / limit`.
    exponent: f32,
}

impl SoftCap {
    /// The cap of numbers that are multiplied by `scale`.
    pub const fn new(cap: f32, scale: f32) -> Self {
        let limit = cap * scale;
        let exponent = 2.0 * std::f32::consts::LOG2_E / limit;
        Self { limit, exponent }
    }
}

/// Products with weights of one format.
#[derive(Clone, Copy)]
pub struct ProductKernels {
    /// Words of the left side per step and row.
    pub phases: usize,
    /// Packs rows of the left side, see [`product::left`].
    pub pack: unsafe fn(&LeftSide<'_>, Range<usize>),
    /// Computes one piece of a product, see [`product::multiply`].
    pub multiply: unsafe fn(&PackedProduct<'_>, &ProductPiece, &mut [f32]),
}

/// Products with quantised weights. Variants of an instruction set matter here that make no
/// difference to [`CpuKernels`].
pub struct IntegerKernels {
    /// Eight bits, a scale for each column.
    pub int8: ProductKernels,
    /// Eight bits in groups.
    pub int8_groups: ProductKernels,
    /// Four bits in groups.
    pub int4: ProductKernels,
    /// Four-bit floats in groups.
    pub fp4: ProductKernels,
    /// Rounds a row and returns its scale, see [`rounding::round_bytes`].
    pub round_int8: unsafe fn(&[f32], &mut [u8]) -> f32,
    /// Rounds a group and returns its scale, see [`rounding::round_nibbles`].
    pub round_int4: unsafe fn(&[f32], &mut [u8]) -> f32,
}

/// Kernels that depend on the number format. `T` is the pool's element type.
pub struct FormatKernels<T> {
    /// Products with dense weights of this format.
    pub product: ProductKernels,
    /// Stores a head in the pool's format, see [`rows::store`].
    pub store: unsafe fn(&[f32], &mut [T]),
    /// Computes the attention of one task, see [`attention::attend`].
    pub attend: unsafe fn(&LayerAttention<'_, T>, Queries<'_>, &SpanShare, &mut AttentionScratch),
    /// Merges the states of spans, see [`attention::merge_spans`].
    pub combine: unsafe fn(&LayerAttention<'_, T>, Queries<'_>, usize, &mut AttentionScratch),
}

/// An element type of the pool, with its kernels.
pub trait StoredElement: PlainData {
    /// The kernels of this format.
    fn kernels_of(kernels: &CpuKernels) -> &FormatKernels<Self>;
    /// Widens an e4m3 exactly.
    fn from_e4m3(bits: u8) -> Self;
}

impl StoredElement for f32 {
    fn from_e4m3(bits: u8) -> Self {
        e4m3::to_f32(bits)
    }

    fn kernels_of(kernels: &CpuKernels) -> &FormatKernels<f32> {
        &kernels.of_f32
    }
}

impl StoredElement for u16 {
    fn from_e4m3(bits: u8) -> Self {
        // Exact: bf16 has all bits of an e4m3.
        (e4m3::to_f32(bits).to_bits() >> 16) as u16
    }

    fn kernels_of(kernels: &CpuKernels) -> &FormatKernels<u16> {
        &kernels.of_bf16
    }
}

/// The kernels of one format, compiled for one instruction set.
macro_rules! format_kernels {
    ($token:expr, $simd:ty, $format:ty, $stored:ty $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn pack(left: &LeftSide<'_>, tiles: Range<usize>) {
            // SAFETY: this function is called only where the processor has its instructions.
            product::left::pack::<$simd, $format>(unsafe { $token }, left, tiles);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply(product: &PackedProduct<'_>, piece: &ProductPiece, scratch: &mut [f32]) {
            // SAFETY: as in `pack`.
            product::multiply::<$simd, $format>(unsafe { $token }, product, piece, scratch);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn store(x: &[f32], to: &mut [$stored]) {
            // SAFETY: as in `pack`.
            rows::store::<$simd, $format>(unsafe { $token }, x, to);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn attend(
            attend: &LayerAttention<'_, $stored>,
            queries: Queries<'_>,
            share: &SpanShare,
            scratch: &mut AttentionScratch,
        ) {
            // SAFETY: as in `pack`.
            let simd = unsafe { $token };
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
            let simd = unsafe { $token };
            attention::merge_spans::<$simd, $stored>(simd, attend, queries, partial, scratch);
        }
        FormatKernels {
            product: ProductKernels {
                phases: <$format as tile::ElementFormat<$simd>>::PHASES,
                pack,
                multiply,
            },
            store,
            attend,
            combine,
        }
    }};
}

/// All kernels, compiled for one instruction set.
macro_rules! kernels {
    ($token:expr, $simd:ty $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn interleave(columns: &[u32], stride: usize, panel: &mut [u32]) {
            // SAFETY: as in `norm`.
            product::interleave(unsafe { $token }, columns, stride, panel);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn norm(x: &mut [f32], weight: &[f32], epsilon: f32) {
            // SAFETY: this function is called only where the processor has its instructions.
            rows::norm(unsafe { $token }, x, weight, epsilon);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn remove_mean(x: &mut [f32]) {
            // SAFETY: as in `norm`.
            rows::remove_mean(unsafe { $token }, x);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn add(x: &mut [f32], delta: &[f32]) {
            // SAFETY: as in `norm`.
            rows::add(unsafe { $token }, x, delta);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn add_scaled(x: &mut [f32], addend: &[f32], factor: f32) {
            // SAFETY: as in `norm`.
            rows::add_scaled(unsafe { $token }, x, addend, factor);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn softmax(x: &mut [f32]) {
            // SAFETY: as in `norm`.
            rows::softmax(unsafe { $token }, x);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn sigmoid(x: &mut [f32]) {
            // SAFETY: as in `norm`.
            rows::sigmoid(unsafe { $token }, x);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn expect(bytes: &[u8]) {
            // SAFETY: as in `norm`.
            rows::prefetch_lines(unsafe { $token }, bytes);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn turn(from: &[u32], rows: [usize; 3], to: TransposeTarget<'_>) {
            // SAFETY: as in `norm`.
            Simd::transpose_rows(unsafe { $token }, from, rows, to);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn cap_row(x: &mut [f32], cap: SoftCap) {
            // SAFETY: as in `norm`.
            rows::cap_row(unsafe { $token }, x, cap);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
            // SAFETY: as in `norm`.
            rows::rotate(unsafe { $token }, head, cos, sin);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn pack_half(left: &LeftSide<'_>, tiles: Range<usize>) {
            // SAFETY: as in `norm`.
            product::halves::pack::<$simd>(unsafe { $token }, left, tiles);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply_half(product: &PackedProduct<'_>, piece: &ProductPiece, scratch: &mut [f32]) {
            // SAFETY: as in `norm`.
            product::multiply::<$simd, HalfForm>(unsafe { $token }, product, piece, scratch);
        }
        static KERNELS: CpuKernels = CpuKernels {
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
            of_f32: format_kernels!($token, $simd, F32Format, f32 $(, $features)?),
            of_bf16: format_kernels!($token, $simd, Bf16Format, u16 $(, $features)?),
        };
        &KERNELS
    }};
}

/// Products with quantised weights, compiled for one instruction set.
macro_rules! bytes_kernels {
    ($token:expr, $simd:ty $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn pack_int8(left: &LeftSide<'_>, tiles: Range<usize>) {
            // SAFETY: this function is called only where the processor has its instructions.
            product::left::pack_bytes::<$simd>(unsafe { $token }, left, tiles);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply_int8(product: &PackedProduct<'_>, piece: &ProductPiece, scratch: &mut [f32]) {
            // SAFETY: as in `pack_int8`.
            product::multiply::<$simd, ByteForm>(unsafe { $token }, product, piece, scratch);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn pack_int8_groups(left: &LeftSide<'_>, tiles: Range<usize>) {
            // SAFETY: as in `pack_int8`.
            product::left::pack_grouped_bytes::<$simd>(unsafe { $token }, left, tiles);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply_int8_groups(product: &PackedProduct<'_>, piece: &ProductPiece, scratch: &mut [f32]) {
            // SAFETY: as in `pack_int8`.
            product::multiply::<$simd, GroupedByteForm>(unsafe { $token }, product, piece, scratch);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn pack_int4(left: &LeftSide<'_>, tiles: Range<usize>) {
            // SAFETY: as in `pack_int8`.
            product::left::pack_for_nibbles::<$simd>(unsafe { $token }, left, tiles);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply_int4(product: &PackedProduct<'_>, piece: &ProductPiece, scratch: &mut [f32]) {
            // SAFETY: as in `pack_int8`.
            let token = unsafe { $token };
            match piece.tiles.len() {
                0 | 1 => {
                    product::multiply::<$simd, NibbleForm<WholeNibbles>>(token, product, piece, scratch);
                }
                _ => product::multiply::<$simd, UnpackedNibbleForm<WholeNibbles>>(
                    token, product, piece, scratch,
                ),
            }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply_fp4(product: &PackedProduct<'_>, piece: &ProductPiece, scratch: &mut [f32]) {
            // SAFETY: as in `pack_int8`.
            let token = unsafe { $token };
            match piece.tiles.len() {
                0 | 1 => {
                    product::multiply::<$simd, NibbleForm<FloatNibbles>>(token, product, piece, scratch);
                }
                _ => product::multiply::<$simd, UnpackedNibbleForm<FloatNibbles>>(
                    token, product, piece, scratch,
                ),
            }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn round_int8(x: &[f32], codes: &mut [u8]) -> f32 {
            rounding::round_bytes(x, codes)
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn round_int4(x: &[f32], codes: &mut [u8]) -> f32 {
            rounding::round_nibbles(x, codes)
        }
        static KERNELS: IntegerKernels = IntegerKernels {
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
            int4: ProductKernels {
                phases: <NibbleForm<WholeNibbles> as WeightForm<$simd>>::PHASES,
                pack: pack_int4,
                multiply: multiply_int4,
            },
            fp4: ProductKernels {
                phases: <NibbleForm<FloatNibbles> as WeightForm<$simd>>::PHASES,
                pack: pack_int4,
                multiply: multiply_fp4,
            },
            round_int8,
            round_int4,
        };
        &KERNELS
    }};
}

impl IntegerKernels {
    /// The kernels of an instruction set; `None` if this processor does not have it.
    pub fn of(isa: Isa) -> Option<&'static Self> {
        isa.available().then(|| bytes_table(isa))?
    }

    /// The kernels of the best instruction set there is.
    pub fn best() -> &'static Self {
        Self::of(Isa::detect()).expect("what is detected is available")
    }
}

impl CpuKernels {
    /// The kernels of an instruction set; `None` if this processor does not have it.
    pub fn of(isa: Isa) -> Option<&'static Self> {
        isa.available().then(|| table(isa))?
    }

    /// The kernels of the best instruction set there is.
    pub fn best() -> &'static Self {
        Self::of(Isa::detect()).expect("what is detected is available")
    }
}

#[cfg(target_arch = "x86_64")]
fn table(isa: Isa) -> Option<&'static CpuKernels> {
    use crate::simd::{avx2::Avx2, avx512::Avx512, avx512::Avx512Bf16, plain::PlainSimd};
    Some(match isa {
        Isa::Avx512Bf16 => kernels!(
            Avx512Bf16::new(),
            Avx512Bf16,
            "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"
        ),
        Isa::Avx512Vnni | Isa::Avx512 => kernels!(
            Avx512::<false>::new(),
            Avx512<false>,
            "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
        ),
        Isa::Avx2Vnni | Isa::Avx2 => kernels!(Avx2::<false>::new(), Avx2<false>, "avx2,fma,f16c"),
        Isa::NeonI8mm | Isa::NeonBf16 | Isa::NeonDot | Isa::Neon => return None,
        Isa::Plain => kernels!(PlainSimd::new(), PlainSimd),
    })
}

#[cfg(target_arch = "x86_64")]
fn bytes_table(isa: Isa) -> Option<&'static IntegerKernels> {
    use crate::simd::{avx2::Avx2, avx512::Avx512, plain::PlainSimd};
    Some(match isa {
        Isa::Avx512Bf16 | Isa::Avx512Vnni => bytes_kernels!(
            Avx512::<true>::new(),
            Avx512<true>,
            "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
        ),
        Isa::Avx512 => bytes_kernels!(
            Avx512::<false>::new(),
            Avx512<false>,
            "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
        ),
        Isa::Avx2Vnni => bytes_kernels!(Avx2::<true>::new(), Avx2<true>, "avx2,fma,f16c,avxvnni"),
        Isa::Avx2 => bytes_kernels!(Avx2::<false>::new(), Avx2<false>, "avx2,fma,f16c"),
        Isa::NeonI8mm | Isa::NeonBf16 | Isa::NeonDot | Isa::Neon => return None,
        Isa::Plain => bytes_kernels!(PlainSimd::new(), PlainSimd),
    })
}

#[cfg(target_arch = "aarch64")]
fn bytes_table(isa: Isa) -> Option<&'static IntegerKernels> {
    use crate::simd::{neon::Neon, plain::PlainSimd};
    Some(match isa {
        Isa::NeonI8mm => bytes_kernels!(
            Neon::<true, true, false>::new(),
            Neon<true, true, false>,
            "neon,dotprod,i8mm"
        ),
        Isa::NeonBf16 | Isa::NeonDot => bytes_kernels!(
            Neon::<true, false, false>::new(),
            Neon<true, false, false>,
            "neon,dotprod"
        ),
        Isa::Neon => bytes_kernels!(
            Neon::<false, false, false>::new(),
            Neon<false, false, false>,
            "neon"
        ),
        Isa::Plain => bytes_kernels!(PlainSimd::new(), PlainSimd),
        Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512 | Isa::Avx2Vnni | Isa::Avx2 => return None,
    })
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn bytes_table(isa: Isa) -> Option<&'static IntegerKernels> {
    use crate::simd::plain::PlainSimd;
    (isa == Isa::Plain)
        .then(|| -> &'static IntegerKernels { bytes_kernels!(PlainSimd::new(), PlainSimd) })
}

#[cfg(target_arch = "aarch64")]
fn table(isa: Isa) -> Option<&'static CpuKernels> {
    use crate::simd::{neon::Neon, plain::PlainSimd};
    Some(match isa {
        Isa::NeonI8mm | Isa::NeonBf16 => kernels!(
            Neon::<false, false, true>::new(),
            Neon<false, false, true>,
            "neon,bf16"
        ),
        Isa::NeonDot | Isa::Neon => kernels!(
            Neon::<false, false, false>::new(),
            Neon<false, false, false>,
            "neon"
        ),
        Isa::Plain => kernels!(PlainSimd::new(), PlainSimd),
        Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512 | Isa::Avx2Vnni | Isa::Avx2 => return None,
    })
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn table(isa: Isa) -> Option<&'static CpuKernels> {
    use crate::simd::plain::PlainSimd;
    (isa == Isa::Plain).then(|| -> &'static CpuKernels { kernels!(PlainSimd::new(), PlainSimd) })
}
