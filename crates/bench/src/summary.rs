//! Statistics over many requests.
//!
//! Owns: percentiles, attainment and goodput. Never: leaves out a failed request. Invariant:
//! `offered` = `met` + the sum of `missed` + `undecided`.

use crate::confidence::{ConfidenceInterval, wilson};
use crate::record::{RequestFailure, RequestMeasurement, RequestOutcome};
use crate::run::{CutReason, RunRecords};
use crate::slo::{MissReason, SloTargets};
use cleave_domain::{RequestStage, Time};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Points of a distribution that the report draws.
const CURVE_POINTS: usize = 101;

/// Statistics of one value over many requests, in the unit of its name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SampleStats {
    /// Number of values; the other fields are 0 if there is none.
    pub count: usize,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

impl SampleStats {
    /// Names of [`Self::columns`], in order.
    pub const COLUMNS: [&str; 6] = ["mean", "p50", "p90", "p95", "p99", "max"];

    /// All fields but the count, for tables.
    pub fn columns(&self) -> [f64; 6] {
        let Self {
            count: _,
            mean,
            p50,
            p90,
            p95,
            p99,
            max,
        } = *self;
        [mean, p50, p90, p95, p99, max]
    }

    /// Percentiles are interpolated linearly, as by numpy.
    pub(crate) fn of(numbers: &mut [f64]) -> Self {
        numbers.sort_unstable_by(f64::total_cmp);
        let Some(max) = numbers.last().copied() else {
            return Self::default();
        };
        Self {
            count: numbers.len(),
            mean: numbers.iter().sum::<f64>() / numbers.len() as f64,
            p50: quantile(numbers, 0.5),
            p90: quantile(numbers, 0.9),
            p95: quantile(numbers, 0.95),
            p99: quantile(numbers, 0.99),
            max,
        }
    }
}

/// The quantile of sorted numbers, at least one.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = share * (sorted.len() - 1) as f64;
    let below = sorted[rank.floor() as usize];
    let above = sorted[rank.ceil() as usize];
    below + (above - below) * rank.fract()
}

/// Percentiles 0 to 100 of each latency, in milliseconds; empty without a value.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LatencyCurves {
    /// Time to first token.
    pub ttft_ms: Vec<f64>,
    /// Time per output token.
    pub tpot_ms: Vec<f64>,
    pub gap_ms: Vec<f64>,
    pub e2e_ms: Vec<f64>,
}

/// The summary of one class, or of all.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RunSummary {
    /// Requests that were due after the warm-up.
    pub offered: u64,
    pub done: u64,
    pub met: u64,
    pub missed: BTreeMap<MissReason, u64>,
    /// In flight when the run was cut short; neither met nor missed.
    pub undecided: u64,
    /// Met requests, divided by the decided ones.
    pub attainment: f64,
    /// 95 % confidence interval of the attainment.
    pub attainment_interval: Option<ConfidenceInterval>,
    /// Offered requests per second of arrivals.
    pub offered_rps: f64,
    /// Met requests per second of arrivals.
    pub goodput_rps: f64,
    /// Goodput divided by the number of devices.
    pub goodput_rps_per_device: f64,
    /// Output tokens of all answers per second, until the last one's end.
    pub output_tokens_per_second: f64,
    /// Prompt tokens of all answers per second, until the last one's end.
    pub input_tokens_per_second: f64,
    pub failures: BTreeMap<String, u64>,
    /// `Retry-After` of refusals, in seconds.
    pub retry_after_s: SampleStats,
    /// Time from when a request was due to its first token.
    pub ttft_ms: SampleStats,
    /// (last − first) / (tokens − 1).
    pub tpot_ms: SampleStats,
    /// Between chunks with output.
    pub gap_ms: SampleStats,
    /// Time from when a request was due to its answer's end.
    pub e2e_ms: SampleStats,
    /// How late the generator sent; if this is not small beside the targets, no latency can be
    /// trusted.
    pub lateness_ms: SampleStats,
    /// Prompt tokens by the server's count, if it has one.
    pub input_tokens: SampleStats,
    /// Output tokens by the server's count, if it has one.
    pub output_tokens: SampleStats,
    /// Prompt tokens that the server had in its cache, as it reports.
    pub cached_tokens: SampleStats,
    /// Stage times, if the server reports them.
    pub stages_ms: BTreeMap<String, SampleStats>,
    /// Answers whose number of chunks differs from their number of tokens.
    pub chunks_differ: u64,
    /// Answers that are not as long as requested.
    pub outputs_differ: u64,
    /// Prompts whose count on the server is more than 2 % off the planned one.
    pub inputs_differ: u64,
    /// Requests that were resent over a fresh connection, since the server closed a kept one
    /// instead of answering: no failures by themselves, and their latencies include both attempts.
    pub asked_again: u64,
    pub curves: LatencyCurves,
}

/// Settings of a summary.
#[derive(Clone, Debug)]
pub(crate) struct SummaryScope<'a> {
    pub(crate) classes: &'a [String],
    /// SLO targets by class.
    pub(crate) targets: &'a [SloTargets],
    /// Requests due before this are left out.
    pub(crate) warmup: Duration,
    pub(crate) devices: u32,
}

impl SummaryScope<'_> {
    /// The summary of all classes, and of each.
    pub(crate) fn summarize(&self, run: &RunRecords) -> (RunSummary, BTreeMap<String, RunSummary>) {
        let counted = |record: &&RequestMeasurement| record.due >= Time::ZERO + self.warmup;
        let all: Vec<&RequestMeasurement> = run.records.iter().filter(counted).collect();
        let of_class = |index: usize| {
            let records: Vec<&RequestMeasurement> =
                all.iter().copied().filter(|r| r.class == index).collect();
            self.summary(&records, run)
        };
        let by_class = self.classes.iter().enumerate();
        let by_class = by_class.map(|(index, name)| (name.clone(), of_class(index)));
        (self.summary(&all, run), by_class.collect())
    }

    fn summary(&self, records: &[&RequestMeasurement], run: &RunRecords) -> RunSummary {
        let mut summary = RunSummary::default();
        for record in records {
            self.count(&mut summary, record, run.cut);
        }
        let decided = summary.offered - summary.undecided;
        summary.attainment = summary.met as f64 / decided.max(1) as f64;
        summary.attainment_interval = Some(wilson(summary.met, decided));
        let span = run.span.saturating_sub(self.warmup).as_secs_f64().max(1e-3);
        summary.offered_rps = summary.offered as f64 / span;
        summary.goodput_rps = summary.met as f64 / span;
        summary.goodput_rps_per_device = summary.goodput_rps / f64::from(self.devices);
        let took = run.took.saturating_sub(self.warmup).as_secs_f64().max(1e-3);
        let done = || records.iter().filter(|r| r.outcome == RequestOutcome::Done);
        // Whole numbers: the sum of no floating-point number is -0.
        let sum =
            |of: fn(&RequestMeasurement) -> u32| done().map(|r| u64::from(of(r))).sum::<u64>();
        summary.output_tokens_per_second = sum(RequestMeasurement::output_tokens) as f64 / took;
        summary.input_tokens_per_second = sum(input_tokens) as f64 / took;
        latencies(&mut summary, records);
        stages(&mut summary, records);
        summary
    }

    fn count(&self, summary: &mut RunSummary, record: &RequestMeasurement, cut: Option<CutReason>) {
        summary.offered += 1;
        summary.asked_again += u64::from(record.resent_count);
        match self.targets[record.class].judge(record) {
            Ok(()) => summary.met += 1,
            Err(MissReason::Unfinished) if cut.is_some() => summary.undecided += 1,
            Err(miss) => *summary.missed.entry(miss).or_default() += 1,
        }
        match &record.outcome {
            RequestOutcome::Done => {
                let of_answer = record.output_tokens();
                summary.done += 1;
                summary.chunks_differ += u64::from(record.chunks != of_answer);
                summary.outputs_differ += u64::from(of_answer != record.requested.output);
                let (meant, counted) = (record.requested.input, input_tokens(record));
                summary.inputs_differ += u64::from(50 * meant.abs_diff(counted) > meant);
            }
            RequestOutcome::Failed { kind, .. } => {
                *summary.failures.entry(failure_name(*kind)).or_default() += 1;
            }
            RequestOutcome::Refused { .. } | RequestOutcome::Unfinished => {}
        }
    }
}

fn failure_name(kind: RequestFailure) -> String {
    let name = serde_json::to_value(kind).unwrap_or_default();
    name.as_str().unwrap_or_default().to_owned()
}

fn input_tokens(record: &RequestMeasurement) -> u32 {
    record
        .usage
        .map_or(record.requested.input, |usage| usage.input)
}

pub(crate) fn millis(span: Duration) -> f64 {
    span.as_secs_f64() * 1e3
}

fn latencies(summary: &mut RunSummary, records: &[&RequestMeasurement]) {
    let of = |take: &dyn Fn(&RequestMeasurement) -> Option<f64>| -> Vec<f64> {
        records.iter().filter_map(|record| take(record)).collect()
    };
    let done = |record: &RequestMeasurement| record.outcome == RequestOutcome::Done;
    let e2e = |record: &RequestMeasurement| record.e2e().filter(|_| done(record)).map(millis);
    let mut ttft = of(&|record| record.ttft().map(millis));
    let mut tpot = of(&|record| record.tpot().filter(|_| done(record)).map(millis));
    let mut e2e = of(&e2e);
    let gaps = records.iter().flat_map(|record| &record.gaps);
    let mut gaps: Vec<f64> = gaps.map(|gap| f64::from(*gap)).collect();
    summary.ttft_ms = SampleStats::of(&mut ttft);
    summary.tpot_ms = SampleStats::of(&mut tpot);
    summary.e2e_ms = SampleStats::of(&mut e2e);
    summary.gap_ms = SampleStats::of(&mut gaps);
    summary.curves = LatencyCurves {
        ttft_ms: quantile_curve(&ttft),
        tpot_ms: quantile_curve(&tpot),
        gap_ms: quantile_curve(&gaps),
        e2e_ms: quantile_curve(&e2e),
    };
    summary.lateness_ms = SampleStats::of(&mut of(&|record| record.lateness().map(millis)));
    let tokens = |count: u32| Some(f64::from(count));
    summary.input_tokens = SampleStats::of(&mut of(&|record| tokens(input_tokens(record))));
    let output =
        |record: &RequestMeasurement| tokens(record.output_tokens()).filter(|_| done(record));
    summary.output_tokens = SampleStats::of(&mut of(&output));
    summary.cached_tokens = SampleStats::of(&mut of(&|record| record.cached.and_then(tokens)));
    let retry_after = |record: &RequestMeasurement| match record.outcome {
        RequestOutcome::Refused { retry_after, .. } => retry_after.and_then(tokens),
        _ => None,
    };
    summary.retry_after_s = SampleStats::of(&mut of(&retry_after));
}

fn quantile_curve(sorted: &[f64]) -> Vec<f64> {
    let share = |index: usize| index as f64 / (CURVE_POINTS - 1) as f64;
    if sorted.is_empty() {
        Vec::new()
    } else {
        (0..CURVE_POINTS)
            .map(|index| round(quantile(sorted, share(index))))
            .collect()
    }
}

/// Rounds milliseconds to microseconds.
pub(crate) fn round(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

fn stages(summary: &mut RunSummary, records: &[&RequestMeasurement]) {
    for stage in RequestStage::ALL {
        let reported = records.iter().filter_map(|record| record.stages.as_ref());
        let mut millis: Vec<f64> = reported.filter_map(|stages| stages.of(stage)).collect();
        if !millis.is_empty() {
            let stats = SampleStats::of(&mut millis);
            summary.stages_ms.insert(stage.name().to_owned(), stats);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RequestTokens;

    #[test]
    fn percentiles_match_numpy() {
        // numpy.percentile([15, 20, 35, 40, 50], [50, 90, 95, 99]) = [35, 46, 48, 49.6]
        let stats = SampleStats::of(&mut [50.0, 20.0, 15.0, 40.0, 35.0]);
        assert_eq!((stats.count, stats.mean, stats.max), (5, 32.0, 50.0));
        for (computed, expected) in [
            (stats.p50, 35.0),
            (stats.p90, 46.0),
            (stats.p95, 48.0),
            (stats.p99, 49.6),
        ] {
            assert!((computed - expected).abs() < 1e-9, "{computed} {expected}");
        }
        assert_eq!(SampleStats::of(&mut []), SampleStats::default());
    }

    fn at(millis: u64) -> Time {
        Time::from_nanos(millis * 1_000_000)
    }

    fn record(index: u32, class: usize, outcome: RequestOutcome) -> RequestMeasurement {
        let due = u64::from(index) * 1000;
        let mut record = RequestMeasurement::new(index, class, at(due));
        record.requested = RequestTokens {
            input: 100,
            output: 3,
        };
        record.sent = Some(at(due + 1));
        if outcome == RequestOutcome::Done {
            for millis in [50, 60, 80] {
                record.receive_chunk(at(due + millis));
            }
            record.ended = Some(at(due + 90));
        }
        record.outcome = outcome;
        record
    }

    fn summarize(
        records: Vec<RequestMeasurement>,
        cut: Option<CutReason>,
    ) -> (RunSummary, BTreeMap<String, RunSummary>) {
        let limit = SloTargets {
            ttft: Some(Duration::from_millis(100)),
            ..SloTargets::default()
        };
        let scope = SummaryScope {
            classes: &["a".to_owned(), "b".to_owned()],
            targets: &[limit, SloTargets::default()],
            warmup: Duration::from_secs(2),
            devices: 2,
        };
        scope.summarize(&RunRecords {
            records,
            span: Duration::from_secs(12),
            took: Duration::from_secs(12),
            cut,
        })
    }

    #[test]
    fn a_run_without_answers_has_a_rate_of_zero() {
        let (none, _) = summarize(Vec::new(), None);
        for rate in [none.output_tokens_per_second, none.input_tokens_per_second] {
            assert_eq!(rate.to_bits(), 0, "not the negative zero");
        }
    }

    // Invariant: I33.
    // Lesson: 25.
    #[test]
    fn every_request_after_the_warm_up_is_counted_once() {
        let refused = RequestOutcome::Refused {
            status: 429,
            retry_after: Some(3),
        };
        let failed = RequestOutcome::Failed {
            kind: RequestFailure::Broken,
            text: "reset".into(),
        };
        let outcomes = [
            // The first two are in the warm-up.
            refused.clone(),
            RequestOutcome::Done,
            RequestOutcome::Done,
            RequestOutcome::Done,
            refused,
            failed,
            RequestOutcome::Unfinished,
        ];
        let records = || -> Vec<RequestMeasurement> {
            let outcomes = outcomes.iter().cloned().enumerate();
            outcomes
                .map(|(i, outcome)| record(i as u32, i % 2, outcome))
                .collect()
        };
        let again = records().into_iter().map(|mut record| {
            record.resent_count = u32::from(record.index % 3 == 0);
            record
        });
        let (all, by_class) = summarize(again.collect(), None);
        let again = [&all, &by_class["a"], &by_class["b"]].map(|sum| sum.asked_again);
        assert_eq!(again, [2, 1, 1], "one more was in the warm-up");
        assert_eq!((all.offered, all.done, all.met), (5, 2, 2));
        let missed = [
            MissReason::Refused,
            MissReason::Failed,
            MissReason::Unfinished,
        ]
        .map(|miss| all.missed[&miss]);
        assert_eq!(missed, [1, 1, 1]);
        assert_eq!(all.attainment, 0.4);
        assert_eq!((all.offered_rps, all.goodput_rps), (0.5, 0.2));
        assert_eq!(all.goodput_rps_per_device, 0.1);
        assert_eq!(all.failures["broken"], 1);
        assert_eq!(all.retry_after_s.max, 3.0);
        assert_eq!((all.ttft_ms.p50, all.tpot_ms.p50), (50.0, 15.0));
        assert_eq!((all.gap_ms.count, all.gap_ms.max), (4, 20.0));
        assert!((all.e2e_ms.p50 - 90.0).abs() < 1e-9 && all.lateness_ms.p50 == 1.0);
        assert_eq!((by_class["a"].offered, by_class["b"].offered), (3, 2));
        // In a run that was cut short, requests in flight are undecided.
        let (cut, _) = summarize(records(), Some(CutReason::Interrupted));
        assert_eq!((cut.undecided, cut.attainment), (1, 0.5));
    }
}
