// Stacks for a kernel's threads, and the switch between them.
//
// Owns: the stacks, the switch, and the calls that sanitizers need for both.
// Never: decides which thread runs; is compiled with a sanitizer itself.
// Invariant: a stack is either in the pool or belongs to one context that has begun and not ended.
#pragma once
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)
namespace emulator {

struct Context {
    // Null until the context begins.
    void* stack_pointer = nullptr;
    uint8_t* stack = nullptr;
    // For sanitizers: a fake stack, and a thread of the race detector.
    void* fake_stack = nullptr;
    void* race_thread = nullptr;
};

// Whether an ended context may pass its stack on to the next one directly. Not for the race
// detector: two threads' variables in one place would look like one.
extern const bool STACKS_ARE_SHARED;

// Registers the context with the race detector. Called from the host, so that the host's work
// precedes each thread's, and no fiber's work seems to precede another's.
void introduce(Context& context);
// Gives `context` a stack, on which `entry` begins when it is first switched to. `entry` never returns.
void begin(Context& context, void (*entry)());
// Returns the stack to the pool, perhaps while still running on it: the next `begin` must come from
// another stack.
void end(Context& context);
// Drops the saved position after a failed launch.
void abandon(Context& context);

// The first call on a new stack.
enum class CameFrom { Host, Fiber };
void arrived_on_new_stack(CameFrom from);
// Switches for the last time: the running context is never resumed.
[[noreturn]] void leave_context(Context& to);

#if defined(EMULATOR_ADDRESS) || defined(EMULATOR_THREAD)
// Sanitizer calls before and after a switch.
void announce(Context& from, Context& to);
void arrived(Context& self);
#else
inline void announce(Context&, Context&) {}
inline void arrived(Context&) {}
#endif

// Saves the registers that the compiler still needs, and continues on the other stack. Inline,
// since a kernel does little between two switches, and each stack's lines must be loaded into the
// cache. Compiled with -mno-red-zone: it pushes below the stack pointer.
inline __attribute__((always_inline)) void switch_stacks(void** from, void* to) {
    asm volatile(
        "pushq %%rbp\n\t"
        "leaq 0f(%%rip), %%rdx\n\t"
        "pushq %%rdx\n\t"
        "movq %%rsp, (%0)\n\t"
        "movq %1, %%rsp\n\t"
        "popq %%rdx\n\t"
        "jmp *%%rdx\n"
        "0:\n\t"
        "popq %%rbp\n\t"
        : "+D"(from), "+S"(to)
        :
        : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2", "xmm3",
          "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory");
}

// Returns when another context switches back. `to` is new, or was left by a switch.
inline __attribute__((always_inline)) void switch_context(Context& from, Context& to) {
    announce(from, to);
    switch_stacks(&from.stack_pointer, to.stack_pointer);
    arrived(from);
}

// The bounds of a context's stack, low end first; an access to the page below is an overflow.
bool is_below(const Context& context, const void* address);
void* top_of(const Context& context);

// For the race detector: work before a `release` happens before work after its `acquire`.
void acquire(void* gate);
void release(void* gate);

}  // namespace emulator
#pragma GCC visibility pop
