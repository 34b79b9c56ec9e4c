//! A random schedule, of a scheduler that receives each step's result one step late.
//!
//! Owns: the plans, and the results of the same steps run one at a time.
//! Never: compares.
//! Invariant: an engine with [`Overlap`](crate::Overlap) accepts every plan while the one before it
//! is in flight, and any engine accepts it afterwards.

use super::residues::residues;
use super::rng::ConformanceRng;
use super::sequence::BLOCK_TOKENS;
use super::sequence::with_windows;
use crate::{Engine, EngineLimits};
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, SamplingParams, Segment, SlotIndex, StepId, StepPlan,
    StepResult, TokenId,
};
use std::sync::Arc;

const SLOTS: u32 = 5;
/// Blocks of one sequence: 64 tokens.
const BLOCKS_PER_SEQUENCE: u32 = 4;
/// Longest prompt and output of a sequence; the last token drawn has no KV.
const TOKENS_MAX: usize = (BLOCKS_PER_SEQUENCE * BLOCK_TOKENS) as usize;
/// Tables per slot: its next sequence has other blocks than its last one, which may still be
/// running.
const TABLES_PER_SLOT: u32 = 2;

/// Limits that the engine must be built with.
pub(super) const LIMITS: EngineLimits = EngineLimits {
    block_tokens: BLOCK_TOKENS,
    blocks_count: SLOTS * TABLES_PER_SLOT * BLOCKS_PER_SEQUENCE + 1,
    states_count: 0,
    slots_count: SLOTS,
    step_tokens_max: 48,
    windows_count: 0,
};

/// A block that no sequence uses.
pub(super) const SPARE: BlockIndex = BlockIndex(SLOTS * TABLES_PER_SLOT * BLOCKS_PER_SEQUENCE);

/// Plans with their results.
#[derive(Debug)]
pub(super) struct RandomSchedule {
    pub(super) steps: Vec<(StepPlan, StepResult)>,
    /// Number of segments whose last token is drawn by the step before.
    pub(super) fed_count: usize,
    /// Number of slots reopened while the step before still drew for their old sequence.
    pub(super) reopened_count: usize,
}

#[derive(Debug)]
struct ScheduledSequence {
    serial: u64,
    /// First block of the sequence's table.
    first_block: u32,
    sampling: Arc<SamplingParams>,
    stop_tokens: Arc<[TokenId]>,
    min_tokens: u32,
    prompt: Arc<[TokenId]>,
    output: Vec<TokenId>,
    output_max: usize,
    /// Number of tokens that have KV.
    done: usize,
    is_open: bool,
    /// Whether the last step drew a token that the scheduler has not received yet.
    has_pending_token: bool,
}

impl ScheduledSequence {
    /// Number of tokens that exist when the next step begins.
    fn tokens_count(&self) -> usize {
        self.prompt.len() + self.output.len() + usize::from(self.has_pending_token)
    }

    fn is_over(&self) -> bool {
        let last = self.output.last();
        self.output.len() >= self.output_max
            || last.is_some_and(|token| {
                self.output.len() > self.min_tokens as usize && self.stop_tokens.contains(token)
            })
    }
}

/// A scheduler that receives results one step late.
struct RandomScheduler {
    rng: ConformanceRng,
    vocab: u64,
    sequences: Vec<Option<ScheduledSequence>>,
    /// Index of the table that each slot used last, `(slots)`.
    tables: Vec<u32>,
    /// Slots whose sequence ended before the last step, which drew for it nevertheless.
    ended: Vec<SlotIndex>,
    serial: u64,
}

impl RandomSchedule {
    /// Plans `steps_count` steps; `engine` runs each before the next is planned.
    pub(super) fn new(
        engine: &mut dyn Engine,
        seed: u64,
        steps_count: usize,
    ) -> Result<Self, String> {
        let mut scheduler = RandomScheduler {
            rng: ConformanceRng::new(seed),
            vocab: u64::from(engine.describe().vocab_size),
            sequences: (0..SLOTS).map(|_| None).collect(),
            tables: vec![0; SLOTS as usize],
            ended: Vec::new(),
            serial: 0,
        };
        let mut schedule = Self {
            steps: Vec::new(),
            fed_count: 0,
            reopened_count: 0,
        };
        let mut drawn_before: Vec<(u64, SlotIndex, TokenId)> = Vec::new();
        for number in 0..steps_count {
            let mut plan = StepPlan {
                step: StepId(number as u64),
                ..StepPlan::default()
            };
            scheduler.fill(&mut plan, &mut schedule);
            let plan = with_windows(engine, &plan);
            let result = engine.step(&plan);
            let result = result.map_err(|error| format!("step {number}: {error}"))?;
            // The tokens of the step before are received only now, after the next step was planned
            // and run.
            scheduler.append_drawn(&drawn_before);
            let serial = |slot: SlotIndex| {
                let entry = scheduler.sequences[slot.0 as usize].as_ref();
                entry.map_or(u64::MAX, |sequence| sequence.serial)
            };
            let sampled = result.sampled.iter();
            drawn_before = sampled
                .map(|(slot, sampled)| (serial(*slot), *slot, sampled.token))
                .collect();
            scheduler.end_finished();
            schedule.steps.push((plan, result));
        }
        Ok(schedule)
    }
}

impl RandomScheduler {
    /// Fills the plan of the next step.
    fn fill(&mut self, plan: &mut StepPlan, schedule: &mut RandomSchedule) {
        let mut rows_left = LIMITS.step_tokens_max as usize;
        for slot in 0..SLOTS {
            self.fill_slot(slot);
            let Some(mut sequence) = self.sequences[slot as usize].take() else {
                continue;
            };
            self.preempt(slot, &mut sequence);
            if let Some(segment) = self.segment(slot, &mut sequence, rows_left) {
                rows_left -= segment.len as usize;
                let end = (segment.position + segment.len) as usize;
                schedule.fed_count +=
                    usize::from(sequence.has_pending_token && end == sequence.tokens_count());
                sequence.done = end;
                if !sequence.is_open {
                    let was_drawn_for = self.ended.contains(&SlotIndex(slot));
                    schedule.reopened_count += usize::from(was_drawn_for);
                    plan.opens.push(open(slot, &sequence));
                    sequence.is_open = true;
                }
                plan.segments.push(segment);
            }
            self.sequences[slot as usize] = Some(sequence);
        }
        // Results must not depend on the order of segments.
        if self.rng.chance(0.5) {
            plan.segments.reverse();
        }
        // The tokens of the step before are received next; those of this step stay pending.
        for (slot, entry) in (0..).map(SlotIndex).zip(&mut self.sequences) {
            if let Some(sequence) = entry {
                let drawn = |segment: &Segment| segment.slot == slot && segment.logits.samples();
                sequence.has_pending_token = plan.segments.iter().any(drawn);
            }
        }
        self.ended.clear();
    }

    /// Gives a free slot to a new sequence, with a probability of 80 %.
    fn fill_slot(&mut self, slot: u32) {
        if self.sequences[slot as usize].is_some() || self.rng.chance(0.2) {
            return;
        }
        self.serial += 1;
        let rng = &mut self.rng;
        let prompt: Vec<TokenId> = (0..1 + rng.below(40))
            .map(|_| rng.below(self.vocab) as TokenId)
            .collect();
        let stop_tokens: Vec<TokenId> = if rng.chance(0.4) {
            (0..self.vocab as TokenId)
                .filter(|_| rng.chance(0.1))
                .collect()
        } else {
            Vec::new()
        };
        let sampling = sampling(rng, self.vocab);
        let min_tokens = rng.below(4) as u32;
        let output_most = (TOKENS_MAX - prompt.len()).min(24) as u64;
        let output_max = 1 + rng.below(output_most - 1) as usize;
        self.sequences[slot as usize] = Some(ScheduledSequence {
            serial: self.serial,
            first_block: self.other_table(slot),
            sampling: Arc::new(sampling),
            stop_tokens: stop_tokens.into(),
            min_tokens,
            output_max,
            prompt: prompt.into(),
            output: Vec::new(),
            done: 0,
            is_open: false,
            has_pending_token: false,
        });
    }

    /// Rarely preempts a sequence: it loses its KV, and reopens its slot with its tokens so far.
    fn preempt(&mut self, slot: u32, sequence: &mut ScheduledSequence) {
        if sequence.done > 0 && !sequence.has_pending_token && self.rng.chance(0.03) {
            sequence.done = 0;
            sequence.is_open = false;
            sequence.first_block = self.other_table(slot);
        }
    }

    /// Switches to the slot's other table; returns its first block.
    fn other_table(&mut self, slot: u32) -> u32 {
        let table = &mut self.tables[slot as usize];
        *table = (*table + 1) % TABLES_PER_SLOT;
        (slot * TABLES_PER_SLOT + *table) * BLOCKS_PER_SEQUENCE
    }

    fn segment(
        &mut self,
        slot: u32,
        sequence: &mut ScheduledSequence,
        rows_left: usize,
    ) -> Option<Segment> {
        let tokens_count = sequence.tokens_count();
        let left = tokens_count - sequence.done;
        let must_wait = sequence.has_pending_token && !sequence.sampling.can_draw_ahead();
        if must_wait || left == 0 || rows_left == 0 || self.rng.chance(0.15) {
            return None;
        }
        let len = match left {
            1 => 1,
            _ => 1 + self.rng.below(left.min(rows_left) as u64) as usize,
        };
        let samples = len == left;
        let is_scored = sequence.sampling.prompt_logprobs.is_some() && !sequence.has_pending_token;
        let first = sequence.first_block;
        Some(Segment {
            slot: SlotIndex(slot),
            position: sequence.done as u32,
            len: len as u32,
            blocks: (first..first + BLOCKS_PER_SEQUENCE)
                .map(BlockIndex)
                .collect(),
            drafts: Vec::new(),
            logits: match (is_scored, samples) {
                (false, false) => LogitsWanted::No,
                (false, true) => LogitsWanted::Sample,
                (true, false) => LogitsWanted::Score,
                (true, true) => LogitsWanted::ScoreAndSample,
            },
            state: None,
            window: None,
        })
    }

    /// Appends the tokens of the step before the last one to their sequences.
    fn append_drawn(&mut self, drawn: &[(u64, SlotIndex, TokenId)]) {
        for (serial, slot, token) in drawn {
            let entry = self.sequences[slot.0 as usize].as_mut();
            if let Some(sequence) = entry.filter(|sequence| sequence.serial == *serial) {
                sequence.output.push(*token);
            }
        }
    }

    /// Removes sequences that are known to have ended, though the last step may have drawn once
    /// more for them.
    fn end_finished(&mut self) {
        for (slot, entry) in (0..).zip(&mut self.sequences) {
            if let Some(sequence) = entry.take_if(|sequence| sequence.is_over())
                && sequence.has_pending_token
            {
                self.ended.push(SlotIndex(slot));
            }
        }
    }
}

fn open(slot: u32, sequence: &ScheduledSequence) -> OpenSlot {
    OpenSlot {
        slot: SlotIndex(slot),
        sampling: Arc::clone(&sequence.sampling),
        prompt: Arc::clone(&sequence.prompt),
        output: sequence.output.clone(),
        stop_tokens: Arc::clone(&sequence.stop_tokens),
        min_tokens: sequence.min_tokens,
        adapter: None,
    }
}

/// Mostly rules by which a device can draw ahead; some depend on every earlier token, on scores, or
/// on a constraint.
fn sampling(rng: &mut ConformanceRng, vocab: u64) -> SamplingParams {
    let plain = SamplingParams {
        seed: rng.next(),
        ..SamplingParams::greedy()
    };
    let hot = SamplingParams {
        temperature: 0.3 + 1.2 * rng.share(),
        ..plain.clone()
    };
    match rng.below(9) {
        0 => plain,
        1 => SamplingParams { top_k: 7, ..hot },
        2 => SamplingParams { top_p: 0.8, ..hot },
        3 => SamplingParams {
            min_p: 0.05,
            top_n_sigma: 2.5,
            ..hot
        },
        4 => SamplingParams {
            logit_bias: vec![(rng.below(vocab) as TokenId, 3.0)],
            ..hot
        },
        5 => SamplingParams {
            repetition_penalty: 1.2,
            ..hot
        },
        6 if rng.chance(0.5) => SamplingParams {
            logprobs: Some(2),
            prompt_logprobs: Some(1),
            ..hot
        },
        7 => SamplingParams {
            constraint: residues(),
            ..hot
        },
        _ => hot,
    }
}
