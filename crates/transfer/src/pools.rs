//! Pools that senders write into themselves: what a device's memory makes possible, and who may.
//!
//! Owns: the traits by which a pool is shared and opened, and [`Access`]: which lives of peers were ever given this
//! worker's pool. Never: copies, or knows a device.
//!
//! A peer that was given the pool may write into it for as long as its process lives, whatever becomes of the link: so
//! a worker that shares its pool is a `Writer::Sender` to its brain, for all its peers. That is the safe one of the
//! two: a frame that this worker writes itself is written and verified as ever, and blocks of a hand-off that ended
//! early wait for the sender's `Stopped` even where no sender could write to them. For peers of which that is known
//! ([`Reach::Never`]) the body answers in their place, at once.
//!
//! Invariant: a life that is said to be [`Reach::Never`] is never given the pool afterwards; one that was given it
//! stays [`Reach::Given`] until it is severed.

use cleave_domain::{BlockIndex, Incarnation, WorkerId, WorkerRef};
use cleave_kv::BlockPart;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// This worker's pool, as far as it can be shared, and its way into others.
pub trait Pools: Send + Sync + Debug {
    /// What a peer needs to write into this worker's pool; means something to [`Pools::open`] only.
    ///
    /// # Errors
    /// Why it cannot be shared.
    fn handle(&self) -> Result<Vec<u8>, String>;

    /// Opens a peer's pool.
    ///
    /// # Errors
    /// Why it cannot be reached.
    fn open(&self, handle: &[u8]) -> Result<Arc<dyn PeerPool>, String>;
}

/// A peer's pool that was opened. Whoever holds it may write there.
pub trait PeerPool: Send + Sync + Debug {
    /// Copies parts of this worker's blocks straight into the peer's; says the checksum of each. No byte is written
    /// after it has returned.
    ///
    /// # Errors
    /// What failed; what is in the peer's blocks is unknown then.
    fn write(&self, parts: &[DirectPart]) -> Result<Vec<u64>, String>;

    /// Copies bytes that mean nothing to a place beside the peer's blocks; says how many.
    ///
    /// # Errors
    /// What failed.
    fn probe(&self) -> Result<usize, String>;
}

/// Bytes that go from pool to pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectPart {
    /// This worker's block.
    pub from: BlockIndex,
    /// The peer's.
    pub to: BlockIndex,
    /// Which bytes of both.
    pub part: BlockPart,
}

/// Whether a peer can write into this worker's pool itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// It cannot, and never will.
    Never,
    /// It was not given the pool so far.
    NotYet,
    /// It can, for as long as its process lives.
    Given,
}

/// Copies that are timed to see how fast a pool is written to, after one that is not.
const PROBES_COUNT: usize = 8;

/// How many bytes went into a peer's pool, and how long that took.
pub(crate) async fn measure(pool: Arc<dyn PeerPool>) -> Result<(usize, Duration), String> {
    let copies = move || {
        pool.probe()?;
        let start = Instant::now();
        let mut bytes = 0;
        for _ in 0..PROBES_COUNT {
            bytes += pool.probe()?;
        }
        Ok((bytes, start.elapsed()))
    };
    // It waits for a device.
    let copied = tokio::task::spawn_blocking(copies).await;
    copied.unwrap_or_else(|_| Err("this worker is closing".to_owned()))
}

/// Lives that are barred, remembered at most: far more than routers could still name by mistake.
const BARRED_MAX: usize = 4096;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Access {
    pools: Option<Arc<dyn Pools>>,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    given: BTreeSet<WorkerRef>,
    /// The last life of each worker that is never given the pool; no earlier one is either.
    barred: BTreeMap<WorkerId, Incarnation>,
    by_age: VecDeque<WorkerId>,
}

impl Access {
    pub(crate) fn new(pools: Option<Arc<dyn Pools>>) -> Arc<Self> {
        Arc::new(Self {
            pools,
            book: Mutex::default(),
        })
    }

    /// What opens the pools of others, and shares this one.
    pub(crate) fn pools(&self) -> Option<&Arc<dyn Pools>> {
        self.pools.as_ref()
    }

    /// Gives the pool away. From now on the peer counts as one that writes here, whether it comes to that or not.
    pub(crate) fn give(&self, peer: WorkerRef) -> Result<Vec<u8>, String> {
        let pools = self.pools.as_ref();
        let pools = pools.ok_or("this worker's blocks are not in a device's memory")?;
        let mut book = self.lock();
        if book.bars(peer) {
            return Err("that worker was given up before".to_owned());
        }
        let handle = pools.handle()?;
        book.given.insert(peer);
        Ok(handle)
    }

    /// How far the peer comes.
    pub(crate) fn reach(&self, peer: WorkerRef) -> Reach {
        let book = self.lock();
        if book.given.contains(&peer) {
            return Reach::Given;
        }
        match self.pools.is_none() || book.bars(peer) {
            true => Reach::Never,
            false => Reach::NotYet,
        }
    }

    /// The peer, if it was not given the pool, never will be. Gives how far it comes from now on.
    pub(crate) fn bar(&self, peer: WorkerRef) -> Reach {
        let mut book = self.lock();
        if book.given.contains(&peer) {
            return Reach::Given;
        }
        book.bar(peer);
        Reach::Never
    }

    /// Nothing that the peer still does can reach the pool. False if it could not before.
    pub(crate) fn sever(&self, peer: WorkerRef) -> bool {
        let mut book = self.lock();
        let was_given = book.given.remove(&peer);
        book.bar(peer);
        was_given
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    fn bars(&self, peer: WorkerRef) -> bool {
        let last = self.barred.get(&peer.worker);
        last.is_some_and(|last| peer.incarnation <= *last)
    }

    fn bar(&mut self, peer: WorkerRef) {
        if let Some(life) = self.barred.get_mut(&peer.worker) {
            *life = (*life).max(peer.incarnation);
            return;
        }
        self.barred.insert(peer.worker, peer.incarnation);
        self.by_age.push_back(peer.worker);
        if self.by_age.len() > BARRED_MAX
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.barred.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Open;

    impl Pools for Open {
        fn handle(&self) -> Result<Vec<u8>, String> {
            Ok(vec![1])
        }

        fn open(&self, _: &[u8]) -> Result<Arc<dyn PeerPool>, String> {
            Err("nobody asks".to_owned())
        }
    }

    fn life(worker: u64, incarnation: u64) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(worker),
            incarnation: Incarnation(incarnation),
        }
    }

    #[test]
    fn lesson_02_who_was_said_to_write_nothing_was_given_the_pool_afterwards() {
        let access = Access::new(Some(Arc::new(Open)));
        assert_eq!(access.reach(life(1, 5)), Reach::NotYet);
        assert_eq!(access.bar(life(1, 5)), Reach::Never);
        assert!(access.give(life(1, 5)).is_err() && access.give(life(1, 4)).is_err());
        assert_eq!(access.reach(life(1, 5)), Reach::Never);
        // Another life is another matter.
        assert!(access.give(life(1, 6)).is_ok());
        assert_eq!(access.bar(life(1, 6)), Reach::Given);
        assert!(access.sever(life(1, 6)));
        assert_eq!(access.reach(life(1, 6)), Reach::Never);
        assert!(!access.sever(life(1, 6)), "once");
    }

    #[test]
    fn a_worker_without_a_pool_to_share_is_written_to_by_nobody() {
        let access = Access::new(None);
        assert_eq!(access.reach(life(1, 1)), Reach::Never);
        assert!(access.give(life(1, 1)).is_err());
    }
}
