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
    u32 rows;
    u32 row_tiles;
    u32 column_tiles;
    u32 spans;
    u32 units;
};

template <class S> DEVICE Work work_of(const MatmulArgs& args) {
    Work work;
    work.rows = *args.rows_count;
    work.row_tiles = divided_up(work.rows, S::ROWS);
    work.column_tiles = divided_up(args.columns, S::COLUMNS);
    work.spans = args.spans;
    work.units = work.row_tiles * work.column_tiles * (S::CUT == Cut::Spans ? work.spans : 1);
    return work;
}

// One unit of work: a tile, whole or one span of it.
struct Unit {
    u32 tile;
    // The number of the first span, and the span.
    u32 index;
    Span span;
    // The end of the last span.
    u32 end;
    u32 first_column;
    u32 first_row;
};

// The number of row tiles that are computed for one column tile before the next: blocks then work
// side by side on tiles that share their weights and their rows.
constexpr u32 BAND = 16;

template <class S> DEVICE Unit unit_of(const MatmulArgs& args, const Work& work, u32 index) {
    Unit unit;
    unit.tile = index;
    unit.index = 0;
    if constexpr (S::CUT == Cut::Spans) {
        unit.tile = index / work.spans;
        unit.index = index % work.spans;
    }
    unit.span = span_of(args, unit.index);
    unit.end = S::CUT == Cut::Spans ? unit.span.end : args.width;
    const u32 band = unit.tile / (BAND * work.column_tiles), in_band = unit.tile % (BAND * work.column_tiles);
    const u32 band_rows = min(BAND, work.row_tiles - band * BAND);
    unit.first_column = in_band / band_rows * S::COLUMNS;
    unit.first_row = (band * BAND + in_band % band_rows) * S::ROWS;
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

// Starts the copies of the scales of the groups that a stage touches: GROUPS_MOST rows of COLUMNS words, unswizzled.
template <class S> DEVICE void fill_scales(u8* to, const MatmulArgs& args, const Unit& unit, u32 depth) {
    constexpr u32 CHUNKS = S::COLUMNS / 4;
    const u32 first = depth >> args.group_shift, groups = unit.span.end >> args.group_shift;
    const u32 row_chunks = divided_up(args.columns, 4);
    for (u32 i = threadIdx.x; i < S::GROUPS_MOST * CHUNKS; i += S::THREADS) {
        const u32 group = first + i / CHUNKS, chunk = unit.first_column / 4 + i % CHUNKS;
        const bool is_there = (i / CHUNKS) << args.group_shift < S::DEPTH && group < groups && chunk < row_chunks;
        cp_async_16(to + i * 16, args.group_scales + (u64(group) * row_chunks + chunk) * 4, is_there);
    }
}

// All stages of all units of this block, one after the other, AHEAD of them at first. Every `fill`
// is one group of copies, even past the end, so that a wait can count groups.
template <class S, u32 AHEAD = S::STAGES - 1> struct Feed {
    const MatmulArgs& args;
    const Work& work;
    Source weights;
    Source x;
    u8* shared;
    u32 index;
    // The next stage's span in it, and first element.
    Unit unit;
    u32 depth;
    u32 slot;

    // A thread that does not copy has no units.
    DEVICE Feed(const MatmulArgs& all, const Work& launch, u8* to, bool copies = true)
        : args(all), work(launch), shared(to), index(copies ? blockIdx.x : launch.units), unit(), depth(0), slot(0) {
        weights = {static_cast<const u8*>(args.weights), args.columns, args.width / S::Weights::PER_CHUNK};
        x = {reinterpret_cast<const u8*>(args.x), work.rows, args.width / 8};
        begin_unit();
        // These stay loops, because unrolled copies of a stage would be too much code.
        if constexpr (S::CUT == Cut::Spans) {
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
                if constexpr (S::GROUPS_MOST > 0) fill_scales<S>(to + S::SCALES_OFFSET, args, unit, depth);
            }
            if constexpr (HAS_ROWS) fill_tile<S::ROWS, S::X_CHUNKS, S::THREADS>(to + S::X_OFFSET, x, unit.first_row, depth / 8, end / 8);
            depth += S::DEPTH;
            if (depth >= end) end_span();
        }
        slot = after(slot);
    }

    DEVICE void begin_unit() {
        if (index >= work.units) return;
        unit = unit_of<S>(args, work, index);
        depth = unit.span.begin;
    }

    DEVICE void end_span() {
        if (unit.span.end == unit.end) {
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
