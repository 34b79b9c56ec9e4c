//! Copies a device's KV blocks out and in, without the engine.
//!
//! Owns: two threads, one for blocks that leave and one for blocks that arrive, each with its
//! queue, in order. Never waits for a step, or delays one: a block leaves after the step that
//! computed it was answered, and no step uses an arriving block before the brain has its answer.
//! Invariant: every piece of work is answered once, even if it is dropped or panics. A block
//! written straight into a peer's pool is answered only when nothing of it is being written there
//! any more.

use super::engine::BlockImport;
use super::spans::part_span;
use cleave_domain::{Capacity, HandoffId};
use cleave_engine::{BlockSpan, DeviceBlocks, EngineError};
use cleave_fleet::{HealthMonitor, panic_message};
use cleave_kv::BlockPart;
use cleave_kv::handoff::HandoffDigest;
use cleave_sched::{BlockExport, ExportOutcome, ImportOutcome, WorkerInput};
use cleave_transfer::{DirectCopy, Frame, FrameBuffer, PeerPool, SendPermit};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use tokio::sync::mpsc;
use tracing::error;

/// Bytes copied at once: enough to keep a device busy while the host prepares the next batch.
const BATCH_BYTES: u64 = 8 << 20;

/// The driver's side. Dropping it ends the threads after the work under way.
#[derive(Debug)]
pub(super) struct KvCopier {
    outgoing: Arc<CopyQueue<OutgoingBlock>>,
    incoming: Arc<CopyQueue<BlockImport>>,
}

/// A block, and the credit to send it with.
type OutgoingBlock = (BlockExport, SendPermit);

/// The state that each of the threads has.
#[derive(Clone)]
struct KvCopyThread {
    blocks: Arc<dyn DeviceBlocks>,
    capacity: Capacity,
    monitor: Arc<HealthMonitor>,
    answers: mpsc::UnboundedSender<WorkerInput>,
}

impl KvCopier {
    pub(super) fn start(
        blocks: Arc<dyn DeviceBlocks>,
        capacity: Capacity,
        monitor: Arc<HealthMonitor>,
        answers: mpsc::UnboundedSender<WorkerInput>,
    ) -> std::io::Result<Self> {
        let copy_thread = KvCopyThread {
            blocks,
            capacity,
            monitor,
            answers,
        };
        let copier = Self {
            outgoing: Arc::default(),
            incoming: Arc::default(),
        };
        let (queue, own) = (Arc::clone(&copier.outgoing), copy_thread.clone());
        let takes = move || {
            let bytes =
                |(export, _): &OutgoingBlock| u64::from(own.capacity.unit_bytes(export.unit()));
            while let Some(batch) = queue.take_batch(bytes, same_route) {
                if !own.answer(own.send_batch(batch)) {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("cleave-kv-out".into())
            .spawn(takes)?;
        let queue = Arc::clone(&copier.incoming);
        let takes = move || {
            let bytes = |import: &BlockImport| u64::from(import.part.len);
            while let Some(batch) = queue.take_batch(bytes, |_, _| true) {
                if !copy_thread.answer(copy_thread.write_batch(&batch)) {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("cleave-kv-in".into())
            .spawn(takes)?;
        Ok(copier)
    }

    /// Queues a block that leaves.
    pub(super) fn read(&self, export: BlockExport, permit: SendPermit) {
        self.outgoing.push((export, permit));
    }

    /// Queues bytes that arrived.
    pub(super) fn write(&self, import: BlockImport) {
        self.incoming.push(import);
    }

    /// Drops the queued copies of a hand-off that have not begun, and answers them.
    pub(super) fn forget(&self, handoff: HandoffId) -> Vec<WorkerInput> {
        let exports = self
            .outgoing
            .remove(|(export, _)| export.handoff == handoff);
        let imports = self.incoming.remove(|import| import.handoff == handoff);
        let exports = exports.iter();
        let exports = exports.map(|(export, _)| export.answer(ExportOutcome::Dropped));
        let imports = imports.iter();
        exports
            .chain(imports.map(|import| import.answer(ImportOutcome::Dropped)))
            .collect()
    }
}

impl Drop for KvCopier {
    fn drop(&mut self) {
        self.outgoing.close();
        self.incoming.close();
    }
}

/// Whether two blocks can be sent together: into one peer pool, or both as frames.
fn same_route(first: &OutgoingBlock, other: &OutgoingBlock) -> bool {
    match (first.1.peer_pool(), other.1.peer_pool()) {
        (None, None) => true,
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        _ => false,
    }
}

impl KvCopyThread {
    /// False when the driver is gone.
    fn answer(&self, answers: Vec<WorkerInput>) -> bool {
        answers
            .into_iter()
            .all(|fact| self.answers.send(fact).is_ok())
    }

    /// Sends blocks of the pool; all blocks of a batch go the same way.
    fn send_batch(&self, mut batch: Vec<OutgoingBlock>) -> Vec<WorkerInput> {
        let mut answers = Vec::new();
        batch.retain(|(export, permit)| {
            if permit.is_broken() {
                answers.push(export.answer(ExportOutcome::Dropped));
            }
            !permit.is_broken()
        });
        let pool = batch.first().and_then(|(_, permit)| permit.peer_pool());
        let sent = match pool.map(Arc::clone) {
            Some(pool) => self.write_to_peer_pool(&mut batch, pool.as_ref()),
            None => self.send_frames(&mut batch),
        };
        match sent {
            Ok(outcomes) => {
                let exports = batch.iter().zip(outcomes);
                answers.extend(exports.map(|((export, _), outcome)| export.answer(outcome)));
            }
            Err(failure) => {
                error!(reason = failure.reason(), "cannot read blocks");
                let broken = |(export, _): &OutgoingBlock| export.answer(ExportOutcome::Broken);
                answers.extend(batch.iter().map(broken));
                answers.extend(failure.engine_lost());
            }
        }
        answers
    }

    /// Copies blocks into the transport's buffers and sends those.
    fn send_frames(&self, batch: &mut [OutgoingBlock]) -> Result<Vec<ExportOutcome>, CopyFailure> {
        let sizes = self.sizes(batch);
        let mut buffers: Vec<(usize, Frame, FrameBuffer)> = Vec::new();
        for (number, (export, permit)) in batch.iter_mut().enumerate() {
            for frame in self.frames(export, permit) {
                buffers.push((number, frame, permit.frame_buffer(frame.part.len)));
            }
        }
        let mut parts: Vec<(BlockSpan, &mut [u8])> = buffers
            .iter_mut()
            .map(|(number, frame, buffer)| {
                let span = part_span(&self.capacity, batch[*number].0.from, frame.part);
                (span, &mut **buffer)
            })
            .collect();
        let sums = self.catch_copy_panic(|blocks| blocks.read(&mut parts))?;
        let mut outcomes = ExportOutcomes::new(sizes);
        for ((number, frame, buffer), sum) in buffers.into_iter().zip(sums) {
            let sent = buffer.send(frame, sum).is_ok();
            outcomes.record_frame(number, frame.part, sent.then_some(sum));
        }
        Ok(outcomes.list)
    }

    /// Copies blocks straight into a peer's pool, and notifies the peer.
    fn write_to_peer_pool(
        &self,
        batch: &mut [OutgoingBlock],
        pool: &dyn PeerPool,
    ) -> Result<Vec<ExportOutcome>, CopyFailure> {
        let sizes = self.sizes(batch);
        let mut frames: Vec<(usize, Frame)> = Vec::new();
        for (number, (export, permit)) in batch.iter().enumerate() {
            frames.extend(self.frames(export, permit).map(|frame| (number, frame)));
        }
        let direct = |(number, frame): &(usize, Frame)| DirectCopy {
            from: batch[*number].0.from,
            to: frame.block.block,
            part: frame.part,
        };
        let parts: Vec<DirectCopy> = frames.iter().map(direct).collect();
        let sums = self.catch_copy_panic(|_| pool.write(&parts).map_err(EngineError::Device))?;
        let mut outcomes = ExportOutcomes::new(sizes);
        for ((number, frame), sum) in frames.into_iter().zip(sums) {
            let is_sent = batch[number].1.send_written(frame, sum).is_ok();
            outcomes.record_frame(number, frame.part, is_sent.then_some(sum));
        }
        Ok(outcomes.list)
    }

    /// The bytes of each block, or of each piece of a state.
    fn sizes(&self, batch: &[OutgoingBlock]) -> Vec<u32> {
        let bytes = |(export, _): &OutgoingBlock| self.capacity.unit_bytes(export.unit());
        batch.iter().map(bytes).collect()
    }

    /// The frames of a block, or of a piece of a state, each as long as its link allows.
    fn frames(
        &self,
        export: &BlockExport,
        permit: &SendPermit,
    ) -> impl Iterator<Item = Frame> + use<> {
        let bytes = self.capacity.unit_bytes(export.unit());
        let most = permit.frame_bytes_max();
        let BlockExport {
            handoff,
            block,
            plane,
            ordinal,
            ..
        } = *export;
        let starts = (0..bytes).step_by(most as usize);
        starts.map(move |offset| Frame {
            handoff,
            block,
            part: BlockPart {
                plane,
                ordinal,
                offset,
                len: most.min(bytes - offset),
            },
        })
    }

    /// Writes received bytes into the pool, and verifies the checksums that are not verified yet.
    fn write_batch(&self, batch: &[BlockImport]) -> Vec<WorkerInput> {
        let written = self.catch_copy_panic(|blocks| {
            let parts: Vec<(BlockSpan, &[u8])> = batch
                .iter()
                .filter_map(|import| Some((self.import_span(import), import.payload.bytes()?)))
                .collect();
            if !parts.is_empty() {
                blocks.write(&parts)?;
            }
            let due: Vec<BlockSpan> = batch
                .iter()
                .filter(|import| import.payload.checksum_unverified().is_some())
                .map(|import| self.import_span(import))
                .collect();
            blocks.checksums(&due)
        });
        let sums = match written {
            Ok(sums) => sums,
            Err(failure) => {
                error!(reason = failure.reason(), "cannot write blocks");
                let broken = |import: &BlockImport| import.answer(ImportOutcome::Broken);
                return batch
                    .iter()
                    .map(broken)
                    .chain(failure.engine_lost())
                    .collect();
            }
        };
        let mut sums = sums.into_iter();
        let outcome = |import: &BlockImport| {
            let due = import.payload.checksum_unverified();
            if due.is_none_or(|due| sums.next() == Some(due)) {
                import.answer(ImportOutcome::Written)
            } else {
                let block = import.block.block;
                error!(%block, "bytes of a block changed on their way");
                import.answer(ImportOutcome::Damaged)
            }
        };
        batch.iter().map(outcome).collect()
    }

    fn import_span(&self, import: &BlockImport) -> BlockSpan {
        part_span(&self.capacity, import.block.block, import.part)
    }

    /// Uses the pool. A panic becomes an error; like a lost device it makes this worker unhealthy.
    fn catch_copy_panic<T>(
        &self,
        use_it: impl FnOnce(&dyn DeviceBlocks) -> Result<T, EngineError>,
    ) -> Result<T, CopyFailure> {
        let blocks = self.blocks.as_ref();
        let caught = catch_unwind(AssertUnwindSafe(|| use_it(blocks)));
        let reason = match caught {
            Ok(Ok(used)) => return Ok(used),
            Ok(Err(error @ EngineError::Lost(_))) => error.to_string(),
            Ok(Err(error)) => return Err(CopyFailure::Device(error.to_string())),
            Err(panic) => format!(
                "a copy of blocks panicked: {}",
                panic_message(panic.as_ref())
            ),
        };
        self.monitor.report_failure(&reason);
        Err(CopyFailure::Lost(reason))
    }
}

/// The reason why blocks were not copied.
enum CopyFailure {
    Device(String),
    /// The device is lost: nothing can be copied any more.
    Lost(String),
}

impl CopyFailure {
    fn reason(&self) -> &str {
        let (Self::Device(reason) | Self::Lost(reason)) = self;
        reason
    }

    /// The loss of the engine, after the answers to the failed work.
    fn engine_lost(self) -> Option<WorkerInput> {
        match self {
            Self::Device(_) => None,
            Self::Lost(reason) => Some(WorkerInput::EngineLost { reason }),
        }
    }
}

/// The outcomes of a batch's exports.
struct ExportOutcomes {
    list: Vec<ExportOutcome>,
    digests: Vec<HandoffDigest>,
    /// Bytes of each export.
    sizes: Vec<u32>,
}

impl ExportOutcomes {
    fn new(sizes: Vec<u32>) -> Self {
        Self {
            list: vec![ExportOutcome::Dropped; sizes.len()],
            digests: vec![HandoffDigest::default(); sizes.len()],
            sizes,
        }
    }

    /// Records a frame. Without a checksum it was not sent: the link is broken, and later frames
    /// fail too.
    fn record_frame(&mut self, number: usize, part: BlockPart, checksum: Option<u64>) {
        let Some(checksum) = checksum else {
            self.list[number] = ExportOutcome::Dropped;
            return;
        };
        self.digests[number].add_frame(part, checksum);
        let bytes = self.sizes[number];
        if part.offset + part.len == bytes {
            self.list[number] = ExportOutcome::Sent {
                digest: self.digests[number].value(),
                bytes: u64::from(bytes),
            };
        }
    }
}

/// Copies to be made, in order.
#[derive(Debug)]
struct CopyQueue<T> {
    state: Mutex<CopyQueueState<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct CopyQueueState<T> {
    work: VecDeque<T>,
    closed: bool,
}

impl<T> Default for CopyQueue<T> {
    fn default() -> Self {
        let state = CopyQueueState {
            work: VecDeque::new(),
            closed: false,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }
}

impl<T> CopyQueue<T> {
    fn push(&self, work: T) {
        self.lock().work.push_back(work);
        self.changed.notify_one();
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
    }

    /// Waits for work, and takes as much as is copied at once, all alike; `None` when the queue is
    /// closed.
    fn take_batch(
        &self,
        bytes: impl Fn(&T) -> u64,
        is_alike: impl Fn(&T, &T) -> bool,
    ) -> Option<Vec<T>> {
        let mut state = self.lock();
        while state.work.is_empty() && !state.closed {
            self.changed.wait(&mut state);
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
        let (removed, rest) = state.work.drain(..).partition(is_it);
        state.work = rest;
        Vec::from_iter::<VecDeque<T>>(removed)
    }

    fn lock(&self) -> MutexGuard<'_, CopyQueueState<T>> {
        self.state.lock()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::engine::BlockImport;
    use crate::engine::tests::{EngineLinkPair, handoff, worker};
    use cleave_domain::{BlockIndex, BlockRef, KvPlane};
    use cleave_engine::PeerBlocks;
    use cleave_transfer::checksum;
    use std::time::Duration;

    pub(crate) const BLOCK: usize = 64;

    /// The capacity of an engine with blocks of this size, and no states.
    pub(crate) const fn capacity(block_bytes: u32) -> Capacity {
        Capacity {
            block_tokens: 4,
            block_bytes,
            blocks_count: 6,
            slots_count: 4,
            step_tokens_max: 16,
            context_tokens_max: 24,
            states: None,
            windows: None,
        }
    }

    /// Blocks in host memory. A test that holds their lock delays every copy.
    #[derive(Debug, Default)]
    pub(crate) struct HostMemoryBlocks {
        blocks: Mutex<Vec<[u8; BLOCK]>>,
        panics: bool,
    }

    impl HostMemoryBlocks {
        pub(crate) fn of(blocks: Vec<[u8; BLOCK]>) -> Self {
            Self {
                blocks: Mutex::new(blocks),
                panics: false,
            }
        }

        pub(crate) fn contents(&self) -> Vec<[u8; BLOCK]> {
            self.blocks.lock().clone()
        }
    }

    impl DeviceBlocks for HostMemoryBlocks {
        fn read(&self, parts: &mut [(BlockSpan, &mut [u8])]) -> Result<Vec<u64>, EngineError> {
            assert!(!self.panics, "the shelf broke");
            let blocks = self.blocks.lock();
            for (span, to) in parts.iter_mut() {
                let of = span.offset..span.offset + span.len;
                to.copy_from_slice(&blocks[span.block.0 as usize][of]);
            }
            Ok(parts.iter().map(|(_, bytes)| checksum(bytes)).collect())
        }

        fn write(&self, parts: &[(BlockSpan, &[u8])]) -> Result<(), EngineError> {
            let mut blocks = self.blocks.lock();
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

    fn export(flight: u64, from: u32) -> BlockExport {
        BlockExport {
            handoff: handoff(flight),
            to: worker(2),
            plane: KvPlane::Blocks,
            from: BlockIndex(from),
            ordinal: from,
            block: BlockRef::default(),
        }
    }

    /// A copier, its answers, and a link to send by.
    struct KvCopierFixture {
        copier: KvCopier,
        blocks: Arc<HostMemoryBlocks>,
        monitor: Arc<HealthMonitor>,
        answers: mpsc::UnboundedReceiver<WorkerInput>,
        links: EngineLinkPair,
    }

    impl KvCopierFixture {
        fn new(host_blocks: HostMemoryBlocks) -> Self {
            let (answer_sender, answers) = mpsc::unbounded_channel();
            let monitor = Arc::new(HealthMonitor::new(Duration::MAX));
            let host_blocks = Arc::new(host_blocks);
            let blocks = Arc::clone(&host_blocks) as Arc<dyn DeviceBlocks>;
            Self {
                copier: KvCopier::start(
                    blocks,
                    capacity(BLOCK as u32),
                    Arc::clone(&monitor),
                    answer_sender,
                )
                .unwrap(),
                blocks: host_blocks,
                monitor,
                answers,
                links: EngineLinkPair::new(),
            }
        }

        /// The next frame at the other end, to be written here.
        async fn import(&mut self, to: u32) -> BlockImport {
            BlockImport {
                handoff: handoff(9),
                part: BlockPart {
                    plane: KvPlane::Blocks,
                    ordinal: to,
                    offset: 0,
                    len: BLOCK as u32,
                },
                block: BlockRef {
                    block: BlockIndex(to),
                    ..BlockRef::default()
                },
                payload: self.links.arrived_payload().await,
            }
        }
    }

    fn numbered_blocks(panics: bool) -> HostMemoryBlocks {
        HostMemoryBlocks {
            blocks: Mutex::new((0..6).map(|block| [block; BLOCK]).collect()),
            panics,
        }
    }

    #[tokio::test]
    async fn a_copied_block_is_answered_at_both_ends() {
        let mut fixture = KvCopierFixture::new(numbered_blocks(false));
        let permit = fixture.links.permit().await;
        fixture.copier.read(export(1, 4), permit);
        let sent = fixture.answers.recv().await.unwrap();
        let mut digest = HandoffDigest::default();
        let part = BlockPart {
            plane: KvPlane::Blocks,
            ordinal: 4,
            offset: 0,
            len: BLOCK as u32,
        };
        digest.add_frame(part, checksum(&[4; BLOCK]));
        let outcome = ExportOutcome::Sent {
            digest: digest.value(),
            bytes: BLOCK as u64,
        };
        assert_eq!(sent, export(1, 4).answer(outcome));
        let import = fixture.import(2).await;
        let written = import.answer(ImportOutcome::Written);
        fixture.copier.write(import);
        assert_eq!(fixture.answers.recv().await, Some(written));
        assert_eq!(fixture.blocks.blocks.lock()[2], [4; BLOCK]);
    }

    // Lesson: 5.
    #[tokio::test]
    async fn a_panicked_copy_answers_its_blocks_and_loses_the_engine() {
        let mut fixture = KvCopierFixture::new(numbered_blocks(true));
        let permit = fixture.links.permit().await;
        fixture.copier.read(export(1, 0), permit);
        let broken = export(1, 0).answer(ExportOutcome::Broken);
        assert_eq!(fixture.answers.recv().await, Some(broken));
        let lost = fixture.answers.recv().await;
        assert!(
            matches!(lost, Some(WorkerInput::EngineLost { .. })),
            "{lost:?}"
        );
        assert!(fixture.monitor.check().is_err());
    }

    // Lesson: 2.
    #[tokio::test]
    async fn queued_copies_of_a_forgotten_hand_off_are_answered_once() {
        let mut fixture = KvCopierFixture::new(numbered_blocks(false));
        let host_blocks = Arc::clone(&fixture.blocks);
        let (first, second, third) = (
            fixture.links.permit().await,
            fixture.links.permit().await,
            fixture.links.permit().await,
        );
        let answers = {
            // Copies that have begun wait for the lock.
            let held = host_blocks.blocks.lock();
            fixture.copier.read(export(1, 0), first);
            fixture.copier.read(export(2, 1), second);
            fixture.copier.read(export(2, 2), third);
            let dropped = fixture.copier.forget(handoff(2));
            drop(held);
            dropped
        };
        let mut outcomes = answers.len();
        // Copies that had begun are answered too; each once.
        while outcomes < 3 {
            let answer = fixture.answers.recv().await.unwrap();
            assert!(matches!(answer, WorkerInput::Exported { .. }), "{answer:?}");
            outcomes += 1;
        }
        assert!(fixture.copier.forget(handoff(1)).is_empty());
        assert!(fixture.answers.try_recv().is_err(), "once");
    }
}
