// Embedding: out[row] = table[tokens[row]].
//
// Rows are widened to f32, since they begin the residual stream. Bandwidth-bound: 2 or 4 bytes read and 4
// written for each element; one block a row.
#include "prims.cuh"

struct EmbedArgs {
    const void* table;   // (vocab, width), bf16 or f32
    const u32* tokens;   // (rows), each within the table
    float* out;          // (rows, width)
    u32 width;
};

constexpr u32 THREADS = 128;

template <class T> DEVICE void embed(const EmbedArgs& args) {
    u64 row = blockIdx.x;
    const T* from = static_cast<const T*>(args.table) + u64(args.tokens[row]) * args.width;
    float* to = args.out + row * args.width;
    for (u32 i = threadIdx.x; i < args.width; i += THREADS) to[i] = to_f32(from[i]);
}

// Grid: (rows).
extern "C" KERNEL(THREADS, 1) embed_f32(GRID_CONSTANT const EmbedArgs args) { embed<float>(args); }
extern "C" KERNEL(THREADS, 1) embed_bf16(GRID_CONSTANT const EmbedArgs args) { embed<bf16>(args); }
