//! The router's brain under anything: words true and false, late and doubled, of workers that come
//! and go, drain, get stuck and change their roles, and clients that have any number of tokens by the
//! time they are counted. It must keep its invariants after each and end every flight exactly once.
//! Where workers lie about numbers too, it must neither overflow nor say without end.

mod lies;

use cleave_domain::{
    BlockHash, Capacity, DecodeTiming, DeviceId, Failure, Fingerprint, FinishReason, FlightId,
    HandoffId, Incarnation, Load, Order, PrefillTiming, Prices, Progress, Refusal, Report, Request,
    Role, Sampling, Slo, StopRules, Time, WorkerDescription, WorkerId, WorkerRef,
};
use cleave_router::{Brain, CancelReason, Command, Input, Limits, Output};
use lies::Lies;
use proptest::prelude::{ProptestConfig, Strategy, any, prop, proptest};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;

fn limits() -> Limits {
    Limits {
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
        ..Limits::default()
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
        },
        queue_max: 3,
        // Some have one of their own, some share one of two.
        device: (revision >= 128).then(|| DeviceId(format!("{}", revision % 2))),
    }
}

/// Far more than there can be to say about twelve flights on five workers.
const OUTPUTS_MAX: u32 = 1000;

fn request(prompt: u8, priority: u8) -> Request {
    Request {
        prompt: (0..u32::from(prompt % 60) + 1).collect(),
        generated: Arc::new([]),
        sampling: Sampling::greedy(),
        stop: StopRules {
            max_tokens: 20,
            min_tokens: 3,
            stop_tokens: Arc::new([1009]),
        },
        priority: i32::from(priority % 3),
        cache_salt: 0,
        slo: Slo::default(),
    }
}

/// An attempt as its workers see it.
struct Told {
    sender: WorkerRef,
    decode: WorkerRef,
    /// The attempt it continues, if a running sequence moves.
    of: Option<u32>,
    /// Its sender was told to start: from now on tokens of it may come.
    ordered: bool,
    /// Its decode worker said that it is over, was told so, or is gone.
    over: bool,
    /// What was said of it, as an honest worker would.
    prefilled: bool,
    landed: bool,
}

/// What is known of a flight outside the brain.
#[derive(Default)]
struct Known {
    attempts: BTreeMap<u32, Told>,
    /// Attempts before this one are fenced.
    unfenced: u32,
    /// Tokens the client was given.
    given: u32,
    /// Of these the brain waits for an answer to the last only.
    asked: Option<HandoffId>,
}

/// Drives a brain, remembers what was asked of whom, and which flights ended.
struct Driver {
    brain: Brain,
    now: u64,
    next: u64,
    lives: [u64; 5],
    told: Vec<(WorkerRef, HandoffId)>,
    open: BTreeSet<FlightId>,
    flights: BTreeMap<FlightId, Known>,
    /// Asked for and not answered yet, with the tokens that the client had then.
    counts: VecDeque<(HandoffId, u32)>,
    chance: u64,
    /// What workers say instead of what they know, if they lie.
    lies: Option<Lies>,
}

impl Driver {
    fn new(limits: Limits) -> Self {
        Self {
            brain: Brain::new(limits),
            now: 0,
            next: 0,
            lives: [1; 5],
            told: Vec::new(),
            open: BTreeSet::new(),
            flights: BTreeMap::new(),
            counts: VecDeque::new(),
            chance: 0,
            lies: None,
        }
    }

    /// Workers lie about all numbers, and clients have targets of any size.
    fn lying(seed: u64) -> Self {
        let mut lies = Lies(seed);
        let limits = Limits {
            policy: lies.policy(),
            ..limits()
        };
        Self {
            lies: Some(lies),
            ..Self::new(limits)
        }
    }

    fn me(&self, worker: usize) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(worker as u64 + 1),
            incarnation: Incarnation(self.lives[worker]),
        }
    }

    fn handle(&mut self, input: Input) {
        self.hear(&input);
        self.brain.handle(Time::from_nanos(self.now), input);
        let mut outputs = 0;
        while let Some(output) = self.brain.poll() {
            self.obey(output);
            outputs += 1;
            assert!(outputs < OUTPUTS_MAX, "the router talks without end");
        }
        self.brain.check();
        let clone = self.brain.clone();
        assert_eq!(fingerprint(&clone), fingerprint(&self.brain));
    }

    /// What the input makes of the attempts.
    fn hear(&mut self, input: &Input) {
        match input {
            Input::WorkerJoined { worker, .. } | Input::WorkerLost { worker } => {
                let attempts = self
                    .flights
                    .values_mut()
                    .flat_map(|f| f.attempts.values_mut());
                for told in attempts.filter(|told| told.decode.worker == worker.worker) {
                    told.over |=
                        matches!(input, Input::WorkerJoined { .. }) || told.decode == *worker;
                }
            }
            Input::Told { worker, report } => {
                let (Report::Finished { handoff, .. }
                | Report::Released { handoff }
                | Report::LegFailed { handoff, .. }
                | Report::Refused { handoff, .. }) = report
                else {
                    return;
                };
                let known = self.flights.get_mut(&handoff.flight);
                let told = known.and_then(|f| f.attempts.get_mut(&handoff.attempt));
                if let Some(told) = told.filter(|told| told.decode == *worker) {
                    told.over = true;
                }
            }
            _ => {}
        }
    }

    fn obey(&mut self, output: Output) {
        match output {
            Output::End { flight, .. } => {
                assert!(self.open.remove(&flight), "{flight} ended twice");
            }
            Output::Fence { handoff } => {
                assert!(self.open.contains(&handoff.flight), "{handoff} is over");
                let known = self
                    .flights
                    .get_mut(&handoff.flight)
                    .expect("was submitted");
                assert!(
                    known.unfenced <= handoff.attempt,
                    "{handoff} is fenced twice"
                );
                known.unfenced = handoff.attempt + 1;
                self.count(handoff);
            }
            Output::Count { handoff } => self.count(handoff),
            Output::Tell { worker, order } => self.order(worker, order),
            Output::Drained | Output::Readiness(_) | Output::Note(_) | Output::Want(_) => {}
        }
    }

    /// Meanwhile the client was given some more.
    fn count(&mut self, handoff: HandoffId) {
        self.chance = self
            .chance
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1);
        let more = (self.chance >> 33) as u32 % 4;
        let known = self
            .flights
            .get_mut(&handoff.flight)
            .expect("was submitted");
        assert_ne!(known.asked, Some(handoff), "{handoff} is asked for twice");
        let ordered = known.attempts.values().any(|told| told.ordered);
        known.given = (known.given + if ordered { more } else { 0 }).min(20);
        known.asked = Some(handoff);
        self.counts.push_back((handoff, known.given));
    }

    fn order(&mut self, worker: WorkerRef, order: Order) {
        match order {
            Order::Reserve(order) => {
                let known = self.flights.entry(order.handoff.flight).or_default();
                // Nothing began while the client's tokens were uncounted, or at another place.
                assert_eq!(known.asked, None, "{}", order.handoff);
                let generated = order.request.generated.len() as u32;
                assert!(generated <= known.given, "{} has too many", order.handoff);
                let of = known
                    .attempts
                    .iter()
                    .rfind(|(_, told)| order.ahead_tokens > 0 && told.decode == order.sender)
                    .map(|(attempt, _)| *attempt);
                let told = Told {
                    sender: order.sender,
                    decode: worker,
                    of,
                    ordered: false,
                    over: false,
                    prefilled: false,
                    landed: false,
                };
                let before = known.attempts.insert(order.handoff.attempt, told);
                assert!(before.is_none(), "{} means two pairs", order.handoff);
                self.told.push((worker, order.handoff));
            }
            Order::Prefill(order) => {
                self.begun(worker, order.handoff);
                self.told.push((worker, order.handoff));
            }
            Order::Migrate(order) => {
                let known = &self.flights[&order.handoff.flight];
                let told = &known.attempts[&order.handoff.attempt];
                assert_eq!(told.of, Some(order.of.attempt), "{}", order.handoff);
                self.begun(worker, order.handoff);
                self.told.push((worker, order.handoff));
            }
            Order::Cancel { handoff } => {
                let known = self
                    .flights
                    .get_mut(&handoff.flight)
                    .expect("was submitted");
                let told = known.attempts.get_mut(&handoff.attempt).expect("was told");
                if told.decode == worker {
                    told.over = true;
                } else {
                    assert_eq!(told.sender, worker, "{handoff} was never there");
                }
            }
            Order::Renew { .. } | Order::Drain | Order::Serve { .. } | Order::PassOn(_) => {}
        }
    }

    /// Of all attempts whose tokens the client may still be given, one runs; two while it moves.
    fn begun(&mut self, sender: WorkerRef, handoff: HandoffId) {
        let known = self
            .flights
            .get_mut(&handoff.flight)
            .expect("was submitted");
        let told = known
            .attempts
            .get_mut(&handoff.attempt)
            .expect("was reserved for");
        assert_eq!(told.sender, sender, "{handoff}");
        told.ordered = true;
        let of = told.of;
        let runs = |(attempt, told): &(&u32, &Told)| {
            **attempt >= known.unfenced && told.ordered && !told.over
        };
        for (attempt, _) in known.attempts.iter().filter(runs) {
            let expected = *attempt == handoff.attempt || of == Some(*attempt);
            assert!(expected, "{handoff} begins while attempt {attempt} runs");
        }
    }

    fn answer_counts(&mut self) {
        while let Some((handoff, given)) = self.counts.pop_front() {
            let known = self
                .flights
                .get_mut(&handoff.flight)
                .expect("was submitted");
            known.asked.take_if(|asked| *asked == handoff);
            let generated = (1000..1000 + given).collect();
            self.handle(Input::Counted { handoff, generated });
        }
    }

    fn act(&mut self, [what, a, b, c]: [u8; 4]) {
        // Most steps take next to nothing, some as long as a time limit.
        self.now += u64::from(c) * if b % 16 == 0 { 300_000 } else { 5_000 };
        self.chance ^= u64::from(a) << 40 | u64::from(b) << 20;
        // Most of the time an answer comes at once.
        if c % 4 > 0 {
            self.answer_counts();
        }
        let worker = usize::from(a % 5);
        let me = self.me(worker);
        match what % 40 {
            0 => {
                self.lives[worker] += u64::from(b % 2);
                self.handle(Input::WorkerJoined {
                    worker: self.me(worker),
                    description: description(a, b),
                });
            }
            1 if b % 2 == 0 => self.handle(Input::WorkerLost { worker: me }),
            2..=6 => {
                let flight = FlightId(self.next);
                self.next += 1;
                self.open.insert(flight);
                self.flights.insert(flight, Known::default());
                let mut request = request(a, b);
                if let Some(lies) = &mut self.lies {
                    lies.ask(&mut request);
                }
                let request = Arc::new(request);
                self.handle(Input::Submitted { flight, request });
            }
            7 => {
                let flight = FlightId(u64::from(a) % self.next.max(1));
                self.handle(match b % 4 {
                    0 | 1 => Input::Cancelled {
                        flight,
                        why: CancelReason::Left,
                    },
                    2 => Input::Stalled { flight },
                    _ => Input::Flowing { flight },
                });
            }
            8 => self.handle(Input::Woke),
            9 | 10 => {
                let report = self.word(b, c);
                self.tell(me, report);
            }
            11 => self.handle(Input::Commanded {
                worker: me.worker,
                command: Command::Serve(role(b)),
            }),
            12..=33 => self.true_answer(a),
            _ => self.answer(a, b),
        }
    }

    /// As far as the worker is honest.
    fn tell(&mut self, worker: WorkerRef, mut report: Report) {
        if let Some(lies) = &mut self.lies {
            lies.twist(&mut report);
        }
        self.handle(Input::Told { worker, report });
    }

    /// A worker about itself.
    fn word(&self, b: u8, c: u8) -> Report {
        match b % 10 {
            0..=3 => Report::Load(Load {
                queue_tokens: u64::from(c),
                sequences_waiting: u32::from(c % 4),
                sequences_running: u32::from(b % 4),
                blocks_free: u32::from(c % 31),
                progress: Progress::Moving,
                ..Load::default()
            }),
            4 | 5 => Report::Prefix {
                stored: vec![BlockHash([b % 4; 16])],
                evicted: vec![BlockHash([c % 4; 16])],
            },
            6 => Report::Load(Load {
                progress: Progress::Stuck,
                ..Load::default()
            }),
            7 => Report::Draining,
            _ => Report::Serves { role: role(c) },
        }
    }

    /// Some word, fit or unfit, about some order of late.
    fn answer(&mut self, a: u8, b: u8) {
        let Some(back) = usize::from(a).checked_rem(self.told.len().min(6)) else {
            return;
        };
        let (worker, handoff) = self.told[self.told.len() - 1 - back];
        let retry_after = Duration::from_millis(u64::from(a));
        let failure = Failure::LinkLost;
        let report = match b % 24 {
            0..=6 => reserved(handoff),
            7..=9 => prefilled(handoff),
            10..=11 => Report::Landed { handoff },
            12..=13 => finished(handoff),
            14..=16 => Report::Released { handoff },
            17 => Report::LegFailed { handoff, failure },
            18 => Report::Refused {
                handoff,
                refusal: Refusal::NoBlocks { retry_after },
            },
            19..=20 => Report::Stayed { handoff, failure },
            21..=22 => Report::Crowded { handoff },
            _ => Report::Draining,
        };
        self.tell(worker, report);
    }

    /// What an honest worker would say next of the latest attempt of some open flight, so that
    /// sequences come to run and to move.
    fn true_answer(&mut self, a: u8) {
        let Some(index) = usize::from(a / 8).checked_rem(self.open.len()) else {
            return;
        };
        let flight = *self.open.iter().nth(index).expect("is within");
        let known = self.flights.get_mut(&flight).expect("was submitted");
        let Some(mut entry) = known.attempts.last_entry() else {
            return;
        };
        let handoff = HandoffId {
            flight,
            attempt: *entry.key(),
        };
        let told = entry.get_mut();
        let (sender, decode) = (told.sender, told.decode);
        let failure = Failure::LinkLost;
        let (worker, report) = if !told.ordered {
            (decode, reserved(handoff))
        } else if !told.prefilled && a % 8 > 1 {
            told.prefilled = true;
            (sender, prefilled(handoff))
        } else if !told.landed && a % 8 > 2 {
            told.landed = true;
            (decode, Report::Landed { handoff })
        } else {
            let attempt = told.of.unwrap_or(handoff.attempt);
            let old = HandoffId { flight, attempt };
            match a % 8 {
                0 if told.of.is_some() => (sender, Report::Stayed { handoff, failure }),
                1 => (sender, Report::Released { handoff: old }),
                2 => (sender, finished(old)),
                3..=5 if self.chance.is_multiple_of(3) => (decode, Report::Draining),
                3..=6 => (decode, Report::Crowded { handoff }),
                _ => (decode, finished(handoff)),
            }
        };
        self.tell(worker, report);
    }

    /// Everybody is gone: every flight ends by its timers alone.
    fn rest(&mut self) {
        self.answer_counts();
        for worker in 0..5 {
            self.handle(Input::WorkerLost {
                worker: self.me(worker),
            });
        }
        for _ in 0..1000 {
            self.answer_counts();
            let Some(at) = self.brain.deadline() else {
                break;
            };
            self.now = at.as_nanos();
            self.handle(Input::Woke);
        }
        assert_eq!(self.brain.deadline(), None, "the router never rests");
        assert!(self.open.is_empty(), "without an end: {:?}", self.open);
        assert_eq!(self.brain.legs_open(), 0, "legs of workers that are gone");
    }
}

fn role(number: u8) -> Role {
    [Role::Prefill, Role::Decode, Role::Both][usize::from(number % 3)]
}

fn reserved(handoff: HandoffId) -> Report {
    Report::Reserved {
        handoff,
        present: 0,
        blocks: Vec::new(),
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

fn fingerprint(brain: &Brain) -> u64 {
    let mut hasher = DefaultHasher::new();
    brain.fingerprint(&mut hasher);
    hasher.finish()
}

fn actions() -> impl Strategy<Value = Vec<[u8; 4]>> {
    prop::collection::vec(any::<[u8; 4]>(), 1..250)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_flight_ends_once_whatever_workers_say(actions in actions()) {
        let mut driver = Driver::new(limits());
        for worker in 0..5 {
            driver.act([0, worker, 0, 0]);
        }
        for action in actions {
            driver.act(action);
        }
        driver.rest();
    }

    #[test]
    fn lies_about_numbers_were_too_large_to_add(seed in any::<u64>(), actions in actions()) {
        let mut driver = Driver::lying(seed);
        for worker in 0..5 {
            driver.act([0, worker, 0, 0]);
            driver.tell(driver.me(usize::from(worker)), Report::Prices(Prices::default()));
        }
        for action in actions {
            driver.act(action);
        }
        driver.rest();
    }
}
