//! Blocks are kept and loaded with real threads and files, and an engine that does nothing else.

use super::slab::tests::SlabFolder;
use super::*;
use crate::StepTime;
use crate::engine::{EngineHost, EngineHostLimits};
use crate::kv_copier::tests::capacity;
use cleave_domain::{BlockIndex, FlightId, KvPlane, StepPlan, StepResult};
use cleave_engine::{BlockSpan, Engine, EngineDescription, EngineError};
use cleave_fleet::HealthMonitor;
use tokio::sync::MutexGuard;

const BLOCK: usize = 1000;

/// An engine whose blocks hold what was written to them, and whose steps do nothing.
struct MemoryOnlyEngine(Vec<Vec<u8>>);

impl Engine for MemoryOnlyEngine {
    fn describe(&self) -> &EngineDescription {
        unreachable!("nobody asks a shelf")
    }

    fn step(&mut self, plan: &StepPlan) -> Result<StepResult, EngineError> {
        Ok(StepResult {
            step: plan.step,
            ..StepResult::default()
        })
    }

    fn read_block(&self, at: BlockSpan, out: &mut [u8]) -> Result<(), EngineError> {
        let found = self.0.get(at.block.0 as usize);
        let block = found.ok_or(EngineError::Plan("no such block".into()))?;
        out.copy_from_slice(&block[at.offset..at.offset + at.len]);
        Ok(())
    }

    fn write_block(&mut self, at: BlockSpan, b: &[u8]) -> Result<(), EngineError> {
        self.0[at.block.0 as usize][at.offset..at.offset + at.len].copy_from_slice(b);
        Ok(())
    }

    fn copy_blocks(
        &mut self,
        _: KvPlane,
        _: &[(BlockIndex, BlockIndex)],
    ) -> Result<(), EngineError> {
        unreachable!("nobody copies here")
    }
}

struct TierFixture {
    engine: EngineHost,
    store: Arc<TierStore>,
    answers: mpsc::UnboundedReceiver<WorkerInput>,
}

impl TierFixture {
    /// A pool of eight blocks, each full of its own number.
    fn new(folder: Option<&SlabFolder>) -> Self {
        Self::with_disk(folder, 90)
    }

    fn with_disk(folder: Option<&SlabFolder>, slots_count: usize) -> Self {
        let tier = open(8 * BLOCK, folder, disk_bytes(slots_count), "m").unwrap();
        let tier_store = tier.store();
        let limits = EngineHostLimits {
            capacity: capacity(BLOCK as u32),
            write_bytes_max: u64::MAX,
            swap_bytes_max: 0,
            time: StepTime::Measured,
        };
        let monitor = Arc::new(HealthMonitor::new(Duration::MAX));
        let (answer_sender, answers) = mpsc::unbounded_channel();
        let pool = (0..8).map(|number| vec![number; BLOCK]).collect();
        let engine = Box::new(MemoryOnlyEngine(pool));
        let engine =
            EngineHost::start(engine, None, Some(tier), limits, monitor, answer_sender).unwrap();
        Self {
            engine,
            store: tier_store,
            answers,
        }
    }

    /// Keeps these, the first in memory, the others on disk.
    async fn keeping(folder: &SlabFolder, in_memory: &[u8], on_disk: &[u8]) -> Self {
        let mut host = Self::new(Some(folder));
        for of in in_memory.iter().chain(on_disk) {
            host.keep(*of).await;
        }
        for of in on_disk {
            host.spill_to_disk(*of).await;
        }
        host
    }

    async fn answer(&mut self) -> WorkerInput {
        let answer = tokio::time::timeout(Duration::from_secs(30), self.answers.recv());
        answer.await.expect("an answer in time").expect("an answer")
    }

    async fn keep(&mut self, of: u8) {
        let span = whole(u32::from(of));
        let offload = OffloadJob::new(hash(of), vec![(hash(of), span)]);
        self.engine.push(EngineWork::Offload(offload));
        let WorkerInput::Offloaded { outcome, .. } = self.answer().await else {
            panic!("another answer")
        };
        assert_eq!(outcome, OffloadOutcome::Copied);
    }

    async fn spill_to_disk(&mut self, of: u8) {
        self.engine.spill_to_disk(hash(of));
        let WorkerInput::SpilledToDisk { outcome, .. } = self.answer().await else {
            panic!("another answer")
        };
        assert_eq!(outcome, OffloadOutcome::Copied);
        self.engine.drop_tier_block(hash(of), TierLevel::Host);
    }

    async fn fetch(&mut self, blocks: &[(u8, u32)]) -> (u32, FetchOutcome) {
        let block = |(of, to): &(u8, u32)| (hash(*of), whole(*to));
        let blocks = blocks.iter().map(block).collect();
        self.engine.fetch(handoff(), blocks);
        self.fetched().await
    }

    async fn fetched(&mut self) -> (u32, FetchOutcome) {
        match self.answer().await {
            WorkerInput::Fetched { came, outcome, .. } => (came, outcome),
            other => panic!("{other:?}"),
        }
    }

    /// The content of a block of the pool.
    async fn content(&mut self, block: u32) -> Vec<u8> {
        let content = BlockHash([100; 16]);
        let offload = OffloadJob::new(content, vec![(content, whole(block))]);
        self.engine.push(EngineWork::Offload(offload));
        self.answer().await;
        self.store.lock().host[&content].bytes.clone()
    }

    async fn step(&mut self) {
        self.engine.push(EngineWork::Step(StepPlan::default()));
        assert!(matches!(self.answer().await, WorkerInput::Stepped { .. }));
    }
}

/// The range of a whole block.
fn whole(block: u32) -> BlockSpan {
    BlockSpan::of_block(BlockIndex(block), 0, BLOCK)
}

/// Pauses reads and writes on disk for as long as the guard is held.
async fn pause_disk(tier_store: &TierStore) -> MutexGuard<'_, ()> {
    tier_store.slab.as_ref().unwrap().test_pause.lock().await
}

/// Whether the reader is at a block for the sequence of [`handoff`].
fn is_reading(tier_store: &TierStore) -> bool {
    tier_store.lock().fetches_open[&handoff()]
        .reading_since
        .is_some()
}

fn hash(of: u8) -> BlockHash {
    BlockHash([of; 16])
}

/// The size of a file with this many blocks: a page, and a head before each block.
fn disk_bytes(slots_count: usize) -> usize {
    4096 + slots_count * (64 + BLOCK)
}

fn open(
    host_bytes: usize,
    folder: Option<&SlabFolder>,
    disk_bytes: usize,
    model: &str,
) -> Result<OpenedTier, SlabError> {
    let options = TierOptions {
        host_bytes: host_bytes as u64,
        disk: folder.map(|folder| DiskOptions {
            folder: folder.0.clone(),
            bytes: disk_bytes as u64,
        }),
    };
    let opened = OpenedTier::open(&options, &Fingerprint(model.into()), BLOCK as u32);
    opened.map(|opened| opened.expect("something is to be kept"))
}

fn handoff() -> HandoffId {
    HandoffId {
        flight: FlightId(1),
        attempt: 0,
    }
}

#[tokio::test]
async fn offloaded_blocks_return_unchanged_from_memory_and_disk() {
    let folder = SlabFolder::new("both");
    let mut host = TierFixture::keeping(&folder, &[1], &[2]).await;
    let copied = (2, FetchOutcome::Copied);
    assert_eq!(host.fetch(&[(1, 5), (2, 6)]).await, copied);
    assert_eq!(host.content(5).await, [1; BLOCK]);
    assert_eq!(host.content(6).await, [2; BLOCK]);
    // They stay kept.
    assert_eq!(host.fetch(&[(2, 0), (1, 3)]).await, copied);
    assert_eq!(host.content(0).await, [2; BLOCK]);
    // After a restart the block on disk is still there.
    drop(host);
    let found = loop {
        // The threads of the first worker unlock the file when they end.
        let opened = open(BLOCK, Some(&folder), disk_bytes(90), "m");
        let found = opened.unwrap().found;
        if !found.is_empty() {
            break found;
        }
        std::fs::remove_file(folder.0.join("kv-1.cleave")).unwrap();
        tokio::task::yield_now().await;
    };
    assert_eq!(found, [hash(2)]);
}

// Invariant: I49.
// Lesson: 7.
#[tokio::test]
async fn corrupt_or_swapped_blocks_are_not_loaded() {
    let folder = SlabFolder::new("changed");
    let mut host = TierFixture::new(Some(&folder));
    for of in 1..=4 {
        host.keep(of).await;
    }
    host.spill_to_disk(2).await;
    // One bit of a copy in memory is flipped; and a copy is stored under another content.
    let tamper = |tier_store: &TierStore, of, change: &dyn Fn(&mut Vec<u8>)| {
        let mut state = tier_store.lock();
        let copy = Arc::get_mut(state.host.get_mut(&hash(of)).unwrap()).unwrap();
        change(&mut copy.bytes);
    };
    tamper(&host.store, 1, &|bytes| bytes[BLOCK / 2] ^= 4);
    let corrupt = FetchOutcome::Corrupt;
    assert_eq!(host.fetch(&[(4, 6), (1, 7)]).await, (1, corrupt));
    assert_eq!(
        host.content(7).await,
        [7; BLOCK],
        "nothing of it was written"
    );
    let others = {
        let mut state = host.store.lock();
        let copy = state.host.remove(&hash(4)).unwrap();
        state.host.insert(hash(3), copy)
    };
    drop(others);
    assert_eq!(host.fetch(&[(3, 7)]).await, (0, corrupt));
    // One bit on disk is flipped.
    let path = host.store.slab.as_ref().unwrap().path().to_owned();
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.len() - 3;
    assert_eq!(bytes[at], 2, "the block's own bytes");
    bytes[at] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(host.fetch(&[(2, 7)]).await, (0, corrupt));
    // A missing content, and a truncated file.
    let missing = (0, FetchOutcome::Missing);
    assert_eq!(host.fetch(&[(9, 7)]).await, missing);
    std::fs::write(&path, "").unwrap();
    let unreadable = (0, FetchOutcome::Unreadable);
    assert_eq!(host.fetch(&[(2, 7)]).await, unreadable);
}

#[test]
fn a_tier_counts_whole_blocks_only() {
    let folder = SlabFolder::new("room");
    let capacity = |host_bytes, disk_bytes| {
        let opened = open(host_bytes, Some(&folder), disk_bytes, "m");
        opened.map(|opened| (opened.host_blocks, opened.disk_blocks))
    };
    let short = (3 * BLOCK - 1, disk_bytes(5) - 1);
    assert_eq!(capacity(short.0, short.1).unwrap(), (2, 4));
    assert_eq!(capacity(3 * BLOCK, disk_bytes(5)).unwrap(), (3, 5));
    let none = capacity(BLOCK - 1, disk_bytes(5));
    assert!(matches!(none, Err(SlabError::NoRoom { .. })));
}

#[tokio::test]
async fn memory_of_dropped_blocks_is_reused() {
    let mut host = TierFixture::new(None);
    for of in 0..8_u8 {
        host.keep(of).await;
        if of > 0 {
            host.engine.drop_tier_block(hash(of - 1), TierLevel::Host);
        }
        let state = host.store.lock();
        let (host_count, spare) = (state.host.len(), state.spare_buffers.len());
        assert!(host_count == 1 && spare <= 1, "{host_count} and {spare}");
    }
}

#[tokio::test]
async fn a_full_disk_refuses_blocks_and_does_not_grow() {
    let folder = SlabFolder::new("full");
    let mut host = TierFixture::with_disk(Some(&folder), 2);
    host.keep(1).await;
    host.keep(2).await;
    host.spill_to_disk(1).await;
    host.spill_to_disk(2).await;
    host.keep(3).await;
    host.engine.spill_to_disk(hash(3));
    let WorkerInput::SpilledToDisk { outcome, .. } = host.answer().await else {
        panic!("another answer")
    };
    assert_eq!(outcome, OffloadOutcome::Broken, "there is no room");
    let copied = |count| (count, FetchOutcome::Copied);
    assert_eq!(host.fetch(&[(1, 5), (2, 6)]).await, copied(2));
    assert_eq!(host.content(5).await, [1; BLOCK]);
    assert_eq!(host.content(6).await, [2; BLOCK]);
    // Each dropped block makes room.
    for of in 3..=7 {
        host.engine.drop_tier_block(hash(of - 2), TierLevel::Disk);
        if of > 3 {
            host.keep(of).await;
        }
        host.spill_to_disk(of).await;
    }
    assert_eq!(host.fetch(&[(6, 1)]).await, copied(1));
    assert_eq!(host.fetch(&[(5, 1)]).await, (0, FetchOutcome::Missing));
    let file = std::fs::metadata(folder.0.join("kv-0.cleave")).unwrap();
    assert_eq!(file.len(), disk_bytes(2) as u64);
}

// Lesson: 7.
#[test]
fn blocks_of_another_model_are_not_found() {
    let folder = SlabFolder::new("model");
    let open = |model| open(BLOCK, Some(&folder), disk_bytes(2), model).unwrap();
    let opened = open("m");
    opened.store.keep(hash(1), vec![1; BLOCK]);
    opened.store.write(hash(1)).unwrap();
    drop(opened);
    let opened = open("m");
    assert_eq!(opened.found, [hash(1)]);
    // The blocks found at the start are not overwritten.
    opened.store.keep(hash(2), vec![2; BLOCK]);
    opened.store.write(hash(2)).unwrap();
    drop(opened);
    assert_eq!(open("m").found.len(), 2);
    assert_eq!(open("n").found, []);
}

// Invariant: I49.
// Lesson: 26.
#[tokio::test]
async fn a_hung_disk_holds_up_neither_steps_nor_memory() {
    let folder = SlabFolder::new("still");
    let mut host = TierFixture::keeping(&folder, &[1], &[2]).await;
    let tier_store = Arc::clone(&host.store);
    let disk_pause = pause_disk(&tier_store).await;
    host.engine.fetch(handoff(), vec![(hash(2), whole(7))]);
    host.step().await;
    host.step().await;
    let other = HandoffId {
        attempt: 1,
        ..handoff()
    };
    host.engine.fetch(other, vec![(hash(1), whole(6))]);
    assert_eq!(host.fetched().await, (1, FetchOutcome::Copied));
    // The sequence that waited for the disk goes on without it, and that is answered at once.
    host.engine.stop_fetch(handoff());
    assert_eq!(host.fetched().await, (0, FetchOutcome::Stopped));
    drop(disk_pause);
    host.step().await;
    assert_eq!(
        host.content(7).await,
        [7; BLOCK],
        "what came late was not written"
    );
}

#[tokio::test]
async fn waiting_behind_another_fetch_counts_as_no_work() {
    let folder = SlabFolder::new("behind");
    let mut host = TierFixture::keeping(&folder, &[], &[1]).await;
    let tier_store = Arc::clone(&host.store);
    let disk_pause = pause_disk(&tier_store).await;
    let behind = HandoffId {
        attempt: 1,
        ..handoff()
    };
    for of in [handoff(), behind] {
        host.engine.fetch(of, vec![(hash(1), whole(7))]);
    }
    while !is_reading(&tier_store) {
        tokio::task::yield_now().await;
    }
    for (of, at_work) in [(behind, false), (handoff(), true)] {
        host.engine.stop_fetch(of);
        let WorkerInput::Fetched { took, worked, .. } = host.answer().await else {
            panic!("another answer")
        };
        assert_eq!(!worked.is_zero(), at_work, "{worked:?} of {took:?}");
    }
    drop(disk_pause);
}

#[tokio::test]
async fn late_blocks_of_a_stopped_fetch_are_ignored() {
    let folder = SlabFolder::new("late");
    let mut host = TierFixture::keeping(&folder, &[1], &[2]).await;
    let tier_store = Arc::clone(&host.store);
    let disk_pause = pause_disk(&tier_store).await;
    let (first, slow) = ((hash(1), whole(5)), (hash(2), whole(6)));
    host.engine.fetch(handoff(), vec![first, slow]);
    // Its first block came, its second is being read.
    while host.content(5).await != [1; BLOCK] || !is_reading(&tier_store) {
        tokio::task::yield_now().await;
    }
    host.engine.stop_fetch(handoff());
    assert_eq!(host.fetched().await, (1, FetchOutcome::Stopped));
    // The same sequence, which has other blocks now, while the reader still is at the old one.
    host.engine.fetch(handoff(), vec![(hash(1), whole(3))]);
    assert_eq!(host.fetched().await, (1, FetchOutcome::Copied));
    let again = vec![(hash(1), whole(4)), (hash(2), whole(7))];
    host.engine.fetch(handoff(), again);
    drop(disk_pause);
    assert_eq!(host.fetched().await, (2, FetchOutcome::Copied));
    let late = host.content(6).await;
    assert_eq!(late, [6; BLOCK], "what came late was written");
    assert_eq!(host.content(7).await, [2; BLOCK]);
    let done = || tier_store.lock().fetches_open.is_empty();
    while !done() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_fetch_is_answered_once_whenever_it_is_stopped() {
    let mut host = TierFixture::new(None);
    for of in 0..8 {
        host.keep(of).await;
    }
    let blocks: Vec<_> = (0..8).map(|of| (hash(of), whole(u32::from(of)))).collect();
    for attempt in 0..50 {
        // One that lost its blocks asks again, while blocks of the fetch that was stopped may come
        // late.
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
    let done = || host.store.lock().fetches_open.is_empty();
    while !done() {
        tokio::task::yield_now().await;
    }
}

/// The last piece of a state is shorter than a block; it is kept in a block's room.
#[tokio::test]
async fn pieces_of_a_state_are_kept_and_fetched_with_blocks() {
    let folder = SlabFolder::new("pieces");
    let mut host = TierFixture::new(Some(&folder));
    let piece = |of: u8, block: u32, offset: usize, len: usize| {
        let plane = KvPlane::State;
        let block = BlockIndex(block);
        let span = BlockSpan {
            plane,
            block,
            offset,
            len,
        };
        (hash(of), span)
    };
    // A buffer that held a block before must not lend its bytes to the piece.
    host.keep(1).await;
    host.engine.drop_tier_block(hash(1), TierLevel::Host);
    let pieces = vec![piece(8, 3, 0, 600), piece(9, 3, 600, 40)];
    let offload = OffloadJob::new(hash(8), pieces);
    host.engine.push(EngineWork::Offload(offload));
    let WorkerInput::Offloaded {
        content, outcome, ..
    } = host.answer().await
    else {
        panic!("another answer")
    };
    assert_eq!((content, outcome), (hash(8), OffloadOutcome::Copied));
    let short = host.store.lock().host[&hash(9)].bytes.clone();
    assert_eq!((&short[..40], &short[40..]), (&[3; 40][..], &[0; 960][..]));
    host.keep(2).await;
    host.spill_to_disk(9).await;
    let parts = vec![
        (hash(2), whole(6)),
        piece(8, 7, 0, 600),
        piece(9, 7, 600, 40),
    ];
    host.engine.fetch(handoff(), parts);
    assert_eq!(host.fetched().await, (3, FetchOutcome::Copied));
    assert_eq!(host.content(6).await, [2; BLOCK]);
    let state = host.content(7).await;
    assert_eq!(
        (&state[..640], &state[640..]),
        (&[3; 640][..], &[7; 360][..])
    );
}
