//! A decode step of 32 sequences of which none, one or all are constrained to JSON of a schema, and
//! the part of it in matchers, which also find forced tokens: on a shared machine the time of the
//! step itself varies by more.
//!
//! `cargo bench -p cleave-cpu --bench constrained`; the processor must be idle otherwise. The model
//! has the shape `llama-160m` and random weights, whose text never ends by itself.
#![allow(missing_docs)] // criterion's macros

use cleave_checkpoint::{Checkpoint, synth::synth};
use cleave_cpu::{CpuOps, CpuOptions, CpuWeightLoader};
use cleave_domain::{
    BlockIndex, Constraint, ConstraintEnd, Grammar, LogitsWanted, OpenSlot, SamplingParams,
    Segment, SlotIndex, StepId, StepPlan, TokenId,
};
use cleave_engine::ops::Precision;
use cleave_engine::{
    ConstraintError, ConstraintSource, Engine, EngineLimits, ModelEngine, TokenMask, TokenMatcher,
    Weights,
};
use cleave_grammar::{CompiledGrammar, GrammarMatcher};
use cleave_text::{ModelFiles, ModelText};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const ROWS: u32 = 32;
const BLOCK_TOKENS: u32 = 16;
const BLOCKS_EACH: u32 = 16;
const PROMPT_TOKENS: u32 = 16;
/// Steps before the sequences begin anew.
const STEPS: u32 = 200;
const SCHEMA: &str = r#"{"type": "array", "items": {"type": "object", "properties":
    {"name": {"type": "string", "maxLength": 24}, "count": {"type": "integer", "maximum": 9999}},
    "required": ["name", "count"], "additionalProperties": false}}"#;

/// Gives every sequence a matcher of the same grammar.
struct OneGrammar(CompiledGrammar, Arc<ModelText>);

struct BenchMatcher(GrammarMatcher, Arc<ModelText>);

/// Time in matchers, in nanoseconds.
static MATCHING: AtomicU64 = AtomicU64::new(0);

fn timed<T>(work: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = work();
    MATCHING.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
    result
}

impl ConstraintSource for OneGrammar {
    fn open(
        &self,
        _: &Constraint,
        output: &[TokenId],
    ) -> Result<Box<dyn TokenMatcher>, ConstraintError> {
        assert_eq!(output.len(), 0, "nothing is resumed");
        Ok(Box::new(BenchMatcher(self.0.start(), Arc::clone(&self.1))))
    }
}

impl TokenMatcher for BenchMatcher {
    fn allow(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        timed(|| self.0.allow(mask.words_mut())).expect("the grammar goes on");
        Ok(())
    }

    fn push(&mut self, token: TokenId) {
        timed(|| self.0.consume(token)).expect("it was allowed");
    }

    fn valid_prefix(&mut self, tokens: &[TokenId]) -> usize {
        self.0.valid_prefix(tokens)
    }

    fn forced(&mut self) -> Vec<TokenId> {
        timed(|| self.1.forced_tokens(&mut self.0))
    }
}

fn engine(folder: &Path) -> ModelEngine<CpuOps> {
    let options = CpuOptions::new(Precision::Bf16);
    let checkpoint = Checkpoint::open(folder).expect("it was just written");
    let loader = CpuWeightLoader::new(&options);
    let weights = Weights::load(&loader, &checkpoint, None, &mut |_| {});
    let limits = EngineLimits {
        block_tokens: BLOCK_TOKENS,
        blocks_count: ROWS * BLOCKS_EACH,
        states_count: 0,
        windows_count: 0,
        slots_count: ROWS,
        step_tokens_max: ROWS * PROMPT_TOKENS,
    };
    let ops = CpuOps::new(&options).expect("the best instruction set");
    ModelEngine::new(ops, Arc::new(weights.expect("they fit")), limits).expect("memory")
}

/// The step after `done` tokens of every sequence; the first has the prompts.
fn plan(done: u32, constrained_count: u32, constraint: &Arc<Constraint>) -> StepPlan {
    let sampling = |slot: u32| {
        Arc::new(SamplingParams {
            temperature: 0.8,
            seed: u64::from(slot),
            constraint: (slot < constrained_count).then(|| Arc::clone(constraint)),
            ..SamplingParams::greedy()
        })
    };
    let opens = (0..ROWS).filter(|_| done == 0).map(|slot| OpenSlot {
        slot: SlotIndex(slot),
        sampling: sampling(slot),
        prompt: vec![100 + slot; PROMPT_TOKENS as usize].into(),
        output: Vec::new(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
        adapter: None,
    });
    let segments = (0..ROWS).map(|slot| Segment {
        slot: SlotIndex(slot),
        position: done,
        len: if done == 0 { PROMPT_TOKENS } else { 1 },
        blocks: (slot * BLOCKS_EACH..(slot + 1) * BLOCKS_EACH)
            .map(BlockIndex)
            .collect(),
        logits: LogitsWanted::Sample,
        drafts: Vec::new(),
        state: None,
        window: None,
    });
    StepPlan {
        step: StepId(u64::from(done)),
        opens: opens.collect(),
        segments: segments.collect(),
        poolings: Vec::new(),
    }
}

/// The time that a benchmark reports.
#[derive(Clone, Copy, Debug)]
enum Measured {
    Step,
    Matchers,
}

fn constrained(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path().join("model");
    synth("llama-160m", &folder, 1, &mut |_| {}).expect("it is written");
    let model = ModelText::new(ModelFiles::read(&folder).expect("files")).expect("a tokenizer");
    let constraint = Arc::new(Constraint {
        grammar: Grammar::JsonSchema(SCHEMA.into()),
        end: ConstraintEnd::Forced,
    });
    let compiler = model.grammars().expect("it has an end token");
    let mut engine = engine(&folder);
    let compiled = compiler.compile(&constraint).expect("it is valid");
    engine.enforce(Arc::new(OneGrammar(compiled, Arc::new(model))));
    let mut group = criterion.benchmark_group("decode of 32");
    group
        .sample_size(20)
        .throughput(Throughput::Elements(u64::from(ROWS)));
    for (count, measured) in [
        (0, Measured::Step),
        (1, Measured::Step),
        (ROWS, Measured::Step),
        (1, Measured::Matchers),
        (ROWS, Measured::Matchers),
    ] {
        group.bench_function(format!("{count} constrained, {measured:?}"), |bench| {
            bench.iter_custom(|steps| {
                let (mut took, mut done) = (Duration::ZERO, 0);
                MATCHING.store(0, Ordering::Relaxed);
                for _ in 0..steps {
                    if done == 0 || done == PROMPT_TOKENS + STEPS {
                        let before = MATCHING.load(Ordering::Relaxed);
                        engine.step(&plan(0, count, &constraint)).expect("a step");
                        MATCHING.store(before, Ordering::Relaxed);
                        done = PROMPT_TOKENS;
                    }
                    let plan = plan(done, count, &constraint);
                    let began = Instant::now();
                    engine.step(&plan).expect("a step");
                    took += began.elapsed();
                    done += 1;
                }
                match measured {
                    Measured::Step => took,
                    Measured::Matchers => Duration::from_nanos(MATCHING.load(Ordering::Relaxed)),
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, constrained);
criterion_main!(benches);
