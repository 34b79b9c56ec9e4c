//! Speculative drafts change when tokens are drawn, never which.
//!
//! Owns: right and wrong drafts, and the schedules in which they are verified.
//! Never: tolerates a difference: tokens and their scores are compared bit by bit.
//! Invariant: KV that a rejected draft left in a block is never read.

use super::BuildEngine;
use super::paths::{BLOCKS_PER_SEQUENCE, LIMITS, PathCase, TOKENS_DRAWN, cases, check_same_tokens};
use super::residues::build_enforcing;
use super::rng::ConformanceRng;
use super::sequence::{BLOCK_TOKENS, DrivenSequence, step};
use crate::Engine;
use cleave_domain::StepPlan;
use std::path::Path;
use std::sync::Arc;

/// Drafts per step at most: enough that some blocks are begun and filled by drafts alone.
const DRAFTS: usize = 6;

/// Quality of the drafted tokens.
#[derive(Clone, Copy, Debug)]
enum GuessQuality {
    /// Every draft equals the token that will be drawn.
    AllRight,
    /// Every draft differs from it.
    AllWrong,
    /// Right drafts up to this index, a wrong one there, right ones after it.
    OneWrong(usize),
    /// One of the others at random in each step, or no drafts.
    Mixed,
}

/// Runs sequences with and without drafts, greedy and seeded, with penalties, scores, constraints
/// and banned tokens: alone; in one batch with chunked prompts; and moved to another engine
/// half-way.
///
/// # Errors The first difference; or if no draft, or every draft, was drawn.
pub fn drafts(dir: &Path, build: BuildEngine<'_>, seed: u64) -> Result<(), String> {
    let at = |problem: String| format!("{}, seed {seed}: {problem}", dir.display());
    let mut engine = build_enforcing(build, dir, LIMITS)?;
    if engine.drafts_max() < DRAFTS as u32 {
        return Err(at(format!("it takes {} drafts", engine.drafts_max())));
    }
    let mut other = build_enforcing(build, dir, LIMITS)?;
    let mut draft_cases = Vec::new();
    for (index, case) in cases(dir, &mut *engine)?.into_iter().enumerate() {
        draft_cases.push(DraftCase::new(&mut *engine, case, index).map_err(at)?);
    }
    let mut run = DraftRun {
        rng: ConformanceRng::new(seed),
        drafted_count: 0,
        accepted_count: 0,
    };
    for quality in [
        GuessQuality::AllRight,
        GuessQuality::AllWrong,
        GuessQuality::OneWrong(1),
        GuessQuality::OneWrong(3),
        GuessQuality::Mixed,
    ] {
        let named = |difference: String| at(format!("{quality:?}: {difference}"));
        for case in &draft_cases {
            run.run_alone(&mut *engine, case, quality).map_err(named)?;
            run.run_moved(&mut *engine, &mut *other, case, quality)
                .map_err(named)?;
        }
        run.run_batched(&mut *engine, &draft_cases, quality)
            .map_err(named)?;
    }
    if (1..run.drafted_count).contains(&run.accepted_count) {
        Ok(())
    } else {
        Err(at(format!(
            "{} of {} drafts were drawn: that shows nothing",
            run.accepted_count, run.drafted_count
        )))
    }
}

/// A case with its banned tokens.
struct DraftCase {
    case: PathCase,
    stop_tokens: Arc<[u32]>,
    min_tokens: u32,
}

impl DraftCase {
    /// Bans the first three tokens of every second case until `min_tokens`, so that the ban ends
    /// within a run of drafts.
    fn new(engine: &mut dyn Engine, case: PathCase, index: usize) -> Result<Self, String> {
        let banned = match index % 2 {
            0 => case.alone[..3].iter().map(|drawn| drawn.token).collect(),
            _ => Vec::new(),
        };
        let mut draft_case = Self {
            stop_tokens: banned.into(),
            min_tokens: TOKENS_DRAWN as u32 / 2,
            case,
        };
        let mut sequence = draft_case.sequence(0, 0..BLOCKS_PER_SEQUENCE);
        sequence.run(engine, usize::MAX, TOKENS_DRAWN)?;
        draft_case.case.alone = sequence.drawn;
        Ok(draft_case)
    }

    fn sequence(&self, slot: u32, blocks: std::ops::Range<u32>) -> DrivenSequence {
        DrivenSequence {
            stop_tokens: Arc::clone(&self.stop_tokens),
            min_tokens: self.min_tokens,
            ..DrivenSequence::new(slot, &self.case.prompt, &self.case.sampling, blocks)
        }
    }
}

struct DraftRun {
    rng: ConformanceRng,
    drafted_count: usize,
    accepted_count: usize,
}

impl DraftRun {
    /// Drafts for the tokens after those drawn so far; fewer than the tokens left to draw.
    fn guess(
        &mut self,
        draft_case: &DraftCase,
        drawn_count: usize,
        quality: GuessQuality,
    ) -> Vec<u32> {
        let quality = match (quality, self.rng.below(5)) {
            (GuessQuality::Mixed, 0) => return Vec::new(),
            (GuessQuality::Mixed, 1) => GuessQuality::AllRight,
            (GuessQuality::Mixed, 2) => GuessQuality::AllWrong,
            (GuessQuality::Mixed, right) => GuessQuality::OneWrong(right as usize - 2),
            (quality, _) => quality,
        };
        let left = &draft_case.case.alone[drawn_count..TOKENS_DRAWN - 1];
        let count = (1 + self.rng.below(DRAFTS as u64) as usize).min(left.len());
        let wrong_at = |place: usize| match quality {
            GuessQuality::AllRight | GuessQuality::Mixed => false,
            GuessQuality::AllWrong => true,
            GuessQuality::OneWrong(right) => place == right,
        };
        let other = 1 + self.rng.below(100) as u32;
        let drafts = left[..count].iter().enumerate().map(|(place, drawn)| {
            let changed = u32::from(wrong_at(place)) * other;
            // The changed id stays below the vocabulary of every test folder.
            match changed {
                0 => drawn.token,
                _ if drawn.token >= changed => drawn.token - changed,
                _ => drawn.token + changed,
            }
        });
        self.drafted_count += count;
        drafts.collect()
    }

    fn take(&mut self, sequence: &mut DrivenSequence, result: &cleave_domain::StepResult) {
        let before = sequence.drawn.len();
        sequence.take_result(result);
        self.accepted_count += (sequence.drawn.len() - before).saturating_sub(1);
    }

    /// Runs the sequence until it has drawn `count` tokens.
    fn run(
        &mut self,
        engine: &mut dyn Engine,
        draft_case: &DraftCase,
        sequence: &mut DrivenSequence,
        quality: GuessQuality,
        count: usize,
    ) -> Result<(), String> {
        while sequence.drawn.len() < count {
            let mut plan = StepPlan::default();
            let drafts = self.guess(draft_case, sequence.drawn.len(), quality);
            sequence.plan_drafts(drafts, &mut plan);
            let result = step(engine, &plan)?;
            self.take(sequence, &result);
        }
        Ok(())
    }

    fn run_alone(
        &mut self,
        engine: &mut dyn Engine,
        draft_case: &DraftCase,
        quality: GuessQuality,
    ) -> Result<(), String> {
        let mut sequence = draft_case.sequence(1, BLOCKS_PER_SEQUENCE..2 * BLOCKS_PER_SEQUENCE);
        self.run(engine, draft_case, &mut sequence, quality, TOKENS_DRAWN)?;
        check_same_tokens(&draft_case.case, &sequence.drawn)
    }

    /// Moves the blocks, including KV of rejected drafts behind the tokens, to another engine, and
    /// continues there without drafts.
    fn run_moved(
        &mut self,
        source: &mut dyn Engine,
        target: &mut dyn Engine,
        draft_case: &DraftCase,
        quality: GuessQuality,
    ) -> Result<(), String> {
        let mut sequence = draft_case.sequence(1, BLOCKS_PER_SEQUENCE..2 * BLOCKS_PER_SEQUENCE);
        self.run(source, draft_case, &mut sequence, quality, TOKENS_DRAWN / 2)?;
        sequence.move_to(source, target, 0..BLOCKS_PER_SEQUENCE)?;
        sequence.run(target, usize::MAX, TOKENS_DRAWN)?;
        check_same_tokens(&draft_case.case, &sequence.drawn)
    }

    /// Runs all sequences in one batch; each joins one step after the one before, with its prompt
    /// in chunks.
    fn run_batched(
        &mut self,
        engine: &mut dyn Engine,
        draft_cases: &[DraftCase],
        quality: GuessQuality,
    ) -> Result<(), String> {
        let sequences = (0..).zip(draft_cases).map(|(slot, draft_case)| {
            let blocks = slot * BLOCKS_PER_SEQUENCE..(slot + 1) * BLOCKS_PER_SEQUENCE;
            draft_case.sequence(slot, blocks)
        });
        let mut sequences: Vec<DrivenSequence> = sequences.collect();
        let mut steps = 0;
        while sequences.iter().any(|one| one.drawn.len() < TOKENS_DRAWN) {
            let mut plan = StepPlan::default();
            let mut rows_left = LIMITS.step_tokens_max as usize;
            let joined = sequences.iter_mut().zip(draft_cases).take(steps + 1);
            for (sequence, draft_case) in joined {
                let left = sequence.tokens.len() - sequence.done;
                let chunk = BLOCK_TOKENS as usize + 3;
                if sequence.drawn.len() == TOKENS_DRAWN || chunk + DRAFTS > rows_left {
                    continue;
                }
                if left > chunk {
                    sequence.plan(chunk, &mut plan);
                } else {
                    let drafts = self.guess(draft_case, sequence.drawn.len(), quality);
                    sequence.plan_drafts(drafts, &mut plan);
                }
                rows_left -= plan.segments.last().map_or(0, |one| one.len as usize);
            }
            if steps % 2 == 1 {
                plan.segments.reverse();
            }
            let result = step(engine, &plan)?;
            for sequence in &mut sequences {
                self.take(sequence, &result);
            }
            steps += 1;
        }
        let mut all = draft_cases.iter().zip(&sequences);
        all.try_for_each(|(draft_case, sequence)| {
            check_same_tokens(&draft_case.case, &sequence.drawn)
        })
    }
}
