// Kernels and launches of the driver API.
//
// Owns: the conditions of an accepted launch, and its argument's bytes.
// Never: reads an argument after the call.
// Invariant: an accepted launch has at most as many threads and as much shared memory as its
// function allows.
#pragma once
#include "state.h"

#pragma GCC visibility push(hidden)
namespace standin {

struct LaunchShape {
    emulator::Index grid, block;
    uint32_t shared_bytes;
};

struct KernelWork : Work {
    // The function may be unloaded with its module before this runs; the kernel stays.
    Function* function;
    const emulator::Kernel* kernel;
    LaunchShape shape;
    std::vector<uint8_t> args;

    CUgraphNodeType type() const override { return NODE_TYPE_KERNEL; }
    CUresult begin(Context& context) const override;
    CUresult run(uint64_t seed) const override;
};

// Checks the shape, and copies the argument out of `params`.
CUresult make_launch(CUfunction function, const LaunchShape& shape, void** params, std::shared_ptr<KernelWork>* made);

}  // namespace standin
#pragma GCC visibility pop
