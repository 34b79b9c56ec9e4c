//! Where NVIDIA's transfer library does not exist: the same words, and no way to say them.

use crate::config::{LinkEvent, LinksConfig};
use crate::handshake::Dialled;
use crate::incoming::{Seat, Visitor};
use crate::link::Store;
use crate::socket::SocketError;
use crate::tcp::{TcpReader, TcpWriter};
use cleave_domain::WorkerRef;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc};

/// What the loader would know the library by.
pub const NIXL_LIBRARY: &str = "libnixl_capi.so";

/// There is none.
#[derive(Debug)]
pub enum Nixl {}

/// Why links cannot go over NIXL.
#[derive(Debug, thiserror::Error)]
#[error("NIXL exists on Linux only")]
pub struct NixlError;

impl Nixl {
    /// Cannot be done here.
    ///
    /// # Errors
    /// Always.
    pub fn load(_path: Option<&Path>) -> Result<Arc<Self>, NixlError> {
        Err(NixlError)
    }

    /// What it was loaded by.
    pub fn path(&self) -> &Path {
        match *self {}
    }

    /// There are none.
    pub fn is_by_card(&self) -> bool {
        match *self {}
    }
}

/// There is none.
#[derive(Debug)]
pub(crate) enum Landing {}

/// There is none.
#[derive(Debug)]
pub(crate) enum Writer {}

impl Landing {
    pub(crate) async fn written(&self, _slot: u32) -> Result<(), String> {
        match *self {}
    }

    pub(crate) async fn failed(&self) -> String {
        match *self {}
    }
}

/// Nothing is made with them.
pub(crate) struct Means<'a> {
    pub(crate) config: &'a LinksConfig,
    pub(crate) nixl: &'a Arc<Nixl>,
    pub(crate) rings: &'a Arc<Semaphore>,
}

impl Writer {
    pub(crate) fn write(&self, _number: u32, _len: usize) {
        match *self {}
    }

    pub(crate) async fn settled(&self, _slots: &[u32]) {
        match *self {}
    }

    pub(crate) async fn all_settled(&self) {
        match *self {}
    }

    pub(crate) async fn failed(&self) -> String {
        match *self {}
    }

    pub(crate) fn close(&self) {
        match *self {}
    }
}

pub(crate) async fn receive(
    _visitor: Visitor<TcpReader, TcpWriter>,
    _seat: Seat,
    means: Means<'_>,
    _events: &mpsc::Sender<LinkEvent>,
) -> SocketError {
    let Means {
        config: _,
        nixl,
        rings: _,
    } = means;
    match **nixl {}
}

pub(crate) async fn dial(
    _config: &LinksConfig,
    _peer: WorkerRef,
    (nixl, _address): (&Arc<Nixl>, &str),
) -> Result<(Dialled<TcpReader, TcpWriter>, Store), SocketError> {
    match **nixl {}
}
