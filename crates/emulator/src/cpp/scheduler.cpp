// The scheduler of a block's threads: each is a fiber that runs until it waits for others or
// returns.
//
// Owns: the running block, the barrier, the end of a failed launch.
// Never: runs two fibers at once, or is compiled with a sanitizer.
// Invariant: a barrier opens when every thread of the block has reached it from one line. A block
// that cannot continue ends the launch with a message that names the line, and the process goes on.
#include "scheduler.h"

#include <stdio.h>
#include <string.h>

#include "block.h"
#include "fiber.h"
#include "groups.h"
#include "memory_traps.h"
#include "shared_memory.h"

namespace emulator {

const Index* thread_index = nullptr;
Index block_index, block_size, grid_size;
Warp* warp = nullptr;
uint32_t lane = 0;

Block block;
Warp warps[WARPS_MAX];
Thread threads[THREADS_MAX];

namespace {

// Each thread's asynchronous copies.
Groups<Copy> copies_of[THREADS_MAX];

const char* name_of(Collective collective) {
    switch (collective) {
        case Collective::Sync: return "sync_warp";
        case Collective::Shuffle: return "a shuffle";
        case Collective::Ballot: return "ballot";
        case Collective::Ldmatrix: return "ldmatrix_x4";
        case Collective::LdmatrixTransposed: return "ldmatrix_x4_transposed";
        case Collective::Mma: return "mma_bf16";
        case Collective::Wgmma: return "wgmma_bf16";
    }
    return "?";
}

const char* file_of(Site site) {
    const char* slash = site.file == nullptr ? nullptr : strrchr(site.file, '/');
    return slash == nullptr ? site.file : slash + 1;
}

[[noreturn]] void end_launch(Outcome outcome) {
    block.outcome = outcome;
    leave_context(block.host);
}

void describe_here(char* to, size_t bytes) {
    const Index& at = threads[block.now].index;
    snprintf(to, bytes, "kernel %s, block (%u, %u, %u), thread (%u, %u, %u)", block.launch->name, block_index.x,
             block_index.y, block_index.z, at.x, at.y, at.z);
}

void fiber_main();

// Ends a thread whose kernel has returned. True if another one continues in its place, on its
// stack.
bool go_on_as_another() {
    Thread& self = threads[block.now];
    if (!copies_of[block.now].is_over()) {
        fail(Outcome::Failed, "returned with asynchronous copies that nobody waited for", {});
    }
    if (has_products()) fail(Outcome::Failed, "returned with products of wgmma that nobody waited for", {});
    warp->ready &= ~(1u << lane);
    block.returned++;
    release(&block.end_gate);
    if (block.returned == block.threads) {
        end(self.context);
        leave_context(block.host);
    }
    uint32_t next = next_ready();
    if (next == NOBODY) report_deadlock();
    Context& to = threads[next].context;
    bool has_begun = to.stack_pointer != nullptr;
    if (STACKS_ARE_SHARED && !has_begun) {
        to.stack = self.context.stack;
        self.context.stack = nullptr;
        self.context.stack_pointer = nullptr;
        // Anything but null marks it as begun; the true value is saved at its first wait.
        to.stack_pointer = to.stack;
        run_as(next);
        return true;
    }
    if (!has_begun) prepare(next);
    end(self.context);
    run_as(next);
    leave_context(to);
}

void fiber_main() {
    arrived_on_new_stack(block.is_first ? CameFrom::Host : CameFrom::Fiber);
    block.is_first = false;
    do {
        acquire(&block.start_gate);
        block.launch->run(block.launch->args);
    } while (go_on_as_another());
}

void begin_block(Index index, uint64_t draw) {
    block_index = index;
    block.returned = block.at_barrier = 0;
    block.outcome = Outcome::Done;
    block.is_first = true;
    for (uint32_t number = 0; number < block.warps; number++) {
        Warp& fresh = warps[number];
        uint32_t left = block.threads - number * LANES;
        fresh.exists = fresh.ready = left >= LANES ? ~0u : (1u << left) - 1;
        fresh.met = fresh.at_barrier = fresh.votes[0] = fresh.votes[1] = 0;
    }
    poison_shared(block.launch->shared_bytes);
    run_as(uint32_t(draw % block.threads));
}

void run_block(Index index, uint64_t draw) {
    begin_block(index, draw);
    release(&block.start_gate);
    prepare(block.now);
    switch_context(block.host, threads[block.now].context);
    acquire(&block.end_gate);
    if (block.outcome == Outcome::Done && !shared_is_intact()) {
        say("emulator: kernel %s, block (%u, %u, %u) wrote past the end of its %u bytes of dynamic shared memory",
            block.launch->name, index.x, index.y, index.z, block.launch->shared_bytes);
        block.outcome = Outcome::IllegalAddress;
    }
    for (uint32_t number = 0; number < block.threads; number++) forget_products(number);
    if (block.outcome == Outcome::Done) return;
    for (uint32_t number = 0; number < block.threads; number++) {
        abandon(threads[number].context);
        copies_of[number].forget();
    }
}

void begin_launch(const Launch& launch) {
    block.launch = &launch;
    block.host = Context();
    Index size = block_size = launch.block;
    grid_size = launch.grid;
    block.threads = size.x * size.y * size.z;
    block.warps = (block.threads + LANES - 1) / LANES;
    for (uint32_t number = 0; number < block.threads; number++) {
        introduce(threads[number].context);
        threads[number].index = {number % size.x, number / size.x % size.y, number / (size.x * size.y)};
    }
}

uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

uint64_t common_divisor(uint64_t a, uint64_t b) { return b == 0 ? a : common_divisor(b, a % b); }

}  // namespace

void report_meeting(Collective collective, Site site) {
    char here[160];
    describe_here(here, sizeof here);
    say("emulator: %s: %s at %s:%u meets %s at %s:%u of the same warp", here, name_of(collective), file_of(site),
        site.line, name_of(warp->collective), file_of(warp->site), warp->site.line);
    end_launch(Outcome::Failed);
}

void report_deadlock() {
    for (uint32_t number = 0; number < block.warps; number++) {
        const Warp& stuck = warps[number];
        if (stuck.met == 0) continue;
        say("emulator: kernel %s, block (%u, %u, %u): deadlock: of warp %u the lanes %08x wait in %s at %s:%u, lanes %08x "
            "at a barrier, the others have returned",
            block.launch->name, block_index.x, block_index.y, block_index.z, number, stuck.met,
            name_of(stuck.collective), file_of(stuck.site), stuck.site.line, stuck.at_barrier);
        end_launch(Outcome::Failed);
    }
    say("emulator: kernel %s, block (%u, %u, %u): deadlock: %u of %u threads wait in sync_block at %s:%u, %u have returned "
        "without it",
        block.launch->name, block_index.x, block_index.y, block_index.z, block.at_barrier, block.threads,
        file_of(block.barrier), block.barrier.line, block.returned);
    end_launch(Outcome::Failed);
}

bool is_same_file(Site a, Site b) { return strcmp(a.file, b.file) == 0; }

void prepare(uint32_t number) {
    begin(threads[number].context, fiber_main);
}

void sync_block(Site site) {
    if (block.at_barrier != 0 && !is_same(block.barrier, site)) {
        char here[160];
        describe_here(here, sizeof here);
        say("emulator: %s: sync_block at %s:%u meets sync_block at %s:%u", here, file_of(site), site.line,
            file_of(block.barrier), block.barrier.line);
        end_launch(Outcome::Failed);
    }
    uint64_t* gate = &block.gate[block.barriers % 2];
    release(gate);
    block.barrier = site;
    block.at_barrier++;
    warp->ready &= ~(1u << lane);
    warp->at_barrier |= 1u << lane;
    if (block.at_barrier == block.threads) {
        block.barriers++;
        block.at_barrier = 0;
        for (uint32_t number = 0; number < block.warps; number++) {
            warps[number].ready |= warps[number].at_barrier;
            warps[number].at_barrier = 0;
        }
    } else {
        wait();
    }
    acquire(gate);
}

void copy_begin(Copy copy) { copies_of[block.now].begin(copy); }

void copy_commit() { copies_of[block.now].commit(); }

const Copy* copies_due(uint32_t groups_left, uint32_t* count) { return copies_of[block.now].due(groups_left, count); }

void fail(Outcome outcome, const char* what, Site site) {
    char here[160];
    describe_here(here, sizeof here);
    if (site.file == nullptr) {
        say("emulator: %s: %s", here, what);
    } else {
        say("emulator: %s: %s at %s:%u", here, what, file_of(site), site.line);
    }
    end_launch(outcome);
}

Outcome launch(const Launch& launch) {
    begin_launch(launch);
    shared_begin(launch.shared_bytes);
    Traps traps([](const void* address) { return is_below(threads[block.now].context, address); },
                []() { return top_of(threads[block.now].context); });
    uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    // A stride coprime to the number of blocks visits each once.
    uint64_t draw = launch.seed == 0 ? 0 : mix(launch.seed);
    uint64_t stride = launch.seed == 0 ? 1 : draw % blocks | 1;
    while (common_divisor(stride, blocks) != 1) stride++;
    for (uint64_t turn = 0, number = launch.seed == 0 ? 0 : mix(draw) % blocks; turn < blocks; turn++) {
        Index index = {uint32_t(number % launch.grid.x), uint32_t(number / launch.grid.x % launch.grid.y),
                       uint32_t(number / launch.grid.x / launch.grid.y)};
        run_block(index, launch.seed == 0 ? 0 : mix(draw + number));
        if (block.outcome != Outcome::Done) return block.outcome;
        number = (number + stride) % blocks;
    }
    return Outcome::Done;
}

}  // namespace emulator
