//! An engine that is no model and yet needs its KV: each position's entry is a hash over the entry
//! before it and the token, read from and written to the pool through the block table; the next
//! token is a hash of the last entry. A hand-off that brings wrong, old or misplaced bytes changes
//! the tokens, and [`expected`] says from the prompt alone what they must be.
//!
//! With a state, the next token is a hash of the last entry and of a second chain, which is kept in
//! the sequence's state slot alone: see [`expected_with_state`].

use cleave_domain::{
    BlockIndex, Capacity, Fingerprint, KvPlane, LogitsWanted, OpenSlot, SampledToken, Segment,
    SlotIndex, StateCapacity, StepPlan, StepResult, TokenId,
};
use cleave_engine::{BlockSpan, DeviceBlocks, Engine, EngineDescription, EngineError, PeerBlocks};
use cleave_transfer::checksum;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use tokio::sync::watch;

pub(crate) const BLOCK_TOKENS: usize = 4;
/// Large, so that KV traffic stands out from everything else.
const ENTRY_BYTES: usize = 2048;
pub(crate) const BLOCK_BYTES: usize = BLOCK_TOKENS * ENTRY_BYTES;
pub(crate) const BLOCKS: u32 = 32;
const VOCABULARY: u32 = 1000;
/// Bytes of a state: two pieces as long as a block, and a shorter one.
pub(crate) const STATE_BYTES: usize = BLOCK_BYTES * 5 / 2;
/// The state of a sequence without tokens: zeros are none.
const STATE_EMPTY: u64 = 0x57a7_e000_57a7_e000;

fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(17) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 31)
}

fn entry(before: u64, token: TokenId) -> u64 {
    mix(before, u64::from(token) + 1)
}

/// The state after one more token; no entry of the KV tells it.
fn next_state(before: u64, token: TokenId) -> u64 {
    mix(before, u64::from(token) + 0x1_0000_0001)
}

/// The content of a state's words: each piece has its own.
fn state_word(state: u64, offset: usize) -> u64 {
    state ^ mix(0x0005_7a7e, (offset / BLOCK_BYTES) as u64)
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

/// As [`expected`], of an engine with states.
pub(crate) fn expected_with_state(prompt: &[TokenId], count: usize) -> Vec<TokenId> {
    let mut last = prompt.iter().fold(0, |last, token| entry(last, *token));
    let mut state = prompt
        .iter()
        .fold(STATE_EMPTY, |state, token| next_state(state, *token));
    let mut tokens = Vec::new();
    for _ in 0..count {
        let next = token(mix(last, state));
        tokens.push(next);
        last = entry(last, next);
        state = next_state(state, next);
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

/// The pool's bytes: the blocks, then the state slots.
#[derive(Debug)]
struct ChainPool {
    states: Option<StateCapacity>,
    bytes: Mutex<Vec<u8>>,
}

impl ChainPool {
    fn new(states: Option<StateCapacity>) -> Self {
        let states_bytes = states.map_or(0, |states| states.count as usize * STATE_BYTES);
        Self {
            states,
            // A pool that was never written to is not zero.
            bytes: Mutex::new(vec![0xa5; BLOCK_BYTES * BLOCKS as usize + states_bytes]),
        }
    }

    fn range(&self, span: &BlockSpan) -> Range<usize> {
        let (first, size, count) = match span.plane {
            KvPlane::Blocks => (0, BLOCK_BYTES, BLOCKS),
            KvPlane::State => {
                let count = self.states.expect("an engine with states").count;
                (BLOCK_BYTES * BLOCKS as usize, STATE_BYTES, count)
            }
            KvPlane::Window => unreachable!("this engine has no window plane"),
        };
        assert!(span.block.0 < count && span.range().end <= size, "{span:?}");
        let start = first + span.block.0 as usize * size;
        start + span.offset..start + span.offset + span.len
    }

    fn read(&self, span: &BlockSpan, out: &mut [u8]) {
        out.copy_from_slice(&self.bytes.lock().unwrap()[self.range(span)]);
    }

    fn write(&self, span: &BlockSpan, bytes: &[u8]) {
        self.bytes.lock().unwrap()[self.range(span)].copy_from_slice(bytes);
    }

    fn copy_of(&self, span: &BlockSpan) -> Vec<u8> {
        let mut bytes = vec![0; span.len];
        self.read(span, &mut bytes);
        bytes
    }
}

/// Copies beside the engine, as a GPU has them.
#[derive(Debug)]
struct ChainBlocks(Arc<ChainPool>);

/// Another engine's pool, opened for writing.
#[derive(Debug)]
struct ChainPeer {
    own: Arc<ChainPool>,
    peer: Arc<ChainPool>,
}

/// Pools of this process, by the handle that a peer opens.
static SHARED: Mutex<BTreeMap<u64, Weak<ChainPool>>> = Mutex::new(BTreeMap::new());

impl DeviceBlocks for ChainBlocks {
    fn read(&self, parts: &mut [(BlockSpan, &mut [u8])]) -> Result<Vec<u64>, EngineError> {
        let sum = |(span, out): &mut (BlockSpan, &mut [u8])| {
            self.0.read(span, out);
            checksum(out)
        };
        Ok(parts.iter_mut().map(sum).collect())
    }

    fn write(&self, parts: &[(BlockSpan, &[u8])]) -> Result<(), EngineError> {
        parts
            .iter()
            .for_each(|(span, bytes)| self.0.write(span, bytes));
        Ok(())
    }

    fn checksums(&self, spans: &[BlockSpan]) -> Result<Vec<u64>, EngineError> {
        let sums = spans.iter().map(|span| checksum(&self.0.copy_of(span)));
        Ok(sums.collect())
    }

    fn handle(&self) -> Result<Vec<u8>, EngineError> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        SHARED
            .lock()
            .unwrap()
            .insert(serial, Arc::downgrade(&self.0));
        Ok(serial.to_le_bytes().to_vec())
    }

    fn open(&self, handle: &[u8]) -> Result<Arc<dyn PeerBlocks>, EngineError> {
        let serial = handle.try_into().map(u64::from_le_bytes);
        let shared = SHARED.lock().unwrap();
        let peer = serial
            .ok()
            .and_then(|serial| shared.get(&serial)?.upgrade());
        let gone = || EngineError::Device("that pool no longer exists".to_owned());
        Ok(Arc::new(ChainPeer {
            own: Arc::clone(&self.0),
            peer: peer.ok_or_else(gone)?,
        }))
    }
}

impl PeerBlocks for ChainPeer {
    fn write(&self, parts: &[(BlockSpan, BlockIndex)]) -> Result<Vec<u64>, EngineError> {
        let copy = |(span, to): &(BlockSpan, BlockIndex)| {
            let bytes = self.own.copy_of(span);
            self.peer.write(
                &BlockSpan {
                    block: *to,
                    ..*span
                },
                &bytes,
            );
            checksum(&bytes)
        };
        Ok(parts.iter().map(copy).collect())
    }

    fn probe(&self) -> Result<usize, EngineError> {
        Ok(BLOCK_BYTES)
    }
}

#[derive(Debug)]
pub(crate) struct HashChainEngine {
    description: EngineDescription,
    pool: Arc<ChainPool>,
    /// Whether blocks are copied beside the engine.
    copies_beside: bool,
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
            windows: None,
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
            pool: Arc::new(ChainPool::new(None)),
            copies_beside: false,
            slots: BTreeMap::new(),
            gate: gate.clone(),
        }
    }

    /// With another fingerprint, as if its weights were others.
    pub(crate) fn with_other_weights(mut self) -> Self {
        self.description.fingerprint = Fingerprint("abacus-2".into());
        self
    }

    /// With so many slots for states.
    pub(crate) fn with_states(mut self, count: u32) -> Self {
        let bytes = STATE_BYTES as u32;
        let states = Some(StateCapacity { bytes, count });
        self.description.capacity.states = states;
        self.description.fingerprint = Fingerprint("abacus-1-state".into());
        self.pool = Arc::new(ChainPool::new(states));
        self
    }

    /// With copies beside the engine, as on a device.
    pub(crate) fn with_copies_beside(mut self) -> Self {
        self.copies_beside = true;
        self
    }

    fn at(blocks: &[BlockIndex], position: usize) -> BlockSpan {
        let block = blocks[position / BLOCK_TOKENS];
        BlockSpan::of_block(block, position % BLOCK_TOKENS * ENTRY_BYTES, ENTRY_BYTES)
    }

    fn whole(plane: KvPlane, block: BlockIndex) -> BlockSpan {
        BlockSpan {
            plane,
            block,
            offset: 0,
            len: match plane {
                KvPlane::Blocks => BLOCK_BYTES,
                KvPlane::State => STATE_BYTES,
                KvPlane::Window => unreachable!("this engine has no window plane"),
            },
        }
    }

    /// Every copy of the value within the entry must agree: no byte of a block is idle.
    fn read(&self, blocks: &[BlockIndex], position: usize) -> u64 {
        let bytes = self.pool.copy_of(&Self::at(blocks, position));
        let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let odd = bytes.chunks_exact(8).any(|chunk| chunk != &bytes[..8]);
        if odd { !first } else { first }
    }

    fn write(&self, blocks: &[BlockIndex], position: usize, value: u64) {
        let words = value.to_le_bytes().repeat(ENTRY_BYTES / 8);
        self.pool.write(&Self::at(blocks, position), &words);
    }

    /// As [`HashChainEngine::read`], of a state.
    fn read_state(&self, slot: BlockIndex) -> u64 {
        let bytes = self.pool.copy_of(&Self::whole(KvPlane::State, slot));
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let state = word(0) ^ state_word(0, 0);
        let odd = (0..STATE_BYTES / 8).any(|index| word(index * 8) != state_word(state, index * 8));
        if odd { !state } else { state }
    }

    fn write_state(&self, slot: BlockIndex, state: u64) {
        let words =
            (0..STATE_BYTES / 8).flat_map(|index| state_word(state, index * 8).to_le_bytes());
        let bytes: Vec<u8> = words.collect();
        self.pool.write(&Self::whole(KvPlane::State, slot), &bytes);
    }

    /// Runs a segment; gives the number that the next token is drawn from.
    fn run(&self, segment: &Segment) -> u64 {
        let last = self.run_chain(segment);
        let Some(named) = segment.state else {
            return last;
        };
        let before = match (segment.position, named.restore) {
            (0, _) => STATE_EMPTY,
            (_, Some(snapshot)) => self.read_state(snapshot),
            (_, None) => self.read_state(named.slot),
        };
        let run = self.slots[&segment.slot].iter();
        let run = run
            .skip(segment.position as usize)
            .take(segment.len as usize);
        let state = run.fold(before, |state, token| next_state(state, *token));
        self.write_state(named.slot, state);
        if let Some(snapshot) = named.snapshot {
            self.write_state(snapshot, state);
        }
        mix(last, state)
    }

    /// Writes the entries of a segment; gives the last one.
    fn run_chain(&self, segment: &Segment) -> u64 {
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
            let has_states = self.description.capacity.states.is_some();
            assert_eq!(segment.state.is_some(), has_states, "{segment:?}");
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

    fn blocks(&self) -> Option<Arc<dyn DeviceBlocks>> {
        let blocks = || Arc::new(ChainBlocks(Arc::clone(&self.pool))) as Arc<dyn DeviceBlocks>;
        self.copies_beside.then(blocks)
    }

    fn read_block(&self, span: BlockSpan, out: &mut [u8]) -> Result<(), EngineError> {
        self.pool.read(&span, out);
        Ok(())
    }

    fn write_block(&mut self, span: BlockSpan, bytes: &[u8]) -> Result<(), EngineError> {
        self.pool.write(&span, bytes);
        Ok(())
    }

    fn copy_blocks(
        &mut self,
        plane: KvPlane,
        pairs: &[(BlockIndex, BlockIndex)],
    ) -> Result<(), EngineError> {
        for (from, to) in pairs {
            let bytes = self.pool.copy_of(&Self::whole(plane, *from));
            self.pool.write(&Self::whole(plane, *to), &bytes);
        }
        Ok(())
    }
}
