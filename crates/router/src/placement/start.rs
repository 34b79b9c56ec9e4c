//! The start of an attempt: its claims, and its first order.
//!
//! Owns: the start. Never: chooses a placement, or knows the further way of the attempt.
//! Invariant: both legs are claimed before anything is sent.

use crate::event::{DecisionOutcome, RouterNote};
use crate::flight::end::FlightEndings;
use crate::flight::state::FlightAttempt;
use crate::flight::timers::FlightTimer;
use crate::placement::admit::FlightAdmission;
use crate::placement::candidates::ChosenPlacement;
use crate::placement::policy::AttemptSize;
use cleave_domain::{FlightId, Order, ReserveOrder, RunOrder};
use std::sync::Arc;

impl FlightAdmission<'_> {
    /// Begins an attempt: both legs are claimed, and either one worker is ordered to run them or
    /// the decode leg is ordered first.
    pub(crate) fn start(&mut self, id: FlightId, placement: &ChosenPlacement) {
        let choice = &placement.choice;
        self.ends.decide(
            id,
            DecisionOutcome::Placed(choice.reason),
            placement.considered.clone(),
        );
        let FlightEndings {
            legs,
            queue,
            tally,
            scaling,
        } = &mut self.ends;
        let (now, limits) = (legs.context.now, legs.context.limits);
        let context_tokens_max = legs.fleet.context_tokens_max(choice.decode);
        let fingerprint = legs.fleet.fingerprint(choice.decode).cloned();
        let Some(flight) = legs.flights.get_mut(id) else {
            return;
        };
        let request = Arc::clone(&flight.request);
        let ask = AttemptSize::of(&request, limits.expected_output_tokens);
        tally.charge_expected(flight, &ask, &limits.policy);
        flight.due = flight.due_at(placement.forecast.as_ref(), now);
        flight.drawn_by = fingerprint;
        let handoff = flight.name_attempt();
        flight.forecast = placement.forecast;
        flight.timestamps.began = Some(now);
        if choice.prefill == choice.decode {
            flight.timestamps.ordered = Some(now);
        }
        flight.pause_until = None;
        queue.leave(&flight.place);
        let waited = now.since(flight.submitted);
        let due = flight.deadline(limits, now);
        let (prefill, decode) = (choice.prefill, choice.decode);
        legs.flights.begin(FlightAttempt::new(
            handoff,
            prefill,
            decode,
            context_tokens_max,
        ));
        legs.flights.set_timer(id, FlightTimer::RetryDelay, None);
        legs.fleet.claim_legs(handoff, placement, &ask);
        queue.count_placement(now);
        let until = now + limits.reserve_timeout;
        legs.flights
            .set_timer(id, FlightTimer::StepTimeout, Some(until));
        self.leases.begin(now, limits);
        scaling.placed(now, handoff, choice.cached_tokens);
        legs.note(RouterNote::Placed {
            handoff,
            prefill,
            decode,
            cached_tokens: choice.cached_tokens,
            waited,
        });
        // The prompt comes after the decode worker's answer, which may load the adapter first: the
        // prefill worker loads it meanwhile.
        if let Some(adapter) = request.adapter.filter(|_| prefill != decode) {
            legs.send_order(prefill, Order::FetchAdapter { adapter });
        }
        let expected_output_tokens = limits.expected_output_tokens;
        let order = if prefill == decode {
            Order::Run(RunOrder {
                handoff,
                request,
                expected_output_tokens,
                waited,
                due,
            })
        } else {
            Order::Reserve(ReserveOrder {
                handoff,
                request,
                sender: prefill,
                expected_output_tokens,
                ahead_tokens: 0,
                waited,
                due,
            })
        };
        legs.send_order(decode, order);
    }
}
