//! How connections reach the drivers: whoever carries a line (a channel, a gRPC stream) comes in
//! here, and only here.

use crate::line::{
    Activity, Downward, Introduction, LINE_ITEMS_MAX, RouterLine, Upward, WorkerLine,
};
use crate::router::{Flights, RouterEvent};
use crate::worker::WorkerEvent;
use cleave_domain::{Role, RouterId, WorkerRef};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Connections of this process, numbered, so that an old one is never mistaken for a new one.
static SERIAL: AtomicU64 = AtomicU64::new(1);

fn next_serial() -> u64 {
    SERIAL.fetch_add(1, Ordering::Relaxed)
}

/// The driver has stopped; there is nobody to talk to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stopped;

/// Where workers come in.
#[derive(Clone, Debug)]
pub(crate) struct RouterDoor {
    pub(crate) router: RouterId,
    pub(crate) inbox: mpsc::Sender<RouterEvent>,
    pub(crate) flights: Arc<Flights>,
    /// A worker that says nothing for so long is lost.
    pub(crate) silence: Duration,
}

impl RouterDoor {
    /// A worker is connected; what the router says to it comes out of the receiver. When that
    /// closes, the connection is to end.
    pub(crate) async fn join(
        &self,
        introduction: Introduction,
    ) -> Result<(Visit, mpsc::Receiver<Downward>), Stopped> {
        let (out, words) = mpsc::channel(LINE_ITEMS_MAX);
        let serial = next_serial();
        let worker = introduction.worker;
        let activity = Arc::new(Activity::default());
        let line = WorkerLine {
            introduction,
            serial,
            out,
            activity: Arc::clone(&activity),
        };
        let joined = RouterEvent::Joined(Box::new(line));
        self.inbox.send(joined).await.map_err(|_| Stopped)?;
        let door = self.clone();
        Ok((
            Visit {
                door,
                worker,
                serial,
                activity,
            },
            words,
        ))
    }
}

/// A worker's connection, at the router.
#[derive(Debug)]
pub(crate) struct Visit {
    door: RouterDoor,
    worker: WorkerRef,
    serial: u64,
    activity: Arc<Activity>,
}

impl Visit {
    /// The worker said something. Tokens go straight to their clients; they are there before any
    /// report that follows them reaches the brain.
    pub(crate) async fn hear(&self, word: Upward) -> Result<(), Stopped> {
        match word {
            Upward::Emissions(tokens) => {
                self.activity.emitted(tokens.len());
                for (handoff, emission) in tokens {
                    self.door.flights.emit(handoff, emission);
                }
                Ok(())
            }
            Upward::Report(report) => {
                self.activity.reported(&report);
                let told = RouterEvent::Told {
                    worker: self.worker,
                    serial: self.serial,
                    report,
                    read: Instant::now(),
                };
                self.door.inbox.send(told).await.map_err(|_| Stopped)
            }
            Upward::Pass { handoff, pass } => {
                let passed = RouterEvent::Passed {
                    worker: self.worker,
                    serial: self.serial,
                    handoff,
                    pass,
                };
                self.door.inbox.send(passed).await.map_err(|_| Stopped)
            }
            Upward::Link(link) => {
                let measured = RouterEvent::Measured {
                    worker: self.worker,
                    serial: self.serial,
                    link,
                };
                self.door.inbox.send(measured).await.map_err(|_| Stopped)
            }
        }
    }

    /// The connection is over.
    pub(crate) async fn leave(self) {
        let lost = RouterEvent::Lost {
            worker: self.worker,
            serial: self.serial,
        };
        // A stopped driver has forgotten the worker anyway.
        let _ = self.door.inbox.send(lost).await;
    }
}

/// Where routers come in.
#[derive(Clone, Debug)]
pub(crate) struct WorkerDoor {
    /// As it was at the start; see [`WorkerDoor::introduce`].
    pub(crate) introduction: Introduction,
    /// Which legs it serves now.
    pub(crate) role: watch::Receiver<Role>,
    pub(crate) inbox: mpsc::Sender<WorkerEvent>,
}

impl WorkerDoor {
    /// What a router that joins now is told.
    pub(crate) fn introduce(&self) -> Introduction {
        let mut introduction = self.introduction.clone();
        introduction.description.role = *self.role.borrow();
        introduction
    }

    /// A router is connected; what the worker says to it comes out of the receiver. When that
    /// closes, the connection is to end.
    pub(crate) async fn join(
        &self,
        router: RouterId,
    ) -> Result<(Call, mpsc::Receiver<Upward>), Stopped> {
        let (out, words) = mpsc::channel(LINE_ITEMS_MAX);
        let serial = next_serial();
        let line = RouterLine {
            router,
            serial,
            out,
        };
        let joined = WorkerEvent::RouterJoined(line);
        self.inbox.send(joined).await.map_err(|_| Stopped)?;
        let inbox = self.inbox.clone();
        Ok((
            Call {
                inbox,
                router,
                serial,
            },
            words,
        ))
    }
}

/// A router's connection, at the worker.
#[derive(Debug)]
pub(crate) struct Call {
    inbox: mpsc::Sender<WorkerEvent>,
    router: RouterId,
    serial: u64,
}

impl Call {
    /// The router said something.
    pub(crate) async fn hear(&self, word: Downward) -> Result<(), Stopped> {
        let told = WorkerEvent::Told {
            router: self.router,
            serial: self.serial,
            word,
        };
        self.inbox.send(told).await.map_err(|_| Stopped)
    }

    /// The connection is over.
    pub(crate) async fn leave(self) {
        let lost = WorkerEvent::RouterLost {
            router: self.router,
            serial: self.serial,
        };
        // A stopped driver has forgotten the router anyway.
        let _ = self.inbox.send(lost).await;
    }
}

/// Joins a worker and a router of one process until either stops.
pub(crate) async fn connect(worker: WorkerDoor, router: RouterDoor) {
    let Ok((call, mut upward)) = worker.join(router.router).await else {
        return;
    };
    let Ok((visit, mut downward)) = router.join(worker.introduce()).await else {
        return call.leave().await;
    };
    let up = async {
        while let Some(word) = upward.recv().await {
            if visit.hear(word).await.is_err() {
                return;
            }
        }
    };
    let down = async {
        while let Some(word) = downward.recv().await {
            if call.hear(word).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = up => {}
        () = down => {}
    }
    tokio::join!(call.leave(), visit.leave());
}
