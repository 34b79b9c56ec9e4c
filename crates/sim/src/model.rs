//! The model that the simulated engines run: what a KV cell holds and which token follows.
//!
//! Owns: both, as pure functions. Never: knows of blocks, workers or steps.
//! Invariant: a cell is a function of the tokens up to its own, a drawn token one of seed, position
//! and the cell before it. So whatever path a request takes, its tokens must equal the reference's,
//! and a cell written by anybody else, or not at all, is told apart.

use crate::dice::mix;
use cleave_domain::{FinishReason, Request, TokenId};

/// Tokens are `0..VOCAB`.
pub(crate) const VOCAB: u64 = 50;

/// Requests of such a seed repeat themselves, mostly: what is drawn is of few tokens, in turn.
pub(crate) const REPEATS: u64 = 1 << 20;
/// How many.
const TURN: u32 = 4;
/// One in so many tokens is another.
const OTHERS: u64 = 8;

/// What attention over a sequence's first tokens amounts to, here: a hash of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Kv(pub(crate) u64);

impl Kv {
    /// The cell of `token`, which follows the sequence that ends in `self`.
    pub(crate) fn then(self, token: TokenId) -> Self {
        Self(mix(self.0.rotate_left(17) ^ mix(u64::from(token) + 1)))
    }
}

/// Draws the token at `position`, after a sequence whose last cell is `last`.
pub(crate) fn draw(seed: u64, position: u32, last: Kv, banned: &[TokenId]) -> TokenId {
    let own = mix(mix(seed) ^ last.0 ^ (u64::from(position) << 40));
    let mut throw = match seed & REPEATS != 0 && !own.is_multiple_of(OTHERS) {
        true => mix(mix(seed) ^ u64::from(position % TURN)),
        false => own,
    };
    loop {
        let token = (throw % VOCAB) as TokenId;
        if !banned.contains(&token) {
            return token;
        }
        throw = mix(throw.wrapping_add(1));
    }
}

/// What a request's whole output must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    /// Output tokens from the first, those generated before included.
    pub(crate) tokens: Vec<TokenId>,
    /// Why it stops.
    pub(crate) reason: FinishReason,
}

/// Runs a request alone, in one go, without blocks.
pub(crate) fn reference(request: &Request, context_tokens_max: u32) -> Reference {
    let mut last = Kv::default();
    for token in request.prompt.iter() {
        last = last.then(*token);
    }
    let mut tokens: Vec<TokenId> = Vec::new();
    loop {
        let count = tokens.len() as u32;
        let position = request.prompt.len() as u32 + count;
        let banned: &[TokenId] = if count < request.stop.min_tokens {
            &request.stop.stop_tokens
        } else {
            &[]
        };
        let token = draw(request.sampling.seed, position, last, banned);
        tokens.push(token);
        last = last.then(token);
        let reason = if request.stop.stop_tokens.contains(&token) {
            FinishReason::Stop
        } else if count + 1 >= request.stop.max_tokens || position + 1 >= context_tokens_max {
            FinishReason::Length
        } else {
            continue;
        };
        return Reference { tokens, reason };
    }
}
