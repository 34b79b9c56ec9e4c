// Partitions of a device's multiprocessors.
//
// Owns: the arithmetic of a split, and the contexts of parts.
// Never: limits concurrency by it: one core runs everything here.
// Invariant: a split gives every multiprocessor to one part; parts are multiples of the hardware's
// granularity.
#include "state.h"

namespace standin {

constexpr int RESOURCE_SM = 1;
// Two of the default four, so that a split is visible; hardware has eight.
constexpr unsigned TOGETHER = 2;

// The driver's layout: a kind, internal bytes, then a union that begins with the number.
struct Resource {
    int type;
    uint8_t internal[92];
    struct {
        unsigned count, smallest, together;
        uint8_t room[36];
    } sm;
};

struct Description {
    unsigned count;
};

struct Green {
    Context* context;
    unsigned count;
};

static Resource processors(unsigned count) {
    Resource made = {};
    made.type = count == 0 ? 0 : RESOURCE_SM;
    made.sm = {count, TOGETHER, TOGETHER, {}};
    return made;
}

}  // namespace standin

using namespace standin;

API cuDeviceGetDevResource(CUdevice, Resource* resource, int type) {
    ENTER(call, During::Anything);
    if (resource == nullptr || type != RESOURCE_SM) return CUDA_ERROR_INVALID_VALUE;
    *resource = processors(unsigned(settings().multiprocessors));
    return CUDA_SUCCESS;
}

API cuDevSmResourceSplitByCount(Resource* groups, unsigned* groups_count, const Resource* from, Resource* rest, unsigned, unsigned least) {
    ENTER(call, During::Anything);
    if (groups_count == nullptr || from == nullptr || from->type != RESOURCE_SM) return CUDA_ERROR_INVALID_VALUE;
    unsigned each = (least + TOGETHER - 1) / TOGETHER * TOGETHER, all = from->sm.count;
    if (each == 0 || each > all) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    unsigned possible = all / each;
    if (groups == nullptr) {
        *groups_count = possible;
        return CUDA_SUCCESS;
    }
    if (*groups_count > possible) *groups_count = possible;
    for (unsigned index = 0; index < *groups_count; index++) groups[index] = processors(each);
    if (rest != nullptr) *rest = processors(all - *groups_count * each);
    return CUDA_SUCCESS;
}

API cuDevResourceGenerateDesc(Description** made, const Resource* resources, unsigned resources_count) {
    ENTER(call, During::Anything);
    if (made == nullptr || resources == nullptr || resources_count != 1) return CUDA_ERROR_INVALID_VALUE;
    if (resources->type != RESOURCE_SM || resources->sm.count == 0) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    *made = new Description{resources->sm.count};
    return CUDA_SUCCESS;
}

API cuGreenCtxCreate(Green** made, const Description* description, CUdevice, unsigned flags) {
    ENTER(call, During::Anything);
    if (made == nullptr || description == nullptr || flags != 1) return CUDA_ERROR_INVALID_VALUE;
    *made = new Green{call.context, description->count};
    state().handles.insert(*made);
    count("partition");
    return CUDA_SUCCESS;
}

API cuGreenCtxDestroy(Green* green) {
    ENTER(call, During::Anything);
    if (!is_live(green)) return CUDA_ERROR_INVALID_HANDLE;
    state().handles.erase(green);
    delete green;
    return CUDA_SUCCESS;
}

API cuGreenCtxStreamCreate(CUstream* made, Green* green, unsigned flags, int priority) {
    ENTER(call, During::Anything);
    if (made == nullptr || !is_live(green) || (flags & CU_STREAM_NON_BLOCKING) == 0) return CUDA_ERROR_INVALID_VALUE;
    *made = add_stream(*green->context, flags, priority);
    state().handles.insert(*made);
    count("partitioned stream");
    return CUDA_SUCCESS;
}
