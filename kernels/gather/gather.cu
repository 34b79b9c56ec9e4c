// Rows by index: to[i] = from[indices[i]]. Bytes are copied as they are, so one kernel serves all types.
#include "prims.cuh"

struct GatherArgs {
    const u16* from;      // (rows, units)
    u16* to;              // (indices, units)
    const u32* indices;   // each within from
    u32 units;            // 16-bit units of a row
};

constexpr u32 THREADS = 128;

// Grid: (indices).
extern "C" KERNEL(THREADS, 1) gather_rows(GRID_CONSTANT const GatherArgs args) {
    start_kernel();
    u64 units = args.units;
    const u16* from = args.from + args.indices[blockIdx.x] * units;
    u16* to = args.to + blockIdx.x * units;
    for (u64 i = threadIdx.x; i < units; i += THREADS) to[i] = from[i];
}
