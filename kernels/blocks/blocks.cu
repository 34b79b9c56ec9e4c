// Copies of pieces of KV blocks to and from one contiguous place, and their checksums.
//
// A copy over the link to the host is fast only for long runs, but blocks lie anywhere in the pool.
// Gather and scatter are bandwidth-bound: each byte is read and written once, in words of 16 bytes.
// The checksum is XXH3-64, seed 0, of a payload longer than 240 bytes, as the frames of a hand-off
// carry it (github.com/Cyan4973/xxHash, doc/xxhash_spec.md). Its accumulators go through blocks of
// 1024 bytes one after the other, but a block's contribution does not depend on them: threads make
// those parts for sixteen blocks at once, eight threads fold them in.
#include "prims.cuh"

// A run of bytes: offsets and length are multiples of 16.
struct Piece {
    u64 pool;      // where it lies in the pool
    u64 staging;   // where it lies in the contiguous place
    u64 bytes;
};

struct BlocksArgs {
    u8* pool;
    u8* staging;
    const Piece* pieces;
    u64* checksums;      // (pieces); of what lies in the pool
    const u8* secret;    // XXH3's default secret, 192 bytes, 16-byte aligned
};

constexpr u32 THREADS = 256;
constexpr u32 SUM_THREADS = 128;
constexpr u32 UNROLLED = 4;

template <class Move> DEVICE void each_word(const Piece& piece, const Move& move) {
    u64 words = piece.bytes / 16;
    u64 stride = u64(gridDim.x) * THREADS;
    for (u64 first = u64(blockIdx.x) * THREADS + threadIdx.x; first < words; first += stride * UNROLLED) {
#pragma unroll
        for (u32 i = 0; i < UNROLLED; i++) {
            u64 word = first + i * stride;
            if (word < words) move(word * 16);
        }
    }
}

// Grid: (blocks that share a piece, pieces).
extern "C" KERNEL(THREADS, 1) blocks_gather(GRID_CONSTANT const BlocksArgs args) {
    start_kernel();
    Piece piece = args.pieces[blockIdx.y];
    each_word(piece, [&](u64 at) { store_words(args.staging + piece.staging + at, load_once(args.pool + piece.pool + at)); });
}
extern "C" KERNEL(THREADS, 1) blocks_scatter(GRID_CONSTANT const BlocksArgs args) {
    start_kernel();
    Piece piece = args.pieces[blockIdx.y];
    each_word(piece, [&](u64 at) { store_words(args.pool + piece.pool + at, load_once(args.staging + piece.staging + at)); });
}

constexpr u64 PRIME32_1 = 0x9e3779b1u, PRIME32_2 = 0x85ebca77u, PRIME32_3 = 0xc2b2ae3du;
constexpr u64 PRIME64_1 = 0x9e3779b185ebca87u, PRIME64_2 = 0xc2b2ae3d27d4eb4fu, PRIME64_3 = 0x165667b19e3779f9u;
constexpr u64 PRIME64_4 = 0x85ebca77c2b2ae63u, PRIME64_5 = 0x27d4eb2f165667c5u;
constexpr u32 STRIPE_BYTES = 64, LANES = 8, STRIPES = 16, BLOCK_BYTES = STRIPES * STRIPE_BYTES;
// The offsets into the secret for the last stripe, for scrambling, and for the end.
constexpr u32 SECRET_LAST = 121, SECRET_SCRAMBLE = 128, SECRET_END = 11;

DEVICE u64 word_at(const u8* at) { return *reinterpret_cast<const u64*>(at); }
DEVICE u64 word_anywhere(const u8* at) {
    u64 word = 0;
    for (u32 i = 0; i < 8; i++) word |= u64(at[i]) << (8 * i);
    return word;
}
DEVICE u64 low_high(u64 key) { return (key & 0xffffffffu) * (key >> 32); }

// The contribution of `stripes` stripes to this thread's lane, the eight threads of a block of
// bytes being neighbours.
DEVICE u64 added(const u8* from, u32 stripes, u32 lane, const u64 (&secret)[24]) {
    u64 product = 0, plain = 0;
    for (u32 stripe = 0; stripe < stripes; stripe++) {
        u64 data = word_at(from + stripe * STRIPE_BYTES + lane * 8);
        product += low_high(data ^ secret[stripe + lane]);
        plain += data;
    }
    return product + shuffle_xor(plain, 1);
}

// Grid: (pieces).
extern "C" KERNEL(SUM_THREADS, 1) blocks_checksum(GRID_CONSTANT const BlocksArgs args) {
    start_kernel();
    __shared__ u64 secret[24];
    __shared__ u64 parts[SUM_THREADS];
    if (threadIdx.x < 24) secret[threadIdx.x] = word_at(args.secret + threadIdx.x * 8);
    sync_block();
    Piece piece = args.pieces[blockIdx.x];
    const u8* from = args.pool + piece.pool;
    u32 lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    // The last byte's block is not scrambled, and its last stripe comes again by itself.
    u64 blocks = (piece.bytes - 1) / BLOCK_BYTES;
    constexpr u64 BEGIN[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < LANES; i++) sum = lane == i ? BEGIN[i] : sum;
    constexpr u32 GROUPS = SUM_THREADS / LANES;
    for (u64 first = 0; first < blocks; first += GROUPS) {
        u64 block = first + group;
        // A group without a block still takes part in the exchange.
        parts[threadIdx.x] = added(from + (block < blocks ? block : 0) * BLOCK_BYTES, STRIPES, lane, secret);
        sync_block();
        if (threadIdx.x < LANES) {
            for (u32 i = 0; i < GROUPS && first + i < blocks; i++) {
                sum += parts[i * LANES + lane];
                sum = (sum ^ (sum >> 47) ^ secret[SECRET_SCRAMBLE / 8 + lane]) * PRIME32_1;
            }
        }
        sync_block();
    }
    if (threadIdx.x >= 32) return;
    u32 stripes = u32((piece.bytes - 1 - blocks * BLOCK_BYTES) / STRIPE_BYTES);
    u64 rest = added(from + blocks * BLOCK_BYTES, stripes, lane, secret);
    u64 data = word_at(from + piece.bytes - STRIPE_BYTES + lane * 8);
    u64 last = low_high(data ^ word_anywhere(args.secret + SECRET_LAST + lane * 8)) + shuffle_xor(data, 1);
    sum += rest + last;
    // Two lanes make one word of the result, which four words add up to.
    u64 mixed = sum ^ word_anywhere(args.secret + SECRET_END + lane * 8);
    u64 other = shuffle_xor(mixed, 1);
    u64 folded = (mixed * other) ^ mul_high(mixed, other);
    u64 total = piece.bytes * PRIME64_1;
    for (u32 i = 0; i < LANES; i += 2) total += shuffle(folded, i);
    total ^= total >> 37;
    total *= 0x165667919e3779f9u;
    total ^= total >> 32;
    if (threadIdx.x == 0) args.checksums[blockIdx.x] = total;
}
