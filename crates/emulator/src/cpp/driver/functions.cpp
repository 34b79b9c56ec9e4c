// Kernels and launches of the driver API. See functions.h.
#include "functions.h"

#include <string.h>

#include <algorithm>

#include "device.h"
#include "faults.h"
#include "memory.h"

namespace standin {
namespace {

constexpr uint32_t DYNAMIC_SHARED_DEFAULT = 48 * 1024;
constexpr uint32_t GRID_YZ_MAX = 65535;

enum : int {
    ATTRIBUTE_THREADS_MAX = 0,
    ATTRIBUTE_SHARED_STATIC = 1,
    ATTRIBUTE_CONSTANT = 2,
    ATTRIBUTE_LOCAL = 3,
    ATTRIBUTE_REGISTERS = 4,
    ATTRIBUTE_PTX_VERSION = 5,
    ATTRIBUTE_BINARY_VERSION = 6,
    ATTRIBUTE_CACHE_MODE = 7,
    ATTRIBUTE_DYNAMIC_SHARED_MAX = 8,
    ATTRIBUTE_CARVEOUT = 9,
};

enum : unsigned { LAUNCH_COOPERATIVE = 2, LAUNCH_CLUSTER = 4 };

CUresult result_of(emulator::Outcome outcome) {
    switch (outcome) {
        case emulator::Outcome::Done: return CUDA_SUCCESS;
        case emulator::Outcome::Failed: return CUDA_ERROR_LAUNCH_FAILED;
        case emulator::Outcome::IllegalAddress: return CUDA_ERROR_ILLEGAL_ADDRESS;
        case emulator::Outcome::Misaligned: return CUDA_ERROR_MISALIGNED_ADDRESS;
    }
    return CUDA_ERROR_UNKNOWN;
}

uint64_t volume(const emulator::Index& of) { return uint64_t(of.x) * of.y * of.z; }

CUresult check_shape(const Function& function, const LaunchShape& shape) {
    const char* name = function.kernel->name;
    if (volume(shape.grid) == 0 || volume(shape.block) == 0 || shape.grid.y > GRID_YZ_MAX || shape.grid.z > GRID_YZ_MAX) {
        say("stand-in: kernel %s: a grid of %u x %u x %u blocks of %u x %u x %u threads", name, shape.grid.x, shape.grid.y, shape.grid.z,
            shape.block.x, shape.block.y, shape.block.z);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (volume(shape.block) > function.kernel->threads_max) {
        say("stand-in: kernel %s: %zu threads, compiled for %u", name, size_t(volume(shape.block)), function.kernel->threads_max);
        return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    }
    if (shape.shared_bytes > function.dynamic_shared_max) {
        say("stand-in: kernel %s: %u bytes of dynamic shared memory, allowed are %u", name, shape.shared_bytes, function.dynamic_shared_max);
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult launch(CUfunction function, const LaunchShape& shape, CUstream stream, void** params) {
    ENTER(call, During::Anything);
    std::shared_ptr<KernelWork> made;
    CUresult result = make_launch(function, shape, params, &made);
    return result == CUDA_SUCCESS ? submit(call, stream, std::move(made)) : result;
}

}  // namespace

CUresult KernelWork::begin(Context& context) const {
    count("launch");
    state().counts["block"] += volume(shape.grid);
    const char* name = kernel->name;
    if (strikes(Fault::Launch, name)) return CUDA_ERROR_LAUNCH_FAILED;
    constexpr int UNLISTED = 4711;
    if (strikes(Fault::Unlisted)) return CUresult(UNLISTED);
    for (size_t offset = 0; offset + 8 <= args.size(); offset += 8) {
        uint64_t word;
        memcpy(&word, args.data() + offset, sizeof word);
        const char* objection = objection_to(context, word);
        if (objection == nullptr) continue;
        say("stand-in: kernel %s: the argument's word at byte %zu (%#llx) %s", name, offset, static_cast<unsigned long long>(word), objection);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    return CUDA_SUCCESS;
}

CUresult KernelWork::run(uint64_t seed) const {
    emulator::Launch launch = {kernel->name, kernel->run, args.data(), shape.grid, shape.block, shape.shared_bytes, seed};
    CUresult result = result_of(emulator::launch(launch));
    if (result != CUDA_SUCCESS) return result;
    std::lock_guard<std::mutex> held(state().mutex);
    return tails_are_intact(kernel->name) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

CUresult make_launch(CUfunction function, const LaunchShape& shape, void** params, std::shared_ptr<KernelWork>* made) {
    if (!is_live(function)) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = check_shape(*function, shape);
    if (result != CUDA_SUCCESS) return result;
    if (params == nullptr || params[0] == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto* first = static_cast<const uint8_t*>(params[0]);
    *made = std::make_shared<KernelWork>();
    (*made)->function = function;
    (*made)->kernel = function->kernel;
    (*made)->shape = shape;
    (*made)->args.assign(first, first + function->kernel->args_bytes);
    return CUDA_SUCCESS;
}

}  // namespace standin

using namespace standin;

// Reads the beginning of the image in whole words, as the driver does; the kernels are this
// library's own. Accepts a fatbin, machine code, or the stand-in compiler's output.
static bool is_image(const void* image) {
    constexpr uint32_t FATBIN = 0xba55ed50, ELF = 0x464c457f;
    constexpr char OWN[] = "stand-in code of ";
    if (reinterpret_cast<uintptr_t>(image) % 8 != 0) return false;
    uint32_t first;
    memcpy(&first, image, sizeof first);
    return first == FATBIN || first == ELF || strncmp(static_cast<const char*>(image), OWN, sizeof OWN - 1) == 0;
}

API cuModuleLoadData(CUmodule* made, const void* image) {
    ENTER(call, During::NoCapture);
    if (made == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (strikes(Fault::Module)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    if (!is_image(image)) {
        say("stand-in: what begins at %p is no kernels, or does not begin on 8 bytes", image);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    *made = new Module{call.context, {}};
    state().handles.insert(*made);
    return CUDA_SUCCESS;
}

API cuModuleLoadDataEx(CUmodule* made, const void* image, unsigned, void*, void**) { return cuModuleLoadData(made, image); }

API cuModuleUnload(CUmodule module) {
    ENTER(call, During::NoCapture);
    if (!is_live(module)) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = drain(call, *call.context);
    for (auto& [name, function] : module->functions) state().handles.erase(function.get());
    state().handles.erase(module);
    delete module;
    return result;
}

API cuModuleGetFunction(CUfunction* found, CUmodule module, const char* name) {
    ENTER(call, During::Anything);
    if (!is_live(module)) return CUDA_ERROR_INVALID_HANDLE;
    const emulator::Kernel* kernel = emulator::find_kernel(name);
    if (kernel == nullptr) return CUDA_ERROR_NOT_FOUND;
    auto& function = module->functions[name];
    if (function == nullptr) function.reset(new Function{kernel, module, DYNAMIC_SHARED_DEFAULT});
    state().handles.insert(function.get());
    *found = function.get();
    return CUDA_SUCCESS;
}

API cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* bytes) {
    ENTER(call, During::Anything);
    if (!is_live(function)) return CUDA_ERROR_INVALID_HANDLE;
    if (index != 0 || offset == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *offset = 0;
    if (bytes != nullptr) *bytes = function->kernel->args_bytes;
    return CUDA_SUCCESS;
}

API cuFuncGetName(const char** name, CUfunction function) {
    ENTER(call, During::Anything);
    if (!is_live(function)) return CUDA_ERROR_INVALID_HANDLE;
    *name = function->kernel->name;
    return CUDA_SUCCESS;
}

API cuFuncGetAttribute(int* value, int attribute, CUfunction function) {
    ENTER(call, During::Anything);
    if (!is_live(function)) return CUDA_ERROR_INVALID_HANDLE;
    int version = settings().capability_major * 10 + settings().capability_minor;
    switch (attribute) {
        case ATTRIBUTE_THREADS_MAX: *value = int(function->kernel->threads_max); break;
        case ATTRIBUTE_REGISTERS: *value = int(function->kernel->registers_max); break;
        case ATTRIBUTE_PTX_VERSION: *value = 80; break;
        case ATTRIBUTE_BINARY_VERSION: *value = version; break;
        case ATTRIBUTE_DYNAMIC_SHARED_MAX: *value = int(function->dynamic_shared_max); break;
        case ATTRIBUTE_CARVEOUT: *value = -1; break;
        case ATTRIBUTE_SHARED_STATIC:
        case ATTRIBUTE_CONSTANT:
        case ATTRIBUTE_LOCAL:
        case ATTRIBUTE_CACHE_MODE: *value = 0; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

API cuFuncSetAttribute(CUfunction function, int attribute, int value) {
    ENTER(call, During::Anything);
    if (!is_live(function)) return CUDA_ERROR_INVALID_HANDLE;
    if (attribute == ATTRIBUTE_CARVEOUT) return value < -1 || value > 100 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (attribute != ATTRIBUTE_DYNAMIC_SHARED_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (value < 0 || value > shared_bytes_optin_max()) {
        say("stand-in: kernel %s asks for %d bytes of dynamic shared memory, a block of this device can have %d", function->kernel->name, value,
            shared_bytes_optin_max());
        return CUDA_ERROR_INVALID_VALUE;
    }
    function->dynamic_shared_max = uint32_t(value);
    return CUDA_SUCCESS;
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads, size_t shared_bytes) {
    ENTER(call, During::Anything);
    if (!is_live(function)) return CUDA_ERROR_INVALID_HANDLE;
    if (threads <= 0) return CUDA_ERROR_INVALID_VALUE;
    // The system takes a kilobyte of shared memory for each block.
    constexpr int THREADS = 2048, REGISTERS = 65536, BLOCKS = 32, SYSTEM_BYTES = 1024;
    int by_threads = THREADS / threads;
    int by_registers = REGISTERS / int(function->kernel->registers_max * unsigned(threads));
    int by_shared = (shared_bytes_optin_max() + SYSTEM_BYTES) / int(shared_bytes + SYSTEM_BYTES);
    *blocks = std::min(std::min(by_threads, by_registers), std::min(by_shared, BLOCKS));
    return CUDA_SUCCESS;
}

API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function, int threads, size_t shared_bytes, unsigned) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared_bytes);
}

API cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                   unsigned shared_bytes, CUstream stream, void** params, void** extra) {
    if (extra != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    return launch(function, {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes}, stream, params);
}

API cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
    if (config == nullptr || extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
    const CUlaunchConfig& the = *config;
    for (unsigned index = 0; index < the.numAttrs; index++) {
        const CUlaunchAttribute& attribute = the.attrs[index];
        bool is_cluster = attribute.id == LAUNCH_CLUSTER && attribute.cluster[0] * attribute.cluster[1] * attribute.cluster[2] > 1;
        bool is_cooperative = attribute.id == LAUNCH_COOPERATIVE && attribute.value != 0;
        // Blocks run one after another, so cooperating blocks would wait for ever.
        if (is_cluster || is_cooperative) return CUDA_ERROR_NOT_SUPPORTED;
    }
    return launch(function, {{the.gridDimX, the.gridDimY, the.gridDimZ}, {the.blockDimX, the.blockDimY, the.blockDimZ}, the.sharedMemBytes},
                  the.hStream, params);
}
