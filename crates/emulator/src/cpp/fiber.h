// Stacks to run a kernel's threads on, and the switch from one to another.
//
// Owns: the stacks, the switch, and what sanitizers must be told about both.
// Never: decides who runs; compiled with a sanitizer itself.
// Invariant: a stack is either in the pool or belongs to one context that has begun and not ended.
#pragma once
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)
namespace emulator {

struct Context {
    // Null: has not begun.
    void* stack_pointer = nullptr;
    uint8_t* stack = nullptr;
    // The sanitizers' own: a fake stack, and a thread of the race detector.
    void* fake_stack = nullptr;
    void* race_thread = nullptr;
};

// Whether a context that ended may leave its stack to another that goes on right there. Not where races are
// looked for: two threads' variables in one place would be one.
extern const bool STACKS_ARE_SHARED;

// Tells the race detector of it. From the host: what made a thread comes before all that the thread does, and
// no fiber's doing must come before another's by that.
void introduce(Context& context);
// Gives `context` a stack, on which `entry` begins when it is first switched to. `entry` never returns.
void begin(Context& context, void (*entry)());
// Back to the pool, which may be said by whoever still runs on it: the next `begin` must come from elsewhere.
void end(Context& context);
// After a failed launch: forgets where the context stood.
void abandon(Context& context);

// First thing on a new stack.
enum class CameFrom { Host, Fiber };
void arrived_on_new_stack(CameFrom from);
// Does not return, and the running context will not be switched to again.
[[noreturn]] void leave_context(Context& to);

#if defined(EMULATOR_ADDRESS) || defined(EMULATOR_THREAD)
// What the sanitizer is told before a switch and after it.
void announce(Context& from, Context& to);
void arrived(Context& self);
#else
inline void announce(Context&, Context&) {}
inline void arrived(Context&) {}
#endif

// Saves what is still needed here (the compiler knows), and goes on where the other stack left off. In line, since
// a kernel does little between two switches, and each stack's lines have to come into the cache for it.
// Compiled with -mno-red-zone: it pushes below the stack pointer.
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

// Returns when somebody switches back. `to` has begun, or is where a switch once left from.
inline __attribute__((always_inline)) void switch_context(Context& from, Context& to) {
    announce(from, to);
    switch_stacks(&from.stack_pointer, to.stack_pointer);
    arrived(from);
}

// The bounds of a context's stack, low end first; what touches the page below it has overrun it.
bool is_below(const Context& context, const void* address);
void* top_of(const Context& context);

// For the race detector: all that happened before a `release` happens before what follows its `acquire`.
void acquire(void* gate);
void release(void* gate);

}  // namespace emulator
#pragma GCC visibility pop
