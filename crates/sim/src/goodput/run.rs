//! A goodput run: brains, messages between them, and their arrival times.
//!
//! Owns: virtual time, and performing the brains' outputs. Never: decides. Invariant: the effects
//! of an input are performed before the next input; simultaneous events happen in the order in
//! which they were scheduled.

mod workers;

use super::links::WorkerLinks;
use super::orchestrator::OrchestratorState;
use super::score::{ClientResults, GoodputOutcome};
use super::worker::GoodputWorker;
pub(crate) use super::worker::WorkerPhase;
use super::{Orchestrator, RouterBrainTimer, Scenario, WorkerDevice};
use cleave_domain::{
    AdapterId, Ending, FlightId, HandoffId, Order, Report, RequestStageTimes, RouterId, StepResult,
    Time, WorkerId, WorkerRef,
};
use cleave_kv::Packet;
use cleave_planner::scaling::ScalerDecision;
use cleave_router::{RouterActions, RouterInput, RouterNote, RouterReadiness};
use cleave_sched::{BlockExport, WorkerInput};
use cleave_testkit::{BlockFrames, EventQueue, WakeTimer};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// An event that may happen next.
#[derive(Debug)]
pub(crate) enum GoodputEvent {
    /// The next client sends its request.
    ClientAsks,
    /// A report reaches a router.
    ToRouter {
        router: usize,
        from: WorkerRef,
        report: Report,
    },
    /// An order reaches a worker.
    ToWorker {
        router: usize,
        worker: usize,
        order: Order,
    },
    /// A load of an adapter is over.
    AdapterLoaded {
        worker: usize,
        adapter: AdapterId,
    },
    /// A router's question about a client's stream is answered.
    Counted {
        router: usize,
        handoff: HandoffId,
    },
    /// A step is over.
    Stepped {
        worker: usize,
        result: StepResult,
        took: Duration,
    },
    /// The last byte of blocks has left their sender.
    BlocksSent {
        worker: usize,
        exports: Arc<[BlockExport]>,
    },
    /// Blocks arrive at their receiver.
    Frames {
        worker: usize,
        from: WorkerRef,
        exports: Arc<[BlockExport]>,
    },
    /// A packet arrives at its receiver.
    Packet {
        worker: usize,
        from: WorkerRef,
        packet: Packet,
    },
    /// A copy to or from host memory is over.
    Swapped {
        worker: usize,
        copy: SwapCopy,
        handoff: HandoffId,
        took: Duration,
    },
    /// A router's deadline passes.
    WakeRouter(usize),
    /// A worker's deadline passes.
    WakeWorker(usize),
    /// A started worker has loaded and joins.
    WorkerJoins(usize),
    /// The orchestrator looks at the fleet.
    CheckFleet,
    KillWorker,
}

/// The direction of a copy between pool and host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SwapCopy {
    Out,
    In,
}

#[derive(Debug)]
pub(crate) struct GoodputRouter {
    pub(crate) brain: cleave_router::RouterBrain,
    pub(crate) id: RouterId,
    wake: WakeTimer,
}

pub(crate) struct GoodputWorld<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) now: Time,
    pub(crate) event_queue: EventQueue<GoodputEvent>,
    pub(crate) routers: Vec<GoodputRouter>,
    pub(crate) workers: Vec<GoodputWorker>,
    pub(crate) devices: Vec<WorkerDevice>,
    /// The orchestrator, if the scenario has one.
    pub(crate) orchestrator: Option<OrchestratorState>,
    /// Index of each worker in `workers`.
    pub(crate) worker_index: BTreeMap<WorkerId, usize>,
    pub(crate) links: WorkerLinks,
    pub(crate) clients: ClientResults<'a>,
    arrivals_submitted: usize,
    events: u64,
    observer: Option<&'a mut dyn RouterBrainTimer>,
    decisions: Option<Vec<RouterNote>>,
    pub(crate) ends_at: Option<Time>,
}

impl<'a> GoodputWorld<'a> {
    pub(crate) fn new(scenario: &'a Scenario) -> Self {
        let first = scenario
            .orchestrator
            .as_ref()
            .map(|starter| starter.fleet().devices());
        let devices = first.unwrap_or_else(|| scenario.devices.clone());
        let router = |number: u32| GoodputRouter {
            brain: cleave_router::RouterBrain::new(cleave_router::RouterLimits {
                me: RouterId(u64::from(number) + 1),
                policy: scenario.policy(),
                ..scenario.router.clone()
            }),
            id: RouterId(u64::from(number) + 1),
            wake: WakeTimer::default(),
        };
        Self {
            scenario,
            now: Time::ZERO,
            event_queue: EventQueue::default(),
            routers: (0..scenario.routers_count.max(1)).map(router).collect(),
            workers: devices
                .iter()
                .map(|device| GoodputWorker::new(device, scenario))
                .collect(),
            worker_index: devices
                .iter()
                .enumerate()
                .map(|(place, device)| (device.worker_ref().worker, place))
                .collect(),
            links: WorkerLinks::new(devices.len(), scenario.grain),
            orchestrator: scenario
                .orchestrator
                .as_ref()
                .map(|starter| OrchestratorState::new(starter, scenario.seed)),
            devices,
            clients: ClientResults::new(scenario),
            arrivals_submitted: 0,
            events: 0,
            observer: None,
            decisions: None,
            ends_at: None,
        }
    }

    pub(crate) fn keep_decisions(&mut self) {
        self.decisions = Some(Vec::new());
    }

    pub(crate) fn observe(&mut self, observer: &'a mut dyn RouterBrainTimer) {
        self.observer = Some(observer);
    }

    /// Runs until every client was answered and nothing is held, or enough targets were missed.
    pub(crate) fn run(mut self) -> GoodputOutcome {
        self.connect_all();
        if let Some(starter) = &self.scenario.orchestrator {
            self.event_queue.push(
                Time::ZERO + starter.look_interval(),
                GoodputEvent::CheckFleet,
            );
            for at in &starter.kill_times {
                self.event_queue
                    .push(Time::ZERO + *at, GoodputEvent::KillWorker);
            }
        }
        if let Some(first) = self.scenario.arrivals.first() {
            self.event_queue.push(first.at, GoodputEvent::ClientAsks);
        }
        while let Some((at, event)) = self.event_queue.pop() {
            self.now = at;
            self.events += 1;
            self.apply(event);
            if self.clients.missed_enough() || self.is_over() {
                break;
            }
        }
        let rests = self.clients.all_ended();
        if rests {
            for worker in self
                .workers
                .iter()
                .filter(|worker| worker.phase.is_running())
            {
                assert!(
                    worker.brain.idle(),
                    "a worker is not idle though every flight has ended"
                );
            }
        }
        let decisions = self.decisions.unwrap_or_default();
        let outcome = self.clients.outcome(self.events, decisions);
        GoodputOutcome {
            growth: self.orchestrator.map(OrchestratorState::growth),
            ..outcome
        }
    }

    /// All workers join before anything else happens.
    fn connect_all(&mut self) {
        for router in 0..self.routers.len() {
            for place in 0..self.workers.len() {
                self.connect(router, place);
            }
        }
    }

    pub(crate) fn connect(&mut self, router: usize, place: usize) {
        let device = &self.devices[place];
        let joined = RouterInput::WorkerJoined {
            worker: device.worker_ref(),
            description: device.description(),
        };
        self.handle_router_input(router, joined);
        let router = self.routers[router].id;
        self.handle_worker_input(place, WorkerInput::RouterJoined { router });
        self.adapters_changed(place);
    }

    fn apply(&mut self, event: GoodputEvent) {
        match event {
            GoodputEvent::ClientAsks => self.client_asks(),
            GoodputEvent::ToRouter {
                router,
                from: worker,
                report,
            } => self.handle_router_input(router, RouterInput::WorkerReported { worker, report }),
            GoodputEvent::ToWorker {
                router,
                worker,
                order,
            } => self.order_arrives(worker, router, order),
            GoodputEvent::AdapterLoaded { worker, adapter } => self.adapter_loaded(worker, adapter),
            GoodputEvent::Counted { router, handoff } => {
                let generated = self.clients.tokens(handoff.flight).into();
                self.handle_router_input(router, RouterInput::Counted { handoff, generated });
            }
            GoodputEvent::Stepped {
                worker,
                result,
                took,
            } => self.handle_worker_input(worker, WorkerInput::Stepped { result, took }),
            GoodputEvent::BlocksSent { worker, exports } => {
                let bytes = self.block_bytes(worker);
                for export in exports.iter() {
                    let block = BlockFrames::blank(export, bytes);
                    self.handle_worker_input(worker, block.answer());
                }
            }
            GoodputEvent::Frames {
                worker,
                from,
                exports,
            } => self.blocks_arrive(worker, from, &exports),
            GoodputEvent::Packet {
                worker,
                from,
                packet,
            } => self.packet_arrives(worker, from, packet),
            GoodputEvent::Swapped {
                worker,
                copy,
                handoff,
                took,
            } => self.finish_swap_copy(worker, copy, handoff, took),
            GoodputEvent::WakeRouter(router) => self.wake_router(router),
            GoodputEvent::WakeWorker(worker) => self.wake_worker(worker),
            GoodputEvent::WorkerJoins(worker) => self.joins(worker),
            GoodputEvent::KillWorker => self.kill_one(),
            GoodputEvent::CheckFleet => {
                self.look();
                let every = self
                    .scenario
                    .orchestrator
                    .as_ref()
                    .map(Orchestrator::look_interval);
                let next = self.now + every.unwrap_or_default();
                self.event_queue.push(next, GoodputEvent::CheckFleet);
            }
        }
    }

    // === clients ===

    fn client_asks(&mut self) {
        let number = self.arrivals_submitted;
        let arrival = &self.scenario.arrivals[number];
        let router = number % self.routers.len();
        self.arrivals_submitted += 1;
        if let Some(next) = self.scenario.arrivals.get(self.arrivals_submitted) {
            self.event_queue.push(next.at, GoodputEvent::ClientAsks);
        }
        let flight = FlightId::new(self.routers[router].id, number as u64);
        let request = Arc::new(arrival.request(number as u64));
        if let Some(observer) = &mut self.observer
            && self.arrivals_submitted == self.scenario.arrivals.len().div_ceil(2)
        {
            observer.half_arrived(&self.routers[router].brain);
        }
        self.handle_router_input(router, RouterInput::Submitted { flight, request });
    }

    // === routers ===

    pub(crate) fn handle_router_input(&mut self, router: usize, input: RouterInput) {
        if let Some(observer) = &mut self.observer {
            observer.input_begins(&input);
        }
        let process = &mut self.routers[router];
        process.brain.handle(self.now, input);
        if let Some(observer) = &mut self.observer {
            observer.input_ends();
        }
        if let Some(wake) = process.wake.plan(process.brain.deadline()) {
            let at = self.scenario.timer_time(wake.max(self.now));
            self.event_queue.push(at, GoodputEvent::WakeRouter(router));
        }
        while let Some(output) = self.routers[router].brain.poll() {
            output.perform(&mut GoodputRouterBody {
                world: self,
                router,
            });
        }
    }

    fn handle_note(&mut self, note: RouterNote) {
        self.clients.note(&note);
        if let Some(decisions) = &mut self.decisions
            && matches!(note, RouterNote::Decided(_) | RouterNote::Placed { .. })
        {
            decisions.push(note);
        }
    }

    fn wake_router(&mut self, router: usize) {
        if self.routers[router].wake.take_due(self.now) {
            self.handle_router_input(router, RouterInput::Woke);
        }
    }
}

/// The body of a router.
struct GoodputRouterBody<'g, 'a> {
    world: &'g mut GoodputWorld<'a>,
    router: usize,
}

impl RouterActions for GoodputRouterBody<'_, '_> {
    type Outcome = ();

    fn order(&mut self, worker: WorkerRef, order: Order) {
        let world = &mut *self.world;
        if matches!(order, Order::Serve { .. })
            && let Some(orchestrator) = &mut world.orchestrator
        {
            orchestrator.count_role_change();
        }
        let event = GoodputEvent::ToWorker {
            router: self.router,
            worker: world.worker_index[&worker.worker],
            order,
        };
        let at = world.now + world.scenario.message_time;
        world.event_queue.push_in_order(at, event);
    }

    fn fence(&mut self, handoff: HandoffId) {
        self.world.clients.fence(handoff);
        self.count(handoff);
    }

    fn count(&mut self, handoff: HandoffId) {
        let router = self.router;
        let event = GoodputEvent::Counted { router, handoff };
        self.world.event_queue.push(self.world.now, event);
    }

    fn end(&mut self, flight: FlightId, ending: Ending, _: Option<u32>, _: RequestStageTimes) {
        self.world.clients.end(flight, &ending);
    }

    fn drained(&mut self) {}

    fn readiness(&mut self, _: RouterReadiness) {}

    fn workers_wanted(&mut self, decision: ScalerDecision) {
        self.world.record_decision(self.router, decision);
    }

    fn note(&mut self, note: RouterNote) {
        self.world.handle_note(note);
    }
}
