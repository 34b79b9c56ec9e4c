// Attention of any shape, by one warp per row and query head.
//
// Owns: the reference for the other kernels, and the shapes that they do not take.
// Never: rounds anything but its result.
// Invariant: a row's keys go in order, 32 at a time from its first, whatever is computed beside it; keys and
// values that it may not see are never read.
#include "attend.cuh"
#include "cap.cuh"
#include "stored.cuh"

namespace attend {

// Keys at a time, one per lane.
constexpr u32 PLAIN_KEYS = 32;
constexpr u32 PLAIN_WARPS = 4;

// One warp's part of the shared memory: PLAIN_KEYS places, as many weights, a query, and the weighted values.
struct Bench {
    u64* places;
    float* weights;
    float* query;
    float* values;
};

DEVICE Bench bench_of(u8* shared, u32 head_dim) {
    const u32 bytes = PLAIN_KEYS * (sizeof(u64) + sizeof(float)) + 2 * head_dim * sizeof(float);
    u8* mine = shared + threadIdx.x / 32 * ((bytes + 15) / 16 * 16);
    Bench bench;
    bench.places = reinterpret_cast<u64*>(mine);
    bench.weights = reinterpret_cast<float*>(mine + PLAIN_KEYS * sizeof(u64));
    bench.query = bench.weights + PLAIN_KEYS;
    bench.values = bench.query + head_dim;
    return bench;
}

// The segment that has this row, or the count if none has.
DEVICE u32 segment_of(const AttendPlainArgs& args, u32 row) {
    const u32 count = *args.segments_count;
    u32 first = 0, end = count;
    while (first < end) {
        const u32 middle = (first + end) / 2;
        const AttendSegment segment = args.segments[middle];
        if (row < segment.row) {
            end = middle;
        } else if (row >= segment.row + segment.rows) {
            first = middle + 1;
        } else {
            return middle;
        }
    }
    return count;
}

// The place of a position's token of one KV head, in elements from the layer's first head of K or
// V.
DEVICE u64 place_of(const AttendPlainArgs& args, const AttendSegment& segment, u32 kv_head, u32 position) {
    const u64 block = args.tables[segment.table + position / args.block_tokens];
    const u64 token = u64(kv_head) * args.block_tokens + position % args.block_tokens;
    return block * args.block_elements + token * args.head_dim;
}

template <class Stored> DEVICE float score_of(const AttendPlainArgs& args, const Bench& bench, u64 place) {
    const Stored* key = static_cast<const Stored*>(args.pool) + args.key_elements + place;
    float sum = 0;
    for (u32 i = 0; i < args.head_dim; i++) sum = fma_rn(bench.query[i], to_f32(key[i]), sum);
    if (args.cap > 0) sum = capped(sum, args.cap, args.cap_exponent);
    return mul_rn(sum, args.scale);
}

DEVICE float warp_max(float x) {
    for (u32 mask = 16; mask > 0; mask /= 2) x = max(x, shuffle_xor(x, mask));
    return x;
}

DEVICE float warp_sum(float x) {
    for (u32 mask = 16; mask > 0; mask /= 2) x = add_rn(x, shuffle_xor(x, mask));
    return x;
}

template <class T, class Stored> DEVICE void attend_row(const AttendPlainArgs& args, const Bench& bench, u32 row, u32 head) {
    const u32 segment_index = segment_of(args, row);
    if (segment_index == *args.segments_count) return;
    const AttendSegment segment = args.segments[segment_index];
    const u32 kv_head = head / (args.query_heads / args.kv_heads);
    const u32 position = segment.position + row - segment.row;
    const u32 lane = lane_index();

    const u64 qkv_width = u64(args.query_heads + 2 * args.kv_heads) * args.head_dim;
    const T* query = static_cast<const T*>(args.qkv) + row * qkv_width + head * args.head_dim;
    for (u32 i = lane; i < args.head_dim; i += 32) {
        bench.query[i] = to_f32(query[i]);
        bench.values[i] = 0;
    }
    sync_warp();

    Total total = {NOTHING, 0};
    for (u32 first = first_seen(position, args.window); first <= position; first += PLAIN_KEYS) {
        const u32 keys = min(PLAIN_KEYS, position + 1 - first);
        float score = NEGATIVE_INFINITY;
        if (lane < keys) {
            bench.places[lane] = place_of(args, segment, kv_head, first + lane);
            score = score_of<Stored>(args, bench, bench.places[lane]);
        }
        const float top = max(total.top, warp_max(score));
        const float kept = exp2_fast(add_rn(total.top, -top));
        const float weight = exp2_fast(add_rn(score, -top));
        total = {top, fma_rn(total.sum, kept, warp_sum(weight))};
        bench.weights[lane] = weight;
        sync_warp();
        const Stored* values = static_cast<const Stored*>(args.pool) + args.value_elements;
        for (u32 i = lane; i < args.head_dim; i += 32) {
            float sum = mul_rn(bench.values[i], kept);
            for (u32 key = 0; key < keys; key++) {
                sum = fma_rn(bench.weights[key], to_f32(values[bench.places[key] + i]), sum);
            }
            bench.values[i] = sum;
        }
        sync_warp();
    }

    T* out = static_cast<T*>(args.out) + (u64(row) * args.query_heads + head) * args.head_dim;
    const float kept = with_sink(total, args.sinks, head);
    for (u32 i = lane; i < args.head_dim; i += 32) store(out + i, mul_rn(bench.values[i], kept) / total.sum);
    sync_warp();
}

template <class T, class Stored> DEVICE void attend_rows(const AttendPlainArgs& args, u8* shared) {
    const u32 segments = *args.segments_count;
    if (segments == 0) return;
    const AttendSegment last = args.segments[segments - 1];
    const u32 work_end = (last.row + last.rows) * args.query_heads;
    const Bench bench = bench_of(shared, args.head_dim);
    for (u32 work = blockIdx.x * PLAIN_WARPS + threadIdx.x / 32; work < work_end; work += gridDim.x * PLAIN_WARPS) {
        attend_row<T, Stored>(args, bench, work / args.query_heads, work % args.query_heads);
    }
}

}  // namespace attend

// Dynamic shared memory, per warp and rounded up to 16 bytes: 384 + 8 × head_dim. Any number of blocks.
extern "C" KERNEL(32 * attend::PLAIN_WARPS, 4) attend_plain_f32(GRID_CONSTANT const AttendPlainArgs args) {
    start_kernel();
    DYNAMIC_SHARED(u8, shared);
    attend::attend_rows<float, float>(args, shared);
}

extern "C" KERNEL(32 * attend::PLAIN_WARPS, 4) attend_plain_bf16(GRID_CONSTANT const AttendPlainArgs args) {
    start_kernel();
    DYNAMIC_SHARED(u8, shared);
    attend::attend_rows<bf16, bf16>(args, shared);
}

// Queries and outputs in bf16, the pool in e4m3.
extern "C" KERNEL(32 * attend::PLAIN_WARPS, 4) attend_plain_fp8(GRID_CONSTANT const AttendPlainArgs args) {
    start_kernel();
    DYNAMIC_SHARED(u8, shared);
    attend::attend_rows<bf16, fp8>(args, shared);
}
