//! A random schedule, as a scheduler makes it that always learns of a step one step late.
//!
//! Owns: which sequences are in which step, and what the engine drew when it ran the steps one at a time.
//! Never: compares.
//! Invariant: every plan is one that an engine with [`Overlap`](crate::Overlap) takes while the plan before it is
//! under way, and that any engine takes after it.

use super::dice::Dice;
use super::sequence::BLOCK_TOKENS;
use crate::{Engine, EngineLimits};
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, Sampling, Segment, SlotIndex, StepId, StepPlan, StepResult,
    TokenId,
};
use std::sync::Arc;

const SLOTS: u32 = 5;
/// Blocks of one sequence: 64 tokens.
const TABLE: u32 = 4;
/// Prompt and output of a sequence at most; the last draw has no KV.
const TOKENS_MAX: usize = (TABLE * BLOCK_TOKENS) as usize;
/// A slot's next sequence has other blocks than its last one, which may be running still.
const TABLES_EACH: u32 = 2;

/// What the engine must be built with.
pub(super) const LIMITS: EngineLimits = EngineLimits {
    block_tokens: BLOCK_TOKENS,
    blocks_count: SLOTS * TABLES_EACH * TABLE + 1,
    slots_count: SLOTS,
    step_tokens_max: 48,
};

/// A block that no sequence has.
pub(super) const SPARE: BlockIndex = BlockIndex(SLOTS * TABLES_EACH * TABLE);

/// Plans with what came of them.
#[derive(Debug)]
pub(super) struct Schedule {
    pub(super) steps: Vec<(StepPlan, StepResult)>,
    /// Segments whose last token the step before draws.
    pub(super) ahead_count: usize,
    /// Slots opened while the step before still drew for their last sequence.
    pub(super) reopened_count: usize,
}

/// A sequence in its slot.
#[derive(Debug)]
struct Seated {
    serial: u64,
    /// Its first block.
    table: u32,
    sampling: Arc<Sampling>,
    stop_tokens: Arc<[TokenId]>,
    min_tokens: u32,
    prompt: Arc<[TokenId]>,
    output: Vec<TokenId>,
    output_max: usize,
    /// Tokens with KV.
    done: usize,
    is_open: bool,
    /// The last step drew for it, which it has not learnt.
    is_untold: bool,
}

impl Seated {
    /// Tokens there are when the next step begins.
    fn known(&self) -> usize {
        self.prompt.len() + self.output.len() + usize::from(self.is_untold)
    }

    fn is_over(&self) -> bool {
        let last = self.output.last();
        self.output.len() >= self.output_max
            || last.is_some_and(|token| {
                self.output.len() > self.min_tokens as usize && self.stop_tokens.contains(token)
            })
    }
}

/// The scheduler.
struct Scheduler {
    dice: Dice,
    vocab: u64,
    seats: Vec<Option<Seated>>,
    /// Which of a slot's tables was given out last, `(slots)`.
    tables: Vec<u32>,
    /// Slots whose sequence ended before the last step, which nevertheless drew for it.
    ended: Vec<SlotIndex>,
    serial: u64,
}

impl Schedule {
    /// Makes so many steps, each run by `engine` before the next is made.
    pub(super) fn new(
        engine: &mut dyn Engine,
        seed: u64,
        steps_count: usize,
    ) -> Result<Self, String> {
        let mut scheduler = Scheduler {
            dice: Dice(seed),
            vocab: u64::from(engine.describe().vocab_size),
            seats: (0..SLOTS).map(|_| None).collect(),
            tables: vec![0; SLOTS as usize],
            ended: Vec::new(),
            serial: 0,
        };
        let mut schedule = Self {
            steps: Vec::new(),
            ahead_count: 0,
            reopened_count: 0,
        };
        let mut untold: Vec<(u64, SlotIndex, TokenId)> = Vec::new();
        for number in 0..steps_count {
            let mut plan = StepPlan {
                step: StepId(number as u64),
                ..StepPlan::default()
            };
            scheduler.fill(&mut plan, &mut schedule);
            let result = engine.step(&plan);
            let result = result.map_err(|error| format!("step {number}: {error}"))?;
            // What the step before drew is learnt only now.
            scheduler.learn(&untold);
            let serial = |slot: SlotIndex| {
                let seat = scheduler.seats[slot.0 as usize].as_ref();
                seat.map_or(u64::MAX, |seated| seated.serial)
            };
            let sampled = result.sampled.iter();
            untold = sampled
                .map(|(slot, sampled)| (serial(*slot), *slot, sampled.token))
                .collect();
            scheduler.end();
            schedule.steps.push((plan, result));
        }
        Ok(schedule)
    }
}

impl Scheduler {
    /// Adds what is in the next step.
    fn fill(&mut self, plan: &mut StepPlan, schedule: &mut Schedule) {
        let mut rows_left = LIMITS.step_tokens_max as usize;
        for slot in 0..SLOTS {
            self.seat(slot);
            let Some(mut seated) = self.seats[slot as usize].take() else {
                continue;
            };
            self.preempt(slot, &mut seated);
            if let Some(segment) = self.segment(slot, &mut seated, rows_left) {
                rows_left -= segment.len as usize;
                let end = (segment.position + segment.len) as usize;
                schedule.ahead_count += usize::from(seated.is_untold && end == seated.known());
                seated.done = end;
                if !seated.is_open {
                    let was_drawn_for = self.ended.contains(&SlotIndex(slot));
                    schedule.reopened_count += usize::from(was_drawn_for);
                    plan.opens.push(open(slot, &seated));
                    seated.is_open = true;
                }
                plan.segments.push(segment);
            }
            self.seats[slot as usize] = Some(seated);
        }
        // The order of segments must not matter.
        if self.dice.chance(0.5) {
            plan.segments.reverse();
        }
        // What the step before drew is learnt next; what this one draws is not.
        for (slot, seat) in (0..).map(SlotIndex).zip(&mut self.seats) {
            if let Some(seated) = seat {
                let drawn = |segment: &Segment| segment.slot == slot && segment.logits.samples();
                seated.is_untold = plan.segments.iter().any(drawn);
            }
        }
        self.ended.clear();
    }

    /// A new sequence takes a free slot, mostly.
    fn seat(&mut self, slot: u32) {
        if self.seats[slot as usize].is_some() || self.dice.chance(0.2) {
            return;
        }
        self.serial += 1;
        let dice = &mut self.dice;
        let prompt: Vec<TokenId> = (0..1 + dice.below(40))
            .map(|_| dice.below(self.vocab) as TokenId)
            .collect();
        let stop_tokens: Vec<TokenId> = match dice.chance(0.4) {
            true => (0..self.vocab as TokenId)
                .filter(|_| dice.chance(0.1))
                .collect(),
            false => Vec::new(),
        };
        let sampling = sampling(dice, self.vocab);
        let min_tokens = dice.below(4) as u32;
        let output_most = (TOKENS_MAX - prompt.len()).min(24) as u64;
        let output_max = 1 + dice.below(output_most - 1) as usize;
        self.seats[slot as usize] = Some(Seated {
            serial: self.serial,
            table: self.other_table(slot),
            sampling: Arc::new(sampling),
            stop_tokens: stop_tokens.into(),
            min_tokens,
            output_max,
            prompt: prompt.into(),
            output: Vec::new(),
            done: 0,
            is_open: false,
            is_untold: false,
        });
    }

    /// Rarely a sequence loses its KV, and takes its slot again with what it has drawn.
    fn preempt(&mut self, slot: u32, seated: &mut Seated) {
        if seated.done > 0 && !seated.is_untold && self.dice.chance(0.03) {
            seated.done = 0;
            seated.is_open = false;
            seated.table = self.other_table(slot);
        }
    }

    /// The first block of the table that the slot's last sequence did not have.
    fn other_table(&mut self, slot: u32) -> u32 {
        let table = &mut self.tables[slot as usize];
        *table = (*table + 1) % TABLES_EACH;
        (slot * TABLES_EACH + *table) * TABLE
    }

    fn segment(&mut self, slot: u32, seated: &mut Seated, rows_left: usize) -> Option<Segment> {
        let known = seated.known();
        let left = known - seated.done;
        let must_wait = seated.is_untold && !seated.sampling.draws_ahead();
        if must_wait || left == 0 || rows_left == 0 || self.dice.chance(0.15) {
            return None;
        }
        let len = match left {
            1 => 1,
            _ => 1 + self.dice.below(left.min(rows_left) as u64) as usize,
        };
        let samples = len == left;
        let is_scored = seated.sampling.prompt_logprobs.is_some() && !seated.is_untold;
        let first = seated.table;
        Some(Segment {
            slot: SlotIndex(slot),
            position: seated.done as u32,
            len: len as u32,
            blocks: (first..first + TABLE).map(BlockIndex).collect(),
            drafts: Vec::new(),
            logits: match (is_scored, samples) {
                (false, false) => LogitsWanted::No,
                (false, true) => LogitsWanted::Sample,
                (true, false) => LogitsWanted::Score,
                (true, true) => LogitsWanted::ScoreAndSample,
            },
        })
    }

    /// What the step before the last one drew.
    fn learn(&mut self, drawn: &[(u64, SlotIndex, TokenId)]) {
        for (serial, slot, token) in drawn {
            let seat = self.seats[slot.0 as usize].as_mut();
            if let Some(seated) = seat.filter(|seated| seated.serial == *serial) {
                seated.output.push(*token);
            }
        }
    }

    /// Who is known to be over leaves, though the last step may have drawn once more.
    fn end(&mut self) {
        for (slot, seat) in (0..).zip(&mut self.seats) {
            if let Some(seated) = seat.take_if(|seated| seated.is_over())
                && seated.is_untold
            {
                self.ended.push(SlotIndex(slot));
            }
        }
    }
}

fn open(slot: u32, seated: &Seated) -> OpenSlot {
    OpenSlot {
        slot: SlotIndex(slot),
        sampling: Arc::clone(&seated.sampling),
        prompt: Arc::clone(&seated.prompt),
        output: seated.output.clone(),
        stop_tokens: Arc::clone(&seated.stop_tokens),
        min_tokens: seated.min_tokens,
    }
}

/// Mostly rules that a device follows ahead; some for which it, or the host, must have seen every token.
fn sampling(dice: &mut Dice, vocab: u64) -> Sampling {
    let plain = Sampling {
        seed: dice.next(),
        ..Sampling::greedy()
    };
    let hot = Sampling {
        temperature: 0.3 + 1.2 * dice.share(),
        ..plain.clone()
    };
    match dice.below(8) {
        0 => plain,
        1 => Sampling { top_k: 7, ..hot },
        2 => Sampling { top_p: 0.8, ..hot },
        3 => Sampling { min_p: 0.05, ..hot },
        4 => Sampling {
            logit_bias: vec![(dice.below(vocab) as TokenId, 3.0)],
            ..hot
        },
        5 => Sampling {
            repetition_penalty: 1.2,
            ..hot
        },
        6 if dice.chance(0.5) => Sampling {
            logprobs: Some(2),
            prompt_logprobs: Some(1),
            ..hot
        },
        _ => hot,
    }
}
