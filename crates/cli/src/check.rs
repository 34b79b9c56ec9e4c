//! `cleave check`: validation of a policy, and simulation of a fleet under it.
//!
//! Owns: the output, and the exit status. Never: accepts a class that misses its goal. Invariant:
//! errors of the file are reported before anything is simulated, and the question that was asked is
//! answered before further rates are.

use crate::args::{ArrivalArgs, CheckArgs, ScenarioArgs};
use crate::goodput::{ArrivalSpan, SimClients, make_comparison, score_json};
use anyhow::bail;
use cleave_domain::SloPolicy;
use cleave_policy::PolicyFile;
use cleave_sim::goodput::{
    ClassScore, MissedGoal, PolicyCheck, PolicyLimit, RoutingComparison, check as check_fleet,
};
use serde_json::json;
use std::cell::Cell;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

/// Reads the policy, simulates the fleet, and prints the result of each class.
///
/// # Errors
/// If the policy is invalid, or a class would miss its goal.
pub(crate) fn check(args: &CheckArgs) -> anyhow::Result<()> {
    let file = PolicyFile::open(&args.policy)?;
    let policy = file.policy();
    let scenario = &args.scenario;
    if is_file_only(scenario) {
        return print_file_counts(args, policy);
    }
    let clients = SimClients::of_fleet(scenario, policy, ArrivalSpan::Sample)?;
    let comparison = make_comparison(scenario, &clients, &|number, count| {
        show_progress(&format!(
            "trying division {number} of {count} of the legs ..."
        ));
    });
    show_progress("");
    let comparison = comparison?;
    let rate = clients.rate_milli;
    show_progress(&format!("simulating {} ...", rate_words(rate)));
    let checked = check_fleet(&comparison, rate, &|rate| clients.arrivals_at(rate));
    show_progress("");
    // The answer is there in seconds; the search for the highest rate may take minutes.
    if !scenario.json {
        print_text(&table_text(&comparison, rate, &checked))?;
    }
    let searching = Cell::new(0_u32);
    let limit = checked.find_limit(&comparison, &|rate| {
        searching.set(searching.get() + 1);
        show_progress(&format!(
            "searching the highest rate: simulation {}, {} ...",
            searching.get(),
            rate_words(rate)
        ));
        clients.arrivals_at(rate)
    });
    show_progress("");
    if scenario.json {
        let report = report_json(&comparison, rate, &checked, &limit);
        print_text(&format!("{report:#}\n"))?;
    } else {
        print_text(&limit_text(&limit))?;
    }
    if checked.met {
        Ok(())
    } else {
        bail!(
            "the goals of {} are not met at {}",
            args.policy.display(),
            rate_words(rate)
        )
    }
}

fn rate_words(rate_milli: u64) -> String {
    format!("{:.2} requests per second", rate_milli as f64 / 1e3)
}

fn print_text(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Whether no flag describes a simulation.
fn is_file_only(scenario: &ScenarioArgs) -> bool {
    let ArrivalArgs {
        workload,
        rate,
        duration,
    } = &scenario.arrivals;
    let some = scenario.workers().is_some() || scenario.arrivals.is_given();
    let how = workload.limit.is_some() || rate.is_some() || duration.is_some();
    !some && !how
}

/// Prints the counts of the file, which has no errors once it was opened.
fn print_file_counts(args: &CheckArgs, policy: &SloPolicy) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let (classes, rules) = (policy.classes.len(), policy.rules.len());
    let tenants = policy.tenants.len();
    if args.scenario.json {
        let counts = json!({"classes": classes, "rules": rules, "tenants": tenants});
        writeln!(out, "{counts:#}")?;
    } else {
        writeln!(
            out,
            "{}: no mistakes (classes: {classes}, rules: {rules}, tenants: {tenants})",
            args.policy.display()
        )?
    }
    Ok(())
}

/// Shows one line of progress, which the next one overwrites, on a terminal only.
fn show_progress(line: &str) {
    let mut err = std::io::stderr();
    if err.is_terminal() {
        // A failed write changes nothing.
        let _ = write!(err, "\r\x1b[2K{line}");
        let _ = err.flush();
    }
}

fn table_text(comparison: &RoutingComparison, rate_milli: u64, checked: &PolicyCheck) -> String {
    let fleet = &comparison.fleet;
    let mut text = format!(
        "{fleet}: {}, {} devices, at {} requests per second\n{:<16} {:>9} {:>8} {:>6} {:>15} {:>15} {:>8}\n",
        fleet.profile.about,
        fleet.devices_count(),
        rate_milli as f64 / 1e3,
        "class",
        "requests",
        "attained",
        "goal",
        "ttft p90/target",
        "tpot p90/target",
        "refused",
    );
    for class in &checked.outcome.score.classes {
        text.push_str(&class_words(comparison, class));
    }
    text
}

fn limit_text(limit: &PolicyLimit) -> String {
    let mut text = String::new();
    match &limit.best {
        Some(best) => text.push_str(&format!(
            "every goal is met up to {:.2} requests per second: {:.3} good ones per second and device\n",
            best.rate_milli as f64 / 1e3,
            best.outcome.score.goodput_milli() as f64 / 1e3,
        )),
        None => text.push_str("no rate was found at which every goal is met\n"),
    }
    if let Some(broken) = &limit.missed_first {
        text.push_str(&break_words(broken));
    }
    text
}

fn class_words(comparison: &RoutingComparison, class: &ClassScore) -> String {
    let targets = comparison.policy.class(&class.class);
    let against = |found: Duration, target: Option<Duration>| {
        let seconds = |span: Duration| format!("{:.3}", span.as_secs_f64());
        format!(
            "{}/{}",
            seconds(found),
            target.map_or("-".to_owned(), seconds)
        )
    };
    format!(
        "{:<16} {:>9} {:>7.1}% {:>5.1}% {:>15} {:>15} {:>8}\n",
        class.class,
        class.arrivals,
        class.attainment_permille() as f64 / 10.0,
        f64::from(targets.attainment_permille) / 10.0,
        against(class.ttft.p90, targets.ttft),
        against(class.tpot.p90, targets.tpot),
        class.refused,
    )
}

fn break_words(broken: &MissedGoal) -> String {
    let stage = broken
        .stage
        .map_or(String::new(), |stage| format!(", mostly in {stage}"));
    format!(
        "class `{}` fails first: at {:.2} requests per second fewer than {:.1}% of it meet their targets \
         (missed: {}{stage})\n",
        broken.class,
        broken.rate_milli as f64 / 1e3,
        broken.goal_permille as f64 / 10.0,
        broken.most.name(),
    )
}

fn report_json(
    comparison: &RoutingComparison,
    rate_milli: u64,
    checked: &PolicyCheck,
    limit: &PolicyLimit,
) -> serde_json::Value {
    let best = limit.best.as_ref().map(|best| {
        json!({"rate": best.rate_milli as f64 / 1e3, "score": score_json(&best.outcome.score)})
    });
    let breaks = limit.missed_first.as_ref().map(|broken| {
        json!({
            "rate": broken.rate_milli as f64 / 1e3,
            "class": broken.class,
            "goal": broken.goal_permille as f64 / 1e3,
            "missed": broken.most.name(),
            "stage": broken.stage,
        })
    });
    json!({
        "fleet": comparison.fleet.to_string(),
        "rate": rate_milli as f64 / 1e3,
        "met": checked.met,
        "score": score_json(&checked.outcome.score),
        "best": best,
        "breaks_first": breaks,
    })
}
