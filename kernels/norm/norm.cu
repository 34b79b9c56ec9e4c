// Root-mean-square normalisation: x[i] * weight[i] / sqrt(mean(x * x) + epsilon).
//
// `norm` first adds the last layer's output, if there is one, to the residual stream, and
// normalises a row; `head_norm` normalises each query and key head in place. Bandwidth-bound: of a
// row, 4 + 2 bytes read and 4 + 2 written for each element in bf16. A row's sum is made in an order
// that its width alone decides: each thread adds its eights, THREADS eights apart, then warps by
// halving, then the warps' sums in order.
#include "stored.cuh"

struct NormArgs {
    float* residual;       // (rows, width), grows by delta
    const void* delta;     // (rows, width), T, or null
    const float* weight;   // (width)
    void* out;             // (rows, width), T
    u32 width;
    float epsilon;
};

struct HeadNormArgs {
    void* qkv;                   // (rows, q | k | v), T
    const float* query_weight;   // (head_dim)
    const float* key_weight;     // (head_dim)
    u32 query_heads;
    u32 kv_heads;
    u32 head_dim;
    float epsilon;
};

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 HEAD_WARPS = 4;

DEVICE float warp_sum(float x) {
    for (u32 mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

template <class T, u32 N> DEVICE void norm_by(const NormArgs& args) {
    __shared__ float sums[WARPS];
    u64 first = u64(blockIdx.x) * args.width;
    float* residual = args.residual + first;
    const T* delta = args.delta ? static_cast<const T*>(args.delta) + first : nullptr;
    T* out = static_cast<T*>(args.out) + first;
    float sum = 0.0f;
    for (u32 i = threadIdx.x * N; i < args.width; i += THREADS * N) {
        float x[N], added[N];
        load_all<N>(residual + i, x);
        if (delta) {
            load_all<N>(delta + i, added);
            for (u32 j = 0; j < N; j++) x[j] += added[j];
            store_all<N>(residual + i, x);
        }
        for (u32 j = 0; j < N; j++) sum += x[j] * x[j];
    }
    sum = warp_sum(sum);
    if (lane_index() == 0) sums[threadIdx.x / 32] = sum;
    sync_block();
    float total = 0.0f;
    for (u32 warp = 0; warp < WARPS; warp++) total += sums[warp];
    float scale = rsqrt_exact(total / float(args.width) + args.epsilon);
    for (u32 i = threadIdx.x * N; i < args.width; i += THREADS * N) {
        float x[N], weight[N];
        load_all<N>(residual + i, x);
        load_all<N>(args.weight + i, weight);
        for (u32 j = 0; j < N; j++) x[j] = x[j] * scale * weight[j];
        store_all<N>(out + i, x);
    }
}

template <class T> DEVICE void norm(const NormArgs& args) {
    if (args.width % 8 == 0)
        norm_by<T, 8>(args);
    else
        norm_by<T, 1>(args);
}

template <class T> DEVICE void head_norm(const HeadNormArgs& args) {
    u32 head = blockIdx.y * HEAD_WARPS + threadIdx.x / 32;
    if (head >= args.query_heads + args.kv_heads) return;
    u64 stride = u64(args.query_heads + 2 * args.kv_heads) * args.head_dim;
    T* x = static_cast<T*>(args.qkv) + blockIdx.x * stride + u64(head) * args.head_dim;
    const float* weight = head < args.query_heads ? args.query_weight : args.key_weight;
    float sum = 0.0f;
    for (u32 i = lane_index(); i < args.head_dim; i += 32) sum += to_f32(x[i]) * to_f32(x[i]);
    float scale = rsqrt_exact(warp_sum(sum) / float(args.head_dim) + args.epsilon);
    for (u32 i = lane_index(); i < args.head_dim; i += 32) store(x + i, to_f32(x[i]) * scale * weight[i]);
}

// Grid: (rows).
extern "C" KERNEL(THREADS, 1) norm_f32(GRID_CONSTANT const NormArgs args) { norm<float>(args); }
extern "C" KERNEL(THREADS, 1) norm_bf16(GRID_CONSTANT const NormArgs args) { norm<bf16>(args); }
// Grid: (rows, (query_heads + kv_heads) / 4 rounded up).
extern "C" KERNEL(HEAD_WARPS * 32, 1) head_norm_f32(GRID_CONSTANT const HeadNormArgs args) { head_norm<float>(args); }
extern "C" KERNEL(HEAD_WARPS * 32, 1) head_norm_bf16(GRID_CONSTANT const HeadNormArgs args) { head_norm<bf16>(args); }
