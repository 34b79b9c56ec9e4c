//! `cleave sim goodput`: the goodput of a simulated fleet.
//!
//! Owns: the output. Never: decides how a request is routed, or which requests count. Invariant:
//! every routing gets the same devices and the same arrivals.

use crate::args::{
    ArrivalArgs, FleetArg, GoodputQuestion, ScenarioArgs, SimGoodputArgs, TargetArgs,
};
use crate::bench::PrintFormat;
use crate::load::{LoadPace, schedule_options, workload_of};
use crate::parts;
use crate::router_cost::{RouterCost, RouterCostMeter};
use anyhow::{Context, bail, ensure};
use cleave_bench::{BenchWorkload, RequestSchedule, ScheduleEntry, ScheduleOptions};
use cleave_domain::{RequestOrigin, RequestSlo, SloClass, SloPolicy};
use cleave_sim::goodput::{
    ClassScore, FleetSpec, FleetText, GoodputOutcome, GoodputScore, PromptRecipe, RecipePart,
    RequestArrival, RoutingComparison, RoutingScheme, WorkerProfile, run, run_observed,
    slo_of_class, with_adapters,
};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

pub(crate) struct GoodputRow {
    pub(crate) scheme: RoutingScheme,
    /// Arrivals per second, in thousandths; `None` if the search found no rate.
    pub(crate) rate_milli: Option<u64>,
    pub(crate) outcome: Option<GoodputOutcome>,
    pub(crate) cost: Option<RouterCost>,
}

/// Runs the simulations and prints the table.
///
/// # Errors
/// If flags contradict each other, or the output cannot be written.
pub(crate) fn run_goodput(args: &SimGoodputArgs) -> anyhow::Result<()> {
    let policy = Arc::new(one_class(&args.targets)?);
    let clients = SimClients::of_fleet(&args.scenario, &policy, ArrivalSpan::Full)?;
    let comparison = make_comparison(&args.scenario, &clients, &|_, _| {})?;
    let schemes = if args.compare {
        RoutingScheme::ALL.to_vec()
    } else {
        args.way.clone()
    };
    let rate = clients.rate_milli;
    let rows = match args.question() {
        GoodputQuestion::RouterCost => schemes
            .into_iter()
            .map(|scheme| measure_cost(&comparison, scheme, &clients))
            .collect(),
        GoodputQuestion::HighestRate => side_by_side(&schemes, |scheme| {
            let found = comparison.search(scheme, rate, &|rate| clients.arrivals_at(rate));
            let (rate_milli, outcome) = found
                .best
                .map(|best| (best.rate_milli, best.outcome))
                .unzip();
            GoodputRow {
                scheme,
                rate_milli,
                outcome,
                cost: None,
            }
        }),
        GoodputQuestion::OneRate => side_by_side(&schemes, |scheme| GoodputRow {
            scheme,
            rate_milli: Some(rate),
            outcome: Some(run(&comparison.scenario(scheme, clients.arrivals_at(rate)))),
            cost: None,
        }),
    };
    let form = if args.scenario.json {
        PrintFormat::Json
    } else {
        PrintFormat::Table
    };
    print(&comparison, &rows, form)
}

fn measure_cost(
    comparison: &RoutingComparison,
    scheme: RoutingScheme,
    clients: &SimClients,
) -> GoodputRow {
    let scenario = comparison.scenario(scheme, clients.arrivals_at(clients.rate_milli));
    let mut meter = RouterCostMeter::default();
    let outcome = run_observed(&scenario, &mut meter);
    GoodputRow {
        scheme,
        rate_milli: Some(clients.rate_milli),
        outcome: Some(outcome),
        cost: Some(meter.cost()),
    }
}

/// Runs as many simulations at a time as there are cores; returns the rows in the order of
/// `schemes`.
fn side_by_side(
    schemes: &[RoutingScheme],
    row: impl Fn(RoutingScheme) -> GoodputRow + Sync,
) -> Vec<GoodputRow> {
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut rows = Vec::new();
    for some in schemes.chunks(cores) {
        let done = thread::scope(|scope| {
            let threads: Vec<_> = some
                .iter()
                .map(|scheme| scope.spawn(|| row(*scheme)))
                .collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|row| row.expect("a simulated world violated an invariant"))
                .collect::<Vec<_>>()
        });
        rows.extend(done);
    }
    rows
}

// === what is simulated ===

/// Builds the policy with the one class that the flags describe.
pub(crate) fn one_class(targets: &TargetArgs) -> anyhow::Result<SloPolicy> {
    let TargetArgs {
        ttft,
        tpot,
        e2e,
        goal,
    } = targets;
    ensure!(
        (0.0..=1.0).contains(goal),
        "--goal {goal}: expected a share from 0 to 1"
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

/// The simulated clients, whose arrivals can be generated at any rate.
pub(crate) struct SimClients {
    workload: BenchWorkload,
    schedule_options: ScheduleOptions,
    policy: Arc<SloPolicy>,
    /// Span of the arrivals, if no flag sets it.
    length: ArrivalSpan,
    /// Adapters that requests name, if any.
    adapters: Option<u32>,
    /// Requested arrivals per second, in thousandths.
    pub(crate) rate_milli: u64,
}

/// Span of a simulated run, if no flag sets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArrivalSpan {
    /// The whole trace, or one minute.
    Full,
    /// The shortest span that gives a result, for searches of dozens of runs: see [`SAMPLE`].
    Sample,
}

/// Least span of a sample's arrivals, and limits of their number.
const SAMPLE: Duration = Duration::from_secs(10);
const SAMPLE_REQUESTS: std::ops::RangeInclusive<usize> = 300..=200_000;

/// Returns the fleet of a complete scenario.
fn require_fleet(args: &ScenarioArgs) -> anyhow::Result<FleetArg<'_>> {
    let workers = args.workers();
    let workers = workers.context("a fleet is missing: give --fleet SPEC or --devices N")?;
    ensure!(
        args.arrivals.is_given(),
        "the fleet has no requests: give --workload SPEC or --trace FILE"
    );
    Ok(workers)
}

impl SimClients {
    /// Reads the clients of a fleet of known size.
    ///
    /// # Errors
    /// If something is missing, or the trace, the workload or the rate is invalid.
    pub(crate) fn of_fleet(
        args: &ScenarioArgs,
        policy: &Arc<SloPolicy>,
        length: ArrivalSpan,
    ) -> anyhow::Result<Self> {
        let workers = match require_fleet(args)? {
            FleetArg::Named(fleet) => fleet.workers_count(),
            FleetArg::Devices(count) => count,
        };
        let clients = Self::from_arrivals(&args.arrivals, policy, length, f64::from(workers))?;
        Ok(Self {
            adapters: args.adapters.adapters,
            ..clients
        })
    }

    /// Reads the trace or the workload. `rate` is the default of arrivals per second, where neither
    /// a flag nor a trace sets them.
    ///
    /// # Errors
    /// If the trace, the workload or the rate is invalid.
    pub(crate) fn from_arrivals(
        args: &ArrivalArgs,
        policy: &Arc<SloPolicy>,
        length: ArrivalSpan,
        rate: f64,
    ) -> anyhow::Result<Self> {
        let timed = args.workload.trace.is_some();
        let pace = LoadPace {
            rate: args.rate.or_else(|| (!timed).then_some(rate)),
            speed: None,
            duration: args
                .duration
                .or((!timed).then_some(Duration::from_secs(60))),
        };
        let mut clients = Self {
            workload: workload_of(&args.workload)?,
            schedule_options: schedule_options(&args.workload, pace),
            policy: Arc::clone(policy),
            length: if args.duration.is_some() || args.workload.limit.is_some() {
                ArrivalSpan::Full
            } else {
                length
            },
            adapters: None,
            rate_milli: 0,
        };
        let schedule = clients.workload.schedule(&clients.schedule_options)?;
        let rate = pace.rate.unwrap_or_else(|| schedule.rate());
        ensure!(
            (0.001..=1e9).contains(&rate),
            "--rate {rate}: expected arrivals per second"
        );
        clients.rate_milli = (rate * 1e3).round() as u64;
        Ok(clients)
    }

    /// Generates the arrivals at this rate; none if the rate is too low for the span. The requested
    /// rate is simulated in full, other rates of a search by samples.
    pub(crate) fn arrivals_at(&self, rate_milli: u64) -> Vec<RequestArrival> {
        if rate_milli == self.rate_milli {
            self.arrivals(rate_milli, ArrivalSpan::Full)
        } else {
            self.arrivals(rate_milli, self.length)
        }
    }

    fn arrivals(&self, rate_milli: u64, length: ArrivalSpan) -> Vec<RequestArrival> {
        let rate = rate_milli as f64 / 1e3;
        let mut options = ScheduleOptions {
            rate: Some(rate),
            ..self.schedule_options
        };
        if length == ArrivalSpan::Sample {
            let least = Duration::try_from_secs_f64(*SAMPLE_REQUESTS.start() as f64 / rate);
            options.duration = Some(least.unwrap_or(Duration::MAX).max(SAMPLE));
            options.requests = Some(*SAMPLE_REQUESTS.end());
        }
        let schedule = self.workload.schedule(&options);
        let requests = schedule.iter().flat_map(RequestSchedule::requests);
        let arrivals = requests.map(|entry| self.arrival(entry)).collect();
        match self.adapters {
            Some(count) => with_adapters(arrivals, count, options.seed),
            None => arrivals,
        }
    }

    fn arrival(&self, entry: ScheduleEntry) -> RequestArrival {
        let ScheduleEntry {
            at,
            class,
            parts,
            output_tokens,
        } = entry;
        let part = |(name, tokens)| RecipePart { name, tokens };
        let prompt = PromptRecipe {
            parts: parts.into_iter().map(part).collect(),
        };
        RequestArrival {
            at,
            slo: self.resolve_slo(class, prompt.tokens()),
            prompt,
            output_tokens,
            priority: 0,
            adapter: None,
        }
    }

    /// Resolves the SLO of a class of the workload: the policy's class of the same name, or else
    /// the class that the rules select.
    fn resolve_slo(&self, class: usize, prompt_tokens: u32) -> RequestSlo {
        let name = &self.workload.classes()[class];
        let is_defined = self.policy.classes.iter().any(|class| class.name == *name);
        if is_defined {
            return slo_of_class(&self.policy, name);
        }
        let resolved = self
            .policy
            .resolve(&RequestOrigin::default(), "", prompt_tokens);
        resolved.unwrap_or_else(|_| slo_of_class(&self.policy, &self.policy.default_class))
    }
}

/// Builds the fleet and the policy of a comparison. `trying` gets the number of each division of
/// the legs that is tried, and their count.
///
/// # Errors
/// If something is missing, the profile is unknown, or the devices make no whole number of workers.
pub(crate) fn make_comparison(
    args: &ScenarioArgs,
    clients: &SimClients,
    trying: &dyn Fn(u32, u32),
) -> anyhow::Result<RoutingComparison> {
    let comparison = |fleet: FleetSpec| {
        let adapters = args.adapters.fleet(&fleet.profile);
        anyhow::Ok(RoutingComparison {
            adapters: adapters.map_err(anyhow::Error::msg)?,
            fleet,
            policy: Arc::clone(&clients.policy),
            noise_permille: args.noise,
            seed: args.arrivals.workload.seed,
        })
    };
    let devices = match require_fleet(args)? {
        FleetArg::Named(fleet) => {
            return comparison(named_fleet(fleet, parts::profile(&args.parts)?)?);
        }
        FleetArg::Devices(count) => count,
    };
    let profile = parts::profile_or(&args.parts, &args.profile)?;
    let each = profile.devices_count();
    let workers = devices / each;
    ensure!(
        workers >= 1 && devices.is_multiple_of(each),
        "--devices {devices}: a worker of {} is {each} devices",
        profile.name
    );
    // The search for the best division of legs starts from a fleet without one.
    let undivided = comparison(FleetSpec::aggregated(profile, workers))?;
    if workers == 1 {
        return Ok(undivided);
    }
    let arrivals = clients.arrivals(clients.rate_milli, clients.length);
    let fleet = undivided.best_division(&arrivals, trying);
    comparison(fleet)
}

/// The fleet of a text, whose workers have the profile that it names, or one from parts.
fn named_fleet(fleet: &FleetText, from_parts: Option<WorkerProfile>) -> anyhow::Result<FleetSpec> {
    match (&fleet.profile, from_parts) {
        (Some(named), None) => Ok(fleet.of(named.clone())),
        (None, Some(profile)) => Ok(fleet.of(profile)),
        (None, None) => {
            bail!("--fleet: give profile=NAME, or --hardware and --model")
        }
        (Some(_), Some(_)) => {
            bail!("--fleet has a profile, and --hardware and --model describe another one")
        }
    }
}

// === what is printed ===

fn print(
    comparison: &RoutingComparison,
    rows: &[GoodputRow],
    form: PrintFormat,
) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if let PrintFormat::Json = form {
        let rows: Vec<Value> = rows.iter().map(row_json).collect();
        let fleet = comparison.fleet.to_string();
        let all = json!({
            "fleet": fleet,
            "devices": comparison.fleet.devices_count(),
            "profile": comparison.fleet.profile.source,
            "rows": rows,
        });
        writeln!(out, "{all:#}")?;
        return Ok(());
    }
    let (fleet, devices) = (&comparison.fleet, comparison.fleet.devices_count());
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
            writeln!(out, "{}: {cost}", row.scheme.name())?;
        }
    }
    Ok(())
}

fn row_text(row: &GoodputRow) -> String {
    let scheme = row.scheme.name();
    let (Some(rate), Some(outcome)) = (row.rate_milli, &row.outcome) else {
        return format!("{scheme:<24} no rate meets the goal");
    };
    let GoodputScore {
        all, split, whole, ..
    } = &outcome.score;
    let seconds = |span: Duration| format!("{:.3}", span.as_secs_f64());
    let millis = |span: Duration| format!("{:.1}", span.as_secs_f64() * 1e3);
    let ttft = format!("{}/{}", seconds(all.ttft.p50), seconds(all.ttft.p99));
    let tpot = format!("{}/{}", millis(all.tpot.p50), millis(all.tpot.p99));
    let placed = (split + whole).max(1);
    format!(
        "{scheme:<24} {:>9.2} {:>7.1}% {:>10.3} {:>7} {:>7} {ttft:>15} {tpot:>15} {:>6}% {:>9}",
        rate as f64 / 1e3,
        all.attainment_permille() as f64 / 10.0,
        outcome.score.goodput_milli() as f64 / 1e3,
        all.refused,
        all.failed + all.unfinished,
        whole * 100 / placed,
        stage_most_missed(all),
    )
}

/// Returns the stage that most late requests exceeded; if none was named, the target that most
/// missed.
fn stage_most_missed(all: &ClassScore) -> &'static str {
    let stages = all.stages.iter();
    let stage = stages.max_by_key(|(_, count)| **count);
    let late = all.late.iter().zip(["ttft", "tpot", "e2e"]);
    let late = late.filter(|(count, _)| **count > 0);
    let late = late.max_by_key(|(count, _)| **count).map(|(_, name)| name);
    stage.map(|(stage, _)| *stage).or(late).unwrap_or("-")
}

fn row_json(row: &GoodputRow) -> Value {
    let mut value = json!({
        "way": row.scheme.name(),
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

/// Formats a score in seconds and shares.
pub(crate) fn score_json(score: &GoodputScore) -> Value {
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
    let quantiles = |q: &cleave_sim::goodput::LatencyQuantiles| {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, CliCommand, SimCommand};
    use clap::Parser;

    fn args(words: &str) -> Result<SimGoodputArgs, String> {
        let words = ["cleave", "sim", "goodput"]
            .into_iter()
            .chain(words.split(' '));
        let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
        match cli.command {
            CliCommand::Sim(sim) => match sim.command {
                SimCommand::Goodput(args) => Ok(*args),
                _ => Err("another simulation".to_owned()),
            },
            _ => Err("another command".to_owned()),
        }
    }

    fn fleet(words: &str) -> Result<FleetSpec, String> {
        let args = args(&format!(
            "{words} --workload long-short --rate 2 --limit 20"
        ))?;
        let policy = Arc::new(one_class(&args.targets).map_err(|error| error.to_string())?);
        let clients = SimClients::of_fleet(&args.scenario, &policy, ArrivalSpan::Full);
        let clients = clients.map_err(|error| error.to_string())?;
        let comparison = make_comparison(&args.scenario, &clients, &|_, _| {});
        comparison
            .map(|found| found.fleet)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn hardware_and_a_model_stand_in_place_of_a_profile() {
        let parts = "--hardware h100 --model qwen3-32b --tensor-parallel-size 2";
        let named = fleet(&format!("--fleet prefill=1,decode=2 {parts}")).unwrap();
        assert_eq!(
            named.to_string(),
            "prefill=1,decode=2,profile=2xh100-qwen3-32b"
        );
        assert_eq!(named.devices_count(), 6);
        let counted = fleet(&format!("--devices 2 {parts}")).unwrap();
        assert_eq!(counted.workers_count(), 1);
        let whole = fleet(&format!("--devices 3 {parts}")).unwrap_err();
        assert!(whole.contains("is 2 devices"), "{whole}");
    }

    #[test]
    fn a_fleet_has_one_profile() {
        for (words, message) in [
            ("--fleet both=1", "give profile=NAME"),
            (
                "--fleet both=1,profile=a100-opt-13b --hardware h100 --model opt-13b",
                "describe another one",
            ),
            ("--devices 1 --hardware h100", "--model"),
            ("--devices 1 --model opt-13b", "--hardware"),
            (
                "--devices 1 --profile a100-opt-13b --hardware h100 --model opt-13b",
                "cannot be used with",
            ),
            ("--devices 1 --hardware abacus --model opt-13b", "abacus"),
            (
                "--devices 1 --hardware l40s --model opt-66b",
                "does not fit",
            ),
        ] {
            let error = fleet(words).unwrap_err();
            assert!(error.contains(message), "{words}: {error}");
        }
    }
}
