// Attention on the tensor cores (mma.sync, from sm_80 on), keys and values in bf16.
//
// Owns: the entries for head dims 64, 80, 96, 128 and 256.
// Never: takes blocks of fewer than 8 tokens or of a number that is no power of two.
#include "entries.cuh"

ATTEND_ENTRIES(attend_decode_bf16_64, attend_prefill_bf16_64, 64, bf16)
ATTEND_ENTRIES(attend_decode_bf16_80, attend_prefill_bf16_80, 80, bf16)
ATTEND_ENTRIES(attend_decode_bf16_96, attend_prefill_bf16_96, 96, bf16)
ATTEND_ENTRIES(attend_decode_bf16_128, attend_prefill_bf16_128, 128, bf16)
ATTEND_ENTRIES(attend_decode_bf16_256, attend_prefill_bf16_256, 256, bf16)
ATTEND_ENTRY(attend_decode_small_bf16_256, 256, bf16, SmallDecode, SMALL_DECODE_BLOCKS)
