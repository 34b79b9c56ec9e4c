//! One hand-off of a sequence's KV from worker to worker, as two pure machines.
//!
//! Owns: [`sender::HandoffSender`] and [`receiver::HandoffReceiver`], and the digest that they
//! compare. Never: moves a byte, or knows a lease or a step; the brain of the worker embeds the
//! machines and decides when a hand-off is given up. Invariant: a receiver lands only if every byte
//! of every block it reserved, and of the state, was written once, in its place, by the one sender
//! it was reserved for; anything else fails the hand-off, at both ends.

mod digest;
pub mod receiver;
pub mod sender;

pub use digest::HandoffDigest;

use serde::{Deserialize, Serialize};

/// The worker that writes frames into the pool of the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PoolWriter {
    /// The receiver writes them, by `Import` (TCP, shared memory): a late frame is dropped,
    /// and changes nothing.
    Receiver,
    /// The sender writes into the pool itself (CUDA IPC, RDMA), and the frame only reports it;
    /// `Import` then means to verify the bytes in place. Blocks of a hand-off that ended
    /// before it landed stay in quarantine until the sender sent `Stopped` or is fenced.
    Sender,
}

#[cfg(test)]
mod tests;
