//! The dialling end of the handshake: sends a hello, and receives the terms on which the receiver
//! accepts the link.
//!
//! Owns: those terms, and the request to the peer. Never: tries another transport. Invariant: no
//! link is made on terms under which no block could be sent.

use crate::config::LinksConfig;
use crate::incoming::LinkStream;
use crate::socket::{LinkError, write_message};
use crate::transports::Transport;
use crate::wire::{LinkHello, LinkMessage};
use cleave_domain::WorkerRef;
use tokio::io::{AsyncRead, AsyncWrite};

/// Established connections and the agreed terms.
pub(crate) struct DialledLink<R, W> {
    pub(crate) streams: Vec<LinkStream<R, W>>,
    pub(crate) terms: LinkTerms,
}

/// The kind of link that the dialler asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestedLink {
    /// A link whose payloads travel on its streams or, within a host, through shared memory.
    Link,
    /// A link whose payloads the network card of this worker writes into a ring of the peer.
    RdmaRing,
}

/// The terms in the welcome of the receiver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkTerms {
    pub(crate) window: u32,
    pub(crate) frame_bytes: u32,
    /// Identifies the link for further streams.
    pub(crate) key: u64,
}

impl LinkTerms {
    /// Refuses terms under which no block could be sent, or only in tiny frames: hand-offs would
    /// wait for ever without a reported reason.
    fn check(self, config: &LinksConfig, peer: WorkerRef) -> Result<Self, LinkError> {
        let (block_bytes, frame_bytes_min) = (config.block_bytes, config.frame_bytes_min());
        let (window, frame_bytes) = (self.window, self.frame_bytes);
        if window < block_bytes {
            return Err(LinkError::RejectedHere(format!(
                "worker {peer} gives {window} bytes of credit, and a block has {block_bytes}"
            )));
        }
        if frame_bytes < frame_bytes_min {
            return Err(LinkError::RejectedHere(format!(
                "worker {peer} takes frames of {frame_bytes} bytes, and {frame_bytes_min} is the least"
            )));
        }
        Ok(self)
    }
}

/// Sends the hello and receives the terms of the link.
pub(crate) async fn perform_handshake<R, W>(
    config: &LinksConfig,
    peer: WorkerRef,
    requested: RequestedLink,
    stream: &mut LinkStream<R, W>,
) -> Result<LinkTerms, LinkError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let hello = LinkHello {
        from: config.me,
        to: peer,
        block_bytes: config.block_bytes,
        fingerprint: config.fingerprint.0.clone(),
    };
    let hello = match requested {
        RequestedLink::Link => LinkMessage::Hello(hello),
        RequestedLink::RdmaRing => LinkMessage::HelloRdma(hello),
    };
    write_message(&mut stream.writer, &hello, &[]).await?;
    match stream.reader.message().await? {
        LinkMessage::Welcome { me, .. } if me != peer => Err(LinkError::RejectedHere(format!(
            "worker {me} answers at the address of worker {peer}"
        ))),
        LinkMessage::Welcome {
            me: _,
            credit,
            key,
            frame_bytes,
        } => {
            let terms = LinkTerms {
                window: u32::try_from(credit).unwrap_or(u32::MAX),
                frame_bytes: frame_bytes.min(config.block_bytes),
                key,
            };
            terms.check(config, peer)
        }
        LinkMessage::Reject(reason) => Err(LinkError::RejectedByPeer(reason)),
        LinkMessage::NoRing(reason) if requested == RequestedLink::RdmaRing => {
            Err(LinkError::Transport(Transport::Nixl, reason))
        }
        _ => Err(LinkError::Unexpected("in place of a welcome")),
    }
}
