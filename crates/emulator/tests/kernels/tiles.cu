// A matrix product for tensor cores: asynchronous copies into two buffers, tiles by ldmatrix, products by mma.
#include "prims.cuh"

struct TileProductArgs {
    // rows × depth.
    const bf16* a;
    // columns × depth, or depth × columns if `b_is_transposed`.
    const bf16* b;
    float* c;
    u32 rows, columns, depth, b_is_transposed;
};

constexpr u32 SIDE = 32, THREADS = 128;
constexpr u32 CHUNK = 8;

// Loads one 32 × 32 tile of a row-major matrix, 16 bytes for each thread; elements outside are
// zero.
DEVICE void fetch(bf16* to, const bf16* from, u32 first_row, u32 first_column, u32 rows, u32 columns) {
    u32 row = threadIdx.x / 4, column = threadIdx.x % 4 * CHUNK;
    bool is_there = first_row + row < rows && first_column + column < columns;
    cp_async_16(to + row * SIDE + column, from + u64(first_row + row) * columns + first_column + column, is_there);
}

extern "C" KERNEL(128, 1) tile_product(GRID_CONSTANT const TileProductArgs args) {
    DYNAMIC_SHARED(bf16, tiles);
    constexpr u32 TILE = SIDE * SIDE;
    u32 warp = threadIdx.x / 32, lane = lane_index();
    u32 row = blockIdx.y * SIDE, column = blockIdx.x * SIDE;
    u32 steps = (args.depth + SIDE - 1) / SIDE;
    auto fetch_step = [&](u32 step) {
        bf16* to = tiles + step % 2 * 2 * TILE;
        if (step < steps) {
            fetch(to, args.a, row, step * SIDE, args.rows, args.depth);
            if (args.b_is_transposed) {
                fetch(to + TILE, args.b, step * SIDE, column, args.depth, args.columns);
            } else {
                fetch(to + TILE, args.b, column, step * SIDE, args.columns, args.depth);
            }
        }
        cp_async_commit();
    };
    float sums[2][4] = {};
    u32 warp_row = warp / 2 * 16, warp_column = warp % 2 * 16;
    fetch_step(0);
    for (u32 step = 0; step < steps; step++) {
        fetch_step(step + 1);
        cp_async_wait<1>();
        sync_block();
        const bf16* a_tile = tiles + step % 2 * 2 * TILE;
        const bf16* b_tile = a_tile + TILE;
        for (u32 k = 0; k < SIDE; k += 16) {
            u32 a[4], b[4];
            ldmatrix_x4(a, a_tile + (warp_row + lane % 16) * SIDE + k + lane / 16 * 8);
            u32 half = lane / 8 % 2 * 8, side = lane / 16 * 8 + warp_column;
            if (args.b_is_transposed) {
                ldmatrix_x4_transposed(b, b_tile + (k + half + lane % 8) * SIDE + side);
            } else {
                ldmatrix_x4(b, b_tile + (side + lane % 8) * SIDE + k + half);
            }
            const u32 left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
            mma_bf16(sums[0], a, left);
            mma_bf16(sums[1], a, right);
        }
        sync_block();
    }
    cp_async_wait<0>();
    for (u32 tile = 0; tile < 2; tile++) {
        for (u32 part = 0; part < 4; part++) {
            u32 to_row = row + warp_row + lane / 4 + part / 2 * 8;
            u32 to_column = column + warp_column + tile * 8 + lane % 4 * 2 + part % 2;
            if (to_row < args.rows && to_column < args.columns) args.c[u64(to_row) * args.columns + to_column] = sums[tile][part];
        }
    }
}
