//! Threads of the host that share its part of a step: masks and draws.
//!
//! Owns: how many threads are worth their start.
//! Never: knows the work: each call takes the next part of it.

use std::sync::LazyLock;
use std::thread;

/// Calls that are worth a thread: some hundred microseconds, several times what it takes to start
/// one.
const CALLS_PER_THREAD: usize = 8;
/// Limit of threads, so that a large machine starts no more than it gains.
const THREADS_MAX: usize = 8;
/// Cores of this process. Asking the system takes as long as several masks.
static CORES: LazyLock<usize> =
    LazyLock::new(|| thread::available_parallelism().map_or(1, usize::from));

/// Limit of calls that [`share_by_new_threads`] runs at once.
pub(super) fn threads_max() -> usize {
    THREADS_MAX.min(*CORES)
}

/// Calls `body` `calls` times, on threads that it starts if there are enough calls, and returns
/// when all calls have.
pub(super) fn share_by_new_threads(calls: usize, body: &(dyn Fn() + Sync)) {
    let threads = (calls / CALLS_PER_THREAD).clamp(1, threads_max());
    let call = |count: usize| (0..count).for_each(|_| body());
    // A scope allocates, and most steps have few calls.
    if threads == 1 {
        return call(calls);
    }
    thread::scope(|scope| {
        let share = |index: usize| calls * (index + 1) / threads - calls * index / threads;
        for index in 1..threads {
            scope.spawn(move || call(share(index)));
        }
        call(share(0));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn each_call_is_made_once() {
        for calls in [0, 1, 7, 8, 15, 16, 33, 100, 1001] {
            let made = AtomicUsize::new(0);
            share_by_new_threads(calls, &|| {
                made.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(made.into_inner(), calls);
        }
    }
}
