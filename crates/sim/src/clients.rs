//! The clients, and what they hold the fleet to.
//!
//! Owns: each request's reference stream and what came of it. Never: looks inside a brain.
//! Invariants checked: every token is the reference's; a finished stream is whole, in order, with
//! the reference's reason; a refused one is empty; every flight ends exactly once.

use crate::model::{Reference, reference};
use crate::world::World;
use cleave_domain::{
    Emission, Ending, Failure, FlightId, HandoffId, Request, RouterId, Sampled, Time, TokenId,
};
use cleave_router::TokenStream;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) flight: FlightId,
    pub(crate) router: usize,
    pub(crate) request: Arc<Request>,
    pub(crate) submitted: bool,
    pub(crate) ending: Option<Ending>,
    reference: Reference,
    stream: TokenStream<TokenId>,
    /// What was given, in order.
    given: Vec<TokenId>,
    fenced: u32,
    left: bool,
    /// Since when it takes nothing.
    pub(crate) stalled: Option<Time>,
    /// Which attempt emitted which token, of those that are not fenced.
    emitted: BTreeMap<u32, u32>,
}

/// Everybody who asks for something.
#[derive(Debug)]
pub(crate) struct Clients {
    pub(crate) all: Vec<Client>,
    by_flight: BTreeMap<FlightId, usize>,
    calm: bool,
    pub(crate) tokens: u64,
}

/// How flights ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Endings {
    /// Every token came.
    pub done: u32,
    /// Not taken on.
    pub refused: u32,
    /// The client left.
    pub cancelled: u32,
    /// Broken off.
    pub failed: u32,
}

impl Clients {
    pub(crate) fn of(world: &World) -> Self {
        let context = world.workers[0].capacity.context_tokens_max;
        let client = |arrival: &crate::world::Arrival| Client {
            flight: FlightId::default(),
            router: arrival.router,
            reference: reference(&arrival.request, context),
            request: Arc::clone(&arrival.request),
            submitted: false,
            ending: None,
            stream: TokenStream::default(),
            given: Vec::new(),
            fenced: 0,
            left: false,
            stalled: None,
            emitted: BTreeMap::new(),
        };
        Self {
            all: world.requests.iter().map(client).collect(),
            by_flight: BTreeMap::new(),
            calm: world.calm(),
            tokens: 0,
        }
    }

    /// The client asks a router in one of its lives.
    pub(crate) fn ask(&mut self, index: usize, router: RouterId) -> FlightId {
        let flight = FlightId::new(router, index as u64);
        self.by_flight.insert(flight, index);
        let client = &mut self.all[index];
        client.submitted = true;
        client.flight = flight;
        flight
    }

    /// The router that the client asked, or was to ask, is gone: its connection ends.
    pub(crate) fn cut_off(&mut self, index: usize) {
        let client = &mut self.all[index];
        client.submitted = true;
        client
            .ending
            .get_or_insert(Ending::Failed(Failure::Draining));
    }

    /// The client takes nothing any more, or again; gives its flight if anybody must be told.
    pub(crate) fn turn(&mut self, index: usize, stalled: Option<Time>) -> Option<FlightId> {
        let client = &mut self.all[index];
        client.stalled = stalled;
        (client.submitted && client.ending.is_none()).then_some(client.flight)
    }

    /// The client leaves; says whether anybody must be told.
    pub(crate) fn leave(&mut self, index: usize) -> bool {
        let client = &mut self.all[index];
        client.left = client.submitted && client.ending.is_none();
        client.left
    }

    fn find(&mut self, flight: FlightId) -> Result<&mut Client, String> {
        let index = self.by_flight.get(&flight);
        let index = index.ok_or_else(|| format!("nobody asked for {flight}"))?;
        Ok(&mut self.all[*index])
    }

    /// Attempts up to this one give nothing more. Says what the client was given.
    pub(crate) fn fence(&mut self, handoff: HandoffId) -> Result<Vec<TokenId>, String> {
        let client = self.find(handoff.flight)?;
        client.stream.fence(handoff.attempt);
        client
            .emitted
            .retain(|_, attempt| *attempt > handoff.attempt);
        client.fenced = client.fenced.max(handoff.attempt + 1);
        Ok(client.given.clone())
    }

    /// What the client was given.
    pub(crate) fn count(&mut self, flight: FlightId) -> Result<Vec<TokenId>, String> {
        Ok(self.find(flight)?.given.clone())
    }

    pub(crate) fn token(&mut self, handoff: HandoffId, emission: Emission) -> Result<(), String> {
        self.tokens += 1;
        let flight = handoff.flight;
        let client = self.find(flight)?;
        let Emission {
            index,
            sampled,
            prompt,
        } = emission;
        let expected = client.reference.tokens.get(index as usize);
        if expected != Some(&sampled.token) {
            return Err(format!(
                "{flight} token {index} is {}, alone it is {expected:?}",
                sampled.token
            ));
        }
        match prompt {
            Some(facts) if index == 0 => {
                client.check_prompt(facts.cached_tokens, &facts.scores)?;
            }
            // The first token after a stream was resumed ends a prefill leg too; whatever it says of
            // the prompt was said before.
            Some(_) => {}
            None if index > 0 => {}
            None => return Err(format!("{flight} token 0 says nothing of its prompt")),
        }
        if client.ending.is_none() && handoff.attempt >= client.fenced {
            let first = *client.emitted.entry(index).or_insert(handoff.attempt);
            if first != handoff.attempt {
                return Err(format!(
                    "{handoff} draws token {index}, and attempt {first} did: both run"
                ));
            }
            client.stream.accept(handoff.attempt, index, sampled.token);
            while let Some((_, token)) = client.stream.poll() {
                client.given.push(token);
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
        let calm = self.calm;
        let client = self.find(flight)?;
        if let Some(before) = &client.ending {
            return Err(format!("{flight} ended twice: {before:?}, {ending:?}"));
        }
        let count = client.stream.count();
        let whole = client.reference.tokens.len() as u32;
        match &ending {
            Ending::Done { reason } => {
                if output_tokens.is_some_and(|told| told != count) {
                    return Err(format!(
                        "{flight} is done with {output_tokens:?} tokens, and {count} came"
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
                if !client.left {
                    return Err(format!("{flight} cancelled, and nobody left"));
                }
            }
            Ending::Failed(Failure::SlowReader) => {
                if client.stalled.is_none() {
                    return Err(format!("{flight} reads, and was too slow"));
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

    /// Who still waits for an end.
    pub(crate) fn waiting(&self) -> Vec<FlightId> {
        let waits = |c: &&Client| c.ending.is_none();
        self.all.iter().filter(waits).map(|c| c.flight).collect()
    }

    pub(crate) fn endings(&self) -> Endings {
        let mut endings = Endings::default();
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

impl Client {
    fn check_prompt(&self, cached_tokens: u32, scores: &[Sampled]) -> Result<(), String> {
        let prompt = &self.request.prompt;
        if cached_tokens as usize >= prompt.len() {
            return Err(format!("{} had its whole prompt cached", self.flight));
        }
        let wanted = match self.request.sampling.prompt_logprobs {
            Some(_) => &prompt[1..],
            None => &[],
        };
        let scored: Vec<TokenId> = scores.iter().map(|s| s.token).collect();
        if scored != wanted {
            return Err(format!(
                "{} got scores of {scored:?}, not {wanted:?}",
                self.flight
            ));
        }
        Ok(())
    }
}
