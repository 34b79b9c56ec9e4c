//! The stand-in on systems without shared memory between processes: nothing listens, and no address
//! belongs to this host.

use crate::address::HostAddress;
use crate::config::{LinkEvent, LinksConfig};
use crate::handshake::DialledLink;
use crate::incoming::{IdentifiedPeer, ReceiveSession};
use crate::outgoing::PayloadChannel;
use crate::socket::LinkError;
use crate::transports::cuda_ipc::PeerProcess;
use cleave_domain::WorkerRef;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

/// Cannot exist on this system.
#[derive(Debug)]
pub enum HostListener {}

/// Cannot exist on this system.
pub(crate) enum HostStream {}

pub(crate) type HostPeer = IdentifiedPeer<OwnedReadHalf, OwnedWriteHalf>;
pub(crate) type HostDialled = DialledLink<OwnedReadHalf, OwnedWriteHalf>;

impl HostListener {
    /// Always fails on this system.
    ///
    /// # Errors
    /// Always `Unsupported`.
    pub fn bind() -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The address that would be announced to peers.
    pub fn address(&self) -> &HostAddress {
        match *self {}
    }

    pub(crate) async fn accept(&self) -> io::Result<HostStream> {
        match *self {}
    }
}

pub(crate) fn is_this_host(_address: &HostAddress) -> bool {
    false
}

/// The same fields as in `mod.rs`.
pub(crate) struct PoolGate<'a> {
    pub(crate) events: &'a mpsc::Sender<LinkEvent>,
    pub(crate) grant_pool:
        &'a (dyn Fn(WorkerRef, PeerProcess) -> Result<Vec<u8>, String> + Send + Sync),
}

pub(crate) async fn identify(
    _config: &LinksConfig,
    stream: HostStream,
) -> Result<HostPeer, LinkError> {
    match stream {}
}

pub(crate) async fn receive(
    _identified: HostPeer,
    _session: ReceiveSession,
    _config: &LinksConfig,
    _gate: PoolGate<'_>,
) -> LinkError {
    LinkError::Closing
}

pub(crate) async fn dial(
    _config: &LinksConfig,
    _peer: WorkerRef,
    _address: &HostAddress,
) -> Result<(DialledLink<OwnedReadHalf, OwnedWriteHalf>, PayloadChannel), LinkError> {
    Err(LinkError::SharedMemory(io::ErrorKind::Unsupported.into()))
}

/// The shape of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingShape {
    pub(crate) slot_bytes: u32,
    pub(crate) slots_count: u32,
}

/// Cannot exist on this system.
#[derive(Debug)]
pub(crate) enum ReceiverRing {}

/// Cannot exist on this system.
#[derive(Debug)]
pub(crate) enum SlotView {}

/// Cannot exist on this system.
#[derive(Debug)]
pub(crate) enum SenderRing {}

/// Cannot exist on this system.
#[derive(Debug)]
pub(crate) enum SenderSlot {}

impl ReceiverRing {
    pub(crate) fn slot_bytes(&self) -> u32 {
        match *self {}
    }

    pub(crate) fn view(&self, _slot: u32, _len: u32) -> Option<SlotView> {
        match *self {}
    }
}

impl SenderRing {
    pub(crate) fn shape(&self) -> RingShape {
        match *self {}
    }

    pub(crate) fn take(self: &Arc<Self>, _len: u32) -> SenderSlot {
        match **self {}
    }

    pub(crate) fn return_slot(&self, _slot: u32) -> bool {
        match *self {}
    }
}

impl SenderSlot {
    pub(crate) fn lend_to_receiver(self) -> u32 {
        match self {}
    }
}

impl Deref for SlotView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match *self {}
    }
}

impl Deref for SenderSlot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match *self {}
    }
}

impl DerefMut for SenderSlot {
    fn deref_mut(&mut self) -> &mut [u8] {
        match *self {}
    }
}

/// An ordinary copy, through the caches.
pub(crate) fn copy_past_caches(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}
