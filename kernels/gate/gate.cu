// The MLP's gate: out[i] = act(gate[i]) * up[i]: silu(x) = x / (1 + exp(-x)), or gelu's approximation
// x / 2 * (1 + tanh(y)) = x / (1 + exp(-2y)), y = sqrt(2 / pi) * (x + 0.044715 * x^3); or, clamped,
// x / (1 + exp(-1.702 * x)) * (1 + up), with x cut to the limit, and up to the limit on both sides.
//
// Bandwidth-bound: 4 bytes read and 2 written for each element of out in bf16.
#include "stored.cuh"

struct GateArgs {
    const void* gate_up;   // (rows, gate | up), T
    void* out;             // (rows, width), T
    u32 width;             // of out: half of gate_up's
    u32 activation;        // SILU, GELU_TANH or CLAMPED_SWIGLU
    float limit;           // of CLAMPED_SWIGLU
    u32 unused;
};

constexpr u32 THREADS = 256;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2;
// 2 * sqrt(2 / pi), and 0.044715 times it.
constexpr float LINEAR = 1.5957691f, CUBIC = 0.07135482f;
// The slope of gpt-oss's gate.
constexpr float SLOPE = 1.702f;

// The activation is x / (1 + exp(-exponent(x))).
template <u32 ACTIVATION> DEVICE float exponent(float x) {
    if (ACTIVATION == CLAMPED_SWIGLU) return x * SLOPE;
    return ACTIVATION == GELU_TANH ? x * (x * x * CUBIC + LINEAR) : x;
}

// Comparisons leave what is no number as it is.
DEVICE float at_most(float x, float limit) { return x > limit ? limit : x; }
DEVICE float at_least(float x, float limit) { return x < limit ? limit : x; }

template <class T, u32 N, u32 ACTIVATION> DEVICE void gate_by(const GateArgs& args) {
    u32 i = (blockIdx.y * THREADS + threadIdx.x) * N;
    if (i >= args.width) return;
    u64 row = blockIdx.x;
    const T* from = static_cast<const T*>(args.gate_up) + row * 2 * args.width;
    float gate[N], up[N];
    load_all<N>(from + i, gate);
    load_all<N>(from + args.width + i, up);
    if (ACTIVATION == CLAMPED_SWIGLU) {
        for (u32 j = 0; j < N; j++) {
            gate[j] = at_most(gate[j], args.limit);
            up[j] = 1.0f + at_least(at_most(up[j], args.limit), -args.limit);
        }
    }
    for (u32 j = 0; j < N; j++) up[j] *= gate[j] / (1.0f + exp2_fast(-exponent<ACTIVATION>(gate[j]) * LOG2_E));
    store_all<N>(static_cast<T*>(args.out) + row * args.width + i, up);
}

template <class T, u32 ACTIVATION> DEVICE void gate_of(const GateArgs& args) {
    if (args.width % 8 == 0)
        gate_by<T, 8, ACTIVATION>(args);
    else
        gate_by<T, 1, ACTIVATION>(args);
}

template <class T> DEVICE void gate(const GateArgs& args) {
    if (args.activation == GELU_TANH)
        gate_of<T, GELU_TANH>(args);
    else if (args.activation == CLAMPED_SWIGLU)
        gate_of<T, CLAMPED_SWIGLU>(args);
    else
        gate_of<T, SILU>(args);
}

// Grid: (rows, width / 2048 rounded up), or width / 256 where width is no multiple of 8.
extern "C" KERNEL(THREADS, 1) silu_gate_f32(GRID_CONSTANT const GateArgs args) { start_kernel(); gate<float>(args); }
extern "C" KERNEL(THREADS, 1) silu_gate_bf16(GRID_CONSTANT const GateArgs args) { start_kernel(); gate<bf16>(args); }
