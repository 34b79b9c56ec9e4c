// Rows of a step, sorted by the experts that they use.
//
// Owns: the tiles into which products of experts cut them. Never: computes.
// Invariant: a place is one row's use of one expert; places are in ascending order of experts, and of rows within an
// expert. A tile has places of one expert.
#pragma once
#include "prims.cuh"

// A tile of an expert's places, whose number in the list says which of them.
struct alignas(16) ExpertTile {
    u32 expert;
    // The expert's places, and the number of its first tile.
    u32 first;
    u32 end;
    u32 first_tile;
};

// The rows of products of several experts, whose matrices lie at one distance from each other.
struct ExpertRows {
    static constexpr bool HAS_EXPERTS = true;
    const ExpertTile* tiles;
    const u32* tiles_count;
    // The row of each place; null where every place has a row of its own.
    const u32* rows_of;
    // From an expert's weights, scales or bias to the next expert's, in bytes.
    u64 stride;
};

// The rows of a product of one matrix: all.
struct AllRows {
    static constexpr bool HAS_EXPERTS = false;
};

// The part of `of` that belongs to an expert; `of` is the first expert's, or null.
template <class T> DEVICE const T* of_expert(const T* of, const ExpertRows& rows, u32 expert) {
    return of == nullptr ? nullptr : reinterpret_cast<const T*>(reinterpret_cast<const u8*>(of) + rows.stride * expert);
}
template <class T> DEVICE const T* of_expert(const T* of, const AllRows&, u32) { return of; }
