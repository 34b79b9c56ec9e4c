// The labs' common code: memory, clocks, ceilings, and the report of results. A lab is a program of
// its own for a machine with a GPU; it is not shipped, and a compiler without CUDA skips it.
//
// Owns: the ceilings that a lab's figures are compared with, measured in the same run.
// Never: is included by a kernel.
// Invariant: a timed launch finds nothing of its input in the second-level cache: labs walk copies of their data
// that together are several times as large.
#pragma once
#ifdef __CUDACC__
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "prims.cuh"

namespace lab {

inline void check(cudaError_t result, const char* what) {
    if (result == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
    std::exit(1);
}

// Device memory, zeroed.
template <class T> class Buffer {
public:
    explicit Buffer(size_t count) : count_(count) {
        check(cudaMalloc(&at_, std::max<size_t>(1, count) * sizeof(T)), "cudaMalloc");
        check(cudaMemset(at_, 0, count * sizeof(T)), "cudaMemset");
    }
    explicit Buffer(const std::vector<T>& from) : Buffer(from.size()) {
        check(cudaMemcpy(at_, from.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "copy to the device");
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { cudaFree(at_); }

    T* get() const { return at_; }
    size_t count() const { return count_; }
    std::vector<T> read() const {
        std::vector<T> to(count_);
        check(cudaMemcpy(to.data(), at_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "copy from the device");
        return to;
    }

private:
    T* at_ = nullptr;
    size_t count_;
};

// The value on the host, which has none of the kernels' conversions.
inline float value(float x) { return x; }
inline float value(bf16 x) {
    const u32 word = u32(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &word, sizeof wide);
    return wide;
}

// Bits from an index, well mixed.
__device__ inline u32 mixed(u64 index, u32 seed) {
    u64 x = (index + 1) * 0x9e3779b97f4a7c15ull ^ u64(seed) << 32;
    x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9ull;
    return u32(x >> 32);
}

// Numbers from -amplitude to amplitude.
static __global__ void fill_bf16(bf16* to, u64 count, u32 seed, float amplitude) {
    for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
        to[i] = to_bf16((float(mixed(i, seed) >> 8) / (1 << 23) - 1.0f) * amplitude);
    }
}

// Any bytes but the e4m3 NaNs and numbers beyond 16.
static __global__ void fill_bytes(u8* to, u64 count, u32 seed) {
    for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
        const u32 bits = mixed(i, seed);
        to[i] = u8((bits & 0x80) | (bits & 0x7f) % 0x58);
    }
}

inline void fill(bf16* to, size_t count, u32 seed, float amplitude) { fill_bf16<<<1024, 256>>>(to, count, seed, amplitude); }
inline void fill(u8* to, size_t count, u32 seed) { fill_bytes<<<1024, 256>>>(to, count, seed); }

// Median seconds of one launch of many, `body(i)` making the i-th.
inline double seconds_of(int launches, const std::function<void(int)>& body) {
    cudaEvent_t before, after;
    check(cudaEventCreate(&before), "cudaEventCreate");
    check(cudaEventCreate(&after), "cudaEventCreate");
    std::vector<double> rounds;
    for (int round = 0; round < 8; round++) {
        check(cudaEventRecord(before), "cudaEventRecord");
        for (int i = 0; i < launches; i++) body(i);
        check(cudaEventRecord(after), "cudaEventRecord");
        check(cudaEventSynchronize(after), "a timed launch");
        float milliseconds = 0;
        check(cudaEventElapsedTime(&milliseconds, before, after), "cudaEventElapsedTime");
        // The first rounds warm up.
        if (round >= 2) rounds.push_back(milliseconds * 1e-3 / launches);
    }
    std::sort(rounds.begin(), rounds.end());
    cudaEventDestroy(before);
    cudaEventDestroy(after);
    return rounds[rounds.size() / 2];
}

// Bytes per second, read and written, of a copy on the device.
inline double copy_ceiling() {
    const size_t bytes = size_t(4) << 30;
    const Buffer<u8> from(bytes), to(bytes);
    const double seconds = seconds_of(4, [&](int) {
        check(cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice), "a copy");
    });
    return 2.0 * bytes / seconds;
}

// A kernel of mma.sync alone, for the ceiling.
static __global__ void multiply_only(float* to, u32 rounds) {
    float sums[8][4] = {};
    const u32 a[4] = {threadIdx.x, 0x3f803f80u, threadIdx.x * 7, 0x3f813f80u};
    for (u32 round = 0; round < rounds; round++) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) mma_bf16(sums[i], a, {a[1], a[3]});
    }
    float sum = 0;
    for (u32 i = 0; i < 32; i++) sum += sums[i / 4][i % 4];
    to[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

inline int multiprocessors() {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
    return count;
}

// Whether the device has wgmma.
inline bool is_hopper() {
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "cudaDeviceGetAttribute");
    return major == 9;
}

// Floating-point operations per second of mma.sync, bf16.
inline double mma_ceiling() {
    const int blocks = multiprocessors() * 2, threads = 256;
    const u32 rounds = 4096;
    const Buffer<float> to(size_t(blocks) * threads);
    const double seconds = seconds_of(4, [&](int) { multiply_only<<<blocks, threads>>>(to.get(), rounds); });
    return double(blocks) * (threads / 32) * rounds * 8 * (16 * 8 * 16 * 2) / seconds;
}

// The result of one variant at one shape. `bytes` are the bytes that it must move and `operations`
// the operations that it must compute; 0 if they are not its limit. Wrong if `error` is above
// `tolerance`.
struct Figure {
    std::string lab;
    std::string variant;
    std::string shape;
    double seconds;
    double bytes = 0;
    double operations = 0;
    double error = 0;
    double tolerance = 0;
};

// Prints a line of JSON for scripts/gpu, which has its own ceilings, and a readable one on standard error.
inline void report(const Figure& figure, double copy, double mma) {
    const char *lab = figure.lab.c_str(), *variant = figure.variant.c_str(), *shape = figure.shape.c_str();
    std::printf("{\"kind\": \"lab\", \"lab\": \"%s\", \"variant\": \"%s\", \"shape\": \"%s\", \"seconds\": %.9g", lab, variant, shape, figure.seconds);
    std::fprintf(stderr, "%-8s %-20s %-44s %9.2f us", lab, variant, shape, figure.seconds * 1e6);
    if (figure.bytes > 0) {
        const double rate = figure.bytes / figure.seconds;
        std::printf(", \"bytes\": %.17g", figure.bytes);
        std::fprintf(stderr, "  %6.0f GB/s", rate * 1e-9);
        if (copy > 0) std::fprintf(stderr, " (%4.2f of copy)", rate / copy);
    }
    if (figure.operations > 0) {
        const double rate = figure.operations / figure.seconds;
        std::printf(", \"operations\": %.17g", figure.operations);
        std::fprintf(stderr, "  %6.1f TFLOP/s", rate * 1e-12);
        if (mma > 0) std::fprintf(stderr, " (%4.2f of mma.sync)", rate / mma);
    }
    // JSON has no infinity.
    std::printf(", \"error\": %.6g, \"tolerance\": %.6g}\n", std::min(figure.error, 1e30), figure.tolerance);
    std::fprintf(stderr, "%s\n", figure.error > figure.tolerance ? "  WRONG" : "");
    std::fflush(stdout);
}

// Whether a lab measures only its most important shapes: `--brief`.
inline bool is_brief(int count, char** arguments) {
    for (int i = 1; i < count; i++) {
        if (std::strcmp(arguments[i], "--brief") == 0) return true;
    }
    return false;
}

// The launch of a kernel with as many blocks as fit the device at once.
struct Kernel {
    const void* entry;
    int threads;
    int shared_bytes;

    int blocks() const {
        int per_multiprocessor = 0;
        check(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "shared memory");
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, entry, threads, shared_bytes), "occupancy");
        return per_multiprocessor * multiprocessors();
    }

    template <class Args> void launch(const Args& args, int blocks_count) const {
        void* parameters[] = {const_cast<Args*>(&args)};
        check(cudaLaunchKernel(entry, dim3(blocks_count), dim3(threads), parameters, shared_bytes, nullptr), "a launch");
    }
};

}  // namespace lab
#endif
