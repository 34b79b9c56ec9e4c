// Embedding: out[row] = factor * table[tokens[row]].
//
// A token that the previous step draws is read on the device, so that the host need not have
// fetched it. A draw without a token, since its logits were not finite, may give any row: its
// results are never reported.
//
// Rows are widened to f32, since they begin the residual stream. Bandwidth-bound: 2 or 4 bytes read and 4
// written for each element; one block a row.
#include "prims.cuh"

struct EmbedArgs {
    const void* table;   // (vocab, width), bf16 or f32
    const u32* tokens;   // (rows), each within the table, or FED and a row of drawn
    const u32* drawn;    // the tokens drawn last; not read if no token is FED
    float* out;          // (rows, width)
    u32 width;
    u32 vocab;           // rows of the table
    float factor;
    u32 padding;
};

constexpr u32 FED = 0x80000000u;

constexpr u32 THREADS = 128;

template <class T> DEVICE void embed(const EmbedArgs& args) {
    u64 row = blockIdx.x;
    u32 token = args.tokens[row];
    if ((token & FED) != 0) token = args.drawn[token & ~FED];
    if (token >= args.vocab) token = 0;
    const T* from = static_cast<const T*>(args.table) + u64(token) * args.width;
    float* to = args.out + row * args.width;
    for (u32 i = threadIdx.x; i < args.width; i += THREADS) to[i] = args.factor * to_f32(from[i]);
}

// Grid: (rows).
extern "C" KERNEL(THREADS, 1) embed_f32(GRID_CONSTANT const EmbedArgs args) { start_kernel(); embed<float>(args); }
extern "C" KERNEL(THREADS, 1) embed_bf16(GRID_CONSTANT const EmbedArgs args) { start_kernel(); embed<bf16>(args); }
