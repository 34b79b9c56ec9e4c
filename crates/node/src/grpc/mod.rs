//! Lines between processes: one gRPC stream per worker and router, dialled by the worker.
//!
//! Owns: the conversation at the start, heartbeats both ways, reconnecting. Never: shows a wire
//! type to anyone else. Invariant: a stream on which nothing was heard for [`SILENCE_MAX`] is lost,
//! at both ends.

mod resolve;
mod service;
mod uplink;

pub(crate) use service::{ModelDesk, fleet_service};
pub(crate) use uplink::Uplink;

use cleave_transfer::{BEAT, SILENCE_MAX};
use std::time::Duration;

/// How long connecting and the router's greeting may take, each.
const DIAL_MAX: Duration = Duration::from_secs(10);
/// How long a worker may take to introduce itself: its tokenizer crosses the network.
const HELLO_MAX: Duration = Duration::from_secs(60);
/// How long a router may take to read a tokenizer before it welcomes.
const WELCOME_MAX: Duration = Duration::from_secs(120);
/// Largest message from a worker: its hello, with a tokenizer of up to 64 MiB and templates.
const UPWARD_BYTES_MAX: usize = 96 << 20;
/// Largest message from a router: a prompt of a few million tokens.
const DOWNWARD_BYTES_MAX: usize = 32 << 20;
/// Messages between the pump and the socket; the line behind it holds the rest.
const STREAM_ITEMS_MAX: usize = 256;
