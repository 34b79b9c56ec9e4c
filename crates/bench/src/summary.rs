//! Numbers over many requests.
//!
//! Owns: percentiles, attainment and goodput. Never: leaves a request out because it went wrong.
//! Invariant: `offered` = `met` + the sum of `missed` + `undecided`.

use crate::confidence::{Interval, wilson};
use crate::record::{Failure, Outcome, Record};
use crate::run::{Cut, Run};
use crate::slo::{Miss, Targets};
use cleave_domain::{Stage, Time};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Points of a distribution that the report draws.
const QUANTILES: usize = 101;

/// One kind of number over many requests, in the unit of its name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// How many there are; the others are 0 if there is none.
    pub count: usize,
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest.
    pub max: f64,
}

impl Stats {
    /// What [`Self::columns`] are.
    pub const COLUMNS: [&str; 6] = ["mean", "p50", "p90", "p95", "p99", "max"];

    /// Everything but how many there are, as tables show it.
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

    /// Percentiles between two values are on the line between them, as numpy has them.
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

/// Of sorted numbers, at least one.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = share * (sorted.len() - 1) as f64;
    let below = sorted[place.floor() as usize];
    let above = sorted[place.ceil() as usize];
    below + (above - below) * place.fract()
}

/// Percentiles 0 to 100 of each latency, in milliseconds; empty without a value.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Curves {
    /// Time to first token.
    pub ttft_ms: Vec<f64>,
    /// Time per output token.
    pub tpot_ms: Vec<f64>,
    /// Gaps between chunks.
    pub gap_ms: Vec<f64>,
    /// End to end.
    pub e2e_ms: Vec<f64>,
}

/// One class, or all of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Requests that were due after the warm-up.
    pub offered: u64,
    /// Answered whole.
    pub done: u64,
    /// Within their targets.
    pub met: u64,
    /// By reason.
    pub missed: BTreeMap<Miss, u64>,
    /// Under way when the run was cut short; neither met nor missed.
    pub undecided: u64,
    /// Met of those decided.
    pub attainment: f64,
    /// 95 % confidence in that.
    pub attainment_interval: Option<Interval>,
    /// Offered requests per second of arrivals.
    pub offered_rps: f64,
    /// Met requests per second of arrivals.
    pub goodput_rps: f64,
    /// The same per device.
    pub goodput_rps_per_device: f64,
    /// Output tokens of all answers per second, until the last one's end.
    pub output_tokens_per_second: f64,
    /// Prompt tokens of all answers per second, until the last one's end.
    pub input_tokens_per_second: f64,
    /// Failures by kind.
    pub failures: BTreeMap<String, u64>,
    /// `Retry-After` of refusals, in seconds.
    pub retry_after_s: Stats,
    /// From when a request was due to its first token.
    pub ttft_ms: Stats,
    /// (last − first) / (tokens − 1).
    pub tpot_ms: Stats,
    /// Between chunks with output.
    pub gap_ms: Stats,
    /// From when a request was due to its answer's end.
    pub e2e_ms: Stats,
    /// How late the generator sent: trust nothing if this is not small beside the targets.
    pub lateness_ms: Stats,
    /// Prompt tokens, by the server's count where it counts.
    pub input_tokens: Stats,
    /// Output tokens, by the server's count where it counts.
    pub output_tokens: Stats,
    /// Prompt tokens that the server had in its cache, as it says.
    pub cached_tokens: Stats,
    /// Stages of a request's way, where the server tells them.
    pub stages_ms: BTreeMap<String, Stats>,
    /// Answers whose number of chunks is not their number of tokens.
    pub chunks_differ: u64,
    /// Answers that are not as long as was asked for.
    pub outputs_differ: u64,
    /// Prompts that the server counted more than 2 % otherwise than meant.
    pub inputs_differ: u64,
    /// Requests that were sent once more, over a fresh connection, since the server closed a kept one
    /// instead of answering: no failures by themselves, and their latencies are of both times together.
    pub asked_again: u64,
    /// For plots.
    pub curves: Curves,
}

/// What a summary is over.
#[derive(Clone, Debug)]
pub(crate) struct Scope<'a> {
    pub(crate) classes: &'a [String],
    /// By class.
    pub(crate) targets: &'a [Targets],
    /// Requests due before this are left out.
    pub(crate) warmup: Duration,
    pub(crate) devices: u32,
}

impl Scope<'_> {
    /// Of all classes, and of each.
    pub(crate) fn summarize(&self, run: &Run) -> (Summary, BTreeMap<String, Summary>) {
        let counted = |record: &&Record| record.due >= Time::ZERO + self.warmup;
        let all: Vec<&Record> = run.records.iter().filter(counted).collect();
        let of_class = |index: usize| {
            let records: Vec<&Record> = all.iter().copied().filter(|r| r.class == index).collect();
            self.summary(&records, run)
        };
        let by_class = self.classes.iter().enumerate();
        let by_class = by_class.map(|(index, name)| (name.clone(), of_class(index)));
        (self.summary(&all, run), by_class.collect())
    }

    fn summary(&self, records: &[&Record], run: &Run) -> Summary {
        let mut summary = Summary::default();
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
        let done = || records.iter().filter(|r| r.outcome == Outcome::Done);
        let sum = |of: fn(&Record) -> u32| done().map(|r| f64::from(of(r))).sum::<f64>();
        summary.output_tokens_per_second = sum(Record::output_tokens) / took;
        summary.input_tokens_per_second = sum(input_tokens) / took;
        latencies(&mut summary, records);
        stages(&mut summary, records);
        summary
    }

    fn count(&self, summary: &mut Summary, record: &Record, cut: Option<Cut>) {
        summary.offered += 1;
        summary.asked_again += u64::from(record.asked_again);
        match self.targets[record.class].judge(record) {
            Ok(()) => summary.met += 1,
            Err(Miss::Unfinished) if cut.is_some() => summary.undecided += 1,
            Err(miss) => *summary.missed.entry(miss).or_default() += 1,
        }
        match &record.outcome {
            Outcome::Done => {
                let of_answer = record.output_tokens();
                summary.done += 1;
                summary.chunks_differ += u64::from(record.chunks != of_answer);
                summary.outputs_differ += u64::from(of_answer != record.asked.output);
                let (meant, counted) = (record.asked.input, input_tokens(record));
                summary.inputs_differ += u64::from(50 * meant.abs_diff(counted) > meant);
            }
            Outcome::Failed { kind, .. } => {
                *summary.failures.entry(name_of(*kind)).or_default() += 1;
            }
            Outcome::Refused { .. } | Outcome::Unfinished => {}
        }
    }
}

fn name_of(kind: Failure) -> String {
    let name = serde_json::to_value(kind).unwrap_or_default();
    name.as_str().unwrap_or_default().to_owned()
}

fn input_tokens(record: &Record) -> u32 {
    record.usage.map_or(record.asked.input, |usage| usage.input)
}

pub(crate) fn millis(span: Duration) -> f64 {
    span.as_secs_f64() * 1e3
}

fn latencies(summary: &mut Summary, records: &[&Record]) {
    let of = |take: &dyn Fn(&Record) -> Option<f64>| -> Vec<f64> {
        records.iter().filter_map(|record| take(record)).collect()
    };
    let done = |record: &Record| record.outcome == Outcome::Done;
    let e2e = |record: &Record| record.e2e().filter(|_| done(record)).map(millis);
    let mut ttft = of(&|record| record.ttft().map(millis));
    let mut tpot = of(&|record| record.tpot().filter(|_| done(record)).map(millis));
    let mut e2e = of(&e2e);
    let gaps = records.iter().flat_map(|record| &record.gaps);
    let mut gaps: Vec<f64> = gaps.map(|gap| f64::from(*gap)).collect();
    summary.ttft_ms = Stats::of(&mut ttft);
    summary.tpot_ms = Stats::of(&mut tpot);
    summary.e2e_ms = Stats::of(&mut e2e);
    summary.gap_ms = Stats::of(&mut gaps);
    summary.curves = Curves {
        ttft_ms: curve(&ttft),
        tpot_ms: curve(&tpot),
        gap_ms: curve(&gaps),
        e2e_ms: curve(&e2e),
    };
    summary.lateness_ms = Stats::of(&mut of(&|record| record.lateness().map(millis)));
    let tokens = |count: u32| Some(f64::from(count));
    summary.input_tokens = Stats::of(&mut of(&|record| tokens(input_tokens(record))));
    let output = |record: &Record| tokens(record.output_tokens()).filter(|_| done(record));
    summary.output_tokens = Stats::of(&mut of(&output));
    summary.cached_tokens = Stats::of(&mut of(&|record| record.cached.and_then(tokens)));
    let retry_after = |record: &Record| match record.outcome {
        Outcome::Refused { retry_after, .. } => retry_after.and_then(tokens),
        _ => None,
    };
    summary.retry_after_s = Stats::of(&mut of(&retry_after));
}

fn curve(sorted: &[f64]) -> Vec<f64> {
    let share = |index: usize| index as f64 / (QUANTILES - 1) as f64;
    match sorted.is_empty() {
        true => Vec::new(),
        false => (0..QUANTILES)
            .map(|index| round(quantile(sorted, share(index))))
            .collect(),
    }
}

/// To a microsecond, for numbers in milliseconds.
pub(crate) fn round(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

fn stages(summary: &mut Summary, records: &[&Record]) {
    for stage in Stage::ALL {
        let told = records.iter().filter_map(|record| record.stages.as_ref());
        let mut millis: Vec<f64> = told.filter_map(|stages| stages.of(stage)).collect();
        if !millis.is_empty() {
            let stats = Stats::of(&mut millis);
            summary.stages_ms.insert(stage.name().to_owned(), stats);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Length;

    #[test]
    fn percentiles_are_numpys() {
        // numpy.percentile([15, 20, 35, 40, 50], [50, 90, 95, 99]) = [35, 46, 48, 49.6]
        let stats = Stats::of(&mut [50.0, 20.0, 15.0, 40.0, 35.0]);
        assert_eq!((stats.count, stats.mean, stats.max), (5, 32.0, 50.0));
        for (ours, numpys) in [
            (stats.p50, 35.0),
            (stats.p90, 46.0),
            (stats.p95, 48.0),
            (stats.p99, 49.6),
        ] {
            assert!((ours - numpys).abs() < 1e-9, "{ours} {numpys}");
        }
        assert_eq!(Stats::of(&mut []), Stats::default());
    }

    fn at(millis: u64) -> Time {
        Time::from_nanos(millis * 1_000_000)
    }

    fn record(index: u32, class: usize, outcome: Outcome) -> Record {
        let due = u64::from(index) * 1000;
        let mut record = Record::new(index, class, at(due));
        record.asked = Length {
            input: 100,
            output: 3,
        };
        record.sent = Some(at(due + 1));
        if outcome == Outcome::Done {
            for millis in [50, 60, 80] {
                record.chunk(at(due + millis));
            }
            record.over = Some(at(due + 90));
        }
        record.outcome = outcome;
        record
    }

    fn summarize(records: Vec<Record>, cut: Option<Cut>) -> (Summary, BTreeMap<String, Summary>) {
        let limit = Targets {
            ttft: Some(Duration::from_millis(100)),
            ..Targets::default()
        };
        let scope = Scope {
            classes: &["a".to_owned(), "b".to_owned()],
            targets: &[limit, Targets::default()],
            warmup: Duration::from_secs(2),
            devices: 2,
        };
        scope.summarize(&Run {
            records,
            span: Duration::from_secs(12),
            took: Duration::from_secs(12),
            cut,
        })
    }

    #[test]
    fn lesson_25_every_request_after_the_warm_up_is_counted_once() {
        let refused = Outcome::Refused {
            status: 429,
            retry_after: Some(3),
        };
        let failed = Outcome::Failed {
            kind: Failure::Broken,
            text: "reset".into(),
        };
        let outcomes = [
            // Two in the warm-up.
            refused.clone(),
            Outcome::Done,
            Outcome::Done,
            Outcome::Done,
            refused,
            failed,
            Outcome::Unfinished,
        ];
        let records = || -> Vec<Record> {
            let outcomes = outcomes.iter().cloned().enumerate();
            outcomes
                .map(|(i, outcome)| record(i as u32, i % 2, outcome))
                .collect()
        };
        let again = records().into_iter().map(|mut record| {
            record.asked_again = u32::from(record.index % 3 == 0);
            record
        });
        let (all, by_class) = summarize(again.collect(), None);
        let again = [&all, &by_class["a"], &by_class["b"]].map(|sum| sum.asked_again);
        assert_eq!(again, [2, 1, 1], "one more was in the warm-up");
        assert_eq!((all.offered, all.done, all.met), (5, 2, 2));
        let missed = [Miss::Refused, Miss::Failed, Miss::Unfinished].map(|miss| all.missed[&miss]);
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
        // Cut short, what was under way is neither.
        let (cut, _) = summarize(records(), Some(Cut::Interrupted));
        assert_eq!((cut.undecided, cut.attainment), (1, 0.5));
    }
}
