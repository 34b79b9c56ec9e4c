//! A measurement: one run, or a search over rates.
//!
//! Owns: the order of runs, and the rest between them. Never: draws a request or reads an answer.
//! Invariant: no run begins while a request of an earlier one is under way.

use crate::ask::{self, Asking, class_headers};
use crate::client::Clock;
use crate::confidence::{Verdict, verdict, wilson};
use crate::prompt::{Prompt, own_key, run_salt};
use crate::record::{Outcome, Record};
use crate::result::{
    Environment, Folder, Goodput, Judging, Kind, Report, RunReport, SCHEMA, Try, errors, timeline,
};
use crate::run::{Cut, Progress, Rules, Run, Runner, Stop};
use crate::schedule::{Planned, Wish};
use crate::search::{Bounds, Search};
use crate::server::Server;
use crate::slo::{Slo, Targets};
use crate::summary::Scope;
use crate::workload::Workload;
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
/// Between two probes of a server that still works on what was taken back.
const PROBE_GAP: Duration = Duration::from_millis(100);
/// Longest wait for a server to rest between runs.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// A generator later than this share of the smallest TTFT target spoils the measurement.
const LATENESS_SHARE: f64 = 0.05;

/// What is measured, and how.
#[derive(Debug)]
pub struct Job {
    /// Which server.
    pub server: Server,
    /// As it was asked.
    pub asking: Asking,
    /// What is asked for.
    pub workload: Workload,
    /// How much of it, and when.
    pub wish: Wish,
    /// What must be kept.
    pub slo: Slo,
    /// A request that is not over so long after it was sent has failed.
    pub timeout: Duration,
    /// Requests not over so long after the last one was due are unfinished.
    pub grace: Duration,
    /// Requests due in the first so much of a run are not counted.
    pub warmup: Duration,
    /// That the server has; at least 1.
    pub devices: u32,
    /// The command line, for the report.
    pub configuration: Value,
    /// Where records go.
    pub folder: Option<Folder>,
    /// Ends everything.
    pub stop: Stop,
}

/// A search for the highest rate.
#[derive(Clone, Debug)]
pub struct Hunt {
    /// Attainment to keep, in (0, 1).
    pub goal: f64,
    /// Where to look.
    pub bounds: Bounds,
    /// Exactly these rates instead, in their order.
    pub rates: Vec<f64>,
    /// Requests of a run at least.
    pub requests_min: usize,
    /// Arrivals of a run last at least so long.
    pub duration_min: Duration,
    /// Runs at one rate at most, while its verdict is open.
    pub repeats: u32,
    /// No run begins that would end after this long.
    pub time_max: Option<Duration>,
}

impl Hunt {
    /// Whether such a search can begin.
    ///
    /// # Errors
    /// There is nothing to keep, or the workload cannot be had at the first rate.
    pub fn check(&self, workload: &Workload, wish: &Wish, slo: &Slo) -> anyhow::Result<()> {
        ensure!(
            !slo.is_empty(),
            "goodput is what meets its targets: give --slo ttft=…,tpot=…"
        );
        let first = self.rates.first().copied().unwrap_or(self.bounds.first);
        workload.schedule(&self.wish(wish, first)).map(drop)
    }

    /// Requests of a run at this rate.
    fn requests(&self, rate: f64) -> usize {
        let due = (rate * self.duration_min.as_secs_f64()).ceil() as usize;
        self.requests_min.max(due)
    }

    /// What is wanted at this rate, of what is wanted at all.
    fn wish(&self, all: &Wish, rate: f64) -> Wish {
        let most = all.requests.unwrap_or(usize::MAX);
        Wish {
            rate: Some(rate),
            requests: Some(most.min(self.requests(rate))),
            duration: None,
            ..*all
        }
    }
}

/// Told while a measurement goes on.
pub trait Watch: Send + Sync {
    /// Several times a second during a run.
    fn progress(&self, progress: &Progress);
    /// Before each run: its rate and how many requests it has.
    fn begins(&self, rate: f64, planned: usize);
    /// After each rate of a search.
    fn tried(&self, tried: &Try);
}

impl Job {
    /// One run.
    ///
    /// # Errors
    /// The workload cannot be had as wished, the server does not answer, or nothing can be written.
    pub async fn run(mut self, watch: &dyn Watch) -> anyhow::Result<Report> {
        let mut session = self.session().await?;
        let (wish, goal) = (self.wish, None);
        self.once(&mut session, watch, (&wish, goal)).await?;
        let report = session.report(&self, Kind::Run);
        self.write(&report)?;
        Ok(report)
    }

    /// A search over rates.
    ///
    /// # Errors
    /// As of [`Self::run`].
    pub async fn goodput(mut self, hunt: &Hunt, watch: &dyn Watch) -> anyhow::Result<Report> {
        hunt.check(&self.workload, &self.wish, &self.slo)?;
        let mut session = self.session().await?;
        let mut search = Search::new(hunt.bounds);
        let mut given = hunt.rates.iter().copied();
        loop {
            let rate = match hunt.rates.is_empty() {
                true => search.next(),
                false => given.next(),
            };
            let Some(rate) = rate else {
                session.complete = true;
                break;
            };
            let Some(tried) = self.attempt(&mut session, watch, (hunt, rate)).await? else {
                break;
            };
            match tried.kept {
                true => search.kept(rate),
                false => search.broken(rate),
            }
            watch.tried(&tried);
            session.tries.push(tried);
        }
        session.goodput = Some(session.found(hunt, self.devices));
        let report = session.report(&self, Kind::Goodput);
        self.write(&report)?;
        Ok(report)
    }

    /// Runs at one rate until it is decided; `None` if time or the user ended it before.
    async fn attempt(
        &mut self,
        session: &mut Session,
        watch: &dyn Watch,
        (hunt, rate): (&Hunt, f64),
    ) -> anyhow::Result<Option<Try>> {
        let requests = hunt.requests(rate);
        let (mut met, mut decided, mut runs, mut seconds) = (0, 0, Vec::new(), 0.0);
        loop {
            let takes = Duration::from_secs_f64(requests as f64 / rate);
            let late = |max| session.began.elapsed() + takes > max;
            let is_repeat = !runs.is_empty();
            if self.stop.is_set() || hunt.time_max.is_some_and(late) {
                match is_repeat {
                    true => break,
                    false => return Ok(None),
                }
            }
            let wish = Wish {
                seed: self.wish.seed.wrapping_add(session.runs.len() as u64),
                ..hunt.wish(&self.wish, rate)
            };
            // A sweep is to show whole runs.
            let goal = hunt.rates.is_empty().then_some(hunt.goal);
            self.once(session, watch, (&wish, goal)).await?;
            let run = session.runs.last().context("a run was made")?;
            met += run.all.met;
            decided += run.all.offered - run.all.undecided;
            seconds += run.span_s - self.warmup.as_secs_f64().min(run.span_s);
            runs.push(session.runs.len() - 1);
            let cut = run.cut;
            if cut == Some(Cut::Interrupted) {
                return Ok(None);
            }
            let open = verdict(met, decided, hunt.goal) == Verdict::Open && cut.is_none();
            if !open || runs.len() >= hunt.repeats as usize {
                break;
            }
        }
        let attainment = met as f64 / decided.max(1) as f64;
        let last = session.runs.last().context("a run was made")?;
        let hopeless = last.cut == Some(Cut::Hopeless);
        let verdict = match hopeless {
            true => Verdict::Broken,
            false => verdict(met, decided, hunt.goal),
        };
        Ok(Some(Try {
            rate,
            met,
            decided,
            attainment,
            attainment_interval: wilson(met, decided),
            verdict,
            kept: verdict == Verdict::Kept || (verdict == Verdict::Open && attainment >= hunt.goal),
            goodput_rps: met as f64 / seconds.max(1e-3),
            ttft_ms: [last.all.ttft_ms.p50, last.all.ttft_ms.p99],
            tpot_ms: [last.all.tpot_ms.p50, last.all.tpot_ms.p99],
            runs,
        }))
    }

    /// One run, from a server at rest.
    async fn once(
        &mut self,
        session: &mut Session,
        watch: &dyn Watch,
        (wish, goal): (&Wish, Option<f64>),
    ) -> anyhow::Result<()> {
        let index = session.runs.len();
        let schedule = self.workload.schedule(wish)?;
        if index > 0 {
            self.settle(session).await;
        } else {
            self.foresee(session, schedule.context_max());
        }
        let (planned, rate) = (schedule.count(), wish.rate.unwrap_or(schedule.rate()));
        let classes = self.workload.classes().to_vec();
        let rules = Rules {
            timeout: self.timeout,
            grace: self.grace,
            warmup: self.warmup,
            targets: session.targets.clone(),
            headers: class_headers(&self.asking, &self.slo, &classes)?,
            salt: run_salt(self.wish.seed, index as u32),
            goal,
        };
        let uri = self.server.client.uri(self.asking.endpoint.path())?;
        watch.begins(rate, planned);
        let runner = Runner {
            server: &self.server,
            rules: &rules,
            stop: self.stop.clone(),
            tell: &|progress| watch.progress(progress),
        };
        let run = runner.run(schedule, uri).await;
        let judging = Judging {
            classes: &classes,
            targets: &session.targets,
            warmup: self.warmup,
        };
        if let Some(folder) = &mut self.folder {
            folder.add(index, &run, judging)?;
        }
        let report = self.report_of(&run, &session.targets, (rate, planned, wish.seed));
        session.note_of(&report);
        session.runs.push(report);
        Ok(())
    }

    fn report_of(
        &self,
        run: &Run,
        targets: &[Targets],
        (rate, planned, seed): (f64, usize, u64),
    ) -> RunReport {
        let classes = self.workload.classes();
        let scope = Scope {
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

    /// Makes sure that the server answers, and how fast while it does nothing else.
    async fn session(&self) -> anyhow::Result<Session> {
        let mut took = Vec::new();
        for _ in 0..PROBES {
            match self.probe().await? {
                (Outcome::Done, span) => took.push(span),
                (outcome, _) => bail!(
                    "the server does not answer a prompt of {PROBE_TOKENS} tokens: {outcome:?}"
                ),
            }
        }
        took.remove(0);
        took.sort_unstable();
        let classes = self.workload.classes().iter();
        Ok(Session {
            began: Instant::now(),
            started: SystemTime::now(),
            idle: took[took.len() / 2],
            targets: classes.map(|class| self.slo.of(class)).collect(),
            runs: Vec::new(),
            tries: Vec::new(),
            complete: false,
            goodput: None,
            notes: Vec::new(),
        })
    }

    async fn probe(&self) -> anyhow::Result<(Outcome, Duration)> {
        let prompt = Prompt::unique(own_key(u64::MAX), PROBE_TOKENS);
        let planned = Planned {
            at: Time::ZERO,
            class: 0,
            prompt,
            output: 1,
        };
        let mut request = Request::new(Full::new(self.server.writer.body(&planned, 0)));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.server.client.uri(self.asking.endpoint.path())?;
        *request.headers_mut() = ask::headers(&self.asking)?;
        let clock = Clock(Instant::now());
        let mut record = Record::new(0, 0, Time::ZERO);
        let stream = self.server.client.stream(request, (clock, &mut record));
        let outcome = tokio::time::timeout(self.timeout, stream).await;
        let outcome = outcome.unwrap_or(Outcome::Unfinished);
        Ok((outcome, clock.now().since(Time::ZERO)))
    }

    /// Until a probe is answered as fast as at rest: what was taken back from the server at a run's end
    /// may keep it busy for a while.
    async fn settle(&self, session: &mut Session) {
        let from = Instant::now();
        let enough = 2 * session.idle + Duration::from_millis(20);
        let mut stop = self.stop.clone();
        while from.elapsed() < SETTLE_MAX && !stop.is_set() {
            let probed = self.probe().await;
            if probed.is_ok_and(|(outcome, took)| outcome == Outcome::Done && took <= enough) {
                return;
            }
            tokio::select! {
                () = stop.wait() => return,
                () = tokio::time::sleep(PROBE_GAP) => {}
            }
        }
        session.note(format!(
            "before run {} the server was not at rest within {} s",
            session.runs.len(),
            SETTLE_MAX.as_secs()
        ));
    }

    /// Says beforehand what will be refused.
    fn foresee(&self, session: &mut Session, longest: u32) {
        let context = self.server.findings.context_max;
        if let Some(context) = context.filter(|context| longest > *context) {
            session.note(format!(
                "the longest request has {longest} tokens and the model's context {context}: --max-context {context} would cut it"
            ));
        }
    }

    fn write(&self, report: &Report) -> anyhow::Result<()> {
        let folder = self.folder.as_ref();
        folder.map_or(Ok(()), |folder| folder.finish(report))
    }
}

/// What was found so far.
struct Session {
    began: Instant,
    started: SystemTime,
    /// How long a server at rest takes for a probe.
    idle: Duration,
    /// By class.
    targets: Vec<Targets>,
    runs: Vec<RunReport>,
    tries: Vec<Try>,
    /// A search came to its end by itself.
    complete: bool,
    goodput: Option<Goodput>,
    notes: Vec<String>,
}

impl Session {
    fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// What a reader should know of a run.
    fn note_of(&mut self, run: &RunReport) {
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
                "run {index}: {} of {} answers are not as long as was asked for",
                all.outputs_differ, all.done
            ));
        }
        if all.inputs_differ > 0 {
            notes.push(format!(
                "run {index}: {} of {} prompts were counted more than 2 % otherwise than meant",
                all.inputs_differ, all.done
            ));
        }
        if all.chunks_differ > 0 {
            notes.push(format!(
                "run {index}: {} of {} answers have another number of chunks than of tokens: gaps are between chunks, TPOT is per token as the server counts",
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
            self.note(note);
        }
    }

    /// The highest rate that kept the goal below all that broke it.
    fn found(&self, hunt: &Hunt, devices: u32) -> Goodput {
        let rates = |kept: bool| self.tries.iter().filter(move |tried| tried.kept == kept);
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
        Goodput {
            goal: hunt.goal,
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

    fn report(self, job: &Job, kind: Kind) -> Report {
        let started = self.started.duration_since(UNIX_EPOCH);
        Report {
            schema: SCHEMA,
            kind,
            version: env!("CARGO_PKG_VERSION"),
            started_unix_s: started.map_or(0, |since| since.as_secs()),
            took_s: self.began.elapsed().as_secs_f64(),
            interrupted: job.stop.is_set(),
            configuration: job.configuration.clone(),
            environment: Environment::here(),
            server: job.server.findings.clone(),
            notes: self.notes,
            goodput: self.goodput,
            tries: self.tries,
            runs: self.runs,
        }
    }
}
