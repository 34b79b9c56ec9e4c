//! How much of a prompt a step should hold.
//!
//! Owns: the size of a chunk, for the scheduler and for forecasts. Never: knows a request.
//! Invariant: without prices a step is filled.

use crate::Predict;
use cleave_domain::{Prices, StepWork};
use std::time::Duration;

/// A chunk costs at most this much per token, in thousandths of the cost per token of the best
/// chunk.
const TOKEN_PERMILLE: u128 = 1050;

/// Prompt tokens in one step at most: the smallest chunk that costs little more per token than the
/// best one, so that the next prompt waits no longer than necessary.
pub fn quantum(prices: &Prices, step_tokens_max: u32, block_tokens: u32) -> u32 {
    let most = step_tokens_max.max(1);
    let doubled = (0..32).map(|power| u64::from(block_tokens.max(1)) << power);
    let sizes = doubled
        .take_while(|tokens| *tokens < u64::from(most))
        .filter_map(|tokens| u32::try_from(tokens).ok())
        .chain([most]);
    let each = |tokens: u32| {
        let rows = StepWork {
            rows: tokens,
            ..StepWork::default()
        };
        prices.step(&rows).as_nanos() * 1000 / u128::from(tokens)
    };
    let best = sizes.clone().map(each).min().unwrap_or(0);
    let enough = |tokens: &u32| each(*tokens) * 1000 <= best * TOKEN_PERMILLE;
    // Without prices every size is as good as any.
    let found = sizes.clone().find(enough).filter(|_| best > 0);
    found.unwrap_or(most)
}

/// A chunk that could be added to a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRoom {
    /// Tokens of the prompt that are already computed.
    pub computed: u32,
    /// Tokens of the prompt still to compute.
    pub rest: u32,
    /// Tokens that fit into the step.
    pub tokens: u32,
}

/// The largest part of the tokens that fit into a step of work `held` for which the step takes no
/// longer than `spare`, with the error of predictions added.
pub fn chunk_tokens_within(
    prices: &Prices,
    held: &StepWork,
    room: ChunkRoom,
    spare: Duration,
) -> u32 {
    let takes = |tokens: u32| {
        let mut work = *held + StepWork::prefill(room.computed, tokens);
        work.draws += u32::from(tokens == room.rest);
        let step = prices.step(&work);
        step + step / 1000 * prices.error_permille.min(1000)
    };
    let (mut fits, mut over) = (0, room.tokens.min(room.rest) + 1);
    while over - fits > 1 {
        let tokens = fits + (over - fits) / 2;
        if takes(tokens) <= spare {
            fits = tokens
        } else {
            over = tokens
        }
    }
    fits
}

/// The time of a prompt beside streams, in thousandths of its time alone: steps hold the streams'
/// tokens too, and chunks must fit into their gaps. `held` is a step of the streams, `spare` its
/// longest allowed time; `None` without targets.
pub fn slowdown_permille(
    prices: &Prices,
    held: &StepWork,
    spare: Option<Duration>,
    quantum: u32,
    block_tokens: u32,
) -> u32 {
    let room = ChunkRoom {
        computed: 0,
        rest: u32::MAX - 1,
        tokens: quantum,
    };
    let fits = spare.map_or(quantum, |spare| {
        chunk_tokens_within(prices, held, room, spare)
    });
    let fits = fits.max(block_tokens.min(quantum)).max(1);
    let of = |held: StepWork, tokens: u32| {
        let rows = StepWork {
            rows: tokens,
            ..StepWork::default()
        };
        prices.step(&(held + rows)).as_nanos() / u128::from(tokens)
    };
    let alone = of(StepWork::default(), quantum.max(1)).max(1);
    let permille = of(*held, fits) * 1000 / alone;
    u32::try_from(permille.clamp(1000, 1_000_000)).unwrap_or(1000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::RowPrice;

    /// A step takes 10 ms, and 1 ms for each row.
    fn prices() -> Prices {
        let rows = [(1, 11_000_000), (512, 522_000_000)];
        Prices {
            rows: rows.map(|(rows, nanos)| RowPrice { rows, nanos }).to_vec(),
            ..Prices::default()
        }
    }

    #[test]
    fn the_quantum_is_the_smallest_near_optimal_chunk() {
        assert_eq!(quantum(&prices(), 512, 16), 256, "10 ms are 4 % of 256");
        assert_eq!(quantum(&Prices::default(), 512, 16), 512);
        assert_eq!(quantum(&prices(), 300, 16), 128);
        assert_eq!(quantum(&prices(), 8, 16), 8);
    }

    #[test]
    fn streams_slow_a_prompt_that_runs_beside_them() {
        let streams = (0..30).fold(StepWork::default(), |sum, _| sum + StepWork::decode(100));
        let beside = |spare: Option<u64>| {
            let spare = spare.map(Duration::from_millis);
            super::slowdown_permille(&prices(), &streams, spare, 256, 16)
        };
        // 256 tokens take 266 ms alone, and 296 ms with thirty rows more.
        assert_eq!(beside(None), 1112);
        // The streams take 40 of 100 ms, so sixty tokens fit into each step.
        assert_eq!(beside(Some(100)), 1604);
        assert_eq!(beside(Some(5)), 3368, "a block in each step at least");
        let alone = super::slowdown_permille(&prices(), &StepWork::default(), None, 256, 16);
        assert_eq!(alone, 1000);
    }

    #[test]
    fn a_chunk_fills_the_given_time_exactly() {
        let room = ChunkRoom {
            computed: 0,
            rest: 1000,
            tokens: 500,
        };
        let within = |millis| {
            let spare = Duration::from_millis(millis);
            chunk_tokens_within(&prices(), &StepWork::decode(100), room, spare)
        };
        // The step and the row that it holds take 11 ms.
        assert_eq!(
            [within(80), within(11), within(5), within(9999)],
            [69, 0, 0, 500]
        );
    }

    #[test]
    fn a_chunk_leaves_time_for_errors_and_the_last_draw() {
        let room = |rest, tokens| ChunkRoom {
            computed: 0,
            rest,
            tokens,
        };
        let within = |prices: &Prices, room: ChunkRoom| {
            let spare = Duration::from_millis(80);
            chunk_tokens_within(prices, &StepWork::default(), room, spare)
        };
        let wrong = Prices {
            error_permille: 250,
            ..prices()
        };
        // 64 ms and a quarter of them.
        assert_eq!(within(&wrong, room(1000, 500)), 54);
        let drawn = Prices {
            draw_nanos: 50_000_000,
            ..prices()
        };
        // The last token of the prompt draws: 60 rows would take 120 ms.
        assert_eq!(within(&drawn, room(60, 60)), 59);
        assert_eq!(within(&drawn, room(61, 60)), 60);
    }
}
