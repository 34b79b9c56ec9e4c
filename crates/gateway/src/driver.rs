//! The loop around a router's brain: handle one fact, perform all outputs of the brain, wait for
//! the next.
//!
//! Never decides, blocks, or sees a token. Invariant: all outputs of the brain are performed before
//! it is given the next input, and each incarnation of a worker joins and is lost in turn.

mod pool_actions;
mod workers;

use self::pool_actions::PoolActions;
use self::workers::ConnectedWorker;
use super::adapters::AdapterChanges;
use super::dashboard::Dashboard;
use super::event::RouterEvent;
use super::flights::FlightTable;
use super::grants::GrantRelay;
use super::readiness::ModelReadiness;
use super::roster::WorkerRoster;
use super::standby::NameStandby;
use cleave_domain::{
    HandoffId, Report, RouterId, SloPolicy, TapeRecord, TokenId, WorkerId, WorkerRef,
};
use cleave_fleet::{
    BrainClock, ScalingStatus, ScalingStatuses, WorkerConnectionEvent, deadline_reached,
};
use cleave_router::{
    OperatorRequest, OutsideQueue, PoolInput, PoolOutput, RouterInput, RouterLimits, RouterPools,
};
use cleave_telemetry::{RouterMeters, RouterObserver, ScalingSeries, SloMeters, TapeRecorder};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{mpsc, watch};
use tracing::info;

/// The things that outputs act on.
pub(crate) struct RouterEffects {
    pub(crate) flights: Arc<FlightTable>,
    pub(crate) roster: Arc<WorkerRoster>,
    pub(crate) meters: RouterMeters,
    pub(crate) slo: SloMeters,
    pub(crate) dashboard: Arc<Dashboard>,
    pub(crate) recorder: TapeRecorder,
    pub(crate) readiness: watch::Sender<ModelReadiness>,
    pub(crate) drained: watch::Sender<bool>,
    /// The number of workers wanted of each model, as last decided.
    pub(crate) scaling: watch::Sender<ScalingStatuses>,
    /// The policy in force.
    pub(crate) policy: Arc<SloPolicy>,
    pub(crate) scaling_series: ScalingSeries,
}

impl RouterEffects {
    /// The receivers of every note, in their order.
    fn observers(&self) -> [&dyn RouterObserver; 5] {
        [
            &self.meters,
            &self.slo,
            &*self.roster,
            &*self.dashboard,
            // Last, since it stops the clock of the time that the router adds.
            &*self.flights,
        ]
    }
}

/// Everything that the driver handles, apart from its deadlines; this list is closed. Connections
/// wait when the driver is behind, clients cannot.
pub(crate) struct RouterInbox {
    pub(crate) workers: mpsc::Receiver<WorkerConnectionEvent>,
    pub(crate) clients: mpsc::UnboundedReceiver<RouterEvent>,
}

/// A router's brain and its body.
pub(crate) struct RouterDriver {
    me: RouterId,
    clock: BrainClock,
    pools: RouterPools,
    inbox: RouterInbox,
    effects: RouterEffects,
    workers: BTreeMap<WorkerId, ConnectedWorker>,
    standby: NameStandby,
    grants: GrantRelay,
    adapter_changes: AdapterChanges,
    /// Answers to the brain's questions; given to it before anything else.
    answers: VecDeque<PoolInput>,
    /// Facts that arose while the brain's outputs were performed.
    pending: VecDeque<PoolInput>,
}

impl RouterDriver {
    pub(crate) fn new(
        limits: RouterLimits,
        inbox: RouterInbox,
        mut effects: RouterEffects,
    ) -> Self {
        effects
            .recorder
            .write_router(TapeRecord::Started { limits: &limits });
        Self {
            me: limits.me,
            clock: BrainClock::start(),
            pools: RouterPools::new(limits),
            inbox,
            effects,
            workers: BTreeMap::new(),
            standby: NameStandby::default(),
            grants: GrantRelay::default(),
            adapter_changes: AdapterChanges::default(),
            answers: VecDeque::new(),
            pending: VecDeque::new(),
        }
    }

    /// Runs until it is stopped. The caller ends the flights that are left.
    pub(crate) async fn run(mut self) {
        // The pools of the models that the policy lists begin.
        self.perform_outputs();
        while let Some(event) = self.next_client_event().await {
            match event {
                RouterEvent::Stop => break,
                event => self.handle_event(event),
            }
        }
    }

    /// The next event of a client; `None` when no sender is left. Meanwhile handles what workers
    /// send, and wakes the brain at its deadlines.
    async fn next_client_event(&mut self) -> Option<RouterEvent> {
        loop {
            let deadlines = [self.pools.deadline(), self.standby.deadline()];
            let deadline = deadlines.into_iter().flatten().min();
            // The order is fixed, so that the same facts at the same moments give the same
            // decisions. Workers report only on work that they were given, so that clients are not
            // starved.
            tokio::select! {
                biased;
                () = deadline_reached(self.clock, deadline) => {
                    self.handle(RouterInput::Woke);
                    self.standby.wake(self.clock.now());
                    self.count_standby();
                }
                event = self.inbox.workers.recv() => self.handle_connection(event?),
                event = self.inbox.clients.recv() => return event,
            }
        }
    }

    /// Gives the brains one fact, and performs everything that follows from it.
    fn handle(&mut self, input: impl Into<PoolInput>) {
        self.pending.push_back(input.into());
        self.drain_brain();
    }

    /// Gives the brain all pending facts, and those that arise meanwhile.
    fn drain_brain(&mut self) {
        while let Some(input) = self.next_input() {
            let at = self.clock.now();
            let line = TapeRecord::Received { at, input: &input };
            self.effects.recorder.write_router(line);
            self.pools.handle(at, input);
            self.perform_outputs();
        }
    }

    fn perform_outputs(&mut self) {
        while let Some(output) = self.pools.poll() {
            let line = TapeRecord::Emitted { output: &output };
            self.effects.recorder.write_router(line);
            self.perform(output);
        }
        self.effects.recorder.flush();
    }

    fn next_input(&mut self) -> Option<PoolInput> {
        let answer = self.answers.pop_front();
        answer.or_else(|| self.pending.pop_front())
    }

    fn handle_event(&mut self, event: RouterEvent) {
        match event {
            RouterEvent::Submitted {
                flight,
                model,
                request,
            } => {
                self.effects.dashboard.submitted();
                let input = RouterInput::Submitted { flight, request };
                self.handle(PoolInput::of_model(model, input));
            }
            RouterEvent::Cancelled { flight, why } => {
                self.handle(RouterInput::Cancelled { flight, why })
            }
            RouterEvent::Stalled { flight } => self.handle(RouterInput::ReaderStalled { flight }),
            RouterEvent::Flowing { flight } => self.handle(RouterInput::ReaderResumed { flight }),
            RouterEvent::Commanded { worker, command } => {
                match command {
                    OperatorRequest::Drain => info!(%worker, "an operator drains a worker"),
                    OperatorRequest::Serve(role) => {
                        info!(%worker, %role, "an operator changes a worker's role");
                    }
                }
                self.handle(RouterInput::Commanded { worker, command });
            }
            RouterEvent::WaitingHere { model, count } => {
                let place = OutsideQueue::Here;
                let input = RouterInput::Waiting { place, count };
                self.handle(PoolInput::of_model(model, input));
            }
            RouterEvent::WaitingElsewhere { counts } => self.count_elsewhere(&counts),
            RouterEvent::AdapterChanged {
                model,
                command,
                answer,
            } => self.change_adapter(&model, &command, answer),
            RouterEvent::PolicyChanged { policy } => {
                self.effects.slo.policy_changed(&policy);
                self.scaling_policy_changed(&policy);
                self.handle(RouterInput::PolicyChanged { policy });
            }
            RouterEvent::Drain => self.handle(RouterInput::Draining),
            RouterEvent::Stop => {}
        }
    }

    /// Gives the pool of each known model the number of its requests at other routers. Before a
    /// model is known, all of them count.
    fn count_elsewhere(&mut self, counts: &BTreeMap<String, u32>) {
        let known: Vec<Arc<str>> = self.effects.readiness.borrow().models().cloned().collect();
        for model in known {
            let count = if model.is_empty() {
                counts
                    .values()
                    .fold(0, |sum: u32, count| sum.saturating_add(*count))
            } else {
                counts.get(&*model).copied().unwrap_or(0)
            };
            let place = OutsideQueue::Elsewhere;
            let input = RouterInput::Waiting { place, count };
            self.handle(PoolInput::of_model(model, input));
        }
    }

    fn handle_connection(&mut self, event: WorkerConnectionEvent) {
        match event {
            WorkerConnectionEvent::Joined(line) => self.worker_joined(*line),
            WorkerConnectionEvent::Lost {
                worker,
                serial,
                reason,
            } => self.worker_lost(worker, serial, &reason),
            WorkerConnectionEvent::Reported {
                worker,
                serial,
                report,
                read,
            } => self.handle_report(worker, serial, report, read),
            WorkerConnectionEvent::GrantReceived {
                worker,
                serial,
                handoff,
                grant,
            } => {
                if self.is_current(worker, serial) {
                    self.grants.add(worker, handoff, grant);
                    self.effects.meters.set_grants(self.grants.count());
                }
            }
            WorkerConnectionEvent::AdapterAnswered {
                worker,
                serial,
                request,
                outcome,
            } => {
                if self.is_current(worker, serial) {
                    self.adapter_answered(worker, request, outcome);
                }
            }
            WorkerConnectionEvent::LinkMeasured {
                worker,
                serial,
                link,
            } => {
                if self.is_current(worker, serial) {
                    self.effects.roster.link_measured(worker, link);
                }
            }
        }
    }

    fn handle_report(&mut self, worker: WorkerRef, serial: u64, report: Report, read: Instant) {
        // A message from a connection that was replaced meanwhile is dropped.
        if !self.is_current(worker, serial) {
            return;
        }
        self.grants.handle_report(worker, &report);
        self.effects.meters.set_grants(self.grants.count());
        self.show_role_change(worker, &report);
        self.effects.roster.handle_report(worker, &report);
        if let Report::Adapters(adapters) = &report {
            self.adapters_reported(worker, adapters);
        }
        self.track_handoff(worker, &report);
        let reserved = match &report {
            Report::Reserved { handoff, .. } => Some(handoff.flight),
            _ => None,
        };
        self.handle(RouterInput::WorkerReported { worker, report });
        if let Some(flight) = reserved {
            self.effects.flights.add_overhead(flight, read);
        }
    }

    /// The policy's rules for the size of each model's pools changed.
    fn scaling_policy_changed(&mut self, policy: &Arc<SloPolicy>) {
        let series = &self.effects.scaling_series;
        self.effects.scaling.send_modify(|statuses| {
            for (model, before) in statuses.clone().iter() {
                let scaling = policy.scaling_of(model);
                if scaling.is_none() {
                    series.hide(model);
                }
                statuses.set(model, ScalingStatus::after_policy_change(scaling, before));
            }
        });
        self.effects.policy = Arc::clone(policy);
    }

    /// A model is known from now on.
    fn model_began(&mut self, model: &Arc<str>) {
        info!(%model, "a pool of workers begins for this model");
        let policy = &self.effects.policy;
        let scaling = policy.scaling_of(model);
        let status = ScalingStatus::after_policy_change(scaling, &ScalingStatus::Off);
        self.effects
            .scaling
            .send_modify(|statuses| statuses.begin(model, status));
        self.effects.scaling_series.hide("");
        self.effects.readiness.send_modify(|all| all.begin(model));
        self.effects.meters.begin_model(model);
        self.effects.slo.begin_model(model);
    }

    /// A model is forgotten.
    fn model_ended(&mut self, model: &Arc<str>) {
        info!(%model, "no worker has served this model for a while: it is forgotten");
        self.effects
            .scaling
            .send_modify(|statuses| statuses.end(model));
        self.effects.scaling_series.hide(model);
        self.effects.readiness.send_modify(|all| all.end(model));
        self.effects.meters.end_model(model);
        self.effects.slo.end_model(model);
    }

    /// Performs one output of the pools.
    fn perform(&mut self, output: PoolOutput) {
        match output {
            PoolOutput::Began { model } => self.model_began(&model),
            PoolOutput::Ended { model } => self.model_ended(&model),
            PoolOutput::OfModel { model, output } => {
                let driver = self;
                output.perform(&mut PoolActions { driver, model });
            }
            PoolOutput::Drained => drop(self.effects.drained.send_replace(true)),
        }
    }

    /// Queues the answer to a question of the brain; a flight that was ended from outside has none.
    fn queue_answer(&mut self, handoff: HandoffId, generated: Option<Arc<[TokenId]>>) {
        let answer = generated.map(|generated| RouterInput::Counted { handoff, generated });
        self.answers.extend(answer.map(PoolInput::from));
    }
}
