//! An engine that computes nothing.
//!
//! Owns: slots' histories, the tokens that are invented or follow a script, and a pool of blocks
//! whose bytes can be sent.
//! Never: takes time: its caller decides the time of a step. Never: reads or writes a block or a
//! state, so that their contents change no token.
//! Invariant: a token is a function of the sequence's seed and prompt, the token's position, and
//! the tokens that a constraint allows there, so that every path through a fleet gives the same
//! tokens; all tokens are equally likely, and have that score. A vector is a function of the prompt
//! alone.

mod draw;
#[cfg(test)]
mod tests;

use crate::constraint::{ConstraintSource, SlotConstraint};
use crate::ops::PoolPlane;
use crate::{BlockSpan, Engine, EngineDescription, EngineError, Overlap, STEPS_IN_FLIGHT_MAX};
use cleave_domain::{
    BlockIndex, KvPlane, LogitsWanted, OpenSlot, Pooling, Segment, StepPlan, StepResult, TokenId,
};
use draw::{mix, sampled, slot_error};
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
    /// Bytes of the blocks, `[blocks_count][block_bytes]`, then of the window plane's blocks, then
    /// of the state slots, `[count][bytes]`.
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
        let windows = capacity.windows.map_or(0, |windows| {
            u64::from(windows.count) * u64::from(windows.bytes)
        });
        let blocks = u64::from(capacity.blocks_count) * u64::from(capacity.block_bytes);
        let bytes = blocks + windows + states;
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
                let slots = vec![open.slot];
                let matcher = matcher.map_err(|error| EngineError::Constraint { slots, error })?;
                Some(SlotConstraint::new(matcher))
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
            KvPlane::Window => capacity
                .windows
                .map_or(PoolPlane::default(), |windows| PoolPlane {
                    count: windows.count as usize,
                    bytes: windows.bytes as usize,
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
            KvPlane::Window => {
                let blocks = self.plane(KvPlane::Blocks);
                blocks.count * blocks.bytes
            }
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
