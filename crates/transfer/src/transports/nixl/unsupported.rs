//! The stand-in on systems without NVIDIA's transfer library: the same items, which cannot be
//! created. Peers that ask for a ring are refused as by a worker that did not find the library.

mod transport;

pub(crate) use transport::NixlTransport;

use crate::config::LinksConfig;
use crate::handshake::DialledLink;
use crate::incoming::{IdentifiedPeer, LinkReceiver, ReceiveSession};
use crate::incoming_links::IncomingLinks;
use crate::link::PayloadStore;
use crate::socket::{LinkError, MessageReader};
use crate::transports::tcp::{TcpReader, TcpWriter};
use cleave_domain::WorkerRef;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::mpsc;

/// The name by which the loader would find the library.
pub const NIXL_LIBRARY: &str = "libnixl_capi.so";

/// Cannot exist on this system.
#[derive(Debug)]
pub enum Nixl {}

/// The reason for which links cannot use NIXL.
#[derive(Debug, thiserror::Error)]
#[error("NIXL exists on Linux only")]
pub struct NixlError;

impl Nixl {
    /// Always fails on this system.
    ///
    /// # Errors
    /// Always.
    pub fn load(_path: Option<&Path>) -> Result<Arc<Self>, NixlError> {
        Err(NixlError)
    }

    /// The path that the library was loaded from.
    pub fn path(&self) -> &Path {
        match *self {}
    }

    /// Whether network cards carry the bytes.
    pub fn uses_network_card(&self) -> bool {
        match *self {}
    }
}

/// Cannot exist on this system.
#[derive(Debug)]
pub(crate) enum PendingWrites {}

/// Cannot exist on this system.
#[derive(Debug)]
pub(crate) enum RdmaWriter {}

impl RdmaWriter {
    pub(crate) fn write(&self, _number: u32, _len: usize) {
        match *self {}
    }

    pub(crate) async fn wait_until_unread(&self, _slots: &[u32]) {
        match *self {}
    }

    pub(crate) async fn wait_until_idle(&self) {
        match *self {}
    }

    pub(crate) async fn wait_until_failed(&self) -> String {
        match *self {}
    }

    pub(crate) fn close(&self) {
        match *self {}
    }
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
