//! The schedule: requests and their due times.
//!
//! Owns: the whole plan of a run, before it starts. Never: sends anything, or changes the plan by a
//! server's behaviour. Invariant: the same workload, options and seed give the same schedule.

use crate::arrivals::{ArrivalProcess, ArrivalTimes, at_seconds};
use crate::lengths::LengthScaling;
use crate::prompt::{PromptPart, PromptPlan, shared_key, unique_key};
use crate::rng::{DrawPurpose, WorkloadRng};
use crate::trace::{ServeGenClients, TraceRow};
use crate::workload::{BenchWorkload, RequestSource, WorkloadClass};
use anyhow::{Context, bail, ensure};
use cleave_domain::Time;
use std::time::Duration;

/// Most requests of a schedule: their plans are held in memory.
const REQUESTS_MAX: usize = 10_000_000;
/// Duration of ServeGen's clients if no other limit is given.
const SERVEGEN_SECONDS: f64 = 600.0;

/// Options of a schedule.
#[derive(Clone, Copy, Debug)]
pub struct ScheduleOptions {
    /// The arrival process; if `None`, a trace's own times, and Poisson for other workloads.
    pub arrivals: Option<ArrivalProcess>,
    /// Mean requests per second.
    pub rate: Option<f64>,
    /// Speed-up of a trace's own times. Not together with `rate`.
    pub speed: Option<f64>,
    pub requests: Option<usize>,
    /// Arrivals end after this long.
    pub duration: Option<Duration>,
    /// Scaling of prompt and answer lengths.
    pub scaling: LengthScaling,
    /// Seed of all draws.
    pub seed: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlannedRequest {
    /// Due time since the run's start.
    pub(crate) at: Time,
    pub(crate) class: usize,
    pub(crate) prompt: PromptPlan,
    /// Number of answer tokens.
    pub(crate) output: u32,
}

/// The plan of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestSchedule {
    /// Requests in the order of their due times; at least one.
    pub(crate) requests: Vec<PlannedRequest>,
    /// Duration of the arrivals, to which rates refer.
    pub(crate) span: Duration,
}

/// A request of a schedule, for callers that do not use HTTP.
#[derive(Clone, Debug, PartialEq)]
pub struct ScheduleEntry {
    /// Due time since the run's start.
    pub at: Time,
    /// Index of its class in [`BenchWorkload::classes`].
    pub class: usize,
    /// Parts of the prompt: content keys, each with its tokens. Equal keys are equal contents, and
    /// a shorter part is the longer one's beginning.
    pub parts: Vec<(u64, u32)>,
    /// Tokens of the answer.
    pub output_tokens: u32,
}

impl RequestSchedule {
    /// The requests in the order of their due times.
    pub fn requests(&self) -> impl Iterator<Item = ScheduleEntry> + '_ {
        self.requests.iter().map(|planned| ScheduleEntry {
            at: planned.at,
            class: planned.class,
            parts: planned
                .prompt
                .0
                .iter()
                .map(|part| (part.key, part.tokens))
                .collect(),
            output_tokens: planned.output,
        })
    }

    pub fn count(&self) -> usize {
        self.requests.len()
    }

    /// Offered requests per second.
    pub fn rate(&self) -> f64 {
        self.count() as f64 / self.span.as_secs_f64()
    }

    /// Tokens of the longest request, prompt and answer.
    pub fn context_max(&self) -> u32 {
        let tokens =
            |request: &PlannedRequest| request.prompt.tokens().saturating_add(request.output);
        self.requests.iter().map(tokens).max().unwrap_or_default()
    }
}

impl BenchWorkload {
    /// Plans a run.
    ///
    /// # Errors
    /// An option that is missing, or that this workload does not support.
    pub fn schedule(&self, options: &ScheduleOptions) -> anyhow::Result<RequestSchedule> {
        ensure!(
            options.rate.is_none() || options.speed.is_none(),
            "give a rate or a speed, not both"
        );
        let own_times = matches!(options.arrivals, None | Some(ArrivalProcess::Trace));
        let mut schedule = match &self.source {
            RequestSource::Classes(classes) => draw_classes(classes, options),
            RequestSource::Timed(rows) if own_times => replay_trace(rows, options),
            RequestSource::ServeGen(clients) if own_times => draw_servegen(clients, options),
            RequestSource::Timed(rows) => retime_trace(rows, options),
            RequestSource::ServeGen(clients) => {
                let all = ScheduleOptions {
                    arrivals: None,
                    ..*options
                };
                let rows = servegen_rows(clients, &all)?;
                retime_trace(&rows, options)
            }
        }?;
        for request in &mut schedule.requests {
            let (prompt, output) = options.scaling.apply(&request.prompt, request.output);
            request.prompt = prompt;
            request.output = output;
        }
        Ok(schedule)
    }
}

/// Due times of an arrival process, and the time that they span.
fn arrival_times(
    options: &ScheduleOptions,
    requests_max: Option<usize>,
) -> anyhow::Result<(Vec<Time>, Duration)> {
    let arrivals = match options.arrivals {
        Some(ArrivalProcess::Trace) => {
            bail!("there are no times in this workload: choose other arrivals")
        }
        Some(arrivals) => arrivals,
        None => ArrivalProcess::Poisson,
    };
    ensure!(
        options.speed.is_none(),
        "a speed is for a trace's own times: give a rate"
    );
    let rate = options
        .rate
        .context("a rate is needed: --rate, in requests per second")?;
    ensure!(
        requests_max.is_some() || options.duration.is_some(),
        "arrivals would never end: --duration TIME or --limit REQUESTS is needed"
    );
    let end = Time::ZERO + options.duration.unwrap_or(Duration::MAX);
    let times: Vec<Time> = ArrivalTimes::new(arrivals, rate, options.seed)
        .take_while(|at| *at < end)
        .take(requests_max.unwrap_or(REQUESTS_MAX).min(REQUESTS_MAX))
        .collect();
    ensure!(
        !times.is_empty(),
        "no request is due in that time: ask for more"
    );
    let full = requests_max == Some(times.len());
    let span = match options.duration.filter(|_| !full) {
        Some(duration) => duration,
        None => at_seconds(times.len() as f64 / rate).since(Time::ZERO),
    };
    Ok((times, span))
}

fn draw_classes(
    classes: &[WorkloadClass],
    options: &ScheduleOptions,
) -> anyhow::Result<RequestSchedule> {
    let (times, span) = arrival_times(options, options.requests)?;
    let mut which = WorkloadRng::new(options.seed, DrawPurpose::Classes);
    let mut lengths = WorkloadRng::new(options.seed, DrawPurpose::Lengths);
    let mut prefixes = WorkloadRng::new(options.seed, DrawPurpose::Prefixes);
    let total: f64 = classes.iter().map(|class| class.share).sum();
    let requests = times.into_iter().enumerate().map(|(index, at)| {
        let mut left = which.unit() * total;
        let class = classes.iter().position(|class| {
            left -= class.share;
            left < 0.0
        });
        let class_index = class.unwrap_or(classes.len() - 1);
        let class = &classes[class_index];
        let (input, output) = class.lengths.draw(&mut lengths);
        let mut prompt = PromptPlan::unique(unique_key(index as u64), input);
        if let Some(shared) = class.prefix {
            let id = prefixes.below(shared.count as usize) as u64;
            let part = PromptPart {
                key: shared_key(class_index as u32 + 1, id),
                tokens: shared.tokens,
            };
            prompt.0.insert(0, part);
        }
        PlannedRequest {
            at,
            class: class_index,
            prompt,
            output,
        }
    });
    Ok(RequestSchedule {
        requests: requests.collect(),
        span,
    })
}

/// A trace's rows at its own times, scaled to the rate or by the speed.
fn replay_trace(rows: &[TraceRow], options: &ScheduleOptions) -> anyhow::Result<RequestSchedule> {
    let mut count = options.requests.unwrap_or(rows.len()).min(rows.len());
    // A rate fixes the speed by the span of the rows; a speed fixes how many rows fit the duration.
    let speed = match (options.rate, options.duration) {
        (Some(rate), duration) => {
            let due = duration.map(|span| (span.as_secs_f64() * rate).ceil() as usize);
            count = count.min(due.unwrap_or(count)).max(1);
            rate * span_seconds(&rows[..count]) / count as f64
        }
        (None, duration) => {
            let speed = options.speed.unwrap_or(1.0);
            let end = duration.map_or(f64::INFINITY, |span| span.as_secs_f64() * speed);
            count = count.min(rows.partition_point(|row| seconds(row.at) < end));
            speed
        }
    };
    ensure!(
        speed > 0.0,
        "the first {count} requests of the trace all have one time: ask for more requests or for other arrivals"
    );
    let rows = &rows[..count];
    let requests = rows
        .iter()
        .map(|row| planned_request(row, at_seconds(seconds(row.at) / speed)));
    Ok(RequestSchedule {
        requests: requests.collect(),
        span: Duration::from_secs_f64((span_seconds(rows) / speed).max(1e-3)),
    })
}

/// Seconds that these rows span: from the first to the last, and a mean gap.
fn span_seconds(rows: &[TraceRow]) -> f64 {
    let last = rows.last().map_or(0.0, |row| seconds(row.at));
    match rows.len() {
        0 | 1 => last,
        count => last * count as f64 / (count as f64 - 1.0),
    }
}

/// The rows in their order, at the times of an arrival process.
fn retime_trace(rows: &[TraceRow], options: &ScheduleOptions) -> anyhow::Result<RequestSchedule> {
    let count = options.requests.unwrap_or(rows.len()).min(rows.len());
    let (times, span) = arrival_times(options, Some(count))?;
    let requests = rows
        .iter()
        .zip(times)
        .map(|(row, at)| planned_request(row, at));
    Ok(RequestSchedule {
        requests: requests.collect(),
        span,
    })
}

fn draw_servegen(
    clients: &ServeGenClients,
    options: &ScheduleOptions,
) -> anyhow::Result<RequestSchedule> {
    ensure!(
        options.speed.is_none(),
        "ServeGen's clients have no speed: give a rate"
    );
    let rows = servegen_rows(clients, options)?;
    let last = rows.last().map_or(0.0, |row| seconds(row.at));
    let full = options.requests == Some(rows.len());
    let span = match options.duration.filter(|_| !full) {
        Some(duration) => duration.as_secs_f64(),
        None => last * (1.0 + 1.0 / rows.len() as f64),
    };
    Ok(RequestSchedule {
        requests: rows
            .iter()
            .map(|row| planned_request(row, row.at))
            .collect(),
        span: Duration::from_secs_f64(span.max(1e-3)),
    })
}

fn servegen_rows(
    clients: &ServeGenClients,
    options: &ScheduleOptions,
) -> anyhow::Result<Vec<TraceRow>> {
    let all = clients.rate(SERVEGEN_SECONDS);
    let seconds = match (options.duration, options.requests) {
        (Some(duration), _) => duration.as_secs_f64(),
        // Windows are drawn whole; a margin over the mean duration ensures enough requests.
        (None, Some(requests)) => 1.5 * requests as f64 / options.rate.unwrap_or(all) + 10.0,
        (None, None) => SERVEGEN_SECONDS,
    };
    clients.draw(crate::trace::ServeGenDraw {
        rate: options.rate,
        seconds,
        requests_max: options.requests.unwrap_or(REQUESTS_MAX),
        seed: options.seed,
    })
}

fn planned_request(row: &TraceRow, at: Time) -> PlannedRequest {
    PlannedRequest {
        at,
        class: 0,
        prompt: row.prompt.clone(),
        output: row.output,
    }
}

pub(crate) fn seconds(at: Time) -> f64 {
    at.as_nanos() as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> ScheduleOptions {
        ScheduleOptions {
            arrivals: None,
            rate: None,
            speed: None,
            requests: None,
            duration: None,
            scaling: LengthScaling::default(),
            seed: 1,
        }
    }

    fn timed(millis: &[u64]) -> BenchWorkload {
        let row = |at: &u64| TraceRow {
            at: Time::from_nanos(at * 1_000_000),
            prompt: PromptPlan::unique(*at, 10),
            output: 5,
        };
        BenchWorkload {
            classes: vec!["default".into()],
            source: RequestSource::Timed(millis.iter().map(row).collect()),
        }
    }

    fn millis(schedule: &RequestSchedule) -> Vec<u64> {
        let at = |request: &PlannedRequest| request.at.as_nanos() / 1_000_000;
        schedule.requests.iter().map(at).collect()
    }

    #[test]
    fn a_trace_is_replayed_at_a_speed_or_a_rate() {
        let trace = timed(&[0, 1000, 1500, 3000]);
        let fast = ScheduleOptions {
            speed: Some(2.0),
            ..options()
        };
        assert_eq!(millis(&trace.schedule(&fast).unwrap()), [0, 500, 750, 1500]);
        let cut = ScheduleOptions {
            duration: Some(Duration::from_secs(1)),
            ..fast
        };
        assert_eq!(millis(&trace.schedule(&cut).unwrap()), [0, 500, 750]);
        let rate = ScheduleOptions {
            rate: Some(10.0),
            ..options()
        };
        let schedule = trace.schedule(&rate).unwrap();
        assert_eq!(millis(&schedule), [0, 100, 150, 300]);
        assert!((schedule.rate() - 10.0).abs() < 1e-6);
        let both = ScheduleOptions {
            speed: Some(1.0),
            ..rate
        };
        assert!(trace.schedule(&both).is_err());
    }

    #[test]
    fn trace_rows_keep_their_order_at_other_arrivals() {
        let trace = timed(&[0, 1000, 1500, 3000]);
        let uniform = ScheduleOptions {
            arrivals: Some(ArrivalProcess::Uniform),
            rate: Some(10.0),
            ..options()
        };
        let schedule = trace.schedule(&uniform).unwrap();
        assert_eq!(millis(&schedule), [100, 200, 300, 400]);
        assert_eq!(schedule.requests[2].prompt, PromptPlan::unique(1500, 10));
    }

    #[test]
    fn classes_keep_their_shares_and_shared_prefixes() {
        let mixed: BenchWorkload = "a=3*short-short:prefix=100,prefixes=2,b=1*long-short"
            .parse()
            .unwrap();
        let many = ScheduleOptions {
            rate: Some(100.0),
            requests: Some(20_000),
            ..options()
        };
        let schedule = mixed.schedule(&many).unwrap();
        assert_eq!(schedule, mixed.schedule(&many).unwrap(), "one seed");
        assert_eq!(schedule.span, Duration::from_secs(200));
        let of_a: Vec<_> = schedule.requests.iter().filter(|r| r.class == 0).collect();
        assert!((14_800..15_200).contains(&of_a.len()), "{}", of_a.len());
        let mut prefixes: Vec<u64> = of_a.iter().map(|r| r.prompt.0[0].key).collect();
        prefixes.sort_unstable();
        prefixes.dedup();
        assert_eq!(prefixes.len(), 2);
        let other = ScheduleOptions { seed: 2, ..many };
        assert_ne!(schedule, mixed.schedule(&other).unwrap());
    }

    #[test]
    fn incomplete_options_name_what_is_missing() {
        let quadrant: BenchWorkload = "short-long".parse().unwrap();
        let error_of =
            |options: ScheduleOptions| quadrant.schedule(&options).unwrap_err().to_string();
        assert!(error_of(options()).contains("rate"));
        let rate = ScheduleOptions {
            rate: Some(1.0),
            ..options()
        };
        assert!(error_of(rate).contains("duration"));
        let replay = ScheduleOptions {
            arrivals: Some(ArrivalProcess::Trace),
            ..rate
        };
        assert!(error_of(replay).contains("no times"));
        let same = timed(&[0, 0, 0]).schedule(&rate).unwrap_err().to_string();
        assert!(same.contains("one time"), "{same}");
    }
}
