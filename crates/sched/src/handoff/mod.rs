//! Hand-offs with other workers, and the end of every sequence.
//!
//! Owns: packets, moves to other workers, and the one way to end. Never: judges a frame itself, or
//! frees a block that a step, a copy or another worker may touch.

mod close;
mod fenced;
mod migrate;
mod packets;
mod recently_ended;
mod resend;

pub(crate) use close::CloseReason;
pub(crate) use fenced::FencedPeers;
pub(crate) use migrate::OutboundMigration;
pub(crate) use recently_ended::{EndedHandoff, RecentlyEnded};
pub(crate) use resend::Resends;
