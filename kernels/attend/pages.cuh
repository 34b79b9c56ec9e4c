// The copies of keys and values from the pool's blocks to shared memory.
//
// Owns: the walk through a block table, and the ring of slabs.
// Never: waits for a copy; the computing code waits.
// Invariant: the pool and the table are read only below `keys_end`; the rest of a slab is zero,
// since the rest of a block may hold anything.
#pragma once
#include "task.cuh"

namespace attend {

// This thread's entry of a span's blocks, if the span has so many.
DEVICE u32 block_of_thread(const Pages& pages, u32 span) {
    const u32 entry = ((span * SPAN_KEYS) >> pages.block_shift) + threadIdx.x;
    const bool is_there = threadIdx.x < SPAN_BLOCKS && entry << pages.block_shift < min(pages.keys_end, (span + 1) * SPAN_KEYS);
    return is_there ? pages.table[entry] : 0;
}

// Starts the copies of one tile of keys or of values; `blocks` are its span's.
template <class S> DEVICE void fill_slab(u8* slab, const u8* heads, const Pages& pages, const u32* blocks, u32 tile) {
    constexpr u32 PASSES = (TILE_KEYS * S::CHUNKS + S::THREADS - 1) / S::THREADS;
    constexpr bool IS_EVEN = TILE_KEYS * S::CHUNKS % S::THREADS == 0;
    const u32 shift = pages.block_shift, block_bytes = pages.block_bytes, keys_end = pages.keys_end;
    // All look-ups precede all copies: both go through shared memory, and no read passes a copy.
    const u8* from[PASSES];
#pragma unroll
    for (u32 pass = 0; pass < PASSES; pass++) {
        const u32 index = pass * S::THREADS + threadIdx.x;
        const u32 key = min(index / S::CHUNKS, TILE_KEYS - 1) + tile * TILE_KEYS;
        const u32 token = key & ((1u << shift) - 1);
        const u64 block = u64(blocks[(key % SPAN_KEYS) >> shift]) * block_bytes;
        from[pass] = heads + index % S::CHUNKS * 16 + block + token * (S::CHUNKS * 16);
    }
#pragma unroll
    for (u32 pass = 0; pass < PASSES; pass++) {
        const u32 index = pass * S::THREADS + threadIdx.x;
        const u32 row = index / S::CHUNKS;
        if (!IS_EVEN && row >= TILE_KEYS) break;
        cp_async_16(slab + slab_offset<S>(row, index % S::CHUNKS), from[pass], tile * TILE_KEYS + row < keys_end);
    }
}

// Slabs of a run of tiles, K and V by turns, round and round. Every slab's copies are one group,
// even past the end, so that a wait can count groups.
template <class S> struct Ring {
    u8* slabs;
    Task<S>& task;
    // The tile to copy next, its part (keys or values), and the slab to copy into.
    u32 tile;
    u32 part;
    u32 slab;
    // This thread's block of the next span, which is still being loaded.
    u32 block;

    // All threads of the block come here together.
    DEVICE Ring(u8* shared, Task<S>& mine) : slabs(shared), task(mine), tile(mine.tile_first), part(0), slab(0) {
        const u32 span = tile / SPAN_TILES;
        const u32 first = block_of_thread(task.pages, span);
        block = block_of_thread(task.pages, span + 1);
        if (threadIdx.x < SPAN_BLOCKS) {
            task.blocks[span % 3][threadIdx.x] = first;
            task.blocks[(span + 1) % 3][threadIdx.x] = block;
        }
        sync_block();
        fill(S::SLABS - 2);
    }

    // This stays a loop, because unrolled copies of a slab would be too much code.
    DEVICE void fill(u32 slabs_count) {
#pragma unroll 1
        for (u32 i = 0; i < slabs_count; i++) {
            if (tile < task.tile_end) fill_one();
            cp_async_commit();
            slab = after(slab);
            tile += part;
            part ^= 1;
        }
    }

    DEVICE void fill_one() {
        const Pages& pages = task.pages;
        const u32 span = tile / SPAN_TILES;
        fill_slab<S>(slabs + slab * S::SLAB_BYTES, part == 0 ? pages.keys : pages.values, pages, task.blocks[span % 3], tile);
        if (part != 0) return;
        // On entering a span, the next one's blocks are asked for. They are stored a tile later,
        // when they have arrived, into an entry that no warp reads: some warps may be as far back
        // as the previous span.
        if (tile % SPAN_TILES == 0) block = block_of_thread(pages, span + 1);
        if (tile % SPAN_TILES == 1 && threadIdx.x < SPAN_BLOCKS) task.blocks[(span + 1) % 3][threadIdx.x] = block;
    }

    static DEVICE u32 after(u32 slab) { return slab + 1 == S::SLABS ? 0 : slab + 1; }
};

}  // namespace attend
