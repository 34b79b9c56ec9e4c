//! Path independence: answers do not depend on how a sequence is run, to the bit.
//!
//! Owns: the paths that a sequence can take through engines.
//! Never: tolerates a difference.
//! Invariant: every path runs with greedy and with seeded sequences, and is compared with the same
//! sequence run alone with its whole prompt in one step.

use super::BuildEngine;
use super::goldens::read;
use super::residues::{build_enforcing, residues};
use super::sequence::{BLOCK_TOKENS, DrivenSequence, step};
use crate::{Engine, EngineLimits};
use cleave_domain::{BlockIndex, KvPlane, LogitsWanted, SampledToken, SamplingParams, StepPlan};
use std::path::Path;
use std::sync::Arc;

/// Sequences that run together.
const BATCH: usize = 16;
/// Tokens drawn per sequence.
pub(super) const TOKENS_DRAWN: usize = 20;
/// Blocks of one sequence: the longest prompt of the goldens is 150.
pub(super) const BLOCKS_PER_SEQUENCE: u32 = 12;

pub(super) const LIMITS: EngineLimits = EngineLimits {
    block_tokens: BLOCK_TOKENS,
    blocks_count: BATCH as u32 * BLOCKS_PER_SEQUENCE,
    states_count: 0,
    slots_count: BATCH as u32,
    step_tokens_max: 256,
    windows_count: 0,
};

/// A prompt with its sampling, and the tokens that it draws when it runs alone with its whole
/// prompt in one step.
pub(super) struct PathCase {
    pub(super) prompt: Vec<u32>,
    pub(super) sampling: Arc<SamplingParams>,
    pub(super) alone: Vec<SampledToken>,
}

/// Checks that every path gives the same tokens, and scores with the same bits: chunks of every
/// size, a batch of 16, a cached prefix, copied blocks, recomputation after a preemption, and moves
/// to another engine before and during decode; greedy and seeded, with and without a constraint.
///
/// # Errors
/// The first difference.
pub fn path_independence(dir: &Path, build: BuildEngine<'_>) -> Result<(), String> {
    let mut engine = build_enforcing(build, dir, LIMITS)?;
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
    let mut other = build_enforcing(build, dir, limits)?;
    named("handed off", handed_off(&mut *engine, &mut *other, &cases))
}

pub(super) fn cases(dir: &Path, engine: &mut dyn Engine) -> Result<Vec<PathCase>, String> {
    let list = read(dir)?;
    let one = |(index, golden): (usize, &super::goldens::Golden)| {
        let sampling = Arc::new(sampling(index));
        let mut sequence =
            DrivenSequence::new(0, &golden.prompt, &sampling, 0..BLOCKS_PER_SEQUENCE);
        sequence.run(engine, usize::MAX, TOKENS_DRAWN)?;
        Ok(PathCase {
            prompt: golden.prompt.clone(),
            sampling,
            alone: sequence.drawn,
        })
    };
    // The last prompts, which are long and end on both sides of a block boundary.
    let skipped = list.len().saturating_sub(BATCH);
    list.iter().enumerate().skip(skipped).map(one).collect()
}

/// Every third sequence is greedy, the others are seeded with different rules; one in four has a
/// constraint.
fn sampling(index: usize) -> SamplingParams {
    let greedy = SamplingParams {
        logprobs: Some(3),
        constraint: residues().filter(|_| index % 4 == 1),
        ..SamplingParams::greedy()
    };
    match index % 3 {
        0 => greedy,
        1 => SamplingParams {
            temperature: 1.0,
            top_p: 0.95,
            seed: index as u64,
            ..greedy
        },
        _ => SamplingParams {
            temperature: 0.8,
            top_k: 40,
            min_p: 0.01,
            top_n_sigma: 3.0,
            repetition_penalty: 1.1,
            frequency_penalty: 0.2,
            seed: u64::MAX - index as u64,
            ..greedy
        },
    }
}

pub(super) fn check_same_tokens(case: &PathCase, drawn: &[SampledToken]) -> Result<(), String> {
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

fn chunked(engine: &mut dyn Engine, cases: &[PathCase]) -> Result<(), String> {
    for (index, case) in cases.iter().enumerate() {
        // One prompt in chunks of every size, the others in sizes around a block's.
        let sizes: Vec<usize> = match index {
            5 => (1..case.prompt.len()).collect(),
            _ => vec![1, 3, 16, 17, 31],
        };
        for size in sizes {
            let mut sequence = DrivenSequence::new(
                1,
                &case.prompt,
                &case.sampling,
                BLOCKS_PER_SEQUENCE..2 * BLOCKS_PER_SEQUENCE,
            );
            sequence.run(engine, size, TOKENS_DRAWN)?;
            check_same_tokens(case, &sequence.drawn).map_err(|d| format!("by {size}: {d}"))?;
        }
    }
    Ok(())
}

/// Runs all sequences in one batch; each joins one step after the one before, in chunks of
/// different sizes, so that prompts and decodes share steps.
fn batched(engine: &mut dyn Engine, cases: &[PathCase]) -> Result<(), String> {
    let sequence = |(index, case): (usize, &PathCase)| {
        let index = index as u32;
        let blocks = index * BLOCKS_PER_SEQUENCE..(index + 1) * BLOCKS_PER_SEQUENCE;
        DrivenSequence::new(index, &case.prompt, &case.sampling, blocks)
    };
    let mut sequences: Vec<DrivenSequence> = cases.iter().enumerate().map(sequence).collect();
    let mut steps = 0;
    while sequences
        .iter()
        .any(|sequence| sequence.drawn.len() < TOKENS_DRAWN)
    {
        let mut plan = StepPlan::default();
        let mut rows = 0;
        let joined = sequences.iter_mut().enumerate().take(steps + 1);
        for (index, sequence) in joined {
            let chunk = 7 + 5 * index;
            let rows_left = LIMITS.step_tokens_max as usize - rows;
            if sequence.drawn.len() < TOKENS_DRAWN && chunk <= rows_left {
                rows += chunk.min(sequence.tokens.len() - sequence.done);
                sequence.plan(chunk, &mut plan);
            }
        }
        // Results must not depend on the order of segments either.
        if steps % 2 == 1 {
            plan.segments.reverse();
        }
        let result = step(engine, &plan)?;
        for sequence in &mut sequences {
            sequence.take_result(&result);
        }
        steps += 1;
    }
    cases
        .iter()
        .zip(&sequences)
        .try_for_each(|(case, sequence)| check_same_tokens(case, &sequence.drawn))
}

/// Reuses the prompt's full blocks from another sequence, as a prefix cache does.
fn cached(engine: &mut dyn Engine, cases: &[PathCase]) -> Result<(), String> {
    for case in cases {
        let mut first =
            DrivenSequence::new(0, &case.prompt, &case.sampling, 0..BLOCKS_PER_SEQUENCE);
        first.run(engine, usize::MAX, 1)?;
        let shared = (case.prompt.len() - 1) / BLOCK_TOKENS as usize;
        let mut second = DrivenSequence::new(
            1,
            &case.prompt,
            &case.sampling,
            BLOCKS_PER_SEQUENCE..2 * BLOCKS_PER_SEQUENCE,
        );
        second.blocks[..shared].copy_from_slice(&first.blocks[..shared]);
        second.done = shared * BLOCK_TOKENS as usize;
        second.run(engine, usize::MAX, TOKENS_DRAWN)?;
        check_same_tokens(case, &second.drawn)?;
        first.run(engine, usize::MAX, TOKENS_DRAWN)?;
        check_same_tokens(case, &first.drawn)?;
    }
    Ok(())
}

/// Copies the blocks in mid-decode, and overwrites the old ones with another sequence.
fn copied(engine: &mut dyn Engine, cases: &[PathCase]) -> Result<(), String> {
    for (case, disturbing) in cases.iter().zip(cases.iter().rev()) {
        let mut sequence =
            DrivenSequence::new(0, &case.prompt, &case.sampling, 0..BLOCKS_PER_SEQUENCE);
        sequence.run(engine, usize::MAX, TOKENS_DRAWN / 2)?;
        let pairs: Vec<_> = sequence
            .blocks
            .iter()
            .map(|block| (*block, BlockIndex(block.0 + 3 * BLOCKS_PER_SEQUENCE)))
            .collect();
        let has_windows = engine.describe().capacity.windows.is_some();
        let planes = [
            Some(KvPlane::Blocks),
            has_windows.then_some(KvPlane::Window),
        ];
        for plane in planes.into_iter().flatten() {
            engine
                .copy_blocks(plane, &pairs)
                .map_err(|error| error.to_string())?;
        }
        sequence.blocks = pairs.iter().map(|(_, to)| *to).collect();
        let mut other = DrivenSequence::new(
            1,
            &disturbing.prompt,
            &disturbing.sampling,
            0..BLOCKS_PER_SEQUENCE,
        );
        other.run(engine, usize::MAX, 2)?;
        sequence.run(engine, usize::MAX, TOKENS_DRAWN)?;
        check_same_tokens(case, &sequence.drawn)?;
    }
    Ok(())
}

/// Preempts in mid-decode: prompt and output so far run again as one prompt, in chunks.
fn recomputed(engine: &mut dyn Engine, cases: &[PathCase]) -> Result<(), String> {
    for case in cases {
        let mut sequence =
            DrivenSequence::new(0, &case.prompt, &case.sampling, 0..BLOCKS_PER_SEQUENCE);
        sequence.run(engine, usize::MAX, TOKENS_DRAWN / 2)?;
        sequence.drop_kv();
        sequence.run(engine, 29, TOKENS_DRAWN)?;
        check_same_tokens(case, &sequence.drawn)?;
    }
    Ok(())
}

/// Prefills on one engine, decodes on the other, and moves back half-way.
fn handed_off(
    prefill: &mut dyn Engine,
    decode: &mut dyn Engine,
    cases: &[PathCase],
) -> Result<(), String> {
    if prefill.describe().fingerprint != decode.describe().fingerprint {
        return Err("two engines of one checkpoint differ in fingerprint".to_owned());
    }
    for (index, case) in cases.iter().enumerate() {
        let first_block = (index as u32 % 7 + 1) * BLOCKS_PER_SEQUENCE;
        let mut sequence =
            DrivenSequence::new(0, &case.prompt, &case.sampling, 0..BLOCKS_PER_SEQUENCE);
        sequence.run(prefill, 48, 1)?;
        sequence.move_to(
            prefill,
            decode,
            first_block..first_block + BLOCKS_PER_SEQUENCE,
        )?;
        sequence.slot.0 = 3;
        sequence.run(decode, 1, TOKENS_DRAWN / 2)?;
        sequence.move_to(decode, prefill, 5..5 + BLOCKS_PER_SEQUENCE)?;
        sequence.slot.0 = 2;
        sequence.run(prefill, 1, TOKENS_DRAWN)?;
        check_same_tokens(case, &sequence.drawn)?;
    }
    Ok(())
}

/// Checks that prompt scores do not depend on chunks, equal the scores of the same tokens when
/// drawn, and change no draw.
fn scored(engine: &mut dyn Engine, cases: &[PathCase]) -> Result<(), String> {
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

/// Scores of prompt and output, run in chunks as one prompt: one score for each token but the
/// first.
fn prompt_scores(
    engine: &mut dyn Engine,
    case: &PathCase,
    chunk: usize,
) -> Result<Vec<SampledToken>, String> {
    let sampling = SamplingParams {
        prompt_logprobs: case.sampling.logprobs,
        ..(*case.sampling).clone()
    };
    let drawn = case.alone.iter().map(|sampled| sampled.token);
    let prompt: Vec<u32> = case.prompt.iter().copied().chain(drawn).collect();
    let mut sequence = DrivenSequence::new(0, &prompt, &Arc::new(sampling), 0..BLOCKS_PER_SEQUENCE);
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
        sequence.take_result(&result);
        scores.extend(result.prompt_scores.into_iter().flat_map(|(_, list)| list));
    }
    if scores.len() != prompt.len() - 1 {
        return Err(format!("{} of {} tokens", scores.len(), prompt.len()));
    }
    Ok(scores)
}
