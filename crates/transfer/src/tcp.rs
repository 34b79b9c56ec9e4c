//! Links over TCP: in clear, or between peers that have shown each other who they are.
//!
//! Owns: which of the two a connection is. Never: takes the one where the other was set up: a worker
//! with a certificate neither dials nor hears one without. Invariant: no byte of a link is read or
//! written before both ends are known for peers, where they are to be.

use crate::config::LinksConfig;
use crate::incoming::Stream;
use crate::socket::{Reader, SocketError};
use cleave_tls::Line;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// What comes in, whichever it is.
pub(crate) type TcpReader = Box<dyn AsyncRead + Send + Unpin>;
/// What goes out.
pub(crate) type TcpWriter = Box<dyn AsyncWrite + Send + Unpin>;
/// One connection, both ways.
pub(crate) type TcpEnd = Stream<TcpReader, TcpWriter>;

/// The dialling end.
pub(crate) async fn dial(config: &LinksConfig, address: &str) -> Result<TcpEnd, SocketError> {
    let stream = TcpStream::connect(address).await;
    let stream = stream.map_err(|error| SocketError::Connect(address.to_owned(), error))?;
    stream.set_nodelay(true)?;
    match &config.peers {
        None => Ok(clear(config, stream)),
        Some(peers) => {
            let shaken = peers.connect(stream, Line::Data).await;
            Ok(secured(config, shaken.map_err(SocketError::NoPeer)?))
        }
    }
}

/// The listening end.
pub(crate) async fn take(config: &LinksConfig, stream: TcpStream) -> Result<TcpEnd, SocketError> {
    stream.set_nodelay(true)?;
    match &config.peers {
        None => Ok(clear(config, stream)),
        Some(peers) => {
            let shaken = peers.accept(stream, Line::Data).await;
            Ok(secured(config, shaken.map_err(SocketError::NoPeer)?))
        }
    }
}

fn clear(config: &LinksConfig, stream: TcpStream) -> TcpEnd {
    let (reader, writer) = stream.into_split();
    end(config, Box::new(reader), Box::new(writer))
}

fn secured<S>(config: &LinksConfig, stream: S) -> TcpEnd
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let (reader, writer) = tokio::io::split(stream);
    end(config, Box::new(reader), Box::new(writer))
}

fn end(config: &LinksConfig, reader: TcpReader, writer: TcpWriter) -> TcpEnd {
    Stream {
        reader: Reader::new(reader, config.silence_max, config.block_bytes),
        writer,
    }
}
