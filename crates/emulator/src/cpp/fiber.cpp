// Stacks and the switch between them, for x86-64. See fiber.h.
#include "fiber.h"

#include <stdlib.h>
#include <sys/mman.h>

#include <vector>

#ifdef EMULATOR_THREAD
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif
#ifdef EMULATOR_ADDRESS
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t bytes);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* bytes);
void __asan_unpoison_memory_region(const volatile void* at, size_t bytes);
}
#endif

namespace emulator {

#ifdef EMULATOR_THREAD
const bool STACKS_ARE_SHARED = false;
#else
const bool STACKS_ARE_SHARED = true;
#endif

namespace {

constexpr size_t PAGE_BYTES = 4096;
// Sanitizers widen every frame.
constexpr size_t STACK_BYTES = 64 * PAGE_BYTES;

// Free stacks, the last one returned on top: it is warm in the cache.
std::vector<uint8_t*> pool;

#ifdef EMULATOR_ADDRESS
// The launching thread's stack, as reported on arrival at the first fiber.
const void* host_stack = nullptr;
size_t host_stack_bytes = 0;
#endif

uint8_t* make_stack() {
    void* at = mmap(nullptr, PAGE_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED || mprotect(at, PAGE_BYTES, PROT_NONE) != 0) abort();
    return static_cast<uint8_t*>(at) + PAGE_BYTES;
}

// Offsets the tops of stacks: at one place in each page they would share a few cache lines.
size_t colour(const uint8_t* stack) { return (reinterpret_cast<uintptr_t>(stack) / PAGE_BYTES * 320) % PAGE_BYTES & ~size_t(63); }

#ifdef EMULATOR_ADDRESS
void announce_stack(void** fake_stack, const Context& to) {
    const void* bottom = to.stack == nullptr ? host_stack : to.stack;
    size_t bytes = to.stack == nullptr ? host_stack_bytes : STACK_BYTES;
    __sanitizer_start_switch_fiber(fake_stack, bottom, bytes);
}
#endif
#ifdef EMULATOR_THREAD
// A switch synchronises nothing; only barriers do.
constexpr unsigned NO_ORDER = 1;
#endif

}  // namespace

void introduce([[maybe_unused]] Context& context) {
#ifdef EMULATOR_THREAD
    if (context.race_thread == nullptr) context.race_thread = __tsan_create_fiber(0);
#endif
}

void begin(Context& context, void (*entry)()) {
    if (context.stack == nullptr) {
        if (pool.empty()) pool.push_back(make_stack());
        context.stack = pool.back();
        pool.pop_back();
    }
    // The stack looks as if `entry` had been called and had switched away before its first line.
    auto** top = reinterpret_cast<void**>(top_of(context));
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    context.stack_pointer = top;
    context.fake_stack = nullptr;
}

void end(Context& context) {
    if (STACKS_ARE_SHARED) {
        pool.push_back(context.stack);
        context.stack = nullptr;
    }
    context.stack_pointer = nullptr;
}

void abandon(Context& context) {
    if (context.stack == nullptr) return;
#ifdef EMULATOR_ADDRESS
    __asan_unpoison_memory_region(context.stack, STACK_BYTES);
#endif
#ifdef EMULATOR_THREAD
    if (context.race_thread != nullptr) __tsan_destroy_fiber(context.race_thread);
    context.race_thread = nullptr;
#endif
    end(context);
}

void arrived_on_new_stack([[maybe_unused]] CameFrom from) {
#ifdef EMULATOR_ADDRESS
    const void* bottom = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (from == CameFrom::Host) {
        host_stack = bottom;
        host_stack_bytes = bytes;
    }
#endif
}

#ifdef EMULATOR_ADDRESS
void announce(Context& from, Context& to) { announce_stack(&from.fake_stack, to); }
void arrived(Context& self) { __sanitizer_finish_switch_fiber(self.fake_stack, nullptr, nullptr); }
#endif
#ifdef EMULATOR_THREAD
void announce(Context& from, Context& to) {
    if (from.race_thread == nullptr) from.race_thread = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(to.race_thread, NO_ORDER);
}
void arrived(Context&) {}
#endif

void leave_context(Context& to) {
#ifdef EMULATOR_ADDRESS
    announce_stack(nullptr, to);
#endif
#ifdef EMULATOR_THREAD
    __tsan_switch_to_fiber(to.race_thread, NO_ORDER);
#endif
    void* nowhere;
    switch_stacks(&nowhere, to.stack_pointer);
    abort();
}

bool is_below(const Context& context, const void* address) {
    auto* at = static_cast<const uint8_t*>(address);
    return context.stack != nullptr && at >= context.stack - PAGE_BYTES && at < context.stack;
}

void* top_of(const Context& context) { return context.stack + STACK_BYTES - colour(context.stack) - 64; }

void acquire([[maybe_unused]] void* gate) {
#ifdef EMULATOR_THREAD
    __tsan_acquire(gate);
#endif
}

void release([[maybe_unused]] void* gate) {
#ifdef EMULATOR_THREAD
    __tsan_release(gate);
#endif
}

}  // namespace emulator
