// One work item with one KV head: which rows, which keys, and where results go.
//
// Owns: the reading of items and segments, the loading of queries, the writing of states and outputs.
// Never: adds anything up.
// Invariant: rows of a tile beyond the segment's last have queries of zero, and nothing is stored for them.
#pragma once
#include "tile.cuh"

namespace attend {

struct Task {
    AttendSegment segment;
    u32 kv_head;
    u32 group;
    // The tile's first packed row, and how many of its rows there are.
    u32 row;
    u32 rows;
    // All spans that the tile sees, of which this item has some; and this item's key tiles.
    u32 span_first;
    u32 span_end;
    u32 tile_first;
    u32 tile_end;
    u32 window;

    DEVICE u32 position_of(u32 row_of_tile) const { return segment.position + (row + row_of_tile) / group; }
    // Rows past the end see what the last one does.
    DEVICE u32 clamped(u32 row_of_tile) const { return min(row_of_tile, rows - 1); }
    // From a row of queries or outputs, `heads` heads wide, to this packed row's head.
    DEVICE u64 head_of(u32 row_of_tile, u32 heads) const {
        const u32 packed = row + row_of_tile;
        return u64(segment.row + packed / group) * heads + kv_head * group + packed % group;
    }
};

template <class S> DEVICE Task task_of(const AttendArgs& args, const AttendItem& item, u32 kv_head) {
    Task task;
    task.segment = args.segments[item.segment];
    task.kv_head = kv_head;
    task.group = args.query_heads / args.kv_heads;
    task.row = item.row;
    task.rows = min(S::ROWS, task.segment.rows * task.group - item.row);
    task.window = args.window;
    const u32 seen_first = first_seen(task.position_of(0), args.window);
    const u32 seen_last = task.position_of(task.rows - 1);
    task.span_first = seen_first / SPAN_KEYS;
    task.span_end = seen_last / SPAN_KEYS + 1;
    task.tile_first = max(seen_first / TILE_KEYS, item.span_first * SPAN_TILES);
    task.tile_end = min(seen_last / TILE_KEYS + 1, item.span_end * SPAN_TILES);
    return task;
}

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

template <class S> DEVICE void load_queries(Queries<S>& queries, const AttendArgs& args, const Task& task, const Share& share) {
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

DEVICE Sight sight_of(const Task& task, const Share& share) {
    Sight sight;
#pragma unroll
    for (u32 which = 0; which < 2; which++) {
        sight.last[which] = task.position_of(task.clamped(lane_row(share, which)));
        sight.first[which] = first_seen(sight.last[which], task.window);
    }
    return sight;
}

// What a warp's rows see of a key tile, all lanes agreeing.
enum class View { Nothing, Some, Everything };

DEVICE View view_of(const Task& task, const Share& share, u32 tile) {
    const u32 row = share.row_tile * 16;
    if (row >= task.rows) return View::Nothing;
    const u32 earliest = task.position_of(row), latest = task.position_of(task.clamped(row + 15));
    const u32 first = tile * TILE_KEYS, last = first + TILE_KEYS - 1;
    if (first > latest || last < first_seen(earliest, task.window)) return View::Nothing;
    return last <= earliest && first >= first_seen(latest, task.window) ? View::Everything : View::Some;
}

// Where a row's state of one of the tile's spans is, counted from its first.
template <class S> DEVICE float* state_at(const AttendArgs& args, const Task& task, u32 states, u32 span, u32 row) {
    const u64 index = states + (u64(task.kv_head) * (task.span_end - task.span_first) + span) * task.rows + row;
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
