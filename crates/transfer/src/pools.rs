//! Access of senders to this worker's pool: the traits by which pools in device memory are shared,
//! and the record of the peers that have access.
//!
//! Owns: the traits by which a pool is shared and opened, and [`PoolAccessList`], the record of the
//! incarnations of peers that were granted this worker's pool. Never: copies blocks, or knows a
//! device.
//!
//! A peer that was granted the pool may write into it for as long as its process lives, even after
//! its link has ended. So a worker that shares its pool is a `PoolWriter::Sender` to its brain, for
//! all peers. That is the safe choice of the two: frames that this worker writes itself are written
//! and verified as usual, and blocks of a hand-off that ended early wait for the sender's `Stopped`
//! even if no sender could write to them. For peers that are known to have no access
//! ([`PoolAccess::Never`]) the body answers in their place, at once.
//!
//! Invariant: an incarnation reported as [`PoolAccess::Never`] is never granted the pool
//! afterwards; an incarnation that was granted it stays [`PoolAccess::Given`] until it is fenced.

use cleave_domain::{BlockIndex, Incarnation, WorkerId, WorkerRef};
use cleave_kv::BlockPart;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Shares this worker's pool with peers, and opens theirs.
pub trait PoolSharing: Send + Sync + Debug {
    /// The handle that a peer needs to write into this worker's pool; only [`PoolSharing::open`]
    /// interprets it.
    ///
    /// # Errors
    /// The reason for which it cannot be shared.
    fn handle(&self) -> Result<Vec<u8>, String>;

    /// Opens a peer's pool.
    ///
    /// # Errors
    /// The reason for which it cannot be reached.
    fn open(&self, handle: &[u8]) -> Result<Arc<dyn PeerPool>, String>;
}

/// A peer's pool that was opened. The holder may write into it.
pub trait PeerPool: Send + Sync + Debug {
    /// Copies parts of this worker's blocks directly into the peer's, and returns the checksum of
    /// each. No byte is written after it has returned.
    ///
    /// # Errors
    /// The failure; the contents of the peer's blocks are unknown then.
    fn write(&self, parts: &[DirectCopy]) -> Result<Vec<u64>, String>;

    /// Copies meaningless bytes to memory beside the peer's blocks, and returns their number.
    ///
    /// # Errors
    /// The failure.
    fn probe(&self) -> Result<usize, String>;
}

/// A copy from pool to pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectCopy {
    /// The block of this worker's pool.
    pub from: BlockIndex,
    /// The block of the peer's pool.
    pub to: BlockIndex,
    /// The byte range in both blocks.
    pub part: BlockPart,
}

/// Whether a peer can write into this worker's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolAccess {
    /// The peer has no access and never gets it.
    Never,
    /// The peer was not granted the pool so far.
    NotYet,
    /// The peer has access for as long as its process lives.
    Given,
}

/// Number of copies that are timed to measure the bandwidth, after one warm-up copy.
const PROBES_COUNT: usize = 8;

/// Measures the bandwidth into a peer's pool: bytes copied, and the time that they took.
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
    // The copies wait for a device.
    let copied = tokio::task::spawn_blocking(copies).await;
    copied.unwrap_or_else(|_| Err("this worker is closing".to_owned()))
}

/// Limit of the workers whose access is recorded as denied: far more than routers could still name
/// by mistake.
const DENIED_MAX: usize = 4096;

/// The record of the peers that have access to this worker's pool.
#[derive(Debug, Default)]
pub(crate) struct PoolAccessList {
    pools: Option<Arc<dyn PoolSharing>>,
    state: Mutex<PoolAccessState>,
}

#[derive(Debug, Default)]
struct PoolAccessState {
    granted: BTreeSet<WorkerRef>,
    /// For each worker the last incarnation that is denied the pool; earlier incarnations are
    /// denied, too.
    denied: BTreeMap<WorkerId, Incarnation>,
    by_age: VecDeque<WorkerId>,
}

impl PoolAccessList {
    pub(crate) fn new(pools: Option<Arc<dyn PoolSharing>>) -> Arc<Self> {
        Arc::new(Self {
            pools,
            state: Mutex::default(),
        })
    }

    /// The trait object that opens pools of others and shares this one.
    pub(crate) fn pools(&self) -> Option<&Arc<dyn PoolSharing>> {
        self.pools.as_ref()
    }

    /// Grants the pool. From now on the peer counts as a writer, whether it writes or not.
    pub(crate) fn grant(&self, peer: WorkerRef) -> Result<Vec<u8>, String> {
        let pools = self.pools.as_ref();
        let pools = pools.ok_or("this worker's blocks are not in a device's memory")?;
        let mut state = self.lock();
        if state.is_denied(peer) {
            return Err("this worker has denied its pool to that worker before".to_owned());
        }
        let handle = pools.handle()?;
        state.granted.insert(peer);
        Ok(handle)
    }

    /// The access of the peer.
    pub(crate) fn access_of(&self, peer: WorkerRef) -> PoolAccess {
        let state = self.lock();
        if state.granted.contains(&peer) {
            return PoolAccess::Given;
        }
        if self.pools.is_none() || state.is_denied(peer) {
            PoolAccess::Never
        } else {
            PoolAccess::NotYet
        }
    }

    /// Denies the pool to the peer, unless it was granted before. Returns its access from now on.
    pub(crate) fn deny(&self, peer: WorkerRef) -> PoolAccess {
        let mut state = self.lock();
        if state.granted.contains(&peer) {
            return PoolAccess::Given;
        }
        state.deny(peer);
        PoolAccess::Never
    }

    /// Records that the peer can no longer reach the pool. Returns `false` if it had no access
    /// before.
    pub(crate) fn fence(&self, peer: WorkerRef) -> bool {
        let mut state = self.lock();
        let was_given = state.granted.remove(&peer);
        state.deny(peer);
        was_given
    }

    fn lock(&self) -> MutexGuard<'_, PoolAccessState> {
        self.state.lock()
    }
}

impl PoolAccessState {
    fn is_denied(&self, peer: WorkerRef) -> bool {
        let last = self.denied.get(&peer.worker);
        last.is_some_and(|last| peer.incarnation <= *last)
    }

    fn deny(&mut self, peer: WorkerRef) {
        if let Some(life) = self.denied.get_mut(&peer.worker) {
            *life = (*life).max(peer.incarnation);
            return;
        }
        self.denied.insert(peer.worker, peer.incarnation);
        self.by_age.push_back(peer.worker);
        if self.by_age.len() > DENIED_MAX
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.denied.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct SharingFixture;

    impl PoolSharing for SharingFixture {
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

    // Invariant: I21.
    // Lesson: 2.
    #[test]
    fn a_fenced_peer_never_gets_the_pool() {
        let access = PoolAccessList::new(Some(Arc::new(SharingFixture)));
        assert_eq!(access.access_of(life(1, 5)), PoolAccess::NotYet);
        assert_eq!(access.deny(life(1, 5)), PoolAccess::Never);
        assert!(access.grant(life(1, 5)).is_err() && access.grant(life(1, 4)).is_err());
        assert_eq!(access.access_of(life(1, 5)), PoolAccess::Never);
        // A later incarnation is not affected.
        assert!(access.grant(life(1, 6)).is_ok());
        assert_eq!(access.deny(life(1, 6)), PoolAccess::Given);
        assert!(access.fence(life(1, 6)));
        assert_eq!(access.access_of(life(1, 6)), PoolAccess::Never);
        assert!(!access.fence(life(1, 6)), "once");
    }

    #[test]
    fn a_worker_without_a_shared_pool_grants_no_access() {
        let access = PoolAccessList::new(None);
        assert_eq!(access.access_of(life(1, 1)), PoolAccess::Never);
        assert!(access.grant(life(1, 1)).is_err());
    }
}
