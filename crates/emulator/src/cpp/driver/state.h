// State of the stand-in driver: devices, memory, streams with their queues, events, captures.
//
// Owns: the one `State` of the process and its lock; every entry point of the API begins with a
// `Call`, which holds the lock.
// Never: holds the lock while a kernel or a copy runs.
// Invariant: work runs only when a caller waits, one entry at a time, in an order that the API
// allows and the seed chooses. An error of the device stays with its context.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../registry.h"
#include "../scheduler.h"
#include "cuda.h"

#pragma GCC visibility push(hidden)
namespace standin {

using emulator::say;

// The environment's, read once:
// CLEAVE_STANDIN_SEED            1; draws the order of work and of blocks; 0: the order of submission
// CLEAVE_STANDIN_MEMORY_MIB      of each device; 2048
// CLEAVE_STANDIN_DEVICES         1
// CLEAVE_STANDIN_CAPABILITY      9.0
// CLEAVE_STANDIN_MULTIPROCESSORS 4: grids that fill the device are walked by one core here
// CLEAVE_STANDIN_MPS             0; 1: other processes share the device by MPS
// CLEAVE_STANDIN_FAULTS          see faults.h
struct Settings {
    uint64_t seed, memory_bytes;
    int devices, capability_major, capability_minor, multiprocessors;
    bool is_mps;
};
const Settings& settings();

// An operation of a stream or a graph.
struct Work {
    virtual ~Work() = default;
    virtual CUgraphNodeType type() const = 0;
    // Called under the lock before it runs: whether its memory still exists.
    virtual CUresult begin(Context& context) const = 0;
    // Called without the lock.
    virtual CUresult run(uint64_t seed) const = 0;
};
using WorkPointer = std::shared_ptr<const Work>;

// An event's two counts, in memory that processes can share: records requested, and done.
struct EventCell {
    std::atomic<uint64_t> recorded{0}, completed{0}, nanoseconds{0};
};

// Work of one launch of a graph: steps with their dependencies.
struct Step {
    uint64_t node;
    WorkPointer work;
    std::vector<size_t> after;
};
using Recipe = std::vector<Step>;

// Orders the launches of one executable graph.
struct Turns {
    uint64_t given = 0, done = 0;
};

struct GraphRun {
    std::shared_ptr<const Recipe> recipe;
    std::vector<bool> is_done;
    size_t left;
    std::shared_ptr<Turns> turns;
    uint64_t turn;
};

// An entry of a stream's queue: exactly one of work, record, wait and graph.
struct Entry {
    uint64_t number = 0;
    WorkPointer work;
    std::shared_ptr<EventCell> record, wait;
    uint64_t version = 0;
    // The awaited event belongs to another process.
    bool is_imported = false;
    std::shared_ptr<GraphRun> graph;
};

struct Capture;

struct Stream {
    Context* context;
    unsigned flags;
    int priority;
    bool is_legacy = false, is_destroyed = false;
    // Random; the seed's favourite mostly goes first.
    uint64_t rank = 0;
    std::deque<Entry> queue;
    std::shared_ptr<Capture> capture;
    // Dependencies of the next captured node.
    std::vector<Node*> tail;
};

struct Event {
    Context* context;
    unsigned flags;
    std::shared_ptr<EventCell> cell;
    // The capture that recorded the event, and its dependencies there.
    std::weak_ptr<Capture> capture;
    bool is_captured = false;
    std::vector<Node*> after;
    // Index among the shareable events; -1 if it is not shareable.
    int shared_index = -1;
    bool is_imported = false;
};

struct Node {
    uint64_t id;
    WorkPointer work;
    std::vector<Node*> after;
    // Storage behind the pointer that cuGraphKernelNodeGetParams gives.
    std::vector<uint8_t> args_shown;
    void* args_pointer = nullptr;
};

struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;
};

struct GraphExec {
    std::shared_ptr<const Recipe> recipe;
    std::shared_ptr<Turns> turns = std::make_shared<Turns>();
};

struct Capture {
    uint64_t id;
    std::unique_ptr<Graph> graph;
    Stream* origin;
    CUstreamCaptureMode mode;
    std::thread::id thread;
    // The capture failed; it ends with CUDA_ERROR_STREAM_CAPTURE_INVALIDATED.
    bool is_broken = false;
};

struct Context {
    int device;
    unsigned retained = 0, flags = 0;
    // The device's error, which every later call returns until the context is reset.
    CUresult broken = CUDA_SUCCESS;
    std::set<int> peers;
    Stream* legacy = nullptr;
    Stream* per_thread = nullptr;
};

struct Module {
    Context* context;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

struct Function {
    const emulator::Kernel* kernel;
    Module* module;
    uint32_t dynamic_shared_max;
};

struct State {
    std::mutex mutex;
    // Notified after each entry.
    std::condition_variable changed;
    bool is_initialized = false;
    // A thread runs an entry now, without the lock.
    bool is_running = false;
    std::vector<std::unique_ptr<Context>> contexts;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<std::shared_ptr<Capture>> captures;
    // All handles given out and not destroyed.
    std::set<const void*> handles;
    std::map<std::thread::id, Context*> current;
    std::map<std::thread::id, CUstreamCaptureMode> capture_modes;
    std::map<std::string, uint64_t> counts;
    uint64_t seed = 0, draws = 0, numbers = 0, identities = 0;
    std::atomic<bool> has_pump{false};
};
State& state();

enum class During { Anything, NoCapture };

// The beginning of an entry point: the lock, the thread's context, and the reason to refuse the
// call.
class Call {
 public:
    explicit Call(During during = During::Anything);
    CUresult refusal = CUDA_SUCCESS;
    std::unique_lock<std::mutex> lock;
    Context* context = nullptr;
};

#define ENTER(call, during) \
    Call call(during); \
    if (call.refusal != CUDA_SUCCESS) return call.refusal

// The next number of the seed's sequence.
uint64_t draw();
void count(const char* what);
bool is_live(const void* handle);
uint64_t nanoseconds_now();

// Functions of streams.cpp.
Stream* add_stream(Context& context, unsigned flags, int priority);
// Null if no stream has that handle.
Stream* find_stream(Context& context, CUstream handle);
// Queues the work, or captures it.
CUresult submit(Call& call, CUstream handle, WorkPointer work);

// Functions of executor.cpp: called with the lock, which is released while work runs.
enum class Until { Done, Never };
// Runs entries until `is_done`. Never: no entry can run any more, and it is not done.
template <class Condition> Until run_until(std::unique_lock<std::mutex>& lock, Condition is_done);
// Runs one entry, or waits for the thread that runs one. False if none may run.
bool run_one(std::unique_lock<std::mutex>& lock);
// Whether some entry waits for another process.
bool awaits_another_process();
void pause_for_another_process(std::unique_lock<std::mutex>& lock);
CUresult drain(Call& call, const Context& context);
// From now on work also runs without a wait, as another process or a callback may depend on it.
void start_pump();

template <class Condition> Until run_until(std::unique_lock<std::mutex>& lock, Condition is_done) {
    while (!is_done()) {
        if (run_one(lock)) continue;
        if (!awaits_another_process()) return Until::Never;
        pause_for_another_process(lock);
    }
    return Until::Done;
}

// Functions of capture.cpp.
bool forbids_unsafe_calls();
void break_captures();
// Handles a stream that is destroyed during its capture.
void leave_capture(Stream& stream);
CUresult capture_work(Stream& stream, WorkPointer work);
CUresult capture_record(Stream& stream, Event& event);
CUresult capture_wait(Stream& stream, Event& event);

}  // namespace standin
#pragma GCC visibility pop
