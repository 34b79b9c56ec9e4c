//! An engine whose KV can be checked: the KV of a token is a hash of all tokens up to it.
//!
//! Owns: the pool's cells and the slots' histories. Never: trusts a plan: KV that is not the
//! sequence's own is a panic.
//! Invariant: the token drawn depends on the history alone, so any course must give the same
//! tokens.

use cleave_domain::{
    BlockIndex, Capacity, LogitsWanted, SampledToken, SlotIndex, StepPlan, StepResult, TokenId,
};
use cleave_kv::BlockPart;
use std::collections::BTreeMap;

pub struct CheckedEngine {
    capacity: Capacity,
    cells: Vec<Vec<u64>>,
    slots: BTreeMap<SlotIndex, Vec<TokenId>>,
}

pub fn fold(seed: u64, values: &[u64]) -> u64 {
    values.iter().fold(seed, |hash, value| {
        (hash ^ value)
            .wrapping_add(0x9e37_79b9_7f4a_7c15)
            .wrapping_mul(0xbf58_476d_1ce4_e5b9)
            .rotate_left(29)
    })
}

/// The KV of each position of a history: `[tokens]`.
fn kv(history: &[TokenId]) -> Vec<u64> {
    let mut hash = 0;
    let token = |token: &TokenId| {
        hash = fold(hash, &[u64::from(*token)]);
        hash
    };
    history.iter().map(token).collect()
}

/// Histories that begin with such a token repeat themselves, mostly.
const REPEATS: std::ops::Range<TokenId> = 900_000..1_000_000;

/// The token that follows a history.
pub fn draw(history: &[TokenId]) -> TokenId {
    let last = kv(history).last().copied().expect("a history has a token");
    let earlier = history.len().checked_sub(3).map(|at| history[at]);
    if let Some(earlier) = earlier.filter(|_| REPEATS.contains(&history[0]) && last % 6 > 0) {
        return earlier;
    }
    100_000 + u32::try_from(last % 900_000).expect("small")
}

/// The first `count` tokens of the output to a prompt.
pub fn output(prompt: &[TokenId], count: u32) -> Vec<TokenId> {
    let mut history = prompt.to_vec();
    for _ in 0..count {
        history.push(draw(&history));
    }
    history.split_off(prompt.len())
}

impl CheckedEngine {
    pub fn new(capacity: Capacity) -> Self {
        let block = vec![0; capacity.block_tokens as usize];
        Self {
            cells: vec![block; capacity.blocks_count as usize],
            slots: BTreeMap::new(),
            capacity,
        }
    }

    pub fn step(&mut self, plan: &StepPlan) -> StepResult {
        self.open(plan);
        let mut result = StepResult {
            step: plan.step,
            ..StepResult::default()
        };
        let mut tokens = 0;
        let mut slots = Vec::new();
        for segment in &plan.segments {
            assert!(!slots.contains(&segment.slot), "a slot twice in a step");
            slots.push(segment.slot);
            tokens += segment.len;
            let history = self.slots.get_mut(&segment.slot).expect("an open slot");
            let (from, to) = (
                segment.position as usize,
                (segment.position + segment.len) as usize,
            );
            let history_len = history.len();
            let (before, own) = (from.min(history_len), to - segment.drafts.len());
            assert!(before < own && own <= history_len, "beyond the history");
            // The tokens that are run: the last ones may be drafts.
            let run = [&history[..own], &segment.drafts].concat();
            let kv = kv(&run);
            for (position, kv) in kv[..to].iter().enumerate() {
                let size = self.capacity.block_tokens as usize;
                let block = segment.blocks[position / size];
                let cell = &mut self.cells[block.0 as usize][position % size];
                if position >= from {
                    *cell = *kv;
                }
                let owner = "the KV of another sequence, or none";
                assert_eq!(*cell, *kv, "{owner}, at {position} in {block}: {segment:?}");
            }
            let score = |token: &TokenId| sampled(*token);
            if matches!(
                segment.logits,
                LogitsWanted::Score | LogitsWanted::ScoreAndSample
            ) {
                let scored = history[from + 1..history.len().min(to + 1)].iter();
                let scores = scored.map(score).collect();
                result.prompt_scores.push((segment.slot, scores));
            }
            if matches!(
                segment.logits,
                LogitsWanted::Sample | LogitsWanted::ScoreAndSample
            ) {
                assert_eq!(own, history.len(), "drawn from the middle");
                let mut drafts = segment.drafts.iter();
                loop {
                    let token = draw(history);
                    history.push(token);
                    result.sampled.push((segment.slot, sampled(token)));
                    if drafts.next() != Some(&token) {
                        break;
                    }
                }
            }
        }
        assert!(tokens <= self.capacity.step_tokens_max, "too many tokens");
        result
    }

    /// A step that broke half way: its writes are garbage.
    pub fn spoil(&mut self, plan: &StepPlan) {
        self.open(plan);
        let size = self.capacity.block_tokens;
        for segment in &plan.segments {
            for position in segment.position..segment.position + segment.len {
                let block = segment.blocks[(position / size) as usize];
                self.cells[block.0 as usize][(position % size) as usize] = u64::MAX;
            }
        }
    }

    fn open(&mut self, plan: &StepPlan) {
        for open in &plan.opens {
            assert!(open.slot.0 < self.capacity.slots_count, "no such slot");
            let history = [&open.prompt[..], &open.output[..]].concat();
            self.slots.insert(open.slot, history);
        }
    }

    pub fn read(&self, block: BlockIndex, part: BlockPart) -> Vec<u64> {
        self.cells[block.0 as usize][cells(part)].to_vec()
    }

    pub fn write(&mut self, block: BlockIndex, part: BlockPart, payload: &[u64]) {
        self.cells[block.0 as usize][cells(part)].copy_from_slice(payload);
    }
}

fn cells(part: BlockPart) -> std::ops::Range<usize> {
    part.offset as usize / 8..(part.offset + part.len) as usize / 8
}

fn sampled(token: TokenId) -> SampledToken {
    SampledToken {
        token,
        scores: None,
    }
}
