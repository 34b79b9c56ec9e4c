//! KV tiers below the pool: prefix-cache blocks in host memory and on disk.
//!
//! Owns: the copies, each under its content hash, and the threads that verify, read and write them.
//! Never decides which blocks are kept, dropped or loaded; never makes the engine's thread or the
//! driver wait for a disk.
//! Invariant: a loaded block has the seal under which it was kept, of this content and this model;
//! every copy asked for is answered once.
//!
//! Copies out of the pool and into it are made on the engine's thread, in its queue's order, one
//! block or piece of a state each, so that a step can go ahead of them (see `engine`). A block on
//! its way back was fetched and verified by a reader thread first: one thread serves sequences
//! whose blocks are all in memory, another one those with blocks on disk. Blocks from disk wait for
//! the engine in a bounded number of buffers.

mod load;
mod slab;

pub(super) use load::{FetchId, LoadedBlock, OffloadJob, PendingLoad, PendingLoads};
pub use slab::SlabError;
use slab::{Slab, SlabFormat};

use super::engine::EngineWork;
use super::queue::EngineQueue;
use cleave_domain::{BlockHash, Fingerprint, HandoffId};
use cleave_engine::BlockSpan;
use cleave_sched::{FetchOutcome, OffloadOutcome, TierLevel, WorkerInput};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, mpsc as threads};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tracing::{error, info, warn};

/// Bytes read from disk that may wait for the engine; two blocks at least.
const STAGED_BYTES: u64 = 64 << 20;

/// Where a worker keeps blocks evicted from its prefix cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierOptions {
    /// Bytes of host memory. Default none: then nothing is kept.
    pub host_bytes: u64,
    /// A folder on disk for further blocks, which survive a restart. Default none.
    pub disk: Option<DiskOptions>,
}

impl TierOptions {
    /// Checks that the folder can be used, before a model is loaded; creates it if needed.
    ///
    /// # Errors
    /// `Unusable`, with the folder's name.
    pub fn check(&self) -> Result<(), SlabError> {
        match &self.disk {
            Some(disk) => slab::check_folder(&disk.folder),
            None => Ok(()),
        }
    }
}

/// A folder for KV blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// The folder, created if needed. Workers may share it: each has a file of its own.
    pub folder: PathBuf,
    /// The largest size of a worker's file.
    pub bytes: u64,
}

/// A block in host memory.
#[derive(Debug)]
pub(super) struct HostBlock {
    pub(super) bytes: Vec<u8>,
    pub(super) seal: u64,
}

/// The places of all kept blocks, shared by all threads.
#[derive(Debug)]
pub(super) struct TierStore {
    format: SlabFormat,
    state: Mutex<TierStoreState>,
    slab: Option<Slab>,
    staging: StagingBuffers,
}

#[derive(Debug, Default)]
struct TierStoreState {
    host: HashMap<BlockHash, Arc<HostBlock>>,
    /// Buffers of dropped copies, for reuse.
    spare_buffers: Vec<Vec<u8>>,
    on_disk: HashMap<BlockHash, u32>,
    slots_free: Vec<u32>,
    /// Fetches that a reader has or will get; the latest of each sequence.
    fetches_open: BTreeMap<HandoffId, FetchProgress>,
    /// Fetches so far; numbers the next one.
    fetches_begun: u64,
}

/// A fetch that a reader has or will get.
#[derive(Clone, Copy, Debug)]
struct FetchProgress {
    number: u64,
    interest: FetchInterest,
    /// When a reader began its present block; waiting for buffers and for the engine does not
    /// count.
    reading_since: Option<Instant>,
}

/// Whether a fetch goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FetchInterest {
    Active,
    Stopped,
}

/// A kept block, with its staging permit if it comes from disk.
type FetchedBlock = Result<(Arc<HostBlock>, Option<StagingPermit>), FetchOutcome>;

/// The number of buffers for blocks read from disk.
#[derive(Debug)]
struct StagingBuffers {
    left: Mutex<usize>,
    returned: Condvar,
}

/// A permit for one staging buffer, returned on drop.
#[derive(Debug)]
pub(super) struct StagingPermit(Arc<TierStore>);

impl Drop for StagingPermit {
    fn drop(&mut self) {
        let staged = &self.0.staging;
        *staged.left.lock() += 1;
        staged.returned.notify_one();
    }
}

/// A sequence's blocks and pieces of its state to load, each with its place in the pool.
#[derive(Debug)]
struct FetchJob {
    id: FetchId,
    parts: Vec<(BlockHash, BlockSpan)>,
}

/// The driver's side. Its threads end with it.
#[derive(Debug)]
pub(crate) struct TierIo {
    pub(super) store: Arc<TierStore>,
    from_host: threads::Sender<FetchJob>,
    from_disk: threads::Sender<FetchJob>,
    write: threads::Sender<BlockHash>,
}

/// The tier before the engine's host runs.
#[derive(Debug)]
pub(crate) struct OpenedTier {
    store: Arc<TierStore>,
    /// Blocks that an earlier incarnation left on disk.
    pub(crate) found: Vec<BlockHash>,
    /// How many blocks each place may keep.
    pub(crate) host_blocks: u32,
    pub(crate) disk_blocks: u32,
}

impl OpenedTier {
    /// Opens the file on disk, if there is one; `None` if nothing is to be kept.
    pub(crate) fn open(
        options: &TierOptions,
        fingerprint: &Fingerprint,
        block_bytes: u32,
    ) -> Result<Option<Self>, SlabError> {
        let host_blocks = options.host_bytes / u64::from(block_bytes.max(1));
        if options == &TierOptions::default() {
            return Ok(None);
        }
        if host_blocks == 0 {
            let host_bytes = options.host_bytes;
            return Err(SlabError::NoRoom {
                host_bytes,
                block_bytes,
            });
        }
        let format = SlabFormat::new(fingerprint, block_bytes);
        let mut state = TierStoreState::default();
        let mut slab = None;
        if let Some(DiskOptions { folder, bytes }) = &options.disk {
            let (opened, found) = Slab::open(folder, format, *bytes)?;
            state.on_disk = found.into_iter().map(|(slot, hash)| (hash, slot)).collect();
            let used_slots: BTreeSet<u32> = state.on_disk.values().copied().collect();
            let free = (0..opened.slots_count()).filter(|slot| !used_slots.contains(slot));
            state.slots_free = free.collect();
            let (path, blocks) = (opened.path().display(), state.on_disk.len());
            info!(%path, blocks, slots = opened.slots_count(), "KV blocks on disk");
            slab = Some(opened);
        }
        let found = state.on_disk.keys().copied().collect();
        let staging_slots = (STAGED_BYTES / u64::from(block_bytes)).max(2);
        Ok(Some(Self {
            host_blocks: u32::try_from(host_blocks).unwrap_or(u32::MAX),
            disk_blocks: slab.as_ref().map_or(0, Slab::slots_count),
            found,
            store: Arc::new(TierStore {
                format,
                state: Mutex::new(state),
                slab,
                staging: StagingBuffers {
                    left: Mutex::new(usize::try_from(staging_slots).unwrap_or(usize::MAX)),
                    returned: Condvar::new(),
                },
            }),
        }))
    }

    /// For the engine's thread.
    pub(crate) fn store(&self) -> Arc<TierStore> {
        Arc::clone(&self.store)
    }

    /// Starts the threads; loaded blocks go to the engine's queue, other answers to `answers`.
    pub(super) fn start(
        self,
        queue: &Arc<EngineQueue>,
        wake: Option<thread::Thread>,
        answers: mpsc::UnboundedSender<WorkerInput>,
    ) -> io::Result<TierIo> {
        let engine = EngineQueueHandle {
            queue: Arc::clone(queue),
            thread: wake,
        };
        let reader = |name: &str| {
            let (sender, fetches) = threads::channel::<FetchJob>();
            let (tier_store, engine) = (Arc::clone(&self.store), engine.clone());
            let run = move || {
                for fetch in fetches {
                    tier_store.load_blocks(&fetch, &engine);
                }
            };
            let spawned = thread::Builder::new().name(name.into()).spawn(run);
            spawned.map(|_| sender)
        };
        let (from_host, from_disk) = (reader("cleave-kv-host")?, reader("cleave-kv-disk")?);
        let (write, contents) = threads::channel();
        let tier_store = Arc::clone(&self.store);
        let writer = thread::Builder::new().name("cleave-kv-write".into());
        writer.spawn(move || {
            let mut failing = false;
            for content in contents {
                let fact = tier_store.spill_to_disk(content, &mut failing);
                if answers.send(fact).is_err() {
                    return;
                }
            }
        })?;
        Ok(TierIo {
            store: self.store,
            from_host,
            from_disk,
            write,
        })
    }
}

/// The engine's queue, for other threads.
#[derive(Clone, Debug)]
struct EngineQueueHandle {
    queue: Arc<EngineQueue>,
    thread: Option<thread::Thread>,
}

impl EngineQueueHandle {
    /// False once the driver is gone.
    fn push(&self, work: EngineWork) -> bool {
        let mut state = self.queue.lock();
        if state.closed {
            return false;
        }
        state.work.push_back(work);
        drop(state);
        self.queue.changed.notify_one();
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
        true
    }
}

impl TierIo {
    /// Registers a fetch. An earlier fetch of the same sequence is not waited for any more.
    pub(super) fn register_fetch(&self, handoff: HandoffId) -> FetchId {
        let mut state = self.store.lock();
        state.fetches_begun += 1;
        let number = state.fetches_begun;
        let progress = FetchProgress {
            number,
            interest: FetchInterest::Active,
            reading_since: None,
        };
        state.fetches_open.insert(handoff, progress);
        FetchId { handoff, number }
    }

    /// Loads the blocks of a fetch; the engine's thread answers.
    pub(super) fn fetch(&self, id: FetchId, parts: Vec<(BlockHash, BlockSpan)>) {
        let state = self.store.lock();
        let in_host = |(content, _): &(BlockHash, _)| state.host.contains_key(content);
        let reader = if parts.iter().all(in_host) {
            &self.from_host
        } else {
            &self.from_disk
        };
        // A reader ends only with this value.
        let _ = reader.send(FetchJob { id, parts });
    }

    /// Loads no more blocks for this hand-off.
    pub(super) fn stop(&self, handoff: HandoffId) {
        self.store.stop(handoff);
    }

    pub(super) fn spill_to_disk(&self, content: BlockHash) {
        let _ = self.write.send(content);
    }

    pub(super) fn drop_block(&self, content: BlockHash, place: TierLevel) {
        let mut state = self.store.lock();
        match place {
            TierLevel::Host => {
                let copy = state.host.remove(&content);
                // A thread that still reads it drops it later.
                let copy = copy.and_then(|copy| Arc::try_unwrap(copy).ok());
                state.spare_buffers.extend(copy.map(|copy| copy.bytes));
            }
            TierLevel::Disk => {
                let slot = state.on_disk.remove(&content);
                state.slots_free.extend(slot);
            }
        }
    }
}

impl TierStoreState {
    /// The entry of a fetch, unless a later fetch of the same sequence replaced it.
    fn open_fetch(&mut self, fetch: FetchId) -> Option<&mut FetchProgress> {
        let progress = self.fetches_open.get_mut(&fetch.handoff)?;
        (progress.number == fetch.number).then_some(progress)
    }
}

impl TierStore {
    fn lock(&self) -> MutexGuard<'_, TierStoreState> {
        self.state.lock()
    }

    // === to host memory, on the engine's thread ===

    /// A buffer for one block; `None` if there is no memory.
    pub(super) fn block_buffer(&self) -> Option<Vec<u8>> {
        if let Some(spare) = self.lock().spare_buffers.pop() {
            return Some(spare);
        }
        let bytes = self.format.block_bytes as usize;
        let mut block = Vec::new();
        block.try_reserve_exact(bytes).ok()?;
        block.resize(bytes, 0);
        Some(block)
    }

    pub(super) fn keep(&self, content: BlockHash, bytes: Vec<u8>) {
        let seal = self.format.seal(content, &bytes);
        let copy = Arc::new(HostBlock { bytes, seal });
        self.lock().host.insert(content, copy);
    }

    /// Stops a fetch. Gives how long its reader has been at the present block.
    pub(super) fn stop(&self, handoff: HandoffId) -> Duration {
        let mut state = self.lock();
        let Some(progress) = state.fetches_open.get_mut(&handoff) else {
            return Duration::ZERO;
        };
        progress.interest = FetchInterest::Stopped;
        progress
            .reading_since
            .map_or(Duration::ZERO, |at| at.elapsed())
    }

    fn is_active(&self, fetch: FetchId) -> bool {
        let mut state = self.lock();
        let progress = state.open_fetch(fetch);
        progress.is_some_and(|progress| progress.interest == FetchInterest::Active)
    }

    fn set_reading(&self, fetch: FetchId, since: Option<Instant>) {
        if let Some(progress) = self.lock().open_fetch(fetch) {
            progress.reading_since = since;
        }
    }

    // === to disk ===

    fn spill_to_disk(&self, content: BlockHash, failing: &mut bool) -> WorkerInput {
        let began = Instant::now();
        let written = self.write(content);
        if let Err(error) = &written
            && !*failing
        {
            let path = self.slab.as_ref().map(|slab| slab.path().display());
            let path = path.map(|path| path.to_string());
            warn!(path, %error, "cannot write KV blocks to disk: blocks that do not fit in host memory are dropped");
        }
        *failing = written.is_err();
        WorkerInput::SpilledToDisk {
            content,
            outcome: match written {
                Ok(()) => OffloadOutcome::Copied,
                Err(_) => OffloadOutcome::Broken,
            },
            took: began.elapsed(),
        }
    }

    fn write(&self, content: BlockHash) -> io::Result<()> {
        let slab = self.slab.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let mut state = self.lock();
        let copy = state.host.get(&content).cloned();
        let copy =
            copy.ok_or_else(|| io::Error::other("the block is not in host memory any more"))?;
        let slot = state.slots_free.pop();
        let slot = slot.ok_or(io::ErrorKind::StorageFull)?;
        drop(state);
        let written = slab.write(slot, content, &copy.bytes, copy.seal);
        let mut state = self.lock();
        match &written {
            Ok(()) => drop(state.on_disk.insert(content, slot)),
            Err(_) => state.slots_free.push(slot),
        }
        written
    }

    // === back, on a reader's thread ===

    /// Loads a sequence's blocks for the engine, up to the first that fails.
    fn load_blocks(self: &Arc<Self>, fetch: &FetchJob, engine: &EngineQueueHandle) {
        self.load_until_error(fetch, engine);
        let mut state = self.lock();
        if state.open_fetch(fetch.id).is_some() {
            state.fetches_open.remove(&fetch.id.handoff);
        }
    }

    fn load_until_error(self: &Arc<Self>, fetch: &FetchJob, engine: &EngineQueueHandle) {
        for (ordinal, (content, span)) in (0..).zip(&fetch.parts) {
            let (content, took) = self.load_block(*content, fetch.id, engine);
            let amiss = content.is_err();
            let pushed = engine.push(EngineWork::Load(LoadedBlock {
                fetch: fetch.id,
                ordinal,
                span: *span,
                content,
                took,
            }));
            if amiss || !pushed {
                return;
            }
        }
    }

    /// Loads and verifies one block; gives also the time that took once it had a buffer.
    fn load_block(
        self: &Arc<Self>,
        content: BlockHash,
        fetch: FetchId,
        engine: &EngineQueueHandle,
    ) -> (FetchedBlock, Duration) {
        if !self.is_active(fetch) {
            return (Err(FetchOutcome::Stopped), Duration::ZERO);
        }
        let state = self.lock();
        let (copy, slot) = (state.host.get(&content), state.on_disk.get(&content));
        let (copy, slot) = (copy.cloned(), slot.copied());
        drop(state);
        let permit = match (&copy, slot) {
            (None, Some(_)) => match self.staging_permit(fetch, engine) {
                None => return (Err(FetchOutcome::Stopped), Duration::ZERO),
                permit => permit,
            },
            _ => None,
        };
        let began = Instant::now();
        self.set_reading(fetch, Some(began));
        let checked = self.read_verified(content, copy, slot);
        self.set_reading(fetch, None);
        (checked.map(|copy| (copy, permit)), began.elapsed())
    }

    /// Finds a block and verifies its seal.
    fn read_verified(
        &self,
        content: BlockHash,
        copy: Option<Arc<HostBlock>>,
        slot: Option<u32>,
    ) -> Result<Arc<HostBlock>, FetchOutcome> {
        let copy = match (copy, slot) {
            (Some(copy), _) => copy,
            (None, Some(slot)) => self.read(slot, content)?,
            (None, None) => return Err(FetchOutcome::Missing),
        };
        if self.format.seal(content, &copy.bytes) != copy.seal {
            error!(%content, "a kept KV block does not match its seal: it is computed again");
            return Err(FetchOutcome::Corrupt);
        }
        Ok(copy)
    }

    fn read(&self, slot: u32, content: BlockHash) -> Result<Arc<HostBlock>, FetchOutcome> {
        let slab = self.slab.as_ref().ok_or(FetchOutcome::Missing)?;
        let mut bytes = vec![0; self.format.block_bytes as usize];
        match slab.read(slot, content, &mut bytes) {
            Ok(Some(seal)) => Ok(Arc::new(HostBlock { bytes, seal })),
            Ok(None) => Err(FetchOutcome::Corrupt),
            Err(error) => {
                error!(path = %slab.path().display(), %error, "cannot read a KV block from disk");
                Err(FetchOutcome::Unreadable)
            }
        }
    }

    /// Waits for a staging buffer. `None` if the fetch is no longer wanted.
    fn staging_permit(
        self: &Arc<Self>,
        fetch: FetchId,
        engine: &EngineQueueHandle,
    ) -> Option<StagingPermit> {
        loop {
            // Checked with no lock held: dropping queued work returns permits.
            if engine.queue.lock().closed || !self.is_active(fetch) {
                return None;
            }
            let mut left = self.staging.left.lock();
            // Neither a stop nor the end of the driver wakes this wait, so it polls.
            let span = Duration::from_millis(50);
            let none = |left: &mut usize| *left == 0;
            let returned = &self.staging.returned;
            returned.wait_while_for(&mut left, none, span);
            if *left > 0 {
                *left -= 1;
                return Some(StagingPermit(Arc::clone(self)));
            }
        }
    }
}

#[cfg(test)]
mod tests;
