//! Reads messages from a byte stream with a limit on silence, and writes head and payload in one
//! vectored call.
//!
//! Owns: the buffers of one connection, and the list of reasons for its end. Never: knows the
//! purpose of a message.
//! Invariant: nothing longer than the limit of its kind is read into memory, and no read waits
//! longer than the limit on silence.
//!
//! A payload is read from the socket directly into the buffer that is delivered, and written from
//! the buffer that it was put into: the only copy at either end is the one of the kernel.

use crate::grant::WriteGrantError;
use crate::transports::Transport;
use crate::wire::{
    FRAME, FRAME_HEAD_BYTES, FrameHead, HEADER_BYTES, LinkMessage, LinkWireError, MessageHeader,
    PROBE,
};
use bytes::{Buf, BytesMut};
use cleave_domain::HandoffId;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::time::timeout;

/// The reason for which a link ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("the peer closed the link")]
    Closed,
    #[error("the stream ended {missing} bytes short of a whole message")]
    Truncated { missing: usize },
    #[error("nothing was heard for {0:?}")]
    SilenceTimedOut(Duration),
    #[error("a write that was announced did not come for {0:?}")]
    WriteTimedOut(Duration),
    #[error("connecting and shaking hands took longer than {0:?}")]
    HandshakeTimedOut(Duration),
    #[error("cannot connect to {0}: {1}")]
    Connect(String, io::Error),
    #[error("no peer of this fleet: {0}")]
    NotAPeer(io::Error),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Wire(#[from] LinkWireError),
    #[error("unexpected message {0}")]
    Unexpected(&'static str),
    #[error("turned away by the peer: {0}")]
    RejectedByPeer(String),
    #[error("turned the peer away: {0}")]
    RejectedHere(String),
    #[error("the peer sent more payload than it was granted")]
    CreditExceeded,
    #[error("hand-off {0}: {1}")]
    InvalidGrant(HandoffId, WriteGrantError),
    #[error("{label}: {1}", label = .0.facts().label)]
    Transport(Transport, String),
    #[error("the link that the stream was to join is gone")]
    NoSuchLink,
    #[error("replaced by a new link of the same peer")]
    Replaced,
    #[error("this worker is closing")]
    Closing,
}

impl LinkError {
    /// Whether an end closed the link, which is no fault of the link.
    pub(crate) fn is_closing(&self) -> bool {
        match self {
            Self::Closed | Self::Replaced | Self::Closing => true,
            // A peer that ends closes its socket. A write may notice that before a read does, and
            // bytes that the peer had not read make a reset of the end.
            Self::Io(error) => matches!(
                error.kind(),
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
            ),
            _ => false,
        }
    }

    /// Whether every other transport to the same peer would fail the same way.
    pub(crate) fn is_independent_of_transport(&self) -> bool {
        matches!(
            self,
            Self::RejectedByPeer(_) | Self::RejectedHere(_) | Self::Closing
        )
    }
}

/// The next item of a stream. The payload of a frame must be read with [`MessageReader::payload`]
/// before anything else.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReceivedMessage {
    Message(LinkMessage),
    Frame(FrameHead),
    /// A probe; its bytes were discarded.
    Probe,
}

/// The reading half of a connection.
pub(crate) struct MessageReader<R> {
    stream: BufReader<R>,
    silence_max: Duration,
    block_bytes: u32,
    body: BytesMut,
}

impl<R: AsyncRead + Unpin> MessageReader<R> {
    pub(crate) fn new(stream: R, silence_max: Duration, block_bytes: u32) -> Self {
        Self {
            // Headers and control messages use this buffer; payloads bypass it.
            stream: BufReader::with_capacity(4 << 10, stream),
            silence_max,
            block_bytes,
            body: BytesMut::new(),
        }
    }

    pub(crate) async fn next(&mut self) -> Result<ReceivedMessage, LinkError> {
        self.body.clear();
        self.fill(HEADER_BYTES).await?;
        let header = MessageHeader::of(&self.body, self.block_bytes)?;
        self.read_more(header.checksummed_len()).await?;
        match header.kind {
            FRAME => {
                let head = FrameHead::parse(&self.body, self.block_bytes)?;
                Ok(ReceivedMessage::Frame(head))
            }
            PROBE => {
                header.fields(&self.body)?;
                let junk_len = header.body_len - header.checksummed_len();
                self.read_more(junk_len).await?;
                Ok(ReceivedMessage::Probe)
            }
            _ => Ok(ReceivedMessage::Message(LinkMessage::decode(&self.body)?)),
        }
    }

    /// Reads the payload of the last frame head, all of `place`.
    pub(crate) async fn payload(&mut self, destination: &mut [u8]) -> Result<(), LinkError> {
        let mut filled = 0;
        while filled < destination.len() {
            let missing = destination.len() - filled;
            let read = self.stream.read(&mut destination[filled..]);
            match timeout(self.silence_max, read).await {
                Err(_) => return Err(LinkError::SilenceTimedOut(self.silence_max)),
                Ok(Err(error)) => return Err(error.into()),
                Ok(Ok(0)) => return Err(LinkError::Truncated { missing }),
                Ok(Ok(count)) => filled += count,
            }
        }
        Ok(())
    }

    /// The stream that messages are read from.
    #[cfg(target_os = "linux")]
    pub(crate) fn stream(&self) -> &R {
        self.stream.get_ref()
    }

    /// The next message, which must not be a frame or a probe.
    pub(crate) async fn message(&mut self) -> Result<LinkMessage, LinkError> {
        match self.next().await? {
            ReceivedMessage::Message(message) => Ok(message),
            ReceivedMessage::Frame(_) => Err(LinkError::Unexpected("frame")),
            ReceivedMessage::Probe => Err(LinkError::Unexpected("probe")),
        }
    }

    /// Reads `len` bytes more; an end of the stream is an error.
    async fn read_more(&mut self, len: usize) -> Result<(), LinkError> {
        self.fill(self.body.len() + len).await
    }

    /// Reads until the body has `len` bytes. Any byte restarts the limit on silence.
    async fn fill(&mut self, len: usize) -> Result<(), LinkError> {
        self.body.reserve(len.saturating_sub(self.body.len()));
        while self.body.len() < len {
            let missing = len - self.body.len();
            let mut limited = (&mut self.stream).take(missing as u64);
            let read = timeout(self.silence_max, limited.read_buf(&mut self.body)).await;
            match read {
                Err(_) => return Err(LinkError::SilenceTimedOut(self.silence_max)),
                Ok(Err(error)) if is_unexpected_eof(&error) => {
                    return Err(self.end_of_stream(missing));
                }
                Ok(Err(error)) => return Err(error.into()),
                Ok(Ok(0)) => return Err(self.end_of_stream(missing)),
                Ok(Ok(_)) => {}
            }
        }
        Ok(())
    }

    /// The reason for an end of the stream here: between two messages it is an orderly close.
    fn end_of_stream(&self, missing: usize) -> LinkError {
        if self.body.is_empty() {
            LinkError::Closed
        } else {
            LinkError::Truncated { missing }
        }
    }
}

/// A process that dies sends no TLS close message, which rustls reports as this error.
fn is_unexpected_eof(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::UnexpectedEof
}

/// Writes a message; `payload` follows it where the message says so.
pub(crate) async fn write_message<W: AsyncWrite + Unpin>(
    stream: &mut W,
    message: &LinkMessage,
    payload: &[u8],
) -> Result<(), LinkError> {
    let mut head = BytesMut::with_capacity(HEADER_BYTES + FRAME_HEAD_BYTES);
    message.encode(&mut head);
    stream.write_all_buf(&mut head.chain(payload)).await?;
    // Encrypted bytes may still be buffered.
    stream.flush().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::KvPlane;
    use cleave_kv::BlockPart;

    fn frame(payload: &[u8]) -> LinkMessage {
        LinkMessage::Frame(FrameHead {
            handoff: HandoffId::default(),
            block: Default::default(),
            part: BlockPart {
                plane: KvPlane::Blocks,
                ordinal: 3,
                offset: 16,
                len: payload.len() as u32,
            },
            checksum: crate::checksum(payload),
        })
    }

    async fn stream_of(messages: &[(LinkMessage, &'static [u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (message, payload) in messages {
            write_message(&mut bytes, message, payload).await.unwrap();
        }
        bytes
    }

    #[tokio::test]
    async fn messages_are_read_whole_however_the_stream_is_cut() {
        let bytes = stream_of(&[
            (LinkMessage::Ping(7), b""),
            (frame(b"kv bytes"), b"kv bytes"),
            (LinkMessage::Probe(4), b"junk"),
            (LinkMessage::Credit(9), b""),
        ])
        .await;
        for cut in 1..=bytes.len() {
            let (mut near, far) = tokio::io::duplex(cut);
            let copy = bytes.clone();
            let writer = tokio::spawn(async move { near.write_all(&copy).await });
            let mut reader = MessageReader::new(far, Duration::from_secs(5), 64);
            let ping = reader.next().await.unwrap();
            assert_eq!(ping, ReceivedMessage::Message(LinkMessage::Ping(7)));
            let ReceivedMessage::Frame(head) = reader.next().await.unwrap() else {
                panic!("a frame was sent");
            };
            let mut payload = vec![0; head.part.len as usize];
            reader.payload(&mut payload).await.unwrap();
            assert_eq!(payload, b"kv bytes");
            assert_eq!(reader.next().await.unwrap(), ReceivedMessage::Probe);
            assert_eq!(
                reader.next().await.unwrap(),
                ReceivedMessage::Message(LinkMessage::Credit(9))
            );
            writer.await.unwrap().unwrap();
            assert!(matches!(reader.next().await, Err(LinkError::Closed)));
        }
    }

    // Lesson: 16.
    #[tokio::test]
    async fn a_truncated_stream_is_an_error_and_no_frame() {
        let bytes = stream_of(&[(frame(b"kv bytes"), b"kv bytes")]).await;
        for keep in 1..bytes.len() {
            let mut reader = MessageReader::new(&bytes[..keep], Duration::from_secs(5), 64);
            let error = match reader.next().await {
                Ok(ReceivedMessage::Frame(head)) => {
                    let mut payload = vec![0; head.part.len as usize];
                    reader.payload(&mut payload).await.unwrap_err()
                }
                Ok(other) => panic!("{other:?} out of a cut frame"),
                Err(error) => error,
            };
            assert!(
                matches!(error, LinkError::Truncated { .. }),
                "{keep}: {error}"
            );
        }
    }

    #[tokio::test]
    async fn a_socket_that_the_peer_closed_is_no_fault() {
        let (mut near, far) = tokio::net::UnixStream::pair().unwrap();
        drop(far);
        let written = write_message(&mut near, &LinkMessage::Ping(1), &[]).await;
        let error = written.unwrap_err();
        assert!(error.is_closing(), "{error}");

        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut near = tokio::net::TcpStream::connect(address).await.unwrap();
        let (far, _) = listener.accept().await.unwrap();
        let written = write_message(&mut near, &LinkMessage::Ping(1), &[]).await;
        written.unwrap();
        far.readable().await.unwrap();
        drop(far);
        let mut reader = MessageReader::new(near, Duration::from_secs(5), 64);
        let error = reader.next().await.unwrap_err();
        assert!(matches!(error, LinkError::Io(_)), "{error}");
        assert!(error.is_closing(), "{error}");
    }

    #[test]
    fn a_fault_of_the_link_is_no_closing() {
        for error in [
            LinkError::Truncated { missing: 1 },
            LinkError::SilenceTimedOut(Duration::from_secs(1)),
            LinkError::Io(io::ErrorKind::TimedOut.into()),
        ] {
            assert!(!error.is_closing(), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_in_the_middle_of_a_frame_ends_the_link() {
        let bytes = stream_of(&[(frame(b"kv bytes"), b"kv bytes")]).await;
        let (mut near, far) = tokio::io::duplex(1 << 10);
        near.write_all(&bytes[..bytes.len() - 1]).await.unwrap();
        let mut reader = MessageReader::new(far, Duration::from_secs(5), 64);
        assert!(matches!(reader.next().await, Ok(ReceivedMessage::Frame(_))));
        let silent = reader.payload(&mut [0; 8]).await;
        assert!(
            matches!(silent, Err(LinkError::SilenceTimedOut(_))),
            "{silent:?}"
        );
    }
}
