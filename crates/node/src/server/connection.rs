//! One connection, whatever carries it.
//!
//! Owns: its protocol, and saying to its [`Watch`] what happens. Never: decides how long anything may
//! take.

use super::limits::{HEADERS_BYTES_MAX, HEADERS_COUNT_MAX, PING, RESETS_MAX};
use super::watch::{Reason, Watch};
use super::{Ended, Shared};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, Request};
use axum::http::Response;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tower::ServiceExt;

impl Shared {
    /// Serves a connection until it ends, is let go or the server stops.
    pub(super) async fn serve<S>(
        &self,
        stream: S,
        from: SocketAddr,
        routes: &Router,
    ) -> Result<(), Ended>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let watch = Arc::new(Watch::new(Instant::now()));
        let io = TokioIo::new(Listened {
            stream,
            watch: Arc::clone(&watch),
        });
        let service = service_fn(|request: hyper::Request<Incoming>| {
            let turn = Turn::new(&watch);
            let mut request: Request = request.map(Body::new);
            // The gate before `/admin` asks who is there.
            request.extensions_mut().insert(ConnectInfo(from));
            let answered = routes.clone().oneshot(request);
            async move {
                let Ok(response) = answered.await;
                Ok::<_, Infallible>(turn.over(response))
            }
        });
        let builder = self.builder();
        let mut connection = pin!(builder.serve_connection(io, service));
        let mut looks = interval(self.limits.period());
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut stopping = self.stopping.clone();
        // Once it was asked to end, it is given until the next look.
        let mut asked: Option<Reason> = None;
        loop {
            tokio::select! {
                ended = connection.as_mut() => {
                    return match (ended, asked) {
                        (_, Some(reason)) => Err(Ended::LetGo(reason)),
                        (Err(error), None) => Err(Ended::Broken(io::Error::other(error))),
                        (Ok(()), None) => Ok(()),
                    };
                }
                _ = looks.tick() => match watch.verdict(&self.limits, Instant::now()) {
                    None => asked = None,
                    Some(Reason::Idle) if asked.is_none() => {
                        asked = Some(Reason::Idle);
                        connection.as_mut().graceful_shutdown();
                    }
                    Some(reason) => return Err(Ended::LetGo(reason)),
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

/// A stream that says when something comes.
struct Listened<S> {
    stream: S,
    watch: Arc<Watch>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Listened<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let new = &buffer.filled()[before..];
        if !new.is_empty() {
            self.watch.heard(new, Instant::now());
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Listened<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// A request under way. Dropped, it is over.
struct Turn {
    watch: Arc<Watch>,
    number: u64,
}

impl Turn {
    fn new(watch: &Arc<Watch>) -> Self {
        Self {
            watch: Arc::clone(watch),
            number: watch.begin(),
        }
    }

    /// The answer, which goes on being this turn until its end.
    fn over(self, response: Response<Body>) -> Response<Answer> {
        self.watch.offer(self.number, Instant::now());
        response.map(|body| Answer { body, turn: self })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.watch.end(self.number, Instant::now());
    }
}

/// A body that says when more of it is asked for, and given.
struct Answer {
    body: Body,
    turn: Turn,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Turn { watch, number } = &self.turn;
        watch.take(*number);
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(_))) = &frame {
            let Turn { watch, number } = &self.turn;
            watch.offer(*number, Instant::now());
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
