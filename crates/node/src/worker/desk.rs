//! A worker's own desk: what its operator sees of it and tells it, without a router in between.
//!
//! Owns: the view that the worker's HTTP port shows, which legs it serves now, and whether it was
//! asked to leave. Never: decides: a command goes to the driver, and the brain does what it means.

use super::WorkerEvent;
use crate::line::{Introduction, LinkState};
use cleave_api::{CommandError, LinkView, Operator, WorkerCommand, WorkerState, WorkerView};
use cleave_domain::{Load, Role, WorkerId};
use cleave_sched::Note;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::{mpsc, watch};

/// See the module.
#[derive(Debug)]
pub(crate) struct Desk {
    view: Mutex<WorkerView>,
    links: Mutex<BTreeMap<WorkerId, LinkState>>,
    role: watch::Sender<Role>,
    asked_to_leave: watch::Sender<bool>,
    inbox: mpsc::Sender<WorkerEvent>,
}

impl Desk {
    pub(crate) fn new(introduction: &Introduction, inbox: mpsc::Sender<WorkerEvent>) -> Self {
        let description = &introduction.description;
        let blocks_count = description.capacity.blocks_count;
        let view = WorkerView {
            name: introduction.name.clone(),
            worker: introduction.worker,
            role: description.role,
            state: WorkerState::Ready,
            fingerprint: description.fingerprint.0.clone(),
            load: Load {
                blocks_free: blocks_count,
                ..Load::default()
            },
            blocks_count,
            links: Vec::new(),
            counters: Vec::new(),
        };
        Self {
            role: watch::Sender::new(description.role),
            view: Mutex::new(view),
            links: Mutex::default(),
            asked_to_leave: watch::Sender::new(false),
            inbox,
        }
    }

    /// Which legs it serves, from now on.
    pub(crate) fn role(&self) -> watch::Receiver<Role> {
        self.role.subscribe()
    }

    /// Returns once a router or an operator has asked the worker to leave.
    pub(crate) async fn asked_to_leave(&self) {
        let mut asked = self.asked_to_leave.subscribe();
        // The sender lives as long as the desk.
        let _ = asked.wait_for(|asked| *asked).await;
    }

    /// The worker is to take nothing new and leave.
    pub(crate) fn leaves(&self) {
        self.asked_to_leave.send_replace(true);
        self.view().state = WorkerState::Draining;
    }

    /// The worker serves these legs from now on.
    pub(crate) fn serves(&self, role: Role) {
        self.role.send_replace(role);
        self.view().role = role;
    }

    /// A link was measured.
    pub(crate) fn measured(&self, link: &LinkState) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.insert(link.peer.worker, link.clone());
    }

    /// Measured links, for a router that joins.
    pub(crate) fn links(&self) -> Vec<LinkState> {
        let links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.values().cloned().collect()
    }

    /// No life of that worker is known any more.
    pub(crate) fn forget(&self, peer: WorkerId) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.remove(&peer);
    }

    /// The brain noted something.
    pub(crate) fn count(&self, note: &Note) {
        match note {
            Note::Pool {
                blocks_free,
                sequences_running,
                sequences_waiting,
                ..
            } => {
                let load = &mut self.view().load;
                load.blocks_free = *blocks_free;
                load.sequences_running = *sequences_running;
                load.sequences_waiting = *sequences_waiting;
            }
            Note::Stuck { .. } => self.turn(WorkerState::Ready, WorkerState::Stuck),
            Note::Stepped { .. } => self.turn(WorkerState::Stuck, WorkerState::Ready),
            _ => {}
        }
    }

    fn turn(&self, from: WorkerState, to: WorkerState) {
        let mut view = self.view();
        if view.state == from {
            view.state = to;
        }
    }

    fn view(&self) -> MutexGuard<'_, WorkerView> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Operator for Desk {
    fn workers(&self) -> Vec<WorkerView> {
        let mut view = self.view().clone();
        view.links = self
            .links()
            .into_iter()
            .map(|link| LinkView {
                peer: link.peer.worker.to_string(),
                transport: link.transport,
                bytes_per_second: link.bytes_per_second,
                latency: link.latency,
            })
            .collect();
        vec![view]
    }

    fn command(&self, worker: &str, command: WorkerCommand) -> Result<WorkerView, CommandError> {
        let mut view = self.view().clone();
        if view.name != worker {
            return Err(CommandError::Unknown);
        }
        match command {
            WorkerCommand::Drain => view.state = WorkerState::Draining,
            WorkerCommand::Serve(role) => view.role = role,
        }
        // A driver so far behind that its inbox is full is asked again, as a stopping one is not.
        let told = self.inbox.try_send(WorkerEvent::Commanded(command));
        told.map_err(|_| CommandError::Stopped)?;
        Ok(view)
    }

    fn sole(&self) -> Option<String> {
        Some(self.view().name.clone())
    }
}
