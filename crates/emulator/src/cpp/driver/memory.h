// Device and pinned memory by address.
//
// Owns: each device's memory (one file that other processes can map), and the list of all memory
// that the device may touch.
// Never: reuses an address soon; a use after free touches an unmapped page.
// Invariant: every function here is called with the state's lock held. Allocated and unwritten
// memory is poisoned (its first 32 MiB), and ends at a guard page, or at a pattern that is compared
// after kernels.
#pragma once
#include "state.h"

#pragma GCC visibility push(hidden)
namespace standin {

constexpr size_t PAGE_BYTES = 4096;
inline size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

enum class Kind { Device, Pinned, Pageable };
enum class Source { Allocated, Imported, HostAllocated, Registered };

struct Region {
    uintptr_t first;
    size_t bytes;
    Source source;
    int device;
    // The mapped pages around it.
    uint8_t* pages;
    size_t pages_bytes;
    unsigned references = 1;
    // Process and offset of an imported region.
    int exporter = 0;
    uint64_t exporter_offset = 0;

    Kind kind() const { return source == Source::Allocated || source == Source::Imported ? Kind::Device : Kind::Pinned; }
};

// The file behind a device's memory.
struct Heap {
    int file = -1;
    uint8_t* base = nullptr;
    size_t reserved = 0, used = 0, cursor = 0;
};
Heap& heap(int device);

void poison_fresh(void* first, size_t bytes);
CUresult allocate(const Context& context, size_t bytes, uintptr_t* at);
CUresult add_region(const Region& region);
// Null if no region begins or lies there.
Region* region_at(const void* address);
// The first region that satisfies the condition; null if none does.
Region* region_where(bool (*is_wanted)(const Region& region, const void* wanted), const void* wanted);
// Unmaps or protects its pages and forgets it.
void remove(Region* region);
void remove_all_of(int device);

Kind kind_of(const void* address);
// Whether the whole range lies in one region of that kind.
bool covers(Kind kind, const void* first, size_t bytes);
// The mistake in a word passed to a kernel, if it looks like an address; null if there is none.
const char* objection_to(const Context& context, uint64_t word);
// False, after a message, if the kernel wrote past the end of some allocation.
bool tails_are_intact(const char* kernel);

}  // namespace standin
#pragma GCC visibility pop
