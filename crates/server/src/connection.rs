//! One connection, over any stream.
//!
//! Owns: its protocol, and notifying its [`ConnectionWatch`] of what happens. Never decides how
//! long anything may take.

use super::half_close::{COMMENT, HalfClose, INTERIM, Probes, RequestBody, StreamEnd};
use super::limits::{HEADERS_BYTES_MAX, HEADERS_COUNT_MAX, PING, RESETS_MAX};
use super::watch::{ConnectionCloseReason, ConnectionWatch};
use super::{ConnectionEnd, HttpServerState};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderMap, Response, Version, header};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tower::ServiceExt;

impl HttpServerState {
    /// Serves a connection until it ends, is closed for a reason, or the server stops.
    pub(super) async fn serve<S>(
        &self,
        stream: S,
        from: SocketAddr,
        routes: &Router,
    ) -> Result<(), ConnectionEnd>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let watch = Arc::new(ConnectionWatch::new(Instant::now()));
        let half_close = Arc::new(HalfClose::default());
        let io = TokioIo::new(WatchedStream::new(stream, &watch, &half_close));
        let service = service_fn(|request: hyper::Request<Incoming>| {
            let is_http1 = request.version() == Version::HTTP_11;
            let half_close = is_http1.then(|| Arc::clone(&half_close));
            let turn = WatchedRequest::new(&watch, half_close.clone());
            let mut request: Request = request.map(|body| match half_close {
                Some(half_close) => Body::new(RequestBody::new(body, half_close)),
                None => Body::new(body),
            });
            // The gate before `/admin` checks the client's address.
            request.extensions_mut().insert(ConnectInfo(from));
            let answered = routes.clone().oneshot(request);
            async move {
                let Ok(response) = answered.await;
                Ok::<_, Infallible>(turn.answer(response))
            }
        });
        let builder = self.builder();
        let mut connection = pin!(builder.serve_connection(io, service));
        let mut looks = interval(self.limits.period());
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut stopping = self.stopping.clone();
        // A connection that was asked to end has time until the next look.
        let mut requested_end: Option<ConnectionCloseReason> = None;
        loop {
            tokio::select! {
                ended = connection.as_mut() => {
                    return match (ended, requested_end) {
                        (_, Some(reason)) => Err(ConnectionEnd::Closed(reason)),
                        (Err(error), None) => Err(ConnectionEnd::Broken(io::Error::other(error))),
                        (Ok(()), None) => Ok(()),
                    };
                }
                _ = looks.tick() => match watch.verdict(&self.limits, Instant::now()) {
                    None => requested_end = None,
                    Some(ConnectionCloseReason::Idle) if requested_end.is_none() => {
                        requested_end = Some(ConnectionCloseReason::Idle);
                        connection.as_mut().graceful_shutdown();
                    }
                    Some(reason) => return Err(ConnectionEnd::Closed(reason)),
                },
                Ok(()) = stopping.changed() => connection.as_mut().graceful_shutdown(),
            }
        }
    }

    fn builder(&self) -> Builder<TokioExecutor> {
        let mut builder = Builder::new(TokioExecutor::new());
        // Its own limit on headers would also end idle connections, which may stand for longer.
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(None)
            .max_headers(HEADERS_COUNT_MAX)
            .max_buf_size(HEADERS_BYTES_MAX as usize);
        let (often, answer) = PING;
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(self.limits.streams_max)
            .max_header_list_size(HEADERS_BYTES_MAX)
            .max_pending_accept_reset_streams(RESETS_MAX)
            .keep_alive_interval(often)
            .keep_alive_timeout(answer);
        builder
    }
}

/// A stream that notes when bytes arrive, and probes a client that has closed its sending side.
struct WatchedStream<S> {
    stream: S,
    watch: Arc<ConnectionWatch>,
    half_close: Arc<HalfClose>,
    is_at_end: bool,
    probes: Probes,
    /// The unwritten rest of the last probe; no other bytes may come between.
    interim: &'static [u8],
    is_interim_unflushed: bool,
}

impl<S> WatchedStream<S> {
    fn new(stream: S, watch: &Arc<ConnectionWatch>, half_close: &Arc<HalfClose>) -> Self {
        Self {
            stream,
            watch: Arc::clone(watch),
            half_close: Arc::clone(half_close),
            is_at_end: false,
            probes: Probes::default(),
            interim: &[],
            is_interim_unflushed: false,
        }
    }
}

impl<S: AsyncWrite + Unpin> WatchedStream<S> {
    /// Writes what is left of an interim response.
    fn poll_interim(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.interim.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, self.interim))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.interim = &self.interim[written..];
            self.is_interim_unflushed = true;
        }
        Poll::Ready(Ok(()))
    }

    /// Ready with an error once the client has left.
    fn poll_probes(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        loop {
            if let Err(error) = ready!(self.poll_interim(context)) {
                return Poll::Ready(error);
            }
            if self.is_interim_unflushed {
                if let Err(error) = ready!(Pin::new(&mut self.stream).poll_flush(context)) {
                    return Poll::Ready(error);
                }
                self.is_interim_unflushed = false;
            }
            ready!(self.probes.poll(context));
            self.interim = INTERIM;
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for WatchedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.is_at_end {
            let before = buffer.filled().len();
            ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
            let new = &buffer.filled()[before..];
            if !new.is_empty() {
                self.watch.bytes_received(new, Instant::now());
            }
            self.is_at_end = new.is_empty() && buffer.remaining() > 0;
            if !self.is_at_end {
                return Poll::Ready(Ok(()));
            }
        }
        match self.half_close.end(context.waker()) {
            StreamEnd::Passed => Poll::Ready(Ok(())),
            StreamEnd::Held => Poll::Pending,
            StreamEnd::Probed => self.poll_probes(context).map(Err),
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WatchedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_interim(context))?;
        self.half_close.write();
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        self.half_close.flush();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_interim(context))?;
        self.half_close.write();
        Pin::new(&mut self.stream).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// A request under way. Dropped, it is over.
struct WatchedRequest {
    watch: Arc<ConnectionWatch>,
    number: u64,
    /// Detects a half-closed connection; only for HTTP/1.1.
    half_close: Option<Arc<HalfClose>>,
}

impl WatchedRequest {
    fn new(watch: &Arc<ConnectionWatch>, half_close: Option<Arc<HalfClose>>) -> Self {
        Self {
            watch: Arc::clone(watch),
            number: watch.begin(),
            half_close,
        }
    }

    /// The answer, which keeps the request under way until its end.
    fn answer(self, response: Response<Body>) -> Response<WatchedBody> {
        self.watch.answer_offered(self.number, Instant::now());
        if let Some(half_close) = &self.half_close {
            half_close.answer();
        }
        let is_stream = is_event_stream(response.headers());
        response.map(|body| WatchedBody {
            comments: (is_stream && body.size_hint().exact().is_none()).then(Probes::default),
            is_between_events: true,
            body,
            turn: self,
        })
    }

    fn is_half_closed(&self) -> bool {
        let half_close = self.half_close.as_ref();
        half_close.is_some_and(|half_close| half_close.is_held())
    }
}

impl Drop for WatchedRequest {
    fn drop(&mut self) {
        self.watch.end(self.number, Instant::now());
        if let Some(half_close) = &self.half_close {
            half_close.finish();
        }
    }
}

/// Whether comments may stand between the parts of an answer.
fn is_event_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE);
    let is_stream = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    is_stream && !headers.contains_key(header::CONTENT_ENCODING)
}

/// A body that notes when more of it is asked for, and given.
struct WatchedBody {
    body: Body,
    turn: WatchedRequest,
    /// When a half-closed client is written to while there are no events; none if this is no event
    /// stream.
    comments: Option<Probes>,
    is_between_events: bool,
}

impl WatchedBody {
    /// The next frame of the body, or a comment while a half-closed client waits for one.
    fn poll_part(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        let Some(comments) = &mut self.comments else {
            return frame;
        };
        if let Poll::Ready(Some(Ok(frame))) = &frame {
            let data = frame.data_ref().filter(|data| !data.is_empty());
            self.is_between_events = data.map_or(self.is_between_events, |d| d.ends_with(b"\n\n"));
        }
        if frame.is_ready() || !self.is_between_events || !self.turn.is_half_closed() {
            return frame;
        }
        ready!(comments.poll(context));
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))))
    }
}

impl HttpBody for WatchedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.turn.watch.answer_read(self.turn.number);
        let frame = self.poll_part(context);
        if let Poll::Ready(Some(Ok(_))) = &frame {
            self.turn
                .watch
                .answer_offered(self.turn.number, Instant::now());
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
