// Ceilings of this GPU's memory and of its link to the host, with which all other figures are compared.
//
// Owns: bandwidth within the device, copying and reading alone, and to and from pinned host memory, each direction
// alone and both at once; the rate of the tensor cores by mma.sync and by wgmma with operands in place; one `ceiling`
// record a line.
// Never: uses managed memory, or changes a setting of the card.
// Invariant: a median of many repetitions over noise, of buffers many times larger than the cache.
#include "lab.h"

namespace {

using lab::Buffer;

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

// The store runs only for a sum that noise does not give, so the reads are not removed.
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

void say(const char* name, double value, const char* how, const char* unit = "bytes/s") {
    std::printf("{\"kind\": \"ceiling\", \"name\": \"%s\", \"value\": %.9g, \"unit\": \"%s\", \"how\": \"%s\"}\n", name, value, unit, how);
    std::fflush(stdout);
}

constexpr int ROUNDS = 2048;
constexpr unsigned TILES = 8, MMA_THREADS = 256;

// Each warp repeats eight independent products of 16 × 8 × 16 on random operands: zeros would run faster.
__global__ void __launch_bounds__(MMA_THREADS) multiply_mma(const uint4* from, float* out) {
    const uint4 words = from[threadIdx.x];
    u32 a[4] = {words.x, words.y, words.z, words.w}, b[2] = {words.y, words.w};
    float sums[TILES][4] = {};
    for (int round = 0; round < ROUNDS; round++) {
#pragma unroll
        for (unsigned tile = 0; tile < TILES; tile++) mma_bf16(sums[tile], a, b);
    }
    float sum = 0;
    for (unsigned tile = 0; tile < TILES; tile++) sum += sums[tile][0] + sums[tile][1] + sums[tile][2] + sums[tile][3];
    if (sum == 1.5f) *out = sum;
}

// Two warpgroups repeat a product of 64 × 128 × 16 each from shared memory.
__global__ void __launch_bounds__(MMA_THREADS) multiply_wgmma(const uint4* from, float* out) {
    extern __shared__ __align__(1024) u8 operands[];
    for (unsigned i = threadIdx.x; i < (64 + 64 + 128) * 128 / 16; i += MMA_THREADS) {
        reinterpret_cast<uint4*>(operands)[i] = from[i];
    }
    wgmma_fence_shared();
    sync_block();
    float sums[16][4] = {};
    const u8* a = operands + threadIdx.x / 128 * 64 * 128;
    const u8* b = operands + 2 * 64 * 128;
    for (int round = 0; round < ROUNDS / 4; round++) {
        wgmma_begin();
#pragma unroll
        for (unsigned step = 0; step < 4; step++) wgmma_bf16(sums, a + step * 32, b + step * 32, true);
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_take(sums);
    if (sums[0][0] == 1.5f) *out = sums[0][0];
}

void tensor_cores(int major) {
    constexpr size_t WORDS = 64 * 1024 / sizeof(uint4);
    constexpr unsigned OPERANDS = (64 + 64 + 128) * 128;
    const Buffer<uint4> from(WORDS);
    const Buffer<float> out(1);
    lab::fill(reinterpret_cast<bf16*>(from.get()), WORDS * sizeof(uint4) / sizeof(bf16), 3, 1.0f);
    const int each = 4, blocks = each * lab::multiprocessors();
    double operations = 2.0 * 16 * 8 * 16 * TILES * ROUNDS * (MMA_THREADS / 32) * blocks;
    double seconds = lab::seconds_of(2, [&](int) { multiply_mma<<<blocks, MMA_THREADS>>>(from.get(), out.get()); });
    say("mma", operations / seconds, "mma.sync of bf16 on operands in registers", "operations/s");
    if (major != 9) return;
    lab::check(cudaFuncSetAttribute(multiply_wgmma, cudaFuncAttributeMaxDynamicSharedMemorySize, OPERANDS), "shared memory");
    operations = 2.0 * 64 * 128 * 16 * ROUNDS * 2 * blocks;
    seconds = lab::seconds_of(2, [&](int) { multiply_wgmma<<<blocks, MMA_THREADS, OPERANDS>>>(from.get(), out.get()); });
    say("wgmma", operations / seconds, "wgmma of bf16 on operands in shared memory", "operations/s");
}

// The largest bandwidth over several numbers of blocks for each multiprocessor.
template <class Launch> double best_of(double bytes, Launch launch) {
    double best = 0;
    for (int each : {2, 4, 16}) {
        const double seconds = lab::seconds_of(4, [&](int) { launch(each * lab::multiprocessors()); });
        best = std::max(best, bytes / seconds);
    }
    return best;
}

void copy_in_device(void* to, const void* from) {
    lab::check(cudaMemcpyAsync(to, from, DEVICE_BYTES, cudaMemcpyDeviceToDevice), "a copy");
}

void within_device() {
    const size_t count = DEVICE_BYTES / sizeof(uint4);
    const Buffer<uint4> from(count), to(count);
    const Buffer<unsigned> out(1);
    lab::fill(reinterpret_cast<bf16*>(from.get()), DEVICE_BYTES / sizeof(bf16), 1, 1.0f);
    const double copied = best_of(2.0 * DEVICE_BYTES, [&](int blocks) { copy<<<blocks, THREADS>>>(to.get(), from.get(), count); });
    say("copy_kernel", copied, "a kernel of 16-byte loads and stores over 4 GiB, bytes read plus bytes written");
    const double seconds = lab::seconds_of(4, [&](int) { copy_in_device(to.get(), from.get()); });
    say("copy_driver", 2.0 * DEVICE_BYTES / seconds, "cudaMemcpyAsync of 4 GiB within the device, bytes read plus bytes written");
    const double was_read = best_of(DEVICE_BYTES, [&](int blocks) { read<<<blocks, THREADS>>>(from.get(), count, out.get()); });
    say("read_kernel", was_read, "a kernel of 16-byte loads over 4 GiB, bytes read");
}

void host_link() {
    void *pinned_in, *pinned_out;
    lab::check(cudaHostAlloc(&pinned_in, HOST_BYTES, cudaHostAllocPortable), "cudaHostAlloc");
    lab::check(cudaHostAlloc(&pinned_out, HOST_BYTES, cudaHostAllocPortable), "cudaHostAlloc");
    u64 state = 1;
    for (size_t i = 0; i < HOST_BYTES / sizeof(u64); i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        static_cast<u64*>(pinned_in)[i] = state;
    }
    const Buffer<u8> device_in(HOST_BYTES), device_out(HOST_BYTES);
    lab::fill(device_out.get(), HOST_BYTES, 2);
    cudaStream_t other;
    cudaEvent_t begin, end;
    lab::check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
    lab::check(cudaEventCreateWithFlags(&begin, cudaEventDisableTiming), "cudaEventCreate");
    lab::check(cudaEventCreateWithFlags(&end, cudaEventDisableTiming), "cudaEventCreate");
    const auto in = [&](int) { lab::check(cudaMemcpyAsync(device_in.get(), pinned_in, HOST_BYTES, cudaMemcpyHostToDevice), "a copy in"); };
    const auto out_in = [&](cudaStream_t stream) {
        lab::check(cudaMemcpyAsync(pinned_out, device_out.get(), HOST_BYTES, cudaMemcpyDeviceToHost, stream), "a copy out");
    };
    say("host_to_device", HOST_BYTES / lab::seconds_of(1, in), "cudaMemcpyAsync of 512 MiB of pinned memory");
    const double out = lab::seconds_of(1, [&](int) { out_in(nullptr); });
    say("device_to_host", HOST_BYTES / out, "cudaMemcpyAsync of 512 MiB to pinned memory");
    const double both = lab::seconds_of(1, [&](int i) {
        lab::check(cudaEventRecord(begin), "cudaEventRecord");
        lab::check(cudaStreamWaitEvent(other, begin, 0), "cudaStreamWaitEvent");
        in(i);
        out_in(other);
        lab::check(cudaEventRecord(end, other), "cudaEventRecord");
        lab::check(cudaStreamWaitEvent(nullptr, end, 0), "cudaStreamWaitEvent");
    });
    say("host_both_ways", 2.0 * HOST_BYTES / both, "512 MiB each way at once, bytes of both");
}

}  // namespace

int main() {
    cudaDeviceProp device;
    lab::check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    std::fprintf(stderr, "%s, %d multiprocessors, %.1f GiB, %d MiB of cache\n", device.name, device.multiProcessorCount,
                 double(device.totalGlobalMem) / (1u << 30), device.l2CacheSize >> 20);
    within_device();
    host_link();
    tensor_cores(device.major);
    lab::check(cudaDeviceSynchronize(), "the device");
}
