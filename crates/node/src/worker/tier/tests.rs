//! What is kept and brought back, with real threads and files, and an engine that does nothing else.

use super::slab::tests::Folder;
use super::*;
use crate::health::Pulse;
use crate::worker::StepTime;
use crate::worker::engine::{EngineHost, EngineLimits};
use cleave_domain::{FlightId, StepPlan, StepResult};
use cleave_engine::{Engine, EngineDescription, EngineError};
use tokio::sync::MutexGuard;

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

    /// Keeps these, the first in memory, the others on disk.
    async fn keeping(folder: &Folder, in_memory: &[u8], on_disk: &[u8]) -> Self {
        let mut host = Self::new(Some(folder));
        for of in in_memory.iter().chain(on_disk) {
            host.keep(*of).await;
        }
        for of in on_disk {
            host.write_on(*of).await;
        }
        host
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

/// Nothing is read from disk or written to it as long as this is held.
async fn stop_disk(shelves: &Shelves) -> MutexGuard<'_, ()> {
    shelves.slab.as_ref().unwrap().still.lock().await
}

/// Whether the reader is at a block for the sequence of [`handoff`].
fn reads(shelves: &Shelves) -> bool {
    shelves.lock().wanted[&handoff()].reading.is_some()
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
    let mut host = Host::keeping(&folder, &[1], &[2]).await;
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
async fn lesson_07_what_changed_in_memory_or_on_disk_or_is_another_content_is_not_brought_back() {
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
    let mut host = Host::keeping(&folder, &[1], &[2]).await;
    let shelves = Arc::clone(&host.shelves);
    let still = stop_disk(&shelves).await;
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
    let mut host = Host::keeping(&folder, &[], &[1]).await;
    let shelves = Arc::clone(&host.shelves);
    let still = stop_disk(&shelves).await;
    let behind = HandoffId {
        attempt: 1,
        ..handoff()
    };
    for of in [handoff(), behind] {
        host.engine.fetch(of, vec![(hash(1), BlockIndex(7))]);
    }
    while !reads(&shelves) {
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
    let mut host = Host::keeping(&folder, &[1], &[2]).await;
    let shelves = Arc::clone(&host.shelves);
    let still = stop_disk(&shelves).await;
    let (first, slow) = ((hash(1), BlockIndex(5)), (hash(2), BlockIndex(6)));
    host.engine.fetch(handoff(), vec![first, slow]);
    // Its first block came, its second is being read.
    while host.content(5).await != [1; BLOCK] || !reads(&shelves) {
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
