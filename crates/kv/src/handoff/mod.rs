//! One hand-off of a sequence's KV from worker to worker, as two pure machines.
//!
//! Owns: [`sender::Sender`] and [`receiver::Receiver`], and the digest they compare.
//! Never: moves a byte, or knows a lease or a step: the worker's brain embeds them and says when a
//! hand-off is given up.
//! Invariant: a receiver lands only if every byte of every block it reserved was written once, in
//! its place, by the one sender it was reserved for; anything else fails closed, at both ends.

mod digest;
pub mod receiver;
pub mod sender;

pub use digest::Digest;

#[cfg(test)]
mod tests;
