// Device and pinned memory: which addresses are whose.
//
// Owns: each device's memory (one file that other processes can map), and the list of everything that the device
// may touch.
// Never: hands an address out again soon; a use after free touches a page that is not there.
// Invariant: everything here is called with the state's lock held. What is allocated and not written is poison
// (its first 32 MiB), and ends at a page that cannot be touched, or at a pattern that is compared after kernels.
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
    // The pages around it, as they are mapped.
    uint8_t* pages;
    size_t pages_bytes;
    unsigned references = 1;
    // Of an imported region: the process and the place that it came from.
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
// Null: no region begins or lies there.
Region* region_at(const void* address);
// The first one that is wanted; null if none is.
Region* region_where(bool (*is_wanted)(const Region& region, const void* wanted), const void* wanted);
// Unmaps or protects its pages and forgets it.
void remove(Region* region);
void remove_all_of(int device);

Kind kind_of(const void* address);
// Whether all of it lies in one region of that kind.
bool covers(Kind kind, const void* first, size_t bytes);
// What is wrong with a word that a kernel is given, if it looks like an address; null: nothing.
const char* objection_to(const Context& context, uint64_t word);
// False, after a line that says so: the kernel wrote past the end of some allocation.
bool tails_are_intact(const char* kernel);

}  // namespace standin
#pragma GCC visibility pop
