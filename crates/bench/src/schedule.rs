//! Which request is due when.
//!
//! Owns: the whole plan of a run, before it starts. Never: sends anything, or changes the plan by what
//! a server does. Invariant: the same workload, wish and seed give the same schedule.

use crate::arrivals::{Arrivals, Times, at_seconds};
use crate::dice::{Dice, Purpose};
use crate::lengths::Scaling;
use crate::prompt::{Part, Prompt, own_key, shared_key};
use crate::trace::{Row, ServeGen};
use crate::workload::{Class, Source, Workload};
use anyhow::{Context, bail, ensure};
use cleave_domain::Time;
use std::time::Duration;

/// Requests in a schedule at most: their plans are held in memory.
const REQUESTS_MAX: usize = 10_000_000;
/// ServeGen's clients without a limit are asked for this long.
const SERVEGEN_SECONDS: f64 = 600.0;

/// What of a workload is wanted.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// The process; where `None`, a trace's own times and Poisson for the rest.
    pub arrivals: Option<Arrivals>,
    /// Mean requests per second.
    pub rate: Option<f64>,
    /// For a trace's own times: how much faster than recorded. Not together with `rate`.
    pub speed: Option<f64>,
    /// Requests at most.
    pub requests: Option<usize>,
    /// Arrivals end after this long.
    pub duration: Option<Duration>,
    /// What is done to lengths.
    pub scaling: Scaling,
    /// Of all draws.
    pub seed: u64,
}

/// A request to be.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Planned {
    /// Since the run's start.
    pub(crate) at: Time,
    pub(crate) class: usize,
    pub(crate) prompt: Prompt,
    /// Tokens.
    pub(crate) output: u32,
}

/// The plan of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// In the order of their times; at least one.
    pub(crate) requests: Vec<Planned>,
    /// How long arrivals last: what rates are per.
    pub(crate) span: Duration,
}

/// A request of a schedule, for whoever serves it elsewhere than over HTTP.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// Since the run's start.
    pub at: Time,
    /// Which of [`Workload::classes`].
    pub class: usize,
    /// What the prompt is made of: names of contents, each with its tokens. Equal names are equal
    /// contents, and a shorter one is the longer one's beginning.
    pub parts: Vec<(u64, u32)>,
    /// Tokens of the answer.
    pub output_tokens: u32,
}

impl Schedule {
    /// Its requests, in the order of their times.
    pub fn requests(&self) -> impl Iterator<Item = Asked> + '_ {
        self.requests.iter().map(|planned| Asked {
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

    /// Requests in it.
    pub fn count(&self) -> usize {
        self.requests.len()
    }

    /// Offered requests per second.
    pub fn rate(&self) -> f64 {
        self.count() as f64 / self.span.as_secs_f64()
    }

    /// Tokens of its longest request, prompt and answer.
    pub fn context_max(&self) -> u32 {
        let tokens = |request: &Planned| request.prompt.tokens().saturating_add(request.output);
        self.requests.iter().map(tokens).max().unwrap_or_default()
    }

    /// Mean tokens of (prompts, answers).
    pub fn tokens_mean(&self) -> (f64, f64) {
        let mean = |of: fn(&Planned) -> u32| {
            let sum: f64 = self.requests.iter().map(|r| f64::from(of(r))).sum();
            sum / self.count() as f64
        };
        (mean(|r| r.prompt.tokens()), mean(|r| r.output))
    }
}

impl Workload {
    /// Plans a run.
    ///
    /// # Errors
    /// What the wish lacks, or has that this workload cannot do.
    pub fn schedule(&self, wish: &Wish) -> anyhow::Result<Schedule> {
        ensure!(
            wish.rate.is_none() || wish.speed.is_none(),
            "give a rate or a speed, not both"
        );
        let own_times = matches!(wish.arrivals, None | Some(Arrivals::Trace));
        let mut schedule = match &self.source {
            Source::Classes(classes) => drawn(classes, wish),
            Source::Timed(rows) if own_times => replayed(rows, wish),
            Source::ServeGen(clients) if own_times => served(clients, wish),
            Source::Timed(rows) => retimed(rows, wish),
            Source::ServeGen(clients) => {
                let all = Wish {
                    arrivals: None,
                    ..*wish
                };
                let rows = rows_of(clients, &all)?;
                retimed(&rows, wish)
            }
        }?;
        for request in &mut schedule.requests {
            let (prompt, output) = wish.scaling.apply(&request.prompt, request.output);
            request.prompt = prompt;
            request.output = output;
        }
        Ok(schedule)
    }
}

/// Times of a process, and what they span.
fn times(wish: &Wish, requests_max: Option<usize>) -> anyhow::Result<(Vec<Time>, Duration)> {
    let arrivals = match wish.arrivals {
        Some(Arrivals::Trace) => {
            bail!("there are no times in this workload: choose other arrivals")
        }
        Some(arrivals) => arrivals,
        None => Arrivals::Poisson,
    };
    ensure!(
        wish.speed.is_none(),
        "a speed is for a trace's own times: give a rate"
    );
    let rate = wish
        .rate
        .context("a rate is needed: --rate, in requests per second")?;
    ensure!(
        requests_max.is_some() || wish.duration.is_some(),
        "arrivals would never end: --duration TIME or --limit REQUESTS is needed"
    );
    let end = Time::ZERO + wish.duration.unwrap_or(Duration::MAX);
    let times: Vec<Time> = Times::new(arrivals, rate, wish.seed)
        .take_while(|at| *at < end)
        .take(requests_max.unwrap_or(REQUESTS_MAX).min(REQUESTS_MAX))
        .collect();
    ensure!(
        !times.is_empty(),
        "no request is due in that time: ask for more"
    );
    let full = requests_max == Some(times.len());
    let span = match wish.duration.filter(|_| !full) {
        Some(duration) => duration,
        None => at_seconds(times.len() as f64 / rate).since(Time::ZERO),
    };
    Ok((times, span))
}

fn drawn(classes: &[Class], wish: &Wish) -> anyhow::Result<Schedule> {
    let (times, span) = times(wish, wish.requests)?;
    let mut which = Dice::new(wish.seed, Purpose::Classes);
    let mut lengths = Dice::new(wish.seed, Purpose::Lengths);
    let mut prefixes = Dice::new(wish.seed, Purpose::Prefixes);
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
        let mut prompt = Prompt::unique(own_key(index as u64), input);
        if let Some(shared) = class.prefix {
            let id = prefixes.below(shared.count as usize) as u64;
            let part = Part {
                key: shared_key(class_index as u32 + 1, id),
                tokens: shared.tokens,
            };
            prompt.0.insert(0, part);
        }
        Planned {
            at,
            class: class_index,
            prompt,
            output,
        }
    });
    Ok(Schedule {
        requests: requests.collect(),
        span,
    })
}

/// A trace's rows at its own times, stretched to the rate or by the speed that is wanted.
fn replayed(rows: &[Row], wish: &Wish) -> anyhow::Result<Schedule> {
    let mut count = wish.requests.unwrap_or(rows.len()).min(rows.len());
    let speed = match (wish.rate, wish.duration) {
        (Some(rate), duration) => {
            let due = duration.map(|span| (span.as_secs_f64() * rate).ceil() as usize);
            count = count.min(due.unwrap_or(count)).max(1);
            rate * span_of(&rows[..count]) / count as f64
        }
        (None, duration) => {
            let speed = wish.speed.unwrap_or(1.0);
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
        .map(|row| planned(row, at_seconds(seconds(row.at) / speed)));
    Ok(Schedule {
        requests: requests.collect(),
        span: Duration::from_secs_f64((span_of(rows) / speed).max(1e-3)),
    })
}

/// Seconds that so many rows take: from the first to the last, and a mean gap.
fn span_of(rows: &[Row]) -> f64 {
    let last = rows.last().map_or(0.0, |row| seconds(row.at));
    match rows.len() {
        0 | 1 => last,
        count => last * count as f64 / (count as f64 - 1.0),
    }
}

/// The rows in their order, at the times of a process.
fn retimed(rows: &[Row], wish: &Wish) -> anyhow::Result<Schedule> {
    let count = wish.requests.unwrap_or(rows.len()).min(rows.len());
    let (times, span) = times(wish, Some(count))?;
    let requests = rows.iter().zip(times).map(|(row, at)| planned(row, at));
    Ok(Schedule {
        requests: requests.collect(),
        span,
    })
}

fn served(clients: &ServeGen, wish: &Wish) -> anyhow::Result<Schedule> {
    ensure!(
        wish.speed.is_none(),
        "ServeGen's clients have no speed: give a rate"
    );
    let rows = rows_of(clients, wish)?;
    let last = rows.last().map_or(0.0, |row| seconds(row.at));
    let full = wish.requests == Some(rows.len());
    let span = match wish.duration.filter(|_| !full) {
        Some(duration) => duration.as_secs_f64(),
        None => last * (1.0 + 1.0 / rows.len() as f64),
    };
    Ok(Schedule {
        requests: rows.iter().map(|row| planned(row, row.at)).collect(),
        span: Duration::from_secs_f64(span.max(1e-3)),
    })
}

fn rows_of(clients: &ServeGen, wish: &Wish) -> anyhow::Result<Vec<Row>> {
    let all = clients.rate(SERVEGEN_SECONDS);
    let seconds = match (wish.duration, wish.requests) {
        (Some(duration), _) => duration.as_secs_f64(),
        // Windows are drawn whole; a little more than the mean takes makes sure of the number.
        (None, Some(requests)) => 1.5 * requests as f64 / wish.rate.unwrap_or(all) + 10.0,
        (None, None) => SERVEGEN_SECONDS,
    };
    clients.draw(crate::trace::ServeGenDraw {
        rate: wish.rate,
        seconds,
        requests_max: wish.requests.unwrap_or(REQUESTS_MAX),
        seed: wish.seed,
    })
}

fn planned(row: &Row, at: Time) -> Planned {
    Planned {
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

    fn wish() -> Wish {
        Wish {
            arrivals: None,
            rate: None,
            speed: None,
            requests: None,
            duration: None,
            scaling: Scaling::default(),
            seed: 1,
        }
    }

    fn timed(millis: &[u64]) -> Workload {
        let row = |at: &u64| Row {
            at: Time::from_nanos(at * 1_000_000),
            prompt: Prompt::unique(*at, 10),
            output: 5,
        };
        Workload {
            classes: vec!["default".into()],
            source: Source::Timed(millis.iter().map(row).collect()),
        }
    }

    fn millis(schedule: &Schedule) -> Vec<u64> {
        let at = |request: &Planned| request.at.as_nanos() / 1_000_000;
        schedule.requests.iter().map(at).collect()
    }

    #[test]
    fn a_trace_is_replayed_faster_by_a_factor_or_to_a_rate() {
        let trace = timed(&[0, 1000, 1500, 3000]);
        let fast = Wish {
            speed: Some(2.0),
            ..wish()
        };
        assert_eq!(millis(&trace.schedule(&fast).unwrap()), [0, 500, 750, 1500]);
        let cut = Wish {
            duration: Some(Duration::from_secs(1)),
            ..fast
        };
        assert_eq!(millis(&trace.schedule(&cut).unwrap()), [0, 500, 750]);
        let rate = Wish {
            rate: Some(10.0),
            ..wish()
        };
        let schedule = trace.schedule(&rate).unwrap();
        assert_eq!(millis(&schedule), [0, 100, 150, 300]);
        assert!((schedule.rate() - 10.0).abs() < 1e-6);
        let both = Wish {
            speed: Some(1.0),
            ..rate
        };
        assert!(trace.schedule(&both).is_err());
    }

    #[test]
    fn rows_keep_their_order_under_another_process() {
        let trace = timed(&[0, 1000, 1500, 3000]);
        let uniform = Wish {
            arrivals: Some(Arrivals::Uniform),
            rate: Some(10.0),
            ..wish()
        };
        let schedule = trace.schedule(&uniform).unwrap();
        assert_eq!(millis(&schedule), [100, 200, 300, 400]);
        assert_eq!(schedule.requests[2].prompt, Prompt::unique(1500, 10));
    }

    #[test]
    fn classes_come_in_their_shares_and_share_their_prefixes() {
        let mixed: Workload = "a=3*short-short:prefix=100,prefixes=2,b=1*long-short"
            .parse()
            .unwrap();
        let many = Wish {
            rate: Some(100.0),
            requests: Some(20_000),
            ..wish()
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
        let other = Wish { seed: 2, ..many };
        assert_ne!(schedule, mixed.schedule(&other).unwrap());
    }

    #[test]
    fn a_wish_that_says_too_little_is_told_what_it_lacks() {
        let quadrant: Workload = "short-long".parse().unwrap();
        let says = |wish: Wish| quadrant.schedule(&wish).unwrap_err().to_string();
        assert!(says(wish()).contains("rate"));
        let rate = Wish {
            rate: Some(1.0),
            ..wish()
        };
        assert!(says(rate).contains("duration"));
        let replay = Wish {
            arrivals: Some(Arrivals::Trace),
            ..rate
        };
        assert!(says(replay).contains("no times"));
        let same = timed(&[0, 0, 0]).schedule(&rate).unwrap_err().to_string();
        assert!(same.contains("one time"), "{same}");
    }
}
