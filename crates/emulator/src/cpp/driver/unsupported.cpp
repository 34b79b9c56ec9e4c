// Calls that this driver answers, but does nothing for.
//
// Owns: the names of what a program may ask for and must be able to do without: a missing name would end it.
// Never: looks at an argument; whatever they are, the answer is the same.
// Invariant: a name here is nowhere else.
#include "cuda.h"

#define UNSUPPORTED(name) \
    API name(...) { return CUDA_ERROR_NOT_SUPPORTED; }

UNSUPPORTED(cuCtxFromGreenCtx)

// Memory by other ways than allocating it.
UNSUPPORTED(cuMemAllocManaged)
UNSUPPORTED(cuMemAddressReserve)
UNSUPPORTED(cuMemAddressFree)
UNSUPPORTED(cuMemCreate)
UNSUPPORTED(cuMemRelease)
UNSUPPORTED(cuMemMap)
UNSUPPORTED(cuMemUnmap)
UNSUPPORTED(cuMemSetAccess)
UNSUPPORTED(cuMemGetAllocationGranularity)
UNSUPPORTED(cuMemExportToShareableHandle)
UNSUPPORTED(cuMemImportFromShareableHandle)
UNSUPPORTED(cuMemGetHandleForAddressRange)
UNSUPPORTED(cuMemPoolCreate)
UNSUPPORTED(cuMemPoolSetAttribute)
UNSUPPORTED(cuMemAllocFromPoolAsync)
UNSUPPORTED(cuDeviceGetDefaultMemPool)
UNSUPPORTED(cuMemcpyBatchAsync_v2)

// What orders work by memory, runs blocks together, or describes tensors.
UNSUPPORTED(cuStreamWaitValue32_v2)
UNSUPPORTED(cuStreamWaitValue64_v2)
UNSUPPORTED(cuStreamWriteValue32_v2)
UNSUPPORTED(cuStreamWriteValue64_v2)
UNSUPPORTED(cuLaunchCooperativeKernel)
UNSUPPORTED(cuTensorMapEncodeTiled)

// Contexts and modules of other kinds.
UNSUPPORTED(cuCtxCreate_v4)
UNSUPPORTED(cuLibraryLoadData)
UNSUPPORTED(cuStreamBeginCaptureToGraph)
