//! One measurement of an engine.
//!
//! Owns: the steps that run, and which of them are timed. Never: takes part in serving. Invariant:
//! only whole steps are timed, after steps of the same shape have run untimed. If an engine can
//! accept a step while it runs the one before, decode steps overlap in this way, as in serving.

use super::shape::BenchShape;
use cleave_domain::{
    BlockIndex, KvPlane, LogitsWanted, OpenSlot, SamplingParams, Segment, SlotIndex, StepId,
    StepPlan, StepWork,
};
use cleave_engine::{Engine, EngineError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timed decode steps per sample.
const DECODE_STEPS: u32 = 32;
/// Untimed decode steps before them, in which the engine prepares for the number of sequences.
const DECODE_STEPS_UNTIMED: u32 = 4;

/// An engine and the shapes that it has run.
pub(super) struct EngineBench {
    engine: Box<dyn Engine>,
    /// Shapes whose prompts have run once, untimed.
    warmed_shapes: Vec<BenchShape>,
}

/// The result of one sample.
pub(super) struct BenchSample {
    /// Timed tokens of all sequences together.
    pub(super) tokens_count: u32,
    /// Time of each decode step, or of a whole prompt.
    pub(super) seconds: Vec<f64>,
    /// Idle time of the device before each decode step, if the engine reports it.
    pub(super) idle_seconds: Vec<f64>,
    /// Work of each timed step.
    pub(super) works: Vec<StepWork>,
}

impl BenchSample {
    pub(super) fn tokens_per_second(&self) -> f64 {
        f64::from(self.tokens_count) / self.seconds.iter().sum::<f64>()
    }
}

/// Limit of the positions of one sequence of a shape.
pub(super) fn sequence_tokens(shape: BenchShape) -> u32 {
    match shape {
        BenchShape::Prefill { tokens } => tokens + 1,
        BenchShape::Decode { context_tokens, .. } => {
            context_tokens + DECODE_STEPS_UNTIMED + DECODE_STEPS + 1
        }
    }
}

impl EngineBench {
    pub(super) fn new(engine: Box<dyn Engine>) -> Self {
        Self {
            engine,
            warmed_shapes: Vec::new(),
        }
    }

    pub(super) fn engine(&self) -> &dyn Engine {
        self.engine.as_ref()
    }

    pub(super) fn sample(&mut self, shape: BenchShape) -> Result<BenchSample, EngineError> {
        let is_new = !self.warmed_shapes.contains(&shape);
        if is_new {
            self.warmed_shapes.push(shape);
        }
        match shape {
            BenchShape::Prefill { tokens } => {
                if is_new {
                    self.prefill(tokens)?;
                }
                let (took, works) = self.prefill(tokens)?;
                Ok(BenchSample {
                    tokens_count: tokens,
                    seconds: vec![took.as_secs_f64()],
                    idle_seconds: Vec::new(),
                    works,
                })
            }
            BenchShape::Decode { sequences, .. } => {
                self.fill(shape)?;
                let (mut seconds, mut idle_seconds) = (Vec::new(), Vec::new());
                for (took, idle) in self.decode(shape)? {
                    seconds.push(took.as_secs_f64());
                    idle_seconds.extend(idle.map(|idle| idle.as_secs_f64()));
                }
                let timed = DECODE_STEPS_UNTIMED..DECODE_STEPS_UNTIMED + DECODE_STEPS;
                Ok(BenchSample {
                    tokens_count: sequences * DECODE_STEPS,
                    seconds,
                    idle_seconds,
                    works: timed
                        .map(|index| StepWork::of_plan(&self.decode_step(shape, index)))
                        .collect(),
                })
            }
        }
    }

    fn prefill(&mut self, tokens: u32) -> Result<(Duration, Vec<StepWork>), EngineError> {
        let shape = BenchShape::Prefill { tokens };
        self.open(shape, tokens)?;
        self.run_prompt(shape, tokens, LogitsWanted::Sample)
    }

    /// Gives every sequence its context. The first sequence computes it, and the others get copies,
    /// since the contents of a block do not change the time to read it.
    fn fill(&mut self, shape: BenchShape) -> Result<(), EngineError> {
        let context = shape.context_tokens();
        self.open(shape, context + 1)?;
        self.run_prompt(shape, context, LogitsWanted::No)?;
        let filled = context.div_ceil(self.block_tokens());
        let table = self.table_blocks(shape);
        let pairs: Vec<_> = (1..shape.sequences())
            .flat_map(|slot| (0..filled).map(move |block| (block, slot * table + block)))
            .map(|(from, to)| (BlockIndex(from), BlockIndex(to)))
            .collect();
        self.engine.copy_blocks(KvPlane::Blocks, &pairs)
    }

    /// Opens every slot of a shape with prompts of this length.
    fn open(&mut self, shape: BenchShape, prompt_tokens: u32) -> Result<(), EngineError> {
        let vocabulary = u64::from(self.engine.describe().vocab_size);
        let token = |slot: u32, index: u32| {
            ((u64::from(index) * 7919 + u64::from(slot) * 104_729) % vocabulary) as u32
        };
        let opens = (0..shape.sequences()).map(|slot| OpenSlot {
            slot: SlotIndex(slot),
            sampling: Arc::new(SamplingParams::greedy()),
            prompt: (0..prompt_tokens).map(|index| token(slot, index)).collect(),
            output: Vec::new(),
            stop_tokens: Arc::from([]),
            min_tokens: 0,
            adapter: None,
        });
        self.engine.step(&StepPlan {
            step: StepId(1),
            opens: opens.collect(),
            segments: Vec::new(),
            poolings: Vec::new(),
        })?;
        Ok(())
    }

    /// Runs the tokens of the first slot in chunks; the last one draws a token if `last` says so.
    /// Returns the time of all steps, and their work.
    fn run_prompt(
        &mut self,
        shape: BenchShape,
        tokens: u32,
        last: LogitsWanted,
    ) -> Result<(Duration, Vec<StepWork>), EngineError> {
        let chunk = self.engine.describe().capacity.step_tokens_max;
        let (mut took, mut works) = (Duration::ZERO, Vec::new());
        for position in (0..tokens).step_by(chunk as usize) {
            let len = chunk.min(tokens - position);
            let logits = if position + len == tokens {
                last
            } else {
                LogitsWanted::No
            };
            let plan = StepPlan {
                step: StepId(1),
                opens: Vec::new(),
                segments: vec![self.segment(shape, 0, position, len, logits)],
                poolings: Vec::new(),
            };
            works.push(StepWork::of_plan(&plan));
            let from = Instant::now();
            self.engine.step(&plan)?;
            took += from.elapsed();
        }
        Ok((took, works))
    }

    /// Runs the decode steps; returns the time from each result to the next, and the device's idle
    /// time before each.
    fn decode(
        &mut self,
        shape: BenchShape,
    ) -> Result<Vec<(Duration, Option<Duration>)>, EngineError> {
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
                    over(overlap.idle_before_step());
                }
                overlap.collect()?;
                over(overlap.idle_before_step());
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

    fn decode_step(&self, shape: BenchShape, index: u32) -> StepPlan {
        let position = shape.context_tokens() + index;
        let segments = (0..shape.sequences())
            .map(|slot| self.segment(shape, slot, position, 1, LogitsWanted::Sample));
        StepPlan {
            step: StepId(1),
            opens: Vec::new(),
            segments: segments.collect(),
            poolings: Vec::new(),
        }
    }

    fn segment(
        &self,
        shape: BenchShape,
        slot: u32,
        position: u32,
        len: u32,
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
            state: None,
            window: None,
        }
    }

    fn block_tokens(&self) -> u32 {
        self.engine.describe().capacity.block_tokens
    }

    fn table_blocks(&self, shape: BenchShape) -> u32 {
        sequence_tokens(shape).div_ceil(self.block_tokens())
    }
}
