//! Integer operations on the sixteen lanes: products of four bytes with four bytes, summed in 32
//! bits.
//!
//! Owns: the operations of products of quantised weights; vectors of f32 carry the integers' bits.
//! Invariant: every operation is exact, so that all instruction sets agree to the bit with any
//! algorithm.

use super::{LANES, Simd};

/// Format of a row's bytes for [`IntegerSimd::byte_dot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // one of the forms is for its instructions
pub enum LeftBytes {
    /// The signed bytes themselves, unchanged.
    Signed,
    /// Two words of two 16-bit integers each: the odd bytes first, then the even ones.
    Widened16,
}

impl LeftBytes {
    /// Words per four bytes.
    pub const fn phases(self) -> usize {
        match self {
            Self::Signed => 1,
            Self::Widened16 => 2,
        }
    }
}

/// Message of a pair operation on a set without them, which is never called.
const NO_PAIRS: &str = "this set takes rows one by one";

/// Operations of products of bytes, beyond [`Simd`].
pub trait IntegerSimd: Simd {
    /// Format of a row's bytes on this set.
    const LEFT: LeftBytes;

    /// Number that [`IntegerSimd::byte_phase`] adds to each byte: 128 where the instruction takes
    /// one side unsigned, which is then the weights'.
    const BYTE_OFFSET: u32 = 0;

    /// Part of four signed bytes per column that one phase multiplies, each plus
    /// [`IntegerSimd::BYTE_OFFSET`].
    #[inline(always)]
    fn byte_phase(self, right: Self::V, _phase: usize) -> Self::V {
        right
    }

    /// acc + Σ left · right, one phase of a step; `left` are signed bytes, none of them −128;
    /// `right` are results of [`IntegerSimd::byte_phase`].
    fn byte_dot(self, acc: Self::V, left: Self::V, right: Self::V) -> Self::V;

    /// acc + Σ left · codes over four; `left` are signed bytes, none of them −128; `codes` are 0 to
    /// 24, or results of [`IntegerSimd::octet_phase`] if [`IntegerSimd::LEFT`] is signed.
    fn code_dot(self, acc: Self::V, left: Self::V, codes: Self::V) -> Self::V;

    /// Whether [`IntegerSimd::pair_dots`] is one instruction: sums of two rows and two columns over
    /// two steps at once. [`IntegerSimd::LEFT`] is then signed, and bytes and codes are multiplied
    /// alike.
    const PAIRS: bool = false;

    /// Loads two rows' words of two steps in the layout of [`IntegerSimd::pair_dots`].
    ///
    /// # Safety
    /// Two words are readable at each pointer.
    #[inline(always)]
    unsafe fn left_pair(self, _steps: [*const u32; 2]) -> Self::V {
        unreachable!("{NO_PAIRS}")
    }

    /// Arranges sixteen columns of two steps in the layout of [`IntegerSimd::pair_dots`].
    #[inline(always)]
    fn right_pair(self, _steps: [Self::V; 2]) -> [Self::V; 2] {
        unreachable!("{NO_PAIRS}")
    }

    /// Converts sums of two rows to the layout of [`IntegerSimd::pair_dots`], and back.
    #[inline(always)]
    fn pair_sums(self, _rows: [Self::V; 2]) -> [Self::V; 2] {
        unreachable!("{NO_PAIRS}")
    }

    /// sums + Σ left · right over two steps.
    #[inline(always)]
    fn pair_dots(self, _sums: [Self::V; 2], _left: Self::V, _right: [Self::V; 2]) -> [Self::V; 2] {
        unreachable!("{NO_PAIRS}")
    }

    /// Part of four eight-bit codes per column that one phase multiplies.
    #[inline(always)]
    fn octet_phase(self, codes: Self::V, _phase: usize) -> Self::V {
        codes
    }

    /// Zero point that matches the results of [`IntegerSimd::octet_phase`].
    #[inline(always)]
    fn octet_zero(self, zero: Self::V) -> Self::V {
        zero
    }

    /// The lower and the upper four bits of every byte.
    fn nibbles(self, x: Self::V) -> [Self::V; 2];

    /// The table's byte for every byte of `x`, 0 to 15.
    fn lookup(self, x: Self::V, table: &[u8; 16]) -> Self::V;

    /// a · b of integers; both factors fit 16 bits.
    fn short_mul(self, a: Self::V, b: Self::V) -> Self::V;

    /// Converts integers to floats, rounded to even.
    fn to_float(self, x: Self::V) -> Self::V;

    /// Converts unsigned bytes to integers.
    fn widen_bytes(self, x: &[u8; LANES]) -> Self::V;

    /// Widens numbers of e4m3 that are not negative; the result is 2^120 times smaller.
    #[inline(always)]
    fn widen_e4m3(self, x: &[u8; LANES]) -> Self::V {
        // Exponent and fraction move to those of a bf16, whose exponent's bias is 120 more.
        self.widen_bf16(&x.map(|byte| u16::from(byte) << 4))
    }

    /// The lowest byte of every lane.
    #[inline(always)]
    fn low_bytes(self, x: Self::V) -> [u8; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(x, &mut lanes);
        lanes.map(|lane| lane.to_bits() as u8)
    }

    /// a · b + c, rounded once on every set.
    #[inline(always)]
    fn fma_rounded_once(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        self.fma(a, b, c)
    }
}
