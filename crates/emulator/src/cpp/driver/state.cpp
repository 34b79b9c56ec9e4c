// State and settings of the stand-in driver, and the beginning of every call. See state.h.
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "faults.h"

namespace standin {
namespace {

uint64_t number_of(const char* name, uint64_t otherwise) {
    const char* text = getenv(name);
    return text == nullptr || *text == 0 ? otherwise : strtoull(text, nullptr, 10);
}

Settings read_settings() {
    Settings read = {};
    read.seed = number_of("CLEAVE_STANDIN_SEED", 1);
    read.memory_bytes = number_of("CLEAVE_STANDIN_MEMORY_MIB", 2048) << 20;
    read.devices = int(number_of("CLEAVE_STANDIN_DEVICES", 1));
    read.multiprocessors = int(number_of("CLEAVE_STANDIN_MULTIPROCESSORS", 4));
    read.is_mps = number_of("CLEAVE_STANDIN_MPS", 0) != 0;
    const char* capability = getenv("CLEAVE_STANDIN_CAPABILITY");
    if (capability == nullptr || sscanf(capability, "%d.%d", &read.capability_major, &read.capability_minor) != 2) {
        read.capability_major = 9;
        read.capability_minor = 0;
    }
    return read;
}

}  // namespace

const Settings& settings() {
    static const Settings read = read_settings();
    return read;
}

// Never destroyed: a thread may still use it when the process ends.
State& state() {
    static State* one = [] {
        auto* made = new State;
        made->seed = settings().seed;
        return made;
    }();
    return *one;
}

uint64_t draw() {
    State& now = state();
    uint64_t x = now.seed * 0x9e3779b97f4a7c15ull + ++now.draws * 0xd1342543de82ef95ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

void count(const char* what) { state().counts[what]++; }

bool is_live(const void* handle) { return handle != nullptr && state().handles.count(handle) != 0; }

uint64_t nanoseconds_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1000000000ull + uint64_t(now.tv_nsec);
}

Call::Call(During during) : lock(state().mutex) {
    State& now = state();
    if (!now.is_initialized) {
        refusal = CUDA_ERROR_NOT_INITIALIZED;
        return;
    }
    auto found = now.current.find(std::this_thread::get_id());
    context = found == now.current.end() ? nullptr : found->second;
    // A context that was reset or released by all may still be current.
    if (context == nullptr || !is_live(context)) {
        refusal = CUDA_ERROR_INVALID_CONTEXT;
    } else if (context->broken != CUDA_SUCCESS) {
        refusal = context->broken;
    } else if (during == During::NoCapture && forbids_unsafe_calls()) {
        say("stand-in: a call that may synchronize was made during a capture, which is broken by it");
        break_captures();
        refusal = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
}

}  // namespace standin

using standin::state;

// For tests; a real driver has no such function.
extern "C" __attribute__((visibility("default"))) void cleave_standin_seed(uint64_t seed) {
    std::lock_guard<std::mutex> held(state().mutex);
    state().seed = seed;
    state().draws = 0;
}

// Counts since the library was loaded: "launch", "copy", "fill", "alloc", "free", "host_alloc",
// "graph_made", "graph_launch", "block" (of launches), "peer" (accesses enabled), "wait" (calls that wait for the
// device).
extern "C" __attribute__((visibility("default"))) uint64_t cleave_standin_count(const char* what) {
    std::lock_guard<std::mutex> held(state().mutex);
    auto found = state().counts.find(what);
    return found == state().counts.end() ? 0 : found->second;
}

extern "C" __attribute__((visibility("default"))) size_t cleave_standin_message(char* to, size_t bytes) {
    return emulator::last_message(to, bytes);
}
