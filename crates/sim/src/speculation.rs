//! Speculation in simulated worlds.
//!
//! Owns: the limits of speculation, and which requests repeat their output so that some drafts are
//! accepted. Never: drafts tokens. Invariant: drawn from its own generator, so that worlds without
//! speculation stay the same.

use crate::model::REPEATING_SEED_BIT;
use crate::world::ChaosRequest;
use cleave_domain::SplitMix64;
use cleave_sched::LookupLimits;
use std::sync::Arc;

/// Separates the draws of speculation from the seed's other draws.
const SPECULATION_SEED_SALT: u64 = 0x1b87_3593_cc9e_2d51;

/// Draws the limits of speculation, and marks the requests that repeat their output.
pub(crate) fn draw_speculation(seed: u64, requests: &mut [ChaosRequest]) -> Option<LookupLimits> {
    let rng = &mut SplitMix64::new(SplitMix64::finalize(seed ^ SPECULATION_SEED_SALT));
    if rng.chance(500) {
        return None;
    }
    for arrival in requests {
        if rng.chance(500) {
            Arc::make_mut(&mut arrival.request).sampling.seed |= REPEATING_SEED_BIT;
        }
    }
    let match_min = rng.count(1, 3);
    Some(LookupLimits {
        drafts_max: rng.count(1, 6),
        match_max: match_min + rng.count(0, 2),
        match_min,
    })
}
