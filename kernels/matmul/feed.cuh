// The copies of weights and rows to shared memory, stage after stage.
//
// Owns: the order in which a block takes tiles and spans, and the copies.
// Never: waits for a copy; the computing code waits.
// Invariant: elements outside of the matrix, the rows or the span are zero, so they add nothing.
#pragma once
#include "slices.cuh"
#include "tiling.cuh"

namespace matmul {

// The work of one launch.
struct Work {
    // All rows, in a product of one matrix.
    u32 rows;
    u32 row_tiles;
    u32 column_tiles;
    u32 units;
};

template <class S> DEVICE Work work_of(const MatmulArgs& args, u32 rows, u32 row_tiles) {
    Work work;
    work.rows = rows;
    work.row_tiles = row_tiles;
    work.column_tiles = divided_up(args.columns, S::COLUMNS);
    work.units = work.row_tiles * work.column_tiles;
    return work;
}

template <class S> DEVICE Work work_of(const MatmulArgs& args, const AllRows& = {}) {
    const u32 rows = *args.rows_count;
    return work_of<S>(args, rows, divided_up(rows, S::ROWS));
}

template <class S> DEVICE Work work_of(const MatmulArgs& args, const ExpertRows& rows) {
    return work_of<S>(args, 0, *rows.tiles_count);
}

// One unit of work: a tile, with its first span.
struct Unit {
    Span span;
    u32 first_column;
    // The first row or place, and the end of those that its matrix multiplies.
    u32 first_row;
    u32 rows_end;
    u32 expert;
};

// The number of row tiles that are computed for one column tile before the next: blocks then work
// side by side on tiles that share their weights and their rows.
constexpr u32 BAND = 16;

// Sets the place of tile `index` of a matrix that multiplies `row_tiles` tiles of rows from `first` on.
template <class S> DEVICE void place_unit(Unit& unit, const Work& work, u32 index, u32 row_tiles, u32 first) {
    const u32 band = index / (BAND * work.column_tiles), in_band = index % (BAND * work.column_tiles);
    const u32 band_rows = min(BAND, row_tiles - band * BAND);
    unit.first_column = in_band / band_rows * S::COLUMNS;
    unit.first_row = first + (band * BAND + in_band % band_rows) * S::ROWS;
}

template <class S> DEVICE Unit unit_of(const MatmulArgs& args, const Work& work, u32 index, const AllRows& = {}) {
    Unit unit;
    unit.span = span_from(args, 0, 0);
    unit.expert = 0;
    place_unit<S>(unit, work, index, work.row_tiles, 0);
    unit.rows_end = work.rows;
    return unit;
}

// An expert's tiles are the next one's neighbours, so that blocks side by side share its weights.
template <class S> DEVICE Unit unit_of(const MatmulArgs& args, const Work& work, u32 index, const ExpertRows& rows) {
    Unit unit;
    unit.span = span_from(args, 0, 0);
    const ExpertTile tile = rows.tiles[index / work.column_tiles];
    const u32 in_expert = index - tile.first_tile * work.column_tiles;
    place_unit<S>(unit, work, in_expert, divided_up(tile.end - tile.first, S::ROWS), tile.first);
    unit.rows_end = tile.end;
    unit.expert = tile.expert;
    return unit;
}

// A (count, width) matrix of which a stage takes rows `first ..` and chunks `depth .. end`.
struct Source {
    const u8* from;
    u32 count;
    // The number of chunks in a row.
    u32 width;
};

// Starts the copies of ROWS rows of CHUNKS chunks.
template <u32 ROWS, u32 CHUNKS, u32 THREADS> DEVICE void fill_tile(u8* to, const Source& source, u32 first, u32 depth, u32 end) {
    static_assert(THREADS % CHUNKS == 0, "a thread stays in its chunk column");
    const u32 chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    const u8* from = source.from + (u64(first + row) * source.width + depth + chunk) * 16;
    const u64 stride = u64(source.width) * (THREADS / CHUNKS * 16);
    const bool is_in_span = depth + chunk < end;
#pragma unroll
    for (u32 i = 0; i < divided_up(ROWS * CHUNKS, THREADS); i++) {
        const u32 at = row + i * (THREADS / CHUNKS);
        if (ROWS * CHUNKS % THREADS != 0 && at >= ROWS) break;
        cp_async_16(to + tile_offset<CHUNKS>(at, chunk), from + i * stride, is_in_span && first + at < source.count);
    }
}

// The same of rows that lie where `rows_of` says.
template <u32 ROWS, u32 CHUNKS, u32 THREADS>
DEVICE void fill_rows(u8* to, const Source& source, const u32* rows_of, u32 first, u32 depth, u32 end) {
    static_assert(THREADS % CHUNKS == 0, "a thread stays in its chunk column");
    const u32 chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    const bool is_in_span = depth + chunk < end;
#pragma unroll
    for (u32 i = 0; i < divided_up(ROWS * CHUNKS, THREADS); i++) {
        const u32 at = row + i * (THREADS / CHUNKS);
        if (ROWS * CHUNKS % THREADS != 0 && at >= ROWS) break;
        const bool is_there = is_in_span && first + at < source.count;
        const u64 from = is_there ? rows_of[first + at] : 0;
        cp_async_16(to + tile_offset<CHUNKS>(at, chunk), source.from + (from * source.width + depth + chunk) * 16, is_there);
    }
}

// Starts the copies of the scales of the groups that a stage touches: GROUPS_MOST rows of COLUMNS words, unswizzled.
template <class S> DEVICE void fill_scales(u8* to, const MatmulArgs& args, const u32* scales, const Unit& unit, u32 depth) {
    constexpr u32 CHUNKS = S::COLUMNS / 4;
    const u32 first = depth >> args.group_shift, groups = unit.span.end >> args.group_shift;
    const u32 row_chunks = divided_up(args.columns, 4);
    for (u32 i = threadIdx.x; i < S::GROUPS_MOST * CHUNKS; i += S::THREADS) {
        const u32 group = first + i / CHUNKS, chunk = unit.first_column / 4 + i % CHUNKS;
        const bool is_there = (i / CHUNKS) << args.group_shift < S::DEPTH && group < groups && chunk < row_chunks;
        cp_async_16(to + i * 16, scales + (u64(group) * row_chunks + chunk) * 4, is_there);
    }
}

// All stages of all units of this block, one after the other, AHEAD of them at first. Every `fill`
// is one group of copies, even past the end, so that a wait can count groups.
template <class S, class Rows = AllRows, u32 AHEAD = S::STAGES - 1> struct Feed {
    const MatmulArgs& args;
    const Rows& rows;
    const Work& work;
    Source weights;
    Source x;
    u8* shared;
    u32 index;
    // The next stage's span in it, and first element.
    Unit unit;
    u32 depth;
    u32 slot;

    DEVICE Feed(const MatmulArgs& all, const Rows& of, const Work& launch, u8* to)
        : args(all), rows(of), work(launch), shared(to), index(blockIdx.x), unit(), depth(0), slot(0) {
        weights = {static_cast<const u8*>(args.weights), args.columns, args.width / S::Weights::PER_CHUNK};
        x = {reinterpret_cast<const u8*>(args.x), work.rows, args.width / 8};
        begin_unit();
        // These stay loops, because unrolled copies of a stage would be too much code.
        if constexpr (!Rows::HAS_EXPERTS) {
            // Nothing writes weights, so their copies begin while earlier launches still run.
            const Feed first = *this;
#pragma unroll 1
            for (u32 i = 0; i < AHEAD; i++) fill_parts<true, false>();
            unit = first.unit, index = first.index, depth = first.depth, slot = first.slot;
            wait_for_previous();
#pragma unroll 1
            for (u32 i = 0; i < AHEAD; i++) {
                fill_parts<false, true>();
                cp_async_commit();
            }
        } else {
#pragma unroll 1
            for (u32 i = 0; i < AHEAD; i++) fill();
        }
    }

    DEVICE void fill() {
        fill_parts<true, true>();
        cp_async_commit();
    }

    // Starts the copies of the next stage's weights, of its rows, or of both.
    template <bool HAS_WEIGHTS, bool HAS_ROWS> DEVICE void fill_parts() {
        if (index < work.units) {
            u8* to = shared + slot * S::STAGE_BYTES;
            constexpr u32 PER_CHUNK = S::Weights::PER_CHUNK;
            const u32 end = unit.span.end;
            if constexpr (HAS_WEIGHTS) {
                fill_tile<S::COLUMNS, S::WEIGHT_CHUNKS, S::THREADS>(to, weights, unit.first_column, depth / PER_CHUNK, end / PER_CHUNK);
                if constexpr (S::GROUPS_MOST > 0) {
                    fill_scales<S>(to + S::SCALES_OFFSET, args, of_expert(args.group_scales, rows, unit.expert), unit, depth);
                }
            }
            if constexpr (HAS_ROWS) fill_rows_of_unit(to + S::X_OFFSET);
            depth += S::DEPTH;
            if (depth >= end) end_span();
        }
        slot = after(slot);
    }

    DEVICE void fill_rows_of_unit(u8* to) {
        const u32 first = depth / 8, end = unit.span.end / 8;
        if constexpr (Rows::HAS_EXPERTS) {
            if (rows.rows_of != nullptr) return fill_rows<S::ROWS, S::X_CHUNKS, S::THREADS>(to, x, rows.rows_of, unit.first_row, first, end);
        }
        fill_tile<S::ROWS, S::X_CHUNKS, S::THREADS>(to, x, unit.first_row, first, end);
    }

    DEVICE void begin_unit() {
        if (index >= work.units) return;
        unit = unit_of<S>(args, work, index, rows);
        depth = unit.span.begin;
        if constexpr (Rows::HAS_EXPERTS) {
            weights.from = of_expert(static_cast<const u8*>(args.weights), rows, unit.expert);
            x.count = unit.rows_end;
        }
    }

    DEVICE void end_span() {
        if (unit.span.end == args.width) {
            index += gridDim.x;
            begin_unit();
        } else {
            unit.span = next_span(args, unit.span);
            depth = unit.span.begin;
        }
    }

    static DEVICE u32 after(u32 slot) { return slot + 1 == S::STAGES ? 0 : slot + 1; }
};

}  // namespace matmul
