//! KV bytes from worker to worker.
//!
//! Owns: one [`Link`] per ordered pair of workers, in process, from device to device, over shared memory, by RDMA or over
//! TCP, the best that both have; framing, handshake, checksums, credit, heartbeats.
//! Never: decides what is sent, where a block goes or what a broken link means: it moves what it
//! is told to and reports [`LinkEvent`]s.
//! Invariant: what is sent through a link arrives whole, in any order, or the link is lost, which is
//! said once and after everything that did arrive; and a peer never has more payload bytes on their
//! way here, or held here, than it was granted.

mod address;
mod announced;
pub mod bench;
mod buffer;
mod config;
mod credit;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod handshake;
#[cfg_attr(not(target_os = "linux"), path = "no_host.rs")]
mod host;
#[cfg(all(test, target_os = "linux"))]
mod hostile;
mod incoming;
#[cfg_attr(not(target_os = "linux"), path = "no_life.rs")]
mod life;
mod link;
mod links;
mod local;
mod measure;
#[cfg_attr(not(target_os = "linux"), path = "no_nixl.rs")]
mod nixl;
mod outgoing;
mod pass;
mod payload;
mod pools;
mod setbacks;
#[cfg_attr(not(target_os = "linux"), path = "no_shared_memory.rs")]
mod shared_memory;
mod socket;
mod tcp;
mod transport;
mod wire;

pub use address::{AddressError, Addresses, HostAddress, Route};
pub use cleave_kv::checksum;
pub use config::{BEAT, CREDIT_BYTES, FRAME_BYTES_MAX, RINGS_MAX, SILENCE_MAX, STREAMS_COUNT};
pub use config::{LinkDown, LinkEvent, LinkSpeed, LinksConfig};
pub use host::HostListener;
pub use link::{Frame, Link, Permit, Room};
pub use links::{Links, Listeners};
pub use local::LocalNet;
pub use nixl::{NIXL_LIBRARY, Nixl, NixlError};
pub use pass::{PASS_BYTES, Pass, PassError, Passes, Purse};
pub use payload::{Destination, Payload};
pub use pools::{DirectPart, PeerPool, Pools, Reach};
pub use transport::Transport;
