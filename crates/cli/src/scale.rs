//! `cleave sim scale`: how a simulated fleet grows and shrinks, and what that saves or costs.
//!
//! Owns: which fleets are compared, and what is printed. Never: says how many workers there are to be.
//! Invariant: every row serves the same arrivals under the same promises.

use crate::args::{Knot, ScaleArgs};
use crate::goodput::{Clients, Length, one_class, score_json};
use anyhow::{Context, ensure};
use cleave_domain::{PoolCounts, PoolScaling, Role, Scaling, ScalingMode, SloPolicy, Time};
use cleave_node::PolicyFile;
use cleave_sim::goodput::{
    Arrival, Contest, Growth, Outcome, Profile, Scenario, Starter, Way, Who, run, shaped,
};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

const POOLS: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

/// A fleet that stays, or whoever changes it.
struct Row {
    name: &'static str,
    outcome: Outcome,
}

/// Runs what was asked for and prints it.
///
/// # Errors
/// A policy that says nothing of scaling, flags that contradict each other, or nowhere to print to.
pub(crate) fn run_scale(args: &ScaleArgs) -> anyhow::Result<()> {
    ensure!(
        args.arrivals.some(),
        "nothing is asked of the fleet: give --workload SPEC or --trace FILE"
    );
    let profile = Profile::named(&args.profile).map_err(anyhow::Error::msg)?;
    let policy = policy(args, profile.devices_count())?;
    let world = World {
        arrivals: arrivals(args, &policy)?,
        args,
        profile,
        policy,
    };
    let rows = world.rows();
    let mut out = std::io::stdout().lock();
    match args.json {
        true => writeln!(out, "{:#}", in_json(&world, &rows))?,
        false => write!(out, "{}", in_words(&world, &rows))?,
    }
    Ok(())
}

/// The file's promises and bounds, followed whether it says `act` or `advise`; or what the flags make of both.
fn policy(args: &ScaleArgs, devices_each: u32) -> anyhow::Result<Arc<SloPolicy>> {
    let mut policy = match &args.policy {
        Some(path) => SloPolicy::clone(PolicyFile::open(path)?.policy()),
        None => one_class(&args.targets)?,
    };
    if let Some(devices_max) = args.devices {
        policy.scaling = Some(bounds(devices_max, devices_each));
    }
    let said = policy.scaling.as_mut();
    let scaling = said.with_context(|| {
        let path = args.policy.as_deref().unwrap_or("".as_ref()).display();
        format!("{path} has no part `scaling`, so its fleet stays as it is: add one, or give --devices N in its place")
    })?;
    scaling.mode = ScalingMode::Act;
    ensure!(
        scaling.serves(),
        "no worker of `scaling.pools` may be started for one of the legs: give prefill and decode, or both, a `max`"
    );
    Ok(Arc::new(policy))
}

/// Any number of either leg, within the devices.
fn bounds(devices_max: u32, devices: u32) -> Scaling {
    let pool = |role| PoolScaling {
        max: devices_max / devices.max(1),
        devices,
        ..PoolScaling::none(role)
    };
    Scaling {
        prefill: pool(Role::Prefill),
        decode: pool(Role::Decode),
        ..Scaling::new(devices_max)
    }
}

fn arrivals(args: &ScaleArgs, policy: &Arc<SloPolicy>) -> anyhow::Result<Vec<Arrival>> {
    let clients = Clients::of(&args.arrivals, (policy, Length::Whole), 1.0)?;
    let all = clients.at(clients.rate_milli);
    let curve: Vec<(u64, u32)> = args
        .curve
        .iter()
        .map(|Knot { at, permille }| (at.as_secs(), *permille))
        .collect();
    ensure!(
        curve.is_sorted_by(|one, next| one.0 < next.0),
        "--curve: its times are to grow, by a second at least"
    );
    let some = match curve.is_empty() {
        true => all,
        false => shaped(all, &curve, args.arrivals.workload.seed),
    };
    ensure!(
        !some.is_empty(),
        "nothing arrives: raise --rate, --duration or the shares of --curve"
    );
    Ok(some)
}

struct World<'a> {
    args: &'a ScaleArgs,
    profile: Profile,
    policy: Arc<SloPolicy>,
    arrivals: Vec<Arrival>,
}

impl World<'_> {
    fn scaling(&self) -> &Scaling {
        self.policy.scaling.as_ref().expect("it was looked for")
    }

    fn rows(&self) -> Vec<Row> {
        let scaling = self.scaling();
        let of = |part: &dyn Fn(&PoolScaling) -> u32| {
            let mut counts = PoolCounts::default();
            for role in POOLS {
                *counts.of_mut(role) = part(scaling.pool(role));
            }
            counts
        };
        let (least, most) = (of(&|pool| pool.min), of(&|pool| pool.max));
        let promises = self.row(
            "by the promises",
            Who::Router,
            self.args.first.unwrap_or(least),
        );
        if !self.args.compare {
            return vec![promises];
        }
        let (peak, mean) = sizes(growth(&promises.outcome), promises.outcome.score.span);
        let devices_max = scaling.devices_max;
        let one = of(&|pool| pool.min.max(u32::from(pool.max > 0)));
        let one = self
            .args
            .first
            .filter(|first| first.total() > 0)
            .unwrap_or(one);
        vec![
            promises,
            self.row("as many as at the most", Who::Nobody, peak),
            self.row("as many as on average", Who::Nobody, mean),
            self.row("thresholds", Who::Thresholds { most, devices_max }, one),
        ]
    }

    /// What goes by queues and occupancy refuses nobody, as its routers do.
    fn row(&self, name: &'static str, who: Who, first: PoolCounts) -> Row {
        let way = match who {
            Who::Thresholds { .. } => Way::LoadSplit,
            Who::Nobody | Who::Router => Way::Auto,
        };
        let starter = Starter {
            profile: self.profile.clone(),
            first,
            start: self.args.start,
            who,
            kills: self.args.kill.clone(),
            tail: Duration::from_secs(30),
        };
        let policy = match who {
            Who::Router => Arc::clone(&self.policy),
            Who::Nobody | Who::Thresholds { .. } => Arc::new(SloPolicy {
                scaling: None,
                ..SloPolicy::clone(&self.policy)
            }),
        };
        let contest = Contest {
            fleet: starter.fleet(),
            policy,
            noise_permille: self.args.noise,
            seed: self.args.arrivals.workload.seed,
        };
        let outcome = run(&Scenario {
            starter: Some(starter),
            ..contest.scenario(way, self.arrivals.clone())
        });
        Row { name, outcome }
    }
}

fn growth(outcome: &Outcome) -> &Growth {
    outcome.growth.as_ref().expect("somebody starts workers")
}

/// Fixed fleets to compare with: each pool as large as at its most, and as it was on average; one worker at least
/// where there ever was one.
fn sizes(growth: &Growth, span: Duration) -> (PoolCounts, PoolCounts) {
    let end = Time::ZERO + span;
    let ends = growth.wanted.iter().skip(1).map(|(at, _)| *at).chain([end]);
    let (mut most, mut mean) = (PoolCounts::default(), PoolCounts::default());
    let stays: Vec<(f64, PoolCounts)> = growth
        .wanted
        .iter()
        .zip(ends)
        .map(|((at, wanted), until)| (until.max(*at).since(*at).as_secs_f64(), *wanted))
        .collect();
    for role in POOLS {
        let sum: f64 = stays
            .iter()
            .map(|(s, wanted)| s * f64::from(wanted.of(role)))
            .sum();
        let largest = stays.iter().map(|(_, wanted)| wanted.of(role)).max();
        *most.of_mut(role) = largest.unwrap_or(0);
        let average = (sum / span.as_secs_f64().max(1e-9)).round() as u32;
        *mean.of_mut(role) = average.max(most.of(role).min(1));
    }
    (most, mean)
}

fn in_words(world: &World, rows: &[Row]) -> String {
    let mut text = format!(
        "{} requests to {}, {} devices at most, a worker serves after {} s\n",
        world.arrivals.len(),
        world.profile.name,
        world.scaling().devices_max,
        world.args.start.as_secs_f64(),
    );
    text += &format!(
        "{:<24} {:>8} {:>8} {:>7} {:>12} {:>8} {:>6} {:>8} {:>12} {:>13}\n",
        "fleet",
        "in time",
        "refused",
        "failed",
        "device-hours",
        "at most",
        "turns",
        "new legs",
        "ttft p99 s",
        "tpot p99 ms",
    );
    for row in rows {
        text += &in_line(row);
    }
    for row in rows.iter().filter(|_| world.args.changes) {
        text += &format!("{}, wanted at second: prefill + decode + both\n", row.name);
        for (
            at,
            PoolCounts {
                prefill,
                decode,
                both,
            },
        ) in &growth(&row.outcome).wanted
        {
            let second = at.since(Time::ZERO).as_secs_f64();
            text += &format!("{second:>10.1}: {prefill} + {decode} + {both}\n");
        }
    }
    text
}

fn in_line(row: &Row) -> String {
    let (growth, all) = (growth(&row.outcome), &row.outcome.score.all);
    format!(
        "{:<24} {:>7.1}% {:>8} {:>7} {:>12.2} {:>8} {:>6} {:>8} {:>12.3} {:>13.1}\n",
        row.name,
        all.attainment_permille() as f64 / 10.0,
        all.refused,
        all.failed + all.unfinished,
        growth.device_time.as_secs_f64() / 3600.0,
        growth.devices_most,
        growth.turns_most(),
        growth.flipped,
        all.ttft.p99.as_secs_f64(),
        all.tpot.p99.as_secs_f64() * 1e3,
    )
}

fn in_json(world: &World, rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let growth = growth(&row.outcome);
        let wanted = |(at, counts): &(Time, PoolCounts)| json!({"at_s": at.since(Time::ZERO).as_secs_f64(), "workers": counts});
        json!({
            "fleet": row.name,
            "score": score_json(&row.outcome.score),
            "device_hours": growth.device_time.as_secs_f64() / 3600.0,
            "devices_most": growth.devices_most,
            "turns_most": growth.turns_most(),
            "started": growth.started,
            "drained": growth.drained,
            "killed": growth.killed,
            "new_legs": growth.flipped,
            "wanted": growth.wanted.iter().map(wanted).collect::<Vec<_>>(),
        })
    };
    json!({
        "profile": world.profile.name,
        "source": world.profile.source,
        "scaling": world.scaling(),
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
    })
}
