//! The router as the HTTP face sees it.
//!
//! Owns: how many streams are open, and the numbers of flights. Never: decides what becomes of a
//! request. Invariant: a stream counts from its submission until its client has let go of it, for
//! until then what it was given is kept.

use super::added::Added;
use super::backlog::{self, Receiver};
use super::driver::RouterEvent;
use super::flights::Flights;
use super::lookout::{ClassSight, Lookout, Sight};
use super::roster::Roster;
use crate::health::Pulse;
use crate::scaling::{Answers, Standing, shown};
use crate::telemetry::Telemetry;
use crate::trace::Mark;
use crate::views::Novelty;
use cleave_api::{
    Board, Caller, ClassRow, CommandError, Enough, FlightEvent, FlightStream, Frontend, Handoffs,
    Operator, Progress, RETRY_AFTER, Readiness, RequestSpan, ScalingAnswer, ScalingView, Streams,
    TraceParent, WorkerCommand, WorkerView,
};
use cleave_domain::{
    Ending, FlightId, Refusal, Request, RouterId, ScalingMode, SloPolicy, Timing, Usage,
};
use cleave_router::{CancelReason, Command, Outside};
use futures::StreamExt;
use futures::stream::{self, Stream};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

/// Opens flights and hands them to the router's driver.
#[derive(Debug)]
pub(crate) struct RouterFrontend {
    pub(crate) router: RouterId,
    pub(crate) flights: Arc<Flights>,
    pub(crate) roster: Arc<Roster>,
    pub(crate) lookout: Arc<Lookout>,
    /// What one client may be given before it takes something, or counts as a slow reader.
    pub(crate) backlog_max: u32,
    /// Streams that may be opened beside those that are; the brain's own limits are lower.
    pub(crate) streams: Arc<Semaphore>,
    pub(crate) streams_max: usize,
    /// Bounded by the open streams, one submission and one cancellation each, and two words for each
    /// backlog that builds up; and by the commands that workers may leave unanswered.
    pub(crate) driver: mpsc::UnboundedSender<RouterEvent>,
    /// What requests are promised from now on.
    pub(crate) policy: watch::Receiver<Arc<SloPolicy>>,
    /// How many workers there are to be.
    pub(crate) answers: Answers,
    pub(crate) readiness: watch::Receiver<Readiness>,
    pub(crate) telemetry: Telemetry,
    /// The engines of this process, if it has any: when one hangs, so does the service.
    pub(crate) pulses: Mutex<Vec<Arc<Pulse>>>,
    pub(crate) number: AtomicU64,
}

impl Frontend for RouterFrontend {
    fn submit(&self, request: Request) -> FlightStream {
        self.submit_for(request, Caller::default())
    }

    fn submit_for(&self, request: Request, caller: Caller) -> FlightStream {
        let Caller {
            enough,
            request_id,
            trace,
        } = caller;
        let Ok(counted) = Arc::clone(&self.streams).try_acquire_owned() else {
            let retry_after = RETRY_AFTER;
            let full = Refusal::QueueFull { retry_after };
            let promises = &self.telemetry.promises;
            let judgement = promises.turned_away(&request.slo.class, &full);
            self.lookout.turned_away(&judgement);
            return ended(Ending::Refused(full));
        };
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let flight = FlightId::new(self.router, number);
        let request = Arc::new(request);
        let line = backlog::line(flight, self.backlog_max, self.driver.clone());
        let mark = Mark { request_id, trace };
        let (events, added) = self.flights.open((flight, mark), &request, line);
        let submitted = RouterEvent::Submitted { flight, request };
        if self.driver.send(submitted).is_err() {
            // The driver has stopped; nobody else would end this flight.
            let refused = Ending::Refused(Refusal::Draining);
            self.flights.end(flight, refused.into());
        }
        let client = Client {
            flight,
            events,
            added,
            driver: self.driver.clone(),
            enough,
            taken: 0,
            ended: false,
            _counted: counted,
        };
        client.boxed()
    }

    fn policy(&self) -> Arc<SloPolicy> {
        Arc::clone(&self.policy.borrow())
    }

    fn readiness(&self) -> Readiness {
        if self.driver.is_closed() {
            return Readiness::Draining;
        }
        self.readiness.borrow().clone()
    }

    fn patience(&self) -> Option<Duration> {
        let policy = self.policy.borrow();
        let scaling = policy.scaling.as_ref()?;
        let comes = scaling.mode == ScalingMode::Act && scaling.serves();
        comes.then_some(scaling.start_max)
    }

    fn wait_outside(&self, count: u32) {
        // A stopped driver wants nobody any more.
        let place = Outside::Here;
        let _ = self.driver.send(RouterEvent::Wait { place, count });
    }

    fn progress(&self) -> Progress {
        let pulses = self.pulses.lock().unwrap_or_else(PoisonError::into_inner);
        match pulses.iter().find_map(|pulse| pulse.check().err()) {
            None => Progress::Moving,
            Some(reason) => Progress::Stalled(reason),
        }
    }

    fn board(&self) -> Option<Board> {
        if self.driver.is_closed() {
            return None;
        }
        let Sight {
            uptime,
            flights,
            stages,
            classes,
            handoffs,
            history,
            events,
            decisions,
        } = self.lookout.sight();
        let (workers, links) = self.roster.rows();
        let scaling = shown(&self.answers.standing(), &workers, decisions);
        let (goodput, devices) = self.telemetry.promises.goodput();
        Some(Board {
            uptime,
            workers,
            flights,
            stages,
            classes: class_rows(&self.policy(), classes, &goodput),
            devices,
            handoffs: Handoffs { links, ..handoffs },
            history,
            events,
            scaling,
        })
    }

    fn streams(&self) -> Streams {
        Streams {
            open: self.streams_max - self.streams.available_permits(),
            max: Some(self.streams_max),
        }
    }

    fn begin_span(&self, client: Option<TraceParent>) -> Option<TraceParent> {
        self.telemetry.traces.begin(client)
    }

    fn end_span(&self, span: RequestSpan) {
        self.telemetry.traces.tell(&span);
    }

    fn metrics(&self) -> String {
        self.telemetry.text()
    }
}

/// The classes of the policy in its order, then what else was judged.
fn class_rows(
    policy: &SloPolicy,
    mut judged: BTreeMap<String, ClassSight>,
    goodput: &[(String, f64)],
) -> Vec<ClassRow> {
    let rate = |name: &str| {
        let found = goodput.iter().find(|(class, _)| class == name);
        found.map_or(0.0, |(_, rate)| *rate)
    };
    let row = |name: &str, sight: ClassSight| ClassRow {
        name: name.to_owned(),
        minute: sight.minute.verdicts,
        total: sight.total,
        goodput: rate(name),
        ttft: sight.minute.ttft,
        tpot: sight.minute.tpot,
        ..ClassRow::default()
    };
    let mut rows = Vec::new();
    for class in &policy.classes {
        let sight = judged.remove(&class.name).unwrap_or_default();
        let promises = class.ttft.or(class.tpot).or(class.e2e).is_some();
        rows.push(ClassRow {
            ttft_target: class.ttft,
            tpot_target: class.tpot,
            goal_permille: promises.then_some(class.attainment_permille),
            ..row(&class.name, sight)
        });
    }
    rows.extend(judged.into_iter().map(|(name, sight)| row(&name, sight)));
    rows
}

impl Operator for RouterFrontend {
    fn workers(&self) -> Vec<WorkerView> {
        self.roster.views()
    }

    fn scaling(&self) -> Option<ScalingView> {
        let (mode, decision) = match self.answers.standing() {
            Standing::Off => return None,
            Standing::Listening(mode) => (mode, None),
            Standing::Said(mode, decision) => (mode, Some(decision)),
        };
        Some(ScalingView {
            mode,
            answer: decision.map(|decision| ScalingAnswer {
                wanted: decision.wanted,
                own: decision.own,
                rate: decision.rate,
                prefill_load: decision.prefill_load,
                decode_load: decision.decode_load,
                waiting: decision.waiting,
                starting: decision.starting,
            }),
        })
    }

    fn command(&self, worker: &str, command: WorkerCommand) -> Result<WorkerView, CommandError> {
        let (view, novelty) = self.roster.command(worker, command)?;
        if novelty == Novelty::Said {
            return Ok(view);
        }
        let command = match command {
            WorkerCommand::Drain => Command::Drain,
            WorkerCommand::Serve(role) => Command::Serve(role),
        };
        let worker = view.worker.worker;
        let told = RouterEvent::Commanded { worker, command };
        self.driver.send(told).map_err(|_| CommandError::Stopped)?;
        Ok(view)
    }
}

fn ended(ending: Ending) -> FlightStream {
    let (usage, timing) = (Usage::default(), Timing::default());
    let event = FlightEvent::Ended {
        ending,
        usage,
        timing,
    };
    stream::iter([event]).boxed()
}

/// A client's end of a flight. Dropped before the ending, it cancels.
struct Client {
    flight: FlightId,
    events: Receiver,
    added: Arc<Added>,
    driver: mpsc::UnboundedSender<RouterEvent>,
    enough: Enough,
    /// Tokens that it took.
    taken: u32,
    ended: bool,
    /// What it was given is in memory for as long as this is held.
    _counted: OwnedSemaphorePermit,
}

impl Stream for Client {
    type Item = FlightEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<FlightEvent>> {
        let event = self.events.poll_recv(context);
        match &event {
            Poll::Ready(Some(FlightEvent::Token(_))) => {
                if self.taken == 0 {
                    self.added.tell();
                }
                self.taken += 1;
            }
            Poll::Ready(None | Some(FlightEvent::Ended { .. })) => self.ended = true,
            Poll::Pending => {}
        }
        event
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.ended {
            let flight = self.flight;
            let output_tokens = self.taken;
            let why = match self.enough.is_said() {
                true => CancelReason::Enough { output_tokens },
                false => CancelReason::Left,
            };
            // Without a driver there is nothing left to cancel.
            let _ = self.driver.send(RouterEvent::Cancelled { flight, why });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::RouterMeters;
    use crate::trace::Traces;
    use cleave_domain::{FinishReason, Sampling, Slo, StopRules};
    use futures::FutureExt;

    fn request() -> Request {
        Request {
            prompt: [1, 2, 3].into(),
            generated: [].into(),
            sampling: Sampling::greedy(),
            stop: StopRules {
                max_tokens: 9,
                min_tokens: 0,
                stop_tokens: [].into(),
            },
            priority: 0,
            cache_salt: 0,
            slo: Slo::default(),
        }
    }

    #[test]
    fn clients_that_ask_and_never_read_held_more_than_they_may() {
        let telemetry = Telemetry::default();
        let meters = RouterMeters::new(&telemetry.router);
        let flights = Arc::new(Flights::new(meters, Traces::default()));
        let (driver, _heard) = mpsc::unbounded_channel();
        let frontend = RouterFrontend {
            router: RouterId(7),
            flights: Arc::clone(&flights),
            roster: Arc::default(),
            lookout: Arc::default(),
            backlog_max: 4,
            streams: Arc::new(Semaphore::new(1)),
            streams_max: 1,
            driver,
            policy: watch::channel(Arc::default()).1,
            answers: Answers::new(watch::channel(Standing::Off).1),
            readiness: watch::channel(Readiness::Ready).1,
            telemetry,
            pulses: Mutex::default(),
            number: AtomicU64::new(0),
        };
        let refused = |stream: &mut FlightStream| {
            let event = stream.next().now_or_never().flatten();
            let full =
                |ending: &Ending| matches!(ending, Ending::Refused(Refusal::QueueFull { .. }));
            matches!(event, Some(FlightEvent::Ended { ending, .. }) if full(&ending))
        };
        let unread = frontend.submit(request());
        let (open, max) = (1, Some(1));
        assert_eq!(frontend.streams(), Streams { open, max });
        let reason = FinishReason::Length;
        let flight = FlightId::new(RouterId(7), 0);
        flights.end(flight, Ending::Done { reason }.into());
        // It has ended, and all it was given is still there.
        assert!(refused(&mut frontend.submit(request())));
        drop(unread);
        assert!(!refused(&mut frontend.submit(request())));
    }
}
