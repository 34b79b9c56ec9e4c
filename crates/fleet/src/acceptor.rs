//! How connections reach the drivers: each carrier of a connection (a channel, a gRPC stream)
//! registers here, and only here.

use crate::connection::{
    CONNECTION_ITEMS_MAX, FromWorker, LinkState, Registration, RouterConnection, ToWorker,
    WorkerActivity, WorkerConnection,
};
use cleave_api::WorkerCommand;
use cleave_domain::{Emission, HandoffId, Report, Role, RouterId, WorkerRef};
use cleave_transfer::WriteGrant;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Serial numbers of this process's connections, so that an old one is never mistaken for a new
/// one.
static SERIAL: AtomicU64 = AtomicU64::new(1);

fn next_serial() -> u64 {
    SERIAL.fetch_add(1, Ordering::Relaxed)
}

/// The driver has stopped and receives no more messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverStopped;

/// An event on a router's connections to its workers, for the router's driver.
#[derive(Debug)]
pub enum WorkerConnectionEvent {
    /// A worker connected and was accepted.
    Joined(Box<WorkerConnection>),
    /// That connection is over.
    Lost {
        worker: WorkerRef,
        serial: u64,
        /// Cause of the loss, for the log.
        reason: String,
    },
    /// A worker reported something.
    Reported {
        worker: WorkerRef,
        serial: u64,
        report: Report,
        read: Instant,
    },
    /// Grants the prefill worker write access to the reserved blocks.
    GrantReceived {
        worker: WorkerRef,
        serial: u64,
        handoff: HandoffId,
        grant: WriteGrant,
    },
    /// A worker answered a change of its adapters.
    AdapterAnswered {
        worker: WorkerRef,
        serial: u64,
        /// The number of the change that it answers.
        request: u64,
        outcome: Result<(), String>,
    },
    /// A worker measured a link to another one.
    LinkMeasured {
        worker: WorkerRef,
        serial: u64,
        link: LinkState,
    },
}

/// Events from outside that a worker's driver receives. They share one queue, so that the driver
/// stops after the messages that came before.
#[derive(Debug)]
pub enum WorkerEvent {
    RouterJoined(RouterConnection),
    /// The router's connection has ended.
    RouterLost {
        router: RouterId,
        serial: u64,
    },
    FromRouter {
        router: RouterId,
        serial: u64,
        message: ToWorker,
    },
    /// An operator sent a command to this worker's own port.
    Commanded(WorkerCommand),
    Drain,
    Stop,
}

/// The clients' streams of a router, which workers' tokens reach without passing its brain.
pub trait EmissionSink: Debug + Send + Sync {
    /// Takes a token from a worker.
    fn emit(&self, handoff: HandoffId, emission: Emission);
}

/// Accepts workers at a router.
#[derive(Clone, Debug)]
pub struct RouterAcceptor {
    pub router: RouterId,
    pub inbox: mpsc::Sender<WorkerConnectionEvent>,
    pub flights: Arc<dyn EmissionSink>,
    /// A worker that sends nothing for this long counts as lost.
    pub silence: Duration,
}

impl RouterAcceptor {
    /// Registers a connected worker. The receiver yields the router's messages to it; the
    /// connection must end when the receiver closes.
    pub(crate) async fn join(
        &self,
        registration: Registration,
    ) -> Result<(WorkerSession, mpsc::Receiver<ToWorker>), DriverStopped> {
        let (out, messages) = mpsc::channel(CONNECTION_ITEMS_MAX);
        let serial = next_serial();
        let worker = registration.worker;
        let activity = Arc::new(WorkerActivity::default());
        let (stands_by, standing_by) = watch::channel(false);
        let line = WorkerConnection {
            registration,
            serial,
            out,
            activity: Arc::clone(&activity),
            waits_for_name: stands_by,
        };
        let joined = WorkerConnectionEvent::Joined(Box::new(line));
        self.inbox.send(joined).await.map_err(|_| DriverStopped)?;
        let acceptor = self.clone();
        Ok((
            WorkerSession {
                acceptor,
                worker,
                serial,
                activity,
                waits_for_name: standing_by,
            },
            messages,
        ))
    }
}

/// A worker's connection, at the router.
#[derive(Debug)]
pub(crate) struct WorkerSession {
    acceptor: RouterAcceptor,
    worker: WorkerRef,
    serial: u64,
    activity: Arc<WorkerActivity>,
    waits_for_name: watch::Receiver<bool>,
}

impl WorkerSession {
    /// Returns when the worker must wait for its name; never returns if the connection ends first.
    pub(crate) async fn waits_for_name(&self) {
        let mut standing_by = self.waits_for_name.clone();
        if standing_by.wait_for(|stands_by| *stands_by).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Handles a message from the worker. Tokens go straight to their clients, and are there before
    /// a report that follows them reaches the brain.
    pub(crate) async fn receive(&self, message: FromWorker) -> Result<(), DriverStopped> {
        match message {
            FromWorker::Emissions(tokens) => {
                self.activity.record_tokens(tokens.len());
                for (handoff, emission) in tokens {
                    self.acceptor.flights.emit(handoff, emission);
                }
                Ok(())
            }
            FromWorker::Report(report) => {
                self.activity.record_report(&report);
                let event = WorkerConnectionEvent::Reported {
                    worker: self.worker,
                    serial: self.serial,
                    report,
                    read: Instant::now(),
                };
                self.acceptor
                    .inbox
                    .send(event)
                    .await
                    .map_err(|_| DriverStopped)
            }
            FromWorker::Grant { handoff, grant } => {
                let passed = WorkerConnectionEvent::GrantReceived {
                    worker: self.worker,
                    serial: self.serial,
                    handoff,
                    grant,
                };
                self.acceptor
                    .inbox
                    .send(passed)
                    .await
                    .map_err(|_| DriverStopped)
            }
            FromWorker::AdapterAnswer { request, outcome } => {
                let answered = WorkerConnectionEvent::AdapterAnswered {
                    worker: self.worker,
                    serial: self.serial,
                    request,
                    outcome,
                };
                let sent = self.acceptor.inbox.send(answered).await;
                sent.map_err(|_| DriverStopped)
            }
            FromWorker::Link(link) => {
                let measured = WorkerConnectionEvent::LinkMeasured {
                    worker: self.worker,
                    serial: self.serial,
                    link,
                };
                self.acceptor
                    .inbox
                    .send(measured)
                    .await
                    .map_err(|_| DriverStopped)
            }
        }
    }

    /// Reports the end of the connection to the driver, with the reason.
    pub(crate) async fn close(self, reason: String) {
        let lost = WorkerConnectionEvent::Lost {
            worker: self.worker,
            serial: self.serial,
            reason,
        };
        // A stopped driver has forgotten the worker anyway.
        let _ = self.acceptor.inbox.send(lost).await;
    }
}

/// Accepts routers at a worker.
#[derive(Clone, Debug)]
pub struct WorkerAcceptor {
    /// The registration at the start; see [`WorkerAcceptor::registration_now`].
    pub registration: Registration,
    /// The legs that the worker serves now.
    pub role: watch::Receiver<Role>,
    pub inbox: mpsc::Sender<WorkerEvent>,
}

impl WorkerAcceptor {
    /// The registration for a router that joins now, with the current role.
    pub(crate) fn registration_now(&self) -> Registration {
        let mut registration = self.registration.clone();
        registration.description.role = *self.role.borrow();
        registration
    }

    /// Registers a connected router. The receiver yields the worker's messages to it; the
    /// connection must end when the receiver closes.
    pub async fn join(
        &self,
        router: RouterId,
    ) -> Result<(RouterSession, mpsc::Receiver<FromWorker>), DriverStopped> {
        let (out, messages) = mpsc::channel(CONNECTION_ITEMS_MAX);
        let serial = next_serial();
        let line = RouterConnection {
            router,
            serial,
            out,
        };
        let joined = WorkerEvent::RouterJoined(line);
        self.inbox.send(joined).await.map_err(|_| DriverStopped)?;
        let inbox = self.inbox.clone();
        Ok((
            RouterSession {
                inbox,
                router,
                serial,
            },
            messages,
        ))
    }
}

/// A router's connection, at the worker.
#[derive(Debug)]
pub struct RouterSession {
    inbox: mpsc::Sender<WorkerEvent>,
    router: RouterId,
    serial: u64,
}

impl RouterSession {
    /// Passes a message from the router to the driver.
    pub async fn receive(&self, message: ToWorker) -> Result<(), DriverStopped> {
        let event = WorkerEvent::FromRouter {
            router: self.router,
            serial: self.serial,
            message,
        };
        self.inbox.send(event).await.map_err(|_| DriverStopped)
    }

    /// Reports the end of the connection to the driver.
    pub async fn close(self) {
        let lost = WorkerEvent::RouterLost {
            router: self.router,
            serial: self.serial,
        };
        // A stopped driver has forgotten the router anyway.
        let _ = self.inbox.send(lost).await;
    }
}

/// Connects a worker and a router of one process until either stops.
pub async fn connect(worker: WorkerAcceptor, router: RouterAcceptor) {
    let Ok((router_session, mut upward)) = worker.join(router.router).await else {
        return;
    };
    let Ok((worker_session, mut downward)) = router.join(worker.registration_now()).await else {
        return router_session.close().await;
    };
    let up = async {
        while let Some(message) = upward.recv().await {
            if worker_session.receive(message).await.is_err() {
                return;
            }
        }
    };
    let down = async {
        while let Some(message) = downward.recv().await {
            if router_session.receive(message).await.is_err() {
                return;
            }
        }
    };
    let reason = tokio::select! {
        () = up => "the worker or the router stopped",
        () = down => "the router cut it off, or the worker stopped",
    };
    tokio::join!(
        router_session.close(),
        worker_session.close(reason.to_owned())
    );
}
