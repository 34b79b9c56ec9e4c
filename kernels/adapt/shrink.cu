// The first product of adapters: shrunk[p] = A . x[row of p], in f32, for each place with the adapter of its row.
//
// Owns: the choice between warps of one rank and of several.
// Never: rounds a weight or a row.
//
// Few rows are bound by the latency of their loads, so that every warp has one rank of one row. Many would read the
// matrices again and again: there a warp has eight rows of an adapter and four ranks.
#include "adapters.cuh"
#include "warp_sums.cuh"

struct ShrinkArgs {
    const void* x;  // (rows, width), T
    float* shrunk;  // (places, ranks_most)
    AdapterRows rows;
    u32 width;
    // 1 if warps have several rows and ranks.
    u32 is_tiled;
};

constexpr u32 WARPS = 4, TILE_RANKS = 4;

// Places `first .. end` of one adapter, and ranks from `first_rank` on.
template <class T, u32 ROWS, u32 RANKS, u32 N> DEVICE void shrink_by(const ShrinkArgs& args, u32 first, u32 end, u32 first_rank) {
    const AdapterChange change = args.rows.change(first);
    if (first_rank >= change.ranks) return;
    const u32 ranks = min(RANKS, change.ranks - first_rank);
    const T* x[ROWS];
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        x[row] = static_cast<const T*>(args.x) + u64(args.rows.places[min(first + row, end - 1)].row) * args.width;
    }
    float sums[ROWS][RANKS];
    warp_sums<ROWS, RANKS, N>(x, change.shrink + u64(first_rank) * args.width, ranks, args.width, sums);
    if (lane_index() != 0) return;
#pragma unroll
    for (u32 i = 0; i < ROWS * RANKS; i++) {
        const u32 place = first + i / RANKS, rank = i % RANKS;
        if (place < end && rank < ranks) args.shrunk[u64(place) * args.rows.ranks_most + first_rank + rank] = sums[i / RANKS][rank];
    }
}

template <class T, u32 ROWS, u32 RANKS> DEVICE void shrink_of(const ShrinkArgs& args, u32 first, u32 end, u32 first_rank) {
    if (args.width % 8 == 0) {
        shrink_by<T, ROWS, RANKS, 8>(args, first, end, first_rank);
    } else {
        shrink_by<T, ROWS, RANKS, 1>(args, first, end, first_rank);
    }
}

template <class T> DEVICE void shrink(const ShrinkArgs& args) {
    const u32 warp = blockIdx.x * WARPS + threadIdx.x / 32;
    if (args.is_tiled != 0) {
        const u32 across = (args.rows.ranks_most + TILE_RANKS - 1) / TILE_RANKS, tile = warp / across;
        if (tile >= args.rows.tiles_count()) return;
        const AdapterTile places = args.rows.tiles[tile];
        shrink_of<T, TILE_PLACES, TILE_RANKS>(args, places.first, places.end, warp % across * TILE_RANKS);
    } else {
        const u32 place = warp / args.rows.ranks_most;
        if (place >= args.rows.places_count()) return;
        shrink_of<T, 1, 1>(args, place, place + 1, warp % args.rows.ranks_most);
    }
}

// Grid: a warp for each place and rank, or for each tile and four ranks.
extern "C" KERNEL(32 * WARPS, 2) adapt_shrink_f32(GRID_CONSTANT const ShrinkArgs args) { start_kernel(); shrink<float>(args); }
extern "C" KERNEL(32 * WARPS, 2) adapt_shrink_bf16(GRID_CONSTANT const ShrinkArgs args) { start_kernel(); shrink<bf16>(args); }
