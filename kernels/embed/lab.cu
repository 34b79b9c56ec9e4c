// Lab of the embedding.
//
// Owns: Llama 3's table, tokens from all over it.
// Never: ships.
#ifdef __CUDACC__
#include "lab.h"

#include "embed.cu"

namespace {

using lab::Buffer;

constexpr u32 VOCABULARY = 128256, WIDTH = 4096;

void rows(u32 count, const Buffer<bf16>& table, const std::vector<bf16>& host, double ceiling) {
    std::vector<u32> tokens(count);
    for (u32 row = 0; row < count; row++) tokens[row] = u32(u64(row + 1) * 2654435761u % VOCABULARY);
    const Buffer<u32> there(tokens);
    const Buffer<float> out(u64(count) * WIDTH);
    lab::Figure figure;
    figure.lab = "embed";
    figure.variant = "bf16 to f32";
    figure.shape = "rows " + std::to_string(count) + ", width " + std::to_string(WIDTH);
    figure.seconds = lab::seconds_of(20, [&](int) { embed_bf16<<<count, THREADS>>>(EmbedArgs{table.get(), there.get(), nullptr, out.get(), WIDTH, VOCABULARY, 1.0f, 0}); });
    const std::vector<float> got = out.read();
    for (u64 i = 0; i < got.size(); i++) {
        const u32 word = u32(host[u64(tokens[i / WIDTH]) * WIDTH + i % WIDTH].bits) << 16;
        figure.error += std::memcmp(&word, &got[i], sizeof word) != 0;
    }
    figure.bytes = 6.0 * count * WIDTH;
    lab::report(figure, ceiling, 0);
}

}  // namespace

int main() {
    const double ceiling = lab::copy_ceiling();
    const Buffer<bf16> table(u64(VOCABULARY) * WIDTH);
    lab::fill(table.get(), table.count(), 1, 1.0f);
    const std::vector<bf16> host = table.read();
    for (const u32 count : {1u, 32u, 128u, 2048u, 8192u}) rows(count, table, host, ceiling);
}
#endif
