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
    /// Seats taken with this step; a seat that was taken before is taken over.
    pub opens: Vec<OpenSlot>,
    /// At most one per seat. The engine may reorder the work, never the results.
    pub segments: Vec<Segment>,
}

/// A sequence takes a seat: all that the sampler must know of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenSlot {
    /// The seat.
    pub slot: SlotIndex,
    /// How its tokens are drawn.
    pub sampling: Arc<Sampling>,
    /// Prompt and output so far, `[tokens]`; every token drawn in this seat is appended.
    pub history: Vec<TokenId>,
    /// The first `prompt_count` tokens of the history are the prompt.
    pub prompt_count: u32,
    /// Tokens banned until `min_tokens` output tokens exist.
    pub stop_tokens: Arc<[TokenId]>,
    /// See `stop_tokens`.
    pub min_tokens: u32,
}

/// A run of consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Segment {
    /// The sequence's seat.
    pub slot: SlotIndex,
    /// The tokens to run, `[len]`, `len >= 1`.
    pub tokens: Vec<TokenId>,
    /// Position of the first of them: as many tokens have their KV in `blocks` already.
    pub position: u32,
    /// The sequence's block table, `[ceil((position + len) / block_tokens)]` or longer.
    pub blocks: Vec<BlockIndex>,
    /// What to compute beyond the KV.
    pub logits: LogitsWanted,
}

/// What a segment's last layer is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogitsWanted {
    /// Nothing: a chunk of a prompt that goes on.
    No,
    /// Draw the next token after the segment's last one.
    Sample,
    /// As `Sample` when `sample` is set; also score each token of the segment that has a
    /// predecessor in it, and the first one against the previous segment's end is not scored.
    ScorePrompt {
        /// Draw the next token too.
        sample: bool,
    },
}

/// What a step gave.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepResult {
    /// Which step.
    pub step: StepId,
    /// One per segment that asked to sample, in the order of the plan.
    pub sampled: Vec<Sampled>,
    /// For segments that asked for prompt scores: seat, then for each position of the segment the
    /// scores of the token that follows that position in the sequence (`position + i + 1`), where
    /// the sequence has one.
    pub prompt_scores: Vec<(SlotIndex, Vec<Sampled>)>,
}

/// A token drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampled {
    /// The seat it was drawn in.
    pub slot: SlotIndex,
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
