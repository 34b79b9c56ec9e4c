// Matrix products of any shape, in f32 arithmetic.
//
// Owns: the reference, F32 precision, and bf16 shapes whose rows are not whole 16 bytes.
// Never: uses tensor cores.
// Invariant: every slice of an element is one chain of fused multiplications and additions over the inner dimension in
// order; slices are added as a balanced binary tree, then the bias; how many rows there are plays no part.
#include "matmul.cuh"

namespace matmul {

// A block computes PLAIN_TILE × PLAIN_TILE elements, a thread 4 × 4 of them, PLAIN_DEPTH steps at a time.
constexpr u32 PLAIN_TILE = 64;
constexpr u32 PLAIN_DEPTH = 16;
constexpr u32 PLAIN_THREADS = 256;

// A tile's [step][row or column]; a column more, so that storing down a column meets no bank twice.
using PlainTile = float[PLAIN_DEPTH][PLAIN_TILE + 1];

// Rows `first ..` and steps `depth ..` of a (count, width) matrix; zeros where there is nothing.
template <class T> DEVICE void load_tile(PlainTile& tile, const T* from, u32 first, u32 count, u32 depth, u32 width) {
    for (u32 i = threadIdx.x; i < PLAIN_TILE * PLAIN_DEPTH; i += PLAIN_THREADS) {
        const u32 row = i / PLAIN_DEPTH, step = i % PLAIN_DEPTH;
        const bool is_there = first + row < count && depth + step < width;
        tile[step][row] = is_there ? to_f32(from[u64(first + row) * width + depth + step]) : 0.0f;
    }
}

// A thread's sums: rows, and columns.
struct PlainSums {
    float of[4][4];

    DEVICE void clear() {
#pragma unroll
        for (u32 i = 0; i < 16; i++) of[i / 4][i % 4] = 0;
    }

    DEVICE void add(const PlainSums& other) {
#pragma unroll
        for (u32 i = 0; i < 16; i++) of[i / 4][i % 4] = add_rn(of[i / 4][i % 4], other.of[i / 4][i % 4]);
    }
};

template <class T> DEVICE void multiply_plain(const MatmulPlainArgs& args) {
    __shared__ PlainTile weights, x;
    const u32 rows = *args.rows_count;
    const u32 column_tiles = divided_up(args.columns, PLAIN_TILE);
    const u32 tiles = column_tiles * divided_up(rows, PLAIN_TILE);
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 first_column = tile % column_tiles * PLAIN_TILE, first_row = tile / column_tiles * PLAIN_TILE;
        const u32 my_column = threadIdx.x % 16, my_row = threadIdx.x / 16;
        PlainSums sums;
        // Sums of one slice, of two and of four that wait for their neighbours'.
        PlainSums waiting[WAITING_MOST];
        u32 depth = 0;
        for (u32 slice = 0; slice < args.slices; slice++) {
            const u32 end = args.slice_ends[slice];
            sums.clear();
            for (; depth < end; depth += PLAIN_DEPTH) {
                load_tile(weights, static_cast<const T*>(args.weights), first_column, args.columns, depth, args.width);
                load_tile(x, static_cast<const T*>(args.x), first_row, rows, depth, args.width);
                sync_block();
                const u32 steps = min(PLAIN_DEPTH, end - depth);
                // Rows beyond the last are left out: for one row most threads have nothing to add.
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    if (first_row + my_row + i * 16 >= rows) break;
                    for (u32 step = 0; step < steps; step++) {
                        const float left = x[step][my_row + i * 16];
#pragma unroll
                        for (u32 j = 0; j < 4; j++) {
                            sums.of[i][j] = fma_rn(left, weights[step][my_column + j * 16], sums.of[i][j]);
                        }
                    }
                }
                sync_block();
            }
            // A slice whose number ends in k ones meets the sums of the k lowest levels.
            bool is_met = true;
#pragma unroll
            for (u32 level = 0; level < WAITING_MOST; level++) {
                if (!is_met) continue;
                is_met = (slice >> level & 1) != 0;
                if (is_met) {
                    sums.add(waiting[level]);
                } else {
                    waiting[level] = sums;
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            const u32 row = first_row + my_row + i / 4 * 16, column = first_column + my_column + i % 4 * 16;
            if (row >= rows || column >= args.columns) continue;
            const float sum = args.bias == nullptr ? sums.of[i / 4][i % 4] : add_rn(sums.of[i / 4][i % 4], args.bias[column]);
            const u64 at = u64(row) * args.columns + column;
            if (sizeof(T) == sizeof(float) || args.is_out_f32 != 0) {
                static_cast<float*>(args.out)[at] = sum;
            } else {
                static_cast<bf16*>(args.out)[at] = to_bf16(sum);
            }
        }
    }
}

}  // namespace matmul

extern "C" KERNEL(matmul::PLAIN_THREADS, 2) matmul_plain_f32(GRID_CONSTANT const MatmulPlainArgs args) {
    start_kernel();
    matmul::multiply_plain<float>(args);
}

extern "C" KERNEL(matmul::PLAIN_THREADS, 2) matmul_plain_bf16(GRID_CONSTANT const MatmulPlainArgs args) {
    start_kernel();
    matmul::multiply_plain<bf16>(args);
}
