//! The receiving end over sockets: checks the hello of a peer, then receives, verifies and delivers
//! what arrives.
//!
//! Owns: the check of a hello, the streams of an incoming link, and the account of the credit that
//! its peer was granted. Never: writes to a pool, or dials.
//! Invariant: after [`serve_stream`] or [`receive_heads`] has returned, nothing more of the stream
//! arrives.

mod message;

pub(crate) use message::{DeferredAction, LinkAction, receive_action};

use crate::buffer::BufferPool;
use crate::config::{LinkEvent, LinksConfig};
use crate::credit::CreditAccount;
use crate::grant::GrantIssuer;
use crate::handshake::RequestedLink;
use crate::socket::{LinkError, MessageReader, write_message};
use crate::transports::nixl::PendingWrites;
use crate::transports::shm::ReceiverRing;
use crate::transports::tcp::TcpLinkStream;
use crate::wire::{LinkHello, LinkMessage, SLOTS_PER_CREDIT_MAX};
use cleave_domain::WorkerRef;
use message::receive_messages;
use std::pin::pin;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

/// Limit of pongs that wait to be written; a peer that sends pings faster than it reads is
/// disconnected.
const PONGS_MAX: usize = 16;
/// Limit of the streams of one link.
pub(crate) const STREAMS_MAX: usize = 16;

/// One connection, with both directions.
pub(crate) struct LinkStream<R, W> {
    pub(crate) reader: MessageReader<R>,
    pub(crate) writer: W,
}

/// A peer that has identified itself and asks for a link.
pub(crate) struct IdentifiedPeer<R, W> {
    pub(crate) peer: WorkerRef,
    pub(crate) stream: LinkStream<R, W>,
}

/// The request that the first message of a connection makes.
pub(crate) enum JoinRequest<R, W> {
    /// A link of this kind.
    Link(RequestedLink, IdentifiedPeer<R, W>),
    /// The connection becomes a further stream of a link.
    FurtherStream {
        from: WorkerRef,
        key: u64,
        stream: LinkStream<R, W>,
    },
}

impl<R, W: AsyncWrite + Unpin> IdentifiedPeer<R, W> {
    /// Sends the reason for which the peer is refused.
    pub(crate) async fn reject(mut self, reason: &str) -> Result<(), LinkError> {
        let reason = reason.to_owned();
        write_message(
            &mut self.stream.writer,
            &LinkMessage::Reject(reason.clone()),
            &[],
        )
        .await?;
        Err(LinkError::RejectedHere(reason))
    }
}

/// The handles that a receiving task gets for its link.
pub(crate) struct ReceiveSession {
    pub(crate) key: u64,
    /// Further streams of the link.
    pub(crate) further_streams: mpsc::Receiver<TcpLinkStream>,
    /// Notified when a newer link of the same peer replaces this one.
    pub(crate) replaced: Arc<Notify>,
}

/// How incoming connections are checked.
#[derive(Clone, Copy)]
pub(crate) struct AcceptPolicy<'a> {
    pub(crate) config: &'a LinksConfig,
    /// Whether a worker of this name belongs to the fleet. Other peers do not receive the
    /// configuration of this worker.
    pub(crate) is_known: &'a (dyn Fn(WorkerRef) -> bool + Send + Sync),
}

/// Reads the first message and checks it against the configuration of this worker.
pub(crate) async fn read_join_request<R, W>(
    AcceptPolicy { config, is_known }: AcceptPolicy<'_>,
    mut stream: LinkStream<R, W>,
) -> Result<JoinRequest<R, W>, LinkError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let first = timeout(config.connect_timeout, stream.reader.message())
        .await
        .map_err(|_| LinkError::HandshakeTimedOut(config.connect_timeout))??;
    let (hello, requested) = match first {
        LinkMessage::Hello(hello) => (hello, RequestedLink::Link),
        LinkMessage::HelloRdma(hello) => (hello, RequestedLink::RdmaRing),
        LinkMessage::Join { from, key } => {
            return Ok(JoinRequest::FurtherStream { from, key, stream });
        }
        _ => return Err(LinkError::Unexpected("in place of a hello")),
    };
    let peer = hello.from;
    if let Some(reason) = mismatch(config, &hello) {
        let sent_reason = if is_known(peer) {
            reason.clone()
        } else {
            "what it said of itself is not what this worker expects; its log has more".into()
        };
        write_message(&mut stream.writer, &LinkMessage::Reject(sent_reason), &[]).await?;
        return Err(LinkError::RejectedHere(reason));
    }
    let identified = IdentifiedPeer { peer, stream };
    Ok(JoinRequest::Link(requested, identified))
}

/// The mismatch between a hello and this worker, if any. The text has both values, so that the log
/// shows which end to change.
fn mismatch(config: &LinksConfig, hello: &LinkHello) -> Option<String> {
    let LinkHello {
        from,
        to,
        block_bytes,
        fingerprint,
    } = hello;
    if *to != config.me {
        let me = config.me;
        return Some(format!(
            "this is worker {me}, and {from} asked for worker {to}"
        ));
    }
    if *fingerprint != config.fingerprint.0 {
        let own = &config.fingerprint.0;
        return Some(format!(
            "KV does not fit: worker {from} has fingerprint \"{fingerprint}\", worker {to} has \"{own}\""
        ));
    }
    if *block_bytes != config.block_bytes {
        let own = config.block_bytes;
        return Some(format!(
            "KV does not fit: blocks of worker {from} have {block_bytes} bytes, those of worker {to} {own}"
        ));
    }
    None
}

/// Receives the heads on one stream while payloads travel on another path. Returns the reason for
/// the end.
pub(crate) async fn receive_heads<R, W>(
    stream: LinkStream<R, W>,
    link_receiver: LinkReceiver,
    session: ReceiveSession,
) -> LinkError
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    tokio::select! {
        error = serve_stream(stream, Arc::new(link_receiver), CreditReturn::OnThisStream) => error,
        () = session.replaced.notified() => LinkError::Replaced,
    }
}

/// The state that the streams of a link share.
pub(crate) struct LinkReceiver {
    pub(crate) peer: WorkerRef,
    pub(crate) block_bytes: u32,
    pub(crate) account: Arc<CreditAccount>,
    pub(crate) payload_source: PayloadSource,
    pub(crate) events: mpsc::Sender<LinkEvent>,
    pub(crate) grants: Option<GrantIssuer>,
}

/// The memory in which payloads of a link arrive.
pub(crate) enum PayloadSource {
    /// Payloads follow their heads on the stream.
    Buffers(BufferPool),
    /// Payloads are in a ring, before or after their heads arrive.
    Ring(ReceiverRing, SlotReadiness),
    /// The sender has written payloads into the pool before their heads arrive.
    Pool,
}

/// The order of a head and the write of its slot.
pub(crate) enum SlotReadiness {
    /// The bytes are there before the head: both ends map the ring.
    Mapped,
    /// The bytes are there once the network card of the sender has written them.
    AfterWrite(PendingWrites),
}

/// Whether this stream of a link returns credit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CreditReturn {
    OnThisStream,
    OnAnotherStream,
}

pub(crate) async fn serve_stream<R, W>(
    stream: LinkStream<R, W>,
    link_receiver: Arc<LinkReceiver>,
    grants: CreditReturn,
) -> LinkError
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let LinkStream {
        mut reader,
        mut writer,
    } = stream;
    let (pongs, ping_nonces) = mpsc::channel(PONGS_MAX);
    let is_announced = matches!(
        link_receiver.payload_source,
        PayloadSource::Ring(_, SlotReadiness::AfterWrite(_))
    );
    let mut received = pin!(receive_messages(&mut reader, &link_receiver, pongs));
    tokio::select! {
            error = send_credit_and_pongs(&mut writer, &link_receiver.account, grants, ping_nonces) => if is_announced {
    // A sender that has disconnected accepts no answer, but the heads and a seal that it
    // sent before may still be waiting here for writes that have already completed, and
    // must not be lost. So reading continues to the end of the stream. Nothing can follow
    // on a stream that accepts no answer, so this ends: the sender gets no answer to its
    // pings and closes the stream after its silence limit.
    received.await
    } else {
    error
    },
            error = &mut received => error,
        }
}

/// Returns credit and answers pings.
async fn send_credit_and_pongs<W: AsyncWrite + Unpin>(
    writer: &mut W,
    account: &CreditAccount,
    grants: CreditReturn,
    mut ping_nonces: mpsc::Receiver<u64>,
) -> LinkError {
    loop {
        let messages = tokio::select! {
            returned = account.wait_returned(), if grants == CreditReturn::OnThisStream => {
                let slots = returned.slots.chunks(SLOTS_PER_CREDIT_MAX);
                let mut messages: Vec<_> = slots.map(|slots| LinkMessage::CreditSlots(slots.to_vec())).collect();
                if returned.bytes > 0 {
                    messages.push(LinkMessage::Credit(returned.bytes));
                }
                messages
            },
            nonce = ping_nonces.recv() => match nonce {
                Some(nonce) => vec![LinkMessage::Pong(nonce)],
                None => return LinkError::Closing,
            },
        };
        for message in &messages {
            if let Err(error) = write_message(writer, message, &[]).await {
                return error;
            }
        }
    }
}
