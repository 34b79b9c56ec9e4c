//! Vectors of pooled sequences: agreement with the goldens, and path independence to the bit.
//!
//! Owns: the paths of a pooled prompt. Never: tolerates a difference between two paths.
//! Invariant: every kind of pooling is compared, in chunks and beside other sequences.

use super::BuildEngine;
use super::goldens::{Golden, LOGIT_TOLERANCE, read};
use super::paths::{BLOCKS_PER_SEQUENCE, LIMITS};
use super::sequence::{BLOCK_TOKENS, DrivenSequence, step};
use crate::Engine;
use cleave_checkpoint::Checkpoint;
use cleave_domain::{
    LogitsWanted, Pooling, SamplingParams, SegmentPooling, SlotIndex, StepPlan, TokenId,
};
use std::path::Path;
use std::sync::Arc;

/// Lengths of the chunks that prompts are cut into, around that of a block.
const CHUNKS: [usize; 6] = [1, 3, 16, 17, 31, usize::MAX];

/// A prompt that pools, as the brain of a worker keeps it.
struct PooledPrompt {
    sequence: DrivenSequence,
    pooling: Pooling,
    values: Option<Arc<[f64]>>,
}

impl PooledPrompt {
    fn new(slot: u32, prompt: &[TokenId], pooling: &Pooling) -> Self {
        let needed = prompt.len().div_ceil(BLOCK_TOKENS as usize) as u32;
        let blocks_count = needed.max(BLOCKS_PER_SEQUENCE);
        let blocks = slot * blocks_count..(slot + 1) * blocks_count;
        let greedy = Arc::new(SamplingParams::greedy());
        Self {
            sequence: DrivenSequence::new(slot, prompt, &greedy, blocks),
            pooling: pooling.clone(),
            values: None,
        }
    }

    fn is_done(&self) -> bool {
        self.sequence.done == self.sequence.tokens.len()
    }

    /// Adds the next `len` tokens to a plan.
    fn plan(&mut self, len: usize, plan: &mut StepPlan) {
        self.sequence.plan(len, plan);
        let tokens = self.sequence.tokens.len() as u32;
        let segment = plan.segments.last_mut().expect("it was just planned");
        segment.logits = LogitsWanted::No;
        if self.pooling.reads(segment.position, segment.len, tokens) {
            segment.logits = LogitsWanted::Pool;
            let sum = self.values.clone();
            plan.poolings.push(SegmentPooling {
                slot: self.sequence.slot,
                pooling: self.pooling.clone(),
                sum: sum.filter(|_| self.pooling == Pooling::Mean),
            });
        }
    }

    fn take(&mut self, pooled: &[(SlotIndex, Arc<[f64]>)]) {
        let own = pooled.iter().find(|(slot, _)| *slot == self.sequence.slot);
        self.values = own
            .map(|(_, values)| Arc::clone(values))
            .or(self.values.take());
    }

    fn vector(&self) -> Result<Arc<[f32]>, String> {
        let values = self.values.as_ref().ok_or("no vector")?;
        Ok(self
            .pooling
            .finish(values, self.sequence.tokens.len() as u32))
    }
}

/// Checks an f32 engine against the folder's goldens, and that chunks and other sequences change no
/// bit of a vector.
///
/// # Errors
/// The first difference.
pub fn pooling(dir: &Path, build: BuildEngine<'_>) -> Result<(), String> {
    let list = read(dir)?;
    let mut engine = build(dir, LIMITS)?;
    for golden in &list {
        logits_match(dir, &mut *engine, golden)?;
    }
    pooled_paths(dir, build)
}

/// Checks path independence alone, of an engine of any precision.
///
/// # Errors
/// The first difference.
pub fn pooled_paths(dir: &Path, build: BuildEngine<'_>) -> Result<(), String> {
    let list = read(dir)?;
    let mut engine = build(dir, LIMITS)?;
    let skipped = list.len().saturating_sub(4);
    for golden in &list[skipped..] {
        for pooling in kinds(golden) {
            chunks_change_nothing(&mut *engine, golden, &pooling)
                .map_err(|difference| format!("{}: {pooling:?}: {difference}", dir.display()))?;
        }
    }
    let shortest = list.iter().min_by_key(|golden| golden.prompt.len());
    shortest.map_or(Ok(()), |golden| {
        mean_is_of_all(&mut *engine, &golden.prompt)
    })
}

fn kinds(golden: &Golden) -> [Pooling; 4] {
    let tokens: Vec<TokenId> = golden.first_top.iter().map(|(token, _)| *token).collect();
    [
        Pooling::LastToken,
        Pooling::Mean,
        Pooling::FirstToken,
        Pooling::Logits(tokens.into()),
    ]
}

/// Runs a prompt alone, in steps of `chunk` tokens.
pub(super) fn alone(
    engine: &mut dyn Engine,
    prompt: &[TokenId],
    pooling: &Pooling,
    chunk: usize,
) -> Result<Arc<[f32]>, String> {
    let mut pooled = PooledPrompt::new(0, prompt, pooling);
    while !pooled.is_done() {
        let mut plan = StepPlan::default();
        pooled.plan(chunk, &mut plan);
        pooled.take(&step(engine, &plan)?.pooled);
    }
    pooled.vector()
}

/// The logits after the prompt are the reference's, both as they are pooled and as the head's
/// products with the last hidden state.
fn logits_match(dir: &Path, engine: &mut dyn Engine, golden: &Golden) -> Result<(), String> {
    let checkpoint = Checkpoint::open(dir).map_err(|error| error.to_string())?;
    let head = checkpoint.head().to_f32();
    let hidden = checkpoint.spec().hidden_size;
    let [_, _, _, logits] = kinds(golden);
    let pooled = alone(engine, &golden.prompt, &logits, usize::MAX)?;
    let last = alone(engine, &golden.prompt, &Pooling::LastToken, usize::MAX)?;
    if last.len() != hidden {
        return Err(format!("{} elements of {hidden}", last.len()));
    }
    for ((token, expected), logit) in golden.first_top.iter().zip(pooled.iter()) {
        let row = &head[*token as usize * hidden..][..hidden];
        let product: f32 = row.iter().zip(last.iter()).map(|(a, b)| a * b).sum();
        for computed in [*logit, product] {
            if (computed - expected).abs() > LOGIT_TOLERANCE {
                let folder = dir.display();
                return Err(format!(
                    "{folder}: the logit of {token} is {computed}, not {expected}"
                ));
            }
        }
    }
    Ok(())
}

fn chunks_change_nothing(
    engine: &mut dyn Engine,
    golden: &Golden,
    pooling: &Pooling,
) -> Result<(), String> {
    let expected = alone(engine, &golden.prompt, pooling, usize::MAX)?;
    for chunk in CHUNKS {
        // Three of the same prompt, each one step behind the other, and a stream beside them.
        let mut pooled: Vec<PooledPrompt> = (0..3)
            .map(|slot| PooledPrompt::new(slot, &golden.prompt, pooling))
            .collect();
        let greedy = Arc::new(SamplingParams::greedy());
        let blocks = 3 * BLOCKS_PER_SEQUENCE..4 * BLOCKS_PER_SEQUENCE;
        let mut stream = DrivenSequence::new(3, &golden.prompt[..1], &greedy, blocks);
        let mut steps = 0;
        while pooled.iter().any(|prompt| !prompt.is_done()) {
            let mut plan = StepPlan::default();
            if stream.tokens.len() < golden.prompt.len() {
                stream.plan(1, &mut plan);
            }
            let mut rows = 1;
            for prompt in pooled.iter_mut().take(steps + 1) {
                let left = prompt.sequence.tokens.len() - prompt.sequence.done;
                let len = chunk.min(left);
                if len > 0 && rows + len <= LIMITS.step_tokens_max as usize {
                    rows += len;
                    prompt.plan(len, &mut plan);
                }
            }
            let result = step(engine, &plan)?;
            stream.take_result(&result);
            pooled
                .iter_mut()
                .for_each(|prompt| prompt.take(&result.pooled));
            steps += 1;
        }
        for prompt in &pooled {
            if prompt.vector()? != expected {
                return Err(format!("another vector by {chunk}"));
            }
        }
    }
    Ok(())
}

/// The mean is that of the last hidden states of all beginnings of the prompt.
fn mean_is_of_all(engine: &mut dyn Engine, prompt: &[TokenId]) -> Result<(), String> {
    let mean = alone(engine, prompt, &Pooling::Mean, usize::MAX)?;
    let mut sum = vec![0.0; mean.len()];
    for end in 1..=prompt.len() {
        let last = alone(engine, &prompt[..end], &Pooling::LastToken, usize::MAX)?;
        let sums = sum.iter_mut().zip(last.iter());
        sums.for_each(|(sum, value)| *sum += f64::from(*value));
    }
    if mean != Pooling::Mean.finish(&sum, prompt.len() as u32) {
        return Err("a mean is not that of its tokens".to_owned());
    }
    let first = alone(engine, prompt, &Pooling::FirstToken, 1)?;
    if first != alone(engine, &prompt[..1], &Pooling::LastToken, 1)? {
        return Err("the first hidden state depends on later tokens".to_owned());
    }
    Ok(())
}
