//! A connection that records whether an answer came over it.
//!
//! Owns: that flag. Never: reads or changes a byte. Invariant: a connection is kept only after an
//! answer, so one without an answer is fresh.

use cleave_tls::HttpTlsStream;
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

pub(crate) type TrackedConnector =
    MapResponse<cleave_tls::HttpTlsConnector, fn(HttpTlsStream) -> TrackedConnection>;

pub(crate) fn connector(dial: cleave_tls::HttpTlsConnector) -> TrackedConnector {
    dial.map_response(TrackedConnection::new as fn(_) -> _)
}

/// The flag of one connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct AnsweredFlag(Arc<AtomicBool>);

impl AnsweredFlag {
    /// Sets the flag of this response's connection.
    pub(crate) fn mark(extensions: &Extensions) {
        if let Some(Self(answered)) = extensions.get() {
            answered.store(true, Ordering::Relaxed);
        }
    }

    /// Whether this connection's flag is set.
    pub(crate) fn is_set_on(connected: &Connected) -> bool {
        let mut extensions = Extensions::new();
        connected.get_extras(&mut extensions);
        let answered = extensions.get();
        answered.is_some_and(|Self(answered)| answered.load(Ordering::Relaxed))
    }
}

/// A connection, with or without TLS.
#[derive(Debug)]
pub(crate) struct TrackedConnection {
    socket: HttpTlsStream,
    answered: AnsweredFlag,
}

impl TrackedConnection {
    fn new(socket: HttpTlsStream) -> Self {
        Self {
            socket,
            answered: AnsweredFlag::default(),
        }
    }

    fn socket(self: Pin<&mut Self>) -> Pin<&mut HttpTlsStream> {
        Pin::new(&mut self.get_mut().socket)
    }
}

impl Connection for TrackedConnection {
    fn connected(&self) -> Connected {
        self.socket.connected().extra(self.answered.clone())
    }
}

impl Read for TrackedConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<Result<()>> {
        self.socket().poll_read(cx, buf)
    }
}

impl Write for TrackedConnection {
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
