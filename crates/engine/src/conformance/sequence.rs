//! A sequence driven through an engine by hand, without a scheduler.
//!
//! Owns: the smallest plans that run a sequence, whole or in chunks, here or there.
//! Never: compares.
//! Invariant: as many tokens have their KV in its blocks as it says.

use crate::Engine;
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, Sampled, Sampling, Segment, SlotIndex, StepId, StepPlan,
    StepResult,
};
use std::sync::Arc;

/// Tokens per block in every suite: prompts of the goldens end on both sides of its multiples.
pub(super) const BLOCK_TOKENS: u32 = 16;

/// One sequence: its tokens, and how many of them have their KV in its blocks.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) slot: SlotIndex,
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_count: usize,
    pub(super) sampling: Arc<Sampling>,
    /// Banned until there are `min_tokens`.
    pub(super) stop_tokens: Arc<[u32]>,
    pub(super) min_tokens: u32,
    pub(super) blocks: Vec<BlockIndex>,
    /// Tokens with KV.
    pub(super) done: usize,
    pub(super) is_open: bool,
    /// What was drawn, with scores.
    pub(super) drawn: Vec<Sampled>,
}

impl Sequence {
    /// A prompt that has not run, with a table of blocks from `first_block`.
    pub(super) fn new(
        slot: u32,
        prompt: &[u32],
        sampling: &Arc<Sampling>,
        blocks: std::ops::Range<u32>,
    ) -> Self {
        Self {
            slot: SlotIndex(slot),
            tokens: prompt.to_vec(),
            prompt_count: prompt.len(),
            sampling: Arc::clone(sampling),
            stop_tokens: Arc::from([]),
            min_tokens: 0,
            blocks: blocks.map(BlockIndex).collect(),
            done: 0,
            is_open: false,
            drawn: Vec::new(),
        }
    }

    /// Adds the sequence's next `len` tokens to a plan; the last of them all also samples.
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
            });
        }
        plan.segments.push(Segment {
            slot: self.slot,
            position: self.done as u32,
            len: (end - self.done) as u32,
            blocks: self.blocks.clone(),
            drafts: Vec::new(),
            logits: match end == self.tokens.len() {
                true => LogitsWanted::Sample,
                false => LogitsWanted::No,
            },
        });
        self.done = end;
    }

    /// Adds all tokens that have no KV to a plan, and tokens guessed to follow them.
    pub(super) fn plan_drafts(&mut self, drafts: Vec<u32>, plan: &mut StepPlan) {
        self.plan(usize::MAX, plan);
        let segment = plan.segments.last_mut();
        let segment = segment.expect("it was just planned");
        segment.len += drafts.len() as u32;
        segment.drafts = drafts;
    }

    /// Takes what a step drew for this sequence, if anything. All but the last has its KV.
    pub(super) fn take(&mut self, result: &StepResult) {
        for (slot, sampled) in &result.sampled {
            if *slot == self.slot {
                self.tokens.push(sampled.token);
                self.drawn.push(sampled.clone());
                self.done = self.tokens.len() - 1;
            }
        }
    }

    /// Runs alone, in chunks, until `count` tokens are drawn.
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
            self.take(&result);
        }
        Ok(())
    }

    /// Forgets its KV, as a preempted sequence does.
    pub(super) fn forget(&mut self) {
        self.done = 0;
        self.is_open = false;
    }

    /// Moves the KV of the tokens done to other blocks of another engine.
    pub(super) fn move_to(
        &mut self,
        from: &dyn Engine,
        to: &mut dyn Engine,
        blocks: std::ops::Range<u32>,
    ) -> Result<(), String> {
        let blocks: Vec<BlockIndex> = blocks.map(BlockIndex).collect();
        let mut bytes = vec![0; from.describe().capacity.block_bytes as usize];
        let used = self.done.div_ceil(BLOCK_TOKENS as usize);
        for (source, target) in self.blocks.iter().zip(&blocks).take(used) {
            // In two parts, as a link would.
            let cut = bytes.len() / 3;
            let (head, tail) = bytes.split_at_mut(cut);
            from.read_block(*source, 0, head)
                .map_err(|error| error.to_string())?;
            from.read_block(*source, cut, tail)
                .map_err(|error| error.to_string())?;
            to.write_block(*target, cut, tail)
                .map_err(|error| error.to_string())?;
            to.write_block(*target, 0, head)
                .map_err(|error| error.to_string())?;
        }
        self.blocks = blocks;
        self.is_open = false;
        Ok(())
    }
}

/// Runs a step.
pub(super) fn step(engine: &mut dyn Engine, plan: &StepPlan) -> Result<StepResult, String> {
    let plan = StepPlan {
        step: StepId(1),
        ..plan.clone()
    };
    engine.step(&plan).map_err(|error| error.to_string())
}
