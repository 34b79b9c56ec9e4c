// The shapes of the tensor-core kernels, by head dim and by how elements are stored.
//
// Owns: the slabs of a block, and the blocks that a multiprocessor shall hold.
// Never: differs between decode and prefill in anything but how warps divide a tile, so that a row gives the same
// bits from both.
//
// Decode: one tile of 16 packed rows per block, its four warps divide the keys for the scores and
// the dims for the values; three barriers per key tile take little time compared with its bytes.
// Reading is the limit: 4.8 TB/s over 132 multiprocessors at a microsecond's latency ask for 36 KB
// on the way to each. With the slabs chosen here all blocks of a multiprocessor together have 75 KB
// or more on the way, and each alone 25 KB or more (at head dim 128 in bf16 64 KB), so that one
// block can begin an item or merge while another reads on.
// Prefill: four tiles of 16 packed rows per block, a warp each, which share the keys and values in
// shared memory; a tile's keys and values are on their way while the tile before is worked on. At
// head dim 256 two warps share a row tile, or their registers would not hold its values.
#pragma once
#include "item.cuh"

namespace attend {

template <u32 DIM, class Stored> struct Choice {
    static constexpr u32 KEY_BYTES = DIM * sizeof(Stored);
    static constexpr u32 DECODE_SLABS = KEY_BYTES >= 512 ? 4 : KEY_BYTES > 128 ? 5 : 7;
    static constexpr u32 DECODE_BLOCKS = KEY_BYTES >= 512 ? 1 : KEY_BYTES > 128 ? 2 : 3;
    static constexpr u32 PREFILL_SPLIT = DIM >= 256 ? 2 : 1;
    static constexpr u32 PREFILL_SLABS = KEY_BYTES >= 512 ? 3 : 4;
    static constexpr u32 PREFILL_BLOCKS = DIM >= 256 ? 1 : 2;
    using Decode = Shape<DIM, DECODE_ROWS / 16, 4, DECODE_SLABS, Stored>;
    // For a block of 99 KiB of shared memory: the fewest slabs, and totals in registers.
    using SmallDecode = Shape<DIM, DECODE_ROWS / 16, 4, 3, Stored, Totals::Registers>;
    static constexpr u32 SMALL_DECODE_BLOCKS = 1;
    using Prefill = Shape<DIM, PREFILL_ROWS / 16, PREFILL_SPLIT, PREFILL_SLABS, Stored>;
};

}  // namespace attend

#define ATTEND_ENTRY(name, dim, stored, kind, blocks) \
    extern "C" KERNEL((attend::Choice<dim, stored>::kind::THREADS), (attend::Choice<dim, stored>::blocks)) \
        name(GRID_CONSTANT const AttendArgs args) { \
        DYNAMIC_SHARED(u8, shared); \
        start_kernel(); \
        attend::attend_items<attend::Choice<dim, stored>::kind>(args, shared); \
    }

#define ATTEND_ENTRIES(decode, prefill, dim, stored) \
    ATTEND_ENTRY(decode, dim, stored, Decode, DECODE_BLOCKS) \
    ATTEND_ENTRY(prefill, dim, stored, Prefill, PREFILL_BLOCKS)
