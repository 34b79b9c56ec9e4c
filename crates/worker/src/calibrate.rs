//! Measures what an engine's steps cost, before its worker joins.
//!
//! Owns: the steps that are run for the measurement, and the clock that times them. Never runs
//! beside real work; the blocks that it leaves in the pool belong to no sequence.
//! Invariant: takes no longer than its budget and the shortest measurement, one token, as far as
//! the times measured so far predict the rest.

use cleave_domain::{
    BlockIndex, Capacity, LogitsWanted, OpenSlot, Prices, SamplingParams, Segment, SegmentState,
    SlotIndex, StepId, StepPlan, StepWork, WindowTable,
};
use cleave_engine::{Engine, EngineError};
use cleave_models::ModelCost;
use cleave_planner::{DeviceSpec, Predict, PriceLearner, roofline};
use cleave_telemetry::DeviceCeilings;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// The default measuring time before a worker joins: enough for every step of a small model, and
/// for the shortest steps of a large one, from which the rest is extrapolated.
pub const CALIBRATION: Duration = Duration::from_millis(500);
/// Context tokens of the first measured decode step.
const CONTEXT_FIRST: u32 = 32;
/// Tokens of the first measured prompt chunk, if there is time for it.
const CHUNK_TOKENS_FIRST: u32 = 64;
/// How often a step is run for one measurement, if one run takes less than `1 / ROUNDS_PART` of the
/// remaining budget: cheap steps are measured well, and expensive ones once.
const ROUNDS: usize = 3;
const ROUNDS_PART: u32 = 16;

/// One sequence's part in a measured step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepPart {
    before: u32,
    tokens: u32,
    logits: LogitsWanted,
}

impl StepPart {
    /// One token of a sequence that then has `context_tokens` tokens, at least 1.
    pub const fn token(context_tokens: u32) -> Self {
        Self {
            before: context_tokens - 1,
            tokens: 1,
            logits: LogitsWanted::Sample,
        }
    }

    /// `tokens` tokens of a prompt after `before` others, with more to come.
    pub const fn chunk(before: u32, tokens: u32) -> Self {
        Self {
            before,
            tokens,
            logits: LogitsWanted::No,
        }
    }

    /// The same as the last chunk of its prompt, which draws a token.
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

/// Runs steps on an engine and times them.
pub struct StepTimer<'a> {
    engine: &'a mut dyn Engine,
    clock: &'a (dyn Fn() -> Duration + Sync),
}

impl<'a> StepTimer<'a> {
    /// The engine must do nothing else meanwhile.
    pub fn new(engine: &'a mut dyn Engine) -> Self {
        Self {
            engine,
            clock: &elapsed,
        }
    }

    /// Runs one step and gives its work and its duration; `None` if the engine cannot hold it.
    ///
    /// # Errors
    /// If the engine breaks.
    pub fn step(
        &mut self,
        parts: &[StepPart],
    ) -> Result<Option<(StepWork, Duration)>, EngineError> {
        let capacity = self.engine.describe().capacity;
        let blocks = |part: &StepPart| u64::from(part.end().div_ceil(capacity.block_tokens));
        let fits = parts.iter().map(blocks).sum::<u64>() <= u64::from(capacity.blocks_count)
            && parts.len() <= capacity.slots_count as usize
            && capacity
                .states
                .is_none_or(|states| parts.len() <= states.count as usize)
            && parts.iter().map(|part| part.tokens).sum::<u32>() <= capacity.step_tokens_max
            && parts
                .iter()
                .all(|part| part.end() < capacity.context_tokens_max);
        let Some(windows) = window_tables(&capacity, parts).filter(|_| fits) else {
            return Ok(None);
        };
        let opens = (0..).zip(parts).map(|(slot, part)| self.open(slot, *part));
        self.engine.step(&StepPlan {
            step: StepId(0),
            opens: opens.collect(),
            segments: Vec::new(),
            poolings: Vec::new(),
        })?;
        let mut next = 0;
        let segments = (0..).zip(parts).zip(windows).map(|((slot, part), window)| {
            let first = next;
            next += part.end().div_ceil(capacity.block_tokens);
            Segment {
                slot: SlotIndex(slot),
                position: part.before,
                len: part.tokens,
                blocks: (first..next).map(BlockIndex).collect(),
                logits: part.logits,
                drafts: Vec::new(),
                state: capacity.states.map(|_| SegmentState {
                    slot: BlockIndex(slot),
                    restore: None,
                    snapshot: None,
                }),
                window,
            }
        });
        let plan = StepPlan {
            step: StepId(1),
            opens: Vec::new(),
            segments: segments.collect(),
            poolings: Vec::new(),
        };
        let from = (self.clock)();
        self.engine.step(&plan)?;
        Ok(Some((StepWork::of_plan(&plan), (self.clock)() - from)))
    }

    /// Runs a step several times, if it is short beside the time left until `end`, and gives the
    /// median: other processes disturb single runs.
    fn median_step(
        &mut self,
        parts: &[StepPart],
        end: Duration,
    ) -> Result<Option<(StepWork, Duration)>, EngineError> {
        let mut times = Vec::with_capacity(ROUNDS);
        while times.len() < ROUNDS {
            let Some((work, took)) = self.step(parts)? else {
                return Ok(None);
            };
            times.push((work, took));
            if took * ROUNDS_PART > end.saturating_sub((self.clock)()) {
                break;
            }
        }
        times.sort_unstable_by_key(|(_, took)| *took);
        Ok(times.get(times.len() / 2).copied())
    }

    fn open(&self, slot: u32, part: StepPart) -> OpenSlot {
        let vocab = u64::from(self.engine.describe().vocab_size.max(1));
        let token = |index: u32| (u64::from(index) * 7919 + u64::from(slot) * 104_729) % vocab;
        OpenSlot {
            slot: SlotIndex(slot),
            sampling: Arc::new(SamplingParams::greedy()),
            prompt: (0..part.end())
                .map(|index| u32::try_from(token(index)).unwrap_or(0))
                .collect(),
            output: Vec::new(),
            stop_tokens: Arc::from([]),
            min_tokens: 0,
            adapter: None,
        }
    }
}

/// A table of the window plane for each part, where the engine has that plane; `None` if the plane
/// is too small.
fn window_tables(capacity: &Capacity, parts: &[StepPart]) -> Option<Vec<Option<WindowTable>>> {
    let (Some(window), Some(windows)) = (capacity.window(), capacity.windows) else {
        return Some(vec![None; parts.len()]);
    };
    let mut next = 0;
    let tables = parts.iter().map(|part| {
        let first = window.first_block(part.before);
        let blocks = next..next + part.end().div_ceil(capacity.block_tokens) - first;
        next = blocks.end;
        Some(WindowTable {
            first,
            blocks: blocks.map(BlockIndex).collect(),
        })
    });
    let tables = tables.collect();
    (next <= windows.count).then_some(tables)
}

/// The result of a measurement.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// The learner with these measurements; the caller goes on with it.
    pub learner: PriceLearner,
    /// The model's sizes, and the highest rates of the device that these steps reached.
    pub ceilings: DeviceCeilings,
    /// Steps that were timed.
    pub steps: u32,
}

impl Calibration {
    pub fn prices(&self) -> Prices {
        self.learner.prices().clone()
    }
}

/// Measures what an engine's steps cost within `budget`. Runs on a thread of its own: an engine may
/// pin the thread that it runs on.
///
/// # Errors
/// If the engine breaks, or cannot run a single token.
pub fn calibrate(
    engine: &mut dyn Engine,
    model: &ModelCost,
    budget: Duration,
) -> Result<Calibration, EngineError> {
    calibrate_by(engine, model, budget, &elapsed)
}

/// The time since this was first called.
fn elapsed() -> Duration {
    static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
    BEGAN.elapsed()
}

fn calibrate_by(
    engine: &mut dyn Engine,
    model: &ModelCost,
    budget: Duration,
    clock: &(dyn Fn() -> Duration + Sync),
) -> Result<Calibration, EngineError> {
    std::thread::scope(|scope| {
        let measuring = scope.spawn(move || measure(engine, model, budget, clock));
        measuring
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn measure(
    engine: &mut dyn Engine,
    model: &ModelCost,
    budget: Duration,
    clock: &(dyn Fn() -> Duration + Sync),
) -> Result<Calibration, EngineError> {
    let end = clock() + budget;
    let capacity = engine.describe().capacity;
    let mut rehearsal = StepTimer { engine, clock };
    let mut timed = Vec::new();
    timed.extend(rehearsal.median_step(&[StepPart::token(CONTEXT_FIRST)], end)?);
    let Some(&(_, token)) = timed.first() else {
        return Err(EngineError::Plan(
            "the pool is too small to measure a single step in".to_owned(),
        ));
    };
    // In the worst case each row costs as much as a step of one row.
    let affordable = end.saturating_sub(clock()).as_nanos() / token.as_nanos().max(1);
    let chunk = u32::try_from(affordable).unwrap_or(u32::MAX);
    let chunk = chunk.min(CHUNK_TOKENS_FIRST).min(capacity.step_tokens_max);
    if chunk > 1 {
        timed.extend(rehearsal.median_step(&[StepPart::chunk(0, chunk)], end)?);
    }
    let seed = roofline(&ceilings(model, &timed), model, capacity.step_tokens_max);
    let mut learner = PriceLearner::new(seed);
    for (work, took) in &timed {
        learner.observe(work, *took);
    }
    for parts in calibration_steps(capacity.slots_count, capacity.step_tokens_max) {
        let work = parts.iter().copied().map(work_of);
        let work = work.fold(StepWork::default(), |sum, work| sum + work);
        if learner.prices().step(&work) > end.saturating_sub(clock()) {
            continue;
        }
        if let Some((work, took)) = rehearsal.median_step(&parts, end)? {
            learner.observe(&work, took);
            timed.push((work, took));
        }
    }
    Ok(Calibration {
        learner,
        ceilings: DeviceCeilings {
            model: *model,
            device: ceilings(model, &timed),
        },
        steps: u32::try_from(timed.len()).unwrap_or(u32::MAX),
    })
}

fn work_of(part: StepPart) -> StepWork {
    if part.logits.samples() && part.tokens == 1 {
        StepWork::decode(u64::from(part.end()))
    } else {
        StepWork::prefill(part.before, part.tokens)
    }
}

/// The highest rates of arithmetic and of memory traffic that any of these steps reached.
fn ceilings(model: &ModelCost, timed: &[(StepWork, Duration)]) -> DeviceSpec {
    let most = |amount: fn(&ModelCost, &StepWork) -> f64| {
        let rates = timed
            .iter()
            .map(|(work, took)| amount(model, work) / took.as_secs_f64().max(1e-9));
        rates.fold(0.0, f64::max)
    };
    DeviceSpec {
        flops_per_second: most(ModelCost::flops),
        bytes_per_second: most(|model, work| model.bytes(work, 1)),
        step: Duration::ZERO,
    }
}

/// The steps worth measuring, cheap ones first: decode batches, short and long contexts, chunks of
/// every size, chunks after a long context; then all of them once more.
fn calibration_steps(slots_count: u32, step_tokens_max: u32) -> Vec<Vec<StepPart>> {
    let batch = |sequences: u32, context_tokens| {
        let sequences = sequences.min(slots_count).min(step_tokens_max);
        vec![StepPart::token(context_tokens); sequences as usize]
    };
    let chunk = |before, tokens: u32| vec![StepPart::chunk(before, tokens.min(step_tokens_max))];
    let once = vec![
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
    ];
    [once.clone(), once].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{Fingerprint, KvPlane, RowPrice, StepResult};
    use cleave_engine::{BlockSpan, EngineDescription, MockEngine};
    use cleave_models::ExpertsCost;
    use cleave_planner::{bytes_used, flops_used};
    use std::sync::atomic::{AtomicU64, Ordering};

    /// An engine whose steps take what prices say, by a clock that only they move.
    struct PricedMockEngine<'a> {
        engine: MockEngine,
        real: Prices,
        clock: &'a AtomicU64,
    }

    impl Engine for PricedMockEngine<'_> {
        fn describe(&self) -> &EngineDescription {
            self.engine.describe()
        }

        fn step(&mut self, plan: &StepPlan) -> Result<StepResult, EngineError> {
            if !plan.segments.is_empty() {
                let took = self.real.step(&StepWork::of_plan(plan)).as_nanos();
                self.clock.fetch_add(took as u64, Ordering::Relaxed);
            }
            self.engine.step(plan)
        }

        fn read_block(&self, span: BlockSpan, into: &mut [u8]) -> Result<(), EngineError> {
            self.engine.read_block(span, into)
        }

        fn write_block(&mut self, span: BlockSpan, from: &[u8]) -> Result<(), EngineError> {
            self.engine.write_block(span, from)
        }

        fn copy_blocks(
            &mut self,
            plane: KvPlane,
            pairs: &[(BlockIndex, BlockIndex)],
        ) -> Result<(), EngineError> {
            self.engine.copy_blocks(plane, pairs)
        }
    }

    /// Sizes of a small model in bf16.
    fn model() -> ModelCost {
        let layer_weights = 12 * (768 * 64 * (2 * 12 + 2 * 4) + 3 * 768 * 2048);
        let head_weights = 768 * 32_000;
        ModelCost {
            layer_weights,
            head_weights,
            pair_flops: 4 * 12 * 12 * 64,
            layer_bytes: 2 * layer_weights,
            experts: ExpertsCost::NONE,
            head_bytes: 2 * head_weights,
            token_bytes: 2 * 2 * 12 * 4 * 64,
        }
    }

    /// Prices of a machine whose step of one token takes `token`; eight rows cost the same, and 512
    /// rows sixty times that.
    fn real(token: Duration) -> Prices {
        let nanos = token.as_nanos() as u64;
        let rows = [(1, nanos), (8, nanos), (512, nanos * 60)];
        Prices {
            rows: rows.map(|(rows, nanos)| RowPrice { rows, nanos }).to_vec(),
            pair_picos: nanos / 50,
            context_picos: nanos / 10,
            ..Prices::default()
        }
    }

    fn found(token: Duration, budget: Duration) -> (Calibration, Duration) {
        let description = EngineDescription {
            capacity: Capacity {
                block_tokens: 16,
                block_bytes: 64,
                blocks_count: 1000,
                slots_count: 64,
                step_tokens_max: 512,
                context_tokens_max: 4096,
                states: None,
                windows: None,
            },
            vocab_size: 1000,
            model: String::new(),
            device: String::new(),
            device_id: None,
            fingerprint: Fingerprint::default(),
        };
        let clock = AtomicU64::new(0);
        let mut engine = PricedMockEngine {
            engine: MockEngine::new(description).unwrap(),
            real: real(token),
            clock: &clock,
        };
        let now = || Duration::from_nanos(clock.load(Ordering::Relaxed));
        let found = calibrate_by(&mut engine, &model(), budget, &now).unwrap();
        (found, now())
    }

    #[test]
    fn calibration_ends_within_its_budget() {
        let budget = CALIBRATION;
        for millis in [1, 5, 20, 100, 400, 3000] {
            let token = Duration::from_millis(millis);
            let (found, took) = found(token, budget);
            // The time of the next step is predicted from the measurements, within an eighth.
            let most = budget.max(token) + budget / 8;
            assert!(took <= most, "{token:?}: {took:?}, {} steps", found.steps);
            assert!(found.learner.has_prices());
        }
    }

    #[test]
    fn calibration_prices_a_small_model_within_a_tenth() {
        let token = Duration::from_millis(1);
        let (found, _) = found(token, CALIBRATION);
        for work in [
            StepWork::decode(500),
            StepWork::prefill(0, 200),
            StepWork::prefill(700, 90),
        ] {
            let (priced, is) = (found.prices().step(&work), real(token).step(&work));
            let off = priced.as_secs_f64() / is.as_secs_f64() - 1.0;
            assert!(off.abs() < 0.1, "{work:?}: {priced:?} for {is:?}");
        }
    }

    #[test]
    fn no_measured_step_exceeds_the_device_ceilings() {
        let token = Duration::from_millis(1);
        let (found, _) = found(token, CALIBRATION);
        let DeviceCeilings { model, device } = found.ceilings;
        for parts in calibration_steps(64, 512) {
            let work = parts.iter().copied().map(work_of);
            let work = work.fold(StepWork::default(), |sum, work| sum + work);
            let busy = real(token).step(&work);
            let used = flops_used(&model, &device, &work, busy);
            assert!(used <= 1.001, "{work:?}: MFU {used}");
            let used = bytes_used(&model, &device, &work, 1, busy);
            assert!(used <= 1.001, "{work:?}: MBU {used}");
        }
    }
}
