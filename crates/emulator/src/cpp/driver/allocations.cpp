// Calls that allocate, free and describe memory.
//
// Owns: which calls are refused, and when memory may be freed.
// Never: frees an address that is not the beginning of an allocation of that kind.
// Invariant: memory is freed when no earlier work can use it any more.
#include <stdlib.h>
#include <sys/mman.h>

#include "faults.h"
#include "memory.h"

using namespace standin;

namespace {

CUresult allocate_for(Call& call, CUdeviceptr* at, size_t bytes) {
    if (at == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    count("alloc");
    if (strikes(Fault::Alloc)) return CUDA_ERROR_OUT_OF_MEMORY;
    uintptr_t first = 0;
    CUresult result = allocate(*call.context, bytes, &first);
    *at = first;
    return result;
}

// Refuses a freed address, one in the middle of an allocation, and an unknown address.
CUresult check_freeable(uintptr_t at, Source source, const char* what) {
    const Region* region = region_at(reinterpret_cast<void*>(at));
    if (region != nullptr && region->first == at && region->source == source) return CUDA_SUCCESS;
    say("stand-in: %s of %#zx, which is not (or no longer) the beginning of such memory", what, size_t(at));
    return CUDA_ERROR_INVALID_VALUE;
}

struct FreeWork : Work {
    uintptr_t at;
    explicit FreeWork(uintptr_t first) : at(first) {}
    CUgraphNodeType type() const override { return NODE_TYPE_HOST; }
    CUresult begin(Context&) const override {
        CUresult result = check_freeable(at, Source::Allocated, "cuMemFreeAsync");
        if (result == CUDA_SUCCESS) remove(region_at(reinterpret_cast<void*>(at)));
        return result;
    }
    CUresult run(uint64_t) const override { return CUDA_SUCCESS; }
};

CUresult free_now(Call& call, uintptr_t at, Source source, const char* what) {
    CUresult result = check_freeable(at, source, what);
    if (result != CUDA_SUCCESS) return result;
    // As on the device: memory is not freed while queued work may use it.
    result = drain(call, *call.context);
    // Another thread may have freed it meanwhile.
    if (check_freeable(at, source, what) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
    count("free");
    remove(region_at(reinterpret_cast<void*>(at)));
    return result;
}

}  // namespace

API cuMemAlloc_v2(CUdeviceptr* at, size_t bytes) {
    ENTER(call, During::NoCapture);
    return allocate_for(call, at, bytes);
}

// The address is known at once; its use before `stream` reaches the allocation is not detected.
API cuMemAllocAsync(CUdeviceptr* at, size_t bytes, CUstream handle) {
    ENTER(call, During::NoCapture);
    if (find_stream(*call.context, handle) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return allocate_for(call, at, bytes);
}

API cuMemFree_v2(CUdeviceptr at) {
    ENTER(call, During::NoCapture);
    return at == 0 ? CUDA_SUCCESS : free_now(call, at, Source::Allocated, "cuMemFree");
}

API cuMemFreeAsync(CUdeviceptr at, CUstream handle) {
    ENTER(call, During::NoCapture);
    CUresult result = check_freeable(at, Source::Allocated, "cuMemFreeAsync");
    if (result != CUDA_SUCCESS) return result;
    count("free");
    return submit(call, handle, std::make_shared<FreeWork>(at));
}

API cuMemHostAlloc(void** at, size_t bytes, unsigned) {
    ENTER(call, During::NoCapture);
    if (at == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    count("host_alloc");
    if (strikes(Fault::HostAlloc)) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t pages = round_up(bytes, PAGE_BYTES) + PAGE_BYTES;
    void* mapped = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    auto* first = static_cast<uint8_t*>(mapped);
    mprotect(first + pages - PAGE_BYTES, PAGE_BYTES, PROT_NONE);
    poison_fresh(first, bytes);
    Region region = {reinterpret_cast<uintptr_t>(first), bytes, Source::HostAllocated, 0, first, pages};
    *at = first;
    return add_region(region);
}

API cuMemAllocHost_v2(void** at, size_t bytes) { return cuMemHostAlloc(at, bytes, 0); }

API cuMemFreeHost(void* at) {
    ENTER(call, During::NoCapture);
    return free_now(call, reinterpret_cast<uintptr_t>(at), Source::HostAllocated, "cuMemFreeHost");
}

API cuMemHostRegister_v2(void* at, size_t bytes, unsigned) {
    ENTER(call, During::NoCapture);
    if (at == nullptr || bytes == 0 || kind_of(at) == Kind::Device) return CUDA_ERROR_INVALID_VALUE;
    auto* first = static_cast<uint8_t*>(at);
    return add_region({reinterpret_cast<uintptr_t>(at), bytes, Source::Registered, 0, first, bytes});
}

API cuMemHostUnregister(void* at) {
    ENTER(call, During::NoCapture);
    const Region* region = region_at(at);
    if (region == nullptr || region->source != Source::Registered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    return free_now(call, reinterpret_cast<uintptr_t>(at), Source::Registered, "cuMemHostUnregister");
}

API cuMemHostGetDevicePointer_v2(CUdeviceptr* to, void* at, unsigned) {
    ENTER(call, During::Anything);
    if (to == nullptr || kind_of(at) != Kind::Pinned) return CUDA_ERROR_INVALID_VALUE;
    *to = reinterpret_cast<uintptr_t>(at);
    return CUDA_SUCCESS;
}

API cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
    ENTER(call, During::Anything);
    if (free_bytes == nullptr || total_bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *total_bytes = settings().memory_bytes;
    *free_bytes = settings().memory_bytes - heap(call.context->device).used;
    return CUDA_SUCCESS;
}

API cuMemGetAddressRange_v2(CUdeviceptr* first, size_t* bytes, CUdeviceptr at) {
    ENTER(call, During::Anything);
    const Region* region = region_at(reinterpret_cast<void*>(at));
    if (region == nullptr || region->kind() != Kind::Device) return CUDA_ERROR_NOT_FOUND;
    if (first != nullptr) *first = region->first;
    if (bytes != nullptr) *bytes = region->bytes;
    return CUDA_SUCCESS;
}

// For the companion libraries: whether all of the range is in one allocation of device memory.
extern "C" __attribute__((visibility("default"))) int cleave_standin_holds(const void* at, size_t bytes) {
    std::lock_guard<std::mutex> held(state().mutex);
    return covers(Kind::Device, at, bytes);
}
