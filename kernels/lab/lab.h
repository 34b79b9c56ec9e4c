// What labs are written with: memory filled with noise, medians of timed launches, results as lines of JSON.
//
// Owns: how a lab measures. A lab is a host program beside a kernel's file (kernels/<op>/lab.cu): it includes the
// .cu itself, checks each variant against a plain reference, and says what each takes.
// Never: ships. The library and the program `cleave` know nothing of it, and only nvcc compiles it.
// Invariant: what is timed has run before, is timed by events on the stream it runs in, and reads memory that was
// not read just before: several sets of inputs take turns where one would fit the cache.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace lab {

#define LAB_CHECK(call) ::lab::check((call), #call, __FILE__, __LINE__)

inline void check(cudaError_t error, const char* call, const char* file, int line) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(error));
    std::exit(1);
}

// Device memory, zeroed; freed with the process.
template <class T> T* device_zeros(size_t count) {
    T* memory = nullptr;
    LAB_CHECK(cudaMalloc(&memory, std::max<size_t>(count, 1) * sizeof(T)));
    LAB_CHECK(cudaMemset(memory, 0, std::max<size_t>(count, 1) * sizeof(T)));
    return memory;
}

template <class T> T* to_device(const std::vector<T>& values) {
    T* memory = device_zeros<T>(values.size());
    LAB_CHECK(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return memory;
}

template <class T> std::vector<T> to_host(const T* memory, size_t count) {
    std::vector<T> values(count);
    LAB_CHECK(cudaMemcpy(values.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}

// The mixing function of SplitMix64 (Steele, Lea, Flood 2014).
__host__ __device__ inline uint64_t mixed(uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Uniform in -1 .. 1, with 8 significant bits, so that bf16 holds it exactly.
__host__ __device__ inline float noise(uint64_t seed, uint64_t index) {
    return float(int(mixed(seed * 0x51ed27ull + index) >> 56) - 128) / 128.0f + 1.0f / 256.0f;
}

__host__ __device__ inline uint16_t noise_bf16(uint64_t seed, uint64_t index) {
    const int eight = int(mixed(seed * 0x51ed27ull + index) >> 56) - 128;
    const float value = float(eight) / 128.0f;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return uint16_t(bits >> 16);
}

inline float widened(uint16_t bf16_bits) {
    const uint32_t bits = uint32_t(bf16_bits) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

__global__ void fill_bf16(uint16_t* to, size_t count, uint64_t seed) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
        to[i] = noise_bf16(seed, i);
    }
}

// Numbers of about equal spread everywhere: zeros are faster than what a model has.
inline uint16_t* device_noise(size_t count, uint64_t seed) {
    uint16_t* memory = device_zeros<uint16_t>(count);
    fill_bf16<<<4096, 256>>>(memory, count, seed);
    LAB_CHECK(cudaGetLastError());
    return memory;
}

struct Timing {
    double median;
    double best;
};

// Seconds of one call of `work(turn, stream)`; `turn` counts up, so that inputs can take turns. Calls are timed in
// groups, each group between two events, so that an event's own time is shared by many calls.
template <class Work> Timing time(Work work, int groups = 15, int calls = 10) {
    cudaStream_t stream;
    LAB_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    LAB_CHECK(cudaDeviceSynchronize());
    cudaEvent_t from, to;
    LAB_CHECK(cudaEventCreate(&from));
    LAB_CHECK(cudaEventCreate(&to));
    int turn = 0;
    for (int i = 0; i < 3 * calls; i++) work(turn++, stream);
    std::vector<double> seconds;
    for (int group = 0; group < groups; group++) {
        LAB_CHECK(cudaEventRecord(from, stream));
        for (int i = 0; i < calls; i++) work(turn++, stream);
        LAB_CHECK(cudaEventRecord(to, stream));
        LAB_CHECK(cudaEventSynchronize(to));
        float milliseconds = 0;
        LAB_CHECK(cudaEventElapsedTime(&milliseconds, from, to));
        seconds.push_back(milliseconds / 1e3 / calls);
    }
    LAB_CHECK(cudaGetLastError());
    LAB_CHECK(cudaEventDestroy(from));
    LAB_CHECK(cudaEventDestroy(to));
    LAB_CHECK(cudaStreamDestroy(stream));
    std::sort(seconds.begin(), seconds.end());
    return {seconds[seconds.size() / 2], seconds.front()};
}

// The largest difference, as a share of the largest number there is; infinite if anything is not a number.
template <class Got, class Want> double error(const std::vector<Got>& got, const std::vector<Want>& want) {
    double largest = 1e-30, apart = 0;
    for (double value : want) largest = std::max(largest, std::fabs(value));
    for (size_t i = 0; i < want.size(); i++) {
        const double difference = std::fabs(double(got[i]) - double(want[i]));
        if (!(difference <= 1e30)) return INFINITY;
        apart = std::max(apart, difference);
    }
    return apart / largest;
}

// What one variant did at one shape. `bytes`: what it must move; `operations`: what it must compute; 0 if that is
// not what bounds it.
struct Result {
    std::string lab;
    std::string variant;
    std::string shape;
    Timing timing;
    double bytes = 0;
    double operations = 0;
    double error = 0;
    double tolerance = 0;
};

// One record a line, which scripts/gpu/run.sh collects.
inline void report(const Result& result) {
    std::printf("{\"kind\": \"lab\", \"lab\": \"%s\", \"variant\": \"%s\", \"shape\": \"%s\", \"seconds\": %.9g, \"best\": %.9g",
                result.lab.c_str(), result.variant.c_str(), result.shape.c_str(), result.timing.median, result.timing.best);
    if (result.bytes > 0) std::printf(", \"bytes\": %.17g", result.bytes);
    if (result.operations > 0) std::printf(", \"operations\": %.17g", result.operations);
    // JSON has no infinity.
    std::printf(", \"error\": %.6g, \"tolerance\": %.6g}\n", std::min(result.error, 1e30), result.tolerance);
    std::fflush(stdout);
}

}  // namespace lab
