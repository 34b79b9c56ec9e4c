//! The answer does not depend on the path, to the bit.
//!
//! Owns: the ways a sequence can take through engines.
//! Never: tolerates a difference.
//! Invariant: every way is taken by greedy and by seeded sequences, and compared with the same
//! sequence run alone and whole.

use super::Build;
use super::goldens::read;
use super::sequence::{BLOCK_TOKENS, Sequence, step};
use crate::{Engine, EngineLimits};
use cleave_domain::{BlockIndex, LogitsWanted, Sampled, Sampling, StepPlan};
use std::path::Path;
use std::sync::Arc;

/// Sequences that run together.
const BATCH: usize = 16;
/// Tokens drawn of each.
pub(super) const DRAWN: usize = 20;
/// Blocks of one sequence: the longest prompt of the goldens is 150.
pub(super) const TABLE: u32 = 12;

pub(super) const LIMITS: EngineLimits = EngineLimits {
    block_tokens: BLOCK_TOKENS,
    blocks_count: BATCH as u32 * TABLE,
    slots_count: BATCH as u32,
    step_tokens_max: 256,
};

/// A prompt, how its tokens are drawn, and what they are when it runs alone and whole.
pub(super) struct Case {
    pub(super) prompt: Vec<u32>,
    pub(super) sampling: Arc<Sampling>,
    pub(super) alone: Vec<Sampled>,
}

/// Demands the same tokens, and the same bits in their scores, of every way to run a sequence:
/// chunked at every size, in a batch of 16, from a cached prefix, from copied blocks, recomputed
/// after a preemption, and moved to another engine before and during decode; greedy and seeded.
///
/// # Errors
/// The first difference.
pub fn path_independence(dir: &Path, build: Build<'_>) -> Result<(), String> {
    let mut engine = build(dir, LIMITS)?;
    let cases = cases(dir, &mut *engine)?;
    let named = |name: &str, outcome: Result<(), String>| {
        outcome.map_err(|difference| format!("{}: {name}: {difference}", dir.display()))
    };
    named("chunked", chunked(&mut *engine, &cases))?;
    named("batched", batched(&mut *engine, &cases))?;
    named("cached prefix", cached(&mut *engine, &cases))?;
    named("copied blocks", copied(&mut *engine, &cases))?;
    named("recomputed", recomputed(&mut *engine, &cases))?;
    named("prompt scores", scored(&mut *engine, &cases))?;
    let limits = EngineLimits {
        step_tokens_max: 64,
        ..LIMITS
    };
    let mut other = build(dir, limits)?;
    named("handed off", handed_off(&mut *engine, &mut *other, &cases))
}

pub(super) fn cases(dir: &Path, engine: &mut dyn Engine) -> Result<Vec<Case>, String> {
    let list = read(dir)?;
    let one = |(index, golden): (usize, &super::goldens::Golden)| {
        let sampling = Arc::new(sampling(index));
        let mut sequence = Sequence::new(0, &golden.prompt, &sampling, 0..TABLE);
        sequence.run(engine, usize::MAX, DRAWN)?;
        Ok(Case {
            prompt: golden.prompt.clone(),
            sampling,
            alone: sequence.drawn,
        })
    };
    // The last ones, which are long and end on both sides of a block's border.
    let skipped = list.len().saturating_sub(BATCH);
    list.iter().enumerate().skip(skipped).map(one).collect()
}

/// Every third greedy, the others seeded with different rules.
fn sampling(index: usize) -> Sampling {
    let greedy = Sampling {
        logprobs: Some(3),
        ..Sampling::greedy()
    };
    match index % 3 {
        0 => greedy,
        1 => Sampling {
            temperature: 1.0,
            top_p: 0.95,
            seed: index as u64,
            ..greedy
        },
        _ => Sampling {
            temperature: 0.8,
            top_k: 40,
            min_p: 0.01,
            repetition_penalty: 1.1,
            frequency_penalty: 0.2,
            seed: u64::MAX - index as u64,
            ..greedy
        },
    }
}

pub(super) fn same(case: &Case, drawn: &[Sampled]) -> Result<(), String> {
    match case.alone.iter().zip(drawn).position(|(a, b)| a != b) {
        None if case.alone.len() == drawn.len() => Ok(()),
        at => {
            let at = at.unwrap_or(drawn.len());
            Err(format!(
                "token {at} after a prompt of {} is {:?}, alone it was {:?}",
                case.prompt.len(),
                drawn.get(at),
                case.alone.get(at)
            ))
        }
    }
}

fn chunked(engine: &mut dyn Engine, cases: &[Case]) -> Result<(), String> {
    for (index, case) in cases.iter().enumerate() {
        // One prompt at every size, the others at sizes around a block's.
        let sizes: Vec<usize> = match index {
            5 => (1..case.prompt.len()).collect(),
            _ => vec![1, 3, 16, 17, 31],
        };
        for size in sizes {
            let mut sequence = Sequence::new(1, &case.prompt, &case.sampling, TABLE..2 * TABLE);
            sequence.run(engine, size, DRAWN)?;
            same(case, &sequence.drawn).map_err(|d| format!("by {size}: {d}"))?;
        }
    }
    Ok(())
}

/// All at once, each joining one step later than the one before, in chunks of different sizes, so
/// that prompts and decodes share steps.
fn batched(engine: &mut dyn Engine, cases: &[Case]) -> Result<(), String> {
    let sequence = |(index, case): (usize, &Case)| {
        let index = index as u32;
        let blocks = index * TABLE..(index + 1) * TABLE;
        Sequence::new(index, &case.prompt, &case.sampling, blocks)
    };
    let mut sequences: Vec<Sequence> = cases.iter().enumerate().map(sequence).collect();
    let mut steps = 0;
    while sequences
        .iter()
        .any(|sequence| sequence.drawn.len() < DRAWN)
    {
        let mut plan = StepPlan::default();
        let mut rows = 0;
        let joined = sequences.iter_mut().enumerate().take(steps + 1);
        for (index, sequence) in joined {
            let chunk = 7 + 5 * index;
            let rows_left = LIMITS.step_tokens_max as usize - rows;
            if sequence.drawn.len() < DRAWN && chunk <= rows_left {
                rows += chunk.min(sequence.tokens.len() - sequence.done);
                sequence.plan(chunk, &mut plan);
            }
        }
        // The order of segments must not matter either.
        if steps % 2 == 1 {
            plan.segments.reverse();
        }
        let result = step(engine, &plan)?;
        for sequence in &mut sequences {
            sequence.take(&result);
        }
        steps += 1;
    }
    cases
        .iter()
        .zip(&sequences)
        .try_for_each(|(case, sequence)| same(case, &sequence.drawn))
}

/// The prompt's full blocks are there already, from another sequence.
fn cached(engine: &mut dyn Engine, cases: &[Case]) -> Result<(), String> {
    for case in cases {
        let mut first = Sequence::new(0, &case.prompt, &case.sampling, 0..TABLE);
        first.run(engine, usize::MAX, 1)?;
        let shared = (case.prompt.len() - 1) / BLOCK_TOKENS as usize;
        let mut second = Sequence::new(1, &case.prompt, &case.sampling, TABLE..2 * TABLE);
        second.blocks[..shared].copy_from_slice(&first.blocks[..shared]);
        second.done = shared * BLOCK_TOKENS as usize;
        second.run(engine, usize::MAX, DRAWN)?;
        same(case, &second.drawn)?;
        first.run(engine, usize::MAX, DRAWN)?;
        same(case, &first.drawn)?;
    }
    Ok(())
}

/// In mid-decode the blocks are copied, the old ones overwritten by another sequence.
fn copied(engine: &mut dyn Engine, cases: &[Case]) -> Result<(), String> {
    for (case, disturbing) in cases.iter().zip(cases.iter().rev()) {
        let mut sequence = Sequence::new(0, &case.prompt, &case.sampling, 0..TABLE);
        sequence.run(engine, usize::MAX, DRAWN / 2)?;
        let pairs: Vec<_> = sequence
            .blocks
            .iter()
            .map(|block| (*block, BlockIndex(block.0 + 3 * TABLE)))
            .collect();
        engine
            .copy_blocks(&pairs)
            .map_err(|error| error.to_string())?;
        sequence.blocks = pairs.iter().map(|(_, to)| *to).collect();
        let mut other = Sequence::new(1, &disturbing.prompt, &disturbing.sampling, 0..TABLE);
        other.run(engine, usize::MAX, 2)?;
        sequence.run(engine, usize::MAX, DRAWN)?;
        same(case, &sequence.drawn)?;
    }
    Ok(())
}

/// Preempted in mid-decode: prompt and output so far run again as one prompt, in chunks.
fn recomputed(engine: &mut dyn Engine, cases: &[Case]) -> Result<(), String> {
    for case in cases {
        let mut sequence = Sequence::new(0, &case.prompt, &case.sampling, 0..TABLE);
        sequence.run(engine, usize::MAX, DRAWN / 2)?;
        sequence.forget();
        sequence.run(engine, 29, DRAWN)?;
        same(case, &sequence.drawn)?;
    }
    Ok(())
}

/// Prefill here, decode there, and back again half-way.
fn handed_off(
    prefill: &mut dyn Engine,
    decode: &mut dyn Engine,
    cases: &[Case],
) -> Result<(), String> {
    if prefill.describe().fingerprint != decode.describe().fingerprint {
        return Err("two engines of one checkpoint differ in fingerprint".to_owned());
    }
    for (index, case) in cases.iter().enumerate() {
        let place = (index as u32 % 7 + 1) * TABLE;
        let mut sequence = Sequence::new(0, &case.prompt, &case.sampling, 0..TABLE);
        sequence.run(prefill, 48, 1)?;
        sequence.move_to(prefill, decode, place..place + TABLE)?;
        sequence.slot.0 = 3;
        sequence.run(decode, 1, DRAWN / 2)?;
        sequence.move_to(decode, prefill, 5..5 + TABLE)?;
        sequence.slot.0 = 2;
        sequence.run(prefill, 1, DRAWN)?;
        same(case, &sequence.drawn)?;
    }
    Ok(())
}

/// Prompt scores do not depend on chunks, and are what drawing said of the same tokens; scoring
/// does not change what is drawn.
fn scored(engine: &mut dyn Engine, cases: &[Case]) -> Result<(), String> {
    for case in cases {
        let whole = prompt_scores(engine, case, usize::MAX)?;
        let in_chunks = prompt_scores(engine, case, 13)?;
        if whole != in_chunks {
            return Err(format!("differ in a prompt of {}", case.prompt.len()));
        }
        let first = case.prompt.len() - 1;
        let drawn = case.alone.iter().zip(&whole[first..]);
        if let Some((drawn, scored)) = drawn.into_iter().find(|(drawn, scored)| drawn != scored) {
            return Err(format!("{scored:?} was drawn as {drawn:?}"));
        }
    }
    Ok(())
}

/// Scores of a prompt followed by what was drawn after it, run in chunks as one prompt: one for
/// each token but the first.
fn prompt_scores(
    engine: &mut dyn Engine,
    case: &Case,
    chunk: usize,
) -> Result<Vec<Sampled>, String> {
    let sampling = Sampling {
        prompt_logprobs: case.sampling.logprobs,
        ..(*case.sampling).clone()
    };
    let drawn = case.alone.iter().map(|sampled| sampled.token);
    let prompt: Vec<u32> = case.prompt.iter().copied().chain(drawn).collect();
    let mut sequence = Sequence::new(0, &prompt, &Arc::new(sampling), 0..TABLE);
    let mut scores = Vec::new();
    while sequence.drawn.is_empty() {
        let mut plan = StepPlan::default();
        sequence.plan(chunk, &mut plan);
        for segment in &mut plan.segments {
            segment.logits = match segment.logits {
                LogitsWanted::Sample => LogitsWanted::ScoreAndSample,
                _ => LogitsWanted::Score,
            };
        }
        let result = step(engine, &plan)?;
        sequence.take(&result);
        scores.extend(result.prompt_scores.into_iter().flat_map(|(_, list)| list));
    }
    if scores.len() != prompt.len() - 1 {
        return Err(format!("{} of {} tokens", scores.len(), prompt.len()));
    }
    Ok(scores)
}
