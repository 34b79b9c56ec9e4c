// The cap of logits: limit * tanh(x / limit), in place.
//
// Bandwidth-bound: 4 bytes read and 4 written for each logit.
#include "cap.cuh"
#include "stored.cuh"

struct CapArgs {
    float* logits;   // (count)
    u64 count;
    float limit;
    float exponent;  // see capped
};

constexpr u32 THREADS = 256;
constexpr u32 EACH = 8;

// Grid: (count / 2048 rounded up).
extern "C" KERNEL(THREADS, 1) cap_logits(GRID_CONSTANT const CapArgs args) {
    start_kernel();
    const u64 first = u64(blockIdx.x) * THREADS * EACH + threadIdx.x;
    for (u32 i = 0; i < EACH; i++) {
        const u64 at = first + i * THREADS;
        if (at < args.count) args.logits[at] = capped(args.logits[at], args.limit, args.exponent);
    }
}
