//! An engine whose KV can be checked: the KV of a token is a hash of all tokens up to it.
//!
//! Owns: the pool's cells and the slots' histories. Never: trusts a plan: KV that is not the
//! sequence's own is a panic.
//! Invariant: the token drawn depends on the history alone, so any course must give the same
//! tokens.

use cleave_domain::{
    BlockIndex, Capacity, KvPlane, LogitsWanted, SampledToken, SegmentState, SlotIndex, StepPlan,
    StepResult, TokenId,
};
use cleave_kv::BlockPart;
use std::collections::BTreeMap;

pub struct CheckedEngine {
    capacity: Capacity,
    cells: Vec<Vec<u64>>,
    /// Words of each state slot: `[slots][bytes / 8]`.
    states: Vec<Vec<u64>>,
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

/// The words of the state after a history: a running hash of its own, which no key or value gives
/// away, and a different word in each place.
fn state(history: &[TokenId], words: usize) -> Vec<u64> {
    let start = 0x5851_f42d_4c95_7f2d;
    let hash = history.iter().fold(start, |hash, token| {
        fold(hash, &[u64::from(*token) << 32, 1])
    });
    (0..words as u64)
        .map(|place| fold(hash, &[place]))
        .collect()
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
        // Garbage of earlier sequences.
        let garbage = |slot: u32| {
            let bytes = capacity.states.map_or(0, |states| states.bytes);
            vec![u64::MAX - u64::from(slot); bytes as usize / 8]
        };
        let slots_count = capacity.states.map_or(0, |states| states.count);
        Self {
            cells: vec![block; capacity.blocks_count as usize],
            states: (0..slots_count).map(garbage).collect(),
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
            if let Some(place) = segment.state {
                run_state(&mut self.states, place, &run, from);
            }
            assert_eq!(segment.state.is_some(), !self.states.is_empty());
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
            for slot in segment
                .state
                .iter()
                .flat_map(|state| std::iter::once(state.slot).chain(state.snapshot))
            {
                self.states[slot.0 as usize].fill(u64::MAX);
            }
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
        let range = self.range(part);
        match part.plane {
            KvPlane::Blocks => self.cells[block.0 as usize][range].to_vec(),
            KvPlane::State => self.states[block.0 as usize][range].to_vec(),
        }
    }

    pub fn write(&mut self, block: BlockIndex, part: BlockPart, payload: &[u64]) {
        let range = self.range(part);
        let all = match part.plane {
            KvPlane::Blocks => &mut self.cells[block.0 as usize],
            KvPlane::State => &mut self.states[block.0 as usize],
        };
        all[range].copy_from_slice(payload);
    }

    fn range(&self, part: BlockPart) -> std::ops::Range<usize> {
        let start = self.capacity.unit_start(part.unit()) + u64::from(part.offset);
        let first = start as usize / 8;
        first..first + part.len as usize / 8
    }
}

/// Runs `run[from..]` on a slot that must have the state of the tokens before.
fn run_state(states: &mut [Vec<u64>], place: SegmentState, run: &[TokenId], from: usize) {
    let SegmentState {
        slot,
        restore,
        snapshot,
    } = place;
    let slot = slot.0 as usize;
    let words = states[slot].len();
    if let Some(restore) = restore {
        assert!(from > 0, "a snapshot of nothing");
        states[slot] = states[restore.0 as usize].clone();
    }
    if from > 0 {
        let before = state(&run[..from], words);
        assert_eq!(states[slot], before, "another state at {from}: {place:?}");
    }
    states[slot] = state(run, words);
    if let Some(snapshot) = snapshot {
        states[snapshot.0 as usize] = states[slot].clone();
    }
}

fn sampled(token: TokenId) -> SampledToken {
    SampledToken {
        token,
        scores: None,
    }
}
