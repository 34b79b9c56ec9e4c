//! Values converted there and back, through the encoded bytes, are equal.

use super::strategies::{emission, handoff, link_state, order, registration, report};
use super::{FleetWireError, proto};
use crate::connection::{LinkState, Registration};
use cleave_domain::{
    Emission, HandoffId, LinkPrice, Order, Prices, Report, RowPrice, WorkerId, WorkerLoad,
};
use cleave_transfer::WriteGrant;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use prost::Message;

/// Encodes and decodes, as the network does.
fn travel<M: Message + Default>(message: &M) -> M {
    M::decode(message.encode_to_vec().as_slice()).unwrap()
}

proptest! {
    #[test]
    fn every_order_round_trips(order in order()) {
        let wire = travel(&proto::Order::from(order.clone()));
        prop_assert_eq!(Order::try_from(wire).unwrap(), order);
    }

    #[test]
    fn every_report_round_trips(report in report()) {
        let wire = travel(&proto::Report::from(report.clone()));
        prop_assert_eq!(Report::try_from(wire).unwrap(), report);
    }

    #[test]
    fn every_emission_round_trips(handoff in handoff(), emission in emission()) {
        let wire = travel(&proto::Tokens::from((handoff, emission.clone())));
        let back: (HandoffId, Emission) = wire.try_into().unwrap();
        prop_assert_eq!(back, (handoff, emission));
    }

    #[test]
    fn every_link_state_round_trips(link in link_state()) {
        let wire = travel(&proto::LinkState::from(link.clone()));
        prop_assert_eq!(LinkState::try_from(wire).unwrap(), link);
    }

    #[test]
    fn every_registration_round_trips(sent in registration()) {
        let wire = travel(&proto::Hello::from(sent.clone()));
        prop_assert_eq!(Registration::try_from(wire).unwrap(), sent);
    }

    #[test]
    fn random_bytes_are_an_error_and_never_a_panic(bytes in vec(any::<u8>(), 0..200)) {
        if let Ok(upward) = proto::Upward::decode(bytes.as_slice())
            && let Some(proto::upward::Kind::Report(report)) = upward.kind
        {
            let _ = Report::try_from(report);
        }
        if let Ok(order) = proto::Order::decode(bytes.as_slice()) {
            let _ = Order::try_from(order);
        }
    }
}

#[test]
fn a_damaged_message_is_refused_or_round_trips() {
    let mut runner = TestRunner::deterministic();
    let mut samples = Vec::new();
    let mut keep = |kind: u8, message: Vec<u8>| samples.push([vec![kind], message].concat());
    for _ in 0..40 {
        keep(0, drawn::<_, proto::Hello>(registration(), &mut runner));
        keep(1, drawn::<_, proto::Report>(report(), &mut runner));
        keep(2, drawn::<_, proto::Order>(order(), &mut runner));
        let tokens = (handoff(), emission());
        keep(3, drawn::<_, proto::Tokens>(tokens, &mut runner));
    }
    for _ in 0..5 {
        keep(4, drawn::<_, proto::LinkState>(link_state(), &mut runner));
        let pass = (handoff(), any::<[u8; 32]>().prop_map(WriteGrant));
        keep(5, drawn::<_, proto::Pass>(pass, &mut runner));
    }
    let mark = proto::Mark {
        request_id: "r-1".to_owned(),
        trace_high: 7,
        trace_low: 9,
        span: 5,
        flags: 1,
    };
    keep(6, mark.encode_to_vec());
    cleave_fuzz::check_samples("grpc", &samples, 20_000, crate::fuzzing::grpc);
}

fn drawn<S: Strategy, M: Message + From<S::Value>>(from: S, runner: &mut TestRunner) -> Vec<u8> {
    let value = from.new_tree(runner).unwrap().current();
    M::from(value).encode_to_vec()
}

// Invariant: I16.
#[test]
fn errors_name_the_missing_field() {
    let empty = proto::Order {
        kind: None,
        mark: None,
    };
    assert_eq!(
        Order::try_from(empty),
        Err(FleetWireError::Missing("order.kind"))
    );
    let hash = proto::Prefix {
        stored: vec![vec![1, 2, 3]],
        evicted: Vec::new(),
    };
    let report = proto::Report {
        kind: Some(proto::report::Kind::Prefix(hash)),
    };
    let error = Report::try_from(report).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`prefix.stored` has 3 bytes in place of 16"
    );
}

#[test]
fn unordered_or_oversized_prices_are_refused() {
    let report = |prices: Prices| Report::try_from(proto::Report::from(Report::Prices(prices)));
    let row = |rows| RowPrice { rows, nanos: 1 };
    let problem = |rows: Vec<RowPrice>, links: Vec<u64>| {
        let to = |worker| (WorkerId(worker), LinkPrice::default());
        report(Prices {
            rows,
            links: links.into_iter().map(to).collect(),
            ..Prices::default()
        })
        .unwrap_err()
        .to_string()
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

    let load = proto::Load {
        backlog_micros: vec![1; 26],
        progress: proto::Progress::Moving.into(),
        ..proto::Load::default()
    };
    let error = WorkerLoad::try_from(load).unwrap_err().to_string();
    assert_eq!(
        error,
        "`load.backlog_micros` does not have three times nine entries"
    );
}

#[test]
fn an_impossible_registration_is_refused() {
    let sound = || proto::Hello::from(crate::sample::registration());
    assert!(Registration::try_from(sound()).is_ok());
    let refused = |field: &str, value: u64, spoil: &dyn Fn(&mut proto::Hello)| {
        let mut hello = sound();
        spoil(&mut hello);
        let error = Registration::try_from(hello).unwrap_err().to_string();
        let is_explained =
            error.contains(&format!("`{field}`")) && error.contains(&value.to_string());
        assert!(is_explained, "{field} {value}: {error}");
    };
    type CapacityField = fn(&mut proto::Capacity) -> &mut u32;
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
            refused(name, value.into(), &|hello| {
                let description = hello.description.as_mut().unwrap();
                *field(description.capacity.as_mut().unwrap()) = value;
            });
        }
    }
    let most = u32::MAX;
    refused("description.queue_max", most.into(), &|hello| {
        hello.description.as_mut().unwrap().queue_max = most;
    });
    refused("hello.silence_nanos", 20_000_000, &|hello| {
        hello.silence_nanos = 20_000_000;
    });
    let long = "x".repeat(129);
    for name in ["", "a\nb", "a\"b", "a/b", "a b", long.as_str()] {
        let mut hello = sound();
        hello.name = name.to_owned();
        let error = Registration::try_from(hello).unwrap_err().to_string();
        assert!(error.starts_with("`hello.name`"), "{name:?}: {error}");
    }
}
