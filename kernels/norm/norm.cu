// Root-mean-square normalisation: x[i] * weight[i] / sqrt(mean(x * x) + epsilon); in `norm` also LayerNorm, the same of
// x - mean(x).
//
// `norm` first adds the last layer's output, if there is one, to the residual stream, and normalises a row;
// `add_rows` adds an output alone; `norm_add` adds a normalised row to the residual stream; `head_norm` normalises
// each query and key head in place, `projection_norm` all query heads of a row together and all key heads.
// `round_rows` stores the residual stream as activations, for products that read it without a norm. Bandwidth-bound:
// `norm` reads 4 + 2 bytes and writes 4 + 2 for each element in bf16, `norm_add` and `add_rows` read 2 + 4 and write
// 4. A row's sum is made in an order that its width alone decides: each thread adds its eights, THREADS eights apart,
// then warps by halving, then the warps' sums in order.
#include "stored.cuh"

struct NormArgs {
    float* residual;       // (rows, width), grows by delta
    const void* delta;     // (rows, width), T, or null
    const float* weight;   // (width)
    void* out;             // (rows, width), T
    u32 width;
    float epsilon;
    u32 formula;           // MEAN_REMOVED, or 0
    u32 padding;
};

struct NormAddArgs {
    const void* x;         // (rows, width), T
    float* residual;       // (rows, width), grows by the normalised x
    const float* weight;   // (width)
    u32 width;
    float epsilon;
};

struct AddRowsArgs {
    const void* delta;   // (rows, width), T
    float* residual;     // (rows, width), grows by delta
    u32 width;
    u32 padding;
};

struct RoundArgs {
    const float* from;   // (rows, width)
    void* to;            // (rows, width), T
    u32 width;
    u32 padding;
};

struct ProjectionNormArgs {
    void* qkv;                   // (rows, q | k | v), T
    const float* query_weight;   // (query_width)
    const float* key_weight;     // (key_width)
    u32 query_width;
    u32 key_width;
    float epsilon;
    u32 padding;
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
// A formula of norms; any other number is the root mean square alone.
constexpr u32 MEAN_REMOVED = 1;

DEVICE float warp_sum(float x) {
    for (u32 mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

// The mean of a row, of which each thread of the block has a part of the sum; every thread gets it. `sums` are of no
// other call.
DEVICE float row_mean(float sum, u32 width, float (&sums)[WARPS]) {
    sum = warp_sum(sum);
    if (lane_index() == 0) sums[threadIdx.x / 32] = sum;
    sync_block();
    float total = 0.0f;
    for (u32 warp = 0; warp < WARPS; warp++) total += sums[warp];
    return total / float(width);
}

// 1 / sqrt(mean + epsilon) of the squares whose sums each thread of the block has; every thread gets it.
DEVICE float row_scale(float sum, u32 width, float epsilon) {
    __shared__ float sums[WARPS];
    return rsqrt_exact(row_mean(sum, width, sums) + epsilon);
}

// This thread's part of a row's sum of squares.
template <u32 N, class T> DEVICE float squares(const T* row, u32 width) {
    float sum = 0.0f;
    for (u32 i = threadIdx.x * N; i < width; i += THREADS * N) {
        float x[N];
        load_all<N>(row + i, x);
        for (u32 j = 0; j < N; j++) sum += x[j] * x[j];
    }
    return sum;
}

template <class T, u32 N> DEVICE void norm_by(const NormArgs& args) {
    u64 first = u64(blockIdx.x) * args.width;
    float* residual = args.residual + first;
    const T* delta = args.delta ? static_cast<const T*>(args.delta) + first : nullptr;
    T* out = static_cast<T*>(args.out) + first;
    const bool removes_mean = args.formula == MEAN_REMOVED;
    float sum = 0.0f, mean = 0.0f;
    for (u32 i = threadIdx.x * N; i < args.width; i += THREADS * N) {
        float x[N], added[N];
        load_all<N>(residual + i, x);
        if (delta) {
            load_all<N>(delta + i, added);
            for (u32 j = 0; j < N; j++) x[j] += added[j];
            store_all<N>(residual + i, x);
        }
        for (u32 j = 0; j < N; j++) sum += removes_mean ? x[j] : x[j] * x[j];
    }
    if (removes_mean) {
        __shared__ float sums[WARPS];
        mean = row_mean(sum, args.width, sums);
        sum = 0.0f;
        for (u32 i = threadIdx.x * N; i < args.width; i += THREADS * N) {
            float x[N];
            load_all<N>(residual + i, x);
            for (u32 j = 0; j < N; j++) sum += (x[j] - mean) * (x[j] - mean);
        }
    }
    float scale = row_scale(sum, args.width, args.epsilon);
    for (u32 i = threadIdx.x * N; i < args.width; i += THREADS * N) {
        float x[N], weight[N];
        load_all<N>(residual + i, x);
        load_all<N>(args.weight + i, weight);
        for (u32 j = 0; j < N; j++) x[j] = (x[j] - mean) * scale * weight[j];
        store_all<N>(out + i, x);
    }
}

template <class T> DEVICE void norm(const NormArgs& args) {
    if (args.width % 8 == 0)
        norm_by<T, 8>(args);
    else
        norm_by<T, 1>(args);
}

template <class T, u32 N> DEVICE void norm_add_by(const NormAddArgs& args) {
    u64 first = u64(blockIdx.x) * args.width;
    const T* row = static_cast<const T*>(args.x) + first;
    float* residual = args.residual + first;
    float scale = row_scale(squares<N>(row, args.width), args.width, args.epsilon);
    for (u32 i = threadIdx.x * N; i < args.width; i += THREADS * N) {
        float x[N], weight[N], sum[N];
        load_all<N>(row + i, x);
        load_all<N>(args.weight + i, weight);
        load_all<N>(residual + i, sum);
        for (u32 j = 0; j < N; j++) sum[j] += x[j] * scale * weight[j];
        store_all<N>(residual + i, sum);
    }
}

template <class T> DEVICE void norm_add(const NormAddArgs& args) {
    if (args.width % 8 == 0)
        norm_add_by<T, 8>(args);
    else
        norm_add_by<T, 1>(args);
}

template <class T, u32 N> DEVICE void add_by(const AddRowsArgs& args) {
    u64 first = u64(blockIdx.x) * args.width;
    const T* delta = static_cast<const T*>(args.delta) + first;
    float* residual = args.residual + first;
    for (u32 i = threadIdx.x * N; i < args.width; i += THREADS * N) {
        float x[N], added[N];
        load_all<N>(residual + i, x);
        load_all<N>(delta + i, added);
        for (u32 j = 0; j < N; j++) x[j] += added[j];
        store_all<N>(residual + i, x);
    }
}

template <class T> DEVICE void add_rows(const AddRowsArgs& args) {
    if (args.width % 8 == 0)
        add_by<T, 8>(args);
    else
        add_by<T, 1>(args);
}

template <class T, u32 N> DEVICE void round_by(const RoundArgs& args) {
    u64 first = u64(blockIdx.x) * args.width;
    T* to = static_cast<T*>(args.to) + first;
    for (u32 i = threadIdx.x * N; i < args.width; i += THREADS * N) {
        float x[N];
        load_all<N>(args.from + first + i, x);
        store_all<N>(to + i, x);
    }
}

template <class T> DEVICE void round_rows(const RoundArgs& args) {
    if (args.width % 8 == 0)
        round_by<T, 8>(args);
    else
        round_by<T, 1>(args);
}

// The block's second index is 0 for queries and 1 for keys.
template <class T, u32 N> DEVICE void projection_norm_by(const ProjectionNormArgs& args) {
    bool is_key = blockIdx.y == 1;
    u32 width = is_key ? args.key_width : args.query_width;
    const float* weights = is_key ? args.key_weight : args.query_weight;
    u64 stride = u64(args.query_width) + 2 * u64(args.key_width);
    T* row = static_cast<T*>(args.qkv) + blockIdx.x * stride + (is_key ? args.query_width : 0);
    float scale = row_scale(squares<N>(row, width), width, args.epsilon);
    for (u32 i = threadIdx.x * N; i < width; i += THREADS * N) {
        float x[N], weight[N];
        load_all<N>(row + i, x);
        load_all<N>(weights + i, weight);
        for (u32 j = 0; j < N; j++) x[j] = x[j] * scale * weight[j];
        store_all<N>(row + i, x);
    }
}

template <class T> DEVICE void projection_norm(const ProjectionNormArgs& args) {
    if (args.query_width % 8 == 0 && args.key_width % 8 == 0)
        projection_norm_by<T, 8>(args);
    else
        projection_norm_by<T, 1>(args);
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
extern "C" KERNEL(THREADS, 1) norm_f32(GRID_CONSTANT const NormArgs args) { start_kernel(); norm<float>(args); }
extern "C" KERNEL(THREADS, 1) norm_bf16(GRID_CONSTANT const NormArgs args) { start_kernel(); norm<bf16>(args); }
extern "C" KERNEL(THREADS, 1) norm_add_f32(GRID_CONSTANT const NormAddArgs args) { start_kernel(); norm_add<float>(args); }
extern "C" KERNEL(THREADS, 1) norm_add_bf16(GRID_CONSTANT const NormAddArgs args) { start_kernel(); norm_add<bf16>(args); }
extern "C" KERNEL(THREADS, 1) add_rows_f32(GRID_CONSTANT const AddRowsArgs args) { start_kernel(); add_rows<float>(args); }
extern "C" KERNEL(THREADS, 1) add_rows_bf16(GRID_CONSTANT const AddRowsArgs args) { start_kernel(); add_rows<bf16>(args); }
extern "C" KERNEL(THREADS, 1) round_rows_bf16(GRID_CONSTANT const RoundArgs args) { start_kernel(); round_rows<bf16>(args); }
// Grid: (rows, 2).
extern "C" KERNEL(THREADS, 1) projection_norm_f32(GRID_CONSTANT const ProjectionNormArgs args) { start_kernel(); projection_norm<float>(args); }
extern "C" KERNEL(THREADS, 1) projection_norm_bf16(GRID_CONSTANT const ProjectionNormArgs args) { start_kernel(); projection_norm<bf16>(args); }
// Grid: (rows, (query_heads + kv_heads) / 4 rounded up).
extern "C" KERNEL(HEAD_WARPS * 32, 1) head_norm_f32(GRID_CONSTANT const HeadNormArgs args) { start_kernel(); head_norm<float>(args); }
extern "C" KERNEL(HEAD_WARPS * 32, 1) head_norm_bf16(GRID_CONSTANT const HeadNormArgs args) { start_kernel(); head_norm<bf16>(args); }
