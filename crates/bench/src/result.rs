//! Result files of a measurement.
//!
//! Owns: the schema of `result.json` and `requests.jsonl`. Never: computes a latency. Invariant:
//! everything in `report.html` is in `result.json`; the schema's number changes when a field
//! changes its meaning. Fields of times end in their unit.

use crate::confidence::{ConfidenceInterval, GoalVerdict};
use crate::record::{RequestMeasurement, RequestOutcome};
use crate::run::{CutReason, RunRecords};
use crate::server::ServerFacts;
use crate::slo::{MissReason, SloTargets};
use crate::stages::StageTimes;
use crate::summary::{RunSummary, millis, round};
use anyhow::Context;
use cleave_domain::Time;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name and number of the schema of `result.json`.
pub const SCHEMA: &str = "cleave-bench/1";
/// Most bins of a timeline.
const BINS_MAX: f64 = 240.0;
/// Most error texts that are kept.
const ERRORS_MAX: usize = 8;

/// The content of `result.json`.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// The value of [`SCHEMA`].
    pub schema: &'static str,
    pub kind: ReportKind,
    /// The version of Cleave.
    pub version: &'static str,
    /// Start, in seconds since 1970-01-01 UTC.
    pub started_unix_s: u64,
    /// Duration of the whole measurement.
    pub took_s: f64,
    /// Whether the user ended it early.
    pub interrupted: bool,
    /// The options of the command line.
    pub configuration: Value,
    /// The machine that made the load.
    pub environment: LoadMachine,
    /// The server's properties, as probed.
    pub server: ServerFacts,
    /// Notes that affect how far the numbers can be trusted.
    pub notes: Vec<String>,
    /// The result of the search; `goodput` only.
    pub goodput: Option<GoodputResult>,
    /// Rates in the order in which they were tried; `goodput` only.
    pub tries: Vec<RateResult>,
    /// Runs in the order of time.
    pub runs: Vec<RunReport>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReportKind {
    Run,
    /// A search over rates, or a sweep.
    Goodput,
}

/// The machine that makes the load.
#[derive(Clone, Debug, Serialize)]
pub struct LoadMachine {
    pub os: &'static str,
    pub arch: &'static str,
    /// Processors that this process may use.
    pub cores: usize,
}

impl LoadMachine {
    pub fn here() -> Self {
        Self {
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// The result of a search.
#[derive(Clone, Debug, Serialize)]
pub struct GoodputResult {
    /// Attainment that had to be met.
    pub goal: f64,
    /// Highest rate that met it, in requests per second; `null` if none did.
    pub rate_max: Option<f64>,
    /// Lowest rate that missed it; `null` if none did.
    pub rate_broken: Option<f64>,
    pub attainment: f64,
    /// 95 % confidence interval of the attainment.
    pub attainment_interval: ConfidenceInterval,
    /// Requests per second within their targets at `rate_max`; 0 if no rate met the goal.
    pub goodput_rps: f64,
    /// Goodput divided by the number of devices.
    pub goodput_rps_per_device: f64,
    /// Goodput of each class, at `rate_max`.
    pub goodput_rps_by_class: BTreeMap<String, f64>,
    /// Devices that the server had, as the user said.
    pub devices: u32,
    /// Whether the bounds are as close as requested; false if time ran out.
    pub complete: bool,
}

/// One rate, over all its runs.
#[derive(Clone, Debug, Serialize)]
pub struct RateResult {
    /// Requested rate, in requests per second.
    pub rate: f64,
    pub met: u64,
    pub decided: u64,
    pub attainment: f64,
    /// 95 % confidence interval of the attainment.
    pub attainment_interval: ConfidenceInterval,
    /// The verdict at this confidence; an `open` one was decided by the attainment itself.
    pub verdict: GoalVerdict,
    /// Whether the search took the goal as met.
    pub kept: bool,
    /// Requests per second that met their targets.
    pub goodput_rps: f64,
    pub runs: Vec<usize>,
    /// Median and 99th percentile of the last run, in milliseconds.
    pub ttft_ms: [f64; 2],
    /// Median and 99th percentile of the last run, in milliseconds.
    pub tpot_ms: [f64; 2],
}

#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// Requested rate, in requests per second; the schedule's own if none was requested.
    pub rate: f64,
    /// Seed of the run's draws.
    pub seed: u64,
    /// Requests of its schedule.
    pub planned: usize,
    /// Duration of the arrivals.
    pub span_s: f64,
    /// Duration until the last answer's end.
    pub took_s: f64,
    /// Why the run was cut short, if it was.
    pub cut: Option<CutReason>,
    pub all: RunSummary,
    pub classes: BTreeMap<String, RunSummary>,
    /// Targets of each class, in milliseconds.
    pub targets: BTreeMap<String, TargetsMs>,
    /// Texts of the first errors, with their counts.
    pub errors: BTreeMap<String, u64>,
    /// Events over time, the warm-up included.
    pub timeline: Vec<TimelineBin>,
}

/// SLO targets in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TargetsMs {
    /// Time to the first token.
    pub ttft: Option<f64>,
    pub tpot: Option<f64>,
    pub e2e: Option<f64>,
}

impl From<SloTargets> for TargetsMs {
    fn from(targets: SloTargets) -> Self {
        let SloTargets { ttft, tpot, e2e } = targets;
        Self {
            ttft: ttft.map(millis),
            tpot: tpot.map(millis),
            e2e: e2e.map(millis),
        }
    }
}

/// One bin of a run's timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TimelineBin {
    /// Start of the bin, since the run's start.
    pub from_s: f64,
    /// Requests that were due.
    pub due: u32,
    pub over: u32,
    /// Requests due here that met their targets.
    pub met: u32,
    /// Requests due here that missed a target.
    pub missed: u32,
    /// Requests in flight at the end of the bin.
    pub in_flight: u32,
}

/// The timeline of a run; `targets` are by class.
pub(crate) fn timeline(run: &RunRecords, targets: &[SloTargets]) -> Vec<TimelineBin> {
    let total = run.span.max(run.took).as_secs_f64();
    let width = [
        0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0, 3600.0,
    ]
    .into_iter()
    .find(|width| total / width < BINS_MAX)
    .unwrap_or(86_400.0);
    let count = (total / width).floor() as usize + 1;
    let mut bins: Vec<TimelineBin> = (0..count)
        .map(|index| TimelineBin {
            from_s: round(index as f64 * width),
            ..TimelineBin::default()
        })
        .collect();
    let bin_index = |at: Time| {
        let index = at.since(Time::ZERO).as_secs_f64() / width;
        (index as usize).min(count - 1)
    };
    for record in &run.records {
        let bin = &mut bins[bin_index(record.due)];
        bin.due += 1;
        match targets[record.class].judge(record) {
            Ok(()) => bin.met += 1,
            Err(MissReason::Unfinished) if run.cut.is_some() => {}
            Err(_) => bin.missed += 1,
        }
        if let Some(over) = record.ended {
            bins[bin_index(over)].over += 1;
        }
    }
    // Requests enter in the bin of their due time and leave in the bin of their end.
    let mut in_flight = 0;
    for bin in &mut bins {
        in_flight += bin.due;
        in_flight = in_flight.saturating_sub(bin.over);
        bin.in_flight = in_flight;
    }
    bins
}

/// Error texts with their counts.
pub(crate) fn errors(run: &RunRecords) -> BTreeMap<String, u64> {
    let mut errors = BTreeMap::new();
    for record in &run.records {
        if let RequestOutcome::Failed { text, .. } = &record.outcome {
            let is_below_limit = errors.len() < ERRORS_MAX;
            if let Some(count) = errors.get_mut(text) {
                *count += 1;
            } else if is_below_limit {
                errors.insert(text.clone(), 1);
            }
        }
    }
    errors
}

/// A line of `requests.jsonl`. Times are since the run's start.
#[derive(Serialize)]
struct RequestLine<'a> {
    run: usize,
    index: u32,
    class: &'a str,
    warmup: bool,
    met: bool,
    miss: Option<MissReason>,
    /// `done`, `refused`, `unfinished`, or the kind of failure.
    outcome: Value,
    error: Option<&'a str>,
    retry_after_s: Option<u32>,
    due_ms: f64,
    sent_ms: Option<f64>,
    first_ms: Option<f64>,
    last_ms: Option<f64>,
    over_ms: Option<f64>,
    ttft_ms: Option<f64>,
    tpot_ms: Option<f64>,
    e2e_ms: Option<f64>,
    gap_max_ms: Option<f64>,
    chunks: u32,
    asked_input_tokens: u32,
    asked_output_tokens: u32,
    input_tokens: Option<u32>,
    output_tokens: Option<u32>,
    cached_tokens: Option<u32>,
    asked_again: u32,
    stages: Option<StageTimes>,
}

/// Context for judging records in `requests.jsonl`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JudgingRules<'a> {
    pub(crate) classes: &'a [String],
    /// SLO targets by class.
    pub(crate) targets: &'a [SloTargets],
    pub(crate) warmup: Duration,
}

fn line<'a>(
    run: usize,
    record: &'a RequestMeasurement,
    rules: JudgingRules<'a>,
) -> RequestLine<'a> {
    let judgement = rules.targets[record.class].judge(record);
    let since_start = |at: Time| round(millis(at.since(Time::ZERO)));
    let span = |span: Duration| round(millis(span));
    let (outcome, error, retry_after_s) = match &record.outcome {
        RequestOutcome::Done => (Value::from("done"), None, None),
        RequestOutcome::Refused { retry_after, .. } => (Value::from("refused"), None, *retry_after),
        RequestOutcome::Failed { kind, text } => {
            let kind = serde_json::to_value(kind).unwrap_or_default();
            (kind, Some(text.as_str()), None)
        }
        RequestOutcome::Unfinished => (Value::from("unfinished"), None, None),
    };
    RequestLine {
        run,
        index: record.index,
        class: &rules.classes[record.class],
        warmup: record.due < Time::ZERO + rules.warmup,
        met: judgement.is_ok(),
        miss: judgement.err(),
        outcome,
        error,
        retry_after_s,
        due_ms: since_start(record.due),
        sent_ms: record.sent.map(since_start),
        first_ms: record.first.map(since_start),
        last_ms: record.last.map(since_start),
        over_ms: record.ended.map(since_start),
        ttft_ms: record.ttft().map(span),
        tpot_ms: record.tpot().map(span),
        e2e_ms: record.e2e().map(span),
        gap_max_ms: record
            .gaps
            .iter()
            .copied()
            .reduce(f32::max)
            .map(|gap| round(gap.into())),
        chunks: record.chunks,
        asked_input_tokens: record.requested.input,
        asked_output_tokens: record.requested.output,
        input_tokens: record.usage.map(|usage| usage.input),
        output_tokens: record.usage.map(|usage| usage.output),
        cached_tokens: record.cached,
        asked_again: record.resent_count,
        stages: record.stages,
    }
}

/// The folder of `--out`.
#[derive(Debug)]
pub struct ResultFolder {
    path: PathBuf,
    requests: BufWriter<File>,
}

impl ResultFolder {
    /// Creates the folder if it is missing, and `requests.jsonl` in it.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let context = || path.display().to_string();
        fs::create_dir_all(path).with_context(context)?;
        let requests = File::create(path.join("requests.jsonl")).with_context(context)?;
        Ok(Self {
            path: path.to_owned(),
            requests: BufWriter::new(requests),
        })
    }

    pub(crate) fn add(
        &mut self,
        index: usize,
        run: &RunRecords,
        rules: JudgingRules<'_>,
    ) -> anyhow::Result<()> {
        let requests = &mut self.requests;
        for record in &run.records {
            serde_json::to_writer(&mut *requests, &line(index, record, rules))?;
            requests.write_all(b"\n")?;
        }
        requests.flush().context("requests.jsonl")
    }

    /// Writes `result.json` and `report.html`.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn finish(&self, report: &BenchReport) -> anyhow::Result<()> {
        let write = |name: &str, text: String| {
            let path = self.path.join(name);
            fs::write(&path, text).with_context(|| path.display().to_string())
        };
        let mut json = serde_json::to_string_pretty(report)?;
        json.push('\n');
        write("result.json", json)?;
        write("report.html", crate::report::html(report))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Time {
        Time::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn timeline_bins_count_due_and_ended_requests() {
        let mut one = RequestMeasurement::new(0, 0, at(50));
        one.ended = Some(at(250));
        one.outcome = RequestOutcome::Done;
        let mut two = RequestMeasurement::new(1, 0, at(120));
        two.ended = Some(at(290));
        let run = RunRecords {
            records: vec![one, two],
            span: Duration::from_millis(200),
            took: Duration::from_millis(290),
            cut: None,
        };
        let bins = timeline(&run, &[SloTargets::default()]);
        let numbers = bins
            .iter()
            .map(|bin| (bin.due, bin.over, bin.met, bin.missed, bin.in_flight));
        assert_eq!(
            numbers.collect::<Vec<_>>(),
            [(1, 0, 1, 0, 1), (1, 0, 0, 1, 2), (0, 2, 0, 0, 0)]
        );
    }
}
