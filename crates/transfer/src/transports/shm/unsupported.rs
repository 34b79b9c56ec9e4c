//! The stand-in on systems without shared memory between processes: nothing listens, no address
//! belongs to this host, and no ring can be created.

use super::{DialChoice, DialFuture, LinkTransport, Transport};
use crate::address::{AddressScheme, PeerRoute};
use crate::config::LinksConfig;
use crate::listeners::{ListenOptions, TransportOffer};
use crate::outgoing::OutboundLink;
use crate::socket::LinkError;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

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
