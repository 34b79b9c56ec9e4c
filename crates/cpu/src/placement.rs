//! Placement of an engine's threads and weights.
//!
//! Owns: the choice, from the machine's topology and the user's option.
//! Never: binds a thread or memory.
//! Invariant: placement changes no result, only speed.
//!
//! Another node's memory is read at half the speed or less, and a decode step reads every weight
//! once. So on a machine with several nodes, a worker that fits on one runs all its threads there,
//! and a larger one spreads them over all nodes in equal parts; each thread may move within its
//! node. Workers of a process share one copy of the weights, whose pages are interleaved over all
//! their nodes, so that all memory channels serve them. KV blocks are allocated where they are
//! first written, on their worker's node. Pages of weights mapped from a file are on the node of
//! the process that first read them.

use crate::affinity::{core_list, cores_allowed, cores_count, parse_core_list};
use crate::options::CpuError;
use std::path::Path;
use std::str::FromStr;

/// The user's choice of cores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CoreBinding {
    /// Threads stay on a memory node if there are several; with one, the system places them.
    #[default]
    Auto,
    /// The system places them.
    None,
    /// Each thread is bound to one of these cores, in ascending order; the next worker's threads
    /// take the following cores. If too few are left for a worker, it starts over: two workers
    /// share all their cores or none.
    Cores(Vec<usize>),
}

impl FromStr for CoreBinding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            list => parse_core_list(list)
                .map(Self::Cores)
                .ok_or_else(|| format!("`{list}` is neither auto, none, nor cores such as 0-3,8")),
        }
    }
}

impl std::fmt::Display for CoreBinding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::None => f.write_str("none"),
            Self::Cores(cores) => f.write_str(&core_list(cores)),
        }
    }
}

/// Placement of an engine's threads and weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadPlacement {
    /// Sets of cores: thread `i` uses set `i` modulo their number. Empty leaves placement to the
    /// system.
    pub threads: Vec<Vec<usize>>,
    /// Memory nodes over which the weights are interleaved; empty leaves it to the system.
    pub nodes: Vec<usize>,
}

/// A worker's index and threads, among the workers of its process.
#[derive(Clone, Copy, Debug)]
pub struct WorkerThreads {
    /// Index of the worker, from 0.
    pub index: usize,
    /// Number of threads of each worker.
    pub count: usize,
}

/// The cores that this process may use, by memory node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreTopology {
    /// All cores; empty if unknown.
    cores: Vec<usize>,
    /// Cores of each memory node, if the system lists them.
    nodes: Vec<MemoryNode>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct MemoryNode {
    number: usize,
    cores: Vec<usize>,
}

impl CoreTopology {
    /// Reads this machine's topology.
    pub fn of_this_machine() -> Self {
        // Count cores before any thread is bound to fewer.
        cores_count();
        Self::read(Path::new("/sys/devices/system/node"), &cores_allowed())
    }

    /// Reads a folder such as Linux's `/sys/devices/system/node`, for these cores.
    fn read(folder: &Path, allowed: &[usize]) -> Self {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let node = |entry: std::fs::DirEntry| {
            let name = entry.file_name();
            let number = name.to_str()?.strip_prefix("node")?.parse().ok()?;
            let list = std::fs::read_to_string(entry.path().join("cpulist")).ok()?;
            let cores = parse_core_list(&list)?.into_iter();
            let cores: Vec<usize> = cores.filter(|core| allowed.contains(core)).collect();
            (!cores.is_empty()).then_some(MemoryNode { number, cores })
        };
        let mut nodes: Vec<MemoryNode> = entries.filter_map(node).collect();
        nodes.sort_by_key(|node| node.number);
        let cores = allowed.to_vec();
        Self { cores, nodes }
    }

    /// Places a worker's threads and weights.
    ///
    /// # Errors
    /// `NoCores` if the user named cores that the process may not use.
    pub fn place(
        &self,
        binding: &CoreBinding,
        worker: WorkerThreads,
    ) -> Result<ThreadPlacement, CpuError> {
        self.check(binding)?;
        let threads = match binding {
            CoreBinding::None => Vec::new(),
            CoreBinding::Cores(cores) => {
                let apart = (cores.len() / worker.count.max(1)).max(1);
                let first = worker.index % apart * worker.count;
                (first..first + worker.count)
                    .map(|thread| vec![cores[thread % cores.len()]])
                    .collect()
            }
            CoreBinding::Auto if self.nodes.len() < 2 => Vec::new(),
            CoreBinding::Auto => self.threads_near_each_other(worker),
        };
        Ok(ThreadPlacement {
            threads,
            nodes: self.nodes_of(binding),
        })
    }

    /// Places a worker's threads on one node if it fits, or else evenly over all.
    fn threads_near_each_other(&self, worker: WorkerThreads) -> Vec<Vec<usize>> {
        let wide_enough = |node: &&MemoryNode| node.cores.len() >= worker.count;
        let whole: Vec<&MemoryNode> = self.nodes.iter().filter(wide_enough).collect();
        if !whole.is_empty() {
            let node = whole[worker.index % whole.len()];
            return vec![node.cores.clone(); worker.count];
        }
        let of_cores: Vec<&MemoryNode> = self
            .nodes
            .iter()
            .flat_map(|node| std::iter::repeat_n(node, node.cores.len()))
            .collect();
        (0..worker.count)
            .map(|thread| {
                of_cores[thread * of_cores.len() / worker.count]
                    .cores
                    .clone()
            })
            .collect()
    }

    /// Memory nodes of the chosen cores; empty if the machine has only one.
    fn nodes_of(&self, binding: &CoreBinding) -> Vec<usize> {
        let is_used = |node: &&MemoryNode| match binding {
            CoreBinding::Auto => true,
            CoreBinding::None => false,
            CoreBinding::Cores(cores) => node.cores.iter().any(|core| cores.contains(core)),
        };
        match self.nodes.len() {
            0 | 1 => Vec::new(),
            _ => self
                .nodes
                .iter()
                .filter(is_used)
                .map(|node| node.number)
                .collect(),
        }
    }

    fn check(&self, binding: &CoreBinding) -> Result<(), CpuError> {
        let CoreBinding::Cores(cores) = binding else {
            return Ok(());
        };
        let is_missing = |core: &usize| !self.cores.contains(core);
        let missing: Vec<usize> = cores.iter().copied().filter(is_missing).collect();
        if missing.is_empty() || self.cores.is_empty() {
            Ok(())
        } else {
            Err(CpuError::NoCores {
                requested: core_list(&missing),
                there: core_list(&self.cores),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets of four cores whose numbers alternate, as on some boards; the process may not
    /// use the last core.
    fn two_sockets() -> CoreTopology {
        let folder = tempfile::tempdir().unwrap();
        for (name, list) in [
            ("node0", "0,2,4,6\n"),
            ("node1", "1,3,5,7\n"),
            ("has_cpu", ""),
        ] {
            let node = folder.path().join(name);
            std::fs::create_dir(&node).unwrap();
            std::fs::write(node.join("cpulist"), list).unwrap();
        }
        CoreTopology::read(folder.path(), &[0, 1, 2, 3, 4, 5, 6])
    }

    fn threads_of(
        machine: &CoreTopology,
        binding: &str,
        index: usize,
        count: usize,
    ) -> Vec<String> {
        let worker = WorkerThreads { index, count };
        let placed = machine.place(&binding.parse().unwrap(), worker).unwrap();
        placed
            .threads
            .iter()
            .map(|cores| core_list(cores))
            .collect()
    }

    #[test]
    fn narrow_workers_stay_on_a_node_and_wide_ones_span_all() {
        let machine = two_sockets();
        assert_eq!(threads_of(&machine, "auto", 0, 3), ["0,2,4,6"; 3]);
        assert_eq!(threads_of(&machine, "auto", 1, 3), ["1,3,5"; 3]);
        assert_eq!(threads_of(&machine, "auto", 2, 3), ["0,2,4,6"; 3]);
        // Only one node is wide enough.
        assert_eq!(threads_of(&machine, "auto", 1, 4), ["0,2,4,6"; 4]);
        let all = threads_of(&machine, "auto", 0, 7);
        assert_eq!(all[..4], ["0,2,4,6"; 4]);
        assert_eq!(all[4..], ["1,3,5"; 3]);
        let halves = threads_of(&machine, "auto", 0, 5);
        assert_eq!(halves.iter().filter(|cores| *cores == "1,3,5").count(), 2);
        assert_eq!(threads_of(&machine, "none", 0, 7), [""; 0]);
    }

    #[test]
    fn threads_take_named_cores_in_order() {
        let machine = two_sockets();
        assert_eq!(threads_of(&machine, "1,3-5", 0, 2), ["1", "3"]);
        assert_eq!(threads_of(&machine, "1,3-5", 1, 2), ["4", "5"]);
        assert_eq!(threads_of(&machine, "1,3-5", 2, 2), ["1", "3"]);
        assert_eq!(threads_of(&machine, "1,3-5", 1, 3), ["1", "3", "4"]);
        assert_eq!(threads_of(&machine, "1,3", 0, 3), ["1", "3", "1"]);
        let requested = "5-7,9".parse().unwrap();
        let worker = WorkerThreads { index: 0, count: 1 };
        let error = machine.place(&requested, worker).unwrap_err().to_string();
        assert!(error.contains("7,9") && error.contains("0-6"), "{error}");
    }

    #[test]
    fn weights_are_placed_on_the_nodes_of_their_threads() {
        let machine = two_sockets();
        let nodes = |binding: &str| machine.nodes_of(&binding.parse().unwrap());
        assert_eq!(nodes("auto"), [0, 1]);
        assert_eq!(nodes("1,3"), [1]);
        assert_eq!(nodes("none"), [0; 0]);
        let one = CoreTopology {
            nodes: machine.nodes[..1].to_vec(),
            ..machine.clone()
        };
        assert_eq!(one.nodes_of(&CoreBinding::Auto), [0; 0]);
        assert_eq!(threads_of(&one, "auto", 0, 3), [""; 0]);
    }

    #[test]
    fn bindings_parse_as_they_are_printed() {
        for text in ["auto", "none", "0-3,8"] {
            assert_eq!(text.parse::<CoreBinding>().unwrap().to_string(), text);
        }
        let error = "all".parse::<CoreBinding>().unwrap_err();
        assert!(error.contains("0-3,8"), "{error}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_topology_lists_exactly_the_allowed_cores() {
        let machine = CoreTopology::of_this_machine();
        let cores = machine.nodes.iter().map(|node| node.cores.len());
        let expected = if Path::new("/sys/devices/system/node/node0/cpulist").exists() {
            cores_allowed().len()
        } else {
            0
        };
        assert_eq!(cores.sum::<usize>(), expected);
    }

    #[test]
    fn missing_cores_are_refused_without_a_node_list() {
        let folder = tempfile::tempdir().unwrap();
        let machine = CoreTopology::read(folder.path(), &[0, 1]);
        let worker = WorkerThreads { index: 0, count: 1 };
        assert!(machine.place(&CoreBinding::Cores(vec![2]), worker).is_err());
        assert!(machine.place(&CoreBinding::Cores(vec![1]), worker).is_ok());
        assert_eq!(threads_of(&machine, "auto", 0, 2), [""; 0]);
    }
}
