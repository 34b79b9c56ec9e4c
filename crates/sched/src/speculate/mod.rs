//! Speculation: tokens are guessed, and a step verifies several at once.
//!
//! Owns: who is guessed for, and how often guesses come true. Never: changes a token: one that is drawn depends on what
//! is before it, its position and the seed, so a step that also runs guesses draws what steps without them would have
//! drawn one by one, and a guess only decides how many of them it draws.
//! Invariant: `computed` counts tokens that were drawn, never a guess. So what a wrong guess left in a block is beyond
//! all that is hashed, sent, swapped or moved, and is written over by the steps that come.
//!
//! What guesses is behind [`Guess`]: here a sequence's own tokens ([`lookup`]). All else takes a guess for what it is,
//! tokens, and would take a draft model's.

mod acceptance;
mod choose;
mod lookup;

pub(crate) use acceptance::Acceptance;

use crate::brain::Placed;
use crate::plan::Draft;
use crate::sequence::Phase;
use crate::{Brain, Drafting};
use choose::{Costs, Drafter};
use cleave_domain::{HandoffId, Sampled, TokenId, Work};
use lookup::{Index, Looking};
use serde::{Deserialize, Serialize};

/// How tokens are guessed from those that a sequence has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lookup {
    /// Tokens guessed for one sequence in one step, at most; at least 1.
    pub drafts_max: u32,
    /// Of the last tokens so many are looked for first; at least `match_min`.
    pub match_max: u32,
    /// And so many at least must have been there before; at least 1.
    pub match_min: u32,
}

/// Guesses what comes next.
pub(crate) trait Guess {
    /// At most so many tokens that may follow these; none where it has no idea.
    fn guess(&mut self, tokens: &[TokenId], most: usize) -> Vec<TokenId>;
}

/// What a sequence needs to be guessed for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Speculating {
    index: Index,
    /// What is guessed to come of the step under way, verified there or not.
    guess: Vec<TokenId>,
    /// How often guesses came true.
    acceptance: Acceptance,
}

impl Speculating {
    /// No step under way verifies a guess of it any more.
    pub(crate) fn forget_guess(&mut self) {
        self.guess.clear();
    }

    /// What of it decides the future, but for what follows from the tokens.
    pub(crate) fn fingerprint(&self) -> (&[TokenId], Acceptance) {
        (&self.guess, self.acceptance)
    }
}

impl Brain {
    // === before a step ===

    /// Adds guesses to a step, as many as are worth their rows, after everybody has found their place. They take
    /// no block that another sequence was promised.
    pub(crate) fn place_drafts(&mut self, draft: &mut Draft) -> Option<Drafting> {
        let lookup = self.limits.speculation?;
        let streams = draft.placed.iter().filter(|placed| placed.decodes());
        let streams_count = streams.count();
        if streams_count == 0 {
            return None;
        }
        let rows: u32 = draft.placed.iter().map(|placed| placed.tokens).sum();
        let drafters = self.drafters(lookup, draft);
        let costs = Costs {
            prices: self.learner.knows().then(|| self.learner.prices()),
            streams_count,
            decode: decode_work(draft),
            held: draft.held,
            room: self.limits.capacity.step_tokens_max - rows,
        };
        let (counts, drafting) = choose::counts(&costs, &drafters);
        for (drafter, count) in drafters.iter().zip(counts) {
            self.place_drafts_of(drafter.place, count, draft);
        }
        Some(drafting)
    }

    /// Guesses for all that draw their next token.
    fn drafters(&mut self, lookup: Lookup, draft: &Draft) -> Vec<Drafter> {
        let size = self.limits.capacity.block_tokens;
        let mut blocks_free = self.pool.blocks_available();
        let mut drafters = Vec::new();
        for (place, placed) in draft.placed.iter().enumerate() {
            let most = self.drafts_allowed(placed, lookup);
            let Some(sequence) = self.sequences.get_mut(&placed.handoff) else {
                continue;
            };
            let (index, bounds) = (&mut sequence.speculating.index, lookup);
            let guess = match most {
                0 => Vec::new(),
                most => Looking { index, bounds }.guess(&sequence.tokens, most as usize),
            };
            let wanted = u32::try_from(guess.len()).expect("a guess is short");
            sequence.speculating.guess = guess;
            if wanted == 0 {
                continue;
            }
            let own = sequence.table.len() as u32 + sequence.promise.count();
            let lacks = (sequence.len() + wanted).div_ceil(size).saturating_sub(own);
            let taken = lacks.min(blocks_free);
            blocks_free -= taken;
            drafters.push(Drafter {
                place,
                tokens: sequence.len(),
                most: wanted.min((own + taken) * size - sequence.len()),
                share: sequence.speculating.acceptance.share(self.acceptance),
            });
        }
        drafters
    }

    /// How many tokens may be guessed for a sequence of a step: not past its end, and none where it may have to stand
    /// still after any token.
    fn drafts_allowed(&self, placed: &Placed, lookup: Lookup) -> u32 {
        let Some(sequence) = self.sequences.get(&placed.handoff) else {
            return 0;
        };
        if !placed.decodes() || sequence.moving.is_some() {
            return 0;
        }
        let context_left = self.limits.capacity.context_tokens_max - sequence.len();
        let left = sequence.tokens_left().min(context_left);
        lookup.drafts_max.min(left.saturating_sub(1))
    }

    /// The first `count` tokens guessed for a sequence join its segment.
    fn place_drafts_of(&mut self, place: usize, count: u32, draft: &mut Draft) {
        let size = self.limits.capacity.block_tokens;
        let (placed, segment) = (&mut draft.placed[place], &mut draft.plan.segments[place]);
        let sequence = self.sequences.get_mut(&placed.handoff);
        let sequence = sequence.expect("it is in the draft");
        let blocks = (sequence.len() + count).div_ceil(size);
        while sequence.table.len() < blocks as usize {
            let block = self.pool.take_promised(&mut sequence.promise);
            let block = block.or_else(|| self.pool.take());
            let block = block.expect("blocks were counted");
            sequence.table.push(block);
            segment.blocks.push(block.block);
        }
        segment.len += count;
        segment.drafts = sequence.speculating.guess[..count as usize].to_vec();
        placed.tokens += count;
        placed.drafts = count;
    }

    // === after it ===

    /// Compares what was guessed with what was drawn, whether the step verified it or not: so it is always known
    /// what guesses are worth, and none need be run to find out.
    pub(crate) fn weigh_guess(&mut self, handoff: HandoffId, drawn: &[Sampled]) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let speculating = &mut sequence.speculating;
        for (guessed, sampled) in std::mem::take(&mut speculating.guess).iter().zip(drawn) {
            let is_right = *guessed == sampled.token;
            speculating.acceptance.of_sequence(is_right);
            self.acceptance.of_worker(is_right);
            if !is_right {
                return;
            }
        }
    }
}

/// What a step's streams would cost alone.
fn decode_work(draft: &Draft) -> Work {
    let both = draft.placed.iter().zip(&draft.plan.segments);
    both.filter(|(placed, _)| placed.decodes())
        .map(|(_, segment)| Work::decode(u64::from(segment.position) + 1))
        .fold(Work::default(), |sum, work| sum + work)
}

impl Placed {
    /// Whether a running sequence draws its next token, and nothing else of it has to be run.
    pub(crate) fn decodes(&self) -> bool {
        self.phase == Phase::Decode && self.samples && self.tokens - self.drafts == 1
    }
}
