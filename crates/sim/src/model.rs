//! The model of the simulated engines: the next token of a sequence.
//!
//! Owns: the draw, and the stream that a request must give. Never: knows blocks, workers or steps.
//! Invariant: a drawn token is a function of seed, position and the cell before it. So a request's
//! tokens equal the reference's whatever path it takes.

use cleave_domain::{FinishReason, POOLED_TOKEN, Request, SplitMix64, TokenId};
use cleave_testkit::{CellConstraint, KvHash, TokenDraw};

/// Token ids are `0..VOCAB`.
pub(crate) const VOCAB_SIZE: u64 = 50;

/// Requests with this bit in their seed mostly repeat a few tokens in turn.
pub(crate) const REPEATING_SEED_BIT: u64 = 1 << 20;
/// Number of the repeated tokens.
const REPEAT_PERIOD: u32 = 4;
/// One token in this many is not a repetition.
const UNREPEATED_ONE_IN: u64 = 8;

/// Draws the token of a slot, among those that its request allows.
pub(crate) fn draw_of_slot(slot: &TokenDraw<'_>) -> TokenId {
    let open = slot.open;
    let banned: &[TokenId] = if (open.output.len() as u32) < open.min_tokens {
        &open.stop_tokens
    } else {
        &[]
    };
    draw_token(
        open.sampling.seed ^ slot.salt,
        slot.position,
        slot.last,
        DrawableTokens {
            banned,
            allowed: slot.allowed,
        },
    )
}

/// The tokens that may be drawn.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DrawableTokens<'a> {
    /// Tokens that are not drawn, unless nothing else is allowed.
    pub(crate) banned: &'a [TokenId],
    /// The only tokens that are drawn, under a constraint.
    pub(crate) allowed: Option<&'a [TokenId]>,
}

/// Draws the token at `position`, after a sequence whose last cell is `last`.
pub(crate) fn draw_token(
    seed: u64,
    position: u32,
    last: KvHash,
    drawable: DrawableTokens<'_>,
) -> TokenId {
    let own =
        SplitMix64::finalize(SplitMix64::finalize(seed) ^ last.0 ^ (u64::from(position) << 40));
    let mut throw = if seed & REPEATING_SEED_BIT != 0 && !own.is_multiple_of(UNREPEATED_ONE_IN) {
        SplitMix64::finalize(SplitMix64::finalize(seed) ^ u64::from(position % REPEAT_PERIOD))
    } else {
        own
    };
    if let Some(allowed) = drawable.allowed {
        let is_unbanned = |token: &&TokenId| !drawable.banned.contains(token);
        let unbanned: Vec<TokenId> = allowed.iter().filter(is_unbanned).copied().collect();
        let choice = if unbanned.is_empty() {
            allowed
        } else {
            &unbanned
        };
        return choice[(throw % choice.len() as u64) as usize];
    }
    loop {
        let token = (throw % VOCAB_SIZE) as TokenId;
        if !drawable.banned.contains(&token) {
            return token;
        }
        throw = SplitMix64::finalize(throw.wrapping_add(1));
    }
}

/// The whole output that a request must give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReferenceStream {
    /// Output tokens from the first on, including those generated before.
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) reason: FinishReason,
}

/// Runs a request alone, in one go, without blocks. A vector has a reference of its own:
/// [`cleave_testkit::pooled_vector`].
pub(crate) fn reference_stream(request: &Request, context_tokens_max: u32) -> ReferenceStream {
    if request.pooling.is_some() {
        return ReferenceStream {
            tokens: vec![POOLED_TOKEN],
            reason: FinishReason::Length,
        };
    }
    let mut last = KvHash::default();
    for token in request.prompt.iter() {
        last = last.extend(*token);
    }
    let constraint = request.sampling.constraint.as_deref();
    let constraint = constraint.and_then(CellConstraint::of);
    let mut tokens: Vec<TokenId> = Vec::new();
    loop {
        let count = tokens.len() as u32;
        let position = request.prompt.len() as u32 + count;
        let banned: &[TokenId] = if count < request.stop.min_tokens {
            &request.stop.stop_tokens
        } else {
            &[]
        };
        // The matcher is made anew for each token, from the output alone.
        let allowed = constraint.map(|constraint| constraint.start_after(&tokens).allowed());
        let drawable = DrawableTokens {
            banned,
            allowed: allowed.as_deref(),
        };
        let token = draw_token(request.sampling.seed, position, last, drawable);
        tokens.push(token);
        last = last.extend(token);
        let reason = if request.stop.stop_tokens.contains(&token) {
            FinishReason::Stop
        } else if count + 1 >= request.stop.max_tokens || position + 1 >= context_tokens_max {
            FinishReason::Length
        } else {
            continue;
        };
        return ReferenceStream { tokens, reason };
    }
}
