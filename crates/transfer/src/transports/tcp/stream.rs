//! Connections of links over TCP: plain, or over TLS between peers with certificates.
//!
//! Owns: the choice of the two. Never: mixes them: a worker with a certificate neither dials nor
//! accepts a plain connection. Invariant: if TLS is configured, no byte of a link is read or
//! written before both ends are authenticated.

use crate::config::LinksConfig;
use crate::incoming::LinkStream;
use crate::socket::{LinkError, MessageReader};
use cleave_tls::{ExplainedStream, PeerProtocol};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// The reading half, plain or TLS.
pub(crate) type TcpReader = Box<dyn AsyncRead + Send + Unpin>;
/// The writing half, plain or TLS.
pub(crate) type TcpWriter = Box<dyn AsyncWrite + Send + Unpin>;
/// One connection, with both directions.
pub(crate) type TcpLinkStream = LinkStream<TcpReader, TcpWriter>;

/// Connects to a listener.
pub(crate) async fn connect(
    config: &LinksConfig,
    address: &str,
) -> Result<TcpLinkStream, LinkError> {
    let stream = TcpStream::connect(address).await;
    let stream = stream.map_err(|error| LinkError::Connect(address.to_owned(), error))?;
    stream.set_nodelay(true)?;
    match &config.peer_tls {
        None => Ok(plain_stream(config, stream)),
        Some(peers) => {
            let handshake = peers.connect(stream, PeerProtocol::Data).await;
            Ok(tls_stream(config, handshake.map_err(LinkError::NotAPeer)?))
        }
    }
}

/// Takes an accepted connection.
pub(crate) async fn accept(
    config: &LinksConfig,
    stream: TcpStream,
) -> Result<TcpLinkStream, LinkError> {
    stream.set_nodelay(true)?;
    match &config.peer_tls {
        None => Ok(plain_stream(config, stream)),
        Some(peers) => {
            let handshake = peers.accept(stream, PeerProtocol::Data).await;
            Ok(tls_stream(config, handshake.map_err(LinkError::NotAPeer)?))
        }
    }
}

fn plain_stream(config: &LinksConfig, stream: TcpStream) -> TcpLinkStream {
    let (reader, writer) = stream.into_split();
    link_stream(config, Box::new(reader), Box::new(writer))
}

/// A peer may refuse this end's certificate after the handshake, so errors of the stream explain
/// themselves too.
fn tls_stream<S>(config: &LinksConfig, stream: S) -> TcpLinkStream
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (reader, writer) = tokio::io::split(ExplainedStream(stream));
    link_stream(config, Box::new(reader), Box::new(writer))
}

fn link_stream(config: &LinksConfig, reader: TcpReader, writer: TcpWriter) -> TcpLinkStream {
    LinkStream {
        reader: MessageReader::new(reader, config.silence_max, config.block_bytes),
        writer,
    }
}
