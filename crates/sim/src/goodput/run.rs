//! The run: brains, what they say to each other, and when it arrives.
//!
//! Owns: virtual time, and carrying out what brains want. Never: decides.
//! Invariant: what an input causes is carried out before the next input; what is planned for one moment
//! happens in the order of being planned.

use super::agenda::Agenda;
use super::score::{Clients, Outcome};
use super::starter::Works;
use super::wire::{Wire, latency, link};
pub(crate) use super::worker::Life;
use super::worker::{self, Flaws, Worker};
use super::{Device, Observer, Scenario, Starter};
use cleave_domain::{
    FlightId, HandoffId, LinkPrice, Order, Report, RouterId, StepResult, Time, WorkerId, WorkerRef,
};
use cleave_kv::Packet;
use cleave_router::Note;
use cleave_sched::{Condition, Export, ImportOutcome, Input, Output, SwapOutcome};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Everything that can happen next.
#[derive(Debug)]
pub(crate) enum Event {
    /// The next client asks.
    Asks,
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
    /// A router's question is answered.
    Counted { router: usize, handoff: HandoffId },
    /// A step is over.
    Stepped {
        worker: usize,
        result: StepResult,
        took: Duration,
    },
    /// Blocks have left.
    Shipped {
        worker: usize,
        exports: Arc<[Export]>,
    },
    /// Blocks are there.
    Frames {
        worker: usize,
        from: WorkerRef,
        exports: Arc<[Export]>,
    },
    /// A packet is there.
    Packet {
        worker: usize,
        from: WorkerRef,
        packet: Packet,
    },
    /// A copy to or from host memory is over.
    Swapped {
        worker: usize,
        copy: Copy,
        handoff: HandoffId,
        took: Duration,
    },
    /// A brain asked to be woken.
    WakeRouter(usize),
    /// As above.
    WakeWorker(usize),
    /// A worker that was started is there.
    Joins(usize),
    /// Whoever starts workers looks at the fleet.
    Look,
    /// A worker dies.
    Kill,
}

/// Which way a copy goes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Copy {
    Out,
    In,
}

#[derive(Debug)]
pub(crate) struct Router {
    pub(crate) brain: cleave_router::Brain,
    id: RouterId,
    wake: Option<Time>,
}

pub(crate) struct World<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) now: Time,
    pub(crate) agenda: Agenda<Event>,
    pub(crate) routers: Vec<Router>,
    pub(crate) workers: Vec<Worker>,
    /// Each one's hardware.
    pub(crate) devices: Vec<Device>,
    /// Whoever starts and stops them.
    pub(crate) works: Option<Works>,
    /// Places of workers in the scenario.
    pub(crate) places: BTreeMap<WorkerId, usize>,
    pub(crate) wire: Wire,
    pub(crate) clients: Clients<'a>,
    asked: usize,
    events: u64,
    observer: Option<&'a mut dyn Observer>,
    decisions: Option<Vec<Note>>,
    pub(crate) ends_at: Option<Time>,
}

impl<'a> World<'a> {
    pub(crate) fn new(scenario: &'a Scenario) -> Self {
        let first = scenario
            .starter
            .as_ref()
            .map(|starter| starter.fleet().devices());
        let devices = first.unwrap_or_else(|| scenario.devices.clone());
        let router = |number: u32| Router {
            brain: cleave_router::Brain::new(cleave_router::Limits {
                me: RouterId(u64::from(number) + 1),
                policy: scenario.policy(),
                ..scenario.router.clone()
            }),
            id: RouterId(u64::from(number) + 1),
            wake: None,
        };
        Self {
            scenario,
            now: Time::ZERO,
            agenda: Agenda::default(),
            routers: (0..scenario.routers_count.max(1)).map(router).collect(),
            workers: devices
                .iter()
                .map(|device| Worker::new(device, scenario.seed))
                .collect(),
            places: devices
                .iter()
                .enumerate()
                .map(|(place, device)| (device.me().worker, place))
                .collect(),
            wire: Wire::new(devices.len(), scenario.grain),
            works: scenario
                .starter
                .as_ref()
                .map(|starter| Works::new(starter, scenario.seed)),
            devices,
            clients: Clients::new(scenario),
            asked: 0,
            events: 0,
            observer: None,
            decisions: None,
            ends_at: None,
        }
    }

    pub(crate) fn keep_decisions(&mut self) {
        self.decisions = Some(Vec::new());
    }

    pub(crate) fn observe(&mut self, observer: &'a mut dyn Observer) {
        self.observer = Some(observer);
    }

    /// Until everybody was answered and nothing is held, or enough was missed.
    pub(crate) fn run(mut self) -> Outcome {
        self.meet();
        if let Some(starter) = &self.scenario.starter {
            self.agenda.plan(Time::ZERO + starter.every(), Event::Look);
            for at in &starter.kills {
                self.agenda.plan(Time::ZERO + *at, Event::Kill);
            }
        }
        if let Some(first) = self.scenario.arrivals.first() {
            self.agenda.plan(first.at, Event::Asks);
        }
        while let Some((at, event)) = self.agenda.next() {
            self.now = at;
            self.events += 1;
            self.happen(event);
            if self.clients.missed_enough() || self.is_over() {
                break;
            }
        }
        let rests = self.clients.all_ended();
        if rests {
            for worker in self.workers.iter().filter(|worker| worker.life.runs()) {
                assert!(worker.brain.idle(), "a worker holds what nobody wants");
            }
        }
        let decisions = self.decisions.unwrap_or_default();
        let outcome = self.clients.outcome(self.events, decisions);
        Outcome {
            growth: self.works.map(Works::growth),
            ..outcome
        }
    }

    /// Everybody joins, before anything else happens.
    fn meet(&mut self) {
        for router in 0..self.routers.len() {
            for place in 0..self.workers.len() {
                self.meet_one(router, place);
            }
        }
    }

    pub(crate) fn meet_one(&mut self, router: usize, place: usize) {
        let device = &self.devices[place];
        let joined = cleave_router::Input::WorkerJoined {
            worker: device.me(),
            description: device.description(),
        };
        self.router_hears(router, joined);
        let router = self.routers[router].id;
        self.worker_hears(place, Input::RouterJoined { router });
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Asks => self.ask(),
            Event::ToRouter {
                router,
                from: worker,
                report,
            } => self.router_hears(router, cleave_router::Input::Told { worker, report }),
            Event::ToWorker {
                router,
                worker,
                order,
            } => {
                let router = self.routers[router].id;
                self.worker_hears(worker, Input::Ordered { router, order });
            }
            Event::Counted { router, handoff } => {
                let generated = self.clients.tokens(handoff.flight).into();
                self.router_hears(router, cleave_router::Input::Counted { handoff, generated });
            }
            Event::Stepped {
                worker,
                result,
                took,
            } => self.worker_hears(worker, Input::Stepped { result, took }),
            Event::Shipped { worker, exports } => {
                let bytes = self.block_bytes(worker);
                for export in exports.iter() {
                    self.worker_hears(worker, worker::sent(export, bytes));
                }
            }
            Event::Frames {
                worker,
                from,
                exports,
            } => self.receive(worker, from, &exports),
            Event::Packet {
                worker,
                from,
                packet,
            } => self.arrived(worker, from, packet),
            Event::Swapped {
                worker,
                copy,
                handoff,
                took,
            } => self.swapped(worker, copy, (handoff, took)),
            Event::WakeRouter(router) => self.wake_router(router),
            Event::WakeWorker(worker) => self.wake_worker(worker),
            Event::Joins(worker) => self.joins(worker),
            Event::Kill => self.kill_one(),
            Event::Look => {
                self.look();
                let every = self.scenario.starter.as_ref().map(Starter::every);
                let next = self.now + every.unwrap_or_default();
                self.agenda.plan(next, Event::Look);
            }
        }
    }

    // === clients ===

    fn ask(&mut self) {
        let number = self.asked;
        let arrival = &self.scenario.arrivals[number];
        let router = number % self.routers.len();
        self.asked += 1;
        if let Some(next) = self.scenario.arrivals.get(self.asked) {
            self.agenda.plan(next.at, Event::Asks);
        }
        let flight = FlightId::new(self.routers[router].id, number as u64);
        let request = Arc::new(arrival.request(number as u64));
        if let Some(observer) = &mut self.observer
            && self.asked == self.scenario.arrivals.len().div_ceil(2)
        {
            observer.half_way(&self.routers[router].brain);
        }
        self.router_hears(router, cleave_router::Input::Submitted { flight, request });
    }

    // === routers ===

    pub(crate) fn router_hears(&mut self, router: usize, input: cleave_router::Input) {
        if let Some(observer) = &mut self.observer {
            observer.begins(&input);
        }
        let seat = &mut self.routers[router];
        seat.brain.handle(self.now, input);
        if let Some(observer) = &mut self.observer {
            observer.ends();
        }
        let wake = seat.brain.deadline();
        if let Some(wake) = wake.filter(|wake| seat.wake.is_none_or(|planned| *wake < planned)) {
            seat.wake = Some(wake);
            let at = self.scenario.tick(wake.max(self.now));
            self.agenda.plan(at, Event::WakeRouter(router));
        }
        while let Some(output) = self.routers[router].brain.poll() {
            self.router_says(router, output);
        }
    }

    fn router_says(&mut self, router: usize, output: cleave_router::Output) {
        match output {
            cleave_router::Output::Tell { worker, order } => {
                if matches!(order, Order::Serve { .. })
                    && let Some(works) = &mut self.works
                {
                    works.flipped();
                }
                let worker = self.places[&worker.worker];
                let event = Event::ToWorker {
                    router,
                    worker,
                    order,
                };
                let at = self.now + self.scenario.message;
                self.agenda.plan_in_line(at, event);
            }
            cleave_router::Output::Fence { handoff } => {
                self.clients.fence(handoff);
                self.agenda
                    .plan(self.now, Event::Counted { router, handoff });
            }
            cleave_router::Output::Count { handoff } => {
                self.agenda
                    .plan(self.now, Event::Counted { router, handoff });
            }
            cleave_router::Output::End { flight, ending, .. } => {
                self.clients.end(flight, &ending);
            }
            cleave_router::Output::Note(note) => self.note(note),
            cleave_router::Output::Drained | cleave_router::Output::Readiness(_) => {}
            cleave_router::Output::Want(decision) => self.wants(router, decision),
        }
    }

    fn note(&mut self, note: Note) {
        self.clients.note(&note);
        if let Some(decisions) = &mut self.decisions
            && matches!(note, Note::Decided(_) | Note::Placed { .. })
        {
            decisions.push(note);
        }
    }

    fn wake_router(&mut self, router: usize) {
        let seat = &mut self.routers[router];
        if seat.wake.take_if(|at| *at <= self.now).is_some() {
            self.router_hears(router, cleave_router::Input::Woke);
        }
    }

    // === workers ===

    pub(crate) fn worker_hears(&mut self, place: usize, input: Input) {
        if !self.workers[place].life.runs() {
            return;
        }
        let mut next = Some(input);
        while let Some(input) = next {
            self.workers[place].brain.handle(self.now, input);
            while let Some(output) = self.workers[place].brain.poll() {
                self.worker_says(place, output);
            }
            next = self.workers[place].owed.pop_front();
        }
        if std::mem::take(&mut self.workers[place].left) {
            return self.gone(place);
        }
        if !self.workers[place].leaving.is_empty() {
            self.ship(place);
        }
        let worker = &mut self.workers[place];
        let wake = worker.brain.deadline();
        if let Some(wake) = wake.filter(|wake| worker.wake.is_none_or(|planned| *wake < planned)) {
            worker.wake = Some(wake);
            let at = self.scenario.tick(wake.max(self.now));
            self.agenda.plan(at, Event::WakeWorker(place));
        }
    }

    fn worker_says(&mut self, place: usize, output: Output) {
        let device = &self.devices[place];
        match output {
            Output::Step(plan) => {
                let flaws = Flaws {
                    noise_permille: self.scenario.noise_permille,
                    grain: self.scenario.grain,
                };
                let worker = &mut self.workers[place];
                let (result, took) = worker.step(&plan, device, flaws);
                // One behind another begins when that is over.
                worker.free_at = worker.free_at.max(self.now) + took;
                let at = worker.free_at;
                let event = Event::Stepped {
                    worker: place,
                    result,
                    took,
                };
                self.agenda.plan(at, event);
            }
            Output::Tell { router, report } => {
                let event = Event::ToRouter {
                    router: router.0 as usize - 1,
                    from: device.me(),
                    report,
                };
                let at = self.now + self.scenario.message;
                self.agenda.plan_in_line(at, event);
            }
            Output::Emit { handoff, emission } => {
                let at = self.now + self.scenario.message;
                self.clients.token(handoff, emission.index, at);
            }
            Output::Export(export) => self.workers[place].leaving.push(export),
            Output::Send { to, packet } => self.send(place, to, packet),
            Output::Import { handoff, part, .. } => {
                self.workers[place].owed.push_back(Input::Imported {
                    handoff,
                    part,
                    outcome: ImportOutcome::Written,
                });
            }
            Output::SwapOut { handoff, blocks } => {
                self.copy(place, Copy::Out, (handoff, blocks.len()));
            }
            Output::SwapIn { handoff, blocks } => {
                self.copy(place, Copy::In, (handoff, blocks.len()));
            }
            Output::SwapDrop { handoff } => {
                self.workers[place].unwanted.insert(handoff);
            }
            Output::Shelve { .. }
            | Output::WriteOn { .. }
            | Output::Fetch { .. }
            | Output::FetchStop { .. }
            | Output::TierDrop { .. } => unreachable!("nothing is kept below these pools"),
            // A frame without a payload leaves nothing to discard, and copies under way are answered
            // when they are over.
            Output::Discard { .. } | Output::Forget { .. } => {}
            Output::Drained => self.workers[place].left = true,
            Output::Note(note) => self.clients.worker_note(&note),
        }
    }

    fn wake_worker(&mut self, place: usize) {
        let worker = &mut self.workers[place];
        if worker.wake.take_if(|at| *at <= self.now).is_none() || !worker.life.runs() {
            return;
        }
        // Many deadlines have moved on by the time they were planned for.
        match worker.brain.deadline() {
            Some(at) if at > self.now => {
                worker.wake = Some(at);
                self.agenda.plan(at, Event::WakeWorker(place));
            }
            Some(_) => self.worker_hears(place, Input::Woke),
            None => {}
        }
    }

    // === from worker to worker ===

    fn block_bytes(&self, place: usize) -> u32 {
        self.devices[place].limits.capacity.block_bytes
    }

    /// Sends what was asked for at once, as one train of blocks for each hand-off.
    fn ship(&mut self, place: usize) {
        let device = &self.devices[place];
        let leaving = std::mem::take(&mut self.workers[place].leaving);
        for exports in leaving.chunk_by(|a, b| (a.handoff, a.to) == (b.handoff, b.to)) {
            let to = exports[0].to.worker;
            let worker = self.places[&to];
            let bytes = u64::from(self.block_bytes(place)) * exports.len() as u64;
            let way = (link(device, to), bytes);
            let (left, arrives) = self.wire.carry((place, worker), way, self.now);
            let exports: Arc<[Export]> = exports.into();
            let shipped = Event::Shipped {
                worker: place,
                exports: Arc::clone(&exports),
            };
            let frames = Event::Frames {
                worker,
                from: device.me(),
                exports,
            };
            self.agenda.plan(left, shipped);
            self.agenda.plan(arrives, frames);
        }
    }

    fn receive(&mut self, place: usize, from: WorkerRef, exports: &[Export]) {
        // A link that broke brings nothing more.
        if !self.workers[self.places[&from.worker]].life.runs() {
            return;
        }
        let bytes = self.block_bytes(place);
        for export in exports {
            let packet = Packet::Frame {
                handoff: export.handoff,
                block: export.block,
                part: worker::part(export, bytes),
                checksum: worker::checksum(export),
            };
            self.arrived(place, from, packet);
        }
    }

    fn send(&mut self, place: usize, to: WorkerRef, packet: Packet) {
        let device = &self.devices[place];
        let event = Event::Packet {
            worker: self.places[&to.worker],
            from: device.me(),
            packet,
        };
        let takes = latency(link(device, to.worker));
        self.agenda.plan(self.now + takes, event);
    }

    fn arrived(&mut self, place: usize, from: WorkerRef, packet: Packet) {
        if !self.workers[self.places[&from.worker]].life.runs() {
            return;
        }
        let input = Input::Arrived {
            from,
            packet,
            condition: Condition::Intact,
        };
        self.worker_hears(place, input);
    }

    // === host memory ===

    fn copy(&mut self, place: usize, copy: Copy, (handoff, blocks): (HandoffId, usize)) {
        let bytes = u64::from(self.block_bytes(place)) * blocks as u64;
        let host: LinkPrice = self.devices[place].host;
        let took = cleave_planner::predict_link(&host, bytes);
        self.workers[place].unwanted.remove(&handoff);
        let event = Event::Swapped {
            worker: place,
            copy,
            handoff,
            took,
        };
        self.agenda.plan(self.now + took, event);
    }

    fn swapped(&mut self, place: usize, copy: Copy, (handoff, took): (HandoffId, Duration)) {
        let outcome = match self.workers[place].unwanted.remove(&handoff) {
            true => SwapOutcome::Dropped,
            false => SwapOutcome::Copied,
        };
        let input = match copy {
            Copy::Out => Input::SwappedOut {
                handoff,
                outcome,
                took,
            },
            Copy::In => Input::SwappedIn {
                handoff,
                outcome,
                took,
            },
        };
        self.worker_hears(place, input);
    }
}
