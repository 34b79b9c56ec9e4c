//! `cleave bench run` and `cleave bench goodput`.
//!
//! Owns: turning the command line into a measurement, the user's signal, and what is printed.
//! Never: measures.

mod args;
mod watch;

pub(crate) use args::{GoodputArgs, RunArgs, WorkloadArgs, parse_positive, parse_span};

use anyhow::Context;
use args::{MeasureArgs, RATE_MIN, ServerArgs, told};
use cleave_bench::{Bounds, Folder, Hunt, Job, Report, Scaling, Server, Slo, Stop, Wish, Workload};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch::Sender;
use watch::Screen;

/// As of a process that a signal ended.
const INTERRUPTED: i32 = 130;

/// One run.
pub(crate) fn run(args: RunArgs) -> anyhow::Result<()> {
    let RunArgs {
        server,
        workload,
        rate,
        speed,
        duration,
        goal,
        measure,
    } = args;
    let parts = (&server, &workload, &measure);
    let mut told = told(parts);
    let seconds = duration.map(|span| span.as_secs_f64());
    told.extend([
        ("rate".to_owned(), json!(rate)),
        ("speed".to_owned(), json!(speed)),
        ("duration_s".to_owned(), json!(seconds)),
    ]);
    let pace = Pace {
        rate,
        speed,
        duration,
    };
    let runtime = runtime(&measure)?;
    let report = runtime.block_on(async {
        let job = job(parts, (wish(&workload, pace), None), told).await?;
        job.run(&Screen::new()).await
    })?;
    watch::print_run(&report)?;
    say_where(&report, measure.out.as_deref());
    demand(&report, goal)
}

/// # Errors
/// If fewer of a run's requests were within their targets than `goal` asks for.
fn demand(report: &Report, goal: Option<f64>) -> anyhow::Result<()> {
    for run in &report.runs {
        let (all, errors) = (&run.all, &run.errors);
        anyhow::ensure!(
            goal.is_none_or(|goal| all.attainment >= goal),
            "{} of {} requests were within their targets, fewer than --goal asks for; errors: {errors:?}",
            all.met,
            all.offered,
        );
    }
    Ok(())
}

/// A search for the highest rate, or a sweep.
pub(crate) fn goodput(args: GoodputArgs) -> anyhow::Result<()> {
    let GoodputArgs {
        server,
        workload,
        goal,
        rate,
        rates,
        max_rate,
        precision,
        requests,
        duration,
        repeats,
        time_cap,
        measure,
    } = args;
    let parts = (&server, &workload, &measure);
    let mut told = told(parts);
    told.extend([
        ("goal".to_owned(), json!(goal)),
        ("rate".to_owned(), json!(rate)),
        ("rates".to_owned(), json!(rates)),
        ("max_rate".to_owned(), json!(max_rate)),
        ("precision".to_owned(), json!(precision)),
        ("requests".to_owned(), json!(requests)),
        ("duration_s".to_owned(), json!(duration.as_secs_f64())),
        ("repeats".to_owned(), json!(repeats)),
        (
            "time_cap_s".to_owned(),
            json!(time_cap.map(|span| span.as_secs_f64())),
        ),
    ]);
    let hunt = Hunt {
        goal,
        bounds: Bounds {
            first: rate,
            max: max_rate,
            min: (rate / 1024.0).max(RATE_MIN),
            precision,
        },
        rates,
        requests_min: requests as usize,
        duration_min: duration,
        repeats,
        time_max: time_cap,
    };
    let runtime = runtime(&measure)?;
    let report = runtime.block_on(async {
        let wish = wish(&workload, Pace::default());
        let job = job(parts, (wish, Some(&hunt)), told).await?;
        job.goodput(&hunt, &Screen::with_table()?).await
    })?;
    watch::print_goodput(&report)?;
    say_where(&report, measure.out.as_deref());
    Ok(())
}

fn runtime(measure: &MeasureArgs) -> anyhow::Result<Runtime> {
    cleave_bench::raise_connections_max();
    Builder::new_multi_thread()
        .worker_threads(measure.threads as usize)
        .enable_all()
        .build()
        .context("starting the runtime")
}

/// How fast, where one run is asked for.
#[derive(Clone, Copy, Default)]
pub(crate) struct Pace {
    pub(crate) rate: Option<f64>,
    pub(crate) speed: Option<f64>,
    pub(crate) duration: Option<Duration>,
}

/// What is asked for, from a file or a text.
///
/// # Errors
/// What is wrong with either.
pub(crate) fn workload_of(args: &WorkloadArgs) -> anyhow::Result<Workload> {
    let workload = match (&args.trace, &args.workload) {
        (Some(path), _) => Workload::from_trace(path, args.dataset.as_deref())?,
        (None, Some(spec)) => spec.parse()?,
        (None, None) => anyhow::bail!("give --trace FILE or --workload SPEC"),
    };
    match &args.class {
        Some(name) => workload.named(name),
        None => Ok(workload),
    }
}

/// Everything checked, the server found, the signal heard.
async fn job(
    (server, workload, measure): (&ServerArgs, &WorkloadArgs, &MeasureArgs),
    (wish, hunt): (Wish, Option<&Hunt>),
    told: Map<String, Value>,
) -> anyhow::Result<Job> {
    let workload = workload_of(workload)?;
    let slo = Slo::parse(&measure.slo, workload.classes())?;
    // What cannot be done is said before a server is asked.
    match hunt {
        Some(hunt) => hunt.check(&workload, &wish, &slo)?,
        None => drop(workload.schedule(&wish)?),
    }
    let target = server.target();
    let folder = measure.out.as_deref().map(Folder::create).transpose()?;
    let found = Server::find(&target).await?;
    let findings = &found.findings;
    let model = findings.model.as_deref().unwrap_or("(unnamed)");
    tracing::info!("{model} at {}: {}", server.url, findings.prompts);
    let (switch, stop) = Stop::new();
    tokio::spawn(heed(switch));
    Ok(Job {
        server: found,
        asking: target.asking,
        workload,
        wish,
        slo,
        timeout: measure.timeout,
        grace: measure.grace,
        warmup: measure.warmup.unwrap_or_default(),
        devices: measure.devices,
        configuration: Value::Object(told),
        folder,
        stop,
    })
}

/// The plan that is wanted.
pub(crate) fn wish(workload: &WorkloadArgs, pace: Pace) -> Wish {
    Wish {
        arrivals: workload.arrivals,
        rate: pace.rate,
        speed: pace.speed,
        requests: workload.limit.map(|limit| limit as usize),
        duration: pace.duration,
        scaling: Scaling {
            input: workload.input_scale,
            output: workload.output_scale,
            input_max: workload.max_input.unwrap_or(u32::MAX),
            output_max: workload.max_output.unwrap_or(u32::MAX),
            context_max: workload.max_context.unwrap_or(u32::MAX),
        },
        seed: workload.seed,
    }
}

/// The first signal ends the measurement, the second one the process.
async fn heed(switch: Sender<bool>) {
    if tokio::signal::ctrl_c().await.is_ok() {
        tracing::warn!("ending; what was measured is written (once more to leave at once)");
        switch.send_replace(true);
    }
    if tokio::signal::ctrl_c().await.is_ok() {
        std::process::exit(INTERRUPTED);
    }
}

fn say_where(report: &Report, out: Option<&Path>) {
    for note in &report.notes {
        tracing::warn!("{note}");
    }
    if let Some(out) = out {
        tracing::info!("written: {}", out.join("report.html").display());
    }
}
