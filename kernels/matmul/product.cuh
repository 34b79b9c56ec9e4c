// Tiles of a matrix product on the tensor cores (mma.sync, from sm_80 on).
//
// Owns: the sums, their order, and their way to the output.
// Never: loads from global memory, except the sums that other blocks of the launch stored.
// Invariant: of each element, a span is summed from zero in steps of 16 in order (where groups have scales, each
// group is, and its scaled sum added to the span's; where columns have, the span's sum is scaled); spans are added as
// `SliceTree` says; then comes the bias. Weights are the left side, 16 columns a tile, rows the right side, 8 a
// tile, in every kernel.
#pragma once
#include "feed.cuh"

namespace matmul {

// This lane's elements of a warp's tiles: rows `lane % 4 × 2` and the next of columns `lane / 4` (first two) and
// `lane / 4 + 8`.
template <class S> struct Sums {
    float of[S::COLUMN_TILES][S::ROW_TILES][4];

    DEVICE void clear() {
#pragma unroll
        for (u32 i = 0; i < S::COLUMN_TILES * S::ROW_TILES * 4; i++) of[i / 4 / S::ROW_TILES][i / 4 % S::ROW_TILES][i % 4] = 0;
    }

    DEVICE void add(const Sums& other) {
#pragma unroll
        for (u32 i = 0; i < S::COLUMN_TILES * S::ROW_TILES * 4; i++) {
            float& sum = of[i / 4 / S::ROW_TILES][i / 4 % S::ROW_TILES][i % 4];
            sum = add_rn(sum, other.of[i / 4 / S::ROW_TILES][i / 4 % S::ROW_TILES][i % 4]);
        }
    }

    // Memory of a block's sums is [column tile × row tile][thread]; `to` is this thread's place in the first.
    DEVICE void leave(Words4* to) const {
#pragma unroll
        for (u32 i = 0; i < S::COLUMN_TILES * S::ROW_TILES; i++) {
            const float(&four)[4] = of[i / S::ROW_TILES][i % S::ROW_TILES];
            store_words(to + i * S::THREADS,
                        Words4{{f32_to_bits(four[0]), f32_to_bits(four[1]), f32_to_bits(four[2]), f32_to_bits(four[3])}});
        }
    }

    DEVICE void load(const Words4* from) {
#pragma unroll
        for (u32 i = 0; i < S::COLUMN_TILES * S::ROW_TILES; i++) {
            const Words4 words = load_fresh_words(from + i * S::THREADS);
#pragma unroll
            for (u32 word = 0; word < 4; word++) of[i / S::ROW_TILES][i % S::ROW_TILES][word] = bits_to_f32(words.word[word]);
        }
    }
};

// Fragments of rows for two steps of 16.
template <class S> struct RowFragments {
    u32 of[2][S::ROW_TILES][2];

    // `row` is the warp's first; steps `2 × pair` and the next.
    DEVICE void load(const u8* x, u32 row, u32 pair) {
        const u32 lane = lane_index();
        if constexpr (S::ROW_TILES == 1) {
            u32 r[4];
            ldmatrix_x4(r, x + tile_offset<S::X_CHUNKS>(row + lane % 8, pair * 4 + lane / 8));
            of[0][0][0] = r[0], of[0][0][1] = r[1];
            of[1][0][0] = r[2], of[1][0][1] = r[3];
        } else {
#pragma unroll
            for (u32 i = 0; i < S::ROW_TILES; i++) {
                const u32 step = i / (S::ROW_TILES / 2), tile = i % (S::ROW_TILES / 2) * 2;
                const u32 at = row + tile * 8 + lane / 16 * 8 + lane % 8;
                u32 r[4];
                ldmatrix_x4(r, x + tile_offset<S::X_CHUNKS>(at, pair * 4 + step * 2 + lane / 8 % 2));
                of[step][tile][0] = r[0], of[step][tile][1] = r[1];
                of[step][tile + 1][0] = r[2], of[step][tile + 1][1] = r[3];
            }
        }
    }
};

// The sums of a warp: the mma's, and where groups have scales, those of the previous groups of the
// span.
template <class S> struct SpanSums {
    static constexpr bool HAS_GROUPS = S::Weights::SCALING == Scaling::Groups;
    Sums<S> sums;
    Sums<S> groups;

    DEVICE void clear() {
        sums.clear();
        if constexpr (HAS_GROUPS) groups.clear();
    }

    DEVICE const Sums<S>& all() const {
        if constexpr (HAS_GROUPS) {
            return groups;
        } else {
            return sums;
        }
    }

    // `scales` of each column tile.
    DEVICE void end_group(const GroupScales (&scales)[S::COLUMN_TILES]) {
#pragma unroll
        for (u32 i = 0; i < S::COLUMN_TILES * S::ROW_TILES * 4; i++) {
            const u32 tile = i / 4 / S::ROW_TILES, row_tile = i / 4 % S::ROW_TILES;
            float& group = groups.of[tile][row_tile][i % 4];
            const float scale = scales[tile].template scale<S::Weights::HAS_ZEROS>(i % 4 / 2);
            group = fma_rn(sums.of[tile][row_tile][i % 4], scale, group);
        }
        sums.clear();
    }
};

// One warp's corner of one stage.
template <class S> struct WarpStage {
    const u8* stage;
    // First column and row of the warp in the block's tile.
    u32 column;
    u32 row;
    // The stage's first element of the inner dimension, and log2 of the elements of a group.
    u32 depth;
    u32 group_shift;

    // Steps of 16, and the narrowest groups, that are loaded together.
    static constexpr u32 STEPS = S::Weights::STEPS;
    static constexpr u32 GROUP_STEPS = S::Weights::GROUP_LEAST / 16;
    static constexpr u32 GROUPS = STEPS / GROUP_STEPS;

    DEVICE void add_to(SpanSums<S>& span) const {
#pragma unroll
        for (u32 part = 0; part < S::DEPTH / 16 / STEPS; part++) {
            GroupScales scales[S::COLUMN_TILES][GROUPS];
            u32 weights[S::COLUMN_TILES][STEPS][4];
#pragma unroll
            for (u32 i = 0; i < S::COLUMN_TILES; i++) {
                if constexpr (SpanSums<S>::HAS_GROUPS) {
#pragma unroll
                    for (u32 group = 0; group < GROUPS; group++) scales[i][group] = scales_of(part * GROUPS + group, i);
                }
                S::Weights::template load<S::WEIGHT_CHUNKS>(weights[i], stage, column + i * 16, part, scales[i]);
            }
#pragma unroll
            for (u32 pair = 0; pair < STEPS / 2; pair++) {
                RowFragments<S> rows;
                rows.load(stage + S::X_OFFSET, row, part * (STEPS / 2) + pair);
#pragma unroll
                for (u32 step = 0; step < 2; step++) {
#pragma unroll
                    for (u32 i = 0; i < S::COLUMN_TILES * S::ROW_TILES; i++) {
                        const u32 tile = i / S::ROW_TILES, row_tile = i % S::ROW_TILES;
                        mma_bf16(span.sums.of[tile][row_tile], weights[tile][pair * 2 + step], rows.of[step][row_tile]);
                    }
                    if constexpr (SpanSums<S>::HAS_GROUPS) {
                        if ((step + 1) % GROUP_STEPS == 0) end_groups(span, scales, part, (pair * 2 + step) / GROUP_STEPS);
                    }
                }
            }
        }
    }

    // Of the narrowest group number `at` of the stage.
    DEVICE GroupScales scales_of(u32 at, u32 tile) const {
        const u32 group = ((depth + at * S::Weights::GROUP_LEAST) >> group_shift) - (depth >> group_shift);
        const auto* words = reinterpret_cast<const u32*>(stage + S::SCALES_OFFSET) + group * S::COLUMNS;
        const u32 mine = column + tile * 16 + lane_index() / 4;
        return {{words[mine], words[mine + 8]}};
    }

    // Ends a group of the matrix if it ends with this narrowest group of the part.
    DEVICE void end_groups(SpanSums<S>& span, const GroupScales (&scales)[S::COLUMN_TILES][GROUPS], u32 part, u32 index) const {
        const u32 begin = depth + (part * GROUPS + index) * S::Weights::GROUP_LEAST;
        if ((begin + S::Weights::GROUP_LEAST) >> group_shift == begin >> group_shift) return;
        GroupScales ended[S::COLUMN_TILES];
#pragma unroll
        for (u32 i = 0; i < S::COLUMN_TILES; i++) ended[i] = scales[i][index];
        span.end_group(ended);
    }
};

// The distance of the sums of two spans, or of two slices, of a tile.
template <class S> DEVICE u64 sums_stride() { return S::TILE_FLOATS / 4; }

// The place of this thread's sums in the workspace, of the tile or block `index` with `each` of them.
template <class S> DEVICE Words4* sums_at(const MatmulArgs& args, u32 index, u32 each) {
    return reinterpret_cast<Words4*>(args.sums) + u64(index) * each * sums_stride<S>() + threadIdx.x;
}

// A warp's corner of the output, the end of the rows that there are, and their bias.
struct Corner {
    u32 column;
    u32 row;
    u32 rows_end;
    const float* bias;
};

// Multiplies a span's sums with the columns' scales; `first` is the warp's first column.
template <class S> DEVICE void scale_columns(const MatmulArgs& args, const float* scales, Sums<S>& sums, u32 first) {
#pragma unroll
    for (u32 i = 0; i < S::COLUMN_TILES * 2; i++) {
        const u32 column = first + i * 8 + lane_index() / 4;
        const float scale = column < args.columns ? scales[column] : 0.0f;
#pragma unroll
        for (u32 j = 0; j < S::ROW_TILES * 2; j++) {
            float& sum = sums.of[i / 2][j / 2][i % 2 * 2 + j % 2];
            sum = mul_rn(sum, scale);
        }
    }
}

template <class S> DEVICE void store_out(const MatmulArgs& args, const Sums<S>& totals, const Corner& corner) {
    const u32 lane = lane_index();
#pragma unroll
    for (u32 i = 0; i < S::COLUMN_TILES * 2; i++) {
        const u32 column = corner.column + i * 8 + lane / 4;
        if (column >= args.columns) continue;
        const float bias = corner.bias == nullptr ? 0.0f : corner.bias[column];
#pragma unroll
        for (u32 j = 0; j < S::ROW_TILES * 2; j++) {
            const u32 row = corner.row + j / 2 * 8 + lane % 4 * 2 + j % 2;
            if (row >= corner.rows_end) continue;
            const float sum = add_rn(totals.of[i / 2][j / 2][i % 2 * 2 + j % 2], bias);
            const u64 at = u64(row) * args.columns + column;
            if (args.is_out_f32 != 0) {
                static_cast<float*>(args.out)[at] = sum;
            } else {
                static_cast<bf16*>(args.out)[at] = to_bf16(sum);
            }
        }
    }
}

template <class S, class Rows> DEVICE void multiply(const MatmulArgs& args, const Rows& rows, u8* shared) {
    let_next_begin();
    // Earlier launches sort rows by expert.
    if constexpr (Rows::HAS_EXPERTS) wait_for_previous();
    // The number of rows was copied before the step's first launch.
    const Work work = work_of<S>(args, rows);
    const u32 warp = threadIdx.x / 32;
    const u32 column = warp % S::COLUMN_WARPS * S::WARP_COLUMNS, row = warp / S::COLUMN_WARPS * S::WARP_ROWS;
    Feed<S, Rows> feed(args, rows, work, shared);
    u32 slot = 0;
    for (u32 index = blockIdx.x; index < work.units; index += gridDim.x) {
        const Unit unit = unit_of<S>(args, work, index, rows);
        SpanSums<S> sums;
        SliceTree<Sums<S>> tree(sums_at<S>(args, blockIdx.x, WAITING_MOST), sums_stride<S>());
        for (Span span = unit.span;; span = next_span(args, span)) {
            sums.clear();
            for (u32 depth = span.begin; depth < span.end; depth += S::DEPTH) {
                cp_async_wait<S::STAGES - 2>();
                sync_block();
                // The stage that all warps have just left is free.
                feed.fill();
                WarpStage<S>{shared + slot * S::STAGE_BYTES, column, row, depth, args.group_shift}.add_to(sums);
                slot = Feed<S, Rows>::after(slot);
            }
            if constexpr (S::Weights::SCALING == Scaling::Columns) {
                scale_columns<S>(args, of_expert(args.column_scales, rows, unit.expert), sums.sums, unit.first_column + column);
            }
            tree.add(args, span, sums.all());
            if (span.end == args.width) break;
        }
        const float* bias = of_expert(args.bias, rows, unit.expert);
        store_out<S>(args, tree.last, {unit.first_column + column, unit.first_row + row, unit.rows_end, bias});
    }
    cp_async_wait<0>();
}

}  // namespace matmul

#define MATMUL_ENTRY(name, shape, blocks) \
    extern "C" KERNEL((shape::THREADS), blocks) name(GRID_CONSTANT const MatmulArgs args) { \
        DYNAMIC_SHARED(u8, shared); \
        matmul::multiply<shape>(args, AllRows{}, shared); \
    }

#define EXPERTS_ENTRY(name, shape, blocks) \
    extern "C" KERNEL((shape::THREADS), blocks) name(GRID_CONSTANT const ExpertMatmulArgs args) { \
        DYNAMIC_SHARED(u8, shared); \
        matmul::multiply<shape>(args.product, args.rows, shared); \
    }
