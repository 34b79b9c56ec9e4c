//! NIXL among the transports: who has the library, and what is refused where it is absent. The
//! stand-in for systems without the library shares it.

use super::{Nixl, dial, receive};
use crate::address::{AddressScheme, PeerRoute};
use crate::config::LinksConfig;
use crate::handshake::RequestedLink;
use crate::incoming_links::IncomingLinks;
use crate::listeners::{ListenOptions, TransportOffer};
use crate::outgoing::{EstablishedLink, OutboundLink, measure_link};
use crate::socket::{LinkError, write_message};
use crate::transports::{
    DialChoice, DialFuture, DialTurn, LinkTransport, PortReceiver, PortRequest, Transport,
    TransportFuture, dial_within,
};
use crate::wire::LinkMessage;
use cleave_domain::WorkerRef;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tracing::warn;

/// The transport over NIXL.
pub(crate) struct NixlTransport;

impl LinkTransport for NixlTransport {
    fn scheme(&self) -> Option<AddressScheme> {
        Some(AddressScheme {
            is_addition: true,
            is_valid: |_| true,
        })
    }

    /// Links over NIXL begin at the TCP address.
    fn offer(&self, options: &mut ListenOptions) -> io::Result<Option<TransportOffer>> {
        Ok(options.has_nixl.then(|| TransportOffer {
            part: Transport::Tcp.name().to_owned(),
            listener: None,
        }))
    }

    /// Without a network card NIXL is no faster than TCP, and within a host shared memory is
    /// better; so it comes last.
    fn dial_choice<'a>(&self, config: &LinksConfig, route: &'a PeerRoute) -> DialChoice<'a> {
        let PeerRoute::Remote(addresses) = route else {
            return DialChoice::Unusable;
        };
        let is_allowed = config.transports.contains(&Transport::Nixl);
        let library = library(config);
        let is_by_card = library.is_some_and(|nixl| nixl.uses_network_card());
        let is_announced = addresses.part(Transport::Nixl).is_some();
        match (library, addresses.part(Transport::Tcp)) {
            (Some(_), Some(address)) if is_announced => {
                let turn = if is_by_card {
                    DialTurn::InOrder
                } else {
                    DialTurn::Last
                };
                DialChoice::Dial(turn, address)
            }
            (None, _) if is_announced && is_allowed => {
                DialChoice::Missing("this worker has no NIXL library")
            }
            (Some(_), _) if !is_announced && is_by_card => {
                DialChoice::Missing("the peer has no NIXL library")
            }
            _ => DialChoice::Unusable,
        }
    }

    /// Writes may fail although both agents were created. So the link counts as established only
    /// after it was measured.
    fn dial<'a>(&'a self, link: OutboundLink<'a>, address: &'a str) -> DialFuture<'a> {
        Box::pin(async move {
            let OutboundLink { config, peer, .. } = link;
            let nixl = library(config).expect("links over NIXL are dialled with the library");
            let dialled = dial(config, peer, nixl, address);
            let (dialled, store) = dial_within(handshake_timeout(config), dialled).await?;
            let within = first_writes_timeout(config);
            let measured = timeout(within, measure_link(dialled, Transport::Nixl, store)).await;
            let measured = measured.unwrap_or(Err(LinkError::WriteTimedOut(within)))?;
            Ok(Box::new(measured) as Box<dyn EstablishedLink>)
        })
    }

    fn backs_off(&self) -> bool {
        true
    }

    fn port_receiver(&self) -> Option<&dyn PortReceiver> {
        Some(self)
    }
}

impl PortReceiver for NixlTransport {
    fn requested_link(&self) -> RequestedLink {
        RequestedLink::RdmaRing
    }

    fn receive(&self, request: PortRequest) -> TransportFuture<'static, ()> {
        Box::pin(receive_or_refuse(request))
    }
}

/// Creates a ring for a peer that asks for one, if a router has named the peer: a ring keeps its
/// memory for as long as the link.
async fn receive_or_refuse(request: PortRequest) {
    let PortRequest {
        links,
        mut identified,
        unidentified_permit,
    } = request;
    let peer = identified.peer;
    let nixl = usable_library(&links, peer).await;
    drop(unidentified_permit);
    let nixl = match nixl {
        Ok(nixl) => nixl,
        Err(reason) => {
            let refusal = LinkMessage::NoRing(reason.to_owned());
            let reply = write_message(&mut identified.stream.writer, &refusal, &[]).await;
            let reply_error = reply.err().map(|error| error.to_string());
            return warn!(%peer, reason, reply_error, "refused to create a ring for a NIXL link");
        }
    };
    let receive = async |session| receive(identified, session, &nixl, &links).await;
    links.receive_in_turn(peer, receive).await;
}

/// The library, or the reason for which the peer gets no ring.
async fn usable_library(links: &IncomingLinks, peer: WorkerRef) -> Result<Arc<Nixl>, &'static str> {
    let config = &links.config;
    let nixl = library(config).ok_or("this worker takes no links over NIXL")?;
    let within = unknown_peer_timeout(config);
    if links.routes.wait_until_known(peer, within).await {
        Ok(Arc::clone(nixl))
    } else {
        Err("no router has named this peer to the worker")
    }
}

/// The library, if this worker may use it.
fn library(config: &LinksConfig) -> Option<&Arc<Nixl>> {
    let is_allowed = config.transports.contains(&Transport::Nixl);
    config.nixl.as_ref().filter(|_| is_allowed)
}

/// The time limit of connecting, the handshake and creating two agents. It is longer than the
/// receiver's own limit, so that the dialler receives the receiver's reason for refusing.
fn handshake_timeout(config: &LinksConfig) -> Duration {
    config.connect_timeout * 4
}

/// The time limit of the first writes of a link over NIXL, which connect the network cards.
fn first_writes_timeout(config: &LinksConfig) -> Duration {
    config.connect_timeout * 2
}

/// How long a request for a ring waits until a router names the peer to this worker.
fn unknown_peer_timeout(config: &LinksConfig) -> Duration {
    config.connect_timeout / 2
}
