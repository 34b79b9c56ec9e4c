// Device and pinned memory by address. See memory.h.
#include "memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../numbers.h"

#ifdef EMULATOR_ADDRESS
extern "C" {
void __asan_poison_memory_region(const volatile void* at, size_t bytes);
void __asan_unpoison_memory_region(const volatile void* at, size_t bytes);
}
#endif

namespace standin {
namespace {

constexpr size_t ALIGNMENT = 256;
// Addresses reserved for each byte of memory, so that a freed one is not reused soon.
constexpr size_t ADDRESSES_PER_BYTE = 4;

// Never destroyed: another thread may still use it when the process ends.
auto& regions = *new std::map<uintptr_t, Region>;

void open_heap(Heap& fresh) {
    fresh.reserved = settings().memory_bytes * ADDRESSES_PER_BYTE;
    fresh.file = memfd_create("cleave-standin", MFD_CLOEXEC);
    if (fresh.file < 0 || ftruncate(fresh.file, off_t(fresh.reserved)) != 0) abort();
    void* at = mmap(nullptr, fresh.reserved, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fresh.file, 0);
    if (at == MAP_FAILED) abort();
    fresh.base = static_cast<uint8_t*>(at);
}

// The first gap of this size from an offset on; `reserved` if there is none.
size_t find_gap(const Heap& in, size_t from, size_t bytes) {
    auto base = reinterpret_cast<uintptr_t>(in.base);
    size_t offset = from;
    for (auto next = regions.lower_bound(base); next != regions.end(); ++next) {
        const Region& region = next->second;
        if (next->first >= base + in.reserved) break;
        size_t first = size_t(region.pages - in.base), end = first + region.pages_bytes + PAGE_BYTES;
        if (end <= offset) continue;
        if (first >= offset + bytes) break;
        offset = end;
    }
    return offset + bytes <= in.reserved ? offset : in.reserved;
}

uint8_t* tail_of(const Region& region) { return reinterpret_cast<uint8_t*>(region.first + region.bytes); }
uint8_t* pages_end(const Region& region) { return region.pages + region.pages_bytes; }

void fence([[maybe_unused]] const Region& region) {
#ifdef EMULATOR_ADDRESS
    __asan_unpoison_memory_region(region.pages, region.pages_bytes);
    __asan_poison_memory_region(region.pages, region.first - reinterpret_cast<uintptr_t>(region.pages));
    __asan_poison_memory_region(tail_of(region), size_t(pages_end(region) - tail_of(region)));
#endif
}

void unfence([[maybe_unused]] const Region& region) {
#ifdef EMULATOR_ADDRESS
    __asan_unpoison_memory_region(region.pages, region.pages_bytes);
#endif
}

}  // namespace

Heap& heap(int device) {
    static auto* heaps = new std::map<int, Heap>;
    Heap& found = (*heaps)[device];
    if (found.base == nullptr) open_heap(found);
    return found;
}

void poison_fresh(void* first, size_t bytes) {
    // Writing more would commit all of the memory, on small machines too.
    constexpr size_t BYTES_MAX = size_t(32) << 20;
    numbers::poison(first, bytes < BYTES_MAX ? bytes : BYTES_MAX);
}

CUresult allocate(const Context& context, size_t bytes, uintptr_t* at) {
    Heap& from = heap(context.device);
    size_t pages = round_up(bytes, PAGE_BYTES), with_guard = pages + PAGE_BYTES;
    if (pages > settings().memory_bytes - from.used) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t offset = find_gap(from, from.cursor, with_guard);
    if (offset == from.reserved) offset = find_gap(from, 0, with_guard);
    if (offset == from.reserved) return CUDA_ERROR_OUT_OF_MEMORY;
    uint8_t* first_page = from.base + offset;
    if (mprotect(first_page, pages, PROT_READ | PROT_WRITE) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    from.used += pages;
    from.cursor = offset + with_guard;
    // Placed at the end of its pages, so that little fits between its end and the guard page.
    auto first = reinterpret_cast<uintptr_t>(first_page) + pages - round_up(bytes, ALIGNMENT);
    Region region = {first, bytes, Source::Allocated, context.device, first_page, pages};
    unfence(region);
    poison_fresh(reinterpret_cast<void*>(first), bytes);
    numbers::poison(tail_of(region), size_t(pages_end(region) - tail_of(region)));
    fence(region);
    regions.emplace(first, region);
    *at = first;
    return CUDA_SUCCESS;
}

CUresult add_region(const Region& region) {
    auto above = regions.lower_bound(region.first + region.bytes);
    if (above != regions.begin()) {
        const Region& below = std::prev(above)->second;
        if (below.first + below.bytes > region.first) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    regions.emplace(region.first, region);
    return CUDA_SUCCESS;
}

Region* region_at(const void* address) {
    auto at = reinterpret_cast<uintptr_t>(address);
    auto above = regions.upper_bound(at);
    if (above == regions.begin()) return nullptr;
    Region& below = std::prev(above)->second;
    return at - below.first < below.bytes ? &below : nullptr;
}

Region* region_where(bool (*is_wanted)(const Region&, const void*), const void* wanted) {
    for (auto& [first, region] : regions) {
        if (is_wanted(region, wanted)) return &region;
    }
    return nullptr;
}

void remove(Region* region) {
    unfence(*region);
    switch (region->source) {
        case Source::Allocated: {
            Heap& of = heap(region->device);
            of.used -= region->pages_bytes;
            mprotect(region->pages, region->pages_bytes, PROT_NONE);
            fallocate(of.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, region->pages - of.base, off_t(region->pages_bytes));
            break;
        }
        case Source::Imported:
        case Source::HostAllocated: munmap(region->pages, region->pages_bytes); break;
        case Source::Registered: break;
    }
    regions.erase(region->first);
}

void remove_all_of(int device) {
    std::vector<Region*> all;
    for (auto& [first, region] : regions) {
        if (region.kind() == Kind::Device && region.device == device) all.push_back(&region);
    }
    for (Region* region : all) remove(region);
}

Kind kind_of(const void* address) {
    const Region* region = region_at(address);
    if (region != nullptr) return region->kind();
    for (int device = 0; device < settings().devices; device++) {
        const Heap& of = heap(device);
        // The address is freed or was never allocated, and is no host address.
        emulator::Range addresses = {reinterpret_cast<uintptr_t>(of.base), of.reserved};
        if (addresses.has(address)) return Kind::Device;
    }
    return Kind::Pageable;
}

bool covers(Kind kind, const void* first, size_t bytes) {
    const Region* region = region_at(first);
    if (region == nullptr || region->kind() != kind) return false;
    return bytes <= region->first + region->bytes - reinterpret_cast<uintptr_t>(first);
}

const char* objection_to(const Context& context, uint64_t word) {
    // Two adjacent small numbers may look like an address too; programs and their memory lie in
    // this range.
    constexpr uint64_t LOWEST = 0x5500ull << 32, HIGHEST = 1ull << 47;
    if (word < LOWEST || word >= HIGHEST) return nullptr;
    auto* address = reinterpret_cast<const uint8_t*>(word);
    const Region* region = region_at(address);
    // One past the end is a valid end of a range, but not a readable address.
    if (region == nullptr) region = region_at(address - 1);
    if (region != nullptr) {
        bool is_near = region->kind() != Kind::Device || region->device == context.device || context.peers.count(region->device) != 0;
        return is_near ? nullptr : "is another device's memory, and peer access is not enabled";
    }
    if (kind_of(address) == Kind::Device) return "is device memory that was freed or never allocated";
    unsigned char is_resident;
    auto* page = reinterpret_cast<void*>(word & ~uint64_t(PAGE_BYTES - 1));
    return mincore(page, 1, &is_resident) == 0 ? "is host memory that the device cannot see" : nullptr;
}

bool tails_are_intact([[maybe_unused]] const char* kernel) {
#ifndef EMULATOR_ADDRESS
    auto* pattern = reinterpret_cast<const uint8_t*>(&numbers::POISON);
    for (auto& [first, region] : regions) {
        if (region.source != Source::Allocated) continue;
        uint8_t* tail = tail_of(region);
        for (uint8_t* at = tail; at < pages_end(region); at++) {
            if (*at == pattern[(at - tail) % 4]) continue;
            say("stand-in: kernel %s wrote %zu bytes past the end of an allocation of %zu bytes", kernel, size_t(at - tail), region.bytes);
            numbers::poison(tail, size_t(pages_end(region) - tail));
            return false;
        }
    }
#endif
    return true;
}

}  // namespace standin
