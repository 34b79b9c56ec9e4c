// The formats of weights, each turned into the left side of an mma.
//
// Owns: the layout of a tile of weights in shared memory, and the conversions to bf16, which are
// all exact: scales multiply sums, not weights.
// Never: waits, or reads global memory.
// Invariant: `load` gives column `lane / 4` (words 0 and 2 of a step) and `lane / 4 + 8` (words 1 and 3) of a column
// tile, elements `lane % 4 × 2` and the next of the step's 16 (words 0 and 1), and the same eight on (2 and 3).
#pragma once
#include "matmul.cuh"

namespace matmul {

enum class Scaling { None, Columns, Groups };

// The place of a chunk of 16 bytes in a tile whose rows have CHUNKS of them, a power of two.
template <u32 CHUNKS> DEVICE u32 tile_offset(u32 row, u32 chunk) {
    constexpr u32 ROWS_PER_LINE = CHUNKS < 8 ? 8 / CHUNKS : 1;
    constexpr u32 MASK = CHUNKS < 8 ? CHUNKS - 1 : 7;
    return (row * CHUNKS + (chunk ^ (row / ROWS_PER_LINE & MASK))) * 16;
}

// The scale of this lane's two columns for a format's narrowest group of elements, with a zero point in the lowest byte
// if the format has them.
struct GroupScales {
    u32 word[2];

    template <bool HAS_ZEROS> DEVICE float scale(u32 which) const { return bits_to_f32(HAS_ZEROS ? word[which] & ~0xffu : word[which]); }
    // -(128 + zero point), twice.
    DEVICE u32 zeros(u32 which) const { return (word[which] & 0xff) * 0x10001u | 0xc300c300u; }
};

// As checkpoints store them.
struct Bf16Weights {
    static constexpr Scaling SCALING = Scaling::None;
    // Elements of a chunk of 16 bytes.
    static constexpr u32 PER_CHUNK = 8;
    // Steps of 16 that are loaded together, an even number.
    static constexpr u32 STEPS = 2;
    // The narrowest group of elements with a scale of its own, 16 or 32, and whether scales have zero points.
    static constexpr u32 GROUP_LEAST = 32;
    static constexpr bool HAS_ZEROS = false;

    // `column` is the column tile's first, `part` counts STEPS steps.
    template <u32 CHUNKS> static DEVICE void load(u32 (&words)[STEPS][4], const u8* tile, u32 column, u32 part, const GroupScales*) {
        const u32 lane = lane_index();
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
            ldmatrix_x4(words[step], tile + tile_offset<CHUNKS>(column + lane % 16, (part * STEPS + step) * 2 + lane / 16));
        }
    }
};

// Two words of bf16 from four bytes of two's complement: 128 + the lower seven bits, minus 128 or 256.
DEVICE void int8_to_bf16(u32 (&words)[2], u32 four) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 order = i == 0 ? 0x5140 : 0x7362;
        const u32 low = permute_bytes(four & 0x7f7f7f7fu, 0x43434343u, order);
        const u32 sign = permute_bytes(four & 0x80808080u, 0x43434343u, order);
        words[i] = fma_bf16x2(sign, 0xbf80bf80u, low);
    }
}

// A byte each.
template <Scaling SCALING_, void (*CONVERT)(u32 (&)[2], u32)> struct ByteWeights {
    static constexpr Scaling SCALING = SCALING_;
    static constexpr u32 PER_CHUNK = 16;
    static constexpr u32 STEPS = 2;
    static constexpr u32 GROUP_LEAST = 32;
    static constexpr bool HAS_ZEROS = false;

    template <u32 CHUNKS> static DEVICE void load(u32 (&words)[STEPS][4], const u8* tile, u32 column, u32 part, const GroupScales*) {
        const u32 lane = lane_index();
        u32 r[4];
        ldmatrix_x4(r, tile + tile_offset<CHUNKS>(column + lane % 16, part * STEPS + lane / 16));
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 halves[2];
            CONVERT(halves, r[i]);
            words[i / 2][i % 2] = halves[0];
            words[i / 2][i % 2 + 2] = halves[1];
        }
    }
};

using Fp8Weights = ByteWeights<Scaling::Columns, fp8_to_bf16>;
using Fp8GroupWeights = ByteWeights<Scaling::Groups, fp8_to_bf16>;
using Int8Weights = ByteWeights<Scaling::Columns, int8_to_bf16>;

// Numbers of four bits, with scales for groups. CONVERT makes two of them bf16 of a word's bits 0 to 3 and 16 to 19.
template <u32 GROUP_LEAST_, bool HAS_ZEROS_, u32 (*CONVERT)(u32, u32)> struct NibbleWeights {
    static constexpr Scaling SCALING = Scaling::Groups;
    static constexpr u32 PER_CHUNK = 32;
    static constexpr u32 STEPS = 4;
    static constexpr u32 GROUP_LEAST = GROUP_LEAST_;
    static constexpr bool HAS_ZEROS = HAS_ZEROS_;

    // `scales` are those of the part's narrowest groups.
    template <u32 CHUNKS> static DEVICE void load(u32 (&words)[STEPS][4], const u8* tile, u32 column, u32 part, const GroupScales* scales) {
        const u32 lane = lane_index();
        u32 r[4];
        ldmatrix_x4(r, tile + tile_offset<CHUNKS>(column + lane % 16, part * 2 + lane / 16));
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            const u32 from = i / 4, which = from % 2, half = i % 4 % 2;
            const u32 zeros = HAS_ZEROS ? scales[from / 2 * 32 / GROUP_LEAST].zeros(which) : 0;
            words[from / 2 * 2 + i % 4 / 2][which + half * 2] = CONVERT(r[from] >> (i % 4 * 4), zeros);
        }
    }
};

// Whole numbers without sign, less `zeros`: 128 + the number is a bf16.
DEVICE u32 int4_to_bf16(u32 two, u32 zeros) { return fma_bf16x2((two & 0x000f000fu) | 0x43004300u, 0x3f803f80u, zeros); }

// e2m1: sign, exponent and fraction go to their places in bf16; the factor 2^126 corrects the exponent's bias.
DEVICE u32 fp4_to_bf16(u32 two, u32) {
    return fma_bf16x2((two & 0x00080008u) << 12 | (two & 0x00070007u) << 6, 0x7e807e80u, 0x80008000u);
}

using Int4Weights = NibbleWeights<32, true, int4_to_bf16>;
using Fp4Weights = NibbleWeights<32, false, fp4_to_bf16>;
using Nvfp4Weights = NibbleWeights<16, false, fp4_to_bf16>;

}  // namespace matmul
