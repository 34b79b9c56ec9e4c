// The sum of each row's experts: weights times outputs, added from zero in ascending order of the experts' indices,
// the shared expert's last.
//
// Bandwidth-bound: four bytes read for each element of each expert that the row uses.
#include "piece.cuh"
#include "stored.cuh"

struct CombineArgs {
    const float* outputs;         // (places, width)
    const u32* places;            // (rows of the piece, chosen)
    const float* weights;         // (rows of the piece, chosen)
    const float* shared;          // (rows, width), or null
    const float* shared_weights;  // (rows of the piece)
    void* out;                    // (rows, width), T
    ExpertPiece piece;
    u32 chosen;
    u32 width;
};

constexpr u32 THREADS = 256;

template <u32 N> DEVICE void add_scaled(float (&sums)[N], const float* from, float weight) {
    float x[N];
    load_all<N>(from, x);
#pragma unroll
    for (u32 i = 0; i < N; i++) sums[i] = fma_rn(weight, x[i], sums[i]);
}

template <class T, u32 N> DEVICE void combine_by(const CombineArgs& args) {
    const u32 row = blockIdx.x, column = (blockIdx.y * THREADS + threadIdx.x) * N;
    if (row >= args.piece.rows() || column >= args.width) return;
    float sums[N];
#pragma unroll
    for (u32 i = 0; i < N; i++) sums[i] = 0;
#pragma unroll 4
    for (u32 use = 0; use < args.chosen; use++) {
        const u64 at = u64(row) * args.chosen + use;
        add_scaled<N>(sums, args.outputs + u64(args.places[at]) * args.width + column, args.weights[at]);
    }
    const u64 to = u64(args.piece.first + row) * args.width + column;
    if (args.shared != nullptr) add_scaled<N>(sums, args.shared + to, args.shared_weights[row]);
    store_all<N>(static_cast<T*>(args.out) + to, sums);
}

template <class T> DEVICE void combine(const CombineArgs& args) {
    if (args.width % 8 == 0) {
        combine_by<T, 8>(args);
    } else {
        combine_by<T, 1>(args);
    }
}

// Grid: (rows of the piece, width / 2048 rounded up), or width / 256 where width is no multiple of 8.
extern "C" KERNEL(THREADS, 1) experts_combine_f32(GRID_CONSTANT const CombineArgs args) { start_kernel(); combine<float>(args); }
extern "C" KERNEL(THREADS, 1) experts_combine_bf16(GRID_CONSTANT const CombineArgs args) { start_kernel(); combine<bf16>(args); }
