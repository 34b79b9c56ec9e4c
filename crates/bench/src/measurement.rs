//! A measurement: one run, or a search over rates.
//!
//! Owns: the order of runs, and the pauses between them. Never: draws a request or reads an answer.
//! Invariant: no run begins while a request of an earlier one is in flight.

use crate::client::RunClock;
use crate::confidence::{GoalVerdict, verdict, wilson};
use crate::prompt::{PromptPlan, run_salt, unique_key};
use crate::record::{RequestMeasurement, RequestOutcome};
use crate::request::{self, RequestOptions, class_headers};
use crate::result::{
    BenchReport, GoodputResult, JudgingRules, LoadMachine, RateResult, ReportKind, ResultFolder,
    RunReport, SCHEMA, errors, timeline,
};
use crate::run::{CutReason, InterruptSignal, RunProgress, RunRecords, RunRules, ScheduleRunner};
use crate::schedule::{PlannedRequest, ScheduleOptions};
use crate::search::{RateBisection, RateBounds};
use crate::server::MeasuredServer;
use crate::slo::{SloSet, SloTargets};
use crate::summary::SummaryScope;
use crate::workload::BenchWorkload;
use anyhow::{Context, bail, ensure};
use cleave_domain::Time;
use http_body_util::Full;
use hyper::{Method, Request};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Probes before the first run; the first one opens a connection.
const PROBES: usize = 4;
/// A probe's prompt, in tokens.
const PROBE_TOKENS: u32 = 4;
/// Pause between two probes of a server that still works on cancelled requests.
const PROBE_GAP: Duration = Duration::from_millis(100);
/// Longest wait for a server to become idle between runs.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// A generator later than this share of the smallest TTFT target spoils the measurement.
const LATENESS_SHARE: f64 = 0.05;

/// The settings of a measurement.
#[derive(Debug)]
pub struct BenchJob {
    pub server: MeasuredServer,
    /// Request options that the server was probed with.
    pub request_options: RequestOptions,
    /// The requests of the workload.
    pub workload: BenchWorkload,
    /// Amount, rate and times of the requests.
    pub schedule_options: ScheduleOptions,
    /// The SLO targets of the classes.
    pub slo: SloSet,
    /// A request that takes longer than this after it was sent has failed.
    pub timeout: Duration,
    /// Requests still open this long after the last one was due are unfinished.
    pub grace: Duration,
    /// Requests due in this first part of a run are not counted.
    pub warmup: Duration,
    /// Devices of the server; at least 1.
    pub devices: u32,
    /// The command line, for the report.
    pub configuration: Value,
    pub folder: Option<ResultFolder>,
    /// Interrupts the whole measurement.
    pub stop: InterruptSignal,
}

/// A search for the highest rate.
#[derive(Clone, Debug)]
pub struct GoodputSearch {
    /// Attainment to reach, in (0, 1).
    pub goal: f64,
    pub bounds: RateBounds,
    /// Exactly these rates instead, in their order.
    pub rates: Vec<f64>,
    /// Fewest requests of a run.
    pub requests_min: usize,
    /// Shortest duration of a run's arrivals.
    pub duration_min: Duration,
    /// Most runs at one rate, while its verdict is open.
    pub repeats: u32,
    /// No run begins that would end after this long.
    pub time_max: Option<Duration>,
}

impl GoodputSearch {
    /// Checks that the search can begin.
    ///
    /// # Errors
    /// No class has a target, or the workload has no schedule at the first rate.
    pub fn check(
        &self,
        workload: &BenchWorkload,
        options: &ScheduleOptions,
        slo: &SloSet,
    ) -> anyhow::Result<()> {
        ensure!(
            !slo.is_empty(),
            "goodput needs SLO targets: give --slo ttft=…,tpot=…"
        );
        let first = self.rates.first().copied().unwrap_or(self.bounds.first);
        workload
            .schedule(&self.options_at(options, first))
            .map(drop)
    }

    /// Requests of a run at this rate.
    pub(crate) fn requests_at(&self, rate: f64) -> usize {
        let due = (rate * self.duration_min.as_secs_f64()).ceil() as usize;
        self.requests_min.max(due)
    }

    /// The schedule options at this rate.
    fn options_at(&self, all: &ScheduleOptions, rate: f64) -> ScheduleOptions {
        let most = all.requests.unwrap_or(usize::MAX);
        ScheduleOptions {
            rate: Some(rate),
            requests: Some(most.min(self.requests_at(rate))),
            duration: None,
            ..*all
        }
    }
}

/// Receives progress during a measurement.
pub trait ProgressObserver: Send + Sync {
    /// Several times a second during a run.
    fn run_progresses(&self, progress: &RunProgress);
    /// Before each run: its rate and how many requests it has.
    fn run_begins(&self, rate: f64, planned: usize);
    /// After each rate of a search.
    fn rate_tried(&self, tried: &RateResult);
}

impl BenchJob {
    /// Measures one run.
    ///
    /// # Errors
    /// The workload has no such schedule, the server does not answer, or nothing can be written.
    pub async fn run(mut self, observer: &dyn ProgressObserver) -> anyhow::Result<BenchReport> {
        let mut session = self.session().await?;
        let (options, goal) = (self.schedule_options, None);
        self.run_once(&mut session, observer, &options, goal)
            .await?;
        let report = session.report(&self, ReportKind::Run);
        self.write(&report)?;
        Ok(report)
    }

    /// Searches over rates.
    ///
    /// # Errors
    /// As of [`Self::run`].
    pub async fn goodput(
        mut self,
        search: &GoodputSearch,
        observer: &dyn ProgressObserver,
    ) -> anyhow::Result<BenchReport> {
        search.check(&self.workload, &self.schedule_options, &self.slo)?;
        let mut session = self.session().await?;
        let mut bisection = RateBisection::new(search.bounds);
        let mut given = search.rates.iter().copied();
        loop {
            let rate = if search.rates.is_empty() {
                bisection.next()
            } else {
                given.next()
            };
            let Some(rate) = rate else {
                session.complete = true;
                break;
            };
            let Some(tried) = self.try_rate(&mut session, observer, search, rate).await? else {
                break;
            };
            if tried.kept {
                bisection.record_met(rate)
            } else {
                bisection.record_missed(rate)
            }
            observer.rate_tried(&tried);
            session.tries.push(tried);
        }
        session.goodput = Some(session.goodput_found(search, self.devices));
        let report = session.report(&self, ReportKind::Goodput);
        self.write(&report)?;
        Ok(report)
    }

    /// Runs at one rate until the verdict is decided; `None` if time or the user ended it first.
    async fn try_rate(
        &mut self,
        session: &mut BenchSession,
        observer: &dyn ProgressObserver,
        search: &GoodputSearch,
        rate: f64,
    ) -> anyhow::Result<Option<RateResult>> {
        let requests = search.requests_at(rate);
        let (mut met, mut decided, mut runs, mut seconds) = (0, 0, Vec::new(), 0.0);
        loop {
            let takes = Duration::from_secs_f64(requests as f64 / rate);
            let late = |max| session.began.elapsed() + takes > max;
            let is_repeat = !runs.is_empty();
            if self.stop.is_requested() || search.time_max.is_some_and(late) {
                if is_repeat { break } else { return Ok(None) }
            }
            let options = ScheduleOptions {
                seed: self
                    .schedule_options
                    .seed
                    .wrapping_add(session.runs.len() as u64),
                ..search.options_at(&self.schedule_options, rate)
            };
            // A sweep over given rates shows complete runs, so they are not cut.
            let goal = search.rates.is_empty().then_some(search.goal);
            self.run_once(session, observer, &options, goal).await?;
            let run = session.runs.last().context("a run was made")?;
            met += run.all.met;
            decided += run.all.offered - run.all.undecided;
            seconds += run.span_s - self.warmup.as_secs_f64().min(run.span_s);
            runs.push(session.runs.len() - 1);
            let cut = run.cut;
            if cut == Some(CutReason::Interrupted) {
                return Ok(None);
            }
            // An open verdict is worth another run at this rate, unless the run was cut.
            let open = verdict(met, decided, search.goal) == GoalVerdict::Open && cut.is_none();
            if !open || runs.len() >= search.repeats as usize {
                break;
            }
        }
        let attainment = met as f64 / decided.max(1) as f64;
        let last = session.runs.last().context("a run was made")?;
        let is_unreachable = last.cut == Some(CutReason::Hopeless);
        let verdict = if is_unreachable {
            GoalVerdict::Broken
        } else {
            verdict(met, decided, search.goal)
        };
        Ok(Some(RateResult {
            rate,
            met,
            decided,
            attainment,
            attainment_interval: wilson(met, decided),
            verdict,
            kept: verdict == GoalVerdict::Kept
                || (verdict == GoalVerdict::Open && attainment >= search.goal),
            goodput_rps: met as f64 / seconds.max(1e-3),
            ttft_ms: [last.all.ttft_ms.p50, last.all.ttft_ms.p99],
            tpot_ms: [last.all.tpot_ms.p50, last.all.tpot_ms.p99],
            runs,
        }))
    }

    /// One run, begun when the server is idle.
    async fn run_once(
        &mut self,
        session: &mut BenchSession,
        observer: &dyn ProgressObserver,
        options: &ScheduleOptions,
        goal: Option<f64>,
    ) -> anyhow::Result<()> {
        let index = session.runs.len();
        let schedule = self.workload.schedule(options)?;
        if index > 0 {
            self.wait_until_idle(session).await;
        } else {
            self.note_context_limit(session, schedule.context_max());
        }
        let (planned, rate) = (schedule.count(), options.rate.unwrap_or(schedule.rate()));
        let classes = self.workload.classes().to_vec();
        let rules = RunRules {
            timeout: self.timeout,
            grace: self.grace,
            warmup: self.warmup,
            targets: session.targets.clone(),
            headers: class_headers(&self.request_options, &self.slo, &classes)?,
            salt: run_salt(self.schedule_options.seed, index as u32),
            goal,
        };
        let uri = self
            .server
            .client
            .uri(self.request_options.endpoint.path())?;
        observer.run_begins(rate, planned);
        let runner = ScheduleRunner {
            server: &self.server,
            rules: &rules,
            stop: self.stop.clone(),
            on_progress: &|progress| observer.run_progresses(progress),
        };
        let run = runner.run(schedule, uri).await;
        let judging_rules = JudgingRules {
            classes: &classes,
            targets: &session.targets,
            warmup: self.warmup,
        };
        if let Some(folder) = &mut self.folder {
            folder.add(index, &run, judging_rules)?;
        }
        let report = self.report_of(&run, &session.targets, rate, planned, options.seed);
        session.add_run_notes(&report);
        session.runs.push(report);
        Ok(())
    }

    fn report_of(
        &self,
        run: &RunRecords,
        targets: &[SloTargets],
        rate: f64,
        planned: usize,
        seed: u64,
    ) -> RunReport {
        let classes = self.workload.classes();
        let scope = SummaryScope {
            classes,
            targets,
            warmup: self.warmup,
            devices: self.devices,
        };
        let (all, by_class) = scope.summarize(run);
        let named = classes.iter().zip(targets);
        RunReport {
            rate,
            seed,
            planned,
            span_s: run.span.as_secs_f64(),
            took_s: run.took.as_secs_f64(),
            cut: run.cut,
            all,
            classes: by_class,
            targets: named
                .map(|(class, targets)| (class.clone(), (*targets).into()))
                .collect(),
            errors: errors(run),
            timeline: timeline(run, targets),
        }
    }

    /// Checks that the server answers, and measures its idle answer time.
    async fn session(&self) -> anyhow::Result<BenchSession> {
        let mut took = Vec::new();
        for _ in 0..PROBES {
            match self.probe().await? {
                (RequestOutcome::Done, span) => took.push(span),
                (outcome, _) => bail!(
                    "the server does not answer a prompt of {PROBE_TOKENS} tokens: {outcome:?}"
                ),
            }
        }
        took.remove(0);
        took.sort_unstable();
        let classes = self.workload.classes().iter();
        Ok(BenchSession {
            began: Instant::now(),
            started: SystemTime::now(),
            idle_probe_time: took[took.len() / 2],
            targets: classes.map(|class| self.slo.of(class)).collect(),
            runs: Vec::new(),
            tries: Vec::new(),
            complete: false,
            goodput: None,
            notes: Vec::new(),
        })
    }

    async fn probe(&self) -> anyhow::Result<(RequestOutcome, Duration)> {
        let prompt = PromptPlan::unique(unique_key(u64::MAX), PROBE_TOKENS);
        let planned = PlannedRequest {
            at: Time::ZERO,
            class: 0,
            prompt,
            output: 1,
        };
        let mut request = Request::new(Full::new(self.server.writer.body(&planned, 0)));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self
            .server
            .client
            .uri(self.request_options.endpoint.path())?;
        *request.headers_mut() = request::headers(&self.request_options)?;
        let clock = RunClock(Instant::now());
        let mut record = RequestMeasurement::new(0, 0, Time::ZERO);
        let stream = self.server.client.stream(request, clock, &mut record);
        let outcome = tokio::time::timeout(self.timeout, stream).await;
        let outcome = outcome.unwrap_or(RequestOutcome::Unfinished);
        Ok((outcome, clock.now().since(Time::ZERO)))
    }

    /// Waits until a probe is answered as fast as by an idle server: cancelled requests of the last
    /// run may keep the server busy.
    async fn wait_until_idle(&self, session: &mut BenchSession) {
        let from = Instant::now();
        let enough = 2 * session.idle_probe_time + Duration::from_millis(20);
        let mut stop = self.stop.clone();
        while from.elapsed() < SETTLE_MAX && !stop.is_requested() {
            let probed = self.probe().await;
            if probed.is_ok_and(|(outcome, took)| outcome == RequestOutcome::Done && took <= enough)
            {
                return;
            }
            tokio::select! {
                () = stop.wait() => return,
                () = tokio::time::sleep(PROBE_GAP) => {}
            }
        }
        session.add_note(format!(
            "before run {} the server was not idle within {} s",
            session.runs.len(),
            SETTLE_MAX.as_secs()
        ));
    }

    /// Notes requests that the server will refuse for their length.
    fn note_context_limit(&self, session: &mut BenchSession, longest: u32) {
        let context = self.server.facts.context_max;
        if let Some(context) = context.filter(|context| longest > *context) {
            session.add_note(format!(
                "the longest request has {longest} tokens and the model's context {context}: --max-context {context} would cut it"
            ));
        }
    }

    fn write(&self, report: &BenchReport) -> anyhow::Result<()> {
        let folder = self.folder.as_ref();
        folder.map_or(Ok(()), |folder| folder.finish(report))
    }
}

/// Runs, rates and notes measured so far.
struct BenchSession {
    began: Instant,
    started: SystemTime,
    /// Time of a probe on an idle server.
    idle_probe_time: Duration,
    /// SLO targets by class.
    targets: Vec<SloTargets>,
    runs: Vec<RunReport>,
    tries: Vec<RateResult>,
    /// The search ended by itself.
    complete: bool,
    goodput: Option<GoodputResult>,
    notes: Vec<String>,
}

impl BenchSession {
    fn add_note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Adds the notes that a reader of a run needs.
    fn add_run_notes(&mut self, run: &RunReport) {
        let (all, index) = (&run.all, self.runs.len());
        let smallest = self.targets.iter().filter_map(|targets| targets.ttft).min();
        let allowed = smallest.map_or(20.0, |ttft| ttft.as_secs_f64() * 1e3 * LATENESS_SHARE);
        let mut notes = Vec::new();
        if all.lateness_ms.p99 > allowed {
            notes.push(format!(
                "run {index}: the generator itself was late (p99 {:.1} ms): give it a core, or lower the rate",
                all.lateness_ms.p99
            ));
        }
        if all.outputs_differ > 0 {
            notes.push(format!(
                "run {index}: {} of {} answers are not as long as requested",
                all.outputs_differ, all.done
            ));
        }
        if all.inputs_differ > 0 {
            notes.push(format!(
                "run {index}: {} of {} prompts have a token count on the server that is more than 2 % off the plan",
                all.inputs_differ, all.done
            ));
        }
        if all.chunks_differ > 0 {
            notes.push(format!(
                "run {index}: {} of {} answers have a number of chunks that differs from their number of tokens: gaps are between chunks, TPOT is per token by the server's count",
                all.chunks_differ, all.done
            ));
        }
        if all.asked_again > 0 {
            notes.push(format!(
                "run {index}: {} of {} requests were sent once more: the server had closed the connection that was kept for them",
                all.asked_again, all.offered
            ));
        }
        if let Some((text, count)) = run.errors.iter().max_by_key(|(_, count)| **count) {
            notes.push(format!("run {index}: failed {count} times: {text}"));
        }
        for note in notes {
            self.add_note(note);
        }
    }

    /// The highest rate that met the goal, below all rates that missed it.
    fn goodput_found(&self, search: &GoodputSearch, devices: u32) -> GoodputResult {
        let rates = |is_met: bool| self.tries.iter().filter(move |tried| tried.kept == is_met);
        let broken = rates(false).map(|tried| tried.rate).reduce(f64::min);
        let best = rates(true)
            .filter(|tried| broken.is_none_or(|broken| tried.rate < broken))
            .max_by(|a, b| a.rate.total_cmp(&b.rate));
        let runs = best.map_or(&[][..], |best| &best.runs);
        let mut by_class: BTreeMap<String, f64> = BTreeMap::new();
        for run in runs.iter().map(|index| &self.runs[*index]) {
            for (class, summary) in &run.classes {
                let share = summary.goodput_rps / runs.len() as f64;
                *by_class.entry(class.clone()).or_default() += share;
            }
        }
        let goodput_rps = best.map_or(0.0, |best| best.goodput_rps);
        GoodputResult {
            goal: search.goal,
            rate_max: best.map(|best| best.rate),
            rate_broken: broken,
            attainment: best.map_or(0.0, |best| best.attainment),
            attainment_interval: best.map_or(wilson(0, 0), |best| best.attainment_interval),
            goodput_rps,
            goodput_rps_per_device: goodput_rps / f64::from(devices),
            goodput_rps_by_class: by_class,
            devices,
            complete: self.complete,
        }
    }

    fn report(self, job: &BenchJob, kind: ReportKind) -> BenchReport {
        let started = self.started.duration_since(UNIX_EPOCH);
        BenchReport {
            schema: SCHEMA,
            kind,
            version: env!("CARGO_PKG_VERSION"),
            started_unix_s: started.map_or(0, |since| since.as_secs()),
            took_s: self.began.elapsed().as_secs_f64(),
            interrupted: job.stop.is_requested(),
            configuration: job.configuration.clone(),
            environment: LoadMachine::here(),
            server: job.server.facts.clone(),
            notes: self.notes,
            goodput: self.goodput,
            tries: self.tries,
            runs: self.runs,
        }
    }
}
