// Streams: queues of work, and their entries.
//
// Owns: creating and destroying streams, waiting for them, host functions.
// Never: runs anything except through the executor.
// Invariant: a destroyed stream exists until its queue is empty.
#include "state.h"

namespace standin {
namespace {

// Handles that are numbers: null and 1 are the legacy stream, 2 is the per-thread stream, which
// here is one ordinary blocking stream for all threads.
constexpr uintptr_t LEGACY = 1, PER_THREAD = 2;

constexpr int PRIORITY_GREATEST = -5, PRIORITY_LEAST = 0;

// A host function in stream order.
struct HostWork : Work {
    void (*function)(void*);
    mutable std::vector<uint8_t> data;
    void* pointer = nullptr;

    CUgraphNodeType type() const override { return NODE_TYPE_HOST; }
    CUresult begin(Context&) const override { return CUDA_SUCCESS; }
    CUresult run(uint64_t) const override {
        function(data.empty() ? pointer : data.data());
        return CUDA_SUCCESS;
    }
};

bool is_captured_by_blocking_stream(const Context& context) {
    for (auto& stream : state().streams) {
        bool is_blocking = (stream->flags & CU_STREAM_NON_BLOCKING) == 0;
        if (stream->context == &context && stream->capture != nullptr && is_blocking) return true;
    }
    return false;
}

}  // namespace

Stream* add_stream(Context& context, unsigned flags, int priority) {
    auto made = std::make_unique<Stream>();
    made->context = &context;
    made->flags = flags;
    made->priority = priority;
    made->rank = draw();
    state().streams.push_back(std::move(made));
    return state().streams.back().get();
}

Stream* find_stream(Context& context, CUstream handle) {
    auto number = reinterpret_cast<uintptr_t>(handle);
    if (number <= LEGACY) return context.legacy;
    if (number == PER_THREAD) return context.per_thread;
    return is_live(handle) ? handle : nullptr;
}

CUresult submit(Call& call, CUstream handle, WorkPointer work) {
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) return capture_work(*stream, std::move(work));
    if (stream->is_legacy && is_captured_by_blocking_stream(*stream->context)) {
        break_captures();
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    Entry entry;
    entry.number = ++state().numbers;
    entry.work = std::move(work);
    stream->queue.push_back(std::move(entry));
    return CUDA_SUCCESS;
}

}  // namespace standin

using namespace standin;

API cuStreamCreateWithPriority(CUstream* made, unsigned flags, int priority) {
    ENTER(call, During::Anything);
    if (made == nullptr || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    // A priority out of range is clamped, not refused.
    int clamped = priority < PRIORITY_GREATEST ? PRIORITY_GREATEST : priority > PRIORITY_LEAST ? PRIORITY_LEAST : priority;
    *made = add_stream(*call.context, flags, clamped);
    state().handles.insert(*made);
    return CUDA_SUCCESS;
}

API cuStreamCreate(CUstream* made, unsigned flags) { return cuStreamCreateWithPriority(made, flags, 0); }

API cuStreamDestroy_v2(CUstream stream) {
    ENTER(call, During::Anything);
    if (!is_live(stream)) return CUDA_ERROR_INVALID_HANDLE;
    state().handles.erase(stream);
    if (stream->capture != nullptr) leave_capture(*stream);
    stream->is_destroyed = true;
    if (!stream->queue.empty()) return CUDA_SUCCESS;
    auto& all = state().streams;
    for (size_t index = 0; index < all.size(); index++) {
        if (all[index].get() != stream) continue;
        all.erase(all.begin() + ptrdiff_t(index));
        break;
    }
    return CUDA_SUCCESS;
}

API cuStreamSynchronize(CUstream handle) {
    ENTER(call, During::NoCapture);
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) {
        stream->capture->is_broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    count("wait");
    // Waits for entries queued until now; other threads may queue more meanwhile.
    uint64_t last = state().numbers;
    auto is_done = [&] {
        Stream* still = find_stream(*call.context, handle);
        return still == nullptr || still->queue.empty() || still->queue.front().number > last;
    };
    if (run_until(call.lock, is_done) == Until::Never) {
        say("stand-in: a stream waits for an event that nothing will complete");
        return CUDA_ERROR_UNKNOWN;
    }
    return call.context->broken;
}

API cuStreamQuery(CUstream handle) {
    ENTER(call, During::NoCapture);
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) {
        stream->capture->is_broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (!stream->queue.empty()) run_one(call.lock);
    if (call.context->broken != CUDA_SUCCESS) return call.context->broken;
    stream = find_stream(*call.context, handle);
    return stream == nullptr || stream->queue.empty() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API cuStreamGetPriority(CUstream handle, int* priority) {
    ENTER(call, During::Anything);
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

API cuStreamGetFlags(CUstream handle, unsigned* flags) {
    ENTER(call, During::Anything);
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

API cuStreamGetCtx(CUstream handle, CUcontext* context) {
    ENTER(call, During::Anything);
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *context = stream->context;
    return CUDA_SUCCESS;
}

API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER(call, During::Anything);
    if (least != nullptr) *least = PRIORITY_LEAST;
    if (greatest != nullptr) *greatest = PRIORITY_GREATEST;
    return CUDA_SUCCESS;
}

API cuLaunchHostFunc(CUstream handle, void (*function)(void*), void* data) {
    ENTER(call, During::Anything);
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto made = std::make_shared<HostWork>();
    made->function = function;
    made->pointer = data;
    // A program that waits for the function waits outside of the driver.
    start_pump();
    return submit(call, handle, made);
}

// For the companion libraries: `function` runs in the stream, with its own copy of the data.
API cleave_standin_enqueue(CUstream handle, void (*function)(void*), const void* data, size_t bytes) {
    ENTER(call, During::Anything);
    auto made = std::make_shared<HostWork>();
    made->function = function;
    made->data.assign(static_cast<const uint8_t*>(data), static_cast<const uint8_t*>(data) + bytes);
    return submit(call, handle, made);
}
