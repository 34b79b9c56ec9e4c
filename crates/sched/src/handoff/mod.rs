//! Hand-offs with other workers, and the end of every sequence.
//!
//! Owns: packets, moves to other workers, and the one way to end. Never: judges a frame itself, or
//! frees a block that a step, a copy or another worker may touch.
//! Invariant: `Released` is reported exactly once for each hand-off that was accepted, and last.
//!
//! [`Handoffs`] is one group of rules because each calls the others: a packet may end a sequence, a
//! sequence that ends gives up its move and sends packets, and the last answer to these releases
//! its blocks. It borrows the machines that this needs; the steps, the routers and the choice of
//! the next step are out of its reach. The state of hand-offs is in [`PeerTraffic`].

mod close;
mod export;
mod fenced;
mod migrate;
mod packets;
mod peers;
mod recently_ended;
mod resend;

pub(crate) use close::CloseReason;
pub(crate) use export::ReadyBlocks;
pub(crate) use peers::PeerTraffic;
pub(crate) use recently_ended::EndedHandoff;

use crate::context::WorkerContext;
use crate::forecast::WorkForecast;
use crate::memory::KvMemory;
use crate::sequences::SequenceTable;
use fenced::FencedPeers;
use migrate::OutboundMigration;
use recently_ended::RecentlyEnded;
use resend::Resends;

/// The rules of hand-offs and of the end of a sequence.
pub(crate) struct Handoffs<'a> {
    pub(crate) context: &'a mut WorkerContext,
    pub(crate) sequences: &'a mut SequenceTable,
    pub(crate) memory: &'a mut KvMemory,
    pub(crate) peers: &'a mut PeerTraffic,
    /// Learns the prices of links, and predicts how long frames take.
    pub(crate) forecast: &'a mut WorkForecast,
}
