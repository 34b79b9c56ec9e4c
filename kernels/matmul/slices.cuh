// Slices of the inner dimension and their spans: where they end, and the order in which their sums are added.
//
// Owns: the walk over spans, and the tree of slices.
// Never: multiplies.
// Invariant: no span is part of two slices. A slice's spans are added in order, and slices as a balanced binary tree:
// of eight, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
#pragma once
#include "matmul.cuh"

namespace matmul {

// A run of elements of the inner dimension that is summed from zero.
struct Span {
    u32 slice;
    u32 begin;
    u32 end;
};

DEVICE Span span_from(const MatmulArgs& args, u32 slice, u32 begin) {
    return {slice, begin, min(args.slice_ends[slice], begin + args.span_width)};
}

DEVICE bool begins_slice(const MatmulArgs& args, const Span& span) {
    return span.begin == (span.slice == 0 ? 0 : args.slice_ends[span.slice - 1]);
}

DEVICE bool ends_slice(const MatmulArgs& args, const Span& span) { return span.end == args.slice_ends[span.slice]; }

// Not for the last span.
DEVICE Span next_span(const MatmulArgs& args, const Span& span) {
    return span_from(args, ends_slice(args, span) ? span.slice + 1 : span.slice, span.end);
}

// Places in memory for sums that wait, this thread's first one and the distance to the next.
struct WaitingInMemory {
    Words4* first;
    u64 stride;

    template <class Sums> DEVICE void leave(const Sums& sums, u32 index) const { sums.leave(first + index * stride); }
    template <class Sums> DEVICE void load(Sums& sums, u32 index) const { sums.load(first + index * stride); }
};

// The sum of spans that come one after the other. Sums of slices that wait for their neighbours' are left in memory,
// the latest on top, except the last: it stays in registers, and with one span in each slice every second one meets
// its neighbour there.
template <class Sums, class Waiting = WaitingInMemory> struct SliceTree {
    Waiting waiting;
    u32 count;
    // After a slice's last span: the sum of the greatest whole subtree that ends there.
    Sums last;

    DEVICE SliceTree(Words4* memory, u64 distance) : SliceTree(WaitingInMemory{memory, distance}) {}
    DEVICE explicit SliceTree(const Waiting& places) : waiting(places), count(0) { last.clear(); }

    DEVICE void add(const MatmulArgs& args, const Span& span, const Sums& sums) {
        // How many subtrees end with this slice's end, other than the slice itself.
        u32 ended = 0;
        while ((span.slice >> ended & 1) != 0) ended++;
        const bool begins = begins_slice(args, span), ends = ends_slice(args, span);
        if (begins && !(ends && ended > 0)) {
            if (span.slice > 0) waiting.leave(last, count++);
            last = sums;
        } else {
            last.add(sums);
            if (begins) ended--;
        }
        if (!ends) return;
        for (; ended > 0; ended--) {
            Sums neighbour;
            waiting.load(neighbour, --count);
            last.add(neighbour);
        }
    }
};

}  // namespace matmul
