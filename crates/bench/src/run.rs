//! One run: a schedule sent to a server.
//!
//! Owns: the pacing of requests. Never: lets an answer, or its absence, move a request's time.
//! Invariant: every request that was due before the end has one record.
//!
//! Two threads of their own keep the time: one writes bodies ahead, one waits for each time (a
//! runtime's timers are a millisecond coarse) and hands the request over. The runtime reads the
//! answers.

use crate::client::{BenchClient, RunClock};
use crate::confidence::{GoalVerdict, verdict};
use crate::record::{RequestFailure, RequestMeasurement, RequestOutcome, RequestTokens};
use crate::request::BodyWriter;
use crate::schedule::RequestSchedule;
use crate::server::MeasuredServer;
use crate::slo::SloTargets;
use bytes::Bytes;
use cleave_domain::Time;
use http_body_util::Full;
use hyper::header::HeaderMap;
use hyper::{Method, Request, Uri};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

/// Most bodies written ahead; the longest are a megabyte.
const BODIES_AHEAD_MAX: usize = 64;
/// How often a waiting pacer checks whether the run has ended.
const PACER_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How often progress is reported.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Settings of a run.
#[derive(Clone, Debug)]
pub(crate) struct RunRules {
    /// Time limit of one request, from when it was sent.
    pub(crate) timeout: Duration,
    /// Time limit after the last request was due; requests still open then are unfinished.
    pub(crate) grace: Duration,
    /// Requests due before this time are not judged.
    pub(crate) warmup: Duration,
    /// SLO targets by class.
    pub(crate) targets: Vec<SloTargets>,
    /// Request headers by class.
    pub(crate) headers: Vec<HeaderMap>,
    /// Salt of the prompts' contents.
    pub(crate) salt: u64,
    /// The run is cut short once this attainment is unreachable.
    pub(crate) goal: Option<f64>,
}

/// The progress of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunProgress {
    /// Requests of the schedule.
    pub planned: u32,
    pub sent: u32,
    /// Requests that ended, in any way.
    pub ended: u32,
    /// Ended requests that met their targets.
    pub met: u32,
    /// Time since the run's start.
    pub took: Duration,
}

/// Why a run ended before all its requests had ended or timed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CutReason {
    /// The user interrupted the run.
    Interrupted,
    /// The goal became unreachable.
    Hopeless,
}

/// The result of a run.
#[derive(Clone, Debug)]
pub(crate) struct RunRecords {
    /// Records in the order of the schedule.
    pub(crate) records: Vec<RequestMeasurement>,
    /// Duration of the arrivals.
    pub(crate) span: Duration,
    /// Time from the start to the last end.
    pub(crate) took: Duration,
    pub(crate) cut: Option<CutReason>,
}

/// A request to end everything; the handler of the user's signal sets it.
#[derive(Clone, Debug)]
pub struct InterruptSignal(watch::Receiver<bool>);

impl InterruptSignal {
    /// A switch, and the signal that it sets when it becomes true.
    pub fn new() -> (watch::Sender<bool>, Self) {
        let (switch, stop) = watch::channel(false);
        (switch, Self(stop))
    }

    /// Whether the end was requested.
    pub fn is_requested(&self) -> bool {
        *self.0.borrow()
    }

    /// Returns when the end is requested.
    pub(crate) async fn wait(&mut self) {
        if self.0.wait_for(|set| *set).await.is_err() {
            // The switch is gone, so no request can come.
            std::future::pending::<()>().await;
        }
    }
}

/// A request ready to be sent, with its due time.
struct DueRequest {
    index: u32,
    class: usize,
    requested: RequestTokens,
    due: Time,
    request: Request<Full<Bytes>>,
}

impl DueRequest {
    fn unsent_record(&self) -> RequestMeasurement {
        let mut record = RequestMeasurement::new(self.index, self.class, self.due);
        record.requested = self.requested;
        record
    }
}

/// State that all parts of a run share.
struct RunShared {
    client: BenchClient,
    clock: RunClock,
    timeout: Duration,
    sent: AtomicU32,
    /// No more requests are sent.
    sends_closed: AtomicBool,
    /// Requests in flight are to end.
    end_requested: watch::Sender<bool>,
}

pub(crate) struct ScheduleRunner<'a> {
    pub(crate) server: &'a MeasuredServer,
    pub(crate) rules: &'a RunRules,
    pub(crate) stop: InterruptSignal,
    pub(crate) on_progress: &'a (dyn Fn(&RunProgress) + Send + Sync),
}

impl ScheduleRunner<'_> {
    pub(crate) async fn run(self, schedule: RequestSchedule, path: Uri) -> RunRecords {
        let span = schedule.span;
        let planned = schedule.count() as u32;
        let last_due = schedule.requests.last().map_or(Time::ZERO, |last| last.at);
        let shared = Arc::new(RunShared {
            client: self.server.client.clone(),
            clock: RunClock(Instant::now()),
            timeout: self.rules.timeout,
            sent: AtomicU32::new(0),
            sends_closed: AtomicBool::new(false),
            end_requested: watch::channel(false).0,
        });
        let bench = BodyLoader {
            writer: self.server.writer.clone(),
            uri: path,
            headers: self.rules.headers.clone(),
            salt: self.rules.salt,
        };
        let (due_requests, ready) = sync_channel(BODIES_AHEAD_MAX);
        let (records, mut finished) = mpsc::unbounded_channel();
        let (handle, pacing, loading) = (Handle::current(), shared.clone(), shared.clone());
        std::thread::spawn(move || bench.write_bodies(schedule, &loading, &due_requests));
        std::thread::spawn(move || send_when_due(&pacing, &ready, &handle, &records));

        let mut tally = RunTally {
            records: Vec::with_capacity(planned as usize),
            progress: RunProgress {
                planned,
                ..RunProgress::default()
            },
            missed: 0,
            rules: self.rules,
        };
        let end = last_due + self.rules.grace;
        let cut = self.collect(&shared, &mut finished, &mut tally, end).await;
        let RunTally { mut records, .. } = tally;
        // Records come in the order of their ends.
        records.sort_by_key(|record: &RequestMeasurement| record.index);
        assert!(
            cut.is_some() || records.len() == planned as usize,
            "a run that was not cut has a record of every request"
        );
        let over = records.iter().filter_map(|record| record.ended).max();
        RunRecords {
            span: match cut {
                Some(_) => span.min(shared.clock.now().since(Time::ZERO)),
                None => span,
            },
            took: over.unwrap_or_default().since(Time::ZERO),
            records,
            cut,
        }
    }

    /// Collects records until every sent request has ended, or was made to end.
    async fn collect(
        &self,
        shared: &RunShared,
        finished: &mut mpsc::UnboundedReceiver<RequestMeasurement>,
        tally: &mut RunTally<'_>,
        end: Time,
    ) -> Option<CutReason> {
        let mut stop = self.stop.clone();
        let mut cut = None;
        let mut tick = tokio::time::interval(PROGRESS_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                record = finished.recv() => match record {
                    Some(record) => {
                        tally.add(record);
                        // Once everything was sent, unfinished requests are misses and do not cut
                        // the run.
                        let open = !shared.sends_closed.load(Ordering::Relaxed);
                        if open && tally.goal_is_unreachable() {
                            cut = Some(CutReason::Hopeless);
                            shared.end();
                        }
                    }
                    None => break,
                },
                () = stop.wait(), if cut.is_none() => {
                    cut = Some(CutReason::Interrupted);
                    shared.end();
                }
                _ = tick.tick() => {
                    tally.progress.sent = shared.sent.load(Ordering::Relaxed);
                    tally.progress.took = shared.clock.now().since(Time::ZERO);
                    (self.on_progress)(&tally.progress);
                    if shared.clock.now() >= end {
                        shared.end();
                    }
                }
            }
        }
        tally.progress.sent = shared.sent.load(Ordering::Relaxed);
        (self.on_progress)(&tally.progress);
        cut
    }
}

struct RunTally<'a> {
    records: Vec<RequestMeasurement>,
    progress: RunProgress,
    /// Misses after the warm-up.
    missed: u32,
    rules: &'a RunRules,
}

impl RunTally<'_> {
    fn add(&mut self, record: RequestMeasurement) {
        let is_met = self.rules.targets[record.class].judge(&record).is_ok();
        self.progress.ended += 1;
        self.progress.met += u32::from(is_met);
        let judged = record.due >= Time::ZERO + self.rules.warmup;
        self.missed += u32::from(judged && !is_met);
        self.records.push(record);
    }

    /// Whether the goal is missed even if all remaining requests meet their targets.
    fn goal_is_unreachable(&self) -> bool {
        let planned = self.progress.planned;
        let most = planned - self.missed;
        let ends = |goal| verdict(most.into(), planned.into(), goal) == GoalVerdict::Broken;
        self.rules.goal.is_some_and(ends)
    }
}

impl RunShared {
    /// Sends nothing more and ends requests in flight.
    fn end(&self) {
        self.sends_closed.store(true, Ordering::Relaxed);
        self.end_requested.send_replace(true);
    }

    /// Waits until the time; false if nothing more is to be sent.
    fn wait_until_due(&self, due: Time) -> bool {
        loop {
            if self.sends_closed.load(Ordering::Relaxed) {
                return false;
            }
            let wait = due.since(self.clock.now());
            if wait.is_zero() {
                return true;
            }
            std::thread::sleep(wait.min(PACER_POLL_INTERVAL));
        }
    }

    async fn send_request(self: Arc<Self>, due_request: DueRequest) -> RequestMeasurement {
        let mut record = due_request.unsent_record();
        let mut over = self.end_requested.subscribe();
        record.sent = Some(self.clock.now());
        let stream = self
            .client
            .stream(due_request.request, self.clock, &mut record);
        record.outcome = tokio::select! {
            outcome = stream => outcome,
            _ = over.wait_for(|over| *over) => RequestOutcome::Unfinished,
            () = tokio::time::sleep(self.timeout) => RequestOutcome::Failed {
                kind: RequestFailure::Timeout,
                text: format!("no complete answer after {} s", self.timeout.as_secs_f64()),
            },
        };
        record.ended = Some(self.clock.now());
        record
    }
}

struct BodyLoader {
    writer: BodyWriter,
    uri: Uri,
    headers: Vec<HeaderMap>,
    salt: u64,
}

impl BodyLoader {
    fn write_bodies(
        &self,
        schedule: RequestSchedule,
        shared: &RunShared,
        due_requests: &SyncSender<DueRequest>,
    ) {
        for (index, planned) in schedule.requests.into_iter().enumerate() {
            // A request that is no longer sent is counted all the same.
            let body = if shared.sends_closed.load(Ordering::Relaxed) {
                Bytes::new()
            } else {
                self.writer.body(&planned, self.salt)
            };
            let mut request = Request::new(Full::new(body));
            *request.method_mut() = Method::POST;
            *request.uri_mut() = self.uri.clone();
            *request.headers_mut() = self.headers[planned.class].clone();
            let due_request = DueRequest {
                index: index as u32,
                class: planned.class,
                requested: RequestTokens {
                    input: planned.prompt.tokens(),
                    output: planned.output,
                },
                due: planned.at,
                request,
            };
            if due_requests.send(due_request).is_err() {
                return;
            }
        }
    }
}

/// Sends each request at its due time.
fn send_when_due(
    shared: &Arc<RunShared>,
    due_requests: &Receiver<DueRequest>,
    handle: &Handle,
    records: &mpsc::UnboundedSender<RequestMeasurement>,
) {
    for due_request in due_requests {
        if !shared.wait_until_due(due_request.due) {
            if due_request.due > shared.clock.now() {
                return;
            }
            // A late pacer still records requests that were due, so that misses do not vanish.
            records.send(due_request.unsent_record()).ok();
            continue;
        }
        shared.sent.fetch_add(1, Ordering::Relaxed);
        let (shared, records) = (shared.clone(), records.clone());
        handle.spawn(async move {
            // The receiver is gone only if the run was given up.
            records.send(shared.send_request(due_request).await).ok();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn due_but_unsent_requests_are_recorded() {
        let shared = Arc::new(RunShared {
            client: BenchClient::new("http://127.0.0.1:1", None).unwrap(),
            clock: RunClock(Instant::now()),
            timeout: Duration::from_secs(1),
            sent: AtomicU32::new(0),
            sends_closed: AtomicBool::new(false),
            end_requested: watch::channel(false).0,
        });
        shared.end();
        let (due_requests, ready) = sync_channel(BODIES_AHEAD_MAX);
        for (index, due) in [(0, 0), (1, 0), (2, 3600)] {
            let due_request = DueRequest {
                index,
                class: 0,
                requested: RequestTokens::default(),
                due: Time::ZERO + Duration::from_secs(due),
                request: Request::new(Full::default()),
            };
            due_requests.send(due_request).unwrap();
        }
        drop(due_requests);
        let (records, mut ended) = mpsc::unbounded_channel();
        send_when_due(&shared, &ready, &Handle::current(), &records);
        drop(records);
        let mut ended_records = Vec::new();
        while let Some(record) = ended.recv().await {
            ended_records.push((record.index, record.sent, record.outcome));
        }
        let unfinished = |index| (index, None, RequestOutcome::Unfinished);
        assert_eq!(ended_records, [unfinished(0), unfinished(1)]);
    }

    #[test]
    fn a_run_is_cut_only_if_its_goal_is_unreachable() {
        let rules = RunRules {
            timeout: Duration::from_secs(1),
            grace: Duration::from_secs(1),
            warmup: Duration::from_secs(1),
            targets: vec![SloTargets::default()],
            headers: Vec::new(),
            salt: 0,
            goal: Some(0.9),
        };
        let mut tally = RunTally {
            records: Vec::new(),
            progress: RunProgress {
                planned: 100,
                ..RunProgress::default()
            },
            missed: 0,
            rules: &rules,
        };
        let missed =
            |millis: u64| RequestMeasurement::new(0, 0, Time::from_nanos(millis * 1_000_000));
        for _ in 0..50 {
            tally.add(missed(999));
        }
        assert!(!tally.goal_is_unreachable(), "the warm-up does not count");
        // Of 100, 85 may still be 0.9 with 95 % confidence (0.767 to 0.907), 84 may not (to 0.899).
        for _ in 0..15 {
            tally.add(missed(1000));
        }
        assert!(!tally.goal_is_unreachable());
        tally.add(missed(1000));
        assert!(tally.goal_is_unreachable());
    }
}
