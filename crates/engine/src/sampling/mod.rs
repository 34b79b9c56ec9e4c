//! Drawing tokens.
//!
//! Owns: a slot's sampling state and the rules of [`Sampling`], in the order documented there:
//! bias (and the ban on stop tokens), penalties, temperature, top-k, top-p, min-p, then one draw
//! keyed by seed and position.
//! Never: remembers a draw: what comes next depends on logits, history and seed alone.
//! Invariant: the same logits, history and sampling give the same token on every machine.

mod draw;
mod philox;
mod select;
mod slot;
mod softmax;
#[cfg(test)]
mod tests;

pub(crate) use draw::Sampler;
pub(crate) use slot::{Slot, Untold, check};
