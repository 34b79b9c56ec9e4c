// Lab of rows by index: the last rows of prompts on their way to the head.
//
// Owns: Llama 3.1 8B's width in bf16, rows from all over a step.
// Never: ships.
#ifdef __CUDACC__
#include "lab.h"

#include "gather.cu"

namespace {

using lab::Buffer;

constexpr u32 WIDTH = 4096, FROM_ROWS = 8192;

void rows(u32 count, const Buffer<bf16>& from, const std::vector<bf16>& host, double ceiling) {
    std::vector<u32> indices(count);
    for (u32 i = 0; i < count; i++) indices[i] = u32(u64(i + 1) * 2654435761u % FROM_ROWS);
    const Buffer<u32> there(indices);
    const Buffer<bf16> to(u64(count) * WIDTH);
    const GatherArgs args = {reinterpret_cast<const u16*>(from.get()), reinterpret_cast<u16*>(to.get()), there.get(), WIDTH};
    lab::Figure figure;
    figure.lab = "gather";
    figure.variant = "bf16";
    figure.shape = "rows " + std::to_string(count) + ", width " + std::to_string(WIDTH);
    figure.seconds = lab::seconds_of(20, [&](int) { gather_rows<<<count, THREADS>>>(args); });
    const std::vector<bf16> got = to.read();
    for (u64 i = 0; i < got.size(); i++) figure.error += got[i].bits != host[u64(indices[i / WIDTH]) * WIDTH + i % WIDTH].bits;
    figure.bytes = 4.0 * count * WIDTH;
    lab::report(figure, ceiling, 0);
}

}  // namespace

int main() {
    const double ceiling = lab::copy_ceiling();
    const Buffer<bf16> from(u64(FROM_ROWS) * WIDTH);
    lab::fill(from.get(), from.count(), 1, 1.0f);
    const std::vector<bf16> host = from.read();
    for (const u32 count : {1u, 32u, 256u}) rows(count, from, host, ceiling);
}
#endif
