//! The wire format of a link's sockets: eight bytes of header (kind, three zeros, body length), the
//! fields, the checksum of both, and the bytes that follow. Only the payload of a frame, which has
//! a checksum of its own, and the meaningless bytes of a probe follow a checksum. If the payload is
//! in shared memory, the fields name its slot and nothing follows.
//!
//! The fields of a frame are little-endian numbers of fixed size; the fields of any other message
//! are postcard of [`LinkMessage`], whose first byte, the variant, is the kind in the header. A
//! message that opens a stream starts with [`MAGIC`] and [`VERSION`], so that another release reads
//! them before it checks or decodes anything.
//!
//! Never: trusts a received length, count or text. A body's length is checked before anything is
//! allocated, and decoding allocates in proportion to the body.
//! Invariant: a message in which any bit was flipped is an error, and never another message.

mod shortened;

use crate::encoding::decode_bounded;
use crate::grant::WriteGrant;
use bytes::{Buf, BufMut, BytesMut};
use cleave_domain::{
    AbandonCause, BlockIndex, BlockRef, FlightId, Generation, HandoffId, KvPlane, WorkerRef,
};
use cleave_kv::{BlockPart, Seal};
use serde::{Deserialize, Serialize};

/// The first bytes of the first message of each direction; they distinguish foreign clients.
pub(crate) const MAGIC: [u8; 4] = *b"CLVK";
/// The version of the format; it grows with every change, and both ends must agree.
pub(crate) const VERSION: u16 = 10;
/// The header: kind, zeros, body length.
pub(crate) const HEADER_BYTES: usize = 8;
/// The checksum after the fields.
pub(crate) const CHECK_BYTES: usize = 8;
/// The body of a frame before its payload: fields and checksum.
pub(crate) const FRAME_HEAD_BYTES: usize = 41 + CHECK_BYTES;
/// Limit of the body of a message other than a frame or a probe.
const CONTROL_BYTES_MAX: usize = 8 << 10;
/// Limit of the body of a seal: as many output tokens as a prefill worker may draw for a hand-off.
const SEAL_BYTES_MAX: usize = 1 << 20;
/// Limit of the body of a ring offer: a few addresses for each network card; a host has ten at
/// most.
const RING_OFFER_BYTES_MAX: usize = 64 << 10;
/// The size of a probe.
pub(crate) const PROBE_BYTES: usize = 1 << 20;
/// Limit of the slots that one message returns.
pub(crate) const SLOTS_PER_CREDIT_MAX: usize = 1024;

/// The first message of a dialler: both ends, and the configuration that must match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LinkHello {
    pub(crate) from: WorkerRef,
    pub(crate) to: WorkerRef,
    pub(crate) block_bytes: u32,
    #[serde(with = "shortened")]
    pub(crate) fingerprint: String,
}

/// A frame without its payload, which has `part.len` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FrameHead {
    pub(crate) handoff: HandoffId,
    pub(crate) block: BlockRef,
    pub(crate) part: BlockPart,
    pub(crate) checksum: u64,
}

/// Every message of a link, in the order of [`KINDS`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LinkMessage {
    /// The first message of the sender.
    Hello(LinkHello),
    /// The receiver accepts the link, and grants this many payload bytes.
    Welcome {
        me: WorkerRef,
        credit: u64,
        /// Identifies the link for further streams that join it.
        key: u64,
        /// The longest frame that the receiver accepts; in shared memory the size of a slot.
        frame_bytes: u32,
    },
    /// The receiver refuses the link, with the reason.
    Reject(#[serde(with = "shortened")] String),
    Frame(FrameHead),
    Seal(Seal),
    Landed(HandoffId),
    Abandoned(HandoffId, #[serde(with = "shortened")] AbandonCause),
    /// Receiver to sender: returns this many payload bytes of credit.
    Credit(u64),
    /// Sender to receiver: a request for a `Pong`; pings are answered in order.
    Ping(u64),
    /// The answer to a `Ping`.
    Pong(u64),
    /// This many meaningless bytes follow.
    Probe(u32),
    /// The first message of each further stream of a link: its sender and the key of the link.
    Join {
        from: WorkerRef,
        key: u64,
    },
    /// The receiver accepts the stream.
    Joined,
    Stop(HandoffId),
    Stopped(HandoffId),
    /// A frame whose payload is at the start of this slot.
    SlotFrame(FrameHead, u32),
    /// Receiver to sender: these slots may be written again.
    CreditSlots(Vec<u32>),
    /// This slot was filled with meaningless bytes.
    SlotProbe(u32),
    /// The sender can write into the receiver's pool itself, and asks for its handle.
    AskPool,
    /// The handle with which the device of the sender opens the pool.
    Pool(Vec<u8>),
    /// The receiver does not share its pool, with the reason; empty if it has no pool to share.
    NoPool(#[serde(with = "shortened")] String),
    /// The sender has opened the pool and will write frames into it.
    Opened,
    /// A frame whose payload is in the receiver's pool already.
    PoolFrame(FrameHead),
    /// Replaces a hello if the network card of the sender can write into a ring of the receiver;
    /// asks for such a ring.
    HelloRdma(LinkHello),
    /// The ring: its address in the receiver's process, and the metadata of the receiver's agent.
    RingOffer {
        start: u64,
        metadata: Vec<u8>,
    },
    /// The receiver could not create a ring, with the reason.
    NoRing(#[serde(with = "shortened")] String),
    /// The write grant of a hand-off; sent on each stream before its first frame or seal there.
    WriteGrant(HandoffId, WriteGrant),
    /// A keep-alive of an end that is still creating an agent.
    KeepAlive,
}

/// The reason for which a message was refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LinkWireError {
    #[error("not a Cleave data link: it started with {0:02x?} in place of {MAGIC:02x?}")]
    Magic([u8; 4]),
    #[error("data link version {0}, this is version {VERSION}: run the same release everywhere")]
    Version(u16),
    #[error("message kind {0} does not exist")]
    Kind(u8),
    #[error("message of {len} bytes where at most {max} are allowed")]
    TooLong { len: usize, max: usize },
    #[error("message ends in the middle of a field")]
    Truncated,
    #[error("{0} bytes too many in a message")]
    TrailingBytes(usize),
    #[error("text is not UTF-8")]
    Text,
    #[error("message \"{0}\" was damaged on the way: its checksum does not match")]
    Damaged(&'static str),
    #[error("frame of {0} bytes at offset {1} does not fit a block of {2} bytes")]
    OutsideBlock(u32, u32, u32),
    #[error("plane code {0} does not exist")]
    PlaneCode(u8),
    #[error("message \"{0}\" has a field with an impossible value: {1}")]
    Value(&'static str, postcard::Error),
}

/// A checked header: the body that follows is no longer than its kind allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageHeader {
    pub(crate) kind: u8,
    pub(crate) body_len: usize,
}

/// The names of the kinds in error texts; the kind in a header is the place here, from 1.
const KINDS: [&str; 28] = [
    "hello",
    "welcome",
    "reject",
    "frame",
    "seal",
    "landed",
    "abandoned",
    "credit",
    "ping",
    "pong",
    "probe",
    "join",
    "joined",
    "stop",
    "stopped",
    "slot frame",
    "credit of slots",
    "slot probe",
    "ask for a pool",
    "pool",
    "no pool",
    "opened",
    "pool frame",
    "hello for RDMA",
    "ring offer",
    "no ring",
    "write grant",
    "keep-alive",
];
const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const REJECT: u8 = 3;
pub(crate) const FRAME: u8 = 4;
const SEAL: u8 = 5;
pub(crate) const PROBE: u8 = 11;
const JOIN: u8 = 12;
const HELLO_RDMA: u8 = 24;
const RING_OFFER: u8 = 25;
/// The kinds that start with [`MAGIC`] and [`VERSION`]. Older releases know them by these numbers.
const OPENING_KINDS: [u8; 5] = [HELLO, WELCOME, REJECT, JOIN, HELLO_RDMA];

impl MessageHeader {
    /// Reads the header at the start of a message; `block_bytes` bounds frames.
    pub(crate) fn of(message: &[u8], block_bytes: u32) -> Result<Self, LinkWireError> {
        let header = message.first_chunk::<HEADER_BYTES>();
        Self::parse(*header.ok_or(LinkWireError::Truncated)?, block_bytes)
    }

    /// Reads a header; `block_bytes` bounds frames.
    pub(crate) fn parse(
        bytes: [u8; HEADER_BYTES],
        block_bytes: u32,
    ) -> Result<Self, LinkWireError> {
        let [kind, z0, z1, z2, l0, l1, l2, l3] = bytes;
        if !(1..=KINDS.len()).contains(&usize::from(kind)) || [z0, z1, z2] != [0; 3] {
            return Err(LinkWireError::Kind(kind));
        }
        let body_len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        let max = match kind {
            FRAME => FRAME_HEAD_BYTES + block_bytes as usize,
            PROBE => CHECK_BYTES + PROBE_BYTES,
            SEAL => SEAL_BYTES_MAX,
            RING_OFFER => RING_OFFER_BYTES_MAX,
            _ => CONTROL_BYTES_MAX,
        };
        if body_len > max {
            return Err(LinkWireError::TooLong { len: body_len, max });
        }
        if body_len < CHECK_BYTES || kind == FRAME && body_len < FRAME_HEAD_BYTES {
            return Err(LinkWireError::Truncated);
        }
        Ok(Self { kind, body_len })
    }

    /// Bytes of the body up to and including its checksum; a payload or the bytes of a probe
    /// follow.
    pub(crate) fn checksummed_len(&self) -> usize {
        match self.kind {
            FRAME => FRAME_HEAD_BYTES,
            PROBE => CHECK_BYTES,
            _ => self.body_len,
        }
    }

    /// The fields of a message up to its checksum, `[HEADER_BYTES + checked_len]`, without magic
    /// and version, if these and the checksum match.
    pub(crate) fn fields<'a>(&self, message: &'a [u8]) -> Result<&'a [u8], LinkWireError> {
        if message.len() != HEADER_BYTES + self.checksummed_len() {
            return Err(LinkWireError::Truncated);
        }
        let split = message.split_last_chunk::<CHECK_BYTES>();
        let (checked, check) = split.ok_or(LinkWireError::Truncated)?;
        let mut fields = &checked[HEADER_BYTES..];
        // Another release may compute the checksum differently; such a message is reported as a
        // version mismatch, not as damage.
        if OPENING_KINDS.contains(&self.kind) {
            fields = without_preamble(fields)?;
        }
        if crate::checksum(checked) == u64::from_le_bytes(*check) {
            Ok(fields)
        } else {
            Err(LinkWireError::Damaged(self.name()))
        }
    }

    /// The name of the kind in error texts.
    fn name(&self) -> &'static str {
        KINDS[usize::from(self.kind) - 1]
    }
}

fn without_preamble(fields: &[u8]) -> Result<&[u8], LinkWireError> {
    let (magic, fields) = fields.split_first_chunk().ok_or(LinkWireError::Truncated)?;
    if *magic != MAGIC {
        return Err(LinkWireError::Magic(*magic));
    }
    let (version, fields) = fields.split_first_chunk().ok_or(LinkWireError::Truncated)?;
    match u16::from_le_bytes(*version) {
        VERSION => Ok(fields),
        other => Err(LinkWireError::Version(other)),
    }
}

impl FrameHead {
    /// Reads a frame up to its payload, `[HEADER_BYTES + FRAME_HEAD_BYTES]`; the payload's length
    /// must be what the header left, and lie in a block.
    pub(crate) fn parse(message: &[u8], block_bytes: u32) -> Result<Self, LinkWireError> {
        let header = MessageHeader::of(message, block_bytes)?;
        if header.kind != FRAME {
            return Err(LinkWireError::Kind(header.kind));
        }
        // A frame's fields have their one length here, so no number below is missing.
        let mut fields = header.fields(message)?;
        let frame = Self {
            handoff: HandoffId {
                flight: FlightId(fields.get_u64_le()),
                attempt: fields.get_u32_le(),
            },
            block: BlockRef {
                block: BlockIndex(fields.get_u32_le()),
                generation: Generation(fields.get_u32_le()),
            },
            part: BlockPart {
                plane: match fields.get_u8() {
                    0 => KvPlane::Blocks,
                    1 => KvPlane::State,
                    2 => KvPlane::Window,
                    other => return Err(LinkWireError::PlaneCode(other)),
                },
                ordinal: fields.get_u32_le(),
                offset: fields.get_u32_le(),
                len: fields.get_u32_le(),
            },
            checksum: fields.get_u64_le(),
        };
        frame.check_within_block(block_bytes)?;
        if header.body_len != FRAME_HEAD_BYTES + frame.part.len as usize {
            return Err(LinkWireError::Truncated);
        }
        Ok(frame)
    }

    fn put(&self, out: &mut BytesMut) {
        out.put_u64_le(self.handoff.flight.0);
        out.put_u32_le(self.handoff.attempt);
        out.put_u32_le(self.block.block.0);
        out.put_u32_le(self.block.generation.0);
        out.put_u8(match self.part.plane {
            KvPlane::Blocks => 0,
            KvPlane::State => 1,
            KvPlane::Window => 2,
        });
        out.put_u32_le(self.part.ordinal);
        out.put_u32_le(self.part.offset);
        out.put_u32_le(self.part.len);
        out.put_u64_le(self.checksum);
    }

    /// Whether the payload is no longer than a block: no piece is.
    pub(crate) fn check_within_block(&self, block_bytes: u32) -> Result<(), LinkWireError> {
        let BlockPart { offset, len, .. } = self.part;
        let end = u64::from(offset) + u64::from(len);
        if len == 0 || end > u64::from(block_bytes) {
            return Err(LinkWireError::OutsideBlock(len, offset, block_bytes));
        }
        Ok(())
    }
}

impl LinkMessage {
    /// Appends header, fields and checksum; the caller appends the payload of a frame or the bytes
    /// of a probe.
    pub(crate) fn encode(&self, out: &mut BytesMut) {
        let start = out.len();
        out.put_bytes(0, HEADER_BYTES);
        let (kind, following) = match self {
            Self::Frame(frame) => {
                frame.put(out);
                (FRAME, frame.part.len as usize)
            }
            Self::Probe(len) => (PROBE, *len as usize),
            other => (other.put_fields(out), 0),
        };
        let body_len = out.len() - start - HEADER_BYTES + CHECK_BYTES + following;
        let body_len = u32::try_from(body_len).expect("bodies are bounded by u32 block sizes");
        out[start] = kind;
        out[start + 4..start + HEADER_BYTES].copy_from_slice(&body_len.to_le_bytes());
        let check = crate::checksum(&out[start..]);
        out.put_u64_le(check);
    }

    /// Appends the fields of a message other than a frame or a probe, and returns its kind.
    fn put_fields(&self, out: &mut BytesMut) -> u8 {
        let encoded = postcard::to_allocvec(self).expect("a vector grows as it is filled");
        let kind = encoded[0] + 1;
        if OPENING_KINDS.contains(&kind) {
            out.put_slice(&MAGIC);
            out.put_u16_le(VERSION);
        }
        out.put_slice(&encoded[1..]);
        kind
    }

    /// Reads a whole message, header included, other than a frame or a probe.
    pub(crate) fn decode(message: &[u8]) -> Result<Self, LinkWireError> {
        let header = MessageHeader::of(message, 0)?;
        if matches!(header.kind, FRAME | PROBE) {
            return Err(LinkWireError::Kind(header.kind));
        }
        let encoded = [&[header.kind - 1], header.fields(message)?].concat();
        match decode_bounded(&encoded) {
            Ok((message, [])) => Ok(message),
            Ok((_, surplus)) => Err(LinkWireError::TrailingBytes(surplus.len())),
            Err(postcard::Error::DeserializeUnexpectedEnd) => Err(LinkWireError::Truncated),
            Err(postcard::Error::DeserializeBadUtf8) => Err(LinkWireError::Text),
            Err(error) => Err(LinkWireError::Value(header.name(), error)),
        }
    }
}

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
