//! KV blocks of a device on their way out and in, beside the engine.
//!
//! Owns: two threads, one for what leaves and one for what arrives, each with its queue, in order. Never: waits for a
//! step, or holds one up: a block leaves once the step that computed it was answered, and nobody uses one that is
//! arriving before the brain has heard that it is there.
//! Invariant: every piece of work taken is answered once, also when it is dropped or panics. A block that goes straight
//! into a peer's pool is answered only when nothing of it is written there any more.

use super::engine::{Import, range};
use crate::health::{Pulse, words};
use cleave_domain::{BlockIndex, HandoffId};
use cleave_engine::{BlockSpan, DeviceBlocks, EngineError};
use cleave_kv::BlockPart;
use cleave_kv::handoff::Digest;
use cleave_sched::{Export, ExportOutcome, ImportOutcome, Input};
use cleave_transfer::{DirectPart, Frame, PeerPool, Permit, Room};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use tokio::sync::mpsc;
use tracing::error;

/// Copied at once: enough for a device to be busy with it while the host begins the next.
const BATCH_BYTES: u64 = 8 << 20;

/// The driver's side. Dropping it ends the threads after the work under way.
#[derive(Debug)]
pub(super) struct Porter {
    leaving: Arc<Queue<Leaving>>,
    arriving: Arc<Queue<Import>>,
}

/// A block, and the credit to send it with.
type Leaving = (Export, Permit);

/// What both threads have.
#[derive(Clone)]
struct Hands {
    blocks: Arc<dyn DeviceBlocks>,
    block_bytes: u32,
    pulse: Arc<Pulse>,
    answers: mpsc::UnboundedSender<Input>,
}

impl Porter {
    /// Starts the threads.
    pub(super) fn start(
        blocks: Arc<dyn DeviceBlocks>,
        block_bytes: u32,
        (pulse, answers): (Arc<Pulse>, mpsc::UnboundedSender<Input>),
    ) -> std::io::Result<Self> {
        let hands = Hands {
            blocks,
            block_bytes,
            pulse,
            answers,
        };
        let porter = Self {
            leaving: Arc::default(),
            arriving: Arc::default(),
        };
        let (queue, own) = (Arc::clone(&porter.leaving), hands.clone());
        let takes = move || {
            let bytes = u64::from(own.block_bytes);
            while let Some(batch) = queue.batch(|_| bytes, goes_with) {
                if !own.answer(own.take_out(batch)) {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("cleave-kv-out".into())
            .spawn(takes)?;
        let queue = Arc::clone(&porter.arriving);
        let takes = move || {
            let bytes = |import: &Import| u64::from(import.part.len);
            while let Some(batch) = queue.batch(bytes, |_, _| true) {
                if !hands.answer(hands.take_in(&batch)) {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("cleave-kv-in".into())
            .spawn(takes)?;
        Ok(porter)
    }

    /// Queues a block that leaves.
    pub(super) fn read(&self, export: Export, permit: Permit) {
        self.leaving.push((export, permit));
    }

    /// Queues bytes that arrived.
    pub(super) fn write(&self, import: Import) {
        self.arriving.push(import);
    }

    /// Drops what has not begun of a hand-off, and answers it.
    pub(super) fn forget(&self, handoff: HandoffId) -> Vec<Input> {
        let exports = self.leaving.remove(|(export, _)| export.handoff == handoff);
        let imports = self.arriving.remove(|import| import.handoff == handoff);
        let exports = exports.iter();
        let exports = exports.map(|(export, _)| export.answer(ExportOutcome::Dropped));
        let imports = imports.iter();
        exports
            .chain(imports.map(|import| import.answer(ImportOutcome::Dropped)))
            .collect()
    }
}

impl Drop for Porter {
    fn drop(&mut self) {
        self.leaving.close();
        self.arriving.close();
    }
}

/// Whether two blocks go the same way: into one pool, or both by frames.
fn goes_with(first: &Leaving, other: &Leaving) -> bool {
    match (first.1.pool(), other.1.pool()) {
        (None, None) => true,
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        _ => false,
    }
}

impl Hands {
    /// False when nobody listens any more.
    fn answer(&self, answers: Vec<Input>) -> bool {
        answers
            .into_iter()
            .all(|fact| self.answers.send(fact).is_ok())
    }

    /// Takes blocks out of the pool, all of them the same way.
    fn take_out(&self, mut batch: Vec<Leaving>) -> Vec<Input> {
        let mut answers = Vec::new();
        batch.retain(|(export, permit)| {
            if permit.is_broken() {
                answers.push(export.answer(ExportOutcome::Dropped));
            }
            !permit.is_broken()
        });
        let pool = batch.first().and_then(|(_, permit)| permit.pool());
        let sent = match pool.map(Arc::clone) {
            Some(pool) => self.put_there(&mut batch, pool.as_ref()),
            None => self.send(&mut batch),
        };
        match sent {
            Ok(outcomes) => {
                let exports = batch.iter().zip(outcomes);
                answers.extend(exports.map(|((export, _), outcome)| export.answer(outcome)));
            }
            Err(failure) => {
                error!(reason = failure.reason(), "cannot read blocks");
                let broken = |(export, _): &Leaving| export.answer(ExportOutcome::Broken);
                answers.extend(batch.iter().map(broken));
                answers.extend(failure.lost());
            }
        }
        answers
    }

    /// Copies blocks into what carries them, and sends that.
    fn send(&self, batch: &mut [Leaving]) -> Result<Vec<ExportOutcome>, Failure> {
        let mut rooms: Vec<(usize, Frame, Room)> = Vec::new();
        for (number, (export, permit)) in batch.iter_mut().enumerate() {
            for frame in self.frames(export, permit) {
                rooms.push((number, frame, permit.room(frame.part.len)));
            }
        }
        let mut parts: Vec<(BlockSpan, &mut [u8])> = rooms
            .iter_mut()
            .map(|(number, frame, room)| (span(batch[*number].0.from, frame.part), &mut **room))
            .collect();
        let sums = self.guarded(|blocks| blocks.read(&mut parts))?;
        let mut outcomes = Outcomes::new(batch.len(), self.block_bytes);
        for ((number, frame, room), sum) in rooms.into_iter().zip(sums) {
            let sent = room.send(frame, sum).is_ok();
            outcomes.frame(number, frame.part, sent.then_some(sum));
        }
        Ok(outcomes.list)
    }

    /// Copies blocks straight into a peer's pool, and tells it.
    fn put_there(
        &self,
        batch: &mut [Leaving],
        pool: &dyn PeerPool,
    ) -> Result<Vec<ExportOutcome>, Failure> {
        let mut frames: Vec<(usize, Frame)> = Vec::new();
        for (number, (export, permit)) in batch.iter().enumerate() {
            frames.extend(self.frames(export, permit).map(|frame| (number, frame)));
        }
        let direct = |(number, frame): &(usize, Frame)| DirectPart {
            from: batch[*number].0.from,
            to: frame.block.block,
            part: frame.part,
        };
        let parts: Vec<DirectPart> = frames.iter().map(direct).collect();
        let sums = self.guarded(|_| pool.write(&parts).map_err(EngineError::Device))?;
        let mut outcomes = Outcomes::new(batch.len(), self.block_bytes);
        for ((number, frame), sum) in frames.into_iter().zip(sums) {
            let told = batch[number].1.tell(frame, sum).is_ok();
            outcomes.frame(number, frame.part, told.then_some(sum));
        }
        Ok(outcomes.list)
    }

    /// A block, cut as its link takes it.
    fn frames(&self, export: &Export, permit: &Permit) -> impl Iterator<Item = Frame> + use<> {
        let (block_bytes, most) = (self.block_bytes, permit.frame_bytes_max());
        let Export {
            handoff,
            block,
            ordinal,
            ..
        } = *export;
        let starts = (0..block_bytes).step_by(most as usize);
        starts.map(move |offset| Frame {
            handoff,
            block,
            part: BlockPart {
                ordinal,
                offset,
                len: most.min(block_bytes - offset),
            },
        })
    }

    /// Puts bytes into the pool, and looks at what is there where nobody else has.
    fn take_in(&self, batch: &[Import]) -> Vec<Input> {
        let written = self.guarded(|blocks| {
            let parts: Vec<(BlockSpan, &[u8])> = batch
                .iter()
                .filter_map(|import| Some((place(import), import.payload.bytes()?)))
                .collect();
            if !parts.is_empty() {
                blocks.write(&parts)?;
            }
            let due: Vec<BlockSpan> = batch
                .iter()
                .filter(|import| import.payload.checksum_due().is_some())
                .map(place)
                .collect();
            blocks.checksums(&due)
        });
        let sums = match written {
            Ok(sums) => sums,
            Err(failure) => {
                error!(reason = failure.reason(), "cannot write blocks");
                let broken = |import: &Import| import.answer(ImportOutcome::Broken);
                return batch.iter().map(broken).chain(failure.lost()).collect();
            }
        };
        let mut sums = sums.into_iter();
        let outcome = |import: &Import| {
            let due = import.payload.checksum_due();
            match due.is_none_or(|due| sums.next() == Some(due)) {
                true => import.answer(ImportOutcome::Written),
                false => {
                    let block = import.block.block;
                    error!(%block, "bytes of a block changed on their way");
                    import.answer(ImportOutcome::Damaged)
                }
            }
        };
        batch.iter().map(outcome).collect()
    }

    /// Uses the pool; a panic in that is a value here, and as a device that is lost the end of this worker's health.
    fn guarded<T>(
        &self,
        use_it: impl FnOnce(&dyn DeviceBlocks) -> Result<T, EngineError>,
    ) -> Result<T, Failure> {
        let blocks = self.blocks.as_ref();
        let caught = catch_unwind(AssertUnwindSafe(|| use_it(blocks)));
        let reason = match caught {
            Ok(Ok(used)) => return Ok(used),
            Ok(Err(error @ EngineError::Lost(_))) => error.to_string(),
            Ok(Err(error)) => return Err(Failure::Device(error.to_string())),
            Err(panic) => format!("a copy of blocks panicked: {}", words(panic.as_ref())),
        };
        self.pulse.broke(&reason);
        Err(Failure::Lost(reason))
    }
}

/// Why blocks were not copied.
enum Failure {
    Device(String),
    /// Nothing will be copied any more.
    Lost(String),
}

impl Failure {
    fn reason(&self) -> &str {
        let (Self::Device(reason) | Self::Lost(reason)) = self;
        reason
    }

    /// After the answers to the work that it failed in, the loss of the engine.
    fn lost(self) -> Option<Input> {
        match self {
            Self::Device(_) => None,
            Self::Lost(reason) => Some(Input::EngineLost { reason }),
        }
    }
}

/// What became of the exports of a batch.
struct Outcomes {
    list: Vec<ExportOutcome>,
    digests: Vec<Digest>,
    block_bytes: u32,
}

impl Outcomes {
    fn new(count: usize, block_bytes: u32) -> Self {
        Self {
            list: vec![ExportOutcome::Dropped; count],
            digests: vec![Digest::default(); count],
            block_bytes,
        }
    }

    /// A frame left, or did not: then the link is broken, and so are those after it.
    fn frame(&mut self, number: usize, part: BlockPart, checksum: Option<u64>) {
        let Some(checksum) = checksum else {
            self.list[number] = ExportOutcome::Dropped;
            return;
        };
        self.digests[number].add(part, checksum);
        if part.offset + part.len == self.block_bytes {
            self.list[number] = ExportOutcome::Sent {
                digest: self.digests[number].value(),
                bytes: u64::from(self.block_bytes),
            };
        }
    }
}

fn span(block: BlockIndex, part: BlockPart) -> BlockSpan {
    BlockSpan {
        block,
        offset: range(part).start,
        len: range(part).len(),
    }
}

fn place(import: &Import) -> BlockSpan {
    span(import.block.block, import.part)
}

/// Work in order.
#[derive(Debug)]
struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    work: VecDeque<T>,
    closed: bool,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        let state = State {
            work: VecDeque::new(),
            closed: false,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }
}

impl<T> Queue<T> {
    fn push(&self, work: T) {
        self.lock().work.push_back(work);
        self.changed.notify_one();
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
    }

    /// Waits for work, and takes as much as is copied at once, of one kind; `None` when it is closed.
    fn batch(
        &self,
        bytes: impl Fn(&T) -> u64,
        is_alike: impl Fn(&T, &T) -> bool,
    ) -> Option<Vec<T>> {
        let mut state = self.lock();
        while state.work.is_empty() && !state.closed {
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            return None;
        }
        let mut batch: Vec<T> = Vec::new();
        let mut sum = 0;
        while let Some(next) = state.work.front() {
            sum += bytes(next);
            let fits =
                sum <= BATCH_BYTES && batch.first().is_none_or(|first| is_alike(first, next));
            if !batch.is_empty() && !fits {
                break;
            }
            batch.extend(state.work.pop_front());
        }
        Some(batch)
    }

    fn remove(&self, is_it: impl Fn(&T) -> bool) -> Vec<T> {
        let mut state = self.lock();
        let (removed, kept) = state.work.drain(..).partition(is_it);
        state.work = kept;
        Vec::from_iter::<VecDeque<T>>(removed)
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::worker::engine::Import;
    use cleave_domain::{BlockRef, FlightId, WorkerId, WorkerRef};
    use cleave_engine::PeerBlocks;
    use cleave_transfer::{LinkEvent, Links, LinksConfig, LocalNet, Route, checksum};
    use std::time::Duration;

    pub(in crate::worker) const BLOCK: usize = 64;

    /// Blocks in host memory. Whoever holds them holds up every copy.
    #[derive(Debug, Default)]
    pub(in crate::worker) struct Shelf {
        blocks: Mutex<Vec<[u8; BLOCK]>>,
        panics: bool,
    }

    impl Shelf {
        pub(in crate::worker) fn of(blocks: Vec<[u8; BLOCK]>) -> Self {
            Self {
                blocks: Mutex::new(blocks),
                panics: false,
            }
        }

        pub(in crate::worker) fn contents(&self) -> Vec<[u8; BLOCK]> {
            self.blocks.lock().unwrap().clone()
        }
    }

    impl DeviceBlocks for Shelf {
        fn read(&self, parts: &mut [(BlockSpan, &mut [u8])]) -> Result<Vec<u64>, EngineError> {
            assert!(!self.panics, "the shelf broke");
            let blocks = self.blocks.lock().unwrap();
            for (span, to) in parts.iter_mut() {
                let of = span.offset..span.offset + span.len;
                to.copy_from_slice(&blocks[span.block.0 as usize][of]);
            }
            Ok(parts.iter().map(|(_, bytes)| checksum(bytes)).collect())
        }

        fn write(&self, parts: &[(BlockSpan, &[u8])]) -> Result<(), EngineError> {
            let mut blocks = self.blocks.lock().unwrap();
            for (span, from) in parts {
                let of = span.offset..span.offset + span.len;
                blocks[span.block.0 as usize][of].copy_from_slice(from);
            }
            Ok(())
        }

        fn checksums(&self, spans: &[BlockSpan]) -> Result<Vec<u64>, EngineError> {
            assert!(spans.is_empty(), "what changed hands was verified");
            Ok(Vec::new())
        }

        fn handle(&self) -> Result<Vec<u8>, EngineError> {
            unreachable!("nobody shares a shelf")
        }

        fn open(&self, _: &[u8]) -> Result<Arc<dyn PeerBlocks>, EngineError> {
            unreachable!("nobody shares a shelf")
        }
    }

    fn worker(worker: u64) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(worker),
            ..WorkerRef::default()
        }
    }

    fn handoff(flight: u64) -> HandoffId {
        HandoffId {
            flight: FlightId(flight),
            attempt: 0,
        }
    }

    fn export(flight: u64, from: u32) -> Export {
        Export {
            handoff: handoff(flight),
            to: worker(2),
            from: BlockIndex(from),
            ordinal: from,
            block: BlockRef::default(),
        }
    }

    /// A porter, what it answers, and a link to send by.
    struct Scene {
        porter: Porter,
        shelf: Arc<Shelf>,
        pulse: Arc<Pulse>,
        answers: mpsc::UnboundedReceiver<Input>,
        sender: Links,
        granted: mpsc::Receiver<LinkEvent>,
        arrived: mpsc::Receiver<LinkEvent>,
        _receiver: Links,
    }

    impl Scene {
        fn new(shelf: Shelf) -> Self {
            let net = LocalNet::default();
            let links = |me| {
                let (events, heard) = mpsc::channel(64);
                let config = LinksConfig::new(me, Default::default(), BLOCK as u32);
                (Links::new(config, events, net.clone()), heard)
            };
            let ((sender, granted), (receiver, arrived)) = (links(worker(1)), links(worker(2)));
            sender.know(worker(2), Route::Local);
            let (told, answers) = mpsc::unbounded_channel();
            let pulse = Arc::new(Pulse::new(Duration::MAX));
            let shelf = Arc::new(shelf);
            let blocks = Arc::clone(&shelf) as Arc<dyn DeviceBlocks>;
            let hands = (Arc::clone(&pulse), told);
            Self {
                porter: Porter::start(blocks, BLOCK as u32, hands).unwrap(),
                shelf,
                pulse,
                answers,
                sender,
                granted,
                arrived,
                _receiver: receiver,
            }
        }

        async fn permit(&mut self) -> Permit {
            loop {
                let link = self.sender.link(worker(2)).unwrap();
                match link.reserve(handoff(9), BLOCK as u32) {
                    Some(permit) => return permit,
                    None => drop(self.granted.recv().await.unwrap()),
                }
            }
        }

        /// The next frame at the other end, to be written here.
        async fn import(&mut self, to: u32) -> Import {
            loop {
                let event = self.arrived.recv().await.unwrap();
                if let LinkEvent::Arrived { payload, .. } = event {
                    return Import {
                        handoff: handoff(9),
                        part: BlockPart {
                            ordinal: to,
                            offset: 0,
                            len: BLOCK as u32,
                        },
                        block: BlockRef {
                            block: BlockIndex(to),
                            ..BlockRef::default()
                        },
                        payload: payload.unwrap(),
                    };
                }
            }
        }
    }

    fn shelf(panics: bool) -> Shelf {
        Shelf {
            blocks: Mutex::new((0..6).map(|block| [block; BLOCK]).collect()),
            panics,
        }
    }

    #[tokio::test]
    async fn a_block_that_leaves_and_comes_back_is_answered_at_both_ends() {
        let mut scene = Scene::new(shelf(false));
        let permit = scene.permit().await;
        scene.porter.read(export(1, 4), permit);
        let sent = scene.answers.recv().await.unwrap();
        let mut digest = Digest::default();
        let part = BlockPart {
            ordinal: 4,
            offset: 0,
            len: BLOCK as u32,
        };
        digest.add(part, checksum(&[4; BLOCK]));
        let outcome = ExportOutcome::Sent {
            digest: digest.value(),
            bytes: BLOCK as u64,
        };
        assert_eq!(sent, export(1, 4).answer(outcome));
        let import = scene.import(2).await;
        let written = import.answer(ImportOutcome::Written);
        scene.porter.write(import);
        assert_eq!(scene.answers.recv().await, Some(written));
        assert_eq!(scene.shelf.blocks.lock().unwrap()[2], [4; BLOCK]);
    }

    #[tokio::test]
    async fn lesson_05_a_copy_that_panicked_lost_the_bookkeeping_of_its_blocks() {
        let mut scene = Scene::new(shelf(true));
        let permit = scene.permit().await;
        scene.porter.read(export(1, 0), permit);
        let broken = export(1, 0).answer(ExportOutcome::Broken);
        assert_eq!(scene.answers.recv().await, Some(broken));
        let lost = scene.answers.recv().await;
        assert!(matches!(lost, Some(Input::EngineLost { .. })), "{lost:?}");
        assert!(scene.pulse.check().is_err());
    }

    #[tokio::test]
    async fn lesson_02_what_has_not_begun_beside_the_engine_is_dropped_and_answered() {
        let mut scene = Scene::new(shelf(false));
        let shelf = Arc::clone(&scene.shelf);
        let (first, second, third) = (
            scene.permit().await,
            scene.permit().await,
            scene.permit().await,
        );
        let answers = {
            // Whatever has begun waits for the shelf.
            let held = shelf.blocks.lock().unwrap();
            scene.porter.read(export(1, 0), first);
            scene.porter.read(export(2, 1), second);
            scene.porter.read(export(2, 2), third);
            let dropped = scene.porter.forget(handoff(2));
            drop(held);
            dropped
        };
        let mut outcomes = answers.len();
        // Those that had begun are answered by themselves; all of them once.
        while outcomes < 3 {
            let answer = scene.answers.recv().await.unwrap();
            assert!(matches!(answer, Input::Exported { .. }), "{answer:?}");
            outcomes += 1;
        }
        assert!(scene.porter.forget(handoff(1)).is_empty());
        assert!(scene.answers.try_recv().is_err(), "once");
    }
}
