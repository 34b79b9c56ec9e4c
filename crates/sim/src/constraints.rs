//! Constrained requests in simulated worlds.
//!
//! Owns: which requests have a constraint, with reasoning in front of it or not, and which are
//! choices of one client's request. Never: enforces a constraint. Invariant: drawn from its own
//! generator, so that the rest of a seed's world stays the same.

use crate::model::VOCAB_SIZE;
use crate::world::ChaosRequest;
use cleave_domain::{SplitMix64, TokenId};
use cleave_testkit::{CellConstraint, CellThinking};
use std::sync::Arc;

/// Separates the draws of constraints from the seed's other draws.
const CONSTRAINTS_SEED_SALT: u64 = 0x5851_f42d_4c95_7f2d;

/// The end token of every constrained output.
const END_TOKEN: TokenId = VOCAB_SIZE as TokenId - 1;

/// Gives some requests, or all, a constraint.
pub(crate) fn draw_constraints(seed: u64, requests: &mut [ChaosRequest]) {
    let rng = &mut SplitMix64::new(SplitMix64::finalize(seed ^ CONSTRAINTS_SEED_SALT));
    let rate = *rng.pick(&[300, 700, 1000]);
    for index in 0..requests.len() {
        if !rng.chance(rate) {
            continue;
        }
        // The next choice of one client's request: only the seed of its draws differs.
        if rng.chance(250) && index > 0 {
            let (first, one) = (requests[index - 1].clone(), &mut requests[index]);
            let seed = one.request.sampling.seed;
            *one = first;
            Arc::make_mut(&mut one.request).sampling.seed = seed;
            continue;
        }
        let request = Arc::make_mut(&mut requests[index].request);
        let answer_tokens = rng.count(1, 40);
        let thinking = CellThinking {
            end_token: rng.count(0, END_TOKEN - 1),
            budget_tokens: rng.count(0, 10),
        };
        let constraint = CellConstraint {
            seed: rng.draw(),
            vocab_size: VOCAB_SIZE as u32,
            end_token: END_TOKEN,
            answer_tokens,
            thinking: rng.chance(500).then_some(thinking),
        };
        request.sampling.constraint = Some(constraint.constraint());
        let stops = request.stop.stop_tokens.iter().copied().chain([END_TOKEN]);
        request.stop.stop_tokens = stops.collect();
        // Some outputs are cut by their length, most end by their constraint.
        request.stop.max_tokens = request.stop.max_tokens.max(rng.count(1, 60));
    }
}
