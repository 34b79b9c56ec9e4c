//! One run: a schedule sent to a server.
//!
//! Owns: the pace. Never: lets an answer, or its absence, move a request's time.
//! Invariant: every request that was due before the end has one record.
//!
//! Two threads of their own keep the time: one writes bodies ahead, one waits for each time (a
//! runtime's timers are a millisecond coarse) and hands the request over. Answers are read by the
//! runtime.

use crate::ask::Writer;
use crate::client::{Client, Clock};
use crate::confidence::{Verdict, verdict};
use crate::record::{Failure, Length, Outcome, Record};
use crate::schedule::Schedule;
use crate::server::Server;
use crate::slo::Targets;
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

/// Bodies written ahead; the longest are a megabyte.
const AHEAD: usize = 64;
/// How often a waiting pacer looks whether it is still wanted.
const NAP: Duration = Duration::from_millis(20);
/// How often progress is told.
const TICK: Duration = Duration::from_millis(100);

/// What holds for a run.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    /// Of one request, from when it was sent.
    pub(crate) timeout: Duration,
    /// After the last request was due: what is not over then is unfinished.
    pub(crate) grace: Duration,
    /// What is due before this is not judged.
    pub(crate) warmup: Duration,
    /// By class.
    pub(crate) targets: Vec<Targets>,
    /// By class.
    pub(crate) headers: Vec<HeaderMap>,
    /// Of the prompts' contents.
    pub(crate) salt: u64,
    /// The run is cut short once this attainment is out of reach.
    pub(crate) goal: Option<f64>,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Requests of the schedule.
    pub planned: u32,
    /// Sent so far.
    pub sent: u32,
    /// Over, whichever way.
    pub over: u32,
    /// Of these, within their targets.
    pub met: u32,
    /// Since the run's start.
    pub took: Duration,
}

/// Why a run ended before all its requests were over or had run out of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// The user asked for it.
    Interrupted,
    /// The goal was out of reach.
    Hopeless,
}

/// What a run gave.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// In the order of the schedule.
    pub(crate) records: Vec<Record>,
    /// How long arrivals lasted.
    pub(crate) span: Duration,
    /// From the start to the last end.
    pub(crate) took: Duration,
    pub(crate) cut: Option<Cut>,
}

/// Asked to end everything; set by whoever handles the user's signal.
#[derive(Clone, Debug)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    /// A switch, and what is stopped by setting it to true.
    pub fn new() -> (watch::Sender<bool>, Self) {
        let (switch, stop) = watch::channel(false);
        (switch, Self(stop))
    }

    /// Whether it was asked for.
    pub fn is_set(&self) -> bool {
        *self.0.borrow()
    }

    /// Comes when it is asked for.
    pub(crate) async fn wait(&mut self) {
        if self.0.wait_for(|set| *set).await.is_err() {
            // Nobody can ask any more.
            std::future::pending::<()>().await;
        }
    }
}

/// A request with its time.
struct Shot {
    index: u32,
    class: usize,
    asked: Length,
    due: Time,
    request: Request<Full<Bytes>>,
}

impl Shot {
    fn unsent(&self) -> Record {
        let mut record = Record::new(self.index, self.class, self.due);
        record.asked = self.asked;
        record
    }
}

/// What all parts of a run have.
struct Range {
    client: Client,
    clock: Clock,
    timeout: Duration,
    sent: AtomicU32,
    /// No more requests are to be sent.
    closed: AtomicBool,
    /// What is under way is to end.
    over: watch::Sender<bool>,
}

/// Sends a schedule.
pub(crate) struct Runner<'a> {
    pub(crate) server: &'a Server,
    pub(crate) rules: &'a Rules,
    pub(crate) stop: Stop,
    pub(crate) tell: &'a (dyn Fn(&Progress) + Send + Sync),
}

impl Runner<'_> {
    pub(crate) async fn run(self, schedule: Schedule, path: Uri) -> Run {
        let span = schedule.span;
        let planned = schedule.count() as u32;
        let last_due = schedule.requests.last().map_or(Time::ZERO, |last| last.at);
        let range = Arc::new(Range {
            client: self.server.client.clone(),
            clock: Clock(Instant::now()),
            timeout: self.rules.timeout,
            sent: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            over: watch::channel(false).0,
        });
        let bench = Loader {
            writer: self.server.writer.clone(),
            uri: path,
            headers: self.rules.headers.clone(),
            salt: self.rules.salt,
        };
        let (shots, ready) = sync_channel(AHEAD);
        let (records, mut ended) = mpsc::unbounded_channel();
        let (handle, pacing, loading) = (Handle::current(), range.clone(), range.clone());
        std::thread::spawn(move || bench.load(schedule, (&loading, &shots)));
        std::thread::spawn(move || pace(&pacing, &ready, (&handle, records)));

        let mut tally = Tally {
            records: Vec::with_capacity(planned as usize),
            progress: Progress {
                planned,
                ..Progress::default()
            },
            missed: 0,
            rules: self.rules,
        };
        let end = last_due + self.rules.grace;
        let cut = self.collect(&range, (&mut ended, &mut tally), end).await;
        let Tally { mut records, .. } = tally;
        records.sort_by_key(|record: &Record| record.index);
        assert!(
            cut.is_some() || records.len() == planned as usize,
            "all of a run that was not cut was due, and has its record"
        );
        let over = records.iter().filter_map(|record| record.over).max();
        Run {
            span: match cut {
                Some(_) => span.min(range.clock.now().since(Time::ZERO)),
                None => span,
            },
            took: over.unwrap_or_default().since(Time::ZERO),
            records,
            cut,
        }
    }

    /// Until every request that was sent is over, or made to be.
    async fn collect(
        &self,
        range: &Range,
        (ended, tally): (&mut mpsc::UnboundedReceiver<Record>, &mut Tally<'_>),
        end: Time,
    ) -> Option<Cut> {
        let mut stop = self.stop.clone();
        let mut cut = None;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                record = ended.recv() => match record {
                    Some(record) => {
                        tally.add(record);
                        // At its end a run misses what is unfinished; it is not cut by that.
                        let open = !range.closed.load(Ordering::Relaxed);
                        if open && tally.is_hopeless() {
                            cut = Some(Cut::Hopeless);
                            range.end();
                        }
                    }
                    None => break,
                },
                () = stop.wait(), if cut.is_none() => {
                    cut = Some(Cut::Interrupted);
                    range.end();
                }
                _ = tick.tick() => {
                    tally.progress.sent = range.sent.load(Ordering::Relaxed);
                    tally.progress.took = range.clock.now().since(Time::ZERO);
                    (self.tell)(&tally.progress);
                    if range.clock.now() >= end {
                        range.end();
                    }
                }
            }
        }
        tally.progress.sent = range.sent.load(Ordering::Relaxed);
        (self.tell)(&tally.progress);
        cut
    }
}

struct Tally<'a> {
    records: Vec<Record>,
    progress: Progress,
    /// After the warm-up.
    missed: u32,
    rules: &'a Rules,
}

impl Tally<'_> {
    fn add(&mut self, record: Record) {
        let kept = self.rules.targets[record.class].judge(&record).is_ok();
        self.progress.over += 1;
        self.progress.met += u32::from(kept);
        let judged = record.due >= Time::ZERO + self.rules.warmup;
        self.missed += u32::from(judged && !kept);
        self.records.push(record);
    }

    /// Whether the goal is broken even if all that is to come is met.
    fn is_hopeless(&self) -> bool {
        let planned = self.progress.planned;
        let most = planned - self.missed;
        let ends = |goal| verdict(most.into(), planned.into(), goal) == Verdict::Broken;
        self.rules.goal.is_some_and(ends)
    }
}

impl Range {
    /// Sends nothing more and ends what is under way.
    fn end(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.over.send_replace(true);
    }

    /// Waits for the time; false if nothing more is to be sent.
    fn is_open_until(&self, due: Time) -> bool {
        loop {
            if self.closed.load(Ordering::Relaxed) {
                return false;
            }
            let wait = due.since(self.clock.now());
            if wait.is_zero() {
                return true;
            }
            std::thread::sleep(wait.min(NAP));
        }
    }

    async fn shoot(self: Arc<Self>, shot: Shot) -> Record {
        let mut record = shot.unsent();
        let mut over = self.over.subscribe();
        record.sent = Some(self.clock.now());
        let stream = self.client.stream(shot.request, (self.clock, &mut record));
        record.outcome = tokio::select! {
            outcome = stream => outcome,
            _ = over.wait_for(|over| *over) => Outcome::Unfinished,
            () = tokio::time::sleep(self.timeout) => Outcome::Failed {
                kind: Failure::Timeout,
                text: format!("not over after {} s", self.timeout.as_secs_f64()),
            },
        };
        record.over = Some(self.clock.now());
        record
    }
}

/// Writes bodies.
struct Loader {
    writer: Writer,
    uri: Uri,
    headers: Vec<HeaderMap>,
    salt: u64,
}

impl Loader {
    fn load(&self, schedule: Schedule, (range, shots): (&Range, &SyncSender<Shot>)) {
        for (index, planned) in schedule.requests.into_iter().enumerate() {
            // What is not sent any more is counted all the same.
            let body = match range.closed.load(Ordering::Relaxed) {
                true => Bytes::new(),
                false => self.writer.body(&planned, self.salt),
            };
            let mut request = Request::new(Full::new(body));
            *request.method_mut() = Method::POST;
            *request.uri_mut() = self.uri.clone();
            *request.headers_mut() = self.headers[planned.class].clone();
            let shot = Shot {
                index: index as u32,
                class: planned.class,
                asked: Length {
                    input: planned.prompt.tokens(),
                    output: planned.output,
                },
                due: planned.at,
                request,
            };
            if shots.send(shot).is_err() {
                return;
            }
        }
    }
}

/// Hands each request over at its time.
fn pace(
    range: &Arc<Range>,
    shots: &Receiver<Shot>,
    (handle, records): (&Handle, mpsc::UnboundedSender<Record>),
) {
    for shot in shots {
        if !range.is_open_until(shot.due) {
            if shot.due > range.clock.now() {
                return;
            }
            // A pacer that is behind must not make misses vanish.
            records.send(shot.unsent()).ok();
            continue;
        }
        range.sent.fetch_add(1, Ordering::Relaxed);
        let (range, records) = (range.clone(), records.clone());
        handle.spawn(async move {
            // Nobody listens only if the run was given up.
            records.send(range.shoot(shot).await).ok();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_due_but_not_sent_was_no_miss() {
        let range = Arc::new(Range {
            client: Client::new("http://127.0.0.1:1", None).unwrap(),
            clock: Clock(Instant::now()),
            timeout: Duration::from_secs(1),
            sent: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            over: watch::channel(false).0,
        });
        range.end();
        let (shots, ready) = sync_channel(AHEAD);
        for (index, due) in [(0, 0), (1, 0), (2, 3600)] {
            let shot = Shot {
                index,
                class: 0,
                asked: Length::default(),
                due: Time::ZERO + Duration::from_secs(due),
                request: Request::new(Full::default()),
            };
            shots.send(shot).unwrap();
        }
        drop(shots);
        let (records, mut ended) = mpsc::unbounded_channel();
        pace(&range, &ready, (&Handle::current(), records));
        let mut seen = Vec::new();
        while let Some(record) = ended.recv().await {
            seen.push((record.index, record.sent, record.outcome));
        }
        let unfinished = |index| (index, None, Outcome::Unfinished);
        assert_eq!(seen, [unfinished(0), unfinished(1)]);
    }

    #[test]
    fn a_run_is_given_up_only_when_its_goal_is_out_of_reach() {
        let rules = Rules {
            timeout: Duration::from_secs(1),
            grace: Duration::from_secs(1),
            warmup: Duration::from_secs(1),
            targets: vec![Targets::default()],
            headers: Vec::new(),
            salt: 0,
            goal: Some(0.9),
        };
        let mut tally = Tally {
            records: Vec::new(),
            progress: Progress {
                planned: 100,
                ..Progress::default()
            },
            missed: 0,
            rules: &rules,
        };
        let missed = |millis: u64| Record::new(0, 0, Time::from_nanos(millis * 1_000_000));
        for _ in 0..50 {
            tally.add(missed(999));
        }
        assert!(!tally.is_hopeless(), "the warm-up does not count");
        // Of 100, 85 may still be 0.9 with 95 % confidence (0.767 to 0.907), 84 may not (to 0.899).
        for _ in 0..15 {
            tally.add(missed(1000));
        }
        assert!(!tally.is_hopeless());
        tally.add(missed(1000));
        assert!(tally.is_hopeless());
    }
}
