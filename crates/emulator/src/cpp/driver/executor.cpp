// Runs queued work of streams, one entry at a time, when a caller waits.
//
// Owns: which streams may advance, the seed's choice among them, and the effect of a failure.
// Never: runs two entries at once, or more than a wait needs.
// Invariant: within a stream entries run in order; the legacy stream and blocking ones run as
// submitted.
#include <stdlib.h>
#include <unistd.h>

#include "faults.h"
#include "state.h"

namespace standin {
namespace {

bool is_blocking(const Stream& stream) { return !stream.is_legacy && (stream.flags & CU_STREAM_NON_BLOCKING) == 0; }

// Work in the legacy stream waits for earlier work of blocking streams, and the reverse.
bool waits_for_legacy(const Stream& stream) {
    for (auto& other : state().streams) {
        if (other->context != stream.context || other->queue.empty()) continue;
        bool is_pair = (stream.is_legacy && is_blocking(*other)) || (other->is_legacy && is_blocking(stream));
        if (is_pair && other->queue.front().number < stream.queue.front().number) return true;
    }
    return false;
}

bool may_run(const Stream& stream) {
    if (stream.queue.empty() || waits_for_legacy(stream)) return false;
    const Entry& head = stream.queue.front();
    if (head.wait != nullptr) return head.wait->completed.load() >= head.version;
    if (head.graph != nullptr) return head.graph->turn == head.graph->turns->done;
    return true;
}

// Mostly the seed's favourite, so that some streams fall far behind; else any.
Stream* choose() {
    std::vector<Stream*> ready;
    for (auto& stream : state().streams) {
        if (may_run(*stream)) ready.push_back(stream.get());
    }
    if (ready.empty()) return nullptr;
    Stream* chosen = ready.front();
    if (state().seed == 0) {
        for (Stream* one : ready) {
            if (one->queue.front().number < chosen->queue.front().number) chosen = one;
        }
        return chosen;
    }
    uint64_t drawn = draw();
    if (drawn % 4 == 0) return ready[drawn / 4 % ready.size()];
    for (Stream* one : ready) {
        if (one->rank > chosen->rank) chosen = one;
    }
    return chosen;
}

size_t choose_step(const GraphRun& run) {
    std::vector<size_t> ready;
    for (size_t index = 0; index < run.is_done.size(); index++) {
        bool is_ready = !run.is_done[index];
        for (size_t before : (*run.recipe)[index].after) is_ready &= run.is_done[before];
        if (is_ready) ready.push_back(index);
    }
    return ready[state().seed == 0 ? 0 : draw() % ready.size()];
}

void run_work(std::unique_lock<std::mutex>& lock, Context& context, const WorkPointer& work) {
    // After a failure no work runs any more, but waits for it must end.
    if (context.broken != CUDA_SUCCESS) return;
    CUresult result = work->begin(context);
    if (result == CUDA_SUCCESS) {
        uint64_t seed = state().seed == 0 ? 0 : draw();
        lock.unlock();
        result = work->run(seed);
        lock.lock();
    }
    if (result != CUDA_SUCCESS) context.broken = result;
}

void complete(EventCell& cell, uint64_t version) {
    cell.nanoseconds.store(nanoseconds_now());
    if (cell.completed.load() < version) cell.completed.store(version);
}

// True if the entry is done.
bool advance(std::unique_lock<std::mutex>& lock, Context& context, Entry& entry) {
    if (entry.record != nullptr) complete(*entry.record, entry.version);
    if (entry.work != nullptr) run_work(lock, context, entry.work);
    if (entry.graph == nullptr) return true;
    GraphRun& run = *entry.graph;
    if (run.left > 0) {
        size_t step = choose_step(run);
        WorkPointer work = (*run.recipe)[step].work;
        run_work(lock, context, work);
        run.is_done[step] = true;
        run.left--;
    }
    if (run.left > 0) return false;
    run.turns->done++;
    return true;
}

void forget_if_gone(Stream* stream) {
    if (!stream->is_destroyed || !stream->queue.empty()) return;
    auto& all = state().streams;
    for (size_t index = 0; index < all.size(); index++) {
        if (all[index].get() == stream) {
            all.erase(all.begin() + ptrdiff_t(index));
            return;
        }
    }
}

void pump() {
    State& now = state();
    for (;;) {
        usleep(200);
        std::unique_lock<std::mutex> lock(now.mutex);
        if (!now.is_running) run_one(lock);
    }
}

}  // namespace

bool run_one(std::unique_lock<std::mutex>& lock) {
    State& now = state();
    if (now.is_running) {
        now.changed.wait(lock, [&] { return !now.is_running; });
        return true;
    }
    Stream* stream = choose();
    if (stream == nullptr) return false;
    now.is_running = true;
    // A copy, since other threads may queue more meanwhile. The progress of a graph is shared.
    Entry head = stream->queue.front();
    if (advance(lock, *stream->context, head)) stream->queue.pop_front();
    now.is_running = false;
    now.changed.notify_all();
    forget_if_gone(stream);
    return true;
}

bool awaits_another_process() {
    for (auto& stream : state().streams) {
        if (!stream->queue.empty() && stream->queue.front().is_imported) return true;
    }
    return false;
}

void pause_for_another_process(std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    usleep(100);
    lock.lock();
}

CUresult drain(Call& call, const Context& context) {
    auto is_idle = [&] {
        for (auto& stream : state().streams) {
            if (stream->context == &context && !stream->queue.empty()) return false;
        }
        return true;
    };
    if (run_until(call.lock, is_idle) == Until::Never) {
        say("stand-in: work waits for an event that nothing will complete");
        return CUDA_ERROR_UNKNOWN;
    }
    return context.broken;
}

void start_pump() {
    if (state().has_pump.exchange(true)) return;
    std::thread(pump).detach();
    // At process exit the pump must not be in the middle of an entry: it is never let in again.
    atexit([] {
        auto* lock = new std::unique_lock<std::mutex>(state().mutex);
        state().changed.wait(*lock, [] { return !state().is_running; });
    });
}

}  // namespace standin

using namespace standin;

API cuCtxSynchronize() {
    ENTER(call, During::NoCapture);
    count("wait");
    return drain(call, *call.context);
}
