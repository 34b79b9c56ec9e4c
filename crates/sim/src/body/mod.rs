//! A worker's body in the simulated world: the real brain, a priced engine, one thing at a time.
//!
//! Owns: one life of a worker: its brain, its pool, and the work its engine has before it.
//! Never: knows the wires; what must go out is handed to the run. Invariant: the engine does what
//! reads or writes the pool in the order in which the brain asked for it, except that a step goes
//! ahead of writes once enough was written since the last one, as the real worker's does.

mod host;
mod tier;
mod witness;

pub(crate) use tier::{Below, From};

use crate::dice::Dice;
use crate::engine::{Cell, Engine, Price};
use crate::tape::{self, Line};
use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Generation, HandoffId, Order, StepId, StepPlan, Tape,
    TapeLine, Time, WorkerDescription, WorkerRef,
};
use cleave_kv::BlockPart;
use cleave_sched::{Export, ExportOutcome, ImportOutcome, Input, Limits, Output, Writer};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::time::Duration;

/// The content of a frame.
pub(crate) type Payload = Vec<Option<Cell>>;

/// What the engine is asked to do.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Step(StepPlan),
    Export(Export),
    Import {
        handoff: HandoffId,
        part: BlockPart,
        block: BlockRef,
        payload: Payload,
    },
    SwapOut {
        handoff: HandoffId,
        blocks: Vec<BlockIndex>,
    },
    SwapIn {
        handoff: HandoffId,
        blocks: Vec<BlockIndex>,
    },
    Shelve {
        content: BlockHash,
        block: BlockIndex,
    },
    Fetch {
        handoff: HandoffId,
        blocks: Vec<(BlockHash, BlockIndex)>,
    },
}

impl Op {
    fn feed(&self, print: &mut impl Hasher) {
        match self {
            Self::Step(plan) => {
                plan.step.hash(print);
                for segment in &plan.segments {
                    (segment.slot, segment.position, segment.len).hash(print);
                    segment.blocks.hash(print);
                }
                plan.opens.iter().for_each(|open| open.output.hash(print));
            }
            Self::Export(export) => {
                (export.handoff, export.to, export.ordinal).hash(print);
                (export.from, export.block).hash(print);
            }
            Self::Import {
                handoff,
                part,
                block,
                payload,
            } => (handoff, part, block, payload).hash(print),
            Self::SwapOut { handoff, blocks } => ("out", handoff, blocks).hash(print),
            Self::SwapIn { handoff, blocks } => ("in", handoff, blocks).hash(print),
            Self::Shelve { content, block } => ("shelve", content, block).hash(print),
            Self::Fetch { handoff, blocks } => ("fetch", handoff, blocks).hash(print),
        }
    }
}

/// Whether a life's tape is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taping {
    Off,
    On,
}

/// Whether the device does what it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Luck {
    Well,
    Broken,
}

/// What became of an op.
#[derive(Debug)]
pub(crate) enum Done {
    /// Tell the brain.
    Hear(Input),
    /// Send these cells of a block, then tell the brain.
    Ship(Export, Payload),
}

#[derive(Clone, Debug)]
pub(crate) struct Body {
    pub(crate) me: WorkerRef,
    pub(crate) brain: cleave_sched::Brain,
    pub(crate) limits: Limits,
    pub(crate) about: WorkerDescription,
    pub(crate) draining: bool,
    /// The brain is done; the process ends when its last words are out.
    pub(crate) exiting: bool,
    /// Blocks in quarantine, as the brain said last.
    pub(crate) quarantined: u32,
    engine: Engine,
    ops: VecDeque<Op>,
    /// Since the last step.
    written_bytes: u64,
    pub(crate) busy: Option<(Op, Time)>,
    /// A step whose tokens a broken one was to draw.
    doomed: Option<StepId>,
    /// The frame that just arrived.
    pub(crate) arriving: Option<(HandoffId, BlockPart, Payload)>,
    /// Exports the brain has no answer to.
    pub(crate) exporting: BTreeMap<(HandoffId, u32), WorkerRef>,
    /// Blocks that a reservation waits to be filled, as this worker said it.
    reserved: BTreeMap<BlockIndex, (HandoffId, Generation)>,
    /// Hand-offs whose both legs are here: their own steps fill the reserved blocks.
    joint: BTreeSet<HandoffId>,
    /// Who was to write what was reserved.
    senders: BTreeMap<HandoffId, WorkerRef>,
    /// Which block was reserved for which of a sequence's.
    places: BTreeMap<(HandoffId, u32), BlockRef>,
    /// To whom seals were sent.
    pub(crate) sealed: BTreeMap<HandoffId, WorkerRef>,
    /// Dropped while it was being copied to host memory.
    unwanted: BTreeSet<HandoffId>,
    /// Blocks in host memory.
    host: BTreeMap<HandoffId, Vec<Payload>>,
    /// What is kept below the pool.
    pub(crate) below: Below,
    pub(crate) wake: Option<Time>,
    tape: Option<Vec<String>>,
}

impl Body {
    pub(crate) fn new(limits: Limits, about: WorkerDescription, taping: Taping) -> Self {
        let capacity = limits.capacity;
        let mut body = Self {
            me: limits.me,
            brain: cleave_sched::Brain::new(limits.clone()),
            engine: Engine::new(capacity.blocks_count, capacity.block_tokens, 0),
            limits: limits.clone(),
            about,
            draining: false,
            exiting: false,
            quarantined: 0,
            ops: VecDeque::new(),
            written_bytes: 0,
            busy: None,
            doomed: None,
            arriving: None,
            exporting: BTreeMap::new(),
            reserved: BTreeMap::new(),
            joint: BTreeSet::new(),
            senders: BTreeMap::new(),
            places: BTreeMap::new(),
            sealed: BTreeMap::new(),
            host: BTreeMap::new(),
            unwanted: BTreeSet::new(),
            below: Below::default(),
            wake: None,
            tape: (taping == Taping::On).then(Vec::new),
        };
        body.record(|| Tape::Worker(TapeLine::Born { limits }));
        body
    }

    fn record(&mut self, line: impl FnOnce() -> Line) {
        if let Some(tape) = &mut self.tape {
            tape.push(tape::write(&line()));
        }
    }

    pub(crate) fn hear(&mut self, at: Time, input: Input) {
        if let Input::Ordered {
            order: Order::Reserve(reserve),
            ..
        } = &input
        {
            self.senders.insert(reserve.handoff, reserve.sender);
            if reserve.sender == self.me {
                self.joint.insert(reserve.handoff);
            }
        }
        if self.tape.is_some() {
            let input = input.clone();
            self.record(|| Tape::Worker(TapeLine::Heard { at, input }));
        }
        self.brain.handle(at, input);
    }

    pub(crate) fn say(&mut self) -> Option<Output> {
        let output = self.brain.poll()?;
        if self.tape.is_some() {
            let output = output.clone();
            self.record(|| Tape::Worker(TapeLine::Said { output }));
        }
        Some(output)
    }

    /// One letter for the log; see its legend.
    pub(crate) fn mark(&self) -> char {
        match &self.busy {
            Some((Op::Step(_), _)) => 's',
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
                "{} plans {} with {under_way} steps under way",
                self.me, plan.step
            ));
        }
        let capacity = &self.limits.capacity;
        let tokens: u32 = plan.segments.iter().map(|s| s.len).sum();
        let slots = plan.segments.len() as u32;
        if tokens > capacity.step_tokens_max || slots > capacity.slots_count || tokens == 0 {
            return Err(format!(
                "{} plans {tokens} tokens in {slots} slots",
                self.me
            ));
        }
        self.ops.push_back(Op::Step(plan));
        Ok(())
    }

    /// Steps under way, the oldest first.
    fn steps(&self) -> impl Iterator<Item = &StepPlan> {
        let ops = self.busy.iter().map(|(op, _)| op).chain(&self.ops);
        ops.filter_map(|op| match op {
            Op::Step(plan) => Some(plan),
            _ => None,
        })
    }

    /// A device may copy a block before the steps under way or after them, so none of them writes it.
    pub(super) fn check_copied(
        &self,
        blocks: impl Iterator<Item = BlockIndex>,
    ) -> Result<(), String> {
        for block in blocks {
            let writes = |plan: &&StepPlan| self.engine.written(plan).contains(&block);
            if let Some(plan) = self.steps().find(writes) {
                return Err(format!(
                    "{} copies {block} while {} writes it",
                    self.me, plan.step
                ));
            }
        }
        Ok(())
    }

    pub(crate) fn export(&mut self, export: Export) -> Result<(), String> {
        let key = (export.handoff, export.ordinal);
        if self.exporting.insert(key, export.to).is_some() {
            return Err(format!("{} exports {key:?} twice at once", self.me));
        }
        self.check_copied(std::iter::once(export.from))?;
        self.ops.push_back(Op::Export(export));
        Ok(())
    }

    pub(crate) fn import(
        &mut self,
        handoff: HandoffId,
        part: BlockPart,
        block: BlockRef,
    ) -> Result<(), String> {
        let payload = self.take_arrived(handoff, part)?;
        let owner = self.reserved.get(&block.block);
        if owner != Some(&(handoff, block.generation)) {
            return Err(format!(
                "{} writes {handoff} into {}/{}, which is held for {owner:?}",
                self.me, block.block, block.generation
            ));
        }
        self.check_copied(std::iter::once(block.block))?;
        self.ops.push_back(Op::Import {
            handoff,
            part,
            block,
            payload,
        });
        Ok(())
    }

    pub(crate) fn take_arrived(
        &mut self,
        handoff: HandoffId,
        part: BlockPart,
    ) -> Result<Payload, String> {
        match self.arriving.take() {
            Some((h, p, payload)) if (h, p) == (handoff, part) => Ok(payload),
            other => Err(format!(
                "{} wants {handoff} {part:?}, and {:?} arrived",
                self.me,
                other.map(|(h, p, _)| (h, p))
            )),
        }
    }

    /// Drops what has not begun of a hand-off; gives the answers the brain is owed.
    pub(crate) fn forget(&mut self, handoff: HandoffId) -> Vec<Input> {
        let mut answers = Vec::new();
        let mut kept = VecDeque::new();
        for op in self.ops.drain(..) {
            match op {
                Op::Export(export) if export.handoff == handoff => {
                    self.exporting.remove(&(handoff, export.ordinal));
                    answers.push(export.answer(ExportOutcome::Dropped));
                }
                Op::Import {
                    handoff: h, part, ..
                } if h == handoff => answers.push(Input::Imported {
                    handoff,
                    part,
                    outcome: ImportOutcome::Dropped,
                }),
                other => kept.push_back(other),
            }
        }
        self.ops = kept;
        answers
    }

    /// The link to a life of a worker is gone: its exports, read or not, got nowhere.
    pub(crate) fn drop_exports(&mut self, peer: WorkerRef) -> Vec<Input> {
        let begun = match &self.busy {
            Some((Op::Export(e), _)) => Some((e.handoff, e.ordinal)),
            _ => None,
        };
        // A one-sided write that has begun ends when it has landed.
        let queued = |key: &(HandoffId, u32)| {
            let is_it = |op: &Op| matches!(op, Op::Export(e) if (e.handoff, e.ordinal) == *key);
            self.ops.iter().any(is_it)
        };
        let stops = |key: &(HandoffId, u32)| self.limits.writer == Writer::Receiver || queued(key);
        let lost: Vec<(HandoffId, u32)> = self
            .exporting
            .iter()
            .filter(|(key, to)| **to == peer && Some(**key) != begun && stops(key))
            .map(|(key, _)| *key)
            .collect();
        self.ops.retain(|op| match op {
            Op::Export(e) => !lost.contains(&(e.handoff, e.ordinal)),
            _ => true,
        });
        let answer = |(handoff, ordinal)| {
            self.exporting.remove(&(handoff, ordinal));
            Input::Exported {
                handoff,
                ordinal,
                outcome: ExportOutcome::Dropped,
            }
        };
        lost.into_iter().map(answer).collect()
    }

    // === the engine ===

    /// Begins the next op, if none is under way; says when it will be done.
    pub(crate) fn begin(&mut self, now: Time, price: &Price) -> Option<Time> {
        if self.busy.is_some() {
            return None;
        }
        let op = self.take(price.write_bytes)?;
        let takes = match &op {
            Op::Step(plan) => price.of(plan),
            Op::Export(_) | Op::Import { .. } | Op::Shelve { .. } => {
                Duration::from_nanos(price.copy)
            }
            Op::Fetch { blocks, .. } => Duration::from_nanos(price.copy * blocks.len() as u64),
            Op::SwapOut { blocks, .. } | Op::SwapIn { blocks, .. } => {
                Duration::from_nanos(price.copy * blocks.len() as u64)
            }
        };
        self.busy = Some((op, now));
        Some(now + takes)
    }

    fn take(&mut self, write_bytes: u64) -> Option<Op> {
        let is_write =
            |op: &&Op| matches!(op, Op::Import { .. } | Op::Shelve { .. } | Op::Fetch { .. });
        let writes_count = self.ops.iter().take_while(is_write).count();
        let step_next = matches!(self.ops.get(writes_count), Some(Op::Step(_)));
        let at = match step_next && self.written_bytes >= write_bytes {
            true => writes_count,
            false => 0,
        };
        let op = self.ops.remove(at)?;
        match &op {
            Op::Step(_) => self.written_bytes = 0,
            Op::Import { part, .. } => self.written_bytes += u64::from(part.len),
            Op::Shelve { .. } => self.written_bytes += u64::from(self.limits.capacity.block_bytes),
            Op::Fetch { blocks, .. } => {
                let bytes = u64::from(self.limits.capacity.block_bytes);
                self.written_bytes += bytes * blocks.len() as u64;
            }
            Op::Export(_) | Op::SwapOut { .. } | Op::SwapIn { .. } => {}
        }
        Some(op)
    }

    /// Finishes the op under way. The device breaks so many of a thousand.
    pub(crate) fn finish(
        &mut self,
        now: Time,
        salt_of: impl Fn(u64) -> u64,
        (dice, broken): (&mut Dice, u32),
    ) -> Result<Done, String> {
        let (op, since) = self.busy.take().ok_or("the engine had nothing to do")?;
        // What is kept below the pool may be amiss besides.
        let broken = match op {
            Op::Fetch { .. } => 100 * broken,
            _ => broken,
        };
        let breaks = broken > 0 && dice.chance(broken);
        let luck = match breaks {
            true => Luck::Broken,
            false => Luck::Well,
        };
        Ok(match op {
            Op::Step(plan) if breaks || self.doomed == Some(plan.step) => {
                // What stands on its tokens breaks with it.
                let behind = self.steps().next().map(|behind| behind.step);
                self.doomed = behind;
                Done::Hear(self.break_step(&plan, dice))
            }
            Op::Step(plan) => {
                self.check_writes(&plan)?;
                let result = self.engine.step(&plan, salt_of);
                let result = result.map_err(|what| format!("{}: {what}", self.me))?;
                let took = now.since(since);
                Done::Hear(Input::Stepped { result, took })
            }
            Op::Export(export) if breaks => {
                self.exporting.remove(&(export.handoff, export.ordinal));
                Done::Hear(export.answer(ExportOutcome::Broken))
            }
            Op::Export(export) => {
                let payload = self.engine.read(export.from).to_vec();
                Done::Ship(export, payload)
            }
            Op::Import {
                handoff,
                part,
                block,
                payload,
            } => {
                let outcome = match luck {
                    Luck::Broken => ImportOutcome::Broken,
                    Luck::Well => self.place((part.offset, block.block), &payload),
                };
                Done::Hear(Input::Imported {
                    handoff,
                    part,
                    outcome,
                })
            }
            Op::Shelve { content, block } => {
                let outcome = self.shelved((content, block), luck)?;
                let took = now.since(since);
                Done::Hear(Input::Shelved {
                    content,
                    outcome,
                    took,
                })
            }
            Op::Fetch { handoff, blocks } => {
                Done::Hear(self.finish_fetch((since, now), (handoff, &blocks), luck)?)
            }
            Op::SwapOut { handoff, blocks } => {
                let outcome = self.swap_out(handoff, &blocks, luck);
                let took = now.since(since);
                Done::Hear(Input::SwappedOut {
                    handoff,
                    outcome,
                    took,
                })
            }
            Op::SwapIn { handoff, blocks } => {
                let outcome = self.swap_in(handoff, &blocks, luck)?;
                let took = now.since(since);
                Done::Hear(Input::SwappedIn {
                    handoff,
                    outcome,
                    took,
                })
            }
        })
    }

    /// Puts bytes at their place, so far into that block.
    fn place(
        &mut self,
        (offset, block): (u32, BlockIndex),
        payload: &[Option<Cell>],
    ) -> ImportOutcome {
        let capacity = &self.limits.capacity;
        let from = (offset / (capacity.block_bytes / capacity.block_tokens)) as usize;
        if self.limits.writer == Writer::Receiver {
            self.engine.write(block, from, payload);
            return ImportOutcome::Written;
        }
        // The bytes are here already; they are looked at in place.
        match self.engine.read(block)[from..].starts_with(payload) {
            true => ImportOutcome::Written,
            false => ImportOutcome::Broken,
        }
    }

    fn break_step(&mut self, plan: &StepPlan, dice: &mut Dice) -> Input {
        if dice.chance(500) {
            self.engine.scribble(plan, dice);
        }
        // Half of the steps fail for one of their sequences alone.
        let slot = dice.chance(500).then(|| dice.pick(&plan.segments).slot);
        Input::StepFailed {
            step: plan.step,
            slot,
            reason: "the dice said so".to_owned(),
        }
    }

    fn check_writes(&self, plan: &StepPlan) -> Result<(), String> {
        for block in self.engine.written(plan) {
            if let Some((handoff, _)) = self.reserved.get(&block) {
                return Err(format!(
                    "{} writes {block} in {}, and it is held for {handoff}",
                    self.me, plan.step
                ));
            }
        }
        Ok(())
    }

    /// Whether the engine has nothing before it and nothing waits behind it.
    pub(crate) fn is_done(&self) -> bool {
        self.ops.is_empty() && self.busy.is_none() && self.disk_is_idle()
    }
}
