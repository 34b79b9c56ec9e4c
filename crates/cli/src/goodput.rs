//! `cleave sim goodput`: how much a simulated fleet serves within its promises.
//!
//! Owns: what is printed. Never: decides how a request is routed, or what counts.
//! Invariant: every way to route gets the same devices and the same arrivals.

use crate::args::{ArrivalArgs, GoodputArgs, Question, ScenarioArgs, TargetArgs, Workers};
use crate::bench::Form;
use crate::load::{Pace, wish, workload_of};
use crate::router_cost::{Cost, Meter};
use anyhow::{Context, ensure};
use cleave_bench::{Asked, Schedule, Wish, Workload};
use cleave_domain::{Origin, Slo, SloClass, SloPolicy};
use cleave_sim::goodput::{
    Arrival, ClassScore, Contest, Fleet, Outcome, Part, Profile, Prompt, Score, Way, promise, run,
    run_observed,
};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// One line of the table.
pub(crate) struct Row {
    pub(crate) way: Way,
    /// Arrivals per second, in thousandths; none if the search found none.
    pub(crate) rate_milli: Option<u64>,
    pub(crate) outcome: Option<Outcome>,
    pub(crate) cost: Option<Cost>,
}

/// Runs what was asked for and prints it.
///
/// # Errors
/// Flags that contradict each other, or nowhere to print to.
pub(crate) fn run_goodput(args: &GoodputArgs) -> anyhow::Result<()> {
    let policy = Arc::new(one_class(&args.targets)?);
    let clients = Clients::of_fleet(&args.scenario, (&policy, Length::Whole))?;
    let contest = contest(&args.scenario, &clients)?;
    let ways = match args.compare {
        true => Way::ALL.to_vec(),
        false => args.way.clone(),
    };
    let rate = clients.rate_milli;
    let rows = match args.question() {
        Question::Cost => ways
            .into_iter()
            .map(|way| measured(&contest, way, &clients))
            .collect(),
        Question::Highest => side_by_side(&ways, |way| {
            let found = contest.search(way, rate, &|rate| clients.at(rate));
            let (rate_milli, outcome) = found
                .best
                .map(|best| (best.rate_milli, best.outcome))
                .unzip();
            Row {
                way,
                rate_milli,
                outcome,
                cost: None,
            }
        }),
        Question::Rate => side_by_side(&ways, |way| Row {
            way,
            rate_milli: Some(rate),
            outcome: Some(run(&contest.scenario(way, clients.at(rate)))),
            cost: None,
        }),
    };
    let form = match args.scenario.json {
        true => Form::Json,
        false => Form::Table,
    };
    print(&contest, &rows, form)
}

fn measured(contest: &Contest, way: Way, clients: &Clients) -> Row {
    let scenario = contest.scenario(way, clients.at(clients.rate_milli));
    let mut meter = Meter::default();
    let outcome = run_observed(&scenario, &mut meter);
    Row {
        way,
        rate_milli: Some(clients.rate_milli),
        outcome: Some(outcome),
        cost: Some(meter.cost()),
    }
}

/// As many at a time as there are cores; in the order asked for.
fn side_by_side(ways: &[Way], row: impl Fn(Way) -> Row + Sync) -> Vec<Row> {
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut rows = Vec::new();
    for some in ways.chunks(cores) {
        let done = thread::scope(|scope| {
            let threads: Vec<_> = some.iter().map(|way| scope.spawn(|| row(*way))).collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|row| row.expect("a simulated world broke an invariant"))
                .collect::<Vec<_>>()
        });
        rows.extend(done);
    }
    rows
}

// === what is simulated ===

/// The one class that the flags describe.
pub(crate) fn one_class(targets: &TargetArgs) -> anyhow::Result<SloPolicy> {
    let TargetArgs {
        ttft,
        tpot,
        e2e,
        goal,
    } = targets;
    ensure!(
        (0.0..=1.0).contains(goal),
        "--goal {goal}: a share from 0 to 1 is meant"
    );
    let class = SloClass {
        ttft: *ttft,
        tpot: *tpot,
        e2e: *e2e,
        attainment_permille: (goal * 1000.0).round() as u32,
        ..SloClass::default()
    };
    Ok(SloPolicy {
        classes: vec![class],
        ..SloPolicy::default()
    })
}

/// Who asks, at any rate.
pub(crate) struct Clients {
    workload: Workload,
    wish: Wish,
    policy: Arc<SloPolicy>,
    /// How long arrivals go on, if the user did not say.
    length: Length,
    /// Arrivals per second asked for, in thousandths.
    pub(crate) rate_milli: u64,
}

/// How much a run simulates where the user leaves it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    /// A trace's own, or a minute.
    Whole,
    /// As little as says something, of dozens of runs: see [`SAMPLE`].
    Sample,
}

/// A sample's arrivals go on for so long at least; there are so many of them at least, and at most.
const SAMPLE: Duration = Duration::from_secs(10);
const SAMPLE_REQUESTS: std::ops::RangeInclusive<usize> = 300..=200_000;

/// The fleet, where a scenario lacks nothing.
fn complete(args: &ScenarioArgs) -> anyhow::Result<Workers<'_>> {
    let workers = args.workers();
    let workers = workers.context("a fleet is missing: give --fleet SPEC or --devices N")?;
    ensure!(
        args.arrivals.some(),
        "nothing is asked of the fleet: give --workload SPEC or --trace FILE"
    );
    Ok(workers)
}

impl Clients {
    /// Of a fleet whose size is known.
    ///
    /// # Errors
    /// What is missing, or wrong with the trace, the workload or the rate.
    pub(crate) fn of_fleet(
        args: &ScenarioArgs,
        how: (&Arc<SloPolicy>, Length),
    ) -> anyhow::Result<Self> {
        let workers = match complete(args)? {
            Workers::Named(fleet) => fleet.workers_count(),
            Workers::Devices(count) => count,
        };
        Self::of(&args.arrivals, how, f64::from(workers))
    }

    /// Reads the trace, or the workload's text. `rate` arrive in a second where neither a user nor a trace
    /// says otherwise.
    ///
    /// # Errors
    /// What is wrong with either, or with the rate.
    pub(crate) fn of(
        args: &ArrivalArgs,
        (policy, length): (&Arc<SloPolicy>, Length),
        rate: f64,
    ) -> anyhow::Result<Self> {
        let timed = args.workload.trace.is_some();
        let pace = Pace {
            rate: args.rate.or_else(|| (!timed).then_some(rate)),
            speed: None,
            duration: args
                .duration
                .or((!timed).then_some(Duration::from_secs(60))),
        };
        let mut clients = Self {
            workload: workload_of(&args.workload)?,
            wish: wish(&args.workload, pace),
            policy: Arc::clone(policy),
            length: match args.duration.is_some() || args.workload.limit.is_some() {
                true => Length::Whole,
                false => length,
            },
            rate_milli: 0,
        };
        let schedule = clients.workload.schedule(&clients.wish)?;
        let rate = pace.rate.unwrap_or_else(|| schedule.rate());
        ensure!(
            (0.001..=1e9).contains(&rate),
            "--rate {rate}: arrivals per second are meant"
        );
        clients.rate_milli = (rate * 1e3).round() as u64;
        Ok(clients)
    }

    /// What arrives at that rate; nothing where the rate is so low that nothing does. What was asked
    /// about is judged by all of it, and only what is searched for by samples.
    pub(crate) fn at(&self, rate_milli: u64) -> Vec<Arrival> {
        match rate_milli == self.rate_milli {
            true => self.arrivals(rate_milli, Length::Whole),
            false => self.arrivals(rate_milli, self.length),
        }
    }

    fn arrivals(&self, rate_milli: u64, length: Length) -> Vec<Arrival> {
        let rate = rate_milli as f64 / 1e3;
        let mut wish = Wish {
            rate: Some(rate),
            ..self.wish
        };
        if length == Length::Sample {
            let least = Duration::try_from_secs_f64(*SAMPLE_REQUESTS.start() as f64 / rate);
            wish.duration = Some(least.unwrap_or(Duration::MAX).max(SAMPLE));
            wish.requests = Some(*SAMPLE_REQUESTS.end());
        }
        let schedule = self.workload.schedule(&wish);
        let requests = schedule.iter().flat_map(Schedule::requests);
        requests.map(|asked| self.arrival(asked)).collect()
    }

    fn arrival(&self, asked: Asked) -> Arrival {
        let Asked {
            at,
            class,
            parts,
            output_tokens,
        } = asked;
        let part = |(name, tokens)| Part { name, tokens };
        let prompt = Prompt {
            parts: parts.into_iter().map(part).collect(),
        };
        Arrival {
            at,
            slo: self.promise(class, prompt.tokens()),
            prompt,
            output_tokens,
            priority: 0,
        }
    }

    /// A class of the workload that the policy knows by name is of that class; others are what the
    /// rules make of them.
    fn promise(&self, class: usize, prompt_tokens: u32) -> Slo {
        let name = &self.workload.classes()[class];
        let known = self.policy.classes.iter().any(|class| class.name == *name);
        if known {
            return promise(&self.policy, name);
        }
        let resolved = self.policy.resolve(&Origin::default(), "", prompt_tokens);
        resolved.unwrap_or_else(|_| promise(&self.policy, &self.policy.default_class))
    }
}

/// The devices and the promises.
///
/// # Errors
/// What is missing, an unknown profile, or devices that make no whole number of workers.
pub(crate) fn contest(args: &ScenarioArgs, clients: &Clients) -> anyhow::Result<Contest> {
    let contest = |fleet| Contest {
        fleet,
        policy: Arc::clone(&clients.policy),
        noise_permille: args.noise,
        seed: args.arrivals.workload.seed,
    };
    let devices = match complete(args)? {
        Workers::Named(fleet) => return Ok(contest(fleet.clone())),
        Workers::Devices(count) => count,
    };
    let profile = Profile::named(&args.profile).map_err(anyhow::Error::msg)?;
    let each = profile.devices_count();
    let workers = devices / each;
    ensure!(
        workers >= 1 && devices.is_multiple_of(each),
        "--devices {devices}: a worker of {} is {each} devices",
        profile.name
    );
    let undivided = contest(Fleet::aggregated(profile, workers));
    if workers == 1 {
        return Ok(undivided);
    }
    let fleet = undivided.divided(&clients.arrivals(clients.rate_milli, clients.length));
    Ok(contest(fleet))
}

// === what is printed ===

fn print(contest: &Contest, rows: &[Row], form: Form) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if let Form::Json = form {
        let rows: Vec<Value> = rows.iter().map(row_json).collect();
        let fleet = contest.fleet.to_string();
        let all = json!({
            "fleet": fleet,
            "devices": contest.fleet.devices_count(),
            "profile": contest.fleet.profile.source,
            "rows": rows,
        });
        writeln!(out, "{all:#}")?;
        return Ok(());
    }
    let (fleet, devices) = (&contest.fleet, contest.fleet.devices_count());
    writeln!(out, "{fleet}: {}, {devices} devices", fleet.profile.about)?;
    writeln!(
        out,
        "{:<24} {:>9} {:>8} {:>9} {:>7} {:>7} {:>15} {:>15} {:>7} {:>9}",
        "way",
        "rate/s",
        "attained",
        "good/s/dev",
        "refused",
        "failed",
        "ttft p50/p99 s",
        "tpot p50/p99 ms",
        "whole",
        "at fault",
    )?;
    for row in rows {
        writeln!(out, "{}", row_text(row))?;
    }
    for row in rows {
        if let Some(cost) = &row.cost {
            writeln!(out, "{}: {cost}", row.way.name())?;
        }
    }
    Ok(())
}

fn row_text(row: &Row) -> String {
    let way = row.way.name();
    let (Some(rate), Some(outcome)) = (row.rate_milli, &row.outcome) else {
        return format!("{way:<24} no rate meets the goal");
    };
    let Score {
        all, split, whole, ..
    } = &outcome.score;
    let seconds = |span: Duration| format!("{:.3}", span.as_secs_f64());
    let millis = |span: Duration| format!("{:.1}", span.as_secs_f64() * 1e3);
    let ttft = format!("{}/{}", seconds(all.ttft.p50), seconds(all.ttft.p99));
    let tpot = format!("{}/{}", millis(all.tpot.p50), millis(all.tpot.p99));
    let placed = (split + whole).max(1);
    format!(
        "{way:<24} {:>9.2} {:>7.1}% {:>10.3} {:>7} {:>7} {ttft:>15} {tpot:>15} {:>6}% {:>9}",
        rate as f64 / 1e3,
        all.attainment_permille() as f64 / 10.0,
        outcome.score.goodput_milli() as f64 / 1e3,
        all.refused,
        all.failed + all.unfinished,
        whole * 100 / placed,
        at_fault(all),
    )
}

/// The stage most often at fault, or the target most often missed where none was named.
fn at_fault(all: &ClassScore) -> &'static str {
    let stages = all.stages.iter();
    let stage = stages.max_by_key(|(_, count)| **count);
    let late = all.late.iter().zip(["ttft", "tpot", "e2e"]);
    let late = late.filter(|(count, _)| **count > 0);
    let late = late.max_by_key(|(count, _)| **count).map(|(_, name)| name);
    stage.map(|(stage, _)| *stage).or(late).unwrap_or("-")
}

fn row_json(row: &Row) -> Value {
    let mut value = json!({
        "way": row.way.name(),
        "rate": row.rate_milli.map(|milli| milli as f64 / 1e3),
    });
    if let Some(outcome) = &row.outcome {
        value["score"] = score_json(&outcome.score);
        value["events"] = json!(outcome.events);
    }
    if let Some(cost) = &row.cost {
        value["router"] = cost.json();
    }
    value
}

/// A score in seconds and shares.
pub(crate) fn score_json(score: &Score) -> Value {
    let classes: Vec<Value> = score.classes.iter().map(class_json).collect();
    json!({
        "goodput_per_device": score.goodput_milli() as f64 / 1e3,
        "offered_per_device": score.offered_milli() as f64 / 1e3,
        "span_s": score.span.as_secs_f64(),
        "all": class_json(&score.all),
        "classes": classes,
        "placed": {"split": score.split, "whole": score.whole},
        "verdicts_disputed": score.disputed,
        "counts": score.counts,
    })
}

fn class_json(class: &ClassScore) -> Value {
    let quantiles = |q: &cleave_sim::goodput::Quantiles| {
        json!({
            "p50": q.p50.as_secs_f64(),
            "p90": q.p90.as_secs_f64(),
            "p99": q.p99.as_secs_f64(),
        })
    };
    let [ttft, tpot, e2e] = class.late;
    json!({
        "class": class.class,
        "arrivals": class.arrivals,
        "good": class.good,
        "attainment": class.attainment_permille() as f64 / 1e3,
        "late": {"ttft": ttft, "tpot": tpot, "e2e": e2e},
        "refused": class.refused,
        "failed": class.failed,
        "unfinished": class.unfinished,
        "ttft_s": quantiles(&class.ttft),
        "tpot_s": quantiles(&class.tpot),
        "stages_at_fault": class.stages,
    })
}
