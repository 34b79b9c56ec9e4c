//! An engine that is no model and yet needs its KV: each position's entry is a hash over the entry
//! before it and the token, read from and written to the pool through the block table; the next
//! token is a hash of the last entry. A hand-off that brings wrong, old or misplaced bytes changes
//! the tokens, and [`expected`] says from the prompt alone what they must be.

use cleave_domain::{
    BlockIndex, Capacity, Fingerprint, KvPlane, LogitsWanted, OpenSlot, SampledToken, Segment,
    SlotIndex, StepPlan, StepResult, TokenId,
};
use cleave_engine::{BlockSpan, Engine, EngineDescription, EngineError};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use tokio::sync::watch;

pub(crate) const BLOCK_TOKENS: usize = 4;
/// Large, so that KV traffic stands out from everything else.
const ENTRY_BYTES: usize = 2048;
pub(crate) const BLOCK_BYTES: usize = BLOCK_TOKENS * ENTRY_BYTES;
pub(crate) const BLOCKS: u32 = 32;
const VOCABULARY: u32 = 1000;

fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(17) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 31)
}

fn entry(before: u64, token: TokenId) -> u64 {
    mix(before, u64::from(token) + 1)
}

fn token(last: u64) -> TokenId {
    (mix(last, 0) % u64::from(VOCABULARY)) as TokenId
}

/// The tokens that every path through the fleet must give for this prompt.
pub(crate) fn expected(prompt: &[TokenId], count: usize) -> Vec<TokenId> {
    let mut last = prompt.iter().fold(0, |last, token| entry(last, *token));
    let mut tokens = Vec::new();
    for _ in 0..count {
        tokens.push(token(last));
        last = entry(last, token(last));
    }
    tokens
}

/// Stops an engine before a step, from the test.
#[derive(Clone, Debug)]
pub(crate) struct StepGate {
    open: Arc<(Mutex<StepGateState>, Condvar)>,
    reached: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct StepGateState {
    shut: bool,
    steps_left: u64,
    panics: bool,
    /// After this prompt the first token is outside of the vocabulary.
    spoiled: Option<Vec<TokenId>>,
}

impl StepGate {
    pub(crate) fn new() -> Self {
        Self {
            open: Arc::default(),
            reached: watch::Sender::new(0),
        }
    }

    pub(crate) fn shut(&self) {
        self.open.0.lock().unwrap().shut = true;
    }

    /// Lets some more steps pass, then shuts.
    pub(crate) fn shut_after(&self, steps: u64) {
        let mut gate = self.open.0.lock().unwrap();
        gate.shut = true;
        gate.steps_left = steps;
    }

    /// Lets one more step pass a shut gate.
    pub(crate) fn allow_one(&self) {
        self.open.0.lock().unwrap().steps_left = 1;
        self.open.1.notify_all();
    }

    pub(crate) fn open(&self) {
        self.open.0.lock().unwrap().shut = false;
        self.open.1.notify_all();
    }

    /// Makes the next step panic.
    pub(crate) fn panic_at_next_step(&self) {
        self.open.0.lock().unwrap().panics = true;
    }

    /// Makes the first token after this prompt one outside of the vocabulary.
    pub(crate) fn spoil_first_token(&self, prompt: &[TokenId]) {
        self.open.0.lock().unwrap().spoiled = Some(prompt.to_vec());
    }

    fn spoils(&self, history: &[TokenId]) -> bool {
        self.open.0.lock().unwrap().spoiled.as_deref() == Some(history)
    }

    /// Returns when the engine has come to a step since the test began.
    pub(crate) async fn reached(&self) {
        let mut reached = self.reached.subscribe();
        reached.wait_for(|steps| *steps > 0).await.unwrap();
    }

    fn wait_for_step(&self) {
        self.reached.send_modify(|steps| *steps += 1);
        let mut gate = self.open.0.lock().unwrap();
        while gate.shut && gate.steps_left == 0 {
            gate = self.open.1.wait(gate).unwrap();
        }
        gate.steps_left = gate.steps_left.saturating_sub(1);
        if std::mem::take(&mut gate.panics) {
            drop(gate);
            panic!("a bead fell off");
        }
    }
}

#[derive(Debug)]
pub(crate) struct HashChainEngine {
    description: EngineDescription,
    pool: Vec<u8>,
    slots: BTreeMap<SlotIndex, Vec<TokenId>>,
    gate: StepGate,
}

impl HashChainEngine {
    pub(crate) fn new(gate: &StepGate) -> Self {
        let capacity = Capacity {
            block_tokens: BLOCK_TOKENS as u32,
            block_bytes: BLOCK_BYTES as u32,
            blocks_count: BLOCKS,
            slots_count: 8,
            step_tokens_max: 16,
            context_tokens_max: BLOCKS * BLOCK_TOKENS as u32,
            states: None,
        };
        Self {
            description: EngineDescription {
                model: "abacus".into(),
                device: "beads".into(),
                device_id: None,
                fingerprint: Fingerprint("abacus-1".into()),
                capacity,
                vocab_size: VOCABULARY,
            },
            // A pool that was never written to is not zero.
            pool: vec![0xa5; BLOCK_BYTES * BLOCKS as usize],
            slots: BTreeMap::new(),
            gate: gate.clone(),
        }
    }

    /// With another fingerprint, as if its weights were others.
    pub(crate) fn with_other_weights(mut self) -> Self {
        self.description.fingerprint = Fingerprint("abacus-2".into());
        self
    }

    fn at(blocks: &[BlockIndex], position: usize) -> usize {
        let block = blocks[position / BLOCK_TOKENS].0 as usize;
        block * BLOCK_BYTES + position % BLOCK_TOKENS * ENTRY_BYTES
    }

    /// Every copy of the value within the entry must agree: no byte of a block is idle.
    fn read(&self, blocks: &[BlockIndex], position: usize) -> u64 {
        let start = Self::at(blocks, position);
        let bytes = &self.pool[start..start + ENTRY_BYTES];
        let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let odd = bytes.chunks_exact(8).any(|chunk| chunk != &bytes[..8]);
        if odd { !first } else { first }
    }

    fn write(&mut self, blocks: &[BlockIndex], position: usize, value: u64) {
        let start = Self::at(blocks, position);
        for chunk in self.pool[start..start + ENTRY_BYTES].chunks_exact_mut(8) {
            chunk.copy_from_slice(&value.to_le_bytes());
        }
    }

    fn run(&mut self, segment: &Segment) -> u64 {
        let history = self.slots[&segment.slot].clone();
        let start = segment.position as usize;
        let mut last = match start {
            0 => 0,
            _ => self.read(&segment.blocks, start - 1),
        };
        for (position, token) in history
            .iter()
            .enumerate()
            .skip(start)
            .take(segment.len as usize)
        {
            last = entry(last, *token);
            self.write(&segment.blocks, position, last);
        }
        last
    }
}

impl Engine for HashChainEngine {
    fn describe(&self) -> &EngineDescription {
        &self.description
    }

    fn step(&mut self, plan: &StepPlan) -> Result<StepResult, EngineError> {
        self.gate.wait_for_step();
        for open in &plan.opens {
            let OpenSlot {
                slot,
                prompt,
                output,
                ..
            } = open;
            let history = prompt.iter().chain(output).copied().collect();
            self.slots.insert(*slot, history);
        }
        let mut result = StepResult {
            step: plan.step,
            ..StepResult::default()
        };
        for segment in &plan.segments {
            let last = self.run(segment);
            if segment.logits == LogitsWanted::Sample {
                let history = self.slots.get_mut(&segment.slot).unwrap();
                let token = if self.gate.spoils(history) {
                    VOCABULARY + 7
                } else {
                    token(last)
                };
                history.push(token);
                let sampled = SampledToken {
                    token,
                    scores: None,
                };
                result.sampled.push((segment.slot, sampled));
            }
        }
        Ok(result)
    }

    fn read_block(&self, span: BlockSpan, out: &mut [u8]) -> Result<(), EngineError> {
        let start = span.block.0 as usize * BLOCK_BYTES + span.offset;
        out.copy_from_slice(&self.pool[start..start + out.len()]);
        Ok(())
    }

    fn write_block(&mut self, span: BlockSpan, bytes: &[u8]) -> Result<(), EngineError> {
        let start = span.block.0 as usize * BLOCK_BYTES + span.offset;
        self.pool[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn copy_blocks(
        &mut self,
        _: KvPlane,
        pairs: &[(BlockIndex, BlockIndex)],
    ) -> Result<(), EngineError> {
        for (from, to) in pairs {
            let start = from.0 as usize * BLOCK_BYTES;
            self.pool
                .copy_within(start..start + BLOCK_BYTES, to.0 as usize * BLOCK_BYTES);
        }
        Ok(())
    }
}
