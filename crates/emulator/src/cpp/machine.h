// Services of the emulator for a kernel that runs on the host.
//
// Owns: the declarations shared by emulator.h, which kernels include, and by the scheduler.
// Never: includes a C++ library header; each kernel's file is compiled after this.
// Invariant: every function here is called from a kernel's fiber, one fiber at a time.
#pragma once
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)
namespace emulator {

struct Index {
    uint32_t x, y, z;
};

// The source line of a call: threads that meet must come from the same one.
struct Site {
    const char* file;
    uint32_t line;
};

struct Range {
    uintptr_t first;
    size_t bytes;
    bool has(const void* at) const { return reinterpret_cast<uintptr_t>(at) - first < bytes; }
};

// Sixteen bytes: one row of a matrix tile, or what one copy carries.
struct alignas(16) Row {
    uint32_t word[4];
};

// An asynchronous copy of sixteen bytes; zeros if there is no source.
struct Copy {
    void* to;
    const void* from;
};

// This lane's part of a warpgroup's product m64n128k16: the operands as read when the product was
// begun.
struct WarpgroupProduct {
    uintptr_t a, b;
    bool keeps;
    // A row's half of the warp's 16 rows of `a`, and both halves of four rows of `b`.
    Row left, right[8];
};

enum class Layout { AsStored, Transposed };
enum class Outcome { Done, Failed, IllegalAddress, Misaligned };

// Indices of the running fiber.
extern const Index* thread_index;
extern Index block_index, block_size, grid_size;
// Exactly the bytes of the launch, and the blocks' static arrays (empty if unknown).
extern Range dynamic_shared, static_shared;

void sync_block(Site site);
void sync_warp(Site site);
uint64_t shuffle(uint64_t value, uint32_t from_lane, Site site);
uint32_t ballot(bool is_true, Site site);
// `row` is this lane's; `to` receives its part of all lanes' rows.
void ldmatrix(uint32_t* to, const Row& row, Layout layout, Site site);
void mma_bf16(float* d, const uint32_t* a, const uint32_t* b, Site site);

void copy_begin(Copy copy);
void copy_commit();
// Copies of all groups but the last `groups_left`, in order, for the caller to perform. They stay
// in place until the next `copy_begin`.
const Copy* copies_due(uint32_t groups_left, uint32_t* count);

// Marks the threads of the block whose copies into shared memory are not yet fenced for wgmma.
void shared_written();
void shared_fenced();
// `d` is 64 numbers of this lane, undefined until `products_over`. One `d` at a time.
void products_begin(float* d, const WarpgroupProduct& product, Site site);
void products_commit();
// The same for products as `copies_due`.
const WarpgroupProduct* products_due(uint32_t groups_left, uint32_t* count);
void products_run(const WarpgroupProduct& product, Site site);
// Releases `d` if no product is left.
void products_over();

// Ends the launch; the driver reports the failure as the device would.
[[noreturn]] void fail(Outcome outcome, const char* what, Site site);

}  // namespace emulator
#pragma GCC visibility pop
