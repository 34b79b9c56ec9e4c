// Narrow number formats in plain C++, with the device's conversions bit for bit.
//
// Owns: bf16, e4m3 and half against float, and the pattern of unwritten memory.
// Never: allocates, or depends on anything but the compiler.
// Invariant: rounding is to the nearest, ties to even; a NaN stays one (bf16 has the device's,
// 0x7fff).
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace numbers {

// NaN in bf16 and f32, and far beyond any length as an index. Not 0xff: padding rows are all ones.
constexpr uint32_t POISON = 0x7fc17fc1u;

inline uint32_t bits(float x) {
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    return word;
}

inline float from_bits(uint32_t word) {
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

inline float from_bf16(uint16_t x) { return from_bits(uint32_t(x) << 16); }

inline uint16_t to_bf16(float x) {
    uint32_t word = bits(x);
    if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return uint16_t((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

// To the nearest bf16 in one rounding: the intermediate float is rounded to odd, so that a value
// near a tie is not taken for the tie.
inline uint16_t to_bf16_once(double x) {
    auto near = float(x);
    if (double(near) != x && near == near && (bits(near) & 1u) == 0) {
        bool is_outward = (double(near) < x) == (x > 0);
        near = from_bits(is_outward ? bits(near) + 1 : bits(near) - 1);
    }
    return to_bf16(near);
}

// a · b + c in bf16, rounded once. The product is exact in double; the last bit of the sum records
// what double cuts off.
inline uint16_t fma_bf16(uint16_t a, uint16_t b, uint16_t c) {
    double product = double(from_bf16(a)) * double(from_bf16(b)), added = double(from_bf16(c));
    double sum = product + added, of_added = sum - product;
    double cut_off = (product - (sum - of_added)) + (added - of_added);
    uint64_t word;
    memcpy(&word, &sum, sizeof word);
    if (cut_off != 0.0 && cut_off == cut_off && (word & 1u) == 0) {
        word += (cut_off > 0) == (sum > 0) ? 1 : uint64_t(-1);
        memcpy(&sum, &word, sizeof sum);
    }
    return to_bf16_once(sum);
}

// e4m3 without infinities: S.1111.111 is the NaN, the largest number is 448.
inline float from_e4m3(uint8_t x) {
    uint32_t sign = uint32_t(x & 0x80) << 24, exponent = (x >> 3) & 15, fraction = x & 7;
    if ((x & 0x7f) == 0x7f) return from_bits(0x7fc00000u);
    if (exponent == 0) {
        float tiny = float(fraction) * 0x1p-9f;
        return sign ? -tiny : tiny;
    }
    return from_bits(sign | (exponent + 120) << 23 | fraction << 20);
}

inline float from_half(uint16_t x) {
    uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = (x >> 10) & 31, fraction = x & 1023;
    if (exponent == 31) return from_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {
        float tiny = float(fraction) * 0x1p-24f;
        return sign ? -tiny : tiny;
    }
    return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t to_half(float x) {
    uint32_t word = bits(x), sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    // From 65520 on everything rounds to infinity.
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    // Below the least normal half, adding 0.5 aligns the fraction and rounds it.
    if (magnitude < 0x38800000u) return uint16_t(sign | (bits(from_bits(magnitude) + 0.5f) - bits(0.5f)));
    return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

inline void poison(void* at, size_t bytes) {
    auto* byte = static_cast<uint8_t*>(at);
    size_t words = bytes / 4;
    for (size_t word = 0; word < words; word++) memcpy(byte + word * 4, &POISON, 4);
    memcpy(byte + words * 4, &POISON, bytes % 4);
}

}  // namespace numbers
