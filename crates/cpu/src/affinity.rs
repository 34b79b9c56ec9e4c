//! Which cores there are, and binding the current thread to one.
//!
//! Owns: the only conversation with the system's scheduler, and the name of the cores that it gives.
//! Never: fails; where binding is not possible the system places threads as it likes.

use cleave_domain::DeviceId;
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

/// The cores that so many threads compute on, if they take all that this process may use. Where a limit
/// on processor time leaves it fewer than it may run on, its control group is part of the name: others
/// are taken to have a limit of their own.
pub(crate) fn device_id(threads: usize) -> Option<DeviceId> {
    if threads < cores_count() {
        return None;
    }
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/sys/kernel/random/boot_id")?;
    let status = read("/proc/self/status")?;
    let cores = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let allowed = cores_listed(cores)?;
    let mut name = format!("cores {} of {}", cores.trim(), machine.trim());
    if cores_count() < allowed {
        let group = read("/proc/self/cgroup").unwrap_or_default();
        let space = std::fs::read_link("/proc/self/ns/cgroup").unwrap_or_default();
        name += &format!(" in {} {}", space.display(), group.trim());
    }
    Some(DeviceId(name))
}

/// How many cores a list such as `0-3,8` has.
fn cores_listed(list: &str) -> Option<usize> {
    let number = |text: &str| text.trim().parse::<usize>().ok();
    let ranges = list.split(',').map(|range| match range.split_once('-') {
        Some((first, last)) => Some(number(last)?.checked_sub(number(first)?)? + 1),
        None => number(range).map(|_| 1),
    });
    ranges.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores() {
        assert_eq!(cores_listed("\t0-3,8\n"), Some(5));
        assert_eq!(cores_listed("7"), Some(1));
        assert_eq!(cores_listed("3-0"), None);
        assert_eq!(cores_listed(""), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn who_takes_all_cores_shares_them_with_whoever_does_too() {
        let all = device_id(cores_count());
        assert!(all.is_some());
        assert_eq!(all, device_id(cores_count() + 1));
        assert_eq!(device_id(cores_count() - 1), None);
    }
}
