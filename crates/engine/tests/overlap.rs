//! Overlapping steps: their tokens, refused plans, and the effects of a failed step.

use crate::reference::{self, PlainDeviceProbe};
use cleave_domain::{
    BlockIndex, Constraint, ConstraintEnd, Grammar, LogitsWanted, OpenSlot, SampledToken,
    SamplingParams, Segment, SlotIndex, StepId, StepPlan, StepResult,
};
use cleave_engine::{
    ConstraintError, ConstraintSource, Engine, EngineError, EngineLimits, Overlap, TokenMask,
    TokenMatcher, conformance,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const LIMITS: EngineLimits = EngineLimits {
    block_tokens: 4,
    blocks_count: 8,
    states_count: 0,
    slots_count: 2,
    step_tokens_max: 16,
    windows_count: 0,
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/llama2")
}

fn engine() -> (impl Engine, Arc<PlainDeviceProbe>) {
    reference::device_engine(&folder(), LIMITS).unwrap()
}

fn ahead(engine: &mut impl Engine) -> &mut dyn Overlap {
    engine.overlap().unwrap()
}

fn hot() -> SamplingParams {
    SamplingParams {
        temperature: 1.5,
        seed: 11,
        ..SamplingParams::greedy()
    }
}

fn open(slot: u32, prompt: &[u32], sampling: SamplingParams) -> OpenSlot {
    OpenSlot {
        slot: SlotIndex(slot),
        sampling: Arc::new(sampling),
        prompt: Arc::from(prompt),
        output: Vec::new(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
        adapter: None,
    }
}

/// A segment; slot 0 has blocks 0 to 3, slot 1 the others.
fn segment(slot: u32, position: u32, len: u32) -> Segment {
    Segment {
        slot: SlotIndex(slot),
        position,
        len,
        blocks: (slot * 4..slot * 4 + 4).map(BlockIndex).collect(),
        logits: LogitsWanted::Sample,
        drafts: Vec::new(),
        state: None,
        window: None,
    }
}

fn plan(step: u64, opens: Vec<OpenSlot>, segments: Vec<Segment>) -> StepPlan {
    StepPlan {
        step: StepId(step),
        opens,
        segments,
        poolings: Vec::new(),
    }
}

/// Prompts of six tokens in slot 0 and three in slot 1.
fn prompts() -> StepPlan {
    let opens = vec![
        open(0, &[1, 2, 3, 4, 5, 6], hot()),
        open(1, &[9, 8, 7], hot()),
    ];
    plan(1, opens, vec![segment(0, 0, 6), segment(1, 0, 3)])
}

/// The decode step after `after` draws in both slots.
fn decode(after: u32) -> StepPlan {
    let segments = vec![segment(0, 5 + after, 1), segment(1, 2 + after, 1)];
    plan(u64::from(after) + 1, vec![], segments)
}

fn tokens(result: &StepResult) -> Vec<u32> {
    result.sampled.iter().map(|(_, s)| s.token).collect()
}

#[test]
fn overlapping_steps_draw_the_same_tokens() {
    let build = |dir: &Path, limits| -> Result<Box<dyn Engine>, String> {
        Ok(Box::new(reference::device_engine(dir, limits)?.0))
    };
    for seed in 0..4 {
        conformance::overlap(&folder(), &build, seed, 60).unwrap();
    }
}

#[test]
fn an_engine_that_draws_on_the_host_does_not_overlap() {
    let mut engine = reference::engine(&folder(), LIMITS).unwrap();
    assert!(engine.overlap().is_none());
    assert!(engine.drafts_max() > 0);
}

#[test]
fn an_engine_that_draws_on_the_device_takes_no_drafts() {
    let (mut engine, _) = engine();
    assert_eq!(engine.drafts_max(), 0);
    engine.step(&prompts()).unwrap();
    let mut plan = decode(1);
    plan.segments[0].len += 1;
    plan.segments[0].drafts = vec![7];
    let refused = engine.step(&plan).unwrap_err().to_string();
    assert!(
        refused.contains("1 drafts, the engine takes 0"),
        "{refused}"
    );
}

#[test]
fn a_step_begins_before_the_host_knows_its_input_tokens() {
    let (mut alone, _) = engine();
    let expected = [prompts(), decode(1), decode(2)].map(|plan| alone.step(&plan).unwrap());
    let (mut engine, watched) = engine();
    let engine = ahead(&mut engine);
    engine.begin(&prompts()).unwrap();
    assert!(!engine.is_done(), "nobody waited for the device");
    engine.begin(&decode(1)).unwrap();
    assert_eq!(watched.fed_count.load(Ordering::Relaxed), 2);
    assert_eq!(engine.collect().unwrap(), expected[0]);
    engine.begin(&decode(2)).unwrap();
    assert_eq!(watched.fed_count.load(Ordering::Relaxed), 4);
    assert_eq!(engine.collect().unwrap(), expected[1]);
    assert_eq!(engine.collect().unwrap(), expected[2]);
    assert!(engine.is_done());
}

/// A step that only reads a prompt, one without work, and one whose logits the host needs.
#[test]
fn steps_of_every_kind_overlap() {
    let with_logprobs = SamplingParams {
        logprobs: Some(2),
        ..hot()
    };
    let mut first = prompts();
    first.segments[1].len = 2;
    first.segments[1].logits = LogitsWanted::No;
    let second = plan(2, vec![], vec![segment(0, 6, 1), segment(1, 2, 1)]);
    let third = plan(3, vec![open(1, &[3, 2, 1], with_logprobs)], vec![]);
    let fourth = plan(4, vec![], vec![segment(1, 0, 3), segment(0, 7, 1)]);
    let fifth = plan(5, vec![], vec![segment(0, 8, 1)]);
    let plans = [first, second, third, fourth, fifth];
    let (mut alone, _) = engine();
    let expected = plans.clone().map(|plan| alone.step(&plan).unwrap());
    assert_eq!(expected[3].sampled.len(), 2);
    let (mut engine, _) = engine();
    let engine = ahead(&mut engine);
    engine.begin(&plans[0]).unwrap();
    for (plan, expected) in plans[1..].iter().zip(&expected) {
        engine.begin(plan).unwrap();
        assert_eq!(engine.collect().unwrap(), *expected);
    }
    assert_eq!(engine.collect().unwrap(), expected[4]);
}

#[test]
fn a_plan_against_the_step_in_flight_is_refused() {
    type DamageStep = fn(&mut StepPlan);
    let damages: [(&str, DamageStep); 9] = [
        ("tokens 6..8 of 7", |p| p.segments[0].len = 2),
        ("tokens 7..8 of 7", |p| p.segments[0].position = 7),
        ("samples after 6 of 7", |p| p.segments[0].position = 5),
        ("two segments", |p| p.segments[1] = p.segments[0].clone()),
        ("needs 2", |p| p.segments[0].blocks.truncate(1)),
        ("no block b8", |p| p.segments[0].blocks[1].0 = 8),
        ("written by two", |p| p.segments[1].blocks[0].0 = 1),
        ("tokens 6..7 of 3", |p| {
            p.opens.push(open(0, &[1, 2, 3], hot()))
        }),
        ("in a context of 256", |p| p.segments[0].position = 256),
    ];
    let (mut alone, _) = engine();
    let expected = [prompts(), decode(1)].map(|plan| alone.step(&plan).unwrap());
    let (mut engine, _) = engine();
    ahead(&mut engine).begin(&prompts()).unwrap();
    for (message, damage) in damages {
        let mut plan = decode(1);
        damage(&mut plan);
        match ahead(&mut engine).begin(&plan) {
            Err(EngineError::Slot(_, problem)) => {
                assert!(problem.contains(message), "{problem}: {message}");
            }
            other => panic!("{message}: {other:?}"),
        }
    }
    assert!(matches!(
        engine.step(&decode(1)),
        Err(EngineError::Plan(problem)) if problem.contains("under way")
    ));
    let engine = ahead(&mut engine);
    engine.begin(&decode(1)).unwrap();
    assert!(matches!(
        engine.begin(&decode(2)),
        Err(EngineError::Plan(problem)) if problem.contains("under way")
    ));
    assert_eq!(engine.collect().unwrap(), expected[0]);
    assert_eq!(engine.collect().unwrap(), expected[1]);
    let late = engine.begin(&decode(1));
    assert!(matches!(late, Err(EngineError::Slot(..))), "{late:?}");
}

/// The plan is refused whether the device draws, or the host, which then has the token but has not
/// reported it.
#[test]
fn a_draw_that_depends_on_a_pending_token_is_refused() {
    let samplings = [
        SamplingParams {
            frequency_penalty: 0.5,
            ..hot()
        },
        SamplingParams {
            logprobs: Some(0),
            ..hot()
        },
    ];
    for sampling in samplings {
        let (mut engine, _) = engine();
        let engine = ahead(&mut engine);
        let first = plan(1, vec![open(0, &[1, 2], sampling)], vec![segment(0, 0, 2)]);
        engine.begin(&first).unwrap();
        let second = plan(2, vec![], vec![segment(0, 2, 1)]);
        assert!(matches!(
            engine.begin(&second),
            Err(EngineError::Slot(_, problem)) if problem.contains("token 2 is being drawn")
        ));
        engine.collect().unwrap();
        engine.begin(&second).unwrap();
        assert_eq!(engine.collect().unwrap().sampled.len(), 1);
    }
}

/// The old sequence's token is reported, and does not enter the new sequence's history.
#[test]
fn a_reopened_slot_never_gets_the_old_sequences_token() {
    let over = plan(
        2,
        vec![open(0, &[7, 7], hot())],
        vec![Segment {
            blocks: vec![BlockIndex(2), BlockIndex(3)],
            ..segment(0, 0, 2)
        }],
    );
    let continuation = plan(
        3,
        vec![],
        vec![Segment {
            blocks: vec![BlockIndex(2), BlockIndex(3)],
            ..segment(0, 2, 1)
        }],
    );
    let (mut alone, _) = engine();
    let plans = [prompts(), over.clone(), continuation.clone()];
    let expected = plans.map(|plan| alone.step(&plan).unwrap());
    let (mut engine, _) = engine();
    let engine = ahead(&mut engine);
    engine.begin(&prompts()).unwrap();
    engine.begin(&over).unwrap();
    assert_eq!(engine.collect().unwrap(), expected[0]);
    engine.begin(&continuation).unwrap();
    assert_eq!(engine.collect().unwrap(), expected[1]);
    assert_eq!(engine.collect().unwrap(), expected[2]);
}

fn is_not_finite(result: &Result<StepResult, EngineError>) -> bool {
    matches!(result, Err(EngineError::NotFinite(_)))
}

#[test]
fn a_step_fed_by_a_failed_draw_fails_too() {
    let (mut engine, watched) = engine();
    let engine = ahead(&mut engine);
    watched.breaks_first_row.store(true, Ordering::Relaxed);
    engine.begin(&prompts()).unwrap();
    engine.begin(&decode(1)).unwrap();
    for _ in 0..2 {
        let collected = engine.collect();
        assert!(is_not_finite(&collected), "{collected:?}");
    }
    // The slots' histories are unchanged.
    assert!(matches!(
        engine.begin(&decode(1)),
        Err(EngineError::Slot(..))
    ));
    let (mut fresh, _) = self::engine();
    engine.begin(&prompts()).unwrap();
    assert_eq!(engine.collect().unwrap(), fresh.step(&prompts()).unwrap());
}

#[test]
fn an_independent_step_survives_a_failed_one() {
    let first = plan(1, vec![open(0, &[1, 2], hot())], vec![segment(0, 0, 2)]);
    let second = plan(2, vec![open(1, &[3], hot())], vec![segment(1, 0, 1)]);
    let (mut alone, _) = engine();
    let expected = alone.step(&second).unwrap();
    let (mut engine, watched) = engine();
    let engine = ahead(&mut engine);
    watched.breaks_first_row.store(true, Ordering::Relaxed);
    engine.begin(&first).unwrap();
    engine.begin(&second).unwrap();
    assert!(is_not_finite(&engine.collect()));
    assert_eq!(engine.collect().unwrap(), expected);
}

/// The host needs the token whose draw failed, and detects that before the step begins.
#[test]
fn a_host_step_after_a_failed_draw_does_not_begin() {
    let (mut engine, watched) = engine();
    let engine = ahead(&mut engine);
    watched.breaks_first_row.store(true, Ordering::Relaxed);
    engine.begin(&prompts()).unwrap();
    let mut second = decode(1);
    second.segments[0].logits = LogitsWanted::ScoreAndSample;
    assert!(matches!(
        engine.begin(&second),
        Err(EngineError::Device(problem)) if problem.contains("the step before failed")
    ));
    assert!(is_not_finite(&engine.collect()));
}

/// A constraint that allows even tokens, and fails after so many of them.
struct EvenTokens {
    count_max: usize,
}

struct EvenMatcher {
    left: usize,
}

fn no_more() -> ConstraintError {
    ConstraintError::Unenforceable("no more tokens".to_owned())
}

impl ConstraintSource for EvenTokens {
    fn open(
        &self,
        _: &Constraint,
        output: &[u32],
    ) -> Result<Box<dyn TokenMatcher>, ConstraintError> {
        let left = self.count_max - output.len();
        Ok(Box::new(EvenMatcher { left }))
    }
}

impl TokenMatcher for EvenMatcher {
    fn allow(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        if self.left == 0 {
            return Err(no_more());
        }
        mask.words_mut().fill(0x5555_5555);
        Ok(())
    }

    fn push(&mut self, token: u32) {
        assert_eq!(token % 2, 0);
        self.left -= 1;
    }

    fn valid_prefix(&mut self, tokens: &[u32]) -> usize {
        tokens.iter().take_while(|token| *token % 2 == 0).count()
    }

    fn forced(&mut self) -> Vec<u32> {
        Vec::new()
    }
}

/// [`prompts`], with a constraint in slot 0.
fn constrained_prompts() -> StepPlan {
    let mut plan = prompts();
    Arc::make_mut(&mut plan.opens[0].sampling).constraint = Some(Arc::new(Constraint {
        grammar: Grammar::Lark("even".into()),
        end: ConstraintEnd::Allowed,
    }));
    plan
}

#[test]
fn a_step_with_a_mask_stays_in_flight() {
    let (mut alone, _) = engine();
    let (mut device, watched) = engine();
    alone.enforce(Arc::new(EvenTokens { count_max: 9 }));
    device.enforce(Arc::new(EvenTokens { count_max: 9 }));
    // The row without a mask goes on before the host has its token.
    let ahead_alone = plan(2, vec![], vec![segment(1, 3, 1)]);
    let both = plan(3, vec![], vec![segment(0, 6, 1), segment(1, 4, 1)]);
    let plans = [constrained_prompts(), ahead_alone, both];
    let expected = plans.clone().map(|plan| alone.step(&plan).unwrap());
    let device = ahead(&mut device);
    device.begin(&plans[0]).unwrap();
    assert!(!device.is_done(), "the host waited for the device");
    device.begin(&plans[1]).unwrap();
    assert_eq!(watched.fed_count.load(Ordering::Relaxed), 1);
    assert_eq!(device.collect().unwrap(), expected[0]);
    device.begin(&plans[2]).unwrap();
    assert!(!device.is_done(), "the host waited for the device");
    assert_eq!(device.collect().unwrap(), expected[1]);
    assert_eq!(device.collect().unwrap(), expected[2]);
    assert_eq!(tokens(&expected[2])[0] % 2, 0);
}

#[test]
fn a_failed_mask_names_its_slot_and_drops_the_draw() {
    let (mut engine, _) = engine();
    engine.enforce(Arc::new(EvenTokens { count_max: 1 }));
    let engine = ahead(&mut engine);
    engine.begin(&constrained_prompts()).unwrap();
    let first = engine.collect().unwrap();
    let failed = engine.begin(&decode(1));
    let slots = vec![SlotIndex(0)];
    let error = no_more();
    assert_eq!(failed, Err(EngineError::Constraint { slots, error }));
    let alone = plan(3, vec![], vec![segment(1, 3, 1)]);
    engine.begin(&alone).unwrap();
    let result = engine.collect().unwrap();
    assert_eq!(result.step, StepId(3));
    assert_eq!((result.sampled.len(), first.sampled.len()), (1, 2));
}

/// `min_tokens` counts every token, including one that the host has not received.
#[test]
fn stop_tokens_are_banned_until_min_tokens_in_overlap() {
    let (mut alone, _) = engine();
    let free = alone.step(&prompts()).unwrap();
    let second = alone.step(&decode(1)).unwrap();
    let (first, second) = (tokens(&free)[0], tokens(&second)[0]);
    for min_tokens in [1, 2] {
        let mut prompts = prompts();
        prompts.opens[0].stop_tokens = if first == second {
            panic!("choose another seed: both tokens are {first}")
        } else {
            Arc::from([second])
        };
        prompts.opens[0].min_tokens = min_tokens;
        let (mut engine, _) = engine();
        let engine = ahead(&mut engine);
        engine.begin(&prompts).unwrap();
        engine.begin(&decode(1)).unwrap();
        assert_eq!(tokens(&engine.collect().unwrap())[0], first);
        let drawn: &SampledToken = &engine.collect().unwrap().sampled[0].1;
        assert_eq!(drawn.token == second, min_tokens == 1);
    }
}

/// For draws on the device and on the host.
#[test]
fn all_slots_with_non_finite_logits_are_named_at_once() {
    let on_host = SamplingParams {
        logprobs: Some(1),
        ..hot()
    };
    for sampling in [hot(), on_host] {
        let (mut engine, watched) = engine();
        let opens = vec![
            open(0, &[1, 2, 3, 4, 5, 6], sampling.clone()),
            open(1, &[9, 8, 7], sampling),
        ];
        let plan = plan(1, opens, vec![segment(0, 0, 6), segment(1, 0, 3)]);
        watched.breaks_every_row.store(true, Ordering::Relaxed);
        let error = engine.step(&plan).unwrap_err();
        assert_eq!(error.slots(), [SlotIndex(0), SlotIndex(1)], "{error}");
    }
}
