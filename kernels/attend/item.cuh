// One work item from its first key to its result.
//
// Owns: the order within a block of copies, waits, exchanges between warps, and the ends of spans.
// Never: rounds or adds by itself; tile.cuh and `merge` do.
// Invariant: whether a tile's spans are computed by one block or by many, they are merged from its first to its
// last by the same steps.
#pragma once
#include "pages.cuh"

namespace attend {

// Shared memory beside the slabs.
template <class S> struct Exchange {
    // [row tile][quarter or share][row]: largest scores in the middle of a tile, sums of weights at a span's end,
    // with barriers between.
    float* largest;
    float* sums;
    // Each thread's own total of values, [pair and half][thread], unless it has them in registers.
    Words4* totals;

    DEVICE explicit Exchange(u8* shared) {
        totals = reinterpret_cast<Words4*>(shared + S::SLABS * S::SLAB_BYTES) + threadIdx.x;
        largest = reinterpret_cast<float*>(shared + S::SLABS * S::SLAB_BYTES + S::TOTAL_BYTES);
        sums = largest;
    }
};

// A tile of keys and the same keys' values.
struct KeyTile {
    u32 index;
    u8* keys;
    const u8* values;
};

// A warp with its rows, in a block that goes through an item's keys together.
template <class S> struct Warp {
    const AttendArgs& args;
    const Task<S>& task;
    Exchange<S> exchange;
    Share share;
    Queries<S> queries;
    SpanState<S> state;
    Total totals[2];
    Words4 own_values[S::TOTALS == Totals::Registers ? S::OWN_PAIRS * 2 : 1];

    DEVICE Warp(const AttendArgs& all, const Task<S>& mine, u8* shared)
        : args(all), task(mine), exchange(shared), share(share_of_warp<S>()) {
        load_queries<S>(queries, args, task, share);
        state.clear();
        totals[0] = totals[1] = {NOTHING, 0};
    }

    DEVICE Words4 total_of(u32 i) const {
        if constexpr (S::TOTALS == Totals::Registers) {
            return own_values[i];
        } else {
            return load_words(exchange.totals + i * S::THREADS);
        }
    }
    DEVICE void set_total(u32 i, Words4 words) {
        if constexpr (S::TOTALS == Totals::Registers) {
            own_values[i] = words;
        } else {
            store_words(exchange.totals + i * S::THREADS, words);
        }
    }
    DEVICE u32 first_quarter() const { return share.index * S::QUARTERS; }
    DEVICE u32 first_pair() const { return share.index * S::OWN_PAIRS; }
    DEVICE u32 exchange_at(u32 part, u32 which) const {
        return (share.row_tile * 4 + part) * 16 + lane_index() / 4 + which * 8;
    }

    // The tile's keys have arrived before the call; its values arrive during it. All warps of the block call this
    // together.
    DEVICE void attend(const KeyTile& tile) {
        const View view = task.view_of(share.row_tile, tile.index);
        Scores<S> scores;
        float largest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
        if (view != View::Nothing) {
            score<S>(scores, queries, tile.keys, first_quarter());
            if (args.cap > 0) cap<S>(scores, args.cap, args.cap_exponent);
            if (view == View::Some) hide<S>(scores, sight_of<S>(task, share), tile.index * TILE_KEYS + first_quarter() * 16);
            find_largest<S>(largest, scores);
        }
        if constexpr (S::SPLIT > 1) exchange_largest(largest);
        u32 own[S::QUARTERS][4];
        if (view != View::Nothing) {
            raise<S>(state, largest, args.scale);
            weigh<S>(own, scores, state, args.scale);
        }
        // The weights overwrite the keys, which no warp reads after the exchange of the largest
        // scores.
        const SharedWeights all = {reinterpret_cast<Words4*>(tile.keys) + share.row_tile * 4 * 32 + lane_index()};
        if (S::SPLIT > 1 && view != View::Nothing) {
#pragma unroll
            for (u32 i = 0; i < S::QUARTERS; i++) all.store(own[i], first_quarter() + i);
        }
        cp_async_wait<S::SLABS - 2>();
        sync_block();
        if (view == View::Nothing) return;
        if constexpr (S::SPLIT > 1) {
            add_values<S>(state, all, tile.values, first_pair());
        } else {
            add_values<S>(state, OwnWeights{own}, tile.values, first_pair());
        }
    }

    DEVICE void exchange_largest(float (&largest)[2]) {
#pragma unroll
        for (u32 which = 0; which < 2; which++) {
            if (lane_index() % 4 == 0) exchange.largest[exchange_at(share.index, which)] = largest[which];
        }
        sync_block();
#pragma unroll
        for (u32 i = 0; i < S::SPLIT * 2; i++) {
            largest[i % 2] = max(largest[i % 2], exchange.largest[exchange_at(i / 2, i % 2)]);
        }
    }

    // The sum of a row's weights in this span: each quarter's over its lanes, then the quarters in order.
    DEVICE void sum_up(float (&sums)[2]) {
#pragma unroll
        for (u32 i = 0; i < S::QUARTERS * 2; i++) {
            float& sum = state.sum[i / 2][i % 2];
            sum = add_rn(sum, shuffle_xor(sum, 1));
            sum = add_rn(sum, shuffle_xor(sum, 2));
            if (S::SPLIT > 1 && lane_index() % 4 == 0) exchange.sums[exchange_at(first_quarter() + i / 2, i % 2)] = sum;
        }
        if constexpr (S::SPLIT > 1) sync_block();
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            float sum;
            if constexpr (S::SPLIT > 1) {
                sum = exchange.sums[exchange_at(i / 2, i % 2)];
            } else {
                sum = state.sum[i / 2][i % 2];
            }
            sums[i % 2] = i < 2 ? sum : add_rn(sums[i % 2], sum);
        }
    }

    // Merges the span into the totals and begins the next. `is_first` is set for the item's first span.
    DEVICE void keep_span(bool is_first) {
        float sums[2];
        sum_up(sums);
        const Factors factors[2] = {merge(totals[0], {state.top[0], sums[0]}), merge(totals[1], {state.top[1], sums[1]})};
#pragma unroll
        for (u32 i = 0; i < S::OWN_PAIRS * 2; i++) {
            Words4 words = {{0, 0, 0, 0}};
            if (!is_first) words = total_of(i);
#pragma unroll
            for (u32 word = 0; word < 4; word++) {
                const float fresh = state.values[i / 2][i % 2][word];
                words.word[word] = f32_to_bits(merged(bits_to_f32(words.word[word]), fresh, factors[word / 2]));
            }
            set_total(i, words);
        }
        state.clear();
    }

    // Stores the span's state for the block that merges the tile's spans, and begins the next span.
    DEVICE void leave_span(u32 span) {
        float sums[2];
        sum_up(sums);
#pragma unroll
        for (u32 which = 0; which < 2; which++) {
            const u32 row = lane_row(share, which);
            if (row >= task.rows) continue;
            float* to = state_at<S>(args, task, span - task.span_first, row);
            if (first_pair() == 0 && lane_index() % 4 == 0) {
                *reinterpret_cast<FloatPair*>(to) = {state.top[which], sums[which]};
            }
            store_state<S>(to, state.values, which, first_pair());
        }
        state.clear();
    }

    // Writes the quotients of the totals to the output.
    DEVICE void store_out() {
#pragma unroll
        for (u32 i = 0; i < S::OWN_PAIRS * 2; i++) {
            const Words4 words = total_of(i);
#pragma unroll
            for (u32 word = 0; word < 4; word++) state.values[i / 2][i % 2][word] = bits_to_f32(words.word[word]);
        }
#pragma unroll
        for (u32 which = 0; which < 2; which++) {
            const u32 row = lane_row(share, which);
            if (row >= task.rows) continue;
            const float scale = final_factor(totals[which], args.sinks, task.query_head_of(row), args.value_scale);
            bf16* out = args.out + task.head_of(row, args.query_heads) * S::DIM + first_pair() * 16;
#pragma unroll
            for (u32 i = 0; i < S::OWN_PAIRS * 2; i++) {
                if (S::PAIRS % S::SPLIT != 0 && first_pair() + i / 2 >= S::PAIRS) break;
                const FloatPair two = values_of<S>(state.values[i / 2], which, i % 2);
                auto* to = reinterpret_cast<u32*>(out + i / 2 * 16 + dim_of<S>(i % 2));
                *to = pack_bf16(mul_rn(two.low, scale), mul_rn(two.high, scale));
            }
        }
    }
};

// Merges the states that the items of one tile stored, span after span, and writes the rows.
template <class S> DEVICE void merge_states(const AttendArgs& args, const Task<S>& task) {
    constexpr u32 FOURS = S::DIM / 4;
    for (u32 i = threadIdx.x; i < task.rows * FOURS; i += S::THREADS) {
        const u32 row = i / FOURS, dim = i % FOURS * 4;
        Total total = {NOTHING, 0};
        float values[4] = {0, 0, 0, 0};
        const u32 spans = task.span_end - task.span_first;
#pragma unroll 4
        for (u32 span = 0; span < spans; span++) {
            const float* state = state_at<S>(args, task, span, row);
            const Words4 words = load_fresh_words(state + STATE_HEADER + dim);
            const Factors factors = merge(total, {load_fresh(state), load_fresh(state + 1)});
#pragma unroll
            for (u32 word = 0; word < 4; word++) values[word] = merged(values[word], bits_to_f32(words.word[word]), factors);
        }
        const float scale = final_factor(total, args.sinks, task.query_head_of(row), args.value_scale);
        auto* out = reinterpret_cast<u32*>(args.out + task.head_of(row, args.query_heads) * S::DIM + dim);
        out[0] = pack_bf16(mul_rn(values[0], scale), mul_rn(values[1], scale));
        out[1] = pack_bf16(mul_rn(values[2], scale), mul_rn(values[3], scale));
    }
}

template <class S> DEVICE void attend_item(const AttendArgs& args, const AttendItem& item, u32 kv_head, u8* shared) {
    __shared__ Task<S> task;
    // Other warps may still read the previous item and its slabs.
    sync_block();
    if (threadIdx.x == 0) task.set(args, item, kv_head);
    sync_block();
    Ring<S> ring(shared, task);
    Warp<S> warp(args, task, shared);
    u32 slab = 0;
    bool is_first = true;
    for (u32 tile = task.tile_first; tile < task.tile_end; tile++) {
        cp_async_wait<S::SLABS - 3>();
        sync_block();
        // The two slabs of the previous tile are free.
        ring.fill(2);
        const u32 values = Ring<S>::after(slab);
        warp.attend({tile, shared + slab * S::SLAB_BYTES, shared + values * S::SLAB_BYTES});
        slab = Ring<S>::after(values);
        if ((tile + 1) % SPAN_TILES != 0 && tile + 1 != task.tile_end) continue;
        if (task.parts == 1) {
            warp.keep_span(is_first);
            is_first = false;
        } else {
            warp.leave_span(tile / SPAN_TILES);
        }
    }
    cp_async_wait<0>();
    if (task.parts == 1) {
        warp.store_out();
    } else if (is_last_block(args.arrivals + task.arrival, task.parts)) {
        merge_states<S>(args, task);
    }
}

template <class S> DEVICE void attend_items(const AttendArgs& args, u8* shared) {
    const u32 work_end = *args.items_count * args.kv_heads;
    for (u32 work = blockIdx.x; work < work_end; work += gridDim.x) {
        attend_item<S>(args, args.items[work / args.kv_heads], work % args.kv_heads, shared);
    }
}

}  // namespace attend
