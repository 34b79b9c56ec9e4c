// Lab of copies of KV blocks: gather, scatter, checksum.
//
// Owns: blocks of Llama 3.1 8B (2 MiB of bf16 for 16 tokens) and one layer's part of them, from all over a pool.
// Never: checks the checksum's value: the emulator's tests compare that with another implementation. Here it must be
// the same for equal bytes at two places.
#ifdef __CUDACC__
#include "lab.h"

#include "blocks.cu"

namespace {

using lab::Buffer;

constexpr u64 BLOCK_BYTES_8B = u64(2) << 20, LAYER_BYTES = u64(64) << 10, POOL_BLOCKS = 2048;
// Blocks of threads that share a piece: enough for a few pieces to fill the device.
constexpr u32 SHARED_BY = 16;

struct Places {
    Buffer<u8> pool{BLOCK_BYTES_8B * POOL_BLOCKS};
    Buffer<u8> staging{BLOCK_BYTES_8B * 64};
    // The secret may be any bytes, since both sides use the same.
    Buffer<u8> secret{192};
};

void pieces(const Places& places, u32 count, u64 bytes, double ceiling) {
    std::vector<Piece> all(count);
    for (u32 i = 0; i < count; i++) all[i] = {u64(i + 1) * 1237 % POOL_BLOCKS * BLOCK_BYTES_8B, i * bytes, bytes};
    const Buffer<Piece> there(all);
    const Buffer<u64> sums(count), again(count);
    BlocksArgs args = {places.pool.get(), places.staging.get(), there.get(), sums.get(), places.secret.get()};
    const dim3 grid(SHARED_BY, count);
    lab::Figure figure;
    figure.lab = "blocks";
    figure.shape = std::to_string(count) + " x " + std::to_string(bytes >> 10) + " KiB";
    const auto told = [&](const char* variant, double moved, const std::function<void(int)>& launch) {
        figure.variant = variant;
        figure.seconds = lab::seconds_of(10, launch);
        figure.bytes = moved * double(count) * double(bytes);
        lab::report(figure, ceiling, 0);
    };
    blocks_checksum<<<count, SUM_THREADS>>>(args);
    blocks_gather<<<grid, THREADS>>>(args);
    // The checksums of the gathered bytes, at their place in staging.
    std::vector<Piece> staged = all;
    for (Piece& piece : staged) piece.pool = piece.staging;
    const Buffer<Piece> staged_there(staged);
    blocks_checksum<<<count, SUM_THREADS>>>(BlocksArgs{places.staging.get(), nullptr, staged_there.get(), again.get(), places.secret.get()});
    const std::vector<u64> before = sums.read(), after = again.read();
    for (u32 i = 0; i < count; i++) figure.error += before[i] != after[i];
    told("gather", 2, [&](int) { blocks_gather<<<grid, THREADS>>>(args); });
    told("scatter", 2, [&](int) { blocks_scatter<<<grid, THREADS>>>(args); });
    told("checksum", 1, [&](int) { blocks_checksum<<<count, SUM_THREADS>>>(args); });
}

}  // namespace

int main() {
    const double ceiling = lab::copy_ceiling();
    const Places places;
    lab::fill(places.pool.get(), places.pool.count(), 1);
    lab::fill(places.secret.get(), places.secret.count(), 2);
    for (const u32 count : {1u, 8u, 64u}) {
        pieces(places, count, BLOCK_BYTES_8B, ceiling);
        pieces(places, count, LAYER_BYTES, ceiling);
    }
}
#endif
