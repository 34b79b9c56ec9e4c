// Tiles of products with weights of eight or four bits.
//
// Owns: their sizes. Never: has an entry.
//
// Tiles are 128 columns wide, twice bf16's: rows are read again for every tile, and at half or a
// quarter of the bytes of weights they would weigh too much. More stages are in flight, since each
// has fewer bytes.
#pragma once
#include "product.cuh"

namespace matmul {

template <class Weights> struct Narrow {
    static constexpr u32 STAGES = 4 * Weights::PER_CHUNK / 16;
    // Scales of groups of 16 take the room of a stage.
    static constexpr u32 FEWER = Weights::GROUP_LEAST == 16 ? 1 : 0;
    using Few8 = Shape<Weights, 128, 8, 4, 1, 128, STAGES - FEWER>;
    using Few16 = Shape<Weights, 128, 16, 4, 1, 128, (STAGES == 8 ? 7 : STAGES) - FEWER>;
    using Few32 = Shape<Weights, 128, 32, 4, 1, 128, (Weights::PER_CHUNK == 16 ? 3 : 5) - FEWER>;
    using Many64 = Shape<Weights, 128, 64, 4, 2, 64, 4>;
};

}  // namespace matmul
