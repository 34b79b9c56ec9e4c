//! The end of a flight.
//!
//! Owns: the output of the end with its verdict, and the settlement of its account. Never: decides
//! that a flight is over. Invariant: a flight ends once, and leaves nothing but legs that its
//! workers have yet to release.

use crate::accounting::tally::ServiceTally;
use crate::event::{
    CancelReason, DecisionOutcome, PlacementDecision, RequestForecast, RouterNote, RouterOutput,
};
use crate::flight::legs::LegRules;
use crate::flight::state::{FlightRecord, SequenceEnd};
use crate::placement::rules::PlacementRules;
use crate::queue::FlightQueue;
use crate::scaling::Autoscaling;
use cleave_domain::{Ending, Failure, FlightId, Refusal};

/// The rules of ending, over the legs of flights and all that keeps count of flights.
#[derive(Debug)]
pub(crate) struct FlightEndings<'a> {
    pub(crate) legs: LegRules<'a>,
    pub(crate) queue: &'a mut FlightQueue,
    pub(crate) tally: &'a mut ServiceTally,
    pub(crate) scaling: &'a mut Autoscaling,
}

impl FlightEndings<'_> {
    pub(crate) fn rules(&self) -> PlacementRules<'_> {
        PlacementRules {
            now: self.legs.context.now,
            limits: self.legs.context.limits,
            fleet: self.legs.fleet,
            tally: self.tally,
        }
    }

    pub(crate) fn flight(&self, id: FlightId) -> Option<&FlightRecord> {
        self.legs.flights.get(id)
    }

    /// Handles the cancel of a client.
    pub(crate) fn cancelled(&mut self, id: FlightId, why: CancelReason) {
        let Some(flight) = self.flight(id) else {
            // It ended while the client was leaving.
            return;
        };
        let stage = flight.cancel_stage();
        self.legs.drop_legs(id, Failure::Rejected);
        let LegRules {
            context,
            fleet,
            releases,
            ..
        } = &mut self.legs;
        releases.cancel(id, stage, fleet, context);
        self.end_with(id, Ending::Cancelled, None, why);
    }

    /// Ends a flight whose client is connected but has not read for too long.
    pub(crate) fn reader_timed_out(&mut self, id: FlightId) {
        self.legs.drop_legs(id, Failure::SlowReader);
        self.end(id, Ending::Failed(Failure::SlowReader));
    }

    /// Ends the flight. The caller has dropped its legs before.
    pub(crate) fn end(&mut self, id: FlightId, ending: Ending) {
        self.end_with(id, ending, None, CancelReason::Left);
    }

    pub(crate) fn refuse(
        &mut self,
        id: FlightId,
        refusal: Refusal,
        considered: Vec<RequestForecast>,
    ) {
        self.decide(id, DecisionOutcome::Refused(refusal.clone()), considered);
        self.end(id, Ending::Refused(refusal));
    }

    /// Ends a flight of which every token was produced.
    pub(crate) fn finish(&mut self, id: FlightId, finish: SequenceEnd) {
        self.legs.drop_legs(id, Failure::Rejected);
        let SequenceEnd {
            reason,
            output_tokens,
        } = finish;
        let ending = Ending::Done { reason };
        self.end_with(id, ending, Some(output_tokens), CancelReason::Left);
    }

    fn end_with(
        &mut self,
        id: FlightId,
        ending: Ending,
        output_tokens: Option<u32>,
        why: CancelReason,
    ) {
        let Some(flight) = self.legs.flights.remove(id) else {
            return;
        };
        self.queue.leave(&flight.place);
        let context = &mut self.legs.context;
        let outcome = flight.verdict(&ending, why, output_tokens, context.now);
        let timing = outcome.timing;
        let policy = &context.limits.policy;
        self.tally
            .learn_answer(&flight, &outcome, policy, context.now);
        self.scaling.judged(context.now, &flight, &outcome);
        context.note(RouterNote::Judged {
            flight: id,
            class: flight.request.slo.class.clone(),
            tenant: flight.request.slo.tenant.clone(),
            verdict: outcome.verdict,
            timing,
            output_tokens: outcome.output_tokens,
            forecast: flight.forecast.map(|forecast| Box::new(forecast.request)),
        });
        let output = output_tokens.unwrap_or(flight.request.generated.len() as u32);
        let served = match ending {
            Ending::Refused(_) => 0,
            _ => flight.request.prompt.len() as i64 + i64::from(output),
        };
        self.tally.settle(&flight, served, policy);
        context.emit(RouterOutput::End {
            flight: id,
            ending,
            output_tokens,
            timing,
        });
    }

    /// Notes a decision about the flight and its reasons.
    pub(crate) fn decide(
        &mut self,
        id: FlightId,
        outcome: DecisionOutcome,
        considered: Vec<RequestForecast>,
    ) {
        let context = &mut self.legs.context;
        let Some(flight) = self.legs.flights.get(id) else {
            return;
        };
        let slo = &flight.request.slo;
        let named = &flight.class(&context.limits.policy).name;
        let decision = PlacementDecision {
            flight: id,
            class: slo.class.clone(),
            tenant: slo.tenant.clone(),
            waited: context.now.since(flight.submitted),
            ttft_permille: self.tally.ttft(named, context.now).permille(),
            tpot_permille: self.tally.tpot(named, context.now).permille(),
            considered,
            outcome,
        };
        context.note(RouterNote::Decided(Box::new(decision)));
    }
}
