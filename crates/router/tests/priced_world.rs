//! A world that keeps to its prices: workers run steps that take exactly the time of their prices,
//! prompts in the order of their latest start, in chunks that keep their streams' gaps. No message
//! takes time.

use cleave_domain::{
    Capacity, Deadline, DecodeTiming, Ending, FinishReason, FlightId, HandoffId, LinkPrice,
    OnDeadlineMiss, Order, PrefillBacklog, PrefillOrder, PrefillTiming, Prices, Refusal, Report,
    Request, RequestSlo, RequestStageTimes, ReserveOrder, Role, RouterId, RowPrice, RunOrder,
    SloMetric, SloVerdict, StepWork, Time, WorkerDescription, WorkerId, WorkerLoad, WorkerRef,
};
use cleave_planner::Predict;
use cleave_planner::scaling::ScalerDecision;
use cleave_router::{
    DecisionOutcome, PlacementReason, RouterActions, RouterBrain, RouterInput, RouterLimits,
    RouterNote, RouterReadiness,
};
use cleave_testkit::build;
use std::collections::{BTreeMap, BTreeSet};
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

struct PricedPrompt {
    handoff: HandoffId,
    request: Arc<Request>,
    to: WorkerRef,
    done: u32,
    arrived: Time,
    begun: Option<Time>,
    /// Its latest start, if it has a target.
    latest: Option<Time>,
}

impl PricedPrompt {
    /// A prompt that arrives now, without a target.
    fn new(handoff: HandoffId, request: Arc<Request>, to: WorkerRef, now: Time) -> Self {
        Self {
            handoff,
            request,
            to,
            done: 0,
            arrived: now,
            begun: None,
            latest: None,
        }
    }
}

struct PricedStream {
    handoff: HandoffId,
    context: u32,
    drawn: u32,
    max: u32,
    tpot: Option<Duration>,
    since: Time,
    first: Option<(Duration, Duration)>,
    /// Whether it is in the step under way, and when it last was in one.
    runs: bool,
    ran: Time,
}

impl PricedStream {
    /// A stream that has its first token.
    fn new(handoff: HandoffId, request: &Request, now: Time) -> Self {
        Self {
            handoff,
            context: request.prompt.len() as u32 + 1,
            drawn: 1,
            max: request.stop.max_tokens,
            tpot: request.slo.tpot,
            since: now,
            first: None,
            runs: false,
            ran: now,
        }
    }
}

/// A stream that has all its tokens, their number, and its timing.
type PricedStreamEnd = (HandoffId, u32, DecodeTiming);

/// Start and end of a step, and the tokens of each prompt in it.
type PricedStep = (Time, Time, Vec<(HandoffId, u32)>);

struct PricedWorker {
    me: WorkerRef,
    prices: Prices,
    /// Orders of each router.
    orders_received: Vec<u64>,
    prompts: Vec<PricedPrompt>,
    streams: Vec<PricedStream>,
    /// Number of blocks reserved for each hand-off.
    reserved: BTreeMap<HandoffId, u32>,
    requests: BTreeMap<HandoffId, Arc<Request>>,
    step: Option<PricedStep>,
}

impl PricedWorker {
    fn tpot_least(&self) -> Option<Duration> {
        let reserved = self
            .reserved
            .keys()
            .filter_map(|id| self.requests[id].slo.tpot);
        let running = self.streams.iter().filter_map(|s| s.tpot);
        reserved.chain(running).min()
    }

    /// Draws a token for every stream of the step; returns the streams that drew their last.
    fn advance_streams(&mut self, began: Time, now: Time) -> Vec<PricedStreamEnd> {
        let mut over = Vec::new();
        for stream in self.streams.iter_mut().filter(|s| s.runs) {
            stream.runs = false;
            stream.ran = now;
            stream.drawn += 1;
            stream.context += 1;
            let first = (began.since(stream.since), now.since(began));
            let (wait, first) = *stream.first.get_or_insert(first);
            if stream.drawn >= stream.max {
                over.push((stream.handoff, stream.drawn, DecodeTiming { wait, first }));
            }
        }
        over
    }

    /// Adds computed tokens to a prompt; returns it if those were its last.
    fn computed(&mut self, handoff: HandoffId, tokens: u32) -> Option<PricedPrompt> {
        let index = self.prompts.iter().position(|p| p.handoff == handoff)?;
        let prompt = &mut self.prompts[index];
        prompt.done += tokens;
        let whole = prompt.done == prompt.request.prompt.len() as u32;
        whole.then(|| self.prompts.remove(index))
    }

    fn blocks_held(&self) -> u32 {
        self.reserved.values().sum()
    }

    /// Streams without a target are deferred where a step would take longer than the others' gap.
    fn run_streams(&mut self) -> StepWork {
        let gap = self.streams.iter().filter_map(|s| s.tpot).min();
        self.streams.sort_by_key(|s| (s.tpot.is_none(), s.ran));
        let mut work = StepWork::default();
        for stream in &mut self.streams {
            let more = work + StepWork::decode(u64::from(stream.context));
            let fits = gap.is_none_or(|gap| self.prices.step(&more) <= gap - gap / 8);
            stream.runs = stream.tpot.is_some() || fits;
            if stream.runs {
                work = more;
            }
        }
        work
    }

    /// The order of prompts: by latest start, those that are late already last.
    fn key(&self, index: usize, now: Time) -> (bool, Time, Time, HandoffId) {
        let prompt = &self.prompts[index];
        let begun = prompt.begun.is_some();
        let late = prompt.latest.is_some_and(|at| at < now) && !begun;
        let latest = prompt.latest.unwrap_or(Time::END);
        (late, latest, prompt.arrived, prompt.handoff)
    }

    fn begin(&mut self, now: Time) {
        if self.step.is_some() || (self.prompts.is_empty() && self.streams.is_empty()) {
            return;
        }
        let mut work = self.run_streams();
        let mut chunks = Vec::new();
        // A part of the gap is left to make up for time lost between steps.
        let gap = self.streams.iter().filter_map(|s| s.tpot).min();
        let gap = gap.map(|gap| gap - gap / 8);
        let mut tokens_left = 512;
        let mut order: Vec<usize> = (0..self.prompts.len()).collect();
        order.sort_by_key(|index| self.key(*index, now));
        for index in order {
            let prompt = &mut self.prompts[index];
            let left = prompt.request.prompt.len() as u32 - prompt.done;
            let mut tokens = left.min(tokens_left);
            if let Some(gap) = gap {
                let fits = |tokens: u32| {
                    let piece = StepWork::prefill(prompt.done, tokens);
                    self.prices.step(&(work + piece)) <= gap
                };
                let least = if chunks.is_empty() { 16 } else { 0 };
                while tokens > least && !fits(tokens) {
                    tokens -= (tokens / 16).max(1);
                }
            }
            if tokens == 0 {
                break;
            }
            work += StepWork::prefill(prompt.done, tokens);
            work.draws += u32::from(tokens == left);
            prompt.begun.get_or_insert(now);
            chunks.push((prompt.handoff, tokens));
            tokens_left -= tokens;
        }
        self.step = Some((now, now + self.prices.step(&work), chunks));
    }

    /// Time of prompts beside its streams, in thousandths of their time alone.
    fn slowed_permille(&self) -> u32 {
        let streams = self
            .streams
            .iter()
            .fold(StepWork::default(), |sum, stream| {
                sum + StepWork::decode(u64::from(stream.context))
            });
        let gap = self.streams.iter().filter_map(|s| s.tpot).min();
        let gap = gap.map(|gap| gap - gap / 8);
        cleave_planner::slowdown_permille(&self.prices, &streams, gap, 512, BLOCK_TOKENS)
    }

    /// Whether a prompt that can be in time would not be, if this much work goes before it.
    fn makes_others_late(&self, now: Time, latest: Option<Time>, run: Duration) -> bool {
        let mut others: Vec<(Time, Duration)> = self
            .prompts
            .iter()
            .filter_map(|prompt| {
                let rest = prompt.request.prompt.len() as u32 - prompt.done;
                let latest = prompt.latest.filter(|at| *at >= now)?;
                Some((latest, self.prices.prefill(prompt.done, rest, 512)))
            })
            .collect();
        others.sort_unstable();
        let mut ahead = Duration::ZERO;
        others.into_iter().any(|(at, work)| {
            let slowed = |span: Duration| span * self.slowed_permille() / 1000;
            let (before, with) = (now + slowed(ahead), now + slowed(ahead + run));
            ahead += work;
            latest.is_some_and(|own_latest| own_latest < at) && before <= at && with > at + run / 4
        })
    }

    fn load(&self, now: Time, orders_received: u64) -> WorkerLoad {
        let mut backlog = PrefillBacklog::default();
        let mut queue_tokens = 0;
        for prompt in &self.prompts {
            let tokens = prompt.request.prompt.len() as u32 - prompt.done;
            queue_tokens += u64::from(tokens);
            let work = self.prices.prefill(prompt.done, tokens, 512);
            let slack = prompt
                .latest
                .filter(|at| *at >= now)
                .map(|at| at.since(now));
            backlog.add(prompt.request.slo.priority, slack, work);
        }
        let running = self.streams.len() as u32;
        let of_running = self.streams.iter().map(|s| (s.handoff, s.context));
        let of_running: BTreeMap<HandoffId, u32> = of_running.collect();
        let context = self.reserved.keys().map(|id| {
            let prompt = self.requests[id].prompt.len() as u32;
            u64::from(of_running.get(id).copied().unwrap_or(prompt))
        });
        WorkerLoad {
            queue_tokens,
            sequences_waiting: self.reserved.len() as u32 - running.min(self.reserved.len() as u32),
            sequences_running: running,
            blocks_free: capacity().blocks_count - self.blocks_held(),
            context_tokens: context.sum(),
            streams: self.reserved.len() as u32,
            backlog,
            tpot_least: self.tpot_least(),
            step_left: self
                .step
                .as_ref()
                .map_or(Duration::ZERO, |(_, end, _)| end.since(now)),
            orders_received,
            ..WorkerLoad::default()
        }
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
    pub(crate) routers: Vec<RouterBrain>,
    workers: BTreeMap<WorkerId, PricedWorker>,
    arrivals: Vec<(Time, Request)>,
    landings: BTreeSet<(Time, WorkerId, HandoffId)>,
    pub(crate) outcomes: BTreeMap<FlightId, PricedOutcome>,
    next: u64,
    pub(crate) refusals_by_workers: u32,
    /// The targets last sent to workers for each flight.
    pub(crate) slo_received: BTreeMap<FlightId, RequestSlo>,
}

impl PricedWorld {
    pub(crate) fn new(limits: &RouterLimits, routers: usize, roles: &[Role]) -> Self {
        let mut world = Self {
            now: Time::ZERO,
            routers: (0..routers)
                .map(|_| RouterBrain::new(limits.clone()))
                .collect(),
            workers: BTreeMap::new(),
            arrivals: Vec::new(),
            landings: BTreeSet::new(),
            outcomes: BTreeMap::new(),
            next: 0,
            refusals_by_workers: 0,
            slo_received: BTreeMap::new(),
        };
        for (index, role) in roles.iter().enumerate() {
            let me = build::worker(index as u64 + 1);
            let worker = PricedWorker {
                me,
                prices: prices(),
                orders_received: vec![0; routers],
                prompts: Vec::new(),
                streams: Vec::new(),
                reserved: BTreeMap::new(),
                requests: BTreeMap::new(),
                step: None,
            };
            world.workers.insert(me.worker, worker);
            let description = WorkerDescription {
                queue_max: 64,
                ..build::description(*role, capacity())
            };
            for router in 0..routers {
                let description = description.clone();
                let joined = RouterInput::WorkerJoined {
                    worker: me,
                    description,
                };
                world.handle(router, joined);
                world.send_report(router, me, Report::Prices(prices()));
            }
        }
        world
    }

    pub(crate) fn arrive(&mut self, at: Time, request: Request) {
        self.arrivals.push((at, request));
    }

    fn send_report(&mut self, router: usize, worker: WorkerRef, report: Report) {
        self.handle(router, RouterInput::WorkerReported { worker, report });
    }

    fn send_report_of(&mut self, worker: WorkerRef, handoff: HandoffId, report: Report) {
        self.send_report(handoff.flight.router().0 as usize, worker, report);
    }

    /// Gives the flight to a router.
    pub(crate) fn submit(&mut self, router: usize, request: Request) -> FlightId {
        let flight = FlightId::new(RouterId(router as u64), self.next);
        self.next += 1;
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
        self.handle(router, RouterInput::Submitted { flight, request });
        flight
    }

    fn handle(&mut self, router: usize, input: RouterInput) {
        self.routers[router].handle(self.now, input);
        self.routers[router].check();
        while let Some(output) = self.routers[router].poll() {
            output.perform(&mut PricedRouterBody {
                world: self,
                router,
            });
        }
    }

    fn order(&mut self, router: usize, worker_ref: WorkerRef, order: Order) {
        let worker = self.workers.get_mut(&worker_ref.worker).expect("exists");
        worker.orders_received[router] += 1;
        match order {
            Order::Reserve(order) => self.reserve(router, worker_ref, &order),
            Order::Prefill(order) => self.prefill(router, worker_ref, order),
            Order::Run(order) => self.run_whole(router, worker_ref, &order),
            Order::Cancel { handoff } => {
                worker.prompts.retain(|prompt| prompt.handoff != handoff);
                worker.streams.retain(|stream| stream.handoff != handoff);
                worker.reserved.remove(&handoff);
                self.send_report(router, worker_ref, Report::Released { handoff });
            }
            Order::Renew { .. } => {}
            other => panic!("{other:?} in a world without faults"),
        }
    }

    fn reserve(&mut self, router: usize, worker_ref: WorkerRef, order: &ReserveOrder) {
        let handoff = order.handoff;
        let report = match self.hold(
            worker_ref,
            handoff,
            &order.request,
            order.expected_output_tokens,
        ) {
            Err(refusal) => Report::Refused { handoff, refusal },
            Ok(()) => Report::Reserved {
                handoff,
                present: 0,
                blocks: Vec::new(),
                state: None,
            },
        };
        self.send_report(router, worker_ref, report);
    }

    fn prefill(&mut self, router: usize, worker_ref: WorkerRef, order: PrefillOrder) {
        let (handoff, to) = (order.handoff, order.target.worker);
        let prompt = PricedPrompt::new(handoff, order.request, to, self.now);
        if let Err(refusal) = self.start_prompt(worker_ref, prompt, order.due) {
            self.send_report(router, worker_ref, Report::Refused { handoff, refusal });
        }
    }

    fn run_whole(&mut self, router: usize, worker_ref: WorkerRef, order: &RunOrder) {
        let handoff = order.handoff;
        let prompt = PricedPrompt::new(handoff, Arc::clone(&order.request), worker_ref, self.now);
        let held = self.hold(
            worker_ref,
            handoff,
            &order.request,
            order.expected_output_tokens,
        );
        let started = held.and_then(|()| self.start_prompt(worker_ref, prompt, order.due));
        let report = match started {
            Ok(()) => Report::Running {
                handoff,
                present: 0,
            },
            Err(refusal) => {
                let worker = self.workers.get_mut(&worker_ref.worker).expect("exists");
                worker.reserved.remove(&handoff);
                Report::Refused { handoff, refusal }
            }
        };
        self.send_report(router, worker_ref, report);
    }

    /// Reserves blocks for a request and its expected output.
    fn hold(
        &mut self,
        worker_ref: WorkerRef,
        handoff: HandoffId,
        request: &Arc<Request>,
        expected_output_tokens: u32,
    ) -> Result<(), Refusal> {
        let worker = self.workers.get_mut(&worker_ref.worker).expect("exists");
        self.slo_received
            .insert(handoff.flight, request.slo.clone());
        let tokens = request.prompt.len() as u32 + expected_output_tokens;
        let blocks = tokens.div_ceil(BLOCK_TOKENS);
        let free = capacity().blocks_count - worker.blocks_held();
        if blocks > free {
            let retry_after = millis(50);
            self.refusals_by_workers += 1;
            return Err(Refusal::NoBlocks { retry_after });
        }
        worker.reserved.insert(handoff, blocks);
        worker.requests.insert(handoff, Arc::clone(request));
        Ok(())
    }

    /// Queues a prompt, unless it or another would be late.
    fn start_prompt(
        &mut self,
        worker_ref: WorkerRef,
        prompt: PricedPrompt,
        due: Option<Deadline>,
    ) -> Result<(), Refusal> {
        let now = self.now;
        let worker = self.workers.get_mut(&worker_ref.worker).expect("exists");
        let run = worker
            .prices
            .prefill(0, prompt.request.prompt.len() as u32, 512);
        let slowed = |span: Duration| span * worker.slowed_permille() / 1000;
        let firm = due.is_some_and(|due| due.unmet == OnDeadlineMiss::Refuse);
        let due = due.map(|due| now + due.left);
        let before = worker
            .load(now, 0)
            .backlog
            .work_ahead(0, due.map(|due| (due - run).since(now)));
        let step = worker
            .step
            .as_ref()
            .map_or(Duration::ZERO, |(_, end, _)| end.since(now));
        let predicted = now + step.max(slowed(before)) + slowed(run);
        let late = due.is_some_and(|due| predicted > due + run / 4);
        if firm && (late || worker.makes_others_late(now, due.map(|due| due - run), run)) {
            self.refusals_by_workers += 1;
            return Err(Refusal::Late {
                aim: SloMetric::Ttft,
                predicted: predicted.since(now),
                retry_after: millis(50),
            });
        }
        worker.prompts.push(PricedPrompt {
            latest: due.map(|due| due - run),
            ..prompt
        });
        worker.begin(now);
        Ok(())
    }

    fn landed(&mut self, id: WorkerId, handoff: HandoffId) {
        let now = self.now;
        let worker = self.workers.get_mut(&id).expect("exists");
        let me = worker.me;
        if !worker.reserved.contains_key(&handoff) {
            return;
        }
        let request = Arc::clone(&worker.requests[&handoff]);
        worker
            .streams
            .push(PricedStream::new(handoff, &request, now));
        worker.begin(now);
        self.send_report_of(me, handoff, Report::Landed { handoff });
    }

    /// Handles a prompt's first token: the sequence runs on here, is sent, or is complete.
    fn handed_on(&mut self, id: WorkerId, prompt: &PricedPrompt) -> Option<PricedStreamEnd> {
        let now = self.now;
        let worker = self.workers.get_mut(&id).expect("exists");
        if prompt.request.stop.max_tokens == 1 {
            return Some((prompt.handoff, 1, DecodeTiming::default()));
        }
        if prompt.to == worker.me {
            let stream = PricedStream::new(prompt.handoff, &prompt.request, now);
            worker.streams.push(stream);
        } else {
            let length = prompt.request.prompt.len() as u32;
            let blocks = u64::from(length.div_ceil(BLOCK_TOKENS));
            let chunks = u64::from(length.div_ceil(512));
            let bytes = blocks * u64::from(capacity().block_bytes) / chunks;
            let transfer = worker.prices.transfer(prompt.to.worker, bytes);
            self.landings
                .insert((now + transfer, prompt.to.worker, prompt.handoff));
        }
        None
    }

    fn stepped(&mut self, id: WorkerId) {
        let now = self.now;
        let worker = self.workers.get_mut(&id).expect("exists");
        let me = worker.me;
        let (began, _, chunks) = worker.step.take().expect("a step is under way");
        let mut words: Vec<(HandoffId, Report)> = Vec::new();
        let mut over = worker.advance_streams(began, now);
        for (handoff, tokens) in chunks {
            let worker = self.workers.get_mut(&id).expect("exists");
            if let Some(prompt) = worker.computed(handoff, tokens) {
                let begun = prompt.begun.unwrap_or(now);
                let timing = PrefillTiming {
                    wait: begun.since(prompt.arrived),
                    run: now.since(begun),
                };
                words.push((handoff, Report::Prefilled { handoff, timing }));
                over.extend(self.handed_on(id, &prompt));
            }
        }
        let worker = self.workers.get_mut(&id).expect("exists");
        for (handoff, tokens, timing) in over {
            worker.streams.retain(|stream| stream.handoff != handoff);
            worker.reserved.remove(&handoff);
            let reason = FinishReason::Length;
            words.push((
                handoff,
                Report::Finished {
                    handoff,
                    reason,
                    output_tokens: tokens,
                    timing,
                    prefill: None,
                },
            ));
            words.push((handoff, Report::Released { handoff }));
        }
        worker.begin(now);
        let load = worker.load(now, 0);
        let received = worker.orders_received.clone();
        for (handoff, report) in words {
            self.send_report_of(me, handoff, report);
        }
        for (router, orders_received) in received.into_iter().enumerate() {
            let load = WorkerLoad {
                orders_received,
                ..load
            };
            self.send_report(router, me, Report::Load(load));
        }
    }

    /// Runs until nothing is left to happen, or `until`.
    pub(crate) fn run(&mut self, until: Time) {
        self.arrivals.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        loop {
            let arrival = self.arrivals.last().map(|(at, _)| *at);
            let landing = self.landings.first().map(|(at, ..)| *at);
            let steps = self
                .workers
                .values()
                .filter_map(|w| w.step.as_ref().map(|(_, end, _)| *end));
            let wake = self.routers.iter().filter_map(RouterBrain::deadline).min();
            let step = steps.min();
            let busy = [arrival, landing, step].into_iter().flatten().min();
            let next = [busy, wake].into_iter().flatten().min();
            let Some(at) = next.filter(|at| *at <= until) else {
                self.now = self.now.max(until);
                return;
            };
            if busy.is_none() && self.idle() {
                return;
            }
            self.now = self.now.max(at);
            if landing == Some(at) {
                let (_, worker, handoff) = self.landings.pop_first().expect("is there");
                self.landed(worker, handoff);
            } else if step == Some(at) {
                let over =
                    |w: &&PricedWorker| w.step.as_ref().is_some_and(|(_, end, _)| *end == at);
                let id = self.workers.values().find(over).map(|w| w.me.worker);
                self.stepped(id.expect("a step ends"));
            } else if arrival == Some(at) {
                let (_, request) = self.arrivals.pop().expect("is there");
                let router = self.next as usize % self.routers.len();
                self.submit(router, request);
            } else {
                for router in 0..self.routers.len() {
                    self.handle(router, RouterInput::Woke);
                }
            }
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
        self.world.order(self.router, worker, order);
    }

    fn fence(&mut self, handoff: HandoffId) {
        panic!("{handoff} breaks in a world without faults");
    }

    fn count(&mut self, handoff: HandoffId) {
        self.fence(handoff);
    }

    fn end(&mut self, flight: FlightId, ending: Ending, _: Option<u32>, _: RequestStageTimes) {
        if let Ending::Refused(refusal) = ending {
            self.outcome(flight).refused = Some((self.world.now, refusal));
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
