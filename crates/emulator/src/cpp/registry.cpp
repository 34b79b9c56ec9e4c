// The kernels of this library, by name. See registry.h.
#include "registry.h"

#include <string.h>

namespace emulator {
namespace {

const Kernel* first = nullptr;

}  // namespace

void add_kernel(Kernel* kernel) {
    kernel->next = first;
    first = kernel;
}

const Kernel* find_kernel(const char* name) {
    for (const Kernel* kernel = first; kernel != nullptr; kernel = kernel->next) {
        if (strcmp(kernel->name, name) == 0) return kernel;
    }
    return nullptr;
}

}  // namespace emulator
