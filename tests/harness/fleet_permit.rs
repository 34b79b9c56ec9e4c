//! The number of fleets that run at once.
//!
//! Owns: the permits. Never: knows a process.
//! Invariant: a thread that waits for a permit holds none, so no two tests wait for each other.
//!
//! The test runner starts a test for each core. A fleet is up to six processes, most of which
//! compute; with a fleet for each core of a large machine, processes would be silent for longer
//! than the second that some tests allow.

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, Weak};

/// Cores for each fleet.
const CORES: usize = 4;

/// Number of fleets on a machine with fewer cores: most of their time they wait for each other.
const FLEETS_MIN: usize = 3;

static RUNNING: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

thread_local! {
    static HELD: RefCell<Weak<FleetPermit>> = const { RefCell::new(Weak::new()) };
}

/// The permit of all processes that one thread started.
pub(crate) struct FleetPermit(());

impl FleetPermit {
    /// The permit that this thread's other processes hold; without such, waits for one.
    pub(crate) fn of_this_thread() -> Arc<Self> {
        HELD.with_borrow_mut(|held| {
            held.upgrade().unwrap_or_else(|| {
                let permit = Arc::new(Self::acquire());
                *held = Arc::downgrade(&permit);
                permit
            })
        })
    }

    fn acquire() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let most = FLEETS_MIN.max(cores / CORES);
        let running = RUNNING.lock().expect("no panic holds it");
        let mut running = ENDED
            .wait_while(running, |running| *running >= most)
            .expect("no panic holds it");
        *running += 1;
        Self(())
    }
}

impl Drop for FleetPermit {
    fn drop(&mut self) {
        *RUNNING.lock().expect("no panic holds it") -= 1;
        ENDED.notify_one();
    }
}
