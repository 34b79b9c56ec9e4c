//! Bytes and their products in registers of AVX2.
//!
//! Owns: the forms in which a product takes bytes. Never: packs, or rounds.

use std::arch::x86_64::{
    __m256, _mm256_add_epi32, _mm256_and_si256, _mm256_castps_si256, _mm256_castsi256_ps,
    _mm256_dpbusd_avx_epi32, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_set1_epi8,
    _mm256_set1_epi16, _mm256_slli_epi16, _mm256_srai_epi16, _mm256_srli_epi16, _mm256_xor_si256,
};

/// Adds 128 to signed bytes.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn flip_signs(x: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let flipped = _mm256_xor_si256(_mm256_castps_si256(x), _mm256_set1_epi8(-128));
        _mm256_castsi256_ps(flipped)
    }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn odd_bytes(x: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe { _mm256_castsi256_ps(_mm256_srai_epi16::<8>(_mm256_castps_si256(x))) }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn even_bytes(x: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let raised = _mm256_slli_epi16::<8>(_mm256_castps_si256(x));
        _mm256_castsi256_ps(_mm256_srai_epi16::<8>(raised))
    }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn odd_codes(x: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe { _mm256_castsi256_ps(_mm256_srli_epi16::<8>(_mm256_castps_si256(x))) }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn even_codes(x: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let codes = _mm256_castps_si256(x);
        _mm256_castsi256_ps(_mm256_and_si256(codes, _mm256_set1_epi16(0xff)))
    }
}

/// # Safety
/// The processor has AVX-VNNI.
#[inline(always)]
pub(super) unsafe fn dot_vnni(acc: __m256, unsigned: __m256, signed: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let (acc, unsigned, signed) = (
            _mm256_castps_si256(acc),
            _mm256_castps_si256(unsigned),
            _mm256_castps_si256(signed),
        );
        _mm256_castsi256_ps(_mm256_dpbusd_avx_epi32(acc, unsigned, signed))
    }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn dot_halves(acc: __m256, left: __m256, right: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let products = _mm256_madd_epi16(_mm256_castps_si256(left), _mm256_castps_si256(right));
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(acc), products))
    }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn dot_codes(acc: __m256, codes: __m256, left: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let (acc, codes, left) = (
            _mm256_castps_si256(acc),
            _mm256_castps_si256(codes),
            _mm256_castps_si256(left),
        );
        // Two products of at most 15 × 127: far below saturation.
        let pairs = _mm256_maddubs_epi16(codes, left);
        let sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        _mm256_castsi256_ps(_mm256_add_epi32(acc, sums))
    }
}
