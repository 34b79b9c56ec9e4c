// A cap of scores or logits: limit * tanh(x / limit).
//
// Owns: the formula. Never: rounds but as written.
#pragma once
#include "prims.cuh"

// limit * tanh(x / limit) as limit - 2 * limit / (exp(2 * x / limit) + 1); `exponent` is 2 * log2(e) / limit.
DEVICE float capped(float x, float limit, float exponent) {
    const float power = exp2_fast(mul_rn(x, exponent));
    return fma_rn(-2.0f * limit, reciprocal_fast(add_rn(power, 1.0f)), limit);
}
