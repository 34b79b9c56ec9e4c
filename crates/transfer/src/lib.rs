//! KV bytes from worker to worker.
//!
//! Owns: one [`Link`] per ordered pair of workers, in process or over TCP; framing, handshake,
//! checksums, credit, heartbeats.
//! Never: decides what is sent, where a block goes or what a broken link means: it moves what it
//! is told to and reports [`LinkEvent`]s.
//! Invariant: a link keeps the order of what is sent through it, and a peer never has more payload
//! bytes on their way here, or held here, than it was granted.

mod config;
mod credit;
mod incoming;
mod link;
mod links;
mod local;
mod outgoing;
mod payload;
mod socket;
mod wire;

pub use config::{BEAT, CREDIT_BYTES, SILENCE_MAX};
pub use config::{LinkDown, LinkEvent, LinkSpeed, LinksConfig, Route};
pub use link::{Frame, Link, Permit};
pub use links::Links;
pub use local::LocalNet;
pub use payload::Payload;

/// The checksum of a frame's payload: XXH3-64, seed 0.
pub fn checksum(payload: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(payload)
}
