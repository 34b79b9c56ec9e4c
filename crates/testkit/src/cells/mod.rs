//! A worker of cells: the production brain over an engine of cells.
//!
//! Owns: one life of a worker: its brain, its pool, what it keeps in host memory and on disk, and
//! the operations that its brain has asked of its engine. Never: knows a clock or the network: its
//! world says when an operation ends and where a packet goes. Invariant: a block is neither read
//! nor written by two operations at once, or while it is reserved for a hand-off, but for it.

mod actions;
mod engine_ops;
mod reservations;
mod swap;
mod tier;

pub use actions::{CellHost, carry_out};
pub use engine_ops::OpFault;
pub use tier::FetchSource;

use crate::MatcherFault;
use crate::engine::{CellEngine, DrawToken, KvCell};
use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Generation, HandoffId, KvPlane, KvUnit, Order, StepId,
    StepPlan, Time, WorkerRef,
};
use cleave_kv::BlockPart;
use cleave_sched::{
    BlockExport, ExportOutcome, ImportOutcome, PoolWriter, WorkerBrain, WorkerInput, WorkerLimits,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use tier::TierContents;

/// The cells of one frame.
pub type FrameCells = Vec<Option<KvCell>>;

/// An operation that the brain asks of the engine.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineOp {
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
        /// Parts of the block or slot that are copied out, each under a content of its own.
        parts: Vec<(BlockHash, KvUnit)>,
        block: BlockIndex,
    },
    Fetch {
        handoff: HandoffId,
        parts: Vec<FetchPart>,
    },
}

/// A content, and the place in the pool that it is copied to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FetchPart {
    pub content: BlockHash,
    pub unit: KvUnit,
    pub block: BlockIndex,
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
            Self::Offload {
                content,
                parts,
                block,
            } => ("shelve", content, parts, block).hash(print),
            Self::Fetch { handoff, parts } => ("fetch", handoff, parts).hash(print),
        }
    }
}

/// When the brain gets the answer to a queued operation that it gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerTime {
    /// At once; the operation is gone.
    AtOnce,
    /// When the operation would have ended.
    AtItsEnd,
}

/// The result of an operation.
#[derive(Debug)]
pub enum EngineOpResult {
    /// The brain is given this input.
    Answer(WorkerInput),
    /// The world sends these cells of a block; the brain is answered when the link has taken them.
    Send(BlockExport, FrameCells),
}

#[derive(Clone, Debug)]
pub struct CellWorker {
    pub worker: WorkerRef,
    pub brain: WorkerBrain,
    pub limits: WorkerLimits,
    /// Its process was asked to drain.
    pub draining: bool,
    /// The brain has drained; the process ends once its last messages are out.
    pub exiting: bool,
    engine: CellEngine,
    answers: AnswerTime,
    /// Operations that have not begun, in the order in which the brain asked for them.
    ops: VecDeque<EngineOp>,
    /// Bytes written into the pool since the last step.
    written_bytes: u64,
    /// The operation in progress, and its beginning, where the engine does one at a time.
    pub busy: Option<(EngineOp, Time)>,
    /// A step in flight that continues tokens of a failed step, so it fails too.
    failing_step: Option<StepId>,
    /// The frame that arrived and is not yet imported or discarded.
    arriving: Option<(HandoffId, BlockPart, FrameCells)>,
    /// Exports that the brain has no answer to yet, with their receivers.
    exporting: BTreeMap<(HandoffId, KvUnit), WorkerRef>,
    /// Reserved blocks that wait for their content, by this worker's own reports.
    block_owners: BTreeMap<(KvPlane, BlockIndex), (HandoffId, Generation)>,
    /// The sender of each reservation, from the `Reserve` order.
    senders: BTreeMap<HandoffId, WorkerRef>,
    /// The block or slot that is reserved for each block and piece of a hand-off.
    reserved_blocks: BTreeMap<(HandoffId, KvUnit), BlockRef>,
    /// The receivers of seals.
    pub sealed: BTreeMap<HandoffId, WorkerRef>,
    /// Hand-offs that were dropped while their blocks were being copied to host memory.
    dropped_swaps: BTreeSet<HandoffId>,
    /// Content swapped to host memory.
    swapped_blocks: BTreeMap<HandoffId, Vec<FrameCells>>,
    /// Content of the memory and disk tiers.
    tiers: TierContents,
}

impl CellWorker {
    /// A new life. Engines with equal salts draw equal tokens.
    pub fn new(limits: WorkerLimits, draw_token: DrawToken, draw_salt: u64) -> Self {
        Self {
            worker: limits.me,
            brain: WorkerBrain::new(limits.clone()),
            engine: CellEngine::new(&limits.capacity, draw_token, draw_salt),
            limits,
            draining: false,
            exiting: false,
            answers: AnswerTime::AtOnce,
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
        }
    }

    /// The same, with another time of answers to operations that the brain gave up.
    pub fn answering(self, answers: AnswerTime) -> Self {
        Self { answers, ..self }
    }

    /// The same, with an engine that makes a mistake with its constraints.
    pub fn mistaking(mut self, fault: Option<MatcherFault>) -> Self {
        if let Some(fault) = fault {
            self.engine.break_matchers(fault);
        }
        self
    }

    /// Gives the brain an input; its outputs are to be polled and carried out.
    pub fn handle_input(&mut self, at: Time, input: WorkerInput) {
        if let WorkerInput::Ordered {
            order: Order::Reserve(reserve),
            ..
        } = &input
        {
            self.senders.insert(reserve.handoff, reserve.sender);
        }
        self.brain.handle(at, input);
    }

    /// One letter for a log: `s` runs a step, `c` copies, `-` drains, `.` is idle.
    pub fn state_symbol(&self) -> char {
        match &self.busy {
            Some((EngineOp::Step(_), _)) => 's',
            Some(_) => 'c',
            None if self.draining => '-',
            None => '.',
        }
    }

    // === what the brain asks of the engine ===

    fn step(&mut self, plan: StepPlan) -> Result<(), String> {
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

    /// The operation that the brain asked for last, if it has not begun.
    pub fn last_queued(&self) -> Option<&EngineOp> {
        self.ops.back()
    }

    /// Steps in flight, the oldest first.
    pub fn steps(&self) -> impl Iterator<Item = &StepPlan> {
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

    fn export(&mut self, export: BlockExport) -> Result<(), String> {
        let key = (export.handoff, export.unit());
        if self.exporting.insert(key, export.to).is_some() {
            return Err(format!("{} exports {key:?} twice at once", self.worker));
        }
        self.check_no_step_writes(std::iter::once((export.plane, export.from)))?;
        self.ops.push_back(EngineOp::Export(export));
        Ok(())
    }

    fn import(
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

    /// The frame that the brain's next input is about.
    pub fn frame_arrives(&mut self, handoff: HandoffId, part: BlockPart, cells: FrameCells) {
        self.arriving = Some((handoff, part, cells));
    }

    /// Checks that the brain has imported or discarded the frame that arrived.
    pub fn check_frame_answered(&self) -> Result<(), String> {
        let Some((handoff, part, _)) = &self.arriving else {
            return Ok(());
        };
        Err(format!(
            "{} neither imports nor discards {handoff} {part:?}",
            self.worker
        ))
    }

    pub(super) fn take_arrived_frame(
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
    fn forget(&mut self, handoff: HandoffId) -> Vec<WorkerInput> {
        self.sealed.remove(&handoff);
        let mut answers = Vec::new();
        if self.answers == AnswerTime::AtItsEnd {
            return answers;
        }
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

    /// The export is answered; false if it was answered before.
    pub fn export_ends(&mut self, handoff: HandoffId, unit: KvUnit) -> bool {
        self.exporting.remove(&(handoff, unit)).is_some()
    }

    /// The link to one life of a worker is lost: exports to it end as dropped, whether they were
    /// read or not.
    pub fn drop_exports(&mut self, peer: WorkerRef) -> Vec<WorkerInput> {
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
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.busy.is_none() && self.disk_is_idle()
    }
}
