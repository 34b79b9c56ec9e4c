//! Where an engine's threads run and where weights lie.
//!
//! Owns: the choice, from what the machine has and what the user asked for.
//! Never: binds anything itself.
//! Invariant: it changes no result, only how soon it is there.
//!
//! Memory of another node is read at half the speed or less, and a decode step reads every weight once. So where a
//! machine has several nodes, a worker that fits on one has its threads there, and a wider one has them on all in
//! equal parts; each thread may move within its node. Workers of a process share one copy of the weights: its pages
//! lie on all their nodes in turn, so that all memory channels serve them. KV blocks lie where they were first
//! written, which is where their worker runs. Weights that are mapped from a file lie where whoever read it first was.

use crate::affinity::{cores_allowed, cores_count, cores_of, listed};
use crate::options::CpuError;
use std::path::Path;
use std::str::FromStr;

/// What a user says about cores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Binding {
    /// Threads keep to a memory node where there are several; with one, the system places them.
    #[default]
    Auto,
    /// The system places them.
    None,
    /// Each thread keeps to one of these, in turn, ascending; threads of several workers one after the other. Where
    /// there are not enough for the next worker it begins anew: two have the same cores, or none in common.
    Cores(Vec<usize>),
}

impl FromStr for Binding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            list => cores_of(list)
                .map(Self::Cores)
                .ok_or_else(|| format!("`{list}` is neither auto, none, nor cores such as 0-3,8")),
        }
    }
}

impl std::fmt::Display for Binding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::None => f.write_str("none"),
            Self::Cores(cores) => f.write_str(&listed(cores)),
        }
    }
}

/// Where an engine's threads may run and its weights lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Cores of thread `i` are those of `i` modulo their number; empty leaves all to the system.
    pub threads: Vec<Vec<usize>>,
    /// Memory nodes that share the weights; empty leaves it to the system.
    pub nodes: Vec<usize>,
}

/// A worker among those of its process.
#[derive(Clone, Copy, Debug)]
pub struct WorkerThreads {
    /// `0..` of all workers.
    pub index: usize,
    /// Threads of each.
    pub count: usize,
}

/// The cores that this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// All; empty where the system does not say.
    cores: Vec<usize>,
    /// Those near each memory node, where the system says so.
    nodes: Vec<Node>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Node {
    number: usize,
    cores: Vec<usize>,
}

impl Machine {
    /// This one.
    pub fn here() -> Self {
        // Counted before any thread has fewer.
        cores_count();
        Self::read(Path::new("/sys/devices/system/node"), &cores_allowed())
    }

    /// What a folder such as Linux's `/sys/devices/system/node` says of these cores.
    fn read(folder: &Path, allowed: &[usize]) -> Self {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let node = |entry: std::fs::DirEntry| {
            let name = entry.file_name();
            let number = name.to_str()?.strip_prefix("node")?.parse().ok()?;
            let list = std::fs::read_to_string(entry.path().join("cpulist")).ok()?;
            let cores = cores_of(&list)?.into_iter();
            let cores: Vec<usize> = cores.filter(|core| allowed.contains(core)).collect();
            (!cores.is_empty()).then_some(Node { number, cores })
        };
        let mut nodes: Vec<Node> = entries.filter_map(node).collect();
        nodes.sort_by_key(|node| node.number);
        let cores = allowed.to_vec();
        Self { cores, nodes }
    }

    /// Where a worker's threads run.
    ///
    /// # Errors
    /// `NoCores` if the user named cores that the process may not use.
    pub fn place(&self, binding: &Binding, worker: WorkerThreads) -> Result<Placement, CpuError> {
        self.check(binding)?;
        let threads = match binding {
            Binding::None => Vec::new(),
            Binding::Cores(cores) => {
                let apart = (cores.len() / worker.count.max(1)).max(1);
                let first = worker.index % apart * worker.count;
                (first..first + worker.count)
                    .map(|thread| vec![cores[thread % cores.len()]])
                    .collect()
            }
            Binding::Auto if self.nodes.len() < 2 => Vec::new(),
            Binding::Auto => self.near(worker),
        };
        Ok(Placement {
            threads,
            nodes: self.nodes_of(binding),
        })
    }

    /// Threads beside each other.
    fn near(&self, worker: WorkerThreads) -> Vec<Vec<usize>> {
        let wide_enough = |node: &&Node| node.cores.len() >= worker.count;
        let whole: Vec<&Node> = self.nodes.iter().filter(wide_enough).collect();
        if !whole.is_empty() {
            let node = whole[worker.index % whole.len()];
            return vec![node.cores.clone(); worker.count];
        }
        let of_cores: Vec<&Node> = self
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

    /// Memory near any of the cores; none if there is only one kind of memory.
    fn nodes_of(&self, binding: &Binding) -> Vec<usize> {
        let is_used = |node: &&Node| match binding {
            Binding::Auto => true,
            Binding::None => false,
            Binding::Cores(cores) => node.cores.iter().any(|core| cores.contains(core)),
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

    fn check(&self, binding: &Binding) -> Result<(), CpuError> {
        let Binding::Cores(cores) = binding else {
            return Ok(());
        };
        let is_missing = |core: &usize| !self.cores.contains(core);
        let missing: Vec<usize> = cores.iter().copied().filter(is_missing).collect();
        match missing.is_empty() || self.cores.is_empty() {
            true => Ok(()),
            false => Err(CpuError::NoCores {
                asked: listed(&missing),
                there: listed(&self.cores),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets of four cores, whose numbers alternate as some boards have them, of which the last may not be used.
    fn two_sockets() -> Machine {
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
        Machine::read(folder.path(), &[0, 1, 2, 3, 4, 5, 6])
    }

    fn threads_of(machine: &Machine, binding: &str, index: usize, count: usize) -> Vec<String> {
        let worker = WorkerThreads { index, count };
        let placed = machine.place(&binding.parse().unwrap(), worker).unwrap();
        placed.threads.iter().map(|cores| listed(cores)).collect()
    }

    #[test]
    fn workers_that_fit_on_a_node_have_one_each_and_wide_ones_have_all_alike() {
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
    fn threads_keep_to_the_cores_that_were_named_one_after_the_other() {
        let machine = two_sockets();
        assert_eq!(threads_of(&machine, "1,3-5", 0, 2), ["1", "3"]);
        assert_eq!(threads_of(&machine, "1,3-5", 1, 2), ["4", "5"]);
        assert_eq!(threads_of(&machine, "1,3-5", 2, 2), ["1", "3"]);
        assert_eq!(threads_of(&machine, "1,3-5", 1, 3), ["1", "3", "4"]);
        assert_eq!(threads_of(&machine, "1,3", 0, 3), ["1", "3", "1"]);
        let asked = "5-7,9".parse().unwrap();
        let worker = WorkerThreads { index: 0, count: 1 };
        let error = machine.place(&asked, worker).unwrap_err().to_string();
        assert!(error.contains("7,9") && error.contains("0-6"), "{error}");
    }

    #[test]
    fn weights_lie_near_whoever_reads_them() {
        let machine = two_sockets();
        let nodes = |binding: &str| machine.nodes_of(&binding.parse().unwrap());
        assert_eq!(nodes("auto"), [0, 1]);
        assert_eq!(nodes("1,3"), [1]);
        assert_eq!(nodes("none"), [0; 0]);
        let one = Machine {
            nodes: machine.nodes[..1].to_vec(),
            ..machine.clone()
        };
        assert_eq!(one.nodes_of(&Binding::Auto), [0; 0]);
        assert_eq!(threads_of(&one, "auto", 0, 3), [""; 0]);
    }

    #[test]
    fn words_are_read_as_they_are_shown() {
        for text in ["auto", "none", "0-3,8"] {
            assert_eq!(text.parse::<Binding>().unwrap().to_string(), text);
        }
        let error = "all".parse::<Binding>().unwrap_err();
        assert!(error.contains("0-3,8"), "{error}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_has_the_cores_that_may_be_used() {
        let machine = Machine::here();
        let cores = machine.nodes.iter().map(|node| node.cores.len());
        let expected = match Path::new("/sys/devices/system/node/node0/cpulist").exists() {
            true => cores_allowed().len(),
            false => 0,
        };
        assert_eq!(cores.sum::<usize>(), expected);
    }

    #[test]
    fn cores_that_are_not_there_were_taken_where_no_node_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        let machine = Machine::read(folder.path(), &[0, 1]);
        let worker = WorkerThreads { index: 0, count: 1 };
        assert!(machine.place(&Binding::Cores(vec![2]), worker).is_err());
        assert!(machine.place(&Binding::Cores(vec![1]), worker).is_ok());
        assert_eq!(threads_of(&machine, "auto", 0, 2), [""; 0]);
    }
}
