//! `cleave sim scale`: growth and shrinking of a simulated fleet, with their gains and costs.
//!
//! Owns: the fleets that are compared, and the output. Never: decides the number of workers.
//! Invariant: every row serves the same arrivals under the same targets.

use crate::args::{RatePoint, ScaleArgs};
use crate::goodput::{ArrivalSpan, SimClients, one_class, score_json};
use crate::parts;
use anyhow::{Context, ensure};
use cleave_domain::{PoolCounts, PoolScaling, Role, ScalingMode, ScalingPolicy, SloPolicy, Time};
use cleave_policy::PolicyFile;
use cleave_sim::goodput::{
    FleetHistory, GoodputOutcome, Orchestrator, RequestArrival, RoutingComparison, RoutingScheme,
    ScalingAuthority, Scenario, WorkerProfile, run, thinned_by_curve,
};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

const POOLS: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

/// The result of a fixed fleet, or of a fleet that some scaler changes.
struct ScaleRow {
    name: &'static str,
    outcome: GoodputOutcome,
}

/// Runs the simulations and prints the table.
///
/// # Errors
/// If the policy has no scaling part, flags contradict each other, or the output cannot be written.
pub(crate) fn run_scale(args: &ScaleArgs) -> anyhow::Result<()> {
    ensure!(
        args.arrivals.is_given(),
        "the fleet has no requests: give --workload SPEC or --trace FILE"
    );
    let profile = parts::profile_or(&args.parts, &args.profile)?;
    let policy = policy(args, profile.devices_count())?;
    let world = ScaleRun {
        arrivals: arrivals(args, &policy)?,
        args,
        profile,
        policy,
    };
    let rows = world.rows();
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", report_json(&world, &rows))?
    } else {
        write!(out, "{}", table_text(&world, &rows))?
    }
    Ok(())
}

/// Returns the policy from the file, with its scaling in the mode `act`, or the policy that the
/// flags describe.
fn policy(args: &ScaleArgs, devices_each: u32) -> anyhow::Result<Arc<SloPolicy>> {
    let mut policy = match &args.policy {
        Some(path) => SloPolicy::clone(PolicyFile::open(path)?.policy()),
        None => one_class(&args.targets)?,
    };
    if let Some(devices_max) = args.devices {
        policy.scaling = Some(bounds(devices_max, devices_each));
    }
    let scaling = policy.scaling.as_mut();
    let scaling = scaling.with_context(|| {
        let path = args.policy.as_deref().unwrap_or("".as_ref()).display();
        format!("{path} has no part `scaling`, so its fleet has a fixed size: add the part, or use --devices N instead")
    })?;
    scaling.mode = ScalingMode::Act;
    ensure!(
        scaling.can_serve(),
        "`scaling.pools` allows no workers for one of the legs: set `max` for prefill and decode, or for both"
    );
    Ok(Arc::new(policy))
}

/// Returns the scaling that allows any number of either leg within the devices.
fn bounds(devices_max: u32, devices: u32) -> ScalingPolicy {
    let pool = |role| PoolScaling {
        max: devices_max / devices.max(1),
        devices,
        ..PoolScaling::absent(role)
    };
    ScalingPolicy {
        prefill: pool(Role::Prefill),
        decode: pool(Role::Decode),
        ..ScalingPolicy::new(devices_max)
    }
}

fn arrivals(args: &ScaleArgs, policy: &Arc<SloPolicy>) -> anyhow::Result<Vec<RequestArrival>> {
    let clients = SimClients::from_arrivals(&args.arrivals, policy, ArrivalSpan::Full, 1.0)?;
    let all = clients.arrivals_at(clients.rate_milli);
    let curve: Vec<(u64, u32)> = args
        .curve
        .iter()
        .map(|RatePoint { at, permille }| (at.as_secs(), *permille))
        .collect();
    ensure!(
        curve.is_sorted_by(|one, next| one.0 < next.0),
        "--curve: each time must be a second after the last"
    );
    let some = if curve.is_empty() {
        all
    } else {
        thinned_by_curve(all, &curve, args.arrivals.workload.seed)
    };
    ensure!(
        !some.is_empty(),
        "nothing arrives: raise --rate, --duration or the shares of --curve"
    );
    Ok(some)
}

struct ScaleRun<'a> {
    args: &'a ScaleArgs,
    profile: WorkerProfile,
    policy: Arc<SloPolicy>,
    arrivals: Vec<RequestArrival>,
}

impl ScaleRun<'_> {
    fn scaling(&self) -> &ScalingPolicy {
        self.policy.scaling.as_ref().expect("the policy scales")
    }

    fn rows(&self) -> Vec<ScaleRow> {
        let scaling = self.scaling();
        let of = |part: &dyn Fn(&PoolScaling) -> u32| {
            let mut counts = PoolCounts::default();
            for role in POOLS {
                *counts.for_role_mut(role) = part(scaling.pool(role));
            }
            counts
        };
        let (least, most) = (of(&|pool| pool.min), of(&|pool| pool.max));
        let by_router = self.row(
            "by the promises",
            ScalingAuthority::Router,
            self.args.first.unwrap_or(least),
        );
        if !self.args.compare {
            return vec![by_router];
        }
        let (peak, mean) = fixed_sizes(growth(&by_router.outcome), by_router.outcome.score.span);
        let devices_max = scaling.devices_max;
        let one = of(&|pool| pool.min.max(u32::from(pool.max > 0)));
        let one = self
            .args
            .first
            .filter(|first| first.total() > 0)
            .unwrap_or(one);
        vec![
            by_router,
            self.row("as many as at the most", ScalingAuthority::Fixed, peak),
            self.row("as many as on average", ScalingAuthority::Fixed, mean),
            self.row(
                "thresholds",
                ScalingAuthority::Thresholds { most, devices_max },
                one,
            ),
        ]
    }

    /// A fleet that scales by queues and occupancy never refuses a request for its targets, so its
    /// routers do not either.
    fn row(&self, name: &'static str, authority: ScalingAuthority, first: PoolCounts) -> ScaleRow {
        let scheme = match authority {
            ScalingAuthority::Thresholds { .. } => RoutingScheme::LoadSplit,
            ScalingAuthority::Fixed | ScalingAuthority::Router => RoutingScheme::Auto,
        };
        let starter = Orchestrator {
            profile: self.profile.clone(),
            workers_first: first,
            start_time: self.args.start,
            authority,
            kill_times: self.args.kill.clone(),
            tail: Duration::from_secs(30),
        };
        let policy = match authority {
            ScalingAuthority::Router => Arc::clone(&self.policy),
            ScalingAuthority::Fixed | ScalingAuthority::Thresholds { .. } => Arc::new(SloPolicy {
                scaling: None,
                ..SloPolicy::clone(&self.policy)
            }),
        };
        let comparison = RoutingComparison {
            fleet: starter.fleet(),
            policy,
            adapters: None,
            noise_permille: self.args.noise,
            seed: self.args.arrivals.workload.seed,
        };
        let outcome = run(&Scenario {
            orchestrator: Some(starter),
            ..comparison.scenario(scheme, self.arrivals.clone())
        });
        ScaleRow { name, outcome }
    }
}

fn growth(outcome: &GoodputOutcome) -> &FleetHistory {
    outcome.growth.as_ref().expect("the fleet has a scaler")
}

/// Returns fixed fleets for comparison: each pool at its largest size, and at its mean size; at
/// least one worker where there ever was one.
fn fixed_sizes(growth: &FleetHistory, span: Duration) -> (PoolCounts, PoolCounts) {
    let end = Time::ZERO + span;
    // Each desired size lasts until the next change, and the last one until the end of the run.
    let ends = growth.wanted.iter().skip(1).map(|(at, _)| *at).chain([end]);
    let (mut most, mut mean) = (PoolCounts::default(), PoolCounts::default());
    let durations: Vec<(f64, PoolCounts)> = growth
        .wanted
        .iter()
        .zip(ends)
        .map(|((at, counts), until)| (until.max(*at).since(*at).as_secs_f64(), *counts))
        .collect();
    for role in POOLS {
        let sum: f64 = durations
            .iter()
            .map(|(s, counts)| s * f64::from(counts.for_role(role)))
            .sum();
        let largest = durations
            .iter()
            .map(|(_, counts)| counts.for_role(role))
            .max();
        *most.for_role_mut(role) = largest.unwrap_or(0);
        let average = (sum / span.as_secs_f64().max(1e-9)).round() as u32;
        *mean.for_role_mut(role) = average.max(most.for_role(role).min(1));
    }
    (most, mean)
}

fn table_text(world: &ScaleRun, rows: &[ScaleRow]) -> String {
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
        text += &row_text(row);
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

fn row_text(row: &ScaleRow) -> String {
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

fn report_json(world: &ScaleRun, rows: &[ScaleRow]) -> Value {
    let row = |row: &ScaleRow| {
        let growth = growth(&row.outcome);
        let change = |(at, counts): &(Time, PoolCounts)| json!({"at_s": at.since(Time::ZERO).as_secs_f64(), "workers": counts});
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
            "wanted": growth.wanted.iter().map(change).collect::<Vec<_>>(),
        })
    };
    json!({
        "profile": world.profile.name,
        "source": world.profile.source,
        "scaling": world.scaling(),
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
    })
}
