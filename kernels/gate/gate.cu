// The MLP's gate: out[i] = silu(gate[i]) * up[i], silu(x) = x / (1 + exp(-x)).
//
// Bandwidth-bound: 4 bytes read and 2 written for each element of out in bf16.
#include "stored.cuh"

struct GateArgs {
    const void* gate_up;   // (rows, gate | up), T
    void* out;             // (rows, width), T
    u32 width;             // of out: half of gate_up's
};

constexpr u32 THREADS = 256;
constexpr float LOG2_E = 1.4426950408889634f;

template <class T, u32 N> DEVICE void silu_gate_by(const GateArgs& args) {
    u32 i = (blockIdx.y * THREADS + threadIdx.x) * N;
    if (i >= args.width) return;
    u64 row = blockIdx.x;
    const T* from = static_cast<const T*>(args.gate_up) + row * 2 * args.width;
    float gate[N], up[N];
    load_all<N>(from + i, gate);
    load_all<N>(from + args.width + i, up);
    for (u32 j = 0; j < N; j++) up[j] *= gate[j] / (1.0f + exp2_fast(-gate[j] * LOG2_E));
    store_all<N>(static_cast<T*>(args.out) + row * args.width + i, up);
}

template <class T> DEVICE void silu_gate(const GateArgs& args) {
    if (args.width % 8 == 0)
        silu_gate_by<T, 8>(args);
    else
        silu_gate_by<T, 1>(args);
}

// Grid: (rows, width / 2048 rounded up), or width / 256 where width is no multiple of 8.
extern "C" KERNEL(THREADS, 1) silu_gate_f32(GRID_CONSTANT const GateArgs args) { start_kernel(); silu_gate<float>(args); }
extern "C" KERNEL(THREADS, 1) silu_gate_bf16(GRID_CONSTANT const GateArgs args) { start_kernel(); silu_gate<bf16>(args); }
