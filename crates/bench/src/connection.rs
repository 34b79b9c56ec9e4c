//! A connection that knows whether anything was answered over it.
//!
//! Owns: that one fact. Never: reads or changes a byte. Invariant: a connection is kept only after an
//! answer, so one that answered nothing yet is fresh.

use cleave_tls::Stream;
use hyper::http::Extensions;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use std::io::{IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use tower::ServiceExt as _;
use tower::util::MapResponse;

/// Makes connections.
pub(crate) type Connector = MapResponse<cleave_tls::Connector, fn(Stream) -> Kept>;

pub(crate) fn connector(dial: cleave_tls::Connector) -> Connector {
    dial.map_response(Kept::new as fn(_) -> _)
}

/// Whether a connection has answered.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answered(Arc<AtomicBool>);

impl Answered {
    /// Notes that the connection of this response has.
    pub(crate) fn note(extensions: &Extensions) {
        if let Some(Self(answered)) = extensions.get() {
            answered.store(true, Ordering::Relaxed);
        }
    }

    /// Whether this connection has.
    pub(crate) fn over(connected: &Connected) -> bool {
        let mut extensions = Extensions::new();
        connected.get_extras(&mut extensions);
        let answered = extensions.get();
        answered.is_some_and(|Self(answered)| answered.load(Ordering::Relaxed))
    }
}

/// A connection, in the clear or not.
#[derive(Debug)]
pub(crate) struct Kept {
    socket: Stream,
    answered: Answered,
}

impl Kept {
    fn new(socket: Stream) -> Self {
        Self {
            socket,
            answered: Answered::default(),
        }
    }

    fn socket(self: Pin<&mut Self>) -> Pin<&mut Stream> {
        Pin::new(&mut self.get_mut().socket)
    }
}

impl Connection for Kept {
    fn connected(&self) -> Connected {
        self.socket.connected().extra(self.answered.clone())
    }
}

impl Read for Kept {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<Result<()>> {
        self.socket().poll_read(cx, buf)
    }
}

impl Write for Kept {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        self.socket().poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.socket().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.socket().poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        self.socket().poll_write_vectored(cx, bufs)
    }
}
