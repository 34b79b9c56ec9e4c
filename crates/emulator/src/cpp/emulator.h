// The counterpart of kernels/include/prims.cuh for a host compiler: the same names with the same
// meaning.
//
// Owns: the emulated primitives. Parts that need other threads of the block are in the scheduler,
// which is never compiled with -fsanitize=thread; every access to the kernel's memory is here, so
// that sanitizers see it.
// Never: fuses a multiplication with an addition (compiled with -ffp-contract=off).
// Invariant: what the device leaves undefined is an error or a NaN here, not a plausible number:
// unwritten memory, a copy not waited for, lanes that meet from different lines.
#pragma once
#include <math.h>

#include "machine.h"
#include "numbers.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define KERNEL(threads, blocks) void
#define GRID_CONSTANT
#define DEVICE inline __attribute__((always_inline))
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulator::dynamic_shared.first)
#define NEGATIVE_INFINITY (-__builtin_inff())

// Thread-local, so that the scheduler finds them all in one place and can poison them before each
// block; except under the address sanitizer, which guards ordinary variables only.
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

#define threadIdx (*emulator::thread_index)
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

// The source line of the call that has this as its argument's default.
#define CALL_SITE emulator::Site site = {__builtin_FILE(), __builtin_LINE()}

struct bf16 {
    u16 bits;
};
struct fp8 {
    u8 bits;
};
struct alignas(16) Words4 {
    u32 word[4];
};

// CUDA's built-in names without a header, as nvcc and NVRTC have them.
#define EMULATOR_ORDER(type) \
    DEVICE type min(type a, type b) { return b < a ? b : a; } \
    DEVICE type max(type a, type b) { return a < b ? b : a; }
EMULATOR_ORDER(i32)
EMULATOR_ORDER(u32)
EMULATOR_ORDER(i64)
EMULATOR_ORDER(u64)
DEVICE float min(float a, float b) { return fminf(a, b); }
DEVICE float max(float a, float b) { return fmaxf(a, b); }

DEVICE float bits_to_f32(u32 bits) { return numbers::from_bits(bits); }
DEVICE u32 f32_to_bits(float x) { return numbers::bits(x); }
DEVICE float to_f32(bf16 x) { return numbers::from_bf16(x.bits); }
DEVICE float to_f32(float x) { return x; }
DEVICE bf16 to_bf16(float x) { return bf16{numbers::to_bf16(x)}; }
DEVICE u32 pack_bf16(float low, float high) { return u32(numbers::to_bf16(high)) << 16 | numbers::to_bf16(low); }
DEVICE float low_bf16(u32 word) { return bits_to_f32(word << 16); }
DEVICE float high_bf16(u32 word) { return bits_to_f32(word & 0xffff0000u); }
DEVICE float fp8_to_f32(fp8 x) { return numbers::from_e4m3(x.bits); }
DEVICE float to_f32(fp8 x) { return fp8_to_f32(x); }

DEVICE u32 permute_bytes(u32 low, u32 high, u32 order) {
    u64 bytes = u64(high) << 32 | low;
    u32 picked = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 digit = order >> 4 * i & 15, byte = u32(bytes >> 8 * (digit & 7)) & 0xff;
        // The highest bit of a digit selects the byte's sign, eight times.
        if (digit & 8) byte = byte & 0x80 ? 0xff : 0;
        picked |= byte << 8 * i;
    }
    return picked;
}
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 low = numbers::fma_bf16(u16(a), u16(b), u16(c));
    return low | u32(numbers::fma_bf16(u16(a >> 16), u16(b >> 16), u16(c >> 16))) << 16;
}

DEVICE float mul_rn(float a, float b) { return a * b; }
DEVICE float add_rn(float a, float b) { return a + b; }
DEVICE float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
// Subnormal numbers are zeros, as for the device's instruction.
DEVICE float exp2_fast(float x) {
    float y = exp2f(fabsf(x) < 0x1p-126f ? 0.0f : x);
    return y < 0x1p-126f ? 0.0f : y;
}
DEVICE float reciprocal_fast(float x) {
    float y = 1.0f / x;
    return fabsf(y) < 0x1p-126f ? 0.0f : y;
}
DEVICE float sqrt_rn(float x) { return sqrtf(x); }
DEVICE float rsqrt_exact(float x) { return 1.0f / sqrtf(x); }
DEVICE u64 mul_high(u64 a, u64 b) { return u64((static_cast<unsigned __int128>(a) * b) >> 64); }
DEVICE u32 mul_high(u32 a, u32 b) { return u32((u64(a) * b) >> 32); }
DEVICE u32 count_ones(u32 x) { return u32(__builtin_popcount(x)); }
DEVICE u32 leading_zeros(u32 x) { return x == 0 ? 32 : u32(__builtin_clz(x)); }

DEVICE u32 lane_index() { return threadIdx.x & 31; }
DEVICE void sync_warp(CALL_SITE) { emulator::sync_warp(site); }
// Launches run in turn.
DEVICE void let_next_begin() {}
DEVICE void wait_for_previous() {}
DEVICE void sync_block(CALL_SITE) { emulator::sync_block(site); }

template <class T> DEVICE T emulator_shuffle(T value, u32 from_lane, emulator::Site site) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle carries one or two registers");
    uint64_t carried = 0;
    __builtin_memcpy(&carried, &value, sizeof value);
    carried = emulator::shuffle(carried, from_lane & 31, site);
    __builtin_memcpy(&value, &carried, sizeof value);
    return value;
}
template <class T> DEVICE T shuffle_xor(T value, u32 mask, CALL_SITE) {
    return emulator_shuffle(value, lane_index() ^ mask, site);
}
template <class T> DEVICE T shuffle(T value, u32 lane, CALL_SITE) { return emulator_shuffle(value, lane, site); }
template <class T> DEVICE T shuffle_up(T value, u32 distance, CALL_SITE) {
    u32 lane = lane_index();
    return emulator_shuffle(value, lane < distance ? lane : lane - distance, site);
}
DEVICE u32 ballot(bool is_true, CALL_SITE) { return emulator::ballot(is_true, site); }

// Relaxed, as on the device: an atomic alone orders nothing else.
DEVICE u32 atomic_add(u32* at, u32 value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
DEVICE u64 atomic_add(u64* at, u64 value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
template <class T> DEVICE T emulator_atomic_max(T* at, T value) {
    T before = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (before < value && !__atomic_compare_exchange_n(at, &before, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return before;
}
DEVICE u32 atomic_max(u32* at, u32 value) { return emulator_atomic_max(at, value); }
DEVICE u64 atomic_max(u64* at, u64 value) { return emulator_atomic_max(at, value); }
DEVICE u32 arrive(u32* counter) { return __atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL); }

DEVICE void emulator_check_aligned(const void* at, const char* what, emulator::Site site) {
    if ((reinterpret_cast<uintptr_t>(at) & 15) != 0) emulator::fail(emulator::Outcome::Misaligned, what, site);
}
DEVICE void emulator_check_global(const void* at, const char* what, emulator::Site site) {
    if (emulator::dynamic_shared.has(at) || emulator::static_shared.has(at)) {
        emulator::fail(emulator::Outcome::IllegalAddress, what, site);
    }
}
DEVICE void emulator_check_shared(const void* at, const char* what, emulator::Site site) {
    bool is_known = emulator::static_shared.bytes != 0;
    if (is_known && !emulator::dynamic_shared.has(at) && !emulator::static_shared.has(at)) {
        emulator::fail(emulator::Outcome::IllegalAddress, what, site);
    }
}

DEVICE Words4 load_words(const void* from, CALL_SITE) {
    emulator_check_aligned(from, "load_words of an address that is no multiple of 16", site);
    return *static_cast<const Words4*>(from);
}
DEVICE void store_words(void* to, Words4 words, CALL_SITE) {
    emulator_check_aligned(to, "store_words to an address that is no multiple of 16", site);
    *static_cast<Words4*>(to) = words;
}
DEVICE Words4 load_once(const void* from, CALL_SITE) {
    emulator_check_aligned(from, "load_once of an address that is no multiple of 16", site);
    emulator_check_global(from, "load_once of shared memory", site);
    return *static_cast<const Words4*>(from);
}
DEVICE float load_fresh(const float* from, CALL_SITE) {
    emulator_check_global(from, "load_fresh of shared memory", site);
    return *from;
}
DEVICE Words4 load_fresh_words(const void* from, CALL_SITE) {
    emulator_check_aligned(from, "load_fresh_words of an address that is no multiple of 16", site);
    emulator_check_global(from, "load_fresh_words of shared memory", site);
    return *static_cast<const Words4*>(from);
}

DEVICE u32 shared_address(const void* at) { return u32(reinterpret_cast<uintptr_t>(at) - emulator::dynamic_shared.first); }

DEVICE void cp_async_16(void* to, const void* from, bool is_there, CALL_SITE) {
    emulator_check_aligned(to, "cp_async_16 to an address that is no multiple of 16", site);
    emulator_check_shared(to, "cp_async_16 to memory that is not shared", site);
    if (is_there) {
        emulator_check_aligned(from, "cp_async_16 of an address that is no multiple of 16", site);
        emulator_check_global(from, "cp_async_16 of shared memory", site);
    }
    // A read before the wait gives NaNs.
    constexpr u32 poison = numbers::POISON;
    *static_cast<Words4*>(to) = Words4{{poison, poison, poison, poison}};
    emulator::copy_begin({to, is_there ? from : nullptr});
}
DEVICE void cp_async_commit() { emulator::copy_commit(); }
template <int N> DEVICE void cp_async_wait() {
    u32 count;
    const emulator::Copy* due = emulator::copies_due(N, &count);
    for (u32 index = 0; index < count; index++) {
        const auto* from = static_cast<const Words4*>(due[index].from);
        *static_cast<Words4*>(due[index].to) = from == nullptr ? Words4{{0, 0, 0, 0}} : *from;
    }
    if (count != 0) emulator::shared_written();
}

// Each lane reads the one row that it names, so that a sanitizer attributes the read.
DEVICE void emulator_ldmatrix(u32 (&r)[4], const void* row, emulator::Layout layout, emulator::Site site) {
    emulator_check_aligned(row, "ldmatrix of a row at no multiple of 16", site);
    emulator_check_shared(row, "ldmatrix of memory that is not shared", site);
    Words4 words = *static_cast<const Words4*>(row);
    emulator::ldmatrix(r, emulator::Row{{words.word[0], words.word[1], words.word[2], words.word[3]}}, layout, site);
}
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row, CALL_SITE) {
    emulator_ldmatrix(r, row, emulator::Layout::AsStored, site);
}
DEVICE void ldmatrix_x4_transposed(u32 (&r)[4], const void* row, CALL_SITE) {
    emulator_ldmatrix(r, row, emulator::Layout::Transposed, site);
}
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], CALL_SITE) {
    emulator::mma_bf16(d, a, b, site);
}

DEVICE u32 transpose_8x8(u32 pair, CALL_SITE) {
    const u32 lane = lane_index(), from = lane % 4 * 8 + lane / 8, half = lane / 4 % 2 * 16;
    const u32 low = shuffle(pair, from, site), high = shuffle(pair, from + 4, site);
    return (low >> half & 0xffff) | (high >> half & 0xffff) << 16;
}

DEVICE void wgmma_fence_shared() { emulator::shared_fenced(); }
DEVICE void wgmma_begin() {}
DEVICE void wgmma_commit() { emulator::products_commit(); }

// Sixteen bytes of row `row` of an operand; the swizzle depends on addresses of the block's shared
// memory.
DEVICE emulator::Row emulator_wgmma_part(uintptr_t operand, u32 row, u32 half) {
    const uintptr_t at = operand + row * 128 + half * 16;
    return *reinterpret_cast<const emulator::Row*>(emulator::dynamic_shared.first + (at ^ (at >> 7 & 7) << 4));
}
// The part of a product's operands that this lane reads.
DEVICE void emulator_wgmma_read(emulator::WarpgroupProduct& product) {
    const u32 lane = lane_index(), row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    product.left = emulator_wgmma_part(product.a, row, lane / 16);
    for (u32 i = 0; i < 8; i++) product.right[i] = emulator_wgmma_part(product.b, lane * 4 + i / 2, i % 2);
}
DEVICE uintptr_t emulator_wgmma_operand(const void* at, u32 rows, emulator::Site site) {
    const uintptr_t offset = reinterpret_cast<uintptr_t>(at) - emulator::dynamic_shared.first;
    const bool is_inside = emulator::dynamic_shared.has(at) && offset + rows * 128 - 96 <= emulator::dynamic_shared.bytes;
    if (!is_inside) emulator::fail(emulator::Outcome::IllegalAddress, "an operand of wgmma outside of shared memory", site);
    const bool is_aligned = offset % 1024 < 128 && offset % 32 == 0;
    if (!is_aligned) emulator::fail(emulator::Outcome::Misaligned, "an operand of wgmma that does not begin with its pattern", site);
    return offset;
}
DEVICE void wgmma_bf16(float (&d)[16][4], const void* a, const void* b, bool keeps, CALL_SITE) {
    emulator::WarpgroupProduct product;
    product.a = emulator_wgmma_operand(a, 64, site);
    product.b = emulator_wgmma_operand(b, 128, site);
    product.keeps = keeps;
    emulator_wgmma_read(product);
    emulator::products_begin(&d[0][0], product, site);
}
template <int N> DEVICE void wgmma_wait(CALL_SITE) {
    u32 count;
    const emulator::WarpgroupProduct* due = emulator::products_due(N, &count);
    for (u32 index = 0; index < count; index++) {
        emulator::WarpgroupProduct now = due[index];
        emulator_wgmma_read(now);
        const bool is_same = __builtin_memcmp(&now.left, &due[index].left, sizeof now.left) == 0 &&
                             __builtin_memcmp(now.right, due[index].right, sizeof now.right) == 0;
        if (!is_same) emulator::fail(emulator::Outcome::Failed, "shared memory changed under a wgmma that was not waited for", site);
        emulator::products_run(due[index], site);
    }
    emulator::products_over();
}
template <u32 N> DEVICE void wgmma_take(float (&)[N][4], CALL_SITE) { wgmma_wait<0>(site); }

DEVICE void store_pair(void* to, u32 low, u32 high) {
    static_cast<u32*>(to)[0] = low;
    static_cast<u32*>(to)[1] = high;
}

// Blocks run one after the other here, so there are no clusters: kernels with them compile, and fail when they run. The
// driver makes no tensor maps either, so the backend does not choose them.
#define CLUSTER(blocks)
DEVICE void emulator_no_clusters(emulator::Site site) { emulator::fail(emulator::Outcome::Failed, "clusters are not emulated", site); }
struct alignas(8) PhaseBarrier {
    u64 state;
};
struct alignas(128) TensorMap {
    u64 word[16];
};
DEVICE void wgmma_bf16(float (&)[24][4], const void*, const void*, bool, CALL_SITE) { emulator_no_clusters(site); }
DEVICE void sync_cluster(CALL_SITE) { emulator_no_clusters(site); }
template <u32 N> DEVICE void registers_release() {}
template <u32 N> DEVICE void registers_take() {}
DEVICE void barrier_init(PhaseBarrier*, u32, CALL_SITE) { emulator_no_clusters(site); }
DEVICE void barrier_init_fence() {}
DEVICE void barrier_expect(PhaseBarrier*, u32, CALL_SITE) { emulator_no_clusters(site); }
DEVICE u32 barrier_of(const PhaseBarrier*, u32) { return 0; }
DEVICE void barrier_arrive(u32, CALL_SITE) { emulator_no_clusters(site); }
DEVICE void barrier_wait(const PhaseBarrier*, u32, CALL_SITE) { emulator_no_clusters(site); }
DEVICE void prefetch_map(const TensorMap&) {}
DEVICE void copy_box(void*, const TensorMap&, u32, u32, PhaseBarrier*, CALL_SITE) { emulator_no_clusters(site); }
DEVICE void copy_box(void*, const TensorMap&, u32, u32, PhaseBarrier*, u32, CALL_SITE) { emulator_no_clusters(site); }
