//! Which worlds guess.
//!
//! Owns: the bounds of guesses, and which requests repeat themselves so that some come true. Never: guesses.
//! Invariant: drawn apart, so that a world that does not guess is the same as before there were guesses.

use crate::dice::{Dice, mix};
use crate::model::REPEATS;
use crate::world::Arrival;
use cleave_sched::Lookup;
use std::sync::Arc;

/// Tells these dice from the others of a seed.
const GUESS: u64 = 0x1b87_3593_cc9e_2d51;

/// What guesses go by, and who repeats what it said.
pub(crate) fn draw_speculation(seed: u64, requests: &mut [Arrival]) -> Option<Lookup> {
    let dice = &mut Dice::new(mix(seed ^ GUESS));
    if dice.chance(500) {
        return None;
    }
    for arrival in requests {
        if dice.chance(500) {
            Arc::make_mut(&mut arrival.request).sampling.seed |= REPEATS;
        }
    }
    let match_min = dice.count(1, 3);
    Some(Lookup {
        drafts_max: dice.count(1, 6),
        match_max: match_min + dice.count(0, 2),
        match_min,
    })
}
