//! A model with a KV pool: [`Engine`] over any [`Ops`].
//!
//! Owns: slots, the pool, and the order of a step's work.
//! Never: decides which sequences run.
//! Invariant: a refused plan changes nothing.

mod draws;
mod fingerprint;
mod host_draws;
mod in_flight;
mod pooled;
mod states;

use crate::adapters::{AdapterMemory, AdapterTable, StepAdapters};
use crate::blocks::{BlockSpan, DeviceBlocks};
use crate::constraint::{ConstraintSource, SlotConstraint};
use crate::engine::Overlap;
use crate::forward::{ActivationBuffers, ForwardPass, selects_all_rows};
use crate::ops;
use crate::ops::{
    AdapterLoader, Batch, BatchSegment, DrawRule, FedRow, KvPoolShape, Ops, PlaneCounts, PoolPlane,
};
use crate::plan::{PlanCheck, check_windows};
use crate::sampling::SamplingSlot;
use crate::weights::Weights;
use crate::{Engine, EngineDescription, EngineError};
use cleave_domain::{
    BlockIndex, Capacity, KvPlane, KvSpec, LogitsWanted, OpenSlot, SlotIndex, StepPlan, StepResult,
    TokenId,
};
use draws::{LogitPurpose, LogitRows, logit_purposes, slot_of};
use fingerprint::fingerprint;
use host_draws::HostDraws;
use in_flight::UncollectedStep;
use pooled::{PooledRows, pooled_rows};
use std::collections::VecDeque;
use std::sync::Arc;

pub(crate) use host_draws::locked;
pub(crate) use pooled::pooling_of;

/// Capacity of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Tokens per block, at least 1.
    pub block_tokens: u32,
    /// Blocks in the pool, at least 1.
    pub blocks_count: u32,
    /// State slots in the pool, at least 1 if the model has a state, else ignored.
    pub states_count: u32,
    /// Blocks of the window plane; 0 puts layers with a window into the plane of blocks. Else at
    /// least `blocks_count` or as many as the longest step of one sequence needs, and ignored if no
    /// layer has a window that is shorter than the context.
    pub windows_count: u32,
    /// Sequences that have a slot at once, at least 1.
    pub slots_count: u32,
    /// Limit of tokens in one step, at least 1. Activations are allocated for so many rows.
    pub step_tokens_max: u32,
}

/// Bounds on the rows whose logits are computed at once for the host. One row per slot, so that a
/// decode step reads the head's weights once; an upper bound, so that a large vocabulary does not
/// fill the memory; a lower bound, because even a single slot's prompt may be scored.
const LOGIT_ROWS: std::ops::RangeInclusive<usize> = 16..=128;

/// Limit of drafts per segment: further drafts are too rarely accepted to be worth their rows.
const DRAFTS_MAX: u32 = 16;

/// A model on a device.
pub struct ModelEngine<O: Ops> {
    ops: O,
    weights: Arc<Weights<O::Pack>>,
    pool: O::Pool,
    shape: KvPoolShape,
    buffers: ActivationBuffers<O>,
    description: EngineDescription,
    check: PlanCheck,
    slots: Vec<Option<SamplingSlot>>,
    /// Number of times that each slot was opened, `(slots)`; it distinguishes a slot's sequences.
    opens_counts: Vec<u64>,
    /// Steps begun and not collected, oldest first.
    in_flight: VecDeque<UncollectedStep>,
    begun_count: u64,
    /// Lists of collected steps, reused so that a step allocates nothing.
    spare_draws: Vec<Vec<(SlotIndex, u64)>>,
    host_draws: HostDraws,
    /// Gives the matchers of slots with a constraint.
    constraints: Option<Arc<dyn ConstraintSource>>,
    /// The step's rows, reused so that a step allocates nothing.
    batch: Batch,
    /// The step's tables of the window plane, reused too.
    window_blocks: Vec<BlockIndex>,
    /// Rows of the batch whose logits are needed, with their purposes; rows that the device draws
    /// come first.
    logit_rows: LogitRows,
    /// Rows whose logits are copied to the host; appended to `wanted` once the plan is laid out.
    host_rows: LogitRows,
    /// Vectors that the step pools, with their rows.
    pooled: Vec<PooledRows>,
    /// Their rows in the batch; appended to the wanted ones once the plan is laid out.
    pooled_rows: Vec<u32>,
    /// Number of wanted rows that the device draws.
    device_rows_count: usize,
    /// Tokens that the device drew, reused so that a step allocates nothing.
    drawn: Vec<Option<TokenId>>,
    rules: Vec<Option<DrawRule>>,
    logit_rows_max: usize,
    /// Logits on the host, `(logit_rows_max, vocab)`.
    logits: Vec<f32>,
    /// Adapters that slots may have, if the device applies any.
    adapters: Option<EngineAdapters<O::Adapters>>,
    /// Adapters of the step, reused so that a step allocates nothing.
    step_adapters: StepAdapters<ops::AdapterOf<O>>,
}

/// The adapters of an engine, as itself and as others see them.
struct EngineAdapters<L: AdapterLoader> {
    table: Arc<AdapterTable<L>>,
    memory: Arc<dyn AdapterMemory>,
}

impl<O: Ops> ModelEngine<O> {
    /// Allocates everything that an engine needs; a step allocates only its result.
    ///
    /// # Errors
    /// `Plan` if a limit is 0 or a block would exceed 4 GiB; `Device` if memory is short.
    pub fn new(
        ops: O,
        weights: Arc<Weights<O::Pack>>,
        limits: EngineLimits,
    ) -> Result<Self, EngineError> {
        let spec = match limits.windows_count {
            0 => weights.kv_spec(limits.block_tokens, ops.kv_type()),
            _ => weights.kv_spec_with_window(limits.block_tokens, ops.kv_type()),
        };
        Self::with_layout(ops, weights, &spec, limits)
    }

    /// The same with a given layout of the KV. Its blocks are those of [`Weights::kv_spec`]; a
    /// state plane is kept for the sequences even if no layer of the model uses it.
    ///
    /// # Errors
    /// As [`ModelEngine::new`].
    ///
    /// # Panics
    /// If the layout's blocks are not those of the weights.
    pub fn with_layout(
        ops: O,
        weights: Arc<Weights<O::Pack>>,
        spec: &KvSpec,
        limits: EngineLimits,
    ) -> Result<Self, EngineError> {
        let EngineLimits {
            block_tokens,
            blocks_count,
            states_count,
            windows_count,
            slots_count,
            step_tokens_max,
        } = limits;
        let has_no_slot = spec.state.is_some() && states_count == 0;
        let counts = [block_tokens, blocks_count, slots_count, step_tokens_max];
        if counts.contains(&0) || has_no_slot {
            return Err(EngineError::Plan(format!("a limit is 0: {limits:?}")));
        }
        let vocab_size = weights.spec().vocab_size;
        let kv = ops.kv_type();
        spec.check()
            .map_err(|error| EngineError::Plan(error.to_string()))?;
        let block_bytes = u32::try_from(spec.blocks.bytes).expect("the layout was checked");
        let heads = weights.spec().attention().map(|attention| attention.heads);
        let counts = PlaneCounts {
            blocks: blocks_count as usize,
            windows: windows_count,
            states: states_count,
        };
        let shape = KvPoolShape::new(spec, heads, counts, kv);
        assert_eq!(shape.block_tokens, block_tokens as usize, "another layout");
        let states = shape.states;
        let rows_max = step_tokens_max as usize;
        let logit_rows_max = if ops.can_draw() {
            // All slots at once: the device's buffers stay on the device and have room.
            (slots_count as usize).max(*LOGIT_ROWS.start())
        } else {
            (slots_count as usize).clamp(*LOGIT_ROWS.start(), *LOGIT_ROWS.end())
        };
        let logit_rows_max = logit_rows_max.min(rows_max);
        let description = EngineDescription {
            model: weights.name.clone(),
            device: ops.device(),
            device_id: ops.device_id(),
            fingerprint: fingerprint(&weights, spec, &shape, &ops.arithmetic()),
            capacity: Capacity {
                block_tokens,
                block_bytes,
                blocks_count,
                slots_count,
                step_tokens_max,
                context_tokens_max: weights.context_tokens_max() as u32,
                states,
                windows: shape.windows,
            },
            vocab_size: vocab_size as u32,
        };
        check_windows(&description.capacity)?;
        Ok(Self {
            pool: ops.pool(shape.clone())?,
            shape,
            buffers: ActivationBuffers::new(&ops, &weights, rows_max, logit_rows_max)?,
            check: PlanCheck::new(&description.capacity, drafts_max(&ops, states.is_some())),
            slots: (0..slots_count).map(|_| None).collect(),
            opens_counts: vec![0; slots_count as usize],
            in_flight: VecDeque::new(),
            begun_count: 0,
            spare_draws: Vec::new(),
            host_draws: HostDraws::new(ops.host_threads(), vocab_size),
            constraints: None,
            batch: Batch::default(),
            window_blocks: Vec::new(),
            logit_rows: LogitRows::default(),
            host_rows: LogitRows::default(),
            pooled: Vec::new(),
            pooled_rows: Vec::new(),
            device_rows_count: 0,
            drawn: Vec::new(),
            rules: Vec::new(),
            logit_rows_max,
            logits: vec![0.0; logit_rows_max.min(*LOGIT_ROWS.end()) * vocab_size],
            adapters: None,
            step_adapters: StepAdapters::default(),
            ops,
            weights,
            description,
        })
    }

    /// Applies the adapters of this table, which is for the same weights.
    #[must_use]
    pub fn with_adapters(self, table: Arc<AdapterTable<O::Adapters>>) -> Self
    where
        O::Adapters: 'static,
    {
        let memory = Arc::clone(&table) as Arc<dyn AdapterMemory>;
        Self {
            adapters: Some(EngineAdapters { table, memory }),
            ..self
        }
    }

    fn open_slots(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        self.check.check(&self.description, &self.slots, plan)?;
        let matchers = plan.opens.iter().map(|open| self.matcher_of(open));
        // A refused plan opens no slot.
        let matchers = matchers.collect::<Result<Vec<_>, EngineError>>()?;
        self.hold_adapters(plan)?;
        for (open, matcher) in plan.opens.iter().zip(matchers) {
            self.slots[open.slot.0 as usize] = Some(SamplingSlot::open(open, matcher));
            self.opens_counts[open.slot.0 as usize] += 1;
        }
        Ok(())
    }

    /// Finds the adapters of a plan's segments, and holds them for its step.
    fn hold_adapters(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        self.step_adapters.clear();
        for segment in &plan.segments {
            let opened = plan.opens.iter().find(|open| open.slot == segment.slot);
            let adapter = match opened {
                Some(open) => open.adapter,
                None => self.slot(segment.slot).adapter,
            };
            let Some(adapter) = adapter.filter(|adapter| !self.step_adapters.holds(*adapter))
            else {
                continue;
            };
            let table = self.adapters.as_ref().map(|adapters| &adapters.table);
            let Some(weights) = table.and_then(|table| table.get(adapter)) else {
                let problem = format!("its adapter {adapter} is not loaded");
                self.step_adapters.clear();
                return Err(EngineError::Slot(segment.slot, problem));
            };
            self.step_adapters.hold(adapter, weights);
        }
        Ok(())
    }

    /// The matcher of a sequence's constraint, if it has one, after its output.
    fn matcher_of(&self, open: &OpenSlot) -> Result<Option<SlotConstraint>, EngineError> {
        let Some(constraint) = &open.sampling.constraint else {
            return Ok(None);
        };
        let Some(source) = &self.constraints else {
            let reason = "this engine enforces no constraint".to_owned();
            return Err(EngineError::Slot(open.slot, reason));
        };
        let matcher = source.open(constraint, &open.output);
        let slots = vec![open.slot];
        let matcher = matcher.map_err(|error| EngineError::Constraint { slots, error })?;
        Ok(Some(SlotConstraint::new(matcher)))
    }

    /// Slot of a plan that was checked.
    fn slot(&self, slot: SlotIndex) -> &SamplingSlot {
        let state = self.slots[slot.0 as usize].as_ref();
        state.expect("the plan was checked: every slot is open")
    }

    fn build_batch(&mut self, plan: &StepPlan) {
        let Self {
            batch,
            logit_rows,
            host_rows: on_host,
            pooled,
            pooled_rows: in_pools,
            slots,
            step_adapters,
            window_blocks,
            ..
        } = self;
        let device_draws = self.ops.can_draw();
        let block_tokens = self.description.capacity.block_tokens as usize;
        let has_windows = self.description.capacity.windows.is_some();
        batch.tokens.clear();
        batch.fed_rows.clear();
        batch.positions.clear();
        batch.segments.clear();
        batch.blocks.clear();
        window_blocks.clear();
        logit_rows.clear();
        on_host.clear();
        pooled.clear();
        in_pools.clear();
        for segment in &plan.segments {
            let slot = slots[segment.slot.0 as usize].as_mut();
            let slot = slot.expect("the plan was checked: every slot is open");
            // A draft that the constraint does not allow is never drawn, nor is any after it.
            let drafts = match &mut slot.constraint {
                Some(constraint) if !segment.drafts.is_empty() => {
                    &segment.drafts[..constraint.valid_prefix(&segment.drafts)]
                }
                Some(_) | None => &segment.drafts[..],
            };
            let len = segment.len as usize - (segment.drafts.len() - drafts.len());
            let (first, position) = (batch.tokens.len(), segment.position as usize);
            let (table, end) = (batch.blocks.len(), position + len);
            let history = &slot.history;
            // The device may feed the last token of the history itself: it was drawn by the step in
            // flight, and the host does not know it yet.
            let drafted = end - drafts.len();
            let history_end = drafted.min(history.len());
            batch
                .tokens
                .extend(&history[position.min(history_end)..history_end]);
            if drafted > history_end {
                let drawn = slot.pending_token.and_then(|pending| pending.row);
                batch.fed_rows.push(FedRow {
                    row: batch.tokens.len() as u32,
                    draw_row: drawn.expect("the plan was checked: its last token is being drawn"),
                });
                batch.tokens.push(0);
            }
            batch.tokens.extend(drafts);
            batch.positions.extend(segment.position..end as u32);
            let used = &segment.blocks[..end.div_ceil(block_tokens)];
            batch.blocks.extend(used);
            step_adapters.push_rows(slot.adapter, first..first + len);
            if let Some(window) = &segment.window {
                let given_up = (window.first as usize).min(used.len());
                let stand_in = window.blocks.first().copied().unwrap_or_default();
                window_blocks.extend(std::iter::repeat_n(stand_in, given_up));
                window_blocks.extend(&window.blocks[..used.len() - given_up]);
            }
            batch.segments.push(BatchSegment {
                rows: first..first + len,
                position,
                blocks: table..batch.blocks.len(),
                state: segment.state.map(|state| state.slot),
            });
            if segment.logits == LogitsWanted::Pool
                && let Some(wanted) = pooling_of(plan, segment)
            {
                let rows = pooled_rows(segment, &wanted.pooling);
                let rows = first + rows.start..first + rows.end;
                Self::add_pooled_rows(pooled, in_pools, rows, wanted);
            }
            for (row, purpose) in logit_purposes(segment, drafts, history.len()) {
                let is_sample = matches!(purpose, LogitPurpose::Sample(..));
                if device_draws && is_sample && slot.device_can_draw() {
                    logit_rows.push(first + row, purpose)
                } else {
                    on_host.push(first + row, purpose)
                }
            }
        }
        batch.windows_start = has_windows.then_some(batch.blocks.len());
        batch.blocks.append(window_blocks);
        self.device_rows_count = logit_rows.rows.len();
        self.rules.clear();
        for purpose in &logit_rows.purposes {
            if let LogitPurpose::Sample(slot, tokens_count) = *purpose {
                let slot = slot_of(slots, slot);
                let is_free = slot.constraint.is_none();
                self.rules
                    .push(is_free.then(|| slot.draw_rule(tokens_count)));
            }
        }
        // Device rows come first, so that the device draws a prefix of the wanted rows and the host
        // the rest.
        logit_rows.append(on_host);
        logit_rows.rows.append(in_pools);
    }

    /// Lays a step out and queues it, with the draws that the device makes and the copies of states
    /// before and after it. Masks of constraints are found once the device has the pass.
    fn queue_pass(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        self.build_batch(plan);
        let prepared = self.prepare_states(plan);
        let queued = prepared.and_then(|()| self.queue_operations());
        // The device needs no more of the host: the memory of an adapter that is unloaded now is
        // free at once.
        self.step_adapters.clear();
        if queued.is_err() {
            self.ops.abandon_pass();
            return queued;
        }
        let taken = self.take_snapshots(plan);
        self.prepare_masks();
        let queued = taken.and_then(|()| self.queue_masked_draws());
        if queued.is_err() {
            self.discard_draw();
        }
        queued
    }

    fn queue_operations(&mut self) -> Result<(), EngineError> {
        let mut pass = ForwardPass {
            ops: &mut self.ops,
            weights: &self.weights,
            pool: &mut self.pool,
            buffers: &mut self.buffers,
            adapters: &mut self.step_adapters,
        };
        let rows = self.batch.rows_count();
        // A decode step: every row is drawn by the device, and nothing else is asked for, so the
        // device may replay a recorded pass.
        let all = selects_all_rows(&self.logit_rows.rows, rows) && self.device_rows_count == rows;
        let purpose = if all && rows <= self.logit_rows_max {
            ops::PassPurpose::DrawEveryRow(&self.rules)
        } else {
            ops::PassPurpose::Unspecified
        };
        pass.run(&self.batch, &self.logit_rows.rows, purpose)?;
        if pass.ops.can_draw() {
            pass.draw(&self.rules)
        } else {
            Ok(())
        }
    }

    /// Runs a step to its end: draws or scores every wanted row.
    fn run(&mut self, plan: &StepPlan) -> Result<StepResult, EngineError> {
        let mut result = StepResult {
            step: plan.step,
            ..StepResult::default()
        };
        if plan.segments.is_empty() {
            return Ok(result);
        }
        self.queue_pass(plan)?;
        if self.ops.can_draw() {
            let draws = self.draws_on_device();
            self.fetch(&draws)?;
            self.report_drawn(&draws, &mut result);
            self.spare_draws.push(draws);
        }
        let pooled = self.pool_on_host(&mut result);
        self.draw_on_host(&mut result)?;
        pooled?;
        // The device's draws were appended before the host's; restore the plan's order.
        if (1..self.logit_rows.purposes.len()).contains(&self.device_rows_count) {
            let plan_index = |slot: SlotIndex| plan.segments.iter().position(|s| s.slot == slot);
            result
                .sampled
                .sort_by_cached_key(|(slot, _)| plan_index(*slot));
        }
        Ok(result)
    }

    /// Checks that a range lies in a block or slot of the pool.
    fn check_span(&self, span: &BlockSpan) -> Result<(), EngineError> {
        if self.shape.plane(span.plane).range(span).is_some() {
            return Ok(());
        }
        Err(EngineError::Plan(outside_pool(&self.shape, span)))
    }
}

/// A device that draws itself draws one token per sequence and step, so that it can verify no
/// drafts. A state that ran a rejected draft could not be taken back.
fn drafts_max(ops: &impl Ops, has_states: bool) -> u32 {
    if ops.can_draw() || has_states {
        0
    } else {
        DRAFTS_MAX
    }
}

fn outside_pool(shape: &KvPoolShape, span: &BlockSpan) -> String {
    let BlockSpan {
        plane,
        block,
        offset,
        len,
    } = *span;
    let PoolPlane { count, bytes } = shape.plane(plane);
    format!("{len} bytes from {offset} of {block}: the plane {plane} has {count} of {bytes} bytes")
}

impl<O: Ops> Engine for ModelEngine<O> {
    fn describe(&self) -> &EngineDescription {
        &self.description
    }

    fn enforce(&mut self, constraints: Arc<dyn ConstraintSource>) {
        self.constraints = Some(constraints);
    }

    fn adapters(&self) -> Option<Arc<dyn AdapterMemory>> {
        let adapters = self.adapters.as_ref()?;
        Some(Arc::clone(&adapters.memory))
    }

    fn drafts_max(&self) -> u32 {
        drafts_max(&self.ops, self.shape.states.is_some())
    }

    fn step(&mut self, plan: &StepPlan) -> Result<StepResult, EngineError> {
        if !self.in_flight.is_empty() {
            return Err(EngineError::Plan(
                "a step is under way: collect it first".to_owned(),
            ));
        }
        self.open_slots(plan)?;
        self.run(plan)
    }

    fn overlap(&mut self) -> Option<&mut dyn Overlap> {
        if self.ops.can_draw() {
            Some(self)
        } else {
            None
        }
    }

    fn read_block(&self, span: BlockSpan, out: &mut [u8]) -> Result<(), EngineError> {
        assert_eq!(span.len, out.len(), "a buffer is as long as its range");
        self.check_span(&span)?;
        self.ops.read_block(&self.pool, span, out)
    }

    fn host_block(&self, plane: KvPlane, block: BlockIndex) -> Option<&[u8]> {
        self.check_span(&BlockSpan::start_of(plane, block)).ok()?;
        self.ops.host_block(&self.pool, plane, block)
    }

    fn blocks(&self) -> Option<Arc<dyn DeviceBlocks>> {
        self.ops.blocks(&self.pool)
    }

    fn write_block(&mut self, span: BlockSpan, bytes: &[u8]) -> Result<(), EngineError> {
        assert_eq!(span.len, bytes.len(), "a buffer is as long as its range");
        self.check_span(&span)?;
        self.ops.write_block(&mut self.pool, span, bytes)
    }

    fn copy_blocks(
        &mut self,
        plane: KvPlane,
        pairs: &[(BlockIndex, BlockIndex)],
    ) -> Result<(), EngineError> {
        for (from, to) in pairs {
            self.check_span(&BlockSpan::start_of(plane, *from))?;
            self.check_span(&BlockSpan::start_of(plane, *to))?;
        }
        for (from, to) in pairs {
            if from != to {
                self.ops.copy_block(&mut self.pool, plane, *from, *to)?;
            }
        }
        Ok(())
    }
}
