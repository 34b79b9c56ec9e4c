//! The transports of links, ordered from the fastest to the one that always works.
//!
//! Owns: the table of transports, and the trait by which the rest of the crate uses them. Never:
//! carries a byte, or chooses the transport of a link (`outgoing` does).
//! Invariant: the rest of the crate asks a transport by its methods, and nothing but the table
//! lists them. A new one is a folder and a row.
//!
//! [`LinkTransport`] is object-safe, and used a few times per link: when it is dialled, accepted
//! and recorded as ended. A dialled link is an [`EstablishedLink`], whose one virtual call enters
//! code that is compiled for its type of stream. So no frame costs an allocation or a virtual call
//! for the choice of a transport; its bytes go by `PayloadStore` and `PayloadSource`, which are
//! enums of the few kinds of memory.
//!
//! There are two kinds. A *two-sided* transport carries bytes, and the receiver's engine writes
//! them into its pool; a frame of an ended hand-off is discarded by its hand-off. On a *one-sided*
//! transport the sender writes into the receiver's pool; only the head of a frame travels, and it
//! reports that the bytes are in place:
//! - `cuda_ipc` and `local` grant access to a worker's pool, and `pools` records to whom;
//! - [`crate::SendPermit::pool`] is the pool that the sender's engine writes to, and
//!   [`crate::SendPermit::send_written`] sends the head once the write is over, so that a brain's
//!   `Exported` holds;
//! - [`crate::ReceivedPayload::bytes`] of such a frame is `None`, and its checksum is verified in
//!   place.
//!
//! The brains make one-sided writes safe: with `PoolWriter::Sender`, blocks of a hand-off that
//! ended before it landed stay in quarantine until the sender's `Stopped` arrives, or until the
//! sender is fenced ([`crate::LinkEvent::Fenced`]).

#[cfg(target_os = "linux")]
pub(crate) mod cuda_ipc;
pub(crate) mod local;
#[cfg(target_os = "linux")]
pub(crate) mod nixl;
#[cfg(target_os = "linux")]
pub(crate) mod shm;
pub(crate) mod tcp;
#[cfg(not(target_os = "linux"))]
pub(crate) mod unsupported;

#[cfg(not(target_os = "linux"))]
pub(crate) use self::{unsupported as cuda_ipc, unsupported as nixl, unsupported as shm};

use crate::address::{AddressScheme, DataAddresses, PeerRoute};
use crate::config::LinksConfig;
use crate::handshake::RequestedLink;
use crate::incoming::IdentifiedPeer;
use crate::incoming_links::IncomingLinks;
use crate::listeners::{ListenOptions, TransportOffer};
use crate::outgoing::{EstablishedLink, OutboundLink};
use crate::socket::LinkError;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tcp::{TcpReader, TcpWriter};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

/// Makes [`Transport`] of the rows of the table.
macro_rules! transport_table {
    ($($(#[$doc:meta])* $transport:ident: $facts:expr, $implementation:expr;)*) => {
        /// A transport of links. Smaller values are preferred.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Transport {
            $($(#[$doc])* $transport,)*
        }

        impl Transport {
            /// All transports, the preferred first.
            pub const ALL: [Self; [$(stringify!($transport)),*].len()] =
                [$(Self::$transport),*];

            pub(crate) fn facts(self) -> TransportFacts {
                match self {
                    $(Self::$transport => $facts,)*
                }
            }

            pub(crate) fn implementation(self) -> &'static dyn LinkTransport {
                match self {
                    $(Self::$transport => &$implementation,)*
                }
            }
        }
    };
}

transport_table! {
    /// Within a process. Buffers are handed over without a copy; between devices, blocks are copied
    /// directly from pool to pool.
    Local: TransportFacts {
        name: "local",
        label: "local",
        reach: TransportReach::Process,
    }, local::LocalTransport;
    /// Between processes of one host: the sender copies into the receiver's pool on its device.
    /// One-sided.
    CudaIpc: TransportFacts {
        name: "cuda-ipc",
        label: "the peer's pool",
        reach: TransportReach::Host,
    }, cuda_ipc::CudaIpcTransport;
    /// Between processes of one host: a ring of slots that both processes map.
    SharedMemory: TransportFacts {
        name: "shm",
        label: "shared memory",
        reach: TransportReach::Host,
    }, shm::SharedMemoryTransport;
    /// Between any two hosts: the sender's network card writes into a ring of slots at the
    /// receiver, which copies frames out of the ring. For the brains it is two-sided.
    Nixl: TransportFacts {
        name: "nixl",
        label: "NIXL",
        reach: TransportReach::Network,
    }, nixl::NixlTransport;
    /// Between any two hosts: several TCP connections.
    Tcp: TransportFacts {
        name: "tcp",
        label: "tcp",
        reach: TransportReach::Network,
    }, tcp::TcpTransport;
}

impl Transport {
    /// The name in metrics, logs and on the command line.
    pub fn name(self) -> &'static str {
        self.facts().name
    }

    /// The workers between which it carries blocks.
    pub fn reach(self) -> TransportReach {
        self.facts().reach
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The facts of a transport that are the same on every system.
pub(crate) struct TransportFacts {
    /// The name in metrics, logs, data addresses and on the command line.
    pub(crate) name: &'static str,
    /// The beginning of the texts of its failures.
    pub(crate) label: &'static str,
    pub(crate) reach: TransportReach,
}

/// The workers between which a transport carries blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TransportReach {
    /// Workers of one process.
    Process,
    /// Processes of one host.
    Host,
    /// Any two hosts. The links of such a transport begin at the TCP listener.
    Network,
}

/// The future of a dial or of an incoming link, boxed once for each.
pub(crate) type TransportFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The future of a dial.
pub(crate) type DialFuture<'a> = TransportFuture<'a, Result<Box<dyn EstablishedLink>, LinkError>>;

/// A transport: its offer to peers, its use of theirs, and the two ends of its links.
pub(crate) trait LinkTransport: Sync {
    /// The form of its part of a data address, if it has one.
    fn scheme(&self) -> Option<AddressScheme> {
        None
    }

    /// Its part of this worker's data address, and the socket behind it.
    ///
    /// # Errors
    /// If the socket cannot be opened.
    fn offer(&self, _options: &mut ListenOptions) -> io::Result<Option<TransportOffer>> {
        Ok(None)
    }

    /// Whether a link to a peer can be dialled, and in which turn.
    fn dial_choice<'a>(&self, config: &LinksConfig, route: &'a PeerRoute) -> DialChoice<'a>;

    /// Dials a peer at the address of the choice, within the time limit of the transport. If an
    /// error is returned the next transport is tried.
    fn dial<'a>(&'a self, link: OutboundLink<'a>, address: &'a str) -> DialFuture<'a>;

    /// Whether it is tried only after a growing delay at a peer where it failed, while another
    /// transport is left.
    fn backs_off(&self) -> bool {
        false
    }

    /// Whether a worker with these addresses may be given this worker's pool to write into.
    fn can_share_pool(&self, _addresses: &DataAddresses) -> bool {
        false
    }

    /// The receiving end, if its links begin at the TCP listener. A transport with a listener of
    /// its own receives what it accepts.
    fn port_receiver(&self) -> Option<&dyn PortReceiver> {
        None
    }
}

/// The receiving end of a transport whose links begin at the TCP listener.
pub(crate) trait PortReceiver: Sync {
    /// The hello with which a peer asks for the transport.
    fn requested_link(&self) -> RequestedLink;

    /// Receives from the peer until the link ends, or refuses the link.
    fn receive(&self, request: PortRequest) -> TransportFuture<'static, ()>;
}

/// A peer that asks for a link at the TCP listener; its hello was checked.
pub(crate) struct PortRequest {
    pub(crate) links: Arc<IncomingLinks>,
    pub(crate) identified: IdentifiedPeer<TcpReader, TcpWriter>,
    /// Dropped once the peer is accepted.
    pub(crate) unidentified_permit: OwnedSemaphorePermit,
}

/// The use of a transport for an outgoing link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DialChoice<'a> {
    /// The link can be dialled at this address.
    Dial(DialTurn, &'a str),
    /// Only one of the ends has it; the reason is reported before a slower one is tried.
    Missing(&'static str),
    /// The route does not lead there, or this worker may not use it.
    Unusable,
}

/// The place of a transport among all that can be dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DialTurn {
    /// Its row in the table.
    InOrder,
    /// After all others: it works, and is no faster here.
    Last,
}

/// Dials within a time limit.
pub(crate) async fn dial_within<T>(
    within: Duration,
    dialled: impl Future<Output = Result<T, LinkError>>,
) -> Result<T, LinkError> {
    let dialled = timeout(within, dialled).await;
    dialled.unwrap_or(Err(LinkError::HandshakeTimedOut(within)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_order_of_transports_are_fixed() {
        let names = Transport::ALL.map(Transport::name);
        assert_eq!(names, ["local", "cuda-ipc", "shm", "nixl", "tcp"]);
    }

    #[test]
    fn each_kind_of_hello_asks_for_one_transport() {
        for requested in [RequestedLink::Link, RequestedLink::RdmaRing] {
            let transports = Transport::ALL.iter();
            let receivers = transports.filter_map(|one| one.implementation().port_receiver());
            let count = receivers
                .filter(|receiver| receiver.requested_link() == requested)
                .count();
            assert_eq!(count, 1, "{requested:?}");
        }
    }
}
