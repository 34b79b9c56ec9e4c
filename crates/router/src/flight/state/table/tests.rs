//! Flights enter, change their stage, and leave; every index follows.

use super::*;
use crate::event::MoveReason;
use crate::fixtures::{FLIGHT as ID, at, flight, worker};

/// One flight whose sequence runs on worker 2, after its prompt ran on worker 1.
fn running() -> RouterFlights {
    let mut flights = RouterFlights::default();
    flights.enter(ID, flight(ID, flights.next_arrival()));
    let handoff = flights.get_mut(ID).unwrap().name_attempt();
    flights.begin(FlightAttempt::new(handoff, worker(1), worker(2), 100));
    let attempt = flights.get_mut(ID).unwrap().attempt_mut(handoff).unwrap();
    (attempt.reserved, attempt.prefilled, attempt.landed) = (true, true, true);
    flights.check(at(0));
    flights
}

fn move_to(flights: &mut RouterFlights, target: WorkerRef) -> HandoffId {
    let flight = flights.get_mut(ID).unwrap();
    let handoff = flight.name_attempt();
    let source = flight.attempt().unwrap().clone();
    let leg = FlightAttempt {
        of: Some(source.handoff),
        ..FlightAttempt::new(handoff, source.decode, target, 100)
    };
    let moving = FlightMigration {
        handoff,
        why: MoveReason::Drain,
        began: at(1),
        leg: Some(leg),
    };
    flights.set_move(ID, moving);
    handoff
}

fn fence(flights: &mut RouterFlights) -> HandoffId {
    let flight = flights.get(ID).unwrap();
    let handoff = flight.attempt().unwrap().handoff;
    let fence = flight.last_attempt();
    flights.fence(FailedAttempt {
        handoff,
        fence,
        peer_in_doubt: None,
        context_tokens_max: 100,
        unanswered_by: None,
    });
    fence
}

#[test]
fn flights_entered_and_removed_add_up() {
    let mut flights = running();
    let other = FlightId(4);
    flights.enter(other, flight(other, flights.next_arrival()));
    flights.set_timer(other, FlightTimer::StepTimeout, Some(at(9)));
    assert_eq!((flights.len(), flights.next_arrival()), (2, 3));
    flights.check(at(0));
    assert!(flights.remove(ID).is_some() && flights.remove(ID).is_none());
    flights.check(at(0));
    assert_eq!((flights.len(), flights.next_arrival()), (1, 3));
}

#[test]
#[should_panic(expected = "was submitted twice")]
fn a_flight_enters_once() {
    let mut flights = running();
    flights.enter(ID, flight(ID, 2));
}

#[test]
fn a_removed_flight_leaves_no_timer_and_no_index() {
    let mut flights = running();
    flights.set_timer(ID, FlightTimer::StepTimeout, Some(at(5)));
    flights.set_timer(ID, FlightTimer::ReaderTimeout, Some(at(6)));
    flights.fail_over(ID, WorkerId(2));
    move_to(&mut flights, worker(3));
    flights.remove(ID);
    assert_eq!((flights.first_timer(), flights.moving().count()), (None, 0));
    assert!(flights.failing_over().is_empty());
    flights.check(at(0));
    // Late facts about it change nothing.
    flights.fail_over(ID, WorkerId(2));
    flights.set_timer(ID, FlightTimer::StepTimeout, Some(at(7)));
    flights.set_waiting(ID);
    flights.check(at(0));
}

#[test]
fn a_flight_is_counted_until_its_next_stage() {
    let mut flights = running();
    let name = fence(&mut flights);
    flights.check(at(0));
    assert_eq!(flights.counting(), 1);
    assert!(flights.counted_attempt(name).is_some() && flights.current(name).is_none());
    let other = HandoffId { attempt: 7, ..name };
    assert_eq!(flights.counted_attempt(other), None);
    flights.set_waiting(ID);
    assert_eq!((flights.counting(), flights.is_waiting(ID)), (0, true));
    assert_eq!(flights.counted_attempt(name), None);
    let mut flights = running();
    fence(&mut flights);
    flights.remove(ID);
    assert_eq!(flights.counting(), 0);
}

#[test]
fn a_move_is_listed_until_it_is_taken() {
    let mut flights = running();
    let handoff = move_to(&mut flights, worker(3));
    assert_eq!(flights.leg(handoff).unwrap().decode, worker(3));
    assert_eq!(flights.moving().count(), 1);
    assert!(!flights.is_sealed(ID));
    let leg = flights.get_mut(ID).unwrap().leg_mut(handoff).unwrap();
    (leg.reserved, leg.prefilled) = (true, true);
    flights.check(at(0));
    assert!(flights.is_sealed(ID));
    let leg = flights.take_move(ID).unwrap().leg.unwrap();
    flights.begin(FlightAttempt {
        landed: true,
        prefilled: false,
        ..leg
    });
    flights.check(at(0));
    assert_eq!((flights.moving().count(), flights.leg(handoff)), (0, None));
    let first = HandoffId {
        attempt: 0,
        ..handoff
    };
    assert_eq!(flights.successor(worker(2), first), Some(handoff));
    assert_eq!(flights.successor(worker(1), first), None);
}

#[test]
#[should_panic(expected = "changes its stage as it moves")]
fn a_moving_flight_keeps_its_stage() {
    let mut flights = running();
    move_to(&mut flights, worker(3));
    fence(&mut flights);
}

#[test]
#[should_panic(expected = "waits without a time limit")]
fn a_waiting_flight_has_a_time_limit() {
    let mut flights = running();
    flights.set_waiting(ID);
    flights.check(at(0));
}

#[test]
#[should_panic(expected = "moves to the worker that it leaves")]
fn a_flight_moves_to_another_worker() {
    let mut flights = running();
    move_to(&mut flights, worker(2));
    flights.check(at(0));
}

#[test]
fn failovers_are_counted_by_worker() {
    let mut flights = running();
    flights.fail_over(ID, WorkerId(2));
    let counts = |flights: &RouterFlights| [1, 2].map(|id| flights.failing_over_from(WorkerId(id)));
    assert_eq!(counts(&flights), [0, 1]);
    assert!(flights.end_fail_over(ID) && !flights.end_fail_over(ID));
    assert_eq!(counts(&flights), [0, 0]);
}
