// Runs a grid of blocks on the calling thread.
//
// Owns: the interface between the stand-in driver and the emulator.
// Never: knows streams, memory or handles.
// Invariant: one launch at a time in a process; the caller sees to that.
#pragma once
#include "machine.h"

#pragma GCC visibility push(hidden)
namespace emulator {

struct Launch {
    const char* name;
    // Calls the kernel with the argument that `args` points to.
    void (*run)(const void* args);
    const void* args;
    Index grid, block;
    uint32_t shared_bytes;
    // Seeds the order of blocks, and the first thread; 0 is the order of their numbers.
    uint64_t seed;
};

Outcome launch(const Launch& launch);

// Writes one line to stderr and keeps it for `last_message`.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Copies the last message, at most `bytes` with its terminator; returns its whole length.
size_t last_message(char* to, size_t bytes);

}  // namespace emulator
#pragma GCC visibility pop
