// The state of the running block, shared by the scheduler and the warps' collectives.
//
// Owns: which threads are ready, wait or have returned, the next thread, and the operands of
// waiting lanes.
// Never: is seen by kernels or by the driver.
// Invariant: a lane is in exactly one of `ready`, `met` and `at_barrier`, or has returned.
#pragma once
#include "fiber.h"
#include "machine.h"
#include "scheduler.h"

#pragma GCC visibility push(hidden)
namespace emulator {

constexpr uint32_t LANES = 32;
constexpr uint32_t WARPS_MAX = 32;
constexpr uint32_t THREADS_MAX = LANES * WARPS_MAX;

enum class Collective : uint8_t { Sync, Shuffle, Ballot, Ldmatrix, LdmatrixTransposed, Mma, Wgmma };

// Operands and results of a collective, for each lane. Values and rows have two places in turn: a
// lane may reach the next collective before all have read the last one.
struct Brought {
    uint64_t value[2][LANES];
    Row row[2][LANES];
    // Fragments of a product, part by part, as matrices of 8 × 8: rows of `a` and columns of `b` in
    // bf16, and the upper and lower half of the sums.
    uint32_t a[4][LANES], b[2][LANES];
    alignas(64) float d[2][LANES * 2];
};

struct Warp {
    // Masks with one bit for each lane.
    uint32_t exists = 0, ready = 0, met = 0, at_barrier = 0;
    Collective collective = Collective::Sync;
    Site site = {};
    // Number of collectives so far, modulo two.
    uint32_t turn = 0;
    uint32_t votes[2] = {};
    // Synchronisation address for the race detector.
    uint64_t gate[2] = {};
    Brought brought;
};

// The part of a thread that a switch touches, in one cache line.
struct alignas(64) Thread {
    Context context;
    Index index;
};

struct Block {
    const Launch* launch = nullptr;
    Context host;
    uint32_t threads = 0, warps = 0;
    uint32_t now = 0, returned = 0, at_barrier = 0;
    Site barrier = {};
    uint32_t barriers = 0;
    // Synchronisation addresses for the race detector: barriers in turn, host to all threads, all
    // threads to host.
    uint64_t gate[2] = {}, start_gate = 0, end_gate = 0;
    bool is_first = false;
    Outcome outcome = Outcome::Done;
};

extern Block block;
extern Warp warps[WARPS_MAX];
extern Thread threads[THREADS_MAX];
// State of the running thread.
extern Warp* warp;
extern uint32_t lane;

constexpr uint32_t NOBODY = ~0u;

// Whether the running thread has products that it has not waited for.
bool has_products();
// Drops the products of a thread whose block is over.
void forget_products(uint32_t number);

// No thread is ready and some have not returned.
[[noreturn]] void report_deadlock();
[[noreturn]] void report_meeting(Collective collective, Site site);
// Gives a thread that has not begun a stack.
void prepare(uint32_t number);

bool is_same_file(Site a, Site b);
inline bool is_same(Site a, Site b) { return a.line == b.line && (a.file == b.file || is_same_file(a, b)); }

inline void run_as(uint32_t number) {
    block.now = number;
    warp = &warps[number / LANES];
    lane = number % LANES;
    thread_index = &threads[number].index;
}

// The next ready lane of this warp, so that a warp runs together; else of the next warp that has
// one.
inline uint32_t next_ready() {
    uint32_t number = block.now / LANES;
    uint32_t above = warp->ready & ~((2u << lane) - 1);
    if (above != 0) return number * LANES + uint32_t(__builtin_ctz(above));
    for (uint32_t tried = 0; tried < block.warps; tried++) {
        uint32_t ready = warps[number].ready;
        if (ready != 0) return number * LANES + uint32_t(__builtin_ctz(ready));
        number = number + 1 == block.warps ? 0 : number + 1;
    }
    return NOBODY;
}

// Adds the running lane to those that reached the collective. True for the last lane, which then
// releases all; the others wait.
inline bool meet(Collective collective, Site site) {
    bool is_other = warp->met != 0 && (warp->collective != collective || !is_same(warp->site, site));
    if (__builtin_expect(is_other, false)) report_meeting(collective, site);
    warp->collective = collective;
    warp->site = site;
    warp->met |= 1u << lane;
    warp->ready &= ~(1u << lane);
    return warp->met == warp->exists;
}

inline void let_go() {
    warp->ready |= warp->met;
    warp->met = 0;
    // All lanes are here, so no lane reads the last collective any more.
    warp->votes[warp->turn ^ 1] = 0;
    warp->turn ^= 1;
}

// Switches to a ready thread, until this one is ready again.
inline __attribute__((always_inline)) void wait() {
    Thread& self = threads[block.now];
    uint32_t next = next_ready();
    if (__builtin_expect(next == NOBODY, false)) report_deadlock();
    Thread& to = threads[next];
    if (__builtin_expect(to.context.stack_pointer == nullptr, false)) prepare(next);
    run_as(next);
    switch_context(self.context, to.context);
}

}  // namespace emulator
#pragma GCC visibility pop
