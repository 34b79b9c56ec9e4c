//! The stand-in on systems other than Linux for the transports between processes of one host, and
//! for NVIDIA's transfer library: the same names, none of whose values can be created. No peer is
//! reached, nothing listens, and a peer that asks for a ring is refused as by a worker that did not
//! find the library.

#[path = "nixl/transport.rs"]
mod transport;

pub(crate) use transport::NixlTransport;

use super::{DialChoice, DialFuture, LinkTransport, Transport};
use crate::address::{AddressScheme, PeerRoute};
use crate::config::LinksConfig;
use crate::handshake::DialledLink;
use crate::incoming::{IdentifiedPeer, LinkReceiver, ReceiveSession};
use crate::incoming_links::IncomingLinks;
use crate::link::PayloadStore;
use crate::listeners::{ListenOptions, TransportOffer};
use crate::outgoing::OutboundLink;
use crate::socket::{LinkError, MessageReader};
use crate::transports::tcp::{TcpReader, TcpWriter};
use cleave_domain::WorkerRef;
use std::future::Ready;
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::Arc;
use tokio::sync::mpsc;

/// The name by which the loader would find the library.
pub const NIXL_LIBRARY: &str = "libnixl_capi.so";

/// The reason for which links cannot use NIXL.
#[derive(Debug, thiserror::Error)]
#[error("NIXL exists on Linux only")]
pub struct NixlError;

/// Cannot exist on this system.
#[derive(Debug)]
pub enum Unsupported {}

/// The library, on this system.
pub type Nixl = Unsupported;
pub(crate) type PeerProcess = Unsupported;
pub(crate) type PendingWrites = Unsupported;
pub(crate) type RdmaWriter = Unsupported;
pub(crate) type ReceiverRing = Unsupported;
pub(crate) type SenderRing = Unsupported;
pub(crate) type SenderSlot = Unsupported;
pub(crate) type SlotView = Unsupported;

/// The shape of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingShape {
    pub(crate) slot_bytes: u32,
    pub(crate) slots_count: u32,
}

macro_rules! methods {
    ($($visible:vis $name:ident($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        #[allow(missing_docs)]
        impl Unsupported {
            /// # Errors
            /// Always.
            pub fn load(_path: Option<&Path>) -> Result<Arc<Self>, NixlError> {
                Err(NixlError)
            }

            pub(crate) fn lend_to_receiver(self) -> u32 {
                match self {}
            }

            $($visible fn $name(&self $(, _: $argument)*) $(-> $answer)? {
                match *self {}
            })*
        }
    };
}

methods! {
    pub path() -> &Path;
    pub uses_network_card() -> bool;
    pub(crate) wait_ended() -> Ready<()>;
    pub(crate) write(u32, usize);
    pub(crate) wait_until_unread(&[u32]) -> Ready<()>;
    pub(crate) wait_until_idle() -> Ready<()>;
    pub(crate) wait_until_failed() -> Ready<String>;
    pub(crate) close();
    pub(crate) slot_bytes() -> u32;
    pub(crate) view(u32, u32) -> Option<SlotView>;
    pub(crate) shape() -> RingShape;
    pub(crate) take(u32) -> SenderSlot;
    pub(crate) return_slot(u32) -> bool;
}

impl Deref for Unsupported {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match *self {}
    }
}

impl DerefMut for Unsupported {
    fn deref_mut(&mut self) -> &mut [u8] {
        match *self {}
    }
}

/// An ordinary copy, through the caches.
pub(crate) fn copy_past_caches(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

async fn receive(
    _identified: IdentifiedPeer<TcpReader, TcpWriter>,
    _session: ReceiveSession,
    nixl: &Arc<Nixl>,
    _links: &IncomingLinks,
) -> LinkError {
    match **nixl {}
}

async fn dial(
    _config: &LinksConfig,
    _peer: WorkerRef,
    nixl: &Arc<Nixl>,
    _address: &str,
) -> Result<(DialledLink<TcpReader, TcpWriter>, PayloadStore), LinkError> {
    match **nixl {}
}

pub(crate) async fn receive_ahead<R>(
    _reader: &mut MessageReader<R>,
    _link_receiver: &LinkReceiver,
    pending_writes: &PendingWrites,
    _pongs: mpsc::Sender<u64>,
) -> LinkError {
    match *pending_writes {}
}

/// The transport from device to device, which leads to no peer.
pub(crate) struct CudaIpcTransport;

impl LinkTransport for CudaIpcTransport {
    fn dial_choice<'a>(&self, _config: &LinksConfig, _route: &'a PeerRoute) -> DialChoice<'a> {
        DialChoice::Unusable
    }

    fn dial<'a>(&'a self, link: OutboundLink<'a>, address: &'a str) -> DialFuture<'a> {
        SharedMemoryTransport.dial(link, address)
    }
}

/// The transport through shared memory, which leads to no peer.
pub(crate) struct SharedMemoryTransport;

impl LinkTransport for SharedMemoryTransport {
    /// Peers on other systems announce it.
    fn scheme(&self) -> Option<AddressScheme> {
        Some(AddressScheme {
            is_addition: false,
            is_valid: |part| part.contains('/'),
        })
    }

    fn offer(&self, options: &mut ListenOptions) -> io::Result<Option<TransportOffer>> {
        if options.transports.contains(&Transport::SharedMemory) {
            Err(io::ErrorKind::Unsupported.into())
        } else {
            Ok(None)
        }
    }

    fn dial_choice<'a>(&self, _config: &LinksConfig, _route: &'a PeerRoute) -> DialChoice<'a> {
        DialChoice::Unusable
    }

    fn dial<'a>(&'a self, _link: OutboundLink<'a>, _address: &'a str) -> DialFuture<'a> {
        let reason = io::Error::from(io::ErrorKind::Unsupported).to_string();
        Box::pin(async { Err(LinkError::Transport(Transport::SharedMemory, reason)) })
    }
}
