//! A worker's own desk: what its operator sees of it and tells it, without a router in between.
//!
//! Owns: the view that the worker's HTTP port shows, which legs it serves now, and whether it was
//! asked to leave. Never: decides: a command goes to the driver, and the brain does what it means.

use super::WorkerEvent;
use crate::line::{Introduction, LinkState};
use crate::views::{self, Commands, Novelty};
use cleave_api::{CommandError, Operator, WorkerCommand, WorkerState, WorkerView};
use cleave_domain::{Load, Progress, Role, WorkerId};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};

/// See the module.
#[derive(Debug)]
pub(crate) struct Desk {
    view: Mutex<WorkerView>,
    links: Mutex<BTreeMap<WorkerId, LinkState>>,
    commands: Mutex<Commands>,
    role: watch::Sender<Role>,
    asked_to_leave: watch::Sender<bool>,
    inbox: mpsc::Sender<WorkerEvent>,
}

impl Desk {
    pub(crate) fn new(introduction: &Introduction, inbox: mpsc::Sender<WorkerEvent>) -> Self {
        Self {
            role: watch::Sender::new(introduction.description.role),
            view: Mutex::new(views::joined(introduction)),
            links: Mutex::default(),
            commands: Mutex::default(),
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
        self.commands().drains();
        self.view().state = WorkerState::Draining;
    }

    /// The worker serves these legs from now on.
    pub(crate) fn serves(&self, role: Role) {
        self.role.send_replace(role);
        self.commands().serves(role);
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

    /// The brain counts so much, and does or does not get anywhere.
    pub(crate) fn loaded(&self, load: Load) {
        let mut view = self.view();
        view.load = load;
        if view.state != WorkerState::Draining {
            view.state = match load.progress {
                Progress::Moving => WorkerState::Ready,
                Progress::Stuck => WorkerState::Stuck,
            };
        }
    }

    fn commands(&self) -> MutexGuard<'_, Commands> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
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
            .map(|link| views::link(link.peer.worker.to_string(), &link))
            .collect();
        vec![view]
    }

    fn command(&self, worker: &str, command: WorkerCommand) -> Result<WorkerView, CommandError> {
        let view = self.view().clone();
        if view.name != worker {
            return Err(CommandError::Unknown);
        }
        // Room first: what is not passed on is not unanswered.
        let room = self.inbox.try_reserve().map_err(|error| match error {
            TrySendError::Full(()) => CommandError::Busy,
            TrySendError::Closed(()) => CommandError::Stopped,
        })?;
        if self.commands().take(command)? == Novelty::New {
            room.send(WorkerEvent::Commanded(command));
        }
        Ok(views::after(view, command))
    }

    fn sole(&self) -> Option<String> {
        Some(self.view().name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::sample;

    #[test]
    fn a_worker_that_is_behind_was_said_to_shut_down() {
        let (inbox, mut heard) = mpsc::channel(1);
        let desk = Desk::new(&sample::introduction(), inbox);
        let serve = |role| desk.command("w", WorkerCommand::Serve(role));
        assert_eq!(serve(Role::Decode).unwrap().role, Role::Decode);
        assert_eq!(serve(Role::Prefill), Err(CommandError::Busy));
        assert!(heard.try_recv().is_ok());
        // Said, and not done yet: once is enough.
        assert!(serve(Role::Decode).is_ok());
        assert!(heard.try_recv().is_err());
        desk.serves(Role::Decode);
        assert!(serve(Role::Decode).is_ok());
        assert!(heard.try_recv().is_ok());
        drop(heard);
        assert_eq!(serve(Role::Both), Err(CommandError::Stopped));
    }

    #[test]
    fn a_worker_that_moves_again_was_shown_as_stuck() {
        let (inbox, _heard) = mpsc::channel(1);
        let desk = Desk::new(&sample::introduction(), inbox);
        let shown = |progress| {
            desk.loaded(Load {
                queue_tokens: 7,
                progress,
                ..Load::default()
            });
            let view = desk.workers().remove(0);
            assert_eq!(view.load.queue_tokens, 7);
            view.state
        };
        assert_eq!(shown(Progress::Stuck), WorkerState::Stuck);
        assert_eq!(shown(Progress::Moving), WorkerState::Ready);
        desk.leaves();
        assert_eq!(shown(Progress::Stuck), WorkerState::Draining);
    }
}
