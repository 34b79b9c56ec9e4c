// Capture: the work given to streams becomes a graph, and nothing runs.
//
// Owns: which streams are in which capture, and which calls are refused meanwhile.
// Never: runs, queues or waits.
// Invariant: a capture ends in the stream where it began, with every stream joined that it spread
// to, or fails.
#include <algorithm>

#include "state.h"

namespace standin {
namespace {

std::vector<Stream*> streams_of(const Capture& capture) {
    std::vector<Stream*> all;
    for (auto& stream : state().streams) {
        if (stream->capture.get() == &capture) all.push_back(stream.get());
    }
    return all;
}

CUstreamCaptureMode mode_of_this_thread() {
    auto found = state().capture_modes.find(std::this_thread::get_id());
    return found == state().capture_modes.end() ? CAPTURE_MODE_GLOBAL : found->second;
}

void collect_before(const std::vector<Node*>& tail, std::set<const Node*>& all) {
    for (const Node* node : tail) {
        if (all.insert(node).second) collect_before(node->after, all);
    }
}

// Whether the origin comes after all work of other streams in the capture.
bool is_joined(const Capture& capture) {
    std::set<const Node*> before;
    collect_before(capture.origin->tail, before);
    for (const Stream* stream : streams_of(capture)) {
        for (const Node* node : stream->tail) {
            if (before.count(node) == 0) return false;
        }
    }
    return true;
}

void add_to_tail(Stream& stream, const std::vector<Node*>& more) {
    for (Node* node : more) {
        if (std::find(stream.tail.begin(), stream.tail.end(), node) == stream.tail.end()) stream.tail.push_back(node);
    }
}

// Removes all streams from the capture.
void close(const std::shared_ptr<Capture>& capture) {
    for (Stream* captured : streams_of(*capture)) {
        captured->capture = nullptr;
        captured->tail.clear();
    }
    auto& all = state().captures;
    all.erase(std::find(all.begin(), all.end(), capture));
}

CUresult broken(Capture& capture, CUresult why) {
    capture.is_broken = true;
    return why;
}

}  // namespace

bool forbids_unsafe_calls() {
    if (mode_of_this_thread() == CAPTURE_MODE_RELAXED) return false;
    for (auto& capture : state().captures) {
        bool is_mine = capture->thread == std::this_thread::get_id();
        if (capture->mode == CAPTURE_MODE_GLOBAL && mode_of_this_thread() == CAPTURE_MODE_GLOBAL) return true;
        if (capture->mode == CAPTURE_MODE_THREAD_LOCAL && is_mine) return true;
    }
    return false;
}

void break_captures() {
    for (auto& capture : state().captures) capture->is_broken = true;
}

void leave_capture(Stream& stream) {
    auto capture = stream.capture;
    capture->is_broken = true;
    if (capture->origin == &stream) {
        close(capture);
    } else {
        stream.capture = nullptr;
    }
}

CUresult capture_work(Stream& stream, WorkPointer work) {
    Capture& capture = *stream.capture;
    if (capture.is_broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    auto node = std::make_unique<Node>();
    node->id = ++state().identities;
    node->work = std::move(work);
    node->after = stream.tail;
    stream.tail = {node.get()};
    state().handles.insert(node.get());
    capture.graph->nodes.push_back(std::move(node));
    return CUDA_SUCCESS;
}

CUresult capture_record(Stream& stream, Event& event) {
    if (stream.capture->is_broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event.capture = stream.capture;
    event.is_captured = true;
    event.after = stream.tail;
    return CUDA_SUCCESS;
}

CUresult capture_wait(Stream& stream, Event& event) {
    auto from = event.is_captured ? event.capture.lock() : nullptr;
    if (event.is_captured && from == nullptr) {
        // An event recorded in an ended capture means nothing outside of its graph.
        return stream.capture == nullptr ? CUDA_ERROR_CAPTURED_EVENT : broken(*stream.capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    if (from == nullptr) {
        say("stand-in: a stream that is captured waits for an event that was recorded outside of the capture");
        return broken(*stream.capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    if (from->is_broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream.capture != nullptr && stream.capture != from) {
        stream.capture->is_broken = true;
        return broken(*from, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    }
    if (stream.is_legacy) return broken(*from, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    stream.capture = from;
    add_to_tail(stream, event.after);
    return CUDA_SUCCESS;
}

}  // namespace standin

using namespace standin;

API cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
    ENTER(call, During::Anything);
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->is_legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture != nullptr) return CUDA_ERROR_INVALID_VALUE;
    auto capture = std::make_shared<Capture>();
    capture->id = ++state().identities;
    capture->graph = std::make_unique<Graph>();
    capture->origin = stream;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    stream->capture = capture;
    stream->tail.clear();
    state().captures.push_back(std::move(capture));
    return CUDA_SUCCESS;
}

API cuStreamEndCapture(CUstream handle, CUgraph* made) {
    ENTER(call, During::Anything);
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (made == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *made = nullptr;
    auto capture = stream->capture;
    if (capture == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (capture->origin != stream) return broken(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    bool is_other_thread = capture->mode != CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id();
    if (is_other_thread) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    CUresult result = capture->is_broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        : is_joined(*capture)            ? CUDA_SUCCESS
                                         : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    close(capture);
    if (result != CUDA_SUCCESS) {
        for (auto& node : capture->graph->nodes) state().handles.erase(node.get());
        return result;
    }
    *made = capture->graph.release();
    state().handles.insert(*made);
    return CUDA_SUCCESS;
}

API cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
    ENTER(call, During::Anything);
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *status = stream->capture == nullptr ? CAPTURE_STATUS_NONE
        : stream->capture->is_broken     ? CAPTURE_STATUS_INVALIDATED
                                         : CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

API cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus* status, uint64_t* id, CUgraph* graph,
                              const CUgraphNode** tail, const void** edges, size_t* tail_count) {
    CUresult result = cuStreamIsCapturing(handle, status);
    if (result != CUDA_SUCCESS) return result;
    ENTER(call, During::Anything);
    Stream* stream = find_stream(*call.context, handle);
    if (stream == nullptr || stream->capture == nullptr) return CUDA_SUCCESS;
    if (id != nullptr) *id = stream->capture->id;
    if (graph != nullptr) *graph = stream->capture->graph.get();
    if (tail != nullptr) *tail = stream->tail.data();
    if (edges != nullptr) *edges = nullptr;
    if (tail_count != nullptr) *tail_count = stream->tail.size();
    return CUDA_SUCCESS;
}

API cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status, uint64_t* id, CUgraph* graph,
                              const CUgraphNode** tail, size_t* tail_count) {
    return cuStreamGetCaptureInfo_v3(handle, status, id, graph, tail, nullptr, tail_count);
}

API cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    ENTER(call, During::Anything);
    if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = mode_of_this_thread();
    state().capture_modes[std::this_thread::get_id()] = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
