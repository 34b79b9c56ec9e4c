//! The clients of a small world, each of which reads its stream as the HTTP side does.
//!
//! Owns: the tokens delivered to each, and the properties that only a client can see (S5 to S8).
//! Never: knows the fleet. Invariant: a token goes to the client once, in order, and only if it
//! continues exactly what the client has.
//!
//! Each worker draws with a salt of its own, so two workers that run the same sequence differ at
//! the next token, and a token of one does not continue the stream of the other.

use super::hasher::StateHasher;
use super::worlds::SmallWorld;
use crate::model::{DrawableTokens, draw_token};
use cleave_domain::{
    Emission, Ending, FinishReason, FlightId, HandoffId, POOLED_TOKEN, Request, TokenId,
};
use cleave_router::TokenStream;
use cleave_testkit::{CellConstraint, KvHash, pooled_vector};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(super) struct SmallWorldClient {
    pub(super) flight: FlightId,
    pub(super) ending: Option<Ending>,
    pub(super) submitted: bool,
    left: bool,
    /// Equal for equal states of the client.
    pub(super) hash: u64,
    request: Arc<Request>,
    delivered: Vec<TokenId>,
    stream: TokenStream<TokenId>,
    /// Attempts below this number are fenced.
    fenced: u32,
    draw_salts: u64,
}

impl SmallWorldClient {
    pub(super) fn all(small: &SmallWorld) -> Vec<Self> {
        let reader = |index| Self {
            flight: small.flight(index),
            ending: None,
            submitted: false,
            left: false,
            hash: 0,
            request: small.request(index),
            delivered: Vec::new(),
            stream: TokenStream::default(),
            fenced: 0,
            draw_salts: small.roles.len() as u64,
        };
        (0..small.requests.len()).map(reader).collect()
    }

    /// Whether a decode worker draws this client's tokens.
    pub(super) fn generates(&self) -> bool {
        self.ending.is_none() && self.delivered.len() >= 2
    }

    pub(super) fn submit(&mut self) {
        self.submitted = true;
        self.update_hash();
    }

    pub(super) fn leave(&mut self) {
        self.left = true;
        self.update_hash();
    }

    /// Fences attempts up to this one.
    pub(super) fn fence(&mut self, handoff: HandoffId) {
        self.stream.fence(handoff.attempt);
        self.fenced = self.fenced.max(handoff.attempt + 1);
        self.update_hash();
    }

    /// Tokens delivered so far.
    pub(super) fn delivered(&self) -> Arc<[TokenId]> {
        self.delivered.as_slice().into()
    }

    pub(super) fn receive_token(
        &mut self,
        handoff: HandoffId,
        emission: &Emission,
    ) -> Result<(), String> {
        if self.ending.is_some() || handoff.attempt < self.fenced {
            return Ok(());
        }
        let pooling = self.request.pooling.as_ref();
        let expected = pooling.map(|pooling| pooled_vector(pooling, &self.request.prompt));
        let facts = emission.prompt.as_ref();
        let pooled = facts.and_then(|facts| facts.pooled.clone());
        if emission.index == 0 && pooled != expected {
            return Err(format!("S6: {handoff} gives {pooled:?}, not {expected:?}"));
        }
        let (index, token) = (emission.index, emission.sampled.token);
        if let Some(before) = self.delivered.get(index as usize)
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
                    self.delivered
                ));
            }
            self.delivered.push(token);
        }
        self.update_hash();
        Ok(())
    }

    /// Whether some worker draws this token after the delivered ones.
    fn continues(&self, token: TokenId) -> bool {
        if self.request.pooling.is_some() {
            return token == POOLED_TOKEN;
        }
        let history = self.request.prompt.iter().chain(&self.delivered);
        let last = history.fold(KvHash::default(), |kv, token| kv.extend(*token));
        let position = (self.request.prompt.len() + self.delivered.len()) as u32;
        let sampling = &self.request.sampling;
        let constraint = sampling.constraint.as_deref().and_then(CellConstraint::of);
        let allowed = constraint.map(|one| one.start_after(&self.delivered).allowed());
        let drawable = DrawableTokens {
            allowed: allowed.as_deref(),
            ..DrawableTokens::default()
        };
        (1..=self.draw_salts)
            .any(|salt| draw_token(sampling.seed ^ salt << 32, position, last, drawable) == token)
    }

    pub(super) fn end(&mut self, ending: Ending) -> Result<(), String> {
        let flight = self.flight;
        if let Some(before) = &self.ending {
            return Err(format!("S5: {flight} ended twice: {before:?}, {ending:?}"));
        }
        let (count, whole) = (self.delivered.len() as u32, self.request.stop.max_tokens);
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
        self.update_hash();
        Ok(())
    }

    fn update_hash(&mut self) {
        let mut print = StateHasher::default();
        (self.submitted, self.left, self.fenced).hash(&mut print);
        self.delivered.hash(&mut print);
        // After the end neither its kind nor tokens still pending matter, so they are not hashed.
        match &self.ending {
            Some(_) => print.write_u8(1),
            None => print.write_u64(StateHasher::of_debug(&self.stream)),
        }
        self.hash = print.finish();
    }
}
