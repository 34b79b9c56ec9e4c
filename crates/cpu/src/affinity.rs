//! Which cores there are, and binding threads and memory to them.
//!
//! Owns: the only conversation with the system about where threads run and where memory lies, and the name of the cores
//! that it gives.
//! Never: fails; where binding is not possible the system places threads and memory as it likes.

use cleave_domain::DeviceId;
use std::sync::OnceLock;

/// Cores this process may use, counted once: to be asked before a thread is bound to fewer.
pub fn cores_count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Numbers of the cores this process may use, ascending, as far as threads can be bound to them; empty where the system
/// does not say.
pub(crate) fn cores_allowed() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let mut cores = line.and_then(cores_of).unwrap_or_default();
    cores.retain(|core| *core < BOUND_MAX);
    cores
}

/// Cores whose numbers fit what the system call takes.
const BOUND_MAX: usize = 1024;

/// Binds the calling thread to some cores. Cores that the process may not use are left out; false if none remains, or
/// the system refuses.
#[cfg(target_os = "linux")]
pub(crate) fn bind(cores: &[usize]) -> bool {
    // Not `CPU_SETSIZE`, which counts bytes in some versions of musl.
    const { assert!(BOUND_MAX <= 8 * size_of::<libc::cpu_set_t>()) };
    // SAFETY: an all-zero `cpu_set_t` is the empty set, every core put into it is below its size, and the system call
    // reads the set during the call only. 0 names the calling thread. A refusal changes nothing.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &core in cores.iter().filter(|core| **core < BOUND_MAX) {
            libc::CPU_SET(core, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) == 0
    }
}

/// Other systems offer no binding; threads run where they are put.
#[cfg(not(target_os = "linux"))]
pub(crate) fn bind(_cores: &[usize]) -> bool {
    false
}

/// Asks that pages of this memory, when they are first touched, lie on these memory nodes in turn. Whole pages only;
/// one node, or none, is asked for nothing where the machine has no other.
#[cfg(target_os = "linux")]
pub(crate) fn spread(memory: &mut [u8], nodes: &[usize]) {
    const BITS: usize = 64;
    const WORDS: usize = 16;
    let mut mask = [0_u64; WORDS];
    for &node in nodes.iter().filter(|node| **node < WORDS * BITS) {
        mask[node / BITS] |= 1 << (node % BITS);
    }
    // SAFETY: the call reads the mask, which is as long as said (it takes one bit less than it is told), during the
    // call only, and changes no byte of the memory: it decides where pages come from. A refusal changes nothing.
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

/// Other systems place memory as they like.
#[cfg(not(target_os = "linux"))]
pub(crate) fn spread(_memory: &mut [u8], _nodes: &[usize]) {}

/// The cores that so many threads compute on, if they take all that they may use: those they are bound to, or else
/// the process's. Where a limit on processor time leaves it fewer than it may run on, its control group is part of
/// the name: others are taken to have a limit of their own.
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
    let mut name = format!("cores {} of {}", listed(&allowed), machine.trim());
    if cores_count() < allowed.len() {
        let group = read("/proc/self/cgroup").unwrap_or_default();
        let space = std::fs::read_link("/proc/self/ns/cgroup").unwrap_or_default();
        name += &format!(" in {} {}", space.display(), group.trim());
    }
    Some(DeviceId(name))
}

/// The cores of a list such as `0-3,8`, ascending, each once.
pub(crate) fn cores_of(list: &str) -> Option<Vec<usize>> {
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

/// More than any machine has.
const CORES_MAX: usize = 1 << 16;

/// Cores as such a list.
pub(crate) fn listed(cores: &[usize]) -> String {
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
    fn lists_of_cores() {
        assert_eq!(cores_of("\t8,0-3,2\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(cores_of("7"), Some(vec![7]));
        for bad in ["3-0", "", "a", "1,,2", "0-99999999999", "-1"] {
            assert_eq!(cores_of(bad), None, "{bad}");
        }
        for list in ["0", "0-1", "0-3,8", "1,3,5-7"] {
            assert_eq!(listed(&cores_of(list).unwrap()), list);
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn who_takes_all_cores_shares_them_with_whoever_does_too() {
        let all = device_id(cores_count(), &[]);
        assert!(all.is_some());
        assert_eq!(all, device_id(cores_count() + 1, &[]));
        assert_eq!(device_id(cores_count() - 1, &[]), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn bound_threads_share_what_they_are_bound_to() {
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
    fn a_bound_thread_runs_on_its_cores_alone() {
        let allowed = cores_allowed();
        let last = allowed[allowed.len() - 1];
        let seen = std::thread::spawn(move || {
            assert!(bind(&[last, 1 << 20]));
            assert!(!bind(&[]), "no core is no binding");
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            cores_of(line.unwrap())
        });
        assert_eq!(seen.join().unwrap(), Some(vec![last]));
    }

    /// Where the system counts by nodes it says how each piece of memory is to be placed.
    #[test]
    #[cfg(target_os = "linux")]
    fn memory_is_spread_over_the_nodes_that_were_named() {
        let mut memory = memmap2::MmapMut::map_anon(1 << 20).unwrap();
        spread(&mut memory, &[0, 1 << 20]);
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
