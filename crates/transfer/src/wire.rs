//! The wire format of a link's sockets: eight bytes of header (kind, three zeros, body length), the
//! fields, the checksum of both, and the bytes that follow. Numbers are little-endian. Only the
//! payload of a frame, which has a checksum of its own, and the meaningless bytes of a probe follow
//! a checksum. If the payload is in shared memory, the fields name its slot and nothing follows.
//!
//! The checksum comes after the fields, so that another release still reads the [`VERSION`] of a
//! message before its checksum.
//!
//! Never: trusts a received length, count or text; each has a limit here, checked before anything
//! is allocated.
//! Invariant: a message in which any bit was flipped is an error, and never another message.

mod fields;

use crate::grant::WriteGrant;
use bytes::{BufMut, BytesMut};
use cleave_domain::{AbandonCause, BlockHash, BlockRef, HandoffId, WorkerRef};
use cleave_kv::{BlockPart, Seal};
use fields::{
    MessageFields, put_cause, put_frame_head, put_handoff, put_hello, put_preamble,
    put_state_digest, put_text, put_worker,
};

/// The first bytes of the first message of each direction; they distinguish foreign clients.
pub(crate) const MAGIC: [u8; 4] = *b"CLVK";
/// The version of the format; it grows with every change, and both ends must agree.
pub(crate) const VERSION: u16 = 7;
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
/// Limit of a text in a message.
const TEXT_BYTES_MAX: usize = 4 << 10;
/// The size of a probe.
pub(crate) const PROBE_BYTES: usize = 1 << 20;
/// Limit of the slots that one message returns.
pub(crate) const SLOTS_PER_CREDIT_MAX: usize = 1024;
/// Limit of nested failures.
const FAILURE_DEPTH_MAX: u32 = 4;

/// The first message of a dialler: both ends, and the configuration that must match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LinkHello {
    pub(crate) from: WorkerRef,
    pub(crate) to: WorkerRef,
    pub(crate) block_bytes: u32,
    pub(crate) fingerprint: String,
}

/// A frame without its payload, which has `part.len` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHead {
    pub(crate) handoff: HandoffId,
    pub(crate) block: BlockRef,
    pub(crate) part: BlockPart,
    pub(crate) checksum: u64,
}

/// Every message of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    Reject(String),
    /// The first message of each further stream of a link: its sender and the key of the link.
    Join {
        from: WorkerRef,
        key: u64,
    },
    /// The receiver accepts the stream.
    Joined,
    Frame(FrameHead),
    /// A frame whose payload is at the start of this slot.
    SlotFrame(FrameHead, u32),
    Seal(Seal),
    Landed(HandoffId),
    Abandoned(HandoffId, AbandonCause),
    Stop(HandoffId),
    Stopped(HandoffId),
    /// Receiver to sender: returns this many payload bytes of credit.
    Credit(u64),
    /// Receiver to sender: these slots may be written again.
    CreditSlots(Vec<u32>),
    /// Sender to receiver: a request for a `Pong`; pings are answered in order.
    Ping(u64),
    /// The answer to a `Ping`.
    Pong(u64),
    /// This many meaningless bytes follow.
    Probe(u32),
    /// This slot was filled with meaningless bytes.
    SlotProbe(u32),
    /// The sender can write into the receiver's pool itself, and asks for its handle.
    AskPool,
    /// The handle with which the device of the sender opens the pool.
    Pool(Vec<u8>),
    /// The receiver does not share its pool, with the reason; empty if it has no pool to share.
    NoPool(String),
    /// The sender has opened the pool and will write frames into it.
    Opened,
    /// A frame whose payload is in the receiver's pool already.
    PoolFrame(FrameHead),
    /// The write grant of a hand-off; sent on each stream before its first frame or seal there.
    WriteGrant(HandoffId, WriteGrant),
    /// Replaces a hello if the network card of the sender can write into a ring of the receiver;
    /// asks for such a ring.
    HelloRdma(LinkHello),
    /// The ring: its address in the receiver's process, and the metadata of the receiver's agent.
    RingOffer {
        start: u64,
        metadata: Vec<u8>,
    },
    /// The receiver could not create a ring, with the reason.
    NoRing(String),
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
    #[error("code {0} stands for neither a state nor none")]
    StateCode(u8),
    #[error("cause code {0} does not exist")]
    CauseCode(u8),
    #[error("failure code {0} does not exist")]
    FailureCode(u8),
}

/// A checked header: the body that follows is no longer than its kind allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageHeader {
    pub(crate) kind: u8,
    pub(crate) body_len: usize,
}

const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const REJECT: u8 = 3;
pub(crate) const FRAME: u8 = 4;
const SEAL: u8 = 5;
const LANDED: u8 = 6;
const ABANDONED: u8 = 7;
const CREDIT: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;
pub(crate) const PROBE: u8 = 11;
const JOIN: u8 = 12;
const JOINED: u8 = 13;
const STOP: u8 = 14;
const STOPPED: u8 = 15;
const SLOT_FRAME: u8 = 16;
const CREDIT_SLOTS: u8 = 17;
const SLOT_PROBE: u8 = 18;
const ASK_POOL: u8 = 19;
const POOL: u8 = 20;
const NO_POOL: u8 = 21;
const OPENED: u8 = 22;
const POOL_FRAME: u8 = 23;
const HELLO_RDMA: u8 = 24;
const RING_OFFER: u8 = 25;
const NO_RING: u8 = 26;
const WRITE_GRANT: u8 = 27;
const KEEP_ALIVE: u8 = 28;

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
        if !(HELLO..=KEEP_ALIVE).contains(&kind) || [z0, z1, z2] != [0; 3] {
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

    /// The fields of a message up to its checksum, `[HEADER_BYTES + checked_len]`, if the checksum
    /// matches.
    pub(crate) fn fields<'a>(&self, message: &'a [u8]) -> Result<&'a [u8], LinkWireError> {
        if message.len() != HEADER_BYTES + self.checksummed_len() {
            return Err(LinkWireError::Truncated);
        }
        let split = message.split_last_chunk::<CHECK_BYTES>();
        let (checked, check) = split.ok_or(LinkWireError::Truncated)?;
        let fields = &checked[HEADER_BYTES..];
        if crate::checksum(checked) == u64::from_le_bytes(*check) {
            return Ok(fields);
        }
        // Another release may compute the checksum differently; such a message is reported as a
        // version mismatch, not as damage.
        if matches!(self.kind, HELLO | HELLO_RDMA | WELCOME | JOIN | REJECT) {
            MessageFields(&message[HEADER_BYTES..]).preamble()?;
        }
        Err(LinkWireError::Damaged(kind_name(self.kind)))
    }
}

/// The name of a kind in error texts.
fn kind_name(kind: u8) -> &'static str {
    match kind {
        HELLO => "hello",
        WELCOME => "welcome",
        REJECT => "reject",
        FRAME => "frame",
        SEAL => "seal",
        LANDED => "landed",
        ABANDONED => "abandoned",
        CREDIT => "credit",
        PING => "ping",
        PONG => "pong",
        PROBE => "probe",
        JOIN => "join",
        JOINED => "joined",
        STOP => "stop",
        STOPPED => "stopped",
        SLOT_FRAME => "slot frame",
        CREDIT_SLOTS => "credit of slots",
        SLOT_PROBE => "slot probe",
        ASK_POOL => "ask for a pool",
        POOL => "pool",
        NO_POOL => "no pool",
        OPENED => "opened",
        POOL_FRAME => "pool frame",
        HELLO_RDMA => "hello for RDMA",
        RING_OFFER => "ring offer",
        NO_RING => "no ring",
        WRITE_GRANT => "write grant",
        KEEP_ALIVE => "keep-alive",
        _ => "unknown",
    }
}

impl FrameHead {
    /// Reads a frame up to its payload, `[HEADER_BYTES + FRAME_HEAD_BYTES]`; the payload's length
    /// must be what the header left, and lie in a block.
    pub(crate) fn parse(message: &[u8], block_bytes: u32) -> Result<Self, LinkWireError> {
        let header = MessageHeader::of(message, block_bytes)?;
        let mut fields = MessageFields(header.fields(message)?);
        let frame = fields.frame_head()?;
        fields.end()?;
        frame.check_within_block(block_bytes)?;
        if header.body_len != FRAME_HEAD_BYTES + frame.part.len as usize {
            return Err(LinkWireError::Truncated);
        }
        Ok(frame)
    }

    /// Whether the payload is no longer than a block: no piece of a state is.
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
        let (kind, trailing) = self.encode_fields(out);
        let body_len = out.len() - start - HEADER_BYTES + CHECK_BYTES + trailing;
        let body_len = u32::try_from(body_len).expect("bodies are bounded by u32 block sizes");
        out[start] = kind;
        out[start + 4..start + HEADER_BYTES].copy_from_slice(&body_len.to_le_bytes());
        let check = crate::checksum(&out[start..]);
        out.put_u64_le(check);
    }

    /// Appends the fields. Returns the kind, and how many bytes follow that are not written here.
    fn encode_fields(&self, out: &mut BytesMut) -> (u8, usize) {
        match self {
            Self::Hello(hello) => {
                put_hello(out, hello);
                (HELLO, 0)
            }
            Self::HelloRdma(hello) => {
                put_hello(out, hello);
                (HELLO_RDMA, 0)
            }
            Self::RingOffer { start, metadata } => {
                out.put_u64_le(*start);
                out.put_slice(metadata);
                (RING_OFFER, 0)
            }
            Self::NoRing(reason) => {
                put_text(out, reason);
                (NO_RING, 0)
            }
            Self::Welcome {
                me,
                credit,
                key,
                frame_bytes,
            } => {
                put_preamble(out);
                put_worker(out, *me);
                out.put_u64_le(*credit);
                out.put_u64_le(*key);
                out.put_u32_le(*frame_bytes);
                (WELCOME, 0)
            }
            Self::Join { from, key } => {
                put_preamble(out);
                put_worker(out, *from);
                out.put_u64_le(*key);
                (JOIN, 0)
            }
            Self::Joined => (JOINED, 0),
            Self::Reject(reason) => {
                put_preamble(out);
                put_text(out, reason);
                (REJECT, 0)
            }
            Self::Frame(frame) => {
                put_frame_head(out, frame);
                (FRAME, frame.part.len as usize)
            }
            Self::SlotFrame(frame, slot) => {
                put_frame_head(out, frame);
                out.put_u32_le(*slot);
                (SLOT_FRAME, 0)
            }
            Self::Seal(seal) => {
                put_handoff(out, seal.handoff);
                out.put_u32_le(seal.blocks_count);
                out.put_u64_le(seal.digest);
                out.put_slice(&seal.content.0);
                put_state_digest(out, seal.state);
                for token in &seal.output {
                    out.put_u32_le(*token);
                }
                (SEAL, 0)
            }
            Self::Landed(handoff) => {
                put_handoff(out, *handoff);
                (LANDED, 0)
            }
            Self::Abandoned(handoff, cause) => {
                put_handoff(out, *handoff);
                put_cause(out, cause);
                (ABANDONED, 0)
            }
            Self::Stop(handoff) => {
                put_handoff(out, *handoff);
                (STOP, 0)
            }
            Self::Stopped(handoff) => {
                put_handoff(out, *handoff);
                (STOPPED, 0)
            }
            Self::Credit(bytes) => {
                out.put_u64_le(*bytes);
                (CREDIT, 0)
            }
            Self::CreditSlots(slots) => {
                for slot in slots {
                    out.put_u32_le(*slot);
                }
                (CREDIT_SLOTS, 0)
            }
            Self::Ping(nonce) => {
                out.put_u64_le(*nonce);
                (PING, 0)
            }
            Self::Pong(nonce) => {
                out.put_u64_le(*nonce);
                (PONG, 0)
            }
            Self::Probe(len) => (PROBE, *len as usize),
            Self::SlotProbe(slot) => {
                out.put_u32_le(*slot);
                (SLOT_PROBE, 0)
            }
            Self::AskPool => (ASK_POOL, 0),
            Self::Pool(handle) => {
                out.put_slice(handle);
                (POOL, 0)
            }
            Self::NoPool(reason) => {
                put_text(out, reason);
                (NO_POOL, 0)
            }
            Self::Opened => (OPENED, 0),
            Self::PoolFrame(frame) => {
                put_frame_head(out, frame);
                (POOL_FRAME, 0)
            }
            Self::KeepAlive => (KEEP_ALIVE, 0),
            Self::WriteGrant(handoff, grant) => {
                put_handoff(out, *handoff);
                out.put_slice(&grant.0);
                (WRITE_GRANT, 0)
            }
        }
    }

    /// Reads a whole message, header included, other than a frame or a probe.
    pub(crate) fn decode(message: &[u8]) -> Result<Self, LinkWireError> {
        let header = MessageHeader::of(message, 0)?;
        let mut fields = MessageFields(header.fields(message)?);
        let message = match header.kind {
            HELLO => Self::Hello(fields.hello()?),
            HELLO_RDMA => Self::HelloRdma(fields.hello()?),
            RING_OFFER => Self::RingOffer {
                start: fields.u64()?,
                metadata: fields.rest(),
            },
            NO_RING => Self::NoRing(fields.text()?),
            KEEP_ALIVE => Self::KeepAlive,
            WELCOME => {
                fields.preamble()?;
                Self::Welcome {
                    me: fields.worker()?,
                    credit: fields.u64()?,
                    key: fields.u64()?,
                    frame_bytes: fields.u32()?,
                }
            }
            JOIN => {
                fields.preamble()?;
                Self::Join {
                    from: fields.worker()?,
                    key: fields.u64()?,
                }
            }
            JOINED => Self::Joined,
            REJECT => {
                fields.preamble()?;
                Self::Reject(fields.text()?)
            }
            SEAL => Self::Seal(Seal {
                handoff: fields.handoff()?,
                blocks_count: fields.u32()?,
                digest: fields.u64()?,
                content: BlockHash(fields.bytes()?),
                // Before the tokens, which are the rest of the body.
                state: fields.state_digest()?,
                output: fields.words()?,
            }),
            SLOT_FRAME => Self::SlotFrame(fields.frame_head()?, fields.u32()?),
            LANDED => Self::Landed(fields.handoff()?),
            STOP => Self::Stop(fields.handoff()?),
            STOPPED => Self::Stopped(fields.handoff()?),
            ABANDONED => Self::Abandoned(fields.handoff()?, fields.cause()?),
            CREDIT => Self::Credit(fields.u64()?),
            CREDIT_SLOTS => Self::CreditSlots(fields.words()?),
            SLOT_PROBE => Self::SlotProbe(fields.u32()?),
            ASK_POOL => Self::AskPool,
            POOL => Self::Pool(fields.rest()),
            NO_POOL => Self::NoPool(fields.text()?),
            OPENED => Self::Opened,
            POOL_FRAME => Self::PoolFrame(fields.frame_head()?),
            WRITE_GRANT => Self::WriteGrant(fields.handoff()?, WriteGrant(fields.bytes()?)),
            PING => Self::Ping(fields.u64()?),
            PONG => Self::Pong(fields.u64()?),
            other => return Err(LinkWireError::Kind(other)),
        };
        fields.end()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests;
