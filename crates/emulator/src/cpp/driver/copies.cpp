// Copies and fills.
//
// Owns: which memory a copy may touch, and when its host side is read.
// Never: copies past an allocation's end, or between kinds of memory that the call does not name.
// Invariant: an asynchronous copy reads and writes pinned host memory when it runs. Pageable memory
// is read at the call, and written before the call returns, as with a real driver.
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "faults.h"
#include "memory.h"

namespace standin {
namespace {

// Rows of `width` bytes; one row for a plain copy.
struct Side {
    Kind kind;
    uint8_t* first;
    size_t pitch;
};

struct Shape {
    size_t width, height;
    size_t span(size_t pitch) const { return height == 0 ? 0 : (height - 1) * pitch + width; }
};

struct CopyWork : Work {
    Side to, from;
    Shape shape;
    // Content of pageable memory at the call, row after row.
    std::vector<uint8_t> staged;
    // The process that a planned fault waits for; 0 for none.
    mutable int awaited = 0;

    CUgraphNodeType type() const override { return NODE_TYPE_MEMCPY; }

    CUresult begin(Context&) const override {
        count("copy");
        for (const Side* side : {&to, &from}) {
            bool is_checked = side->kind == Kind::Device;
            if (is_checked && !covers(Kind::Device, side->first, shape.span(side->pitch))) {
                say("stand-in: a copy of %zu bytes at %p, which was freed while the copy waited in its stream", shape.span(side->pitch), static_cast<void*>(side->first));
                return CUDA_ERROR_ILLEGAL_ADDRESS;
            }
        }
        const Region* region = region_at(to.first);
        if (region != nullptr && region->source == Source::Imported) {
            if (strikes(Fault::IpcCopy)) return CUDA_ERROR_ILLEGAL_ADDRESS;
            if (strikes(Fault::IpcWait)) awaited = region->exporter;
        }
        return strikes(Fault::Copy) ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
    }

    CUresult run(uint64_t) const override {
        if (awaited != 0) {
            memmove(to.first, from.first, shape.width / 2);
            say("stand-in: a copy waits for the end of process %d", awaited);
            while (kill(awaited, 0) == 0) usleep(1000);
        }
        for (size_t row = 0; row < shape.height; row++) {
            const uint8_t* source = staged.empty() ? from.first + row * from.pitch : staged.data() + row * shape.width;
            memmove(to.first + row * to.pitch, source, shape.width);
        }
        return CUDA_SUCCESS;
    }
};

struct FillWork : Work {
    uint8_t* to;
    uint32_t value;
    size_t width, count_of;

    CUgraphNodeType type() const override { return NODE_TYPE_MEMSET; }
    CUresult begin(Context&) const override {
        count("fill");
        return covers(Kind::Device, to, width * count_of) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    CUresult run(uint64_t) const override {
        if (width == 1) memset(to, int(value), count_of);
        for (size_t index = 0; width > 1 && index < count_of; index++) memcpy(to + index * width, &value, width);
        return CUDA_SUCCESS;
    }
};

CUresult check_side(Side& side, const Shape& shape, const char* what) {
    size_t span = shape.span(side.pitch);
    if (side.kind == Kind::Device) {
        if (covers(Kind::Device, side.first, span)) return CUDA_SUCCESS;
        const Region* region = region_at(side.first);
        say("stand-in: %s of a copy: %zu bytes at %p are not all in one allocation (it has %zu)", what, span,
            static_cast<void*>(side.first), region == nullptr ? size_t(0) : region->bytes);
        return CUDA_ERROR_INVALID_VALUE;
    }
    side.kind = kind_of(side.first);
    if (side.kind == Kind::Device || (side.kind == Kind::Pinned && !covers(Kind::Pinned, side.first, span))) {
        say("stand-in: %s of a copy: %zu bytes at %p are not (all) host memory", what, span, static_cast<void*>(side.first));
        return CUDA_ERROR_INVALID_VALUE;
    }
    return side.first == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult wait_until_empty(Call& call, Stream& stream) {
    if (run_until(call.lock, [&] { return stream.queue.empty(); }) == Until::Never) return CUDA_ERROR_UNKNOWN;
    return call.context->broken;
}

enum class When { Now, InStream };

CUresult copy(Call& call, CopyWork made, When when, CUstream handle) {
    if (made.shape.width == 0 || made.shape.height == 0) return CUDA_SUCCESS;
    CUresult result = check_side(made.to, made.shape, "target");
    if (result == CUDA_SUCCESS) result = check_side(made.from, made.shape, "source");
    if (result != CUDA_SUCCESS) return result;
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    bool is_pageable = made.to.kind == Kind::Pageable || made.from.kind == Kind::Pageable;
    if (is_pageable && stream->capture != nullptr) {
        say("stand-in: a copy from or to pageable memory was captured; the graph would read it whenever it runs");
        break_captures();
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (made.from.kind == Kind::Pageable) {
        for (size_t row = 0; row < made.shape.height; row++) {
            const uint8_t* first = made.from.first + row * made.from.pitch;
            made.staged.insert(made.staged.end(), first, first + made.shape.width);
        }
    }
    bool is_waited_for = when == When::Now || made.to.kind == Kind::Pageable;
    if (is_waited_for) count("wait");
    result = submit(call, handle, std::make_shared<CopyWork>(std::move(made)));
    return result == CUDA_SUCCESS && is_waited_for ? wait_until_empty(call, *stream) : result;
}

CopyWork plain(Side to, Side from, size_t bytes) {
    CopyWork made;
    made.to = to;
    made.from = from;
    made.shape = {bytes, 1};
    return made;
}

Side device(CUdeviceptr at) { return {Kind::Device, reinterpret_cast<uint8_t*>(at), 0}; }
Side host(const void* at) { return {Kind::Pageable, static_cast<uint8_t*>(const_cast<void*>(at)), 0}; }
// For calls that derive the kind of memory from the address.
Side either(CUdeviceptr at) { return {kind_of(reinterpret_cast<void*>(at)), reinterpret_cast<uint8_t*>(at), 0}; }

CUresult fill(Call& call, CUdeviceptr at, uint32_t value, size_t width, size_t count_of, CUstream handle, When when) {
    if (count_of == 0) return CUDA_SUCCESS;
    auto made = std::make_shared<FillWork>();
    made->to = reinterpret_cast<uint8_t*>(at);
    made->value = value;
    made->width = width;
    made->count_of = count_of;
    if (at % width != 0 || !covers(Kind::Device, made->to, width * count_of)) {
        say("stand-in: a fill of %zu bytes at %#llx, which are not all in one allocation", width * count_of, at);
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult result = submit(call, handle, made);
    if (result != CUDA_SUCCESS || when == When::InStream) return result;
    return wait_until_empty(call, *find_stream(*call.context, handle));
}

CUresult side_2d(Side& to, unsigned type, const void* at_host, CUdeviceptr at_device, size_t offset, size_t pitch) {
    switch (type) {
        case CU_MEMORYTYPE_HOST: to = host(at_host); break;
        case CU_MEMORYTYPE_DEVICE: to = device(at_device); break;
        case CU_MEMORYTYPE_UNIFIED: to = either(at_device); break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    to.first += offset;
    to.pitch = pitch;
    return CUDA_SUCCESS;
}

CUresult copy_2d(const CUDA_MEMCPY2D* given, CUstream handle, When when) {
    ENTER(call, when == When::Now ? During::NoCapture : During::Anything);
    if (given == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const CUDA_MEMCPY2D& the = *given;
    size_t to_pitch = the.dstPitch == 0 ? the.dstXInBytes + the.WidthInBytes : the.dstPitch;
    size_t from_pitch = the.srcPitch == 0 ? the.srcXInBytes + the.WidthInBytes : the.srcPitch;
    bool fits = the.dstXInBytes + the.WidthInBytes <= to_pitch && the.srcXInBytes + the.WidthInBytes <= from_pitch;
    CopyWork made;
    made.shape = {the.WidthInBytes, the.Height};
    CUresult result = fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        result = side_2d(made.to, the.dstMemoryType, the.dstHost, the.dstDevice, the.dstY * to_pitch + the.dstXInBytes, to_pitch);
    }
    if (result == CUDA_SUCCESS) {
        result = side_2d(made.from, the.srcMemoryType, the.srcHost, the.srcDevice, the.srcY * from_pitch + the.srcXInBytes, from_pitch);
    }
    return result == CUDA_SUCCESS ? copy(call, std::move(made), when, handle) : result;
}

}  // namespace
}  // namespace standin

using namespace standin;

API cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    ENTER(call, During::NoCapture);
    return copy(call, plain(device(to), host(from), bytes), When::Now, nullptr);
}
API cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    ENTER(call, During::NoCapture);
    return copy(call, plain(host(to), device(from), bytes), When::Now, nullptr);
}
API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    ENTER(call, During::NoCapture);
    return copy(call, plain(device(to), device(from), bytes), When::Now, nullptr);
}
API cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    ENTER(call, During::NoCapture);
    return copy(call, plain(either(to), either(from), bytes), When::Now, nullptr);
}
API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    ENTER(call, During::Anything);
    return copy(call, plain(device(to), host(from), bytes), When::InStream, stream);
}
API cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(call, During::Anything);
    return copy(call, plain(host(to), device(from), bytes), When::InStream, stream);
}
API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(call, During::Anything);
    return copy(call, plain(device(to), device(from), bytes), When::InStream, stream);
}
API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(call, During::Anything);
    return copy(call, plain(either(to), either(from), bytes), When::InStream, stream);
}
API cuMemcpyPeer(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes) {
    ENTER(call, During::NoCapture);
    return copy(call, plain(device(to), device(from), bytes), When::Now, nullptr);
}
API cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes, CUstream stream) {
    ENTER(call, During::Anything);
    return copy(call, plain(device(to), device(from), bytes), When::InStream, stream);
}
API cuMemcpy2D_v2(const CUDA_MEMCPY2D* the) { return copy_2d(the, nullptr, When::Now); }
API cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* the) { return copy_2d(the, nullptr, When::Now); }
API cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* the, CUstream stream) { return copy_2d(the, stream, When::InStream); }

API cuMemsetD8_v2(CUdeviceptr at, unsigned char value, size_t count_of) {
    ENTER(call, During::NoCapture);
    return fill(call, at, value, 1, count_of, nullptr, When::Now);
}
API cuMemsetD32_v2(CUdeviceptr at, unsigned value, size_t count_of) {
    ENTER(call, During::NoCapture);
    return fill(call, at, value, 4, count_of, nullptr, When::Now);
}
API cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t count_of, CUstream stream) {
    ENTER(call, During::Anything);
    return fill(call, at, value, 1, count_of, stream, When::InStream);
}
API cuMemsetD16Async(CUdeviceptr at, unsigned short value, size_t count_of, CUstream stream) {
    ENTER(call, During::Anything);
    return fill(call, at, value, 2, count_of, stream, When::InStream);
}
API cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t count_of, CUstream stream) {
    ENTER(call, During::Anything);
    return fill(call, at, value, 4, count_of, stream, When::InStream);
}
