// Lab of normalisation: the residual stream's, with what a layer left, an output's, and the heads'.
//
// Owns: Llama 3.1 8B's width, Qwen3's heads, OLMo 2's projections, for decode steps and prompts.
// Never: ships.
#ifdef __CUDACC__
#include "lab.h"

#include "norm.cu"

#include <cmath>

namespace {

using lab::Buffer;

constexpr u32 WIDTH = 4096, HEADS = 40, QUERY_HEADS = 32, HEAD_DIM = 128;
constexpr float EPSILON = 1e-5f;
// The relative rounding of a bf16; sums are in f32.
constexpr double TOLERANCE = 1.0 / 128;

// Largest error of `width` numbers against x / sqrt(mean(x * x) + epsilon), in doubles; weights are 1.
template <class T> double error_of(const float* x, const T* out, u32 width) {
    double sum = 0, worst = 0;
    for (u32 i = 0; i < width; i++) sum += double(x[i]) * x[i];
    for (u32 i = 0; i < width; i++) {
        const double want = x[i] / std::sqrt(sum / width + EPSILON);
        worst = std::max(worst, std::fabs(lab::value(out[i]) - want) / std::max(1.0, std::fabs(want)));
    }
    return worst;
}

void rows(u32 count, double ceiling) {
    const u64 elements = u64(count) * WIDTH;
    // Copies of the data, a gigabyte together, take turns, so that no launch finds its data in the cache.
    const int copies = int(std::max<u64>(1, (u64(1) << 30) / (elements * 12)));
    const Buffer<float> residual(elements * copies), weight(std::vector<float>(WIDTH, 1.0f));
    const Buffer<bf16> delta(elements * copies), out(elements * copies);
    lab::fill(delta.get(), delta.count(), 1, 1.0f);
    const auto launch = [&](int i) {
        const u64 at = elements * (i % copies);
        norm_bf16<<<count, THREADS>>>(NormArgs{residual.get() + at, delta.get() + at, weight.get(), out.get() + at, WIDTH, EPSILON, 0, 0});
    };
    launch(0);
    const std::vector<bf16> got = out.read();
    const std::vector<float> summed = residual.read();
    lab::Figure figure;
    figure.lab = "norm";
    figure.variant = "residual add";
    figure.shape = "rows " + std::to_string(count) + ", width " + std::to_string(WIDTH);
    for (const u32 row : {0u, count / 2, count - 1}) {
        figure.error = std::max(figure.error, error_of(summed.data() + u64(row) * WIDTH, got.data() + u64(row) * WIDTH, WIDTH));
    }
    figure.tolerance = TOLERANCE;
    figure.seconds = lab::seconds_of(20, launch);
    // Residual read and written, delta read, out written.
    figure.bytes = 12.0 * double(elements);
    lab::report(figure, ceiling, 0);
}

void outputs(u32 count, double ceiling) {
    const u64 elements = u64(count) * WIDTH;
    const int copies = int(std::max<u64>(1, (u64(1) << 30) / (elements * 10)));
    const Buffer<float> residual(elements * copies), weight(std::vector<float>(WIDTH, 1.0f));
    const Buffer<bf16> x(elements * copies);
    lab::fill(x.get(), x.count(), 1, 1.0f);
    const std::vector<bf16> input = x.read();
    const auto launch = [&](int i) {
        const u64 at = elements * (i % copies);
        norm_add_bf16<<<count, THREADS>>>(NormAddArgs{x.get() + at, residual.get() + at, weight.get(), WIDTH, EPSILON});
    };
    launch(0);
    // The stream was zero, so it holds the norm alone.
    const std::vector<float> summed = residual.read();
    lab::Figure figure;
    figure.lab = "norm";
    figure.variant = "added output";
    figure.shape = "rows " + std::to_string(count) + ", width " + std::to_string(WIDTH);
    for (const u32 row : {0u, count / 2, count - 1}) {
        const u64 at = u64(row) * WIDTH;
        std::vector<float> row_input(WIDTH);
        for (u32 i = 0; i < WIDTH; i++) row_input[i] = lab::value(input[at + i]);
        figure.error = std::max(figure.error, error_of(row_input.data(), summed.data() + at, WIDTH));
    }
    figure.tolerance = TOLERANCE;
    figure.seconds = lab::seconds_of(20, launch);
    // The output read, the residual read and written.
    figure.bytes = 10.0 * double(elements);
    lab::report(figure, ceiling, 0);
}

void projections(u32 count, double ceiling) {
    // OLMo 2 7B: 32 query and 32 key heads of 128.
    constexpr u32 QUERY_WIDTH = 32 * HEAD_DIM, KEY_WIDTH = 32 * HEAD_DIM;
    const u64 width = QUERY_WIDTH + 2 * KEY_WIDTH, elements = count * width;
    const int copies = int(std::max<u64>(1, (u64(1) << 30) / (elements * 4)));
    const Buffer<bf16> qkv(elements * copies);
    const Buffer<float> weight(std::vector<float>(QUERY_WIDTH, 1.0f));
    lab::fill(qkv.get(), qkv.count(), 1, 1.0f);
    const std::vector<bf16> before = qkv.read();
    const auto launch = [&](int i) {
        const ProjectionNormArgs args = {qkv.get() + elements * (i % copies), weight.get(), weight.get(), QUERY_WIDTH, KEY_WIDTH, EPSILON, 0};
        projection_norm_bf16<<<dim3(count, 2), THREADS>>>(args);
    };
    launch(0);
    const std::vector<bf16> got = qkv.read();
    lab::Figure figure;
    figure.lab = "norm";
    figure.variant = "projections";
    figure.shape = "rows " + std::to_string(count) + ", widths " + std::to_string(QUERY_WIDTH) + " and " + std::to_string(KEY_WIDTH);
    for (const u64 at : {u64(0), u64(QUERY_WIDTH), (count - 1) * width + QUERY_WIDTH}) {
        std::vector<float> x(KEY_WIDTH);
        for (u32 i = 0; i < KEY_WIDTH; i++) x[i] = lab::value(before[at + i]);
        figure.error = std::max(figure.error, error_of(x.data(), got.data() + at, KEY_WIDTH));
    }
    figure.tolerance = TOLERANCE;
    figure.seconds = lab::seconds_of(20, launch);
    figure.bytes = 4.0 * count * (QUERY_WIDTH + KEY_WIDTH);
    lab::report(figure, ceiling, 0);
}

void heads(u32 count, double ceiling) {
    const u32 kv_heads = HEADS - QUERY_HEADS;
    const u64 width = u64(QUERY_HEADS + 2 * kv_heads) * HEAD_DIM, elements = count * width;
    const int copies = int(std::max<u64>(1, (u64(1) << 30) / (elements * 4)));
    const Buffer<bf16> qkv(elements * copies);
    const Buffer<float> weight(std::vector<float>(HEAD_DIM, 1.0f));
    lab::fill(qkv.get(), qkv.count(), 1, 1.0f);
    const std::vector<bf16> before = qkv.read();
    const auto launch = [&](int i) {
        const HeadNormArgs args = {qkv.get() + elements * (i % copies), weight.get(), weight.get(), QUERY_HEADS, kv_heads, HEAD_DIM, EPSILON};
        head_norm_bf16<<<dim3(count, HEADS / HEAD_WARPS), HEAD_WARPS * 32>>>(args);
    };
    launch(0);
    const std::vector<bf16> got = qkv.read();
    lab::Figure figure;
    figure.lab = "norm";
    figure.variant = "heads";
    figure.shape = "rows " + std::to_string(count) + ", heads " + std::to_string(HEADS) + " x " + std::to_string(HEAD_DIM);
    for (const u64 at : {u64(0), u64(QUERY_HEADS) * HEAD_DIM, (count - 1) * width + u64(HEADS - 1) * HEAD_DIM}) {
        std::vector<float> x(HEAD_DIM);
        for (u32 i = 0; i < HEAD_DIM; i++) x[i] = lab::value(before[at + i]);
        figure.error = std::max(figure.error, error_of(x.data(), got.data() + at, HEAD_DIM));
    }
    figure.tolerance = TOLERANCE;
    figure.seconds = lab::seconds_of(20, launch);
    figure.bytes = 4.0 * count * HEADS * HEAD_DIM;
    lab::report(figure, ceiling, 0);
}

}  // namespace

int main() {
    const double ceiling = lab::copy_ceiling();
    for (const u32 count : {1u, 32u, 128u, 2048u, 8192u}) {
        rows(count, ceiling);
        outputs(count, ceiling);
        projections(count, ceiling);
        heads(count, ceiling);
    }
}
#endif
