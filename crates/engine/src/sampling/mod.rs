//! Drawing tokens on the host.
//!
//! Owns: a slot's sampling state and the rules of
//! [`SamplingParams`](cleave_domain::SamplingParams), in the order documented there: constraint,
//! bias (and the ban on stop tokens), penalties, top-n-sigma, temperature, top-k, top-p, min-p,
//! then one draw keyed by seed and position.
//! Never: keeps state between draws: a draw depends on logits, history and seed only.
//! Invariant: the same logits, history and sampling give the same token on every machine.

mod draw;
mod philox;
mod select;
mod sigma;
mod slot;
mod softmax;
#[cfg(test)]
mod tests;

pub(crate) use draw::{DrawError, TokenSampler};
pub(crate) use slot::{PendingToken, SamplingSlot, check};
