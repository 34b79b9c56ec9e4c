//! The loop around a router's brain: handle one fact, perform all outputs of the brain, wait for
//! the next.
//!
//! Never decides, blocks, or sees a token. Invariant: all outputs of the brain are performed before
//! it is given the next input, and each incarnation of a worker joins and is lost in turn.

mod workers;

use self::workers::ConnectedWorker;
use super::dashboard::Dashboard;
use super::event::RouterEvent;
use super::flights::{FlightEnd, FlightTable};
use super::grants::GrantRelay;
use super::readiness::readiness_text;
use super::roster::WorkerRoster;
use super::standby::NameStandby;
use cleave_domain::{
    Ending, FlightId, HandoffId, Order, Report, RequestStageTimes, Role, ScalingMode, SloPolicy,
    TapeRecord, TokenId, WorkerId, WorkerRef,
};
use cleave_fleet::{BrainClock, ScalingStatus, WorkerConnectionEvent, deadline_reached};
use cleave_planner::scaling::ScalerDecision;
use cleave_router::{
    RouterActions, RouterBrain, RouterInput, RouterLimits, RouterNote, RouterReadiness,
};
use cleave_telemetry::{
    NoteContext, RouterMeters, RouterObserver, ScalingSeries, SloMeters, TapeRecorder,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{mpsc, watch};
use tracing::{Level, info};

/// The things that outputs act on.
pub(crate) struct RouterEffects {
    pub(crate) flights: Arc<FlightTable>,
    pub(crate) roster: Arc<WorkerRoster>,
    pub(crate) meters: RouterMeters,
    pub(crate) slo: SloMeters,
    pub(crate) dashboard: Arc<Dashboard>,
    pub(crate) recorder: TapeRecorder,
    pub(crate) readiness: watch::Sender<cleave_api::ServingReadiness>,
    pub(crate) drained: watch::Sender<bool>,
    /// The number of workers wanted, as last decided.
    pub(crate) scaling: watch::Sender<ScalingStatus>,
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
    clock: BrainClock,
    brain: RouterBrain,
    inbox: RouterInbox,
    effects: RouterEffects,
    workers: BTreeMap<WorkerId, ConnectedWorker>,
    standby: NameStandby,
    grants: GrantRelay,
    /// Answers to the brain's questions; given to it before anything else.
    answers: VecDeque<RouterInput>,
    /// Facts that arose while the brain's outputs were performed.
    pending: VecDeque<RouterInput>,
}

impl RouterDriver {
    pub(crate) fn new(
        limits: RouterLimits,
        inbox: RouterInbox,
        mut effects: RouterEffects,
    ) -> Self {
        effects
            .readiness
            .send_replace(readiness_text(RouterReadiness::NONE));
        effects
            .recorder
            .write_router(TapeRecord::Started { limits: &limits });
        Self {
            clock: BrainClock::start(),
            brain: RouterBrain::new(limits),
            inbox,
            effects,
            workers: BTreeMap::new(),
            standby: NameStandby::default(),
            grants: GrantRelay::default(),
            answers: VecDeque::new(),
            pending: VecDeque::new(),
        }
    }

    /// Runs until it is stopped. The caller ends the flights that are left.
    pub(crate) async fn run(mut self) {
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
            let deadlines = [self.brain.deadline(), self.standby.deadline()];
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

    /// Gives the brain one fact, and performs everything that follows from it.
    fn handle(&mut self, input: RouterInput) {
        self.pending.push_back(input);
        self.drain_brain();
    }

    /// Gives the brain all pending facts, and those that arise meanwhile.
    fn drain_brain(&mut self) {
        while let Some(input) = self.next_input() {
            let at = self.clock.now();
            let line = TapeRecord::Received { at, input: &input };
            self.effects.recorder.write_router(line);
            self.brain.handle(at, input);
            while let Some(output) = self.brain.poll() {
                let line = TapeRecord::Emitted { output: &output };
                self.effects.recorder.write_router(line);
                output.perform(self);
            }
            self.effects.recorder.flush();
        }
    }

    fn next_input(&mut self) -> Option<RouterInput> {
        let answer = self.answers.pop_front();
        answer.or_else(|| self.pending.pop_front())
    }

    fn handle_event(&mut self, event: RouterEvent) {
        match event {
            RouterEvent::Submitted { flight, request } => {
                self.effects.dashboard.submitted();
                self.handle(RouterInput::Submitted { flight, request });
            }
            RouterEvent::Cancelled { flight, why } => {
                self.handle(RouterInput::Cancelled { flight, why })
            }
            RouterEvent::Stalled { flight } => self.handle(RouterInput::ReaderStalled { flight }),
            RouterEvent::Flowing { flight } => self.handle(RouterInput::ReaderResumed { flight }),
            RouterEvent::Commanded { worker, command } => {
                info!(%worker, ?command, "operator command received");
                self.handle(RouterInput::Commanded { worker, command });
            }
            RouterEvent::WaitingOutside { place, count } => {
                self.handle(RouterInput::Waiting { place, count });
            }
            RouterEvent::PolicyChanged { policy } => {
                self.effects.slo.policy_changed(&policy);
                self.scaling_policy_changed(&policy);
                self.handle(RouterInput::PolicyChanged { policy });
            }
            RouterEvent::Drain => self.handle(RouterInput::Draining),
            RouterEvent::Stop => {}
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
        self.effects.roster.handle_report(worker, &report);
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

    /// The policy's rules for the size of the fleet changed.
    fn scaling_policy_changed(&mut self, policy: &SloPolicy) {
        let scaling = policy.scaling.as_ref();
        if scaling.is_none() {
            self.effects.scaling_series.hide();
        }
        self.effects
            .scaling
            .send_modify(|status| *status = ScalingStatus::after_policy_change(scaling, status));
    }

    /// Publishes how many workers are wanted from now on.
    fn scaling_decided(&mut self, decision: ScalerDecision) {
        let before = self.effects.scaling.borrow().clone();
        let mode = match before {
            ScalingStatus::Off => return,
            ScalingStatus::Starting(mode) | ScalingStatus::Decided(mode, _) => mode,
        };
        let is_unchanged = matches!(&before, ScalingStatus::Decided(_, earlier) if earlier.wanted == decision.wanted);
        if !is_unchanged {
            let target = &decision.wanted;
            let reason = |role| target.reasons.for_role(role).name();
            info!(
                prefill = target.workers.prefill,
                decode = target.workers.decode,
                both = target.workers.both,
                prefill_legs = target.legs.prefill,
                decode_legs = target.legs.decode,
                why_prefill = reason(Role::Prefill),
                why_decode = reason(Role::Decode),
                why_both = reason(Role::Both),
                rate = decision.rate,
                waiting = decision.waiting,
                advice = mode == ScalingMode::Advise,
                "workers wanted"
            );
        }
        self.effects.scaling_series.show(&decision);
        self.effects.dashboard.scaling_decided(&decision.wanted);
        self.effects
            .scaling
            .send_replace(ScalingStatus::Decided(mode, decision));
    }

    /// Queues the answer to a question of the brain; a flight that was ended from outside has none.
    fn queue_answer(&mut self, handoff: HandoffId, generated: Option<Arc<[TokenId]>>) {
        let answer = generated.map(|generated| RouterInput::Counted { handoff, generated });
        self.answers.extend(answer);
    }
}

impl RouterActions for RouterDriver {
    type Outcome = ();

    fn order(&mut self, worker: WorkerRef, order: Order) {
        self.send_order(worker, order);
    }

    fn fence(&mut self, handoff: HandoffId) {
        let generated = self.effects.flights.fence(handoff);
        self.queue_answer(handoff, generated);
    }

    fn count(&mut self, handoff: HandoffId) {
        let generated = self.effects.flights.tokens_given(handoff.flight);
        self.queue_answer(handoff, generated);
    }

    fn end(
        &mut self,
        flight: FlightId,
        ending: Ending,
        output_tokens: Option<u32>,
        timing: RequestStageTimes,
    ) {
        let end = FlightEnd {
            ending,
            output_tokens,
            timing,
        };
        if let Some(ended) = self.effects.flights.end(flight, end)
            && let Some(judged) = ended.judged
            && let Some(verdict) = self.effects.slo.ended(judged, &ended.ending)
        {
            self.effects.dashboard.judged(&verdict);
        }
    }

    fn drained(&mut self) {
        self.effects.drained.send_replace(true);
    }

    fn readiness(&mut self, readiness: RouterReadiness) {
        self.effects
            .readiness
            .send_replace(readiness_text(readiness));
    }

    fn workers_wanted(&mut self, decision: ScalerDecision) {
        self.scaling_decided(decision);
    }

    fn note(&mut self, note: RouterNote) {
        let is_logged = tracing::enabled!(target: "note", Level::DEBUG)
            || tracing::enabled!(target: "decision", Level::DEBUG);
        let flight = note.flight();
        let request = flight.filter(|_| is_logged);
        let request = request.and_then(|flight| self.effects.flights.request_context(flight));
        let roster = &self.effects.roster;
        let context = NoteContext {
            flight,
            request: request.as_ref(),
            worker_name: &|worker| roster.name(worker),
        };
        for observer in self.effects.observers() {
            observer.handle_note(&note, context);
        }
    }
}
