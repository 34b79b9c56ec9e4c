// What this GPU's memory and its link to the host can do: the ceilings that everything else is held against.
//
// Owns: bandwidth within the device, copying and reading alone, and to and from pinned host memory, each way alone
// and both at once; one `ceiling` record a line.
// Never: uses managed memory, or changes a setting of the card.
// Invariant: a median of many repetitions over noise, of buffers many times larger than the cache.
#include "../../kernels/lab/lab.h"

namespace {

constexpr size_t DEVICE_BYTES = size_t(4) << 30;
constexpr size_t HOST_BYTES = size_t(512) << 20;
constexpr unsigned THREADS = 512;

__global__ void copy(uint4* to, const uint4* from, size_t count) {
    const size_t stride = size_t(gridDim.x) * THREADS;
    size_t i = blockIdx.x * size_t(THREADS) + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
        uint4 four[4];
#pragma unroll
        for (int j = 0; j < 4; j++) four[j] = from[i + j * stride];
#pragma unroll
        for (int j = 0; j < 4; j++) to[i + j * stride] = four[j];
    }
    for (; i < count; i += stride) to[i] = from[i];
}

// Nothing is written unless the sum is one that noise does not give.
__global__ void read(const uint4* from, size_t count, unsigned* out) {
    const size_t stride = size_t(gridDim.x) * THREADS;
    unsigned sum = 0;
    size_t i = blockIdx.x * size_t(THREADS) + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint4 words = from[i + j * stride];
            sum += words.x ^ words.y ^ words.z ^ words.w;
        }
    }
    if (sum == 0xdeadbeefu) *out = sum;
}

void say(const char* name, double value, const char* how) {
    std::printf("{\"kind\": \"ceiling\", \"name\": \"%s\", \"value\": %.9g, \"unit\": \"bytes/s\", \"how\": \"%s\"}\n", name, value, how);
    std::fflush(stdout);
}

void within_device(unsigned processors) {
    auto* from = reinterpret_cast<uint4*>(lab::device_noise(DEVICE_BYTES / 2, 1));
    auto* to = lab::device_zeros<uint4>(DEVICE_BYTES / sizeof(uint4));
    auto* out = lab::device_zeros<unsigned>(1);
    const size_t count = DEVICE_BYTES / sizeof(uint4);
    double best = 0;
    for (unsigned blocks : {2u, 4u, 16u}) {
        const auto timing = lab::time([&](int, cudaStream_t stream) { copy<<<processors * blocks, THREADS, 0, stream>>>(to, from, count); }, 15, 2);
        best = std::max(best, 2.0 * DEVICE_BYTES / timing.median);
    }
    say("copy_kernel", best, "a kernel of 16-byte loads and stores over 4 GiB, bytes read plus bytes written");
    const auto driver = lab::time([&](int, cudaStream_t stream) { LAB_CHECK(cudaMemcpyAsync(to, from, DEVICE_BYTES, cudaMemcpyDeviceToDevice, stream)); }, 15, 2);
    say("copy_driver", 2.0 * DEVICE_BYTES / driver.median, "cudaMemcpyAsync of 4 GiB within the device, bytes read plus bytes written");
    double reading = 0;
    for (unsigned blocks : {2u, 4u, 16u}) {
        const auto timing = lab::time([&](int, cudaStream_t stream) { read<<<processors * blocks, THREADS, 0, stream>>>(from, count, out); }, 15, 2);
        reading = std::max(reading, DEVICE_BYTES / timing.median);
    }
    say("read_kernel", reading, "a kernel of 16-byte loads over 4 GiB, bytes read");
    LAB_CHECK(cudaFree(from));
    LAB_CHECK(cudaFree(to));
}

void host_link() {
    void *pinned_in, *pinned_out;
    LAB_CHECK(cudaHostAlloc(&pinned_in, HOST_BYTES, cudaHostAllocPortable));
    LAB_CHECK(cudaHostAlloc(&pinned_out, HOST_BYTES, cudaHostAllocPortable));
    auto* words = static_cast<uint64_t*>(pinned_in);
    for (size_t i = 0; i < HOST_BYTES / sizeof(uint64_t); i++) words[i] = lab::mixed(i);
    auto* device_in = lab::device_zeros<uint8_t>(HOST_BYTES);
    auto* device_out = reinterpret_cast<uint8_t*>(lab::device_noise(HOST_BYTES / 2, 2));
    const auto in = lab::time([&](int, cudaStream_t stream) { LAB_CHECK(cudaMemcpyAsync(device_in, pinned_in, HOST_BYTES, cudaMemcpyHostToDevice, stream)); }, 9, 1);
    say("host_to_device", HOST_BYTES / in.median, "cudaMemcpyAsync of 512 MiB of pinned memory");
    const auto out = lab::time([&](int, cudaStream_t stream) { LAB_CHECK(cudaMemcpyAsync(pinned_out, device_out, HOST_BYTES, cudaMemcpyDeviceToHost, stream)); }, 9, 1);
    say("device_to_host", HOST_BYTES / out.median, "cudaMemcpyAsync of 512 MiB to pinned memory");
    cudaStream_t other;
    LAB_CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    cudaEvent_t begin, end;
    LAB_CHECK(cudaEventCreateWithFlags(&begin, cudaEventDisableTiming));
    LAB_CHECK(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
    const auto both = lab::time(
        [&](int, cudaStream_t stream) {
            LAB_CHECK(cudaEventRecord(begin, stream));
            LAB_CHECK(cudaStreamWaitEvent(other, begin, 0));
            LAB_CHECK(cudaMemcpyAsync(device_in, pinned_in, HOST_BYTES, cudaMemcpyHostToDevice, stream));
            LAB_CHECK(cudaMemcpyAsync(pinned_out, device_out, HOST_BYTES, cudaMemcpyDeviceToHost, other));
            LAB_CHECK(cudaEventRecord(end, other));
            LAB_CHECK(cudaStreamWaitEvent(stream, end, 0));
        },
        9, 1);
    say("host_both_ways", 2.0 * HOST_BYTES / both.median, "512 MiB each way at once, bytes of both");
}

}  // namespace

int main() {
    cudaDeviceProp device;
    LAB_CHECK(cudaGetDeviceProperties(&device, 0));
    std::fprintf(stderr, "%s, %d multiprocessors, %.1f GiB, %d MiB of cache\n", device.name, device.multiProcessorCount,
                 double(device.totalGlobalMem) / (1u << 30), device.l2CacheSize >> 20);
    within_device(unsigned(device.multiProcessorCount));
    host_link();
}
