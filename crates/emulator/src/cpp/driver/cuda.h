// Numbers and layouts of the driver API, as far as the stand-in has them (CUDA 13.0).
//
// Owns: definitions that the interface fixes.
// Never: includes NVIDIA's headers, which are not on the machines that build this.
// Invariant: structs have the layout of the interface.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace standin {
struct Context;
struct Event;
struct Function;
struct Graph;
struct GraphExec;
struct Module;
struct Node;
struct Stream;
}  // namespace standin

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = standin::Context*;
using CUevent = standin::Event*;
using CUfunction = standin::Function*;
using CUgraph = standin::Graph*;
using CUgraphExec = standin::GraphExec*;
using CUgraphNode = standin::Node*;
using CUmodule = standin::Module*;
// The numbers one, two and null are streams too; see streams.cpp.
using CUstream = standin::Stream*;

enum CUresult : int {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_MAP_FAILED = 205,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_MISALIGNED_ADDRESS = 716,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910,
    CUDA_ERROR_INVALID_RESOURCE_TYPE = 914,
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915,
    CUDA_ERROR_UNKNOWN = 999,
};

enum : unsigned {
    CU_EVENT_DISABLE_TIMING = 2,
    CU_EVENT_INTERPROCESS = 4,
    CU_STREAM_NON_BLOCKING = 1,
    CU_MEMORYTYPE_HOST = 1,
    CU_MEMORYTYPE_DEVICE = 2,
    CU_MEMORYTYPE_UNIFIED = 4,
};

enum CUstreamCaptureStatus : int { CAPTURE_STATUS_NONE = 0, CAPTURE_STATUS_ACTIVE = 1, CAPTURE_STATUS_INVALIDATED = 2 };
enum CUstreamCaptureMode : int { CAPTURE_MODE_GLOBAL = 0, CAPTURE_MODE_THREAD_LOCAL = 1, CAPTURE_MODE_RELAXED = 2 };
enum CUgraphNodeType : int { NODE_TYPE_KERNEL = 0, NODE_TYPE_MEMCPY = 1, NODE_TYPE_MEMSET = 2, NODE_TYPE_HOST = 3 };

struct CUuuid {
    char bytes[16];
};

struct CUDA_KERNEL_NODE_PARAMS {
    CUfunction func;
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    void** kernelParams;
    void** extra;
    void* kern;
    CUcontext ctx;
};

struct CUlaunchAttribute {
    unsigned id;
    char pad[4];
    union {
        char bytes[64];
        unsigned cluster[3];
        int value;
    };
};

struct CUlaunchConfig {
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    CUstream hStream;
    CUlaunchAttribute* attrs;
    unsigned numAttrs;
};

struct CUDA_MEMCPY2D {
    size_t srcXInBytes, srcY;
    unsigned srcMemoryType;
    const void* srcHost;
    CUdeviceptr srcDevice;
    void* srcArray;
    size_t srcPitch, dstXInBytes, dstY;
    unsigned dstMemoryType;
    void* dstHost;
    CUdeviceptr dstDevice;
    void* dstArray;
    size_t dstPitch, WidthInBytes, Height;
};

struct CUgraphExecUpdateResultInfo {
    int result;
    CUgraphNode errorNode, errorFromNode;
};

struct CUDA_GRAPH_INSTANTIATE_PARAMS {
    uint64_t flags;
    CUstream hUploadStream;
    CUgraphNode hErrNode_out;
    int result_out;
};

struct CUipcMemHandle {
    char reserved[64];
};

struct CUipcEventHandle {
    char reserved[64];
};

#define API extern "C" __attribute__((visibility("default"))) CUresult
