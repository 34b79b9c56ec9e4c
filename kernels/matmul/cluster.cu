// Matrix products for many rows on Hopper, by clusters of blocks that share what they copy.
//
// Owns: the entries for tiles of 128 and of 192 rows, and the times when a stage is there and when its place is free
// again.
// Never: adds in another order than matmul_many*: steps of 16, spans from zero, spans added as `SliceTree` says. The
// chip decides whether a step of 16 itself rounds as mma's does, and the host compares both before it uses this kernel.
//
// A stage of 64 elements is 2 · 128 · 192 · 64 operations, 768 cycles of a multiprocessor's 4096 a cycle. Alone, a
// block would need 40 KB for it from the second-level cache; a pair of blocks with the same rows copies 28 KB each, 37
// bytes a cycle, with tiles of 128 rows 48 (without a neighbour 64, more than the cache gives). A thread has no
// registers for more rows, because it holds the sums of a span beside those of the spans before.
//
// One thread copies; two warpgroups multiply, each at its own pace, so that one multiplies while the other adds a span.
#include "product.cuh"

struct MatmulClusterArgs {
    // Of (columns, width) and (rows, width), in boxes of what one block copies of a stage: see `Cluster`.
    TensorMap weights;
    TensorMap x;
    MatmulArgs product;
    u32 unused[34];
};

namespace matmul {

// COLUMN_BLOCKS blocks with the same rows, side by side, times ROW_BLOCKS with the same weights. Each copies its part
// of the operand that it shares, for all that share it. Sums of slices that wait for their neighbours' are in memory,
// but with HAS_WAITING the first of them, two of the three of a product with eight slices, are in shared memory.
template <class Shape_, u32 COLUMN_BLOCKS_, u32 ROW_BLOCKS_, bool HAS_WAITING_ = false> struct Cluster {
    using S = Shape_;
    static constexpr bool HAS_WAITING = HAS_WAITING_;
    static constexpr u32 COLUMN_BLOCKS = COLUMN_BLOCKS_;
    static constexpr u32 ROW_BLOCKS = ROW_BLOCKS_;
    static constexpr u32 BLOCKS = COLUMN_BLOCKS * ROW_BLOCKS;
    // The tile of the cluster, which `work_of` and `unit_of` divide a product into.
    static constexpr u32 COLUMNS = S::COLUMNS * COLUMN_BLOCKS;
    static constexpr u32 ROWS = S::ROWS * ROW_BLOCKS;
    // The boxes: columns, or rows, of a stage that one block copies.
    static constexpr u32 BOX_COLUMNS = S::COLUMNS / ROW_BLOCKS;
    static constexpr u32 BOX_ROWS = S::ROWS / COLUMN_BLOCKS;
    static constexpr u32 ROW_BYTES = S::DEPTH * 2;
    static_assert(ROW_BYTES == 128 && BOX_COLUMNS % 8 == 0 && BOX_ROWS % 8 == 0, "whole patterns of wgmma's operands");
    static_assert(S::WARP_COLUMNS == 16 && S::WARP_ROWS == S::ROWS && S::THREADS == 256, "two warpgroups, one above the other");
    // Blocks that copy something for this one, or for which this one copies.
    static constexpr u32 SHARING = COLUMN_BLOCKS + ROW_BLOCKS - 1;
    static constexpr u32 THREADS = S::THREADS + 128;
    // Stages, sums that wait, and barriers.
    static constexpr u32 BARRIERS_OFFSET = S::SHARED_BYTES + (HAS_WAITING ? S::TILE_FLOATS * 4 : 0);
    static constexpr u32 SHARED_BYTES = BARRIERS_OFFSET + 2 * S::STAGES * sizeof(PhaseBarrier);
};

// A block's place in its cluster.
template <class C> struct ClusterPlace {
    u32 rank;
    u32 column_block;
    u32 row_block;

    DEVICE ClusterPlace() : rank(blockIdx.x % C::BLOCKS), column_block(rank % C::COLUMN_BLOCKS), row_block(rank / C::COLUMN_BLOCKS) {}

    // Blocks with the same rows, and with the same weights, a bit each.
    DEVICE u32 same_rows() const { return ((1u << C::COLUMN_BLOCKS) - 1) << (row_block * C::COLUMN_BLOCKS); }
    DEVICE u32 same_weights() const {
        u32 bits = 0;
#pragma unroll
        for (u32 i = 0; i < C::ROW_BLOCKS; i++) bits |= 1u << (i * C::COLUMN_BLOCKS + column_block);
        return bits;
    }
    // The rank of one of the SHARING blocks, those with the same rows first.
    DEVICE u32 sharing(u32 index) const {
        if (index < C::COLUMN_BLOCKS) return row_block * C::COLUMN_BLOCKS + index;
        const u32 other = index - C::COLUMN_BLOCKS;
        return (other < row_block ? other : other + 1) * C::COLUMN_BLOCKS + column_block;
    }
};

// The places of sums of slices that wait.
template <class C> struct ClusterWaiting {
    using S = typename C::S;
    WaitingInMemory memory;
    Words4* shared;

    DEVICE ClusterWaiting(const MatmulArgs& args, u8* block)
        : memory({sums_at<S>(args, blockIdx.x, WAITING_MOST), sums_stride<S>()}),
          shared(reinterpret_cast<Words4*>(block + S::SHARED_BYTES) + threadIdx.x) {}

    DEVICE void leave(const Sums<S>& sums, u32 index) const {
        if constexpr (C::HAS_WAITING) {
            if (index == 0) return sums.leave(shared);
        }
        memory.leave(sums, index);
    }

    DEVICE void load(Sums<S>& sums, u32 index) const {
        if constexpr (C::HAS_WAITING) {
            if (index == 0) return load_shared(sums);
        }
        memory.load(sums, index);
    }

    DEVICE void load_shared(Sums<S>& sums) const {
#pragma unroll
        for (u32 i = 0; i < S::ROW_TILES; i++) {
            const Words4 words = load_words(shared + i * S::THREADS);
#pragma unroll
            for (u32 word = 0; word < 4; word++) sums.of[0][i][word] = bits_to_f32(words.word[word]);
        }
    }
};

// The places of stages in shared memory, one after the other, and the barriers behind them.
template <class C> struct StageRing {
    using S = typename C::S;
    u8* shared;
    // Over when the stage's bytes are there, and when all warps that read them are done.
    PhaseBarrier* full;
    PhaseBarrier* free;
    u32 slot;
    u32 parity;

    DEVICE explicit StageRing(u8* memory)
        : shared(memory), full(reinterpret_cast<PhaseBarrier*>(memory + C::BARRIERS_OFFSET)), free(full + S::STAGES), slot(0), parity(0) {}

    // One thread makes the barriers for all. This block copies again after the warps of all SHARING blocks are done.
    DEVICE void make_barriers() const {
        for (u32 i = 0; i < S::STAGES; i++) {
            barrier_init(full + i, 1);
            barrier_init(free + i, C::SHARING * (S::THREADS / 32));
        }
        barrier_init_fence();
    }

    DEVICE void advance() {
        slot++;
        if (slot < S::STAGES) return;
        slot = 0;
        parity ^= 1;
    }
};

// One thread's work: all stages of all tiles of this block.
template <class C> DEVICE void copy_stages(const MatmulClusterArgs& args, const Work& work, StageRing<C> ring) {
    using S = typename C::S;
    const ClusterPlace<C> place;
    prefetch_map(args.weights);
    prefetch_map(args.x);
    // Of the box in the cluster's tile, and in the stage.
    const u32 own_column = place.column_block * S::COLUMNS + place.row_block * C::BOX_COLUMNS;
    const u32 own_row = place.row_block * S::ROWS + place.column_block * C::BOX_ROWS;
    const u32 weights_at = place.row_block * C::BOX_COLUMNS * C::ROW_BYTES;
    const u32 x_at = S::X_OFFSET + place.column_block * C::BOX_ROWS * C::ROW_BYTES;
    for (u32 index = blockIdx.x / C::BLOCKS; index < work.units; index += gridDim.x / C::BLOCKS) {
        const Unit unit = unit_of<C>(args.product, work, index);
        for (Span span = unit.span;; span = next_span(args.product, span)) {
            for (u32 depth = span.begin; depth < span.end; depth += S::DEPTH) {
                // A barrier's phase before the first counts as over.
                barrier_wait(ring.free + ring.slot, ring.parity ^ 1);
                PhaseBarrier* const full = ring.full + ring.slot;
                // Other blocks' parts may already have arrived, but this arrival alone lets the phase end.
                barrier_expect(full, S::STAGE_BYTES);
                u8* const stage = ring.shared + ring.slot * S::STAGE_BYTES;
                if constexpr (C::ROW_BLOCKS > 1) {
                    copy_box(stage + weights_at, args.weights, depth, unit.first_column + own_column, full, place.same_weights());
                } else {
                    copy_box(stage + weights_at, args.weights, depth, unit.first_column + own_column, full);
                }
                if constexpr (C::COLUMN_BLOCKS > 1) {
                    copy_box(stage + x_at, args.x, depth, unit.first_row + own_row, full, place.same_rows());
                } else {
                    copy_box(stage + x_at, args.x, depth, unit.first_row + own_row, full);
                }
                ring.advance();
            }
            if (span.end == args.product.width) break;
        }
    }
}

// Begins the products of the first `steps` steps of a stage.
template <class S> DEVICE void multiply_stage(Sums<S>& sums, const u8* weights, const u8* rows, u32 steps, bool keeps) {
    constexpr u32 STEP_BYTES = 32;
    if (steps == S::DEPTH / 16) {
        wgmma_begin();
#pragma unroll
        for (u32 step = 0; step < S::DEPTH / 16; step++) {
            wgmma_bf16(sums.of[0], weights + step * STEP_BYTES, rows + step * STEP_BYTES, keeps || step > 0);
        }
        wgmma_commit();
    } else {
        // A slice that ends within the stage; the elements behind it are the next one's.
#pragma unroll 1
        for (u32 step = 0; step < steps; step++) {
            wgmma_begin();
            wgmma_bf16(sums.of[0], weights + step * STEP_BYTES, rows + step * STEP_BYTES, keeps || step > 0);
            wgmma_commit();
        }
    }
}

// Stores a warp's 16 columns of totals as `store_out` does, with fewer instructions.
template <class S> struct ColumnStore {
    const MatmulArgs& args;
    const Corner& corner;
    u32 rows;
    // Of the lane's two columns.
    float bias[2];

    DEVICE ColumnStore(const MatmulArgs& all, const Corner& at) : args(all), corner(at), rows(at.rows_end) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 column = corner.column + i * 8 + lane_index() / 4;
            bias[i] = corner.bias == nullptr || column >= args.columns ? 0.0f : corner.bias[column];
        }
    }

    DEVICE void store_f32(const Sums<S>& totals) const {
        const u32 lane = lane_index(), column = corner.column + lane / 4;
        const bool has_column[2] = {column < args.columns, column + 8 < args.columns};
        u32 row = corner.row + lane % 4 * 2;
        float* to = static_cast<float*>(args.out) + u64(row) * args.columns + column;
#pragma unroll
        for (u32 tile = 0; tile < S::ROW_TILES; tile++) {
            float* next = to + args.columns;
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const float(&four)[4] = totals.of[0][tile];
                if (has_column[i] && row < rows) to[i * 8] = add_rn(four[i * 2], bias[i]);
                if (has_column[i] && row + 1 < rows) next[i * 8] = add_rn(four[i * 2 + 1], bias[i]);
            }
            row += 8;
            to += u64(args.columns) * 8;
        }
    }

    // Whole sectors of 32 bytes at a time; `columns` is a multiple of 4, and `out` begins at one of 8 bytes.
    DEVICE void store_bf16(const Sums<S>& totals) const {
        const u32 lane = lane_index(), quarter = lane % 4;
        // This lane stores four columns of one row of each eight; of two neighbours one has the first eight columns'.
        const bool has_first = quarter % 2 == 0;
        const u32 column = corner.column + (has_first ? quarter * 2 : quarter * 2 + 6);
        u32 row = corner.row + lane / 4;
        bf16* to = static_cast<bf16*>(args.out) + u64(row) * args.columns + column;
#pragma unroll
        for (u32 tile = 0; tile < S::ROW_TILES; tile++) {
            const float(&four)[4] = totals.of[0][tile];
            // Columns `quarter * 2` and the next, of the first eight and of the others.
            const u32 first = transpose_8x8(pack_bf16(add_rn(four[0], bias[0]), add_rn(four[1], bias[0])));
            const u32 second = transpose_8x8(pack_bf16(add_rn(four[2], bias[1]), add_rn(four[3], bias[1])));
            const u32 other = shuffle_xor(has_first ? second : first, 1);
            const u32 low = has_first ? first : other, high = has_first ? other : second;
            if (row < rows && column < args.columns) store_pair(to, low, high);
            row += 8;
            to += u64(args.columns) * 8;
        }
    }
};

// The work of the two warpgroups that multiply.
template <class C> DEVICE void multiply_stages(const MatmulArgs& args, const Work& work, StageRing<C> ring) {
    using S = typename C::S;
    constexpr u32 GROUP_COLUMNS = 64;
    const ClusterPlace<C> place;
    const u32 warp = threadIdx.x / 32, lane = lane_index();
    const u8* const weights = ring.shared + warp / 4 * GROUP_COLUMNS * C::ROW_BYTES;
    // A lane reports to one of the blocks that copy for this one.
    const u32 free = lane < C::SHARING ? barrier_of(ring.free, place.sharing(lane)) : 0;
    for (u32 index = blockIdx.x / C::BLOCKS; index < work.units; index += gridDim.x / C::BLOCKS) {
        const Unit unit = unit_of<C>(args, work, index);
        SliceTree<Sums<S>, ClusterWaiting<C>> tree(ClusterWaiting<C>(args, ring.shared));
        for (Span span = unit.span;; span = next_span(args, span)) {
            Sums<S> sums;
            sums.clear();
            u32 last = 0;
            for (u32 depth = span.begin; depth < span.end; depth += S::DEPTH) {
                barrier_wait(ring.full + ring.slot, ring.parity);
                const u32 at = ring.slot * S::STAGE_BYTES, steps = min(S::DEPTH / 16, divided_up(span.end - depth, 16));
                multiply_stage<S>(sums, weights + at, ring.shared + at + S::X_OFFSET, steps, depth > span.begin);
                // This warp is done with the stage before.
                wgmma_wait<1>();
                if (depth > span.begin && lane < C::SHARING) barrier_arrive(free + last * sizeof(PhaseBarrier));
                last = ring.slot;
                ring.advance();
            }
            wgmma_take(sums.of[0]);
            if (lane < C::SHARING) barrier_arrive(free + last * sizeof(PhaseBarrier));
            tree.add(args, span, sums);
            if (span.end == args.width) break;
        }
        const u32 column = unit.first_column + place.column_block * S::COLUMNS + warp * 16;
        const Corner corner = {column, unit.first_row + place.row_block * S::ROWS, work.rows, args.bias};
        const ColumnStore<S> store(args, corner);
        if (args.is_out_f32 != 0) {
            store.store_f32(tree.last);
        } else if (args.columns % 4 == 0 && reinterpret_cast<u64>(args.out) % 8 == 0) {
            store.store_bf16(tree.last);
        } else {
            store_out<S>(args, tree.last, corner);
        }
    }
}

template <class C> DEVICE void multiply_in_cluster(const MatmulClusterArgs& args, u8* shared) {
    using S = typename C::S;
    // 65536 registers for 384 threads are 168 each; one that copies needs few.
    constexpr u32 COPYING_REGISTERS = 40, MULTIPLYING_REGISTERS = 232;
    start_kernel();
    const StageRing<C> ring(shared);
    if (threadIdx.x == 0) ring.make_barriers();
    // No block copies to another, or reports to it, before that one has its barriers.
    sync_cluster();
    const Work work = work_of<C>(args.product);
    if (threadIdx.x < S::THREADS) {
        registers_take<MULTIPLYING_REGISTERS>();
        multiply_stages<C>(args.product, work, ring);
    } else {
        registers_release<COPYING_REGISTERS>();
        if (threadIdx.x == S::THREADS) copy_stages<C>(args, work, ring);
        sync_warp();
    }
    // A block that ended would take its shared memory with it, to which others still report.
    sync_cluster();
}

// A product takes the tile that fills the device more evenly.
using Cluster128 = Cluster<Shape<Bf16Weights, 128, 128, 8, 1, 64, 5>, 2, 1, true>;
using Cluster192 = Cluster<Shape<Bf16Weights, 128, 192, 8, 1, 64, 5>, 2, 1>;

}  // namespace matmul

#define CLUSTER_ENTRY(name, cluster) \
    extern "C" KERNEL((cluster::THREADS), 1) CLUSTER(cluster::BLOCKS) name(GRID_CONSTANT const MatmulClusterArgs args) { \
        DYNAMIC_SHARED(u8, shared); \
        matmul::multiply_in_cluster<cluster>(args, shared); \
    }

CLUSTER_ENTRY(matmul_cluster128_bf16, matmul::Cluster128)
CLUSTER_ENTRY(matmul_cluster192_bf16, matmul::Cluster192)
