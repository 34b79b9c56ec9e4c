//! The bytes on a link's sockets: eight bytes of header (kind, three zeros, body length), the fields,
//! the checksum of both, and what follows them. Numbers are little-endian. Only a frame's payload, which
//! has a checksum of its own, and the bytes of a probe, which mean nothing, follow a checksum; where the
//! payload lies in shared memory, the fields name its slot and nothing follows.
//!
//! The checksum stands behind the fields, so that a release of another [`VERSION`] still reads which
//! version it has met.
//!
//! Never: trusts a length, a count or a text that came from outside; every one has a limit here,
//! checked before anything is allocated.
//! Invariant: a message in which any bit was flipped is an error, and never another message.

mod fields;

use crate::pass::Pass;
use bytes::{BufMut, BytesMut};
use cleave_domain::{BlockHash, BlockRef, Cause, HandoffId, WorkerRef};
use cleave_kv::{BlockPart, Seal};
use fields::{
    Fields, put_cause, put_frame_head, put_handoff, put_hello, put_preamble, put_text, put_worker,
};

/// What the first message of each direction starts with; a stray client never has it.
pub(crate) const MAGIC: [u8; 4] = *b"CLVK";
/// Grows when a message changes; both ends must agree.
pub(crate) const VERSION: u16 = 6;
/// Kind, zeros, body length.
pub(crate) const HEADER_BYTES: usize = 8;
/// The checksum behind the fields.
pub(crate) const CHECK_BYTES: usize = 8;
/// A frame's body before its payload: its fields and the checksum.
pub(crate) const FRAME_HEAD_BYTES: usize = 40 + CHECK_BYTES;
/// Longest body of a message other than a frame or a probe.
const CONTROL_BYTES_MAX: usize = 8 << 10;
/// Longest body of a seal: as many output tokens as a prefill worker may draw for a hand-off.
const SEAL_BYTES_MAX: usize = 1 << 20;
/// Longest body of a ring's whereabouts: a few addresses for each network card, of which a host has ten at most.
const LANDING_BYTES_MAX: usize = 64 << 10;
/// Longest text in a message.
const TEXT_BYTES_MAX: usize = 4 << 10;
/// Bytes of a probe.
pub(crate) const PROBE_BYTES: usize = 1 << 20;
/// Slots in one message that gives them back.
pub(crate) const SLOTS_PER_GRANT_MAX: usize = 1024;
/// A failure inside a failure inside …
const FAILURE_DEPTH_MAX: u32 = 4;

/// Who knocks, and whom it expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
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

/// Everything that is said on a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// First from the sender.
    Hello(Hello),
    /// The receiver takes the link, and grants this many payload bytes.
    Welcome {
        me: WorkerRef,
        credit: u64,
        /// Names the link to the streams that are to join it.
        key: u64,
        /// The longest frame it takes; over shared memory the size of a slot.
        frame_bytes: u32,
    },
    /// The receiver does not, and why.
    Reject(String),
    /// First on each further stream of a link: whose it is, and its key.
    Join {
        from: WorkerRef,
        key: u64,
    },
    /// The receiver takes the stream.
    Joined,
    Frame(FrameHead),
    /// A frame whose payload is at the start of this slot.
    SlotFrame(FrameHead, u32),
    Seal(Seal),
    Landed(HandoffId),
    Abandoned(HandoffId, Cause),
    Stop(HandoffId),
    Stopped(HandoffId),
    /// Receiver to sender: this many payload bytes more.
    Grant(u64),
    /// Receiver to sender: these slots may be written again.
    GrantSlots(Vec<u32>),
    /// Sender to receiver, to be answered in order.
    Ping(u64),
    /// The answer.
    Pong(u64),
    /// This many bytes follow and mean nothing.
    Probe(u32),
    /// This slot was filled and means nothing.
    SlotProbe(u32),
    /// The sender could write into the receiver's pool itself, and asks for it.
    AskPool,
    /// Here it is: what the sender's device opens it by.
    Pool(Vec<u8>),
    /// The receiver does not share its pool, and why; without a reason it has none to share.
    NoPool(String),
    /// The sender has opened the pool: its bytes go there.
    Opened,
    /// A frame whose payload is in the receiver's pool already.
    PoolFrame(FrameHead),
    /// On each stream before the first frame or seal of a hand-off there: that it may be written.
    Pass(HandoffId, Pass),
    /// In place of a hello: the sender's network card could write into a ring of the receiver's, and asks for one.
    Approach(Hello),
    /// Here it is, by its address in the receiver's process, and what its agent is reached by.
    Landing {
        start: u64,
        metadata: Vec<u8>,
    },
    /// The receiver could not make one, and why.
    NoLanding(String),
    /// A sign of life from whoever is still making an agent.
    Wait,
}

/// What was wrong with what a peer sent.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    #[error("not a Cleave data link: it started with {0:02x?} in place of {MAGIC:02x?}")]
    Magic([u8; 4]),
    #[error("data link version {0}, this is version {VERSION}: run the same release everywhere")]
    Version(u16),
    #[error("message kind {0} does not exist")]
    Kind(u8),
    #[error("message of {len} bytes where at most {max} are allowed")]
    TooLong { len: usize, max: usize },
    #[error("message ends in the middle of a field")]
    Short,
    #[error("{0} bytes too many in a message")]
    Surplus(usize),
    #[error("text is not UTF-8")]
    Text,
    #[error("message \"{0}\" was damaged on the way: its checksum does not fit")]
    Damaged(&'static str),
    #[error("frame of {0} bytes at offset {1} does not fit a block of {2} bytes")]
    OutsideBlock(u32, u32, u32),
    #[error("cause code {0} does not exist")]
    CauseCode(u8),
    #[error("failure code {0} does not exist")]
    FailureCode(u8),
}

/// A header, checked: no body that follows is longer than its kind allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
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
const GRANT: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;
pub(crate) const PROBE: u8 = 11;
const JOIN: u8 = 12;
const JOINED: u8 = 13;
const STOP: u8 = 14;
const STOPPED: u8 = 15;
const SLOT_FRAME: u8 = 16;
const GRANT_SLOTS: u8 = 17;
const SLOT_PROBE: u8 = 18;
const ASK_POOL: u8 = 19;
const POOL: u8 = 20;
const NO_POOL: u8 = 21;
const OPENED: u8 = 22;
const POOL_FRAME: u8 = 23;
const APPROACH: u8 = 24;
const LANDING: u8 = 25;
const NO_LANDING: u8 = 26;
const PASS: u8 = 27;
const WAIT: u8 = 28;

impl Header {
    /// Reads the header that a message begins with; `block_bytes` bounds frames.
    pub(crate) fn of(message: &[u8], block_bytes: u32) -> Result<Self, WireError> {
        let header = message.first_chunk::<HEADER_BYTES>();
        Self::parse(*header.ok_or(WireError::Short)?, block_bytes)
    }

    /// Reads a header; `block_bytes` bounds frames.
    pub(crate) fn parse(bytes: [u8; HEADER_BYTES], block_bytes: u32) -> Result<Self, WireError> {
        let [kind, z0, z1, z2, l0, l1, l2, l3] = bytes;
        if !(HELLO..=WAIT).contains(&kind) || [z0, z1, z2] != [0; 3] {
            return Err(WireError::Kind(kind));
        }
        let body_len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        let max = match kind {
            FRAME => FRAME_HEAD_BYTES + block_bytes as usize,
            PROBE => CHECK_BYTES + PROBE_BYTES,
            SEAL => SEAL_BYTES_MAX,
            LANDING => LANDING_BYTES_MAX,
            _ => CONTROL_BYTES_MAX,
        };
        if body_len > max {
            return Err(WireError::TooLong { len: body_len, max });
        }
        if body_len < CHECK_BYTES || kind == FRAME && body_len < FRAME_HEAD_BYTES {
            return Err(WireError::Short);
        }
        Ok(Self { kind, body_len })
    }

    /// Bytes of the body that the checksum closes; a payload or the bytes of a probe follow them.
    pub(crate) fn checked_len(&self) -> usize {
        match self.kind {
            FRAME => FRAME_HEAD_BYTES,
            PROBE => CHECK_BYTES,
            _ => self.body_len,
        }
    }

    /// The fields of a message up to its checksum, `[HEADER_BYTES + checked_len]`, if that fits.
    pub(crate) fn fields<'a>(&self, message: &'a [u8]) -> Result<&'a [u8], WireError> {
        if message.len() != HEADER_BYTES + self.checked_len() {
            return Err(WireError::Short);
        }
        let split = message.split_last_chunk::<CHECK_BYTES>();
        let (checked, check) = split.ok_or(WireError::Short)?;
        let fields = &checked[HEADER_BYTES..];
        if crate::checksum(checked) == u64::from_le_bytes(*check) {
            return Ok(fields);
        }
        // Another release closes its messages in another way, and is to hear so.
        if matches!(self.kind, HELLO | APPROACH | WELCOME | JOIN | REJECT) {
            Fields(&message[HEADER_BYTES..]).preamble()?;
        }
        Err(WireError::Damaged(name(self.kind)))
    }
}

/// A kind, for people.
fn name(kind: u8) -> &'static str {
    match kind {
        HELLO => "hello",
        WELCOME => "welcome",
        REJECT => "reject",
        FRAME => "frame",
        SEAL => "seal",
        LANDED => "landed",
        ABANDONED => "abandoned",
        GRANT => "grant",
        PING => "ping",
        PONG => "pong",
        PROBE => "probe",
        JOIN => "join",
        JOINED => "joined",
        STOP => "stop",
        STOPPED => "stopped",
        SLOT_FRAME => "slot frame",
        GRANT_SLOTS => "grant of slots",
        SLOT_PROBE => "slot probe",
        ASK_POOL => "ask for a pool",
        POOL => "pool",
        NO_POOL => "no pool",
        OPENED => "opened",
        POOL_FRAME => "pool frame",
        APPROACH => "approach",
        LANDING => "landing",
        NO_LANDING => "no landing",
        PASS => "pass",
        WAIT => "wait",
        _ => "unknown",
    }
}

impl FrameHead {
    /// Reads a frame up to its payload, `[HEADER_BYTES + FRAME_HEAD_BYTES]`; the payload's length must be
    /// what the header left, and lie in a block.
    pub(crate) fn parse(message: &[u8], block_bytes: u32) -> Result<Self, WireError> {
        let header = Header::of(message, block_bytes)?;
        let mut fields = Fields(header.fields(message)?);
        let frame = fields.frame_head()?;
        fields.end()?;
        frame.fits(block_bytes)?;
        if header.body_len != FRAME_HEAD_BYTES + frame.part.len as usize {
            return Err(WireError::Short);
        }
        Ok(frame)
    }

    /// Whether the payload lies inside a block.
    pub(crate) fn fits(&self, block_bytes: u32) -> Result<(), WireError> {
        let BlockPart { offset, len, .. } = self.part;
        let end = u64::from(offset) + u64::from(len);
        if len == 0 || end > u64::from(block_bytes) {
            return Err(WireError::OutsideBlock(len, offset, block_bytes));
        }
        Ok(())
    }
}

impl Message {
    /// Appends header, fields and checksum; the payload of a frame and the bytes of a probe come after.
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

    /// The kind, and how many bytes follow that are not written here.
    fn encode_fields(&self, out: &mut BytesMut) -> (u8, usize) {
        match self {
            Self::Hello(hello) => {
                put_hello(out, hello);
                (HELLO, 0)
            }
            Self::Approach(hello) => {
                put_hello(out, hello);
                (APPROACH, 0)
            }
            Self::Landing { start, metadata } => {
                out.put_u64_le(*start);
                out.put_slice(metadata);
                (LANDING, 0)
            }
            Self::NoLanding(reason) => {
                put_text(out, reason);
                (NO_LANDING, 0)
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
            Self::Grant(bytes) => {
                out.put_u64_le(*bytes);
                (GRANT, 0)
            }
            Self::GrantSlots(slots) => {
                for slot in slots {
                    out.put_u32_le(*slot);
                }
                (GRANT_SLOTS, 0)
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
            Self::Wait => (WAIT, 0),
            Self::Pass(handoff, pass) => {
                put_handoff(out, *handoff);
                out.put_slice(&pass.0);
                (PASS, 0)
            }
        }
    }

    /// Reads any whole message, header included, but a frame or a probe.
    pub(crate) fn decode(message: &[u8]) -> Result<Self, WireError> {
        let header = Header::of(message, 0)?;
        let mut fields = Fields(header.fields(message)?);
        let message = match header.kind {
            HELLO => Self::Hello(fields.hello()?),
            APPROACH => Self::Approach(fields.hello()?),
            LANDING => Self::Landing {
                start: fields.u64()?,
                metadata: fields.rest(),
            },
            NO_LANDING => Self::NoLanding(fields.text()?),
            WAIT => Self::Wait,
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
                output: fields.words()?,
            }),
            SLOT_FRAME => Self::SlotFrame(fields.frame_head()?, fields.u32()?),
            LANDED => Self::Landed(fields.handoff()?),
            STOP => Self::Stop(fields.handoff()?),
            STOPPED => Self::Stopped(fields.handoff()?),
            ABANDONED => Self::Abandoned(fields.handoff()?, fields.cause()?),
            GRANT => Self::Grant(fields.u64()?),
            GRANT_SLOTS => Self::GrantSlots(fields.words()?),
            SLOT_PROBE => Self::SlotProbe(fields.u32()?),
            ASK_POOL => Self::AskPool,
            POOL => Self::Pool(fields.rest()),
            NO_POOL => Self::NoPool(fields.text()?),
            OPENED => Self::Opened,
            POOL_FRAME => Self::PoolFrame(fields.frame_head()?),
            PASS => Self::Pass(fields.handoff()?, Pass(fields.bytes()?)),
            PING => Self::Ping(fields.u64()?),
            PONG => Self::Pong(fields.u64()?),
            other => return Err(WireError::Kind(other)),
        };
        fields.end()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{BlockIndex, Failure, FlightId, Generation, Incarnation, WorkerId};
    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    fn worker() -> impl Strategy<Value = WorkerRef> {
        (any::<u64>(), any::<u64>()).prop_map(|(worker, incarnation)| WorkerRef {
            worker: WorkerId(worker),
            incarnation: Incarnation(incarnation),
        })
    }

    fn handoff() -> impl Strategy<Value = HandoffId> {
        (any::<u64>(), any::<u32>()).prop_map(|(flight, attempt)| HandoffId {
            flight: FlightId(flight),
            attempt,
        })
    }

    fn failure() -> impl Strategy<Value = Failure> {
        let plain = prop_oneof![
            Just(Failure::WorkerLost),
            Just(Failure::LinkLost),
            Just(Failure::LeaseExpired),
            Just(Failure::Corrupt),
            Just(Failure::Rejected),
            Just(Failure::OutOfBlocks),
            Just(Failure::Draining),
            Just(Failure::WorkerStuck),
            Just(Failure::SlowReader),
            ".{0,40}".prop_map(Failure::Engine),
        ];
        plain.prop_recursive(2, 3, 1, |last| {
            last.prop_map(|last| Failure::RetriesSpent(Box::new(last)))
        })
    }

    fn cause() -> impl Strategy<Value = Cause> {
        prop_oneof![
            Just(Cause::Finished),
            Just(Cause::Cancelled),
            failure().prop_map(Cause::Failed),
        ]
    }

    fn hello() -> impl Strategy<Value = Hello> {
        (worker(), worker(), any::<u32>(), ".{0,200}").prop_map(
            |(from, to, block_bytes, fingerprint)| Hello {
                from,
                to,
                block_bytes,
                fingerprint,
            },
        )
    }

    fn message() -> impl Strategy<Value = Message> {
        let metadata = prop::collection::vec(any::<u8>(), 0..200);
        let landing = (any::<u64>(), metadata)
            .prop_map(|(start, metadata)| Message::Landing { start, metadata });
        let seal = (handoff(), any::<(u32, u64, [u8; 16], Vec<u32>)>()).prop_map(
            |(handoff, (blocks_count, digest, content, output))| {
                Message::Seal(Seal {
                    handoff,
                    blocks_count,
                    digest,
                    content: BlockHash(content),
                    output,
                })
            },
        );
        prop_oneof![
            hello().prop_map(Message::Hello),
            hello().prop_map(Message::Approach),
            landing,
            ".{0,200}".prop_map(Message::NoLanding),
            Just(Message::Wait),
            (worker(), any::<(u64, u64, u32)>()).prop_map(|(me, (credit, key, frame_bytes))| {
                Message::Welcome {
                    me,
                    credit,
                    key,
                    frame_bytes,
                }
            }),
            (worker(), any::<u64>()).prop_map(|(from, key)| Message::Join { from, key }),
            Just(Message::Joined),
            (frame_head(), any::<u32>()).prop_map(|(head, slot)| Message::SlotFrame(head, slot)),
            handoff().prop_map(Message::Stop),
            handoff().prop_map(Message::Stopped),
            prop::collection::vec(any::<u32>(), 0..50).prop_map(Message::GrantSlots),
            any::<u32>().prop_map(Message::SlotProbe),
            Just(Message::AskPool),
            prop::collection::vec(any::<u8>(), 0..200).prop_map(Message::Pool),
            ".{0,200}".prop_map(Message::NoPool),
            Just(Message::Opened),
            frame_head().prop_map(Message::PoolFrame),
            (handoff(), any::<[u8; 32]>())
                .prop_map(|(handoff, pass)| Message::Pass(handoff, Pass(pass))),
            ".{0,200}".prop_map(Message::Reject),
            seal,
            handoff().prop_map(Message::Landed),
            (handoff(), cause()).prop_map(|(handoff, cause)| Message::Abandoned(handoff, cause)),
            any::<u64>().prop_map(Message::Grant),
            any::<u64>().prop_map(Message::Ping),
            any::<u64>().prop_map(Message::Pong),
        ]
    }

    fn frame_head() -> impl Strategy<Value = FrameHead> {
        let numbers = any::<(u32, u32, u32, u64)>();
        (handoff(), numbers, 0u32..1000, 1u32..1000).prop_map(
            |(handoff, (block, generation, ordinal, checksum), offset, len)| FrameHead {
                handoff,
                block: BlockRef {
                    block: BlockIndex(block),
                    generation: Generation(generation),
                },
                part: BlockPart {
                    ordinal,
                    offset,
                    len,
                },
                checksum,
            },
        )
    }

    fn encoded(message: &Message) -> Vec<u8> {
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes);
        bytes.to_vec()
    }

    /// The message that a link reads from the bytes up to a payload.
    fn decoded(bytes: &[u8]) -> Result<Message, WireError> {
        match Header::of(bytes, 2000)? {
            Header { kind: FRAME, .. } => FrameHead::parse(bytes, 2000).map(Message::Frame),
            header if header.kind == PROBE => {
                header.fields(bytes)?;
                let len = header.body_len - CHECK_BYTES;
                Ok(Message::Probe(len as u32))
            }
            _ => Message::decode(bytes),
        }
    }

    /// Flips every bit of an encoded message, one at a time.
    fn flip_each_bit(message: &Message) {
        let mut bytes = encoded(message);
        assert_eq!(decoded(&bytes).as_ref(), Ok(message));
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let read = decoded(&bytes);
            assert!(read.is_err(), "bit {bit} of {message:?} makes {read:?}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    proptest! {
        #[test]
        fn every_message_comes_back(message in message()) {
            let bytes = encoded(&message);
            let header = Header::of(&bytes, 0).unwrap();
            prop_assert_eq!(header.body_len, bytes.len() - HEADER_BYTES);
            prop_assert_eq!(Message::decode(&bytes).unwrap(), message);
        }

        #[test]
        fn every_frame_head_comes_back(head in frame_head()) {
            let bytes = encoded(&Message::Frame(head));
            prop_assert_eq!(bytes.len(), HEADER_BYTES + FRAME_HEAD_BYTES);
            prop_assert_eq!(FrameHead::parse(&bytes, 2000).unwrap(), head);
        }

        #[test]
        fn one_flipped_bit_is_an_error_and_never_another_message(message in message(), head in frame_head()) {
            flip_each_bit(&message);
            flip_each_bit(&Message::Frame(head));
            flip_each_bit(&Message::Probe(head.part.len));
        }

        #[test]
        fn damage_is_an_error_and_never_a_panic(kind in 0u8..31, body in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut bytes = vec![kind, 0, 0, 0];
            bytes.extend((body.len() as u32).to_le_bytes());
            bytes.extend(body);
            let _ = decoded(&bytes);
            crate::fuzzing::close(&mut bytes);
            let _ = decoded(&bytes);
        }

        #[test]
        fn a_message_cut_short_is_refused(message in message(), keep in 0usize..1000) {
            let bytes = encoded(&message);
            let keep = keep % bytes.len();
            prop_assert!(Message::decode(&bytes[..keep]).is_err());
        }
    }

    /// The preamble says so before the checksum is looked at: another release has another one, or none.
    #[test]
    fn another_version_is_named_and_not_taken_for_damage() {
        let hello = Message::Hello(Hello {
            from: WorkerRef::default(),
            to: WorkerRef::default(),
            block_bytes: 1,
            fingerprint: "f".to_owned(),
        });
        let mut bytes = encoded(&hello);
        bytes[HEADER_BYTES + 4] = 5;
        assert_eq!(decoded(&bytes), Err(WireError::Version(5)));
        bytes[HEADER_BYTES + 4] = VERSION as u8;
        bytes[HEADER_BYTES + 6] ^= 1;
        assert_eq!(decoded(&bytes), Err(WireError::Damaged("hello")));
    }

    #[test]
    fn a_damaged_stream_is_refused_or_what_it_says() {
        let mut runner = TestRunner::deterministic();
        let samples: Vec<Vec<u8>> = (0..200)
            .map(|_| {
                let message = message().new_tree(&mut runner).unwrap().current();
                let mut bytes = BytesMut::new();
                message.encode(&mut bytes);
                bytes.to_vec()
            })
            .collect();
        cleave_fuzz::hold("frames", &samples, 20_000, crate::fuzzing::frames);
    }

    #[test]
    fn a_length_from_outside_is_bounded_before_anything_is_allocated() {
        let header = |kind: u8, len: u32| {
            let [a, b, c, d] = len.to_le_bytes();
            Header::parse([kind, 0, 0, 0, a, b, c, d], 4096)
        };
        assert!(header(FRAME, 4096 + 48).is_ok());
        assert!(matches!(
            header(FRAME, 4096 + 49),
            Err(WireError::TooLong { .. })
        ));
        assert!(matches!(
            header(SEAL, u32::MAX),
            Err(WireError::TooLong { .. })
        ));
        assert!(matches!(
            header(PROBE, u32::MAX),
            Err(WireError::TooLong { .. })
        ));
        assert_eq!(header(b'G', 0), Err(WireError::Kind(b'G')));
    }
}
