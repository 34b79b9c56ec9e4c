// Devices and their contexts. See device.h.
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "memory.h"

namespace standin {
namespace {

constexpr int DRIVER_VERSION = 13000;

struct Figure {
    int attribute, value;
};

// Figures of an H100. `figure_of` has those that depend on the environment.
const Figure FIGURES[] = {
    {1, 1024},     {2, 1024},       {3, 1024},    {4, 64},       {5, 2147483647}, {6, 65535},   {7, 65535},   {8, 49152},
    {9, 65536},    {10, 32},        {11, 2147483647}, {12, 65536}, {13, 1980000}, {14, 512},    {15, 1},      {17, 0},
    {18, 0},       {19, 1},         {20, 0},      {31, 1},       {32, 1},         {34, 0},      {35, 0},      {36, 2619000},
    {37, 5120},    {38, 52428800},  {39, 2048},   {40, 3},       {41, 1},         {50, 0},      {78, 1},      {79, 1},
    {80, 1},       {82, 65536},     {83, 1},      {84, 0},       {85, 0},         {86, 0},      {87, 2},      {88, 0},
    {89, 1},       {90, 1},         {91, 1},      {92, 0},       {93, 0},         {94, 0},      {95, 0},      {96, 0},
    {98, 0},       {99, 1},         {100, 0},     {101, 0},      {102, 0},        {103, 0},     {104, 0},     {105, 0},
    {106, 32},     {107, 0},        {108, 32768000}, {109, 134217728}, {110, 0},  {111, 1024},  {112, 0},     {113, 0},
    {114, 0},      {115, 1},        {116, 0},     {117, 0},      {118, 0},        {119, 0},
};

enum : int {
    ATTRIBUTE_MULTIPROCESSORS = 16,
    ATTRIBUTE_PCI_BUS = 33,
    ATTRIBUTE_CAPABILITY_MAJOR = 75,
    ATTRIBUTE_CAPABILITY_MINOR = 76,
    ATTRIBUTE_SHARED_PER_MULTIPROCESSOR = 81,
    ATTRIBUTE_SHARED_OPTIN = 97,
    ATTRIBUTE_MPS = 133,
};

// Kilobytes of shared memory of a multiprocessor; a block can have all but one of them.
int shared_kilobytes() {
    int capability = settings().capability_major * 10 + settings().capability_minor;
    switch (capability) {
        case 80:
        case 87: return 164;
        case 86:
        case 89:
        case 120: return 100;
        default: return 228;
    }
}

CUresult figure_of(int attribute, CUdevice device, int* value) {
    switch (attribute) {
        case ATTRIBUTE_MULTIPROCESSORS: *value = settings().multiprocessors; return CUDA_SUCCESS;
        case ATTRIBUTE_PCI_BUS: *value = device + 1; return CUDA_SUCCESS;
        case ATTRIBUTE_CAPABILITY_MAJOR: *value = settings().capability_major; return CUDA_SUCCESS;
        case ATTRIBUTE_CAPABILITY_MINOR: *value = settings().capability_minor; return CUDA_SUCCESS;
        case ATTRIBUTE_SHARED_PER_MULTIPROCESSOR: *value = shared_kilobytes() * 1024; return CUDA_SUCCESS;
        case ATTRIBUTE_SHARED_OPTIN: *value = shared_bytes_optin_max(); return CUDA_SUCCESS;
        case ATTRIBUTE_MPS: *value = settings().is_mps; return CUDA_SUCCESS;
        default: break;
    }
    for (const Figure& figure : FIGURES) {
        if (figure.attribute != attribute) continue;
        *value = figure.value;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

bool is_device(CUdevice device) { return device >= 0 && device < settings().devices; }

// Calls about devices need no context, and succeed even after an error of one.
CUresult check_device(CUdevice device) {
    if (!state().is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

Context& primary(CUdevice device) {
    auto& all = state().contexts;
    while (int(all.size()) < settings().devices) {
        auto made = std::make_unique<Context>();
        made->device = int(all.size());
        all.push_back(std::move(made));
    }
    return *all[size_t(device)];
}

void begin_context(Context& context) {
    context.broken = CUDA_SUCCESS;
    context.peers.clear();
    context.legacy = add_stream(context, 0, 0);
    context.legacy->is_legacy = true;
    context.per_thread = add_stream(context, 0, 0);
    state().handles.insert(&context);
}

// Ends the context with everything in it; work waiting in its streams never runs.
void end_context(Context& context) {
    auto& all = state().streams;
    for (size_t index = 0; index < all.size();) {
        if (all[index]->context != &context) {
            index++;
            continue;
        }
        state().handles.erase(all[index].get());
        all.erase(all.begin() + ptrdiff_t(index));
    }
    remove_all_of(context.device);
    context.legacy = context.per_thread = nullptr;
    context.broken = CUDA_SUCCESS;
    state().handles.erase(&context);
}

void wait_for_runner(std::unique_lock<std::mutex>& lock) {
    state().changed.wait(lock, [] { return !state().is_running; });
}

// The context that is current in this thread, in any state; null if there is none.
Context*& current() { return state().current[std::this_thread::get_id()]; }

}  // namespace

int shared_bytes_optin_max() { return (shared_kilobytes() - 1) * 1024; }

}  // namespace standin

using namespace standin;
using Held = std::lock_guard<std::mutex>;

API cuInit(unsigned flags) {
    Held held(state().mutex);
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (settings().devices == 0) return CUDA_ERROR_NO_DEVICE;
    state().is_initialized = true;
    return CUDA_SUCCESS;
}

API cuDriverGetVersion(int* version) {
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}

API cuDeviceGetCount(int* count_of) {
    Held held(state().mutex);
    if (!state().is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    *count_of = settings().devices;
    return CUDA_SUCCESS;
}

API cuDeviceGet(CUdevice* device, int ordinal) {
    Held held(state().mutex);
    CUresult result = check_device(ordinal);
    if (result == CUDA_SUCCESS) *device = ordinal;
    return result;
}

API cuDeviceGetName(char* name, int bytes, CUdevice device) {
    Held held(state().mutex);
    CUresult result = check_device(device);
    if (result == CUDA_SUCCESS) snprintf(name, size_t(bytes), "Cleave stand-in %d", device);
    return result;
}

// Another process has another device by its memory, but the same one by name.
API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
    Held held(state().mutex);
    CUresult result = check_device(device);
    if (result != CUDA_SUCCESS) return result;
    memcpy(uuid->bytes, "cleave-standin-0", sizeof uuid->bytes);
    uuid->bytes[15] = char('0' + device);
    return CUDA_SUCCESS;
}

API cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

API cuDeviceGetPCIBusId(char* name, int bytes, CUdevice device) {
    Held held(state().mutex);
    CUresult result = check_device(device);
    if (result == CUDA_SUCCESS) snprintf(name, size_t(bytes), "0000:%02x:00.0", device + 1);
    return result;
}

API cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    Held held(state().mutex);
    CUresult result = check_device(device);
    if (result == CUDA_SUCCESS) *bytes = settings().memory_bytes;
    return result;
}

API cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    Held held(state().mutex);
    CUresult result = check_device(device);
    return result == CUDA_SUCCESS ? figure_of(attribute, device, value) : result;
}

API cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
    Held held(state().mutex);
    CUresult result = check_device(device);
    if (result == CUDA_SUCCESS) result = check_device(peer);
    if (result == CUDA_SUCCESS) *can = device != peer;
    return result;
}

API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    Held held(state().mutex);
    CUresult result = check_device(device);
    if (result != CUDA_SUCCESS) return result;
    Context& the = primary(device);
    if (the.retained++ == 0) begin_context(the);
    *context = &the;
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    std::unique_lock<std::mutex> lock(state().mutex);
    CUresult result = check_device(device);
    if (result != CUDA_SUCCESS) return result;
    wait_for_runner(lock);
    Context& the = primary(device);
    if (the.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--the.retained == 0) end_context(the);
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxReset_v2(CUdevice device) {
    std::unique_lock<std::mutex> lock(state().mutex);
    CUresult result = check_device(device);
    if (result != CUDA_SUCCESS) return result;
    wait_for_runner(lock);
    Context& the = primary(device);
    if (the.retained == 0) return CUDA_SUCCESS;
    end_context(the);
    begin_context(the);
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
    Held held(state().mutex);
    CUresult result = check_device(device);
    if (result == CUDA_SUCCESS) primary(device).flags = flags;
    return result;
}

API cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) {
    Held held(state().mutex);
    CUresult result = check_device(device);
    if (result != CUDA_SUCCESS) return result;
    *flags = primary(device).flags;
    *is_active = primary(device).retained != 0;
    return CUDA_SUCCESS;
}

API cuCtxSetCurrent(CUcontext context) {
    Held held(state().mutex);
    if (!state().is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (context != nullptr && !is_live(context)) return CUDA_ERROR_INVALID_CONTEXT;
    current() = context;
    return CUDA_SUCCESS;
}

API cuCtxGetCurrent(CUcontext* context) {
    Held held(state().mutex);
    if (!state().is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    *context = current();
    return CUDA_SUCCESS;
}

API cuCtxGetDevice(CUdevice* device) {
    Held held(state().mutex);
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current()->device;
    return CUDA_SUCCESS;
}

API cuCtxGetFlags(unsigned* flags) {
    Held held(state().mutex);
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *flags = current()->flags;
    return CUDA_SUCCESS;
}

API cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    ENTER(call, During::Anything);
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (!is_live(peer) || peer == call.context) return CUDA_ERROR_INVALID_CONTEXT;
    count("peer");
    return call.context->peers.insert(peer->device).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

API cuCtxDisablePeerAccess(CUcontext peer) {
    ENTER(call, During::Anything);
    if (!is_live(peer)) return CUDA_ERROR_INVALID_CONTEXT;
    return call.context->peers.erase(peer->device) != 0 ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

// Finds the name itself, or its newest version.
API cuGetProcAddress_v2(const char* name, void** found, int, uint64_t, int* status) {
    enum : int { FOUND = 0, MISSING = 1 };
    Dl_info here;
    *found = nullptr;
    void* library = dladdr(reinterpret_cast<void*>(&cuInit), &here) != 0 ? dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr;
    for (const char* version : {"_v3", "_v2", ""}) {
        if (library != nullptr && *found == nullptr) *found = dlsym(library, (std::string(name) + version).c_str());
    }
    if (library != nullptr) dlclose(library);
    if (status != nullptr) *status = *found == nullptr ? MISSING : FOUND;
    return *found == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
