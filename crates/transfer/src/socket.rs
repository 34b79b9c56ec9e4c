//! Messages on a byte stream: read with a limit on silence, written with head and payload in one
//! vectored call.
//!
//! Owns: the buffers of one connection, and every way in which one ends. Never: knows what a message is
//! for.
//! Invariant: nothing longer than the limits of its kind is read into memory, and no read waits longer
//! than the limit on silence.
//!
//! A payload is read from the socket straight into the buffer that is handed on, and written from the
//! one it was put into: the one copy on either side is the kernel's.

use crate::pass::PassError;
use crate::wire::{
    FRAME, FRAME_HEAD_BYTES, FrameHead, HEADER_BYTES, Header, Message, PROBE, WireError,
};
use bytes::{Buf, BytesMut};
use cleave_domain::HandoffId;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::time::timeout;

/// Why a link ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    #[error("the peer closed the link")]
    Closed,
    #[error("the stream ended {missing} bytes short of a whole message")]
    Truncated { missing: usize },
    #[error("nothing was heard for {0:?}")]
    Silent(Duration),
    #[error("a write that was announced did not come for {0:?}")]
    Unwritten(Duration),
    #[error("connecting and shaking hands took longer than {0:?}")]
    Slow(Duration),
    #[error("cannot connect to {0}: {1}")]
    Connect(String, io::Error),
    #[error("no peer of this fleet: {0}")]
    NoPeer(io::Error),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("unexpected message {0}")]
    Unexpected(&'static str),
    #[error("turned away by the peer: {0}")]
    Rejected(String),
    #[error("turned the peer away: {0}")]
    Refused(String),
    #[error("the peer sent more payload than it was granted")]
    Overdrawn,
    #[error("hand-off {0}: {1}")]
    Pass(HandoffId, PassError),
    #[error("shared memory: {0}")]
    SharedMemory(io::Error),
    #[error("the peer's pool: {0}")]
    Pool(String),
    #[error("NIXL: {0}")]
    Nixl(String),
    #[error("the link that the stream was to join is gone")]
    NoSuchLink,
    #[error("replaced by a new link of the same peer")]
    Replaced,
    #[error("this worker is closing")]
    Closing,
}

impl SocketError {
    /// Whether another transport to the same peer would end the same way.
    pub(crate) fn holds_for_all(&self) -> bool {
        matches!(self, Self::Rejected(_) | Self::Refused(_) | Self::Closing)
    }
}

/// What came next. A frame's payload must be read, with [`Reader::payload`], before anything else.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    Message(Message),
    Frame(FrameHead),
    /// A probe, already thrown away.
    Probe,
}

/// The reading half.
pub(crate) struct Reader<R> {
    stream: BufReader<R>,
    silence_max: Duration,
    block_bytes: u32,
    body: BytesMut,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    pub(crate) fn new(stream: R, silence_max: Duration, block_bytes: u32) -> Self {
        Self {
            // Headers and control packets come out of this buffer; payloads bypass it.
            stream: BufReader::with_capacity(4 << 10, stream),
            silence_max,
            block_bytes,
            body: BytesMut::new(),
        }
    }

    pub(crate) async fn next(&mut self) -> Result<Received, SocketError> {
        self.body.clear();
        self.fill(HEADER_BYTES).await?;
        let header = Header::of(&self.body, self.block_bytes)?;
        self.rest(header.checked_len()).await?;
        match header.kind {
            FRAME => {
                let head = FrameHead::parse(&self.body, self.block_bytes)?;
                Ok(Received::Frame(head))
            }
            PROBE => {
                header.fields(&self.body)?;
                let junk_len = header.body_len - header.checked_len();
                self.rest(junk_len).await?;
                Ok(Received::Probe)
            }
            _ => Ok(Received::Message(Message::decode(&self.body)?)),
        }
    }

    /// The payload of the frame whose head came last, all of `place`.
    pub(crate) async fn payload(&mut self, place: &mut [u8]) -> Result<(), SocketError> {
        let mut filled = 0;
        while filled < place.len() {
            let missing = place.len() - filled;
            let read = self.stream.read(&mut place[filled..]);
            match timeout(self.silence_max, read).await {
                Err(_) => return Err(SocketError::Silent(self.silence_max)),
                Ok(Err(error)) => return Err(error.into()),
                Ok(Ok(0)) => return Err(SocketError::Truncated { missing }),
                Ok(Ok(count)) => filled += count,
            }
        }
        Ok(())
    }

    /// What bytes come from.
    #[cfg(target_os = "linux")]
    pub(crate) fn stream(&self) -> &R {
        self.stream.get_ref()
    }

    /// The next message, which must not be a frame or a probe.
    pub(crate) async fn message(&mut self) -> Result<Message, SocketError> {
        match self.next().await? {
            Received::Message(message) => Ok(message),
            Received::Frame(_) => Err(SocketError::Unexpected("frame")),
            Received::Probe => Err(SocketError::Unexpected("probe")),
        }
    }

    /// Reads `len` bytes more; the stream must not end here.
    async fn rest(&mut self, len: usize) -> Result<(), SocketError> {
        self.fill(self.body.len() + len).await
    }

    /// Reads until the body has `len` bytes. Any byte is a sign of life.
    async fn fill(&mut self, len: usize) -> Result<(), SocketError> {
        self.body.reserve(len.saturating_sub(self.body.len()));
        while self.body.len() < len {
            let missing = len - self.body.len();
            let mut limited = (&mut self.stream).take(missing as u64);
            let read = timeout(self.silence_max, limited.read_buf(&mut self.body)).await;
            match read {
                Err(_) => return Err(SocketError::Silent(self.silence_max)),
                Ok(Err(error)) if is_end(&error) => return Err(self.ended(missing)),
                Ok(Err(error)) => return Err(error.into()),
                Ok(Ok(0)) => return Err(self.ended(missing)),
                Ok(Ok(_)) => {}
            }
        }
        Ok(())
    }

    /// The meaning of the stream's end here: between two messages it is no damage.
    fn ended(&self, missing: usize) -> SocketError {
        match self.body.is_empty() {
            true => SocketError::Closed,
            false => SocketError::Truncated { missing },
        }
    }
}

/// A process that dies does not take leave, and under TLS that is an error.
fn is_end(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::UnexpectedEof
}

/// Writes a message; `payload` follows it where the message says so.
pub(crate) async fn write<W: AsyncWrite + Unpin>(
    stream: &mut W,
    message: &Message,
    payload: &[u8],
) -> Result<(), SocketError> {
    let mut head = BytesMut::with_capacity(HEADER_BYTES + FRAME_HEAD_BYTES);
    message.encode(&mut head);
    stream.write_all_buf(&mut head.chain(payload)).await?;
    // What is encrypted may still wait for the socket.
    stream.flush().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_kv::BlockPart;

    fn frame(payload: &[u8]) -> Message {
        Message::Frame(FrameHead {
            handoff: HandoffId::default(),
            block: Default::default(),
            part: BlockPart {
                ordinal: 3,
                offset: 16,
                len: payload.len() as u32,
            },
            checksum: crate::checksum(payload),
        })
    }

    async fn stream_of(messages: &[(Message, &'static [u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (message, payload) in messages {
            write(&mut bytes, message, payload).await.unwrap();
        }
        bytes
    }

    #[tokio::test]
    async fn messages_survive_any_cut_of_the_stream() {
        let bytes = stream_of(&[
            (Message::Ping(7), b""),
            (frame(b"kv bytes"), b"kv bytes"),
            (Message::Probe(4), b"junk"),
            (Message::Grant(9), b""),
        ])
        .await;
        for cut in 1..=bytes.len() {
            let (mut near, far) = tokio::io::duplex(cut);
            let copy = bytes.clone();
            let writer = tokio::spawn(async move { near.write_all(&copy).await });
            let mut reader = Reader::new(far, Duration::from_secs(5), 64);
            let ping = reader.next().await.unwrap();
            assert_eq!(ping, Received::Message(Message::Ping(7)));
            let Received::Frame(head) = reader.next().await.unwrap() else {
                panic!("a frame was sent");
            };
            let mut payload = vec![0; head.part.len as usize];
            reader.payload(&mut payload).await.unwrap();
            assert_eq!(payload, b"kv bytes");
            assert_eq!(reader.next().await.unwrap(), Received::Probe);
            assert_eq!(
                reader.next().await.unwrap(),
                Received::Message(Message::Grant(9))
            );
            writer.await.unwrap().unwrap();
            assert!(matches!(reader.next().await, Err(SocketError::Closed)));
        }
    }

    #[tokio::test]
    async fn lesson_16_a_truncated_stream_is_an_error_and_no_frame() {
        let bytes = stream_of(&[(frame(b"kv bytes"), b"kv bytes")]).await;
        for keep in 1..bytes.len() {
            let mut reader = Reader::new(&bytes[..keep], Duration::from_secs(5), 64);
            let error = match reader.next().await {
                Ok(Received::Frame(head)) => {
                    let mut payload = vec![0; head.part.len as usize];
                    reader.payload(&mut payload).await.unwrap_err()
                }
                Ok(other) => panic!("{other:?} out of a cut frame"),
                Err(error) => error,
            };
            assert!(
                matches!(error, SocketError::Truncated { .. }),
                "{keep}: {error}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_in_the_middle_of_a_frame_ends_the_link() {
        let bytes = stream_of(&[(frame(b"kv bytes"), b"kv bytes")]).await;
        let (mut near, far) = tokio::io::duplex(1 << 10);
        near.write_all(&bytes[..bytes.len() - 1]).await.unwrap();
        let mut reader = Reader::new(far, Duration::from_secs(5), 64);
        assert!(matches!(reader.next().await, Ok(Received::Frame(_))));
        let silent = reader.payload(&mut [0; 8]).await;
        assert!(matches!(silent, Err(SocketError::Silent(_))), "{silent:?}");
    }
}
