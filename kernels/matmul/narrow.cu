// Matrix products with weights of eight or four bits.
//
// Owns: the entries for fp8 with a scale per column or per group, int8 with a scale per column, int4 with a scale
// and a zero point per group, and fp4 with a scale per group, also of 16; for at most 8, 16 and 32 rows, and for tiles
// of 64 rows.
// Never: rounds a weight: kernels multiply the stored number less its zero point, which bf16 holds
// exactly.
#include "narrow.cuh"

#define NARROW_ENTRIES(format, weights) \
    MATMUL_ENTRY(matmul_few8_##format, matmul::Narrow<matmul::weights>::Few8, 2) \
    MATMUL_ENTRY(matmul_few16_##format, matmul::Narrow<matmul::weights>::Few16, 2) \
    MATMUL_ENTRY(matmul_few32_##format, matmul::Narrow<matmul::weights>::Few32, 2) \
    MATMUL_ENTRY(matmul_many64_##format, matmul::Narrow<matmul::weights>::Many64, 1)

NARROW_ENTRIES(fp8, Fp8Weights)
NARROW_ENTRIES(fp8_groups, Fp8GroupWeights)
NARROW_ENTRIES(int8, Int8Weights)
NARROW_ENTRIES(int4, Int4Weights)
NARROW_ENTRIES(fp4, Fp4Weights)
NARROW_ENTRIES(nvfp4, Nvfp4Weights)
