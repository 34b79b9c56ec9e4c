//! The receiving end of links within a host: offers the pool, or creates a ring, and receives the
//! heads on the socket.

use super::ring::send_descriptor;
use super::{ReceiverRing, RingShape, ring_shape, run_blocking, same_user, split};
use crate::config::LinksConfig;
use crate::credit::CreditAccount;
use crate::handshake::RequestedLink;
use crate::incoming::{
    AcceptPolicy, IdentifiedPeer, JoinRequest, LinkReceiver, LinkStream, PayloadSource,
    ReceiveSession, SlotReadiness, read_join_request, receive_heads,
};
use crate::incoming_links::IncomingLinks;
use crate::socket::{LinkError, write_message};
use crate::transports::cuda_ipc::{self, PoolOffer};
use crate::wire::LinkMessage;
use cleave_domain::WorkerRef;
use std::sync::Arc;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;
use tracing::warn;

/// Serves one connection from its first message on.
pub(super) async fn serve(
    stream: UnixStream,
    links: Arc<IncomingLinks>,
    unidentified_permit: OwnedSemaphorePermit,
) {
    let identified = identify(&links.config, stream).await;
    drop(unidentified_permit);
    match identified {
        Ok(identified) => {
            let peer = identified.peer;
            let receive = async |session| receive(identified, session, &links).await;
            links.receive_in_turn(peer, receive).await;
        }
        Err(error) => warn!(%error, "data link refused"),
    }
}

/// Reads the first message of a connection, and checks it.
async fn identify(
    config: &LinksConfig,
    stream: UnixStream,
) -> Result<IdentifiedPeer<OwnedReadHalf, OwnedWriteHalf>, LinkError> {
    same_user(&stream)?;
    let policy = AcceptPolicy {
        config,
        // Only processes of this user can connect here.
        is_known: &|_| true,
    };
    match read_join_request(policy, split(config, stream)).await? {
        JoinRequest::Link(RequestedLink::Link, identified) => Ok(identified),
        JoinRequest::FurtherStream { .. } => Err(LinkError::Unexpected(
            "further stream for a shared-memory link",
        )),
        JoinRequest::Link(RequestedLink::RdmaRing, _) => Err(LinkError::Unexpected(
            "request for an RDMA ring on a host socket",
        )),
    }
}

/// Grants the pool to the peer, or creates a ring for it, and receives on that path until the link
/// ends. Returns the reason for the end.
async fn receive(
    identified: IdentifiedPeer<OwnedReadHalf, OwnedWriteHalf>,
    session: ReceiveSession,
    links: &Arc<IncomingLinks>,
) -> LinkError {
    let config = &links.config;
    let IdentifiedPeer { peer, mut stream } = identified;
    let shape = ring_shape(config);
    let opened = open_payload_source(&mut stream, links, shape, session.key, peer);
    let payload_source = match timeout(config.connect_timeout, opened).await {
        Ok(Ok(payload_source)) => payload_source,
        Ok(Err(error)) => return error,
        Err(_) => return LinkError::HandshakeTimedOut(config.connect_timeout),
    };
    let account = match &payload_source {
        PayloadSource::Ring(..) => CreditAccount::of_slots(shape.slots_count),
        PayloadSource::Pool | PayloadSource::Buffers(_) => CreditAccount::of_bytes(shape.credit()),
    };
    let link_receiver = LinkReceiver {
        peer,
        block_bytes: config.block_bytes,
        account,
        payload_source,
        events: links.events.clone(),
        grants: config.grants.clone(),
    };
    receive_heads(stream, link_receiver, session).await
}

/// Sends the welcome, and the handle of the pool or the descriptor of the ring, as the peer
/// requests. When the descriptor is sent nothing else may be on the socket, because a descriptor
/// that arrives with an ordinary read is lost.
async fn open_payload_source(
    stream: &mut LinkStream<OwnedReadHalf, OwnedWriteHalf>,
    links: &Arc<IncomingLinks>,
    shape: RingShape,
    key: u64,
    peer: WorkerRef,
) -> Result<PayloadSource, LinkError> {
    let welcome = LinkMessage::Welcome {
        me: links.config.me,
        credit: shape.window(),
        key,
        frame_bytes: shape.slot_bytes,
    };
    write_message(&mut stream.writer, &welcome, &[]).await?;
    let mut request = stream.reader.message().await?;
    if request == LinkMessage::AskPool {
        let offer = cuda_ipc::offer_pool(stream, links, peer).await?;
        request = stream.reader.message().await?;
        if request == LinkMessage::Opened && offer == PoolOffer::Given {
            return Ok(PayloadSource::Pool);
        }
    }
    match request {
        LinkMessage::Ping(_) => {}
        _ => return Err(LinkError::Unexpected("before the ring was sent")),
    }
    let (mirror, fd) = run_blocking(move || ReceiverRing::create(shape)).await?;
    let socket: &UnixStream = stream.writer.as_ref();
    let sent = socket.async_io(Interest::WRITABLE, || send_descriptor(socket, &fd));
    sent.await?;
    Ok(PayloadSource::Ring(mirror, SlotReadiness::Mapped))
}
