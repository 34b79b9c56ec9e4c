//! The streams that draw in a step so that targets are kept, and the slack that they have.
//!
//! Owns: the choice among sequences that could all run, as functions from a snapshot. Never:
//! changes anything, or sees the brain. Invariant: a step of sequences that draw is never predicted
//! to take longer than the tightest mean gap promised to one in it, unless there is but one; and
//! the stream that waited longest goes first once its wait exceeds `IDLE_MAX`.

use crate::forecast::WorkForecast;
use crate::policy::ServiceRank;
use crate::sequences::WorkerSequence;
use cleave_domain::{HandoffId, Prices, StepWork, Time};
use cleave_planner::Predict;
use std::time::Duration;

/// A stream or prompt that could run and did not for this long goes first, one in each step: it
/// guarantees a share to streams without a target, and to prompts whose room the streams take.
pub(crate) const IDLE_MAX: Duration = Duration::from_millis(500);
/// A stream that is ahead of its target gives up at most this many of its mean gaps to one prompt
/// chunk: its client should see no pause.
const SLACK_GAPS_MAX: u32 = 3;
/// A sequence that could draw its next token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeCandidate {
    pub(crate) rank: ServiceRank,
    /// Its tokens after this step.
    pub(crate) context_tokens: u64,
    /// The mean gap that keeps its target, and the deadline of its next token; `None` without a
    /// target, or where it is already missed.
    pub(crate) target: Option<(Duration, Time)>,
    /// When it last ran.
    pub(crate) last_run_at: Time,
}

impl DecodeCandidate {
    pub(crate) fn new(sequence: &WorkerSequence, forecast: &WorkForecast, now: Time) -> Self {
        let gap = forecast.keepable_gap(sequence, now);
        Self {
            rank: sequence.rank(),
            context_tokens: u64::from(sequence.len()),
            target: gap.zip(sequence.token_due()),
            last_run_at: sequence.client_timing.last_run_at,
        }
    }
}

/// Streams and work that the step holds already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BatchLoad {
    pub(crate) work: StepWork,
    /// The tightest mean gap promised to a stream in it.
    pub(crate) tpot_least: Option<Duration>,
    /// Upper limit of the step's time by the slack of its streams.
    pub(crate) slack_least: Option<Duration>,
}

impl BatchLoad {
    pub(crate) fn add(&mut self, candidate: &DecodeCandidate, now: Time) {
        self.work += StepWork::decode(candidate.context_tokens);
        if let Some((tpot, due)) = candidate.target {
            // A late stream has a shorter gap left for each of its tokens, not none for the next
            // one.
            let spare = due.since(now).min(tpot * SLACK_GAPS_MAX).max(tpot);
            self.tpot_least = Some(self.tpot_least.map_or(tpot, |least| least.min(tpot)));
            self.slack_least = Some(self.slack_least.map_or(spare, |least| least.min(spare)));
        }
    }

    /// Whether all streams in it are predicted to keep their targets.
    fn keeps_targets(&self, prices: &Prices) -> bool {
        self.tpot_least
            .is_none_or(|least| prices.step(&self.work) <= least)
    }
}

/// Streams deferred to a later step. All run if that breaks no target; otherwise they are added by
/// priority, then by deadline, as long as every target holds.
pub(crate) fn deferred(
    prices: &Prices,
    placed: BatchLoad,
    candidates: &[DecodeCandidate],
    now: Time,
) -> Vec<HandoffId> {
    let mut all = placed;
    for candidate in candidates {
        all.add(candidate, now);
    }
    if all.keeps_targets(prices) {
        return Vec::new();
    }
    let mut order: Vec<&DecodeCandidate> = candidates.iter().collect();
    // Without a target the one that ran longest ago comes first, after all that have one.
    order.sort_by_key(|candidate| {
        let due = candidate.target.map(|(_, due)| due);
        let (late, due) = (due.is_none(), due.unwrap_or(candidate.last_run_at));
        (candidate.rank.priority, late, due, candidate.rank)
    });
    // A stream that waited for more than `IDLE_MAX` goes first, or a tight one could starve it.
    let longest = order
        .iter()
        .enumerate()
        .min_by_key(|(_, one)| one.last_run_at);
    if let Some((place, one)) = longest
        && now.since(one.last_run_at) > IDLE_MAX
    {
        order[..=place].rotate_right(1);
    }
    let mut chosen = placed;
    let mut out = Vec::new();
    for candidate in order {
        let mut with = chosen;
        with.add(candidate, now);
        // The first one always runs, even alone over its target: nothing would ever run otherwise.
        if chosen.work.rows == 0 || with.keeps_targets(prices) {
            chosen = with;
        } else {
            out.push(candidate.rank.handoff);
        }
    }
    out
}

/// The mean gap if all sequences with these targets and lengths ran here: within the tightest gap,
/// a stream with twice that gap draws in every other step, so it counts half.
pub(crate) fn step_of_all_streams(
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

    /// A step takes 10 ms, and 1 ms for each row.
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

    fn candidate(number: u64, target: Option<(u32, u32)>, served: u32) -> DecodeCandidate {
        let handoff = HandoffId {
            flight: FlightId(number),
            attempt: 0,
        };
        DecodeCandidate {
            rank: ServiceRank {
                priority: (0, 0),
                due: at(0),
                since: at(0),
                arrival: number,
                handoff,
            },
            context_tokens: 100,
            target: target.map(|(tpot, due)| (MS * tpot, at(due))),
            last_run_at: at(served),
        }
    }

    fn out(candidates: &[DecodeCandidate], now: u32) -> Vec<u64> {
        let out = deferred(&prices(), BatchLoad::default(), candidates, at(now));
        let mut out: Vec<u64> = out.iter().map(|handoff| handoff.flight.0).collect();
        out.sort_unstable();
        out
    }

    #[test]
    fn all_streams_run_while_every_target_holds() {
        let lax: Vec<_> = (0..40)
            .map(|i| candidate(i, Some((60, 1000)), 990))
            .collect();
        assert!(out(&lax, 990).is_empty());
        let none: Vec<_> = (0..200).map(|i| candidate(i, None, 0)).collect();
        assert!(out(&none, 990).is_empty(), "no stream has a target");
    }

    // Invariant: I28.
    #[test]
    fn streams_with_slack_are_deferred_for_the_tightest() {
        let mut all: Vec<_> = (0..20).map(|i| candidate(i, None, 990)).collect();
        all.push(candidate(20, Some((20, 1000)), 980));
        all.push(candidate(21, Some((100, 1080)), 980));
        // Ten rows fit into 20 ms, and the two streams with a target are two of them.
        assert_eq!(out(&all, 990), (8..20).collect::<Vec<_>>());
    }

    #[test]
    fn an_infeasible_request_does_not_block_the_queue() {
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
    fn slack_is_the_lead_over_the_target_capped_at_three_gaps() {
        let mut placed = BatchLoad::default();
        placed.add(&candidate(1, Some((50, 1080)), 990), at(1000));
        assert_eq!(placed.slack_least, Some(MS * 80));
        placed.add(&candidate(2, Some((20, 2000)), 990), at(1000));
        assert_eq!(
            placed.slack_least,
            Some(MS * 60),
            "slack is capped at three gaps"
        );
        placed.add(&candidate(3, Some((50, 990)), 990), at(1000));
        assert_eq!(
            placed.slack_least,
            Some(MS * 50),
            "one is late, and makes up for it in the gaps that it has left"
        );
    }

    #[test]
    fn a_lax_stream_counts_as_part_of_a_tight_one() {
        let streams = [(MS * 20, 100), (MS * 40, 100), (MS * 40, 100)];
        let all_streams = step_of_all_streams(&prices(), streams.into_iter());
        assert_eq!(all_streams, Some((MS * 20, MS * 12)));
        assert_eq!(step_of_all_streams(&prices(), [].into_iter()), None);
    }
}
