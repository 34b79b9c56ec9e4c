// Mistakes that must be detected, one in each kernel, and the correct version where an argument
// selects it.
#include "prims.cuh"

struct MistakeArgs {
    float* results;
    const float* numbers;
    // Selects the mistake; the comment of each kernel lists its choices.
    u32 choice;
};

// Choice 1 waits for the copy.
extern "C" KERNEL(32, 1) without_wait(GRID_CONSTANT const MistakeArgs args) {
    DYNAMIC_SHARED(float, copied);
    cp_async_16(copied + threadIdx.x * 4, args.numbers + threadIdx.x * 4, true);
    cp_async_commit();
    if (args.choice == 1) cp_async_wait<0>();
    sync_block();
    args.results[threadIdx.x] = copied[(threadIdx.x ^ 1) * 4];
    cp_async_wait<0>();
}

extern "C" KERNEL(64, 1) divergent_barrier(GRID_CONSTANT const MistakeArgs args) {
    if (threadIdx.x < 32) {
        sync_block();
    } else {
        sync_block();
    }
    args.results[threadIdx.x] = 1.0f;
}

extern "C" KERNEL(64, 1) unreached_barrier(GRID_CONSTANT const MistakeArgs args) {
    if (threadIdx.x >= 40) return;
    sync_block();
    args.results[threadIdx.x] = 1.0f;
}

extern "C" KERNEL(32, 1) half_a_shuffle(GRID_CONSTANT const MistakeArgs args) {
    float x = args.numbers[threadIdx.x];
    if (threadIdx.x < 16) x = shuffle_xor(x, 1);
    args.results[threadIdx.x] = x;
}

extern "C" KERNEL(32, 1) two_shuffles(GRID_CONSTANT const MistakeArgs args) {
    float x = args.numbers[threadIdx.x];
    if (threadIdx.x < 16) {
        x = shuffle_xor(x, 1);
    } else {
        x = shuffle_xor(x, 2);
    }
    args.results[threadIdx.x] = x;
}

extern "C" KERNEL(32, 1) copy_left_behind(GRID_CONSTANT const MistakeArgs args) {
    DYNAMIC_SHARED(float, copied);
    cp_async_16(copied + threadIdx.x * 4, args.numbers + threadIdx.x * 4, true);
    cp_async_commit();
}

// Writes the float of index `choice`.
extern "C" KERNEL(32, 1) write_shared(GRID_CONSTANT const MistakeArgs args) {
    DYNAMIC_SHARED(float, numbers);
    if (threadIdx.x == 0) numbers[args.choice] = 1.0f;
    sync_block();
    args.results[threadIdx.x] = numbers[0];
}

extern "C" KERNEL(32, 1) write_static_shared(GRID_CONSTANT const MistakeArgs args) {
    __shared__ float numbers[32];
    // A pointer hides the array's length from the compiler.
    float* to = numbers;
    asm volatile("" : "+r"(to));
    to[threadIdx.x + args.choice] = 1.0f;
    sync_block();
    args.results[threadIdx.x] = to[31 - threadIdx.x];
}

extern "C" KERNEL(32, 1) write_global(GRID_CONSTANT const MistakeArgs args) {
    if (threadIdx.x == 0) args.results[args.choice] = 1.0f;
}

// Two warps exchange numbers through shared memory; choice 1 has a barrier between.
extern "C" KERNEL(64, 1) swap_halves(GRID_CONSTANT const MistakeArgs args) {
    DYNAMIC_SHARED(float, numbers);
    numbers[threadIdx.x] = float(threadIdx.x);
    if (args.choice == 1) sync_block();
    args.results[threadIdx.x] = numbers[threadIdx.x ^ 32];
}

extern "C" KERNEL(32, 1) misaligned(GRID_CONSTANT const MistakeArgs args) {
    Words4 words = load_words(args.numbers + threadIdx.x);
    args.results[threadIdx.x] = bits_to_f32(words.word[0]);
}

// The recursion cannot become a loop, since work follows the call.
float descend(float x, u32 depth) {
    volatile float here[256];
    here[depth % 256] = x;
    if (depth == 0) return x;
    return descend(x + 1.0f, depth - 1) + here[depth % 256];
}

extern "C" KERNEL(32, 1) overflow_stack(GRID_CONSTANT const MistakeArgs args) {
    args.results[threadIdx.x] = descend(1.0f, args.choice);
}

// A warpgroup product from copied operands. Choice 0: copies are not fenced for it. 2: an operand
// is written while it runs. 3: sums are read before the wait. 4: an operand begins in the middle of
// its swizzle pattern. 1 is correct.
extern "C" KERNEL(128, 1) warpgroup(GRID_CONSTANT const MistakeArgs args) {
    DYNAMIC_SHARED(u8, operands);
    for (u32 chunk = threadIdx.x; chunk < (64 + 128) * 8; chunk += 128) {
        cp_async_16(operands + chunk * 16, args.numbers + chunk % 32 * 4, true);
    }
    cp_async_commit();
    cp_async_wait<0>();
    if (args.choice != 0) wgmma_fence_shared();
    sync_block();
    float sums[16][4] = {};
    wgmma_begin();
    wgmma_bf16(sums, operands + (args.choice == 4 ? 128 : 0), operands + 64 * 128, false);
    wgmma_commit();
    float early = 0;
    if (args.choice == 2) operands[threadIdx.x * 128] ^= 0x55;
    if (args.choice == 3) early = sums[0][0];
    wgmma_take(sums);
    if (threadIdx.x < 64) args.results[threadIdx.x] = sums[threadIdx.x % 16][0] + early;
}
