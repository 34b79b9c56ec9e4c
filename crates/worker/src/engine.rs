//! The engine's host: a thread of its own, or a task where steps are priced and compute nothing. It
//! takes steps, block reads and block writes from one queue, in order; that order alone keeps them
//! from interfering.
//!
//! Swaps of sequences to host memory and back take their turn in the same queue, and so do copies
//! of prefix-cache blocks to host memory and back.
//!
//! A device that copies by itself does not use this queue for blocks that leave and arrive: the
//! `kv_copier` copies them.
//!
//! One exception to the order: once `write_bytes_max` bytes have been written since the last step,
//! a step goes ahead of the writes, swaps and tier copies before it, so that neither arriving
//! hand-offs nor a memory shortage delay running sequences for longer. A swap is done in passes of
//! that size, and its rest goes to the end of the queue. This is safe because a brain gives no
//! block to a step before the write to it, or the swap that reads it, has been answered.
//!
//! An engine that takes a step while the previous one runs has it begun as soon as it is queued,
//! and results are collected in order. Meanwhile the queue goes on: blocks are copied while the
//! device runs. The thread sleeps until it is woken, and polls now and then whether a step is over
//! ([`POLL_INTERVAL_IDLE`], [`POLL_INTERVAL_BUSY`]). So a step is begun at once, and its result is
//! late by no more than the poll interval, what the system adds to a sleep (50 µs on Linux), and
//! the one copy under way.
//!
//! Invariant: every piece of work is answered once, even if it is dropped or panics; steps are
//! answered in order.

use super::kv_copier::KvCopier;
use super::overlap::StepExecution;
use super::pace::{StepPacer, StepTime};
use super::queue::EngineQueue;
use super::spans::part_span;
use super::step_failure::StepFailure;
use super::swap::{HostSwapPool, SwapJob, SwapProgress};
use super::tier::{self, LoadedBlock, OffloadJob, PendingLoad, PendingLoads, TierIo};
use cleave_domain::{BlockRef, Capacity, HandoffId, StepPlan, StepResult};
use cleave_engine::{BlockSpan, DeviceBlocks, Engine, EngineError};
use cleave_fleet::{HealthMonitor, panic_message};
use cleave_kv::{BlockPart, handoff::HandoffDigest};
use cleave_sched::{
    BlockExport, ExportOutcome, FetchOutcome, ImportOutcome, SwapOutcome, WorkerInput,
};
use cleave_transfer::{Frame, PayloadDestination, ReceivedPayload, SendPermit};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc};
use tracing::error;

/// The longest sleep while the device runs its only step and would idle after it. A poll costs 5 to
/// 20 µs of a processor.
const POLL_INTERVAL_IDLE: Duration = Duration::from_micros(50);
/// The longest sleep while the device has another step queued: only clients wait for the result.
const POLL_INTERVAL_BUSY: Duration = Duration::from_micros(200);

/// Steps in a row that a device may fail. One failure may be due to its request; a device that only
/// fails is broken, and its streams are better off on another worker.
const DEVICE_FAILURES_MAX: u32 = 8;

/// Received bytes to be written into the pool.
#[derive(Debug)]
pub(crate) struct BlockImport {
    pub(crate) handoff: HandoffId,
    pub(crate) part: BlockPart,
    pub(crate) block: BlockRef,
    pub(crate) payload: ReceivedPayload,
}

/// Work for the engine's thread.
#[derive(Debug)]
pub(crate) enum EngineWork {
    Step(StepPlan),
    Read(BlockExport, SendPermit),
    Write(BlockImport),
    Swap(SwapJob),
    /// Drops the blocks swapped out for this hand-off.
    SwapDrop(HandoffId),
    /// Copies a block of the prefix cache to host memory.
    Offload(OffloadJob),
    /// Announces blocks that are about to come back.
    Fetch(PendingLoad),
    Load(LoadedBlock),
    /// Stops waiting for blocks that have not come back.
    FetchStop(HandoffId),
}

impl BlockImport {
    pub(super) fn answer(&self, outcome: ImportOutcome) -> WorkerInput {
        WorkerInput::Imported {
            handoff: self.handoff,
            part: self.part,
            outcome,
        }
    }
}

/// Limits of the host's work.
#[derive(Clone, Debug)]
pub(crate) struct EngineHostLimits {
    pub(crate) capacity: Capacity,
    pub(crate) write_bytes_max: u64,
    pub(crate) swap_bytes_max: u64,
    pub(crate) time: StepTime,
}

/// The driver's side of the host. Dropping it ends the host after the work under way.
#[derive(Debug)]
pub(crate) struct EngineHost {
    pub(super) queue: Arc<EngineQueue>,
    /// Copies blocks without the engine, on devices that can.
    kv_copier: Option<KvCopier>,
    /// Keeps blocks below the pool.
    pub(super) tier_io: Option<TierIo>,
    /// The engine's thread, if it has one: it may sleep between two polls of the device.
    thread: Option<Thread>,
}

impl EngineHost {
    /// Starts the host. Its answers go to `answers`, one for each piece of work. Must be called
    /// within a tokio runtime.
    pub(crate) fn start(
        engine: Box<dyn Engine>,
        blocks: Option<Arc<dyn DeviceBlocks>>,
        tier: Option<tier::OpenedTier>,
        limits: EngineHostLimits,
        monitor: Arc<HealthMonitor>,
        answers: mpsc::UnboundedSender<WorkerInput>,
    ) -> std::io::Result<Self> {
        let queue = Arc::new(EngineQueue {
            state: Mutex::default(),
            changed: Notify::new(),
            write_bytes_max: limits.write_bytes_max,
        });
        let time = limits.time.clone();
        let kv_copier = blocks.clone().map(|blocks| {
            let monitor = Arc::clone(&monitor);
            KvCopier::start(blocks, limits.capacity, monitor, answers.clone())
        });
        let kv_copier = kv_copier.transpose()?;
        let mut engine_thread = EngineThread::new(engine, blocks, limits, monitor);
        engine_thread.pending_loads = tier.as_ref().map(|tier| PendingLoads::new(tier.store()));
        let running = run(engine_thread, Arc::clone(&queue), answers.clone());
        let thread = match time {
            StepTime::Measured => {
                let here = Handle::current();
                let thread = thread::Builder::new()
                    .name("cleave-engine".into())
                    .spawn(move || here.block_on(running))?;
                Some(thread.thread().clone())
            }
            StepTime::Priced(_) => {
                drop(tokio::spawn(running));
                None
            }
        };
        let tier_io = tier.map(|tier| tier.start(&queue, thread.clone(), answers));
        Ok(Self {
            tier_io: tier_io.transpose()?,
            queue,
            kv_copier,
            thread,
        })
    }

    /// Queues work. The queue is bounded by its sources: as many steps as the engine takes, reads
    /// by credit at the receivers, writes by the credit granted to senders, and swaps by the
    /// sequences that have no other work then: one of each at most, and one entry to drop what it
    /// left.
    pub(crate) fn push(&self, work: EngineWork) {
        let work = match (work, &self.kv_copier) {
            (EngineWork::Read(export, permit), Some(kv_copier)) => {
                return kv_copier.read(export, permit);
            }
            (EngineWork::Write(import), Some(kv_copier)) => return kv_copier.write(import),
            (work, _) => work,
        };
        self.queue.lock().work.push_back(work);
        self.wake();
    }

    pub(super) fn wake(&self) {
        self.queue.changed.notify_one();
        if let Some(thread) = &self.thread {
            thread.unpark();
        }
    }

    /// Drops the queued work of a hand-off that has not begun, and answers it.
    pub(crate) fn forget(&self, handoff: HandoffId) -> Vec<WorkerInput> {
        let mut answers = match &self.kv_copier {
            Some(kv_copier) => kv_copier.forget(handoff),
            None => Vec::new(),
        };
        self.queue.lock().work.retain(|work| match work {
            EngineWork::Read(export, _) if export.handoff == handoff => {
                answers.push(export.answer(ExportOutcome::Dropped));
                false
            }
            EngineWork::Write(import) if import.handoff == handoff => {
                answers.push(import.answer(ImportOutcome::Dropped));
                false
            }
            _ => true,
        });
        answers
    }

    /// Drops the blocks that a hand-off has in host memory. Swaps that have not begun are answered
    /// here.
    pub(crate) fn drop_swapped(&self, handoff: HandoffId) -> Vec<WorkerInput> {
        let mut answers = Vec::new();
        let mut state = self.queue.lock();
        state.work.retain(|work| match work {
            EngineWork::Swap(swap) if swap.handoff == handoff => {
                answers.push(swap.answer(SwapOutcome::Dropped));
                false
            }
            _ => true,
        });
        // After the copy that may be under way.
        state.work.push_back(EngineWork::SwapDrop(handoff));
        drop(state);
        self.wake();
        answers
    }
}

impl Drop for EngineHost {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.wake();
    }
}

/// The state of the engine's thread.
pub(super) struct EngineThread {
    engine: Box<dyn Engine>,
    /// The pool, if the device exposes it: copies there wait for no step.
    pub(super) blocks: Option<Arc<dyn DeviceBlocks>>,
    pub(super) steps: StepExecution,
    pub(super) pace: StepPacer,
    pub(super) limits: EngineHostLimits,
    monitor: Arc<HealthMonitor>,
    health: EngineHealth,
    /// Device failures since the last step that succeeded.
    device_failures: u32,
    pub(super) swap_pool: HostSwapPool,
    /// Blocks that are being loaded back, if there is a tier.
    pub(super) pending_loads: Option<PendingLoads>,
}

/// Whether the engine failed, and whether the brain was notified.
enum EngineHealth {
    Healthy,
    Failed(String),
    Reported,
}

/// The next action of the host.
enum EngineAction {
    Work(EngineWork),
    /// Takes the result of the oldest begun step.
    Collect,
    /// The priced time of a step has passed.
    TimeElapsed(WorkerInput),
    End,
}

async fn run(
    mut engine_thread: EngineThread,
    queue: Arc<EngineQueue>,
    answers: mpsc::UnboundedSender<WorkerInput>,
) {
    loop {
        let [answer, lost] = match next_action(&mut engine_thread, &queue).await {
            EngineAction::Work(work) => engine_thread.take(work, &queue),
            EngineAction::Collect => engine_thread.collect(),
            EngineAction::TimeElapsed(answer) => {
                engine_thread.step_ended();
                [Some(answer), None]
            }
            EngineAction::End => return,
        };
        let mut facts = answer.into_iter().chain(lost);
        if facts.any(|fact| answers.send(fact).is_err()) {
            return;
        }
    }
}

async fn next_action(engine_thread: &mut EngineThread, queue: &EngineQueue) -> EngineAction {
    // Only where the host has a thread of its own: parking it delays no other task.
    while engine_thread.has_uncollected_step() {
        let span = if engine_thread.has_another() {
            POLL_INTERVAL_BUSY
        } else {
            POLL_INTERVAL_IDLE
        };
        if engine_thread.is_done() {
            return EngineAction::Collect;
        }
        match queue.try_next() {
            Some(Some(work)) => return EngineAction::Work(work),
            // The driver is gone; begun steps are still waited for.
            Some(None) => return EngineAction::Collect,
            None => thread::park_timeout(span),
        }
    }
    tokio::select! {
        biased;
        answer = engine_thread.pace.step_over() => EngineAction::TimeElapsed(answer),
        work = queue.next() => work.map_or(EngineAction::End, EngineAction::Work),
    }
}

impl EngineThread {
    pub(super) fn new(
        mut engine: Box<dyn Engine>,
        blocks: Option<Arc<dyn DeviceBlocks>>,
        limits: EngineHostLimits,
        monitor: Arc<HealthMonitor>,
    ) -> Self {
        let steps = match (&limits.time, engine.overlap()) {
            (StepTime::Measured, Some(_)) => StepExecution::Overlap(VecDeque::new()),
            // Priced time passes by itself, even for an engine that could overlap steps.
            (StepTime::Priced(_), _) | (StepTime::Measured, None) => StepExecution::OneByOne,
        };
        Self {
            engine,
            blocks,
            steps,
            pace: StepPacer::new(limits.time.clone()),
            monitor,
            health: EngineHealth::Healthy,
            device_failures: 0,
            swap_pool: HostSwapPool::new(limits.swap_bytes_max),
            pending_loads: None,
            limits,
        }
    }

    /// Does one piece of work. Gives its answer, and the loss of the engine if it panicked.
    fn take(&mut self, work: EngineWork, queue: &EngineQueue) -> [Option<WorkerInput>; 2] {
        // Work done while a step runs, or while its time passes, does not count as the engine being
        // busy.
        if !self.has_step_under_way() {
            self.monitor.step_began();
        }
        let answer = match work {
            EngineWork::Step(plan) => self.step(plan),
            EngineWork::Read(export, permit) => Some(self.read(&export, permit)),
            EngineWork::Write(import) => Some(self.write(&import)),
            EngineWork::Swap(swap) => match self.swap(swap) {
                SwapProgress::More(rest) => queue.requeue(rest),
                SwapProgress::Over(answer) => Some(answer),
            },
            EngineWork::SwapDrop(handoff) => {
                drop(self.swap_pool.take(handoff));
                None
            }
            EngineWork::Offload(offload) => self.offload_part(offload, queue),
            EngineWork::Fetch(incoming) => {
                if let Some(pending_loads) = &mut self.pending_loads {
                    pending_loads.begin(incoming);
                }
                None
            }
            EngineWork::Load(loaded) => self.load_block(loaded),
            EngineWork::FetchStop(handoff) => {
                let pending_loads = self.pending_loads.as_mut();
                pending_loads
                    .and_then(|pending_loads| pending_loads.end(handoff, FetchOutcome::Stopped))
            }
        };
        if !self.has_step_under_way() {
            self.monitor.step_ended();
        }
        [answer, self.take_failure()]
    }

    /// Whether a step is under way.
    fn has_step_under_way(&self) -> bool {
        self.pace.is_pending() || self.has_uncollected_step()
    }

    /// Called when a step is over: from now on the engine is busy with the next one, or idle.
    pub(super) fn step_ended(&self) {
        if self.has_step_under_way() {
            self.monitor.step_began()
        } else {
            self.monitor.step_ended()
        }
    }

    /// The loss of the engine, reported once, after the answer to the work that it panicked in.
    pub(super) fn take_failure(&mut self) -> Option<WorkerInput> {
        let EngineHealth::Failed(reason) = &mut self.health else {
            return None;
        };
        let reason = std::mem::take(reason);
        self.health = EngineHealth::Reported;
        Some(WorkerInput::EngineLost { reason })
    }

    /// Runs or begins a step; its answer may have to wait until the step or its priced time is
    /// over.
    fn step(&mut self, plan: StepPlan) -> Option<WorkerInput> {
        if matches!(self.steps, StepExecution::Overlap(_)) {
            return self.begin(plan);
        }
        let began = Instant::now();
        let result = self.catch_engine_panic(|engine| engine.step(&plan));
        self.stepped(&plan, began, result)
    }

    /// Answers a step that is over, unless its priced time has yet to pass.
    pub(super) fn stepped(
        &mut self,
        plan: &StepPlan,
        began: Instant,
        result: Result<Result<StepResult, EngineError>, String>,
    ) -> Option<WorkerInput> {
        let failure = match result {
            Ok(Ok(result)) => {
                self.device_failures = 0;
                return self.pace.stepped(plan, result, began);
            }
            Ok(Err(error)) => StepFailure::of(&error, self.note_step_error(&error)),
            Err(panic) => StepFailure::of_panic(panic),
        };
        self.pace.step_failed();
        Some(failure.report(plan.step))
    }

    /// Sends a block, or a piece of a state, in frames; each is copied once, straight into the
    /// transport's buffer.
    fn read(&mut self, export: &BlockExport, mut permit: SendPermit) -> WorkerInput {
        let capacity = self.limits.capacity;
        let bytes = capacity.unit_bytes(export.unit());
        let mut digest = HandoffDigest::default();
        let mut offset = 0;
        while offset < bytes {
            let len = permit.frame_bytes_max().min(bytes - offset);
            let part = BlockPart {
                plane: export.plane,
                ordinal: export.ordinal,
                offset,
                len,
            };
            let frame = Frame {
                handoff: export.handoff,
                block: export.block,
                part,
            };
            let span = part_span(&capacity, export.from, part);
            let sent = self.catch_engine_panic(|engine| send(engine, span, frame, &mut permit));
            let reason = match sent {
                Ok(Ok(checksum)) => {
                    digest.add_frame(part, checksum);
                    offset += len;
                    continue;
                }
                Ok(Err(BlockSendError::LinkBroken)) => {
                    return export.answer(ExportOutcome::Dropped);
                }
                Ok(Err(BlockSendError::Engine(error))) => self.note_error(&error),
                Err(panic) => panic,
            };
            error!(block = %export.from, %reason, "cannot read a block");
            return export.answer(ExportOutcome::Broken);
        }
        export.answer(ExportOutcome::Sent {
            digest: digest.value(),
            bytes: u64::from(bytes),
        })
    }

    fn write(&mut self, import: &BlockImport) -> WorkerInput {
        let block = import.block.block;
        let span = part_span(&self.limits.capacity, block, import.part);
        let reason = match self.catch_engine_panic(|engine| write(engine, span, import)) {
            Ok(Ok(true)) => return import.answer(ImportOutcome::Written),
            Ok(Ok(false)) => {
                error!(%block, "bytes of a block changed on their way");
                return import.answer(ImportOutcome::Damaged);
            }
            Ok(Err(error)) => self.note_error(&error),
            Err(panic) => panic,
        };
        error!(%block, %reason, "cannot write a block");
        import.answer(ImportOutcome::Broken)
    }

    /// Calls the engine; a panic in it becomes an error, and makes this worker unhealthy.
    pub(super) fn catch_engine_panic<T>(
        &mut self,
        use_it: impl FnOnce(&mut dyn Engine) -> T,
    ) -> Result<T, String> {
        let engine = self.engine.as_mut();
        let caught = catch_unwind(AssertUnwindSafe(|| use_it(engine)));
        caught.map_err(|panic| {
            let reason = format!("the engine panicked: {}", panic_message(panic.as_ref()));
            self.engine_failed(&reason);
            reason
        })
    }

    /// The text of an error; a lost device also makes this worker unhealthy.
    pub(super) fn note_error(&mut self, error: &EngineError) -> String {
        let reason = error.to_string();
        if matches!(error, EngineError::Lost(_)) {
            self.engine_failed(&reason);
        }
        reason
    }

    /// As [`EngineThread::note_error`]; too many device failures in a row count as its loss.
    fn note_step_error(&mut self, error: &EngineError) -> String {
        let reason = self.note_error(error);
        if matches!(error, EngineError::Device(_)) {
            self.device_failures += 1;
        }
        if self.device_failures >= DEVICE_FAILURES_MAX {
            let count = self.device_failures;
            self.engine_failed(&format!(
                "{count} steps in a row failed, the last: {reason}"
            ));
        }
        reason
    }

    fn engine_failed(&mut self, reason: &str) {
        self.monitor.report_failure(reason);
        self.health = match std::mem::replace(&mut self.health, EngineHealth::Reported) {
            EngineHealth::Healthy => EngineHealth::Failed(reason.to_owned()),
            reported => reported,
        };
    }
}

/// The reason why a part of a block was not sent.
enum BlockSendError {
    Engine(EngineError),
    LinkBroken,
}

/// Sends one part; gives its checksum.
fn send(
    engine: &dyn Engine,
    span: BlockSpan,
    frame: Frame,
    permit: &mut SendPermit,
) -> Result<u64, BlockSendError> {
    if let Some(block) = engine.host_block(span.plane, span.block) {
        return permit
            .send_copy(frame, &block[span.range()])
            .map_err(|_| BlockSendError::LinkBroken);
    }
    let buffer = permit.buffer(frame.part.len);
    let read = engine.read_block(span, buffer);
    read.map_err(BlockSendError::Engine)?;
    permit.send(frame).map_err(|_| BlockSendError::LinkBroken)
}

/// Writes one part; gives whether its bytes are those that were sent.
fn write(
    engine: &mut dyn Engine,
    span: BlockSpan,
    import: &BlockImport,
) -> Result<bool, EngineError> {
    let mut place = PoolDestination { engine, span };
    import.payload.write_verified(&mut place)
}

/// A part of a block or slot in the pool, as the destination of a payload.
struct PoolDestination<'a> {
    engine: &'a mut dyn Engine,
    span: BlockSpan,
}

impl PayloadDestination for PoolDestination<'_> {
    type Error = EngineError;

    fn write(&mut self, bytes: &[u8]) -> Result<(), EngineError> {
        self.engine.write_block(self.span, bytes)
    }

    fn written(&self) -> Option<&[u8]> {
        let block = self.engine.host_block(self.span.plane, self.span.block)?;
        Some(&block[self.span.range()])
    }
}

#[cfg(test)]
pub(super) mod tests;
