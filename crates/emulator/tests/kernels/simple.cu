// Kernels that show which work has run, and in which order.
#include "prims.cuh"

struct AddArgs {
    u32* numbers;
    u32 count, value;
};

extern "C" KERNEL(128, 1) add(GRID_CONSTANT const AddArgs args) {
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < args.count) args.numbers[index] += args.value;
}

struct FollowArgs {
    u32* numbers;
};

// A mistake: each block uses the result of the one before it, which the device need not have run.
extern "C" KERNEL(32, 1) follow(GRID_CONSTANT const FollowArgs args) {
    if (threadIdx.x == 0) args.numbers[blockIdx.x + 1] = args.numbers[blockIdx.x] + 1;
}
