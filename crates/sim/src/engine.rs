//! An engine that computes nothing, at a price, over a pool whose every cell remembers its writer.
//!
//! Owns: the simulated KV pool and the slots' histories. Never: decides what runs.
//! Invariant: a step reads exactly the cells that its sequence's tokens would have written; any
//! other cell, whoever left it there, is a violation.

use crate::dice::Dice;
use crate::model::{Kv, draw};
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, Sampled, Scores, Segment, SlotIndex, StepPlan, StepResult,
    TokenId,
};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::time::Duration;

/// The KV of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cell {
    pub(crate) kv: Kv,
    /// Whose content it is; content is shared only within a salt.
    pub(crate) salt: u64,
}

/// What running costs, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Price {
    /// Each step.
    pub(crate) step: u64,
    /// Each prompt token.
    pub(crate) prefill_token: u64,
    /// Each sequence that generates.
    pub(crate) decode_sequence: u64,
    /// Each token attended to.
    pub(crate) context_token: u64,
    /// Each block copied in or out.
    pub(crate) copy: u64,
    /// Bytes, not nanoseconds: writes of about so many between two steps; more wait.
    pub(crate) write_bytes: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Engine {
    block_tokens: usize,
    cells: Vec<Option<Cell>>,
    /// Colours every draw: engines of one voice agree on every token.
    pub(crate) voice: u64,
    slots: BTreeMap<SlotIndex, Seat>,
}

#[derive(Clone, Debug)]
struct Seat {
    open: OpenSlot,
    salt: u64,
}

impl Engine {
    pub(crate) fn new(blocks_count: u32, block_tokens: u32, voice: u64) -> Self {
        Self {
            voice,
            block_tokens: block_tokens as usize,
            cells: vec![None; blocks_count as usize * block_tokens as usize],
            slots: BTreeMap::new(),
        }
    }

    /// Runs a step; the salts of the sequences' owners are looked up by seed, which no two requests
    /// of a world share.
    pub(crate) fn step(
        &mut self,
        plan: &StepPlan,
        salt_of: impl Fn(u64) -> u64,
    ) -> Result<StepResult, String> {
        for open in &plan.opens {
            let salt = salt_of(open.sampling.seed);
            let open = open.clone();
            self.slots.insert(open.slot, Seat { open, salt });
        }
        let mut result = StepResult {
            step: plan.step,
            ..StepResult::default()
        };
        let mut seen: Vec<SlotIndex> = Vec::new();
        for segment in &plan.segments {
            if seen.contains(&segment.slot) {
                return Err(format!("{} is twice in {}", segment.slot, plan.step));
            }
            seen.push(segment.slot);
            self.run(segment, &mut result)?;
        }
        Ok(result)
    }

    fn run(&mut self, segment: &Segment, result: &mut StepResult) -> Result<(), String> {
        let Some(seat) = self.slots.get(&segment.slot) else {
            return Err(format!("{} was never opened", segment.slot));
        };
        let salt = seat.salt;
        let history = seat.history();
        let (known, end) = (history.len(), (segment.position + segment.len) as usize);
        let told = (segment.position + segment.history_len()) as usize;
        if segment.history_len() == 0 || told > known {
            return Err(format!(
                "{} runs {}+{} of {} tokens",
                segment.slot, segment.position, segment.len, known
            ));
        }
        // Drafts are written like tokens, whether they will be drawn or not.
        let run = [&history[..told], &segment.drafts].concat();
        let (mut last, mut last_told) = (Kv::default(), Kv::default());
        for (position, token) in run.iter().enumerate() {
            last = last.then(*token);
            if position < told {
                last_told = last;
            }
            let place = self.place(&segment.blocks, position)?;
            if position >= segment.position as usize {
                self.cells[place] = Some(Cell { kv: last, salt });
            } else if self.cells[place] != Some(Cell { kv: last, salt }) {
                return Err(format!(
                    "{} reads b{:x} at position {position}: not what was written for it",
                    segment.slot,
                    place / self.block_tokens
                ));
            }
        }
        if matches!(
            segment.logits,
            LogitsWanted::Score | LogitsWanted::ScoreAndSample
        ) {
            let first = segment.position as usize + 1;
            let scored = history[first..history.len().min(end + 1)]
                .iter()
                .map(|token| scored(*token))
                .collect();
            result.prompt_scores.push((segment.slot, scored));
        }
        if matches!(
            segment.logits,
            LogitsWanted::Sample | LogitsWanted::ScoreAndSample
        ) {
            if told != known {
                return Err(format!("{} samples before its end", segment.slot));
            }
            self.draw(segment, last_told, result)?;
        }
        Ok(())
    }

    /// A token, and one more for each draft that was drawn.
    fn draw(
        &mut self,
        segment: &Segment,
        mut last: Kv,
        result: &mut StepResult,
    ) -> Result<(), String> {
        let mut drafts = segment.drafts.iter();
        for position in segment.position + segment.history_len().. {
            let token = self.sample(segment.slot, position, last)?;
            let sampled = Sampled {
                token,
                scores: None,
            };
            result.sampled.push((segment.slot, sampled));
            last = last.then(token);
            if drafts.next() != Some(&token) {
                break;
            }
        }
        Ok(())
    }

    fn sample(&mut self, slot: SlotIndex, position: u32, last: Kv) -> Result<TokenId, String> {
        let seat = self.slots.get_mut(&slot).ok_or("no such slot")?;
        let open = &mut seat.open;
        let banned: &[TokenId] = if (open.output.len() as u32) < open.min_tokens {
            &open.stop_tokens
        } else {
            &[]
        };
        let token = draw(open.sampling.seed ^ self.voice, position, last, banned);
        open.output.push(token);
        Ok(token)
    }

    fn place(&self, blocks: &[BlockIndex], position: usize) -> Result<usize, String> {
        let block = blocks
            .get(position / self.block_tokens)
            .ok_or_else(|| format!("no block for position {position}"))?;
        let place = block.0 as usize * self.block_tokens + position % self.block_tokens;
        if place >= self.cells.len() {
            return Err(format!("{block} is outside the pool"));
        }
        Ok(place)
    }

    /// The blocks that a step writes to.
    pub(crate) fn written(&self, plan: &StepPlan) -> Vec<BlockIndex> {
        let size = self.block_tokens as u32;
        let mut blocks = Vec::new();
        for segment in &plan.segments {
            let first = segment.position / size;
            let last = (segment.position + segment.len.max(1) - 1) / size;
            for ordinal in first..=last {
                blocks.extend(segment.blocks.get(ordinal as usize));
            }
        }
        blocks
    }

    /// Feeds all that tells this engine from another.
    pub(crate) fn feed(&self, print: &mut impl Hasher) {
        self.cells.hash(print);
        for (slot, seat) in &self.slots {
            slot.hash(print);
            seat.open.prompt.hash(print);
            seat.open.output.hash(print);
        }
    }

    pub(crate) fn read(&self, block: BlockIndex) -> &[Option<Cell>] {
        let first = block.0 as usize * self.block_tokens;
        &self.cells[first..first + self.block_tokens]
    }

    /// Writes cells from token `offset` of the block on.
    pub(crate) fn write(&mut self, block: BlockIndex, offset: usize, cells: &[Option<Cell>]) {
        let first = block.0 as usize * self.block_tokens + offset;
        self.cells[first..first + cells.len()].copy_from_slice(cells);
    }

    /// Something else is where the step was to write.
    pub(crate) fn scribble(&mut self, plan: &StepPlan, dice: &mut Dice) {
        let size = self.block_tokens as u32;
        for segment in &plan.segments {
            for position in segment.position..segment.position + segment.len {
                let cell = Cell {
                    kv: Kv(dice.next()),
                    salt: 0,
                };
                if let Some(block) = segment.blocks.get((position / size) as usize) {
                    self.write(*block, (position % size) as usize, &[Some(cell)]);
                }
            }
        }
    }
}

impl Seat {
    fn history(&self) -> Vec<TokenId> {
        let prompt = self.open.prompt.iter();
        prompt.chain(&self.open.output).copied().collect()
    }
}

impl Price {
    pub(crate) fn of(&self, plan: &StepPlan) -> Duration {
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

/// The score of a token that was given, not drawn; the numbers mean nothing here.
fn scored(token: TokenId) -> Sampled {
    let scores = Scores {
        normalizer: 0.0,
        chosen: 0.0,
        top: Vec::new(),
    };
    Sampled {
        token,
        scores: Some(scores),
    }
}
