//! Values that travel arrive equal; bytes from elsewhere are errors, or values within bounds.

use super::bounds::FAILURES_NESTED_MAX;
use super::checked::{decode_checked, encode_checked};
use super::strategies::{
    context, emission, from_worker, handoff, link_state, order, registration, report, to_worker,
    worker,
};
use super::{FleetWireError, decode, encode, nanos, proto};
use crate::connection::{FromWorker, Registration, ToWorker};
use crate::grpc::{InboundMessage, OutboundMessage};
use cleave_api::TraceParent;
use cleave_domain::{
    Capacity, Deadline, Failure, FleetDemand, HandoffId, LinkPrice, OnDeadlineMiss, Order,
    PrefillOrder, PrefillTiming, Prices, Report, Request, ReserveOrder, RowPrice, RunOrder,
    ScalingGossip, SloOutcomes, WorkerId,
};
use cleave_telemetry::RequestContext;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use prost::Message;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

proptest! {
    #[test]
    fn every_message_of_a_worker_round_trips(sent in from_worker()) {
        let bytes = encode_checked(&proto::Upward::of(sent.clone()));
        let message: proto::Upward = decode_checked(&bytes).unwrap();
        let received: FromWorker = message.content().unwrap();
        prop_assert_eq!(received, sent);
    }

    #[test]
    fn every_message_of_a_router_round_trips(sent in to_worker()) {
        let bytes = encode_checked(&proto::Downward::of(sent.clone()));
        let message: proto::Downward = decode_checked(&bytes).unwrap();
        let received: ToWorker = message.content().unwrap();
        prop_assert_eq!(received, sent);
    }

    #[test]
    fn every_registration_round_trips(sent in registration()) {
        let bytes = proto::Hello::from(&sent).encode_to_vec();
        let hello = proto::Hello::decode(bytes.as_slice()).unwrap();
        prop_assert_eq!(&hello.name, &sent.name);
        let received: Registration = decode("hello.registration", &hello.registration).unwrap();
        prop_assert_eq!(received, sent);
    }

    #[test]
    fn random_bytes_are_an_error_and_never_a_panic(bytes in vec(any::<u8>(), 0..200)) {
        crate::fuzzing::grpc(&bytes);
    }

    #[test]
    fn fewer_bytes_or_more_are_no_message(sent in report(), more in any::<u8>()) {
        let mut bytes = encode(&sent);
        bytes.push(more);
        prop_assert!(decode::<Report>("report", &bytes).is_err());
        let keep = usize::from(more) % (bytes.len() - 1);
        prop_assert!(decode::<Report>("report", &bytes[..keep]).is_err());
    }
}

#[test]
fn a_damaged_message_is_refused_or_round_trips() {
    let mut runner = TestRunner::deterministic();
    let mut samples = Vec::new();
    let mut keep = |kind: u8, message: Vec<u8>| samples.push([vec![kind], message].concat());
    for _ in 0..40 {
        keep(0, drawn(registration(), &mut runner));
        keep(1, drawn(report(), &mut runner));
        keep(2, drawn((order(), context()), &mut runner));
        let tokens = vec((handoff(), emission()), 0..3);
        keep(3, drawn(tokens, &mut runner));
    }
    for _ in 0..5 {
        keep(4, drawn(link_state(), &mut runner));
        keep(5, drawn((handoff(), any::<[u8; 32]>()), &mut runner));
        keep(6, drawn((worker(), ".{0,9}"), &mut runner));
    }
    cleave_fuzz::check_samples("grpc", &samples, 20_000, crate::fuzzing::grpc);
}

fn drawn<S: Strategy<Value: Serialize>>(from: S, runner: &mut TestRunner) -> Vec<u8> {
    encode(&from.new_tree(runner).unwrap().current())
}

// Invariant: I16.
#[test]
fn errors_name_the_message_or_its_field() {
    let error = decode::<Report>("report", &[99]).unwrap_err().to_string();
    assert!(error.starts_with("`report` cannot be decoded"), "{error}");
    let error = proto::Upward::default().content().unwrap_err().to_string();
    assert!(error.starts_with("message lacks `upward.kind`"), "{error}");
}

fn nested_failure(depth: usize) -> Vec<u8> {
    let spent = encode(&Failure::RetriesSpent(Box::new(Failure::WorkerLost)));
    let [spent, last] = spent[..] else {
        panic!("a byte each: {spent:?}")
    };
    [vec![spent; depth], vec![last]].concat()
}

#[test]
fn failures_nest_a_little_and_never_end_the_stack() {
    let nested: Failure = decode("failure", &nested_failure(5)).unwrap();
    assert_eq!(encode(&nested), nested_failure(5));
    let most = FAILURES_NESTED_MAX as usize;
    assert!(decode::<Failure>("failure", &nested_failure(most)).is_ok());
    let error = decode::<Failure>("failure", &nested_failure(most + 1)).unwrap_err();
    assert!(
        matches!(
            error,
            FleetWireError::Bounds {
                field: "failure.retries_spent",
                ..
            }
        ),
        "{error}"
    );
    let error = decode::<Failure>("failure", &nested_failure(8 << 20)).unwrap_err();
    assert_eq!(error, FleetWireError::Unreadable("failure"));
}

/// Memory for so many items would end the process.
#[test]
fn a_list_longer_than_its_bytes_is_refused() {
    let stored = encode(&Report::Prefix {
        stored: Vec::new(),
        evicted: Vec::new(),
    });
    let announced = [&stored[..1], &encode(&u64::MAX)[..]].concat();
    assert!(decode::<Report>("report", &announced).is_err());
    let announced = [&stored[..1], &encode(&(1_u64 << 40))[..], &[7; 160][..]].concat();
    assert!(decode::<Report>("report", &announced).is_err());
}

#[test]
fn durations_beyond_584_years_are_584_years() {
    let timing = PrefillTiming {
        wait: Duration::MAX,
        run: Duration::from_secs(1),
    };
    let handoff = HandoffId::default();
    let sent = encode(&Report::Prefilled { handoff, timing });
    let received: Report = decode("report", &sent).unwrap();
    let timing = PrefillTiming {
        wait: Duration::from_nanos(u64::MAX),
        ..timing
    };
    assert_eq!(received, Report::Prefilled { handoff, timing });
    // More nanoseconds than a second has, on top of the most seconds.
    let overflowing = [&sent[..3], &encode(&(u64::MAX, u32::MAX))[..], &[1, 0][..]].concat();
    assert!(decode::<Report>("report", &overflowing).is_err());
}

/// The parts with durations of an order that begins a leg.
fn times(order: &mut Order) -> Option<(&mut Duration, &mut Option<Deadline>, &mut Arc<Request>)> {
    match order {
        Order::Reserve(ReserveOrder {
            waited,
            due,
            request,
            ..
        })
        | Order::Prefill(PrefillOrder {
            waited,
            due,
            request,
            ..
        })
        | Order::Run(RunOrder {
            waited,
            due,
            request,
            ..
        }) => Some((waited, due, request)),
        _ => None,
    }
}

#[test]
fn durations_of_an_order_that_begins_a_leg_are_bounded() {
    let mut runner = TestRunner::deterministic();
    let mut kinds = BTreeSet::new();
    for _ in 0..200 {
        let mut sent = order().new_tree(&mut runner).unwrap().current();
        let Some((waited, due, request)) = times(&mut sent) else {
            continue;
        };
        *waited = Duration::MAX;
        *due = Some(Deadline {
            left: Duration::MAX,
            unmet: OnDeadlineMiss::Serve,
        });
        Arc::make_mut(request).slo.ttft = Some(Duration::MAX);
        let bytes = encode(&sent);
        kinds.insert(bytes[0]);
        let mut received: Order = decode("order", &bytes).unwrap();
        let (waited, due, request) = times(&mut received).unwrap();
        let longest = Duration::from_nanos(u64::MAX);
        assert_eq!(*waited, longest);
        assert_eq!(due.map(|due| due.left), Some(longest));
        assert_eq!(request.slo.ttft, Some(longest));
    }
    assert_eq!(kinds.len(), 3, "reserve, prefill and run");
}

#[test]
fn a_bad_request_context_is_empty() {
    let received = |context: RequestContext| {
        let sent = encode(&(Order::Drain, Some(context)));
        let (_, context): (Order, Option<Arc<RequestContext>>) = decode("order", &sent).unwrap();
        context.unwrap()
    };
    let trace = |trace, span, flags| Some(TraceParent { trace, span, flags });
    let long = received(RequestContext {
        request_id: "é".repeat(400).into(),
        trace: trace(1, 0, 0),
    });
    assert_eq!(*long, RequestContext::default());
    let unrooted = received(RequestContext {
        request_id: "r-1".into(),
        trace: trace(0, 5, 0),
    });
    assert_eq!((&*unrooted.request_id, unrooted.trace), ("r-1", None));
    let flagged = received(RequestContext {
        request_id: "r-1".into(),
        trace: trace((7 << 64) | 9, 5, 0xff),
    });
    assert_eq!(flagged.trace, trace((7 << 64) | 9, 5, 1));
}

#[test]
fn more_classes_than_a_policy_has_are_refused() {
    let received = |count| {
        let demand = FleetDemand {
            classes: vec![SloOutcomes::default(); count],
            ..FleetDemand::default()
        };
        let gossip = ScalingGossip {
            demand,
            ..ScalingGossip::default()
        };
        decode::<Report>("report", &encode(&Report::Relayed(Arc::new(gossip))))
    };
    assert!(received(1024).is_ok());
    let error = received(1025).unwrap_err().to_string();
    assert_eq!(error, "`demand.classes` is 1025, and may be 0 to 1024");
}

#[test]
fn unordered_or_oversized_prices_are_refused() {
    let row = |rows| RowPrice { rows, nanos: 1 };
    let problem = |rows: Vec<RowPrice>, links: Vec<u64>| {
        let to = |worker| (WorkerId(worker), LinkPrice::default());
        let prices = Prices {
            rows,
            links: links.into_iter().map(to).collect(),
            ..Prices::default()
        };
        let error = decode::<Report>("report", &encode(&Report::Prices(prices)));
        error.unwrap_err().to_string()
    };
    let ascending = "is not in ascending order";
    for rows in [vec![row(8), row(1)], vec![row(8), row(8)]] {
        assert_eq!(
            problem(rows, Vec::new()),
            format!("`prices.rows` {ascending}")
        );
    }
    let links = problem(Vec::new(), vec![2, 1]);
    assert_eq!(links, format!("`prices.links` {ascending}"));
    let many = problem((0..1025).map(row).collect(), Vec::new());
    assert_eq!(many, "`prices.rows` has more than 1024 entries");
    let many = problem(Vec::new(), (0..65537).collect());
    assert_eq!(many, "`prices.links` has more than 65536 entries");
}

#[test]
fn an_impossible_registration_is_refused() {
    let received = |registration: &Registration| {
        decode::<Registration>("hello.registration", &encode(registration))
    };
    assert!(received(&crate::sample::registration()).is_ok());
    let refused = |field: &str, value: u64, spoil: &dyn Fn(&mut Registration)| {
        let mut registration = crate::sample::registration();
        spoil(&mut registration);
        let error = received(&registration).unwrap_err().to_string();
        let is_explained =
            error.contains(&format!("`{field}`")) && error.contains(&value.to_string());
        assert!(is_explained, "{field} {value}: {error}");
    };
    type CapacityField = fn(&mut Capacity) -> &mut u32;
    let fields: [(&str, CapacityField); 6] = [
        ("capacity.block_tokens", |c| &mut c.block_tokens),
        ("capacity.block_bytes", |c| &mut c.block_bytes),
        ("capacity.blocks_count", |c| &mut c.blocks_count),
        ("capacity.slots_count", |c| &mut c.slots_count),
        ("capacity.step_tokens_max", |c| &mut c.step_tokens_max),
        ("capacity.context_tokens_max", |c| &mut c.context_tokens_max),
    ];
    for (name, field) in fields {
        for value in [0, u32::MAX] {
            refused(name, value.into(), &|registration| {
                *field(&mut registration.description.capacity) = value;
            });
        }
    }
    let most = u32::MAX;
    refused("description.queue_max", most.into(), &|registration| {
        registration.description.queue_max = most;
    });
    let hasty = Duration::from_millis(20);
    refused("hello.silence_nanos", nanos(hasty), &|registration| {
        registration.silence = hasty;
    });
    let long = "x".repeat(129);
    for name in ["", "a\nb", "a\"b", "a/b", "a b", long.as_str()] {
        let mut registration = crate::sample::registration();
        registration.name = name.to_owned();
        let error = received(&registration).unwrap_err().to_string();
        assert!(error.starts_with("`hello.name`"), "{name:?}: {error}");
    }
}
