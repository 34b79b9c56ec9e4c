// Devices and their contexts.
//
// Owns: the properties of a device: an H100's figures, except those that the environment sets.
// Never: has more than one context for each device, its primary one.
// Invariant: a context that was reset is as new.
#pragma once
#include "state.h"

#pragma GCC visibility push(hidden)
namespace standin {

// The most dynamic shared memory that a kernel may ask for.
int shared_bytes_optin_max();

}  // namespace standin
#pragma GCC visibility pop
