//! The receiving end of links over TCP: identifies each connection, passes it to the transport that
//! it asks for, and receives on those that ask for TCP.
//!
//! Never: takes a link of a transport that this worker may not use.

use super::{TcpReader, TcpTransport, TcpWriter, accept, stream_frame_bytes};
use crate::buffer::BufferPool;
use crate::config::LinkEvent;
use crate::config::LinksConfig;
use crate::credit::CreditAccount;
use crate::handshake::RequestedLink;
use crate::incoming::{
    AcceptPolicy, CreditReturn, IdentifiedPeer, JoinRequest, LinkReceiver, PayloadSource,
    ReceiveSession, STREAMS_MAX, read_join_request, serve_stream,
};
use crate::incoming_links::IncomingLinks;
use crate::listeners::{LinkConnection, LinkListener};
use crate::socket::{LinkError, write_message};
use crate::transports::{PortReceiver, PortRequest, Transport, TransportFuture};
use crate::wire::LinkMessage;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::warn;

impl LinkListener for TcpListener {
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<Box<dyn LinkConnection>>> {
        let accepted = TcpListener::poll_accept(self, cx);
        accepted.map_ok(|(stream, _)| Box::new(stream) as Box<dyn LinkConnection>)
    }
}

impl LinkConnection for TcpStream {
    fn serve(
        self: Box<Self>,
        links: Arc<IncomingLinks>,
        unidentified_permit: OwnedSemaphorePermit,
    ) -> TransportFuture<'static, ()> {
        Box::pin(serve(*self, links, unidentified_permit))
    }
}

impl PortReceiver for TcpTransport {
    fn requested_link(&self) -> RequestedLink {
        RequestedLink::Link
    }

    fn receive(&self, request: PortRequest) -> TransportFuture<'static, ()> {
        Box::pin(receive_or_reject(request))
    }
}

/// Serves one connection from its first message on.
async fn serve(
    stream: TcpStream,
    links: Arc<IncomingLinks>,
    unidentified_permit: OwnedSemaphorePermit,
) {
    let policy = AcceptPolicy {
        config: &links.config,
        // A peer with a certificate of the fleet may learn the configuration of the fleet.
        is_known: &|peer| links.config.peer_tls.is_some() || links.routes.is_known(peer),
    };
    let refused = match identify(policy, stream).await {
        Ok(JoinRequest::Link(requested, identified)) => {
            let request = PortRequest {
                links,
                identified,
                unidentified_permit,
            };
            return port_receiver(requested).receive(request).await;
        }
        Ok(JoinRequest::FurtherStream { from, key, stream }) => {
            drop(unidentified_permit);
            links.join_stream(from, key, stream).await
        }
        Err(error) => Err(error),
    };
    if let Err(error) = refused {
        warn!(%error, "data link refused");
    }
}

/// The receiving end of the transport that a hello asks for.
fn port_receiver(requested: RequestedLink) -> &'static dyn PortReceiver {
    let receivers = Transport::ALL.into_iter();
    let mut receivers = receivers.filter_map(|one| one.implementation().port_receiver());
    let receiver = receivers.find(|receiver| receiver.requested_link() == requested);
    receiver.expect("each kind of hello asks for a transport of the table")
}

async fn receive_or_reject(request: PortRequest) {
    let PortRequest {
        links,
        identified,
        unidentified_permit,
    } = request;
    if !links.config.transports.contains(&Transport::Tcp) {
        let reason = "this worker takes no links over TCP";
        if let Err(error) = identified.reject(reason).await {
            warn!(%error, "data link refused");
        }
        return;
    }
    drop(unidentified_permit);
    let peer = identified.peer;
    let receive = async |session| receive(identified, session, &links.config, &links.events).await;
    links.receive_in_turn(peer, receive).await;
}

/// Accepts a TCP connection and reads its first message.
async fn identify(
    policy: AcceptPolicy<'_>,
    stream: TcpStream,
) -> Result<JoinRequest<TcpReader, TcpWriter>, LinkError> {
    let config = policy.config;
    let accepted = timeout(config.connect_timeout, accept(config, stream)).await;
    let slow = LinkError::HandshakeTimedOut(config.connect_timeout);
    read_join_request(policy, accepted.map_err(|_| slow)??).await
}

/// Receives over TCP until the link ends. Returns the reason for the end.
async fn receive(
    identified: IdentifiedPeer<TcpReader, TcpWriter>,
    mut session: ReceiveSession,
    config: &LinksConfig,
    events: &mpsc::Sender<LinkEvent>,
) -> LinkError {
    let IdentifiedPeer { peer, mut stream } = identified;
    let window = config.window();
    let welcome = LinkMessage::Welcome {
        me: config.me,
        credit: u64::from(window),
        key: session.key,
        frame_bytes: stream_frame_bytes(config),
    };
    if let Err(error) = write_message(&mut stream.writer, &welcome, &[]).await {
        return error;
    }
    let link_receiver = LinkReceiver {
        peer,
        block_bytes: config.block_bytes,
        account: CreditAccount::of_bytes(window),
        payload_source: PayloadSource::Buffers(BufferPool::new(stream_frame_bytes(config), window)),
        events: events.clone(),
        grants: config.grants.clone(),
    };
    let link_receiver = Arc::new(link_receiver);
    let mut streams = JoinSet::new();
    streams.spawn(serve_stream(
        stream,
        Arc::clone(&link_receiver),
        CreditReturn::OnThisStream,
    ));
    let error = loop {
        tokio::select! {
            further = session.further_streams.recv() => match further {
                Some(stream) if streams.len() < STREAMS_MAX => {
                    streams.spawn(serve_stream(stream, Arc::clone(&link_receiver), CreditReturn::OnAnotherStream));
                }
                Some(_) => break LinkError::Unexpected("stream beyond the limit of a link"),
                None => break LinkError::Closing,
            },
            ended = streams.join_next() => {
                let ended = ended.expect("there is the first stream");
                break ended.unwrap_or(LinkError::Closing);
            }
            () = session.replaced.notified() => break LinkError::Replaced,
        }
    };
    // One lost stream loses the link: the other streams end before the loss is reported.
    streams.shutdown().await;
    error
}
