//! What is kept of the prefix cache below the pool: bytes in host memory and on disk.
//!
//! Owns: the copies, each by its content, and the threads that check, read and write them. Never: decides what is
//! kept, dropped or brought back; never has the engine's thread or the driver wait for a disk.
//! Invariant: what is brought back has the seal under which it was kept, of this content and this model; every
//! copy asked for is answered once.
//!
//! Copies out of the pool and into it are made on the engine's thread, in its queue's order, each block by itself, so
//! that a step goes ahead of them (see `engine`). Before a block goes there on its way back, a thread has fetched
//! it and checked its seal: one for sequences whose blocks are all in memory, one for those of which some are on
//! disk. Blocks from a disk wait for the engine in few buffers.

mod bring;
mod slab;

pub(super) use bring::{Brought, FetchId, Incoming, Incomings, Shelving};
pub use slab::SlabError;
use slab::{Meaning, Slab};

use super::engine::Work;
use super::queue::Queue;
use cleave_domain::{BlockHash, BlockIndex, Fingerprint, HandoffId};
use cleave_sched::{FetchOutcome, Input, KeepOutcome, Place};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc as threads};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tracing::{error, info, warn};

/// Bytes read from disk that wait for the engine at most; two blocks at least.
const STAGED_BYTES: u64 = 64 << 20;

/// Where a worker keeps what its prefix cache would lose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierOptions {
    /// Bytes of host memory. Default none: then nothing is kept.
    pub host_bytes: u64,
    /// A folder on disk for the same, found again after a restart. Default none.
    pub disk: Option<DiskOptions>,
}

impl TierOptions {
    /// Finds out whether the folder is of use, before a model is loaded. Makes it if it is not there.
    ///
    /// # Errors
    /// `Unusable`, with the folder's name.
    pub fn check(&self) -> Result<(), SlabError> {
        match &self.disk {
            Some(disk) => slab::try_folder(&disk.folder),
            None => Ok(()),
        }
    }
}

/// A folder for KV blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// Which; made if it is not there. Workers may share it: each has a file of its own.
    pub folder: PathBuf,
    /// Bytes of a worker's file at most.
    pub bytes: u64,
}

/// A block in host memory.
#[derive(Debug)]
pub(super) struct Copy {
    pub(super) bytes: Vec<u8>,
    pub(super) seal: u64,
}

/// What is where, for all threads.
#[derive(Debug)]
pub(super) struct Shelves {
    meaning: Meaning,
    state: Mutex<State>,
    slab: Option<Slab>,
    staged: Staged,
}

#[derive(Debug, Default)]
struct State {
    host: HashMap<BlockHash, Arc<Copy>>,
    /// Memory of copies that were dropped: it need not be taken from the system again.
    spare: Vec<Vec<u8>>,
    on_disk: HashMap<BlockHash, u32>,
    slots_free: Vec<u32>,
    /// Fetches that a reader has, or will have; of a sequence the latest.
    wanted: BTreeMap<HandoffId, Wanted>,
    /// So far; names the next one.
    fetches: u64,
}

/// A fetch that a reader has, or will have.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    number: u64,
    still: Still,
    /// Since when a reader has been at the present block of it; buffers and the engine are not waited for then.
    reading: Option<Instant>,
}

/// Whether somebody still waits for a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Still {
    Wanted,
    Stopped,
}

/// A block that was kept, and the buffer that it has if it comes from disk.
type Found = Result<(Arc<Copy>, Option<Seat>), FetchOutcome>;

/// Buffers for what was read from disk.
#[derive(Debug)]
struct Staged {
    left: Mutex<usize>,
    returned: Condvar,
}

/// A place in a staging buffer, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Seat(Arc<Shelves>);

impl Drop for Seat {
    fn drop(&mut self) {
        let staged = &self.0.staged;
        *staged.left.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        staged.returned.notify_one();
    }
}

/// A sequence's blocks, to be brought back.
#[derive(Debug)]
struct Fetch {
    id: FetchId,
    blocks: Vec<(BlockHash, BlockIndex)>,
}

/// The driver's side. Its threads end with it.
#[derive(Debug)]
pub(crate) struct Keeper {
    pub(super) shelves: Arc<Shelves>,
    from_host: threads::Sender<Fetch>,
    from_disk: threads::Sender<Fetch>,
    write: threads::Sender<BlockHash>,
}

/// What a keeper is made of, before the engine's host runs.
#[derive(Debug)]
pub(crate) struct Opened {
    shelves: Arc<Shelves>,
    /// What an earlier life left on disk.
    pub(crate) found: Vec<BlockHash>,
    /// Blocks that each place may keep.
    pub(crate) host_blocks: u32,
    pub(crate) disk_blocks: u32,
}

impl Opened {
    /// Looks what is on disk, if a disk is wanted; `None` if nothing is to be kept.
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
        let meaning = Meaning::new(fingerprint, block_bytes);
        let mut state = State::default();
        let mut slab = None;
        if let Some(DiskOptions { folder, bytes }) = &options.disk {
            let (opened, found) = Slab::open(folder, meaning, *bytes)?;
            state.on_disk = found.into_iter().map(|(slot, hash)| (hash, slot)).collect();
            let taken: BTreeSet<u32> = state.on_disk.values().copied().collect();
            let free = (0..opened.slots_count()).filter(|slot| !taken.contains(slot));
            state.slots_free = free.collect();
            let (path, blocks) = (opened.path().display(), state.on_disk.len());
            info!(%path, blocks, slots = opened.slots_count(), "KV blocks on disk");
            slab = Some(opened);
        }
        let found = state.on_disk.keys().copied().collect();
        let seats = (STAGED_BYTES / u64::from(block_bytes)).max(2);
        Ok(Some(Self {
            host_blocks: u32::try_from(host_blocks).unwrap_or(u32::MAX),
            disk_blocks: slab.as_ref().map_or(0, Slab::slots_count),
            found,
            shelves: Arc::new(Shelves {
                meaning,
                state: Mutex::new(state),
                slab,
                staged: Staged {
                    left: Mutex::new(usize::try_from(seats).unwrap_or(usize::MAX)),
                    returned: Condvar::new(),
                },
            }),
        }))
    }

    /// For the engine's thread.
    pub(crate) fn shelves(&self) -> Arc<Shelves> {
        Arc::clone(&self.shelves)
    }

    /// Starts the threads; what they bring goes to the engine's queue, other answers to `answers`.
    pub(super) fn start(
        self,
        queue: &Arc<Queue>,
        wake: Option<thread::Thread>,
        answers: mpsc::UnboundedSender<Input>,
    ) -> io::Result<Keeper> {
        let engine = EngineDoor {
            queue: Arc::clone(queue),
            thread: wake,
        };
        let reader = |name: &str| {
            let (sender, fetches) = threads::channel::<Fetch>();
            let (shelves, engine) = (Arc::clone(&self.shelves), engine.clone());
            let run = move || {
                for fetch in fetches {
                    shelves.bring(&fetch, &engine);
                }
            };
            let spawned = thread::Builder::new().name(name.into()).spawn(run);
            spawned.map(|_| sender)
        };
        let (from_host, from_disk) = (reader("cleave-kv-host")?, reader("cleave-kv-disk")?);
        let (write, contents) = threads::channel();
        let shelves = Arc::clone(&self.shelves);
        let writer = thread::Builder::new().name("cleave-kv-write".into());
        writer.spawn(move || {
            let mut failing = false;
            for content in contents {
                let fact = shelves.write_on(content, &mut failing);
                if answers.send(fact).is_err() {
                    return;
                }
            }
        })?;
        Ok(Keeper {
            shelves: self.shelves,
            from_host,
            from_disk,
            write,
        })
    }
}

/// How threads reach the engine's.
#[derive(Clone, Debug)]
struct EngineDoor {
    queue: Arc<Queue>,
    thread: Option<thread::Thread>,
}

impl EngineDoor {
    /// False once the driver is gone.
    fn push(&self, work: Work) -> bool {
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

impl Keeper {
    /// A sequence's blocks are to be brought back. Nobody waits for an earlier fetch of it any more.
    pub(super) fn want(&self, handoff: HandoffId) -> FetchId {
        let mut state = self.shelves.lock();
        state.fetches += 1;
        let number = state.fetches;
        let wanted = Wanted {
            number,
            still: Still::Wanted,
            reading: None,
        };
        state.wanted.insert(handoff, wanted);
        FetchId { handoff, number }
    }

    /// Has them brought back; the engine's thread answers.
    pub(super) fn fetch(&self, id: FetchId, blocks: Vec<(BlockHash, BlockIndex)>) {
        let state = self.shelves.lock();
        let in_host = |(content, _): &(BlockHash, _)| state.host.contains_key(content);
        let reader = match blocks.iter().all(in_host) {
            true => &self.from_host,
            false => &self.from_disk,
        };
        // A reader ends only with its keeper.
        let _ = reader.send(Fetch { id, blocks });
    }

    /// No more of it is brought.
    pub(super) fn stop(&self, handoff: HandoffId) {
        self.shelves.stop(handoff);
    }

    pub(super) fn write_on(&self, content: BlockHash) {
        let _ = self.write.send(content);
    }

    pub(super) fn drop_kept(&self, content: BlockHash, place: Place) {
        let mut state = self.shelves.lock();
        match place {
            Place::Host => {
                let copy = state.host.remove(&content);
                // Whoever reads it still drops it later.
                let copy = copy.and_then(|copy| Arc::try_unwrap(copy).ok());
                state.spare.extend(copy.map(|copy| copy.bytes));
            }
            Place::Disk => {
                let slot = state.on_disk.remove(&content);
                state.slots_free.extend(slot);
            }
        }
    }
}

impl State {
    /// What is known of a fetch, if a later one of the same sequence has not taken its place.
    fn wanted_of(&mut self, fetch: FetchId) -> Option<&mut Wanted> {
        let wanted = self.wanted.get_mut(&fetch.handoff)?;
        (wanted.number == fetch.number).then_some(wanted)
    }
}

impl Shelves {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // === to host memory, on the engine's thread ===

    /// Memory for a block; `None` if there is none.
    pub(super) fn room(&self) -> Option<Vec<u8>> {
        if let Some(spare) = self.lock().spare.pop() {
            return Some(spare);
        }
        let bytes = self.meaning.block_bytes as usize;
        let mut block = Vec::new();
        block.try_reserve_exact(bytes).ok()?;
        block.resize(bytes, 0);
        Some(block)
    }

    pub(super) fn keep(&self, content: BlockHash, bytes: Vec<u8>) {
        let seal = self.meaning.seal(content, &bytes);
        let copy = Arc::new(Copy { bytes, seal });
        self.lock().host.insert(content, copy);
    }

    /// Nobody waits for what a reader has yet to bring. Gives how long it has been at the present block.
    pub(super) fn stop(&self, handoff: HandoffId) -> Duration {
        let mut state = self.lock();
        let Some(wanted) = state.wanted.get_mut(&handoff) else {
            return Duration::ZERO;
        };
        wanted.still = Still::Stopped;
        wanted.reading.map_or(Duration::ZERO, |at| at.elapsed())
    }

    fn is_wanted(&self, fetch: FetchId) -> bool {
        let mut state = self.lock();
        let wanted = state.wanted_of(fetch);
        wanted.is_some_and(|wanted| wanted.still == Still::Wanted)
    }

    fn reading(&self, fetch: FetchId, since: Option<Instant>) {
        if let Some(wanted) = self.lock().wanted_of(fetch) {
            wanted.reading = since;
        }
    }

    // === to disk ===

    fn write_on(&self, content: BlockHash, failing: &mut bool) -> Input {
        let began = Instant::now();
        let written = self.write(content);
        if let Err(error) = &written
            && !*failing
        {
            let path = self.slab.as_ref().map(|slab| slab.path().display());
            let path = path.map(|path| path.to_string());
            warn!(path, %error, "cannot write KV blocks to disk; what host memory has no room for is lost");
        }
        *failing = written.is_err();
        Input::WrittenOn {
            content,
            outcome: match written {
                Ok(()) => KeepOutcome::Copied,
                Err(_) => KeepOutcome::Broken,
            },
            took: began.elapsed(),
        }
    }

    fn write(&self, content: BlockHash) -> io::Result<()> {
        let slab = self.slab.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let mut state = self.lock();
        let copy = state.host.get(&content).cloned();
        let copy = copy.ok_or_else(|| io::Error::other("host memory has lost it"))?;
        let slot = state.slots_free.pop();
        let slot = slot.ok_or(io::ErrorKind::StorageFull)?;
        drop(state);
        let written = slab.write((slot, content), (&copy.bytes, copy.seal));
        let mut state = self.lock();
        match &written {
            Ok(()) => drop(state.on_disk.insert(content, slot)),
            Err(_) => state.slots_free.push(slot),
        }
        written
    }

    // === back, on a reader's thread ===

    /// Brings a sequence's blocks to the engine, up to the first that is amiss.
    fn bring(self: &Arc<Self>, fetch: &Fetch, engine: &EngineDoor) {
        self.bring_all(fetch, engine);
        let mut state = self.lock();
        if state.wanted_of(fetch.id).is_some() {
            state.wanted.remove(&fetch.id.handoff);
        }
    }

    fn bring_all(self: &Arc<Self>, fetch: &Fetch, engine: &EngineDoor) {
        for (ordinal, (content, block)) in (0..).zip(&fetch.blocks) {
            let (content, took) = self.get(*content, (fetch.id, engine));
            let amiss = content.is_err();
            let pushed = engine.push(Work::Bring(Brought {
                fetch: fetch.id,
                ordinal,
                block: *block,
                content,
                took,
            }));
            if amiss || !pushed {
                return;
            }
        }
    }

    /// One block, checked, and how long that took once there was a buffer for it.
    fn get(
        self: &Arc<Self>,
        content: BlockHash,
        (fetch, engine): (FetchId, &EngineDoor),
    ) -> (Found, Duration) {
        if !self.is_wanted(fetch) {
            return (Err(FetchOutcome::Stopped), Duration::ZERO);
        }
        let state = self.lock();
        let (copy, slot) = (state.host.get(&content), state.on_disk.get(&content));
        let (copy, slot) = (copy.cloned(), slot.copied());
        drop(state);
        let seat = match (&copy, slot) {
            (None, Some(_)) => match self.seat(fetch, engine) {
                None => return (Err(FetchOutcome::Stopped), Duration::ZERO),
                seat => seat,
            },
            _ => None,
        };
        let began = Instant::now();
        self.reading(fetch, Some(began));
        let checked = self.checked(content, (copy, slot));
        self.reading(fetch, None);
        (checked.map(|copy| (copy, seat)), began.elapsed())
    }

    /// A content from where it is, if it is still what was kept.
    fn checked(
        &self,
        content: BlockHash,
        (copy, slot): (Option<Arc<Copy>>, Option<u32>),
    ) -> Result<Arc<Copy>, FetchOutcome> {
        let copy = match (copy, slot) {
            (Some(copy), _) => copy,
            (None, Some(slot)) => self.read(slot, content)?,
            (None, None) => return Err(FetchOutcome::Missing),
        };
        if self.meaning.seal(content, &copy.bytes) != copy.seal {
            error!(%content, "a KV block that was kept has changed; it is computed again");
            return Err(FetchOutcome::Corrupt);
        }
        Ok(copy)
    }

    fn read(&self, slot: u32, content: BlockHash) -> Result<Arc<Copy>, FetchOutcome> {
        let slab = self.slab.as_ref().ok_or(FetchOutcome::Missing)?;
        let mut bytes = vec![0; self.meaning.block_bytes as usize];
        match slab.read((slot, content), &mut bytes) {
            Ok(Some(seal)) => Ok(Arc::new(Copy { bytes, seal })),
            Ok(None) => Err(FetchOutcome::Corrupt),
            Err(error) => {
                error!(path = %slab.path().display(), %error, "cannot read a KV block from disk");
                Err(FetchOutcome::Unreadable)
            }
        }
    }

    /// Waits until the engine has taken some of what was read. `None` if nobody wants it any more.
    fn seat(self: &Arc<Self>, fetch: FetchId, engine: &EngineDoor) -> Option<Seat> {
        loop {
            // Asked with nothing locked: whoever drops what is queued gives seats back.
            if engine.queue.lock().closed || !self.is_wanted(fetch) {
                return None;
            }
            let left = self.staged.left.lock();
            let left = left.unwrap_or_else(PoisonError::into_inner);
            // Neither a stop nor the end is said here.
            let span = Duration::from_millis(50);
            let none = |left: &mut usize| *left == 0;
            let waited = self.staged.returned.wait_timeout_while(left, span, none);
            let (mut left, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if *left > 0 {
                *left -= 1;
                return Some(Seat(Arc::clone(self)));
            }
        }
    }
}

#[cfg(test)]
mod tests;
