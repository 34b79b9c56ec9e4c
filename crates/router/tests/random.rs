//! The router's brain under any input: true and false reports, late and doubled, of workers that
//! come and go, drain, get stuck and change their roles, and clients that have any number of tokens
//! by the time they are counted. It must keep its invariants after each and end every flight
//! exactly once. Where workers report absurd numbers too, it must neither overflow nor emit without
//! end.

use crate::absurd_reports::AbsurdReports;
use cleave_domain::{
    BlockHash, Capacity, DecodeTiming, DeviceId, Ending, Failure, Fingerprint, FinishReason,
    FlightId, HandoffId, Incarnation, Order, PrefillTiming, Prices, Refusal, Report, Request,
    RequestStageTimes, Role, StepProgress, Time, WorkerDescription, WorkerId, WorkerLoad,
    WorkerRef,
};
use cleave_planner::scaling::ScalerDecision;
use cleave_router::{
    CancelReason, OperatorRequest, RouterActions, RouterBrain, RouterInput, RouterLimits,
    RouterNote, RouterReadiness,
};
use cleave_testkit::build;
use proptest::prelude::{ProptestConfig, Strategy, any, prop, proptest};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;

fn limits() -> RouterLimits {
    RouterLimits {
        flights_max: 12,
        queue_max: 5,
        queue_wait_max: Duration::from_millis(300),
        failures_max: 2,
        renew_every: Duration::from_millis(50),
        reserve_timeout: Duration::from_millis(40),
        expected_output_tokens: 8,
        moves_max: 2,
        move_ahead_tokens: 4,
        stuck_max: Duration::from_millis(80),
        reader_wait_max: Duration::from_millis(60),
        ..RouterLimits::default()
    }
}

fn description(role: u8, revision: u8) -> WorkerDescription {
    WorkerDescription {
        role: self::role(role),
        home: self::role(role),
        model: "m".to_owned(),
        fingerprint: Fingerprint(format!("rev {}", revision % 8 / 7)),
        capacity: Capacity {
            block_tokens: 4,
            block_bytes: 64,
            blocks_count: 30,
            slots_count: 3,
            step_tokens_max: 16,
            context_tokens_max: 100,
            states: None,
            windows: None,
        },
        queue_max: 3,
        // Some have a device of their own, some share one of two.
        device: (revision >= 128).then(|| DeviceId(format!("{}", revision % 2))),
    }
}

/// Far more outputs than twelve flights on five workers can need.
const OUTPUTS_MAX: u32 = 1000;

fn request(prompt: u8, priority: u8) -> Request {
    let mut request = build::request(0..=u32::from(prompt % 60), 20);
    request.stop.min_tokens = 3;
    request.stop.stop_tokens = [1009].into();
    request.priority = i32::from(priority % 3);
    request
}

/// An attempt as its workers see it.
struct OrderedAttempt {
    sender: WorkerRef,
    decode: WorkerRef,
    /// The attempt it continues, if a running sequence moves.
    of: Option<u32>,
    /// Its sender was ordered to start: from now on its tokens may come.
    ordered: bool,
    /// Its decode worker reported its end, was ordered to end it, or is gone; or the sender
    /// refused.
    over: bool,
    /// An order to run both legs was answered.
    running: bool,
    /// Reports already made, as by an honest worker.
    prefilled: bool,
    landed: bool,
}

impl OrderedAttempt {
    fn new(sender: WorkerRef, decode: WorkerRef, of: Option<u32>) -> Self {
        Self {
            sender,
            decode,
            of,
            ordered: false,
            over: false,
            running: false,
            prefilled: false,
            landed: false,
        }
    }
}

/// A flight's state outside the brain.
#[derive(Default)]
struct DrivenFlight {
    attempts: BTreeMap<u32, OrderedAttempt>,
    /// Lowest attempt that is not fenced.
    unfenced: u32,
    /// Tokens the client was given.
    tokens_given: u32,
    /// The last question to the client; the brain waits for an answer to this one only.
    count_requested: Option<HandoffId>,
}

/// Drives a brain, and records its orders and the flights that ended.
struct RandomDriver {
    brain: RouterBrain,
    now: u64,
    next: u64,
    incarnations: [u64; 5],
    orders_sent: Vec<(WorkerRef, HandoffId)>,
    open: BTreeSet<FlightId>,
    flights: BTreeMap<FlightId, DrivenFlight>,
    /// Counts requested and not answered yet, with the tokens that the client had then.
    counts: VecDeque<(HandoffId, u32)>,
    chance: u64,
    /// Source of the workers' absurd reports, if they send such.
    absurd_reports: Option<AbsurdReports>,
}

impl RandomDriver {
    fn new(limits: RouterLimits) -> Self {
        Self {
            brain: RouterBrain::new(limits),
            now: 0,
            next: 0,
            incarnations: [1; 5],
            orders_sent: Vec::new(),
            open: BTreeSet::new(),
            flights: BTreeMap::new(),
            counts: VecDeque::new(),
            chance: 0,
            absurd_reports: None,
        }
    }

    /// Workers report absurd numbers, and clients have targets of any size.
    fn lying(seed: u64) -> Self {
        let mut absurd_reports = AbsurdReports::new(seed);
        let limits = RouterLimits {
            policy: absurd_reports.policy(),
            ..limits()
        };
        Self {
            absurd_reports: Some(absurd_reports),
            ..Self::new(limits)
        }
    }

    fn me(&self, worker: usize) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(worker as u64 + 1),
            incarnation: Incarnation(self.incarnations[worker]),
        }
    }

    fn handle(&mut self, input: RouterInput) {
        self.track_input(&input);
        self.brain.handle(Time::from_nanos(self.now), input);
        let mut outputs = 0;
        while let Some(output) = self.brain.poll() {
            output.perform(self);
            outputs += 1;
            assert!(outputs < OUTPUTS_MAX, "the router talks without end");
        }
        self.brain.check();
        let clone = self.brain.clone();
        assert_eq!(fingerprint(&clone), fingerprint(&self.brain));
    }

    /// Applies the input to the attempts.
    fn track_input(&mut self, input: &RouterInput) {
        match input {
            RouterInput::WorkerJoined { worker, .. } | RouterInput::WorkerLost { worker } => {
                let attempts = self
                    .flights
                    .values_mut()
                    .flat_map(|f| f.attempts.values_mut());
                for attempt in attempts.filter(|attempt| attempt.decode.worker == worker.worker) {
                    attempt.over |= matches!(input, RouterInput::WorkerJoined { .. })
                        || attempt.decode == *worker;
                }
            }
            RouterInput::WorkerReported { worker, report } => {
                if let Report::Running { handoff, .. } = report {
                    let driven = self.flights.get_mut(&handoff.flight);
                    let attempt = driven.and_then(|f| f.attempts.get_mut(&handoff.attempt));
                    if let Some(attempt) = attempt.filter(|attempt| attempt.decode == *worker) {
                        attempt.running = true;
                    }
                }
                let (Report::Finished { handoff, .. }
                | Report::Released { handoff }
                | Report::LegFailed { handoff, .. }
                | Report::Refused { handoff, .. }) = report
                else {
                    return;
                };
                let driven = self.flights.get_mut(&handoff.flight);
                let attempt = driven.and_then(|f| f.attempts.get_mut(&handoff.attempt));
                // A sender that refuses its prompt drew nothing.
                let refused = matches!(report, Report::Refused { .. });
                let ends = |attempt: &&mut OrderedAttempt| {
                    attempt.decode == *worker || (refused && attempt.sender == *worker)
                };
                if let Some(attempt) = attempt.filter(ends) {
                    attempt.over = true;
                }
            }
            _ => {}
        }
    }

    /// Records a question for the client's tokens; meanwhile the client was given some more.
    fn record_count(&mut self, handoff: HandoffId) {
        self.chance = self
            .chance
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1);
        let more = (self.chance >> 33) as u32 % 4;
        let driven = self
            .flights
            .get_mut(&handoff.flight)
            .expect("was submitted");
        assert_ne!(
            driven.count_requested,
            Some(handoff),
            "{handoff} is asked for twice"
        );
        let ordered = driven.attempts.values().any(|attempt| attempt.ordered);
        driven.tokens_given = (driven.tokens_given + if ordered { more } else { 0 }).min(20);
        driven.count_requested = Some(handoff);
        self.counts.push_back((handoff, driven.tokens_given));
    }

    /// Records an attempt with its first order.
    fn first_order(&mut self, handoff: HandoffId, request: &Request, attempt: OrderedAttempt) {
        let driven = self.flights.entry(handoff.flight).or_default();
        // No attempt begins while the client's tokens are being counted.
        assert_eq!(driven.count_requested, None, "{handoff}");
        let generated = request.generated.len() as u32;
        assert!(generated <= driven.tokens_given, "{handoff} has too many");
        let worker = attempt.decode;
        let before = driven.attempts.insert(handoff.attempt, attempt);
        assert!(before.is_none(), "{handoff} means two pairs");
        self.orders_sent.push((worker, handoff));
    }

    /// Asserts that among all attempts whose tokens the client may still be given one runs, or two
    /// during a move.
    fn begun(&mut self, sender: WorkerRef, handoff: HandoffId) {
        let driven = self
            .flights
            .get_mut(&handoff.flight)
            .expect("was submitted");
        let ordered_attempt = driven
            .attempts
            .get_mut(&handoff.attempt)
            .expect("was reserved for");
        assert_eq!(ordered_attempt.sender, sender, "{handoff}");
        ordered_attempt.ordered = true;
        let of = ordered_attempt.of;
        let runs = |(attempt, ordered_attempt): &(&u32, &OrderedAttempt)| {
            **attempt >= driven.unfenced && ordered_attempt.ordered && !ordered_attempt.over
        };
        for (attempt, _) in driven.attempts.iter().filter(runs) {
            let expected = *attempt == handoff.attempt || of == Some(*attempt);
            assert!(expected, "{handoff} begins while attempt {attempt} runs");
        }
    }

    fn answer_counts(&mut self) {
        while let Some((handoff, tokens_given)) = self.counts.pop_front() {
            let driven = self
                .flights
                .get_mut(&handoff.flight)
                .expect("was submitted");
            driven
                .count_requested
                .take_if(|count_requested| *count_requested == handoff);
            let generated = (1000..1000 + tokens_given).collect();
            self.handle(RouterInput::Counted { handoff, generated });
        }
    }

    fn act(&mut self, [action, a, b, c]: [u8; 4]) {
        // Most actions take next to no time, some as long as a time limit.
        self.now += u64::from(c) * if b % 16 == 0 { 300_000 } else { 5_000 };
        self.chance ^= u64::from(a) << 40 | u64::from(b) << 20;
        // Most counts are answered at once.
        if c % 4 > 0 {
            self.answer_counts();
        }
        let worker = usize::from(a % 5);
        let me = self.me(worker);
        match action % 40 {
            0 => {
                self.incarnations[worker] += u64::from(b % 2);
                self.handle(RouterInput::WorkerJoined {
                    worker: self.me(worker),
                    description: description(a, b),
                });
            }
            1 if b % 2 == 0 => self.handle(RouterInput::WorkerLost { worker: me }),
            2..=6 => {
                let flight = FlightId(self.next);
                self.next += 1;
                self.open.insert(flight);
                self.flights.insert(flight, DrivenFlight::default());
                let mut request = request(a, b);
                if let Some(absurd_reports) = &mut self.absurd_reports {
                    absurd_reports.falsify_request(&mut request);
                }
                let request = Arc::new(request);
                self.handle(RouterInput::Submitted { flight, request });
            }
            7 => {
                let flight = FlightId(u64::from(a) % self.next.max(1));
                self.handle(match b % 4 {
                    0 | 1 => RouterInput::Cancelled {
                        flight,
                        why: CancelReason::Left,
                    },
                    2 => RouterInput::ReaderStalled { flight },
                    _ => RouterInput::ReaderResumed { flight },
                });
            }
            8 => self.handle(RouterInput::Woke),
            9 | 10 => {
                let report = self.own_report(b, c);
                self.send_report(me, report);
            }
            11 => self.handle(RouterInput::Commanded {
                worker: me.worker,
                command: OperatorRequest::Serve(role(b)),
            }),
            12..=33 => self.honest_answer(a),
            _ => self.answer(a, b),
        }
    }

    /// Sends a report, falsified if workers are not honest.
    fn send_report(&mut self, worker: WorkerRef, mut report: Report) {
        if let Some(absurd_reports) = &mut self.absurd_reports {
            absurd_reports.falsify(&mut report);
        }
        self.handle(RouterInput::WorkerReported { worker, report });
    }

    /// A worker's report about itself.
    fn own_report(&self, b: u8, c: u8) -> Report {
        match b % 10 {
            0..=3 => Report::Load(WorkerLoad {
                queue_tokens: u64::from(c),
                sequences_waiting: u32::from(c % 4),
                sequences_running: u32::from(b % 4),
                blocks_free: u32::from(c % 31),
                progress: StepProgress::Moving,
                ..WorkerLoad::default()
            }),
            4 | 5 => Report::Prefix {
                stored: vec![BlockHash([b % 4; 16])],
                evicted: vec![BlockHash([c % 4; 16])],
            },
            6 => Report::Load(WorkerLoad {
                progress: StepProgress::Stuck,
                ..WorkerLoad::default()
            }),
            7 => Report::Draining,
            _ => Report::Serves { role: role(c) },
        }
    }

    /// Sends some report, fitting or not, about some recent order.
    fn answer(&mut self, a: u8, b: u8) {
        let Some(back) = usize::from(a).checked_rem(self.orders_sent.len().min(6)) else {
            return;
        };
        let (worker, handoff) = self.orders_sent[self.orders_sent.len() - 1 - back];
        let retry_after = Duration::from_millis(u64::from(a));
        let failure = Failure::LinkLost;
        let report = match b % 24 {
            0..=4 => reserved(handoff),
            5..=6 => running(handoff),
            7..=9 => prefilled(handoff),
            10..=11 => Report::Landed { handoff },
            12..=13 => finished(handoff),
            14..=16 => Report::Released { handoff },
            17 => Report::LegFailed { handoff, failure },
            18 => Report::Refused {
                handoff,
                refusal: Refusal::NoBlocks { retry_after },
            },
            19..=20 => Report::MigrationAborted { handoff, failure },
            21..=22 => Report::MemoryPressure { handoff },
            _ => Report::Draining,
        };
        self.send_report(worker, report);
    }

    /// The next report of an honest worker about the latest attempt of some open flight, so that
    /// sequences come to run and to move.
    fn honest_answer(&mut self, a: u8) {
        let Some(index) = usize::from(a / 8).checked_rem(self.open.len()) else {
            return;
        };
        let flight = *self.open.iter().nth(index).expect("is within");
        let driven = self.flights.get_mut(&flight).expect("was submitted");
        let Some(mut entry) = driven.attempts.last_entry() else {
            return;
        };
        let handoff = HandoffId {
            flight,
            attempt: *entry.key(),
        };
        let ordered_attempt = entry.get_mut();
        let (sender, decode) = (ordered_attempt.sender, ordered_attempt.decode);
        let failure = Failure::LinkLost;
        let (worker, report) = if !ordered_attempt.ordered {
            (decode, reserved(handoff))
        } else if sender == decode && !ordered_attempt.running {
            (decode, running(handoff))
        } else if !ordered_attempt.prefilled && a % 8 > 1 {
            ordered_attempt.prefilled = true;
            (sender, prefilled(handoff))
        } else if !ordered_attempt.landed && a % 8 > 2 {
            ordered_attempt.landed = true;
            (decode, Report::Landed { handoff })
        } else {
            let attempt = ordered_attempt.of.unwrap_or(handoff.attempt);
            let old = HandoffId { flight, attempt };
            match a % 8 {
                0 if ordered_attempt.of.is_some() => {
                    (sender, Report::MigrationAborted { handoff, failure })
                }
                1 => (sender, Report::Released { handoff: old }),
                2 => (sender, finished(old)),
                3..=5 if self.chance.is_multiple_of(3) => (decode, Report::Draining),
                3..=6 => (decode, Report::MemoryPressure { handoff }),
                _ => (decode, finished(handoff)),
            }
        };
        self.send_report(worker, report);
    }

    /// Removes every worker: every flight ends by its timers alone.
    fn end_all(&mut self) {
        self.answer_counts();
        for worker in 0..5 {
            self.handle(RouterInput::WorkerLost {
                worker: self.me(worker),
            });
        }
        for _ in 0..1000 {
            self.answer_counts();
            let Some(at) = self.brain.deadline() else {
                break;
            };
            self.now = at.as_nanos();
            self.handle(RouterInput::Woke);
        }
        assert_eq!(self.brain.deadline(), None, "the router never rests");
        assert!(self.open.is_empty(), "without an end: {:?}", self.open);
        assert_eq!(self.brain.legs_open(), 0, "legs of workers that are gone");
    }
}

impl RouterActions for RandomDriver {
    type Outcome = ();

    fn order(&mut self, worker: WorkerRef, order: Order) {
        match order {
            Order::Reserve(order) => {
                assert_ne!(order.sender, worker, "{} has one worker", order.handoff);
                let driven = self.flights.entry(order.handoff.flight).or_default();
                let of = driven
                    .attempts
                    .iter()
                    .rfind(|(_, ordered_attempt)| {
                        order.ahead_tokens > 0 && ordered_attempt.decode == order.sender
                    })
                    .map(|(attempt, _)| *attempt);
                let attempt = OrderedAttempt::new(order.sender, worker, of);
                self.first_order(order.handoff, &order.request, attempt);
            }
            Order::Run(order) => {
                let attempt = OrderedAttempt::new(worker, worker, None);
                self.first_order(order.handoff, &order.request, attempt);
                self.begun(worker, order.handoff);
            }
            Order::Prefill(order) => {
                assert_ne!(
                    order.target.worker, worker,
                    "{} has one worker",
                    order.handoff
                );
                self.begun(worker, order.handoff);
                self.orders_sent.push((worker, order.handoff));
            }
            Order::Migrate(order) => {
                let driven = &self.flights[&order.handoff.flight];
                let ordered_attempt = &driven.attempts[&order.handoff.attempt];
                assert_eq!(
                    ordered_attempt.of,
                    Some(order.of.attempt),
                    "{}",
                    order.handoff
                );
                self.begun(worker, order.handoff);
                self.orders_sent.push((worker, order.handoff));
            }
            Order::Cancel { handoff } => {
                let driven = self
                    .flights
                    .get_mut(&handoff.flight)
                    .expect("was submitted");
                let ordered_attempt = driven
                    .attempts
                    .get_mut(&handoff.attempt)
                    .expect("was ordered");
                if ordered_attempt.decode == worker {
                    // Tokens may still come of an order to run that was not answered.
                    let whole = ordered_attempt.sender == worker;
                    ordered_attempt.over |= !whole || ordered_attempt.running;
                } else {
                    assert_eq!(ordered_attempt.sender, worker, "{handoff} was never there");
                }
            }
            Order::Renew { .. }
            | Order::Drain
            | Order::Serve { .. }
            | Order::Relay(_)
            | Order::FetchAdapter { .. } => {}
        }
    }

    fn fence(&mut self, handoff: HandoffId) {
        assert!(self.open.contains(&handoff.flight), "{handoff} is over");
        let driven = self
            .flights
            .get_mut(&handoff.flight)
            .expect("was submitted");
        assert!(
            driven.unfenced <= handoff.attempt,
            "{handoff} is fenced twice"
        );
        driven.unfenced = handoff.attempt + 1;
        self.record_count(handoff);
    }

    fn count(&mut self, handoff: HandoffId) {
        self.record_count(handoff);
    }

    fn end(&mut self, flight: FlightId, _: Ending, _: Option<u32>, _: RequestStageTimes) {
        assert!(self.open.remove(&flight), "{flight} ended twice");
    }

    fn drained(&mut self) {}

    fn readiness(&mut self, _: RouterReadiness) {}

    fn workers_wanted(&mut self, _: ScalerDecision) {}

    fn note(&mut self, _: RouterNote) {}
}

fn role(number: u8) -> Role {
    [Role::Prefill, Role::Decode, Role::Both][usize::from(number % 3)]
}

fn reserved(handoff: HandoffId) -> Report {
    Report::Reserved {
        handoff,
        present: 0,
        blocks: Vec::new(),
        state: None,
        window: None,
    }
}

fn running(handoff: HandoffId) -> Report {
    Report::Running {
        handoff,
        present: 0,
    }
}

fn prefilled(handoff: HandoffId) -> Report {
    let timing = PrefillTiming::default();
    Report::Prefilled { handoff, timing }
}

fn finished(handoff: HandoffId) -> Report {
    Report::Finished {
        handoff,
        reason: FinishReason::Stop,
        output_tokens: 3,
        timing: DecodeTiming::default(),
        prefill: None,
    }
}

fn fingerprint(brain: &RouterBrain) -> u64 {
    let mut hasher = DefaultHasher::new();
    brain.fingerprint(&mut hasher);
    hasher.finish()
}

fn actions() -> impl Strategy<Value = Vec<[u8; 4]>> {
    prop::collection::vec(any::<[u8; 4]>(), 1..250)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    // Invariant: I6, I19.
    #[test]
    fn every_flight_ends_once_under_any_reports(actions in actions()) {
        let mut driver = RandomDriver::new(limits());
        for worker in 0..5 {
            driver.act([0, worker, 0, 0]);
        }
        for action in actions {
            driver.act(action);
        }
        driver.end_all();
    }

    #[test]
    fn absurd_reports_neither_overflow_nor_loop(seed in any::<u64>(), actions in actions()) {
        let mut driver = RandomDriver::lying(seed);
        for worker in 0..5 {
            driver.act([0, worker, 0, 0]);
            driver.send_report(driver.me(usize::from(worker)), Report::Prices(Prices::default()));
        }
        for action in actions {
            driver.act(action);
        }
        driver.end_all();
    }
}
