//! Speculation: draft tokens are proposed, and a step verifies several at once.
//!
//! Owns: which sequences get drafts, and how often these are accepted. Never: changes a token: a
//! drawn token depends on those before it, its position and the seed, so a step that also runs
//! drafts draws what steps without them would have drawn one by one, and a draft only decides how
//! many of them it draws.
//! Invariant: `computed` counts tokens that were drawn, never a draft. So the KV of a rejected
//! draft is beyond all that is hashed, sent, swapped or moved, and later steps overwrite it.
//!
//! The source of drafts is behind [`DraftSource`]: here a sequence's own tokens ([`lookup`]).
//! Tokens that a constraint forces, which the engine reports, are better drafts and come first.
//! Everything else treats drafts as tokens, and would accept a draft model's.

mod acceptance;
mod choose;
mod lookup;

pub(crate) use acceptance::DraftAcceptance;

use crate::batch::{SegmentInFlight, StepBuilder};
use crate::forecast::WorkForecast;
use crate::memory::{KvMemory, SequenceWindow};
use crate::sequences::SequenceTable;
use crate::{DraftOutcome, WorkerLimits};
use acceptance::DraftKind;
use choose::{DraftCandidate, DraftCosts};
use cleave_domain::{SampledToken, StepWork, TokenId};
use cleave_kv::PlanePool;
use lookup::{NgramIndex, PromptLookup};
use serde::{Deserialize, Serialize};
use std::hash::Hash;

/// Limits of prompt lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupLimits {
    /// Draft tokens for one sequence in one step, at most; at least 1.
    pub drafts_max: u32,
    /// Longest run of last tokens that is searched for; at least `match_min`.
    pub match_max: u32,
    /// Shortest run that must have occurred before; at least 1.
    pub match_min: u32,
}

/// A source of draft tokens.
pub(crate) trait DraftSource {
    /// At most `most` tokens that may follow these; none without a proposal.
    fn draft(&mut self, tokens: &[TokenId], most: usize) -> Vec<TokenId>;
}

/// A sequence's state of speculation.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpeculationState {
    index: NgramIndex,
    /// Draft for the step under way, verified there or not.
    drafts: Vec<TokenId>,
    drafts_kind: DraftKind,
    /// Tokens that the sequence's constraint forces next, as far as the last step said.
    forced: Vec<TokenId>,
    acceptance: DraftAcceptance,
}

impl SpeculationState {
    /// Discards the draft: no step under way verifies it any more.
    pub(crate) fn discard_drafts(&mut self) {
        self.drafts.clear();
    }

    /// Takes the tokens that are forced after the sequence's last one; they replace others.
    pub(crate) fn propose(&mut self, forced: Vec<TokenId>) {
        self.forced = forced;
    }

    /// Compares the draft with the drawn tokens, whether the step verified it or not: so the
    /// acceptance is always known, and no draft need be run to measure it. `worker` is the
    /// acceptance over all sequences.
    pub(crate) fn compare(&mut self, drawn: &[SampledToken], worker: &mut DraftAcceptance) {
        for (guessed, sampled) in std::mem::take(&mut self.drafts).iter().zip(drawn) {
            let is_right = *guessed == sampled.token;
            let kind = self.drafts_kind;
            self.acceptance.observe_for_sequence(kind, is_right);
            worker.observe_for_worker(kind, is_right);
            if !is_right {
                return;
            }
        }
    }

    /// The part of it that decides the future, without what follows from the tokens.
    pub(crate) fn fingerprint(&self) -> impl Hash {
        (
            &self.drafts,
            self.drafts_kind,
            &self.forced,
            self.acceptance,
        )
    }
}

/// The choice of drafts for a step.
pub(crate) struct Drafting<'a> {
    pub(crate) limits: &'a WorkerLimits,
    pub(crate) sequences: &'a mut SequenceTable,
    pub(crate) memory: &'a mut KvMemory,
    pub(crate) forecast: &'a WorkForecast,
    pub(crate) acceptance: &'a DraftAcceptance,
}

impl Drafting<'_> {
    /// Adds drafts to a step, as many as are worth their rows, after every sequence has its place.
    /// They take no block that another sequence has reserved.
    pub(crate) fn place_drafts(&mut self, draft: &mut StepBuilder) -> Option<DraftOutcome> {
        let lookup = self.limits.speculation?;
        let streams = draft.segments.iter().filter(|placed| placed.decodes());
        let streams_count = streams.count();
        if streams_count == 0 {
            return None;
        }
        let rows: u32 = draft.segments.iter().map(|placed| placed.tokens).sum();
        let drafters = self.drafters(lookup, draft);
        let costs = DraftCosts {
            prices: self.forecast.has_prices().then(|| self.forecast.prices()),
            streams_count,
            decode: decode_work(draft),
            held: draft.held,
            rows_left: self.limits.capacity.step_tokens_max - rows,
        };
        let (counts, drafting) = choose::draft_counts(&costs, &drafters);
        for (drafter, count) in drafters.iter().zip(counts) {
            self.place_drafts_of(drafter.place, count, draft);
        }
        Some(drafting)
    }

    /// Drafts for all sequences that draw their next token.
    fn drafters(&mut self, lookup: LookupLimits, draft: &StepBuilder) -> Vec<DraftCandidate> {
        let size = self.limits.capacity.block_tokens;
        let mut blocks_free = self.memory.blocks().blocks_available();
        let windows = self.memory.windows();
        let mut windows_free = windows.map_or(0, PlanePool::blocks_available);
        let mut drafters = Vec::new();
        for (place, placed) in draft.segments.iter().enumerate() {
            let most = self.drafts_allowed(placed, lookup);
            let Some(sequence) = self.sequences.get_mut(placed.handoff) else {
                continue;
            };
            let (index, bounds) = (&mut sequence.speculating.index, lookup);
            let mut guess = std::mem::take(&mut sequence.speculating.forced);
            guess.truncate(most as usize);
            let kind = if guess.is_empty() {
                DraftKind::Guessed
            } else {
                DraftKind::Forced
            };
            if kind == DraftKind::Guessed && most > 0 {
                guess = PromptLookup { index, bounds }.draft(&sequence.tokens, most as usize);
            }
            let guessed = u32::try_from(guess.len()).expect("a guess is short");
            sequence.speculating.drafts = guess;
            sequence.speculating.drafts_kind = kind;
            if guessed == 0 {
                continue;
            }
            // A draft that needs more blocks than are free is cut to those that it gets.
            let own = sequence.kv.blocks() as u32;
            let lacks = (sequence.len() + guessed)
                .div_ceil(size)
                .saturating_sub(own);
            let extra_blocks = lacks.min(blocks_free);
            blocks_free -= extra_blocks;
            let mut reach = own + extra_blocks;
            if let Some(window) = sequence.kv.window() {
                let end = (sequence.len() + guessed).div_ceil(size);
                let extra_blocks = end.saturating_sub(window.reach()).min(windows_free);
                windows_free -= extra_blocks;
                reach = reach.min(window.reach() + extra_blocks);
            }
            drafters.push(DraftCandidate {
                place,
                tokens: sequence.len(),
                most: guessed.min(reach * size - sequence.len()),
                probability: (sequence.speculating.acceptance).probability(kind, *self.acceptance),
            });
        }
        drafters
    }

    /// How many draft tokens a sequence may have: not past its end, and none while it may have to
    /// pause after any token.
    fn drafts_allowed(&self, placed: &SegmentInFlight, lookup: LookupLimits) -> u32 {
        let Some(sequence) = self.sequences.get(placed.handoff) else {
            return 0;
        };
        if !placed.decodes() || sequence.moving.is_some() {
            return 0;
        }
        let context_left = self.limits.capacity.context_tokens_max - sequence.len();
        let left = sequence.tokens_left().min(context_left);
        lookup.drafts_max.min(left.saturating_sub(1))
    }

    /// Adds the first `count` draft tokens of a sequence to its segment.
    fn place_drafts_of(&mut self, place: usize, count: u32, draft: &mut StepBuilder) {
        let size = self.limits.capacity.block_tokens;
        let (placed, segment) = (&mut draft.segments[place], &mut draft.plan.segments[place]);
        let sequence = self.sequences.get_mut(placed.handoff);
        let sequence = sequence.expect("it is in the draft");
        let blocks = (sequence.len() + count).div_ceil(size);
        let held = sequence.kv.table().len();
        assert!(self.memory.grow(sequence, blocks), "blocks were counted");
        let new = sequence.kv.table()[held..].iter().map(|block| block.block);
        segment.blocks.extend(new);
        segment.window = sequence.kv.window().map(SequenceWindow::table);
        segment.len += count;
        segment.drafts = sequence.speculating.drafts[..count as usize].to_vec();
        placed.tokens += count;
        placed.drafts = count;
    }
}

/// Work of a step's streams alone.
fn decode_work(draft: &StepBuilder) -> StepWork {
    let both = draft.segments.iter().zip(&draft.plan.segments);
    both.filter(|(placed, _)| placed.decodes())
        .map(|(_, segment)| StepWork::decode(u64::from(segment.position) + 1))
        .fold(StepWork::default(), |sum, work| sum + work)
}
