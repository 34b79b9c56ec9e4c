// Names of results.
//
// Owns: the text of each result that the stand-in gives, and of those that programs compare with.
// Never: depends on a state.
// Invariant: an unknown number has no name.
#include "cuda.h"

namespace {

struct Known {
    CUresult result;
    const char* name;
    const char* text;
};

#define KNOWN(result, text) \
    { result, #result, text }

const Known ALL[] = {
    KNOWN(CUDA_SUCCESS, "no error"),
    KNOWN(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    KNOWN(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    KNOWN(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    KNOWN(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    KNOWN(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    KNOWN(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    KNOWN(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    KNOWN(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
    KNOWN(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    KNOWN(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    KNOWN(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    KNOWN(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    KNOWN(CUDA_ERROR_NOT_READY, "device not ready"),
    KNOWN(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    KNOWN(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    KNOWN(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    KNOWN(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    KNOWN(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    KNOWN(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    KNOWN(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address"),
    KNOWN(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    KNOWN(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    KNOWN(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    KNOWN(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    KNOWN(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    KNOWN(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    KNOWN(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    KNOWN(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    KNOWN(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing blocking stream"),
    KNOWN(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    KNOWN(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "attempt to terminate a thread-local capture sequence from another thread"),
    KNOWN(CUDA_ERROR_INVALID_RESOURCE_TYPE, "invalid resource type"),
    KNOWN(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, "invalid resource configuration"),
    KNOWN(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "the graph update was not performed"),
    KNOWN(CUDA_ERROR_UNKNOWN, "unknown error"),
};

const Known* find(CUresult result) {
    for (const Known& known : ALL) {
        if (known.result == result) return &known;
    }
    return nullptr;
}

}  // namespace

API cuGetErrorName(CUresult result, const char** name) {
    const Known* known = find(result);
    *name = known == nullptr ? nullptr : known->name;
    return known == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API cuGetErrorString(CUresult result, const char** text) {
    const Known* known = find(result);
    *text = known == nullptr ? nullptr : known->text;
    return known == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
