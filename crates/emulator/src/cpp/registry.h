// The kernels of this library, by name.
//
// Owns: the registration of a kernel file's content; the build writes one such file for each .cu
// file.
// Never: looks into a kernel.
// Invariant: a name stands for one kernel.
#pragma once
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)
namespace emulator {

struct Kernel {
    const char* name;
    void (*run)(const void* args);
    size_t args_bytes;
    // Limits from kernels/table.txt.
    uint32_t threads_max, registers_max, shared_bytes;
    const Kernel* next;
};

void add_kernel(Kernel* kernel);
// Null if no kernel has that name.
const Kernel* find_kernel(const char* name);

template <auto entry> struct Entry;
template <class Args, void (*entry)(Args)> struct Entry<entry> {
    static constexpr size_t ARGS_BYTES = sizeof(Args);
    static void run(const void* args) { entry(*static_cast<const Args*>(args)); }
};

struct Listed : Kernel {
    explicit Listed(const Kernel& kernel) : Kernel(kernel) { add_kernel(this); }
};

}  // namespace emulator
#pragma GCC visibility pop
