//! The loop around a worker's brain: handle one fact, perform all outputs of the brain, wait for
//! the next.
//!
//! Never decides, and never blocks: long work belongs to the engine's thread, a link's task or a
//! router's connection, and comes back as a fact.
//! Invariant: all outputs of the brain are performed before it is given the next input.

mod actions;
mod links;

use super::adapter_gate::{
    AdapterChangeQueue, AdapterEvent, AdapterGate, OpenRequest, Passage, QueuedAdapterChange,
};
use super::admin::WorkerAdmin;
use super::constraint_gate::{ConstraintGate, RouterOrder};
use super::directory::PeerDirectory;
use super::engine::EngineHost;
use super::exports::ExportQueue;
use super::stops::PendingStops;
use cleave_api::WorkerCommand;
use cleave_domain::{
    AdapterCommand, AdapterReport, BlockHash, Capacity, Constraint, Emission, HandoffId, Order,
    Report, ReserveOrder, Role, RouterId, TapeRecord, WorkerLoad,
};
use cleave_fleet::{
    BrainClock, FromWorker, RouterConnection, ToWorker, WorkerEvent, deadline_reached,
};
use cleave_sched::{WorkerActions, WorkerBrain, WorkerInput, WorkerLimits};
use cleave_telemetry::{TapeRecorder, WorkerMeters, WorkerObserver, WorkerSpans};
use cleave_transfer::{GrantIssuer, LinkEvent, Links, PeerRoute, ReceivedPayload};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tracing::{debug, error, info, warn};

/// The router id of a command at this worker's own port. No router has it, since ids that large are
/// not accepted.
const OPERATOR: RouterId = RouterId(u64::MAX);

/// Everything that can wake the driver; this list is closed.
enum WorkerWakeup {
    Outside(WorkerEvent),
    Link(LinkEvent),
    Engine(WorkerInput),
    /// This constraint is compiled, or known to be unusable.
    ConstraintKnown(Arc<Constraint>),
    /// Work on an adapter has ended.
    Adapter(AdapterEvent),
    Deadline,
}

pub(crate) struct WorkerInbox {
    pub(crate) inbox: mpsc::Receiver<WorkerEvent>,
    pub(crate) links: mpsc::Receiver<LinkEvent>,
    pub(crate) engine: mpsc::UnboundedReceiver<WorkerInput>,
    pub(crate) constraints: mpsc::UnboundedReceiver<Arc<Constraint>>,
    pub(crate) adapters: mpsc::UnboundedReceiver<AdapterEvent>,
}

/// The things that outputs act on.
pub(crate) struct WorkerEffects {
    pub(crate) engine: EngineHost,
    pub(crate) links: Links,
    /// Grants by which senders in other processes may write here, and this worker elsewhere.
    pub(crate) grants: Option<GrantIssuer>,
    pub(crate) meters: WorkerMeters,
    pub(crate) spans: WorkerSpans,
    /// For log messages: the worker's name, and the address at which its blocks are reached.
    pub(crate) name: String,
    pub(crate) data_address: String,
    pub(crate) link_prices: LinkPriceSource,
    pub(crate) recorder: TapeRecorder,
    pub(crate) admin: Arc<WorkerAdmin>,
    pub(crate) constraint_gate: ConstraintGate,
    pub(crate) adapter_gate: AdapterGate,
    pub(crate) drained: watch::Sender<bool>,
}

impl WorkerEffects {
    /// The receivers of every note, in their order.
    fn observers(&mut self) -> [&mut dyn WorkerObserver; 2] {
        [&mut self.spans, &mut self.meters]
    }
}

/// The source of link prices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkPriceSource {
    /// Each link's own measurement.
    Measured,
    /// Given together with the prices of the steps.
    Given,
}

pub(crate) struct WorkerDriver {
    clock: BrainClock,
    brain: WorkerBrain,
    capacity: Capacity,
    inbox: WorkerInbox,
    effects: WorkerEffects,
    routers: BTreeMap<RouterId, RouterConnection>,
    peers: PeerDirectory,
    exports: ExportQueue,
    stops: PendingStops,
    /// The payload of the frame that is the brain's present input.
    payload_arriving: Option<ReceivedPayload>,
    /// The load that the operator and the metrics last saw.
    load_shown: Option<WorkerLoad>,
    /// The adapters that routers know of.
    adapters_shown: AdapterReport,
    /// Version of the adapters that the metrics last saw.
    adapters_version_shown: u64,
    adapter_changes: AdapterChangeQueue,
    /// Facts that arose while the brain's outputs were performed.
    pending: VecDeque<WorkerInput>,
    /// Tokens that the brain emitted for the present input; they are sent together.
    emitted: BTreeMap<RouterId, Vec<(HandoffId, Emission)>>,
}

impl WorkerDriver {
    /// `found` are the blocks that an earlier incarnation of the worker left on disk.
    pub(crate) fn new(
        limits: WorkerLimits,
        found: Vec<BlockHash>,
        inbox: WorkerInbox,
        mut effects: WorkerEffects,
    ) -> Self {
        let capacity = limits.capacity;
        effects
            .recorder
            .write_worker(TapeRecord::Started { limits: &limits });
        Self {
            clock: BrainClock::start(),
            brain: WorkerBrain::new(limits),
            capacity,
            inbox,
            effects,
            routers: BTreeMap::new(),
            peers: PeerDirectory::default(),
            exports: ExportQueue::default(),
            stops: PendingStops::default(),
            payload_arriving: None,
            load_shown: None,
            adapters_shown: AdapterReport::default(),
            adapters_version_shown: 0,
            adapter_changes: AdapterChangeQueue::default(),
            pending: if found.is_empty() {
                VecDeque::new()
            } else {
                VecDeque::from([WorkerInput::FoundOnDisk { contents: found }])
            },
            emitted: BTreeMap::new(),
        }
    }

    /// Runs until it is stopped, or until no event can come any more.
    pub(crate) async fn run(mut self) {
        self.announce_adapters();
        self.drain_brain();
        loop {
            match self.next_event().await {
                Some(WorkerWakeup::Outside(WorkerEvent::Stop)) | None => return,
                Some(WorkerWakeup::Outside(event)) => self.handle_event(event),
                Some(WorkerWakeup::Link(event)) => self.handle_link_event(event),
                Some(WorkerWakeup::Engine(answer)) => self.handle(answer),
                Some(WorkerWakeup::ConstraintKnown(known)) => {
                    let orders = self.effects.constraint_gate.take_known(&known);
                    let orders = orders.into_iter();
                    orders.for_each(|order| self.pass_adapter_gate(order));
                }
                Some(WorkerWakeup::Adapter(event)) => self.handle_adapter_event(event),
                Some(WorkerWakeup::Deadline) => self.handle(WorkerInput::Woke),
            }
        }
    }

    async fn next_event(&mut self) -> Option<WorkerWakeup> {
        let deadline = self.brain.deadline();
        // The order is fixed, so that the same facts at the same moments give the same decisions.
        // The engine, the links, the compiler of constraints and work on adapters report only what
        // they were asked for, so that routers are not starved.
        tokio::select! {
            biased;
            () = deadline_reached(self.clock, deadline) => Some(WorkerWakeup::Deadline),
            answer = self.inbox.engine.recv() => answer.map(WorkerWakeup::Engine),
            event = self.inbox.links.recv() => event.map(WorkerWakeup::Link),
            known = self.inbox.constraints.recv() => known.map(WorkerWakeup::ConstraintKnown),
            event = self.inbox.adapters.recv() => event.map(WorkerWakeup::Adapter),
            event = self.inbox.inbox.recv() => event.map(WorkerWakeup::Outside),
        }
    }

    /// Gives the brain one fact, and performs everything that follows from it.
    fn handle(&mut self, input: WorkerInput) {
        self.pending.push_back(input);
        self.drain_brain();
    }

    /// Gives the brain all pending facts, and those that arise meanwhile.
    fn drain_brain(&mut self) {
        while let Some(input) = self.pending.pop_front() {
            let at = self.clock.now();
            let line = TapeRecord::Received { at, input: &input };
            self.effects.recorder.write_worker(line);
            self.brain.handle(at, input);
            while let Some(output) = self.brain.poll() {
                self.effects
                    .recorder
                    .write_worker(TapeRecord::Emitted { output: &output });
                output.perform(self);
            }
            for (router, tokens) in std::mem::take(&mut self.emitted) {
                self.enqueue_for_router(router, FromWorker::Emissions(tokens));
            }
            self.effects.recorder.flush();
            assert!(
                self.payload_arriving.is_none(),
                "the brain neither imported nor discarded a frame"
            );
        }
        self.publish_load();
    }

    /// Shows the load that routers receive to the operator and the metrics, whether or not a router
    /// is connected.
    fn publish_load(&mut self) {
        let version = self.effects.adapter_gate.version();
        if std::mem::replace(&mut self.adapters_version_shown, version) != version {
            let adapters = self.effects.adapter_gate.in_use();
            self.effects.meters.adapters_changed(&adapters);
        }
        let load = self.brain.load();
        if self.load_shown.replace(load) != Some(load) {
            self.effects.admin.load_changed(load);
            self.effects.meters.load_changed(load);
        }
    }

    fn handle_event(&mut self, event: WorkerEvent) {
        match event {
            WorkerEvent::RouterJoined(line) => {
                let router = line.router;
                // Its transport has logged the connection; within a process it says nothing.
                debug!(%router, "router joined");
                if self.routers.remove(&router).is_some() {
                    self.router_lost(router);
                }
                self.routers.insert(router, line);
                // The join comes first: a connection that has ended already is lost to the brain
                // after it joined.
                self.handle(WorkerInput::RouterJoined { router });
                // Without any, too: an earlier start of the worker may have had some.
                if self.effects.adapter_gate.is_capable() {
                    let adapters = Report::Adapters(self.adapters_shown.clone());
                    self.send_to_router(router, FromWorker::Report(adapters));
                }
                for link in self.effects.admin.links() {
                    self.send_to_router(router, FromWorker::Link(link));
                }
                self.drain_brain();
            }
            WorkerEvent::RouterLost { router, serial } => {
                if self
                    .routers
                    .get(&router)
                    .is_some_and(|line| line.serial == serial)
                {
                    self.routers.remove(&router);
                    // As above: a transport logs the end too.
                    debug!(%router, "router lost");
                    self.router_lost(router);
                }
            }
            WorkerEvent::FromRouter {
                router,
                serial,
                message,
            } => {
                // A message from a connection that was replaced meanwhile is dropped.
                if self
                    .routers
                    .get(&router)
                    .is_some_and(|line| line.serial == serial)
                {
                    self.handle_router_message(router, message);
                }
            }
            WorkerEvent::Commanded(WorkerCommand::Drain) => {
                self.effects.admin.drain_requested();
                self.handle(WorkerInput::Draining);
            }
            WorkerEvent::Commanded(WorkerCommand::SetRole(role)) => {
                self.serve(role);
                let order = Order::Serve { role };
                let router = OPERATOR;
                self.handle(WorkerInput::Ordered { router, order });
            }
            WorkerEvent::Drain => {
                self.effects.admin.drain_requested();
                self.handle(WorkerInput::Draining);
            }
            WorkerEvent::Stop => {}
        }
    }

    fn handle_router_message(&mut self, router: RouterId, message: ToWorker) {
        match message {
            ToWorker::Peer {
                worker,
                data_address,
            } => {
                self.peers.add(worker, router);
                match PeerRoute::parse(&data_address) {
                    Ok(route) => self.effects.links.add_peer(worker, route),
                    // Hand-offs with it will find no route, and fail.
                    Err(error) => warn!(peer = %worker, %error, "invalid worker address"),
                }
            }
            ToWorker::PeerGone { worker } => {
                let gone = self.peers.remove(worker, router);
                self.forget_peers(gone);
                self.drain_brain();
            }
            ToWorker::NameTaken { data_address } => {
                // The connection ends after this; it is dialled again in case the other worker
                // leaves.
                error!(
                    name = self.effects.name,
                    %router,
                    here = self.effects.data_address,
                    there = data_address,
                    "another worker of this name started later and is connected to the router: \
                     this one is cut off; give one of the two another name (--name)"
                );
            }
            ToWorker::Grant { handoff, grant } => {
                self.update_grants(|grants| grants.store(handoff, grant));
            }
            ToWorker::Adapter {
                request,
                change,
                command,
            } => {
                self.adapter_changes.push(QueuedAdapterChange {
                    router,
                    request,
                    change,
                    command,
                });
                self.change_adapters();
            }
            ToWorker::Order { order, context } => {
                let order = RouterOrder {
                    router,
                    order,
                    context,
                };
                if let Some(order) = self.effects.constraint_gate.pass(order) {
                    self.pass_adapter_gate(order);
                }
            }
        }
    }

    /// Takes an order whose constraint is known, once its adapter is loaded.
    fn pass_adapter_gate(&mut self, order: RouterOrder) {
        let (_, request) = order.subject();
        let has_adapter = request.is_some_and(|request| request.adapter.is_some());
        let may_load = has_adapter || matches!(order.order, Order::FetchAdapter { .. });
        let passage = self.effects.adapter_gate.pass(order);
        self.go(passage);
        if may_load {
            // A place may have been made.
            self.announce_adapters();
        }
    }

    fn handle_adapter_event(&mut self, event: AdapterEvent) {
        match event {
            AdapterEvent::Loaded { adapter, outcome } => {
                // Routers know of the adapter before its hand-offs are reported.
                let passages = self.effects.adapter_gate.loaded(adapter, &outcome);
                self.announce_adapters();
                passages.into_iter().for_each(|passage| self.go(passage));
            }
            AdapterEvent::Opened { request, outcome } => {
                let outcome = self.effects.adapter_gate.opened(&request, outcome);
                if outcome.is_ok() {
                    info!(name = request.name, "adapter is served");
                }
                self.answer_adapter(request.router, request.number, outcome);
                self.adapter_changes.opening_ended();
                self.change_adapters();
            }
        }
        self.publish_load();
    }

    /// Carries out the changes of adapters that wait for no folder.
    fn change_adapters(&mut self) {
        while let Some(change) = self.adapter_changes.next() {
            self.change_adapter(change);
        }
    }

    fn change_adapter(&mut self, change: QueuedAdapterChange) {
        let QueuedAdapterChange {
            router,
            request,
            change,
            command,
        } = change;
        let gate = &mut self.effects.adapter_gate;
        let outcome = gate.check_order(command.name(), change);
        let outcome = outcome.and_then(|()| gate.check_room(&command));
        match command {
            _ if outcome.is_err() => self.answer_adapter(router, request, outcome),
            // A worker that lost its connection alone has it still.
            AdapterCommand::Load {
                name,
                folder,
                content: Some(content),
            } if gate.keep(&name, &folder, content, change) => {
                self.answer_adapter(router, request, Ok(()));
            }
            AdapterCommand::Load {
                name,
                folder,
                content,
            } => {
                self.adapter_changes.opening_began();
                gate.open(OpenRequest {
                    router,
                    number: request,
                    change,
                    name,
                    folder,
                    content,
                });
            }
            AdapterCommand::Unload { name } => {
                // A worker that never had it serves it no longer, too.
                let was_served = gate.unload(&name, change);
                info!(name, was_served, "adapter is served no longer");
                self.answer_adapter(router, request, Ok(()));
            }
        }
    }

    /// Answers a change of adapters, after every router knows of it.
    fn answer_adapter(&mut self, router: RouterId, request: u64, outcome: Result<(), String>) {
        self.announce_adapters();
        self.send_to_router(router, FromWorker::AdapterAnswer { request, outcome });
    }

    fn go(&mut self, passage: Passage) {
        match passage {
            Passage::Open(order) => self.take_order(order),
            Passage::Held => {}
            Passage::Refused(router, report) => self.report(router, report),
        }
    }

    /// Tells routers which adapters are served, and where each is, if that has changed.
    fn announce_adapters(&mut self) {
        let adapters = self.effects.adapter_gate.report();
        if adapters == self.adapters_shown {
            return;
        }
        self.adapters_shown.clone_from(&adapters);
        for router in self.routers.keys().copied().collect::<Vec<_>>() {
            let report = Report::Adapters(adapters.clone());
            self.send_to_router(router, FromWorker::Report(report));
        }
    }

    /// Takes an order whose constraint is known and whose adapter is loaded, if it has any.
    fn take_order(&mut self, order: RouterOrder) {
        let RouterOrder {
            router,
            order,
            context,
        } = order;
        self.effects.spans.order_received(&order, context);
        match &order {
            Order::Drain => self.effects.admin.drain_requested(),
            Order::Serve { role } => self.serve(*role),
            Order::Reserve(reserve) => self.issue_grant(router, reserve),
            Order::Prefill(_)
            | Order::Run(_)
            | Order::Migrate(_)
            | Order::Renew { .. }
            | Order::Cancel { .. }
            | Order::Relay(_)
            | Order::FetchAdapter { .. } => {}
        }
        self.handle(WorkerInput::Ordered { router, order });
    }

    /// Issues a grant to write to the blocks about to be reserved. If they are not reserved, the
    /// grant permits nothing.
    fn issue_grant(&mut self, router: RouterId, reserve: &ReserveOrder) {
        let Some(grants) = &self.effects.grants else {
            return;
        };
        let handoff = reserve.handoff;
        let grant = grants.issue(handoff, reserve.sender, &reserve.request.slo.tenant);
        self.send_to_router(router, FromWorker::Grant { handoff, grant });
    }

    fn update_grants(&self, change: impl FnOnce(&GrantIssuer)) {
        if let Some(grants) = &self.effects.grants {
            change(grants);
            self.effects.meters.set_grants(grants.stored_count());
        }
    }

    /// Shows a new role, before the brain is given it.
    fn serve(&mut self, role: Role) {
        info!(name = self.effects.name, %role, "role changed");
        self.effects.admin.role_changed(role);
        self.effects.meters.role_changed(role);
        self.update_grants(|_| {});
    }

    /// Sends a message after the tokens that were emitted before it.
    fn send_to_router(&mut self, router: RouterId, message: FromWorker) {
        if let Some(tokens) = self.emitted.remove(&router) {
            self.enqueue_for_router(router, FromWorker::Emissions(tokens));
        }
        self.enqueue_for_router(router, message);
    }

    /// Queues a message. A router whose connection is full does not read it and counts as lost.
    fn enqueue_for_router(&mut self, router: RouterId, message: FromWorker) {
        let Some(line) = self.routers.get(&router) else {
            return; // It left meanwhile; the brain knows, or has it pending.
        };
        // A connection that has ended is lost by an event of its own.
        if let Err(error @ TrySendError::Full(_)) = line.out.try_send(message) {
            warn!(%router, %error, "router lost: it does not read its messages");
            self.routers.remove(&router);
            self.pending.push_back(WorkerInput::RouterLost { router });
            let gone = self.peers.remove_router(router);
            self.forget_peers(gone);
        }
    }

    /// Ends the router's flights first, while the peers that they concern can still be reached.
    fn router_lost(&mut self, router: RouterId) {
        self.handle(WorkerInput::RouterLost { router });
        self.effects.spans.router_lost(router);
        self.effects.constraint_gate.router_lost(router);
        self.effects.adapter_gate.router_lost(router);
        self.update_grants(|grants| grants.remove_router(router));
        let gone = self.peers.remove_router(router);
        self.forget_peers(gone);
        self.drain_brain();
    }
}
