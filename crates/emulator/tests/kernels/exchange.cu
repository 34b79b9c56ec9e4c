// Exchange between the lanes of a warp, and narrow number formats.
#include "stored.cuh"

struct ExchangeArgs {
    u32* results;
    u32* counters;
};

constexpr u32 RESULTS = 8;

// Eight results for each thread; a block has two warps.
extern "C" KERNEL(64, 1) exchange(GRID_CONSTANT const ExchangeArgs args) {
    __shared__ u32 sums[2];
    u32 thread = threadIdx.x, lane = lane_index();
    u32* to = args.results + (blockIdx.x * blockDim.x + thread) * RESULTS;
    to[0] = shuffle_xor(thread, 5);
    to[1] = shuffle(thread * 3, 7);
    to[2] = shuffle_up(thread, 2);
    // Two votes, so that a fast lane votes again before the others have read the first.
    to[3] = ballot(lane % 3 == 0) & ~ballot(lane % 6 == 0);
    to[4] = u32(shuffle_xor(u64(thread) << 33, 1) >> 33);
    u32 sum = thread;
    for (u32 distance = 16; distance > 0; distance /= 2) sum += shuffle_xor(sum, distance);
    if (lane == 0) sums[thread / 32] = sum;
    sync_block();
    to[5] = sums[0] + sums[1];
    to[6] = atomic_add(args.counters, 1u);
    to[7] = leading_zeros(thread) | count_ones(thread) << 8;
    atomic_max(args.counters + 1, thread + blockIdx.x);
    if (thread == 0) arrive(args.counters + 2);
}

struct ConvertArgs {
    const float* numbers;
    float* results;
    u32 count;
};

// For each number: rounded to bf16, its power of two, its bits' low byte as e4m3, a pair's sum,
// rounded to e4m3.
extern "C" KERNEL(64, 1) convert(GRID_CONSTANT const ConvertArgs args) {
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= args.count) return;
    float x = args.numbers[index];
    float* to = args.results + index * 5;
    to[0] = to_f32(to_bf16(x));
    to[1] = exp2_fast(x);
    to[2] = fp8_to_f32(fp8{u8(f32_to_bits(x))});
    u32 pair = pack_bf16(x, -x);
    to[3] = low_bf16(pair) + high_bf16(pair);
    to[4] = to_f32(to_fp8(x));
}

struct ReadUnwrittenArgs {
    float* results;
};

// Reads unwritten shared memory of both kinds, and then writes it: the next block must not see these values.
extern "C" KERNEL(64, 1) read_unwritten(GRID_CONSTANT const ReadUnwrittenArgs args) {
    DYNAMIC_SHARED(float, dynamic);
    __shared__ float fixed[32];
    u32 lane = threadIdx.x % 32;
    float* from = threadIdx.x < 32 ? dynamic : fixed;
    args.results[blockIdx.x * blockDim.x + threadIdx.x] = from[lane];
    from[lane] = 1.0f;
}
