// The places of a step's rows in the order of experts.
//
// Owns: that order, and the tiles that products cut it into.
// Never: depends on the order in which blocks run.
// Invariant: places are in ascending order of experts, and of rows within an expert.
#include "expert_rows.cuh"

struct ExpertSortArgs {
    // (count, words): which rows use an expert, see RouteArgs.
    const u32* masks;
    // (rows, chosen): experts of each row, ascending.
    const u32* experts;
    // (rows, chosen): the place of each of them.
    u32* places;
    // The row of each place, counted from the step's first.
    u32* rows_of;
    ExpertTile* tiles;
    u32* tiles_count;
    u32 first_row;
    u32 count;
    u32 chosen;
    // At most THREADS.
    u32 words;
    // Places of a tile.
    u32 tile_rows;
    u32 unused;
};

constexpr u32 THREADS = 256, WARPS = THREADS / 32;

// Places and tiles of some experts.
struct Extent {
    u32 places;
    u32 tiles;
};

// The sum over all threads of the block, of those before this one and of all.
DEVICE u32 sum_before(u32 value, u32& all) {
    __shared__ u32 of_warps[WARPS];
    u32 sum = value;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 below = shuffle_up(sum, distance);
        if (lane_index() >= distance) sum += below;
    }
    sync_block();
    if (lane_index() == 31) of_warps[threadIdx.x / 32] = sum;
    sync_block();
    u32 before = 0;
    all = 0;
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) {
        if (warp < threadIdx.x / 32) before += of_warps[warp];
        all += of_warps[warp];
    }
    return before + sum - value;
}

// The experts before this block's, each thread some of them.
DEVICE Extent experts_before(const ExpertSortArgs& args) {
    u32 places = 0, tiles = 0;
    for (u32 expert = threadIdx.x; expert < blockIdx.x; expert += THREADS) {
        u32 of_expert = 0;
        for (u32 word = 0; word < args.words; word++) of_expert += count_ones(args.masks[u64(expert) * args.words + word]);
        places += of_expert;
        tiles += (of_expert + args.tile_rows - 1) / args.tile_rows;
    }
    Extent all;
    sum_before(places, all.places);
    sum_before(tiles, all.tiles);
    return all;
}

// Grid: a block for each expert.
extern "C" KERNEL(THREADS, 1) experts_sort(GRID_CONSTANT const ExpertSortArgs args) {
    start_kernel();
    const u32 expert = blockIdx.x;
    const Extent before = experts_before(args);
    u32 mask = threadIdx.x < args.words ? args.masks[u64(expert) * args.words + threadIdx.x] : 0;
    u32 rows;
    u32 place = before.places + sum_before(count_ones(mask), rows);
    const u32 tiles = (rows + args.tile_rows - 1) / args.tile_rows;
    for (; mask != 0; mask &= mask - 1, place++) {
        const u32 row = threadIdx.x * 32 + 31 - leading_zeros(mask & (0u - mask));
        u64 at = u64(row) * args.chosen;
        while (args.experts[at] != expert) at++;
        args.places[at] = place;
        args.rows_of[place] = args.first_row + row;
    }
    for (u32 tile = threadIdx.x; tile < tiles; tile += THREADS) {
        args.tiles[before.tiles + tile] = {expert, before.places, before.places + rows, before.tiles};
    }
    if (threadIdx.x == 0 && expert + 1 == args.count) *args.tiles_count = before.tiles + tiles;
}
