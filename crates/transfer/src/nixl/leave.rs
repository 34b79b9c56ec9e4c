//! The end of the process, while threads have agents.
//!
//! Owns: who is inside the library, and the hook at the process's end. Never: ends an agent, or a thread.
//! Invariant: once the library's own destructors run nobody is inside it and nobody enters: a thread that was would use
//! what they take away.

#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, PoisonError, RwLock, TryLockError};
use std::time::{Duration, Instant};

/// A call that hangs is not waited for any longer.
const PATIENCE: Duration = Duration::from_secs(2);

static INSIDE: RwLock<()> = RwLock::new(());
static IS_ENDING: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    /// Of the C library: what was registered last runs first.
    fn atexit(hook: extern "C" fn()) -> c_int;
}

/// Runs calls of the library. Where the process is ending it does not return.
pub(super) fn inside<T>(calls: impl FnOnce() -> T) -> T {
    let guard = INSIDE.read().unwrap_or_else(PoisonError::into_inner);
    if IS_ENDING.load(Ordering::Acquire) {
        drop(guard);
        loop {
            std::thread::park();
        }
    }
    calls()
}

/// What has an agent: it goes as a call of the library, also where a panic takes it.
pub(super) struct Gated<T>(Option<T>);

impl<T> Gated<T> {
    pub(super) fn new(kept: T) -> Self {
        Self(Some(kept))
    }
}

impl<T> std::ops::Deref for Gated<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it goes last of all")
    }
}

impl<T> std::ops::DerefMut for Gated<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("it goes last of all")
    }
}

impl<T> Drop for Gated<T> {
    fn drop(&mut self) {
        inside(|| drop(self.0.take()));
    }
}

/// To be called when the library and its plugins are loaded: their destructors were registered before.
pub(super) fn before_the_end() {
    static HOOKED: Once = Once::new();
    HOOKED.call_once(|| {
        // SAFETY: the hook is there for as long as the program is, and lets nothing unwind into C.
        let refused = unsafe { atexit(wait_until_nobody_is_inside) };
        debug_assert_eq!(refused, 0, "there is room for 32 hooks, at least");
    });
}

extern "C" fn wait_until_nobody_is_inside() {
    IS_ENDING.store(true, Ordering::Release);
    let until = Instant::now() + PATIENCE;
    while let Err(TryLockError::WouldBlock) = INSIDE.try_write()
        && Instant::now() < until
    {
        std::thread::sleep(Duration::from_millis(1));
    }
}
