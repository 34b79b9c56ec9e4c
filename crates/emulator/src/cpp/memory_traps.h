// Turns a kernel's access to memory that is not there into the end of its launch.
//
// Owns: the handlers of SIGSEGV and SIGBUS while a launch runs.
// Never: takes a fault that another thread of the process made, or that the driver itself made.
// Invariant: what the process had installed before is installed again after the launch.
#pragma once

#pragma GCC visibility push(hidden)
namespace emulator {

class Traps {
 public:
    // Whether an address is where the running fiber's stack overflows to, and the top of that stack.
    using IsOverrun = bool (*)(const void* address);
    using StackTop = void* (*)();

    Traps(IsOverrun is_overrun, StackTop stack_top);
    ~Traps();
    Traps(const Traps&) = delete;
    Traps& operator=(const Traps&) = delete;
};

}  // namespace emulator
#pragma GCC visibility pop
