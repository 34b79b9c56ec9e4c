//! The listener for processes of the same host, and the identity of this host.
//!
//! The name of the socket is abstract: a killed process leaves nothing behind, and only processes
//! of the same network namespace can connect. A connection is the proof that the ring can be
//! shared; the host identity in an address only avoids attempts between hosts.

use super::receiver::serve;
use crate::incoming_links::IncomingLinks;
use crate::listeners::{LinkConnection, LinkListener};
use crate::transports::TransportFuture;
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::OwnedSemaphorePermit;

/// Limit of the names that are tried: process ids are unique only within their namespace, so a name
/// may be taken.
const NAMES_TRIED_MAX: u32 = 16;

/// The address of a listener that only processes of one host can reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostAddress {
    /// The host and its boot; processes of other hosts do not try the address.
    pub(crate) host_id: String,
    /// The name of the socket on that host.
    pub(crate) name: String,
}

impl HostAddress {
    pub(crate) fn parse(part: &str) -> Option<Self> {
        let (host_id, name) = part.split_once('/')?;
        Some(Self {
            host_id: host_id.to_owned(),
            name: name.to_owned(),
        })
    }

    /// Whether the address belongs to this host, in this boot.
    pub(super) fn is_of_this_host(&self) -> bool {
        host_id().is_ok_and(|host_id| host_id == self.host_id)
    }
}

impl fmt::Display for HostAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host_id, self.name)
    }
}

/// The listener for processes of the same host.
#[derive(Debug)]
pub(crate) struct HostListener {
    listener: UnixListener,
    address: HostAddress,
}

impl HostListener {
    /// Binds a free name.
    ///
    /// # Errors
    /// If the system has no abstract sockets, or does not identify its host and boot.
    pub(crate) fn bind() -> io::Result<Self> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let host_id = host_id()?;
        for _ in 0..NAMES_TRIED_MAX {
            let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
            let name = format!("cleave-kv-{}-{serial}", std::process::id());
            match UnixListener::bind(format!("\0{name}")) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => continue,
                Err(error) => return Err(error),
                Ok(listener) => {
                    let address = HostAddress { host_id, name };
                    return Ok(Self { listener, address });
                }
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }

    /// The address that is announced to peers.
    pub(crate) fn address(&self) -> &HostAddress {
        &self.address
    }
}

impl LinkListener for HostListener {
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Box<dyn LinkConnection>>> {
        let accepted = self.listener.poll_accept(cx);
        accepted.map_ok(|(stream, _)| Box::new(stream) as Box<dyn LinkConnection>)
    }
}

impl LinkConnection for UnixStream {
    fn serve(
        self: Box<Self>,
        links: Arc<IncomingLinks>,
        unidentified_permit: OwnedSemaphorePermit,
    ) -> TransportFuture<'static, ()> {
        Box::pin(serve(*self, links, unidentified_permit))
    }
}

/// The identity of this host: its boot and the network namespace. Abstract sockets are private to a
/// namespace, so pods of one node cannot connect. It is read once, because it cannot change while
/// the process lives.
fn host_id() -> io::Result<String> {
    static HOST_ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = HOST_ID.get() {
        return Ok(id.clone());
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let namespace = std::fs::metadata("/proc/self/ns/net")?.ino();
    let id = format!("{}-{namespace}", boot.trim());
    Ok(HOST_ID.get_or_init(|| id).clone())
}

#[cfg(test)]
impl HostListener {
    /// Accepts the next connection.
    pub(crate) async fn accept(&self) -> io::Result<UnixStream> {
        Ok(self.listener.accept().await?.0)
    }
}
