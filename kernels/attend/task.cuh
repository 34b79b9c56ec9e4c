// One work item with one KV head: its rows, its keys, and the place of its results.
//
// Owns: the reading of items and segments, the loading of queries, the writing of states.
// Never: adds anything up.
// Invariant: rows of a tile beyond the segment's last have queries of zero, and nothing is stored for them.
#pragma once
#include "tile.cuh"

namespace attend {

// The place of one KV head of one sequence in a layer.
struct Pages {
    // Keys and values of block 0.
    const u8* keys;
    const u8* values;
    const u32* table;
    u32 block_bytes;
    u32 block_shift;
    u32 keys_end;
};

// The positions that the rows of a row tile see: the earliest `earliest_first ..= earliest`, the
// latest `latest_first ..= latest`.
struct Reach {
    u32 earliest_first;
    u32 earliest;
    u32 latest_first;
    u32 latest;
};

// The part of a key tile that a warp's rows see; it is the same in all lanes.
enum class View { Nothing, Some, Everything };

// It lies in shared memory, because all threads of a block have the same one and registers are
// scarce.
template <class S> struct Task {
    AttendSegment segment;
    Pages pages;
    // The block table's entries of three spans, span `s` at `s % 3`.
    u32 blocks[3][SPAN_BLOCKS];
    Reach reach[S::ROW_TILES];
    u32 kv_head;
    u32 group;
    u32 window;
    // The tile's first packed row, and how many of its rows there are.
    u32 row;
    u32 rows;
    // All spans that the tile sees, of which this item has some; and this item's key tiles.
    u32 span_first;
    u32 span_end;
    u32 tile_first;
    u32 tile_end;
    // The fields of AttendItem with these names.
    u32 parts;
    u32 states;
    u32 arrival;

    DEVICE u32 position_of(u32 row_of_tile) const { return segment.position + (row + row_of_tile) / group; }
    // Rows past the end see the same keys as the last one.
    DEVICE u32 clamped(u32 row_of_tile) const { return min(row_of_tile, rows - 1); }
    DEVICE u32 query_head_of(u32 row_of_tile) const { return kv_head * group + (row + row_of_tile) % group; }
    // The index of this packed row's head in queries or outputs, whose rows are `heads` heads wide.
    DEVICE u64 head_of(u32 row_of_tile, u32 heads) const {
        const u32 packed = row + row_of_tile;
        return u64(segment.row + packed / group) * heads + kv_head * group + packed % group;
    }

    DEVICE View view_of(u32 row_tile, u32 tile) const {
        if (row_tile * 16 >= rows) return View::Nothing;
        const Reach& seen = reach[row_tile];
        const u32 first = tile * TILE_KEYS, last = first + TILE_KEYS - 1;
        if (first > seen.latest || last < seen.earliest_first) return View::Nothing;
        return last <= seen.earliest && first >= seen.latest_first ? View::Everything : View::Some;
    }

    // One thread calls this, before the others read it.
    DEVICE void set(const AttendArgs& args, const AttendItem& item, u32 head) {
        segment = args.segments[item.segment];
        kv_head = head;
        group = args.query_heads / args.kv_heads;
        window = args.window;
        row = item.row;
        rows = min(S::ROWS, segment.rows * group - item.row);
        const u32 seen_first = first_seen(position_of(0), window), seen_last = position_of(rows - 1);
        span_first = seen_first / SPAN_KEYS;
        span_end = seen_last / SPAN_KEYS + 1;
        tile_first = max(seen_first / TILE_KEYS, item.span_first * SPAN_TILES);
        tile_end = min(seen_last / TILE_KEYS + 1, item.span_end * SPAN_TILES);
        parts = item.parts;
        states = item.states;
        arrival = item.arrival + head;
        const u64 head_bytes = (u64(head) << args.block_shift) * S::CHUNKS * 16;
        pages = {args.pool + args.key_bytes + head_bytes, args.pool + args.value_bytes + head_bytes, args.tables + segment.table,
                 u32(args.block_bytes), args.block_shift, seen_last + 1};
        for (u32 i = 0; i < S::ROW_TILES; i++) {
            const u32 earliest = position_of(clamped(i * 16)), latest = position_of(clamped(i * 16 + 15));
            reach[i] = {first_seen(earliest, window), earliest, first_seen(latest, window), latest};
        }
    }
};

// A warp's place in the block: its row tile, and its share of it.
struct Share {
    u32 row_tile;
    u32 index;
};

template <class S> DEVICE Share share_of_warp() {
    const u32 warp = threadIdx.x / 32;
    return {warp / S::SPLIT, warp % S::SPLIT};
}

// This lane's rows, within the block's tile.
DEVICE u32 lane_row(const Share& share, u32 which) { return share.row_tile * 16 + lane_index() / 4 + which * 8; }

template <class S> DEVICE void load_queries(Queries<S>& queries, const AttendArgs& args, const Task<S>& task, const Share& share) {
#pragma unroll
    for (u32 which = 0; which < 2; which++) {
        const u32 row = lane_row(share, which);
        const bool is_there = row < task.rows;
        const u64 head = task.head_of(task.clamped(row), args.query_heads + 2 * args.kv_heads);
        const bf16* from = args.qkv + head * S::DIM;
#pragma unroll
        for (u32 i = 0; i < S::PAIRS * 2; i++) {
            const auto* two = reinterpret_cast<const u32*>(from + i / 2 * 16 + dim_of<S>(i % 2));
            queries.of[i / 2][i % 2 * 2 + which] = is_there ? *two : 0;
        }
    }
}

template <class S> DEVICE Sight sight_of(const Task<S>& task, const Share& share) {
    Sight sight;
#pragma unroll
    for (u32 which = 0; which < 2; which++) {
        sight.last[which] = task.position_of(task.clamped(lane_row(share, which)));
        sight.first[which] = first_seen(sight.last[which], task.window);
    }
    return sight;
}

// The place of a row's state of one of the tile's spans, counted from the tile's first.
template <class S> DEVICE float* state_at(const AttendArgs& args, const Task<S>& task, u32 span, u32 row) {
    const u64 index = task.states + (u64(task.kv_head) * (task.span_end - task.span_first) + span) * task.rows + row;
    return args.states + index * S::STATE_FLOATS;
}

template <class S> DEVICE void store_state(float* state, const float (&values)[S::OWN_PAIRS][2][4], u32 which, u32 pair) {
#pragma unroll
    for (u32 i = 0; i < S::OWN_PAIRS * 2; i++) {
        if (S::PAIRS % S::SPLIT != 0 && pair + i / 2 >= S::PAIRS) break;
        const u32 dim = (pair + i / 2) * 16 + dim_of<S>(i % 2);
        *reinterpret_cast<FloatPair*>(state + STATE_HEADER + dim) = values_of<S>(values[i / 2], which, i % 2);
    }
}

}  // namespace attend
