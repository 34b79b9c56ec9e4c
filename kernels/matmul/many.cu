// Matrix products for many rows: prefill.
//
// Owns: the entries for tiles of 64 and of 128 rows.
// Never: leaves sums to other blocks: a block adds up all spans of its tile in the order in which matmul_few* merges
// them. Sums of slices that wait for their neighbours' are in memory: of eight slices of one span, three are stored and
// loaded, six times the bytes of the tile's f32.
//
// Eight warps a block. At 128 rows each has 64 columns by 32 rows: three kilobytes read from shared memory for
// every 32 K multiplications, which 128 bytes per cycle feed at 1365 multiplications per cycle and multiprocessor,
// above the 1024 of sm_80's tensor cores.
#include "product.cuh"

namespace matmul {
using Many64 = Shape<Bf16Weights, 128, 64, 4, 2, 64, 4>;
using Many128 = Shape<Bf16Weights, 128, 128, 2, 4, 64, 3>;
}  // namespace matmul

MATMUL_ENTRY(matmul_many64_bf16, matmul::Many64, 2)
MATMUL_ENTRY(matmul_many128_bf16, matmul::Many128, 1)
