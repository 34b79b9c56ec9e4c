//! Whole numbers in the sixteen lanes: four bytes meet four bytes, sums are of 32 bits.
//!
//! Owns: the vocabulary of products of quantised weights; the bits of whole numbers travel in vectors of f32.
//! Invariant: every operation is exact, so all instruction sets agree to the bit whatever way they take.

use super::{LANES, Simd};

/// How four bytes of a row become words for [`Bytes::byte_dot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // two of the forms are for its instructions
pub(crate) enum LeftBytes {
    /// Each with 128 added, since the instruction takes them without sign: sums start 128 × the column's sum lower.
    Offset,
    /// As they are.
    Signed,
    /// As two words of two whole numbers of 16 bits: the odd ones first, then the even.
    Halves,
}

impl LeftBytes {
    /// Words of four bytes.
    pub(crate) const fn phases(self) -> usize {
        match self {
            Self::Offset | Self::Signed => 1,
            Self::Halves => 2,
        }
    }
}

/// Why what pairs need is not called.
const NO_PAIRS: &str = "this set takes rows one by one";

/// What products of bytes need beyond [`Simd`].
pub(crate) trait Bytes: Simd {
    /// See there.
    const LEFT: LeftBytes;

    /// The same for codes of eight bits without sign.
    const LEFT_OCTETS: LeftBytes = match Self::LEFT {
        LeftBytes::Offset | LeftBytes::Signed => LeftBytes::Signed,
        LeftBytes::Halves => LeftBytes::Halves,
    };

    /// What one phase needs of four bytes of each column.
    #[inline(always)]
    fn byte_phase(self, right: Self::V, _phase: usize) -> Self::V {
        right
    }

    /// acc + Σ left · right, one phase of a step; `right` are bytes with a sign.
    fn byte_dot(self, acc: Self::V, left: Self::V, right: Self::V) -> Self::V;

    /// acc + Σ left · codes over four; `left` are bytes with a sign, none of them −128, `codes` 0 to 15, or what
    /// [`Bytes::octet_phase`] makes of more where [`Bytes::LEFT_OCTETS`] are with a sign.
    fn code_dot(self, acc: Self::V, left: Self::V, codes: Self::V) -> Self::V;

    /// Whether [`Bytes::pair_dots`] is one instruction: sums of two rows and two columns at once, of two steps.
    /// [`Bytes::LEFT`] is then with a sign, and bytes and codes are multiplied alike.
    const PAIRS: bool = false;

    /// Two rows' words at each of two steps, as [`Bytes::pair_dots`] takes them.
    ///
    /// # Safety
    /// Two words may be read at each.
    #[inline(always)]
    unsafe fn left_pair(self, _steps: [*const u32; 2]) -> Self::V {
        unreachable!("{NO_PAIRS}")
    }

    /// What two steps have of sixteen columns, as [`Bytes::pair_dots`] takes it.
    #[inline(always)]
    fn right_pair(self, _steps: [Self::V; 2]) -> [Self::V; 2] {
        unreachable!("{NO_PAIRS}")
    }

    /// Sums of two rows as [`Bytes::pair_dots`] adds to them; and back again.
    #[inline(always)]
    fn pair_sums(self, _rows: [Self::V; 2]) -> [Self::V; 2] {
        unreachable!("{NO_PAIRS}")
    }

    /// sums + Σ left · right over two steps.
    #[inline(always)]
    fn pair_dots(self, _sums: [Self::V; 2], _left: Self::V, _right: [Self::V; 2]) -> [Self::V; 2] {
        unreachable!("{NO_PAIRS}")
    }

    /// What one phase needs of four codes of eight bits of each column.
    #[inline(always)]
    fn octet_phase(self, codes: Self::V, _phase: usize) -> Self::V {
        codes
    }

    /// A zero point as it is taken off what [`Bytes::octet_phase`] makes.
    #[inline(always)]
    fn octet_zero(self, zero: Self::V) -> Self::V {
        zero
    }

    /// The lower four bits of every byte, and the upper ones.
    fn nibbles(self, x: Self::V) -> [Self::V; 2];

    /// a · b, whole numbers of 16 bits in lanes of 32.
    fn short_mul(self, a: Self::V, b: Self::V) -> Self::V;

    /// Whole numbers as floats, rounded to even.
    fn float(self, x: Self::V) -> Self::V;

    /// Bytes without sign as whole numbers.
    fn widen_bytes(self, x: &[u8; LANES]) -> Self::V;

    /// The lowest byte of every lane.
    #[inline(always)]
    fn low_bytes(self, x: Self::V) -> [u8; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(x, &mut lanes);
        lanes.map(|lane| lane.to_bits() as u8)
    }

    /// a · b + c, rounded once on every set.
    #[inline(always)]
    fn fused(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        self.fma(a, b, c)
    }
}
