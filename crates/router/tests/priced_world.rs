//! A world that keeps to its prices: routers, and workers whose steps take exactly the time of
//! their prices. A message takes no time, a block does.

use cleave_domain::{
    BlockRef, Capacity, Emission, Ending, FlightId, HandoffId, LinkPrice, Order, Prices, Refusal,
    Report, Request, RequestSlo, RequestStageTimes, Role, RouterId, RowPrice, SloVerdict, StepPlan,
    StepWork, Time, TokenId, WorkerId, WorkerRef,
};
use cleave_kv::{BlockPart, Packet};
use cleave_planner::Predict;
use cleave_planner::scaling::ScalerDecision;
use cleave_router::{
    DecisionOutcome, PlacementReason, RouterActions, RouterBrain, RouterInput, RouterLimits,
    RouterNote, RouterReadiness,
};
use cleave_sched::{
    BlockExport, ImportOutcome, PayloadCondition, WorkerActions, WorkerBrain, WorkerInput,
    WorkerLimits, WorkerNote,
};
use cleave_testkit::{BlockFrames, EventQueue, WakeTimer, build};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const BLOCK_TOKENS: u32 = 16;

pub(crate) fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

pub(crate) fn capacity() -> Capacity {
    Capacity {
        block_tokens: BLOCK_TOKENS,
        block_bytes: 1 << 16,
        blocks_count: 4000,
        slots_count: 32,
        step_tokens_max: 512,
        context_tokens_max: 16_384,
        states: None,
        windows: None,
    }
}

/// A step of one row takes 5 ms; 20 µs more for each further one, 1 µs for a thousand tokens
/// attended to.
pub(crate) fn prices() -> Prices {
    let knot = |rows: u32, micros: u64| RowPrice {
        rows,
        nanos: micros * 1000,
    };
    Prices {
        rows: vec![knot(1, 5_000), knot(64, 5_500), knot(10_064, 205_500)],
        pair_picos: 500,
        context_picos: 500_000,
        draw_nanos: 10_000,
        link: LinkPrice {
            latency_nanos: 500_000,
            byte_picos: 500,
        },
        ..Prices::default()
    }
}

pub(crate) fn request(prompt: u32, max_tokens: u32, slo: RequestSlo) -> Request {
    Request {
        slo,
        ..build::request(0..prompt, max_tokens)
    }
}

/// Numbers from a seed.
pub(crate) struct PricedRng(pub(crate) u64);

impl PricedRng {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound.max(1)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct PricedOutcome {
    pub(crate) submitted: Time,
    pub(crate) class: String,
    pub(crate) tenant: String,
    pub(crate) placed: Option<PlacementReason>,
    pub(crate) refused: Option<(Time, Refusal)>,
    pub(crate) verdict: Option<SloVerdict>,
    pub(crate) output_tokens: u32,
    pub(crate) words: String,
}

pub(crate) struct PricedWorld {
    pub(crate) now: Time,
    events: EventQueue<PricedEvent>,
    routers: Vec<PricedRouter>,
    workers: Vec<PricedWorker>,
    /// Requests that have not arrived.
    arrivals_left: usize,
    pub(crate) outcomes: BTreeMap<FlightId, PricedOutcome>,
    /// Tokens that each client was given.
    tokens: BTreeMap<FlightId, Vec<TokenId>>,
    /// The targets last sent to workers for each flight.
    pub(crate) slo_received: BTreeMap<FlightId, RequestSlo>,
}

struct PricedRouter {
    brain: RouterBrain,
    wake: WakeTimer,
}

struct PricedWorker {
    brain: WorkerBrain,
    wake: WakeTimer,
    /// The end of the step under way.
    free_at: Time,
    /// Answers that the brain gets before any other input.
    answers: VecDeque<WorkerInput>,
    /// Blocks exported since the last input.
    exports: Vec<BlockExport>,
}

enum PricedEvent {
    Arrives(Request),
    ToRouter(usize, RouterInput),
    ToWorker(usize, WorkerInput),
    /// Blocks have left a worker for another, and arrived there.
    BlocksSent(usize, Vec<BlockExport>),
    WakeRouter(usize),
    WakeWorker(usize),
}

impl PricedWorld {
    pub(crate) fn new(limits: &RouterLimits, routers: usize, roles: &[Role]) -> Self {
        let router = |index: usize| PricedRouter {
            brain: RouterBrain::new(RouterLimits {
                me: RouterId(index as u64),
                ..limits.clone()
            }),
            wake: WakeTimer::default(),
        };
        let worker = |(number, role): (u64, &Role)| PricedWorker {
            brain: WorkerBrain::new(WorkerLimits {
                role: *role,
                queue_max: 64,
                prices: prices(),
                ..build::limits(build::worker(number), capacity())
            }),
            wake: WakeTimer::default(),
            free_at: Time::ZERO,
            answers: VecDeque::new(),
            exports: Vec::new(),
        };
        let mut world = Self {
            now: Time::ZERO,
            events: EventQueue::default(),
            routers: (0..routers).map(router).collect(),
            workers: (1..).zip(roles).map(worker).collect(),
            arrivals_left: 0,
            outcomes: BTreeMap::new(),
            tokens: BTreeMap::new(),
            slo_received: BTreeMap::new(),
        };
        for (at, role) in roles.iter().enumerate() {
            for router in 0..routers {
                let joined = RouterInput::WorkerJoined {
                    worker: world.me(at),
                    description: build::description(*role, capacity()),
                };
                world.handle_router_input(router, joined);
                let router = RouterId(router as u64);
                world.handle_worker_input(at, WorkerInput::RouterJoined { router });
            }
        }
        world.settle();
        world
    }

    fn me(&self, worker: usize) -> WorkerRef {
        self.workers[worker].brain.limits().me
    }

    pub(crate) fn arrive(&mut self, at: Time, request: Request) {
        self.arrivals_left += 1;
        self.events.push(at, PricedEvent::Arrives(request));
    }

    /// Gives the flight to a router, and performs everything that follows from it at once.
    pub(crate) fn submit(&mut self, router: usize, request: Request) -> FlightId {
        let flight = self.begin(router, request);
        self.settle();
        flight
    }

    fn begin(&mut self, router: usize, request: Request) -> FlightId {
        let flight = FlightId::new(RouterId(router as u64), self.outcomes.len() as u64);
        let outcome = PricedOutcome {
            submitted: self.now,
            class: request.slo.class.clone(),
            tenant: request.slo.tenant.clone(),
            placed: None,
            refused: None,
            verdict: None,
            output_tokens: 0,
            words: String::new(),
        };
        self.outcomes.insert(flight, outcome);
        let request = Arc::new(request);
        self.handle_router_input(router, RouterInput::Submitted { flight, request });
        flight
    }

    /// Sends a message, which arrives at once, after those before it.
    fn send(&mut self, event: PricedEvent) {
        self.events.push_in_order(self.now, event);
    }

    fn handle_router_input(&mut self, router: usize, input: RouterInput) {
        let process = &mut self.routers[router];
        process.brain.handle(self.now, input);
        process.brain.check();
        if let Some(wake) = process.wake.plan(process.brain.deadline()) {
            let event = PricedEvent::WakeRouter(router);
            self.events.push(wake.max(self.now), event);
        }
        while let Some(output) = self.routers[router].brain.poll() {
            output.perform(&mut PricedRouterBody {
                world: self,
                router,
            });
        }
    }

    fn handle_worker_input(&mut self, worker: usize, input: WorkerInput) {
        let mut next = Some(input);
        while let Some(input) = next {
            self.workers[worker].brain.handle(self.now, input);
            while let Some(output) = self.workers[worker].brain.poll() {
                output.perform(&mut PricedWorkerBody {
                    world: self,
                    worker,
                });
            }
            next = self.workers[worker].answers.pop_front();
        }
        let process = &mut self.workers[worker];
        if let Some(wake) = process.wake.plan(process.brain.deadline()) {
            let event = PricedEvent::WakeWorker(worker);
            self.events.push(wake.max(self.now), event);
        }
        let exports = std::mem::take(&mut process.exports);
        for exports in exports.chunk_by(|a, b| a.handoff == b.handoff) {
            let bytes = u64::from(capacity().block_bytes) * exports.len() as u64;
            let takes = prices().transfer(exports[0].to.worker, bytes);
            let event = PricedEvent::BlocksSent(worker, exports.to_vec());
            self.events.push(self.now + takes, event);
        }
    }

    fn blocks_sent(&mut self, worker: usize, exports: Vec<BlockExport>) {
        let from = self.me(worker);
        for export in exports {
            let block = BlockFrames::blank(&export, capacity().block_bytes);
            self.handle_worker_input(worker, block.answer());
            for (packet, _) in block.frames {
                let arrived = WorkerInput::Arrived {
                    from,
                    packet,
                    condition: PayloadCondition::Intact,
                };
                self.handle_worker_input(index_of(export.to.worker), arrived);
            }
        }
    }

    /// Performs everything that happens at this time.
    fn settle(&mut self) {
        while self.events.next_at().is_some_and(|at| at <= self.now) {
            self.advance();
        }
    }

    fn advance(&mut self) {
        let Some((at, event)) = self.events.pop() else {
            return;
        };
        self.now = self.now.max(at);
        match event {
            PricedEvent::Arrives(request) => {
                self.arrivals_left -= 1;
                let router = self.outcomes.len() % self.routers.len();
                self.begin(router, request);
            }
            PricedEvent::ToRouter(router, input) => self.handle_router_input(router, input),
            PricedEvent::ToWorker(worker, input) => self.handle_worker_input(worker, input),
            PricedEvent::BlocksSent(worker, exports) => self.blocks_sent(worker, exports),
            PricedEvent::WakeRouter(router) => {
                if self.routers[router].wake.take_due(self.now) {
                    self.handle_router_input(router, RouterInput::Woke);
                }
            }
            PricedEvent::WakeWorker(worker) => {
                if self.workers[worker].wake.take_due(self.now) {
                    self.handle_worker_input(worker, WorkerInput::Woke);
                }
            }
        }
    }

    /// Runs until every request has its verdict, or `until`.
    pub(crate) fn run(&mut self, until: Time) {
        while self.arrivals_left > 0 || !self.idle() {
            if self.events.next_at().is_none_or(|at| at > until) {
                self.now = self.now.max(until);
                return;
            }
            self.advance();
        }
    }

    fn idle(&self) -> bool {
        self.outcomes
            .values()
            .all(|outcome| outcome.verdict.is_some())
    }

    pub(crate) fn count(&self, of: impl Fn(&PricedOutcome) -> bool) -> usize {
        self.outcomes.values().filter(|outcome| of(outcome)).count()
    }

    pub(crate) fn good(&self) -> usize {
        self.count(|outcome| outcome.verdict == Some(SloVerdict::Good))
    }

    pub(crate) fn late(&self) -> usize {
        self.count(|outcome| matches!(outcome.verdict, Some(SloVerdict::Late { .. })))
    }
}

/// The place of a worker in the world.
fn index_of(worker: WorkerId) -> usize {
    worker.0 as usize - 1
}

struct PricedWorkerBody<'a> {
    world: &'a mut PricedWorld,
    worker: usize,
}

impl WorkerActions for PricedWorkerBody<'_> {
    type Outcome = ();

    fn step(&mut self, plan: StepPlan) {
        let took = prices().step(&StepWork::of_plan(&plan));
        let result = build::step_result(&plan, |_| 7);
        let worker = &mut self.world.workers[self.worker];
        worker.free_at = worker.free_at.max(self.world.now) + took;
        let at = worker.free_at;
        let stepped = WorkerInput::Stepped { result, took };
        let event = PricedEvent::ToWorker(self.worker, stepped);
        self.world.events.push(at, event);
    }

    fn report(&mut self, router: RouterId, report: Report) {
        let worker = self.world.me(self.worker);
        let input = RouterInput::WorkerReported { worker, report };
        let event = PricedEvent::ToRouter(router.0 as usize, input);
        self.world.send(event);
    }

    fn emit(&mut self, handoff: HandoffId, emission: Emission) {
        let tokens = self.world.tokens.entry(handoff.flight).or_default();
        if emission.index as usize == tokens.len() {
            tokens.push(emission.sampled.token);
        }
    }

    fn forget(&mut self, _: HandoffId) {}

    fn drained(&mut self) {}

    fn note(&mut self, _: WorkerNote) {}

    fn export(&mut self, export: BlockExport) {
        self.world.workers[self.worker].exports.push(export);
    }

    fn send(&mut self, to: WorkerRef, packet: Packet) {
        let arrived = WorkerInput::Arrived {
            from: self.world.me(self.worker),
            packet,
            condition: PayloadCondition::Intact,
        };
        let event = PricedEvent::ToWorker(index_of(to.worker), arrived);
        self.world.send(event);
    }

    fn import(&mut self, handoff: HandoffId, part: BlockPart, _: BlockRef) {
        let outcome = ImportOutcome::Written;
        let answers = &mut self.world.workers[self.worker].answers;
        answers.push_back(WorkerInput::Imported {
            handoff,
            part,
            outcome,
        });
    }

    fn discard(&mut self, _: HandoffId, _: BlockPart) {}
}

/// The body of a router of the world.
struct PricedRouterBody<'a> {
    world: &'a mut PricedWorld,
    router: usize,
}

impl PricedRouterBody<'_> {
    fn outcome(&mut self, flight: FlightId) -> &mut PricedOutcome {
        let outcome = self.world.outcomes.get_mut(&flight);
        outcome.expect("was submitted")
    }
}

impl RouterActions for PricedRouterBody<'_> {
    type Outcome = ();

    fn order(&mut self, worker: WorkerRef, order: Order) {
        if let Order::Reserve(reserve) = &order {
            let slo = reserve.request.slo.clone();
            self.world.slo_received.insert(reserve.handoff.flight, slo);
        } else if let Order::Run(run) = &order {
            let slo = run.request.slo.clone();
            self.world.slo_received.insert(run.handoff.flight, slo);
        }
        let router = RouterId(self.router as u64);
        let input = WorkerInput::Ordered { router, order };
        let event = PricedEvent::ToWorker(index_of(worker.worker), input);
        self.world.send(event);
    }

    fn fence(&mut self, handoff: HandoffId) {
        self.count(handoff);
    }

    fn count(&mut self, handoff: HandoffId) {
        let tokens = self.world.tokens.get(&handoff.flight);
        let generated = tokens.cloned().unwrap_or_default().into();
        let input = RouterInput::Counted { handoff, generated };
        let event = PricedEvent::ToRouter(self.router, input);
        self.world.send(event);
    }

    fn end(&mut self, flight: FlightId, ending: Ending, _: Option<u32>, _: RequestStageTimes) {
        match ending {
            Ending::Refused(refusal) => {
                self.outcome(flight).refused = Some((self.world.now, refusal));
            }
            Ending::Failed(failure) => panic!("{flight} failed: {failure:?}"),
            Ending::Done { .. } | Ending::Cancelled => {}
        }
    }

    fn drained(&mut self) {}

    fn readiness(&mut self, _: RouterReadiness) {}

    fn workers_wanted(&mut self, _: ScalerDecision) {}

    fn note(&mut self, note: RouterNote) {
        match note {
            RouterNote::Judged {
                flight,
                verdict,
                output_tokens,
                timing,
                forecast,
                ..
            } => {
                let outcome = self.outcome(flight);
                assert!(outcome.verdict.is_none(), "{flight} is judged twice");
                outcome.verdict = Some(verdict);
                outcome.output_tokens = output_tokens;
                outcome.words = format!("{timing:?}\n{forecast:?}");
            }
            RouterNote::Decided(decision) => {
                if let DecisionOutcome::Placed(reason) = decision.outcome {
                    self.outcome(decision.flight).placed = Some(reason);
                }
            }
            _ => {}
        }
    }
}
