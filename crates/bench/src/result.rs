//! What a measurement leaves behind.
//!
//! Owns: the schema of `result.json` and `requests.jsonl`. Never: computes a latency.
//! Invariant: everything in `report.html` is in `result.json`; the schema's number changes when a
//! field changes its meaning. Fields of times end in their unit.

use crate::confidence::{Interval, Verdict};
use crate::record::{Outcome, Record};
use crate::run::{Cut, Run};
use crate::server::Findings;
use crate::slo::{Miss, Targets};
use crate::stages::Stages;
use crate::summary::{Summary, millis, round};
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
/// Bins of a timeline at most.
const BINS_MAX: f64 = 240.0;
/// Texts of errors that are kept.
const ERRORS_MAX: usize = 8;

/// `result.json`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// `run` or `goodput`.
    pub kind: Kind,
    /// Of Cleave.
    pub version: &'static str,
    /// When it began, in seconds since 1970-01-01 UTC.
    pub started_unix_s: u64,
    /// How long all of it took.
    pub took_s: f64,
    /// Whether the user ended it early.
    pub interrupted: bool,
    /// What was asked for, as the command line had it.
    pub configuration: Value,
    /// Where the load came from.
    pub environment: Environment,
    /// What the server said of itself.
    pub server: Findings,
    /// What a reader should know before believing a number.
    pub notes: Vec<String>,
    /// What the search found; `goodput` only.
    pub goodput: Option<Goodput>,
    /// Rates that were tried, in their order in time; `goodput` only.
    pub tries: Vec<Try>,
    /// In their order in time.
    pub runs: Vec<RunReport>,
}

/// See [`Report::kind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// One run.
    Run,
    /// A search over rates, or a sweep.
    Goodput,
}

/// The machine that makes the load.
#[derive(Clone, Debug, Serialize)]
pub struct Environment {
    /// Operating system.
    pub os: &'static str,
    /// Instruction set.
    pub arch: &'static str,
    /// Processors of the machine that this process may use.
    pub cores: usize,
}

impl Environment {
    /// This machine.
    pub fn here() -> Self {
        Self {
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// What a search found.
#[derive(Clone, Debug, Serialize)]
pub struct Goodput {
    /// Attainment that had to be kept.
    pub goal: f64,
    /// Highest rate that kept it, in requests per second; `null` if none did.
    pub rate_max: Option<f64>,
    /// Lowest rate that broke it; `null` if none did.
    pub rate_broken: Option<f64>,
    /// Attainment at `rate_max`.
    pub attainment: f64,
    /// 95 % confidence in that.
    pub attainment_interval: Interval,
    /// Requests per second within their targets at `rate_max`; 0 if no rate kept the goal.
    pub goodput_rps: f64,
    /// The same per device.
    pub goodput_rps_per_device: f64,
    /// Of classes, at `rate_max`.
    pub goodput_rps_by_class: BTreeMap<String, f64>,
    /// Devices that the server had, as the user said.
    pub devices: u32,
    /// Whether the bounds are as close as was asked for; not so if time ran out.
    pub complete: bool,
}

/// One rate, over all its runs.
#[derive(Clone, Debug, Serialize)]
pub struct Try {
    /// Asked for, in requests per second.
    pub rate: f64,
    /// Within their targets.
    pub met: u64,
    /// Met or missed.
    pub decided: u64,
    /// `met` of `decided`.
    pub attainment: f64,
    /// 95 % confidence in that.
    pub attainment_interval: Interval,
    /// With this confidence; `open` was decided by the attainment itself.
    pub verdict: Verdict,
    /// What the search went on with.
    pub kept: bool,
    /// Met requests per second.
    pub goodput_rps: f64,
    /// Indices into [`Report::runs`].
    pub runs: Vec<usize>,
    /// Median and 99th percentile of the last run, in milliseconds.
    pub ttft_ms: [f64; 2],
    /// Median and 99th percentile of the last run, in milliseconds.
    pub tpot_ms: [f64; 2],
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// Asked for, in requests per second; the schedule's own if none was asked for.
    pub rate: f64,
    /// Of its draws.
    pub seed: u64,
    /// Requests of its schedule.
    pub planned: usize,
    /// How long arrivals lasted.
    pub span_s: f64,
    /// Until the last answer's end.
    pub took_s: f64,
    /// Why it was cut short, if it was.
    pub cut: Option<Cut>,
    /// All classes together.
    pub all: Summary,
    /// Each class.
    pub classes: BTreeMap<String, Summary>,
    /// Targets of each class, in milliseconds.
    pub targets: BTreeMap<String, TargetsMs>,
    /// Texts of errors, the first ones.
    pub errors: BTreeMap<String, u64>,
    /// What happened when, the warm-up included.
    pub timeline: Vec<Bin>,
}

/// Limits in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TargetsMs {
    /// To the first token.
    pub ttft: Option<f64>,
    /// Per output token.
    pub tpot: Option<f64>,
    /// End to end.
    pub e2e: Option<f64>,
}

impl From<Targets> for TargetsMs {
    fn from(targets: Targets) -> Self {
        let Targets { ttft, tpot, e2e } = targets;
        Self {
            ttft: ttft.map(millis),
            tpot: tpot.map(millis),
            e2e: e2e.map(millis),
        }
    }
}

/// A part of a run's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Bin {
    /// Its beginning, since the run's.
    pub from_s: f64,
    /// Requests that were due.
    pub due: u32,
    /// Requests that ended.
    pub over: u32,
    /// Of those due, met in the end.
    pub met: u32,
    /// Of those due, missed in the end.
    pub missed: u32,
    /// Under way at its end.
    pub in_flight: u32,
}

/// Bins of a run; `targets` are by class.
pub(crate) fn timeline(run: &Run, targets: &[Targets]) -> Vec<Bin> {
    let total = run.span.max(run.took).as_secs_f64();
    let width = [
        0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0, 3600.0,
    ]
    .into_iter()
    .find(|width| total / width < BINS_MAX)
    .unwrap_or(86_400.0);
    let count = (total / width).floor() as usize + 1;
    let mut bins: Vec<Bin> = (0..count)
        .map(|index| Bin {
            from_s: round(index as f64 * width),
            ..Bin::default()
        })
        .collect();
    let place = |at: Time| {
        let index = at.since(Time::ZERO).as_secs_f64() / width;
        (index as usize).min(count - 1)
    };
    for record in &run.records {
        let bin = &mut bins[place(record.due)];
        bin.due += 1;
        match targets[record.class].judge(record) {
            Ok(()) => bin.met += 1,
            Err(Miss::Unfinished) if run.cut.is_some() => {}
            Err(_) => bin.missed += 1,
        }
        if let Some(over) = record.over {
            bins[place(over)].over += 1;
        }
    }
    let mut in_flight = 0;
    for bin in &mut bins {
        in_flight += bin.due;
        in_flight = in_flight.saturating_sub(bin.over);
        bin.in_flight = in_flight;
    }
    bins
}

/// Texts of errors with how often they came.
pub(crate) fn errors(run: &Run) -> BTreeMap<String, u64> {
    let mut errors = BTreeMap::new();
    for record in &run.records {
        if let Outcome::Failed { text, .. } = &record.outcome {
            let room = errors.len() < ERRORS_MAX;
            if let Some(count) = errors.get_mut(text) {
                *count += 1;
            } else if room {
                errors.insert(text.clone(), 1);
            }
        }
    }
    errors
}

/// A line of `requests.jsonl`. Times are since the run's start.
#[derive(Serialize)]
struct Line<'a> {
    run: usize,
    index: u32,
    class: &'a str,
    warmup: bool,
    met: bool,
    miss: Option<Miss>,
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
    stages: Option<Stages>,
}

/// What lines need beside records.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Judging<'a> {
    pub(crate) classes: &'a [String],
    /// By class.
    pub(crate) targets: &'a [Targets],
    pub(crate) warmup: Duration,
}

fn line<'a>(run: usize, record: &'a Record, judging: Judging<'a>) -> Line<'a> {
    let judged = judging.targets[record.class].judge(record);
    let since_start = |at: Time| round(millis(at.since(Time::ZERO)));
    let span = |span: Duration| round(millis(span));
    let (outcome, error, retry_after_s) = match &record.outcome {
        Outcome::Done => (Value::from("done"), None, None),
        Outcome::Refused { retry_after, .. } => (Value::from("refused"), None, *retry_after),
        Outcome::Failed { kind, text } => {
            let kind = serde_json::to_value(kind).unwrap_or_default();
            (kind, Some(text.as_str()), None)
        }
        Outcome::Unfinished => (Value::from("unfinished"), None, None),
    };
    Line {
        run,
        index: record.index,
        class: &judging.classes[record.class],
        warmup: record.due < Time::ZERO + judging.warmup,
        met: judged.is_ok(),
        miss: judged.err(),
        outcome,
        error,
        retry_after_s,
        due_ms: since_start(record.due),
        sent_ms: record.sent.map(since_start),
        first_ms: record.first.map(since_start),
        last_ms: record.last.map(since_start),
        over_ms: record.over.map(since_start),
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
        asked_input_tokens: record.asked.input,
        asked_output_tokens: record.asked.output,
        input_tokens: record.usage.map(|usage| usage.input),
        output_tokens: record.usage.map(|usage| usage.output),
        cached_tokens: record.cached,
        asked_again: record.asked_again,
        stages: record.stages,
    }
}

/// The folder of `--out`.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    requests: BufWriter<File>,
}

impl Folder {
    /// Makes the folder if it is not there, and begins `requests.jsonl` in it.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let place = || path.display().to_string();
        fs::create_dir_all(path).with_context(place)?;
        let requests = File::create(path.join("requests.jsonl")).with_context(place)?;
        Ok(Self {
            path: path.to_owned(),
            requests: BufWriter::new(requests),
        })
    }

    pub(crate) fn add(
        &mut self,
        index: usize,
        run: &Run,
        judging: Judging<'_>,
    ) -> anyhow::Result<()> {
        let requests = &mut self.requests;
        for record in &run.records {
            serde_json::to_writer(&mut *requests, &line(index, record, judging))?;
            requests.write_all(b"\n")?;
        }
        requests.flush().context("requests.jsonl")
    }

    /// Writes `result.json` and `report.html`.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn finish(&self, report: &Report) -> anyhow::Result<()> {
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
    fn a_timeline_counts_each_request_where_it_was_due_and_where_it_ended() {
        let mut one = Record::new(0, 0, at(50));
        one.over = Some(at(250));
        one.outcome = Outcome::Done;
        let mut two = Record::new(1, 0, at(120));
        two.over = Some(at(290));
        let run = Run {
            records: vec![one, two],
            span: Duration::from_millis(200),
            took: Duration::from_millis(290),
            cut: None,
        };
        let bins = timeline(&run, &[Targets::default()]);
        let numbers = bins
            .iter()
            .map(|bin| (bin.due, bin.over, bin.met, bin.missed, bin.in_flight));
        assert_eq!(
            numbers.collect::<Vec<_>>(),
            [(1, 0, 1, 0, 1), (1, 0, 0, 1, 2), (0, 2, 0, 0, 0)]
        );
    }
}
