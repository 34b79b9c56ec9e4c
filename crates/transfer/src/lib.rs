//! Carries KV bytes from worker to worker.
//!
//! Owns: one [`Link`] per ordered pair of workers, over the best transport that both have (in
//! process, device to device, shared memory, RDMA, TCP); framing, handshake, checksums, credit,
//! heartbeats.
//! Never: decides which blocks are sent, where a block goes or how a broken link is handled. It
//! carries what the worker sends and reports [`LinkEvent`]s.
//! Invariant: everything sent through a link arrives whole, in any order, or the link is lost. The
//! loss is reported once, after everything that arrived. A peer never has more payload bytes on the
//! way here, or held here, than it was granted.

#![warn(missing_docs)]

mod address;
pub mod bench;
mod buffer;
mod config;
mod credit;
mod dial_backoff;
mod encoding;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod grant;
mod handshake;
#[cfg(all(test, target_os = "linux"))]
mod hostile;
mod incoming;
mod incoming_links;
mod link;
mod links;
mod listeners;
mod measure;
mod outgoing;
mod payload;
mod peer_routes;
mod pools;
mod socket;
mod transports;
mod wire;

pub use address::{DataAddressError, DataAddresses, PeerRoute};
pub use cleave_kv::checksum;
pub use config::{BEAT, CREDIT_BYTES, FRAME_BYTES_MAX, RINGS_MAX, SILENCE_MAX, STREAMS_COUNT};
pub use config::{LinkDown, LinkEvent, LinkSpeed, LinksConfig};
pub use encoding::decode_bounded;
pub use grant::{GRANT_BYTES, GrantIssuer, GrantStore, WriteGrant, WriteGrantError};
pub use link::{Frame, FrameBuffer, Link, SendPermit};
pub use links::Links;
pub use listeners::{ListenOptions, Listeners, OpenedListeners};
pub use payload::{PayloadDestination, ReceivedPayload};
pub use pools::{DirectCopy, PeerPool, PoolAccess, PoolSharing};
pub use transports::local::LocalNet;
pub use transports::nixl::{NIXL_LIBRARY, Nixl, NixlError};
pub use transports::{Transport, TransportReach};
