//! How a link over sockets begins, at the end that dials: a hello, and the terms on which the receiver takes it.
//!
//! Owns: those terms, and what is asked of a peer. Never: tries another way. Invariant: on terms under which no block could
//! ever be sent, no link is made.

use crate::config::LinksConfig;
use crate::incoming::{STREAMS_MAX, Stream};
use crate::socket::{SocketError, write};
use crate::tcp::{self, TcpReader, TcpWriter};
use crate::wire::{Hello, Message};
use cleave_domain::WorkerRef;
use tokio::io::{AsyncRead, AsyncWrite};

/// Connections that stand, in agreement.
pub(crate) struct Dialled<R, W> {
    pub(crate) streams: Vec<Stream<R, W>>,
    pub(crate) terms: Terms,
}

/// What is asked of a peer that is dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// A link whose payloads come over its streams, or as its host can bring them.
    Link,
    /// One whose payloads this worker's network card writes into a ring of the peer's.
    Landing,
}

/// What the receiver's welcome said.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) window: u32,
    pub(crate) frame_bytes: u32,
    /// Names the link.
    pub(crate) key: u64,
}

impl Terms {
    /// On terms under which no block could ever be sent, or only in crumbs, no link is made: hand-offs
    /// would wait on it for ever, and nobody would know why.
    fn check(self, config: &LinksConfig, peer: WorkerRef) -> Result<Self, SocketError> {
        let (block_bytes, frame_bytes_min) = (config.block_bytes, config.frame_bytes_min());
        let (window, frame_bytes) = (self.window, self.frame_bytes);
        if window < block_bytes {
            return Err(SocketError::Refused(format!(
                "worker {peer} gives {window} bytes of credit, and a block has {block_bytes}"
            )));
        }
        if frame_bytes < frame_bytes_min {
            return Err(SocketError::Refused(format!(
                "worker {peer} takes frames of {frame_bytes} bytes, and {frame_bytes_min} is the least"
            )));
        }
        Ok(self)
    }
}

/// Connects all streams and shakes hands.
pub(crate) async fn dial(
    config: &LinksConfig,
    peer: WorkerRef,
    address: &str,
) -> Result<Dialled<TcpReader, TcpWriter>, SocketError> {
    let mut first = tcp::dial(config, address).await?;
    let terms = shake_hands(config, (peer, Wish::Link), &mut first).await?;
    let mut streams = vec![first];
    let streams_count = usize::from(config.streams_count).clamp(1, STREAMS_MAX);
    while streams.len() < streams_count {
        let mut further = tcp::dial(config, address).await?;
        let join = Message::Join {
            from: config.me,
            key: terms.key,
        };
        write(&mut further.writer, &join, &[]).await?;
        match further.reader.message().await? {
            Message::Joined => streams.push(further),
            Message::Reject(reason) => return Err(SocketError::Rejected(reason)),
            _ => return Err(SocketError::Unexpected("in answer to a join")),
        }
    }
    Ok(Dialled { streams, terms })
}

/// Says who this is and hears on which terms the link is taken.
pub(crate) async fn shake_hands<R, W>(
    config: &LinksConfig,
    (peer, wish): (WorkerRef, Wish),
    stream: &mut Stream<R, W>,
) -> Result<Terms, SocketError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let hello = Hello {
        from: config.me,
        to: peer,
        block_bytes: config.block_bytes,
        fingerprint: config.fingerprint.0.clone(),
    };
    let hello = match wish {
        Wish::Link => Message::Hello(hello),
        Wish::Landing => Message::Approach(hello),
    };
    write(&mut stream.writer, &hello, &[]).await?;
    match stream.reader.message().await? {
        Message::Welcome { me, .. } if me != peer => Err(SocketError::Refused(format!(
            "worker {me} answers where worker {peer} was to be"
        ))),
        Message::Welcome {
            me: _,
            credit,
            key,
            frame_bytes,
        } => {
            let terms = Terms {
                window: u32::try_from(credit).unwrap_or(u32::MAX),
                frame_bytes: frame_bytes.min(config.block_bytes),
                key,
            };
            terms.check(config, peer)
        }
        Message::Reject(reason) => Err(SocketError::Rejected(reason)),
        Message::NoLanding(reason) if wish == Wish::Landing => Err(SocketError::Nixl(reason)),
        _ => Err(SocketError::Unexpected("in place of a welcome")),
    }
}
