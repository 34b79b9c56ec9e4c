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
mod tests {
    use super::slab::tests::Folder;
    use super::*;
    use crate::health::Pulse;
    use crate::worker::StepTime;
    use crate::worker::engine::{EngineHost, EngineLimits};
    use cleave_domain::{FlightId, StepPlan, StepResult};
    use cleave_engine::{Engine, EngineDescription, EngineError};

    const BLOCK: usize = 1000;

    /// Blocks that say what was written to them, and steps that do nothing.
    struct Shelf(Vec<Vec<u8>>);

    impl Engine for Shelf {
        fn describe(&self) -> &EngineDescription {
            unreachable!("nobody asks a shelf")
        }

        fn step(&mut self, plan: &StepPlan) -> Result<StepResult, EngineError> {
            Ok(StepResult {
                step: plan.step,
                ..StepResult::default()
            })
        }

        fn read_block(&self, at: BlockIndex, _: usize, out: &mut [u8]) -> Result<(), EngineError> {
            let found = self.0.get(at.0 as usize);
            out.copy_from_slice(found.ok_or(EngineError::Plan("no such block".into()))?);
            Ok(())
        }

        fn write_block(&mut self, at: BlockIndex, _: usize, b: &[u8]) -> Result<(), EngineError> {
            self.0[at.0 as usize].copy_from_slice(b);
            Ok(())
        }

        fn copy_blocks(&mut self, _: &[(BlockIndex, BlockIndex)]) -> Result<(), EngineError> {
            unreachable!("nobody copies here")
        }
    }

    struct Host {
        engine: EngineHost,
        shelves: Arc<Shelves>,
        answers: mpsc::UnboundedReceiver<Input>,
    }

    impl Host {
        /// A pool of eight blocks, each full of its own number.
        fn new(folder: Option<&Folder>) -> Self {
            Self::with_disk(folder, 90)
        }

        fn with_disk(folder: Option<&Folder>, slots_count: usize) -> Self {
            let tier = open((8 * BLOCK, folder, disk_bytes(slots_count)), "m").unwrap();
            let shelves = tier.shelves();
            let limits = EngineLimits {
                block_bytes: BLOCK as u32,
                write_bytes_max: u64::MAX,
                swap_bytes_max: 0,
                time: StepTime::Measured,
            };
            let pulse = Arc::new(Pulse::new(Duration::MAX));
            let (told, answers) = mpsc::unbounded_channel();
            let pool = (0..8).map(|number| vec![number; BLOCK]).collect();
            let engine: (Box<dyn Engine>, _) = (Box::new(Shelf(pool)), None);
            let engine = EngineHost::start(engine, Some(tier), (limits, pulse), told).unwrap();
            Self {
                engine,
                shelves,
                answers,
            }
        }

        async fn answer(&mut self) -> Input {
            let answer = tokio::time::timeout(Duration::from_secs(30), self.answers.recv());
            answer.await.expect("an answer in time").expect("an answer")
        }

        async fn keep(&mut self, of: u8) {
            self.engine.push(Work::Shelve(Shelving {
                content: hash(of),
                block: BlockIndex(u32::from(of)),
                bytes: BLOCK as u32,
            }));
            let Input::Shelved { outcome, .. } = self.answer().await else {
                panic!("another answer")
            };
            assert_eq!(outcome, KeepOutcome::Copied);
        }

        async fn write_on(&mut self, of: u8) {
            self.engine.write_on(hash(of));
            let Input::WrittenOn { outcome, .. } = self.answer().await else {
                panic!("another answer")
            };
            assert_eq!(outcome, KeepOutcome::Copied);
            self.engine.drop_kept(hash(of), Place::Host);
        }

        async fn fetch(&mut self, blocks: &[(u8, u32)]) -> (u32, FetchOutcome) {
            let block = |(of, to): &(u8, u32)| (hash(*of), BlockIndex(*to));
            let blocks = blocks.iter().map(block).collect();
            self.engine.fetch(handoff(), blocks);
            self.fetched().await
        }

        async fn fetched(&mut self) -> (u32, FetchOutcome) {
            match self.answer().await {
                Input::Fetched { came, outcome, .. } => (came, outcome),
                other => panic!("{other:?}"),
            }
        }

        /// What lies in a block of the pool.
        async fn content(&mut self, block: u32) -> Vec<u8> {
            let content = BlockHash([100; 16]);
            let block = BlockIndex(block);
            let bytes = BLOCK as u32;
            self.engine.push(Work::Shelve(Shelving {
                content,
                block,
                bytes,
            }));
            self.answer().await;
            self.shelves.lock().host[&content].bytes.clone()
        }

        async fn step(&mut self) {
            self.engine.push(Work::Step(StepPlan::default()));
            assert!(matches!(self.answer().await, Input::Stepped { .. }));
        }
    }

    fn hash(of: u8) -> BlockHash {
        BlockHash([of; 16])
    }

    /// What a file of so many blocks takes: a page, and a head before each block.
    fn disk_bytes(slots_count: usize) -> usize {
        4096 + slots_count * (64 + BLOCK)
    }

    fn open(
        (host_bytes, folder, disk_bytes): (usize, Option<&Folder>, usize),
        model: &str,
    ) -> Result<Opened, SlabError> {
        let options = TierOptions {
            host_bytes: host_bytes as u64,
            disk: folder.map(|folder| DiskOptions {
                folder: folder.0.clone(),
                bytes: disk_bytes as u64,
            }),
        };
        let opened = Opened::open(&options, &Fingerprint(model.into()), BLOCK as u32);
        opened.map(|opened| opened.expect("something is to be kept"))
    }

    fn handoff() -> HandoffId {
        HandoffId {
            flight: FlightId(1),
            attempt: 0,
        }
    }

    #[tokio::test]
    async fn what_was_kept_comes_back_elsewhere_and_unchanged_from_memory_and_from_disk() {
        let folder = Folder::new("both");
        let mut host = Host::new(Some(&folder));
        host.keep(1).await;
        host.keep(2).await;
        host.write_on(2).await;
        let copied = (2, FetchOutcome::Copied);
        assert_eq!(host.fetch(&[(1, 5), (2, 6)]).await, copied);
        assert_eq!(host.content(5).await, [1; BLOCK]);
        assert_eq!(host.content(6).await, [2; BLOCK]);
        // They stay kept.
        assert_eq!(host.fetch(&[(2, 0), (1, 3)]).await, copied);
        assert_eq!(host.content(0).await, [2; BLOCK]);
        // In the next life what is on disk still is.
        drop(host);
        let found = loop {
            // The threads of the first life let go of the file when they end.
            let opened = open((BLOCK, Some(&folder), disk_bytes(90)), "m");
            let found = opened.unwrap().found;
            if !found.is_empty() {
                break found;
            }
            std::fs::remove_file(folder.0.join("kv-1.cleave")).unwrap();
            tokio::task::yield_now().await;
        };
        assert_eq!(found, [hash(2)]);
    }

    #[tokio::test]
    async fn lesson_07_what_changed_in_memory_or_on_disk_or_is_another_content_is_not_brought_back()
    {
        let folder = Folder::new("changed");
        let mut host = Host::new(Some(&folder));
        for of in 1..=4 {
            host.keep(of).await;
        }
        host.write_on(2).await;
        // A bit of one in memory; and a copy under another's name.
        let tamper = |shelves: &Shelves, of, change: &dyn Fn(&mut Vec<u8>)| {
            let mut state = shelves.lock();
            let copy = Arc::get_mut(state.host.get_mut(&hash(of)).unwrap()).unwrap();
            change(&mut copy.bytes);
        };
        tamper(&host.shelves, 1, &|bytes| bytes[BLOCK / 2] ^= 4);
        let corrupt = FetchOutcome::Corrupt;
        assert_eq!(host.fetch(&[(4, 6), (1, 7)]).await, (1, corrupt));
        assert_eq!(
            host.content(7).await,
            [7; BLOCK],
            "nothing of it was written"
        );
        let others = {
            let mut state = host.shelves.lock();
            let copy = state.host.remove(&hash(4)).unwrap();
            state.host.insert(hash(3), copy)
        };
        drop(others);
        assert_eq!(host.fetch(&[(3, 7)]).await, (0, corrupt));
        // A bit of one on disk.
        let path = host.shelves.slab.as_ref().unwrap().path().to_owned();
        let mut bytes = std::fs::read(&path).unwrap();
        let at = bytes.len() - 3;
        assert_eq!(bytes[at], 2, "the block's own bytes");
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(host.fetch(&[(2, 7)]).await, (0, corrupt));
        // One that is nowhere, and a file that was cut off.
        let missing = (0, FetchOutcome::Missing);
        assert_eq!(host.fetch(&[(9, 7)]).await, missing);
        std::fs::write(&path, "").unwrap();
        let unreadable = (0, FetchOutcome::Unreadable);
        assert_eq!(host.fetch(&[(2, 7)]).await, unreadable);
    }

    #[test]
    fn a_place_has_room_for_whole_blocks_only() {
        let folder = Folder::new("room");
        let room = |host_bytes, disk_bytes| {
            let opened = open((host_bytes, Some(&folder), disk_bytes), "m");
            opened.map(|opened| (opened.host_blocks, opened.disk_blocks))
        };
        let short = (3 * BLOCK - 1, disk_bytes(5) - 1);
        assert_eq!(room(short.0, short.1).unwrap(), (2, 4));
        assert_eq!(room(3 * BLOCK, disk_bytes(5)).unwrap(), (3, 5));
        let none = room(BLOCK - 1, disk_bytes(5));
        assert!(matches!(none, Err(SlabError::NoRoom { .. })));
    }

    #[tokio::test]
    async fn memory_of_what_was_dropped_is_used_again() {
        let mut host = Host::new(None);
        for of in 0..8_u8 {
            host.keep(of).await;
            if of > 0 {
                host.engine.drop_kept(hash(of - 1), Place::Host);
            }
            let state = host.shelves.lock();
            let (kept, spare) = (state.host.len(), state.spare.len());
            assert!(kept == 1 && spare <= 1, "{kept} and {spare}");
        }
    }

    #[tokio::test]
    async fn a_full_disk_took_the_place_of_what_it_kept_or_grew() {
        let folder = Folder::new("full");
        let mut host = Host::with_disk(Some(&folder), 2);
        host.keep(1).await;
        host.keep(2).await;
        host.write_on(1).await;
        host.write_on(2).await;
        host.keep(3).await;
        host.engine.write_on(hash(3));
        let Input::WrittenOn { outcome, .. } = host.answer().await else {
            panic!("another answer")
        };
        assert_eq!(outcome, KeepOutcome::Broken, "there is no room");
        let copied = |count| (count, FetchOutcome::Copied);
        assert_eq!(host.fetch(&[(1, 5), (2, 6)]).await, copied(2));
        assert_eq!(host.content(5).await, [1; BLOCK]);
        assert_eq!(host.content(6).await, [2; BLOCK]);
        // What is dropped makes room, each time.
        for of in 3..=7 {
            host.engine.drop_kept(hash(of - 2), Place::Disk);
            if of > 3 {
                host.keep(of).await;
            }
            host.write_on(of).await;
        }
        assert_eq!(host.fetch(&[(6, 1)]).await, copied(1));
        assert_eq!(host.fetch(&[(5, 1)]).await, (0, FetchOutcome::Missing));
        let file = std::fs::metadata(folder.0.join("kv-0.cleave")).unwrap();
        assert_eq!(file.len(), disk_bytes(2) as u64);
    }

    #[test]
    fn lesson_07_what_another_model_kept_was_found() {
        let folder = Folder::new("model");
        let open = |model| open((BLOCK, Some(&folder), disk_bytes(2)), model).unwrap();
        let opened = open("m");
        opened.shelves.keep(hash(1), vec![1; BLOCK]);
        opened.shelves.write(hash(1)).unwrap();
        drop(opened);
        let opened = open("m");
        assert_eq!(opened.found, [hash(1)]);
        // What was found is not written over.
        opened.shelves.keep(hash(2), vec![2; BLOCK]);
        opened.shelves.write(hash(2)).unwrap();
        drop(opened);
        assert_eq!(open("m").found.len(), 2);
        assert_eq!(open("n").found, []);
    }

    #[tokio::test]
    async fn lesson_26_a_disk_that_stands_still_held_up_steps_or_what_is_in_memory() {
        let folder = Folder::new("still");
        let mut host = Host::new(Some(&folder));
        host.keep(1).await;
        host.keep(2).await;
        host.write_on(2).await;
        let shelves = Arc::clone(&host.shelves);
        let still = shelves.slab.as_ref().unwrap().still.lock().await;
        host.engine.fetch(handoff(), vec![(hash(2), BlockIndex(7))]);
        host.step().await;
        host.step().await;
        let other = HandoffId {
            attempt: 1,
            ..handoff()
        };
        host.engine.fetch(other, vec![(hash(1), BlockIndex(6))]);
        assert_eq!(host.fetched().await, (1, FetchOutcome::Copied));
        // Whoever waited for the disk is told to go on without, and that is answered at once.
        host.engine.stop_fetch(handoff());
        assert_eq!(host.fetched().await, (0, FetchOutcome::Stopped));
        drop(still);
        host.step().await;
        assert_eq!(
            host.content(7).await,
            [7; BLOCK],
            "what came late was not written"
        );
    }

    #[tokio::test]
    async fn waiting_behind_another_fetch_counted_as_work() {
        let folder = Folder::new("behind");
        let mut host = Host::new(Some(&folder));
        host.keep(1).await;
        host.write_on(1).await;
        let shelves = Arc::clone(&host.shelves);
        let still = shelves.slab.as_ref().unwrap().still.lock().await;
        let behind = HandoffId {
            attempt: 1,
            ..handoff()
        };
        for of in [handoff(), behind] {
            host.engine.fetch(of, vec![(hash(1), BlockIndex(7))]);
        }
        let reads = || shelves.lock().wanted[&handoff()].reading.is_some();
        while !reads() {
            tokio::task::yield_now().await;
        }
        for (of, at_work) in [(behind, false), (handoff(), true)] {
            host.engine.stop_fetch(of);
            let Input::Fetched { took, worked, .. } = host.answer().await else {
                panic!("another answer")
            };
            assert_eq!(!worked.is_zero(), at_work, "{worked:?} of {took:?}");
        }
        drop(still);
    }

    #[tokio::test]
    async fn what_came_late_of_a_fetch_was_taken_for_the_next_one_of_the_same_sequence() {
        let folder = Folder::new("late");
        let mut host = Host::new(Some(&folder));
        host.keep(1).await;
        host.keep(2).await;
        host.write_on(2).await;
        let shelves = Arc::clone(&host.shelves);
        let still = shelves.slab.as_ref().unwrap().still.lock().await;
        let (first, slow) = ((hash(1), BlockIndex(5)), (hash(2), BlockIndex(6)));
        host.engine.fetch(handoff(), vec![first, slow]);
        let reads = || shelves.lock().wanted[&handoff()].reading.is_some();
        // Its first block came, its second is being read.
        while host.content(5).await != [1; BLOCK] || !reads() {
            tokio::task::yield_now().await;
        }
        host.engine.stop_fetch(handoff());
        assert_eq!(host.fetched().await, (1, FetchOutcome::Stopped));
        // The same sequence, which has other blocks now, while the reader still is at the old one.
        host.engine.fetch(handoff(), vec![(hash(1), BlockIndex(3))]);
        assert_eq!(host.fetched().await, (1, FetchOutcome::Copied));
        let again = vec![(hash(1), BlockIndex(4)), (hash(2), BlockIndex(7))];
        host.engine.fetch(handoff(), again);
        drop(still);
        assert_eq!(host.fetched().await, (2, FetchOutcome::Copied));
        let late = host.content(6).await;
        assert_eq!(late, [6; BLOCK], "what came late was written");
        assert_eq!(host.content(7).await, [2; BLOCK]);
        let done = || shelves.lock().wanted.is_empty();
        while !done() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_fetch_is_answered_once_whenever_it_is_stopped() {
        let mut host = Host::new(None);
        for of in 0..8 {
            host.keep(of).await;
        }
        let blocks: Vec<_> = (0..8)
            .map(|of| (hash(of), BlockIndex(u32::from(of))))
            .collect();
        for attempt in 0..50 {
            // One that lost its blocks asks again, while blocks of the fetch that was stopped may come late.
            let handoff = HandoffId {
                attempt: attempt / 10,
                ..handoff()
            };
            host.engine.fetch(handoff, blocks.clone());
            host.engine.stop_fetch(handoff);
            let (came, outcome) = host.fetched().await;
            assert_eq!(
                came == 8,
                outcome == FetchOutcome::Copied,
                "{came} {outcome:?}"
            );
            host.step().await;
        }
        let done = || host.shelves.lock().wanted.is_empty();
        while !done() {
            tokio::task::yield_now().await;
        }
    }
}
