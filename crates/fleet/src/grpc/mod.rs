//! Connections between processes: one gRPC stream per worker and router, dialled by the worker.
//!
//! Owns: the exchange at the start, heartbeats both ways, reconnecting. Never shows a wire type to
//! other modules. Invariant: a stream on which an end receives nothing for as long as it allows is
//! lost to that end, and the other end sends heartbeats often enough; no end may ask for less than
//! [`SILENCE_MIN`].

mod inbound;
mod message_limit;
mod resolve;
mod service;
mod turned_away;
mod uplink;
mod window;

pub use resolve::{local_address, watch_names};
pub use service::{ModelAdmission, fleet_routes};
pub use uplink::{FAREWELL_MAX, RouterConnections, Uplink};
#[cfg(test)]
pub(crate) use {inbound::InboundMessage, window::OutboundMessage};

use crate::wire::{EMISSIONS_BYTES_MAX, HELLO_BYTES_MAX, ORDER_BYTES_MAX};
use service::StreamError;
use std::error::Error;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tonic::Streaming;

/// How long connecting and the router's greeting may take, each.
const DIAL_MAX: Duration = Duration::from_secs(10);
/// How long a worker may take to introduce itself: its tokenizer crosses the network.
const HELLO_MAX: Duration = Duration::from_secs(60);
/// How long a router may take to read a tokenizer before it welcomes.
const WELCOME_MAX: Duration = Duration::from_secs(120);
/// Largest message from a worker: its hello. The codec has a limit for each kind.
const UPWARD_BYTES_MAX: usize = HELLO_BYTES_MAX + CHECKSUM_BYTES_MAX;
/// Largest message from a worker after its hello: output tokens with their scores.
const LATER_BYTES_MAX: usize = EMISSIONS_BYTES_MAX + CHECKSUM_BYTES_MAX;
/// Largest message from a router: an order.
const DOWNWARD_BYTES_MAX: usize = ORDER_BYTES_MAX + CHECKSUM_BYTES_MAX;
/// Room for a message's checksum.
const CHECKSUM_BYTES_MAX: usize = 64;
/// Messages between the pump and the socket; the line behind it holds the rest.
const STREAM_ITEMS_MAX: usize = 256;
/// The shortest interval between heartbeats, whatever silence the other end allows.
const HEARTBEAT_INTERVAL_MIN: Duration = Duration::from_millis(20);
/// The shortest silence that may count as a loss: five of the quickest heartbeats.
pub const SILENCE_MIN: Duration = Duration::from_millis(100);
/// The default limit on silence. A process that dies closes its connections at once; this is for
/// one that is stopped or cut off, whose streams wait this long. It is five heartbeats, so that an
/// overloaded machine does not count as lost.
pub const SILENCE_DEFAULT: Duration = Duration::from_secs(5);
/// Router ids are drawn from so many; the numbers above are this process's own.
const ROUTERS_MAX: u64 = 1 << 24;

/// The interval of heartbeats for an end that takes `silence` for a loss.
fn heartbeat_interval(silence: Duration) -> Duration {
    (silence / 4).clamp(HEARTBEAT_INTERVAL_MIN, Duration::from_secs(1))
}

/// The next message, unless the other side is silent for too long. A process that was itself
/// stopped meanwhile cannot tell whose silence that was: it listens for once more.
async fn next_message<T>(messages: &mut Streaming<T>, silence: Duration) -> Result<T, StreamError> {
    for _ in 0..2 {
        let began = Instant::now();
        if let Ok(message) = timeout(silence, messages.message()).await {
            return message?.ok_or(StreamError::Closed);
        }
        if began.elapsed() < silence + silence / 4 {
            break;
        }
    }
    Err(StreamError::Silent(silence))
}

/// An error's own text with those of all its causes: the outermost often only says that there was
/// one, and the innermost not where. A cause that repeats what is around it is left out.
fn with_causes(text: impl Into<String>, error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |&error| error.source());
    causes.fold(text.into(), |text, cause| {
        let cause = cause.to_string();
        if text.contains(&cause) {
            text
        } else {
            format!("{text}: {cause}")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::{Body, Bytes};
    use bytes::Buf;
    use futures::{StreamExt, poll};
    use std::convert::Infallible;
    use std::pin::pin;
    use tokio::sync::mpsc;
    use tokio::time::advance;
    use tokio_stream::wrappers::UnboundedReceiverStream;
    use tonic::Status;
    use tonic::codec::{DecodeBuf, Decoder};

    /// Messages of one byte.
    struct ByteDecoder;

    impl Decoder for ByteDecoder {
        type Item = u8;
        type Error = Status;

        fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<u8>, Status> {
            Ok(bytes.has_remaining().then(|| bytes.get_u8()))
        }
    }

    fn byte_stream() -> (mpsc::UnboundedSender<u8>, Streaming<u8>) {
        let (sender, bytes) = mpsc::unbounded_channel();
        let frames = UnboundedReceiverStream::new(bytes)
            .map(|byte| Ok::<_, Infallible>(Bytes::from(vec![0, 0, 0, 0, 1, byte])));
        let body = Body::from_stream(frames);
        (
            sender,
            Streaming::new_request(ByteDecoder, body, None, None),
        )
    }

    const SILENCE: Duration = Duration::from_secs(1);
    /// For so long a process stands still in these tests.
    const STOPPED: Duration = Duration::from_millis(3500);

    #[tokio::test(start_paused = true)]
    async fn a_silent_peer_is_lost_when_its_silence_ends() {
        let (sender, mut messages) = byte_stream();
        sender.send(7).unwrap();
        assert_eq!(next_message(&mut messages, SILENCE).await.unwrap(), 7);
        let began = Instant::now();
        let error = next_message(&mut messages, SILENCE).await.unwrap_err();
        assert!(matches!(error, StreamError::Silent(SILENCE)), "{error}");
        assert_eq!(began.elapsed(), SILENCE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_resumed_process_listens_once_more() {
        let (sender, mut messages) = byte_stream();
        {
            let mut next = pin!(next_message(&mut messages, SILENCE));
            assert!(poll!(&mut next).is_pending());
            advance(STOPPED).await;
            assert!(poll!(&mut next).is_pending(), "it listens again");
            sender.send(7).unwrap();
            assert_eq!(next.await.unwrap(), 7);
        }
        // A peer that stays silent is lost after another silence.
        let mut next = pin!(next_message(&mut messages, SILENCE));
        assert!(poll!(&mut next).is_pending());
        advance(STOPPED).await;
        let woke = Instant::now();
        let error = next.await.unwrap_err();
        assert!(matches!(error, StreamError::Silent(SILENCE)), "{error}");
        assert_eq!(woke.elapsed(), SILENCE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_closed_stream_is_no_silence() {
        let (sender, mut messages) = byte_stream();
        drop(sender);
        let error = next_message(&mut messages, SILENCE).await.unwrap_err();
        assert!(matches!(error, StreamError::Closed), "{error}");
    }

    #[test]
    fn every_cause_of_a_stream_error_is_named_once() {
        let inner = std::io::Error::other("too_many_data_frames");
        let outer = std::io::Error::other(inner);
        let mut status = tonic::Status::unknown("error reading a body");
        status.set_source(std::sync::Arc::new(outer));
        let text = StreamError::from(status).to_string();
        assert_eq!(text, "error reading a body: too_many_data_frames");
    }

    #[test]
    fn every_allowed_silence_holds_four_heartbeats() {
        for silence in [SILENCE_MIN, Duration::from_secs(5), Duration::from_secs(60)] {
            assert!(heartbeat_interval(silence) * 4 <= silence, "{silence:?}");
        }
    }
}
