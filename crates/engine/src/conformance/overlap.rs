//! Steps that overlap draw what the same steps draw one at a time, to the bit.
//!
//! Owns: the number of steps that the caller begins ahead, and the copies that it makes meanwhile.
//! Never: tolerates a difference.
//! Invariant: whole results are compared, with scores, and every block at the end.

use super::BuildEngine;
use super::residues::build_enforcing;
use super::rng::ConformanceRng;
use super::schedule::{LIMITS, RandomSchedule, SPARE};
use crate::{BlockSpan, Engine, EngineError, Overlap, STEPS_IN_FLIGHT_MAX};
use cleave_domain::{BlockIndex, StepPlan, StepResult};
use std::collections::VecDeque;
use std::path::Path;

/// Runs a random schedule one step at a time on one engine, and overlapped on another: sequences
/// join, end, run one step beyond their end, are preempted and resumed; greedy and seeded, with
/// every sampling rule.
///
/// # Errors
/// The first difference; or if no step of the schedule depends on the one before it.
pub fn overlap(
    dir: &Path,
    build: BuildEngine<'_>,
    seed: u64,
    steps_count: usize,
) -> Result<(), String> {
    let at = |problem: String| format!("{}, seed {seed}: {problem}", dir.display());
    let mut alone = build_enforcing(build, dir, LIMITS)?;
    let schedule = RandomSchedule::new(&mut *alone, seed, steps_count).map_err(at)?;
    if schedule.fed_count == 0 || schedule.reopened_count == 0 {
        return Err(at(format!(
            "{} tokens were fed and {} slots reopened: make the schedule longer",
            schedule.fed_count, schedule.reopened_count
        )));
    }
    let mut ahead = build_enforcing(build, dir, LIMITS)?;
    let mut run = OverlapRun {
        engine: &mut *ahead,
        rng: ConformanceRng::new(!seed),
        expected: VecDeque::new(),
        spare: Vec::new(),
    };
    for (number, (plan, result)) in schedule.steps.iter().enumerate() {
        let at = |problem: String| at(format!("step {number}: {problem}"));
        run.begin(plan, result).map_err(at)?;
    }
    while !run.expected.is_empty() {
        run.collect().map_err(at)?;
    }
    check_same_blocks(&*alone, &*ahead).map_err(at)
}

struct OverlapRun<'a> {
    engine: &'a mut dyn Engine,
    rng: ConformanceRng,
    /// Expected results of the steps in flight, oldest first.
    expected: VecDeque<&'a StepResult>,
    /// Contents of the spare block.
    spare: Vec<u8>,
}

impl<'a> OverlapRun<'a> {
    fn begin(&mut self, plan: &StepPlan, result: &'a StepResult) -> Result<(), String> {
        overlapping(self.engine)?
            .begin(plan)
            .map_err(|error| error.to_string())?;
        self.expected.push_back(result);
        if self.expected.len() == STEPS_IN_FLIGHT_MAX {
            match overlapping(self.engine)?.begin(plan) {
                Err(EngineError::Plan(_)) => {}
                other => return Err(format!("a step too many under way: {other:?}")),
            }
        }
        // Block copies while steps are in flight: their data and the drawn tokens must not be
        // exchanged on the way to the host.
        match self.rng.below(4) {
            0 => self.write_spare()?,
            1 => self.read_spare()?,
            _ => {}
        }
        while self.expected.len() == STEPS_IN_FLIGHT_MAX
            || (!self.expected.is_empty() && self.rng.chance(0.2))
        {
            self.collect()?;
        }
        Ok(())
    }

    fn collect(&mut self) -> Result<(), String> {
        let engine = overlapping(self.engine)?;
        // Polling must not change the result.
        for _ in 0..self.rng.below(3) {
            engine.is_done();
        }
        let result = engine.collect().map_err(|error| error.to_string())?;
        match self.expected.pop_front() {
            Some(expected) if *expected == result => Ok(()),
            expected => Err(format!("{result:?}, alone it was {expected:?}")),
        }
    }

    fn write_spare(&mut self) -> Result<(), String> {
        let bytes = self.engine.describe().capacity.block_bytes as usize;
        let fill = self.rng.next() as u8;
        self.spare = (0..bytes).map(|at| fill ^ at as u8).collect();
        self.engine
            .write_block(BlockSpan::of_block(SPARE, 0, bytes), &self.spare)
            .map_err(|error| error.to_string())
    }

    fn read_spare(&mut self) -> Result<(), String> {
        let mut bytes = vec![0; self.spare.len()];
        self.engine
            .read_block(BlockSpan::of_block(SPARE, 0, bytes.len()), &mut bytes)
            .map_err(|error| error.to_string())?;
        if bytes == self.spare {
            Ok(())
        } else {
            Err("a block that was written reads otherwise".to_owned())
        }
    }
}

fn overlapping(engine: &mut dyn Engine) -> Result<&mut dyn Overlap, String> {
    let ahead = engine.overlap();
    ahead.ok_or_else(|| "the engine takes one step at a time".to_owned())
}

fn check_same_blocks(one: &dyn Engine, other: &dyn Engine) -> Result<(), String> {
    let bytes = one.describe().capacity.block_bytes as usize;
    let mut blocks = [vec![0; bytes], vec![0; bytes]];
    for block in (0..SPARE.0).map(BlockIndex) {
        for (engine, bytes) in [one, other].into_iter().zip(&mut blocks) {
            let read = engine.read_block(BlockSpan::of_block(block, 0, bytes.len()), bytes);
            read.map_err(|error| error.to_string())?;
        }
        if blocks[0] != blocks[1] {
            return Err(format!("block {block} has other KV"));
        }
    }
    Ok(())
}
