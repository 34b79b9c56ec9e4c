//! The reading of a policy and of a request, below the level of the scenario scripts.

use super::*;
use crate::placement::forecast::PlacementPriority;
use cleave_domain::{
    Capacity, Fingerprint, Prices, Report, RequestSlo, Role, RowPrice, WorkerDescription, WorkerRef,
};
use cleave_testkit::build;

fn class(name: &str, ttft: Option<u64>, tpot: Option<u64>) -> SloClass {
    SloClass {
        name: name.to_owned(),
        ttft: ttft.map(Duration::from_millis),
        tpot: tpot.map(Duration::from_millis),
        ..SloClass::default()
    }
}

/// A fleet of one worker, with the state that its rules read.
struct RulesFixture {
    now: Time,
    limits: RouterLimits,
    fleet: RouterFleet,
    tally: ServiceTally,
}

impl RulesFixture {
    fn rules(&self) -> PlacementRules<'_> {
        PlacementRules {
            now: self.now,
            limits: &self.limits,
            fleet: &self.fleet,
            tally: &self.tally,
        }
    }
}

/// A policy with these classes; the first is the default.
fn policy(classes: &[SloClass]) -> SloPolicy {
    SloPolicy {
        default_class: classes[0].name.clone(),
        classes: classes.to_vec(),
        ..SloPolicy::default()
    }
}

/// One worker that has reported its prices, and one request that waits for room there.
fn with_flight(classes: &[SloClass], class: &SloClass) -> (RulesFixture, FlightRecord) {
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
            windows: None,
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
    let mut fleet = RouterFleet::default();
    fleet.join(worker, description);
    fleet.update_worker(worker, &Report::Prices(prices));
    let request = Request {
        slo: RequestSlo {
            class: class.name.clone(),
            ttft: class.ttft,
            tpot: class.tpot,
            ..RequestSlo::default()
        },
        ..build::request([1, 2, 3], 300)
    };
    let fixture = RulesFixture {
        now: Time::from_nanos(7_000_000),
        limits: RouterLimits {
            policy: Arc::new(policy(classes)),
            ..RouterLimits::default()
        },
        fleet,
        tally: ServiceTally::default(),
    };
    let rules = fixture.rules();
    let place = rules.queue_place(FlightId(1), &request, 1, Time::ZERO);
    let sizes = fixture.fleet.block_sizes();
    let flight = FlightRecord::new(place, Arc::new(request), sizes, Time::ZERO);
    (fixture, flight)
}

#[test]
fn classes_yield_only_where_some_have_targets() {
    let (chat, batch) = (class("chat", None, Some(40)), class("batch", None, None));
    let yields = |classes: &[SloClass]| some_class_yields(&policy(classes));
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
        let (fixture, flight) = with_flight(&classes, class);
        assert_eq!(flight.class(&fixture.limits.policy), class);
    }
}

#[test]
fn a_need_reflects_targets_and_recent_answer_lengths() {
    let classes = [
        class("chat", Some(90), Some(40)),
        class("batch", None, None),
    ];
    let (mut fixture, flight) = with_flight(&classes, &classes[0]);
    let need = fixture.rules().need(&flight).unwrap();
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
        fixture.tally.answered("chat", tokens);
        fixture.tally.answered("batch", 290);
    }
    let need = fixture.rules().need(&flight).unwrap();
    assert_eq!((need.output, need.output_long), (25, 31));
    // Tokens that its client has are not expected again, and nothing can be refused.
    let mut given = flight.clone();
    given.request = Arc::new(Request {
        generated: (0..20).collect(),
        ..Request::clone(&flight.request)
    });
    let need = fixture.rules().need(&given).unwrap();
    assert_eq!((need.output, need.output_long), (5, 11));
    assert_eq!((need.ttft, need.tpot), (None, None));
    assert_eq!(need.priority_over_others, PlacementPriority::Resumed);
    // The time of a class that may wait counts from its placement.
    let mut waits = flight;
    waits.on_miss = OnSloMiss::Queue(Duration::from_secs(9));
    assert_eq!(
        fixture.rules().need(&waits).unwrap().counted_wait,
        Duration::ZERO
    );
    fixture.limits.mode = RoutingMode::Load;
    assert!(
        fixture.rules().need(&waits).is_none(),
        "times do not decide"
    );
}

#[test]
fn a_request_without_targets_yields_to_those_with_some() {
    let classes = [class("chat", None, Some(40)), class("batch", None, None)];
    let (fixture, flight) = with_flight(&classes, &classes[1]);
    assert_eq!(
        fixture.rules().need(&flight).unwrap().priority_over_others,
        PlacementPriority::Yielding
    );
    let rule = fixture.rules().overtake_rule(&flight);
    assert_eq!(rule, OvertakeRule::Uncounted);
    let (mut fixture, mut flight) = with_flight(&classes, &classes[0]);
    assert_eq!(
        fixture.rules().need(&flight).unwrap().priority_over_others,
        PlacementPriority::New
    );
    let mut overtaken = |count| {
        flight.overtaken = count;
        fixture.rules().overtake_rule(&flight)
    };
    assert_eq!(overtaken(0), OvertakeRule::Counted);
    assert_eq!(overtaken(OVERTAKEN_MAX - 1), OvertakeRule::Counted);
    assert_eq!(overtaken(OVERTAKEN_MAX), OvertakeRule::Forbidden);
    assert_eq!(overtaken(OVERTAKEN_MAX + 1), OvertakeRule::Forbidden);
    flight.overtaken = 0;
    fixture.limits.mode = RoutingMode::Load;
    assert_eq!(
        fixture.rules().overtake_rule(&flight),
        OvertakeRule::Forbidden,
        "by load nobody overtakes"
    );
    // No flight waits, and no other class has targets, so there is nothing to yield to.
    let (fixture, flight) = with_flight(&classes[1..], &classes[1]);
    let rule = fixture.rules().overtake_rule(&flight);
    assert_eq!(rule, OvertakeRule::Counted);
}

#[test]
fn an_unmet_target_is_handled_by_the_rule_of_its_class() {
    let rest = class("rest", None, None);
    let classes = [class("chat", Some(90), None), rest.clone()];
    let (mut fixture, mut flight) = with_flight(&classes, &classes[0]);
    let late = |met_after| TargetMiss {
        aim: SloMetric::Ttft,
        predicted: Duration::from_secs(1),
        met_after,
    };
    let soon = late(Some(Duration::from_secs(2)));
    let refused = |action: UnmetAction| match action {
        UnmetAction::Refuse(Refusal::Late { retry_after, .. }) => Some(retry_after),
        _ => None,
    };
    let action = fixture.rules().unmet_action(&flight, &soon);
    assert_eq!(refused(action), Some(Duration::from_secs(2)));
    let action = fixture.rules().unmet_action(&flight, &late(None));
    assert_eq!(refused(action), Some(RETRY_AFTER_NEVER), "never in time");
    // It waits as long as its class allows, unless an idle fleet would be late too.
    flight.on_miss = OnSloMiss::Queue(Duration::from_millis(10));
    let waits = |fixture: &RulesFixture, flight: &FlightRecord, late: &TargetMiss| {
        fixture.rules().unmet_action(flight, late) == UnmetAction::Wait
    };
    assert!(waits(&fixture, &flight, &soon));
    assert!(!waits(&fixture, &flight, &late(None)));
    fixture.now = Time::from_nanos(10_000_000);
    assert!(!waits(&fixture, &flight, &soon));
    // It goes to another class, but not round and round.
    flight.on_miss = OnSloMiss::Downgrade("rest".to_owned());
    let action = fixture.rules().unmet_action(&flight, &soon);
    assert_eq!(action, UnmetAction::Downgrade(rest));
    flight.downgrades = 2;
    assert!(refused(fixture.rules().unmet_action(&flight, &soon)).is_some());
    flight.downgrades = 0;
    flight.on_miss = OnSloMiss::Downgrade("chat".to_owned());
    assert!(refused(fixture.rules().unmet_action(&flight, &soon)).is_some());
}
