// Memory and events that two processes share, and the kind of an address.
//
// Owns: the handles exchanged by processes, and the page of shareable events.
// Never: sends anything itself: a handle is bytes, as with a real driver.
// Invariant: a handle names a file of a living process, which must run under the same user.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "faults.h"
#include "memory.h"

namespace standin {
namespace {

constexpr uint64_t MAGIC = 0x316370692d766c63ull;

// Content of a handle's 64 bytes.
struct Ticket {
    uint64_t magic;
    int process, file, device;
    // Of memory: the pages in the file, and the allocation's place in them. Of an event: its index.
    uint64_t offset, pages_bytes, lead_bytes, bytes;
};
static_assert(sizeof(Ticket) <= sizeof(CUipcMemHandle) && sizeof(Ticket) <= sizeof(CUipcEventHandle), "a handle has 64 bytes");

template <class Handle> void write(const Ticket& ticket, Handle* to) {
    memset(to, 0, sizeof *to);
    memcpy(to, &ticket, sizeof ticket);
}

template <class Handle> Ticket read(const Handle& from) {
    Ticket ticket;
    memcpy(&ticket, &from, sizeof ticket);
    return ticket;
}

// Null if the process is gone, or not readable by this user.
uint8_t* map(const Ticket& ticket) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", ticket.process, ticket.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        say("stand-in: cannot open %s of another process: %s", path, strerror(errno));
        return nullptr;
    }
    void* at = mmap(nullptr, ticket.pages_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, off_t(ticket.offset));
    close(file);
    return at == MAP_FAILED ? nullptr : static_cast<uint8_t*>(at);
}

constexpr size_t SHARED_EVENTS_MAX = PAGE_BYTES / sizeof(EventCell);

// This process's shareable events, in one page of a file.
struct EventPage {
    int file;
    EventCell* cells;
    // A cell is freed when its last holder drops it, with or without the state's lock.
    std::mutex guard;
    std::vector<int> free;
};

EventPage& event_page() {
    static auto* page = [] {
        auto* made = new EventPage;
        made->file = memfd_create("cleave-standin-events", MFD_CLOEXEC);
        if (made->file < 0 || ftruncate(made->file, PAGE_BYTES) != 0) abort();
        void* at = mmap(nullptr, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, made->file, 0);
        if (at == MAP_FAILED) abort();
        made->cells = static_cast<EventCell*>(at);
        for (int index = int(SHARED_EVENTS_MAX); index-- > 0;) made->free.push_back(index);
        return made;
    }();
    return *page;
}

void give_cell_back(int index) {
    EventPage& page = event_page();
    std::lock_guard<std::mutex> held(page.guard);
    page.free.push_back(index);
}

CUresult share_cell(Event& event) {
    EventPage& page = event_page();
    std::lock_guard<std::mutex> held(page.guard);
    if (page.free.empty()) return CUDA_ERROR_OUT_OF_MEMORY;
    int index = page.free.back();
    page.free.pop_back();
    EventCell* cell = &page.cells[index];
    cell->recorded = cell->completed = cell->nanoseconds = 0;
    event.shared_index = index;
    event.cell = std::shared_ptr<EventCell>(cell, [index](EventCell*) { give_cell_back(index); });
    return CUDA_SUCCESS;
}

// Memory that is open already is mapped once.
Region* imported_from(const Ticket& ticket) {
    return region_where([](const Region& region, const void* wanted) {
        auto& of = *static_cast<const Ticket*>(wanted);
        return region.source == Source::Imported && region.exporter == of.process && region.exporter_offset == of.offset && region.bytes == of.bytes;
    }, &ticket);
}

CUresult open_memory(const Context& context, const Ticket& ticket, CUdeviceptr* at) {
    if (Region* known = imported_from(ticket)) {
        known->references++;
        *at = known->first;
        return CUDA_SUCCESS;
    }
    uint8_t* pages = map(ticket);
    if (pages == nullptr) return CUDA_ERROR_MAP_FAILED;
    Region region = {reinterpret_cast<uintptr_t>(pages) + ticket.lead_bytes, ticket.bytes, Source::Imported, context.device, pages, ticket.pages_bytes};
    region.exporter = ticket.process;
    region.exporter_offset = ticket.offset;
    *at = region.first;
    return add_region(region);
}

}  // namespace
}  // namespace standin

using namespace standin;

API cuEventCreate(CUevent* made, unsigned flags) {
    ENTER(call, During::Anything);
    bool is_shared = (flags & CU_EVENT_INTERPROCESS) != 0;
    if (made == nullptr || (is_shared && (flags & CU_EVENT_DISABLE_TIMING) == 0)) return CUDA_ERROR_INVALID_VALUE;
    auto event = std::make_unique<Event>();
    event->context = call.context;
    event->flags = flags;
    if (is_shared) {
        CUresult result = share_cell(*event);
        if (result != CUDA_SUCCESS) return result;
    } else {
        event->cell = std::make_shared<EventCell>();
    }
    state().handles.insert(event.get());
    *made = event.release();
    return CUDA_SUCCESS;
}

API cuIpcGetEventHandle(CUipcEventHandle* handle, CUevent event) {
    ENTER(call, During::Anything);
    if (handle == nullptr || !is_live(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (event->shared_index < 0 || event->is_imported) return CUDA_ERROR_INVALID_HANDLE;
    // The other process's wait is not visible here, so work must run without one.
    start_pump();
    uint64_t place = uint64_t(event->shared_index) * sizeof(EventCell);
    write(Ticket{MAGIC, getpid(), event_page().file, event->context->device, 0, PAGE_BYTES, place, sizeof(EventCell)}, handle);
    return CUDA_SUCCESS;
}

API cuIpcOpenEventHandle(CUevent* made, CUipcEventHandle handle) {
    ENTER(call, During::NoCapture);
    Ticket ticket = read(handle);
    if (made == nullptr || ticket.magic != MAGIC) return CUDA_ERROR_INVALID_VALUE;
    if (ticket.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    if (strikes(Fault::IpcOpen)) return CUDA_ERROR_MAP_FAILED;
    uint8_t* page = map(ticket);
    if (page == nullptr) return CUDA_ERROR_MAP_FAILED;
    auto event = std::make_unique<Event>();
    event->context = call.context;
    event->flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
    event->is_imported = true;
    event->cell = std::shared_ptr<EventCell>(reinterpret_cast<EventCell*>(page + ticket.lead_bytes), [page](EventCell*) { munmap(page, PAGE_BYTES); });
    // The event is recorded here and waited for in the other process.
    start_pump();
    state().handles.insert(event.get());
    *made = event.release();
    return CUDA_SUCCESS;
}

API cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr at) {
    ENTER(call, During::Anything);
    const Region* region = region_at(reinterpret_cast<void*>(at));
    if (handle == nullptr || region == nullptr || region->source != Source::Allocated) return CUDA_ERROR_INVALID_VALUE;
    const Heap& of = heap(region->device);
    uint64_t lead = region->first - reinterpret_cast<uintptr_t>(region->pages);
    write(Ticket{MAGIC, getpid(), of.file, region->device, uint64_t(region->pages - of.base), region->pages_bytes, lead, region->bytes}, handle);
    return CUDA_SUCCESS;
}

API cuIpcOpenMemHandle_v2(CUdeviceptr* at, CUipcMemHandle handle, unsigned) {
    ENTER(call, During::NoCapture);
    Ticket ticket = read(handle);
    if (at == nullptr || ticket.magic != MAGIC) return CUDA_ERROR_INVALID_VALUE;
    // A process cannot open its own memory.
    if (ticket.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    if (strikes(Fault::IpcOpen)) return CUDA_ERROR_MAP_FAILED;
    return open_memory(*call.context, ticket, at);
}

API cuIpcCloseMemHandle(CUdeviceptr at) {
    ENTER(call, During::NoCapture);
    auto* address = reinterpret_cast<void*>(at);
    Region* region = region_at(address);
    bool is_imported = region != nullptr && region->source == Source::Imported && region->first == at;
    if (!is_imported) return CUDA_ERROR_INVALID_VALUE;
    if (region->references > 1) {
        region->references--;
        return CUDA_SUCCESS;
    }
    CUresult result = drain(call, *call.context);
    region = region_at(address);
    if (region != nullptr) remove(region);
    return result;
}

enum : int {
    POINTER_CONTEXT = 1,
    POINTER_MEMORY_TYPE = 2,
    POINTER_DEVICE_POINTER = 3,
    POINTER_HOST_POINTER = 4,
    POINTER_IS_MANAGED = 8,
    POINTER_DEVICE_ORDINAL = 9,
    POINTER_RANGE_START = 11,
    POINTER_RANGE_BYTES = 12,
};

API cuPointerGetAttribute(void* value, int attribute, CUdeviceptr at) {
    ENTER(call, During::Anything);
    const Region* region = region_at(reinterpret_cast<void*>(at));
    if (value == nullptr || region == nullptr) return CUDA_ERROR_INVALID_VALUE;
    bool is_device = region->kind() == Kind::Device;
    switch (attribute) {
        case POINTER_CONTEXT: *static_cast<CUcontext*>(value) = call.context; break;
        case POINTER_MEMORY_TYPE: *static_cast<unsigned*>(value) = is_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
        case POINTER_HOST_POINTER:
            if (is_device) return CUDA_ERROR_INVALID_VALUE;
            *static_cast<CUdeviceptr*>(value) = at;
            break;
        case POINTER_DEVICE_POINTER: *static_cast<CUdeviceptr*>(value) = at; break;
        case POINTER_IS_MANAGED: *static_cast<unsigned*>(value) = 0; break;
        case POINTER_DEVICE_ORDINAL: *static_cast<int*>(value) = region->device; break;
        case POINTER_RANGE_START: *static_cast<CUdeviceptr*>(value) = region->first; break;
        case POINTER_RANGE_BYTES: *static_cast<size_t*>(value) = region->bytes; break;
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}
