//! AVX2, FMA and F16C: two registers of eight lanes, with or without the dot product of bytes.
//!
//! Invariant: a value of this type exists only where the processor has the instructions.

mod bytes;
mod nibbles;

use super::bytes::{IntegerSimd, LeftBytes};
use super::{LANES, Simd};
use bytes::{
    dot_codes, dot_halves, dot_vnni, even_bytes, even_codes, flip_signs, odd_bytes, odd_codes,
};
use nibbles::{looked_up, lower_nibbles, upper_nibbles};
use std::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_GE_OQ, _CMP_LT_OQ, _CMP_UNORD_Q, _MM_FROUND_NO_EXC,
    _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T0, _mm_loadl_epi64, _mm_loadu_si128, _mm_prefetch,
    _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_blendv_ps,
    _mm256_broadcastsi128_si256, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_cmp_ps,
    _mm256_cvtepi8_epi16, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32,
    _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32, _mm256_cvtss_f32, _mm256_div_ps,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps,
    _mm256_mullo_epi32, _mm256_or_si256, _mm256_packus_epi32, _mm256_permute2f128_ps,
    _mm256_permute4x64_epi64, _mm256_round_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setr_ps,
    _mm256_shuffle_epi32, _mm256_shuffle_ps, _mm256_slli_epi32, _mm256_srai_epi32,
    _mm256_srli_epi32, _mm256_storeu_ps, _mm256_storeu_si256, _mm256_sub_ps, _mm256_unpackhi_ps,
    _mm256_unpacklo_ps,
};

/// AVX2, FMA and F16C, and perhaps AVX-VNNI.
#[derive(Clone, Copy)]
pub struct Avx2<const VNNI: bool>(());

/// Lanes 0..8 and 8..16.
#[derive(Clone, Copy)]
pub struct V(__m256, __m256);

impl<const VNNI: bool> Avx2<VNNI> {
    /// # Safety
    /// The processor has AVX2, FMA and F16C, and AVX-VNNI if `VNNI`.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Self(())
    }
}

/// The same instruction on both halves.
macro_rules! both {
    ($op:expr, $($x:expr),+) => {
        // SAFETY: the `Avx2` at hand proves the instructions.
        unsafe { V($op($($x.0),+), $op($($x.1),+)) }
    };
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type V = V;
    const ROWS: usize = 4;
    const COLUMNS: usize = 1;
    const PHASES: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        // SAFETY: `self` proves the instructions.
        let half = unsafe { _mm256_set1_ps(x) };
        V(half, half)
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> V {
        // SAFETY: `self` proves the instructions; sixteen lanes are there.
        unsafe {
            V(
                _mm256_loadu_ps(x.as_ptr()),
                _mm256_loadu_ps(x.as_ptr().add(8)),
            )
        }
    }

    #[inline(always)]
    fn store(self, x: V, to: &mut [f32; LANES]) {
        // SAFETY: `self` proves the instructions; sixteen lanes fit.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), x.0);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), x.1);
        }
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        both!(_mm256_add_ps, a, b)
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        both!(_mm256_sub_ps, a, b)
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        both!(_mm256_mul_ps, a, b)
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        both!(_mm256_div_ps, a, b)
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        both!(_mm256_fmadd_ps, a, b, c)
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        both!(_mm256_min_ps, a, b)
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        both!(_mm256_max_ps, a, b)
    }

    #[inline(always)]
    fn round(self, x: V) -> V {
        both!(
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>,
            x
        )
    }

    #[inline(always)]
    fn power_of_two(self, x: V) -> V {
        both!(power_of_two, x)
    }

    #[inline(always)]
    fn mask_outside(self, x: V, from: usize, to: usize) -> V {
        let (from, to) = (from.min(LANES) as f32, to.min(LANES) as f32);
        // SAFETY: `self` proves the instructions.
        unsafe {
            let low = _mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0);
            let high = _mm256_add_ps(low, _mm256_set1_ps(8.0));
            V(keep(x.0, low, from, to), keep(x.1, high, from, to))
        }
    }

    #[inline(always)]
    fn largest(self, x: V) -> f32 {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let eight = _mm256_max_ps(x.0, x.1);
            let four = _mm256_max_ps(eight, _mm256_permute2f128_ps::<1>(eight, eight));
            let two = _mm256_max_ps(four, _mm256_shuffle_ps::<0b01_00_11_10>(four, four));
            let one = _mm256_max_ps(two, _mm256_shuffle_ps::<0b10_11_00_01>(two, two));
            _mm256_cvtss_f32(one)
        }
    }

    #[inline(always)]
    fn round_bf16(self, x: V) -> V {
        both!(round_bf16, x)
    }

    #[inline(always)]
    fn store_upper_halves(self, x: V, to: &mut [u16; LANES]) {
        // SAFETY: `self` proves the instructions; sixteen halves are one 256-bit store.
        unsafe {
            let low = _mm256_srli_epi32::<16>(_mm256_castps_si256(x.0));
            let high = _mm256_srli_epi32::<16>(_mm256_castps_si256(x.1));
            // Packing works within 128-bit lanes; the permutation puts the quarters in order.
            let packed = _mm256_packus_epi32(low, high);
            let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), ordered);
        }
    }

    #[inline(always)]
    fn widen_bf16(self, x: &[u16; LANES]) -> V {
        // SAFETY: `self` proves the instructions; sixteen halves are two 128-bit loads.
        unsafe {
            let (low, high) = halves(x);
            V(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        }
    }

    #[inline(always)]
    fn widen_f16(self, x: &[u16; LANES]) -> V {
        // SAFETY: `self` proves the instructions; sixteen halves are two 128-bit loads.
        unsafe {
            V(
                _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().add(8).cast())),
            )
        }
    }

    #[inline(always)]
    fn zip_bf16(self, low: &[u16; LANES], high: &[u16; LANES]) -> V {
        let high = self.widen_bf16(high);
        // SAFETY: `self` proves the instructions; sixteen halves are two 128-bit loads.
        unsafe {
            let low = halves(low);
            V(
                _mm256_castsi256_ps(_mm256_or_si256(low.0, _mm256_castps_si256(high.0))),
                _mm256_castsi256_ps(_mm256_or_si256(low.1, _mm256_castps_si256(high.1))),
            )
        }
    }

    #[inline(always)]
    fn pair_phase(self, pairs: V, phase: usize) -> V {
        if phase == 0 {
            both!(upper, pairs)
        } else {
            both!(lower, pairs)
        }
    }

    #[inline(always)]
    fn pair_dot(self, acc: V, a: V, b: V) -> V {
        self.fma(a, b, acc)
    }

    #[inline(always)]
    fn pair_words(self, x: V, to: &mut [u32; LANES]) -> usize {
        let rounded = self.round_bf16(x);
        // SAFETY: `self` proves the instructions; sixteen words are two stores.
        unsafe {
            // Odd before even: exchange the halves of each 64-bit pair.
            let low = _mm256_shuffle_epi32::<0b10_11_00_01>(_mm256_castps_si256(rounded.0));
            let high = _mm256_shuffle_epi32::<0b10_11_00_01>(_mm256_castps_si256(rounded.1));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), low);
            _mm256_storeu_si256(to.as_mut_ptr().add(8).cast(), high);
        }
        LANES
    }

    #[inline(always)]
    fn widen_codes(self, x: &[u8; LANES]) -> V {
        // SAFETY: `self` proves the instructions; eight bytes are there at each half.
        unsafe {
            let (low, high) = (x.as_ptr(), x.as_ptr().add(8));
            V(
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(low.cast()))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(high.cast()))),
            )
        }
    }

    #[inline(always)]
    fn widen_code_pairs(self, x: &[u8; 2 * LANES]) -> V {
        // SAFETY: `self` proves the instructions; sixteen bytes are there at each half.
        unsafe { V(code_pairs(x.as_ptr()), code_pairs(x.as_ptr().add(LANES))) }
    }

    #[inline(always)]
    fn prefetch(self, address: *const u32) {
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    #[inline(always)]
    unsafe fn transpose(self, from: &[*const u32; LANES], to: *mut u32, stride: usize) {
        for quarter in 0..4 {
            let (rows, columns) = (quarter / 2 * 8, quarter % 2 * 8);
            // SAFETY: `self` proves the instructions; an 8 × 8 quarter of what the caller promises.
            unsafe {
                let from: [*const u32; 8] = [
                    from[rows].add(columns),
                    from[rows + 1].add(columns),
                    from[rows + 2].add(columns),
                    from[rows + 3].add(columns),
                    from[rows + 4].add(columns),
                    from[rows + 5].add(columns),
                    from[rows + 6].add(columns),
                    from[rows + 7].add(columns),
                ];
                transpose(&from, to.add(columns * stride + rows), stride);
            }
        }
    }
}

impl<const VNNI: bool> IntegerSimd for Avx2<VNNI> {
    const LEFT: LeftBytes = if VNNI {
        LeftBytes::Signed
    } else {
        LeftBytes::Widened16
    };
    const BYTE_OFFSET: u32 = if VNNI { 128 } else { 0 };

    #[inline(always)]
    fn byte_phase(self, right: V, phase: usize) -> V {
        match (VNNI, phase) {
            (true, _) => both!(flip_signs, right),
            (false, 0) => both!(odd_bytes, right),
            (false, _) => both!(even_bytes, right),
        }
    }

    #[inline(always)]
    fn byte_dot(self, acc: V, left: V, right: V) -> V {
        if VNNI {
            both!(dot_vnni, acc, right, left)
        } else {
            both!(dot_halves, acc, left, right)
        }
    }

    #[inline(always)]
    fn code_dot(self, acc: V, left: V, codes: V) -> V {
        if VNNI {
            both!(dot_vnni, acc, codes, left)
        } else {
            both!(dot_codes, acc, codes, left)
        }
    }

    #[inline(always)]
    fn octet_phase(self, codes: V, phase: usize) -> V {
        match (VNNI, phase) {
            (true, _) => codes,
            (false, 0) => both!(odd_codes, codes),
            (false, _) => both!(even_codes, codes),
        }
    }

    #[inline(always)]
    fn nibbles(self, x: V) -> [V; 2] {
        [both!(lower_nibbles, x), both!(upper_nibbles, x)]
    }

    #[inline(always)]
    fn lookup(self, x: V, table: &[u8; 16]) -> V {
        // SAFETY: `self` proves the instructions; the table has sixteen bytes.
        let table = unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm256_castsi256_ps(_mm256_broadcastsi128_si256(table))
        };
        both!(looked_up, x, V(table, table))
    }

    #[inline(always)]
    fn short_mul(self, a: V, b: V) -> V {
        both!(short_mul, a, b)
    }

    #[inline(always)]
    fn to_float(self, x: V) -> V {
        both!(float, x)
    }

    #[inline(always)]
    fn widen_bytes(self, x: &[u8; LANES]) -> V {
        // SAFETY: `self` proves the instructions; eight bytes are there at each half.
        unsafe {
            let (low, high) = (x.as_ptr(), x.as_ptr().add(8));
            V(
                _mm256_castsi256_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(low.cast()))),
                _mm256_castsi256_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(high.cast()))),
            )
        }
    }

    #[inline(always)]
    fn widen_e4m3(self, x: &[u8; LANES]) -> V {
        let V(low, high) = self.widen_bytes(x);
        // SAFETY: `self` proves the instructions.
        let shifted = |bytes: __m256| unsafe {
            _mm256_castsi256_ps(_mm256_slli_epi32::<20>(_mm256_castps_si256(bytes)))
        };
        V(shifted(low), shifted(high))
    }
}

/// Converts eight pairs of bytes to pairs of bf16.
///
/// # Safety
/// The processor has AVX2; sixteen bytes are readable.
#[inline(always)]
unsafe fn code_pairs(x: *const u8) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let both = _mm256_cvtepi8_epi16(_mm_loadu_si128(x.cast()));
        let low = _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(both));
        let low = _mm256_castps_si256(_mm256_cvtepi32_ps(low));
        let high = _mm256_cvtepi32_ps(_mm256_srai_epi32::<16>(both));
        let low = _mm256_srli_epi32::<16>(low);
        _mm256_castsi256_ps(_mm256_or_si256(low, _mm256_castps_si256(high)))
    }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn short_mul(a: __m256, b: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let (a, b) = (_mm256_castps_si256(a), _mm256_castps_si256(b));
        _mm256_castsi256_ps(_mm256_mullo_epi32(a, b))
    }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn float(x: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe { _mm256_cvtepi32_ps(_mm256_castps_si256(x)) }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn power_of_two(x: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let biased = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn keep(x: __m256, lane: __m256, from: f32, to: f32) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let none = _mm256_set1_ps(f32::NEG_INFINITY);
        let started = _mm256_cmp_ps::<_CMP_GE_OQ>(lane, _mm256_set1_ps(from));
        let before = _mm256_cmp_ps::<_CMP_LT_OQ>(lane, _mm256_set1_ps(to));
        _mm256_blendv_ps(none, _mm256_blendv_ps(none, x, before), started)
    }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn round_bf16(x: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let even = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x);
        upper(_mm256_blendv_ps(
            _mm256_castsi256_ps(rounded),
            _mm256_castsi256_ps(quiet),
            nan,
        ))
    }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn upper(x: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let mask = _mm256_set1_epi32(0xffff_0000_u32 as i32);
        _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x), mask))
    }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn lower(x: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(x))) }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn halves(x: &[u16; LANES]) -> (__m256i, __m256i) {
    // SAFETY: as the caller promises; sixteen halves are two 128-bit loads.
    unsafe {
        let low: __m128i = _mm_loadu_si128(x.as_ptr().cast());
        let high: __m128i = _mm_loadu_si128(x.as_ptr().add(8).cast());
        (_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high))
    }
}

/// # Safety
/// The processor has AVX2; eight words are readable at each of `from`, and writable at
/// `to + i × stride`, `i < 8`.
#[inline(always)]
unsafe fn transpose(from: &[*const u32; 8], to: *mut u32, stride: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        let mut rows = [_mm256_set1_ps(0.0); 8];
        for i in 0..8 {
            rows[i] = _mm256_loadu_ps(from[i].cast());
        }
        // Afterwards `rows[4g + c]` holds, in 128-bit lane l, column 4l + c of rows 4g..4g + 4.
        for g in 0..2 {
            let [a, b, c, d] = [
                rows[4 * g],
                rows[4 * g + 1],
                rows[4 * g + 2],
                rows[4 * g + 3],
            ];
            let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
            let (ef, gh) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
            rows[4 * g] = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
            rows[4 * g + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
            rows[4 * g + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(ef, gh);
            rows[4 * g + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(ef, gh);
        }
        for c in 0..4 {
            let low = _mm256_permute2f128_ps::<0x20>(rows[c], rows[4 + c]);
            let high = _mm256_permute2f128_ps::<0x31>(rows[c], rows[4 + c]);
            _mm256_storeu_ps(to.add(c * stride).cast(), low);
            _mm256_storeu_ps(to.add((4 + c) * stride).cast(), high);
        }
    }
}
