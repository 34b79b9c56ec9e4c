//! `cleave check`: whether a policy is one, and whether a fleet could keep it.
//!
//! Owns: what is printed, and the exit status. Never: forgives a class that misses its goal.
//! Invariant: what is wrong with the file is said before anything is simulated.

use crate::args::{ArrivalArgs, CheckArgs, ScenarioArgs};
use crate::goodput::{Clients, Length, contest, score_json};
use anyhow::bail;
use cleave_domain::SloPolicy;
use cleave_node::PolicyFile;
use cleave_sim::goodput::{Break, Checked, ClassScore, Contest, check as check_fleet};
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// Reads the policy, simulates the fleet, prints what became of each class.
///
/// # Errors
/// A file that is no policy; a class that would miss its goal.
pub(crate) fn check(args: &CheckArgs) -> anyhow::Result<()> {
    let file = PolicyFile::open(&args.policy)?;
    let policy = file.policy();
    let scenario = &args.scenario;
    if is_bare(scenario) {
        return file_alone(args, policy);
    }
    let clients = Clients::of_fleet(scenario, (policy, Length::Sample))?;
    if scenario.fleet.is_none() {
        show("dividing the fleet's legs ...");
    }
    let contest = contest(scenario, &clients);
    show("");
    let contest = contest?;
    let rate = clients.rate_milli;
    let checked = check_fleet(&contest, rate, &|rate| {
        show(&format!(
            "simulating {:.2} requests per second ...",
            rate as f64 / 1e3
        ));
        clients.at(rate)
    });
    show("");
    let mut out = std::io::stdout().lock();
    match scenario.json {
        true => writeln!(out, "{:#}", in_json(&contest, rate, &checked))?,
        false => write!(out, "{}", in_words(&contest, rate, &checked))?,
    }
    match checked.met {
        true => Ok(()),
        false => bail!(
            "the goals of {} are not met at {} requests per second",
            args.policy.display(),
            rate as f64 / 1e3
        ),
    }
}

/// Nothing was said about what is to be simulated.
fn is_bare(scenario: &ScenarioArgs) -> bool {
    let ArrivalArgs {
        workload,
        rate,
        duration,
    } = &scenario.arrivals;
    let some = scenario.workers().is_some() || scenario.arrivals.some();
    let how = workload.limit.is_some() || rate.is_some() || duration.is_some();
    !some && !how
}

/// The file has no mistakes, or it would not have been opened.
fn file_alone(args: &CheckArgs, policy: &SloPolicy) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let (classes, rules) = (policy.classes.len(), policy.rules.len());
    let tenants = policy.tenants.len();
    match args.scenario.json {
        true => {
            let counts = json!({"classes": classes, "rules": rules, "tenants": tenants});
            writeln!(out, "{counts:#}")?;
        }
        false => writeln!(
            out,
            "{}: no mistakes (classes: {classes}, rules: {rules}, tenants: {tenants})",
            args.policy.display()
        )?,
    }
    Ok(())
}

/// One line that the next one overwrites, for whoever watches.
fn show(line: &str) {
    let mut err = std::io::stderr();
    if err.is_terminal() {
        // Who cannot be told waits as well.
        let _ = write!(err, "\r\x1b[2K{line}");
        let _ = err.flush();
    }
}

fn in_words(contest: &Contest, rate_milli: u64, checked: &Checked) -> String {
    let fleet = &contest.fleet;
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
        text.push_str(&class_words(contest, class));
    }
    match &checked.best {
        Some(best) => text.push_str(&format!(
            "every goal is met up to {:.2} requests per second: {:.3} good ones per second and device\n",
            best.rate_milli as f64 / 1e3,
            best.outcome.score.goodput_milli() as f64 / 1e3,
        )),
        None => text.push_str("no rate was found at which every goal is met\n"),
    }
    if let Some(broken) = &checked.breaks {
        text.push_str(&break_words(broken));
    }
    text
}

fn class_words(contest: &Contest, class: &ClassScore) -> String {
    let promised = contest.policy.class(&class.class);
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
        f64::from(promised.attainment_permille) / 10.0,
        against(class.ttft.p90, promised.ttft),
        against(class.tpot.p90, promised.tpot),
        class.refused,
    )
}

fn break_words(broken: &Break) -> String {
    let stage = broken
        .stage
        .map_or(String::new(), |stage| format!(", mostly in {stage}"));
    format!(
        "class `{}` breaks first: at {:.2} requests per second less than {:.1}% of it meet their targets \
         (missed: {}{stage})\n",
        broken.class,
        broken.rate_milli as f64 / 1e3,
        broken.goal_permille as f64 / 10.0,
        broken.most.name(),
    )
}

fn in_json(contest: &Contest, rate_milli: u64, checked: &Checked) -> serde_json::Value {
    let best = checked.best.as_ref().map(|best| {
        json!({"rate": best.rate_milli as f64 / 1e3, "score": score_json(&best.outcome.score)})
    });
    let breaks = checked.breaks.as_ref().map(|broken| {
        json!({
            "rate": broken.rate_milli as f64 / 1e3,
            "class": broken.class,
            "goal": broken.goal_permille as f64 / 1e3,
            "missed": broken.most.name(),
            "stage": broken.stage,
        })
    });
    json!({
        "fleet": contest.fleet.to_string(),
        "rate": rate_milli as f64 / 1e3,
        "met": checked.met,
        "score": score_json(&checked.outcome.score),
        "best": best,
        "breaks_first": breaks,
    })
}
