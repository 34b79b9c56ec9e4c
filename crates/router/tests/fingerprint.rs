//! States that a model checker may merge behave alike: whatever happens next, two brains with equal
//! fingerprints give equal outputs and come to equal fingerprints again.

use cleave_domain::{
    Capacity, DecodeTiming, Failure, FinishReason, FlightId, HandoffId, PrefillTiming, Report,
    RequestStageTimes, Role, StepProgress, Time, WorkerDescription, WorkerLoad,
};
use cleave_router::{
    CancelReason, LegPlacement, RouterBrain, RouterInput, RouterLimits, RouterNote, RouterOutput,
};
use cleave_testkit::build::{self, worker};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;

const FLIGHT: FlightId = FlightId(1);

#[derive(Clone)]
struct FingerprintWorld {
    brain: RouterBrain,
    now: Time,
    submitted: bool,
}

fn handoff(attempt: u32) -> HandoffId {
    HandoffId {
        flight: FLIGHT,
        attempt,
    }
}

fn reserved(attempt: u32) -> Report {
    Report::Reserved {
        handoff: handoff(attempt),
        present: 0,
        blocks: Vec::new(),
        state: None,
        window: None,
    }
}

fn runs(attempt: u32) -> Report {
    Report::Running {
        handoff: handoff(attempt),
        present: 0,
    }
}

fn prefilled(attempt: u32) -> Report {
    let handoff = handoff(attempt);
    let timing = PrefillTiming::default();
    Report::Prefilled { handoff, timing }
}

fn landed(attempt: u32) -> Report {
    let handoff = handoff(attempt);
    Report::Landed { handoff }
}

fn joined(id: u64, role: Role) -> RouterInput {
    let capacity = Capacity {
        block_tokens: 4,
        block_bytes: 64,
        blocks_count: 40,
        slots_count: 4,
        step_tokens_max: 16,
        context_tokens_max: 100,
        states: None,
        windows: None,
    };
    RouterInput::WorkerJoined {
        worker: worker(id),
        description: WorkerDescription {
            queue_max: 3,
            ..build::description(role, capacity)
        },
    }
}

fn cancelled(flight: FlightId) -> RouterInput {
    let why = CancelReason::Left;
    RouterInput::Cancelled { flight, why }
}

fn submitted(number: u64) -> RouterInput {
    RouterInput::Submitted {
        flight: FlightId(number),
        request: Arc::new(build::request(0..9, 20)),
    }
}

/// Everything that may happen next in a world of one prefill and two decode workers, one flight and
/// its first attempts.
fn inputs(world: &FingerprintWorld) -> Vec<Option<RouterInput>> {
    let roles = [(1, Role::Prefill), (2, Role::Decode), (3, Role::Decode)];
    let mut inputs = vec![None, Some(cancelled(FLIGHT))];
    if !world.submitted {
        inputs.push(Some(submitted(FLIGHT.0)));
    }
    let report_input = |worker, report| Some(RouterInput::WorkerReported { worker, report });
    for (id, role) in roles {
        let me = worker(id);
        inputs.push(Some(joined(id, role)));
        inputs.push(Some(RouterInput::WorkerLost { worker: me }));
        for progress in [StepProgress::Moving, StepProgress::Stuck] {
            let load = WorkerLoad {
                blocks_free: 40,
                progress,
                ..WorkerLoad::default()
            };
            inputs.push(report_input(me, Report::Load(load)));
        }
        if id > 1 {
            inputs.push(report_input(me, Report::Draining));
        }
        for attempt in 0..3 {
            let handoff = handoff(attempt);
            let failure = Failure::LinkLost;
            let reason = FinishReason::Stop;
            inputs.push(report_input(me, prefilled(attempt)));
            inputs.push(report_input(me, Report::Released { handoff }));
            if id == 1 {
                let generated = (0..attempt + 1).collect();
                inputs.push(Some(RouterInput::Counted { handoff, generated }));
                continue;
            }
            inputs.push(report_input(me, reserved(attempt)));
            inputs.push(report_input(me, runs(attempt)));
            inputs.push(report_input(me, landed(attempt)));
            inputs.push(report_input(
                me,
                Report::MigrationAborted { handoff, failure },
            ));
            inputs.push(report_input(
                me,
                Report::Finished {
                    handoff,
                    reason,
                    output_tokens: 3,
                    timing: DecodeTiming::default(),
                    prefill: None,
                },
            ));
        }
    }
    inputs
}

/// Takes a step; returns the outputs without reported spans of time.
fn step(world: &mut FingerprintWorld, input: Option<RouterInput>) -> Vec<RouterOutput> {
    world.submitted |= matches!(input, Some(RouterInput::Submitted { .. }));
    let input = input.unwrap_or_else(|| {
        world.now = world.now.max(world.brain.deadline().unwrap_or(world.now));
        RouterInput::Woke
    });
    world.brain.handle(world.now, input);
    let mut outputs: Vec<RouterOutput> = std::iter::from_fn(|| world.brain.poll()).collect();
    world.brain.check();
    for output in &mut outputs {
        match output {
            RouterOutput::Note(
                RouterNote::Placed { waited: span, .. }
                | RouterNote::Moved { took: span, .. }
                | RouterNote::CancelFreed { took: span, .. },
            ) => *span = Duration::ZERO,
            RouterOutput::Note(RouterNote::Decided(decision)) => decision.waited = Duration::ZERO,
            RouterOutput::Note(RouterNote::Judged { timing, .. })
            | RouterOutput::End { timing, .. } => {
                *timing = RequestStageTimes::default();
            }
            RouterOutput::Order { order, .. } => match order {
                cleave_domain::Order::Reserve(order) => order.waited = Duration::ZERO,
                cleave_domain::Order::Prefill(order) => order.waited = Duration::ZERO,
                cleave_domain::Order::Run(order) => order.waited = Duration::ZERO,
                _ => {}
            },
            _ => {}
        }
    }
    outputs.retain(|output| !matches!(output, RouterOutput::Note(RouterNote::Fleet { .. })));
    outputs
}

fn fingerprint(brain: &RouterBrain) -> u64 {
    let mut hasher = DefaultHasher::new();
    brain.fingerprint(&mut hasher);
    hasher.finish()
}

fn new_world() -> FingerprintWorld {
    world_of(LegPlacement::Auto)
}

fn world_of(placement: LegPlacement) -> FingerprintWorld {
    let mut world = FingerprintWorld {
        brain: RouterBrain::new(RouterLimits {
            failures_max: 1,
            placement,
            ..RouterLimits::default()
        }),
        now: Time::ZERO,
        submitted: false,
    };
    for (id, role) in [(1, Role::Prefill), (2, Role::Decode), (3, Role::Decode)] {
        step(&mut world, Some(joined(id, role)));
    }
    world
}

#[test]
fn equal_fingerprints_have_equal_futures() {
    let (mut states, mut pairs) = (0, 0);
    for world in [new_world(), ordered_to_run(), running(), moving()] {
        let (count, compared) = explore(world);
        states += count;
        pairs += compared;
    }
    assert!(states > 500, "only {states} states");
    assert!(pairs > 1_000, "only {pairs} pairs");
}

/// A flight whose worker of both legs has not answered.
fn ordered_to_run() -> FingerprintWorld {
    let mut world = world_of(LegPlacement::Whole);
    step(&mut world, Some(submitted(FLIGHT.0)));
    world
}

/// A flight on workers 1 and 2.
fn running() -> FingerprintWorld {
    let mut world = new_world();
    step(&mut world, Some(submitted(FLIGHT.0)));
    for (id, report) in [(2, reserved(0)), (1, prefilled(0)), (2, landed(0))] {
        let worker = worker(id);
        step(
            &mut world,
            Some(RouterInput::WorkerReported { worker, report }),
        );
    }
    world
}

/// The same, on its way to worker 3.
fn moving() -> FingerprintWorld {
    let mut world = running();
    let (worker, report) = (worker(2), Report::Draining);
    step(
        &mut world,
        Some(RouterInput::WorkerReported { worker, report }),
    );
    let (handoff, generated) = (handoff(1), Arc::new([7, 7]));
    step(
        &mut world,
        Some(RouterInput::Counted { handoff, generated }),
    );
    let (worker, report) = (self::worker(3), reserved(1));
    step(
        &mut world,
        Some(RouterInput::WorkerReported { worker, report }),
    );
    world
}

/// States seen from here on, and how many more were equal to one of them.
fn explore(begin: FingerprintWorld) -> (usize, usize) {
    let mut visited: BTreeMap<(u64, bool), FingerprintWorld> = BTreeMap::new();
    let mut open: VecDeque<FingerprintWorld> = VecDeque::from([begin]);
    let mut compared = 0;
    while let Some(world) = open.pop_front() {
        let key = (fingerprint(&world.brain), world.submitted);
        let Some(visited_world) = visited.get(&key) else {
            let successors = inputs(&world).into_iter().map(|input| {
                let mut next = world.clone();
                step(&mut next, input);
                next
            });
            if visited.len() + open.len() < 1_500 {
                open.extend(successors);
            }
            visited.insert(key, world);
            continue;
        };
        // Most are equal in everything; a sample of the pairs covers the others.
        compared += 1;
        if compared % 16 > 0 {
            continue;
        }
        for input in inputs(&world) {
            let (mut one, mut other) = (visited_world.clone(), world.clone());
            let outputs = step(&mut one, input.clone());
            assert_eq!(outputs, step(&mut other, input.clone()), "{input:?}");
            let prints = [&one, &other].map(|world| fingerprint(&world.brain));
            assert_eq!(prints[0], prints[1], "after {input:?}");
        }
    }
    (visited.len(), compared)
}

/// The time of an event, and the number of earlier flights, create no state of their own.
#[test]
fn clock_time_and_counters_create_no_new_state() {
    let after = |now: u64, flights: u64| {
        let mut world = new_world();
        for number in 2..2 + flights {
            let flight = FlightId(number);
            step(&mut world, Some(submitted(number)));
            step(&mut world, Some(cancelled(flight)));
            let handoff = HandoffId { flight, attempt: 0 };
            for id in [2, 3] {
                let report = Report::Released { handoff };
                let worker = worker(id);
                step(
                    &mut world,
                    Some(RouterInput::WorkerReported { worker, report }),
                );
            }
        }
        world.now = Time::from_nanos(now);
        // Lets the renewal timer pass.
        step(&mut world, None);
        step(&mut world, Some(submitted(1)));
        fingerprint(&world.brain)
    };
    let minute = 60_000_000_000;
    assert_eq!(after(minute, 2), after(minute, 4));
    assert_eq!(after(minute, 2), after(7 * minute, 2));
    assert_ne!(after(minute, 2), after(minute, 3), "another worker's turn");
}
