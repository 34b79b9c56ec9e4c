//! Simulated clients and the promises that they check.
//!
//! Owns: each request's reference stream and outcome. Never: looks inside a brain. Invariants
//! checked: every token equals the reference's; a finished stream is complete, in order, with the
//! reference's reason; a refused one is empty; every flight ends exactly once.

use crate::model::{ReferenceStream, reference_stream};
use crate::world::ChaosWorld;
use cleave_domain::{
    Emission, Ending, Failure, FlightId, HandoffId, PromptFacts, Request, RouterId, Time, TokenId,
};
use cleave_router::TokenStream;
use cleave_testkit::pooled_vector;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct ChaosClient {
    pub(crate) flight: FlightId,
    pub(crate) router: usize,
    pub(crate) request: Arc<Request>,
    pub(crate) submitted: bool,
    pub(crate) ending: Option<Ending>,
    reference: ReferenceStream,
    stream: TokenStream<TokenId>,
    /// Tokens delivered to the client, in order.
    delivered: Vec<TokenId>,
    fenced: u32,
    has_left: bool,
    /// The time since which the client reads nothing.
    pub(crate) stalled: Option<Time>,
    /// The attempt that emitted each token index; fenced attempts are left out.
    emitted: BTreeMap<u32, u32>,
}

/// All clients of a world.
#[derive(Debug)]
pub(crate) struct ChaosClients {
    pub(crate) all: Vec<ChaosClient>,
    by_flight: BTreeMap<FlightId, usize>,
    faultless: bool,
    pub(crate) tokens: u64,
}

/// Counts of flights by their ending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndingCounts {
    pub done: u32,
    pub refused: u32,
    pub cancelled: u32,
    pub failed: u32,
}

impl ChaosClients {
    pub(crate) fn of(world: &ChaosWorld) -> Self {
        let context = world.workers[0].capacity.context_tokens_max;
        let client = |arrival: &crate::world::ChaosRequest| ChaosClient {
            flight: FlightId::default(),
            router: arrival.router,
            reference: reference_stream(&arrival.request, context),
            request: Arc::clone(&arrival.request),
            submitted: false,
            ending: None,
            stream: TokenStream::default(),
            delivered: Vec::new(),
            fenced: 0,
            has_left: false,
            stalled: None,
            emitted: BTreeMap::new(),
        };
        Self {
            all: world.requests.iter().map(client).collect(),
            by_flight: BTreeMap::new(),
            faultless: world.is_faultless(),
            tokens: 0,
        }
    }

    /// Submits the client's request to one life of a router.
    pub(crate) fn ask(&mut self, index: usize, router: RouterId) -> FlightId {
        let flight = FlightId::new(router, index as u64);
        self.by_flight.insert(flight, index);
        let client = &mut self.all[index];
        client.submitted = true;
        client.flight = flight;
        flight
    }

    /// The client's router is gone: its connection ends, or is refused.
    pub(crate) fn end_with_router(&mut self, index: usize) {
        let client = &mut self.all[index];
        client.submitted = true;
        client
            .ending
            .get_or_insert(Ending::Failed(Failure::Draining));
    }

    /// Sets whether the client reads; gives its flight if the router must be notified.
    pub(crate) fn set_stalled(&mut self, index: usize, stalled: Option<Time>) -> Option<FlightId> {
        let client = &mut self.all[index];
        client.stalled = stalled;
        (client.submitted && client.ending.is_none()).then_some(client.flight)
    }

    /// The client leaves; says whether the router must be notified.
    pub(crate) fn leave(&mut self, index: usize) -> bool {
        let client = &mut self.all[index];
        client.has_left = client.submitted && client.ending.is_none();
        client.has_left
    }

    /// The client that submitted this flight.
    pub(crate) fn index_of(&self, flight: FlightId) -> usize {
        self.by_flight[&flight]
    }

    /// Whether a flight's request has a constraint.
    pub(crate) fn is_constrained(&self, flight: FlightId) -> bool {
        let index = self.by_flight.get(&flight);
        index.is_some_and(|index| self.all[*index].request.sampling.constraint.is_some())
    }

    fn client_of(&mut self, flight: FlightId) -> Result<&mut ChaosClient, String> {
        let index = self.by_flight.get(&flight);
        let index = index.ok_or_else(|| format!("no client submitted {flight}"))?;
        Ok(&mut self.all[*index])
    }

    /// Fences a flight's attempts up to this one; gives the tokens delivered so far.
    pub(crate) fn fence(&mut self, handoff: HandoffId) -> Result<Vec<TokenId>, String> {
        let client = self.client_of(handoff.flight)?;
        client.stream.fence(handoff.attempt);
        client
            .emitted
            .retain(|_, attempt| *attempt > handoff.attempt);
        client.fenced = client.fenced.max(handoff.attempt + 1);
        Ok(client.delivered.clone())
    }

    /// The tokens delivered to a flight's client.
    pub(crate) fn delivered_tokens(&mut self, flight: FlightId) -> Result<Vec<TokenId>, String> {
        Ok(self.client_of(flight)?.delivered.clone())
    }

    pub(crate) fn receive_token(
        &mut self,
        handoff: HandoffId,
        emission: Emission,
    ) -> Result<(), String> {
        self.tokens += 1;
        let flight = handoff.flight;
        let client = self.client_of(flight)?;
        let Emission {
            index,
            sampled,
            prompt,
        } = emission;
        let expected = client.reference.tokens.get(index as usize);
        if expected != Some(&sampled.token) {
            return Err(format!(
                "{flight} token {index} is {}, the reference is {expected:?}",
                sampled.token
            ));
        }
        match prompt {
            Some(facts) if index == 0 => client.check_prompt(&facts)?,
            // The first token after a resume ends a prefill leg too; its prompt facts repeat
            // earlier ones.
            Some(_) => {}
            None if index > 0 => {}
            None => return Err(format!("{flight} token 0 has no prompt facts")),
        }
        if client.ending.is_none() && handoff.attempt >= client.fenced {
            let first = *client.emitted.entry(index).or_insert(handoff.attempt);
            if first != handoff.attempt {
                return Err(format!(
                    "{handoff} draws token {index}, which attempt {first} drew: two attempts run"
                ));
            }
            client.stream.accept(handoff.attempt, index, sampled.token);
            while let Some((_, token)) = client.stream.poll() {
                client.delivered.push(token);
            }
        }
        Ok(())
    }

    pub(crate) fn end(
        &mut self,
        flight: FlightId,
        ending: Ending,
        output_tokens: Option<u32>,
    ) -> Result<(), String> {
        let calm = self.faultless;
        let client = self.client_of(flight)?;
        if let Some(before) = &client.ending {
            return Err(format!("{flight} ended twice: {before:?}, {ending:?}"));
        }
        let count = client.stream.count();
        let whole = client.reference.tokens.len() as u32;
        match &ending {
            Ending::Done { reason } => {
                if output_tokens.is_some_and(|reported| reported != count) {
                    return Err(format!(
                        "{flight} is done with {output_tokens:?} tokens, but {count} came"
                    ));
                }
                if count != whole || *reason != client.reference.reason {
                    return Err(format!(
                        "{flight} is done ({reason:?}) after {count} of {whole} tokens ({:?})",
                        client.reference.reason
                    ));
                }
            }
            Ending::Refused(refusal) => {
                if count > 0 {
                    return Err(format!(
                        "{flight} refused ({refusal:?}) after {count} tokens"
                    ));
                }
            }
            Ending::Cancelled => {
                if !client.has_left {
                    return Err(format!(
                        "{flight} was cancelled, but its client did not leave"
                    ));
                }
            }
            Ending::Failed(Failure::SlowReader) => {
                if client.stalled.is_none() {
                    return Err(format!(
                        "{flight} ended for a slow reader, but its client reads"
                    ));
                }
            }
            Ending::Failed(failure) => {
                if calm {
                    return Err(format!("{flight} failed without a fault: {failure:?}"));
                }
            }
        }
        client.ending = Some(ending);
        Ok(())
    }

    /// Flights that have not ended.
    pub(crate) fn unended_flights(&self) -> Vec<FlightId> {
        let waits = |c: &&ChaosClient| c.ending.is_none();
        self.all.iter().filter(waits).map(|c| c.flight).collect()
    }

    pub(crate) fn endings(&self) -> EndingCounts {
        let mut endings = EndingCounts::default();
        for client in &self.all {
            match &client.ending {
                Some(Ending::Done { .. }) => endings.done += 1,
                Some(Ending::Refused(_)) => endings.refused += 1,
                Some(Ending::Cancelled) => endings.cancelled += 1,
                Some(Ending::Failed(_)) => endings.failed += 1,
                None => {}
            }
        }
        endings
    }
}

impl ChaosClient {
    fn check_prompt(&self, facts: &PromptFacts) -> Result<(), String> {
        let prompt = &self.request.prompt;
        let PromptFacts {
            cached_tokens,
            scores,
            timing: _,
            pooled,
        } = facts;
        let pooling = self.request.pooling.as_ref();
        let expected = pooling.map(|pooling| pooled_vector(pooling, prompt));
        if *pooled != expected {
            let flight = self.flight;
            return Err(format!("{flight} got {pooled:?}, not {expected:?}"));
        }
        let cached_tokens = *cached_tokens;
        if cached_tokens as usize >= prompt.len() {
            return Err(format!("{} had its whole prompt cached", self.flight));
        }
        let requested = match self.request.sampling.prompt_logprobs {
            Some(_) => &prompt[1..],
            None => &[],
        };
        let scored: Vec<TokenId> = scores.iter().map(|s| s.token).collect();
        if scored != requested {
            return Err(format!(
                "{} got scores of {scored:?}, not {requested:?}",
                self.flight
            ));
        }
        Ok(())
    }
}
