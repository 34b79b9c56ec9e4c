// Faults on demand.
//
// Owns: the list of faults to come. The grammar, in CLEAVE_STANDIN_FAULTS or `cleave_standin_faults`:
//
//   faults = fault *("," fault)      kind[:name]@n
//   kind   = alloc        the n-th allocation of device memory from now fails: OUT_OF_MEMORY
//          | host_alloc   the same for pinned memory
//          | launch       the n-th kernel to run (of that name, if one is given) fails: LAUNCH_FAILED, which
//                         stays with the context as on a real device, and is returned by later waits
//          | unlisted     the n-th kernel to run fails with a number that no list of results has, as a newer
//                         driver's may; it stays too
//          | copy         the n-th copy to run fails: ILLEGAL_ADDRESS, which stays too
//          | event_late   the next n queries of events that are complete say NOT_READY
//          | module       the n-th module to be loaded fails: NO_BINARY_FOR_GPU
//          | ipc_open     the n-th handle of another process to be opened fails: MAP_FAILED
//          | ipc_copy     the n-th copy into another process's memory fails: ILLEGAL_ADDRESS, which stays
//          | ipc_wait     the n-th copy into another process's memory stops half-way until that process has ended
//
// Never: fails a call without a fault from the list.
// Invariant: each fault strikes once (event_late: n times).
#pragma once
#include <stdint.h>

#pragma GCC visibility push(hidden)
namespace standin {

enum class Fault { Alloc, HostAlloc, Launch, Unlisted, Copy, EventLate, Module, IpcOpen, IpcCopy, IpcWait };

// Whether this call is to fail. Called under the lock; `name` is a kernel's, or null.
bool strikes(Fault fault, const char* name = nullptr);

}  // namespace standin
#pragma GCC visibility pop
