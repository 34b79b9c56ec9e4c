// Attention over paged keys and values: the contract between the host and the kernels.
//
// Owns: the arguments, the work items, and the sizes by which keys are cut.
// Never: computes.
// Invariant: how keys are cut depends on their absolute positions only. Keys go in tiles of
// TILE_KEYS positions, tiles in spans of SPAN_KEYS; every span starts from an empty state, and a
// row's spans are merged one after the other from its first. So a row gives the same bits from
// every tensor-core kernel here, whatever rows, items and blocks are computed beside it: keys that
// a row may not see do not change its state, since its largest score stays, the scale is exactly 1
// and the weight exactly 0.
//
// The host's part for the tensor-core kernels (`attend_decode_*`, `attend_prefill_*`), once per
// step:
// - `segments`: one AttendSegment for each run of rows, in row order.
// - A segment's queries of one KV head are packed: packed row `i` is query head `kv_head * group + i % group` of
//   row `row + i / group`, where `group = query_heads / kv_heads`; it has `rows * group` of them. They are cut
//   into tiles of DECODE_ROWS (a segment with at most DECODE_ROWS packed rows) or PREFILL_ROWS (any other).
//   Tiles of the two kinds go to the two kernels, each with its own list of items.
// - A tile sees the spans from `first_seen(position of its first row) / SPAN_KEYS` up to and with
//   `(position of its last row) / SPAN_KEYS`, where `first_seen(p)` is `p + 1 - window`, or 0 if
//   that is negative. Let `spans` be their number.
// - A tile is one item of all its spans (`parts` = 1) if it has no more of them than one block's share: all spans of
//   all tiles × kv_heads, over the blocks that fit the device. Otherwise it is cut into items of a share at most, in
//   order (`parts` of them): their states go to the workspace and the block that arrives last merges them.
// - Items with most keys first, so that the last to start are the short ones. `items_count` counts items, not
//   items × kv_heads: every item is done for each KV head.
// - Workspace, only for items with `parts` > 1: `states` is where the tile's states begin, in row states; the
//   tile takes `kv_heads × spans × min(tile rows, packed rows left)` of them, of `head_dim + STATE_HEADER` floats each;
//   `arrival` is the tile's first counter, and it takes `kv_heads` of them. Counters are zero before and after.
// - The grid is any number of blocks; each walks the items with the grid's stride. As many as fit the device at
//   once is best, whatever the batch, so that a graph needs no other.
#pragma once
#include "prims.cuh"

// Consecutive rows of one sequence.
struct AttendSegment {
    // Its first row in the batch, and the number of its rows.
    u32 row;
    u32 rows;
    // The position of its first row; the pool has keys and values of all positions up to its last
    // row's.
    u32 position;
    // The start of its block table in `tables`.
    u32 table;
};

// One tile of packed rows with some of the spans it sees, for every KV head.
struct AttendItem {
    u32 segment;
    // First packed row of the tile.
    u32 row;
    // Spans of this item, by absolute number: `span_first .. span_end`.
    u32 span_first;
    u32 span_end;
    // Items that this tile is cut into.
    u32 parts;
    // Offsets into the workspace, see above; not read if `parts` is 1.
    u32 states;
    u32 arrival;
    u32 unused;
};

// Arguments of the tensor-core kernels. Pool: `[block][layer][K|V][kv_head][token][dim]`.
struct AttendArgs {
    // (rows, q | k | v) bf16, queries rotated.
    const bf16* qkv;
    // (rows, query_heads × head_dim).
    bf16* out;
    const u8* pool;
    // Every segment's block table.
    const u32* tables;
    const AttendSegment* segments;
    const AttendItem* items;
    const u32* items_count;
    float* states;
    u32* arrivals;
    // One more score of each query head, (query_heads), which no value has; or null.
    const float* sinks;
    // From a block to the next (less than 4 GiB), and from a block's start to the layer's first head of K and of V;
    // in bytes.
    u64 block_bytes;
    u64 key_bytes;
    u64 value_bytes;
    u32 query_heads;
    u32 kv_heads;
    // log2 of the tokens per block; 3 at least.
    u32 block_shift;
    // Position `p` sees `p - window + 1 ..= p`; all ones if there is no window.
    u32 window;
    // Multiplies scores: attention's scale × log2(e), times the scale of stored keys if they have one. Positive.
    float scale;
    // Multiplies values: their scale, or 1.
    float value_scale;
    // Cap of the scores before `scale`, 0 if there is none, and 2 × log2(e) divided by it; see capped.
    float cap;
    float cap_exponent;
};

// Arguments of the plain kernels, which take any shape.
struct AttendPlainArgs {
    // (rows, q | k | v) of T, queries rotated.
    const void* qkv;
    // (rows, query_heads × head_dim) of T.
    void* out;
    // Of T.
    const void* pool;
    const u32* tables;
    // In row order; together they cover every row.
    const AttendSegment* segments;
    const u32* segments_count;
    // As in AttendArgs.
    const float* sinks;
    // As in AttendArgs, but in elements.
    u64 block_elements;
    u64 key_elements;
    u64 value_elements;
    u32 query_heads;
    u32 kv_heads;
    u32 head_dim;
    u32 block_tokens;
    u32 window;
    // Attention's scale × log2(e).
    float scale;
    // As in AttendArgs.
    float cap;
    float cap_exponent;
};

namespace attend {

// Keys per tile, over which the largest score is found at once.
constexpr u32 TILE_KEYS = 64;
// Keys per span. Shorter ones fill a device from fewer sequences, longer ones leave fewer states to merge: one
// sequence of 8192 tokens and 8 KV heads gives 128 spans, and the state of a group of 4 heads is less than a hundredth
// of what its span reads.
constexpr u32 SPAN_KEYS = 512;
constexpr u32 SPAN_TILES = SPAN_KEYS / TILE_KEYS;
// Blocks of a span at most: those of 8 tokens.
constexpr u32 SPAN_BLOCKS = SPAN_KEYS / 8;
// Packed rows per item.
constexpr u32 DECODE_ROWS = 16;
constexpr u32 PREFILL_ROWS = 64;
// Floats before a row state's values: the largest score, the sum of weights, two unused ones.
constexpr u32 STATE_HEADER = 4;
// The largest score before any key: below every score, and finite, so that it cancels.
constexpr float NOTHING = -1e30f;

DEVICE u32 first_seen(u32 position, u32 window) { return position + 1 > window ? position + 1 - window : 0; }

// A softmax's largest score so far and its sum of weights.
struct Total {
    float top;
    float sum;
};
// The factors of the values on both sides of a merge.
struct Factors {
    float kept;
    float added;
};

// One step of the only procedure that merges states. Merging an empty state, on either side, gives
// the other unchanged.
DEVICE Factors merge(Total& total, Total span) {
    const float top = max(total.top, span.top);
    const Factors factors = {exp2_fast(add_rn(total.top, -top)), exp2_fast(add_rn(span.top, -top))};
    total.top = top;
    total.sum = fma_rn(span.sum, factors.added, mul_rn(total.sum, factors.kept));
    return factors;
}

DEVICE float merged(float total, float span, Factors factors) {
    return fma_rn(span, factors.added, mul_rn(total, factors.kept));
}

constexpr float LOG2_E = 1.4426950408889634f;

// Adds a head's sink, if there is one, to a row's sum of weights; returns the factor of the row's values.
DEVICE float with_sink(Total& total, const float* sinks, u32 head) {
    return sinks == nullptr ? 1.0f : merge(total, {mul_rn(sinks[head], LOG2_E), 1.0f}).kept;
}

// The factor of a row's values after its last span.
DEVICE float final_factor(Total total, const float* sinks, u32 head, float value_scale) {
    const float kept = with_sink(total, sinks, head);
    return mul_rn(value_scale, kept) / total.sum;
}

}  // namespace attend
