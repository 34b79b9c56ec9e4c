// The primitives of all kernels: the only file with inline PTX, and the only one that depends on
// the compiler.
//
// Under nvcc and NVRTC a primitive is one instruction or intrinsic. Under a host compiler the same names
// come from the emulator (crates/emulator), which runs a kernel's threads as fibers, so every kernel is
// one source for both. No host header is included: NVRTC has none.
//
// Conventions of all kernels:
// - one entry is `extern "C" KERNEL(threads, blocks) name(GRID_CONSTANT const NameArgs args)`: one plain
//   struct of pointers, 32-bit and 64-bit numbers and floats, mirrored by crates/cuda/src/args.rs;
// - an entry begins with `start_kernel`, or calls its two parts;
// - sizes that change from step to step within one CUDA graph are read from device memory, not from args;
// - rows are row-major; "T" is how working activations and KV are stored, bf16 or float.
#pragma once

#ifdef __CUDACC__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
static_assert(sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(void*) == 8, "sizes of the device");

#define KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define GRID_CONSTANT __grid_constant__
#define DEVICE __device__ __forceinline__
// A function for constants too, on both sides of a launch.
#define CONSTANT_DEVICE __host__ __device__ constexpr
// Dynamic shared memory of this launch, aligned to 1024 bytes.
#define DYNAMIC_SHARED(type, name) \
    extern __shared__ __align__(1024) u8 dynamic_shared_bytes[]; \
    type* name = reinterpret_cast<type*>(dynamic_shared_bytes)

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

struct bf16 {
    u16 bits;
};
// e4m3 without infinities.
struct fp8 {
    u8 bits;
};
// 16 bytes, the widest load there is.
struct alignas(16) Words4 {
    u32 word[4];
};

DEVICE float to_f32(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE float to_f32(float x) { return x; }
// Rounds halves to even.
DEVICE bf16 to_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bf16{bits};
}
// Two neighbours, `low` at the lower address.
DEVICE u32 pack_bf16(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
DEVICE float low_bf16(u32 word) { return __uint_as_float(word << 16); }
DEVICE float high_bf16(u32 word) { return __uint_as_float(word & 0xffff0000u); }
DEVICE float bits_to_f32(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 f32_to_bits(float x) { return __float_as_uint(x); }
DEVICE float fp8_to_f32(fp8 x) {
    // e4m3 -> two halves -> float. sm_80 has no such conversion; a half holds every e4m3 after scaling by 2^8.
    u32 half = (u32(x.bits & 0x80) << 8) | (u32(x.bits & 0x7f) << 7);
    float wide;
    u16 low = u16(half);
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(low));
    return (x.bits & 0x7f) == 0x7f ? __int_as_float(0x7fc00000) : wide * 256.0f;
}
DEVICE float to_f32(fp8 x) { return fp8_to_f32(x); }

// Selects bytes by number, 0 to 3 of `low` and 4 to 7 of `high`; each digit of `order` picks one, the lowest first.
DEVICE u32 permute_bytes(u32 low, u32 high, u32 order) { return __byte_perm(low, high, order); }
// a · b + c in each half, rounded once, halves to even; numbers below the least normal one are kept.
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Each operation is rounded as written, and never fused with another.
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
// a · b + c, rounded once.
DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// 2^x, two units in the last place; 0 for negative infinity.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 1 / x, one unit in the last place; 0 for infinity.
DEVICE float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float sqrt_rn(float x) { return __fsqrt_rn(x); }
DEVICE float rsqrt_exact(float x) { return __fdiv_rn(1.0f, __fsqrt_rn(x)); }
DEVICE u64 mul_high(u64 a, u64 b) { return __umul64hi(a, b); }
DEVICE u32 mul_high(u32 a, u32 b) { return __umulhi(a, b); }
DEVICE u32 count_ones(u32 x) { return __popc(x); }
// Zeros before the highest one; 32 for 0.
DEVICE u32 leading_zeros(u32 x) { return __clz(i32(x)); }

// A launch may begin before those in front of it in its stream are over, as soon as all their blocks have called
// `let_next_begin` and left it room. Until `wait_for_previous` has returned in a thread, it touches only memory that no
// kernel writes. Before sm_90 launches begin in turn, and neither does anything.
#if __CUDA_ARCH__ >= 900
DEVICE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
DEVICE void let_next_begin() {}
DEVICE void wait_for_previous() {}
#endif

DEVICE u32 lane_index() { return threadIdx.x & 31; }
DEVICE void sync_warp() { __syncwarp(); }
#define sync_block() __syncthreads()
template <class T> DEVICE T shuffle_xor(T value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
template <class T> DEVICE T shuffle(T value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
// The value of the lane `distance` below; lanes without such a lane keep their own value.
template <class T> DEVICE T shuffle_up(T value, u32 distance) { return __shfl_up_sync(0xffffffffu, value, distance); }
// CUDA's headers still have a function of this name, for old devices.
#define ballot ballot_of_warp
DEVICE u32 ballot(bool is_true) { return __ballot_sync(0xffffffffu, is_true); }

DEVICE u32 atomic_add(u32* at, u32 value) { return atomicAdd(at, value); }
DEVICE u64 atomic_add(u64* at, u64 value) { return atomicAdd(at, value); }
DEVICE u32 atomic_max(u32* at, u32 value) { return atomicMax(at, value); }
DEVICE u64 atomic_max(u64* at, u64 value) { return atomicMax(at, value); }
// Makes this thread's writes visible to every thread that sees the count, and theirs to this
// thread. Returns the previous count.
DEVICE u32 arrive(u32* counter) {
    __threadfence();
    u32 before = atomicAdd(counter, 1u);
    __threadfence();
    return before;
}

// Loads 16 bytes that are read once, so past the first-level cache. 16-byte aligned.
DEVICE Words4 load_once(const void* from) {
    Words4 to;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
                 : "l"(from));
    return to;
}
// Reads a value that another block of this launch wrote, past this multiprocessor's cache.
DEVICE float load_fresh(const float* from) { return __ldcg(from); }
DEVICE Words4 load_fresh_words(const void* from) {
    const uint4 words = __ldcg(static_cast<const uint4*>(from));
    return Words4{{words.x, words.y, words.z, words.w}};
}
DEVICE Words4 load_words(const void* from) { return *static_cast<const Words4*>(from); }
DEVICE void store_words(void* to, Words4 words) { *static_cast<Words4*>(to) = words; }

// Stores 8 bytes, 8-byte aligned, in global memory, at once.
DEVICE void store_pair(void* to, u32 low, u32 high) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
}

DEVICE u32 shared_address(const void* at) { return u32(__cvta_generic_to_shared(at)); }
// Copies 16 bytes from global to shared memory, both 16-byte aligned; they have arrived after commit and wait. Writes
// zeros if not `is_there`.
DEVICE void cp_async_16(void* to, const void* from, bool is_there) {
    u32 bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups are in flight. The memory clobber keeps the
// compiler from moving reads of their data before it.
template <int N> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Four 8 × 8 matrices of 16-bit elements; lanes 8i .. 8i + 7 give the addresses of the rows of matrix i.
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}
DEVICE void ldmatrix_x4_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}
// Turns an 8 × 8 matrix of 16-bit elements, of which lane l has elements `l % 4 × 2` and the next of row `l / 4`.
DEVICE u32 transpose_8x8(u32 pair) {
    u32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}
// d += a · b; a 16 × 16 row-major, b 16 × 8 column-major, d 16 × 8, fragments as the PTX manual lays them out.
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Hopper's products of warpgroups: four warps, the first of which has a number that 4 divides,
// multiply operands that lie in shared memory, beside whatever else they do. Under other targets
// the code traps; the host never launches it there.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER(code) code
#else
#define HOPPER(code) __trap()
#endif
// Makes this thread's writes to shared memory, and copies that it waited for, visible to wgmma after the next barrier.
DEVICE void wgmma_fence_shared() { HOPPER(asm volatile("fence.proxy.async.shared::cta;" ::: "memory")); }
// Orders other instructions' accesses to registers before the wgmma that follow.
DEVICE void wgmma_begin() { HOPPER(asm volatile("wgmma.fence.sync.aligned;" ::: "memory")); }
DEVICE void wgmma_commit() { HOPPER(asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")); }
// Waits until at most N of this warp's groups are in flight.
template <int N> DEVICE void wgmma_wait() { HOPPER(asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory")); }
// Waits until no group is in flight: `d` then has the result, and other instructions may use it.
template <u32 N> DEVICE void wgmma_take(float (&d)[N][4]) {
    wgmma_wait<0>();
#pragma unroll
    for (u32 i = 0; i < N * 4; i++) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}
// An operand: rows of 64 bf16 along the inner dimension, one after the other. Eight rows are a pattern of 1024 bytes,
// in which chunk c of 16 bytes of row r lies at chunk c ^ r % 8 (the 128-byte swizzle, PTX ISA, "Matrix Descriptor
// Format").
DEVICE u64 wgmma_operand(const void* at) {
    constexpr u64 PATTERN_BYTES = 1024, LINE_OF_128 = 1;
    return u64((shared_address(at) & 0x3ffff) >> 4) | u64(1) << 16 | (PATTERN_BYTES >> 4) << 32 | LINE_OF_128 << 62;
}
// d += a · b if `keeps`, else d = a · b: a is 64 × 16, b 16 × 128, both from 32 bytes of each row of an operand (see
// above). Of d, 64 × 128, each warp has 16 rows, as the 16 × 8 fragments of mma_bf16.
DEVICE void wgmma_bf16(float (&d)[16][4], const void* a, const void* b, bool keeps) {
    HOPPER(asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "l"(wgmma_operand(a)), "l"(wgmma_operand(b)), "r"(u32(keeps))
        : "memory"));
}
// The same with 192 columns of b and d.
DEVICE void wgmma_bf16(float (&d)[24][4], const void* a, const void* b, bool keeps) {
    HOPPER(asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\nwgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, %96, %97, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3])
        : "l"(wgmma_operand(a)), "l"(wgmma_operand(b)), "r"(u32(keeps))
        : "memory"));
}

// Hopper's clusters: blocks of one launch that run at once on neighbouring multiprocessors, with consecutive numbers
// from a multiple of the cluster's size, and that reach each other's shared memory. The grid is a multiple of the size.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTER(blocks)
#endif
// Waits for all threads of the cluster, and shows them this thread's writes to shared memory.
DEVICE void sync_cluster() {
    HOPPER(asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"));
}
// Limits each thread of this warpgroup to N registers; others may then have more.
template <u32 N> DEVICE void registers_release() { HOPPER(asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N))); }
template <u32 N> DEVICE void registers_take() { HOPPER(asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N))); }

// A barrier in shared memory: a phase is over when all arrivals that it counts were made and all bytes that it expects
// were written. Phases have parities 0, 1, 0 and so on.
struct alignas(8) PhaseBarrier {
    u64 state;
};
DEVICE void barrier_init(PhaseBarrier* barrier, u32 arrivals) {
    HOPPER(asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory"));
}
// Shows this thread's new barriers to the copies and, after sync_cluster, to the cluster.
DEVICE void barrier_init_fence() { HOPPER(asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory")); }
// Arrives, and lets the phase expect so many bytes more.
DEVICE void barrier_expect(PhaseBarrier* barrier, u32 bytes) {
    HOPPER(asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory"));
}
// The address, for barrier_arrive, of the barrier that block `rank` of the cluster has at this place.
DEVICE u32 barrier_of(const PhaseBarrier* barrier, u32 rank) {
    u32 address = 0;
    HOPPER(asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(barrier)), "r"(rank)));
    return address;
}
// Orders nothing but this block's own accesses before it: a release to the whole cluster takes a microsecond. That is
// enough where the phase guards what wgmma has read and waited for.
DEVICE void barrier_arrive(u32 address) {
    HOPPER(asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory"));
}
DEVICE bool barrier_is_over(const PhaseBarrier* barrier, u32 parity) {
    u32 is_over = 1;
    HOPPER(asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                        : "=r"(is_over)
                        : "r"(shared_address(barrier)), "r"(parity)
                        : "memory"));
    return is_over != 0;
}
// Waits until the phase of this parity is over. A wait of seconds is a mistake, which ends the launch with an error
// instead of never.
DEVICE void barrier_wait(const PhaseBarrier* barrier, u32 parity) {
    constexpr i64 CYCLES_MOST = i64(1) << 34;
    if (barrier_is_over(barrier, parity)) return;
    const i64 begin = clock64();
    while (!barrier_is_over(barrier, parity)) {
        if (clock64() - begin > CYCLES_MOST) __trap();
    }
}

// A matrix in memory, in the driver's words (cuTensorMapEncodeTiled), of which boxes are copied.
struct alignas(128) TensorMap {
    u64 word[16];
};
DEVICE void prefetch_map(const TensorMap& map) { HOPPER(asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory")); }
// Copies the box that begins at this column and row to the same place in each block of the cluster whose bit `blocks`
// has, and reports its bytes to the barrier at the same place there. Elements outside of the matrix become zeros, and
// count. The box has the swizzle that wgmma_operand describes.
DEVICE void copy_box(void* to, const TensorMap& map, u32 column, u32 row, PhaseBarrier* barrier, u32 blocks) {
    HOPPER(asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
                        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(u16(blocks))
                        : "memory"));
}
DEVICE void copy_box(void* to, const TensorMap& map, u32 column, u32 row, PhaseBarrier* barrier) {
    HOPPER(asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                            shared_address(to)),
                        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
                        : "memory"));
}
#undef HOPPER

#else
#include "emulator.h"
#define CONSTANT_DEVICE constexpr
#endif

// The first statement of every kernel that has nothing to read before its turn.
DEVICE void start_kernel() {
    let_next_begin();
    wait_for_previous();
}

// Four e4m3 in the order of their bytes, to four bf16, exactly. A NaN would give 480, so callers must have none.
DEVICE void fp8_to_bf16(u32 (&words)[2], u32 four) {
    // Sign, exponent and fraction go to their places in bf16; the factor 2^120 corrects the exponent's bias.
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 high_bytes = permute_bytes(four, 0, i == 0 ? 0x1404 : 0x3424);
        const u32 small = (high_bytes & 0x80008000u) | ((high_bytes >> 4) & 0x07f007f0u);
        words[i] = fma_bf16x2(small, 0x7b807b80u, 0x80008000u);
    }
}

// Whether this block is the last of `blocks` to arrive; if so, it sees the stores of the others before their arrival,
// and the counter is zero again for the next launch. All threads of the block call this together.
DEVICE bool is_last_block(u32* counter, u32 blocks) {
    __shared__ u32 before;
    sync_block();
    if (threadIdx.x == 0) {
        before = arrive(counter);
        if (before + 1 == blocks) *counter = 0;
    }
    sync_block();
    return before + 1 == blocks;
}
