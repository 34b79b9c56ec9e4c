// Rotary embedding fused with the write into paged KV.
//
// Queries are rotated where they are, and multiplied by the factor of their position if there are
// factors; keys are rotated into the pool, values copied there. Pairs are (i, i + half), and
// elements from 2 * half on stay. A warp has one head of one row. Bandwidth-bound, and in a decode step
// by latency. A row whose slot is NO_SLOT is padding: storing it would overwrite another sequence's
// KV.
#include "stored.cuh"

struct RotateArgs {
    void* qkv;              // (rows, q | k | v), T
    const float* cos;       // (positions, half)
    const float* sin;       // the same
    const float* query_factors;   // (positions), or null
    const u32* positions;   // (rows)
    const u32* row_slots;   // (rows), block * block_tokens + token in the block, or NO_SLOT
    void* pool;             // [block][layer][K|V][kv_head][token][dim], Stored
    u64 block_elements;     // of one block
    u64 key_offset;         // in a block, of this layer's K
    u64 value_offset;       // in a block, of this layer's V
    u32 query_heads;
    u32 kv_heads;
    u32 head_dim;
    u32 half;               // pairs of a head, at most head_dim / 2
    u32 block_tokens;
    u32 padding;
};

constexpr u32 WARPS = 4;
constexpr u32 NO_SLOT = 0xffffffffu;

// Rotates one head by its row's position, and multiplies it by `factor`; `to` may be `from`.
template <class T, class To> DEVICE void turn(const RotateArgs& args, u32 row, float factor, const T* from, To* to) {
    u32 half = args.half;
    u64 angle = u64(args.positions[row]) * half;
    for (u32 i = lane_index(); i < half; i += 32) {
        float cos = args.cos[angle + i], sin = args.sin[angle + i];
        float low = to_f32(from[i]), high = to_f32(from[i + half]);
        store(to + i, (low * cos - high * sin) * factor);
        store(to + i + half, (high * cos + low * sin) * factor);
    }
    for (u32 i = 2 * half + lane_index(); i < args.head_dim; i += 32) store(to + i, to_f32(from[i]) * factor);
}

template <class T, class Stored> DEVICE void rotate(const RotateArgs& args) {
    u32 row = blockIdx.x;
    u32 head = blockIdx.y * WARPS + threadIdx.x / 32;
    u32 slot = args.row_slots[row];
    u32 heads = args.query_heads + 2 * args.kv_heads;
    if (slot == NO_SLOT || head >= heads) return;
    T* from = static_cast<T*>(args.qkv) + (u64(row) * heads + head) * args.head_dim;
    if (head < args.query_heads) {
        float factor = args.query_factors ? args.query_factors[args.positions[row]] : 1.0f;
        turn(args, row, factor, from, from);
        return;
    }
    bool is_value = head >= args.query_heads + args.kv_heads;
    u32 kv_head = (head - args.query_heads) % args.kv_heads;
    u64 block = slot / args.block_tokens, token = slot % args.block_tokens;
    Stored* to = static_cast<Stored*>(args.pool) + block * args.block_elements + (is_value ? args.value_offset : args.key_offset) +
                 (u64(kv_head) * args.block_tokens + token) * args.head_dim;
    if (is_value) {
        for (u32 i = lane_index(); i < args.head_dim; i += 32) store(to + i, to_f32(from[i]));
    } else {
        turn(args, row, 1.0f, from, to);
    }
}

// Grid: (rows, (query_heads + 2 * kv_heads) / 4 rounded up).
extern "C" KERNEL(WARPS * 32, 1) rotate_f32(GRID_CONSTANT const RotateArgs args) { start_kernel(); rotate<float, float>(args); }
extern "C" KERNEL(WARPS * 32, 1) rotate_bf16(GRID_CONSTANT const RotateArgs args) { start_kernel(); rotate<bf16, bf16>(args); }
// Queries, keys and values in bf16, the pool in e4m3.
extern "C" KERNEL(WARPS * 32, 1) rotate_fp8(GRID_CONSTANT const RotateArgs args) { start_kernel(); rotate<bf16, fp8>(args); }
