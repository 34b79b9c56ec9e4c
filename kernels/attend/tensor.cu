// Attention on the tensor cores (mma.sync, from sm_80 on): decode and prefill from one body.
//
// Owns: the entries, and the shape of each.
// Never: differs between decode and prefill in anything but how warps divide a tile, so that a row gives the same
// bits from both.
//
// Decode: one tile of 16 packed rows per block, its four warps divide the keys for the scores and the dims for the
// values; per key tile three barriers, which is little beside the time its bytes take. Reading is what counts: with
// five slabs of 16 KB (head_dim 128) four are on their way, 64 KB per block and twice that per multiprocessor, where
// 4.8 TB/s over 132 multiprocessors at a microsecond's latency ask for 36 KB.
// Prefill: four tiles of 16 packed rows per block, a warp each, which share the keys and values in shared memory.
// At head_dim 256 two warps share a row tile, or their registers would not hold its values.
#include "item.cuh"

namespace attend {

template <u32 DIM, u32 SLABS, class Stored> using Decode = Shape<DIM, DECODE_ROWS / 16, 4, SLABS, Stored>;
template <u32 DIM, u32 SPLIT, u32 SLABS, class Stored> using Prefill = Shape<DIM, PREFILL_ROWS / 16, SPLIT, SLABS, Stored>;

}  // namespace attend

#define ATTEND_ENTRY(name, shape, blocks) \
    extern "C" KERNEL((shape::THREADS), blocks) name(GRID_CONSTANT const AttendArgs args) { \
        DYNAMIC_SHARED(u8, shared); \
        attend::attend_items<shape>(args, shared); \
    }

namespace attend {
using Decode64 = Decode<64, 6, bf16>;
using Decode80 = Decode<80, 5, bf16>;
using Decode96 = Decode<96, 5, bf16>;
using Decode128 = Decode<128, 5, bf16>;
using Decode256 = Decode<256, 4, bf16>;
using Prefill64 = Prefill<64, 1, 4, bf16>;
using Prefill80 = Prefill<80, 1, 4, bf16>;
using Prefill96 = Prefill<96, 1, 4, bf16>;
using Prefill128 = Prefill<128, 1, 4, bf16>;
using Prefill256 = Prefill<256, 2, 3, bf16>;
}  // namespace attend

ATTEND_ENTRY(attend_decode_bf16_64, attend::Decode64, 3)
ATTEND_ENTRY(attend_decode_bf16_80, attend::Decode80, 2)
ATTEND_ENTRY(attend_decode_bf16_96, attend::Decode96, 2)
ATTEND_ENTRY(attend_decode_bf16_128, attend::Decode128, 2)
ATTEND_ENTRY(attend_decode_bf16_256, attend::Decode256, 1)
ATTEND_ENTRY(attend_prefill_bf16_64, attend::Prefill64, 2)
ATTEND_ENTRY(attend_prefill_bf16_80, attend::Prefill80, 2)
ATTEND_ENTRY(attend_prefill_bf16_96, attend::Prefill96, 2)
ATTEND_ENTRY(attend_prefill_bf16_128, attend::Prefill128, 2)
ATTEND_ENTRY(attend_prefill_bf16_256, attend::Prefill256, 1)
