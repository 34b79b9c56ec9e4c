//! Admission's reading of a policy and of a request, below the level of the scenario scripts.

use super::*;
use crate::event::{RouterInput, RouterLimits};
use crate::forecast::PlacementPriority;
use cleave_domain::{
    Capacity, Fingerprint, Prices, Report, RequestSlo, Role, RowPrice, SamplingParams, StopRules,
    WorkerDescription, WorkerRef,
};

fn class(name: &str, ttft: Option<u64>, tpot: Option<u64>) -> SloClass {
    SloClass {
        name: name.to_owned(),
        ttft: ttft.map(Duration::from_millis),
        tpot: tpot.map(Duration::from_millis),
        ..SloClass::default()
    }
}

/// A router with these classes; the first is the default.
fn brain(classes: &[SloClass]) -> RouterBrain {
    let policy = SloPolicy {
        default_class: classes[0].name.clone(),
        classes: classes.to_vec(),
        ..SloPolicy::default()
    };
    RouterBrain::new(RouterLimits {
        policy: Arc::new(policy),
        ..RouterLimits::default()
    })
}

/// A router with one worker that has reported its prices, and one request that waits for room
/// there.
fn with_flight(classes: &[SloClass], class: &SloClass) -> (RouterBrain, FlightRecord) {
    let mut brain = brain(classes);
    let worker = WorkerRef::default();
    let description = WorkerDescription {
        role: Role::Both,
        home: Role::Both,
        model: "m".to_owned(),
        fingerprint: Fingerprint("f".to_owned()),
        capacity: Capacity {
            block_tokens: 4,
            block_bytes: 64,
            blocks_count: 100,
            slots_count: 8,
            step_tokens_max: 64,
            context_tokens_max: 400,
            states: None,
        },
        queue_max: 8,
        device: None,
    };
    let prices = Prices {
        rows: vec![
            RowPrice {
                rows: 1,
                nanos: 1000,
            },
            RowPrice {
                rows: 9,
                nanos: 9000,
            },
        ],
        ..Prices::default()
    };
    let joined = RouterInput::WorkerJoined {
        worker,
        description,
    };
    brain.handle(Time::ZERO, joined);
    let report = Report::Prices(prices);
    brain.handle(Time::ZERO, RouterInput::WorkerReported { worker, report });
    let request = Request {
        prompt: [1, 2, 3].into(),
        generated: [].into(),
        sampling: SamplingParams::greedy(),
        stop: StopRules {
            max_tokens: 300,
            min_tokens: 0,
            stop_tokens: [].into(),
        },
        priority: 0,
        cache_salt: 0,
        slo: RequestSlo {
            class: class.name.clone(),
            ttft: class.ttft,
            tpot: class.tpot,
            ..RequestSlo::default()
        },
    };
    let (flight, request) = (FlightId(1), Arc::new(request));
    brain.handle(Time::ZERO, RouterInput::Submitted { flight, request });
    let flight = brain.flights[&flight].clone();
    brain.now = Time::from_nanos(7_000_000);
    (brain, flight)
}

#[test]
fn classes_yield_only_where_some_have_targets() {
    let (chat, batch) = (class("chat", None, Some(40)), class("batch", None, None));
    let yields = |classes: &[SloClass]| some_class_yields(&brain(classes).limits.policy);
    assert!(yields(&[chat.clone(), batch.clone()]));
    assert!(yields(&[class("end", Some(9), None), batch.clone()]));
    assert!(!yields(std::slice::from_ref(&chat)));
    assert!(!yields(&[batch.clone(), class("rest", None, None)]));
    assert!(!yields(&[chat, class("fast", Some(9), None)]));
}

#[test]
fn a_flight_has_the_class_of_its_queue() {
    let classes = [
        class("chat", None, Some(40)),
        class("batch", Some(90), None),
    ];
    for class in &classes {
        let (brain, flight) = with_flight(&classes, class);
        assert_eq!(brain.class_of(&flight), class);
    }
}

#[test]
fn a_need_reflects_targets_and_recent_answer_lengths() {
    let classes = [
        class("chat", Some(90), Some(40)),
        class("batch", None, None),
    ];
    let (mut brain, flight) = with_flight(&classes, &classes[0]);
    let need = brain.need(&flight).unwrap();
    assert_eq!(
        (need.output, need.output_long),
        (256, 300),
        "no answer is known"
    );
    assert_eq!(
        (need.ttft, need.tpot, need.e2e),
        (classes[0].ttft, classes[0].tpot, None)
    );
    assert_eq!(
        (need.waited, need.counted_wait),
        (Duration::from_millis(7), Duration::from_millis(7))
    );
    assert_eq!(
        need.gap_left_to_others,
        Some(Duration::from_millis(35)),
        "an eighth less than 40 ms"
    );
    assert_eq!(need.priority_over_others, PlacementPriority::New);
    // As long as three quarters of the class's answers, and as 95 in a hundred.
    for tokens in 1..=32 {
        brain.tally.answered("chat", tokens);
        brain.tally.answered("batch", 290);
    }
    let need = brain.need(&flight).unwrap();
    assert_eq!((need.output, need.output_long), (25, 31));
    // Tokens that its client has are not expected again, and nothing can be refused.
    let mut given = flight.clone();
    given.request = Arc::new(Request {
        generated: (0..20).collect(),
        ..Request::clone(&flight.request)
    });
    let need = brain.need(&given).unwrap();
    assert_eq!((need.output, need.output_long), (5, 11));
    assert_eq!((need.ttft, need.tpot), (None, None));
    assert_eq!(need.priority_over_others, PlacementPriority::Resumed);
    // The time of a class that may wait counts from its placement.
    let mut waits = flight;
    waits.on_miss = OnSloMiss::Queue(Duration::from_secs(9));
    assert_eq!(brain.need(&waits).unwrap().counted_wait, Duration::ZERO);
    brain.limits.mode = RoutingMode::Load;
    assert!(brain.need(&waits).is_none(), "times do not decide");
}

#[test]
fn a_request_without_targets_yields_to_those_with_some() {
    let classes = [class("chat", None, Some(40)), class("batch", None, None)];
    let (brain, flight) = with_flight(&classes, &classes[1]);
    assert_eq!(
        brain.need(&flight).unwrap().priority_over_others,
        PlacementPriority::Yielding
    );
    assert_eq!(brain.stands(flight.place.flight), OvertakeRule::Uncounted);
    let (mut brain, flight) = with_flight(&classes, &classes[0]);
    let id = flight.place.flight;
    assert_eq!(
        brain.need(&flight).unwrap().priority_over_others,
        PlacementPriority::New
    );
    assert_eq!(brain.stands(id), OvertakeRule::Counted);
    brain.flights.get_mut(&id).unwrap().overtaken = OVERTAKEN_MAX - 1;
    assert_eq!(brain.stands(id), OvertakeRule::Counted);
    brain.count_overtaken(&[id]);
    assert_eq!(brain.stands(id), OvertakeRule::Forbidden);
    brain.count_overtaken(&[id]);
    assert_eq!(brain.stands(id), OvertakeRule::Forbidden);
    brain.flights.get_mut(&id).unwrap().overtaken = 0;
    brain.limits.mode = RoutingMode::Load;
    assert_eq!(
        brain.stands(id),
        OvertakeRule::Forbidden,
        "by load nobody overtakes"
    );
    // No flight waits, and no other class has targets, so there is nothing to yield to.
    let (brain, flight) = with_flight(&classes[1..], &classes[1]);
    assert_eq!(brain.stands(flight.place.flight), OvertakeRule::Counted);
}
