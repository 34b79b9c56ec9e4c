//! The router's side of the HTTP API.
//!
//! Owns: how many streams are open, and the numbers of flights. Never decides what happens to a
//! request. Invariant: a stream counts from its submission until its client has dropped it, since
//! its events are kept until then.

use super::backlog::{self, ClientReceiver};
use super::dashboard::dashboard_scaling;
use super::dashboard::{ClassSnapshot, Dashboard, DashboardSnapshot};
use super::event::RouterEvent;
use super::flights::{FlightOrigin, FlightTable};
use super::readiness::ModelReadiness;
use super::roster::WorkerRoster;
use cleave_api::{
    AdapterChange, ClassRow, CommandError, FleetSnapshot, FlightEvent, FlightStream, Frontend,
    HandoffTotals, Operator, RETRY_AFTER, RequestSpan, ScalingDecision, ScalingView, ServedAdapter,
    ServingProgress, ServingReadiness, StopSignal, StreamCounts, SubmissionContext, TraceParent,
    WorkerCommand, WorkerView,
};
use cleave_domain::{
    AdapterCommand, Ending, FlightId, Refusal, Request, RequestStageTimes, RouterId, ScalingMode,
    SloPolicy, TokenUsage,
};
use cleave_fleet::views::CommandNovelty;
use cleave_fleet::{HealthMonitor, ScalingStatus, ScalingStatusReader};
use cleave_router::{CancelReason, OperatorRequest};
use cleave_telemetry::{RequestContext, RouterOverhead, Telemetry};
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::{self, Stream};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

/// Opens flights and hands them to the router's driver.
#[derive(Debug)]
pub(crate) struct RouterFrontend {
    pub(crate) router: RouterId,
    pub(crate) flights: Arc<FlightTable>,
    pub(crate) roster: Arc<WorkerRoster>,
    pub(crate) dashboard: Arc<Dashboard>,
    /// Events that one client may be given before it takes one; with more it counts as a slow
    /// reader.
    pub(crate) backlog_max: u32,
    /// Permits for further streams, of each model by name, so that a flood of one model takes none
    /// of another; the brains' own limits are lower.
    pub(crate) streams: Mutex<BTreeMap<Arc<str>, Arc<Semaphore>>>,
    /// Limit of the streams of a model.
    pub(crate) streams_max: usize,
    /// Bounded by the open streams of all models, with one submission, one cancellation and two
    /// backlog changes each, and by the commands that workers may leave unanswered.
    pub(crate) driver: mpsc::UnboundedSender<RouterEvent>,
    /// The SLO policy for new requests.
    pub(crate) policy: watch::Receiver<Arc<SloPolicy>>,
    /// The number of workers wanted.
    pub(crate) scaling: ScalingStatusReader,
    pub(crate) readiness: watch::Receiver<ModelReadiness>,
    pub(crate) telemetry: Telemetry,
    /// The health of this process's engines, if it has any: when one hangs, so does the service.
    pub(crate) monitors: Mutex<Vec<Arc<HealthMonitor>>>,
    pub(crate) flights_submitted: AtomicU64,
}

impl Frontend for RouterFrontend {
    fn submit(&self, request: Request) -> FlightStream {
        self.submit_for(request, SubmissionContext::default())
    }

    fn router_number(&self) -> u32 {
        (self.router.0 & 0xff_ffff) as u32
    }

    fn submit_for(&self, request: Request, caller: SubmissionContext) -> FlightStream {
        let SubmissionContext {
            stop_signal,
            model,
            request_id,
            trace,
            workers,
        } = caller;
        let Ok(counted) = self.streams_of(&model).try_acquire_owned() else {
            let retry_after = RETRY_AFTER;
            let full = Refusal::QueueFull { retry_after };
            let slo_telemetry = &self.telemetry.slo;
            let verdict = slo_telemetry.turned_away(&model, &request.slo.class, &full);
            self.dashboard.judged(&verdict);
            return ended(Ending::Refused(full));
        };
        let number = self.flights_submitted.fetch_add(1, Ordering::Relaxed);
        let flight = FlightId::new(self.router, number);
        let request = Arc::new(request);
        let (client, stream) =
            backlog::client_channel(flight, self.backlog_max, self.driver.clone());
        let origin = FlightOrigin {
            model: Arc::clone(&model),
            context: RequestContext { request_id, trace },
            workers,
        };
        let opened = self.flights.open(flight, origin, &request, client, stream);
        let (events, added) = opened;
        let submitted = RouterEvent::Submitted {
            flight,
            model,
            request,
        };
        if self.driver.send(submitted).is_err() {
            // The driver has stopped; nobody else would end this flight.
            let refused = Ending::Refused(Refusal::Draining);
            self.flights.end(flight, refused.into());
        }
        let client = ClientStream {
            flight,
            events,
            overhead: added,
            driver: self.driver.clone(),
            stop_signal,
            tokens_read: 0,
            ended: false,
            _counted: counted,
        };
        client.boxed()
    }

    fn policy(&self) -> Arc<SloPolicy> {
        Arc::clone(&self.policy.borrow())
    }

    fn readiness(&self, model: &str) -> ServingReadiness {
        if self.driver.is_closed() {
            return ServingReadiness::Draining;
        }
        self.readiness.borrow().of(model)
    }

    fn worker_wait_max(&self, model: &str) -> Option<Duration> {
        let policy = self.policy.borrow();
        let scaling = policy.scaling_of(model)?;
        let starts_workers = scaling.mode == ScalingMode::Act && scaling.can_serve();
        starts_workers.then_some(scaling.start_max)
    }

    fn report_waiting_requests(&self, model: &str, count: u32) {
        // A stopped driver wants no workers any more.
        let model = Arc::from(model);
        let _ = self.driver.send(RouterEvent::WaitingHere { model, count });
    }

    fn sequence_tokens_max(&self, model: &str) -> Option<u32> {
        self.roster.sequence_tokens_max(model)
    }

    fn adapter(&self, name: &str) -> Option<ServedAdapter> {
        self.roster.adapters().get(name)
    }

    fn adapters(&self) -> Vec<ServedAdapter> {
        self.roster.adapters().all()
    }

    fn progress(&self) -> ServingProgress {
        let pulses = self.monitors.lock();
        match pulses.iter().find_map(|pulse| pulse.check().err()) {
            None => ServingProgress::Advancing,
            Some(reason) => ServingProgress::Stalled(reason),
        }
    }

    fn fleet_snapshot(&self) -> Option<FleetSnapshot> {
        if self.driver.is_closed() {
            return None;
        }
        let DashboardSnapshot {
            uptime,
            stages,
            classes,
            handoffs,
            history,
            events,
            decisions,
        } = self.dashboard.snapshot();
        let (workers, links) = self.roster.rows();
        let scaling = dashboard_scaling(&self.scaling.statuses(), &workers, decisions);
        let (goodput, devices) = self.telemetry.slo.goodput();
        Some(FleetSnapshot {
            uptime,
            workers,
            lost: self.roster.lost(),
            flights: self.flights.stage_counts(),
            stages,
            classes: class_rows(&self.policy(), classes, &goodput),
            devices,
            handoffs: HandoffTotals { links, ..handoffs },
            history,
            events,
            scaling,
        })
    }

    fn streams(&self) -> StreamCounts {
        let models = self.streams.lock().len().max(1);
        StreamCounts {
            open: self.streams_by_model().values().sum(),
            max: Some(self.streams_max.saturating_mul(models)),
        }
    }

    fn streams_by_model(&self) -> BTreeMap<String, usize> {
        let streams = self.streams.lock();
        let open = |(model, free): (&Arc<str>, &Arc<Semaphore>)| {
            (
                model.to_string(),
                self.streams_max - free.available_permits(),
            )
        };
        streams.iter().map(open).collect()
    }

    fn begin_span(&self, client: Option<TraceParent>) -> Option<TraceParent> {
        self.telemetry.traces.begin(client)
    }

    fn end_span(&self, span: RequestSpan) {
        self.telemetry.traces.send_request_span(&span);
    }

    fn metrics(&self) -> String {
        self.telemetry.text()
    }
}

impl RouterFrontend {
    /// The permits for streams of a model.
    fn streams_of(&self, model: &Arc<str>) -> Arc<Semaphore> {
        let mut streams = self.streams.lock();
        let begin = || Arc::new(Semaphore::new(self.streams_max));
        let of_model = streams.entry(Arc::clone(model)).or_insert_with(begin);
        Arc::clone(of_model)
    }
}

/// The classes of the policy in its order, then other classes that were judged.
fn class_rows(
    policy: &SloPolicy,
    mut judged: BTreeMap<String, ClassSnapshot>,
    goodput: &[(String, f64)],
) -> Vec<ClassRow> {
    let rate = |name: &str| {
        let found = goodput.iter().find(|(class, _)| class == name);
        found.map_or(0.0, |(_, rate)| *rate)
    };
    let row = |name: &str, snapshot: ClassSnapshot| ClassRow {
        name: name.to_owned(),
        minute: snapshot.minute.verdicts,
        total: snapshot.total,
        goodput: rate(name),
        ttft: snapshot.minute.ttft,
        tpot: snapshot.minute.tpot,
        ..ClassRow::default()
    };
    let mut rows = Vec::new();
    for class in &policy.classes {
        let snapshot = judged.remove(&class.name).unwrap_or_default();
        let has_target = class.ttft.or(class.tpot).or(class.e2e).is_some();
        rows.push(ClassRow {
            ttft_target: class.ttft,
            tpot_target: class.tpot,
            goal_permille: has_target.then_some(class.attainment_permille),
            ..row(&class.name, snapshot)
        });
    }
    rows.extend(
        judged
            .into_iter()
            .map(|(name, snapshot)| row(&name, snapshot)),
    );
    rows
}

impl Operator for RouterFrontend {
    fn workers(&self) -> Vec<WorkerView> {
        self.roster.views()
    }

    fn scaling(&self) -> BTreeMap<String, ScalingView> {
        let statuses = self.scaling.statuses();
        let views = statuses.iter().filter_map(|(model, status)| {
            let (mode, first, decision) = match status {
                ScalingStatus::Off => return None,
                ScalingStatus::Starting(mode) => (*mode, None, None),
                ScalingStatus::First(mode, first) => (*mode, Some(*first), None),
                ScalingStatus::Decided(mode, decision) => (*mode, None, Some(decision)),
            };
            let view = ScalingView {
                mode,
                first,
                answer: decision.map(|decision| ScalingDecision {
                    target: decision.wanted,
                    decided_here: decision.own,
                    rate: decision.rate,
                    prefill_load: decision.prefill_load,
                    decode_load: decision.decode_load,
                    waiting: decision.waiting,
                    starting: decision.starting,
                }),
            };
            Some((model.to_string(), view))
        });
        views.collect()
    }

    fn change_adapter(&self, change: AdapterChange) -> BoxFuture<'static, Result<(), String>> {
        let AdapterChange { model, command } = change;
        let model = match (&command, model) {
            (AdapterCommand::Unload { name }, _) => {
                let served = self.roster.adapters().get(name);
                let none = || format!("no adapter of the name {name} is served");
                served.map(|adapter| adapter.base).ok_or_else(none)
            }
            (AdapterCommand::Load { name, folder, .. }, model) => {
                let named = self.roster.check_adapter_names(name, folder);
                named.and_then(|()| model.map_or_else(|| self.roster.only_model(), Ok))
            }
        };
        let (answer, outcome) = oneshot::channel();
        let sent = model.and_then(|model| {
            let model = Arc::from(model);
            let changed = RouterEvent::AdapterChanged {
                model,
                command,
                answer,
            };
            let stopped = |_| "the server is shutting down".to_owned();
            self.driver.send(changed).map_err(stopped)
        });
        Box::pin(async move {
            sent?;
            let stopped = |_| "the server is shutting down".to_owned();
            outcome.await.map_err(stopped)?
        })
    }

    fn command(&self, worker: &str, command: WorkerCommand) -> Result<WorkerView, CommandError> {
        let (view, novelty) = self.roster.command(worker, command)?;
        if novelty == CommandNovelty::Pending {
            return Ok(view);
        }
        let command = match command {
            WorkerCommand::Drain => OperatorRequest::Drain,
            WorkerCommand::SetRole(role) => OperatorRequest::Serve(role),
        };
        let worker = view.worker.worker;
        let commanded = RouterEvent::Commanded { worker, command };
        self.driver
            .send(commanded)
            .map_err(|_| CommandError::Stopped)?;
        Ok(view)
    }
}

fn ended(ending: Ending) -> FlightStream {
    let (usage, timing) = (TokenUsage::default(), RequestStageTimes::default());
    let event = FlightEvent::Ended {
        ending,
        usage,
        timing,
    };
    stream::iter([event]).boxed()
}

/// A client's end of a flight. Dropped before the ending, it cancels.
struct ClientStream {
    flight: FlightId,
    events: ClientReceiver,
    overhead: Arc<RouterOverhead>,
    driver: mpsc::UnboundedSender<RouterEvent>,
    stop_signal: StopSignal,
    /// Tokens that the client took.
    tokens_read: u32,
    ended: bool,
    /// Held for as long as events for the client are in memory.
    _counted: OwnedSemaphorePermit,
}

impl Stream for ClientStream {
    type Item = FlightEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<FlightEvent>> {
        let event = self.events.poll_recv(context);
        match &event {
            Poll::Ready(Some(FlightEvent::Token(_))) => {
                if self.tokens_read == 0 {
                    self.overhead.observe_once();
                }
                self.tokens_read += 1;
            }
            Poll::Ready(None | Some(FlightEvent::Ended { .. })) => self.ended = true,
            Poll::Pending => {}
        }
        event
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        if !self.ended {
            let flight = self.flight;
            let output_tokens = self.tokens_read;
            let why = if self.stop_signal.is_set() {
                CancelReason::Enough { output_tokens }
            } else {
                CancelReason::Left
            };
            // Without a driver there is nothing left to cancel.
            let _ = self.driver.send(RouterEvent::Cancelled { flight, why });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{FinishReason, RequestSlo, SamplingParams, StopRules};
    use cleave_telemetry::{RouterMeters, Traces};
    use futures::FutureExt;

    fn request() -> Request {
        Request {
            prompt: [1, 2, 3].into(),
            generated: [].into(),
            sampling: SamplingParams::greedy(),
            stop: StopRules {
                max_tokens: 9,
                min_tokens: 0,
                stop_tokens: [].into(),
            },
            priority: 0,
            cache_salt: 0,
            adapter: None,
            pooling: None,
            slo: RequestSlo::default(),
        }
    }

    #[test]
    fn an_unread_stream_counts_until_it_is_dropped() {
        let telemetry = Telemetry::default();
        let meters = RouterMeters::new(&telemetry.router);
        let slo = telemetry.slo.clone();
        let flights = Arc::new(FlightTable::new(meters, slo, Traces::default()));
        let (driver, _submissions) = mpsc::unbounded_channel();
        let frontend = RouterFrontend {
            router: RouterId(7),
            flights: Arc::clone(&flights),
            roster: Arc::default(),
            dashboard: Arc::default(),
            backlog_max: 4,
            streams: Mutex::default(),
            streams_max: 1,
            driver,
            policy: watch::channel(Arc::default()).1,
            scaling: ScalingStatusReader::new(watch::channel(ScalingStatus::Off.into()).1),
            readiness: watch::channel(ModelReadiness::default()).1,
            telemetry,
            monitors: Mutex::default(),
            flights_submitted: AtomicU64::new(0),
        };
        let refused = |stream: &mut FlightStream| {
            let event = stream.next().now_or_never().flatten();
            let full =
                |ending: &Ending| matches!(ending, Ending::Refused(Refusal::QueueFull { .. }));
            matches!(event, Some(FlightEvent::Ended { ending, .. }) if full(&ending))
        };
        let unread = frontend.submit(request());
        let (open, max) = (1, Some(1));
        assert_eq!(frontend.streams(), StreamCounts { open, max });
        let reason = FinishReason::Length;
        let flight = FlightId::new(RouterId(7), 0);
        flights.end(flight, Ending::Done { reason }.into());
        // It has ended, and its events are still in memory.
        assert!(refused(&mut frontend.submit(request())));
        let of_other = SubmissionContext {
            model: Arc::from("other"),
            ..SubmissionContext::default()
        };
        let mut other = frontend.submit_for(request(), of_other);
        assert!(!refused(&mut other), "another model has its own streams");
        drop(unread);
        assert!(!refused(&mut frontend.submit(request())));
    }
}
