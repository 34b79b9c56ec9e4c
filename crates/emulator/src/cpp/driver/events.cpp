// Events: marks in streams for other streams and the host to wait for.
//
// Owns: recording, waiting, querying, and the time between two events.
// Never: completes a record out of stream order.
// Invariant: a wait is for the last record that was requested before it.
#include "faults.h"
#include "state.h"

namespace standin {
namespace {

bool is_complete(const Event& event) { return event.cell->completed.load() >= event.cell->recorded.load(); }

CUresult find_event(CUevent event) {
    if (is_live(event)) return CUDA_SUCCESS;
    say("stand-in: an event that was destroyed, or never was");
    return CUDA_ERROR_INVALID_HANDLE;
}

// An event that was recorded in a capture cannot be waited for by the host.
CUresult refuse_captured(Event& event) {
    if (!event.is_captured) return CUDA_SUCCESS;
    if (auto capture = event.capture.lock()) capture->is_broken = true;
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult elapsed(float* milliseconds, CUevent from, CUevent to) {
    ENTER(call, During::Anything);
    if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_live(from) || !is_live(to)) return CUDA_ERROR_INVALID_HANDLE;
    for (const Event* event : {from, to}) {
        if ((event->flags & CU_EVENT_DISABLE_TIMING) != 0 || event->cell->recorded.load() == 0) return CUDA_ERROR_INVALID_HANDLE;
        if (!is_complete(*event)) return CUDA_ERROR_NOT_READY;
    }
    auto between = int64_t(to->cell->nanoseconds.load() - from->cell->nanoseconds.load());
    *milliseconds = float(double(between) * 1e-6);
    return CUDA_SUCCESS;
}

}  // namespace
}  // namespace standin

using namespace standin;

API cuEventDestroy_v2(CUevent event) {
    ENTER(call, During::Anything);
    CUresult result = find_event(event);
    if (result != CUDA_SUCCESS) return result;
    state().handles.erase(event);
    delete event;
    return CUDA_SUCCESS;
}

API cuEventRecord(CUevent event, CUstream handle) {
    ENTER(call, During::Anything);
    CUresult result = find_event(event);
    if (result != CUDA_SUCCESS) return result;
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) return capture_record(*stream, *event);
    event->is_captured = false;
    Entry entry;
    entry.number = ++state().numbers;
    entry.record = event->cell;
    entry.version = event->cell->recorded.fetch_add(1) + 1;
    stream->queue.push_back(std::move(entry));
    return CUDA_SUCCESS;
}

API cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned) { return cuEventRecord(event, handle); }

API cuStreamWaitEvent(CUstream handle, CUevent event, unsigned) {
    ENTER(call, During::Anything);
    CUresult result = find_event(event);
    if (result != CUDA_SUCCESS) return result;
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr || event->is_captured) return capture_wait(*stream, *event);
    Entry entry;
    entry.number = ++state().numbers;
    entry.wait = event->cell;
    entry.version = event->cell->recorded.load();
    entry.is_imported = event->is_imported;
    stream->queue.push_back(std::move(entry));
    return CUDA_SUCCESS;
}

API cuEventQuery(CUevent event) {
    ENTER(call, During::NoCapture);
    CUresult result = find_event(event);
    if (result == CUDA_SUCCESS) result = refuse_captured(*event);
    if (result != CUDA_SUCCESS) return result;
    if (!is_complete(*event)) {
        auto cell = event->cell;
        run_one(call.lock);
        if (call.context->broken != CUDA_SUCCESS) return call.context->broken;
        if (cell->completed.load() < cell->recorded.load()) return CUDA_ERROR_NOT_READY;
    }
    return strikes(Fault::EventLate) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

API cuEventSynchronize(CUevent event) {
    ENTER(call, During::NoCapture);
    CUresult result = find_event(event);
    if (result == CUDA_SUCCESS) result = refuse_captured(*event);
    if (result != CUDA_SUCCESS) return result;
    count("wait");
    auto cell = event->cell;
    uint64_t version = cell->recorded.load();
    bool is_imported = event->is_imported;
    while (run_until(call.lock, [&] { return cell->completed.load() >= version; }) == Until::Never) {
        if (!is_imported) return CUDA_ERROR_UNKNOWN;
        pause_for_another_process(call.lock);
    }
    return call.context->broken;
}

API cuEventElapsedTime_v2(float* milliseconds, CUevent from, CUevent to) { return elapsed(milliseconds, from, to); }
API cuEventElapsedTime(float* milliseconds, CUevent from, CUevent to) { return elapsed(milliseconds, from, to); }
