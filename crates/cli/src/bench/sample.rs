//! One measurement of an engine.
//!
//! Owns: the steps that are run, and which of them are timed.
//! Never: takes part in serving.
//! Invariant: only whole steps are timed, after steps of the same shape have run untimed. Where an engine takes a
//! step while it runs the one before, decode steps are run so, as in serving.

use super::shape::Shape;
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, Sampling, Segment, SlotIndex, StepId, StepPlan, Work,
};
use cleave_engine::{Engine, EngineError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Decode steps per sample.
const DECODE_STEPS: u32 = 32;
/// Decode steps before them, untimed: whatever an engine prepares for a number of sequences is done then.
const DECODE_STEPS_UNTIMED: u32 = 4;

/// An engine, and what it has run.
pub(super) struct Bench {
    engine: Box<dyn Engine>,
    /// Shapes whose prompts have run once.
    seen: Vec<Shape>,
}

/// What one sample took.
pub(super) struct Sampled {
    /// Timed, of all sequences together.
    pub(super) tokens_count: u32,
    /// Of each decode step, or of a whole prompt.
    pub(super) seconds: Vec<f64>,
    /// For how long the device stood still before each decode step, where it knows.
    pub(super) idle_seconds: Vec<f64>,
    /// Of each timed step.
    pub(super) works: Vec<Work>,
}

impl Sampled {
    pub(super) fn tokens_per_second(&self) -> f64 {
        f64::from(self.tokens_count) / self.seconds.iter().sum::<f64>()
    }
}

/// Positions that a sequence of a shape has at most.
pub(super) fn sequence_tokens(shape: Shape) -> u32 {
    match shape {
        Shape::Prefill { tokens } => tokens + 1,
        Shape::Decode { context_tokens, .. } => {
            context_tokens + DECODE_STEPS_UNTIMED + DECODE_STEPS + 1
        }
    }
}

impl Bench {
    pub(super) fn new(engine: Box<dyn Engine>) -> Self {
        Self {
            engine,
            seen: Vec::new(),
        }
    }

    pub(super) fn engine(&self) -> &dyn Engine {
        self.engine.as_ref()
    }

    /// Measures a shape once.
    pub(super) fn sample(&mut self, shape: Shape) -> Result<Sampled, EngineError> {
        let is_new = !self.seen.contains(&shape);
        if is_new {
            self.seen.push(shape);
        }
        match shape {
            Shape::Prefill { tokens } => {
                if is_new {
                    self.prefill(tokens)?;
                }
                let (took, works) = self.prefill(tokens)?;
                Ok(Sampled {
                    tokens_count: tokens,
                    seconds: vec![took.as_secs_f64()],
                    idle_seconds: Vec::new(),
                    works,
                })
            }
            Shape::Decode { sequences, .. } => {
                self.fill(shape)?;
                let (mut seconds, mut idle_seconds) = (Vec::new(), Vec::new());
                for (took, idle) in self.decode(shape)? {
                    seconds.push(took.as_secs_f64());
                    idle_seconds.extend(idle.map(|idle| idle.as_secs_f64()));
                }
                let timed = DECODE_STEPS_UNTIMED..DECODE_STEPS_UNTIMED + DECODE_STEPS;
                Ok(Sampled {
                    tokens_count: sequences * DECODE_STEPS,
                    seconds,
                    idle_seconds,
                    works: timed
                        .map(|index| Work::of(&self.decode_step(shape, index)))
                        .collect(),
                })
            }
        }
    }

    fn prefill(&mut self, tokens: u32) -> Result<(Duration, Vec<Work>), EngineError> {
        let shape = Shape::Prefill { tokens };
        self.open(shape, tokens)?;
        self.run_prompt(shape, tokens, LogitsWanted::Sample)
    }

    /// Gives every sequence its context: the first computes it, the others get a copy of their own, since what a
    /// block holds does not change what it takes to read it.
    fn fill(&mut self, shape: Shape) -> Result<(), EngineError> {
        let context = shape.context_tokens();
        self.open(shape, context + 1)?;
        self.run_prompt(shape, context, LogitsWanted::No)?;
        let filled = context.div_ceil(self.block_tokens());
        let table = self.table_blocks(shape);
        let pairs: Vec<_> = (1..shape.sequences())
            .flat_map(|slot| (0..filled).map(move |block| (block, slot * table + block)))
            .map(|(from, to)| (BlockIndex(from), BlockIndex(to)))
            .collect();
        self.engine.copy_blocks(&pairs)
    }

    /// Opens every slot of a shape with prompts of so many tokens.
    fn open(&mut self, shape: Shape, prompt_tokens: u32) -> Result<(), EngineError> {
        let vocabulary = u64::from(self.engine.describe().vocab_size);
        let token = |slot: u32, index: u32| {
            ((u64::from(index) * 7919 + u64::from(slot) * 104_729) % vocabulary) as u32
        };
        let opens = (0..shape.sequences()).map(|slot| OpenSlot {
            slot: SlotIndex(slot),
            sampling: Arc::new(Sampling::greedy()),
            prompt: (0..prompt_tokens).map(|index| token(slot, index)).collect(),
            output: Vec::new(),
            stop_tokens: Arc::from([]),
            min_tokens: 0,
        });
        self.engine.step(&StepPlan {
            step: StepId(1),
            opens: opens.collect(),
            segments: Vec::new(),
        })?;
        Ok(())
    }

    /// Runs the first slot's tokens in chunks; the last draws a token, if that is wanted. Gives the time of all steps, and what
    /// each had to do.
    fn run_prompt(
        &mut self,
        shape: Shape,
        tokens: u32,
        last: LogitsWanted,
    ) -> Result<(Duration, Vec<Work>), EngineError> {
        let chunk = self.engine.describe().capacity.step_tokens_max;
        let (mut took, mut works) = (Duration::ZERO, Vec::new());
        for position in (0..tokens).step_by(chunk as usize) {
            let len = chunk.min(tokens - position);
            let logits = match position + len == tokens {
                true => last,
                false => LogitsWanted::No,
            };
            let plan = StepPlan {
                step: StepId(1),
                opens: Vec::new(),
                segments: vec![self.segment(shape, (0, position, len), logits)],
            };
            works.push(Work::of(&plan));
            let from = Instant::now();
            self.engine.step(&plan)?;
            took += from.elapsed();
        }
        Ok((took, works))
    }

    /// The timed decode steps: from one result to the next, and how long the device stood still before each.
    fn decode(&mut self, shape: Shape) -> Result<Vec<(Duration, Option<Duration>)>, EngineError> {
        let steps_count = DECODE_STEPS_UNTIMED + DECODE_STEPS;
        let plans: Vec<StepPlan> = (0..steps_count)
            .map(|index| self.decode_step(shape, index))
            .collect();
        let mut took = Vec::new();
        let mut last = Instant::now();
        let mut over = |idle: Option<Duration>| {
            let now = Instant::now();
            took.push((now - last, idle));
            last = now;
        };
        match self.engine.overlap() {
            Some(overlap) => {
                overlap.begin(&plans[0])?;
                for next in plans.iter().skip(1) {
                    overlap.begin(next)?;
                    overlap.collect()?;
                    over(overlap.idle());
                }
                overlap.collect()?;
                over(overlap.idle());
            }
            None => {
                for plan in &plans {
                    self.engine.step(plan)?;
                    over(None);
                }
            }
        }
        Ok(took.split_off(DECODE_STEPS_UNTIMED as usize))
    }

    fn decode_step(&self, shape: Shape, index: u32) -> StepPlan {
        let position = shape.context_tokens() + index;
        let segments = (0..shape.sequences())
            .map(|slot| self.segment(shape, (slot, position, 1), LogitsWanted::Sample));
        StepPlan {
            step: StepId(1),
            opens: Vec::new(),
            segments: segments.collect(),
        }
    }

    fn segment(
        &self,
        shape: Shape,
        (slot, position, len): (u32, u32, u32),
        logits: LogitsWanted,
    ) -> Segment {
        let table = self.table_blocks(shape);
        Segment {
            slot: SlotIndex(slot),
            position,
            len,
            blocks: (slot * table..(slot + 1) * table).map(BlockIndex).collect(),
            logits,
            drafts: Vec::new(),
        }
    }

    fn block_tokens(&self) -> u32 {
        self.engine.describe().capacity.block_tokens
    }

    /// Blocks of one sequence.
    fn table_blocks(&self, shape: Shape) -> u32 {
        sequence_tokens(shape).div_ceil(self.block_tokens())
    }
}
