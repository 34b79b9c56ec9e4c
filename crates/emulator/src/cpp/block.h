// The state of the block that runs, shared by the scheduler and the warps' collectives.
//
// Owns: which threads are ready, wait or have returned, and what waiting lanes brought along.
// Never: is seen by kernels or by the driver.
// Invariant: a lane is in exactly one of `ready`, `met` and `at_barrier`, or has returned.
#pragma once
#include "machine.h"

#pragma GCC visibility push(hidden)
namespace emulator {

constexpr uint32_t LANES = 32;
constexpr uint32_t WARPS_MAX = 32;
constexpr uint32_t THREADS_MAX = LANES * WARPS_MAX;

enum class Collective : uint8_t { Sync, Shuffle, Ballot, Ldmatrix, LdmatrixTransposed, Mma };

// What each lane brings to a collective, and takes away from it.
struct Brought {
    uint64_t value[LANES];
    uint32_t from_lane[LANES];
    uint64_t taken[LANES];
    Row row[LANES];
    uint32_t* tile[LANES];
    float* d[LANES];
    const uint32_t* a[LANES];
    const uint32_t* b[LANES];
};

struct Warp {
    // One bit per lane.
    uint32_t exists = 0, ready = 0, met = 0, at_barrier = 0;
    Collective collective = Collective::Sync;
    Site site = {};
    uint32_t ballot_votes = 0, ballot = 0;
    // For the race detector; two in turn, since a lane may be at the next one before all have left the last.
    uint32_t syncs = 0;
    uint64_t gate[2] = {};
    Brought brought;
};

// The warp and lane of the thread that runs.
extern Warp* warp;
extern uint32_t lane;

// Puts the running lane among those who met. True for the last one, which then carries the collective out
// for all and goes on; the others return after that.
bool meet(Collective collective, Site site);
void let_go();
// Gives way to a thread that is ready, until this one is again.
void wait();

}  // namespace emulator
#pragma GCC visibility pop
