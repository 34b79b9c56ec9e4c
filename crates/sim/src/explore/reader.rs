//! The clients of a small world, each of which reads its stream as the HTTP face does.
//!
//! Owns: what each was given, and the properties that only a client can see (S5 to S8).
//! Never: knows the fleet. Invariant: a token goes to the client once, in order, and only if it
//! continues exactly what the client has.
//!
//! Each worker draws with a voice of its own, so two workers that run the same sequence part at the
//! next token, and what one of them says does not continue what the other has said.

use super::print::Print;
use super::small::Small;
use crate::model::{Kv, draw};
use cleave_domain::{Emission, Ending, FinishReason, FlightId, HandoffId, Request, TokenId};
use cleave_router::TokenStream;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// One client.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    pub(super) flight: FlightId,
    pub(super) ending: Option<Ending>,
    pub(super) submitted: bool,
    left: bool,
    /// The same for the same client.
    pub(super) print: u64,
    request: Arc<Request>,
    given: Vec<TokenId>,
    stream: TokenStream<TokenId>,
    /// Attempts below this are over.
    fenced: u32,
    voices: u64,
}

impl Reader {
    pub(super) fn all(small: &Small) -> Vec<Self> {
        let reader = |index| Self {
            flight: small.flight(index),
            ending: None,
            submitted: false,
            left: false,
            print: 0,
            request: small.request(index),
            given: Vec::new(),
            stream: TokenStream::default(),
            fenced: 0,
            voices: small.roles.len() as u64,
        };
        (0..small.requests.len()).map(reader).collect()
    }

    /// Whether a decode worker draws for it.
    pub(super) fn generates(&self) -> bool {
        self.ending.is_none() && self.given.len() >= 2
    }

    /// It asks.
    pub(super) fn submit(&mut self) {
        self.submitted = true;
        self.reprint();
    }

    /// It leaves.
    pub(super) fn leave(&mut self) {
        self.left = true;
        self.reprint();
    }

    /// Attempts up to this one give nothing more.
    pub(super) fn fence(&mut self, handoff: HandoffId) {
        self.stream.fence(handoff.attempt);
        self.fenced = self.fenced.max(handoff.attempt + 1);
        self.reprint();
    }

    /// What it was given so far.
    pub(super) fn given(&self) -> Arc<[TokenId]> {
        self.given.as_slice().into()
    }

    pub(super) fn token(&mut self, handoff: HandoffId, emission: &Emission) -> Result<(), String> {
        if self.ending.is_some() || handoff.attempt < self.fenced {
            return Ok(());
        }
        let (index, token) = (emission.index, emission.sampled.token);
        if let Some(before) = self.given.get(index as usize)
            && *before != token
        {
            return Err(format!(
                "S7: {handoff} draws token {index} again, {token} and not {before}"
            ));
        }
        self.stream.accept(handoff.attempt, index, token);
        while let Some((index, token)) = self.stream.poll() {
            if !self.continues(token) {
                return Err(format!(
                    "S6: {handoff} token {index} = {token} does not continue {:?}",
                    self.given
                ));
            }
            self.given.push(token);
        }
        self.reprint();
        Ok(())
    }

    /// Whether some worker draws this after what the client has.
    fn continues(&self, token: TokenId) -> bool {
        let history = self.request.prompt.iter().chain(&self.given);
        let last = history.fold(Kv::default(), |kv, token| kv.then(*token));
        let position = (self.request.prompt.len() + self.given.len()) as u32;
        let seed = self.request.sampling.seed;
        (1..=self.voices).any(|voice| draw(seed ^ voice << 32, position, last, &[]) == token)
    }

    pub(super) fn end(&mut self, ending: Ending) -> Result<(), String> {
        let flight = self.flight;
        if let Some(before) = &self.ending {
            return Err(format!("S5: {flight} ended twice: {before:?}, {ending:?}"));
        }
        let (count, whole) = (self.given.len() as u32, self.request.stop.max_tokens);
        let fits = match &ending {
            Ending::Done { reason } => count == whole && *reason == FinishReason::Length,
            Ending::Refused(_) => count == 0,
            Ending::Cancelled => self.left,
            Ending::Failed(_) => true,
        };
        if !fits {
            return Err(format!(
                "S6: {flight} ended {ending:?} after {count} of {whole} tokens"
            ));
        }
        self.ending = Some(ending);
        self.reprint();
        Ok(())
    }

    fn reprint(&mut self) {
        let mut print = Print::default();
        (self.submitted, self.left, self.fenced).hash(&mut print);
        self.given.hash(&mut print);
        // What it ended with matters to nobody any more, nor what waits for it.
        match &self.ending {
            Some(_) => print.write_u8(1),
            None => print.write_u64(Print::of_words(&self.stream)),
        }
        self.print = print.finish();
    }
}
