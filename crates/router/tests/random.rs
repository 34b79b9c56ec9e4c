//! The router's brain under anything: words true and false, late and doubled, of workers that come
//! and go. It must keep its invariants after each and end every flight exactly once.

use cleave_domain::{
    BlockHash, Capacity, Failure, Fingerprint, FinishReason, FlightId, HandoffId, Incarnation,
    Load, Order, Refusal, Report, Request, Role, Sampling, Slo, StopRules, Time, WorkerDescription,
    WorkerId, WorkerRef,
};
use cleave_router::{Brain, Input, Limits, Output};
use proptest::prelude::{ProptestConfig, Strategy, any, prop, proptest};
use std::collections::BTreeSet;
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
    }
}

fn description(role: u8, revision: u8) -> WorkerDescription {
    WorkerDescription {
        role: [Role::Prefill, Role::Decode, Role::Both][usize::from(role % 3)],
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
    }
}

fn request(prompt: u8, priority: u8) -> Request {
    Request {
        prompt: (0..u32::from(prompt % 60) + 1).collect(),
        generated: Arc::new([]),
        sampling: Sampling::greedy(),
        stop: StopRules {
            max_tokens: 20,
            min_tokens: 0,
            stop_tokens: Arc::new([]),
        },
        priority: i32::from(priority % 3),
        cache_salt: 0,
        slo: Slo::default(),
    }
}

/// Drives a brain, remembers what was asked of whom, and which flights ended.
struct Driver {
    brain: Brain,
    now: u64,
    next: u64,
    lives: [u64; 5],
    told: Vec<(WorkerRef, HandoffId)>,
    open: BTreeSet<FlightId>,
}

impl Driver {
    fn handle(&mut self, input: Input) {
        self.brain.handle(Time::from_nanos(self.now), input);
        while let Some(output) = self.brain.poll() {
            match output {
                Output::End { flight, .. } => {
                    assert!(self.open.remove(&flight), "{flight} ended twice");
                }
                Output::Tell { worker, order } => match order {
                    Order::Reserve(order) => self.told.push((worker, order.handoff)),
                    Order::Prefill(order) => self.told.push((worker, order.handoff)),
                    _ => {}
                },
                Output::Drained | Output::Readiness(_) | Output::Note(_) => {}
            }
        }
        self.brain.check();
    }

    fn act(&mut self, [what, a, b, c]: [u8; 4]) {
        self.now += u64::from(c) * 300_000;
        let worker = usize::from(a % 5);
        let me = WorkerRef {
            worker: WorkerId(worker as u64 + 1),
            incarnation: Incarnation(self.lives[worker]),
        };
        match what % 16 {
            0 | 1 => {
                self.lives[worker] += u64::from(b % 2);
                let incarnation = Incarnation(self.lives[worker]);
                self.handle(Input::WorkerJoined {
                    worker: WorkerRef { incarnation, ..me },
                    description: description(a, b),
                });
            }
            2 => self.handle(Input::WorkerLost { worker: me }),
            3..=5 => {
                let flight = FlightId(self.next);
                self.next += 1;
                self.open.insert(flight);
                let request = Arc::new(request(a, b));
                self.handle(Input::Submitted { flight, request });
            }
            6 => {
                let flight = FlightId(u64::from(a) % self.next.max(1));
                self.handle(Input::Cancelled { flight });
            }
            7 => self.handle(Input::Woke),
            8 => {
                let report = if b % 2 == 0 {
                    Report::Load(Load {
                        queue_tokens: u64::from(c),
                        sequences_waiting: u32::from(c % 4),
                        sequences_running: u32::from(b % 4),
                        blocks_free: u32::from(b % 31),
                    })
                } else {
                    Report::Prefix {
                        stored: vec![BlockHash([b % 4; 16])],
                        evicted: vec![BlockHash([c % 4; 16])],
                    }
                };
                self.handle(Input::Told { worker: me, report });
            }
            _ => self.answer(a, b),
        }
    }

    /// Some word, fit or unfit, about some order of late.
    fn answer(&mut self, a: u8, b: u8) {
        let Some(back) = usize::from(a).checked_rem(self.told.len().min(6)) else {
            return;
        };
        let (worker, handoff) = self.told[self.told.len() - 1 - back];
        let retry_after = Duration::from_millis(u64::from(a));
        let report = match b % 20 {
            0..=6 => Report::Reserved {
                handoff,
                present: 0,
                blocks: Vec::new(),
            },
            7..=9 => Report::Prefilled { handoff },
            10..=11 => Report::Landed { handoff },
            12..=13 => Report::Finished {
                handoff,
                reason: FinishReason::Stop,
                output_tokens: 3,
            },
            14..=16 => Report::Released { handoff },
            17 => Report::LegFailed {
                handoff,
                failure: Failure::Corrupt,
            },
            18 => Report::Refused {
                handoff,
                refusal: Refusal::NoBlocks { retry_after },
            },
            _ => Report::Draining,
        };
        self.handle(Input::Told { worker, report });
    }

    /// Everybody is gone: every flight ends by its timers alone.
    fn rest(&mut self) {
        for worker in 0..5 {
            self.handle(Input::WorkerLost {
                worker: WorkerRef {
                    worker: WorkerId(worker as u64 + 1),
                    incarnation: Incarnation(self.lives[worker]),
                },
            });
        }
        for _ in 0..1000 {
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

fn actions() -> impl Strategy<Value = Vec<[u8; 4]>> {
    prop::collection::vec(any::<[u8; 4]>(), 1..250)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_flight_ends_once_whatever_workers_say(actions in actions()) {
        let mut driver = Driver {
            brain: Brain::new(limits()),
            now: 0,
            next: 0,
            lives: [1; 5],
            told: Vec::new(),
            open: BTreeSet::new(),
        };
        for worker in 0..5 {
            driver.act([0, worker, 0, 0]);
        }
        for action in actions {
            driver.act(action);
        }
        driver.rest();
    }
}
