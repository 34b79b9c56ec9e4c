// Turns a kernel's access to unmapped memory into a failed launch.
//
// Owns: the handlers of SIGSEGV and SIGBUS while a launch runs.
// Never: handles a fault of another thread, or of the driver itself.
// Invariant: the process's earlier handlers are restored after the launch.
#pragma once

#pragma GCC visibility push(hidden)
namespace emulator {

class Traps {
 public:
    // Whether an address is just below the running fiber's stack, and the top of that stack.
    using IsOverrun = bool (*)(const void* address);
    using StackTop = void* (*)();

    Traps(IsOverrun is_overrun, StackTop stack_top);
    ~Traps();
    Traps(const Traps&) = delete;
    Traps& operator=(const Traps&) = delete;
};

}  // namespace emulator
#pragma GCC visibility pop
