//! The pools of several models behind one router: facts go to the pool of their model, and one
//! model takes nothing from another.

use cleave_domain::{
    Capacity, DeviceId, Ending, Fingerprint, FlightId, Incarnation, ModelPolicy, Order,
    PoolScaling, Refusal, Report, Role, ScalingPolicy, SloPolicy, Time, WorkerDescription,
    WorkerId, WorkerRef,
};
use cleave_router::{
    CancelReason, OutsideQueue, PoolInput, PoolOutput, RouterInput, RouterLimits, RouterOutput,
    RouterPools, RouterReadiness,
};
use cleave_testkit::build;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Pools, and what they emitted.
struct PoolsDriver {
    pools: RouterPools,
    now: Time,
    began: Vec<String>,
    ended: Vec<String>,
    orders: Vec<(String, WorkerRef, Order)>,
    endings: BTreeMap<FlightId, Ending>,
    readiness: BTreeMap<String, RouterReadiness>,
    wanted: BTreeMap<String, u32>,
    drained: u32,
    /// Answers to the brains' questions: no client has a token.
    answers: VecDeque<RouterInput>,
}

fn capacity(slots_count: u32) -> Capacity {
    Capacity {
        block_tokens: 4,
        block_bytes: 64,
        blocks_count: 40,
        slots_count,
        step_tokens_max: 16,
        context_tokens_max: 100,
        states: None,
        windows: None,
    }
}

fn worker(number: u64, incarnation: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(number),
        incarnation: Incarnation(incarnation),
    }
}

impl PoolsDriver {
    fn new(limits: RouterLimits) -> Self {
        let mut driver = Self {
            pools: RouterPools::new(limits),
            now: Time::ZERO,
            began: Vec::new(),
            ended: Vec::new(),
            orders: Vec::new(),
            endings: BTreeMap::new(),
            readiness: BTreeMap::new(),
            wanted: BTreeMap::new(),
            drained: 0,
            answers: VecDeque::new(),
        };
        driver.take_outputs();
        driver
    }

    fn handle(&mut self, input: impl Into<PoolInput>) {
        self.now = self.now + Duration::from_millis(1);
        self.pools.handle(self.now, input.into());
        self.take_outputs();
        while let Some(answer) = self.answers.pop_front() {
            self.pools.handle(self.now, answer.into());
            self.take_outputs();
        }
    }

    fn take_outputs(&mut self) {
        while let Some(output) = self.pools.poll() {
            let (model, output) = match output {
                PoolOutput::Began { model } => {
                    self.began.push(model.to_string());
                    continue;
                }
                PoolOutput::Ended { model } => {
                    self.ended.push(model.to_string());
                    continue;
                }
                PoolOutput::Drained => {
                    self.drained += 1;
                    continue;
                }
                PoolOutput::OfModel { model, output } => (model.to_string(), output),
            };
            match *output {
                RouterOutput::Order { worker, order } => self.orders.push((model, worker, order)),
                RouterOutput::Fence { handoff } | RouterOutput::Count { handoff } => {
                    let generated = Arc::new([]);
                    let counted = RouterInput::Counted { handoff, generated };
                    self.answers.push_back(counted);
                }
                RouterOutput::End { flight, ending, .. } => {
                    let earlier = self.endings.insert(flight, ending);
                    assert_eq!(earlier, None, "{flight} ended twice");
                }
                RouterOutput::Readiness(readiness) => {
                    self.readiness.insert(model, readiness);
                }
                RouterOutput::WorkersWanted(decision) => {
                    self.wanted.insert(model, decision.wanted.workers.both);
                }
                _ => {}
            }
        }
        self.pools.check();
    }

    fn join(&mut self, worker: WorkerRef, model: &str, role: Role) {
        // Equal for all models: only the name separates them.
        self.join_with(worker, model, role, "a");
    }

    fn join_with(&mut self, worker: WorkerRef, model: &str, role: Role, fingerprint: &str) {
        let description = WorkerDescription {
            role,
            home: role,
            model: model.to_owned(),
            fingerprint: Fingerprint(fingerprint.to_owned()),
            capacity: capacity(4),
            queue_max: 3,
            device: Some(DeviceId(worker.to_string())),
        };
        self.handle(RouterInput::WorkerJoined {
            worker,
            description,
        });
    }

    fn submit(&mut self, flight: u64, model: &str) {
        let input = RouterInput::Submitted {
            flight: FlightId(flight),
            request: Arc::new(build::request([1, 2, 3], 9)),
        };
        self.handle(PoolInput::of_model(Arc::from(model), input));
    }

    /// Wakes the pools once a second for this long.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now = self.now + Duration::from_secs(1);
            self.handle(RouterInput::Woke);
        }
    }

    fn ending(&self, flight: u64) -> Option<&Ending> {
        self.endings.get(&FlightId(flight))
    }

    /// The workers that were ordered to begin a leg of this flight.
    fn workers_of(&self, flight: u64) -> Vec<u64> {
        let begins = |order: &Order| match order {
            Order::Reserve(reserve) => Some(reserve.handoff.flight),
            Order::Run(run) => Some(run.handoff.flight),
            _ => None,
        };
        let orders = self.orders.iter();
        let of_flight = orders.filter(|(_, _, order)| begins(order) == Some(FlightId(flight)));
        of_flight.map(|(_, worker, _)| worker.worker.0).collect()
    }
}

#[test]
fn a_request_goes_to_a_worker_of_its_model() {
    let mut router = PoolsDriver::new(RouterLimits::default());
    router.join(worker(1, 1), "a", Role::Both);
    router.join(worker(2, 1), "b", Role::Both);
    assert_eq!(router.began, ["a", "b"]);
    for flight in 0..4 {
        router.submit(flight, if flight % 2 == 0 { "a" } else { "b" });
    }
    let expected = [1, 2, 1, 2].map(|worker| vec![worker]);
    assert_eq!(
        [0, 1, 2, 3].map(|flight| router.workers_of(flight)),
        expected
    );
}

// Invariant: I55.
#[test]
fn no_hand_off_crosses_models_of_one_fingerprint() {
    let mut router = PoolsDriver::new(RouterLimits::default());
    router.join(worker(1, 1), "a", Role::Prefill);
    router.join(worker(2, 1), "b", Role::Decode);
    router.submit(1, "a");
    router.submit(2, "b");
    assert_eq!(router.orders, [], "neither model has a pair");
    for flight in [1, 2] {
        let ending = router.ending(flight);
        assert_eq!(ending, Some(&Ending::Refused(Refusal::NoWorker)));
    }
    assert!(
        router
            .readiness
            .values()
            .all(|one| *one != RouterReadiness::Ready)
    );
    router.join(worker(3, 1), "a", Role::Decode);
    assert_eq!(router.readiness["a"], RouterReadiness::Ready);
    router.submit(3, "a");
    assert_eq!(router.workers_of(3), [3]);
}

// Invariant: I55.
#[test]
fn a_flooded_model_refuses_while_another_places() {
    let limits = RouterLimits {
        flights_max: 20,
        queue_max: 8,
        ..RouterLimits::default()
    };
    let mut router = PoolsDriver::new(limits);
    router.join(worker(1, 1), "a", Role::Both);
    router.join(worker(2, 1), "b", Role::Both);
    for flight in 0..100 {
        router.submit(flight, "a");
    }
    let refused = |ending: &Ending| matches!(ending, Ending::Refused(_));
    let count = router
        .endings
        .values()
        .filter(|ending| refused(ending))
        .count();
    assert!(count >= 80, "{count} of the flood were refused");
    router.submit(1000, "b");
    assert_eq!(router.workers_of(1000), [2], "at once");
}

#[test]
fn a_worker_that_changes_its_model_leaves_the_first_pool() {
    let mut router = PoolsDriver::new(RouterLimits::default());
    router.join(worker(1, 1), "a", Role::Both);
    router.submit(1, "a");
    // Its next life joins before its earlier connection is known to be over.
    router.join(worker(1, 2), "b", Role::Both);
    assert_ne!(router.readiness["a"], RouterReadiness::Ready);
    assert_eq!(router.readiness["b"], RouterReadiness::Ready);
    let lost = worker(1, 1);
    router.handle(RouterInput::WorkerLost { worker: lost });
    assert_eq!(
        router.readiness["b"],
        RouterReadiness::Ready,
        "that life is past"
    );
    router.submit(2, "b");
    assert_eq!(router.workers_of(2), [1]);
    // The stream of the first model waits for another worker of that one.
    assert_eq!(router.ending(1), None);
    router.join(worker(2, 1), "a", Role::Both);
    router.pass(1);
    assert_eq!(router.workers_of(1), [1, 2]);
}

#[test]
fn a_rolling_update_of_a_model_leaves_others_alone() {
    let mut router = PoolsDriver::new(RouterLimits::default());
    router.join(worker(1, 1), "a", Role::Both);
    router.join(worker(2, 1), "b", Role::Both);
    router.submit(1, "a");
    // The new weights have another fingerprint; the other model has that of the old ones.
    router.join_with(worker(3, 1), "a", Role::Both, "new");
    router.handle(RouterInput::WorkerReported {
        worker: worker(1, 1),
        report: Report::Draining,
    });
    router.submit(2, "a");
    assert_eq!(router.workers_of(2), [3]);
    router.handle(RouterInput::WorkerLost {
        worker: worker(1, 1),
    });
    // Its client has no token yet, so the new weights may begin anew.
    router.pass(1);
    assert_eq!(router.workers_of(1), [1, 3]);
    let to_other = router
        .orders
        .iter()
        .filter(|(_, to, _)| to.worker == WorkerId(2));
    assert_eq!(to_other.count(), 0);
    assert_eq!(router.readiness["b"], RouterReadiness::Ready);
}

#[test]
fn a_model_without_workers_is_known_and_refused() {
    let mut router = PoolsDriver::new(RouterLimits::default());
    router.join(worker(1, 1), "a", Role::Both);
    router.join(worker(2, 1), "b", Role::Both);
    let gone = worker(2, 1);
    router.handle(RouterInput::WorkerLost { worker: gone });
    router.submit(1, "b");
    assert_eq!(router.ending(1), Some(&Ending::Refused(Refusal::NoWorker)));
    assert_eq!(router.readiness["a"], RouterReadiness::Ready);
}

#[test]
fn a_cancel_finds_the_pool_of_its_flight() {
    let mut router = PoolsDriver::new(RouterLimits::default());
    router.join(worker(1, 1), "a", Role::Both);
    router.join(worker(2, 1), "b", Role::Both);
    router.submit(1, "b");
    router.handle(RouterInput::Cancelled {
        flight: FlightId(1),
        why: CancelReason::Left,
    });
    assert_eq!(router.ending(1), Some(&Ending::Cancelled));
    let (model, to, _) = router.orders.last().expect("the worker is told");
    assert_eq!((model.as_str(), to.worker), ("b", WorkerId(2)));
    // One that no pool has changes nothing.
    router.handle(RouterInput::Cancelled {
        flight: FlightId(9),
        why: CancelReason::Left,
    });
    assert_eq!(router.endings.len(), 1);
}

#[test]
fn a_drain_ends_once_after_the_last_model() {
    let mut router = PoolsDriver::new(RouterLimits::default());
    router.join(worker(1, 1), "a", Role::Both);
    router.join(worker(2, 1), "b", Role::Both);
    router.submit(1, "b");
    router.handle(RouterInput::Draining);
    assert_eq!(router.drained, 0, "b has a flight");
    router.submit(2, "a");
    assert_eq!(router.ending(2), Some(&Ending::Refused(Refusal::Draining)));
    router.handle(RouterInput::Cancelled {
        flight: FlightId(1),
        why: CancelReason::Left,
    });
    assert_eq!(router.drained, 1);
    // A model that comes later finds a router that drains.
    router.join(worker(3, 1), "c", Role::Both);
    assert_eq!(router.readiness["c"], RouterReadiness::Draining);
    assert_eq!(router.drained, 1);
    let mut empty = PoolsDriver::new(RouterLimits::default());
    empty.handle(RouterInput::Draining);
    assert_eq!(empty.drained, 1, "without a worker too");
}

fn scaling(max: u32) -> ScalingPolicy {
    ScalingPolicy {
        both: PoolScaling {
            max,
            ..PoolScaling::absent(Role::Both)
        },
        ..ScalingPolicy::new(max)
    }
}

fn limits_of(models: &[(&str, u32)]) -> RouterLimits {
    let model = |(name, max): &(&str, u32)| ModelPolicy {
        name: (*name).to_owned(),
        aliases: Vec::new(),
        scaling: (*max > 0).then(|| scaling(*max)),
    };
    RouterLimits {
        policy: Arc::new(SloPolicy {
            models: models.iter().map(model).collect(),
            ..SloPolicy::default()
        }),
        ..RouterLimits::default()
    }
}

#[test]
fn each_listed_model_has_its_own_autoscaler() {
    let mut router = PoolsDriver::new(limits_of(&[("a", 2), ("b", 3), ("fixed", 0)]));
    assert_eq!(router.began, ["a", "b", "fixed"], "before any worker");
    // Longer than `idle_after` and `down_after`.
    router.pass(1300);
    assert_eq!(
        router.wanted,
        BTreeMap::from([("a".to_owned(), 0), ("b".to_owned(), 0)])
    );
    let waiting = RouterInput::Waiting {
        place: OutsideQueue::Here,
        count: 5,
    };
    router.handle(PoolInput::of_model(Arc::from("b"), waiting));
    router.pass(2);
    assert_eq!(router.wanted.get("a"), Some(&0), "nobody asks for it");
    assert_eq!(router.wanted.get("b"), Some(&1), "its first worker");
    assert_eq!(router.wanted.get("fixed"), None);
    // A request for a model that may be started waits; one for another is refused.
    router.submit(1, "b");
    router.submit(2, "fixed");
    assert_eq!(router.ending(1), None);
    assert_eq!(router.ending(2), Some(&Ending::Refused(Refusal::NoWorker)));
}

#[test]
fn the_first_model_takes_the_pool_without_a_name() {
    let policy = SloPolicy {
        scaling: Some(scaling(2)),
        ..SloPolicy::default()
    };
    let mut router = PoolsDriver::new(RouterLimits {
        policy: Arc::new(policy),
        ..RouterLimits::default()
    });
    router.pass(30);
    router.handle(RouterInput::Waiting {
        place: OutsideQueue::Here,
        count: 1,
    });
    router.pass(2);
    assert_eq!(router.wanted.get(""), Some(&1), "no model is known");
    router.join(worker(1, 1), "a", Role::Both);
    assert_eq!(router.began, ["a"]);
    router.pass(1);
    assert_eq!(router.wanted.get("a"), Some(&1), "the same autoscaler");
}

#[test]
fn a_policy_may_list_models_while_the_router_runs() {
    let mut router = PoolsDriver::new(RouterLimits::default());
    router.join(worker(1, 1), "a", Role::Both);
    router.submit(1, "a");
    let policy = limits_of(&[("b", 1)]).policy;
    router.handle(RouterInput::PolicyChanged { policy });
    assert_eq!(router.began, ["a", "b"]);
    assert_eq!(router.ending(1), None);
    router.submit(2, "b");
    assert_eq!(router.ending(2), None, "it waits for the first worker");
}

#[test]
fn a_model_that_was_replaced_is_forgotten_after_a_while() {
    let mut router = PoolsDriver::new(RouterLimits::default());
    router.join(worker(1, 1), "a", Role::Both);
    router.join(worker(2, 1), "b", Role::Both);
    let gone = worker(1, 1);
    router.handle(RouterInput::WorkerLost { worker: gone });
    router.pass(590);
    assert_eq!(router.ended, [""; 0], "it may come back");
    router.submit(1, "a");
    assert_eq!(router.ending(1), Some(&Ending::Refused(Refusal::NoWorker)));
    router.pass(20);
    assert_eq!(router.ended, ["a"]);
    // The last model stays, whatever happens to its workers.
    let gone = worker(2, 1);
    router.handle(RouterInput::WorkerLost { worker: gone });
    router.pass(1000);
    assert_eq!(router.ended, ["a"]);
    // It begins anew with its next worker.
    router.join(worker(1, 2), "a", Role::Both);
    router.submit(2, "a");
    assert_eq!(router.workers_of(2), [1]);
}

#[test]
fn a_listed_model_is_never_forgotten() {
    let mut router = PoolsDriver::new(limits_of(&[("a", 0)]));
    router.join(worker(1, 1), "b", Role::Both);
    router.pass(1000);
    assert_eq!(router.ended, [""; 0]);
}
