// The second product of adapters, added to the model's own: out[row of p] += B . shrunk[p], for each place.
//
// Owns: the order of a sum: ranks in order, from zero; then what the row has already.
// Never: touches a row without an adapter.
//
// A thread has some columns of the rows of a tile. It reads B once for them all.
#include "adapters.cuh"
#include "stored.cuh"

struct ExpandArgs {
    const float* shrunk;  // (places, ranks_most)
    void* out;            // (rows, width), T
    AdapterRows rows;
    u32 width;
    u32 unused;
};

constexpr u32 THREADS = 128;

template <class T, u32 N> DEVICE void expand_by(const ExpandArgs& args) {
    const u32 column = (blockIdx.y * THREADS + threadIdx.x) * N;
    if (blockIdx.x >= args.rows.tiles_count() || column >= args.width) return;
    const AdapterTile tile = args.rows.tiles[blockIdx.x];
    const AdapterChange change = args.rows.change(tile.first);
    // Not even zero is added where nothing changes: it would turn a negative zero into a positive one.
    if (change.ranks == 0) return;
    const u32 places = tile.end - tile.first;
    const float* shrunk = args.shrunk + u64(tile.first) * args.rows.ranks_most;
    float sums[TILE_PLACES][N];
#pragma unroll
    for (u32 i = 0; i < TILE_PLACES * N; i++) sums[i / N][i % N] = 0;
    for (u32 rank = 0; rank < change.ranks; rank++) {
        float right[N];
        load_all<N>(change.expand + u64(rank) * args.width + column, right);
#pragma unroll
        for (u32 place = 0; place < TILE_PLACES; place++) {
            const float left = shrunk[u64(min(place, places - 1)) * args.rows.ranks_most + rank];
#pragma unroll
            for (u32 i = 0; i < N; i++) sums[place][i] = fma_rn(left, right[i], sums[place][i]);
        }
    }
#pragma unroll
    for (u32 place = 0; place < TILE_PLACES; place++) {
        if (place >= places) break;
        T* at = static_cast<T*>(args.out) + u64(args.rows.places[tile.first + place].row) * args.width + column;
        float x[N];
        load_all<N>(at, x);
#pragma unroll
        for (u32 i = 0; i < N; i++) x[i] = add_rn(x[i], sums[place][i]);
        store_all<N>(at, x);
    }
}

template <class T> DEVICE void expand(const ExpandArgs& args) {
    if (args.width % 8 == 0) {
        expand_by<T, 8>(args);
    } else {
        expand_by<T, 1>(args);
    }
}

// Grid: (tiles, width / 1024 rounded up), or width / 128 where width is no multiple of 8.
extern "C" KERNEL(THREADS, 2) adapt_expand_f32(GRID_CONSTANT const ExpandArgs args) { start_kernel(); expand<float>(args); }
extern "C" KERNEL(THREADS, 2) adapt_expand_bf16(GRID_CONSTANT const ExpandArgs args) { start_kernel(); expand<bf16>(args); }
