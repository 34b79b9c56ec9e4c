//! The plan of one engine step, and its result. It names slots, block indices and token ids, and no
//! requests.

use crate::{AdapterId, BlockIndex, Pooling, SamplingParams, SlotIndex, StepId, TokenId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// One forward pass over a joint batch of prefill chunks and decode tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepPlan {
    /// The step; the result names it.
    pub step: StepId,
    /// Slots assigned with this step; a slot in use is reassigned.
    pub opens: Vec<OpenSlot>,
    /// At most one segment for each slot. The engine may reorder the work, never the results.
    pub segments: Vec<Segment>,
    /// For each segment with [`LogitsWanted::Pool`], in their order: its vector.
    #[serde(default)]
    pub poolings: Vec<SegmentPooling>,
}

/// The vector that a segment contributes to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SegmentPooling {
    /// The slot of the segment.
    pub slot: SlotIndex,
    /// The kind of the vector.
    pub pooling: Pooling,
    /// The sum over all tokens before the segment, `(hidden)`, of a [`Pooling::Mean`] that has any.
    /// The engine keeps nothing between steps, so a sequence may lose its slot.
    pub sum: Option<Arc<[f64]>>,
}

/// Assigns a slot to a sequence, with all that the engine must know of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenSlot {
    /// The slot that the sequence gets.
    pub slot: SlotIndex,
    /// The sampling parameters of the sequence.
    pub sampling: Arc<SamplingParams>,
    /// The tokens of the prompt, `[tokens]`.
    pub prompt: Arc<[TokenId]>,
    /// The output so far, `[tokens]`; prompt and output together are the history of the slot, and
    /// every token drawn in the slot is appended to it.
    pub output: Vec<TokenId>,
    /// Tokens that may not be drawn until `min_tokens` output tokens exist, unless a constraint
    /// allows nothing else.
    pub stop_tokens: Arc<[TokenId]>,
    /// Output tokens before `stop_tokens` may be drawn.
    pub min_tokens: u32,
    /// The adapter of all segments of the slot, which the engine has loaded.
    #[serde(default)]
    pub adapter: Option<AdapterId>,
}

/// A run of consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Segment {
    /// The slot of the sequence.
    pub slot: SlotIndex,
    /// Position of the first token to run: all tokens before it have their KV in `blocks` already.
    pub position: u32,
    /// The number of tokens to run, at least 1: `history[position..position + len]`, of which the
    /// last ones may be `drafts`.
    pub len: u32,
    /// The sequence's block table, `[ceil((position + len) / block_tokens)]` or longer.
    pub blocks: Vec<BlockIndex>,
    /// The result beyond the KV.
    pub logits: LogitsWanted,
    /// Draft tokens after the history, fewer than `len`, only with [`LogitsWanted::Sample`]; they
    /// end the segment. The token after the history is drawn; if it equals the first draft the next
    /// one is drawn too, and so on. The KV of rejected drafts is invalid, and later steps overwrite
    /// it. An engine leaves out drafts that the sequence's constraint does not allow.
    #[serde(default)]
    pub drafts: Vec<TokenId>,
    /// The sequence's state, where the model has one.
    #[serde(default)]
    pub state: Option<SegmentState>,
    /// The blocks of the window plane, where the model has one: those of all positions that the
    /// segment runs or its layers with a window read.
    #[serde(default)]
    pub window: Option<WindowTable>,
}

/// The blocks of a sequence in the window plane. Those before the first are no more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WindowTable {
    /// The ordinal in the sequence of the first block.
    pub first: u32,
    /// The blocks, in order: `blocks[i]` has positions `(first + i) × block_tokens ..`.
    pub blocks: Vec<BlockIndex>,
}

impl WindowTable {
    /// The blocks with their ordinals.
    pub fn entries(&self) -> impl Iterator<Item = (u32, BlockIndex)> + use<'_> {
        (self.first..).zip(self.blocks.iter().copied())
    }
}

/// The state of a segment's sequence: what its layers without keys and values know of all tokens
/// so far. Slots are indices of the state plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SegmentState {
    /// The slot that is read and written; at position 0 it counts as empty, whatever is in it.
    pub slot: BlockIndex,
    /// A snapshot after `position` tokens, copied to `slot` before the segment; never at position
    /// 0. `None`: `slot` has the state after `position` tokens.
    pub restore: Option<BlockIndex>,
    /// A slot that gets a copy of `slot` after the segment's last token.
    pub snapshot: Option<BlockIndex>,
}

impl Segment {
    /// The number of history tokens that it runs.
    pub fn history_len(&self) -> u32 {
        let drafts = u32::try_from(self.drafts.len()).unwrap_or(u32::MAX);
        self.len.saturating_sub(drafts)
    }
}

/// The use of the last layer of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogitsWanted {
    /// No logits: a chunk of a prompt that continues.
    No,
    /// Draw the next token after the segment's last one.
    Sample,
    /// Score the token that follows each position of the segment; draw none.
    Score,
    /// As `Score` for all but the last position, and draw the token after that.
    ScoreAndSample,
    /// Pool hidden states, as [`StepPlan::poolings`] says; draw none.
    Pool,
}

impl LogitsWanted {
    /// Whether a token is drawn.
    pub fn samples(self) -> bool {
        matches!(self, Self::Sample | Self::ScoreAndSample)
    }
}

/// The result of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepResult {
    /// The step that has this result.
    pub step: StepId,
    /// For each segment with a sampled token, in the order of the plan: the token drawn, and one
    /// more for each accepted leading draft.
    pub sampled: Vec<(SlotIndex, SampledToken)>,
    /// For each segment with scores: for each of its positions the scores of the token at `position
    /// + i + 1` of the history (also past the end of the segment), where there is one.
    pub prompt_scores: Vec<(SlotIndex, Vec<SampledToken>)>,
    /// For slots whose constraint leaves one text only: the tokens that will probably be drawn
    /// next. They are proposals for drafts, and change no token.
    #[serde(default)]
    pub forced: Vec<(SlotIndex, Vec<TokenId>)>,
    /// For each entry of [`StepPlan::poolings`], in their order: the values of its vector, or the
    /// sum so far of a mean. Sums add one token after the other in f64, so that they do not depend
    /// on the chunks of the prompt. Every value is finite.
    #[serde(default)]
    pub pooled: Vec<(SlotIndex, Arc<[f64]>)>,
}

/// A token that the engine drew.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    /// The token that was drawn.
    pub token: TokenId,
    /// The scores, if the sampling requests log-probabilities.
    pub scores: Option<TokenScores>,
}

/// The raw scores of the model, before bias, penalties and temperature. The log-probability of a
/// token is its logit minus `normalizer`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenScores {
    /// log Σ exp(logit) over the vocabulary.
    pub normalizer: f32,
    /// The logit of the token drawn.
    pub chosen: f32,
    /// The most likely tokens with their logits, descending, ties by smaller id.
    pub top: Vec<(TokenId, f32)>,
}
