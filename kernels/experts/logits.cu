// A router's logits, out[r] = W · x[r] + bias, in f32.
//
// Owns: the choice between warps of one logit and of several; the order of a sum is that of warp_sums.
// Never: rounds a weight or a row.
//
// Few rows are bound by the latency of their loads, so that every warp has one logit. Many would read the matrix again
// and again: there a warp has eight rows and four columns, which are read once for 32 logits.
#include "piece.cuh"
#include "warp_sums.cuh"

struct ExpertLogitsArgs {
    const void* x;         // (rows, width), T
    const float* weights;  // (columns, width)
    const float* bias;     // (columns), or null
    float* logits;         // (rows of the piece, columns)
    ExpertPiece piece;
    u32 columns;
    u32 width;
    // 1 if warps have several rows and columns.
    u32 is_tiled;
    u32 unused;
};

constexpr u32 WARPS = 4;
constexpr u32 TILE_ROWS = 8, TILE_COLUMNS = 4;

// The logits of ROWS rows and COLUMNS columns, N elements of each at a time.
template <class T, u32 ROWS, u32 COLUMNS, u32 N> DEVICE void multiply_logits(const ExpertLogitsArgs& args, u32 first_row, u32 first_column) {
    const u32 rows = min(ROWS, args.piece.rows() - first_row), columns = min(COLUMNS, args.columns - first_column);
    const T* x[ROWS];
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        x[row] = static_cast<const T*>(args.x) + u64(args.piece.first + first_row + min(row, rows - 1)) * args.width;
    }
    float sums[ROWS][COLUMNS];
    warp_sums<ROWS, COLUMNS, N>(x, args.weights + u64(first_column) * args.width, columns, args.width, sums);
    if (lane_index() != 0) return;
#pragma unroll
    for (u32 i = 0; i < ROWS * COLUMNS; i++) {
        const u32 row = i / COLUMNS, column = i % COLUMNS, of = first_column + column;
        if (row >= rows || column >= columns) continue;
        const float sum = sums[row][column];
        args.logits[u64(first_row + row) * args.columns + of] = args.bias == nullptr ? sum : add_rn(sum, args.bias[of]);
    }
}

template <class T, u32 ROWS, u32 COLUMNS> DEVICE void logits_of(const ExpertLogitsArgs& args) {
    const u32 across = (args.columns + COLUMNS - 1) / COLUMNS, warp = blockIdx.x * WARPS + threadIdx.x / 32;
    const u32 first_row = warp / across * ROWS, first_column = warp % across * COLUMNS;
    if (first_row >= args.piece.rows()) return;
    if (args.width % 8 == 0) {
        multiply_logits<T, ROWS, COLUMNS, 8>(args, first_row, first_column);
    } else {
        multiply_logits<T, ROWS, COLUMNS, 1>(args, first_row, first_column);
    }
}

template <class T> DEVICE void logits(const ExpertLogitsArgs& args) {
    if (args.is_tiled != 0) {
        logits_of<T, TILE_ROWS, TILE_COLUMNS>(args);
    } else {
        logits_of<T, 1, 1>(args);
    }
}

// Grid: a warp for each tile of rows and columns.
extern "C" KERNEL(32 * WARPS, 2) experts_logits_f32(GRID_CONSTANT const ExpertLogitsArgs args) { start_kernel(); logits<float>(args); }
extern "C" KERNEL(32 * WARPS, 2) experts_logits_bf16(GRID_CONSTANT const ExpertLogitsArgs args) { start_kernel(); logits<bf16>(args); }
