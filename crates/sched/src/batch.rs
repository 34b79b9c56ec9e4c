//! What a step may hold so that promises are kept: which sequences draw, and what they can spare.
//!
//! Owns: the choice among sequences that could all run, as functions from a snapshot. Never: changes
//! anything, or sees the brain. Invariant: a step of sequences that draw is never predicted to take
//! longer than the tightest mean gap promised to one in it, unless there is but one; and whoever waits
//! longest goes first once that was too long.

use crate::policy::Rank;
use cleave_domain::{HandoffId, Prices, Time, Work};
use cleave_planner::Predict;
use std::time::Duration;

/// Whoever could run and did not for so long goes first, one in each step: those without a target
/// have this much of a share, and prompts whose room the streams take.
pub(crate) const IDLE_MAX: Duration = Duration::from_millis(500);
/// A stream that is ahead of what it was promised pays for a prompt's chunk with at most so many of
/// its mean gaps at once: its client should see no standstill.
const GAPS_MAX: u32 = 3;
/// A sequence that could draw its next token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) rank: Rank,
    /// Tokens that it then has.
    pub(crate) context_tokens: u64,
    /// The mean gap that keeps its promise, and when its next token is due by it; none where nothing
    /// was promised, or it is lost.
    pub(crate) target: Option<(Duration, Time)>,
    /// When it ran last.
    pub(crate) served: Time,
}

/// What is in the step already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Placed {
    pub(crate) work: Work,
    /// The tightest mean gap promised to one that draws.
    pub(crate) tpot_least: Option<Duration>,
    /// How long the step may take by what the streams in it can spare.
    pub(crate) spare: Option<Duration>,
}

impl Placed {
    /// With one more.
    pub(crate) fn add(&mut self, candidate: &Candidate, now: Time) {
        self.work += Work::decode(candidate.context_tokens);
        if let Some((tpot, due)) = candidate.target {
            // Whoever is behind has a shorter gap left for each of its tokens, not none for the next.
            let spare = due.since(now).min(tpot * GAPS_MAX).max(tpot);
            self.tpot_least = Some(self.tpot_least.map_or(tpot, |least| least.min(tpot)));
            self.spare = Some(self.spare.map_or(spare, |least| least.min(spare)));
        }
    }

    /// Whether the streams in it keep what they were promised, as predicted.
    fn keeps(&self, prices: &Prices) -> bool {
        self.tpot_least
            .is_none_or(|least| prices.step(&self.work) <= least)
    }
}

/// Those that sit out this step. All run if that breaks nothing; else whoever is due first, the most
/// important before that.
pub(crate) fn sit_out(
    prices: &Prices,
    placed: Placed,
    candidates: &[Candidate],
    now: Time,
) -> Vec<HandoffId> {
    let mut all = placed;
    for candidate in candidates {
        all.add(candidate, now);
    }
    if all.keeps(prices) {
        return Vec::new();
    }
    let mut order: Vec<&Candidate> = candidates.iter().collect();
    order.sort_by_key(|candidate| {
        let due = candidate.target.map(|(_, due)| due);
        let (late, due) = (due.is_none(), due.unwrap_or(candidate.served));
        (candidate.rank.priority, late, due, candidate.rank)
    });
    let longest = order.iter().enumerate().min_by_key(|(_, one)| one.served);
    if let Some((place, one)) = longest
        && now.since(one.served) > IDLE_MAX
    {
        order[..=place].rotate_right(1);
    }
    let mut chosen = placed;
    let mut out = Vec::new();
    for candidate in order {
        let mut with = chosen;
        with.add(candidate, now);
        if chosen.work.rows == 0 || with.keeps(prices) {
            chosen = with;
        } else {
            out.push(candidate.rank.handoff);
        }
    }
    out
}

/// The mean gap that sequences with these targets and lengths would have if all of them ran here:
/// in the time of the tightest gap, one of twice that gap draws every other time.
pub(crate) fn crowded_step(
    prices: &Prices,
    streams: impl Iterator<Item = (Duration, u64)> + Clone,
) -> Option<(Duration, Duration)> {
    let least = streams.clone().map(|(tpot, _)| tpot).min()?;
    let micros = |span: Duration| span.as_micros().max(1);
    let (mut sequences, mut context) = (0_u128, 0_u128);
    for (tpot, tokens) in streams {
        let permille = micros(least) * 1000 / micros(tpot);
        sequences += permille;
        context += permille * u128::from(tokens);
    }
    let sequences = u32::try_from(sequences.div_ceil(1000)).unwrap_or(u32::MAX);
    let context = u64::try_from(context / 1000).unwrap_or(u64::MAX);
    Some((least, prices.decode(sequences, context)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{FlightId, RowPrice};

    const MS: Duration = Duration::from_millis(1);

    /// A step of 10 ms, and 1 ms for each row.
    fn prices() -> Prices {
        let rows = [(1, 11_000_000), (512, 522_000_000)];
        Prices {
            rows: rows.map(|(rows, nanos)| RowPrice { rows, nanos }).to_vec(),
            ..Prices::default()
        }
    }

    fn at(millis: u32) -> Time {
        Time::ZERO + MS * millis
    }

    fn candidate(number: u64, target: Option<(u32, u32)>, served: u32) -> Candidate {
        let handoff = HandoffId {
            flight: FlightId(number),
            attempt: 0,
        };
        Candidate {
            rank: Rank {
                priority: (0, 0),
                due: at(0),
                since: at(0),
                arrival: number,
                handoff,
            },
            context_tokens: 100,
            target: target.map(|(tpot, due)| (MS * tpot, at(due))),
            served: at(served),
        }
    }

    fn out(candidates: &[Candidate], now: u32) -> Vec<u64> {
        let out = sit_out(&prices(), Placed::default(), candidates, at(now));
        let mut out: Vec<u64> = out.iter().map(|handoff| handoff.flight.0).collect();
        out.sort_unstable();
        out
    }

    #[test]
    fn all_run_while_no_promise_breaks() {
        let lax: Vec<_> = (0..40)
            .map(|i| candidate(i, Some((60, 1000)), 990))
            .collect();
        assert!(out(&lax, 990).is_empty());
        let none: Vec<_> = (0..200).map(|i| candidate(i, None, 0)).collect();
        assert!(out(&none, 990).is_empty(), "nobody was promised anything");
    }

    #[test]
    fn who_has_slack_sits_out_where_the_tightest_would_wait() {
        let mut all: Vec<_> = (0..20).map(|i| candidate(i, None, 990)).collect();
        all.push(candidate(20, Some((20, 1000)), 980));
        all.push(candidate(21, Some((100, 1080)), 980));
        // 20 ms are room for ten, and the two that were promised something are two of them.
        assert_eq!(out(&all, 990), (8..20).collect::<Vec<_>>());
    }

    #[test]
    fn one_that_nobody_can_serve_in_time_runs_alone_and_does_not_stop_the_rest_for_ever() {
        let all = [
            candidate(1, Some((5, 1000)), 990),
            candidate(2, Some((30, 1020)), 990),
        ];
        assert_eq!(out(&all, 990), [2]);
        let later = [
            candidate(1, Some((5, 1000)), 1520),
            candidate(2, Some((30, 1020)), 990),
        ];
        assert_eq!(out(&later, 1520), [1], "its turn has come");
    }

    #[test]
    fn streams_can_spare_what_they_are_ahead_by() {
        let mut placed = Placed::default();
        placed.add(&candidate(1, Some((50, 1080)), 990), at(1000));
        assert_eq!(placed.spare, Some(MS * 80));
        placed.add(&candidate(2, Some((20, 2000)), 990), at(1000));
        assert_eq!(placed.spare, Some(MS * 60), "no client sees a standstill");
        placed.add(&candidate(3, Some((50, 990)), 990), at(1000));
        assert_eq!(
            placed.spare,
            Some(MS * 50),
            "one is late, and makes up for it in the gaps that it has left"
        );
    }

    #[test]
    fn a_lax_stream_counts_for_part_of_a_tight_one() {
        let streams = [(MS * 20, 100), (MS * 40, 100), (MS * 40, 100)];
        let crowded = crowded_step(&prices(), streams.into_iter());
        assert_eq!(crowded, Some((MS * 20, MS * 12)));
        assert_eq!(crowded_step(&prices(), [].into_iter()), None);
    }
}
