//! Where memory cannot be shared between processes: nobody listens, and no address is of this host.

use crate::address::HostAddress;
use crate::config::{LinkEvent, LinksConfig};
use crate::incoming::{Seat, Visitor};
use crate::life::PeerProcess;
use crate::outgoing::{Carriage, Dialled};
use crate::socket::SocketError;
use cleave_domain::WorkerRef;
use std::io;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

/// There is none.
#[derive(Debug)]
pub enum HostListener {}

/// There is none.
pub(crate) enum HostStream {}

pub(crate) type HostVisitor = Visitor<OwnedReadHalf, OwnedWriteHalf>;
pub(crate) type HostDialled = Dialled<OwnedReadHalf, OwnedWriteHalf>;

impl HostListener {
    /// Cannot be done here.
    ///
    /// # Errors
    /// Always `Unsupported`.
    pub fn bind() -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// What peers would be told.
    pub fn address(&self) -> &HostAddress {
        match *self {}
    }

    pub(crate) async fn accept(&self) -> io::Result<HostStream> {
        match *self {}
    }
}

/// Never.
pub(crate) fn is_here(_address: &HostAddress) -> bool {
    false
}

/// As where there are hosts.
pub(crate) struct Gate<'a> {
    pub(crate) events: &'a mpsc::Sender<LinkEvent>,
    pub(crate) give: &'a (dyn Fn(WorkerRef, PeerProcess) -> Result<Vec<u8>, String> + Send + Sync),
}

pub(crate) async fn greet(
    _config: &LinksConfig,
    stream: HostStream,
) -> Result<HostVisitor, SocketError> {
    match stream {}
}

pub(crate) async fn receive(
    _visitor: HostVisitor,
    _seat: Seat,
    (_config, _gate): (&LinksConfig, Gate<'_>),
) -> SocketError {
    SocketError::Closing
}

pub(crate) async fn dial(
    _config: &LinksConfig,
    _peer: WorkerRef,
    _address: &HostAddress,
) -> Result<(Dialled<OwnedReadHalf, OwnedWriteHalf>, Carriage), SocketError> {
    Err(SocketError::SharedMemory(io::ErrorKind::Unsupported.into()))
}
