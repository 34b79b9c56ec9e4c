// Matrix products for few rows: decode, where a step reads every weight once for a handful of rows.
//
// Owns: the entries for bf16 weights and at most 8, 16, 32 and 64 rows.
// Never: reads a weight twice, unless there are more rows than the tile has.
//
// Reading weights is the limit: at R rows a weight of two bytes is multiplied R times, and up to
// some 100 rows the tensor cores are faster than the memory. To keep 4.8 TB/s flowing to 132
// multiprocessors, 36 GB/s each, at a microsecond's latency under load, each needs 36 KB on the way
// at all times, barriers and ends of tiles included: two blocks with two to four stages, 16 KB of
// weights each, on the way are 64 to 128 KB. The copies run on from tile to tile, so a block's
// memory requests never pause. A stage's rows come from the second-level cache, R / 64 of the bytes
// of its weights. Columns are read 256 bytes at a time from each of 64 rows of the matrix, the next
// 256 bytes right after. A block takes whole tiles. Fewer blocks than fill the device still read at its full rate, as
// long as they have enough on the way together: sums of parts of a tile, which meet in memory, cost more than they
// save.
#include "product.cuh"

namespace matmul {
using Few8 = Shape<Bf16Weights, FEW_COLUMNS, 8, 4, 1, 128, 5>;
using Few16 = Shape<Bf16Weights, FEW_COLUMNS, 16, 4, 1, 128, 4>;
using Few32 = Shape<Bf16Weights, FEW_COLUMNS, 32, 4, 1, 128, 4>;
using Few64 = Shape<Bf16Weights, FEW_COLUMNS, 64, 2, 2, 128, 3>;
}  // namespace matmul

MATMUL_ENTRY(matmul_few8_bf16, matmul::Few8, 2)
MATMUL_ENTRY(matmul_few16_bf16, matmul::Few16, 2)
MATMUL_ENTRY(matmul_few32_bf16, matmul::Few32, 2)
MATMUL_ENTRY(matmul_few64_bf16, matmul::Few64, 2)
