//! Mock engines: tokens, scripts, constraints, refused plans.

use super::*;
use crate::constraint::{ConstraintError, TokenMask, TokenMatcher};
use cleave_domain::{
    Capacity, Constraint, ConstraintEnd, Fingerprint, Grammar, SamplingParams, SlotIndex,
    StateCapacity, StepId,
};

fn engine() -> MockEngine {
    engine_with_states(None)
}

fn engine_with_states(states: Option<StateCapacity>) -> MockEngine {
    let capacity = Capacity {
        block_tokens: 4,
        block_bytes: 8,
        blocks_count: 6,
        slots_count: 2,
        step_tokens_max: 16,
        context_tokens_max: 24,
        states,
        windows: None,
    };
    MockEngine::new(EngineDescription {
        model: "mock".into(),
        device: "none".into(),
        device_id: None,
        fingerprint: Fingerprint::default(),
        capacity,
        vocab_size: 100,
    })
    .unwrap()
}

fn open(slot: u32, output: &[TokenId]) -> OpenSlot {
    let sampling = SamplingParams {
        seed: 7,
        logprobs: Some(2),
        ..SamplingParams::greedy()
    };
    OpenSlot {
        slot: SlotIndex(slot),
        sampling: Arc::new(sampling),
        prompt: Arc::from([1, 2, 3, 4, 5]),
        output: output.to_vec(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
        adapter: None,
    }
}

fn step(
    engine: &mut MockEngine,
    opens: Vec<OpenSlot>,
    position: u32,
    len: u32,
) -> Result<StepResult, EngineError> {
    let slot = opens.first().map_or(SlotIndex(0), |open| open.slot);
    engine.step(&StepPlan {
        step: StepId(1),
        segments: vec![Segment {
            slot,
            position,
            len,
            blocks: vec![BlockIndex(0), BlockIndex(1)],
            logits: LogitsWanted::Sample,
            drafts: Vec::new(),
            state: None,
            window: None,
        }],
        opens,
        poolings: Vec::new(),
    })
}

fn drawn(result: &StepResult) -> TokenId {
    result.sampled[0].1.token
}

#[test]
fn a_resumed_mock_sequence_draws_the_same_tokens() {
    let mut engine = engine();
    let first = drawn(&step(&mut engine, vec![open(0, &[])], 0, 5).unwrap());
    let second = drawn(&step(&mut engine, vec![], 5, 1).unwrap());
    assert_ne!(first, second);
    let resumed = step(&mut engine, vec![open(1, &[first])], 0, 6).unwrap();
    assert_eq!(drawn(&resumed), second);
    let scores = resumed.sampled[0].1.scores.as_ref().unwrap();
    assert!((scores.normalizer - 100f32.ln()).abs() < 1e-6);
    assert_eq!(scores.top.len(), 2);
}

/// Plan of one token of slot 0 at `position`.
fn decode(step: u64, position: u32) -> StepPlan {
    StepPlan {
        step: StepId(step),
        segments: vec![Segment {
            slot: SlotIndex(0),
            position,
            len: 1,
            blocks: vec![BlockIndex(0), BlockIndex(1)],
            logits: LogitsWanted::Sample,
            drafts: Vec::new(),
            state: None,
            window: None,
        }],
        opens: vec![],
        poolings: Vec::new(),
    }
}

#[test]
fn overlapping_mock_steps_draw_the_same_tokens() {
    let free = || OpenSlot {
        sampling: Arc::new(SamplingParams::greedy()),
        ..open(0, &[])
    };
    let mut one = engine();
    step(&mut one, vec![free()], 0, 5).unwrap();
    let expected: Vec<_> = (5..9)
        .map(|position| one.step(&decode(1, position)).unwrap().sampled)
        .collect();
    let mut two = engine().overlapping();
    step(&mut two, vec![free()], 0, 5).unwrap();
    let overlap = two.overlap().unwrap();
    overlap.begin(&decode(1, 5)).unwrap();
    let mut drawn = Vec::new();
    for position in 6..9 {
        overlap.begin(&decode(2, position)).unwrap();
        assert!(overlap.begin(&decode(3, position + 1)).is_err());
        drawn.push(overlap.collect().unwrap().sampled);
    }
    drawn.push(overlap.collect().unwrap().sampled);
    assert_eq!(drawn, expected);
    assert!(engine().overlap().is_none());
}

#[test]
fn a_draw_that_needs_the_pending_token_is_refused() {
    let mut engine = engine().overlapping();
    // Scores are requested, so that the host must see the logits.
    step(&mut engine, vec![open(0, &[])], 0, 5).unwrap();
    let overlap = engine.overlap().unwrap();
    overlap.begin(&decode(1, 5)).unwrap();
    assert!(overlap.begin(&decode(2, 6)).is_err());
    overlap.collect().unwrap();
    overlap.begin(&decode(2, 6)).unwrap();
    overlap.collect().unwrap();
}

#[test]
fn stop_tokens_are_not_drawn_before_min_tokens() {
    let mut engine = engine();
    let token = drawn(&step(&mut engine, vec![open(0, &[])], 0, 5).unwrap());
    let banned = OpenSlot {
        stop_tokens: Arc::from([token]),
        min_tokens: 1,
        ..open(0, &[])
    };
    let other = drawn(&step(&mut engine, vec![banned], 0, 5).unwrap());
    assert_ne!(other, token);
}

/// A constraint by the length of the output: the tokens that it allows there, or none where it
/// fails.
struct ByLength(fn(usize) -> Option<Vec<TokenId>>);

struct LengthMatcher {
    length: usize,
    allowed: fn(usize) -> Option<Vec<TokenId>>,
}

impl ConstraintSource for ByLength {
    fn open(
        &self,
        _: &Constraint,
        output: &[TokenId],
    ) -> Result<Box<dyn TokenMatcher>, ConstraintError> {
        Ok(Box::new(LengthMatcher {
            length: output.len(),
            allowed: self.0,
        }))
    }
}

impl TokenMatcher for LengthMatcher {
    fn allow(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        let allowed = (self.allowed)(self.length);
        for token in allowed.ok_or_else(full)? {
            mask.words_mut()[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(())
    }

    fn push(&mut self, _: TokenId) {
        self.length += 1;
    }

    fn valid_prefix(&mut self, tokens: &[TokenId]) -> usize {
        tokens.len()
    }

    fn forced(&mut self) -> Vec<TokenId> {
        Vec::new()
    }
}

fn full() -> ConstraintError {
    ConstraintError::Unenforceable("it is full".to_owned())
}

/// Tokens that are the length modulo 10; nothing after four.
fn lengths_modulo_10(length: usize) -> Option<Vec<TokenId>> {
    (length != 4).then(|| (length as TokenId..100).step_by(10).collect())
}

/// The tokens 20 and 21, then the stop token 99.
fn two_then_stop(length: usize) -> Option<Vec<TokenId>> {
    Some(vec![[20, 21, 99][length.min(2)]])
}

fn constrained(output: &[TokenId]) -> OpenSlot {
    let mut open = open(0, output);
    Arc::make_mut(&mut open.sampling).constraint = Some(Arc::new(Constraint {
        grammar: Grammar::Regex("unread".into()),
        end: ConstraintEnd::Allowed,
    }));
    open
}

#[test]
fn a_mock_draws_what_the_constraint_allows() {
    let mut engine = engine();
    let refused = step(&mut engine, vec![constrained(&[])], 0, 5);
    assert!(
        matches!(refused, Err(EngineError::Slot(..))),
        "nothing enforces it"
    );
    engine.enforce(Arc::new(ByLength(lengths_modulo_10)));
    let mut drawn = vec![drawn(
        &step(&mut engine, vec![constrained(&[])], 0, 5).unwrap(),
    )];
    for position in 5..8 {
        drawn.push(
            engine.step(&decode(2, position)).unwrap().sampled[0]
                .1
                .token,
        );
    }
    assert_eq!(
        drawn.iter().map(|token| token % 10).collect::<Vec<_>>(),
        [0, 1, 2, 3]
    );
    let full = engine.step(&decode(2, 8));
    let slots = vec![SlotIndex(0)];
    let error = self::full();
    assert_eq!(full, Err(EngineError::Constraint { slots, error }));
    // A slot that is opened anew continues the output.
    let resumed = step(&mut engine, vec![constrained(&drawn[..2])], 0, 7).unwrap();
    assert_eq!(resumed.sampled[0].1.token, drawn[2]);
}

/// Answers with as many tokens as the prompt has, from 20 on.
struct CountingScript;

impl AnswerScript for CountingScript {
    fn answer(&self, prompt: &[TokenId]) -> Arc<[TokenId]> {
        (20..).take(prompt.len()).collect()
    }
}

fn scripted_engine() -> MockEngine {
    engine().scripted(Arc::new(CountingScript))
}

/// Draws of one slot after its first step.
fn later_draws(engine: &mut MockEngine, positions: Range<u32>) -> Vec<TokenId> {
    let drawn = |position| {
        engine.step(&decode(2, position)).unwrap().sampled[0]
            .1
            .token
    };
    positions.map(drawn).collect()
}

#[test]
fn a_script_is_answered_token_by_token_and_ended() {
    let ended = |min_tokens| OpenSlot {
        stop_tokens: Arc::from([98, 99]),
        min_tokens,
        ..open(0, &[])
    };
    let mut engine = scripted_engine();
    let first = drawn(&step(&mut engine, vec![ended(0)], 0, 5).unwrap());
    assert_eq!(first, 20);
    assert_eq!(later_draws(&mut engine, 5..11), [21, 22, 23, 24, 98, 98]);
    // A sequence goes on where it was, and does not end before its least length.
    let resumed = OpenSlot {
        output: vec![20, 21, 22, 23],
        ..ended(7)
    };
    let next = drawn(&step(&mut engine, vec![resumed], 0, 9).unwrap());
    assert_eq!(next, 24);
    let tail = later_draws(&mut engine, 9..12);
    assert!(!tail[..2].contains(&98) && tail[2] == 98, "{tail:?}");
}

#[test]
fn drafts_of_a_script_are_accepted_until_they_differ() {
    let mut engine = scripted_engine();
    let mut plan = decode(2, 5);
    drawn(&step(&mut engine, vec![open(0, &[])], 0, 5).unwrap());
    plan.segments[0].len = 4;
    plan.segments[0].drafts = vec![21, 22, 9];
    let drawn = engine.step(&plan).unwrap().sampled;
    let tokens: Vec<_> = drawn.iter().map(|(_, sampled)| sampled.token).collect();
    assert_eq!(tokens, [21, 22, 23]);
}

/// Draws of a prompt of this many tokens, and of the answer as long, until one fails.
fn constrained_draws(prompt_count: u32, stops: &[TokenId]) -> (Vec<TokenId>, EngineError) {
    let mut engine = scripted_engine();
    engine.enforce(Arc::new(ByLength(two_then_stop)));
    let asked = OpenSlot {
        prompt: (0..prompt_count).collect(),
        stop_tokens: stops.into(),
        ..constrained(&[])
    };
    let mut result = step(&mut engine, vec![asked], 0, prompt_count);
    let mut tokens = Vec::new();
    for position in prompt_count..10 {
        match result {
            Ok(result) => tokens.push(result.sampled[0].1.token),
            Err(error) => return (tokens, error),
        }
        result = engine.step(&decode(2, position));
    }
    (tokens, EngineError::Plan("none".into()))
}

#[test]
fn a_script_that_breaks_a_constraint_fails_its_request() {
    for (prompt_count, stops, expected) in [
        (1, [98, 99], &[20][..]),
        // The constraint ends with a token that is no end.
        (3, [98, 98], &[20, 21]),
    ] {
        let (tokens, error) = constrained_draws(prompt_count, &stops);
        assert_eq!(tokens, expected);
        assert!(
            matches!(error, EngineError::Slot(SlotIndex(0), _)),
            "{error}"
        );
    }
}

#[test]
fn a_script_ends_where_a_constraint_allows_only_its_end() {
    // One answer is as long as the constraint demands, the other longer.
    for prompt_count in [2, 3] {
        let (tokens, _) = constrained_draws(prompt_count, &[98, 99]);
        assert_eq!(tokens[..4], [20, 21, 99, 99]);
    }
}

#[test]
fn impossible_plans_and_blocks_are_errors() {
    let mut engine = engine();
    assert!(step(&mut engine, vec![open(0, &[])], 0, 6).is_err());
    assert!(step(&mut engine, vec![open(9, &[])], 0, 5).is_err());
    let last = |offset| BlockSpan::of_block(BlockIndex(5), offset, 4);
    engine.write_block(last(4), &[1, 2, 3, 4]).unwrap();
    let plane = KvPlane::Blocks;
    engine
        .copy_blocks(plane, &[(BlockIndex(5), BlockIndex(0))])
        .unwrap();
    let copied = engine.host_block(plane, BlockIndex(0)).unwrap();
    assert_eq!(copied[4..], [1, 2, 3, 4]);
    assert!(engine.write_block(last(5), &[0; 4]).is_err());
    assert!(engine.host_block(plane, BlockIndex(6)).is_none());
    assert!(engine.host_block(KvPlane::State, BlockIndex(0)).is_none());
}

#[test]
fn mock_state_slots_lie_behind_the_blocks() {
    let states = StateCapacity { bytes: 5, count: 3 };
    let mut engine = engine_with_states(Some(states));
    assert_eq!(engine.drafts_max(), 0);
    let plane = KvPlane::State;
    let span = |block, len| BlockSpan {
        plane,
        block: BlockIndex(block),
        offset: 0,
        len,
    };
    engine.write_block(span(2, 5), &[9; 5]).unwrap();
    engine
        .copy_blocks(plane, &[(BlockIndex(2), BlockIndex(0))])
        .unwrap();
    let read = |block| engine.host_block(plane, BlockIndex(block));
    assert_eq!([0, 1, 2].map(|slot| read(slot).unwrap()[4]), [9, 0, 9]);
    assert!(read(3).is_none() && engine.read_block(span(0, 6), &mut [0; 6]).is_err());
    for block in 0..6 {
        let bytes = engine.host_block(KvPlane::Blocks, BlockIndex(block));
        assert_eq!(bytes.unwrap(), [0; 8]);
    }
}
