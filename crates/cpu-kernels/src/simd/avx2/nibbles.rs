//! Four-bit codes in registers of AVX2.
//!
//! Owns: their separation, and the table of their numbers. Never: multiplies.

use std::arch::x86_64::{
    __m256, _mm256_and_si256, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_set1_epi8,
    _mm256_shuffle_epi8, _mm256_srli_epi16,
};

/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn lower_nibbles(x: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let bytes = _mm256_castps_si256(x);
        _mm256_castsi256_ps(_mm256_and_si256(bytes, _mm256_set1_epi8(15)))
    }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn upper_nibbles(x: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let bytes = _mm256_srli_epi16::<4>(_mm256_castps_si256(x));
        _mm256_castsi256_ps(_mm256_and_si256(bytes, _mm256_set1_epi8(15)))
    }
}

/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn looked_up(x: __m256, table: __m256) -> __m256 {
    // SAFETY: as the caller promises.
    unsafe {
        let (x, table) = (_mm256_castps_si256(x), _mm256_castps_si256(table));
        _mm256_castsi256_ps(_mm256_shuffle_epi8(table, x))
    }
}
