// Products of experts with weights of eight or four bits.
//
// Owns: the entries for each format of narrow.cu; experts.cu has the host's part.
// Never: rounds a weight.
#include "narrow.cuh"

#define EXPERTS_ENTRIES(format, weights) \
    EXPERTS_ENTRY(experts_many8_##format, matmul::Narrow<matmul::weights>::Few8, 2) \
    EXPERTS_ENTRY(experts_many16_##format, matmul::Narrow<matmul::weights>::Few16, 2) \
    EXPERTS_ENTRY(experts_many32_##format, matmul::Narrow<matmul::weights>::Few32, 2) \
    EXPERTS_ENTRY(experts_many64_##format, matmul::Narrow<matmul::weights>::Many64, 1)

EXPERTS_ENTRIES(fp8, Fp8Weights)
EXPERTS_ENTRIES(fp8_groups, Fp8GroupWeights)
EXPERTS_ENTRIES(int8, Int8Weights)
EXPERTS_ENTRIES(int4, Int4Weights)
EXPERTS_ENTRIES(fp4, Fp4Weights)
EXPERTS_ENTRIES(nvfp4, Nvfp4Weights)
