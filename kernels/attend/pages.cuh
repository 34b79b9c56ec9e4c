// Keys and values on their way from the pool's blocks to shared memory.
//
// Owns: the walk through a block table, and the ring of slabs.
// Never: waits for a copy; who computes does.
// Invariant: the pool and the table are read only below `keys_end`; what a slab has beyond is zero, since a block's
// rest may hold anything.
#pragma once
#include "shape.cuh"

namespace attend {

// Where one KV head of one sequence lies in a layer.
struct Pages {
    // Of block 0.
    const u8* keys;
    const u8* values;
    const u32* table;
    u32 block_bytes;
    u32 block_shift;
    u32 keys_end;
};

// A span's blocks: this lane's is the table's entry number `lane`, and number `lane + 32`, counted from the span's
// first. A span has 64 blocks at most, of 8 tokens.
struct Entries {
    u32 low;
    u32 high;
};

DEVICE Entries entries_of(const Pages& pages, u32 span) {
    const u32 low = ((span * SPAN_KEYS) >> pages.block_shift) + lane_index();
    const u32 high = low + 32;
    Entries entries = {0, 0};
    if (low << pages.block_shift < pages.keys_end) entries.low = pages.table[low];
    if (pages.block_shift == 3 && high << pages.block_shift < pages.keys_end) entries.high = pages.table[high];
    return entries;
}

DEVICE u32 block_of(const Pages& pages, const Entries& entries, u32 key) {
    const u32 entry = (key % SPAN_KEYS) >> pages.block_shift;
    const u32 block = shuffle(entries.low, entry & 31);
    if (pages.block_shift > 3) return block;
    const u32 far = shuffle(entries.high, entry & 31);
    return entry < 32 ? block : far;
}

// Asks for one tile of keys or of values.
template <class S> DEVICE void fill_slab(u8* slab, const u8* heads, const Pages& pages, const Entries& entries, u32 tile) {
    constexpr u32 COUNT = TILE_KEYS * S::CHUNKS;
#pragma unroll
    for (u32 first = 0; first < COUNT; first += S::THREADS) {
        const u32 index = first + threadIdx.x;
        const u32 row = index / S::CHUNKS, chunk = index % S::CHUNKS;
        const u32 key = tile * TILE_KEYS + row;
        const u32 block = block_of(pages, entries, key);
        if (COUNT % S::THREADS != 0 && index >= COUNT) break;
        const u32 token = key & ((1u << pages.block_shift) - 1);
        const u8* from = heads + u64(block) * pages.block_bytes + (token * S::CHUNKS + chunk) * 16;
        cp_async_16(slab + slab_offset<S>(row, chunk), from, key < pages.keys_end);
    }
}

// Slabs of a run of tiles, K and V by turns, round and round. Every `fill` is one group of copies, even past the
// end, so that who waits can count.
template <class S> struct Ring {
    u8* slabs;
    Pages pages;
    Entries entries;
    Entries entries_next;
    u32 tile_end;
    // What is filled next, and where to.
    u32 tile;
    u32 part;
    u32 slab;

    DEVICE Ring(u8* shared, const Pages& pages_of_head, u32 first, u32 end)
        : slabs(shared), pages(pages_of_head), tile_end(end), tile(first), part(0), slab(0) {
        entries = entries_of(pages, first / SPAN_TILES);
        entries_next = entries_of(pages, first / SPAN_TILES + 1);
#pragma unroll
        for (u32 i = 0; i < S::SLABS - 2; i++) fill();
    }

    DEVICE void fill() {
        if (tile < tile_end) {
            fill_slab<S>(slabs + slab * S::SLAB_BYTES, part == 0 ? pages.keys : pages.values, pages, entries, tile);
        }
        cp_async_commit();
        slab = after(slab);
        part ^= 1;
        if (part == 1) return;
        tile++;
        if (tile % SPAN_TILES != 0) return;
        // The table's next entries were asked for a whole span ago.
        entries = entries_next;
        entries_next = entries_of(pages, tile / SPAN_TILES + 1);
    }

    static DEVICE u32 after(u32 slab) { return slab + 1 == S::SLABS ? 0 : slab + 1; }
};

}  // namespace attend
