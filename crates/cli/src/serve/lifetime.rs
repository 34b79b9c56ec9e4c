//! The life of a process that serves: until a signal, a failure or an operator's request ends it.
//!
//! Owns: signals, the order of a shutdown, and the messages to a service manager (systemd's
//! protocol, sd_notify(3)). Never: decides what a drain waits for.

use crate::values::SecondsArg;
use anyhow::{Context, anyhow};
use cleave_node::{RunningFleet, RunningRouter, RunningWorker};
use sd_notify::NotifyState;
use std::pin::Pin;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};

/// Exit status after a second signal: 128 + SIGINT, as in shells.
const EXIT_ON_SECOND_SIGNAL: i32 = 130;

/// Time limits of a shutdown.
#[derive(Clone, Copy)]
pub(super) struct ShutdownPlan {
    /// Time during which the process only reports "not ready".
    pub(super) delay: Duration,
    /// Time limit for running requests after that.
    pub(super) limit: SecondsArg,
}

/// A running node, as far as signals and the exit status are concerned.
pub(super) trait RunningNode {
    async fn ready(&self);
    async fn broken(&self) -> String;
    /// Returns when an operator has asked the node to leave.
    async fn wait_for_leave_request(&self);
    /// Reports "not ready" from now on and keeps serving.
    fn leave(&self);
    async fn drain(self, deadline: Duration);
}

// The node's own methods take precedence over the trait's methods of the same name.
macro_rules! node {
    ($($running:ty: $leave_request:expr, $leave:expr;)*) => {$(
        impl RunningNode for $running {
            async fn ready(&self) {
                self.ready().await;
            }

            async fn broken(&self) -> String {
                self.failed().await
            }

            async fn wait_for_leave_request(&self) {
                let leave_request: fn(&Self) -> LeaveRequest<'_> = $leave_request;
                leave_request(self).await;
            }

            fn leave(&self) {
                let leave: fn(&Self) = $leave;
                leave(self);
            }

            async fn drain(self, deadline: Duration) {
                self.drain(deadline).await;
            }
        }
    )*};
}

type LeaveRequest<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

node!(
    RunningFleet: |_| Box::pin(std::future::pending()), Self::set_not_ready;
    RunningRouter: |_| Box::pin(std::future::pending()), Self::set_not_ready;
    // A worker's routers learn of the drain from the worker itself.
    RunningWorker: |worker| Box::pin(worker.wait_for_drain_request()), |_| {};
);

/// Runs a node until a signal arrives or it fails, then drains it. A failure sets the exit status.
pub(super) async fn run_until_stopped<N: RunningNode>(
    node: N,
    mut stop: TerminationSignals,
    shutdown: ShutdownPlan,
    report_ready: impl FnOnce(&N),
) -> anyhow::Result<()> {
    // Started means that the ports answer: a router waits for workers without an end.
    notify_service_manager(&[
        NotifyState::Ready,
        NotifyState::Status("serves; not ready yet"),
    ]);
    let ready = async {
        node.ready().await;
        notify_service_manager(&[NotifyState::Status("ready")]);
        cleave_cpu::trim_allocator();
        report_ready(&node);
        std::future::pending().await
    };
    // A failure, an operator's request or a signal ends the node.
    let broken = tokio::select! {
        broken = ready => Some(broken),
        broken = node.broken() => Some(broken),
        () = node.wait_for_leave_request() => None,
        () = stop.signalled() => None,
    };
    notify_service_manager(&[NotifyState::Stopping, NotifyState::Status("drains")]);
    let ShutdownPlan { delay, limit } = shutdown;
    if broken.is_none() && !delay.is_zero() {
        let delay_seconds = delay.as_secs_f64();
        info!(
            delay_seconds,
            "reporting not ready, and serving until the delay is over"
        );
        node.leave();
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            _ = node.broken() => {}
            () = stop.signalled() => end_at_once(),
        }
    }
    let limit_seconds = limit.0.as_secs_f64();
    info!(limit_seconds, "draining; a second signal ends at once");
    tokio::select! {
        () = node.drain(limit.0) => {}
        () = stop.signalled() => end_at_once(),
    }
    broken.map_or(Ok(()), |reason| Err(anyhow!("{reason}")))
}

/// Does nothing unless a service manager asked for messages by NOTIFY_SOCKET.
fn notify_service_manager(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        warn!(%error, "cannot notify the service manager");
    }
}

fn end_at_once() -> ! {
    warn!("ended at once");
    std::process::exit(EXIT_ON_SECOND_SIGNAL);
}

/// Ctrl-C and SIGTERM: the first one drains, the second one ends the process at once.
pub(super) struct TerminationSignals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl TerminationSignals {
    pub(super) fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    async fn signalled(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
