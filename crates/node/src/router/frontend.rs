//! The router as the HTTP face sees it.

use super::backlog::{self, Receiver};
use super::driver::RouterEvent;
use super::flights::Flights;
use super::roster::Roster;
use crate::health::Pulse;
use crate::telemetry::Telemetry;
use cleave_api::{
    CommandError, FlightEvent, FlightStream, Frontend, Operator, Progress, RETRY_AFTER, Readiness,
    WorkerCommand, WorkerView,
};
use cleave_domain::{Ending, FlightId, Refusal, Request, RouterId, Usage};
use cleave_router::Command;
use futures::StreamExt;
use futures::stream::{self, Stream};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use tokio::sync::{mpsc, watch};

/// Opens flights and hands them to the router's driver.
#[derive(Debug)]
pub(crate) struct RouterFrontend {
    pub(crate) router: RouterId,
    pub(crate) flights: Arc<Flights>,
    pub(crate) roster: Arc<Roster>,
    /// What may wait for one client before it counts as a slow reader.
    pub(crate) backlog_max: u32,
    /// Streams open at once; the brain's own limits are lower.
    pub(crate) streams_max: usize,
    /// Bounded by the open streams: one submission and one cancellation each, and a word for each
    /// half of a backlog that builds up or drains.
    pub(crate) driver: mpsc::UnboundedSender<RouterEvent>,
    pub(crate) readiness: watch::Receiver<Readiness>,
    pub(crate) telemetry: Telemetry,
    /// The engines of this process, if it has any: when one hangs, so does the service.
    pub(crate) pulses: Mutex<Vec<Arc<Pulse>>>,
    pub(crate) number: AtomicU64,
}

impl Frontend for RouterFrontend {
    fn submit(&self, request: Request) -> FlightStream {
        if self.flights.count() >= self.streams_max {
            let retry_after = RETRY_AFTER;
            return ended(Ending::Refused(Refusal::QueueFull { retry_after }));
        }
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let flight = FlightId::new(self.router, number);
        let request = Arc::new(request);
        let line = backlog::line(flight, self.backlog_max, self.driver.clone());
        let events = self.flights.open(flight, &request, line);
        let submitted = RouterEvent::Submitted { flight, request };
        if self.driver.send(submitted).is_err() {
            // The driver has stopped; nobody else would end this flight.
            let refused = Ending::Refused(Refusal::Draining);
            self.flights.end(flight, refused, None);
        }
        let client = Client {
            flight,
            events,
            driver: self.driver.clone(),
            ended: false,
        };
        client.boxed()
    }

    fn readiness(&self) -> Readiness {
        if self.driver.is_closed() {
            return Readiness::Draining;
        }
        self.readiness.borrow().clone()
    }

    fn progress(&self) -> Progress {
        let pulses = self.pulses.lock().unwrap_or_else(PoisonError::into_inner);
        match pulses.iter().find_map(|pulse| pulse.check().err()) {
            None => Progress::Moving,
            Some(reason) => Progress::Stalled(reason),
        }
    }

    fn metrics(&self) -> String {
        self.telemetry.text()
    }
}

impl Operator for RouterFrontend {
    fn workers(&self) -> Vec<WorkerView> {
        self.roster.views()
    }

    fn command(&self, worker: &str, command: WorkerCommand) -> Result<WorkerView, CommandError> {
        let view = self.roster.after(worker, command);
        let view = view.ok_or(CommandError::Unknown)?;
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
    let usage = Usage::default();
    stream::iter([FlightEvent::Ended { ending, usage }]).boxed()
}

/// A client's end of a flight. Dropped before the ending, it cancels.
struct Client {
    flight: FlightId,
    events: Receiver,
    driver: mpsc::UnboundedSender<RouterEvent>,
    ended: bool,
}

impl Stream for Client {
    type Item = FlightEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<FlightEvent>> {
        let event = self.events.poll_recv(context);
        if let Poll::Ready(None | Some(FlightEvent::Ended { .. })) = &event {
            self.ended = true;
        }
        event
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.ended {
            let flight = self.flight;
            // Without a driver there is nothing left to cancel.
            let _ = self.driver.send(RouterEvent::Cancelled { flight });
        }
    }
}
