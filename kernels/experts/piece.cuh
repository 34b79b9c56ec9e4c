// The rows that a mixture of experts computes at once.
//
// Owns: their number, which the device knows. Never: computes.
#pragma once
#include "prims.cuh"

// Rows `first ..` of the step, at most `most` of them. The mixture's own buffers begin with row `first`.
struct ExpertPiece {
    const u32* rows_count;
    u32 first;
    u32 most;

    DEVICE u32 rows() const {
        const u32 all = *rows_count;
        return all > first ? min(all - first, most) : 0;
    }
};
