//! A router's worker connections: workers join, are lost, and are sent orders.
//!
//! Invariant: each incarnation of a worker joins and is lost in turn.

use super::RouterDriver;
use crate::adapters::{OrderedChange, ReportCommands};
use crate::join_warnings::warn_of_mismatch;
use crate::orders;
use cleave_api::WorkerState;
use cleave_domain::{AdapterCommand, AdapterReport, Order, Report, WorkerId, WorkerRef};
use cleave_fleet::{ToWorker, WorkerConnection};
use cleave_router::RouterInput;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::oneshot;
use tracing::{error, info, warn};

/// The number of a change of adapters whose answer nobody waits for; others begin with 1.
const NO_REQUEST: u64 = 0;

#[derive(Debug)]
pub(super) struct ConnectedWorker {
    connection: WorkerConnection,
    /// Peers whose address was sent to it.
    peers_sent: BTreeSet<WorkerRef>,
}

impl RouterDriver {
    pub(super) fn worker_joined(&mut self, connection: WorkerConnection) {
        let worker = connection.registration.worker;
        if let Some(connected) = self.workers.get(&worker.worker) {
            let registered = &connected.connection.registration;
            if registered.worker.incarnation > worker.incarnation {
                // An earlier start that still dials is alive: two processes have one name.
                let name = &connection.registration.name;
                let (there, here) = (
                    &registered.data_address,
                    &connection.registration.data_address,
                );
                error!(
                    name,
                    kept = there,
                    turned_away = here,
                    "two workers have one name: give one of them another (--name)"
                );
                send_name_taken(&connection, there.clone());
                self.standby.add(connection);
                return self.count_standby();
            }
            let earlier = registered.worker;
            if earlier != worker {
                // A restart whose old stream lingers, or the second of two workers with one name:
                // an earlier one that is alive is notified why it is cut off, and logs it.
                let (there, here) = (
                    &registered.data_address,
                    &connection.registration.data_address,
                );
                warn!(%worker, before = there, now = here, "a worker with the same name and a later start replaces this one");
                send_name_taken(&connected.connection, here.clone());
                self.standby.add(connected.connection.clone());
            }
            self.remove_worker(earlier);
        }
        self.standby.name_taken(worker.worker);
        self.count_standby();
        let description = connection.registration.description.clone();
        let (name, role) = (&connection.registration.name, description.role);
        info!(%worker, name, %role, "worker joined");
        let serves = format!("serves {role}");
        self.effects
            .dashboard
            .worker_changed("joined", &serves, name);
        let model = connection.registration.description.model.clone();
        let connected = self
            .workers
            .values()
            .map(|other| &other.connection.registration)
            .filter(|other| other.description.model == model);
        warn_of_mismatch(&connection.registration, connected);
        let activity = Arc::clone(&connection.activity);
        self.effects.roster.join(&connection.registration, activity);
        let connected = ConnectedWorker {
            connection,
            peers_sent: BTreeSet::new(),
        };
        self.workers.insert(worker.worker, connected);
        self.handle(RouterInput::WorkerJoined {
            worker,
            description,
        });
        self.send_adapters(worker, &model);
    }

    /// Tells a worker that has joined what operators changed of its model's adapters before.
    fn send_adapters(&mut self, worker: WorkerRef, model: &str) {
        let mut commands = self.effects.roster.adapters().commands_for(model);
        commands.extend(self.adapter_changes.pending_for(model).cloned());
        self.send_commands(worker, &commands);
    }

    /// Nobody waits for the answers.
    fn send_commands(&mut self, worker: WorkerRef, changes: &[OrderedChange]) {
        for OrderedChange { change, command } in changes {
            let message = ToWorker::Adapter {
                request: NO_REQUEST,
                change: *change,
                command: command.clone(),
            };
            self.enqueue_for_worker(worker, message);
        }
    }

    pub(super) fn worker_lost(&mut self, worker: WorkerRef, serial: u64, reason: &str) {
        self.standby.connection_lost(worker, serial);
        if self.is_current(worker, serial) {
            let connected = self.workers.get(&worker.worker);
            let name = connected.map(|connected| &*connected.connection.registration.name);
            // A worker that was asked to leave, or leaves by a signal, has said so before.
            if self.effects.roster.is_draining(worker) {
                info!(%worker, name, reason, "worker left");
            } else {
                warn!(%worker, name, reason, "worker lost");
            }
            self.remove_worker(worker);
            self.free_name(worker.worker);
        }
        self.count_standby();
    }

    /// Removes a worker that is connected no longer.
    fn forget_worker(&mut self, worker: WorkerRef) {
        self.workers.remove(&worker.worker);
        self.grants.issuer_lost(worker);
        self.adapter_changes.worker_lost(worker);
        let Some(view) = self.effects.roster.leave(worker) else {
            return;
        };
        let (kind, reason) = match view.state {
            WorkerState::Draining => ("left", "drained"),
            WorkerState::Ready | WorkerState::Stuck => ("lost", "its connection ended"),
        };
        let dashboard = &self.effects.dashboard;
        dashboard.worker_changed(kind, reason, &view.name);
        if view.state != WorkerState::Draining {
            self.effects.roster.remember_lost(view);
        }
    }

    /// Lists it as an event if the report says that the worker's role is another now.
    pub(super) fn show_role_change(&self, worker: WorkerRef, report: &Report) {
        let Report::Serves { role } = report else {
            return;
        };
        if let Some(name) = self.effects.roster.name_of_other_role(worker, *role) {
            let serves = format!("serves {role} now");
            let dashboard = &self.effects.dashboard;
            dashboard.worker_changed("role", &serves, &name);
        }
    }

    /// No worker has the name any more.
    fn free_name(&mut self, name: WorkerId) {
        self.standby.name_freed(name, self.clock.now());
        self.count_standby();
    }

    pub(super) fn count_standby(&self) {
        self.effects.meters.set_standing_by(self.standby.count());
    }

    pub(super) fn is_current(&self, worker: WorkerRef, serial: u64) -> bool {
        let current = self.workers.get(&worker.worker);
        current.is_some_and(|current| current.connection.serial == serial)
    }

    /// Updates a flight with a worker's report on a hand-off, and counts one that landed.
    pub(super) fn track_handoff(&self, worker: WorkerRef, report: &Report) {
        let Some(connected) = self.workers.get(&worker.worker) else {
            return;
        };
        let receiver = &connected.connection.registration.description.capacity;
        if let Some(bytes) = self.effects.flights.handle_report(report, receiver) {
            self.effects.dashboard.handoff_landed(bytes);
            self.effects.meters.handoff_landed(bytes);
        }
    }

    /// Sends a change of adapters to every worker of a model.
    pub(super) fn change_adapter(
        &mut self,
        model: &str,
        command: &AdapterCommand,
        answer: oneshot::Sender<Result<(), String>>,
    ) {
        let workers: BTreeSet<WorkerRef> = self.workers_of(model).collect();
        if workers.is_empty() {
            let reason = format!("no worker of the model {model} is connected");
            // The operator may have left.
            let _ = answer.send(Err(reason));
            return;
        }
        match &command {
            AdapterCommand::Load { name, folder, .. } => {
                info!(model, adapter = name, folder, "an adapter is loaded");
            }
            AdapterCommand::Unload { name } => {
                info!(model, adapter = name, "an adapter is unloaded");
            }
        }
        let change = self.effects.roster.adapters().next_change(self.me);
        let ordered = OrderedChange {
            change,
            command: command.clone(),
        };
        let changes = &mut self.adapter_changes;
        let request = changes.begin(model, ordered, workers.clone(), answer);
        for worker in workers {
            let message = ToWorker::Adapter {
                request,
                change,
                command: command.clone(),
            };
            self.enqueue_for_worker(worker, message);
        }
    }

    /// A worker answered a change of adapters.
    pub(super) fn adapter_answered(
        &mut self,
        worker: WorkerRef,
        request: u64,
        outcome: Result<(), String>,
    ) {
        let name = self.effects.roster.name(&worker);
        if let (NO_REQUEST, Err(reason)) = (request, &outcome) {
            warn!(%worker, name, reason, "a worker refused an earlier change of adapters");
        }
        self.adapter_changes
            .answered(worker, &name, request, outcome);
    }

    /// A worker serves these adapters from now on. A change that this router sees for the first
    /// time is sent to the model's other workers, too: the router that ordered it may have been cut
    /// off from one of them, or none may have known it when one was started. A worker that carried
    /// out an earlier change is sent the later one.
    pub(super) fn adapters_reported(&mut self, worker: WorkerRef, report: &AdapterReport) {
        let Some(connected) = self.workers.get(&worker.worker) else {
            return;
        };
        let model = connected.connection.registration.description.model.clone();
        let adapters = self.effects.roster.adapters();
        let ReportCommands {
            mut learned,
            mut corrections,
        } = adapters.report(worker.worker, &model, report);
        // Every worker has the changes that this router has begun.
        let is_over = |of: &OrderedChange| !self.adapter_changes.is_pending(of.change);
        learned.retain(is_over);
        corrections.retain(is_over);
        self.send_commands(worker, &corrections);
        if learned.is_empty() {
            return;
        }
        let others = self.workers_of(&model).filter(|other| *other != worker);
        for other in others.collect::<Vec<_>>() {
            self.send_commands(other, &learned);
        }
    }

    /// The connected workers of a model.
    fn workers_of(&self, model: &str) -> impl Iterator<Item = WorkerRef> {
        let registrations = self
            .workers
            .values()
            .map(|worker| &worker.connection.registration);
        registrations
            .filter(move |worker| worker.description.model == model)
            .map(|worker| worker.worker)
    }

    pub(super) fn send_order(&mut self, worker: WorkerRef, order: Order) {
        if let Some(peer) = orders::peer_of(&order) {
            self.send_peer_address(worker, peer);
        }
        if let Some((handoff, grant)) = self.grants.take_for_order(&order) {
            self.enqueue_for_worker(worker, ToWorker::Grant { handoff, grant });
        }
        let context = orders::handoff_begun(&order)
            .and_then(|handoff| self.effects.flights.order_context(handoff));
        self.enqueue_for_worker(worker, ToWorker::Order { order, context });
    }

    /// Sends a worker the address of a peer, unless it has it.
    fn send_peer_address(&mut self, worker: WorkerRef, peer: WorkerRef) {
        let Some(connected_peer) = self.workers.get(&peer.worker) else {
            return; // Gone meanwhile: the worker will find no link, and report that.
        };
        if connected_peer.connection.registration.worker != peer {
            return;
        }
        let data_address = connected_peer.connection.registration.data_address.clone();
        let connected_worker = self.workers.get_mut(&worker.worker);
        if connected_worker.is_some_and(|connected_worker| connected_worker.peers_sent.insert(peer))
        {
            self.enqueue_for_worker(
                worker,
                ToWorker::Peer {
                    worker: peer,
                    data_address,
                },
            );
        }
    }

    /// Queues a message. A worker whose connection is full does not read it and counts as lost.
    fn enqueue_for_worker(&mut self, worker: WorkerRef, message: ToWorker) {
        let Some(connected) = self.workers.get(&worker.worker) else {
            return;
        };
        if connected.connection.registration.worker != worker {
            return;
        }
        // A connection that has ended is lost by an event of its own, which says why it ended.
        if let Err(error @ TrySendError::Full(_)) = connected.connection.out.try_send(message) {
            let name = &connected.connection.registration.name;
            warn!(%worker, name, %error, "worker lost: it does not read its orders");
            self.forget_worker(worker);
            self.free_name(worker.worker);
            let lost = RouterInput::WorkerLost { worker };
            self.pending.push_back(lost.into());
            self.send_peer_gone(worker);
        }
    }

    /// Removes a worker that is connected no longer. The other legs of its flights get their orders
    /// before its peers hear of the loss: they end by an order, not by a lost link.
    fn remove_worker(&mut self, worker: WorkerRef) {
        self.forget_worker(worker);
        self.handle(RouterInput::WorkerLost { worker });
        self.send_peer_gone(worker);
        // A full connection may have ended meanwhile.
        self.drain_brain();
    }

    /// Notifies the workers that had its address that a worker is gone.
    fn send_peer_gone(&mut self, worker: WorkerRef) {
        let mut notified = Vec::new();
        for other in self.workers.values_mut() {
            if other.peers_sent.remove(&worker) {
                notified.push(other.connection.registration.worker);
            }
        }
        for other in notified {
            self.enqueue_for_worker(other, ToWorker::PeerGone { worker });
        }
    }
}

/// The last message on a connection; a full connection ends without it.
fn send_name_taken(connection: &WorkerConnection, data_address: String) {
    let _ = connection
        .out
        .try_send(ToWorker::NameTaken { data_address });
}
