//! Orders at the gate.

use super::*;
use crate::constraints::tests::{constraints, regex};
use cleave_domain::{FlightId, Request, RequestSlo, RunOrder, SamplingParams, StopRules};
use std::time::Duration;

fn handoff(flight: u64) -> HandoffId {
    HandoffId {
        flight: FlightId(flight),
        attempt: 1,
    }
}

fn run(flight: u64, constraint: Option<Arc<Constraint>>) -> RouterOrder {
    let request = Request {
        prompt: [1].into(),
        generated: [].into(),
        sampling: SamplingParams {
            constraint,
            ..SamplingParams::greedy()
        },
        stop: StopRules {
            max_tokens: 1,
            min_tokens: 0,
            stop_tokens: [].into(),
        },
        priority: 0,
        cache_salt: 0,
        adapter: None,
        pooling: None,
        slo: RequestSlo::default(),
    };
    let order = Order::Run(RunOrder {
        handoff: handoff(flight),
        request: Arc::new(request),
        expected_output_tokens: 1,
        waited: Duration::ZERO,
        due: None,
    });
    sent(order)
}

fn cancel(flight: u64) -> RouterOrder {
    sent(Order::Cancel {
        handoff: handoff(flight),
    })
}

fn sent(order: Order) -> RouterOrder {
    RouterOrder {
        router: RouterId(0),
        order,
        context: None,
    }
}

/// `R` and `C` with their flights.
fn shown(orders: &[RouterOrder]) -> Vec<(char, HandoffId)> {
    let letter = |order: &Order| match order {
        Order::Run(_) => 'R',
        Order::Cancel { .. } => 'C',
        other => panic!("{other:?}"),
    };
    let shown = |order: &RouterOrder| (letter(&order.order), order.subject().0.unwrap());
    orders.iter().map(shown).collect()
}

// Lesson: 41.
#[tokio::test]
async fn an_order_waits_for_its_constraint_alone() {
    let (mut gate, mut known) = ConstraintGate::new(Arc::new(constraints()));
    let digits = regex("[0-9]+");
    assert!(gate.pass(run(1, Some(Arc::clone(&digits)))).is_none());
    assert!(gate.pass(run(2, Some(Arc::clone(&digits)))).is_none());
    assert!(gate.pass(run(3, None)).is_some(), "others pass");
    assert!(gate.pass(cancel(3)).is_some());
    assert!(gate.pass(cancel(1)).is_none(), "it stays behind its order");
    let compiled = known.recv().await.unwrap();
    let passed = shown(&gate.take_known(&compiled));
    let expected = [('R', handoff(1)), ('C', handoff(1)), ('R', handoff(2))];
    assert_eq!(passed, expected);
    assert!(gate.pass(run(4, Some(digits))).is_some(), "it is known now");
    assert!(known.try_recv().is_err(), "it was compiled once");
}

// Lesson: 41.
#[tokio::test]
async fn an_order_passes_when_its_constraint_is_unusable() {
    let (mut gate, mut known) = ConstraintGate::new(Arc::new(constraints()));
    assert!(gate.pass(run(1, Some(regex("(")))).is_none());
    let compiled = known.recv().await.unwrap();
    assert_eq!(gate.take_known(&compiled).len(), 1);
}

#[tokio::test]
async fn orders_of_a_lost_router_are_dropped() {
    let (mut gate, mut known) = ConstraintGate::new(Arc::new(constraints()));
    assert!(gate.pass(run(1, Some(regex("a")))).is_none());
    gate.router_lost(handoff(1).flight.router());
    let compiled = known.recv().await.unwrap();
    assert!(gate.take_known(&compiled).is_empty());
    assert!(gate.pinned.is_empty());
}
