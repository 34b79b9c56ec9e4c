// Matrix products of any shape, in f32 arithmetic.
//
// Owns: the reference, F32 precision, and bf16 shapes whose rows are not whole 16 bytes; of one matrix, or of experts'.
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

// Rows of a matrix up to number `end`, which lie where `rows_of` says, or in order if it is null.
template <class T> struct PlainRows {
    const T* from;
    const u32* rows_of;
    u32 end;
    u32 width;
};

// Rows `first ..` and steps `depth ..`; zeros where there is nothing.
template <class T> DEVICE void load_tile(PlainTile& tile, const PlainRows<T>& rows, u32 first, u32 depth) {
    for (u32 i = threadIdx.x; i < PLAIN_TILE * PLAIN_DEPTH; i += PLAIN_THREADS) {
        const u32 row = first + i / PLAIN_DEPTH, step = i % PLAIN_DEPTH;
        float value = 0;
        if (row < rows.end && depth + step < rows.width) {
            const u64 from = rows.rows_of == nullptr ? row : rows.rows_of[row];
            value = to_f32(rows.from[from * rows.width + depth + step]);
        }
        tile[step][i / PLAIN_DEPTH] = value;
    }
}

// A tile of the output: its first column and row, the end of its matrix' rows, and the expert.
struct PlainUnit {
    u32 first_column;
    u32 first_row;
    u32 rows_end;
    u32 expert;
};

DEVICE u32 plain_row_tiles(const MatmulPlainArgs& args, const AllRows&) { return divided_up(*args.rows_count, PLAIN_TILE); }
DEVICE u32 plain_row_tiles(const MatmulPlainArgs&, const ExpertRows& rows) { return *rows.tiles_count; }

DEVICE PlainUnit plain_unit(const MatmulPlainArgs& args, const AllRows&, u32 column_tile, u32 row_tile) {
    return {column_tile * PLAIN_TILE, row_tile * PLAIN_TILE, *args.rows_count, 0};
}
DEVICE PlainUnit plain_unit(const MatmulPlainArgs&, const ExpertRows& rows, u32 column_tile, u32 row_tile) {
    const ExpertTile tile = rows.tiles[row_tile];
    return {column_tile * PLAIN_TILE, tile.first + (row_tile - tile.first_tile) * PLAIN_TILE, tile.end, tile.expert};
}

DEVICE const u32* plain_rows_of(const AllRows&) { return nullptr; }
DEVICE const u32* plain_rows_of(const ExpertRows& rows) { return rows.rows_of; }

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

template <class T, class Rows> DEVICE void multiply_plain(const MatmulPlainArgs& args, const Rows& all) {
    __shared__ PlainTile weights, x;
    const u32 column_tiles = divided_up(args.columns, PLAIN_TILE);
    const u32 tiles = column_tiles * plain_row_tiles(args, all);
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const PlainUnit unit = plain_unit(args, all, tile % column_tiles, tile / column_tiles);
        const u32 first_column = unit.first_column, first_row = unit.first_row, rows = unit.rows_end;
        const PlainRows<T> left = {static_cast<const T*>(args.x), plain_rows_of(all), rows, args.width};
        const PlainRows<T> right = {of_expert(static_cast<const T*>(args.weights), all, unit.expert), nullptr, args.columns, args.width};
        const float* bias = of_expert(args.bias, all, unit.expert);
        const u32 my_column = threadIdx.x % 16, my_row = threadIdx.x / 16;
        PlainSums sums;
        // Sums of one slice, of two and of four that wait for their neighbours'.
        PlainSums waiting[WAITING_MOST];
        u32 depth = 0;
        for (u32 slice = 0; slice < args.slices; slice++) {
            const u32 end = args.slice_ends[slice];
            sums.clear();
            for (; depth < end; depth += PLAIN_DEPTH) {
                load_tile(weights, right, first_column, depth);
                load_tile(x, left, first_row, depth);
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
            const float sum = bias == nullptr ? sums.of[i / 4][i % 4] : add_rn(sums.of[i / 4][i % 4], bias[column]);
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

#define PLAIN_ENTRIES(name, type) \
    extern "C" KERNEL(matmul::PLAIN_THREADS, 2) matmul_plain_##name(GRID_CONSTANT const MatmulPlainArgs args) { \
        start_kernel(); \
        matmul::multiply_plain<type>(args, AllRows{}); \
    } \
    extern "C" KERNEL(matmul::PLAIN_THREADS, 2) experts_plain_##name(GRID_CONSTANT const ExpertMatmulPlainArgs args) { \
        start_kernel(); \
        matmul::multiply_plain<type>(args.product, args.rows); \
    }

PLAIN_ENTRIES(f32, float)
PLAIN_ENTRIES(bf16, bf16)
