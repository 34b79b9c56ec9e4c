//! Drafts change how soon tokens are there, and no token.
//!
//! Owns: the ways to guess, right and wrong, and the schedules that guesses are verified in.
//! Never: tolerates a difference: tokens and their scores are compared to the bit.
//! Invariant: what a draft that was not drawn left in a block is never read.

use super::Build;
use super::dice::Dice;
use super::paths::{Case, DRAWN, LIMITS, TABLE, cases, same};
use super::sequence::{BLOCK_TOKENS, Sequence, step};
use crate::Engine;
use cleave_domain::StepPlan;
use std::path::Path;
use std::sync::Arc;

/// Drafts of a step at most: some blocks are entered and filled by drafts alone.
const DRAFTS: usize = 6;

/// How the tokens that follow are guessed.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// As they will be.
    Right,
    /// Each another one.
    Wrong,
    /// So many right ones, then one that is wrong, then right ones again.
    Partly(usize),
    /// Any of these, a new one in each step, or none.
    Mixed,
}

/// Runs sequences with and without drafts, greedy and seeded, with penalties, scores and bans on tokens: alone and
/// in one batch, with prompts in chunks beside them, and on another engine from the middle on.
///
/// # Errors
/// The first difference; or if no draft, or every draft, was drawn.
pub fn drafts(dir: &Path, build: Build<'_>, seed: u64) -> Result<(), String> {
    let at = |problem: String| format!("{}, seed {seed}: {problem}", dir.display());
    let mut engine = build(dir, LIMITS)?;
    if engine.drafts_max() < DRAFTS as u32 {
        return Err(at(format!("it takes {} drafts", engine.drafts_max())));
    }
    let mut other = build(dir, LIMITS)?;
    let mut told = Vec::new();
    for (index, case) in cases(dir, &mut *engine)?.into_iter().enumerate() {
        told.push(Told::new(&mut *engine, case, index).map_err(at)?);
    }
    let mut run = Run {
        dice: Dice(seed),
        drafted_count: 0,
        taken_count: 0,
    };
    for way in [
        Way::Right,
        Way::Wrong,
        Way::Partly(1),
        Way::Partly(3),
        Way::Mixed,
    ] {
        let named = |difference: String| at(format!("{way:?}: {difference}"));
        for case in &told {
            run.alone(&mut *engine, case, way).map_err(named)?;
            run.moved((&mut *engine, &mut *other), case, way)
                .map_err(named)?;
        }
        run.together(&mut *engine, &told, way).map_err(named)?;
    }
    match (1..run.drafted_count).contains(&run.taken_count) {
        true => Ok(()),
        false => Err(at(format!(
            "{} of {} drafts were drawn: that shows nothing",
            run.taken_count, run.drafted_count
        ))),
    }
}

/// A case, with what is banned of it.
struct Told {
    case: Case,
    stop_tokens: Arc<[u32]>,
    min_tokens: u32,
}

impl Told {
    /// Of every second case the first tokens that it would draw are banned for a while, which ends within drafts.
    fn new(engine: &mut dyn Engine, case: Case, index: usize) -> Result<Self, String> {
        let banned = match index % 2 {
            0 => case.alone[..3].iter().map(|drawn| drawn.token).collect(),
            _ => Vec::new(),
        };
        let mut told = Self {
            stop_tokens: banned.into(),
            min_tokens: DRAWN as u32 / 2,
            case,
        };
        let mut sequence = told.sequence(0, 0..TABLE);
        sequence.run(engine, usize::MAX, DRAWN)?;
        told.case.alone = sequence.drawn;
        Ok(told)
    }

    fn sequence(&self, slot: u32, blocks: std::ops::Range<u32>) -> Sequence {
        Sequence {
            stop_tokens: Arc::clone(&self.stop_tokens),
            min_tokens: self.min_tokens,
            ..Sequence::new(slot, &self.case.prompt, &self.case.sampling, blocks)
        }
    }
}

struct Run {
    dice: Dice,
    drafted_count: usize,
    taken_count: usize,
}

impl Run {
    /// What is guessed to follow the tokens drawn so far, fewer than are left.
    fn guess(&mut self, told: &Told, drawn_count: usize, way: Way) -> Vec<u32> {
        let way = match (way, self.dice.below(5)) {
            (Way::Mixed, 0) => return Vec::new(),
            (Way::Mixed, 1) => Way::Right,
            (Way::Mixed, 2) => Way::Wrong,
            (Way::Mixed, right) => Way::Partly(right as usize - 2),
            (way, _) => way,
        };
        let left = &told.case.alone[drawn_count..DRAWN - 1];
        let count = (1 + self.dice.below(DRAFTS as u64) as usize).min(left.len());
        let wrong_at = |place: usize| match way {
            Way::Right | Way::Mixed => false,
            Way::Wrong => true,
            Way::Partly(right) => place == right,
        };
        let other = 1 + self.dice.below(100) as u32;
        let drafts = left[..count].iter().enumerate().map(|(place, drawn)| {
            let changed = u32::from(wrong_at(place)) * other;
            // Ids below the vocabulary of every folder.
            match changed {
                0 => drawn.token,
                _ if drawn.token >= changed => drawn.token - changed,
                _ => drawn.token + changed,
            }
        });
        self.drafted_count += count;
        drafts.collect()
    }

    fn take(&mut self, sequence: &mut Sequence, result: &cleave_domain::StepResult) {
        let before = sequence.drawn.len();
        sequence.take(result);
        self.taken_count += (sequence.drawn.len() - before).saturating_sub(1);
    }

    /// Draws until so many are there.
    fn run(
        &mut self,
        engine: &mut dyn Engine,
        (told, sequence): (&Told, &mut Sequence),
        (way, count): (Way, usize),
    ) -> Result<(), String> {
        while sequence.drawn.len() < count {
            let mut plan = StepPlan::default();
            let drafts = self.guess(told, sequence.drawn.len(), way);
            sequence.plan_drafts(drafts, &mut plan);
            let result = step(engine, &plan)?;
            self.take(sequence, &result);
        }
        Ok(())
    }

    fn alone(&mut self, engine: &mut dyn Engine, told: &Told, way: Way) -> Result<(), String> {
        let mut sequence = told.sequence(1, TABLE..2 * TABLE);
        self.run(engine, (told, &mut sequence), (way, DRAWN))?;
        same(&told.case, &sequence.drawn)
    }

    /// Its blocks go elsewhere with whatever wrong drafts left behind its tokens, and there it goes on without any.
    fn moved(
        &mut self,
        (here, there): (&mut dyn Engine, &mut dyn Engine),
        told: &Told,
        way: Way,
    ) -> Result<(), String> {
        let mut sequence = told.sequence(1, TABLE..2 * TABLE);
        self.run(here, (told, &mut sequence), (way, DRAWN / 2))?;
        sequence.move_to(here, there, 0..TABLE)?;
        sequence.run(there, usize::MAX, DRAWN)?;
        same(&told.case, &sequence.drawn)
    }

    /// All at once, each joining one step later than the one before, its prompt in chunks.
    fn together(&mut self, engine: &mut dyn Engine, told: &[Told], way: Way) -> Result<(), String> {
        let sequences = (0..).zip(told).map(|(slot, told)| {
            let blocks = slot * TABLE..(slot + 1) * TABLE;
            told.sequence(slot, blocks)
        });
        let mut sequences: Vec<Sequence> = sequences.collect();
        let mut steps = 0;
        while sequences.iter().any(|one| one.drawn.len() < DRAWN) {
            let mut plan = StepPlan::default();
            let mut rows_left = LIMITS.step_tokens_max as usize;
            let joined = sequences.iter_mut().zip(told).take(steps + 1);
            for (sequence, told) in joined {
                let left = sequence.tokens.len() - sequence.done;
                let chunk = BLOCK_TOKENS as usize + 3;
                if sequence.drawn.len() == DRAWN || chunk + DRAFTS > rows_left {
                    continue;
                }
                if left > chunk {
                    sequence.plan(chunk, &mut plan);
                } else {
                    let drafts = self.guess(told, sequence.drawn.len(), way);
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
        let mut all = told.iter().zip(&sequences);
        all.try_for_each(|(told, sequence)| same(&told.case, &sequence.drawn))
    }
}
