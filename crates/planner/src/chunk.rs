//! How much of a prompt a step should hold.
//!
//! Owns: the size of a chunk, for those who run it and for those who predict how long it takes.
//! Never: knows who waits. Invariant: where nothing is known a step is filled.

use crate::Predict;
use cleave_domain::{Prices, Work};
use std::time::Duration;

/// A chunk is as small as a token of it costs at most this much, in thousandths, of what it costs in
/// the best chunk.
const TOKEN_PERMILLE: u128 = 1050;

/// Prompt tokens in one step at most: the smallest chunk that costs little more than the best one,
/// so that who comes next waits no longer than need be.
pub fn quantum(prices: &Prices, step_tokens_max: u32, block_tokens: u32) -> u32 {
    let most = step_tokens_max.max(1);
    let doubled = (0..32).map(|power| u64::from(block_tokens.max(1)) << power);
    let sizes = doubled
        .take_while(|tokens| *tokens < u64::from(most))
        .filter_map(|tokens| u32::try_from(tokens).ok())
        .chain([most]);
    let each = |tokens: u32| {
        let rows = Work {
            rows: tokens,
            ..Work::default()
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
pub struct Room {
    /// Tokens of the prompt that are computed.
    pub computed: u32,
    /// And those that are not.
    pub rest: u32,
    /// Tokens that fit.
    pub tokens: u32,
}

/// How many of the tokens that fit can be added to a step of work `held` so that it takes no longer
/// than `spare`, with what predictions err by on top.
pub fn chunk_within(prices: &Prices, held: &Work, room: Room, spare: Duration) -> u32 {
    let takes = |tokens: u32| {
        let mut work = *held + Work::prefill(room.computed, tokens);
        work.draws += u32::from(tokens == room.rest);
        let step = prices.step(&work);
        step + step / 1000 * prices.error_permille.min(1000)
    };
    let (mut fits, mut over) = (0, room.tokens.min(room.rest) + 1);
    while over - fits > 1 {
        let tokens = fits + (over - fits) / 2;
        match takes(tokens) <= spare {
            true => fits = tokens,
            false => over = tokens,
        }
    }
    fits
}

/// By how much a prompt takes longer beside streams, in thousandths of what it takes alone: steps hold
/// their tokens too, and chunks must fit their gaps. `held` is a step of theirs, `spare` how long it
/// may take; `None` where nothing was promised.
pub fn beside(
    prices: &Prices,
    held: &Work,
    spare: Option<Duration>,
    (quantum, block_tokens): (u32, u32),
) -> u32 {
    let room = Room {
        computed: 0,
        rest: u32::MAX - 1,
        tokens: quantum,
    };
    let fits = spare.map_or(quantum, |spare| chunk_within(prices, held, room, spare));
    let fits = fits.max(block_tokens.min(quantum)).max(1);
    let of = |held: Work, tokens: u32| {
        let rows = Work {
            rows: tokens,
            ..Work::default()
        };
        prices.step(&(held + rows)).as_nanos() / u128::from(tokens)
    };
    let alone = of(Work::default(), quantum.max(1)).max(1);
    let permille = of(*held, fits) * 1000 / alone;
    u32::try_from(permille.clamp(1000, 1_000_000)).unwrap_or(1000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::RowPrice;

    /// A step of 10 ms, and 1 ms for each row.
    fn prices() -> Prices {
        let rows = [(1, 11_000_000), (512, 522_000_000)];
        Prices {
            rows: rows.map(|(rows, nanos)| RowPrice { rows, nanos }).to_vec(),
            ..Prices::default()
        }
    }

    #[test]
    fn the_smallest_chunk_that_costs_little_more_is_taken() {
        assert_eq!(quantum(&prices(), 512, 16), 256, "10 ms are 4 % of 256");
        assert_eq!(quantum(&Prices::default(), 512, 16), 512);
        assert_eq!(quantum(&prices(), 300, 16), 128);
        assert_eq!(quantum(&prices(), 8, 16), 8);
    }

    #[test]
    fn a_prompt_beside_streams_was_predicted_as_if_it_were_alone() {
        let streams = (0..30).fold(Work::default(), |sum, _| sum + Work::decode(100));
        let beside = |spare: Option<u64>| {
            let spare = spare.map(Duration::from_millis);
            super::beside(&prices(), &streams, spare, (256, 16))
        };
        // 266 ms for 256 tokens alone, and 296 with thirty more.
        assert_eq!(beside(None), 1112);
        // Of 100 ms they take 40: sixty tokens in each.
        assert_eq!(beside(Some(100)), 1604);
        assert_eq!(beside(Some(5)), 3368, "a block in each step at least");
        let alone = super::beside(&prices(), &Work::default(), None, (256, 16));
        assert_eq!(alone, 1000);
    }

    #[test]
    fn a_chunk_takes_what_may_be_taken_and_not_a_token_more() {
        let room = Room {
            computed: 0,
            rest: 1000,
            tokens: 500,
        };
        let within = |millis| {
            let spare = Duration::from_millis(millis);
            chunk_within(&prices(), &Work::decode(100), room, spare)
        };
        // 11 for the step and the row that it holds.
        assert_eq!(
            [within(80), within(11), within(5), within(9999)],
            [69, 0, 0, 500]
        );
    }
}
