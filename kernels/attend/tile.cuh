// One warp's part of one tile of keys: scores, weights, weighted values.
//
// Owns: the arithmetic, on the fragments of mma.m16n8k16: this lane has the elements of rows `lane / 4` and
// `lane / 4 + 8`, and of columns that `lane % 4` gives. Stored in bf16, columns are the dims in order. Stored in fp8,
// ldmatrix brings a lane four dims side by side where in bf16 it brings two and two that are eight apart; the dims
// of a pair then go to the columns in that order, for queries and values alike.
// Never: reads global memory, or waits for other warps.
// Invariant: an element is computed from its row's queries and its keys by one fixed chain of operations, each
// rounded as written, whichever warp computes it and whatever else the warp computes.
#pragma once
#include "cap.cuh"
#include "shape.cuh"

namespace attend {

// This lane's scores of a warp's part of a key tile: [quarter][eight keys][row's two keys, other row's two].
template <class S> struct Scores {
    float of[S::QUARTERS][2][4];
};

// A warp's queries, as the left side of scores.
template <class S> struct Queries {
    u32 of[S::PAIRS][4];
};

// Weights of a whole key tile, as the left side of values: a fragment for each quarter, in registers where one warp
// has them all, or in shared memory where several made them.
struct OwnWeights {
    const u32 (&of)[4][4];

    DEVICE void load(u32 (&fragment)[4], u32 quarter) const {
#pragma unroll
        for (u32 word = 0; word < 4; word++) fragment[word] = of[quarter][word];
    }
};
struct SharedWeights {
    // This lane's of the first quarter; a warp's lanes lie side by side.
    Words4* first;

    DEVICE void load(u32 (&fragment)[4], u32 quarter) const {
        const Words4 words = load_words(first + quarter * 32);
#pragma unroll
        for (u32 word = 0; word < 4; word++) fragment[word] = words.word[word];
    }
    DEVICE void store(const u32 (&fragment)[4], u32 quarter) const {
        store_words(first + quarter * 32, Words4{{fragment[0], fragment[1], fragment[2], fragment[3]}});
    }
};

// The softmax of a span so far, for this lane's two rows.
template <class S> struct SpanState {
    // [pair][eight dims][as Scores].
    float values[S::OWN_PAIRS][2][4];
    float top[2];
    // This lane's share, [quarter][row].
    float sum[S::QUARTERS][2];

    DEVICE void clear() {
#pragma unroll
        for (u32 pair = 0; pair < S::OWN_PAIRS; pair++) {
#pragma unroll
            for (u32 i = 0; i < 8; i++) values[pair][i / 4][i % 4] = 0;
        }
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            top[row] = NOTHING;
#pragma unroll
            for (u32 quarter = 0; quarter < S::QUARTERS; quarter++) sum[quarter][row] = 0;
        }
    }
};

// This lane has two times two dims of a pair; this is the first of the `half`th two.
template <class S> DEVICE u32 dim_of(u32 half) {
    const u32 quad_lane = lane_index() % 4;
    return S::IS_FP8 ? quad_lane * 4 + half * 2 : half * 8 + quad_lane * 2;
}

// Two neighbouring floats.
struct alignas(8) FloatPair {
    float low;
    float high;
};

// A row's values of a pair at `dim_of<S>(half)` and the next; `which` of the lane's two rows.
template <class S> DEVICE FloatPair values_of(const float (&pair)[2][4], u32 which, u32 half) {
    if constexpr (S::IS_FP8) {
        return {pair[0][which * 2 + half], pair[1][which * 2 + half]};
    } else {
        return {pair[half][which * 2], pair[half][which * 2 + 1]};
    }
}

// The keys that this lane's two rows see: `first ..= last`.
struct Sight {
    u32 first[2];
    u32 last[2];
};

// Adds two pairs of dims to the scores of one quarter, keys stored in fp8; `pair` is the first.
template <class S> DEVICE void score_fp8(float (&scores)[2][4], const Queries<S>& queries, const u8* keys, u32 key, u32 pair) {
    const u32 lane = lane_index();
    // An odd pair at the end is read twice and used once.
    const u32 chunk = min(pair + lane / 16, S::PAIRS - 1);
    u32 r[4];
    ldmatrix_x4(r, keys + slab_offset<S>(key + lane % 16, chunk));
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if (pair + i / 2 >= S::PAIRS) break;
        u32 fragment[2];
        fp8_to_bf16(fragment, r[i]);
        mma_bf16(scores[i % 2], queries.of[pair + i / 2], fragment);
    }
}

// Scores of the warp's quarters, from `quarter` on. Each is one chain over the dims in order.
template <class S> DEVICE void score(Scores<S>& scores, const Queries<S>& queries, const u8* keys, u32 quarter) {
    const u32 lane = lane_index();
    const u32 key = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
#pragma unroll
    for (u32 i = 0; i < S::QUARTERS * 8; i++) scores.of[i / 8][i / 4 % 2][i % 4] = 0;
#pragma unroll
    for (u32 pair = 0; pair < S::PAIRS; pair += S::IS_FP8 ? 2 : 1) {
#pragma unroll
        for (u32 own = 0; own < S::QUARTERS; own++) {
            const u32 first = (quarter + own) * 16;
            if constexpr (S::IS_FP8) {
                score_fp8<S>(scores.of[own], queries, keys, first, pair);
            } else {
                u32 r[4];
                ldmatrix_x4(r, keys + slab_offset<S>(first + key, pair * 2 + half));
                mma_bf16(scores.of[own][0], queries.of[pair], {r[0], r[1]});
                mma_bf16(scores.of[own][1], queries.of[pair], {r[2], r[3]});
            }
        }
    }
}

// Caps the warp's scores.
template <class S> DEVICE void cap(Scores<S>& scores, float limit, float exponent) {
#pragma unroll
    for (u32 i = 0; i < S::QUARTERS * 8; i++) {
        float& x = scores.of[i / 8][i / 4 % 2][i % 4];
        x = capped(x, limit, exponent);
    }
}

// Hides the keys that a row may not see; `key` is the warp's first.
template <class S> DEVICE void hide(Scores<S>& scores, const Sight& sight, u32 key) {
    const u32 mine = key + lane_index() % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < S::QUARTERS * 8; i++) {
        const u32 at = mine + i / 8 * 16 + i / 4 % 2 * 8 + i % 2, row = i / 2 % 2;
        if (at < sight.first[row] || at > sight.last[row]) scores.of[i / 8][i / 4 % 2][i % 4] = NEGATIVE_INFINITY;
    }
}

// The largest of the warp's scores in each of the two rows, known to all lanes of the row.
template <class S> DEVICE void find_largest(float (&largest)[2], const Scores<S>& scores) {
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
        float x = NEGATIVE_INFINITY;
#pragma unroll
        for (u32 i = 0; i < S::QUARTERS * 4; i++) x = max(x, scores.of[i / 4][i / 2 % 2][row * 2 + i % 2]);
        x = max(x, shuffle_xor(x, 1));
        largest[row] = max(x, shuffle_xor(x, 2));
    }
}

// Raises the state to the tile's largest scores: from then on it is in their scale.
template <class S> DEVICE void raise(SpanState<S>& state, const float (&largest)[2], float scale) {
    float kept[2];
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
        const float top = max(state.top[row], mul_rn(largest[row], scale));
        kept[row] = exp2_fast(add_rn(state.top[row], -top));
        state.top[row] = top;
    }
    // Once the largest score has been seen, nothing changes: a factor of 1 is left out.
    if (ballot(kept[0] != 1.0f || kept[1] != 1.0f) == 0) return;
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
#pragma unroll
        for (u32 quarter = 0; quarter < S::QUARTERS; quarter++) {
            state.sum[quarter][row] = mul_rn(state.sum[quarter][row], kept[row]);
        }
#pragma unroll
        for (u32 i = 0; i < S::OWN_PAIRS * 4; i++) {
            float& value = state.values[i / 4][i / 2 % 2][row * 2 + i % 2];
            value = mul_rn(value, kept[row]);
        }
    }
}

// Turns scores into weights, adds them to the sums as they are, and rounds them for the values: a fragment for
// each of the warp's quarters.
template <class S> DEVICE void weigh(u32 (&weights)[S::QUARTERS][4], Scores<S>& scores, SpanState<S>& state, float scale) {
#pragma unroll
    for (u32 quarter = 0; quarter < S::QUARTERS; quarter++) {
        float(&of)[2][4] = scores.of[quarter];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            float& x = of[i / 4][i % 4];
            x = exp2_fast(fma_rn(x, scale, -state.top[i / 2 % 2]));
        }
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            const float low = add_rn(of[0][row * 2], of[0][row * 2 + 1]);
            const float high = add_rn(of[1][row * 2], of[1][row * 2 + 1]);
            state.sum[quarter][row] = add_rn(state.sum[quarter][row], add_rn(low, high));
        }
        weights[quarter][0] = pack_bf16(of[0][0], of[0][1]);
        weights[quarter][1] = pack_bf16(of[0][2], of[0][3]);
        weights[quarter][2] = pack_bf16(of[1][0], of[1][1]);
        weights[quarter][3] = pack_bf16(of[1][2], of[1][3]);
    }
}

// Adds two quarters of keys, from `quarter` on, to one pair of dims, values stored in fp8.
template <class S> DEVICE void add_fp8(float (&values)[2][4], const u32 (&weights)[2][4], const u8* slab, u32 quarter, u32 pair) {
    u32 r[4];
    ldmatrix_x4_transposed(r, slab + slab_offset<S>(quarter * 16 + lane_index(), pair));
    // Of eight keys each: two dims of one key, then the same of the next. Sorted by dim: a word for each half.
    u32 fragments[4][2];
#pragma unroll
    for (u32 i = 0; i < 4; i++) fp8_to_bf16(fragments[i], permute_bytes(r[i], 0, 0x3120));
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32(&low)[2] = fragments[i / 2 * 2], (&high)[2] = fragments[i / 2 * 2 + 1];
        mma_bf16(values[i % 2], weights[i / 2], {low[i % 2], high[i % 2]});
    }
}

// Adds the tile's weighted values to the warp's pairs, from `pair` on. Each is one chain over the keys in order.
template <class S, class Weights> DEVICE void add_values(SpanState<S>& state, const Weights& weights, const u8* values, u32 pair) {
    constexpr u32 QUARTERS = S::IS_FP8 ? 2 : 1;
    const u32 lane = lane_index();
#pragma unroll
    for (u32 quarter = 0; quarter < 4; quarter += QUARTERS) {
        u32 fragments[QUARTERS][4];
#pragma unroll
        for (u32 i = 0; i < QUARTERS; i++) weights.load(fragments[i], quarter + i);
#pragma unroll
        for (u32 own = 0; own < S::OWN_PAIRS; own++) {
            if (S::PAIRS % S::SPLIT != 0 && pair + own >= S::PAIRS) break;
            if constexpr (S::IS_FP8) {
                add_fp8<S>(state.values[own], fragments, values, quarter, pair + own);
            } else {
                u32 r[4];
                ldmatrix_x4_transposed(r, values + slab_offset<S>(quarter * 16 + lane % 16, (pair + own) * 2 + lane / 16));
                mma_bf16(state.values[own][0], fragments[0], {r[0], r[1]});
                mma_bf16(state.values[own][1], fragments[0], {r[2], r[3]});
            }
        }
    }
}

}  // namespace attend
