// A block's shared memory on the host.
//
// Owns: the memory behind DYNAMIC_SHARED, and the knowledge of where `__shared__` variables are.
// Never: keeps what a block wrote for the next one.
// Invariant: one byte more than the launch asked for is noticed: by a fence of the address sanitizer, by a page
// that cannot be touched, or by a pattern that is compared after the block.
#pragma once
#include <stdint.h>

#pragma GCC visibility push(hidden)
namespace emulator {

// Once before a launch, on the thread that runs it.
void shared_begin(uint32_t bytes);
// Before each block.
void poison_shared(uint32_t bytes);
// After each block.
bool shared_is_intact();

}  // namespace emulator
#pragma GCC visibility pop
