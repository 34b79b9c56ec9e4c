// Turns a kernel's access to unmapped memory into a failed launch. See memory_traps.h.
#include "memory_traps.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <ucontext.h>

#include "machine.h"

namespace emulator {

// The address sanitizer's own handler reports more, and ends the process.
#ifdef EMULATOR_ADDRESS

Traps::Traps(IsOverrun, StackTop) {}
Traps::~Traps() = default;

#else

namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS};
struct sigaction before[2];
pthread_t runner;
Traps::IsOverrun is_overrun_now;
Traps::StackTop stack_top_now;
const void* address_missed;
bool is_overrun_missed;

// The fiber continues here after the fault; nothing below on its stack is needed any more.
[[noreturn]] void land() {
    char what[96];
    snprintf(what, sizeof what, is_overrun_missed ? "its stack overflowed at %p" : "touched %p, where there is no memory", address_missed);
    fail(Outcome::IllegalAddress, what, {});
}

void on_fault(int number, siginfo_t* info, void* interrupted) {
    if (!pthread_equal(pthread_self(), runner)) {
        // The fault is not the kernel's: the earlier handler gets it when the access is retried.
        for (int index = 0; index < 2; index++) {
            if (SIGNALS[index] == number) sigaction(number, &before[index], nullptr);
        }
        return;
    }
    address_missed = info->si_addr;
    is_overrun_missed = is_overrun_now(info->si_addr);
    auto* context = static_cast<ucontext_t*>(interrupted);
    auto top = reinterpret_cast<uintptr_t>(stack_top_now());
    context->uc_mcontext.gregs[REG_RSP] = greg_t((top & ~uintptr_t(15)) - 8);
    context->uc_mcontext.gregs[REG_RIP] = greg_t(reinterpret_cast<uintptr_t>(&land));
}

}  // namespace

Traps::Traps(IsOverrun is_overrun, StackTop stack_top) {
    runner = pthread_self();
    is_overrun_now = is_overrun;
    stack_top_now = stack_top;
    struct sigaction ours = {};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int index = 0; index < 2; index++) sigaction(SIGNALS[index], &ours, &before[index]);
}

Traps::~Traps() {
    for (int index = 0; index < 2; index++) sigaction(SIGNALS[index], &before[index], nullptr);
}

#endif

}  // namespace emulator
