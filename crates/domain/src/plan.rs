//! What a scheduler asks of an engine in one step, and what comes back. No requests here: slots,
//! block indices and token ids.

use crate::{BlockIndex, Sampling, SlotIndex, StepId, TokenId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// One forward pass over a joint batch of prefill chunks and decode tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepPlan {
    /// Which step; the result names it.
    pub step: StepId,
    /// Slots taken with this step; one that was taken before is taken over.
    pub opens: Vec<OpenSlot>,
    /// At most one per slot. The engine may reorder the work, never the results.
    pub segments: Vec<Segment>,
}

/// A sequence takes a slot: all that the engine must know of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenSlot {
    /// The place.
    pub slot: SlotIndex,
    /// How its tokens are drawn.
    pub sampling: Arc<Sampling>,
    /// The prompt, `[tokens]`.
    pub prompt: Arc<[TokenId]>,
    /// Output so far, `[tokens]`; prompt and output together are the slot's history, and every
    /// token drawn in the slot is appended to it.
    pub output: Vec<TokenId>,
    /// Tokens banned until `min_tokens` output tokens exist.
    pub stop_tokens: Arc<[TokenId]>,
    /// See `stop_tokens`.
    pub min_tokens: u32,
}

/// A run of consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Segment {
    /// The sequence's slot.
    pub slot: SlotIndex,
    /// Position of the first token to run: as many tokens have their KV in `blocks` already.
    pub position: u32,
    /// How many tokens to run, at least 1: `history[position..position + len]`, of which the last ones may be
    /// `drafts`.
    pub len: u32,
    /// The sequence's block table, `[ceil((position + len) / block_tokens)]` or longer.
    pub blocks: Vec<BlockIndex>,
    /// What to compute beyond the KV.
    pub logits: LogitsWanted,
    /// Tokens guessed to follow the history, fewer than `len`, only with [`LogitsWanted::Sample`]: the segment ends
    /// with them. The token after the history is drawn; where it is the first draft the one after that too, and so
    /// on. The KV of drafts that were not drawn is good for nothing, and later steps write over it.
    #[serde(default)]
    pub drafts: Vec<TokenId>,
}

impl Segment {
    /// Tokens of the history that it runs.
    pub fn history_len(&self) -> u32 {
        let drafts = u32::try_from(self.drafts.len()).unwrap_or(u32::MAX);
        self.len.saturating_sub(drafts)
    }
}

/// What a segment's last layer is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogitsWanted {
    /// Nothing: a chunk of a prompt that goes on.
    No,
    /// Draw the next token after the segment's last one.
    Sample,
    /// Score the token that follows each position of the segment; draw none.
    Score,
    /// As `Score` for all but the last position, and draw the token after that.
    ScoreAndSample,
}

impl LogitsWanted {
    /// Whether a token is drawn.
    pub fn samples(self) -> bool {
        matches!(self, Self::Sample | Self::ScoreAndSample)
    }
}

/// What a step gave.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepResult {
    /// Which step.
    pub step: StepId,
    /// For each segment that asked to sample, in the order of the plan, the token drawn, and one more for each of
    /// its leading drafts that were drawn.
    pub sampled: Vec<(SlotIndex, Sampled)>,
    /// For segments that asked for scores: for each position of the segment the scores of the token
    /// at `position + i + 1` of the history (across the segment's end too), where there is one.
    pub prompt_scores: Vec<(SlotIndex, Vec<Sampled>)>,
}

/// A token drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampled {
    /// The token.
    pub token: TokenId,
    /// Present when the sampling asked for log-probabilities.
    pub scores: Option<Scores>,
}

/// The model's own opinion, before bias, penalties and temperature.
/// The log-probability of a token is its logit less `normalizer`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    /// log Σ exp(logit) over the vocabulary.
    pub normalizer: f32,
    /// The logit of the token drawn.
    pub chosen: f32,
    /// The most likely tokens with their logits, descending, ties by smaller id.
    pub top: Vec<(TokenId, f32)>,
}
