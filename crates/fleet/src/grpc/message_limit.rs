//! How long a message of a worker's stream may be, by its place in the stream.
//!
//! Owns: the look at each message's length, before any of it is kept. Never: reads what a message
//! says. Invariant: only the first message, a worker's hello with its tokenizer, may be longer than
//! [`LATER_BYTES_MAX`]; a longer one behind it ends the stream when its length is known.
//!
//! The gRPC library has one limit for all messages of a stream, and makes room for a message as
//! soon as it knows the length.

use super::{LATER_BYTES_MAX, UPWARD_BYTES_MAX};
use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::Status;

/// A byte that says whether a message is compressed, and its length.
const PREFIX_BYTES: usize = 5;

/// A stream of messages with its bounds.
pub(super) fn limited(body: Body) -> Body {
    Body::new(LengthLimitedBody {
        body,
        lengths: MessageLengths::default(),
    })
}

struct LengthLimitedBody {
    body: Body,
    lengths: MessageLengths,
}

/// Where in a stream of messages its bytes are.
#[derive(Debug, Default)]
struct MessageLengths {
    prefix: [u8; PREFIX_BYTES],
    prefix_len: usize,
    /// Of the message at hand, what is still to come.
    message_left: usize,
    is_later: bool,
}

impl MessageLengths {
    /// Follows the stream's next bytes.
    fn follow(&mut self, mut bytes: &[u8]) -> Result<(), Status> {
        while !bytes.is_empty() {
            if self.message_left > 0 {
                let len = self.message_left.min(bytes.len());
                self.message_left -= len;
                bytes = &bytes[len..];
                continue;
            }
            let len = (PREFIX_BYTES - self.prefix_len).min(bytes.len());
            self.prefix[self.prefix_len..][..len].copy_from_slice(&bytes[..len]);
            self.prefix_len += len;
            bytes = &bytes[len..];
            if self.prefix_len == PREFIX_BYTES {
                self.begin_message()?;
            }
        }
        Ok(())
    }

    fn begin_message(&mut self) -> Result<(), Status> {
        let [_, length @ ..] = self.prefix;
        let length = u32::from_be_bytes(length) as usize;
        let bytes_max = if self.is_later {
            LATER_BYTES_MAX
        } else {
            UPWARD_BYTES_MAX
        };
        if length > bytes_max {
            return Err(Status::out_of_range(format!(
                "a message is too long for its place in the stream: {length} bytes, and at most {bytes_max} are read"
            )));
        }
        (self.message_left, self.prefix_len) = (length, 0);
        self.is_later = true;
        Ok(())
    }
}

impl HttpBody for LengthLimitedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(bytes) = frame.data_ref()
            && let Err(too_long) = self.lengths.follow(bytes)
        {
            return Poll::Ready(Some(Err(axum::Error::new(too_long))));
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

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{StreamExt, stream};
    use http_body_util::BodyExt;

    fn prefix(length: usize) -> Vec<u8> {
        let length = u32::try_from(length).unwrap().to_be_bytes();
        [&[0], &length[..]].concat()
    }

    fn follow(pieces: &[&[u8]]) -> Result<(), Status> {
        let mut lengths = MessageLengths::default();
        pieces.iter().try_for_each(|piece| lengths.follow(piece))
    }

    #[test]
    fn only_the_first_message_may_be_as_long_as_a_hello() {
        let long = LATER_BYTES_MAX + 1;
        let hello = vec![0; long];
        assert!(follow(&[&prefix(long), &hello, &prefix(LATER_BYTES_MAX)]).is_ok());
        // The length alone ends the stream.
        let error = follow(&[&prefix(long), &hello, &prefix(long)]).unwrap_err();
        assert!(error.message().contains(&long.to_string()), "{error}");
        assert!(follow(&[&prefix(UPWARD_BYTES_MAX + 1)]).is_err());
    }

    #[test]
    fn lengths_are_followed_however_bytes_are_cut() {
        let mut bytes = Vec::new();
        for length in [3, 0, 700, 1] {
            bytes.extend(prefix(length));
            bytes.extend(vec![0xff; length]);
        }
        bytes.extend(prefix(LATER_BYTES_MAX + 1));
        for size in [1, 2, 3, 5, 7, 64, 4096] {
            let pieces: Vec<&[u8]> = bytes.chunks(size).collect();
            assert!(follow(&pieces).is_err(), "{size}");
            let sound: Vec<&[u8]> = bytes[..bytes.len() - PREFIX_BYTES].chunks(size).collect();
            assert!(follow(&sound).is_ok(), "{size}");
        }
    }

    #[tokio::test]
    async fn a_stream_ends_where_a_message_is_too_long() {
        let pieces = [prefix(2), vec![1, 2], prefix(LATER_BYTES_MAX + 1), vec![3]];
        let pieces = stream::iter(pieces).map(|piece| Ok::<_, axum::Error>(Bytes::from(piece)));
        let mut body = limited(Body::from_stream(pieces));
        for _ in 0..2 {
            assert!(body.frame().await.unwrap().is_ok());
        }
        let error = body.frame().await.unwrap().unwrap_err();
        assert!(
            error.to_string().contains("too long for its place"),
            "{error}"
        );
    }
}
