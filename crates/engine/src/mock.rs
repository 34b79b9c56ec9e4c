//! An engine that computes nothing.
//!
//! Owns: slots' histories, the tokens that are invented or follow a script, and a pool of blocks
//! whose bytes can be sent.
//! Never: takes time: its caller decides the time of a step. Never: reads or writes a block or a
//! state, so that their contents change no token.
//! Invariant: a token is a function of the sequence's seed and prompt, the token's position, and
//! the tokens that a constraint allows there, so that every path through a fleet gives the same
//! tokens; all tokens are equally likely, and have that score. A vector is a
//! function of the prompt alone.

use crate::constraint::{ConstraintSource, SlotConstraint, TokenMask};
use crate::ops::PoolPlane;
use crate::{BlockSpan, Engine, EngineDescription, EngineError, Overlap, STEPS_IN_FLIGHT_MAX};
use cleave_domain::{
    BlockIndex, KvPlane, LogitsWanted, OpenSlot, Pooling, SampledToken, Segment, SlotIndex,
    StepPlan, StepResult, TokenId, TokenScores,
};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Drafts per segment, as in engines that compute.
const DRAFTS_MAX: u32 = 16;

/// The answers that a mock engine gives instead of invented tokens.
pub trait AnswerScript: Send + Sync {
    /// The answer to a prompt, `[tokens]`, without the token that ends it. It depends on the prompt
    /// alone, so that a sequence that is opened again elsewhere goes on with the same answer.
    fn answer(&self, prompt: &[TokenId]) -> Arc<[TokenId]>;
}
/// Elements of a mock's hidden states.
pub const MOCK_HIDDEN: usize = 16;

/// An engine that invents tokens instead of computing them.
pub struct MockEngine {
    description: EngineDescription,
    /// Bytes of the blocks, `[blocks_count][block_bytes]`, then of the state slots,
    /// `[count][bytes]`.
    pool: Vec<u8>,
    /// `[slots_count]`; a slot's output grows with every drawn token.
    slots: Vec<Option<MockSlot>>,
    constraints: Option<Arc<dyn ConstraintSource>>,
    script: Option<Arc<dyn AnswerScript>>,
    /// Results of steps that were begun and not collected, oldest first; `None` if steps do not
    /// overlap.
    uncollected: Option<VecDeque<StepResult>>,
}

/// An opened slot with its output so far.
#[derive(Debug)]
struct MockSlot {
    open: OpenSlot,
    constraint: Option<SlotConstraint>,
    /// The whole output, `[tokens]`, if a script has it.
    answer: Option<Arc<[TokenId]>>,
}

impl MockEngine {
    /// An engine with this description, and a pool of that capacity.
    ///
    /// # Errors
    /// `Device` if there is no memory for the pool.
    pub fn new(description: EngineDescription) -> Result<Self, EngineError> {
        let capacity = &description.capacity;
        let states = capacity.states.map_or(0, |states| {
            u64::from(states.count) * u64::from(states.bytes)
        });
        let bytes = u64::from(capacity.blocks_count) * u64::from(capacity.block_bytes) + states;
        let no_memory = || EngineError::Device(format!("no memory for {bytes} bytes of blocks"));
        let bytes = usize::try_from(bytes).map_err(|_| no_memory())?;
        let mut pool = Vec::new();
        pool.try_reserve_exact(bytes).map_err(|_| no_memory())?;
        pool.resize(bytes, 0);
        let slots = std::iter::repeat_with(|| None).take(capacity.slots_count as usize);
        Ok(Self {
            slots: slots.collect(),
            constraints: None,
            script: None,
            pool,
            description,
            uncollected: None,
        })
    }

    /// Lets a step begin before the last one was collected.
    pub fn overlapping(self) -> Self {
        let begun = Some(VecDeque::new());
        Self {
            uncollected: begun,
            ..self
        }
    }

    /// Answers with the tokens of a script.
    pub fn scripted(self, script: Arc<dyn AnswerScript>) -> Self {
        let script = Some(script);
        Self { script, ..self }
    }

    /// Whether the segment's draw depends on a token of an uncollected step, which the host does
    /// not know.
    fn lacks_last_token(&self, segment: &Segment) -> bool {
        let results = self.uncollected.iter().flatten();
        let mut unknown = results.flat_map(|result| &result.sampled);
        let entry = self.slots.get(segment.slot.0 as usize);
        let open = entry.and_then(Option::as_ref);
        open.is_some_and(|slot| !slot.open.sampling.can_draw_ahead())
            && unknown.any(|(slot, _)| *slot == segment.slot)
    }

    fn open(&mut self, open: &OpenSlot) -> Result<(), EngineError> {
        let constraint = match (&open.sampling.constraint, &self.constraints) {
            (None, _) => None,
            (Some(_), None) => return Err(slot_error(open.slot, "no constraint is enforced")),
            (Some(constraint), Some(source)) => {
                let matcher = source.open(constraint, &open.output);
                let refused = |error: crate::ConstraintError| slot_error(open.slot, &error.0);
                Some(SlotConstraint::new(matcher.map_err(refused)?))
            }
        };
        let entry = self.slots.get_mut(open.slot.0 as usize);
        let entry = entry.ok_or_else(|| slot_error(open.slot, "no such slot"))?;
        let script = self.script.as_ref();
        *entry = Some(MockSlot {
            open: open.clone(),
            constraint,
            answer: script.map(|script| script.answer(&open.prompt)),
        });
        Ok(())
    }

    fn run(&mut self, segment: &Segment, result: &mut StepResult) -> Result<(), EngineError> {
        let slot = segment.slot;
        let vocab_size = self.description.vocab_size;
        let entry = self.slots.get_mut(slot.0 as usize);
        let mock_slot = entry.and_then(Option::as_mut);
        let mock_slot = mock_slot.ok_or_else(|| slot_error(slot, "was never opened"))?;
        let open = &mock_slot.open;
        let tokens_count = open.prompt.len() + open.output.len();
        let end = segment.position as usize + segment.history_len() as usize;
        if segment.history_len() == 0 || end > tokens_count {
            let problem = format!(
                "{}+{} of {tokens_count} tokens",
                segment.position, segment.len
            );
            return Err(slot_error(slot, &problem));
        }
        let scores = match segment.logits {
            LogitsWanted::Score | LogitsWanted::ScoreAndSample => open.sampling.prompt_logprobs,
            LogitsWanted::No | LogitsWanted::Sample | LogitsWanted::Pool => None,
        };
        if let Some(top) = scores {
            let history = open.prompt.iter().chain(&open.output);
            let scored = history
                .skip(segment.position as usize + 1)
                .take(segment.len as usize);
            let scored = scored.map(|token| sampled(*token, Some(top), vocab_size));
            result.prompt_scores.push((slot, scored.collect()));
        }
        if !segment.logits.samples() {
            return Ok(());
        }
        let mut drafts = segment.drafts.iter();
        for position in end as u32.. {
            let token = mock_slot.draw(position, vocab_size)?;
            let drawn = sampled(token, mock_slot.open.sampling.logprobs, vocab_size);
            result.sampled.push((slot, drawn));
            if drafts.next() != Some(&token) {
                break;
            }
        }
        Ok(())
    }

    /// The values of a segment that pools, of hidden states that depend on all tokens before.
    fn pool(&self, plan: &StepPlan, segment: &Segment) -> Result<Arc<[f64]>, EngineError> {
        let slot = segment.slot;
        let wanted = plan.poolings.iter().find(|wanted| wanted.slot == slot);
        let wanted = wanted.ok_or_else(|| slot_error(slot, "pools nothing"))?;
        let entry = self.slots.get(slot.0 as usize).and_then(Option::as_ref);
        let open = &entry
            .ok_or_else(|| slot_error(slot, "was never opened"))?
            .open;
        let (first, len) = (segment.position as usize, segment.len as usize);
        let mut prefix = 0;
        let hidden = open.prompt[..first + len].iter().map(|token| {
            prefix = mix(prefix ^ u64::from(*token));
            prefix
        });
        let hidden: Vec<u64> = hidden.collect();
        let element = |state: u64, at: u64| mix(state ^ mix(at)) as i32 as f64 / 2f64.powi(31);
        let row = |state: u64| (0..MOCK_HIDDEN as u64).map(move |at| element(state, at));
        Ok(match &wanted.pooling {
            Pooling::LastToken => row(hidden[first + len - 1]).collect(),
            Pooling::FirstToken => row(hidden[0]).collect(),
            Pooling::Logits(tokens) => {
                let last = hidden[first + len - 1];
                let logit = |token: &TokenId| 4.0 * element(last, u64::from(*token));
                tokens.iter().map(logit).collect()
            }
            Pooling::Mean => {
                let mut sum = match &wanted.sum {
                    Some(sum) => sum.to_vec(),
                    None => vec![0.0; MOCK_HIDDEN],
                };
                for state in &hidden[first..] {
                    sum.iter_mut()
                        .zip(row(*state))
                        .for_each(|(sum, x)| *sum += x);
                }
                sum.into()
            }
        })
    }

    /// Number of blocks or slots of a plane, and their bytes.
    fn plane(&self, plane: KvPlane) -> PoolPlane {
        let capacity = &self.description.capacity;
        match plane {
            KvPlane::Blocks => PoolPlane {
                count: capacity.blocks_count as usize,
                bytes: capacity.block_bytes as usize,
            },
            KvPlane::State => capacity
                .states
                .map_or(PoolPlane::default(), |states| PoolPlane {
                    count: states.count as usize,
                    bytes: states.bytes as usize,
                }),
        }
    }

    /// Byte range of a part of a block or slot in the pool.
    fn range(&self, span: BlockSpan) -> Result<Range<usize>, EngineError> {
        let range = self.plane(span.plane).range(&span);
        let outside = || EngineError::Plan(format!("{span:?} is outside the pool"));
        let range = range.ok_or_else(outside)?;
        let states = self.plane(KvPlane::State);
        let first = match span.plane {
            KvPlane::Blocks => 0,
            KvPlane::State => self.pool.len() - states.count * states.bytes,
        };
        Ok(first + range.start..first + range.end)
    }

    /// Byte range of a whole block or slot in the pool.
    fn whole(&self, plane: KvPlane, block: BlockIndex) -> Result<Range<usize>, EngineError> {
        self.range(BlockSpan {
            plane,
            block,
            offset: 0,
            len: self.plane(plane).bytes,
        })
    }
}

impl Engine for MockEngine {
    fn describe(&self) -> &EngineDescription {
        &self.description
    }

    fn enforce(&mut self, constraints: Arc<dyn ConstraintSource>) {
        self.constraints = Some(constraints);
    }

    fn drafts_max(&self) -> u32 {
        if self.uncollected.is_some() || self.description.capacity.states.is_some() {
            0
        } else {
            DRAFTS_MAX
        }
    }

    fn overlap(&mut self) -> Option<&mut dyn Overlap> {
        self.uncollected
            .is_some()
            .then_some(self as &mut dyn Overlap)
    }

    fn step(&mut self, plan: &StepPlan) -> Result<StepResult, EngineError> {
        for open in &plan.opens {
            self.open(open)?;
        }
        let mut result = StepResult {
            step: plan.step,
            ..StepResult::default()
        };
        for segment in &plan.segments {
            self.run(segment, &mut result)?;
            if segment.logits == LogitsWanted::Pool {
                let pooled = self.pool(plan, segment)?;
                result.pooled.push((segment.slot, pooled));
            }
        }
        Ok(result)
    }

    fn read_block(&self, span: BlockSpan, out: &mut [u8]) -> Result<(), EngineError> {
        let range = self.range(span)?;
        out.copy_from_slice(&self.pool[range]);
        Ok(())
    }

    fn host_block(&self, plane: KvPlane, block: BlockIndex) -> Option<&[u8]> {
        Some(&self.pool[self.whole(plane, block).ok()?])
    }

    fn write_block(&mut self, span: BlockSpan, bytes: &[u8]) -> Result<(), EngineError> {
        let range = self.range(span)?;
        self.pool[range].copy_from_slice(bytes);
        Ok(())
    }

    fn copy_blocks(
        &mut self,
        plane: KvPlane,
        pairs: &[(BlockIndex, BlockIndex)],
    ) -> Result<(), EngineError> {
        for (from, to) in pairs {
            let from = self.whole(plane, *from)?;
            let to = self.whole(plane, *to)?;
            self.pool.copy_within(from, to.start);
        }
        Ok(())
    }
}

impl Overlap for MockEngine {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        if self.uncollected.iter().flatten().count() >= STEPS_IN_FLIGHT_MAX {
            let problem = format!("{}: as many as can be are under way", plan.step);
            return Err(EngineError::Plan(problem));
        }
        if let Some(segment) = plan.segments.iter().find(|s| self.lacks_last_token(s)) {
            return Err(slot_error(segment.slot, "needs the token under way"));
        }
        let result = self.step(plan)?;
        self.uncollected.get_or_insert_default().push_back(result);
        Ok(())
    }

    fn is_done(&mut self) -> bool {
        true
    }

    fn collect(&mut self) -> Result<StepResult, EngineError> {
        let begun = self.uncollected.as_mut().and_then(VecDeque::pop_front);
        Ok(begun.expect("a step was begun and not collected"))
    }
}

fn slot_error(slot: SlotIndex, problem: &str) -> EngineError {
    EngineError::Slot(slot, problem.to_owned())
}

impl MockSlot {
    /// Draws the token at `position`.
    ///
    /// # Errors
    /// If the constraint fails, or does not allow what a script says.
    fn draw(&mut self, position: u32, vocab_size: u32) -> Result<TokenId, EngineError> {
        let open = &self.open;
        let token = match &mut self.constraint {
            None => scripted_token(self.answer.as_deref(), open, |_| true)
                .unwrap_or_else(|| token(open, position, vocab_size)),
            Some(constraint) => {
                let failed = || EngineError::Constraint(vec![open.slot]);
                let mask = constraint.mask(vocab_size as usize).map_err(|_| failed())?;
                let scripted = constrained_token(self.answer.as_deref(), open, mask, vocab_size)?;
                let token = scripted.or_else(|| allowed_token(open, mask, position, vocab_size));
                let token = token.ok_or_else(failed)?;
                constraint.push(token);
                token
            }
        };
        self.open.output.push(token);
        Ok(token)
    }
}

/// The next token of a script's answer, or behind its end a stop token, one that is allowed if
/// there is one. `None` without a script, and where no stop token may end the answer: it goes on
/// with invented tokens, as a model's would.
fn scripted_token(
    answer: Option<&[TokenId]>,
    open: &OpenSlot,
    is_allowed: impl Fn(TokenId) -> bool,
) -> Option<TokenId> {
    let answer = answer?;
    if let Some(token) = answer.get(open.output.len()) {
        return Some(*token);
    }
    let stops = open.stop_tokens.iter().copied();
    let mut stops = stops.filter(|token| !banned(open).contains(token));
    let first = stops.next();
    let allowed = first
        .into_iter()
        .chain(stops)
        .find(|token| is_allowed(*token));
    allowed.or(first)
}

/// The next token of a script's answer, or its end where a constraint allows nothing else.
///
/// # Errors
/// If the constraint allows other tokens only.
fn constrained_token(
    answer: Option<&[TokenId]>,
    open: &OpenSlot,
    mask: &TokenMask,
    vocab_size: u32,
) -> Result<Option<TokenId>, EngineError> {
    let scripted = scripted_token(answer, open, |token| mask.allows(token));
    if scripted.is_none_or(|token| mask.allows(token)) {
        return Ok(scripted);
    }
    let stops = &open.stop_tokens;
    let end = stops.iter().find(|token| mask.allows(**token)).copied();
    let end = end.filter(|_| mask.is_within(stops, vocab_size));
    let problem = "the script's answer is not one that the request's constraint allows";
    end.map(Some).ok_or_else(|| slot_error(open.slot, problem))
}

/// The token at `position` among those that a constraint allows; stop tokens that are banned only
/// where nothing else is allowed.
fn allowed_token(
    open: &OpenSlot,
    mask: &TokenMask,
    position: u32,
    vocab_size: u32,
) -> Option<TokenId> {
    let all: Vec<TokenId> = mask.tokens(vocab_size).collect();
    let banned = banned(open);
    let mut unbanned = all.clone();
    unbanned.retain(|token| !banned.contains(token));
    let choice = if unbanned.is_empty() { all } else { unbanned };
    let throw = mix(open.sampling.seed ^ mix(u64::from(position) + 1));
    let place = throw.checked_rem(choice.len() as u64)?;
    choice.get(place as usize).copied()
}

/// Tokens that may not be drawn yet.
fn banned(open: &OpenSlot) -> &[TokenId] {
    if open.output.len() < open.min_tokens as usize {
        &open.stop_tokens
    } else {
        &[]
    }
}

/// The token at `position`: the first of a chain of hashes that is not banned.
fn token(open: &OpenSlot, position: u32, vocab_size: u32) -> TokenId {
    let banned = banned(open);
    let mut throw = mix(open.sampling.seed ^ mix(u64::from(position) + 1));
    // If the whole vocabulary is banned there is nothing to draw, and any token will do.
    for _ in 0..64 {
        let token = (throw % u64::from(vocab_size.max(1))) as TokenId;
        if !banned.contains(&token) {
            return token;
        }
        throw = mix(throw);
    }
    0
}

/// A drawn token with the scores of a flat distribution: all logits are 0.
fn sampled(token: TokenId, top: Option<u32>, vocab_size: u32) -> SampledToken {
    let scores = top.map(|top| TokenScores {
        normalizer: (vocab_size.max(1) as f32).ln(),
        chosen: 0.0,
        top: (0..top.min(vocab_size)).map(|token| (token, 0.0)).collect(),
    });
    SampledToken { token, scores }
}

fn mix(value: u64) -> u64 {
    cleave_domain::SplitMix64::hash(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constraint::{ConstraintError, TokenMatcher};
    use cleave_domain::{
        Capacity, Constraint, ConstraintEnd, Fingerprint, Grammar, SamplingParams, StateCapacity,
        StepId,
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

    /// Allows tokens that are the length of the output modulo 10, and fails after four.
    struct ByLength;

    struct LengthMatcher(usize);

    impl ConstraintSource for ByLength {
        fn open(
            &self,
            _: &Constraint,
            output: &[TokenId],
        ) -> Result<Box<dyn TokenMatcher>, ConstraintError> {
            Ok(Box::new(LengthMatcher(output.len())))
        }
    }

    impl TokenMatcher for LengthMatcher {
        fn allow(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
            if self.0 == 4 {
                return Err(ConstraintError("it is full".to_owned()));
            }
            for token in (self.0..100).step_by(10) {
                mask.words_mut()[token / 32] |= 1 << (token % 32);
            }
            Ok(())
        }

        fn push(&mut self, _: TokenId) {
            self.0 += 1;
        }

        fn valid_prefix(&mut self, tokens: &[TokenId]) -> usize {
            tokens.len()
        }

        fn forced(&mut self) -> Vec<TokenId> {
            Vec::new()
        }
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
        engine.enforce(Arc::new(ByLength));
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
        assert_eq!(full, Err(EngineError::Constraint(vec![SlotIndex(0)])));
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

    /// Allows the tokens 20 and 21, then the stop token 99.
    struct TwoThenStop;

    impl ConstraintSource for TwoThenStop {
        fn open(
            &self,
            _: &Constraint,
            output: &[TokenId],
        ) -> Result<Box<dyn TokenMatcher>, ConstraintError> {
            Ok(Box::new(TwoThenStopMatcher(output.len())))
        }
    }

    struct TwoThenStopMatcher(usize);

    impl TokenMatcher for TwoThenStopMatcher {
        fn allow(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
            let token = [20, 21, 99][self.0.min(2)];
            mask.words_mut()[token / 32] |= 1 << (token % 32);
            Ok(())
        }

        fn push(&mut self, _: TokenId) {
            self.0 += 1;
        }

        fn valid_prefix(&mut self, tokens: &[TokenId]) -> usize {
            tokens.len()
        }

        fn forced(&mut self) -> Vec<TokenId> {
            Vec::new()
        }
    }

    /// Draws of a prompt of this many tokens, and of the answer as long, until one fails.
    fn constrained_draws(prompt_count: u32, stops: &[TokenId]) -> (Vec<TokenId>, EngineError) {
        let mut engine = scripted_engine();
        engine.enforce(Arc::new(TwoThenStop));
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
}
