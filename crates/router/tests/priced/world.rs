//! A world that keeps to its prices: workers run steps that take exactly what their prices say, prompts
//! by when they must begin, in pieces that keep their streams' gaps. No message takes time.

use cleave_domain::{
    Aim, Backlog, Capacity, DecodeTiming, DueUnmet, Ending, Fingerprint, FinishReason, FlightId,
    HandoffId, Incarnation, LinkPrice, Load, Order, Prefill, PrefillTiming, Prices, Refusal,
    Report, Request, Reserve, Role, RouterId, RowPrice, Sampling, Slo, StopRules, Time, Verdict,
    Work, WorkerDescription, WorkerId, WorkerRef,
};
use cleave_planner::Predict;
use cleave_router::{Brain, Decided, Input, Limits, Note, Output, PlaceReason};
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
    }
}

/// A step of one row takes 5 ms; 20 µs more for each further one, 1 µs for a thousand tokens attended to.
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

pub(crate) fn request(prompt: u32, max_tokens: u32, slo: Slo) -> Request {
    Request {
        prompt: (0..prompt).collect(),
        generated: Arc::new([]),
        sampling: Sampling::greedy(),
        stop: StopRules {
            max_tokens,
            min_tokens: 0,
            stop_tokens: Arc::new([]),
        },
        priority: 0,
        cache_salt: 0,
        slo,
    }
}

/// Numbers from a seed.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound.max(1)
    }
}

struct Prompt {
    handoff: HandoffId,
    request: Arc<Request>,
    to: WorkerRef,
    done: u32,
    arrived: Time,
    begun: Option<Time>,
    /// When it must begin, if it has to.
    latest: Option<Time>,
}

struct Stream {
    handoff: HandoffId,
    context: u32,
    drawn: u32,
    max: u32,
    tpot: Option<Duration>,
    since: Time,
    first: Option<(Duration, Duration)>,
    /// Whether it is in the step under way, and when it was in one last.
    runs: bool,
    ran: Time,
}

impl Stream {
    /// One that has its first token.
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

/// A stream that has all its tokens, how many those are, and how it began.
type Over = (HandoffId, u32, DecodeTiming);

/// When a step began, when it ends, and how many tokens of which prompts are in it.
type UnderWay = (Time, Time, Vec<(HandoffId, u32)>);

struct Worker {
    me: WorkerRef,
    prices: Prices,
    /// Orders of each router.
    heard: Vec<u64>,
    prompts: Vec<Prompt>,
    streams: Vec<Stream>,
    /// What was reserved, in blocks.
    reserved: BTreeMap<HandoffId, u32>,
    requests: BTreeMap<HandoffId, Arc<Request>>,
    /// The step under way: when it began and ends, and of which prompt so many tokens.
    step: Option<UnderWay>,
}

impl Worker {
    fn tpot_least(&self) -> Option<Duration> {
        let reserved = self
            .reserved
            .keys()
            .filter_map(|id| self.requests[id].slo.tpot);
        let running = self.streams.iter().filter_map(|s| s.tpot);
        reserved.chain(running).min()
    }

    /// Every stream of the step drew a token; these drew their last.
    fn drew(&mut self, began: Time, now: Time) -> Vec<Over> {
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

    /// So many tokens of a prompt ran; gives it if those were its last.
    fn computed(&mut self, handoff: HandoffId, tokens: u32) -> Option<Prompt> {
        let index = self.prompts.iter().position(|p| p.handoff == handoff)?;
        let prompt = &mut self.prompts[index];
        prompt.done += tokens;
        let whole = prompt.done == prompt.request.prompt.len() as u32;
        whole.then(|| self.prompts.remove(index))
    }

    fn blocks_held(&self) -> u32 {
        self.reserved.values().sum()
    }

    /// Streams without a target sit out where a step would take longer than the others' gap.
    fn run_streams(&mut self) -> Work {
        let gap = self.streams.iter().filter_map(|s| s.tpot).min();
        self.streams.sort_by_key(|s| (s.tpot.is_none(), s.ran));
        let mut work = Work::default();
        for stream in &mut self.streams {
            let more = work + Work::decode(u64::from(stream.context));
            let fits = gap.is_none_or(|gap| self.prices.step(&more) <= gap - gap / 8);
            stream.runs = stream.tpot.is_some() || fits;
            if stream.runs {
                work = more;
            }
        }
        work
    }

    /// Whoever must begin first goes first; who is too late already goes last.
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
        // What is lost on the way is made up for.
        let gap = self.streams.iter().filter_map(|s| s.tpot).min();
        let gap = gap.map(|gap| gap - gap / 8);
        let mut room = 512;
        let mut order: Vec<usize> = (0..self.prompts.len()).collect();
        order.sort_by_key(|index| self.key(*index, now));
        for index in order {
            let prompt = &mut self.prompts[index];
            let left = prompt.request.prompt.len() as u32 - prompt.done;
            let mut tokens = left.min(room);
            if let Some(gap) = gap {
                let fits = |tokens: u32| {
                    let piece = Work::prefill(prompt.done, tokens);
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
            work += Work::prefill(prompt.done, tokens);
            work.draws += u32::from(tokens == left);
            prompt.begun.get_or_insert(now);
            chunks.push((prompt.handoff, tokens));
            room -= tokens;
        }
        self.step = Some((now, now + self.prices.step(&work), chunks));
    }

    /// By how much prompts take longer beside its streams.
    fn slowed_permille(&self) -> u32 {
        let streams = self.streams.iter().fold(Work::default(), |sum, stream| {
            sum + Work::decode(u64::from(stream.context))
        });
        let gap = self.streams.iter().filter_map(|s| s.tpot).min();
        let gap = gap.map(|gap| gap - gap / 8);
        cleave_planner::beside(&self.prices, &streams, gap, (512, BLOCK_TOKENS))
    }

    /// Whether one that can be in time would not be, if so much work goes before it.
    fn crowded(&self, now: Time, latest: Option<Time>, run: Duration) -> bool {
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
            latest.is_some_and(|mine| mine < at) && before <= at && with > at + run / 4
        })
    }

    fn load(&self, now: Time, orders_heard: u64) -> Load {
        let mut backlog = Backlog::default();
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
        Load {
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
            orders_heard,
            ..Load::default()
        }
    }
}

/// What became of a request.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) submitted: Time,
    pub(crate) class: String,
    pub(crate) tenant: String,
    pub(crate) placed: Option<PlaceReason>,
    pub(crate) refused: Option<(Time, Refusal)>,
    pub(crate) verdict: Option<Verdict>,
    pub(crate) output_tokens: u32,
    pub(crate) words: String,
}

pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) routers: Vec<Brain>,
    workers: BTreeMap<WorkerId, Worker>,
    arrivals: Vec<(Time, Request)>,
    landings: BTreeSet<(Time, WorkerId, HandoffId)>,
    pub(crate) outcomes: BTreeMap<FlightId, Outcome>,
    next: u64,
    pub(crate) refusals_by_workers: u32,
    /// What workers were told of each flight's promise, last.
    pub(crate) told: BTreeMap<FlightId, Slo>,
}

impl World {
    pub(crate) fn new(limits: &Limits, routers: usize, roles: &[Role]) -> Self {
        let mut world = Self {
            now: Time::ZERO,
            routers: (0..routers).map(|_| Brain::new(limits.clone())).collect(),
            workers: BTreeMap::new(),
            arrivals: Vec::new(),
            landings: BTreeSet::new(),
            outcomes: BTreeMap::new(),
            next: 0,
            refusals_by_workers: 0,
            told: BTreeMap::new(),
        };
        for (index, role) in roles.iter().enumerate() {
            let me = WorkerRef {
                worker: WorkerId(index as u64 + 1),
                incarnation: Incarnation(1),
            };
            let worker = Worker {
                me,
                prices: prices(),
                heard: vec![0; routers],
                prompts: Vec::new(),
                streams: Vec::new(),
                reserved: BTreeMap::new(),
                requests: BTreeMap::new(),
                step: None,
            };
            world.workers.insert(me.worker, worker);
            let description = WorkerDescription {
                role: *role,
                home: *role,
                model: "m".to_owned(),
                fingerprint: Fingerprint("a".to_owned()),
                capacity: capacity(),
                queue_max: 64,
                device: None,
            };
            for router in 0..routers {
                let description = description.clone();
                let joined = Input::WorkerJoined {
                    worker: me,
                    description,
                };
                world.handle(router, joined);
                world.told(router, me, Report::Prices(prices()));
            }
        }
        world
    }

    pub(crate) fn arrive(&mut self, at: Time, request: Request) {
        self.arrivals.push((at, request));
    }

    fn told(&mut self, router: usize, worker: WorkerRef, report: Report) {
        self.handle(router, Input::Told { worker, report });
    }

    fn tell_of(&mut self, worker: WorkerRef, handoff: HandoffId, report: Report) {
        self.told(handoff.flight.router().0 as usize, worker, report);
    }

    /// Gives the flight to a router.
    pub(crate) fn submit(&mut self, router: usize, request: Request) -> FlightId {
        let flight = FlightId::new(RouterId(router as u64), self.next);
        self.next += 1;
        let outcome = Outcome {
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
        self.handle(router, Input::Submitted { flight, request });
        flight
    }

    fn handle(&mut self, router: usize, input: Input) {
        self.routers[router].handle(self.now, input);
        self.routers[router].check();
        while let Some(output) = self.routers[router].poll() {
            self.obey(router, output);
        }
    }

    fn obey(&mut self, router: usize, output: Output) {
        match output {
            Output::Tell { worker, order } => self.order(router, worker, order),
            Output::End { flight, ending, .. } => {
                if let Ending::Refused(refusal) = ending {
                    let outcome = self.outcomes.get_mut(&flight).expect("was submitted");
                    outcome.refused = Some((self.now, refusal));
                }
            }
            Output::Note(Note::Judged {
                flight,
                verdict,
                output_tokens,
                timing,
                forecast,
                ..
            }) => {
                let outcome = self.outcomes.get_mut(&flight).expect("was submitted");
                assert!(outcome.verdict.is_none(), "{flight} is judged twice");
                outcome.verdict = Some(verdict);
                outcome.output_tokens = output_tokens;
                outcome.words = format!("{timing:?}\n{forecast:?}");
            }
            Output::Note(Note::Decided(decision)) => {
                let flight = decision.flight;
                let outcome = self.outcomes.get_mut(&flight).expect("was submitted");
                if let Decided::Placed(reason) = decision.outcome {
                    outcome.placed = Some(reason);
                }
            }
            Output::Note(_) | Output::Readiness(_) | Output::Drained | Output::Want(_) => {}
            Output::Fence { handoff } | Output::Count { handoff } => {
                panic!("{handoff} breaks in a world without faults")
            }
        }
    }

    fn order(&mut self, router: usize, who: WorkerRef, order: Order) {
        let worker = self.workers.get_mut(&who.worker).expect("exists");
        worker.heard[router] += 1;
        match order {
            Order::Reserve(order) => self.reserve(router, who, order),
            Order::Prefill(order) => self.prefill(router, who, order),
            Order::Cancel { handoff } => {
                worker.prompts.retain(|prompt| prompt.handoff != handoff);
                worker.streams.retain(|stream| stream.handoff != handoff);
                worker.reserved.remove(&handoff);
                self.told(router, who, Report::Released { handoff });
            }
            Order::Renew { .. } => {}
            other => panic!("{other:?} in a world without faults"),
        }
    }

    fn reserve(&mut self, router: usize, who: WorkerRef, order: Reserve) {
        let worker = self.workers.get_mut(&who.worker).expect("exists");
        let handoff = order.handoff;
        self.told.insert(handoff.flight, order.request.slo.clone());
        let tokens = order.request.prompt.len() as u32 + order.expected_output_tokens;
        let blocks = tokens.div_ceil(BLOCK_TOKENS);
        let free = capacity().blocks_count - worker.blocks_held();
        let report = if blocks > free {
            let retry_after = millis(50);
            self.refusals_by_workers += 1;
            let refusal = Refusal::NoBlocks { retry_after };
            Report::Refused { handoff, refusal }
        } else {
            worker.reserved.insert(handoff, blocks);
            worker.requests.insert(handoff, order.request);
            Report::Reserved {
                handoff,
                present: 0,
                blocks: Vec::new(),
            }
        };
        self.told(router, who, report);
    }

    fn prefill(&mut self, router: usize, who: WorkerRef, order: Prefill) {
        let now = self.now;
        let worker = self.workers.get_mut(&who.worker).expect("exists");
        let run = worker
            .prices
            .prefill(0, order.request.prompt.len() as u32, 512);
        let slowed = |span: Duration| span * worker.slowed_permille() / 1000;
        let due = order.due.map(|due| now + due.left);
        let firm = order.due.is_some_and(|due| due.unmet == DueUnmet::Refuse);
        let before = worker
            .load(now, 0)
            .backlog
            .ahead(0, due.map(|due| (due - run).since(now)));
        let step = worker
            .step
            .as_ref()
            .map_or(Duration::ZERO, |(_, end, _)| end.since(now));
        let predicted = now + step.max(slowed(before)) + slowed(run);
        let late = due.is_some_and(|due| predicted > due + run / 4);
        if firm && (late || worker.crowded(now, due.map(|due| due - run), run)) {
            self.refusals_by_workers += 1;
            let handoff = order.handoff;
            let refusal = Refusal::Late {
                aim: Aim::Ttft,
                predicted: predicted.since(now),
                retry_after: millis(50),
            };
            return self.told(router, who, Report::Refused { handoff, refusal });
        }
        worker.prompts.push(Prompt {
            handoff: order.handoff,
            request: order.request,
            to: order.target.worker,
            done: 0,
            arrived: now,
            begun: None,
            latest: due.map(|due| due - run),
        });
        worker.begin(now);
    }

    fn landed(&mut self, id: WorkerId, handoff: HandoffId) {
        let now = self.now;
        let worker = self.workers.get_mut(&id).expect("exists");
        let me = worker.me;
        if !worker.reserved.contains_key(&handoff) {
            return;
        }
        let request = Arc::clone(&worker.requests[&handoff]);
        worker.streams.push(Stream::new(handoff, &request, now));
        worker.begin(now);
        self.tell_of(me, handoff, Report::Landed { handoff });
    }

    /// A prompt's first token is there: it runs on, leaves, or that was all.
    fn handed_on(&mut self, id: WorkerId, prompt: &Prompt) -> Option<Over> {
        let now = self.now;
        let worker = self.workers.get_mut(&id).expect("exists");
        if prompt.request.stop.max_tokens == 1 {
            return Some((prompt.handoff, 1, DecodeTiming::default()));
        }
        if prompt.to == worker.me {
            let stream = Stream::new(prompt.handoff, &prompt.request, now);
            worker.streams.push(stream);
        } else {
            let length = prompt.request.prompt.len() as u32;
            let blocks = u64::from(length.div_ceil(BLOCK_TOKENS));
            let chunks = u64::from(length.div_ceil(512));
            let bytes = blocks * u64::from(capacity().block_bytes) / chunks;
            let way = worker.prices.transfer(prompt.to.worker, bytes);
            self.landings
                .insert((now + way, prompt.to.worker, prompt.handoff));
        }
        None
    }

    fn stepped(&mut self, id: WorkerId) {
        let now = self.now;
        let worker = self.workers.get_mut(&id).expect("exists");
        let me = worker.me;
        let (began, _, chunks) = worker.step.take().expect("a step is under way");
        let mut words: Vec<(HandoffId, Report)> = Vec::new();
        let mut over = worker.drew(began, now);
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
        let heard = worker.heard.clone();
        for (handoff, report) in words {
            self.tell_of(me, handoff, report);
        }
        for (router, orders_heard) in heard.into_iter().enumerate() {
            let load = Load {
                orders_heard,
                ..load
            };
            self.told(router, me, Report::Load(load));
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
            let wake = self.routers.iter().filter_map(Brain::deadline).min();
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
                let over = |w: &&Worker| w.step.as_ref().is_some_and(|(_, end, _)| *end == at);
                let id = self.workers.values().find(over).map(|w| w.me.worker);
                self.stepped(id.expect("a step ends"));
            } else if arrival == Some(at) {
                let (_, request) = self.arrivals.pop().expect("is there");
                let router = self.next as usize % self.routers.len();
                self.submit(router, request);
            } else {
                for router in 0..self.routers.len() {
                    self.handle(router, Input::Woke);
                }
            }
        }
    }

    fn idle(&self) -> bool {
        self.outcomes
            .values()
            .all(|outcome| outcome.verdict.is_some())
    }

    pub(crate) fn count(&self, of: impl Fn(&Outcome) -> bool) -> usize {
        self.outcomes.values().filter(|outcome| of(outcome)).count()
    }

    pub(crate) fn good(&self) -> usize {
        self.count(|outcome| outcome.verdict == Some(Verdict::Good))
    }

    pub(crate) fn late(&self) -> usize {
        self.count(|outcome| matches!(outcome.verdict, Some(Verdict::Late { .. })))
    }
}
