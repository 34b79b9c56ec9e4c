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

use serde::{Deserialize, Serialize};

/// How frames from other workers reach a worker's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Writer {
    /// This worker writes them, by `Import` (TCP, shared memory): a late frame is dropped, and harms
    /// nobody.
    Receiver,
    /// The sender writes into the pool itself (CUDA IPC, RDMA) and the frame only tells of it;
    /// `Import` then means to verify it in place. Blocks of a hand-off that ended before it landed stay
    /// in quarantine until the sender said `Stopped` or cannot reach them any more.
    Sender,
}

#[cfg(test)]
mod tests;
