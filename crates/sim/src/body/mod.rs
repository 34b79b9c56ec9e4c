//! A worker of the simulated world: the production brain over a priced engine that does one
//! operation at a time.
//!
//! Owns: one life of a worker: its brain, its pool, and the operations queued for its engine.
//! Never: knows the network; the run sends the packets. Invariant: the engine reads and writes the
//! pool in the order in which the brain asked for it, except that a step goes ahead of writes once
//! enough bytes were written since the last step, as in the real worker.

mod engine_ops;
mod reservations;
mod swap;
mod tier;

pub(crate) use tier::{FetchSource, TierContents};

use crate::engine::{KvCell, SimEngine};
use crate::tape::{self, AnyTapeLine};
use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Generation, HandoffId, KvPlane, KvUnit, Order, StepId,
    StepPlan, Tape, TapeRecord, Time, WorkerDescription, WorkerRef,
};
use cleave_kv::BlockPart;
use cleave_sched::{
    BlockExport, ExportOutcome, ImportOutcome, PoolWriter, WorkerInput, WorkerLimits, WorkerOutput,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};

/// The cells of one frame.
pub(crate) type FrameCells = Vec<Option<KvCell>>;

/// An operation that the brain asks of the engine.
#[derive(Clone, Debug)]
pub(crate) enum EngineOp {
    Step(StepPlan),
    Export(BlockExport),
    Import {
        handoff: HandoffId,
        part: BlockPart,
        block: BlockRef,
        payload: FrameCells,
    },
    SwapOut {
        handoff: HandoffId,
        units: Vec<(KvUnit, BlockIndex)>,
    },
    SwapIn {
        handoff: HandoffId,
        units: Vec<(KvUnit, BlockIndex)>,
    },
    Offload {
        content: BlockHash,
        block: BlockIndex,
    },
    Fetch {
        handoff: HandoffId,
        blocks: Vec<(BlockHash, BlockIndex)>,
    },
}

impl EngineOp {
    fn hash_into(&self, print: &mut impl Hasher) {
        match self {
            Self::Step(plan) => {
                plan.step.hash(print);
                for segment in &plan.segments {
                    (segment.slot, segment.position, segment.len).hash(print);
                    segment.blocks.hash(print);
                    if let Some(state) = segment.state {
                        state.hash(print);
                    }
                }
                plan.opens.iter().for_each(|open| open.output.hash(print));
            }
            Self::Export(export) => {
                (export.handoff, export.to, export.unit()).hash(print);
                (export.from, export.block).hash(print);
            }
            Self::Import {
                handoff,
                part,
                block,
                payload,
            } => (handoff, part, block, payload).hash(print),
            Self::SwapOut { handoff, units } => ("out", handoff, units).hash(print),
            Self::SwapIn { handoff, units } => ("in", handoff, units).hash(print),
            Self::Offload { content, block } => ("shelve", content, block).hash(print),
            Self::Fetch { handoff, blocks } => ("fetch", handoff, blocks).hash(print),
        }
    }
}

/// Whether the tape of a life is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TapeMode {
    Off,
    On,
}

/// Whether the device fails the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceFaults {
    None,
    Failing,
}

/// The result of an engine operation.
#[derive(Debug)]
pub(crate) enum EngineOpResult {
    /// The brain is given this input.
    Answer(WorkerInput),
    /// The run sends these cells of a block; the brain is answered when the link has taken them.
    Send(BlockExport, FrameCells),
}

#[derive(Clone, Debug)]
pub(crate) struct SimWorker {
    pub(crate) worker: WorkerRef,
    pub(crate) brain: cleave_sched::WorkerBrain,
    pub(crate) limits: WorkerLimits,
    pub(crate) description: WorkerDescription,
    pub(crate) draining: bool,
    /// The brain has drained; the process ends once its last messages are out.
    pub(crate) exiting: bool,
    /// Blocks in quarantine, from the brain's last note.
    pub(crate) quarantined: u32,
    engine: SimEngine,
    ops: VecDeque<EngineOp>,
    /// Bytes written into the pool since the last step.
    written_bytes: u64,
    pub(crate) busy: Option<(EngineOp, Time)>,
    /// A step in flight that continues tokens of a failed step, so it fails too.
    failing_step: Option<StepId>,
    /// The frame that arrived and is not yet imported or discarded.
    pub(crate) arriving: Option<(HandoffId, BlockPart, FrameCells)>,
    /// Exports that the brain has no answer to yet, with their receivers.
    pub(crate) exporting: BTreeMap<(HandoffId, KvUnit), WorkerRef>,
    /// Reserved blocks that wait for their content, by this worker's own reports.
    block_owners: BTreeMap<(KvPlane, BlockIndex), (HandoffId, Generation)>,
    /// The sender of each reservation, from the `Reserve` order.
    senders: BTreeMap<HandoffId, WorkerRef>,
    /// The block or slot that is reserved for each block and piece of a hand-off.
    reserved_blocks: BTreeMap<(HandoffId, KvUnit), BlockRef>,
    /// The receivers of seals.
    pub(crate) sealed: BTreeMap<HandoffId, WorkerRef>,
    /// Hand-offs that were dropped while their blocks were being copied to host memory.
    dropped_swaps: BTreeSet<HandoffId>,
    /// Content swapped to host memory.
    swapped_blocks: BTreeMap<HandoffId, Vec<FrameCells>>,
    /// Content of the memory and disk tiers.
    pub(crate) tiers: TierContents,
    pub(crate) wakeup_at: Option<Time>,
    tape: Option<Vec<String>>,
}

impl SimWorker {
    pub(crate) fn new(limits: WorkerLimits, about: WorkerDescription, taping: TapeMode) -> Self {
        let mut body = Self {
            worker: limits.me,
            brain: cleave_sched::WorkerBrain::new(limits.clone()),
            engine: SimEngine::new(&limits.capacity, 0),
            limits: limits.clone(),
            description: about,
            draining: false,
            exiting: false,
            quarantined: 0,
            ops: VecDeque::new(),
            written_bytes: 0,
            busy: None,
            failing_step: None,
            arriving: None,
            exporting: BTreeMap::new(),
            block_owners: BTreeMap::new(),
            senders: BTreeMap::new(),
            reserved_blocks: BTreeMap::new(),
            sealed: BTreeMap::new(),
            swapped_blocks: BTreeMap::new(),
            dropped_swaps: BTreeSet::new(),
            tiers: TierContents::default(),
            wakeup_at: None,
            tape: (taping == TapeMode::On).then(Vec::new),
        };
        body.record(|| Tape::Worker(TapeRecord::Started { limits }));
        body
    }

    fn record(&mut self, line: impl FnOnce() -> AnyTapeLine) {
        if let Some(tape) = &mut self.tape {
            tape.push(tape::write(&line()));
        }
    }

    pub(crate) fn handle_input(&mut self, at: Time, input: WorkerInput) {
        if let WorkerInput::Ordered {
            order: Order::Reserve(reserve),
            ..
        } = &input
        {
            self.senders.insert(reserve.handoff, reserve.sender);
        }
        if self.tape.is_some() {
            let input = input.clone();
            self.record(|| Tape::Worker(TapeRecord::Received { at, input }));
        }
        self.brain.handle(at, input);
    }

    pub(crate) fn poll_output(&mut self) -> Option<WorkerOutput> {
        let output = self.brain.poll()?;
        if self.tape.is_some() {
            let output = output.clone();
            self.record(|| Tape::Worker(TapeRecord::Emitted { output }));
        }
        Some(output)
    }

    /// One letter for the log; [`crate::LEGEND`] explains it.
    pub(crate) fn state_symbol(&self) -> char {
        match &self.busy {
            Some((EngineOp::Step(_), _)) => 's',
            Some(_) => 'c',
            None if self.draining => '-',
            None => '.',
        }
    }

    pub(crate) fn take_tape(&mut self) -> Option<Vec<String>> {
        self.tape.take()
    }

    // === what the brain asks of the engine ===

    pub(crate) fn step(&mut self, plan: StepPlan) -> Result<(), String> {
        let (steps_max, under_way) = (self.limits.steps_in_flight, self.steps().count());
        if under_way >= steps_max as usize {
            return Err(format!(
                "{} plans {} with {under_way} steps in flight",
                self.worker, plan.step
            ));
        }
        let capacity = &self.limits.capacity;
        let tokens: u32 = plan.segments.iter().map(|s| s.len).sum();
        let slots = plan.segments.len() as u32;
        if tokens > capacity.step_tokens_max || slots > capacity.slots_count || tokens == 0 {
            return Err(format!(
                "{} plans {tokens} tokens in {slots} slots",
                self.worker
            ));
        }
        self.ops.push_back(EngineOp::Step(plan));
        Ok(())
    }

    /// Steps in flight, the oldest first.
    fn steps(&self) -> impl Iterator<Item = &StepPlan> {
        let ops = self.busy.iter().map(|(op, _)| op).chain(&self.ops);
        ops.filter_map(|op| match op {
            EngineOp::Step(plan) => Some(plan),
            _ => None,
        })
    }

    /// Checks that no step in flight writes these blocks or slots: a device may run a copy before
    /// the steps in flight or after them.
    pub(super) fn check_no_step_writes(
        &self,
        blocks: impl Iterator<Item = (KvPlane, BlockIndex)>,
    ) -> Result<(), String> {
        for (plane, block) in blocks {
            let written = (plane, block);
            let writes = |plan: &&StepPlan| self.engine.blocks_written(plan).contains(&written);
            if let Some(plan) = self.steps().find(writes) {
                return Err(format!(
                    "{} copies {block} while {} writes it",
                    self.worker, plan.step
                ));
            }
        }
        Ok(())
    }

    pub(crate) fn export(&mut self, export: BlockExport) -> Result<(), String> {
        let key = (export.handoff, export.unit());
        if self.exporting.insert(key, export.to).is_some() {
            return Err(format!("{} exports {key:?} twice at once", self.worker));
        }
        self.check_no_step_writes(std::iter::once((export.plane, export.from)))?;
        self.ops.push_back(EngineOp::Export(export));
        Ok(())
    }

    pub(crate) fn import(
        &mut self,
        handoff: HandoffId,
        part: BlockPart,
        block: BlockRef,
    ) -> Result<(), String> {
        let payload = self.take_arrived_frame(handoff, part)?;
        let owner = self.block_owners.get(&(part.plane, block.block));
        if owner != Some(&(handoff, block.generation)) {
            return Err(format!(
                "{} writes {handoff} into {}/{}, which is held for {owner:?}",
                self.worker, block.block, block.generation
            ));
        }
        self.check_no_step_writes(std::iter::once((part.plane, block.block)))?;
        self.ops.push_back(EngineOp::Import {
            handoff,
            part,
            block,
            payload,
        });
        Ok(())
    }

    pub(crate) fn take_arrived_frame(
        &mut self,
        handoff: HandoffId,
        part: BlockPart,
    ) -> Result<FrameCells, String> {
        match self.arriving.take() {
            Some((h, p, payload)) if (h, p) == (handoff, part) => Ok(payload),
            other => Err(format!(
                "{} expects {part:?} of {handoff}, but {:?} arrived",
                self.worker,
                other.map(|(h, p, _)| (h, p))
            )),
        }
    }

    /// Drops a hand-off's operations that have not begun; gives the answers that the brain is owed.
    pub(crate) fn forget(&mut self, handoff: HandoffId) -> Vec<WorkerInput> {
        let mut answers = Vec::new();
        let mut remaining = VecDeque::new();
        for op in self.ops.drain(..) {
            match op {
                EngineOp::Export(export) if export.handoff == handoff => {
                    self.exporting.remove(&(handoff, export.unit()));
                    answers.push(export.answer(ExportOutcome::Dropped));
                }
                EngineOp::Import {
                    handoff: h, part, ..
                } if h == handoff => answers.push(WorkerInput::Imported {
                    handoff,
                    part,
                    outcome: ImportOutcome::Dropped,
                }),
                other => remaining.push_back(other),
            }
        }
        self.ops = remaining;
        answers
    }

    /// The link to one life of a worker is lost: exports to it end as dropped, whether they were
    /// read or not.
    pub(crate) fn drop_exports(&mut self, peer: WorkerRef) -> Vec<WorkerInput> {
        let begun = match &self.busy {
            Some((EngineOp::Export(e), _)) => Some((e.handoff, e.unit())),
            _ => None,
        };
        // A one-sided write that has begun ends only when it lands, so it is not dropped.
        let queued = |key: &(HandoffId, KvUnit)| {
            let is_it =
                |op: &EngineOp| matches!(op, EngineOp::Export(e) if (e.handoff, e.unit()) == *key);
            self.ops.iter().any(is_it)
        };
        let stops =
            |key: &(HandoffId, KvUnit)| self.limits.writer == PoolWriter::Receiver || queued(key);
        let lost: Vec<(HandoffId, KvUnit)> = self
            .exporting
            .iter()
            .filter(|(key, to)| **to == peer && Some(**key) != begun && stops(key))
            .map(|(key, _)| *key)
            .collect();
        self.ops.retain(|op| match op {
            EngineOp::Export(e) => !lost.contains(&(e.handoff, e.unit())),
            _ => true,
        });
        let answer = |(handoff, unit): (HandoffId, KvUnit)| {
            self.exporting.remove(&(handoff, unit));
            WorkerInput::Exported {
                handoff,
                plane: unit.plane,
                ordinal: unit.ordinal,
                outcome: ExportOutcome::Dropped,
            }
        };
        lost.into_iter().map(answer).collect()
    }

    /// Whether the engine has no operation in progress, queued, or waiting for the disk.
    pub(crate) fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.busy.is_none() && self.disk_is_idle()
    }
}
