//! Which cores there are, and binding the current thread to one.
//!
//! Owns: the only conversation with the system's scheduler.
//! Never: fails; where binding is not possible the system places threads as it likes.

use std::sync::OnceLock;

/// Cores this process may use.
pub fn cores_count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Binds the calling thread to one core. A core that the process may not use is left alone.
#[cfg(target_os = "linux")]
pub(crate) fn pin(core: usize) {
    if core >= libc::CPU_SETSIZE as usize {
        return;
    }
    // SAFETY: an all-zero `cpu_set_t` is the empty set, `core` is below the set's size, and the
    // system call reads the set during the call only. 0 names the calling thread. A refusal changes
    // nothing.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

/// Other systems offer no binding; threads run where they are put.
#[cfg(not(target_os = "linux"))]
pub(crate) fn pin(_core: usize) {}
