// Lab of the gate.
//
// Owns: Llama 3.1 8B's and 1B's widths.
// Never: ships.
#ifdef __CUDACC__
#include "lab.h"

#include "gate.cu"

#include <cmath>

namespace {

using lab::Buffer;

// Eights that a block takes, as the host launches it.
constexpr u32 BLOCK_ELEMENTS = THREADS * 8;
// The rounding of a bf16, for numbers up to 4, and the error of 2^x.
constexpr double TOLERANCE = 1.0 / 32;

void rows(u32 count, u32 width, double ceiling) {
    const u64 elements = u64(count) * width;
    const int copies = int(std::max<u64>(1, (u64(1) << 30) / (elements * 6)));
    const Buffer<bf16> gate_up(2 * elements * copies), out(elements * copies);
    lab::fill(gate_up.get(), gate_up.count(), 1, 2.0f);
    const auto launch = [&](int i) {
        const GateArgs args = {gate_up.get() + 2 * elements * (i % copies), out.get() + elements * (i % copies), width, SILU, 0, 0};
        silu_gate_bf16<<<dim3(count, (width + BLOCK_ELEMENTS - 1) / BLOCK_ELEMENTS), THREADS>>>(args);
    };
    launch(0);
    const std::vector<bf16> from = gate_up.read(), got = out.read();
    lab::Figure figure;
    figure.lab = "gate";
    figure.variant = "silu";
    figure.shape = "rows " + std::to_string(count) + ", width " + std::to_string(width);
    for (u32 i = 0; i < width; i++) {
        const u64 row = u64(count - 1) * 2 * width;
        const double gate = lab::value(from[row + i]), up = lab::value(from[row + width + i]);
        figure.error = std::max(figure.error, std::fabs(lab::value(got[row / 2 + i]) - gate / (1 + std::exp(-gate)) * up));
    }
    figure.tolerance = TOLERANCE;
    figure.seconds = lab::seconds_of(20, launch);
    figure.bytes = 6.0 * double(elements);
    lab::report(figure, ceiling, 0);
}

}  // namespace

int main() {
    const double ceiling = lab::copy_ceiling();
    for (const u32 width : {14336u, 8192u}) {
        for (const u32 count : {1u, 32u, 128u, 2048u, 8192u}) rows(count, width, ceiling);
    }
}
#endif
