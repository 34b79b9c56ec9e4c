//! `cleave bench run` and `cleave bench goodput`.
//!
//! Owns: the conversion of the command line into a measurement, the user's signal, and the output.
//! Never: measures.

mod args;
mod watch;

pub(crate) use args::{LoadGoodputArgs, LoadRunArgs, WorkloadArgs, parse_positive, parse_span};

use anyhow::Context;
use args::{MeasureArgs, RATE_MIN, ServerArgs, report_configuration};
use cleave_bench::{
    BenchJob, BenchReport, BenchWorkload, GoodputSearch, InterruptSignal, LengthScaling,
    MeasuredServer, RateBounds, ResultFolder, ScheduleOptions, SloSet,
};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch::Sender;
use watch::ProgressScreen;

/// Exit status of a process that a signal ended.
const INTERRUPTED: i32 = 130;

pub(crate) fn run(args: LoadRunArgs) -> anyhow::Result<()> {
    let LoadRunArgs {
        server,
        workload,
        rate,
        speed,
        duration,
        goal,
        measure,
    } = args;
    let mut configuration = report_configuration(&server, &workload, &measure);
    let seconds = duration.map(|span| span.as_secs_f64());
    configuration.extend([
        ("rate".to_owned(), json!(rate)),
        ("speed".to_owned(), json!(speed)),
        ("duration_s".to_owned(), json!(seconds)),
    ]);
    let pace = LoadPace {
        rate,
        speed,
        duration,
    };
    let runtime = runtime(&measure)?;
    let report = runtime.block_on(async {
        let options = schedule_options(&workload, pace);
        let job = prepare_job(&server, &workload, &measure, options, None, configuration).await?;
        job.run(&ProgressScreen::new()).await
    })?;
    watch::print_run(&report)?;
    report_output_files(&report, measure.out.as_deref());
    require_goal(&report, goal)
}

/// # Errors
/// If fewer of a run's requests met their targets than `goal` requires.
fn require_goal(report: &BenchReport, goal: Option<f64>) -> anyhow::Result<()> {
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

/// Runs a search for the highest rate, or a sweep.
pub(crate) fn goodput(args: LoadGoodputArgs) -> anyhow::Result<()> {
    let LoadGoodputArgs {
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
    let mut configuration = report_configuration(&server, &workload, &measure);
    configuration.extend([
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
    let search = GoodputSearch {
        goal,
        bounds: RateBounds {
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
        let options = schedule_options(&workload, LoadPace::default());
        let job = prepare_job(
            &server,
            &workload,
            &measure,
            options,
            Some(&search),
            configuration,
        )
        .await?;
        watch::print_expected_time(&search.expected_time(options.requests), time_cap)?;
        job.goodput(&search, &ProgressScreen::with_table()?).await
    })?;
    watch::print_goodput(&report)?;
    report_output_files(&report, measure.out.as_deref());
    Ok(())
}

fn runtime(measure: &MeasureArgs) -> anyhow::Result<Runtime> {
    cleave_bench::raise_connections_max();
    Builder::new_multi_thread()
        .worker_threads(measure.threads as usize)
        .enable_all()
        .build()
        .context("cannot start the runtime")
}

/// Rate, speed and duration of one run.
#[derive(Clone, Copy, Default)]
pub(crate) struct LoadPace {
    pub(crate) rate: Option<f64>,
    pub(crate) speed: Option<f64>,
    pub(crate) duration: Option<Duration>,
}

/// Reads the workload from a trace file or a text.
///
/// # Errors
/// If it is invalid.
pub(crate) fn workload_of(args: &WorkloadArgs) -> anyhow::Result<BenchWorkload> {
    let workload = match (&args.trace, &args.workload) {
        (Some(path), _) => {
            let read = BenchWorkload::from_trace(path, args.dataset.as_deref());
            read.context("--trace")?
        }
        (None, Some(spec)) => spec.parse()?,
        (None, None) => anyhow::bail!("give --trace FILE or --workload SPEC"),
    };
    match &args.class {
        Some(name) => workload.named(name),
        None => Ok(workload),
    }
}

/// Checks all input, finds the server, and listens for the signal.
async fn prepare_job(
    server: &ServerArgs,
    workload: &WorkloadArgs,
    measure: &MeasureArgs,
    options: ScheduleOptions,
    search: Option<&GoodputSearch>,
    configuration: Map<String, Value>,
) -> anyhow::Result<BenchJob> {
    let workload = workload_of(workload)?;
    let slo = SloSet::parse(&measure.slo, workload.classes())?;
    // Input errors are reported before the server is contacted.
    match search {
        Some(search) => search.check(&workload, &options, &slo)?,
        None => drop(workload.schedule(&options)?),
    }
    let target = server.target();
    let folder = measure
        .out
        .as_deref()
        .map(ResultFolder::create)
        .transpose()?;
    let found = MeasuredServer::probe(&target).await?;
    let findings = &found.facts;
    let model = findings.model.as_deref().unwrap_or("(unnamed)");
    tracing::info!("{model} at {}: {}", server.url, findings.prompts);
    let (switch, stop) = InterruptSignal::new();
    tokio::spawn(stop_on_signal(switch));
    Ok(BenchJob {
        server: found,
        request_options: target.request_options,
        workload,
        schedule_options: options,
        slo,
        timeout: measure.timeout,
        grace: measure.grace,
        warmup: measure.warmup.unwrap_or_default(),
        devices: measure.devices,
        configuration: Value::Object(configuration),
        folder,
        stop,
    })
}

/// Builds the options of the schedule.
pub(crate) fn schedule_options(workload: &WorkloadArgs, pace: LoadPace) -> ScheduleOptions {
    ScheduleOptions {
        arrivals: workload.arrivals,
        rate: pace.rate,
        speed: pace.speed,
        requests: workload.limit.map(|limit| limit as usize),
        duration: pace.duration,
        scaling: LengthScaling {
            input: workload.input_scale,
            output: workload.output_scale,
            input_max: workload.max_input.unwrap_or(u32::MAX),
            output_max: workload.max_output.unwrap_or(u32::MAX),
            context_max: workload.max_context.unwrap_or(u32::MAX),
        },
        seed: workload.seed,
    }
}

/// The first signal ends the measurement, the second one ends the process.
async fn stop_on_signal(switch: Sender<bool>) {
    if tokio::signal::ctrl_c().await.is_ok() {
        tracing::warn!("stopping and writing the results so far (Ctrl-C again exits at once)");
        switch.send_replace(true);
    }
    if tokio::signal::ctrl_c().await.is_ok() {
        std::process::exit(INTERRUPTED);
    }
}

fn report_output_files(report: &BenchReport, out: Option<&Path>) {
    for note in &report.notes {
        tracing::warn!("{note}");
    }
    if let Some(out) = out {
        tracing::info!("written: {}", out.join("report.html").display());
    }
}
