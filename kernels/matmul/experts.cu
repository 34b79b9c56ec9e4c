// Products of experts with bf16 weights: each expert's matrix with the rows that use it.
//
// Owns: the entries for tiles of 8, 16, 32, 64 and 128 rows of an expert.
// Never: reads the matrix of an expert that no row uses.
//
// The host's part for the kernels `experts_*`:
// - `tiles` is what `experts_sort` made for tiles of as many rows; `out` has a row for each place.
// - `rows_of` names the row of each place for the first product of an expert, and is null for the second, whose rows
//   are places.
// - The product is a MatmulArgs of the first expert's matrix, whose sums have the order of a dense product. Workspace
//   as there, for as many tiles as there may be; `span_width` is that of a matrix with the columns of all experts that
//   one row uses.
#include "product.cuh"

namespace matmul {
using ExpertsMany8 = Shape<Bf16Weights, FEW_COLUMNS, 8, 4, 1, 128, 5>;
using ExpertsMany16 = Shape<Bf16Weights, FEW_COLUMNS, 16, 4, 1, 128, 4>;
using ExpertsMany32 = Shape<Bf16Weights, FEW_COLUMNS, 32, 4, 1, 128, 4>;
using ExpertsMany64 = Shape<Bf16Weights, 128, 64, 4, 2, 64, 4>;
using ExpertsMany128 = Shape<Bf16Weights, 128, 128, 2, 4, 64, 3>;
}  // namespace matmul

EXPERTS_ENTRY(experts_many8_bf16, matmul::ExpertsMany8, 2)
EXPERTS_ENTRY(experts_many16_bf16, matmul::ExpertsMany16, 2)
EXPERTS_ENTRY(experts_many32_bf16, matmul::ExpertsMany32, 2)
EXPERTS_ENTRY(experts_many64_bf16, matmul::ExpertsMany64, 2)
EXPERTS_ENTRY(experts_many128_bf16, matmul::ExpertsMany128, 1)
