//! What an engine's steps cost, measured before its worker joins.
//!
//! Owns: the steps that are run for it, and the clock that they are timed by. Never: runs beside real
//! work; what it leaves in the pool belongs to nobody.
//! Invariant: takes no longer than its budget and one step, whatever the model; the shortest
//! measurement is one token.

use crate::telemetry::Ceilings;
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, Prices, Sampling, Segment, SlotIndex, StepId, StepPlan,
    Work,
};
use cleave_engine::{Engine, EngineError};
use cleave_planner::{Device, Learner, Predict, Shape, bytes, flops, roofline};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a worker measures its engine before it joins, unless it is told otherwise: enough for a
/// small model's every step, and for a large one's shortest, from which the rest follows roughly.
pub const CALIBRATION: Duration = Duration::from_millis(500);
/// What is measured first, because the device's two ceilings follow from it: sequences and tokens.
const DECODE_FIRST: Part = Part::token(32);
const CHUNK_FIRST: Part = Part::chunk(0, 64);
/// Times a step is run for one measurement.
const ROUNDS: usize = 3;

/// One sequence's part in a rehearsed step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    before: u32,
    tokens: u32,
    logits: LogitsWanted,
}

impl Part {
    /// One token of a sequence that then has `context_tokens` tokens, at least 1.
    pub const fn token(context_tokens: u32) -> Self {
        Self {
            before: context_tokens - 1,
            tokens: 1,
            logits: LogitsWanted::Sample,
        }
    }

    /// `tokens` tokens of a prompt after `before` others, and more to come.
    pub const fn chunk(before: u32, tokens: u32) -> Self {
        Self {
            before,
            tokens,
            logits: LogitsWanted::No,
        }
    }

    /// The same, and a prompt's last.
    #[must_use]
    pub const fn last(self) -> Self {
        Self {
            logits: LogitsWanted::Sample,
            ..self
        }
    }

    fn end(self) -> u32 {
        self.before + self.tokens
    }
}

/// Steps that nobody asked for.
pub struct Rehearsal<'a> {
    engine: &'a mut dyn Engine,
}

impl<'a> Rehearsal<'a> {
    /// With an engine that does nothing else meanwhile.
    pub fn new(engine: &'a mut dyn Engine) -> Self {
        Self { engine }
    }

    /// Runs one step and says what it had to do and how long that took; `None` if the engine cannot
    /// hold it.
    ///
    /// # Errors
    /// If the engine breaks.
    pub fn step(&mut self, parts: &[Part]) -> Result<Option<(Work, Duration)>, EngineError> {
        let capacity = self.engine.describe().capacity;
        let blocks = |part: &Part| u64::from(part.end().div_ceil(capacity.block_tokens));
        let fits = parts.iter().map(blocks).sum::<u64>() <= u64::from(capacity.blocks_count)
            && parts.len() <= capacity.slots_count as usize
            && parts.iter().map(|part| part.tokens).sum::<u32>() <= capacity.step_tokens_max
            && parts
                .iter()
                .all(|part| part.end() < capacity.context_tokens_max);
        if !fits {
            return Ok(None);
        }
        let opens = (0..).zip(parts).map(|(slot, part)| self.open(slot, *part));
        self.engine.step(&StepPlan {
            step: StepId(0),
            opens: opens.collect(),
            segments: Vec::new(),
        })?;
        let mut next = 0;
        let segments = (0..).zip(parts).map(|(slot, part)| {
            let first = next;
            next += part.end().div_ceil(capacity.block_tokens);
            Segment {
                slot: SlotIndex(slot),
                position: part.before,
                len: part.tokens,
                blocks: (first..next).map(BlockIndex).collect(),
                logits: part.logits,
            }
        });
        let plan = StepPlan {
            step: StepId(1),
            opens: Vec::new(),
            segments: segments.collect(),
        };
        let from = Instant::now();
        self.engine.step(&plan)?;
        Ok(Some((Work::of(&plan), from.elapsed())))
    }

    /// The same `rounds` times, and the median: other processes come in between.
    fn usual(
        &mut self,
        parts: &[Part],
        rounds: usize,
    ) -> Result<Option<(Work, Duration)>, EngineError> {
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            times.extend(self.step(parts)?);
        }
        times.sort_unstable_by_key(|(_, took)| *took);
        Ok(times.get(times.len() / 2).copied())
    }

    fn open(&self, slot: u32, part: Part) -> OpenSlot {
        let vocab = u64::from(self.engine.describe().vocab_size.max(1));
        let token = |index: u32| (u64::from(index) * 7919 + u64::from(slot) * 104_729) % vocab;
        OpenSlot {
            slot: SlotIndex(slot),
            sampling: Arc::new(Sampling::greedy()),
            prompt: (0..part.end())
                .map(|index| u32::try_from(token(index)).unwrap_or(0))
                .collect(),
            output: Vec::new(),
            stop_tokens: Arc::from([]),
            min_tokens: 0,
        }
    }
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// As it learned; what it goes on learning from is the caller's.
    pub learner: Learner,
    /// The model's sizes, and the ceilings of the device as the first steps came closest to them.
    pub ceilings: Ceilings,
    /// Steps that were timed.
    pub steps: u32,
}

impl Calibration {
    /// What work costs.
    pub fn prices(&self) -> Prices {
        self.learner.prices().clone()
    }
}

/// Measures what an engine's steps cost within about `budget`. On a thread of its own: an engine may
/// pin the thread that it runs on.
///
/// # Errors
/// If the engine breaks, or cannot run a single token.
pub fn calibrate(
    engine: &mut dyn Engine,
    shape: &Shape,
    budget: Duration,
) -> Result<Calibration, EngineError> {
    std::thread::scope(|scope| {
        let measuring = scope.spawn(move || measure(engine, shape, budget));
        measuring
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn measure(
    engine: &mut dyn Engine,
    shape: &Shape,
    budget: Duration,
) -> Result<Calibration, EngineError> {
    let began = Instant::now();
    let capacity = engine.describe().capacity;
    let mut rehearsal = Rehearsal::new(engine);
    let first = [DECODE_FIRST, CHUNK_FIRST].map(|part| shorter(part, capacity.step_tokens_max));
    let mut timed = Vec::new();
    for part in first {
        timed.extend(rehearsal.usual(&[part], ROUNDS)?);
    }
    if timed.is_empty() {
        return Err(EngineError::Plan(
            "the pool is too small to measure a single step in".to_owned(),
        ));
    }
    let device = ceilings(shape, &timed);
    let seed = roofline(&device, shape, capacity.step_tokens_max);
    let mut learner = Learner::new(seed);
    let mut steps = 0;
    for (work, took) in timed {
        learner.observe(&work, took);
        steps += 1;
    }
    for _ in 0..2 {
        for parts in lesson(capacity.slots_count, capacity.step_tokens_max) {
            let left = budget.saturating_sub(began.elapsed());
            let work = parts.iter().copied().map(work_of);
            let work = work.fold(Work::default(), |sum, work| sum + work);
            let takes = learner.prices().step(&work);
            // What is cheap is measured well, and what is dear once.
            let rounds = if takes * 16 < left { ROUNDS } else { 1 };
            if takes > left {
                continue;
            }
            if let Some((work, took)) = rehearsal.usual(&parts, rounds)? {
                learner.observe(&work, took);
                steps += 1;
            }
        }
    }
    Ok(Calibration {
        learner,
        ceilings: Ceilings {
            shape: *shape,
            device,
        },
        steps,
    })
}

fn shorter(part: Part, step_tokens_max: u32) -> Part {
    Part {
        tokens: part.tokens.min(step_tokens_max),
        ..part
    }
}

fn work_of(part: Part) -> Work {
    match part.logits.samples() && part.tokens == 1 {
        true => Work::decode(u64::from(part.end())),
        false => Work::prefill(part.before, part.tokens),
    }
}

/// The most arithmetic and the most memory that any of these steps did in its time.
fn ceilings(shape: &Shape, timed: &[(Work, Duration)]) -> Device {
    let most = |amount: fn(&Shape, &Work) -> f64| {
        let rates = timed
            .iter()
            .map(|(work, took)| amount(shape, work) / took.as_secs_f64().max(1e-9));
        rates.fold(0.0, f64::max)
    };
    Device {
        flops_per_second: most(flops),
        bytes_per_second: most(|shape, work| bytes(shape, work, 1)),
        step: Duration::ZERO,
    }
}

/// The steps worth a measurement, the cheap ones first: batches that decode, short and long contexts,
/// chunks of every size, chunks after much else.
fn lesson(slots_count: u32, step_tokens_max: u32) -> Vec<Vec<Part>> {
    let batch = |sequences: u32, context_tokens| {
        let sequences = sequences.min(slots_count).min(step_tokens_max);
        vec![Part::token(context_tokens); sequences as usize]
    };
    let chunk = |before, tokens: u32| vec![Part::chunk(before, tokens.min(step_tokens_max))];
    vec![
        batch(1, 32),
        batch(1, 1024),
        batch(4, 64),
        chunk(0, 16),
        batch(8, 64),
        chunk(0, 128),
        batch(16, 64),
        batch(8, 512),
        chunk(512, 64),
        batch(32, 64),
        chunk(0, 256),
        batch(64, 64),
        chunk(1024, 128),
        chunk(0, 512),
    ]
}
