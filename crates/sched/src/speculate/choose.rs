//! How many draft tokens a step verifies.
//!
//! Owns: the choice, as a function from a snapshot. Never: changes anything.
//! Invariant: with the drafts chosen, a step is predicted to draw more tokens in a second than
//! without any, to keep the targets of the streams in it, and to hold no more rows than it may.
//!
//! The first `k` drafts of a sequence, each accepted with probability `p` if those before it were,
//! add `p + p² + … + p^k` tokens. So drafts are taken in the order of their own power, and the best
//! prefix of that list is chosen: the cost of rows is a curve with steps, and the next row may be
//! nearly free.

use crate::DraftOutcome;
use crate::batch::targets;
use cleave_domain::{Prices, StepWork};
use cleave_planner::Predict;
use std::time::Duration;

/// Least gain in tokens per second that is worth a draft: prices err by some per cent.
const GAIN_LEAST: f64 = 1.05;
/// Without prices, a draft is verified if it is accepted with at least this probability.
const SHARE_LEAST: f64 = 0.5;

/// A sequence with draft tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftCandidate {
    /// Its index in the step.
    pub(crate) place: usize,
    pub(crate) tokens: u32,
    /// Drafts that it has, and room for.
    pub(crate) most: u32,
    /// Probability that the next one is accepted, in 0..1.
    pub(crate) probability: f64,
}

/// Content and prices of the step without drafts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftCosts<'a> {
    /// `None` while prices are unknown.
    pub(crate) prices: Option<&'a Prices>,
    /// Sequences that draw their next token.
    pub(crate) streams_count: usize,
    /// Work of these sequences, without that of prompts.
    pub(crate) decode: StepWork,
    pub(crate) held: targets::BatchLoad,
    /// Rows that still fit.
    pub(crate) rows_left: u32,
}

/// One more draft for a sequence.
#[derive(Clone, Copy, Debug)]
struct NextDraft {
    /// Index of the sequence among the drafters.
    drafter: usize,
    tokens_before: u32,
    /// Probability that it and all before it are accepted.
    probability: f64,
}

/// Drafts to verify of each sequence, and the outcome.
pub(crate) fn draft_counts(
    costs: &DraftCosts<'_>,
    drafters: &[DraftCandidate],
) -> (Vec<u32>, DraftOutcome) {
    let none = vec![0; drafters.len()];
    if drafters.is_empty() {
        return (none, DraftOutcome::NoGuess);
    }
    let list = candidate_drafts(drafters);
    let fitting = &list[..list.len().min(costs.rows_left as usize)];
    if fitting.is_empty() {
        return (none, DraftOutcome::NoRoom);
    }
    let (draft_count, no_draft_reason) = match costs.prices {
        Some(prices) => best(costs, prices, fitting),
        None => {
            let likely = fitting
                .iter()
                .take_while(|one| one.probability >= SHARE_LEAST);
            (likely.count(), DraftOutcome::NoGain)
        }
    };
    let mut counts = none;
    for one in &fitting[..draft_count] {
        counts[one.drafter] += 1;
    }
    let drafting = if draft_count > 0 {
        DraftOutcome::Drafted
    } else {
        no_draft_reason
    };
    (counts, drafting)
}

/// Every draft, the most likely first; those of one sequence stay in their order.
fn candidate_drafts(drafters: &[DraftCandidate]) -> Vec<NextDraft> {
    let of = |(drafter, one): (usize, &DraftCandidate)| {
        let DraftCandidate {
            tokens,
            probability: share,
            ..
        } = *one;
        let mut worth = 1.0;
        (0..one.most).map(move |earlier| {
            worth *= share;
            let before = tokens + earlier;
            NextDraft {
                drafter,
                tokens_before: before,
                probability: worth,
            }
        })
    };
    let mut list: Vec<_> = drafters.iter().enumerate().flat_map(of).collect();
    // The sort is stable: equal ones stay in their order.
    list.sort_by(|one, other| other.probability.total_cmp(&one.probability));
    list
}

/// Length of the best prefix of the list, and the reason if it is zero.
fn best(costs: &DraftCosts<'_>, prices: &Prices, list: &[NextDraft]) -> (usize, DraftOutcome) {
    let DraftCosts { decode, held, .. } = costs;
    let streams = costs.streams_count as f64;
    let (plain, whole) = (prices.step(decode), prices.step(&held.work));
    // Without drafts the streams draw this many tokens a second; drafts must gain more than the
    // error of prices.
    let mut most = streams / plain.as_secs_f64() * GAIN_LEAST;
    let (mut draft_count, mut no_draft_reason) = (0, DraftOutcome::NoGain);
    let (mut drafts, mut gained) = (StepWork::default(), 0.0);
    for (place, one) in list.iter().enumerate() {
        drafts += StepWork::drafts(one.tokens_before, 1);
        gained += one.probability;
        let (streams_take, all_take) = (
            prices.step(&(*decode + drafts)),
            prices.step(&(held.work + drafts)),
        );
        // A prefix that breaks a target ends the search: longer ones break it too.
        if exceeds(streams_take, held.tpot_least) || exceeds(all_take, held.slack_least) {
            if draft_count == 0 {
                no_draft_reason = DraftOutcome::NoTime;
            }
            break;
        }
        // The prompts in the step pay their own cost; drafts are charged only with what they add.
        let takes = plain + all_take.saturating_sub(whole);
        let rate = (streams + gained) / takes.as_secs_f64();
        // A later prefix may be better although this one is not: the cost of rows has steps.
        if rate > most {
            (most, draft_count) = (rate, place + 1);
        }
    }
    (draft_count, no_draft_reason)
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

    fn streams(count: u32) -> targets::BatchLoad {
        let work = StepWork {
            rows: count,
            draws: count,
            ..StepWork::default()
        };
        targets::BatchLoad {
            work,
            ..targets::BatchLoad::default()
        }
    }

    fn chosen(
        prices: &Prices,
        held: targets::BatchLoad,
        shares: &[f64],
    ) -> (Vec<u32>, DraftOutcome) {
        let drafters = shares
            .iter()
            .enumerate()
            .map(|(place, share)| DraftCandidate {
                place,
                tokens: 0,
                most: 4,
                probability: *share,
            });
        let drafters: Vec<DraftCandidate> = drafters.collect();
        let costs = DraftCosts {
            prices: Some(prices),
            streams_count: held.work.rows as usize,
            decode: held.work,
            held,
            rows_left: 64,
        };
        draft_counts(&costs, &drafters)
    }

    #[test]
    fn nearly_free_rows_are_drafted_at_modest_probability() {
        let one = |share| chosen(&prices(100), streams(1), &[share]);
        assert_eq!(one(0.9), (vec![4], DraftOutcome::Drafted));
        assert_eq!(one(0.2), (vec![2], DraftOutcome::Drafted));
        assert_eq!(one(0.01), (vec![0], DraftOutcome::NoGain));
    }

    #[test]
    fn no_drafts_where_rows_cost_what_they_gain() {
        let dear = prices(40_000);
        assert_eq!(chosen(&dear, streams(1), &[0.7]).1, DraftOutcome::NoGain);
        // With many rows in the step, the next one costs four times as much.
        let full = chosen(&prices(1000), streams(64), &[0.6; 64]);
        assert_eq!(full, (vec![0; 64], DraftOutcome::NoGain));
        assert_eq!(
            chosen(&prices(1000), streams(1), &[0.6]).1,
            DraftOutcome::Drafted
        );
    }

    #[test]
    fn likelier_drafts_get_the_rows() {
        let (counts, _) = chosen(&prices(700), streams(3), &[0.1, 0.95, 0.6]);
        assert!(
            counts[1] > counts[2] && counts[2] >= counts[0],
            "{counts:?}"
        );
        assert_eq!(counts[0], 0, "{counts:?}");
    }

    /// With one row the step takes 10.1 ms, with five 10.5.
    #[test]
    fn drafts_never_break_a_stream_target() {
        let drafts_for = |tpot, spare| {
            let held = targets::BatchLoad {
                tpot_least: Some(tpot),
                slack_least: Some(spare),
                ..streams(1)
            };
            chosen(&prices(100), held, &[0.9])
        };
        let (tight, lax) = (MS * 103 / 10, MS * 11);
        assert_eq!(drafts_for(lax, lax), (vec![4], DraftOutcome::Drafted));
        assert_eq!(drafts_for(tight, lax), (vec![2], DraftOutcome::Drafted));
        assert_eq!(drafts_for(lax, tight), (vec![2], DraftOutcome::Drafted));
        assert_eq!(drafts_for(MS * 10, lax), (vec![0], DraftOutcome::NoTime));
    }

    /// A step with a prompt is long anyhow, which makes no draft worth more.
    #[test]
    fn a_prompt_in_the_step_makes_no_draft_worth_more() {
        let mut held = streams(1);
        held.work += StepWork::prefill(0, 80);
        let drafter = DraftCandidate {
            place: 0,
            tokens: 0,
            most: 4,
            probability: 0.3,
        };
        let prices = prices(1000);
        let costs = DraftCosts {
            prices: Some(&prices),
            streams_count: 1,
            decode: streams(1).work,
            held,
            rows_left: 64,
        };
        assert_eq!(draft_counts(&costs, &[drafter]).1, DraftOutcome::NoGain);
    }

    #[test]
    fn full_steps_draft_nothing_and_unpriced_only_likely() {
        let drafter = DraftCandidate {
            place: 0,
            tokens: 0,
            most: 4,
            probability: 0.8,
        };
        let costs = DraftCosts {
            prices: None,
            streams_count: 1,
            decode: StepWork::default(),
            held: targets::BatchLoad::default(),
            rows_left: 0,
        };
        assert_eq!(draft_counts(&costs, &[drafter]).1, DraftOutcome::NoRoom);
        assert_eq!(draft_counts(&costs, &[]).1, DraftOutcome::NoGuess);
        let costs = DraftCosts {
            rows_left: 9,
            ..costs
        };
        // 0.8, 0.64, 0.51, 0.41
        assert_eq!(draft_counts(&costs, &[drafter]).0, [3]);
    }
}
