//! Invariants between machines, asserted after every fact in tests.
//!
//! Owns: the assertions. Never: changes anything; each machine asserts its own.
//! Invariant: flights, their places in the queue and their claims on workers agree.

use crate::fleet::RouterFleet;
use crate::fleet::ledger::LegClaim;
use crate::flight::state::{FlightAttempt, FlightRecord, RouterFlights};
use crate::flight::timers::FlightTimer;
use crate::queue::FlightQueue;
use cleave_domain::Time;

/// Asserts that the queue holds the waiting flights and no others.
pub(crate) fn check_queued(flights: &RouterFlights, queue: &FlightQueue, now: Time) {
    let mut waiting = 0;
    for (id, flight) in flights.iter() {
        let queued = queue.contains(&flight.place);
        assert_eq!(
            queued,
            flight.is_waiting(),
            "{id} waits and is not in the queue, or is there and does not wait"
        );
        assert!(
            queued || !flight.pauses(now),
            "{id} pauses but is not in the queue"
        );
        waiting += u32::from(queued);
    }
    assert_eq!(
        waiting,
        queue.len(),
        "the queue holds a flight that does not wait"
    );
}

/// Asserts that every attempt has claims on its workers, as far as its legs are not over.
pub(crate) fn check_attempts(flights: &RouterFlights, fleet: &RouterFleet) {
    for (id, flight) in flights.iter() {
        let is_timed = flights.timer(id, FlightTimer::StepTimeout).is_some();
        if let Some(attempt) = flight.attempt() {
            check_attempt(flight, attempt, is_timed, fleet);
        }
    }
}

fn check_attempt(
    flight: &FlightRecord,
    attempt: &FlightAttempt,
    is_timed: bool,
    fleet: &RouterFleet,
) {
    let handoff = attempt.handoff;
    let decode = fleet.claim(attempt.decode, handoff);
    let sender = fleet.claim(attempt.prefill, attempt.sending());
    let in_doubt = attempt.leg_failure.is_some() && is_timed;
    assert!(
        attempt.finished.is_some() || decode.is_some() || in_doubt,
        "{handoff} has no claim on its decode worker"
    );
    // A decode worker that has ended the sequence has everything, whatever its sender says later.
    assert!(
        attempt.prefilled || attempt.finished.is_some() || sender.is_some(),
        "{handoff}: its sender has no claim and has not finished"
    );
    if let Some(leg) = flight.leg() {
        let held = fleet.claim(leg.decode, leg.handoff).is_some();
        assert!(
            held || leg.leg_failure.is_some(),
            "{} has no claim on its target",
            leg.handoff
        );
    }
}

/// Asserts that every renewed claim belongs to the attempt that generates, or to the one to which
/// it moves.
pub(crate) fn check_claims(flights: &RouterFlights, fleet: &RouterFleet) {
    for worker in fleet.workers() {
        let live = |claim: &LegClaim| claim.renewed;
        for (handoff, _) in worker.ledger.handoffs().filter(|(_, p)| live(p)) {
            let user = flights.current(handoff).or(flights.leg(handoff));
            let me = worker.me;
            assert!(
                user.is_some_and(|a| a.decode == me || a.prefill == me),
                "{me} renews {handoff}, which no flight needs"
            );
        }
    }
}
