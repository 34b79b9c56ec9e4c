// Attention on the tensor cores (mma.sync, from sm_80 on), keys and values in e4m3.
//
// Owns: the entries for head dims 64, 80, 96, 128 and 256. Queries and outputs are bf16; stored numbers become bf16,
// exactly, on their way to the tensor cores. The scale of keys is in `scale`, that of values in `value_scale`.
// Never: takes blocks of fewer than 8 tokens or of a number that is no power of two.
#include "entries.cuh"

ATTEND_ENTRIES(attend_decode_fp8_64, attend_prefill_fp8_64, 64, fp8)
ATTEND_ENTRIES(attend_decode_fp8_80, attend_prefill_fp8_80, 80, fp8)
ATTEND_ENTRIES(attend_decode_fp8_96, attend_prefill_fp8_96, 96, fp8)
ATTEND_ENTRIES(attend_decode_fp8_128, attend_prefill_fp8_128, 128, fp8)
ATTEND_ENTRIES(attend_decode_fp8_256, attend_prefill_fp8_256, 256, fp8)
