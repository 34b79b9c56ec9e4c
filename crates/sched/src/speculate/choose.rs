//! How many guesses a step verifies.
//!
//! Owns: the choice, as a function from a snapshot. Never: changes anything.
//! Invariant: with the guesses chosen a step is predicted to draw more tokens in a second than without any, to keep
//! what the streams in it were promised, and to hold no more rows than it may.
//!
//! The first `k` guesses for a sequence of which each comes true with probability `p` if those before it did add
//! `p + p² + … + p^k` tokens. So guesses are taken in the order of their own power, and of all beginnings of that list
//! the best is chosen: what a row costs is a curve with steps, and the next row may be nearly free.

use crate::Drafting;
use crate::batch;
use cleave_domain::{Prices, Work};
use cleave_planner::Predict;
use std::time::Duration;

/// Tokens in a second must be more by so much: prices err by some parts in a hundred.
const GAIN_LEAST: f64 = 1.05;
/// Where nothing is known of prices, a guess is verified that is at least so likely right.
const SHARE_LEAST: f64 = 0.5;

/// A sequence that tokens were guessed for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drafter {
    /// Its place in the step.
    pub(crate) place: usize,
    /// Tokens that it has.
    pub(crate) tokens: u32,
    /// Guesses that it has, and room for.
    pub(crate) most: u32,
    /// How likely the next one is right, in 0..1.
    pub(crate) share: f64,
}

/// What the step holds without guesses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs<'a> {
    /// `None` where nothing is known.
    pub(crate) prices: Option<&'a Prices>,
    /// Sequences that draw their next token.
    pub(crate) streams_count: usize,
    /// Their work, without that of prompts.
    pub(crate) decode: Work,
    /// All there is.
    pub(crate) held: batch::Placed,
    /// Rows that still fit.
    pub(crate) room: u32,
}

/// One more guess for a sequence.
#[derive(Clone, Copy, Debug)]
struct Further {
    /// Which sequence, by its place among the drafters.
    drafter: usize,
    /// Tokens before it.
    before: u32,
    /// How likely it and all before it are right.
    worth: f64,
}

/// Guesses to verify of each sequence, and what that came to.
pub(crate) fn counts(costs: &Costs<'_>, drafters: &[Drafter]) -> (Vec<u32>, Drafting) {
    let none = vec![0; drafters.len()];
    if drafters.is_empty() {
        return (none, Drafting::NoGuess);
    }
    let list = further(drafters);
    let fitting = &list[..list.len().min(costs.room as usize)];
    if fitting.is_empty() {
        return (none, Drafting::NoRoom);
    }
    let (taken, otherwise) = match costs.prices {
        Some(prices) => best(costs, prices, fitting),
        None => {
            let likely = fitting.iter().take_while(|one| one.worth >= SHARE_LEAST);
            (likely.count(), Drafting::NoGain)
        }
    };
    let mut counts = none;
    for one in &fitting[..taken] {
        counts[one.drafter] += 1;
    }
    let drafting = if taken > 0 {
        Drafting::Drafted
    } else {
        otherwise
    };
    (counts, drafting)
}

/// Every guess, the most likely first; of one sequence in their order.
fn further(drafters: &[Drafter]) -> Vec<Further> {
    let of = |(drafter, one): (usize, &Drafter)| {
        let Drafter { tokens, share, .. } = *one;
        let mut worth = 1.0;
        (0..one.most).map(move |earlier| {
            worth *= share;
            let before = tokens + earlier;
            Further {
                drafter,
                before,
                worth,
            }
        })
    };
    let mut list: Vec<_> = drafters.iter().enumerate().flat_map(of).collect();
    // Stable: equal ones stay in their order.
    list.sort_by(|one, other| other.worth.total_cmp(&one.worth));
    list
}

/// How many of the list, and why none.
fn best(costs: &Costs<'_>, prices: &Prices, list: &[Further]) -> (usize, Drafting) {
    let Costs { decode, held, .. } = costs;
    let streams = costs.streams_count as f64;
    let (plain, whole) = (prices.step(decode), prices.step(&held.work));
    let mut most = streams / plain.as_secs_f64() * GAIN_LEAST;
    let (mut taken, mut otherwise) = (0, Drafting::NoGain);
    let (mut drafts, mut gained) = (Work::default(), 0.0);
    for (place, one) in list.iter().enumerate() {
        drafts += Work::drafts(one.before, 1);
        gained += one.worth;
        let (streams_take, all_take) = (
            prices.step(&(*decode + drafts)),
            prices.step(&(held.work + drafts)),
        );
        if exceeds(streams_take, held.tpot_least) || exceeds(all_take, held.spare) {
            if taken == 0 {
                otherwise = Drafting::NoTime;
            }
            break;
        }
        // What prompts in the step cost is theirs; what drafts add to it is not.
        let takes = plain + all_take.saturating_sub(whole);
        let rate = (streams + gained) / takes.as_secs_f64();
        if rate > most {
            (most, taken) = (rate, place + 1);
        }
    }
    (taken, otherwise)
}

fn exceeds(takes: Duration, most: Option<Duration>) -> bool {
    most.is_some_and(|most| takes > most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::RowPrice;

    const MS: Duration = Duration::from_millis(1);

    /// A step of 10 ms, and so many microseconds for each row; from 8 rows on four times as many.
    fn prices(row: u64) -> Prices {
        let knot = |(rows, micros): (u32, u64)| RowPrice {
            rows,
            nanos: (10_000 + micros) * 1000,
        };
        Prices {
            rows: [(1, row), (8, 8 * row), (108, 408 * row)]
                .map(knot)
                .to_vec(),
            ..Prices::default()
        }
    }

    fn streams(count: u32) -> batch::Placed {
        let work = Work {
            rows: count,
            draws: count,
            ..Work::default()
        };
        batch::Placed {
            work,
            ..batch::Placed::default()
        }
    }

    fn chosen(prices: &Prices, held: batch::Placed, shares: &[f64]) -> (Vec<u32>, Drafting) {
        let drafters = shares.iter().enumerate().map(|(place, share)| Drafter {
            place,
            tokens: 0,
            most: 4,
            share: *share,
        });
        let drafters: Vec<Drafter> = drafters.collect();
        let costs = Costs {
            prices: Some(prices),
            streams_count: held.work.rows as usize,
            decode: held.work,
            held,
            room: 64,
        };
        counts(&costs, &drafters)
    }

    #[test]
    fn a_row_that_is_nearly_free_is_taken_for_any_fair_guess() {
        let one = |share| chosen(&prices(100), streams(1), &[share]);
        assert_eq!(one(0.9), (vec![4], Drafting::Drafted));
        assert_eq!(one(0.2), (vec![2], Drafting::Drafted));
        assert_eq!(one(0.01), (vec![0], Drafting::NoGain));
    }

    #[test]
    fn a_row_that_costs_what_it_brings_is_taken_by_nobody() {
        let dear = prices(40_000);
        assert_eq!(chosen(&dear, streams(1), &[0.7]).1, Drafting::NoGain);
        // Where many rows are in the step, the next one costs four times as much.
        let full = chosen(&prices(1000), streams(64), &[0.6; 64]);
        assert_eq!(full, (vec![0; 64], Drafting::NoGain));
        assert_eq!(
            chosen(&prices(1000), streams(1), &[0.6]).1,
            Drafting::Drafted
        );
    }

    #[test]
    fn those_who_are_guessed_best_have_the_rows() {
        let (counts, _) = chosen(&prices(700), streams(3), &[0.1, 0.95, 0.6]);
        assert!(
            counts[1] > counts[2] && counts[2] >= counts[0],
            "{counts:?}"
        );
        assert_eq!(counts[0], 0, "{counts:?}");
    }

    /// With one row the step takes 10.1 ms, with five 10.5.
    #[test]
    fn no_promise_is_broken_for_a_guess() {
        let promised = |tpot, spare| {
            let held = batch::Placed {
                tpot_least: Some(tpot),
                spare: Some(spare),
                ..streams(1)
            };
            chosen(&prices(100), held, &[0.9])
        };
        let (tight, lax) = (MS * 103 / 10, MS * 11);
        assert_eq!(promised(lax, lax), (vec![4], Drafting::Drafted));
        assert_eq!(promised(tight, lax), (vec![2], Drafting::Drafted));
        assert_eq!(promised(lax, tight), (vec![2], Drafting::Drafted));
        assert_eq!(promised(MS * 10, lax), (vec![0], Drafting::NoTime));
    }

    /// A step with a prompt is long anyhow: that makes no guess worth more.
    #[test]
    fn a_prompt_in_the_step_did_not_pay_for_guesses() {
        let mut held = streams(1);
        held.work += Work::prefill(0, 80);
        let drafter = Drafter {
            place: 0,
            tokens: 0,
            most: 4,
            share: 0.3,
        };
        let prices = prices(1000);
        let costs = Costs {
            prices: Some(&prices),
            streams_count: 1,
            decode: streams(1).work,
            held,
            room: 64,
        };
        assert_eq!(counts(&costs, &[drafter]).1, Drafting::NoGain);
    }

    #[test]
    fn a_full_step_takes_none_and_without_prices_only_likely_ones() {
        let drafter = Drafter {
            place: 0,
            tokens: 0,
            most: 4,
            share: 0.8,
        };
        let costs = Costs {
            prices: None,
            streams_count: 1,
            decode: Work::default(),
            held: batch::Placed::default(),
            room: 0,
        };
        assert_eq!(counts(&costs, &[drafter]).1, Drafting::NoRoom);
        assert_eq!(counts(&costs, &[]).1, Drafting::NoGuess);
        let costs = Costs { room: 9, ..costs };
        // 0.8, 0.64, 0.51, 0.41
        assert_eq!(counts(&costs, &[drafter]).0, [3]);
    }
}
