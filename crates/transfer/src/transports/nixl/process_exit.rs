//! Protects the exit of the process while threads use the library.
//!
//! Owns: the lock of threads inside the library, and the exit hook. Never: ends an agent, or a
//! thread.
//! Invariant: while the destructors of the library run, no thread is inside the library and none
//! enters it, because it would use freed state.

#![allow(unsafe_code)]

use parking_lot::RwLock;
use std::ffi::c_int;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The time limit of the wait for calls at exit: a hung call is not awaited any longer.
const EXIT_WAIT_MAX: Duration = Duration::from_secs(2);

static LIBRARY_CALLS: RwLock<()> = RwLock::new(());
static IS_PROCESS_ENDING: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    /// The function of the C library: the hook registered last runs first.
    fn atexit(hook: extern "C" fn()) -> c_int;
}

/// Runs calls of the library. It does not return while the process is exiting.
pub(super) fn inside_library<T>(calls: impl FnOnce() -> T) -> T {
    let guard = LIBRARY_CALLS.read();
    if IS_PROCESS_ENDING.load(Ordering::Acquire) {
        drop(guard);
        loop {
            std::thread::park();
        }
    }
    calls()
}

/// Holds a value with an agent; the value is dropped as a call of the library, also during a panic.
pub(super) struct DropInsideLibrary<T>(Option<T>);

impl<T> DropInsideLibrary<T> {
    pub(super) fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T> std::ops::Deref for DropInsideLibrary<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it goes last of all")
    }
}

impl<T> std::ops::DerefMut for DropInsideLibrary<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("it goes last of all")
    }
}

impl<T> Drop for DropInsideLibrary<T> {
    fn drop(&mut self) {
        inside_library(|| drop(self.0.take()));
    }
}

/// Registers the exit hook. Call this after the library and its plugins are loaded, so that the
/// hook runs before their destructors.
pub(super) fn register_exit_hook() {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(|| {
        // SAFETY: the hook is there for as long as the program is, and lets nothing unwind into C.
        let refused = unsafe { atexit(wait_for_library_calls) };
        debug_assert_eq!(refused, 0, "atexit accepts at least 32 hooks");
    });
}

extern "C" fn wait_for_library_calls() {
    IS_PROCESS_ENDING.store(true, Ordering::Release);
    let until = Instant::now() + EXIT_WAIT_MAX;
    while LIBRARY_CALLS.try_write().is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}
