//! A sequence that a suite runs on an engine without a scheduler.
//!
//! Owns: the smallest plans that run a sequence, whole or in chunks, on one engine or another.
//! Never: compares.
//! Invariant: the first `done` tokens have their KV in the sequence's blocks.

use crate::{BlockSpan, Engine};
use cleave_domain::{
    AdapterId, BlockIndex, KvPlane, LogitsWanted, OpenSlot, SampledToken, SamplingParams, Segment,
    SlotIndex, StepId, StepPlan, StepResult, WindowTable,
};
use std::ops::Range;
use std::sync::Arc;

/// Tokens per block in every suite; prompts of the goldens end on both sides of its multiples.
pub(super) const BLOCK_TOKENS: u32 = 16;

/// A sequence's tokens, sampling and blocks.
#[derive(Clone, Debug)]
pub(super) struct DrivenSequence {
    pub(super) slot: SlotIndex,
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_count: usize,
    pub(super) sampling: Arc<SamplingParams>,
    /// Tokens banned until the output has `min_tokens`.
    pub(super) stop_tokens: Arc<[u32]>,
    pub(super) min_tokens: u32,
    pub(super) adapter: Option<AdapterId>,
    pub(super) blocks: Vec<BlockIndex>,
    /// Number of tokens that have KV.
    pub(super) done: usize,
    pub(super) is_open: bool,
    /// Drawn tokens, with scores.
    pub(super) drawn: Vec<SampledToken>,
}

impl DrivenSequence {
    /// A prompt of which nothing has run, with these blocks.
    pub(super) fn new(
        slot: u32,
        prompt: &[u32],
        sampling: &Arc<SamplingParams>,
        blocks: std::ops::Range<u32>,
    ) -> Self {
        Self {
            slot: SlotIndex(slot),
            tokens: prompt.to_vec(),
            prompt_count: prompt.len(),
            sampling: Arc::clone(sampling),
            stop_tokens: Arc::from([]),
            min_tokens: 0,
            adapter: None,
            blocks: blocks.map(BlockIndex).collect(),
            done: 0,
            is_open: false,
            drawn: Vec::new(),
        }
    }

    /// Adds the sequence's next `len` tokens to a plan; the sequence's last token also samples.
    pub(super) fn plan(&mut self, len: usize, plan: &mut StepPlan) {
        let end = self.done.saturating_add(len).min(self.tokens.len());
        if !self.is_open {
            self.is_open = true;
            plan.opens.push(OpenSlot {
                slot: self.slot,
                sampling: Arc::clone(&self.sampling),
                prompt: Arc::from(&self.tokens[..self.prompt_count]),
                output: self.tokens[self.prompt_count..].to_vec(),
                stop_tokens: Arc::clone(&self.stop_tokens),
                min_tokens: self.min_tokens,
                adapter: self.adapter,
            });
        }
        plan.segments.push(Segment {
            slot: self.slot,
            position: self.done as u32,
            len: (end - self.done) as u32,
            blocks: self.blocks.clone(),
            drafts: Vec::new(),
            logits: if end == self.tokens.len() {
                LogitsWanted::Sample
            } else {
                LogitsWanted::No
            },
            state: None,
            window: None,
        });
        self.done = end;
    }

    /// Adds all tokens without KV to a plan, followed by drafts.
    pub(super) fn plan_drafts(&mut self, drafts: Vec<u32>, plan: &mut StepPlan) {
        self.plan(usize::MAX, plan);
        let segment = plan.segments.last_mut();
        let segment = segment.expect("it was just planned");
        segment.len += drafts.len() as u32;
        segment.drafts = drafts;
    }

    /// Appends the tokens that a step drew for this sequence. All but the last have their KV.
    pub(super) fn take_result(&mut self, result: &StepResult) {
        for (slot, sampled) in &result.sampled {
            if *slot == self.slot {
                self.tokens.push(sampled.token);
                self.drawn.push(sampled.clone());
                self.done = self.tokens.len() - 1;
            }
        }
    }

    /// Runs the sequence alone, in chunks, until `count` tokens are drawn.
    pub(super) fn run(
        &mut self,
        engine: &mut dyn Engine,
        chunk: usize,
        count: usize,
    ) -> Result<(), String> {
        while self.drawn.len() < count {
            let mut plan = StepPlan::default();
            self.plan(chunk, &mut plan);
            let result = step(engine, &plan)?;
            self.take_result(&result);
        }
        Ok(())
    }

    /// Drops the KV, as a preemption does.
    pub(super) fn drop_kv(&mut self) {
        self.done = 0;
        self.is_open = false;
    }

    /// Moves the sequence's KV into blocks of another engine.
    pub(super) fn move_to(
        &mut self,
        from: &dyn Engine,
        to: &mut dyn Engine,
        blocks: std::ops::Range<u32>,
    ) -> Result<(), String> {
        let blocks: Vec<BlockIndex> = blocks.map(BlockIndex).collect();
        let capacity = from.describe().capacity;
        let used = self.done.div_ceil(capacity.block_tokens as usize);
        let window = capacity.window();
        // Of the window plane, only the blocks that the next token reads.
        let live = window.map_or(used, |window| window.first_block(self.done as u32) as usize);
        let pairs = self.blocks.iter().zip(&blocks).take(used).enumerate();
        for (ordinal, (source, target)) in pairs {
            copy_across(from, to, KvPlane::Blocks, (*source, *target))?;
            if window.is_some() && ordinal >= live {
                copy_across(from, to, KvPlane::Window, (*source, *target))?;
            }
        }
        self.blocks = blocks;
        self.is_open = false;
        Ok(())
    }
}

/// Copies a block to another engine, in two parts, as a transfer link does.
fn copy_across(
    from: &dyn Engine,
    to: &mut dyn Engine,
    plane: KvPlane,
    pair: (BlockIndex, BlockIndex),
) -> Result<(), String> {
    let (source, target) = pair;
    let capacity = from.describe().capacity;
    let len = match plane {
        KvPlane::Window => capacity.windows.map_or(0, |windows| windows.bytes),
        KvPlane::Blocks | KvPlane::State => capacity.block_bytes,
    } as usize;
    let mut bytes = vec![0; len];
    let cut = len / 3;
    let span = |block, range: Range<usize>| BlockSpan {
        plane,
        block,
        offset: range.start,
        len: range.len(),
    };
    for part in [0..cut, cut..len] {
        let error = |error: crate::EngineError| error.to_string();
        let bytes = &mut bytes[part.clone()];
        from.read_block(span(source, part.clone()), bytes)
            .map_err(error)?;
        to.write_block(span(target, part), bytes).map_err(error)?;
    }
    Ok(())
}

/// The plan with the tables of the window plane, where the engine has one. A block of a sequence
/// has the same index in both planes, and those that no token to come reads are left out.
pub(super) fn with_windows(engine: &dyn Engine, plan: &StepPlan) -> StepPlan {
    let mut plan = plan.clone();
    if let Some(window) = engine.describe().capacity.window() {
        for segment in &mut plan.segments {
            let first = window.first_block(segment.position);
            segment.window = Some(WindowTable {
                first,
                blocks: segment.blocks[first as usize..].to_vec(),
            });
        }
    }
    plan
}

pub(super) fn step(engine: &mut dyn Engine, plan: &StepPlan) -> Result<StepResult, String> {
    let plan = StepPlan {
        step: StepId(1),
        ..with_windows(engine, plan)
    };
    engine.step(&plan).map_err(|error| error.to_string())
}
