//! The engine's host: a thread of its own, or a task where steps are priced and compute nothing. It
//! takes steps, block reads and block writes from one queue, in order; that order alone keeps them
//! apart.
//!
//! Sequences that are swapped to host memory and back take their turn in the same queue, and so do blocks of the
//! prefix cache that are copied to host memory or brought back.
//!
//! Where a device copies by itself, blocks that leave and arrive do not come here at all: the `porter` has them.
//!
//! One exception: once `write_bytes_max` bytes have been written since the last step, a step goes
//! ahead of the writes, swaps and such blocks before it, so that neither arriving hand-offs nor a shortage hold up
//! running sequences for longer than that. A swap is made in goes of as much, and its rest goes to the
//! end of the queue. It is safe because a brain gives no block to a step before the write to it, or
//! the swap that reads it, has been answered.
//!
//! An engine that takes a step while it runs the one before has it begun as soon as it is asked for, and
//! results are collected in order. Meanwhile the queue goes on: blocks are copied while the device runs.
//! The thread sleeps until it is asked for something, and looks up now and then whether a step is over
//! ([`LOOK_AGAIN`], [`LOOK_LATER`]). So a step is begun at once, and its result is late by no more than
//! that, by what the system adds to a sleep (50 µs on Linux) and by the one copy under way.
//!
//! Invariant: every piece of work taken is answered once, also when it is dropped or panics; steps are
//! answered in their order.

use super::overlap::Steps;
use super::pace::{Pace, StepTime};
use super::porter::Porter;
use super::queue::Queue;
use super::swap::{Cellar, Progress, Swap};
use super::tier::{self, Brought, Incoming, Incomings, Keeper, Shelving};
use crate::health::{Pulse, words};
use cleave_domain::{BlockIndex, BlockRef, HandoffId, StepPlan, StepResult};
use cleave_engine::{DeviceBlocks, Engine, EngineError};
use cleave_kv::{BlockPart, handoff::Digest};
use cleave_sched::{Export, ExportOutcome, FetchOutcome, ImportOutcome, Input, SwapOutcome};
use cleave_transfer::{Destination, Frame, Payload, Permit};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc};
use tracing::error;

/// How long the host sleeps at most while the device runs its only step, and would wait after it. A look
/// costs 5 to 20 µs of a processor.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// And while it has another one: only clients wait for what is over.
const LOOK_LATER: Duration = Duration::from_micros(200);

/// Steps in a row that a device may fail. One may be due to what was asked for; a device that does nothing else
/// is no device, and its streams are better off with another worker.
const DEVICE_FAILURES_MAX: u32 = 8;

/// Bytes on their way into the pool.
#[derive(Debug)]
pub(crate) struct Import {
    pub(crate) handoff: HandoffId,
    pub(crate) part: BlockPart,
    pub(crate) block: BlockRef,
    pub(crate) payload: Payload,
}

/// What the engine is asked to do.
#[derive(Debug)]
pub(crate) enum Work {
    Step(StepPlan),
    Read(Export, Permit),
    Write(Import),
    Swap(Swap),
    /// Drop what was swapped out of this.
    SwapDrop(HandoffId),
    /// A block of the prefix cache goes to host memory.
    Shelve(Shelving),
    /// Such blocks are about to come back.
    Fetch(Incoming),
    Bring(Brought),
    /// They are not waited for any more.
    FetchStop(HandoffId),
}

impl Import {
    pub(super) fn answer(&self, outcome: ImportOutcome) -> Input {
        Input::Imported {
            handoff: self.handoff,
            part: self.part,
            outcome,
        }
    }
}

/// What bounds the host's work.
#[derive(Clone, Debug)]
pub(crate) struct EngineLimits {
    pub(crate) block_bytes: u32,
    pub(crate) write_bytes_max: u64,
    pub(crate) swap_bytes_max: u64,
    pub(crate) time: StepTime,
}

/// The driver's side of the host. Dropping it ends the host after the work under way.
#[derive(Debug)]
pub(crate) struct EngineHost {
    pub(super) queue: Arc<Queue>,
    /// Where blocks are copied beside the engine.
    porter: Option<Porter>,
    /// Where blocks are kept below the pool.
    pub(super) keeper: Option<Keeper>,
    /// The thread, if the engine has one: it may sleep between two looks at the device.
    thread: Option<Thread>,
}

impl EngineHost {
    /// Starts the host. Answers go to `answers`; it holds one per piece of work. Must be called within
    /// a tokio runtime.
    pub(crate) fn start(
        (engine, blocks): (Box<dyn Engine>, Option<Arc<dyn DeviceBlocks>>),
        tier: Option<tier::Opened>,
        (limits, pulse): (EngineLimits, Arc<Pulse>),
        answers: mpsc::UnboundedSender<Input>,
    ) -> std::io::Result<Self> {
        let queue = Arc::new(Queue {
            state: Mutex::default(),
            changed: Notify::new(),
            write_bytes_max: limits.write_bytes_max,
        });
        let time = limits.time.clone();
        let porter = blocks.clone().map(|blocks| {
            let told = (Arc::clone(&pulse), answers.clone());
            Porter::start(blocks, limits.block_bytes, told)
        });
        let porter = porter.transpose()?;
        let mut bench = Bench::new((engine, blocks), limits, pulse);
        bench.incomings = tier.as_ref().map(|tier| Incomings::new(tier.shelves()));
        let running = run(bench, Arc::clone(&queue), answers.clone());
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
        let keeper = tier.map(|tier| tier.start(&queue, thread.clone(), answers));
        Ok(Self {
            keeper: keeper.transpose()?,
            queue,
            porter,
            thread,
        })
    }

    /// Queues work. The queue is bounded by what fills it: as many steps as the engine takes, reads by
    /// credit at the receivers, writes by the credit granted to senders, swaps by the sequences that have no other
    /// work then: one of each at most, and one word to drop what it left.
    pub(crate) fn push(&self, work: Work) {
        let work = match (work, &self.porter) {
            (Work::Read(export, permit), Some(porter)) => return porter.read(export, permit),
            (Work::Write(import), Some(porter)) => return porter.write(import),
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

    /// Drops what has not begun of a hand-off, and answers it.
    pub(crate) fn forget(&self, handoff: HandoffId) -> Vec<Input> {
        let mut answers = match &self.porter {
            Some(porter) => porter.forget(handoff),
            None => Vec::new(),
        };
        self.queue.lock().work.retain(|work| match work {
            Work::Read(export, _) if export.handoff == handoff => {
                answers.push(export.answer(ExportOutcome::Dropped));
                false
            }
            Work::Write(import) if import.handoff == handoff => {
                answers.push(import.answer(ImportOutcome::Dropped));
                false
            }
            _ => true,
        });
        answers
    }

    /// Drops what a hand-off has in host memory. Copies that have not begun are answered here.
    pub(crate) fn drop_swapped(&self, handoff: HandoffId) -> Vec<Input> {
        let mut answers = Vec::new();
        let mut state = self.queue.lock();
        state.work.retain(|work| match work {
            Work::Swap(swap) if swap.handoff == handoff => {
                answers.push(swap.answer(SwapOutcome::Dropped));
                false
            }
            _ => true,
        });
        // After the copy that may be under way.
        state.work.push_back(Work::SwapDrop(handoff));
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

/// What the host owns.
pub(super) struct Bench {
    engine: Box<dyn Engine>,
    /// The pool beside the engine, if it has one: copies there wait for no step.
    pub(super) blocks: Option<Arc<dyn DeviceBlocks>>,
    pub(super) steps: Steps,
    pub(super) pace: Pace,
    pub(super) limits: EngineLimits,
    pulse: Arc<Pulse>,
    health: Health,
    /// Steps that the device failed since it last did one.
    device_failures: u32,
    pub(super) cellar: Cellar,
    /// Blocks that come back, if any are kept.
    pub(super) incomings: Option<Incomings>,
}

/// Whether the engine panicked, and whether the brain knows.
enum Health {
    Sound,
    Broke(String),
    Told,
}

/// What the host does next.
enum Next {
    Work(Work),
    /// Takes the result of the oldest step that was begun.
    Collect,
    /// The time of a step has passed.
    Passed(Input),
    End,
}

async fn run(mut bench: Bench, queue: Arc<Queue>, answers: mpsc::UnboundedSender<Input>) {
    loop {
        let [answer, lost] = match next(&mut bench, &queue).await {
            Next::Work(work) => bench.take(work, &queue),
            Next::Collect => bench.collect(),
            Next::Passed(answer) => {
                bench.beat();
                [Some(answer), None]
            }
            Next::End => return,
        };
        let mut facts = answer.into_iter().chain(lost);
        if facts.any(|fact| answers.send(fact).is_err()) {
            return;
        }
    }
}

async fn next(bench: &mut Bench, queue: &Queue) -> Next {
    // Only where the host has a thread of its own: nobody else is held up.
    while bench.flies() {
        let span = match bench.has_another() {
            true => LOOK_LATER,
            false => LOOK_AGAIN,
        };
        if bench.is_done() {
            return Next::Collect;
        }
        match queue.look() {
            Some(Some(work)) => return Next::Work(work),
            // The driver is gone; what was begun is waited for.
            Some(None) => return Next::Collect,
            None => thread::park_timeout(span),
        }
    }
    tokio::select! {
        biased;
        answer = bench.pace.over() => Next::Passed(answer),
        work = queue.next() => work.map_or(Next::End, Next::Work),
    }
}

impl Bench {
    pub(super) fn new(
        (mut engine, blocks): (Box<dyn Engine>, Option<Arc<dyn DeviceBlocks>>),
        limits: EngineLimits,
        pulse: Arc<Pulse>,
    ) -> Self {
        let steps = match (&limits.time, engine.overlap()) {
            (StepTime::Measured, Some(_)) => Steps::Overlap(VecDeque::new()),
            // Time that is priced passes by itself, whatever computes nothing meanwhile.
            (StepTime::Priced(_), _) | (StepTime::Measured, None) => Steps::OneByOne,
        };
        Self {
            engine,
            blocks,
            steps,
            pace: Pace::new(limits.time.clone()),
            pulse,
            health: Health::Sound,
            device_failures: 0,
            cellar: Cellar::new(limits.swap_bytes_max),
            incomings: None,
            limits,
        }
    }

    /// Does one piece of work. Gives its answer, and the loss of the engine if that panicked in it.
    fn take(&mut self, work: Work, queue: &Queue) -> [Option<Input>; 2] {
        // What is done while a step runs, or its time passes, is not what the engine is busy with.
        if !self.steps_run() {
            self.pulse.begin();
        }
        let answer = match work {
            Work::Step(plan) => self.step(plan),
            Work::Read(export, permit) => Some(self.read(&export, permit)),
            Work::Write(import) => Some(self.write(&import)),
            Work::Swap(swap) => match self.swap(swap) {
                Progress::More(rest) => queue.put_back(rest),
                Progress::Over(answer) => Some(answer),
            },
            Work::SwapDrop(handoff) => {
                drop(self.cellar.take(handoff));
                None
            }
            Work::Shelve(shelving) => Some(self.shelve(shelving)),
            Work::Fetch(incoming) => {
                if let Some(incomings) = &mut self.incomings {
                    incomings.begin(incoming);
                }
                None
            }
            Work::Bring(brought) => self.bring(brought),
            Work::FetchStop(handoff) => {
                let incomings = self.incomings.as_mut();
                incomings.and_then(|incomings| incomings.end(handoff, FetchOutcome::Stopped))
            }
        };
        if !self.steps_run() {
            self.pulse.end();
        }
        [answer, self.lost()]
    }

    /// Whether a step is under way.
    fn steps_run(&self) -> bool {
        self.pace.is_pending() || self.flies()
    }

    /// A step is over: the engine is busy with the next one from now on, or with nothing.
    pub(super) fn beat(&self) {
        match self.steps_run() {
            true => self.pulse.begin(),
            false => self.pulse.end(),
        }
    }

    /// After the answer to the work it panicked in, the loss of the engine; said once.
    pub(super) fn lost(&mut self) -> Option<Input> {
        let Health::Broke(reason) = &mut self.health else {
            return None;
        };
        let reason = std::mem::take(reason);
        self.health = Health::Told;
        Some(Input::EngineLost { reason })
    }

    /// Runs or begins a step; its answer may have to wait until it is over, or its time has passed.
    fn step(&mut self, plan: StepPlan) -> Option<Input> {
        if matches!(self.steps, Steps::Overlap(_)) {
            return self.begin(plan);
        }
        let began = Instant::now();
        let result = self.guarded(|engine| engine.step(&plan));
        self.stepped(&plan, began, result)
    }

    /// Answers a step that is over, unless its time has yet to pass.
    pub(super) fn stepped(
        &mut self,
        plan: &StepPlan,
        began: Instant,
        result: Result<Result<StepResult, EngineError>, String>,
    ) -> Option<Input> {
        let (slot, reason) = match result {
            Ok(Ok(result)) => {
                self.device_failures = 0;
                return self.pace.stepped(plan, (result, began));
            }
            Ok(Err(error)) => (error.slot(), self.step_failed(&error)),
            Err(panic) => (None, panic),
        };
        self.pace.failed();
        error!(step = %plan.step, %reason, "step failed");
        Some(Input::StepFailed {
            step: plan.step,
            slot,
            reason,
        })
    }

    /// Sends a block in frames, each copied once, into what carries it.
    fn read(&mut self, export: &Export, mut permit: Permit) -> Input {
        let block_bytes = self.limits.block_bytes;
        let mut digest = Digest::default();
        let mut offset = 0;
        while offset < block_bytes {
            let len = permit.frame_bytes_max().min(block_bytes - offset);
            let part = BlockPart {
                ordinal: export.ordinal,
                offset,
                len,
            };
            let sent = self.guarded(|engine| send(engine, (export, part), &mut permit));
            let reason = match sent {
                Ok(Ok(checksum)) => {
                    digest.add(part, checksum);
                    offset += len;
                    continue;
                }
                Ok(Err(Unsent::LinkBroken)) => return export.answer(ExportOutcome::Dropped),
                Ok(Err(Unsent::Engine(error))) => self.failed(&error),
                Err(panic) => panic,
            };
            error!(block = %export.from, %reason, "cannot read a block");
            return export.answer(ExportOutcome::Broken);
        }
        export.answer(ExportOutcome::Sent {
            digest: digest.value(),
            bytes: u64::from(block_bytes),
        })
    }

    fn write(&mut self, import: &Import) -> Input {
        let block = import.block.block;
        let reason = match self.guarded(|engine| write(engine, import)) {
            Ok(Ok(true)) => return import.answer(ImportOutcome::Written),
            Ok(Ok(false)) => {
                error!(%block, "bytes of a block changed on their way");
                return import.answer(ImportOutcome::Damaged);
            }
            Ok(Err(error)) => self.failed(&error),
            Err(panic) => panic,
        };
        error!(%block, %reason, "cannot write a block");
        import.answer(ImportOutcome::Broken)
    }

    /// Runs the engine; a panic in it is a value here, and the end of this worker's health.
    pub(super) fn guarded<T>(
        &mut self,
        use_it: impl FnOnce(&mut dyn Engine) -> T,
    ) -> Result<T, String> {
        let engine = self.engine.as_mut();
        let caught = catch_unwind(AssertUnwindSafe(|| use_it(engine)));
        caught.map_err(|panic| {
            let reason = format!("the engine panicked: {}", words(panic.as_ref()));
            self.broke(&reason);
            reason
        })
    }

    /// The words of an error, which may be the end of this worker's health too.
    pub(super) fn failed(&mut self, error: &EngineError) -> String {
        let reason = error.to_string();
        if matches!(error, EngineError::Lost(_)) {
            self.broke(&reason);
        }
        reason
    }

    /// As [`Bench::failed`]; so many failures of the device in a row are its loss.
    fn step_failed(&mut self, error: &EngineError) -> String {
        let reason = self.failed(error);
        if matches!(error, EngineError::Device(_)) {
            self.device_failures += 1;
        }
        if self.device_failures >= DEVICE_FAILURES_MAX {
            let count = self.device_failures;
            self.broke(&format!(
                "{count} steps in a row failed, the last: {reason}"
            ));
        }
        reason
    }

    fn broke(&mut self, reason: &str) {
        self.pulse.broke(reason);
        self.health = match std::mem::replace(&mut self.health, Health::Told) {
            Health::Sound => Health::Broke(reason.to_owned()),
            known => known,
        };
    }
}

/// Why a part of a block was not sent.
enum Unsent {
    Engine(EngineError),
    LinkBroken,
}

/// Sends one part; says what its checksum is.
fn send(
    engine: &dyn Engine,
    (export, part): (&Export, BlockPart),
    permit: &mut Permit,
) -> Result<u64, Unsent> {
    let frame = Frame {
        handoff: export.handoff,
        block: export.block,
        part,
    };
    if let Some(block) = engine.host_block(export.from) {
        return permit
            .copy(frame, &block[range(part)])
            .map_err(|_| Unsent::LinkBroken);
    }
    let buffer = permit.buffer(part.len);
    let read = engine.read_block(export.from, part.offset as usize, buffer);
    read.map_err(Unsent::Engine)?;
    permit.send(frame).map_err(|_| Unsent::LinkBroken)
}

/// Writes one part; says whether it is what was sent.
fn write(engine: &mut dyn Engine, import: &Import) -> Result<bool, EngineError> {
    let mut place = Place {
        engine,
        block: import.block.block,
        part: import.part,
    };
    import.payload.land(&mut place)
}

/// A part of a block in the pool.
struct Place<'a> {
    engine: &'a mut dyn Engine,
    block: BlockIndex,
    part: BlockPart,
}

impl Destination for Place<'_> {
    type Error = EngineError;

    fn write(&mut self, bytes: &[u8]) -> Result<(), EngineError> {
        let offset = self.part.offset as usize;
        self.engine.write_block(self.block, offset, bytes)
    }

    fn written(&self) -> Option<&[u8]> {
        Some(&self.engine.host_block(self.block)?[range(self.part)])
    }
}

/// Where it is in its block.
pub(super) fn range(part: BlockPart) -> std::ops::Range<usize> {
    part.offset as usize..part.offset as usize + part.len as usize
}

#[cfg(test)]
mod tests;
