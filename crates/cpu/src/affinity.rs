//! The available cores, and binding of threads and memory.
//!
//! Owns: all system calls about the placement of threads and memory, and the device id of a set of
//! cores.
//! Never: fails; if binding is not possible, the system places threads and memory.

use cleave_domain::DeviceId;
use std::sync::OnceLock;

/// Number of cores that this process may use, counted once: call it before a thread is bound to
/// fewer.
pub fn cores_count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Numbers of the cores that this process may use and threads can be bound to, ascending; empty if
/// unknown.
pub(crate) fn cores_allowed() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let mut cores = line.and_then(parse_core_list).unwrap_or_default();
    cores.retain(|core| *core < BOUND_MAX);
    cores
}

/// Limit of core numbers in the system call's set.
const BOUND_MAX: usize = 1024;

/// Binds the calling thread to some cores, ignoring those that the process may not use. Returns
/// false if none remains, or the system refuses.
#[cfg(target_os = "linux")]
pub(crate) fn bind_thread(cores: &[usize]) -> bool {
    // Not `CPU_SETSIZE`, which counts bytes in some versions of musl.
    const { assert!(BOUND_MAX <= 8 * size_of::<libc::cpu_set_t>()) };
    // SAFETY: an all-zero `cpu_set_t` is the empty set, every core put into it is below its size,
    // and the system call reads the set during the call only. 0 names the calling thread. A refusal
    // changes nothing.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &core in cores.iter().filter(|core| **core < BOUND_MAX) {
            libc::CPU_SET(core, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) == 0
    }
}

/// Other systems offer no binding.
#[cfg(not(target_os = "linux"))]
pub(crate) fn bind_thread(_cores: &[usize]) -> bool {
    false
}

/// Requests that pages of this memory are allocated on these memory nodes in turn, when first
/// touched; an empty list leaves the choice to the system. Covers whole pages only.
#[cfg(target_os = "linux")]
pub(crate) fn interleave_pages(memory: &mut [u8], nodes: &[usize]) {
    const BITS: usize = 64;
    const WORDS: usize = 16;
    if nodes.is_empty() {
        return;
    }
    let mut mask = [0_u64; WORDS];
    for &node in nodes.iter().filter(|node| **node < WORDS * BITS) {
        mask[node / BITS] |= 1 << (node % BITS);
    }
    // SAFETY: the call reads the mask during the call only, within its length (the kernel uses one
    // bit less than the count it gets), and changes no byte of the memory, only where its pages are
    // allocated. A refusal changes nothing.
    unsafe {
        libc::syscall(
            libc::SYS_mbind,
            memory.as_mut_ptr(),
            memory.len(),
            libc::MPOL_INTERLEAVE,
            mask.as_ptr(),
            WORDS * BITS + 1,
            0,
        );
    }
}

/// Other systems have no such call.
#[cfg(not(target_os = "linux"))]
pub(crate) fn interleave_pages(_memory: &mut [u8], _nodes: &[usize]) {}

/// Identity of the cores of `threads` threads, if they use all that they may: those that they are
/// bound to, or else the process's. If a limit on processor time allows the process fewer cores
/// than it may run on, its control group is part of the name: other groups are assumed to have
/// their own limits.
pub(crate) fn device_id(threads: usize, bound: &[usize]) -> Option<DeviceId> {
    let allowed = match bound {
        [] => cores_allowed(),
        bound => bound.to_vec(),
    };
    if allowed.is_empty() || threads < allowed.len().min(cores_count()) {
        return None;
    }
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/sys/kernel/random/boot_id")?;
    let mut name = format!("cores {} of {}", core_list(&allowed), machine.trim());
    if cores_count() < allowed.len() {
        let group = read("/proc/self/cgroup").unwrap_or_default();
        let space = std::fs::read_link("/proc/self/ns/cgroup").unwrap_or_default();
        name += &format!(" in {} {}", space.display(), group.trim());
    }
    Some(DeviceId(name))
}

/// Parses a list of cores such as `0-3,8`; ascending, each once.
pub(crate) fn parse_core_list(list: &str) -> Option<Vec<usize>> {
    let number = |text: &str| text.trim().parse::<usize>().ok();
    let mut cores = Vec::new();
    for range in list.split(',') {
        let (first, last) = match range.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(range)?, number(range)?),
        };
        if last < first || last - first >= CORES_MAX {
            return None;
        }
        cores.extend(first..=last);
    }
    cores.sort_unstable();
    cores.dedup();
    Some(cores)
}

/// Limit of cores in a range, above any machine's.
const CORES_MAX: usize = 1 << 16;

/// Formats cores as such a list.
pub(crate) fn core_list(cores: &[usize]) -> String {
    let runs = cores.chunk_by(|one, next| one + 1 == *next);
    let texts: Vec<String> = runs
        .map(|run| match run {
            [first, .., last] => format!("{first}-{last}"),
            run => run[0].to_string(),
        })
        .collect();
    texts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_lists_parse_and_print_alike() {
        assert_eq!(parse_core_list("\t8,0-3,2\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(parse_core_list("7"), Some(vec![7]));
        for bad in ["3-0", "", "a", "1,,2", "0-99999999999", "-1"] {
            assert_eq!(parse_core_list(bad), None, "{bad}");
        }
        for list in ["0", "0-1", "0-3,8", "1,3,5-7"] {
            assert_eq!(core_list(&parse_core_list(list).unwrap()), list);
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn engines_on_all_cores_have_one_device_id() {
        let all = device_id(cores_count(), &[]);
        assert!(all.is_some());
        assert_eq!(all, device_id(cores_count() + 1, &[]));
        assert_eq!(device_id(cores_count() - 1, &[]), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn engines_bound_to_the_same_cores_have_one_device_id() {
        let allowed = cores_allowed();
        let one = &allowed[..1];
        let on_one = device_id(1, one);
        assert!(on_one.is_some());
        assert_eq!(on_one, device_id(2, one));
        assert_eq!(device_id(1, &allowed).is_some(), allowed.len() == 1);
        assert_eq!(
            device_id(cores_count(), &allowed),
            device_id(cores_count(), &[])
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_bound_thread_runs_only_on_its_cores() {
        let allowed = cores_allowed();
        let last = allowed[allowed.len() - 1];
        let listed = std::thread::spawn(move || {
            assert!(bind_thread(&[last, 1 << 20]));
            assert!(!bind_thread(&[]), "no core is no binding");
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            parse_core_list(line.unwrap())
        });
        assert_eq!(listed.join().unwrap(), Some(vec![last]));
    }

    /// Systems with memory nodes list each mapping's placement policy.
    #[test]
    #[cfg(target_os = "linux")]
    fn memory_is_interleaved_over_the_named_nodes() {
        let mut memory = memmap2::MmapMut::map_anon(1 << 20).unwrap();
        interleave_pages(&mut memory, &[0, 1 << 20]);
        memory.fill(1);
        let start = format!("{:x} ", memory.as_ptr() as usize);
        let Ok(maps) = std::fs::read_to_string("/proc/self/numa_maps") else {
            return;
        };
        let policy = maps.lines().find_map(|line| line.strip_prefix(&start));
        assert!(
            policy.is_some_and(|policy| policy.starts_with("interleave:0 ")),
            "{policy:?}"
        );
    }
}
