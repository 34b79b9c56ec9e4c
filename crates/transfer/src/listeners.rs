//! The sockets at which a worker takes links of other processes, and the address that it announces.
//!
//! Owns: the list of sockets, and turns of accepting. Never: reads a byte of a connection.
//! Invariant: a socket that always has a connection to accept delays no other.

use crate::address::DataAddresses;
use crate::incoming_links::IncomingLinks;
use crate::transports::{Transport, TransportFuture};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::net::TcpListener;
use tokio::sync::OwnedSemaphorePermit;

/// The listeners of a worker for other processes.
#[derive(Debug, Default)]
pub struct Listeners {
    sockets: Vec<Box<dyn LinkListener>>,
    /// The socket that is asked first.
    next: usize,
}

/// The means by which a worker takes links of other processes.
#[derive(Debug, Default)]
pub struct ListenOptions {
    /// The transports that may open a socket of their own.
    pub transports: BTreeSet<Transport>,
    /// The TCP listener, and the address at which peers reach it.
    pub tcp: Option<(TcpListener, String)>,
    /// Whether links over NIXL are accepted at the TCP listener.
    pub has_nixl: bool,
}

/// The listeners of a worker, and the addresses to announce.
#[derive(Debug, Default)]
pub struct OpenedListeners {
    /// The sockets of all transports.
    pub listeners: Listeners,
    /// The parts of all transports that listen.
    pub addresses: DataAddresses,
    /// The transports whose socket could not be opened; they are not announced.
    pub failures: Vec<(Transport, io::Error)>,
}

/// The offer of one transport to peers.
pub(crate) struct TransportOffer {
    /// Its part of the data address.
    pub(crate) part: String,
    /// `None` if its links begin at the socket of another transport.
    pub(crate) listener: Option<Box<dyn LinkListener>>,
}

/// A socket that accepts connections.
pub(crate) trait LinkListener: Debug + Send + Sync {
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Box<dyn LinkConnection>>>;
}

/// A connection from a peer that has not identified itself.
pub(crate) trait LinkConnection: Send {
    /// Reads the request of the peer, and receives from it until the link ends.
    fn serve(
        self: Box<Self>,
        links: Arc<IncomingLinks>,
        unidentified_permit: OwnedSemaphorePermit,
    ) -> TransportFuture<'static, ()>;
}

impl Listeners {
    /// Opens the sockets of all transports.
    pub fn open(mut options: ListenOptions) -> OpenedListeners {
        let mut opened = OpenedListeners::default();
        for transport in Transport::ALL {
            match transport.implementation().offer(&mut options) {
                Ok(None) => {}
                Ok(Some(TransportOffer { part, listener })) => {
                    opened.addresses = opened.addresses.with(transport, part);
                    opened.listeners.sockets.extend(listener);
                }
                Err(error) => opened.failures.push((transport, error)),
            }
        }
        opened
    }

    /// Accepts the next connection of any socket.
    pub(crate) async fn accept(&mut self) -> io::Result<Box<dyn LinkConnection>> {
        let Self { sockets, next } = self;
        let count = sockets.len();
        poll_fn(|cx| {
            for index in (0..count).map(|offset| (*next + offset) % count) {
                if let Poll::Ready(accepted) = sockets[index].poll_accept(cx) {
                    *next = index + 1;
                    return Poll::Ready(accepted);
                }
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A socket that always has a connection.
    #[derive(Debug, Default)]
    struct BusyListener {
        accepted: Arc<AtomicUsize>,
    }

    impl LinkListener for BusyListener {
        fn poll_accept(&self, _: &mut Context<'_>) -> Poll<io::Result<Box<dyn LinkConnection>>> {
            self.accepted.fetch_add(1, Ordering::Relaxed);
            Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()))
        }
    }

    #[tokio::test]
    async fn a_busy_socket_delays_no_other() {
        let sockets = [BusyListener::default(), BusyListener::default()];
        let accepted = sockets
            .each_ref()
            .map(|socket| Arc::clone(&socket.accepted));
        let mut listeners = Listeners::default();
        for socket in sockets {
            listeners.sockets.push(Box::new(socket));
        }
        for _ in 0..4 {
            assert!(listeners.accept().await.is_err());
        }
        let accepted = accepted.map(|count| count.load(Ordering::Relaxed));
        assert_eq!(accepted, [2, 2]);
    }
}
