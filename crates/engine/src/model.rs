//! A model with a KV pool: [`Engine`] over any [`Ops`].
//!
//! Owns: slots, the pool, and what a step does in which order.
//! Never: decides what to run.
//! Invariant: a refused plan changes nothing.

mod under_way;

use crate::blocks::DeviceBlocks;
use crate::forward::{Buffers, Pass, is_all};
use crate::ops;
use crate::ops::{Batch, BatchSegment, DrawRule, FedRow, Ops, PoolShape};
use crate::plan::{PlanCheck, out_of_range};
use crate::sampling::{Sampler, Slot};
use crate::waist::Overlap;
use crate::weights::Weights;
use crate::{Engine, EngineDescription, EngineError};
use cleave_domain::{
    BlockIndex, Capacity, Fingerprint, LogitsWanted, Sampled, Segment, SlotIndex, StepPlan,
    StepResult, TokenId,
};
use std::collections::VecDeque;
use std::sync::Arc;
use under_way::UnderWay;

/// What an engine is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Tokens per block, at least 1.
    pub block_tokens: u32,
    /// Blocks in the pool, at least 1.
    pub blocks_count: u32,
    /// Sequences that have a slot at once, at least 1.
    pub slots_count: u32,
    /// Tokens in one step at most, at least 1. Activations are allocated for so many rows.
    pub step_tokens_max: u32,
}

/// Bounds on the rows whose logits are made at once for the host. As many as there are slots, so that a
/// decode step reads the head's weights once; not so many that a large vocabulary fills the memory;
/// and some even for a single slot, whose prompt may be scored.
const LOGIT_ROWS: std::ops::RangeInclusive<usize> = 16..=128;

/// Drafts of one segment: no guess is worth more rows than this.
const DRAFTS_MAX: u32 = 16;

/// A model on a device.
pub struct ModelEngine<O: Ops> {
    ops: O,
    weights: Arc<Weights<O::Pack>>,
    pool: O::Pool,
    buffers: Buffers<O>,
    description: EngineDescription,
    check: PlanCheck,
    slots: Vec<Option<Slot>>,
    /// How often each slot was opened, `(slots)`.
    opens_counts: Vec<u64>,
    /// Steps begun and not collected, oldest first.
    under_way: VecDeque<UnderWay>,
    begun_count: u64,
    /// Lists of steps that were collected, kept for their memory.
    spare_draws: Vec<Vec<(SlotIndex, u64)>>,
    sampler: Sampler,
    /// The step's rows, kept for their memory.
    batch: Batch,
    /// Rows of the batch whose logits are wanted, and what for; first those that the device draws.
    wanted: Wanted,
    /// Of those, the ones whose logits come to the host, before they join the others.
    on_host: Wanted,
    /// How many of the wanted rows the device draws.
    on_device_count: usize,
    /// What the device drew, kept for its memory.
    drawn: Vec<Option<TokenId>>,
    rules: Vec<DrawRule>,
    logit_rows_max: usize,
    /// `(logit_rows_max, vocab)`.
    logits: Vec<f32>,
}

/// Rows of the batch, and what each is wanted for.
#[derive(Debug, Default)]
struct Wanted {
    rows: Vec<u32>,
    purposes: Vec<Purpose>,
}

impl Wanted {
    fn push(&mut self, row: usize, purpose: Purpose) {
        self.rows.push(row as u32);
        self.purposes.push(purpose);
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.purposes.clear();
    }

    /// Takes what the other has.
    fn append(&mut self, other: &mut Self) {
        self.rows.append(&mut other.rows);
        self.purposes.append(&mut other.purposes);
    }
}

/// What a row's logits are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Score the token at this index of the slot's history.
    Score(SlotIndex, usize),
    /// Draw the slot's token after so many.
    Sample(SlotIndex, usize),
    /// The same, if the last of these is this token: the row ran it as a draft.
    Verify(SlotIndex, usize, TokenId),
}

impl Purpose {
    fn slot(self) -> SlotIndex {
        let (Self::Score(slot, _) | Self::Sample(slot, _) | Self::Verify(slot, ..)) = self;
        slot
    }
}

impl<O: Ops> ModelEngine<O> {
    /// Allocates everything an engine needs; nothing is allocated for a step later but its result.
    ///
    /// # Errors
    /// `Plan` if a limit is 0 or a block would exceed 4 GiB; `Device` if memory is short.
    pub fn new(
        ops: O,
        weights: Arc<Weights<O::Pack>>,
        limits: EngineLimits,
    ) -> Result<Self, EngineError> {
        let EngineLimits {
            block_tokens,
            blocks_count,
            slots_count,
            step_tokens_max,
        } = limits;
        if [block_tokens, blocks_count, slots_count, step_tokens_max].contains(&0) {
            return Err(EngineError::Plan(format!("a limit is 0: {limits:?}")));
        }
        let vocab_size = weights.config().vocab_size;
        let shape = weights.pool_shape(block_tokens as usize, blocks_count as usize, ops.kv_type());
        let block_bytes = u32::try_from(shape.block_bytes())
            .map_err(|_| EngineError::Plan(format!("blocks of {} bytes", shape.block_bytes())))?;
        let rows_max = step_tokens_max as usize;
        let logit_rows_max = match ops.draws() {
            // All at once: they stay where there is room for them.
            true => (slots_count as usize).max(*LOGIT_ROWS.start()),
            false => (slots_count as usize).clamp(*LOGIT_ROWS.start(), *LOGIT_ROWS.end()),
        };
        let logit_rows_max = logit_rows_max.min(rows_max);
        let description = EngineDescription {
            model: weights.name.clone(),
            device: ops.device(),
            device_id: ops.device_id(),
            fingerprint: fingerprint(&weights, &shape, &ops.arithmetic()),
            capacity: Capacity {
                block_tokens,
                block_bytes,
                blocks_count,
                slots_count,
                step_tokens_max,
                context_tokens_max: weights.context_tokens_max() as u32,
            },
            vocab_size: vocab_size as u32,
        };
        Ok(Self {
            pool: ops.pool(shape)?,
            buffers: Buffers::new(&ops, &weights, (rows_max, logit_rows_max))?,
            check: PlanCheck::new(
                (blocks_count as usize, slots_count as usize),
                drafts_max(&ops),
            ),
            slots: (0..slots_count).map(|_| None).collect(),
            opens_counts: vec![0; slots_count as usize],
            under_way: VecDeque::new(),
            begun_count: 0,
            spare_draws: Vec::new(),
            sampler: Sampler::default(),
            batch: Batch::default(),
            wanted: Wanted::default(),
            on_host: Wanted::default(),
            on_device_count: 0,
            drawn: Vec::new(),
            rules: Vec::new(),
            logit_rows_max,
            logits: vec![0.0; logit_rows_max.min(*LOGIT_ROWS.end()) * vocab_size],
            ops,
            weights,
            description,
        })
    }

    /// Checks a plan, and opens its slots.
    fn admit(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        self.check.check(&self.description, &self.slots, plan)?;
        for open in &plan.opens {
            self.slots[open.slot.0 as usize] = Some(Slot::open(open));
            self.opens_counts[open.slot.0 as usize] += 1;
        }
        Ok(())
    }

    /// A slot of a plan that was checked.
    fn slot(&self, slot: SlotIndex) -> &Slot {
        let state = self.slots[slot.0 as usize].as_ref();
        state.expect("the plan was checked: every slot is open")
    }

    fn lay_out(&mut self, plan: &StepPlan) {
        let Self {
            batch,
            wanted,
            on_host,
            slots,
            ..
        } = self;
        let device_draws = self.ops.draws();
        let block_tokens = self.description.capacity.block_tokens as usize;
        batch.tokens.clear();
        batch.fed.clear();
        batch.positions.clear();
        batch.segments.clear();
        batch.blocks.clear();
        wanted.clear();
        on_host.clear();
        for segment in &plan.segments {
            let (first, len) = (batch.tokens.len(), segment.len as usize);
            let (position, table) = (segment.position as usize, batch.blocks.len());
            let end = position + len;
            let slot = slots[segment.slot.0 as usize].as_ref();
            let slot = slot.expect("the plan was checked: every slot is open");
            let history = &slot.history;
            let drafted = end - segment.drafts.len();
            let known = drafted.min(history.len());
            batch.tokens.extend(&history[position.min(known)..known]);
            if drafted > known {
                let drawn = slot.untold.and_then(|untold| untold.row);
                batch.fed.push(FedRow {
                    row: batch.tokens.len() as u32,
                    drawn: drawn.expect("the plan was checked: its last token is being drawn"),
                });
                batch.tokens.push(0);
            }
            batch.tokens.extend(&segment.drafts);
            batch.positions.extend(segment.position..end as u32);
            let used = &segment.blocks[..end.div_ceil(block_tokens)];
            batch.blocks.extend(used);
            batch.segments.push(BatchSegment {
                rows: first..first + len,
                position,
                blocks: table..batch.blocks.len(),
            });
            for (row, purpose) in purposes_of(segment, history.len()) {
                let is_sample = matches!(purpose, Purpose::Sample(..));
                match device_draws && is_sample && slot.is_drawn_by_device() {
                    true => wanted.push(first + row, purpose),
                    false => on_host.push(first + row, purpose),
                }
            }
        }
        self.on_device_count = wanted.rows.len();
        self.rules.clear();
        for purpose in &wanted.purposes {
            if let Purpose::Sample(slot, known) = *purpose {
                self.rules.push(slot_of(slots, slot).rule(known));
            }
        }
        wanted.append(on_host);
    }

    /// Lays a step out and queues it, with the drawing of what the device draws.
    fn queue_pass(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        self.lay_out(plan);
        let queued = self.queue_operations();
        if queued.is_err() {
            self.ops.abandon();
        }
        queued
    }

    fn queue_operations(&mut self) -> Result<(), EngineError> {
        let mut pass = Pass {
            ops: &mut self.ops,
            weights: &self.weights,
            pool: &mut self.pool,
            buffers: &mut self.buffers,
        };
        let rows = self.batch.rows_count();
        let all = is_all(&self.wanted.rows, rows) && self.on_device_count == rows;
        let what = match all && rows <= self.logit_rows_max {
            true => ops::Wanted::Tokens(&self.rules),
            false => ops::Wanted::Anything,
        };
        pass.run(&self.batch, &self.wanted.rows, what)?;
        match pass.ops.draws() {
            true => pass.draw(&self.rules),
            false => Ok(()),
        }
    }

    /// Runs a step to its end: draws and scores every wanted row.
    fn run(&mut self, plan: &StepPlan) -> Result<StepResult, EngineError> {
        let mut result = StepResult {
            step: plan.step,
            ..StepResult::default()
        };
        if plan.segments.is_empty() {
            return Ok(result);
        }
        self.queue_pass(plan)?;
        if self.ops.draws() {
            let draws = self.draws_on_device();
            self.fetch(&draws)?;
            self.tell(&draws, &mut result);
            self.spare_draws.push(draws);
        }
        self.draw_on_host(&mut result)?;
        if (1..self.wanted.rows.len()).contains(&self.on_device_count) {
            let place = |slot: SlotIndex| plan.segments.iter().position(|s| s.slot == slot);
            result.sampled.sort_by_cached_key(|(slot, _)| place(*slot));
        }
        Ok(result)
    }

    fn draw_on_host(&mut self, result: &mut StepResult) -> Result<(), EngineError> {
        let vocab = self.weights.config().vocab_size;
        let mut first = self.on_device_count;
        while first < self.wanted.rows.len() {
            let rows = self.wanted.rows.len() - first;
            let rows = rows.min(self.logits.len() / vocab);
            let mut pass = Pass {
                ops: &mut self.ops,
                weights: &self.weights,
                pool: &mut self.pool,
                buffers: &mut self.buffers,
            };
            pass.logits(first, &mut self.logits[..rows * vocab])?;
            for row in 0..rows {
                let purpose = self.wanted.purposes[first + row];
                self.take_row(purpose, row, result)?;
            }
            first += rows;
        }
        Ok(())
    }

    fn take_row(
        &mut self,
        purpose: Purpose,
        row: usize,
        result: &mut StepResult,
    ) -> Result<(), EngineError> {
        let vocab = self.weights.config().vocab_size;
        let logits = &mut self.logits[row * vocab..(row + 1) * vocab];
        let slot = purpose.slot();
        let state = slot_of(&mut self.slots, slot);
        let not_finite = |_| not_finite(slot);
        match purpose {
            // What was drawn so far is not what this row stands on.
            Purpose::Verify(_, known, draft)
                if state.history.len() != known || state.history.last() != Some(&draft) => {}
            Purpose::Sample(..) | Purpose::Verify(..) => {
                let (token, scores) = self.sampler.draw(state, logits).map_err(not_finite)?;
                result.sampled.push((slot, Sampled { token, scores }));
            }
            Purpose::Score(_, at) => {
                let token = state.history[at];
                let count = state.sampling.prompt_logprobs.unwrap_or(0);
                let scores = self.sampler.score(logits, token, count);
                let scored = Sampled {
                    token,
                    scores: Some(scores.map_err(not_finite)?),
                };
                match result.prompt_scores.last_mut() {
                    Some((last, list)) if *last == slot => list.push(scored),
                    _ => result.prompt_scores.push((slot, vec![scored])),
                }
            }
        }
        Ok(())
    }

    fn check_range(&self, block: BlockIndex, offset: usize, len: usize) -> Result<(), EngineError> {
        if block.0 >= self.description.capacity.blocks_count {
            return Err(EngineError::Plan(out_of_range(&self.description, block)));
        }
        let bytes = self.description.capacity.block_bytes as usize;
        match offset.checked_add(len) {
            Some(end) if end <= bytes => Ok(()),
            _ => Err(EngineError::Plan(format!(
                "{len} bytes from {offset} of a block of {bytes}"
            ))),
        }
    }
}

/// A slot of a plan that was checked.
fn slot_of(slots: &mut [Option<Slot>], slot: SlotIndex) -> &mut Slot {
    let state = slots[slot.0 as usize].as_mut();
    state.expect("the plan was checked: every slot is open")
}

fn not_finite(slot: SlotIndex) -> EngineError {
    EngineError::NotFinite(slot)
}

/// The rows of a segment whose logits are wanted, in order, and why.
fn purposes_of(segment: &Segment, known: usize) -> impl Iterator<Item = (usize, Purpose)> + '_ {
    let (slot, len) = (segment.slot, segment.len as usize);
    let position = segment.position as usize;
    let (scored, samples) = match segment.logits {
        LogitsWanted::No => (0, false),
        LogitsWanted::Sample => (0, true),
        // A row scores the token after it, as far as tokens are known.
        LogitsWanted::Score => (len.min(known - position - 1), false),
        LogitsWanted::ScoreAndSample => (len - 1, true),
    };
    let scores = (0..scored).map(move |row| (row, Purpose::Score(slot, position + row + 1)));
    let drafted = len - segment.drafts.len();
    let sample = samples.then_some((drafted - 1, Purpose::Sample(slot, position + drafted)));
    let drafts = (drafted..).zip(&segment.drafts);
    let verified = drafts.map(move |(row, draft)| {
        let purpose = Purpose::Verify(slot, position + row + 1, *draft);
        (row, purpose)
    });
    scores.chain(sample).chain(verified)
}

/// What must be equal for blocks to mean the same.
fn fingerprint<P: crate::ops::Pack>(
    weights: &Weights<P>,
    shape: &PoolShape,
    arithmetic: &str,
) -> Fingerprint {
    let PoolShape {
        blocks_count: _,
        layers_count,
        heads,
        block_tokens,
        kv,
    } = shape;
    let form = match weights.form {
        "" => String::new(),
        form => format!("-{form}"),
    };
    Fingerprint(format!(
        "{}-{}{form}-{arithmetic}-{}l{layers_count}h{}d{}t{block_tokens}",
        weights.revision,
        weights.precision.name(),
        kv.name(),
        heads.kv_heads,
        heads.head_dim,
    ))
}

/// What a device draws itself it draws once a step for each sequence.
fn drafts_max(ops: &impl Ops) -> u32 {
    match ops.draws() {
        true => 0,
        false => DRAFTS_MAX,
    }
}

impl<O: Ops> Engine for ModelEngine<O> {
    fn describe(&self) -> &EngineDescription {
        &self.description
    }

    fn drafts_max(&self) -> u32 {
        drafts_max(&self.ops)
    }

    fn step(&mut self, plan: &StepPlan) -> Result<StepResult, EngineError> {
        if !self.under_way.is_empty() {
            return Err(EngineError::Plan(
                "a step is under way: collect it first".to_owned(),
            ));
        }
        self.admit(plan)?;
        self.run(plan)
    }

    fn overlap(&mut self) -> Option<&mut dyn Overlap> {
        match self.ops.draws() {
            true => Some(self),
            false => None,
        }
    }

    fn read_block(
        &self,
        block: BlockIndex,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), EngineError> {
        self.check_range(block, offset, out.len())?;
        self.ops.read_block(&self.pool, block, offset, out)
    }

    fn host_block(&self, block: BlockIndex) -> Option<&[u8]> {
        self.check_range(block, 0, 0).ok()?;
        self.ops.host_block(&self.pool, block)
    }

    fn blocks(&self) -> Option<Arc<dyn DeviceBlocks>> {
        self.ops.blocks(&self.pool)
    }

    fn write_block(
        &mut self,
        block: BlockIndex,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        self.check_range(block, offset, bytes.len())?;
        self.ops.write_block(&mut self.pool, block, offset, bytes)
    }

    fn copy_blocks(&mut self, pairs: &[(BlockIndex, BlockIndex)]) -> Result<(), EngineError> {
        for (from, to) in pairs {
            self.check_range(*from, 0, 0)?;
            self.check_range(*to, 0, 0)?;
        }
        for (from, to) in pairs {
            if from != to {
                self.ops.copy_block(&mut self.pool, *from, *to)?;
            }
        }
        Ok(())
    }
}
