// A block's shared memory on the host. See shared_memory.h.
#include "shared_memory.h"

#include <link.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "machine.h"
#include "numbers.h"

namespace emulator {

Range dynamic_shared, static_shared;

namespace {

constexpr size_t PAGE_BYTES = 4096;
constexpr size_t ALIGNMENT = 1024;
// More than any device's shared memory.
constexpr size_t BYTES_MAX = 64 * PAGE_BYTES;

// The last page is a guard page.
uint8_t* arena() {
    static uint8_t* at = [] {
        void* pages = mmap(nullptr, BYTES_MAX + PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages == MAP_FAILED || mprotect(static_cast<uint8_t*>(pages) + BYTES_MAX, PAGE_BYTES, PROT_NONE) != 0) abort();
        return static_cast<uint8_t*>(pages);
    }();
    return at;
}

#ifdef EMULATOR_ADDRESS
void* fenced = nullptr;
#else
// All thread-local variables of this library are kernels' `__shared__` ones, except this: it makes
// the calling thread's block of them exist.
thread_local volatile uint32_t anchor;

int find_statics(dl_phdr_info* info, size_t, void*) {
    auto* here = reinterpret_cast<const uint8_t*>(&find_statics);
    bool is_ours = false;
    const ElfW(Phdr)* variables = nullptr;
    for (int index = 0; index < info->dlpi_phnum; index++) {
        const ElfW(Phdr)& part = info->dlpi_phdr[index];
        auto* first = reinterpret_cast<const uint8_t*>(info->dlpi_addr + part.p_vaddr);
        is_ours |= part.p_type == PT_LOAD && here >= first && here < first + part.p_memsz;
        if (part.p_type == PT_TLS) variables = &part;
    }
    if (!is_ours) return 0;
    if (variables != nullptr && info->dlpi_tls_data != nullptr) {
        static_shared = {reinterpret_cast<uintptr_t>(info->dlpi_tls_data), variables->p_memsz};
    }
    return 1;
}
#endif

}  // namespace

#ifdef EMULATOR_ADDRESS

void shared_begin(uint32_t bytes) {
    // The sanitizer's own redzone lies right behind the last byte.
    free(fenced);
    fenced = nullptr;
    if (bytes != 0 && posix_memalign(&fenced, ALIGNMENT, bytes) != 0) abort();
    dynamic_shared = {reinterpret_cast<uintptr_t>(bytes == 0 ? arena() + BYTES_MAX : fenced), bytes};
}

void poison_shared(uint32_t bytes) {
    if (bytes != 0) numbers::poison(fenced, bytes);
}

bool shared_is_intact() { return true; }

#else

void shared_begin(uint32_t bytes) {
    size_t whole = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    dynamic_shared = {reinterpret_cast<uintptr_t>(arena() + BYTES_MAX - whole), bytes};
    anchor = 0;
    dl_iterate_phdr(find_statics, nullptr);
}

void poison_shared(uint32_t bytes) {
    size_t whole = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    numbers::poison(reinterpret_cast<void*>(dynamic_shared.first), whole);
    numbers::poison(reinterpret_cast<void*>(static_shared.first), static_shared.bytes);
}

// The bytes between the last one and the guard page must be unchanged.
bool shared_is_intact() {
    auto* end = reinterpret_cast<const uint8_t*>(dynamic_shared.first + dynamic_shared.bytes);
    auto* pattern = reinterpret_cast<const uint8_t*>(&numbers::POISON);
    for (size_t index = 0; end + index < arena() + BYTES_MAX; index++) {
        if (end[index] != pattern[(dynamic_shared.bytes + index) % 4]) return false;
    }
    return true;
}

#endif

}  // namespace emulator
