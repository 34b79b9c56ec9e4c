//! Links between any two hosts: several TCP connections, plain or over TLS.
//!
//! Owns: the connections of such a link, and the TCP listener, at which links of other transports
//! begin too. Never: carries a payload on another path.
//! Invariant: a link has all its connections before it is measured.

mod receiver;
mod stream;

pub(crate) use stream::{TcpLinkStream, TcpReader, TcpWriter, connect};

use super::{
    DialChoice, DialFuture, DialTurn, LinkTransport, PortReceiver, Transport, dial_within,
};
use crate::address::{AddressScheme, PeerRoute};
use crate::buffer::BufferPool;
use crate::config::LinksConfig;
use crate::handshake::{DialledLink, LinkTerms, RequestedLink, perform_handshake};
use crate::incoming::STREAMS_MAX;
use crate::link::PayloadStore;
use crate::listeners::{LinkListener, ListenOptions, TransportOffer};
use crate::outgoing::{DialledTransport, EstablishedLink, OutboundLink};
use crate::socket::{LinkError, write_message};
use crate::wire::LinkMessage;
use cleave_domain::WorkerRef;
use std::io;
use stream::accept;

/// The longest frame over TCP: a block of 1 MiB is spread over all streams.
const STREAM_FRAME_BYTES_MAX: u32 = 256 << 10;

/// The transport over TCP.
pub(crate) struct TcpTransport;

impl LinkTransport for TcpTransport {
    fn scheme(&self) -> Option<AddressScheme> {
        Some(AddressScheme {
            is_addition: false,
            is_valid: |_| true,
        })
    }

    /// The address is announced even if no link may use TCP alone, because links of other
    /// transports begin there.
    fn offer(&self, options: &mut ListenOptions) -> io::Result<Option<TransportOffer>> {
        let offer = options
            .tcp
            .take()
            .map(|(listener, address)| TransportOffer {
                part: address,
                listener: Some(Box::new(listener) as Box<dyn LinkListener>),
            });
        Ok(offer)
    }

    fn dial_choice<'a>(&self, config: &LinksConfig, route: &'a PeerRoute) -> DialChoice<'a> {
        match route.part(Transport::Tcp) {
            Some(address) if config.transports.contains(&Transport::Tcp) => {
                DialChoice::Dial(DialTurn::InOrder, address)
            }
            _ => DialChoice::Unusable,
        }
    }

    fn dial<'a>(&'a self, link: OutboundLink<'a>, address: &'a str) -> DialFuture<'a> {
        Box::pin(async move {
            let OutboundLink { config, peer, .. } = link;
            let dialled = dial(config, peer, address);
            let dialled = dial_within(config.connect_timeout, dialled).await?;
            let LinkTerms {
                window,
                frame_bytes,
                ..
            } = dialled.terms;
            let frame_bytes = frame_bytes.min(stream_frame_bytes(config));
            let established = DialledTransport {
                dialled,
                transport: Transport::Tcp,
                store: PayloadStore::Buffers(BufferPool::new(frame_bytes, window)),
            };
            Ok(Box::new(established) as Box<dyn EstablishedLink>)
        })
    }

    fn port_receiver(&self) -> Option<&dyn PortReceiver> {
        Some(self)
    }
}

/// The longest frame that one stream carries.
fn stream_frame_bytes(config: &LinksConfig) -> u32 {
    config.frame_bytes().min(STREAM_FRAME_BYTES_MAX)
}

/// Connects all streams and shakes hands.
async fn dial(
    config: &LinksConfig,
    peer: WorkerRef,
    address: &str,
) -> Result<DialledLink<TcpReader, TcpWriter>, LinkError> {
    let mut first = connect(config, address).await?;
    let terms = perform_handshake(config, peer, RequestedLink::Link, &mut first).await?;
    let mut streams = vec![first];
    let streams_count = usize::from(config.streams_count).clamp(1, STREAMS_MAX);
    while streams.len() < streams_count {
        let mut further = connect(config, address).await?;
        let join = LinkMessage::Join {
            from: config.me,
            key: terms.key,
        };
        write_message(&mut further.writer, &join, &[]).await?;
        match further.reader.message().await? {
            LinkMessage::Joined => streams.push(further),
            LinkMessage::Reject(reason) => return Err(LinkError::RejectedByPeer(reason)),
            _ => return Err(LinkError::Unexpected("in answer to a join")),
        }
    }
    Ok(DialledLink { streams, terms })
}
