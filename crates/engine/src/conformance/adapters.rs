//! Adapters: answers of a reference, and of each sequence alone.
//!
//! Owns: the paths of sequences with different adapters through one engine.
//! Never: tolerates a difference between two paths.
//! Invariant: sequences of the base model run beside those of adapters.

use super::BuildEngine;
use super::goldens::{compare, read};
use super::sequence::{BLOCK_TOKENS, DrivenSequence, step};
use crate::{AdapterMemory, Engine, EngineLimits};
use cleave_domain::{AdapterId, SampledToken, SamplingParams, StepPlan};
use std::path::Path;
use std::sync::Arc;

/// Tokens drawn per sequence, and blocks for the longest prompt of the goldens and these.
const TOKENS_DRAWN: usize = 12;
const BLOCKS_PER_SEQUENCE: u32 = 6;
/// Prompts of each adapter that run together, the longest.
const PROMPTS_EACH: usize = 3;

fn limits(sequences_count: u32) -> EngineLimits {
    EngineLimits {
        block_tokens: BLOCK_TOKENS,
        blocks_count: sequences_count * BLOCKS_PER_SEQUENCE,
        states_count: 0,
        slots_count: sequences_count,
        step_tokens_max: sequences_count * BLOCKS_PER_SEQUENCE * BLOCK_TOKENS,
        windows_count: 0,
    }
}

/// Compares an f32 engine for the checkpoint `base` with the goldens in the folder of an adapter:
/// greedy tokens must be equal, and logits within 1e-3.
///
/// # Errors
/// The first difference, or the failure that prevented the comparison.
pub fn adapter_goldens(base: &Path, folder: &Path, build: BuildEngine<'_>) -> Result<(), String> {
    let mut engine = build(base, limits(1))?;
    let adapter = load(&*engine, folder)?;
    for (index, golden) in read(folder)?.iter().enumerate() {
        let mut sequence = sequence(
            0,
            &golden.prompt,
            Some(adapter),
            &sampling(golden.top_count()),
        );
        sequence.run(&mut *engine, 256, golden.tokens_count())?;
        compare(golden, &sequence.drawn)
            .map_err(|difference| format!("{}: prompt {index}: {difference}", folder.display()))?;
    }
    Ok(())
}

/// Checks that sequences of several adapters of one checkpoint, and of none, draw the same tokens
/// together as each draws alone, with the same bits of their scores; and that an adapter that is
/// not loaded refuses its own slot.
///
/// # Errors
/// The first difference.
pub fn mixed_adapters(
    base: &Path,
    folders: &[&Path],
    build: BuildEngine<'_>,
) -> Result<(), String> {
    let count = ((folders.len() + 1) * PROMPTS_EACH) as u32;
    let mut engine = build(base, limits(count))?;
    let mut cases: Vec<(Vec<u32>, Option<AdapterId>)> = Vec::new();
    let mut last = None;
    for folder in folders {
        let adapter = load(&*engine, folder)?;
        last = Some(adapter);
        // The same prompts without the adapter: equal prompts must not become equal answers.
        let prompts = read(folder)?.into_iter().map(|golden| golden.prompt);
        let prompts: Vec<Vec<u32>> = prompts.rev().take(PROMPTS_EACH).collect();
        cases.extend(prompts.iter().map(|prompt| (prompt.clone(), Some(adapter))));
        if cases.len() + PROMPTS_EACH == count as usize {
            cases.extend(prompts.into_iter().map(|prompt| (prompt, None)));
        }
    }
    let mut alone = Vec::new();
    for (prompt, adapter) in &cases {
        let mut sequence = sequence(0, prompt, *adapter, &sampling(3));
        sequence.run(&mut *engine, usize::MAX, TOKENS_DRAWN)?;
        alone.push(sequence.drawn);
    }
    let together = run_together(&mut *engine, &cases)?;
    for (index, (alone, together)) in alone.iter().zip(&together).enumerate() {
        if alone != together {
            let adapter = cases[index].1;
            return Err(format!(
                "sequence {index} of {adapter:?}: {together:?}, alone {alone:?}"
            ));
        }
    }
    let adapter = last.ok_or("no adapter was given")?;
    refuses_unloaded(&mut *engine, adapter, &cases[0].0)
}

/// Runs all sequences side by side, each from another step on and in other chunks.
fn run_together(
    engine: &mut dyn Engine,
    cases: &[(Vec<u32>, Option<AdapterId>)],
) -> Result<Vec<Vec<SampledToken>>, String> {
    let sequences = (0..).zip(cases);
    let mut sequences: Vec<DrivenSequence> = sequences
        .map(|(index, (prompt, adapter))| sequence(index, prompt, *adapter, &sampling(3)))
        .collect();
    for turn in 0.. {
        let mut plan = StepPlan::default();
        for (index, sequence) in sequences.iter_mut().enumerate() {
            let chunk = [usize::MAX, 3, 17, 1][index % 4];
            if turn >= index % 5 && sequence.drawn.len() < TOKENS_DRAWN {
                sequence.plan(chunk, &mut plan);
            }
        }
        if plan.segments.is_empty() && turn > 5 {
            break;
        }
        let result = step(engine, &plan)?;
        sequences
            .iter_mut()
            .for_each(|each| each.take_result(&result));
    }
    Ok(sequences
        .into_iter()
        .map(|sequence| sequence.drawn)
        .collect())
}

/// Checks that a step with an adapter that is not loaded is refused for that slot.
fn refuses_unloaded(
    engine: &mut dyn Engine,
    adapter: AdapterId,
    prompt: &[u32],
) -> Result<(), String> {
    memory(engine)?.unload(adapter);
    let mut plan = StepPlan::default();
    sequence(1, prompt, Some(adapter), &sampling(0)).plan(usize::MAX, &mut plan);
    match engine.step(&plan) {
        Err(error) if error.slots() == [plan.segments[0].slot] => Ok(()),
        other => Err(format!("an unloaded adapter gave {other:?}")),
    }
}

fn memory(engine: &dyn Engine) -> Result<Arc<dyn AdapterMemory>, String> {
    engine
        .adapters()
        .ok_or("the engine applies no adapters".to_owned())
}

fn load(engine: &dyn Engine, folder: &Path) -> Result<AdapterId, String> {
    let memory = memory(engine)?;
    let facts = memory.open(folder).map_err(|error| error.to_string())?;
    memory
        .load(facts.adapter)
        .map_err(|error| error.to_string())?;
    Ok(facts.adapter)
}

fn sampling(top: usize) -> Arc<SamplingParams> {
    Arc::new(SamplingParams {
        logprobs: Some(top as u32),
        ..SamplingParams::greedy()
    })
}

fn sequence(
    slot: u32,
    prompt: &[u32],
    adapter: Option<AdapterId>,
    sampling: &Arc<SamplingParams>,
) -> DrivenSequence {
    let blocks = slot * BLOCKS_PER_SEQUENCE..(slot + 1) * BLOCKS_PER_SEQUENCE;
    DrivenSequence {
        adapter,
        ..DrivenSequence::new(slot, prompt, sampling, blocks)
    }
}
