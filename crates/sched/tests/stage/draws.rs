//! The tokens that the stage's engines draw.
//!
//! Owns: the draw, and the output that a prompt must give. Never: knows blocks or steps.
//! Invariant: the token drawn depends on the history alone, so any course must give the same
//! tokens.

use cleave_domain::TokenId;
use cleave_testkit::TokenDraw;

/// A hash of all tokens of a history.
fn hash(history: &[TokenId]) -> u64 {
    history.iter().fold(0, |hash: u64, token| {
        (hash ^ u64::from(*token))
            .wrapping_add(0x9e37_79b9_7f4a_7c15)
            .wrapping_mul(0xbf58_476d_1ce4_e5b9)
            .rotate_left(29)
    })
}

/// Histories that begin with such a token repeat themselves, mostly.
const REPEATS: std::ops::Range<TokenId> = 900_000..1_000_000;

/// The token that follows a history.
fn draw(history: &[TokenId]) -> TokenId {
    let last = hash(history);
    let earlier = history.len().checked_sub(3).map(|at| history[at]);
    if let Some(earlier) =
        earlier.filter(|_| REPEATS.contains(&history[0]) && !last.is_multiple_of(6))
    {
        return earlier;
    }
    100_000 + u32::try_from(last % 900_000).expect("small")
}

/// The first `count` tokens of the output to a prompt.
pub fn output(prompt: &[TokenId], count: u32) -> Vec<TokenId> {
    let mut history = prompt.to_vec();
    for _ in 0..count {
        history.push(draw(&history));
    }
    history.split_off(prompt.len())
}

/// The same for a slot of an engine.
pub fn draw_of_slot(slot: &TokenDraw<'_>) -> TokenId {
    draw(&[&slot.open.prompt[..], &slot.open.output[..]].concat())
}
