//! The operations of a worker's engine: one at a time, or in any order, as its world says.

use super::{CellWorker, EngineOp, EngineOpResult, FrameCells};
use crate::engine::{EngineCosts, KvCell};
use cleave_domain::{BlockIndex, KvUnit, SlotIndex, SplitMix64, StepPlan, Time};
use cleave_kv::BlockPart;
use cleave_sched::{
    ExportOutcome, FetchOutcome, ImportOutcome, PoolWriter, StepFault, WorkerInput,
};
use std::ops::Range;
use std::time::Duration;

/// How an operation fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpFault {
    /// The device reports an error.
    Device,
    /// A step fails for these slots, or for all if there are none.
    Step {
        slots: Vec<SlotIndex>,
        fault: StepFault,
        reason: String,
    },
    /// A fetch fails half way.
    Fetch(FetchOutcome),
}

impl CellWorker {
    /// Begins the next operation if none is in progress; gives the time of its end.
    pub fn begin_next_op(&mut self, now: Time, price: &EngineCosts) -> Option<Time> {
        if self.busy.is_some() {
            return None;
        }
        let op = self.take_next_op(price.write_bytes)?;
        let takes = match &op {
            EngineOp::Step(plan) => price.step_time(plan),
            EngineOp::Export(_) | EngineOp::Import { .. } => Duration::from_nanos(price.copy),
            EngineOp::Offload { parts, .. } => {
                Duration::from_nanos(price.copy * parts.len() as u64)
            }
            EngineOp::Fetch { parts, .. } => Duration::from_nanos(price.copy * parts.len() as u64),
            EngineOp::SwapOut { units, .. } | EngineOp::SwapIn { units, .. } => {
                Duration::from_nanos(price.copy * units.len() as u64)
            }
        };
        self.busy = Some((op, now));
        Some(now + takes)
    }

    fn take_next_op(&mut self, write_bytes: u64) -> Option<EngineOp> {
        let is_write = |op: &&EngineOp| {
            matches!(
                op,
                EngineOp::Import { .. } | EngineOp::Offload { .. } | EngineOp::Fetch { .. }
            )
        };
        // As in the real worker: once enough bytes were written since the last step, the next step
        // goes ahead of queued writes, so that writes cannot delay it without limit.
        let writes_count = self.ops.iter().take_while(is_write).count();
        let step_next = matches!(self.ops.get(writes_count), Some(EngineOp::Step(_)));
        let at = if step_next && self.written_bytes >= write_bytes {
            writes_count
        } else {
            0
        };
        let op = self.ops.remove(at)?;
        match &op {
            EngineOp::Step(_) => self.written_bytes = 0,
            EngineOp::Import { part, .. } => self.written_bytes += u64::from(part.len),
            EngineOp::Offload { parts, .. } => {
                let bytes = u64::from(self.limits.capacity.block_bytes);
                self.written_bytes += bytes * parts.len() as u64;
            }
            EngineOp::Fetch { parts, .. } => {
                let bytes = u64::from(self.limits.capacity.block_bytes);
                self.written_bytes += bytes * parts.len() as u64;
            }
            EngineOp::Export(_) | EngineOp::SwapOut { .. } | EngineOp::SwapIn { .. } => {}
        }
        Some(op)
    }

    /// Ends the operation in progress. The device fails `broken` of a thousand.
    pub fn finish_op(
        &mut self,
        now: Time,
        salt_of: impl Fn(u64) -> u64,
        rng: &mut SplitMix64,
        broken: u32,
    ) -> Result<EngineOpResult, String> {
        let (op, since) = self
            .busy
            .take()
            .ok_or("the engine has no operation to finish")?;
        // Content in the tiers may be damaged or gone too, so fetches fail more often.
        let broken = match op {
            EngineOp::Fetch { .. } => 100 * broken,
            _ => broken,
        };
        let breaks = broken > 0 && rng.chance(broken);
        let fault = match &op {
            EngineOp::Step(plan) if breaks || self.fails_with_last(plan) => {
                Some(self.draw_step_fault(plan, rng))
            }
            EngineOp::Fetch { parts, .. } if breaks => {
                let outcomes = [
                    FetchOutcome::Missing,
                    FetchOutcome::Corrupt,
                    FetchOutcome::Unreadable,
                    FetchOutcome::Broken,
                ];
                Some(OpFault::Fetch(outcomes[parts.len() % outcomes.len()]))
            }
            _ if breaks => Some(OpFault::Device),
            _ => None,
        };
        self.end_op(op, since..now, salt_of, fault)
    }

    /// Ends a queued operation in no order but its world's. Equal operations stand for each other.
    pub fn finish_queued(
        &mut self,
        op: &EngineOp,
        span: Range<Time>,
        salt_of: impl Fn(u64) -> u64,
        fault: Option<OpFault>,
    ) -> Result<EngineOpResult, String> {
        let at = self.ops.iter().position(|queued| queued == op);
        let op = at.and_then(|at| self.ops.remove(at));
        let op = op.ok_or("the engine has no such operation")?;
        self.end_op(op, span, salt_of, fault)
    }

    fn end_op(
        &mut self,
        op: EngineOp,
        span: Range<Time>,
        salt_of: impl Fn(u64) -> u64,
        fault: Option<OpFault>,
    ) -> Result<EngineOpResult, String> {
        let took = span.end.since(span.start);
        Ok(EngineOpResult::Answer(match (op, fault) {
            (EngineOp::Step(plan), Some(fault)) => {
                // The step behind continues this step's tokens, so it fails with it.
                let behind = self.steps().next().map(|behind| behind.step);
                self.failing_step = behind;
                let OpFault::Step {
                    slots,
                    fault,
                    reason,
                } = fault
                else {
                    return Err(format!("{fault:?} is no fault of a step"));
                };
                WorkerInput::StepFailed {
                    step: plan.step,
                    slots,
                    fault,
                    reason,
                }
            }
            (EngineOp::Step(plan), None) => {
                self.check_no_reserved_write(&plan)?;
                let result = self.engine.step(&plan, salt_of);
                let result = result.map_err(|problem| format!("{}: {problem}", self.worker))?;
                WorkerInput::Stepped { result, took }
            }
            (EngineOp::Export(export), Some(_)) => {
                self.export_ends(export.handoff, export.unit());
                export.answer(ExportOutcome::Broken)
            }
            (EngineOp::Export(export), None) => {
                let payload = self.engine.read_unit(export.unit(), export.from).to_vec();
                return Ok(EngineOpResult::Send(export, payload));
            }
            (
                EngineOp::Import {
                    handoff,
                    part,
                    block,
                    payload,
                },
                fault,
            ) => {
                let outcome = match fault {
                    Some(_) => ImportOutcome::Broken,
                    None => self.import_frame(part, block.block, &payload),
                };
                WorkerInput::Imported {
                    handoff,
                    part,
                    outcome,
                }
            }
            (
                EngineOp::Offload {
                    content,
                    parts,
                    block,
                },
                fault,
            ) => {
                let outcome = self.offloaded(&parts, block, fault.as_ref())?;
                WorkerInput::Offloaded {
                    content,
                    outcome,
                    took,
                }
            }
            (EngineOp::Fetch { handoff, parts }, fault) => {
                self.finish_fetch(&span, handoff, &parts, fault.as_ref())?
            }
            (EngineOp::SwapOut { handoff, units }, fault) => {
                let outcome = self.swap_out(handoff, &units, fault.as_ref());
                WorkerInput::SwappedOut {
                    handoff,
                    outcome,
                    took,
                }
            }
            (EngineOp::SwapIn { handoff, units }, fault) => {
                let outcome = self.swap_in(handoff, &units, fault.as_ref())?;
                WorkerInput::SwappedIn {
                    handoff,
                    outcome,
                    took,
                }
            }
        }))
    }

    /// Whether a step continues tokens of the step before it, which failed.
    pub fn fails_with_last(&self, plan: &StepPlan) -> bool {
        self.failing_step == Some(plan.step)
    }

    /// The cells that an operation reads: nothing may write them before it ends.
    pub fn cells_read(&self, op: &EngineOp) -> Vec<FrameCells> {
        let read = |unit, block| self.engine.read_unit(unit, block).to_vec();
        match op {
            EngineOp::Export(export) => vec![read(export.unit(), export.from)],
            EngineOp::SwapOut { units, .. } => {
                let read = |(unit, block): &(KvUnit, BlockIndex)| read(*unit, *block);
                units.iter().map(read).collect()
            }
            EngineOp::Offload { parts, block, .. } => {
                let units = parts.iter().map(|(_, unit)| *unit);
                units.map(|unit| read(unit, *block)).collect()
            }
            EngineOp::Step(_)
            | EngineOp::Import { .. }
            | EngineOp::SwapIn { .. }
            | EngineOp::Fetch { .. } => Vec::new(),
        }
    }

    /// Writes the cells of a frame to its place.
    fn import_frame(
        &mut self,
        part: BlockPart,
        block: BlockIndex,
        payload: &[Option<KvCell>],
    ) -> ImportOutcome {
        let capacity = &self.limits.capacity;
        let from = (part.offset / (capacity.block_bytes / capacity.block_tokens)) as usize;
        let unit = part.unit();
        if self.limits.writer == PoolWriter::Receiver {
            self.engine.write_unit(unit, block, from, payload);
            return ImportOutcome::Written;
        }
        // One-sided bytes are in the pool already; they are verified in place.
        if self.engine.read_unit(unit, block)[from..].starts_with(payload) {
            ImportOutcome::Written
        } else {
            ImportOutcome::Broken
        }
    }

    fn draw_step_fault(&mut self, plan: &StepPlan, rng: &mut SplitMix64) -> OpFault {
        if rng.chance(500) {
            self.engine.write_garbage(plan, || rng.draw());
        }
        // Half of the failed steps fail for one or two of their sequences only.
        let mut slots = Vec::new();
        if rng.chance(500) {
            slots.push(rng.pick(&plan.segments).slot);
            if rng.chance(300) {
                slots.push(rng.pick(&plan.segments).slot);
            }
        }
        let reason = "injected fault".to_owned();
        OpFault::Step {
            slots,
            fault: StepFault::Engine,
            reason,
        }
    }

    /// A step broke half way: it has opened its slots, and its writes are garbage.
    pub fn spoil(&mut self, plan: &StepPlan, salt_of: impl Fn(u64) -> u64) {
        self.engine.open(plan, salt_of);
        self.engine.write_garbage(plan, || u64::MAX);
    }

    fn check_no_reserved_write(&self, plan: &StepPlan) -> Result<(), String> {
        for (plane, block) in self.engine.blocks_written(plan) {
            if let Some((handoff, _)) = self.block_owners.get(&(plane, block)) {
                return Err(format!(
                    "{} writes {block} in {}, and it is held for {handoff}",
                    self.worker, plan.step
                ));
            }
        }
        Ok(())
    }
}
