//! The stand-in on systems without shared memory between processes: nothing listens, and no address
//! belongs to this host.

use crate::address::HostAddress;
use crate::config::{LinkEvent, LinksConfig};
use crate::handshake::DialledLink;
use crate::incoming::{IdentifiedPeer, ReceiveSession};
use crate::outgoing::PayloadChannel;
use crate::peer_process::PeerProcess;
use crate::socket::LinkError;
use cleave_domain::WorkerRef;
use std::io;
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

/// The same fields as in `host.rs`.
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
