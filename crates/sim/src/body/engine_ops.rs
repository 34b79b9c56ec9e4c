//! The operations of a worker's engine: they run one at a time, take time, and may fail.

use super::{DeviceFaults, EngineOp, EngineOpResult, SimWorker};
use crate::engine::{EngineCosts, KvCell};
use cleave_domain::{BlockIndex, SplitMix64, StepPlan, Time};
use cleave_kv::BlockPart;
use cleave_sched::{ExportOutcome, ImportOutcome, PoolWriter, WorkerInput};
use std::time::Duration;

impl SimWorker {
    /// Begins the next operation if none is in progress; gives the time of its end.
    pub(crate) fn begin_next_op(&mut self, now: Time, price: &EngineCosts) -> Option<Time> {
        if self.busy.is_some() {
            return None;
        }
        let op = self.take_next_op(price.write_bytes)?;
        let takes = match &op {
            EngineOp::Step(plan) => price.step_time(plan),
            EngineOp::Export(_) | EngineOp::Import { .. } | EngineOp::Offload { .. } => {
                Duration::from_nanos(price.copy)
            }
            EngineOp::Fetch { blocks, .. } => {
                Duration::from_nanos(price.copy * blocks.len() as u64)
            }
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
            EngineOp::Offload { .. } => {
                self.written_bytes += u64::from(self.limits.capacity.block_bytes)
            }
            EngineOp::Fetch { blocks, .. } => {
                let bytes = u64::from(self.limits.capacity.block_bytes);
                self.written_bytes += bytes * blocks.len() as u64;
            }
            EngineOp::Export(_) | EngineOp::SwapOut { .. } | EngineOp::SwapIn { .. } => {}
        }
        Some(op)
    }

    /// Finishes the operation in progress. The device fails `broken` of a thousand.
    pub(crate) fn finish_op(
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
        let device_faults = if breaks {
            DeviceFaults::Failing
        } else {
            DeviceFaults::None
        };
        Ok(match op {
            EngineOp::Step(plan) if breaks || self.failing_step == Some(plan.step) => {
                // The step behind continues this step's tokens, so it fails with it.
                let behind = self.steps().next().map(|behind| behind.step);
                self.failing_step = behind;
                EngineOpResult::Answer(self.fail_step(&plan, rng))
            }
            EngineOp::Step(plan) => {
                self.check_no_reserved_write(&plan)?;
                let result = self.engine.step(&plan, salt_of);
                let result = result.map_err(|problem| format!("{}: {problem}", self.worker))?;
                let took = now.since(since);
                EngineOpResult::Answer(WorkerInput::Stepped { result, took })
            }
            EngineOp::Export(export) if breaks => {
                self.exporting.remove(&(export.handoff, export.unit()));
                EngineOpResult::Answer(export.answer(ExportOutcome::Broken))
            }
            EngineOp::Export(export) => {
                let payload = self.engine.read_unit(export.unit(), export.from).to_vec();
                EngineOpResult::Send(export, payload)
            }
            EngineOp::Import {
                handoff,
                part,
                block,
                payload,
            } => {
                let outcome = match device_faults {
                    DeviceFaults::Failing => ImportOutcome::Broken,
                    DeviceFaults::None => self.import_frame(part, block.block, &payload),
                };
                EngineOpResult::Answer(WorkerInput::Imported {
                    handoff,
                    part,
                    outcome,
                })
            }
            EngineOp::Offload { content, block } => {
                let outcome = self.offloaded(content, block, device_faults)?;
                let took = now.since(since);
                EngineOpResult::Answer(WorkerInput::Offloaded {
                    content,
                    outcome,
                    took,
                })
            }
            EngineOp::Fetch { handoff, blocks } => EngineOpResult::Answer(self.finish_fetch(
                since,
                now,
                handoff,
                &blocks,
                device_faults,
            )?),
            EngineOp::SwapOut { handoff, units } => {
                let outcome = self.swap_out(handoff, &units, device_faults);
                let took = now.since(since);
                EngineOpResult::Answer(WorkerInput::SwappedOut {
                    handoff,
                    outcome,
                    took,
                })
            }
            EngineOp::SwapIn { handoff, units } => {
                let outcome = self.swap_in(handoff, &units, device_faults)?;
                let took = now.since(since);
                EngineOpResult::Answer(WorkerInput::SwappedIn {
                    handoff,
                    outcome,
                    took,
                })
            }
        })
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

    fn fail_step(&mut self, plan: &StepPlan, rng: &mut SplitMix64) -> WorkerInput {
        if rng.chance(500) {
            self.engine.write_garbage(plan, rng);
        }
        // Half of the failed steps fail for one or two of their sequences only.
        let mut slots = Vec::new();
        if rng.chance(500) {
            slots.push(rng.pick(&plan.segments).slot);
            if rng.chance(300) {
                slots.push(rng.pick(&plan.segments).slot);
            }
        }
        WorkerInput::StepFailed {
            step: plan.step,
            slots,
            reason: "injected fault".to_owned(),
        }
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
