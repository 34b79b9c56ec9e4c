// A block's shared memory on the host.
//
// Owns: the memory behind DYNAMIC_SHARED, and the location of `__shared__` variables.
// Never: keeps a block's content for the next one.
// Invariant: an access one byte past the launch's request is detected: by the address sanitizer's
// redzone, by a guard page, or by a pattern that is compared after the block.
#pragma once
#include <stdint.h>

#pragma GCC visibility push(hidden)
namespace emulator {

// Called once before a launch, on its thread.
void shared_begin(uint32_t bytes);
// Called before each block.
void poison_shared(uint32_t bytes);
// Called after each block.
bool shared_is_intact();

}  // namespace emulator
#pragma GCC visibility pop
