//! The arithmetic, written once over [`Simd`](crate::simd::Simd) and compiled for each instruction
//! set.
//!
//! Owns: [`CpuKernels`], the table through which everything else calls it.
//! Never: knows threads or buffers.
//! Invariant: a table for an instruction set is handed out only where the processor has it.

pub mod attention;
mod compiled;
mod kv_codes;
mod kv_sources;
pub mod product;
mod rows;
pub mod tile;

use crate::isa::Isa;
use crate::memory::PlainData;
use crate::simd::TransposeTarget;
use attention::{AttentionScratch, LayerAttention, Queries, SpanShare};
use cleave_checkpoint::e4m3;
use product::left::LeftSide;
use product::{PackedProduct, ProductPiece};
use std::ops::Range;

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
    /// Four bits in groups, whole numbers or floats.
    pub nibbles: ProductKernels,
    /// Rounds a row and returns its scale, see [`int8`](cleave_checkpoint::rounding::int8).
    pub round_int8: unsafe fn(&[f32], &mut [u8]) -> f32,
    /// Rounds a group and returns its scale, see [`int4`](cleave_checkpoint::rounding::int4).
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

impl IntegerKernels {
    /// The kernels of an instruction set; `None` if this processor does not have it.
    pub fn of(isa: Isa) -> Option<&'static Self> {
        isa.available().then(|| compiled::bytes_table(isa))?
    }

    /// The kernels of the best instruction set there is.
    pub fn best() -> &'static Self {
        Self::of(Isa::detect()).expect("what is detected is available")
    }
}

impl CpuKernels {
    /// The kernels of an instruction set; `None` if this processor does not have it.
    pub fn of(isa: Isa) -> Option<&'static Self> {
        isa.available().then(|| compiled::table(isa))?
    }

    /// The kernels of the best instruction set there is.
    pub fn best() -> &'static Self {
        Self::of(Isa::detect()).expect("what is detected is available")
    }
}
