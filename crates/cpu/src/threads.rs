//! The threads that share the work of one operation.
//!
//! Owns: worker threads, how they wait, and which cores they run on.
//! Never: learns what the tasks are; queues anything: one run at a time, its caller takes part.
//! Invariant: [`Threads::run`] returns, or resumes a task's panic, only when no worker can touch the
//! task body any more.
//!
//! A decode step is some hundred runs of a few microseconds each, so a worker that has nothing to do
//! spins for a while, then yields, then parks. A worker that comes late (parked, or its core taken by
//! somebody else) finds the run closed and is never waited for.

use crate::affinity;
use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

/// One task of a run: which it is, and who does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// `0..tasks`; each once.
    pub task: usize,
    /// `0..count()`; no two tasks run on the same worker at once, so it can index scratch space.
    pub worker: usize,
}

/// A fixed set of threads; the one that calls [`Threads::run`] is worker 0.
#[derive(Debug)]
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    /// Cores of each worker, in turn, or empty: the system decides.
    cores: Vec<Vec<usize>>,
    /// No other set of this process has it; above 0.
    number: u64,
}

#[derive(Debug)]
struct Worker {
    asleep: Arc<AtomicBool>,
    thread: Thread,
    handle: Option<JoinHandle<()>>,
}

/// What a run is, while it is open. The pointer's lifetime is erased: see [`Threads::run`].
#[derive(Clone, Copy)]
struct Job {
    body: *const (dyn Fn(Turn) + Sync),
    tasks: usize,
}

/// Keeps what is written by different threads on different cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// `epoch << 32 | OPEN | joined`: which run this is, whether workers may still join it, and how
    /// many have.
    gate: Line<AtomicU64>,
    /// Next task to take.
    next: Line<AtomicUsize>,
    /// How many of the joined have left.
    left: Line<AtomicU32>,
    /// Written by the caller while the gate is closed and nobody is inside.
    job: UnsafeCell<Option<Job>>,
    /// The first panic of a task.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stopping: AtomicBool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

// SAFETY: `job` is written only by the caller while nobody is inside (see `Threads::run`), and read
// only by workers that joined; the gate orders the two. What it points to is `Sync`.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

const OPEN: u64 = 1 << 31;
const JOINED: u64 = OPEN - 1;
const fn epoch(gate: u64) -> u32 {
    (gate >> 32) as u32
}

/// Pauses before a waiting thread starts to yield: some twenty microseconds, the longest gap between
/// two runs of a step.
const SPINS: u32 = 1500;
/// The same when the process has more such threads than the machine has cores: spinning then takes
/// the core from whoever is being waited for.
const SPINS_CROWDED: u32 = 32;
/// Yields before a worker parks.
const YIELDS: u32 = 200;

/// Threads that may spin, over all sets in this process.
static CROWD: AtomicUsize = AtomicUsize::new(0);

/// Sets made so far.
static SETS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The set whose worker 0 this thread was last bound as.
    static BOUND: Cell<u64> = const { Cell::new(0) };
}

impl Threads {
    /// `count` threads, the caller's included; 0 counts as 1. With `cores`, worker `i` keeps to
    /// `cores[i % cores.len()]`; the caller's thread from its first run. Where the system refuses any of
    /// them that is a warning, and none is bound.
    ///
    /// # Errors
    /// If the system gives no more threads.
    pub fn new(count: usize, cores: &[Vec<usize>]) -> std::io::Result<Self> {
        // Counted before any thread has fewer.
        affinity::cores_count();
        let cores = if_bindable(cores)?;
        let shared = Arc::new(Shared {
            gate: Line::default(),
            next: Line::default(),
            left: Line::default(),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            stopping: AtomicBool::new(false),
        });
        let mut threads = Self {
            shared,
            workers: Vec::new(),
            cores: cores.to_vec(),
            number: SETS.fetch_add(1, Ordering::Relaxed) + 1,
        };
        CROWD.fetch_add(1, Ordering::Relaxed);
        for index in 1..count {
            let worker = threads.spawn(index)?;
            threads.workers.push(worker);
        }
        Ok(threads)
    }

    /// How many threads take part, the caller's included.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// The cores the threads keep to, ascending, each once; empty if the system decides.
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
    pub fn run(&mut self, tasks: usize, body: &(dyn Fn(Turn) + Sync)) {
        self.bind_caller();
        if self.workers.is_empty() || tasks <= 1 {
            for task in 0..tasks {
                body(Turn { task, worker: 0 });
            }
            return;
        }
        self.open(tasks, body);
        let shared = &*self.shared;
        let outcome = catch_unwind(AssertUnwindSafe(|| shared.take_tasks(body, tasks, 0)));
        // From here on nobody joins; whoever has joined is waited for before `body` goes away.
        let joined = shared.gate.0.fetch_and(!OPEN, Ordering::AcqRel) & JOINED;
        let mut patience = Patience::new();
        while u64::from(shared.left.0.load(Ordering::Acquire)) != joined {
            patience.wait();
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

    fn open(&self, tasks: usize, body: &(dyn Fn(Turn) + Sync)) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers use the pointer only between joining and
        // leaving, and `run` waits for all who joined before it returns.
        let body: *const (dyn Fn(Turn) + Sync) = unsafe { std::mem::transmute(body) };
        // SAFETY: the gate is closed and everybody who joined the last run has left, so nobody reads
        // the job; `&mut self` in `run` keeps other callers out.
        unsafe { *shared.job.get() = Some(Job { body, tasks }) };
        shared.next.0.store(0, Ordering::Relaxed);
        shared.left.0.store(0, Ordering::Relaxed);
        let last = epoch(shared.gate.0.load(Ordering::Relaxed));
        let gate = u64::from(last.wrapping_add(1)) << 32 | OPEN;
        // Sequentially consistent with `asleep`: either the worker sees this gate before it parks, or
        // it is seen asleep here.
        shared.gate.0.store(gate, Ordering::SeqCst);
        for worker in self.workers.iter().take(tasks - 1) {
            worker.wake();
        }
    }

    fn bind_caller(&self) {
        let Some(cores) = self.cores.first() else {
            return;
        };
        if BOUND.replace(self.number) != self.number {
            affinity::bind(cores);
        }
    }

    fn spawn(&self, index: usize) -> std::io::Result<Worker> {
        let asleep = Arc::new(AtomicBool::new(false));
        let cores = self.cores.iter().cycle().nth(index).cloned();
        let (shared, mine) = (Arc::clone(&self.shared), Arc::clone(&asleep));
        let handle = std::thread::Builder::new()
            .name(format!("cpu-{index}"))
            .spawn(move || {
                if let Some(cores) = cores {
                    affinity::bind(&cores);
                }
                shared.work(index, &mine);
            })?;
        CROWD.fetch_add(1, Ordering::Relaxed);
        Ok(Worker {
            asleep,
            thread: handle.thread().clone(),
            handle: Some(handle),
        })
    }
}

/// The same, or none if the system binds no thread to one of them: tried by a thread that ends, because what is told of a
/// worker's cores must be so before it computes.
fn if_bindable(cores: &[Vec<usize>]) -> std::io::Result<&[Vec<usize>]> {
    if cores.is_empty() {
        return Ok(cores);
    }
    let refused = std::thread::scope(|scope| {
        let tried = std::thread::Builder::new()
            .spawn_scoped(scope, || cores.iter().find(|cores| !affinity::bind(cores)))?;
        std::io::Result::Ok(tried.join().unwrap_or(None))
    })?;
    Ok(match refused {
        None => cores,
        Some(refused) => {
            let cores = affinity::listed(refused);
            tracing::warn!(
                cores,
                "the system does not bind a thread to these cores; all threads run where they are put"
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
                // A worker catches its tasks' panics, so it ends well.
                let _ = handle.join();
            }
        }
        CROWD.fetch_sub(1 + self.workers.len(), Ordering::Relaxed);
    }
}

impl Worker {
    fn wake(&self) {
        // The load keeps the common case, a spinning worker, free of a write.
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            self.thread.unpark();
        }
    }
}

impl Shared {
    /// A worker's life.
    fn work(&self, worker: usize, asleep: &AtomicBool) {
        let mut seen = 0;
        while let Some(gate) = self.await_run(seen, asleep) {
            let joined =
                self.gate
                    .0
                    .compare_exchange(gate, gate + 1, Ordering::AcqRel, Ordering::Relaxed);
            if joined.is_err() {
                // Closed meanwhile, or another worker joined in the same moment: look again.
                continue;
            }
            seen = epoch(gate);
            // SAFETY: joined while open, so the job is that of this run until this worker leaves.
            if let Some(Job { body, tasks }) = unsafe { *self.job.get() } {
                // SAFETY: `run` keeps the body alive until this worker has left.
                let body = unsafe { &*body };
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    self.take_tasks(body, tasks, worker);
                }));
                if let Err(panic) = outcome {
                    let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                    first.get_or_insert(panic);
                }
            }
            self.left.0.fetch_add(1, Ordering::Release);
        }
    }

    /// Waits for an open run other than `seen`; `None` when the set is being dropped.
    fn await_run(&self, seen: u32, asleep: &AtomicBool) -> Option<u64> {
        let mut patience = Patience::new();
        loop {
            let gate = self.gate.0.load(Ordering::SeqCst);
            if gate & OPEN != 0 && epoch(gate) != seen {
                asleep.store(false, Ordering::SeqCst);
                return Some(gate);
            }
            if self.stopping.load(Ordering::SeqCst) {
                return None;
            }
            if asleep.load(Ordering::SeqCst) {
                // Announced, and nothing has come since: whoever opens a run now wakes this thread.
                std::thread::park();
                asleep.store(false, Ordering::SeqCst);
                patience = Patience::new();
            } else if patience.spent() {
                asleep.store(true, Ordering::SeqCst);
            } else {
                patience.wait();
            }
        }
    }

    /// Takes tasks until none is left. A panic leaves none for the others.
    fn take_tasks(&self, body: &(dyn Fn(Turn) + Sync), tasks: usize, worker: usize) {
        let stop = StopOnPanic {
            next: &self.next.0,
            tasks,
        };
        loop {
            let task = self.next.0.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                break;
            }
            body(Turn { task, worker });
        }
        std::mem::forget(stop);
    }

    fn clear_panic(&self) -> Option<Box<dyn Any + Send>> {
        self.panic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
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

/// How a thread waits: it pauses, then gives its core away between looks.
struct Patience {
    looks: u32,
    spins: u32,
}

impl Patience {
    fn new() -> Self {
        let crowded = CROWD.load(Ordering::Relaxed) > affinity::cores_count();
        Self {
            looks: 0,
            spins: if crowded { SPINS_CROWDED } else { SPINS },
        }
    }

    fn wait(&mut self) {
        if self.looks < self.spins {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
        self.looks = self.looks.saturating_add(1);
    }

    fn spent(&self) -> bool {
        self.looks >= self.spins + YIELDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn every_task_runs_once_whatever_the_thread_count() {
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
    fn workers_that_come_late_touch_no_closed_run() {
        // More threads than cores, very short runs with state on the stack: a worker that entered a
        // run after its end would write into a later run's sum.
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
    fn a_panic_in_any_task_reaches_the_caller_and_the_threads_go_on() {
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
            // Two tasks that wait for each other: only a woken worker lets this end.
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
    fn threads_that_the_system_does_not_bind_are_said_to_be_bound_to_nothing() {
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
    fn several_sets_run_side_by_side() {
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
