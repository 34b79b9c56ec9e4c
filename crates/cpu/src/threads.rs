//! The threads that share the work of one operation.
//!
//! Owns: worker threads, their waiting, and their cores.
//! Never: knows the tasks' purpose; queues runs: there is one run at a time, in which its caller
//! takes part.
//! Invariant: [`Threads::run`] returns, or resumes a task's panic, only when no worker can access
//! the task body any more.
//!
//! A decode step is about a hundred runs of a few microseconds each, so an idle worker spins for a
//! while, then yields, then parks. A late worker (parked, or preempted by another process) finds
//! the run closed, and the caller does not wait for it.

use crate::affinity;
use parking_lot::Mutex;
use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};

/// A task of a run, and the worker that executes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskTurn {
    /// Task number in `0..tasks`; each runs once.
    pub task: usize,
    /// Worker number in `0..count()`. No two tasks run on the same worker at once, so that it can
    /// index scratch memory.
    pub worker: usize,
}

/// A fixed set of threads; the one that calls [`Threads::run`] is worker 0.
#[derive(Debug)]
pub struct Threads {
    shared: Arc<ThreadsShared>,
    workers: Vec<ComputeThread>,
    /// Sets of cores for the workers in turn; empty if the system decides.
    cores: Vec<Vec<usize>>,
    /// Number of this set, unique in the process; above 0.
    number: u64,
}

#[derive(Debug)]
struct ComputeThread {
    asleep: Arc<AtomicBool>,
    thread: Thread,
    handle: Option<JoinHandle<()>>,
}

/// The current run. The pointer's lifetime is erased: see [`Threads::run`].
#[derive(Clone, Copy)]
struct TaskRun {
    body: *const (dyn Fn(TaskTurn) + Sync),
    tasks: usize,
}

/// Aligned so that data written by different threads are on different cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CacheLine<T>(T);

struct ThreadsShared {
    /// `epoch << 32 | OPEN | joined`: the run's number, whether workers may still join it, and the
    /// number that have.
    gate: CacheLine<AtomicU64>,
    /// Number of the next task to take.
    next_task: CacheLine<AtomicUsize>,
    /// Number of joined workers that have left the run.
    workers_done: CacheLine<AtomicU32>,
    /// The run; the caller writes it while the gate is closed and no worker is inside.
    job: UnsafeCell<Option<TaskRun>>,
    /// The first panic of a task.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stopping: AtomicBool,
}

impl std::fmt::Debug for ThreadsShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

// SAFETY: `job` is written only by the caller while no worker is inside (see `Threads::run`), and
// read only by workers that joined; the gate orders the two. The body that it points to is `Sync`.
unsafe impl Send for ThreadsShared {}
// SAFETY: as above.
unsafe impl Sync for ThreadsShared {}

const OPEN: u64 = 1 << 31;
const JOINED: u64 = OPEN - 1;
const fn epoch(gate: u64) -> u32 {
    (gate >> 32) as u32
}

/// Pauses before a waiting thread starts to yield: about twenty microseconds, the longest gap
/// between two runs of a step.
const SPINS: u32 = 1500;
/// The same if the process has more such threads than cores: spinning then takes the core from the
/// thread that is waited for.
const SPINS_OVERSUBSCRIBED: u32 = 32;
/// Yields before a worker parks.
const YIELDS: u32 = 200;

/// Threads that may spin, in all sets of this process.
static SPINNING_THREADS: AtomicUsize = AtomicUsize::new(0);

static SETS_CREATED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Number of the set as whose worker 0 this thread was last bound.
    static BOUND_FOR_SET: Cell<u64> = const { Cell::new(0) };
}

impl Threads {
    /// Starts `count` threads, the caller's included; 0 counts as 1. With `cores`, worker `i` is
    /// bound to `cores[i % cores.len()]`, the caller's thread from its first run on. If the system
    /// refuses any of these, a warning is logged and no thread is bound.
    ///
    /// # Errors
    /// If the system cannot start the threads.
    pub fn new(count: usize, cores: &[Vec<usize>]) -> std::io::Result<Self> {
        // Count cores before any thread is bound to fewer.
        affinity::cores_count();
        let cores = bindable_cores(cores)?;
        let shared = Arc::new(ThreadsShared {
            gate: CacheLine::default(),
            next_task: CacheLine::default(),
            workers_done: CacheLine::default(),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            stopping: AtomicBool::new(false),
        });
        let mut threads = Self {
            shared,
            workers: Vec::new(),
            cores: cores.to_vec(),
            number: SETS_CREATED.fetch_add(1, Ordering::Relaxed) + 1,
        };
        SPINNING_THREADS.fetch_add(1, Ordering::Relaxed);
        for index in 1..count {
            let worker = threads.spawn(index)?;
            threads.workers.push(worker);
        }
        Ok(threads)
    }

    /// Number of threads, including the caller's.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Cores that the threads are bound to, ascending, each once; empty if the system decides.
    pub fn cores(&self) -> Vec<usize> {
        let bound = self.cores.iter().cycle().take(self.count());
        let mut cores: Vec<usize> = bound.flatten().copied().collect();
        cores.sort_unstable();
        cores.dedup();
        cores
    }

    /// Calls `body` once for each task in `0..tasks`, from any of the threads, and returns when all
    /// have returned. Allocates nothing.
    ///
    /// # Panics
    /// With the panic of a task, if one panics; the tasks not begun by then are dropped.
    pub fn run(&mut self, tasks: usize, body: &(dyn Fn(TaskTurn) + Sync)) {
        self.bind_caller();
        if self.workers.is_empty() || tasks <= 1 {
            for task in 0..tasks {
                body(TaskTurn { task, worker: 0 });
            }
            return;
        }
        self.open_run(tasks, body);
        let shared = &*self.shared;
        let outcome = catch_unwind(AssertUnwindSafe(|| shared.take_tasks(body, tasks, 0)));
        // From here on no worker joins. The joined ones must leave before `body` goes out of scope.
        let joined = shared.gate.0.fetch_and(!OPEN, Ordering::AcqRel) & JOINED;
        let mut spin_wait = SpinWait::new();
        while u64::from(shared.workers_done.0.load(Ordering::Acquire)) != joined {
            spin_wait.wait();
        }
        if let Err(panic) = outcome {
            shared.clear_panic();
            resume_unwind(panic);
        }
        if joined > 0
            && let Some(panic) = shared.clear_panic()
        {
            resume_unwind(panic);
        }
    }

    fn open_run(&self, tasks: usize, body: &(dyn Fn(TaskTurn) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers use the pointer only between joining and
        // leaving, and `run` waits for all who joined before it returns.
        let body: *const (dyn Fn(TaskTurn) + Sync) = unsafe { std::mem::transmute(body) };
        // SAFETY: the gate is closed and every worker that joined the last run has left, so no
        // thread reads the job; `&mut self` in `run` excludes other callers.
        unsafe { *shared.job.get() = Some(TaskRun { body, tasks }) };
        shared.next_task.0.store(0, Ordering::Relaxed);
        shared.workers_done.0.store(0, Ordering::Relaxed);
        let last = epoch(shared.gate.0.load(Ordering::Relaxed));
        let gate = u64::from(last.wrapping_add(1)) << 32 | OPEN;
        // Sequentially consistent with `asleep`: either the worker sees this gate before it parks,
        // or this thread sees it asleep and wakes it.
        shared.gate.0.store(gate, Ordering::SeqCst);
        for worker in self.workers.iter().take(tasks - 1) {
            worker.wake();
        }
    }

    fn bind_caller(&self) {
        let Some(cores) = self.cores.first() else {
            return;
        };
        if BOUND_FOR_SET.replace(self.number) != self.number {
            affinity::bind_thread(cores);
        }
    }

    fn spawn(&self, index: usize) -> std::io::Result<ComputeThread> {
        let asleep = Arc::new(AtomicBool::new(false));
        let cores = self.cores.iter().cycle().nth(index).cloned();
        let (shared, own_asleep) = (Arc::clone(&self.shared), Arc::clone(&asleep));
        let handle = std::thread::Builder::new()
            .name(format!("cpu-{index}"))
            .spawn(move || {
                if let Some(cores) = cores {
                    affinity::bind_thread(&cores);
                }
                shared.run_worker(index, &own_asleep);
            })?;
        SPINNING_THREADS.fetch_add(1, Ordering::Relaxed);
        Ok(ComputeThread {
            asleep,
            thread: handle.thread().clone(),
            handle: Some(handle),
        })
    }
}

/// Returns `cores`, or none if the system refuses one of them. A temporary thread tries them,
/// because the reported cores must be right before a worker computes.
fn bindable_cores(cores: &[Vec<usize>]) -> std::io::Result<&[Vec<usize>]> {
    if cores.is_empty() {
        return Ok(cores);
    }
    let refused = std::thread::scope(|scope| {
        let tried = std::thread::Builder::new().spawn_scoped(scope, || {
            cores.iter().find(|cores| !affinity::bind_thread(cores))
        })?;
        std::io::Result::Ok(tried.join().unwrap_or(None))
    })?;
    Ok(match refused {
        None => cores,
        Some(refused) => {
            let cores = affinity::core_list(refused);
            tracing::warn!(
                cores,
                "the system refuses to bind a thread to these cores; no thread of this engine is bound"
            );
            &[]
        }
    })
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        for worker in &mut self.workers {
            worker.wake();
            if let Some(handle) = worker.handle.take() {
                // A worker catches its tasks' panics, so it never panics itself.
                let _ = handle.join();
            }
        }
        SPINNING_THREADS.fetch_sub(1 + self.workers.len(), Ordering::Relaxed);
    }
}

impl ComputeThread {
    fn wake(&self) {
        // The load keeps the common case, a spinning worker, free of a write.
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            self.thread.unpark();
        }
    }
}

impl ThreadsShared {
    /// Main loop of a worker.
    fn run_worker(&self, worker: usize, asleep: &AtomicBool) {
        let mut last_epoch = 0;
        while let Some(gate) = self.await_run(last_epoch, asleep) {
            let joined =
                self.gate
                    .0
                    .compare_exchange(gate, gate + 1, Ordering::AcqRel, Ordering::Relaxed);
            if joined.is_err() {
                // The gate closed meanwhile, or another worker joined at the same moment: try
                // again.
                continue;
            }
            last_epoch = epoch(gate);
            // SAFETY: this worker joined while the gate was open, so the job is that of this run
            // until it leaves.
            if let Some(TaskRun { body, tasks }) = unsafe { *self.job.get() } {
                // SAFETY: `run` keeps the body alive until this worker has left.
                let body = unsafe { &*body };
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    self.take_tasks(body, tasks, worker);
                }));
                if let Err(panic) = outcome {
                    let mut first = self.panic.lock();
                    first.get_or_insert(panic);
                }
            }
            self.workers_done.0.fetch_add(1, Ordering::Release);
        }
    }

    /// Waits for an open run other than `last_epoch`; `None` when the set is being dropped.
    fn await_run(&self, last_epoch: u32, asleep: &AtomicBool) -> Option<u64> {
        let mut spin_wait = SpinWait::new();
        loop {
            let gate = self.gate.0.load(Ordering::SeqCst);
            if gate & OPEN != 0 && epoch(gate) != last_epoch {
                asleep.store(false, Ordering::SeqCst);
                return Some(gate);
            }
            if self.stopping.load(Ordering::SeqCst) {
                return None;
            }
            if asleep.load(Ordering::SeqCst) {
                // `asleep` is set and no run has opened since: a thread that opens one now will
                // unpark this one.
                std::thread::park();
                asleep.store(false, Ordering::SeqCst);
                spin_wait = SpinWait::new();
            } else if spin_wait.is_exhausted() {
                asleep.store(true, Ordering::SeqCst);
            } else {
                spin_wait.wait();
            }
        }
    }

    /// Takes tasks until none is left. A panic drops the remaining tasks.
    fn take_tasks(&self, body: &(dyn Fn(TaskTurn) + Sync), tasks: usize, worker: usize) {
        let stop = StopOnPanic {
            next: &self.next_task.0,
            tasks,
        };
        loop {
            let task = self.next_task.0.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                break;
            }
            body(TaskTurn { task, worker });
        }
        std::mem::forget(stop);
    }

    fn clear_panic(&self) -> Option<Box<dyn Any + Send>> {
        self.panic.lock().take()
    }
}

/// Dropped only when a task unwinds.
struct StopOnPanic<'a> {
    next: &'a AtomicUsize,
    tasks: usize,
}

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        self.next.fetch_max(self.tasks, Ordering::Relaxed);
    }
}

/// Waiting of a thread: it spins, then yields its core between polls.
struct SpinWait {
    polls: u32,
    spins: u32,
}

impl SpinWait {
    fn new() -> Self {
        let is_oversubscribed = SPINNING_THREADS.load(Ordering::Relaxed) > affinity::cores_count();
        Self {
            polls: 0,
            spins: if is_oversubscribed {
                SPINS_OVERSUBSCRIBED
            } else {
                SPINS
            },
        }
    }

    fn wait(&mut self) {
        if self.polls < self.spins {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
        self.polls = self.polls.saturating_add(1);
    }

    fn is_exhausted(&self) -> bool {
        self.polls >= self.spins + YIELDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn every_task_runs_once_on_any_number_of_threads() {
        for count in [0, 1, 2, 3, 7] {
            let mut threads = Threads::new(count, &[]).unwrap();
            for tasks in [0, 1, 2, 5, 100] {
                let runs: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                threads.run(tasks, &|turn| {
                    runs[turn.task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|r| r.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_late_worker_enters_no_closed_run() {
        // More threads than cores, and very short runs with state on the stack: a worker that
        // entered a run after its end would write into a later run's sum.
        let mut threads = Threads::new(8, &[]).unwrap();
        for round in 0..20_000_u64 {
            let sum = AtomicU64::new(0);
            let tasks = 1 + (round % 11) as usize;
            threads.run(tasks, &|turn| {
                sum.fetch_add(round * 100 + turn.task as u64, Ordering::Relaxed);
            });
            let n = tasks as u64;
            assert_eq!(sum.into_inner(), n * round * 100 + n * (n - 1) / 2);
        }
    }

    #[test]
    fn a_worker_index_is_never_used_by_two_tasks_at_once() {
        let mut threads = Threads::new(4, &[]).unwrap();
        let busy: Vec<AtomicBool> = (0..4).map(|_| AtomicBool::new(false)).collect();
        for _ in 0..500 {
            threads.run(16, &|turn| {
                assert!(!busy[turn.worker].swap(true, Ordering::SeqCst));
                std::hint::spin_loop();
                busy[turn.worker].store(false, Ordering::SeqCst);
            });
        }
    }

    #[test]
    fn a_task_panic_reaches_the_caller_and_threads_survive() {
        let mut threads = Threads::new(3, &[]).unwrap();
        for bad in 0..20 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                threads.run(20, &|turn| assert_ne!(turn.task, bad, "task {bad} fails"));
            }));
            assert!(outcome.is_err(), "the panic of task {bad} was lost");
            let done = AtomicU32::new(0);
            threads.run(20, &|_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.into_inner(), 20);
        }
    }

    #[test]
    fn the_caller_waits_for_every_worker_that_joined() {
        let mut threads = Threads::new(2, &[]).unwrap();
        for _ in 0..50 {
            let (joined, done) = (AtomicU32::new(0), AtomicU32::new(0));
            threads.run(2, &|turn| {
                joined.fetch_add(1, Ordering::SeqCst);
                while joined.load(Ordering::SeqCst) < 2 {
                    std::thread::yield_now();
                }
                if turn.worker != 0 {
                    for _ in 0..20_000 {
                        std::hint::spin_loop();
                    }
                }
                done.fetch_add(1, Ordering::SeqCst);
            });
            assert_eq!(done.into_inner(), 2);
        }
    }

    #[test]
    fn parked_workers_are_woken() {
        let mut threads = Threads::new(2, &[]).unwrap();
        for _ in 0..20 {
            while !threads.workers[0].asleep.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            // Two tasks wait for each other: the run ends only if the worker wakes.
            let arrived = AtomicU32::new(0);
            threads.run(2, &|_| {
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < 2 {
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn threads_report_no_cores_if_binding_is_refused() {
        let allowed = affinity::cores_allowed();
        let there = vec![allowed[0]];
        assert_eq!(
            Threads::new(2, std::slice::from_ref(&there))
                .unwrap()
                .cores(),
            there
        );
        let absent = (0..1024).rev().find(|core| !allowed.contains(core));
        let one_is_absent = [there, vec![absent.unwrap()]];
        let mut threads = Threads::new(2, &one_is_absent).unwrap();
        assert!(threads.cores().is_empty());
        let may_use = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let mut lines = status.lines().map(str::to_owned);
            lines.find(|line| line.starts_with("Cpus_allowed_list:"))
        };
        let before = may_use();
        threads.run(2, &|_| assert_eq!(may_use(), before));
    }

    #[test]
    fn several_thread_sets_run_concurrently() {
        let cores: Vec<Vec<usize>> = affinity::cores_allowed()
            .chunks(1)
            .take(1)
            .map(<[usize]>::to_vec)
            .collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut threads = Threads::new(3, &cores).unwrap();
                    let total = AtomicUsize::new(0);
                    for _ in 0..300 {
                        threads.run(9, &|turn| {
                            total.fetch_add(turn.task, Ordering::Relaxed);
                        });
                    }
                    assert_eq!(total.into_inner(), 300 * 36);
                });
            }
        });
    }
}
