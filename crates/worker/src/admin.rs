//! A worker's operator interface: its view and its commands, without a router in between.
//!
//! Owns: the view that the worker's HTTP port shows, the legs that it serves now, and whether it
//! was asked to leave. Never decides: a command goes to the driver, and the brain carries it out.

use cleave_api::{CommandError, Operator, WorkerCommand, WorkerState, WorkerView};
use cleave_domain::{Role, StepProgress, WorkerId, WorkerLoad};
use cleave_fleet::views::{self, CommandNovelty, PendingCommands};
use cleave_fleet::{LinkState, Registration, WorkerEvent};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};

#[derive(Debug)]
pub struct WorkerAdmin {
    view: Mutex<WorkerView>,
    links: Mutex<BTreeMap<WorkerId, LinkState>>,
    commands: Mutex<PendingCommands>,
    role: watch::Sender<Role>,
    drain_request: watch::Sender<bool>,
    inbox: mpsc::Sender<WorkerEvent>,
}

impl WorkerAdmin {
    pub(crate) fn new(registration: &Registration, inbox: mpsc::Sender<WorkerEvent>) -> Self {
        Self {
            role: watch::Sender::new(registration.description.role),
            view: Mutex::new(views::initial_view(registration)),
            links: Mutex::default(),
            commands: Mutex::default(),
            drain_request: watch::Sender::new(false),
            inbox,
        }
    }

    /// The legs that it serves, from now on.
    pub(crate) fn role(&self) -> watch::Receiver<Role> {
        self.role.subscribe()
    }

    /// Returns once a router or an operator has asked the worker to leave.
    pub async fn wait_for_drain_request(&self) {
        let mut requested = self.drain_request.subscribe();
        // The sender lives as long as this value.
        let _ = requested.wait_for(|requested| *requested).await;
    }

    /// The worker is asked to take nothing new and to leave.
    pub(crate) fn drain_requested(&self) {
        self.drain_request.send_replace(true);
        self.commands().drain_began();
        self.view().state = WorkerState::Draining;
    }

    /// The worker serves these legs from now on.
    pub(crate) fn role_changed(&self, role: Role) {
        self.role.send_replace(role);
        self.commands().role_changed(role);
        self.view().role = role;
    }

    /// A link was measured.
    pub(crate) fn link_measured(&self, link: &LinkState) {
        let mut links = self.links.lock();
        links.insert(link.peer.worker, link.clone());
    }

    /// Measured links, for a router that joins.
    pub(crate) fn links(&self) -> Vec<LinkState> {
        let links = self.links.lock();
        links.values().cloned().collect()
    }

    /// No incarnation of that worker is known any more.
    pub(crate) fn forget_link(&self, peer: WorkerId) {
        let mut links = self.links.lock();
        links.remove(&peer);
    }

    /// The brain's load changed.
    pub(crate) fn load_changed(&self, load: WorkerLoad) {
        let mut view = self.view();
        view.load = load;
        if view.state != WorkerState::Draining {
            view.state = match load.progress {
                StepProgress::Moving => WorkerState::Ready,
                StepProgress::Stuck => WorkerState::Stuck,
            };
        }
    }

    fn commands(&self) -> MutexGuard<'_, PendingCommands> {
        self.commands.lock()
    }

    fn view(&self) -> MutexGuard<'_, WorkerView> {
        self.view.lock()
    }
}

impl Operator for WorkerAdmin {
    fn workers(&self) -> Vec<WorkerView> {
        let mut view = self.view().clone();
        view.links = self
            .links()
            .into_iter()
            .map(|link| views::link_view(link.peer.worker.to_string(), &link))
            .collect();
        vec![view]
    }

    fn command(&self, worker: &str, command: WorkerCommand) -> Result<WorkerView, CommandError> {
        let view = self.view().clone();
        if view.name != worker {
            return Err(CommandError::UnknownWorker);
        }
        // Reserves room first: a command that is not forwarded must not count as unanswered.
        let permit = self.inbox.try_reserve().map_err(|error| match error {
            TrySendError::Full(()) => CommandError::Busy,
            TrySendError::Closed(()) => CommandError::Stopped,
        })?;
        if self.commands().accept(command)? == CommandNovelty::New {
            permit.send(WorkerEvent::Commanded(command));
        }
        Ok(views::view_after(view, command))
    }

    fn only_worker(&self) -> Option<String> {
        Some(self.view().name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_fleet::sample;

    #[test]
    fn a_full_inbox_answers_busy_not_stopped() {
        let (inbox, mut events) = mpsc::channel(1);
        let admin = WorkerAdmin::new(&sample::registration(), inbox);
        let serve = |role| admin.command("w", WorkerCommand::SetRole(role));
        assert_eq!(serve(Role::Decode).unwrap().role, Role::Decode);
        assert_eq!(serve(Role::Prefill), Err(CommandError::Busy));
        assert!(events.try_recv().is_ok());
        // Sent and not carried out yet: once is enough.
        assert!(serve(Role::Decode).is_ok());
        assert!(events.try_recv().is_err());
        admin.role_changed(Role::Decode);
        assert!(serve(Role::Decode).is_ok());
        assert!(events.try_recv().is_ok());
        drop(events);
        assert_eq!(serve(Role::Both), Err(CommandError::Stopped));
    }

    #[test]
    fn a_worker_that_progresses_again_is_shown_ready() {
        let (inbox, _events) = mpsc::channel(1);
        let admin = WorkerAdmin::new(&sample::registration(), inbox);
        let shown = |progress| {
            admin.load_changed(WorkerLoad {
                queue_tokens: 7,
                progress,
                ..WorkerLoad::default()
            });
            let view = admin.workers().remove(0);
            assert_eq!(view.load.queue_tokens, 7);
            view.state
        };
        assert_eq!(shown(StepProgress::Stuck), WorkerState::Stuck);
        assert_eq!(shown(StepProgress::Moving), WorkerState::Ready);
        admin.drain_requested();
        assert_eq!(shown(StepProgress::Stuck), WorkerState::Draining);
    }
}
