//! Clients that close their sending side and wait for the answer.
//!
//! Owns: the end of a connection's incoming bytes: when hyper sees it, and whether the client is
//! still there. Never: reads or writes a socket. Invariant: the end is held back only while an
//! HTTP/1.1 request is under way whose body has arrived, or while bytes of its answer are not
//! written yet.
//!
//! A FIN alone does not tell a client that has left from one that waits (`shutdown(SHUT_WR)`, `nc
//! -N`): hyper takes both for departures. A system whose process has closed the socket answers
//! further bytes by a reset, and the next write fails. So bytes that mean nothing are written while
//! there is nothing else to write: `100 Continue` before the answer, which a client of HTTP/1.1
//! must be able to skip (RFC 9110, section 15.2), and comments between the events of an event
//! stream. HTTP/1.0 has no interim responses: its FIN stays a departure. HTTP/2 has no half-closed
//! connections; its streams are half-closed by nature.

use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};
use parking_lot::{Mutex, MutexGuard};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};

/// Written to a client whose sending side is closed, before the answer.
pub(super) const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// Written to it between events: a comment and an empty line, which end no event.
pub(super) const COMMENT: &[u8] = b":\n\n";
/// From the first probe to the second; each further wait is twice the one before.
const WAIT_MIN: Duration = Duration::from_millis(20);
/// The longest wait between two probes.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// The incoming end of a connection and its one request of HTTP/1.1, shared by stream, request and
/// answer.
#[derive(Debug, Default)]
pub(super) struct HalfClose(Mutex<HalfCloseState>);

#[derive(Debug, Default)]
struct HalfCloseState {
    exchange: Option<HttpExchange>,
    /// hyper may have bytes of an answer in its buffers: it has not flushed since they were made.
    is_unflushed: bool,
    is_held: bool,
    /// Reads the stream, while the end is held.
    reader: Option<Waker>,
}

/// A request of HTTP/1.1 under way.
#[derive(Debug)]
struct HttpExchange {
    upload: Upload,
    is_answered: bool,
}

#[derive(Debug)]
enum Upload {
    /// More of it may come. The waker is that of its reader.
    Arriving(Option<Waker>),
    Whole,
    /// Its reader wants bytes that will not come, or has left.
    Broken,
}

/// The end of the incoming bytes, as hyper shall see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamEnd {
    Passed,
    /// Not yet, and the client may be asked whether it is there.
    Probed,
    Held,
}

impl HalfClose {
    fn lock(&self) -> MutexGuard<'_, HalfCloseState> {
        self.0.lock()
    }

    /// A request of HTTP/1.1 has begun, `is_whole` if it has no body.
    fn begin(&self, is_whole: bool) {
        let upload = if is_whole {
            Upload::Whole
        } else {
            Upload::Arriving(None)
        };
        self.lock().exchange = Some(HttpExchange {
            upload,
            is_answered: false,
        });
    }

    /// The answer is given to hyper from here on.
    pub(super) fn answer(&self) {
        if let Some(exchange) = &mut self.lock().exchange {
            exchange.is_answered = true;
        }
    }

    /// The request is over; its answer's last bytes may be in hyper's buffers.
    pub(super) fn finish(&self) {
        let mut state = self.lock();
        let ended = state.exchange.take();
        state.is_unflushed |= ended.is_some_and(|exchange| exchange.is_answered);
        wake(state.reader.take());
    }

    pub(super) fn write(&self) {
        let mut state = self.lock();
        state.is_unflushed |= state.exchange.is_some();
    }

    /// Everything that hyper had has left.
    pub(super) fn flush(&self) {
        let mut state = self.lock();
        // hyper flushes at each turn of its loop: there is news only in the first after a write.
        if std::mem::take(&mut state.is_unflushed) {
            wake(state.reader.take());
        }
    }

    /// The client sends nothing more. `reader` is woken when that may have become hyper's to know.
    pub(super) fn end(&self, reader: &Waker) -> StreamEnd {
        let mut state = self.lock();
        let is_unflushed = state.is_unflushed;
        let body_reader = match &mut state.exchange {
            None if !is_unflushed => return state.pass(),
            None => None,
            Some(exchange) => match &mut exchange.upload {
                Upload::Broken => return state.pass(),
                Upload::Arriving(reader) => reader.take(),
                Upload::Whole => None,
            },
        };
        state.is_held = true;
        state.reader = Some(reader.clone());
        let exchange = state.exchange.as_ref();
        let is_unanswered = exchange.is_some_and(|exchange| !exchange.is_answered);
        drop(state);
        // Its next look at the body tells whether that is whole.
        wake(body_reader);
        let is_probed = is_unanswered && !is_unflushed;
        if is_probed {
            StreamEnd::Probed
        } else {
            StreamEnd::Held
        }
    }

    pub(super) fn is_held(&self) -> bool {
        self.lock().is_held
    }

    /// The body's reader is about to ask for more; whether the end was held before that.
    fn ask(&self, body_reader: &Waker) -> bool {
        let mut state = self.lock();
        if let Some(HttpExchange {
            upload: Upload::Arriving(reader),
            ..
        }) = &mut state.exchange
        {
            *reader = Some(body_reader.clone());
        }
        state.is_held
    }

    /// The end of the body is known.
    fn settle(&self, upload: Upload) {
        let mut state = self.lock();
        if let Some(exchange) = &mut state.exchange {
            exchange.upload = upload;
            wake(state.reader.take());
        }
    }
}

impl HalfCloseState {
    fn pass(&mut self) -> StreamEnd {
        self.is_held = false;
        StreamEnd::Passed
    }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// A request's body that reports its end.
///
/// hyper reads the stream's end either because it wants more of the body, or after the last of it
/// was handed over. In the second case the body never makes its reader wait again.
pub(super) struct RequestBody {
    incoming: Incoming,
    half_close: Arc<HalfClose>,
    is_settled: bool,
}

impl RequestBody {
    /// Of a request that begins now.
    pub(super) fn new(incoming: Incoming, half_close: Arc<HalfClose>) -> Self {
        let is_whole = incoming.is_end_stream();
        half_close.begin(is_whole);
        Self {
            incoming,
            half_close,
            is_settled: is_whole,
        }
    }

    fn settle(&mut self, upload: Upload) {
        if !self.is_settled {
            self.is_settled = true;
            self.half_close.settle(upload);
        }
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.is_settled {
            return Pin::new(&mut self.incoming).poll_frame(context);
        }
        let was_held = self.half_close.ask(context.waker());
        let frame = Pin::new(&mut self.incoming).poll_frame(context);
        match &frame {
            Poll::Pending if was_held => self.settle(Upload::Broken),
            Poll::Pending => {}
            Poll::Ready(Some(Err(_))) => self.settle(Upload::Broken),
            Poll::Ready(Some(Ok(_))) if !self.incoming.is_end_stream() => {}
            Poll::Ready(_) => self.settle(Upload::Whole),
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

impl Drop for RequestBody {
    /// A body that no handler read may have arrived whole.
    fn drop(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        while !self.is_settled {
            match Pin::new(&mut self.incoming).poll_frame(&mut context) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(None) => self.settle(Upload::Whole),
                Poll::Ready(Some(Err(_))) | Poll::Pending => self.settle(Upload::Broken),
            }
        }
    }
}

/// The times at which a client is asked: at once, and then less and less often.
#[derive(Debug, Default)]
pub(super) struct Probes(Option<(Pin<Box<Sleep>>, Duration)>);

impl Probes {
    /// Ready each time that a probe is due.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        match &mut self.0 {
            None => {
                self.0 = Some((Box::pin(sleep(WAIT_MIN)), WAIT_MIN));
                Poll::Ready(())
            }
            Some((sleep, wait)) => {
                let due = sleep.as_mut().poll(context);
                if due.is_ready() {
                    *wait = (*wait * 2).min(WAIT_MAX);
                    sleep.as_mut().reset(Instant::now() + *wait);
                }
                due
            }
        }
    }
}
