// Access to activations, keys and values in memory: one element at a time, or eight neighbours with
// one or two wide accesses.
#pragma once
#include "prims.cuh"

DEVICE void store(float* at, float x) { *at = x; }
DEVICE void store(bf16* at, float x) { *at = to_bf16(x); }

// Rounds halves to even; numbers beyond 448 become 448. Whole numbers and one sum do it: sm_80 has no such conversion.
DEVICE fp8 to_fp8(float x) {
    const u32 bits = f32_to_bits(x), size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80;
    if (size > 0x7f800000u) return fp8{u8(sign | 0x7f)};
    // 448, and the least number with a full fraction, 2^-6. At 2^14 the last bit of a float is 2^-9, the smallest step.
    const u32 most = 0x43e00000u, least_normal = 0x3c800000u, steps = 0x46800000u;
    const u32 kept = min(size, most);
    if (kept < least_normal) return fp8{u8(sign | (f32_to_bits(add_rn(bits_to_f32(kept), bits_to_f32(steps))) - steps))};
    return fp8{u8(sign | (((kept + 0x7ffff + (kept >> 20 & 1)) >> 20) - (120 << 3)))};
}
DEVICE void store(fp8* at, float x) { *at = to_fp8(x); }

// N neighbours. Eight need `at` aligned to 16 bytes, which rows have whose width is a multiple of eight.
template <u32 N, class T> DEVICE void load_all(const T* at, float (&x)[N]) {
    for (u32 i = 0; i < N; i++) x[i] = to_f32(at[i]);
}
template <> DEVICE void load_all<8, bf16>(const bf16* at, float (&x)[8]) {
    Words4 words = load_words(at);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        x[2 * i] = low_bf16(words.word[i]);
        x[2 * i + 1] = high_bf16(words.word[i]);
    }
}
template <> DEVICE void load_all<8, float>(const float* at, float (&x)[8]) {
    Words4 words[2] = {load_words(at), load_words(at + 4)};
#pragma unroll
    for (u32 i = 0; i < 8; i++) x[i] = bits_to_f32(words[i / 4].word[i % 4]);
}

template <u32 N, class T> DEVICE void store_all(T* at, const float (&x)[N]) {
    for (u32 i = 0; i < N; i++) store(at + i, x[i]);
}
template <> DEVICE void store_all<8, bf16>(bf16* at, const float (&x)[8]) {
    Words4 words;
#pragma unroll
    for (u32 i = 0; i < 4; i++) words.word[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    store_words(at, words);
}
template <> DEVICE void store_all<8, float>(float* at, const float (&x)[8]) {
    Words4 words[2];
#pragma unroll
    for (u32 i = 0; i < 8; i++) words[i / 4].word[i % 4] = f32_to_bits(x[i]);
    store_words(at, words[0]);
    store_words(at + 4, words[1]);
}
