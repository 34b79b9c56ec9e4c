// Lab of the rotary embedding with the write into paged KV.
//
// Owns: Llama 3.1 8B's heads, rows that go to blocks all over a pool.
// Never: ships.
#ifdef __CUDACC__
#include "lab.h"

#include "rotate.cu"

#include <cmath>

namespace {

using lab::Buffer;

constexpr u32 QUERY_HEADS = 32, KV_HEADS = 8, HEAD_DIM = 128, HALF = HEAD_DIM / 2, BLOCK_TOKENS = 16;
constexpr u32 WIDTH = (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM;
// One layer of the pool, and how many of its blocks there are.
constexpr u64 BLOCK_ELEMENTS = u64(2) * KV_HEADS * BLOCK_TOKENS * HEAD_DIM;
constexpr u32 BLOCKS = 16384, POSITIONS = 8192;
// The sum of two halves in bf16, each rounded.
constexpr double TOLERANCE = 1.0 / 128;

void rows(u32 count, double ceiling) {
    const u64 elements = u64(count) * WIDTH;
    const int copies = int(std::max<u64>(1, (u64(1) << 30) / (elements * 4)));
    const Buffer<bf16> qkv(elements * copies), pool(BLOCK_ELEMENTS * BLOCKS);
    lab::fill(qkv.get(), qkv.count(), 1, 1.0f);
    std::vector<float> cosines(POSITIONS * HALF), sines(POSITIONS * HALF);
    for (u32 i = 0; i < POSITIONS * HALF; i++) {
        const double angle = (i / HALF) * std::pow(500000.0, -double(i % HALF) / HALF);
        cosines[i] = float(std::cos(angle));
        sines[i] = float(std::sin(angle));
    }
    std::vector<u32> positions(count), slots(count);
    for (u32 row = 0; row < count; row++) {
        positions[row] = row * 17 % POSITIONS;
        // An odd factor of a power of two visits every slot once.
        slots[row] = u32(u64(row) * 40503 % (BLOCKS * BLOCK_TOKENS));
    }
    const Buffer<float> cos(cosines), sin(sines);
    const Buffer<u32> positions_there(positions), slots_there(slots);
    const auto launch = [&](int i) {
        RotateArgs args{};
        args.qkv = qkv.get() + elements * (i % copies);
        args.cos = cos.get(), args.sin = sin.get();
        args.positions = positions_there.get(), args.row_slots = slots_there.get();
        args.pool = pool.get();
        args.block_elements = BLOCK_ELEMENTS;
        args.value_offset = BLOCK_ELEMENTS / 2;
        args.query_heads = QUERY_HEADS, args.kv_heads = KV_HEADS, args.head_dim = HEAD_DIM, args.half = HEAD_DIM / 2, args.block_tokens = BLOCK_TOKENS;
        rotate_bf16<<<dim3(count, (QUERY_HEADS + 2 * KV_HEADS) / WARPS), WARPS * 32>>>(args);
    };
    const std::vector<bf16> before = qkv.read();
    launch(0);
    const std::vector<bf16> kv = pool.read();
    lab::Figure figure;
    figure.lab = "rotate";
    figure.variant = "rope and KV";
    figure.shape = "rows " + std::to_string(count) + ", heads 32 + 8 + 8 x 128";
    const u32 row = count - 1;
    const u64 block = slots[row] / BLOCK_TOKENS * BLOCK_ELEMENTS, token = u64(slots[row] % BLOCK_TOKENS) * HEAD_DIM;
    const bf16* key = before.data() + u64(row) * WIDTH + QUERY_HEADS * HEAD_DIM;
    const bf16* value = key + KV_HEADS * HEAD_DIM;
    for (u32 i = 0; i < HALF; i++) {
        const u64 angle = u64(positions[row]) * HALF + i;
        const double low = lab::value(key[i]), high = lab::value(key[i + HALF]), c = cosines[angle], s = sines[angle];
        figure.error = std::max(figure.error, std::fabs(lab::value(kv[block + token + i]) - (low * c - high * s)));
        figure.error = std::max(figure.error, std::fabs(lab::value(kv[block + token + i + HALF]) - (high * c + low * s)));
        figure.error = std::max(figure.error, double(std::fabs(lab::value(kv[block + BLOCK_ELEMENTS / 2 + token + i]) - lab::value(value[i]))));
    }
    figure.tolerance = TOLERANCE;
    figure.seconds = lab::seconds_of(20, launch);
    figure.bytes = 4.0 * double(elements);
    lab::report(figure, ceiling, 0);
}

}  // namespace

int main() {
    const double ceiling = lab::copy_ceiling();
    for (const u32 count : {1u, 32u, 128u, 2048u, 8192u}) rows(count, ceiling);
}
#endif
