// Calls that this driver answers without doing anything.
//
// Owns: the names that a program may look up and can do without: a missing name would end it.
// Never: looks at an argument; the answer is always the same.
// Invariant: a name here is defined nowhere else.
#include "cuda.h"

#define UNSUPPORTED(name) \
    API name(...) { return CUDA_ERROR_NOT_SUPPORTED; }

UNSUPPORTED(cuCtxFromGreenCtx)

// Other kinds of memory.
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

// Memory operations in streams, cooperative blocks, and tensor maps.
UNSUPPORTED(cuStreamWaitValue32_v2)
UNSUPPORTED(cuStreamWaitValue64_v2)
UNSUPPORTED(cuStreamWriteValue32_v2)
UNSUPPORTED(cuStreamWriteValue64_v2)
UNSUPPORTED(cuLaunchCooperativeKernel)
UNSUPPORTED(cuTensorMapEncodeTiled)

// Other kinds of contexts and modules.
UNSUPPORTED(cuCtxCreate_v4)
UNSUPPORTED(cuLibraryLoadData)
UNSUPPORTED(cuStreamBeginCaptureToGraph)
