//! A priced engine that computes no tensors, over a pool whose every cell remembers its content.
//!
//! Owns: the simulated KV pool and the slots' histories. Never: decides which sequences run.
//! Invariant: a step reads exactly the cells that its sequence's tokens would have written; any
//! other cell is a violation.

use crate::pooling::pool_cells;
use crate::{CellConstraint, CellMatcher, KvHash, MatcherFault};
use cleave_domain::{
    BlockIndex, Capacity, KvPlane, KvUnit, KvWindow, LogitsWanted, OpenSlot, SampledToken, Segment,
    SegmentState, SlotIndex, SplitMix64, StateCapacity, StepPlan, StepResult, TokenId, TokenScores,
    WindowTable,
};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::time::Duration;

/// The KV of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvCell {
    pub kv: KvHash,
    /// The cache salt of the content's owner; content is shared only within a salt.
    pub salt: u64,
}

/// Bytes that a cell stands for.
pub(crate) const CELL_BYTES: u32 = 8;
/// The running hash of a state before the first token; cells of tokens begin with another one.
const STATE_START: KvHash = KvHash(0x1405_7b7e_f767_814f);

/// The cells of a state: a different one in each place, which no token's cell gives away.
fn state_cells(state: KvHash, salt: u64, count: usize) -> Vec<Option<KvCell>> {
    let cell = |place: usize| {
        let kv = KvHash(SplitMix64::finalize(
            state.0 ^ SplitMix64::finalize(place as u64),
        ));
        Some(KvCell { kv, salt })
    };
    (0..count).map(cell).collect()
}

/// The cells of a token in layers with a window: a different one in each, which no other cell of
/// the token gives away.
fn window_cells(token: KvHash, salt: u64, count: usize) -> Vec<Option<KvCell>> {
    state_cells(KvHash(SplitMix64::finalize(token.0)), salt, count)
}

/// The slots that a segment writes.
fn slots_written(place: SegmentState) -> impl Iterator<Item = BlockIndex> {
    std::iter::once(place.slot).chain(place.snapshot)
}

/// Draws the next token of a slot.
pub type DrawToken = fn(&TokenDraw<'_>) -> TokenId;

/// A draw of a token.
#[derive(Clone, Copy, Debug)]
pub struct TokenDraw<'a> {
    /// The slot's sequence, with all tokens before this one.
    pub open: &'a OpenSlot,
    /// Position of the token in the sequence.
    pub position: u32,
    /// The cell of the token before it.
    pub last: KvHash,
    /// Salt of the engine: engines with equal salts draw equal tokens.
    pub salt: u64,
    /// The tokens that the sequence's constraint allows, ascending and not empty, if it has one.
    pub allowed: Option<&'a [TokenId]>,
}

/// Times of engine operations, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct EngineCosts {
    /// Fixed time of a step.
    pub step: u64,
    /// Time of each prompt token.
    pub prefill_token: u64,
    /// Time of each sequence that generates.
    pub decode_sequence: u64,
    /// Time of each token attended to.
    pub context_token: u64,
    /// Time of each block copied in or out.
    pub copy: u64,
    /// Bytes, not nanoseconds: writes wait for a step after about this many since the last one.
    pub write_bytes: u64,
}

#[derive(Clone, Debug)]
pub struct CellEngine {
    block_tokens: usize,
    cells: Vec<Option<KvCell>>,
    /// The cells of each state slot.
    states: Vec<Vec<Option<KvCell>>>,
    /// The cells of each block of the window plane, whose layers keep several for each token, and
    /// the window itself.
    windows: Vec<Vec<Option<KvCell>>>,
    window: Option<KvWindow>,
    window_pieces: u32,
    /// Cells of a block, and of a piece of a state that is not the last.
    unit_cells: usize,
    draw_token: DrawToken,
    /// Mixed into every draw: engines with equal salts draw equal tokens.
    draw_salt: u64,
    slots: BTreeMap<SlotIndex, CellEngineSlot>,
    matcher_fault: Option<MatcherFault>,
    /// The last mask of the step, which a fault may use once more.
    last_mask: Option<Vec<TokenId>>,
}

#[derive(Clone, Debug)]
struct CellEngineSlot {
    open: OpenSlot,
    salt: u64,
    matcher: Option<CellMatcher>,
    /// The mask of its last draw, which a fault may use once more.
    last_mask: Option<Vec<TokenId>>,
}

impl CellEngine {
    pub fn new(capacity: &Capacity, draw_token: DrawToken, draw_salt: u64) -> Self {
        let block_tokens = capacity.block_tokens as usize;
        let slot = |states: StateCapacity| vec![None; states.bytes.div_ceil(CELL_BYTES) as usize];
        let slots_count = capacity.states.map_or(0, |states| states.count) as usize;
        let windows = capacity.windows.map_or((0, 0), |windows| {
            let cells = windows.bytes.div_ceil(CELL_BYTES) as usize;
            (windows.count as usize, cells)
        });
        Self {
            draw_token,
            draw_salt,
            block_tokens,
            cells: vec![None; capacity.blocks_count as usize * block_tokens],
            states: vec![capacity.states.map_or(Vec::new(), slot); slots_count],
            windows: vec![vec![None; windows.1]; windows.0],
            window: capacity.window(),
            window_pieces: capacity.window_pieces(),
            unit_cells: (capacity.block_bytes / CELL_BYTES) as usize,
            slots: BTreeMap::new(),
            matcher_fault: None,
            last_mask: None,
        }
    }

    /// Makes a mistake with every matcher from now on.
    pub(crate) fn break_matchers(&mut self, fault: MatcherFault) {
        self.matcher_fault = Some(fault);
    }

    /// Runs a step. Cache salts are looked up by sampling seed, which no two requests of a world
    /// share.
    pub fn step(
        &mut self,
        plan: &StepPlan,
        salt_of: impl Fn(u64) -> u64,
    ) -> Result<StepResult, String> {
        self.open(plan, salt_of);
        let mut result = StepResult {
            step: plan.step,
            ..StepResult::default()
        };
        self.last_mask = None;
        let mut slots_seen: Vec<SlotIndex> = Vec::new();
        for segment in &plan.segments {
            if slots_seen.contains(&segment.slot) {
                return Err(format!("{} is twice in {}", segment.slot, plan.step));
            }
            slots_seen.push(segment.slot);
            self.run(plan, segment, &mut result)?;
        }
        Ok(result)
    }

    /// Opens the slots that a step opens. A failed step has opened them too.
    pub fn open(&mut self, plan: &StepPlan, salt_of: impl Fn(u64) -> u64) {
        for open in &plan.opens {
            let salt = salt_of(open.sampling.seed);
            let open = open.clone();
            let matcher = self.matcher(&open);
            let engine_slot = CellEngineSlot {
                open,
                salt,
                matcher,
                last_mask: None,
            };
            self.slots.insert(engine_slot.open.slot, engine_slot);
        }
    }

    /// The matcher of a slot that opens.
    fn matcher(&self, open: &OpenSlot) -> Option<CellMatcher> {
        let constraint = CellConstraint::of(open.sampling.constraint.as_deref()?);
        let constraint = constraint.expect("requests of worlds have constraints of worlds");
        let output = match self.matcher_fault {
            Some(MatcherFault::NotRebuilt) => Vec::new(),
            Some(MatcherFault::FirstTokenTwice) => {
                let first = open.output.first();
                first.into_iter().chain(&open.output).copied().collect()
            }
            _ => open.output.clone(),
        };
        Some(constraint.start_after(&output))
    }

    fn run(
        &mut self,
        plan: &StepPlan,
        segment: &Segment,
        result: &mut StepResult,
    ) -> Result<(), String> {
        let Some(engine_slot) = self.slots.get(&segment.slot) else {
            return Err(format!("{} was never opened", segment.slot));
        };
        let salt = engine_slot.salt;
        let history = engine_slot.history();
        let (history_len, end) = (history.len(), (segment.position + segment.len) as usize);
        let sent_len = (segment.position + segment.history_len()) as usize;
        if segment.history_len() == 0 || sent_len > history_len {
            return Err(format!(
                "{} runs {}+{} of {} tokens",
                segment.slot, segment.position, segment.len, history_len
            ));
        }
        // Drafts are written like tokens, whether they are accepted or not; the engine leaves out
        // those that the constraint does not allow.
        let drafts = match &engine_slot.matcher {
            Some(matcher) => &segment.drafts[..matcher.valid_prefix(&segment.drafts)],
            None => &segment.drafts,
        };
        let run = [&history[..sent_len], drafts].concat();
        self.run_state(segment, &run, salt)?;
        self.run_window(segment, &run, salt)?;
        let (mut last, mut last_sent) = (KvHash::default(), KvHash::default());
        // Every position before the segment must hold the cell of this very sequence; the
        // positions of the segment are written.
        for (position, token) in run.iter().enumerate() {
            last = last.extend(*token);
            if position < sent_len {
                last_sent = last;
            }
            let place = self.cell_index(&segment.blocks, position)?;
            if position >= segment.position as usize {
                self.cells[place] = Some(KvCell { kv: last, salt });
            } else if self.cells[place] != Some(KvCell { kv: last, salt }) {
                return Err(format!(
                    "{} reads b{:x} at position {position}: not what was written for it",
                    segment.slot,
                    place / self.block_tokens
                ));
            }
        }
        if segment.logits == LogitsWanted::Pool {
            let place = plan.poolings.iter().find(|at| at.slot == segment.slot);
            let wanted = place.ok_or_else(|| format!("{} pools nothing", segment.slot))?;
            let pooled = pool_cells(wanted, segment, &run, history_len)?;
            result.pooled.push((segment.slot, pooled));
        }
        if matches!(
            segment.logits,
            LogitsWanted::Score | LogitsWanted::ScoreAndSample
        ) {
            let first = segment.position as usize + 1;
            let scored = history[first..history.len().min(end + 1)]
                .iter()
                .map(|token| prompt_score(*token))
                .collect();
            result.prompt_scores.push((segment.slot, scored));
        }
        if matches!(
            segment.logits,
            LogitsWanted::Sample | LogitsWanted::ScoreAndSample
        ) {
            if sent_len != history_len {
                return Err(format!("{} samples before its end", segment.slot));
            }
            self.draw(segment, last_sent, result)?;
        }
        Ok(())
    }

    /// Runs a segment on its state slot, which must have the state of the tokens before it.
    fn run_state(&mut self, segment: &Segment, run: &[TokenId], salt: u64) -> Result<(), String> {
        let Some(place) = segment.state else {
            if self.states.is_empty() {
                return Ok(());
            }
            return Err(format!("{} runs without a state", segment.slot));
        };
        let slot_of = |slot: BlockIndex, count: usize| {
            let index = slot.0 as usize;
            let outside = || format!("{slot} is no state slot");
            (index < count).then_some(index).ok_or_else(outside)
        };
        let count = self.states.len();
        let slot = slot_of(place.slot, count)?;
        let (before, rest) = run.split_at(segment.position as usize);
        if let Some(snapshot) = place.restore {
            self.states[slot] = self.states[slot_of(snapshot, count)?].clone();
        }
        let cells_count = self.states[slot].len();
        let state = STATE_START.extend_all(before);
        if !before.is_empty() && self.states[slot] != state_cells(state, salt, cells_count) {
            return Err(format!(
                "{} reads {} at position {}: not the state of its tokens",
                segment.slot, place.slot, segment.position
            ));
        }
        self.states[slot] = state_cells(state.extend_all(rest), salt, cells_count);
        if let Some(snapshot) = place.snapshot {
            let snapshot = slot_of(snapshot, count)?;
            self.states[snapshot] = self.states[slot].clone();
        }
        Ok(())
    }

    /// Runs a segment on its blocks of the window plane: those of all positions that its window
    /// reads must have the content of its own tokens.
    fn run_window(&mut self, segment: &Segment, run: &[TokenId], salt: u64) -> Result<(), String> {
        let (window, table) = match (self.window, &segment.window) {
            (None, None) => return Ok(()),
            (Some(window), Some(table)) => (window, table),
            _ => return Err(format!("{} has a window that is none", segment.slot)),
        };
        let oldest = (segment.position + 1).saturating_sub(window.tokens);
        let mut last = KvHash::default();
        for (position, token) in (0..).zip(run) {
            last = last.extend(*token);
            if position < oldest {
                continue;
            }
            let ordinal = position / window.block_tokens;
            let index = ordinal.checked_sub(table.first);
            let block = index.and_then(|index| table.blocks.get(index as usize));
            let block = block.ok_or_else(|| {
                let slot = segment.slot;
                format!("{slot} has no block of the window for position {position}")
            })?;
            let cells = self.windows.get_mut(block.0 as usize);
            let cells = cells.ok_or_else(|| format!("{block} is outside the window plane"))?;
            let each = cells.len() / self.block_tokens;
            let place = (position % window.block_tokens) as usize * each;
            let own = window_cells(last, salt, each);
            if position >= segment.position {
                cells[place..place + each].copy_from_slice(&own);
            } else if cells[place..place + each] != own {
                return Err(format!(
                    "{} reads {block} of the window at position {position}: not its own",
                    segment.slot
                ));
            }
        }
        Ok(())
    }

    /// Draws one token, and one more for each accepted draft.
    fn draw(
        &mut self,
        segment: &Segment,
        mut last: KvHash,
        result: &mut StepResult,
    ) -> Result<(), String> {
        let mut drafts = segment.drafts.iter();
        let matcher = |engine: &Self| engine.slots.get(&segment.slot)?.matcher.clone();
        let was_thinking = matcher(self).is_some_and(|matcher| matcher.is_thinking());
        for position in segment.position + segment.history_len().. {
            let is_first = position == segment.position + segment.history_len();
            let mask = self.mask(segment.slot, was_thinking && !is_first);
            let token = self.sample(segment.slot, position, last, mask.as_deref())?;
            let sampled = SampledToken {
                token,
                scores: None,
            };
            result.sampled.push((segment.slot, sampled));
            last = last.extend(token);
            if drafts.next() != Some(&token) {
                break;
            }
        }
        let forced = matcher(self).map_or(Vec::new(), |matcher| matcher.forced());
        if !forced.is_empty() {
            result.forced.push((segment.slot, forced));
        }
        Ok(())
    }

    /// The tokens that a slot's constraint allows next. `ends_unseen` says whether a fault may
    /// have missed the end of reasoning within this step.
    fn mask(&mut self, slot: SlotIndex, ends_unseen: bool) -> Option<Vec<TokenId>> {
        let engine_slot = self.slots.get_mut(&slot)?;
        let Some(matcher) = &engine_slot.matcher else {
            let leaked = self.last_mask.clone();
            return leaked.filter(|_| self.matcher_fault == Some(MatcherFault::LeakedMask));
        };
        let own = matcher.allowed();
        let before = engine_slot.last_mask.replace(own.clone());
        self.last_mask = Some(own.clone());
        match self.matcher_fault {
            Some(MatcherFault::StaleMask) => before.or(Some(own)),
            Some(MatcherFault::ThinkingEndMissed) if ends_unseen && !matcher.is_thinking() => None,
            _ => Some(own),
        }
    }

    fn sample(
        &mut self,
        slot: SlotIndex,
        position: u32,
        last: KvHash,
        allowed: Option<&[TokenId]>,
    ) -> Result<TokenId, String> {
        let engine_slot = self.slots.get_mut(&slot).ok_or("no such slot")?;
        let token = (self.draw_token)(&TokenDraw {
            open: &engine_slot.open,
            position,
            last,
            salt: self.draw_salt,
            allowed,
        });
        engine_slot.open.output.push(token);
        if let Some(matcher) = &mut engine_slot.matcher {
            matcher.push(token);
            if let Some(at) = matcher.strayed_at() {
                return Err(format!("{slot} leaves its constraint at output token {at}"));
            }
        }
        Ok(token)
    }

    fn cell_index(&self, blocks: &[BlockIndex], position: usize) -> Result<usize, String> {
        let block = blocks
            .get(position / self.block_tokens)
            .ok_or_else(|| format!("no block for position {position}"))?;
        let place = block.0 as usize * self.block_tokens + position % self.block_tokens;
        if place >= self.cells.len() {
            return Err(format!("{block} is outside the pool"));
        }
        Ok(place)
    }

    /// The blocks and state slots that a step writes to.
    pub fn blocks_written(&self, plan: &StepPlan) -> Vec<(KvPlane, BlockIndex)> {
        let size = self.block_tokens as u32;
        let mut blocks = Vec::new();
        for segment in &plan.segments {
            let first = segment.position / size;
            let last = (segment.position + segment.len.max(1) - 1) / size;
            for ordinal in first..=last {
                let block = segment.blocks.get(ordinal as usize);
                blocks.extend(block.map(|block| (KvPlane::Blocks, *block)));
            }
            let window = segment.window.iter().flat_map(WindowTable::entries);
            let window = window.filter(|(ordinal, _)| (first..=last).contains(ordinal));
            blocks.extend(window.map(|(_, block)| (KvPlane::Window, block)));
            let slots = segment.state.into_iter().flat_map(slots_written);
            blocks.extend(slots.map(|slot| (KvPlane::State, slot)));
        }
        blocks
    }

    /// Hashes the state of this engine.
    pub fn hash_into(&self, print: &mut impl Hasher) {
        self.cells.hash(print);
        self.states.hash(print);
        if self.window.is_some() {
            self.windows.hash(print);
        }
        for (slot, engine_slot) in &self.slots {
            slot.hash(print);
            engine_slot.open.prompt.hash(print);
            engine_slot.open.output.hash(print);
            engine_slot.matcher.hash(print);
        }
    }

    pub fn read(&self, block: BlockIndex) -> &[Option<KvCell>] {
        let first = block.0 as usize * self.block_tokens;
        &self.cells[first..first + self.block_tokens]
    }

    /// Writes cells into a block from token `offset` on.
    pub fn write(&mut self, block: BlockIndex, offset: usize, cells: &[Option<KvCell>]) {
        let first = block.0 as usize * self.block_tokens + offset;
        self.cells[first..first + cells.len()].copy_from_slice(cells);
    }

    /// The cells of a block, or of a piece of the state in slot `block`.
    pub fn read_unit(&self, unit: KvUnit, block: BlockIndex) -> &[Option<KvCell>] {
        match unit.plane {
            KvPlane::Blocks => self.read(block),
            KvPlane::State => {
                let state = &self.states[block.0 as usize];
                let first = unit.ordinal as usize * self.unit_cells;
                &state[first..state.len().min(first + self.unit_cells)]
            }
            KvPlane::Window => {
                let cells = &self.windows[block.0 as usize];
                let first = (unit.ordinal % self.window_pieces) as usize * self.unit_cells;
                &cells[first..cells.len().min(first + self.unit_cells)]
            }
        }
    }

    /// Writes cells into a block, or into a piece of the state in slot `block`, from cell `offset`
    /// on.
    pub fn write_unit(
        &mut self,
        unit: KvUnit,
        block: BlockIndex,
        offset: usize,
        cells: &[Option<KvCell>],
    ) {
        match unit.plane {
            KvPlane::Blocks => self.write(block, offset, cells),
            KvPlane::State => {
                let first = unit.ordinal as usize * self.unit_cells + offset;
                let state = &mut self.states[block.0 as usize];
                state[first..first + cells.len()].copy_from_slice(cells);
            }
            KvPlane::Window => {
                let piece = (unit.ordinal % self.window_pieces) as usize;
                let first = piece * self.unit_cells + offset;
                let window = &mut self.windows[block.0 as usize];
                window[first..first + cells.len()].copy_from_slice(cells);
            }
        }
    }

    /// Writes garbage where the step was to write: a failed step leaves undefined KV.
    pub fn write_garbage(&mut self, plan: &StepPlan, mut garbage: impl FnMut() -> u64) {
        let size = self.block_tokens as u32;
        for segment in &plan.segments {
            for position in segment.position..segment.position + segment.len {
                let cell = KvCell {
                    kv: KvHash(garbage()),
                    salt: 0,
                };
                if let Some(block) = segment.blocks.get((position / size) as usize) {
                    self.write(*block, (position % size) as usize, &[Some(cell)]);
                }
            }
            self.write_window_garbage(segment, &mut garbage);
            for slot in segment.state.into_iter().flat_map(slots_written) {
                let kv = KvHash(garbage());
                self.states[slot.0 as usize].fill(Some(KvCell { kv, salt: 0 }));
            }
        }
    }
}

impl CellEngine {
    fn write_window_garbage(&mut self, segment: &Segment, mut garbage: impl FnMut() -> u64) {
        let size = self.block_tokens as u32;
        let positions = segment.position..segment.position + segment.len;
        for (ordinal, block) in segment.window.iter().flat_map(WindowTable::entries) {
            let cells = &mut self.windows[block.0 as usize];
            let each = cells.len() / self.block_tokens;
            for (position, cells) in (ordinal * size..).zip(cells.chunks_mut(each)) {
                if positions.contains(&position) {
                    let kv = KvHash(garbage());
                    cells.fill(Some(KvCell { kv, salt: 0 }));
                }
            }
        }
    }
}

impl CellEngineSlot {
    fn history(&self) -> Vec<TokenId> {
        let prompt = self.open.prompt.iter();
        prompt.chain(&self.open.output).copied().collect()
    }
}

impl EngineCosts {
    pub fn step_time(&self, plan: &StepPlan) -> Duration {
        let mut nanos = self.step;
        for segment in &plan.segments {
            nanos += self.context_token * u64::from(segment.position + segment.len);
            nanos += if segment.history_len() == 1 {
                self.decode_sequence * u64::from(segment.len)
            } else {
                self.prefill_token * u64::from(segment.len)
            };
        }
        Duration::from_nanos(nanos)
    }
}

/// The score of a prompt token; the numbers mean nothing here.
fn prompt_score(token: TokenId) -> SampledToken {
    let scores = TokenScores {
        normalizer: 0.0,
        chosen: 0.0,
        top: Vec::new(),
    };
    SampledToken {
        token,
        scores: Some(scores),
    }
}
