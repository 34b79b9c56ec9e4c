//! Links between processes of one host whose sender copies into the receiver's pool on its device.
//! Such a link begins as one over shared memory: on its socket the sender asks for the pool first,
//! and for a ring only if it cannot open the pool.
//!
//! Owns: the request for a pool and its answer, and the observation of the peer's process. Never:
//! copies a block, or knows a device.
//! Invariant: a pool is offered only to a process whose end can be observed.

mod peer_process;

pub(crate) use peer_process::PeerProcess;

use super::{DialChoice, DialFuture, LinkTransport, shm};
use crate::address::{DataAddresses, PeerRoute};
use crate::config::LinksConfig;
use crate::incoming::LinkStream;
use crate::incoming_links::IncomingLinks;
use crate::outgoing::OutboundLink;
use crate::pools::PeerPool;
use crate::socket::{LinkError, write_message};
use crate::wire::LinkMessage;
use cleave_domain::WorkerRef;
use std::sync::Arc;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// The transport from device to device.
pub(crate) struct CudaIpcTransport;

impl LinkTransport for CudaIpcTransport {
    /// It is never dialled apart: a link over shared memory becomes one of this transport.
    fn dial_choice<'a>(&self, _config: &LinksConfig, _route: &'a PeerRoute) -> DialChoice<'a> {
        DialChoice::Unusable
    }

    fn dial<'a>(&'a self, link: OutboundLink<'a>, address: &'a str) -> DialFuture<'a> {
        shm::SharedMemoryTransport.dial(link, address)
    }

    /// A worker of this host can open a pool, whatever transports this worker may use.
    fn can_share_pool(&self, addresses: &DataAddresses) -> bool {
        shm::is_on_this_host(addresses)
    }
}

/// The answer to a request for this worker's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolOffer {
    Given,
    Refused,
}

/// Answers the request for this worker's pool.
pub(crate) async fn offer_pool(
    stream: &mut LinkStream<OwnedReadHalf, OwnedWriteHalf>,
    links: &Arc<IncomingLinks>,
    peer: WorkerRef,
) -> Result<PoolOffer, LinkError> {
    let socket: &UnixStream = stream.writer.as_ref();
    let answer = match (&links.config.pools, PeerProcess::of(socket)) {
        (None, _) => LinkMessage::NoPool(String::new()),
        // A peer whose end cannot be observed could write for ever.
        (Some(_), Err(error)) => LinkMessage::NoPool(error.to_string()),
        (Some(_), Ok(process)) => match links.grant_pool(peer, process) {
            Ok(handle) => LinkMessage::Pool(handle),
            Err(reason) => LinkMessage::NoPool(reason),
        },
    };
    write_message(&mut stream.writer, &answer, &[]).await?;
    Ok(match answer {
        LinkMessage::Pool(_) => PoolOffer::Given,
        _ => PoolOffer::Refused,
    })
}

/// The result of the request for the peer's pool.
pub(crate) enum PoolReply {
    Opened(Arc<dyn PeerPool>),
    /// The reason, if both ends have a pool.
    Unopened(Option<String>),
}

pub(crate) async fn ask_pool(
    config: &LinksConfig,
    stream: &mut LinkStream<OwnedReadHalf, OwnedWriteHalf>,
) -> Result<PoolReply, LinkError> {
    let Some(pools) = &config.pools else {
        return Ok(PoolReply::Unopened(None));
    };
    write_message(&mut stream.writer, &LinkMessage::AskPool, &[]).await?;
    let handle = match stream.reader.message().await? {
        LinkMessage::Pool(handle) => handle,
        LinkMessage::NoPool(reason) => {
            return Ok(PoolReply::Unopened((!reason.is_empty()).then_some(reason)));
        }
        _ => return Err(LinkError::Unexpected("in answer to a pool request")),
    };
    let pools = Arc::clone(pools);
    let opened = tokio::task::spawn_blocking(move || pools.open(&handle)).await;
    match opened.map_err(|_| LinkError::Closing)? {
        Ok(pool) => {
            write_message(&mut stream.writer, &LinkMessage::Opened, &[]).await?;
            Ok(PoolReply::Opened(pool))
        }
        Err(reason) => Ok(PoolReply::Unopened(Some(reason))),
    }
}
