// Rows of a step by adapter, and the changes that adapters make to a model's products.
//
// Owns: these lists, which the host writes before a step: a recorded step reads them anew.
// Never: computes.
// Invariant: places of one adapter follow each other, and a tile has places of one adapter.
#pragma once
#include "prims.cuh"

// The change of one product, expand . (shrink . x); none if there are no ranks.
struct AdapterChange {
    const float* shrink;  // (ranks, in)
    const float* expand;  // (ranks, out): transposed, so that neighbouring threads read neighbours
    u32 ranks;
    u32 unused;
};

// A row with an adapter.
struct AdapterPlace {
    const AdapterChange* changes;  // (products of the model)
    u32 row;
    u32 unused;
};

// Places `first .. end`, at most TILE_PLACES.
struct AdapterTile {
    u32 first;
    u32 end;
};

struct AdapterRows {
    const AdapterPlace* places;
    const AdapterTile* tiles;
    // How many places and how many tiles there are.
    const u32* counts;
    // The product's number among those of the model.
    u32 product;
    // The distance from one place's ranks to the next one's.
    u32 ranks_most;

    DEVICE u32 places_count() const { return counts[0]; }
    DEVICE u32 tiles_count() const { return counts[1]; }
    DEVICE AdapterChange change(u32 place) const { return places[place].changes[product]; }
};

constexpr u32 TILE_PLACES = 8;
