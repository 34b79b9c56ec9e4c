//! AVX-512: one register of sixteen lanes, with or without the dot products of bytes and of bf16.
//!
//! Invariant: a value of these types exists only where the processor has the instructions.

use super::bytes::{IntegerSimd, LeftBytes};
use super::{LANES, Simd, TransposeTarget};
use std::arch::x86_64::{
    __m256bh, __m256i, __m512, __m512bh, __m512i, _CMP_UNORD_Q, _MM_FROUND_NO_EXC,
    _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T0, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_loadu_si128,
    _mm_movehdup_ps, _mm_movehl_ps, _mm_prefetch, _mm_storeu_si128, _mm256_add_ps,
    _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_loadu_si256, _mm256_storeu_si256,
    _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_broadcast_i32x4, _mm512_castps_si512,
    _mm512_castps512_ps256, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi8_epi16,
    _mm512_cvtepi8_epi32, _mm512_cvtepi32_epi8, _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps,
    _mm512_cvtepu8_epi32, _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh, _mm512_cvtneps_pbh,
    _mm512_cvtph_ps, _mm512_cvtps_epi32, _mm512_div_ps, _mm512_dpbf16_ps, _mm512_dpbusd_epi32,
    _mm512_extractf32x8_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_madd_epi16, _mm512_maddubs_epi16, _mm512_mask_mov_epi32, _mm512_mask_mov_ps,
    _mm512_mask_storeu_epi32, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_max_ps,
    _mm512_min_ps, _mm512_mul_ps, _mm512_mullo_epi32, _mm512_or_si512, _mm512_reduce_max_ps,
    _mm512_roundscale_ps, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_shuffle_epi8, _mm512_shuffle_epi32, _mm512_shuffle_i32x4, _mm512_slli_epi16,
    _mm512_slli_epi32, _mm512_srai_epi16, _mm512_srai_epi32, _mm512_srli_epi16, _mm512_srli_epi32,
    _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64, _mm512_xor_si512,
};

/// AVX-512 F, BW, DQ, VL, and perhaps VNNI.
#[derive(Clone, Copy)]
pub struct Avx512<const VNNI: bool>(());

/// The same with VNNI and BF16.
#[derive(Clone, Copy)]
pub struct Avx512Bf16(Avx512<true>);

impl<const VNNI: bool> Avx512<VNNI> {
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ and VL, and VNNI if `VNNI`.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Self(())
    }
}

impl Avx512Bf16 {
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ, VL, VNNI and BF16.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        // SAFETY: as the caller promises.
        Self(unsafe { Avx512::<true>::new() })
    }
}

/// Methods that are the same for both tokens.
macro_rules! lanes {
    () => {
        type V = __m512;
        const ROWS: usize = 14;
        const COLUMNS: usize = 2;

        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            // SAFETY: `self` proves the instructions.
            unsafe { _mm512_set1_ps(x) }
        }

        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> __m512 {
            // SAFETY: `self` proves the instructions; sixteen lanes are there.
            unsafe { _mm512_loadu_ps(x.as_ptr()) }
        }

        #[inline(always)]
        fn store(self, x: __m512, to: &mut [f32; LANES]) {
            // SAFETY: `self` proves the instructions; sixteen lanes fit.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
        }

        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves the instructions.
            unsafe { _mm512_add_ps(a, b) }
        }

        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves the instructions.
            unsafe { _mm512_sub_ps(a, b) }
        }

        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves the instructions.
            unsafe { _mm512_mul_ps(a, b) }
        }

        #[inline(always)]
        fn div(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves the instructions.
            unsafe { _mm512_div_ps(a, b) }
        }

        #[inline(always)]
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: `self` proves the instructions.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        fn min(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves the instructions.
            unsafe { _mm512_min_ps(a, b) }
        }

        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: `self` proves the instructions.
            unsafe { _mm512_max_ps(a, b) }
        }

        #[inline(always)]
        fn round(self, x: __m512) -> __m512 {
            // SAFETY: `self` proves the instructions.
            unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
        }

        #[inline(always)]
        fn power_of_two(self, x: __m512) -> __m512 {
            // SAFETY: `self` proves the instructions.
            unsafe {
                let biased = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(127));
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
            }
        }

        #[inline(always)]
        fn mask_outside(self, x: __m512, from: usize, to: usize) -> __m512 {
            let below = |lane: usize| ((1_u32 << lane.min(LANES)) - 1) as u16;
            let lanes = below(to) & !below(from);
            // SAFETY: `self` proves the instructions.
            unsafe { _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), lanes, x) }
        }

        #[inline(always)]
        fn largest(self, x: __m512) -> f32 {
            // SAFETY: `self` proves the instructions.
            unsafe { _mm512_reduce_max_ps(x) }
        }

        #[inline(always)]
        fn round_bf16(self, x: __m512) -> __m512 {
            // SAFETY: `self` proves the instructions.
            unsafe {
                let bits = _mm512_castps_si512(x);
                let even = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let half = _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff));
                let rounded = _mm512_add_epi32(bits, half);
                let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
                let chosen = _mm512_mask_mov_epi32(rounded, nan, quiet);
                let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                _mm512_castsi512_ps(_mm512_and_si512(chosen, upper))
            }
        }

        #[inline(always)]
        fn store_upper_halves(self, x: __m512, to: &mut [u16; LANES]) {
            // SAFETY: `self` proves the instructions; sixteen halves are one 256-bit store.
            unsafe {
                let upper = _mm512_srli_epi32::<16>(_mm512_castps_si512(x));
                _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(upper));
            }
        }

        #[inline(always)]
        fn widen_bf16(self, x: &[u16; LANES]) -> __m512 {
            // SAFETY: `self` proves the instructions; sixteen halves are one 256-bit load.
            unsafe {
                let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
            }
        }

        #[inline(always)]
        fn widen_f16(self, x: &[u16; LANES]) -> __m512 {
            // SAFETY: `self` proves the instructions; sixteen halves are one 256-bit load.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
        }

        #[inline(always)]
        fn zip_bf16(self, low: &[u16; LANES], high: &[u16; LANES]) -> __m512 {
            let high = self.widen_bf16(high);
            // SAFETY: `self` proves the instructions; sixteen halves are one 256-bit load.
            unsafe {
                let low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(low.as_ptr().cast()));
                _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(high)))
            }
        }

        #[inline(always)]
        fn widen_codes(self, x: &[u8; LANES]) -> __m512 {
            // SAFETY: `self` proves the instructions; sixteen bytes are one 128-bit load.
            unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
        }

        #[inline(always)]
        fn prefetch(self, address: *const u32) {
            // SAFETY: a prefetch never faults, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        }

        #[inline(always)]
        unsafe fn transpose(self, from: &[*const u32; LANES], to: *mut u32, stride: usize) {
            // SAFETY: `self` proves the instructions; the caller vouches for the memory.
            unsafe { transpose(from, to, stride) }
        }

        #[inline(always)]
        fn transpose_rows(self, from: &[u32], rows: [usize; 3], to: TransposeTarget<'_>) {
            // SAFETY: `self` proves the instructions.
            unsafe { turn(from, rows, to) }
        }

        #[inline(always)]
        fn load_part(self, x: &[f32]) -> __m512 {
            // SAFETY: `self` proves the instructions; no lane is read that the slice does not have.
            unsafe { _mm512_maskz_loadu_ps(first_lanes(x.len()), x.as_ptr()) }
        }

        #[inline(always)]
        fn store_part(self, x: __m512, to: &mut [f32]) {
            // SAFETY: `self` proves the instructions; no lane is written that the slice does not
            // have.
            unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr(), first_lanes(to.len()), x) }
        }

        #[inline(always)]
        fn sum(self, x: __m512) -> f32 {
            // SAFETY: `self` proves the instructions.
            unsafe {
                let halves =
                    _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
                let quarters = _mm_add_ps(
                    _mm256_castps256_ps128(halves),
                    _mm256_extractf128_ps::<1>(halves),
                );
                let pairs = _mm_add_ps(quarters, _mm_movehl_ps(quarters, quarters));
                _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)))
            }
        }
    };
}

/// Mask of the first `count` lanes, at most all.
#[inline(always)]
fn first_lanes(count: usize) -> u16 {
    ((1_u32 << count.min(LANES)) - 1) as u16
}

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    lanes!();
    const PHASES: usize = 2;

    #[inline(always)]
    fn pair_phase(self, pairs: __m512, phase: usize) -> __m512 {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let bits = _mm512_castps_si512(pairs);
            _mm512_castsi512_ps(if phase == 0 {
                _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32))
            } else {
                _mm512_slli_epi32::<16>(bits)
            })
        }
    }

    #[inline(always)]
    fn pair_dot(self, acc: __m512, a: __m512, b: __m512) -> __m512 {
        self.fma(a, b, acc)
    }

    #[inline(always)]
    fn pair_words(self, x: __m512, to: &mut [u32; LANES]) -> usize {
        // SAFETY: `self` proves the instructions; sixteen words are one store.
        unsafe {
            // Odd before even: exchange the halves of each 64-bit pair.
            let bits = _mm512_castps_si512(self.round_bf16(x));
            let swapped = _mm512_shuffle_epi32::<0b10_11_00_01>(bits);
            _mm512_storeu_si512(to.as_mut_ptr().cast(), swapped);
        }
        LANES
    }

    #[inline(always)]
    fn widen_code_pairs(self, x: &[u8; 2 * LANES]) -> __m512 {
        // SAFETY: `self` proves the instructions; 32 bytes are one 256-bit load.
        unsafe {
            let both = _mm512_cvtepi8_epi16(_mm256_loadu_si256(x.as_ptr().cast()));
            let low = _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(both));
            let low = _mm512_castps_si512(_mm512_cvtepi32_ps(low));
            let high = _mm512_cvtepi32_ps(_mm512_srai_epi32::<16>(both));
            let low = _mm512_srli_epi32::<16>(low);
            _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(high)))
        }
    }
}

impl Simd for Avx512Bf16 {
    lanes!();
    const PHASES: usize = 1;

    #[inline(always)]
    fn pair_phase(self, pairs: __m512, _phase: usize) -> __m512 {
        pairs
    }

    #[inline(always)]
    fn pair_dot(self, acc: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the instructions; both types are 512 bits of bf16 pairs.
        unsafe {
            _mm512_dpbf16_ps(
                acc,
                std::mem::transmute::<__m512, __m512bh>(a),
                std::mem::transmute::<__m512, __m512bh>(b),
            )
        }
    }

    #[inline(always)]
    fn pair_words(self, x: __m512, to: &mut [u32; LANES]) -> usize {
        // SAFETY: `self` proves the instructions; sixteen halves are eight words.
        unsafe {
            let halves = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(x));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
        }
        LANES / 2
    }

    #[inline(always)]
    fn widen_code_pairs(self, x: &[u8; 2 * LANES]) -> __m512 {
        let (halves, _) = x.as_chunks();
        let (low, high) = (self.widen_codes(&halves[0]), self.widen_codes(&halves[1]));
        // SAFETY: `self` proves the instructions; both types are 512 bits of bf16 pairs.
        unsafe { std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low)) }
    }
}

impl<const VNNI: bool> IntegerSimd for Avx512<VNNI> {
    const LEFT: LeftBytes = if VNNI {
        LeftBytes::Signed
    } else {
        LeftBytes::Widened16
    };
    const BYTE_OFFSET: u32 = if VNNI { 128 } else { 0 };

    #[inline(always)]
    fn byte_phase(self, right: __m512, phase: usize) -> __m512 {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let bytes = _mm512_castps_si512(right);
            if VNNI {
                let flipped = _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
                return _mm512_castsi512_ps(flipped);
            }
            let even = match phase {
                0 => bytes,
                _ => _mm512_slli_epi16::<8>(bytes),
            };
            _mm512_castsi512_ps(_mm512_srai_epi16::<8>(even))
        }
    }

    #[inline(always)]
    fn byte_dot(self, acc: __m512, left: __m512, right: __m512) -> __m512 {
        // SAFETY: `self` proves the instructions, VNNI if the constant says so.
        unsafe {
            let (acc, left, right) = (
                _mm512_castps_si512(acc),
                _mm512_castps_si512(left),
                _mm512_castps_si512(right),
            );
            _mm512_castsi512_ps(if VNNI {
                _mm512_dpbusd_epi32(acc, right, left)
            } else {
                _mm512_add_epi32(acc, _mm512_madd_epi16(left, right))
            })
        }
    }

    #[inline(always)]
    fn code_dot(self, acc: __m512, left: __m512, codes: __m512) -> __m512 {
        // SAFETY: `self` proves the instructions, VNNI if the constant says so.
        unsafe {
            let (acc, left, codes) = (
                _mm512_castps_si512(acc),
                _mm512_castps_si512(left),
                _mm512_castps_si512(codes),
            );
            _mm512_castsi512_ps(if VNNI {
                _mm512_dpbusd_epi32(acc, codes, left)
            } else {
                // Two products of at most 15 × 127: far below saturation.
                let pairs = _mm512_maddubs_epi16(codes, left);
                _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
            })
        }
    }

    #[inline(always)]
    fn octet_phase(self, codes: __m512, phase: usize) -> __m512 {
        if VNNI {
            return codes;
        }
        // SAFETY: `self` proves the instructions.
        unsafe {
            let codes = _mm512_castps_si512(codes);
            _mm512_castsi512_ps(match phase {
                0 => _mm512_srli_epi16::<8>(codes),
                _ => _mm512_and_si512(codes, _mm512_set1_epi16(0xff)),
            })
        }
    }

    #[inline(always)]
    fn nibbles(self, x: __m512) -> [__m512; 2] {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let (bytes, mask) = (_mm512_castps_si512(x), _mm512_set1_epi8(15));
            let upper = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask);
            let lower = _mm512_and_si512(bytes, mask);
            [_mm512_castsi512_ps(lower), _mm512_castsi512_ps(upper)]
        }
    }

    #[inline(always)]
    fn lookup(self, x: __m512, table: &[u8; 16]) -> __m512 {
        // SAFETY: `self` proves the instructions; the table has sixteen bytes.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_shuffle_epi8(table, _mm512_castps_si512(x)))
        }
    }

    #[inline(always)]
    fn short_mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let (a, b) = (_mm512_castps_si512(a), _mm512_castps_si512(b));
            _mm512_castsi512_ps(_mm512_mullo_epi32(a, b))
        }
    }

    #[inline(always)]
    fn to_float(self, x: __m512) -> __m512 {
        // SAFETY: `self` proves the instructions.
        unsafe { _mm512_cvtepi32_ps(_mm512_castps_si512(x)) }
    }

    #[inline(always)]
    fn widen_bytes(self, x: &[u8; LANES]) -> __m512 {
        // SAFETY: `self` proves the instructions; sixteen bytes are one 128-bit load.
        unsafe { _mm512_castsi512_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn widen_e4m3(self, x: &[u8; LANES]) -> __m512 {
        // SAFETY: `self` proves the instructions.
        unsafe {
            let bytes = _mm512_castps_si512(self.widen_bytes(x));
            _mm512_castsi512_ps(_mm512_slli_epi32::<20>(bytes))
        }
    }

    #[inline(always)]
    fn low_bytes(self, x: __m512) -> [u8; LANES] {
        let mut bytes = [0; LANES];
        // SAFETY: `self` proves the instructions; sixteen bytes are one 128-bit store.
        unsafe {
            let low = _mm512_cvtepi32_epi8(_mm512_castps_si512(x));
            _mm_storeu_si128(bytes.as_mut_ptr().cast(), low);
        }
        bytes
    }
}

/// See [`Simd::turn`].
///
/// # Safety
/// The processor has AVX-512 F.
#[inline(always)]
unsafe fn turn(from: &[u32], [rows, words, stride]: [usize; 3], to: TransposeTarget<'_>) {
    let (to, to_stride) = (to.words, to.stride);
    assert!((1..=LANES).contains(&rows) && rows <= to_stride && words <= stride);
    assert!(rows * stride <= from.len() && words * to_stride <= to.len() + to_stride - rows);
    let mut square = [0; LANES * LANES];
    let whole = words / LANES * LANES;
    let mask = first_lanes(rows);
    for first in (0..whole).step_by(LANES) {
        // Missing rows repeat the first one.
        let mut sources = [from.as_ptr().wrapping_add(first); LANES];
        for row in 1..rows {
            sources[row] = sources[0].wrapping_add(row * stride);
        }
        // SAFETY: each row has sixteen words from `first` on, and the square has room for all.
        unsafe { transpose(&sources, square.as_mut_ptr(), LANES) };
        for word in 0..LANES {
            // SAFETY: the mask writes one word per row, for which `to` has room.
            unsafe {
                let column = _mm512_loadu_si512(square.as_ptr().add(word * LANES).cast());
                let to = to.as_mut_ptr().add((first + word) * to_stride);
                _mm512_mask_storeu_epi32(to.cast(), mask, column);
            }
        }
    }
    for word in whole..words {
        for row in 0..rows {
            to[word * to_stride + row] = from[row * stride + word];
        }
    }
}

/// # Safety
/// The processor has AVX-512 F; sixteen words are readable at each of `from`, and writable at
/// `to + i × stride`, `i < 16`.
#[inline(always)]
unsafe fn transpose(from: &[*const u32; LANES], to: *mut u32, stride: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        let mut rows = [_mm512_set1_epi32(0); LANES];
        for i in 0..LANES {
            rows[i] = _mm512_loadu_si512(from[i].cast());
        }
        // Within 128-bit lanes: pairs of rows, then pairs of pairs. Afterwards `rows[4g + c]`
        // holds, in its 128-bit lane l, column 4l + c of rows 4g..4g + 4.
        for g in 0..4 {
            let [a, b, c, d] = [
                rows[4 * g],
                rows[4 * g + 1],
                rows[4 * g + 2],
                rows[4 * g + 3],
            ];
            let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
            let (ef, gh) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
            rows[4 * g] = _mm512_unpacklo_epi64(ab, cd);
            rows[4 * g + 1] = _mm512_unpackhi_epi64(ab, cd);
            rows[4 * g + 2] = _mm512_unpacklo_epi64(ef, gh);
            rows[4 * g + 3] = _mm512_unpackhi_epi64(ef, gh);
        }
        // Across 128-bit lanes.
        for c in 0..4 {
            let [a, b, d, e] = [rows[c], rows[4 + c], rows[8 + c], rows[12 + c]];
            let (low, high) = (
                _mm512_shuffle_i32x4::<0b01_00_01_00>(a, b),
                _mm512_shuffle_i32x4::<0b01_00_01_00>(d, e),
            );
            let (low2, high2) = (
                _mm512_shuffle_i32x4::<0b11_10_11_10>(a, b),
                _mm512_shuffle_i32x4::<0b11_10_11_10>(d, e),
            );
            store(
                to,
                c * stride,
                _mm512_shuffle_i32x4::<0b10_00_10_00>(low, high),
            );
            store(
                to,
                (4 + c) * stride,
                _mm512_shuffle_i32x4::<0b11_01_11_01>(low, high),
            );
            store(
                to,
                (8 + c) * stride,
                _mm512_shuffle_i32x4::<0b10_00_10_00>(low2, high2),
            );
            store(
                to,
                (12 + c) * stride,
                _mm512_shuffle_i32x4::<0b11_01_11_01>(low2, high2),
            );
        }
    }
}

/// # Safety
/// The processor has AVX-512 F; sixteen words are writable at `to + offset`.
#[inline(always)]
unsafe fn store(to: *mut u32, offset: usize, x: __m512i) {
    // SAFETY: as the caller promises.
    unsafe { _mm512_storeu_si512(to.add(offset).cast(), x) }
}
