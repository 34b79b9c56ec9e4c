// Sums of products that a warp computes, in f32.
//
// Owns: the order of a sum, which the width alone decides: a lane's elements in order, then lanes by halves.
// Never: knows where a result goes.
// Invariant: how many rows and columns a warp has changes no bit of any of them.
#pragma once
#include "stored.cuh"

// sums[r][c] = x[r] . weights[c], N elements of each at a time; of `columns` rows of weights the last stands for those
// that are missing. `x` are rows, each of which exists. Every lane has the sums.
template <u32 ROWS, u32 COLUMNS, u32 N, class T>
DEVICE void warp_sums(const T* const (&x)[ROWS], const float* weights, u32 columns, u32 width, float (&sums)[ROWS][COLUMNS]) {
#pragma unroll
    for (u32 i = 0; i < ROWS * COLUMNS; i++) sums[i / COLUMNS][i % COLUMNS] = 0;
    for (u32 at = lane_index() * N; at < width; at += 32 * N) {
        float left[ROWS][N];
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) load_all<N>(x[row] + at, left[row]);
#pragma unroll
        for (u32 column = 0; column < COLUMNS; column++) {
            float right[N];
            load_all<N>(weights + u64(min(column, columns - 1)) * width + at, right);
#pragma unroll
            for (u32 i = 0; i < ROWS * N; i++) {
                float& sum = sums[i / N][column];
                sum = fma_rn(left[i / N][i % N], right[i % N], sum);
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < ROWS * COLUMNS; i++) {
        float& sum = sums[i / COLUMNS][i % COLUMNS];
#pragma unroll
        for (u32 mask = 16; mask > 0; mask /= 2) sum = add_rn(sum, shuffle_xor(sum, mask));
    }
}
