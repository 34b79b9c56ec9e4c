// The division of a tensor-core attention kernel: rows and dims over warps, keys over shared
// memory.
//
// Owns: the sizes, and the place of a chunk of 16 bytes in a slab of keys or values.
// Never: knows a sequence.
// Invariant: eight rows of one chunk column lie in eight different groups of banks, so that ldmatrix reads them
// at once.
#pragma once
#include "attend.cuh"

namespace attend {

// DIM: elements of a head, a multiple of 16. ROW_TILES: tiles of 16 packed rows per block. SPLIT:
// warps that share a row tile (1, 2 or 4): each scores its quarters of every key tile and sums its
// share of the dims. SLABS: tiles of K or of V in shared memory, at least 3; all but two of them
// are on their way at any time. TOTALS: the place of a thread's totals of values, which are read
// once a span.
enum class Totals { Shared, Registers };

template <u32 DIM_, u32 ROW_TILES_, u32 SPLIT_, u32 SLABS_, class Stored_, Totals TOTALS_ = Totals::Shared> struct Shape {
    using Stored = Stored_;
    static constexpr u32 DIM = DIM_;
    static constexpr u32 ROW_TILES = ROW_TILES_;
    static constexpr u32 SPLIT = SPLIT_;
    static constexpr u32 SLABS = SLABS_;
    static constexpr Totals TOTALS = TOTALS_;
    static_assert(DIM % 16 == 0 && 4 % SPLIT == 0 && SLABS >= 3, "a shape that the kernels are written for");

    static constexpr bool IS_FP8 = sizeof(Stored) == 1;
    static constexpr u32 ROWS = 16 * ROW_TILES;
    static constexpr u32 THREADS = 32 * ROW_TILES * SPLIT;
    // Quarters of a key tile, 16 keys each, that a warp scores.
    static constexpr u32 QUARTERS = 4 / SPLIT;
    // A pair is 16 dims, two tiles of an mma's result; a warp sums `OWN_PAIRS` of them at most.
    static constexpr u32 PAIRS = DIM / 16;
    static constexpr u32 OWN_PAIRS = (PAIRS + SPLIT - 1) / SPLIT;

    // Chunks of 16 bytes: of a row as stored, and of a row in a slab. A row of whole 128 bytes is swizzled, any
    // other is padded to an odd number of chunks.
    static constexpr u32 CHUNKS = DIM * sizeof(Stored) / 16;
    static constexpr bool IS_SWIZZLED = CHUNKS % 8 == 0;
    static constexpr u32 SLAB_CHUNKS = IS_SWIZZLED ? CHUNKS : CHUNKS | 1;
    static constexpr u32 SLAB_BYTES = TILE_KEYS * SLAB_CHUNKS * 16;

    // Shared memory: slabs; every thread's total of values; scores, or sums, that warps of a row tile exchange.
    static constexpr u32 TOTAL_BYTES = TOTALS == Totals::Shared ? OWN_PAIRS * 2 * THREADS * 16 : 0;
    static constexpr u32 EXCHANGE_FLOATS = SPLIT > 1 ? ROW_TILES * 4 * 16 : 0;
    static constexpr u32 SHARED_BYTES = SLABS * SLAB_BYTES + TOTAL_BYTES + EXCHANGE_FLOATS * 4;
    // Weights are exchanged through the slab of the keys that they came from, so they must fit it.
    static_assert(SPLIT == 1 || ROW_TILES * 4 * 32 * 16 <= SLAB_BYTES, "weights fit a slab");

    static constexpr u32 STATE_FLOATS = STATE_HEADER + DIM;
};

// The place of a chunk in a slab, in bytes.
template <class S> DEVICE u32 slab_offset(u32 key, u32 chunk) {
    if constexpr (S::IS_SWIZZLED) {
        return (key * S::CHUNKS + (chunk ^ (key & 7))) * 16;
    } else {
        return (key * S::SLAB_CHUNKS + chunk) * 16;
    }
}

}  // namespace attend
