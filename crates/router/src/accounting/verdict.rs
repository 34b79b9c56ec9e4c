//! The stages of a flight's time, and its outcome for its targets.
//!
//! Owns: the timestamps taken on the way, the stages computed from them, the verdict, and what
//! predictions learn from both. Never: decides anything about a flight.
//! Invariant: the stages add up to the time from arrival to the end, as far as the flight came; one
//! verdict for each flight.

use crate::accounting::tally::{PredictionSample, ServiceTally};
use crate::event::CancelReason;
use crate::flight::state::FlightRecord;
use crate::placement::rules::some_class_yields;
use cleave_domain::{
    DecodeTiming, Ending, PrefillTiming, RequestStage, RequestStageTimes, SloMetric, SloPolicy,
    SloVerdict, Time,
};
use std::time::Duration;

/// Timestamps of a flight. Reports may come in any order. Only the first attempt that gave its
/// client a token counts for the time until then; the cost of later failures is part of the last
/// stage.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FlightTimestamps {
    /// Start of the attempt under way, and the order of its prompt.
    pub(crate) began: Option<Time>,
    pub(crate) ordered: Option<Time>,
    /// Time spent on attempts that failed before the first token.
    pub(crate) lost: Duration,
    /// Arrival of the first token, and its worker's timing.
    pub(crate) first: Option<(Time, PrefillTiming)>,
    /// Landing of the blocks.
    pub(crate) landed: Option<Time>,
    pub(crate) decode: DecodeTiming,
}

/// Workers fill promised gaps with work of requests without targets, so where there are such, a gap
/// close to its target is no error of a prediction.
fn most(target: Option<Duration>) -> Duration {
    target.map_or(Duration::ZERO, |target| target - target / 8)
}

/// Takes as much as is left of the time wanted.
fn take_part(left: &mut Duration, requested: Duration) -> Duration {
    let part = requested.min(*left);
    *left -= part;
    part
}

impl FlightTimestamps {
    /// Records that the attempt under way failed.
    pub(crate) fn attempt_lost(&mut self, now: Time) {
        let began = self.began.take().filter(|_| self.first.is_none());
        self.lost += began.map_or(Duration::ZERO, |at| now.since(at));
        self.ordered = None;
    }

    /// Records the first token. Returns false if there was one before.
    pub(crate) fn first_token(&mut self, timing: PrefillTiming, now: Time) -> bool {
        let is_first = self.first.is_none();
        self.first.get_or_insert((now, timing));
        is_first
    }

    /// The stages of a flight from `since` until `until`: each takes from the time that the ones
    /// before it left, so that they add up whatever was reported and in whatever order.
    fn timing(&self, since: Time, until: Time) -> RequestStageTimes {
        let Some((first, prefill)) = self.first else {
            let mut left = until.since(since);
            let waits = self.ordered.map_or(Duration::ZERO, |at| until.since(at));
            let prefill_wait = take_part(&mut left, waits);
            let retry = take_part(&mut left, self.lost);
            return RequestStageTimes {
                router_queue: left,
                retry,
                prefill_wait,
                ..RequestStageTimes::default()
            };
        };
        let mut before = first.since(since);
        let mut after = until.since(since) - before.min(until.since(since));
        // The two clocks differ: a worker's measurement may exceed the time observed here.
        let run = take_part(&mut before, prefill.run);
        let prefill_wait = take_part(&mut before, prefill.wait);
        let retry = take_part(&mut before, self.lost);
        let landed = self.landed.unwrap_or(first);
        let transfer = take_part(&mut after, landed.since(first));
        let decode_wait = take_part(&mut after, self.decode.wait);
        let first_decode = take_part(&mut after, self.decode.first);
        RequestStageTimes {
            router_queue: before,
            retry,
            prefill_wait,
            prefill: run,
            transfer,
            decode_wait,
            first_decode,
            decode: after,
        }
    }
}

impl FlightRecord {
    fn late(&self, timing: &RequestStageTimes, output_tokens: u32) -> Option<SloVerdict> {
        let slo = &self.request.slo;
        let spans = [
            (SloMetric::Ttft, slo.ttft, Some(timing.ttft())),
            (SloMetric::Tpot, slo.tpot, timing.tpot(output_tokens)),
            (SloMetric::EndToEnd, slo.e2e, Some(timing.total())),
        ];
        let missed = |(_, target, real): &(SloMetric, Option<Duration>, Option<Duration>)| {
            target
                .zip(*real)
                .is_some_and(|(target, real)| real > target)
        };
        let (aim, target, _) = spans.into_iter().find(missed)?;
        let stage = self.stage_that_broke(aim, target.unwrap_or_default(), timing);
        Some(SloVerdict::Late { aim, stage })
    }

    /// The stage with the largest excess over the forecast of the placement; without a forecast, or
    /// where the placement was already too late, the longest stage.
    fn stage_that_broke(
        &self,
        aim: SloMetric,
        target: Duration,
        timing: &RequestStageTimes,
    ) -> RequestStage {
        let stages = match aim {
            SloMetric::Ttft => &RequestStage::ALL[..4],
            SloMetric::Tpot => &RequestStage::ALL[4..],
            SloMetric::EndToEnd => &RequestStage::ALL[..],
        };
        let in_time =
            |stages: &RequestStageTimes| aim == SloMetric::Tpot || stages.ttft() <= target;
        let predicted = self.forecast.map(|forecast| forecast.stages);
        let predicted = predicted.filter(in_time);
        let predicted = predicted.unwrap_or_default();
        let beyond =
            |stage: RequestStage| timing.stage(stage).saturating_sub(predicted.stage(stage));
        let worst = stages.iter().copied().rev().max_by_key(|s| beyond(*s));
        worst.unwrap_or(RequestStage::RouterQueue)
    }
}

/// The outcome of a flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlightVerdict<'a> {
    pub(crate) ending: &'a Ending,
    /// Outcome for its targets.
    pub(crate) verdict: SloVerdict,
    /// Times of its stages.
    pub(crate) timing: RequestStageTimes,
    pub(crate) output_tokens: u32,
    /// Length of its answer, if the client has all of it that it wanted.
    pub(crate) answer_tokens: Option<u32>,
}

impl FlightRecord {
    /// The outcome of the flight that ends now, with so many output tokens, if they are known.
    pub(crate) fn verdict<'a>(
        &self,
        ending: &'a Ending,
        why: CancelReason,
        tokens: Option<u32>,
        now: Time,
    ) -> FlightVerdict<'a> {
        let timing = self.timestamps.timing(self.submitted, now);
        let given = self.timestamps.first.is_some();
        let tokens = match (tokens, why) {
            (None, CancelReason::Enough { output_tokens }) => Some(output_tokens),
            (tokens, _) => tokens,
        };
        let counted = (self.request.generated.len() as u32).max(u32::from(given));
        let output_tokens = tokens.unwrap_or(counted);
        let enough = matches!(why, CancelReason::Enough { .. });
        let is_whole = enough || matches!(ending, Ending::Done { .. });
        let verdict = match ending {
            Ending::Cancelled if !enough => {
                let passed = self.late(&timing, u32::from(given));
                passed.unwrap_or(SloVerdict::Cancelled)
            }
            Ending::Done { .. } | Ending::Cancelled => {
                let late = self.late(&timing, output_tokens);
                late.unwrap_or(SloVerdict::Good)
            }
            Ending::Refused(_) => SloVerdict::Refused,
            Ending::Failed(_) => SloVerdict::Failed,
        };
        FlightVerdict {
            ending,
            verdict,
            timing,
            output_tokens,
            answer_tokens: is_whole.then_some(output_tokens),
        }
    }

    /// Whether the flight's times say anything about predictions: a single attempt without failure.
    fn is_plain(&self) -> bool {
        self.failures.failures() == 0 && self.attempts() == 1
    }

    /// The observed time to the first token, which has just come, against its prediction.
    pub(crate) fn ttft_sample(&self, goal_permille: u32, now: Time) -> Option<PredictionSample> {
        let slo = &self.request.slo;
        // A prompt without a deadline runs behind those with one, so its time teaches nothing.
        let has_deadline = slo.ttft.is_some() || slo.e2e.is_some();
        let forecast = self.forecast.filter(|_| has_deadline && self.is_plain())?;
        let (first, _) = self.timestamps.first?;
        // The time that it waited for a place is known, not predicted.
        let before = forecast.stages.router_queue;
        Some(PredictionSample {
            real: first.since(self.submitted).saturating_sub(before),
            predicted: forecast.request.ttft.saturating_sub(before),
            target: slo.ttft.map(|ttft| ttft.saturating_sub(before)),
            goal_permille,
            at: now,
        })
    }

    /// The observed gaps between the tokens of a whole answer against their prediction.
    /// `some_class_yields` tells whether gaps are filled with work of other classes.
    fn tpot_sample(
        &self,
        outcome: &FlightVerdict,
        some_class_yields: bool,
        goal_permille: u32,
        now: Time,
    ) -> Option<PredictionSample> {
        let slo = &self.request.slo;
        // A stream without a target for its gap is deferred for those with one, so its time teaches
        // nothing.
        let has_target = slo.tpot.is_some() || slo.e2e.is_some();
        let forecast = self.forecast.filter(|_| has_target)?;
        let gap = most(slo.tpot.filter(|_| some_class_yields));
        let predicted = forecast.tpot_of(outcome.output_tokens)?.max(gap);
        let gaps = outcome.output_tokens - 1;
        Some(PredictionSample {
            real: outcome.timing.total() - outcome.timing.ttft(),
            predicted: predicted * gaps,
            target: slo.tpot.map(|tpot| tpot * gaps),
            goal_permille,
            at: now,
        })
    }
}

impl ServiceTally {
    /// Learns from the first token of a flight, which has just come.
    pub(crate) fn learn_first_token(
        &mut self,
        flight: &FlightRecord,
        policy: &SloPolicy,
        now: Time,
    ) {
        let class = flight.class(policy);
        if let Some(sample) = flight.ttft_sample(class.attainment_permille, now) {
            self.learn_ttft(&class.name, &sample);
        }
    }

    /// Learns from the answer of a flight, if the client has all of it.
    pub(crate) fn learn_answer(
        &mut self,
        flight: &FlightRecord,
        outcome: &FlightVerdict,
        policy: &SloPolicy,
        now: Time,
    ) {
        if outcome.answer_tokens.is_none() || flight.forecast.is_none() || !flight.is_plain() {
            return;
        }
        let class = flight.class(policy);
        // A vector is no answer of one token.
        if flight.request.pooling.is_none() {
            self.answered(&class.name, outcome.output_tokens);
        }
        let yields = some_class_yields(policy);
        let sample = flight.tpot_sample(outcome, yields, class.attainment_permille, now);
        if let Some(sample) = sample {
            self.learn_tpot(&class.name, &sample);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(millis: u32) -> Time {
        Time::ZERO + MS * millis
    }

    /// The first token is there after so long, as its worker timed it.
    fn first(millis: u32, wait: u32, run: u32) -> Option<(Time, PrefillTiming)> {
        let timing = PrefillTiming {
            wait: MS * wait,
            run: MS * run,
        };
        Some((at(millis), timing))
    }

    /// Every stage in milliseconds, in the order of the way, from 100 to `until`.
    fn stages(clock: &FlightTimestamps, until: u32) -> [u128; 8] {
        let timing = clock.timing(at(100), at(until));
        assert_eq!(timing.total(), MS * (until - 100), "they add up");
        RequestStage::ALL.map(|stage| timing.stage(stage).as_millis())
    }

    #[test]
    fn a_flight_without_a_token_waited_retried_or_queued() {
        let clock = FlightTimestamps {
            ordered: Some(at(170)),
            lost: MS * 50,
            ..FlightTimestamps::default()
        };
        assert_eq!(stages(&clock, 200), [20, 50, 30, 0, 0, 0, 0, 0]);
        assert_eq!(stages(&clock, 190), [20, 50, 20, 0, 0, 0, 0, 0]);
        let unordered = FlightTimestamps {
            ordered: None,
            ..clock
        };
        assert_eq!(stages(&unordered, 200), [50, 50, 0, 0, 0, 0, 0, 0]);
        // More was lost than there is time.
        assert_eq!(stages(&unordered, 120), [0, 20, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn each_stage_takes_from_the_time_that_others_left() {
        let clock = FlightTimestamps {
            lost: MS * 5,
            first: first(150, 10, 20),
            landed: Some(at(157)),
            decode: DecodeTiming {
                wait: MS * 3,
                first: MS * 4,
            },
            ..FlightTimestamps::default()
        };
        assert_eq!(stages(&clock, 200), [15, 5, 10, 20, 7, 3, 4, 36]);
        let unmoved = FlightTimestamps {
            landed: None,
            ..clock
        };
        assert_eq!(stages(&unmoved, 200), [15, 5, 10, 20, 0, 3, 4, 43]);
        // It ends before the decode worker has drawn.
        assert_eq!(stages(&clock, 159), [15, 5, 10, 20, 7, 2, 0, 0]);
        // A worker measured more than was seen of it here.
        let slow = FlightTimestamps {
            first: first(150, 40, 45),
            ..clock
        };
        assert_eq!(stages(&slow, 150), [0, 0, 5, 45, 0, 0, 0, 0]);
    }

    #[test]
    fn a_part_takes_no_more_than_is_left() {
        let mut left = MS * 10;
        let parts = [3, 0, 9, 1].map(|requested| take_part(&mut left, MS * requested));
        let none = Duration::ZERO;
        assert_eq!(parts, [MS * 3, none, MS * 7, none]);
        assert_eq!(left, none);
        assert_eq!([most(Some(MS * 8)), most(None)], [MS * 7, none]);
    }
}
