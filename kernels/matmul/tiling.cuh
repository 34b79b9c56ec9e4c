// The division of a tensor-core matrix product: columns and rows over warps, the inner dimension
// over stages.
//
// Owns: the sizes, and the place of a chunk of 16 bytes in a tile in shared memory.
// Never: knows a matrix.
// Invariant: eight rows of one chunk column lie in eight different groups of banks, so that ldmatrix reads them
// at once.
#pragma once
#include "weights.cuh"

namespace matmul {

// A block multiplies COLUMNS of the matrix with ROWS rows, COLUMN_WARPS × ROW_WARPS warps side by side, in stages of
// DEPTH elements of the inner dimension, all but one of STAGES on their way at any time.
template <class Weights_, u32 COLUMNS_, u32 ROWS_, u32 COLUMN_WARPS_, u32 ROW_WARPS_, u32 DEPTH_, u32 STAGES_>
struct Shape {
    using Weights = Weights_;
    static constexpr u32 COLUMNS = COLUMNS_;
    static constexpr u32 ROWS = ROWS_;
    static constexpr u32 COLUMN_WARPS = COLUMN_WARPS_;
    static constexpr u32 ROW_WARPS = ROW_WARPS_;
    static constexpr u32 DEPTH = DEPTH_;
    static constexpr u32 STAGES = STAGES_;
    static constexpr u32 THREADS = 32 * COLUMN_WARPS * ROW_WARPS;

    static constexpr u32 WARP_COLUMNS = COLUMNS / COLUMN_WARPS;
    static constexpr u32 WARP_ROWS = ROWS / ROW_WARPS;
    // Tiles of an mma that a warp sums: 16 columns by 8 rows each.
    static constexpr u32 COLUMN_TILES = WARP_COLUMNS / 16;
    static constexpr u32 ROW_TILES = WARP_ROWS / 8;
    static_assert(COLUMN_TILES * 16 == WARP_COLUMNS && (ROW_TILES == 1 || ROW_TILES % 2 == 0), "whole fragments");
    static_assert(SPAN_UNIT % DEPTH == 0 && DEPTH % (16 * Weights::STEPS) == 0, "a span is whole stages");

    // A stage: weights, rows, and scales of the groups it touches. Chunks are of 16 bytes.
    static constexpr u32 WEIGHT_CHUNKS = DEPTH / Weights::PER_CHUNK;
    static constexpr u32 X_CHUNKS = DEPTH / 8;
    static constexpr u32 X_OFFSET = COLUMNS * WEIGHT_CHUNKS * 16;
    static constexpr u32 SCALES_OFFSET = X_OFFSET + ROWS * X_CHUNKS * 16;
    static constexpr u32 GROUPS_MOST = Weights::SCALING == Scaling::Groups ? DEPTH / Weights::GROUP_LEAST : 0;
    static constexpr u32 STAGE_BYTES = SCALES_OFFSET + GROUPS_MOST * COLUMNS * 4;
    static constexpr u32 SHARED_BYTES = STAGES * STAGE_BYTES;
    // Floats that the sums of one tile and span take in the workspace.
    static constexpr u32 TILE_FLOATS = COLUMNS * ROWS;
};

}  // namespace matmul
