//! Encodes and decodes the fields of messages.
//!
//! Never: reads past the end of a body, or allocates more than the limit of a text or the length of
//! the body.

use super::{
    FAILURE_DEPTH_MAX, FrameHead, LinkHello, LinkWireError, MAGIC, TEXT_BYTES_MAX, VERSION,
};
use bytes::{BufMut, BytesMut};
use cleave_domain::{
    AbandonCause, BlockIndex, BlockRef, Failure, FlightId, Generation, HandoffId, Incarnation,
    KvPlane, WorkerId, WorkerRef,
};
use cleave_kv::BlockPart;

pub(super) fn put_frame_head(out: &mut BytesMut, frame: &FrameHead) {
    put_handoff(out, frame.handoff);
    out.put_u32_le(frame.block.block.0);
    out.put_u32_le(frame.block.generation.0);
    out.put_u8(match frame.part.plane {
        KvPlane::Blocks => 0,
        KvPlane::State => 1,
    });
    out.put_u32_le(frame.part.ordinal);
    out.put_u32_le(frame.part.offset);
    out.put_u32_le(frame.part.len);
    out.put_u64_le(frame.checksum);
}

pub(super) fn put_hello(out: &mut BytesMut, hello: &LinkHello) {
    let LinkHello {
        from,
        to,
        block_bytes,
        fingerprint,
    } = hello;
    put_preamble(out);
    put_worker(out, *from);
    put_worker(out, *to);
    out.put_u32_le(*block_bytes);
    put_text(out, fingerprint);
}

pub(super) fn put_preamble(out: &mut BytesMut) {
    out.put_slice(&MAGIC);
    out.put_u16_le(VERSION);
}

pub(super) fn put_worker(out: &mut BytesMut, worker: WorkerRef) {
    out.put_u64_le(worker.worker.0);
    out.put_u64_le(worker.incarnation.0);
}

pub(super) fn put_handoff(out: &mut BytesMut, handoff: HandoffId) {
    out.put_u64_le(handoff.flight.0);
    out.put_u32_le(handoff.attempt);
}

/// Texts are for people, so a text over the limit is cut rather than refused.
pub(super) fn put_text(out: &mut BytesMut, text: &str) {
    let mut cut = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(cut) {
        cut -= 1;
    }
    out.put_u32_le(u32::try_from(cut).expect("the limit is small"));
    out.put_slice(&text.as_bytes()[..cut]);
}

pub(super) fn put_state_digest(out: &mut BytesMut, digest: Option<u64>) {
    out.put_u8(u8::from(digest.is_some()));
    if let Some(digest) = digest {
        out.put_u64_le(digest);
    }
}

pub(super) fn put_cause(out: &mut BytesMut, cause: &AbandonCause) {
    match cause {
        AbandonCause::Finished => out.put_u8(1),
        AbandonCause::Cancelled => out.put_u8(2),
        AbandonCause::Failed(failure) => {
            out.put_u8(3);
            put_failure(out, failure, 0);
        }
    }
}

pub(super) fn put_failure(out: &mut BytesMut, failure: &Failure, depth: u32) {
    match failure {
        Failure::WorkerLost => out.put_u8(1),
        Failure::LinkLost => out.put_u8(2),
        Failure::LeaseExpired => out.put_u8(3),
        Failure::Corrupt => out.put_u8(4),
        Failure::Rejected => out.put_u8(5),
        Failure::Engine(reason) => {
            out.put_u8(6);
            put_text(out, reason);
        }
        Failure::OutOfBlocks => out.put_u8(8),
        Failure::Draining => out.put_u8(9),
        Failure::WorkerStuck => out.put_u8(10),
        Failure::SlowReader => out.put_u8(11),
        // Brains nest failures at most once; below the limit only the innermost failure is kept.
        Failure::RetriesSpent(last) if depth + 1 < FAILURE_DEPTH_MAX => {
            out.put_u8(7);
            put_failure(out, last, depth + 1);
        }
        Failure::RetriesSpent(last) => put_failure(out, last, depth),
    }
}

/// A reader of the fields in a body; `.0` is the rest.
pub(super) struct MessageFields<'a>(pub(super) &'a [u8]);

impl MessageFields<'_> {
    pub(super) fn bytes<const N: usize>(&mut self) -> Result<[u8; N], LinkWireError> {
        let (head, rest) = self
            .0
            .split_first_chunk::<N>()
            .ok_or(LinkWireError::Truncated)?;
        self.0 = rest;
        Ok(*head)
    }

    pub(super) fn u8(&mut self) -> Result<u8, LinkWireError> {
        Ok(u8::from_le_bytes(self.bytes()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, LinkWireError> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, LinkWireError> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    /// The rest of the body, whose length is bounded by its kind.
    pub(super) fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).to_vec()
    }

    pub(super) fn preamble(&mut self) -> Result<(), LinkWireError> {
        let magic = self.bytes()?;
        if magic != MAGIC {
            return Err(LinkWireError::Magic(magic));
        }
        match u16::from_le_bytes(self.bytes()?) {
            VERSION => Ok(()),
            other => Err(LinkWireError::Version(other)),
        }
    }

    pub(super) fn hello(&mut self) -> Result<LinkHello, LinkWireError> {
        self.preamble()?;
        Ok(LinkHello {
            from: self.worker()?,
            to: self.worker()?,
            block_bytes: self.u32()?,
            fingerprint: self.text()?,
        })
    }

    pub(super) fn worker(&mut self) -> Result<WorkerRef, LinkWireError> {
        Ok(WorkerRef {
            worker: WorkerId(self.u64()?),
            incarnation: Incarnation(self.u64()?),
        })
    }

    pub(super) fn handoff(&mut self) -> Result<HandoffId, LinkWireError> {
        Ok(HandoffId {
            flight: FlightId(self.u64()?),
            attempt: self.u32()?,
        })
    }

    pub(super) fn text(&mut self) -> Result<String, LinkWireError> {
        let len = self.u32()? as usize;
        if len > TEXT_BYTES_MAX {
            let max = TEXT_BYTES_MAX;
            return Err(LinkWireError::TooLong { len, max });
        }
        let (text, rest) = self
            .0
            .split_at_checked(len)
            .ok_or(LinkWireError::Truncated)?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).map_err(|_| LinkWireError::Text)
    }

    /// All 32-bit numbers up to the end of the body.
    pub(super) fn words(&mut self) -> Result<Vec<u32>, LinkWireError> {
        let mut words = Vec::with_capacity(self.0.len() / 4);
        while !self.0.is_empty() {
            words.push(self.u32()?);
        }
        Ok(words)
    }

    pub(super) fn frame_head(&mut self) -> Result<FrameHead, LinkWireError> {
        Ok(FrameHead {
            handoff: self.handoff()?,
            block: BlockRef {
                block: BlockIndex(self.u32()?),
                generation: Generation(self.u32()?),
            },
            part: BlockPart {
                plane: self.plane()?,
                ordinal: self.u32()?,
                offset: self.u32()?,
                len: self.u32()?,
            },
            checksum: self.u64()?,
        })
    }

    fn plane(&mut self) -> Result<KvPlane, LinkWireError> {
        match self.u8()? {
            0 => Ok(KvPlane::Blocks),
            1 => Ok(KvPlane::State),
            other => Err(LinkWireError::PlaneCode(other)),
        }
    }

    pub(super) fn state_digest(&mut self) -> Result<Option<u64>, LinkWireError> {
        match self.u8()? {
            0 => Ok(None),
            1 => Ok(Some(self.u64()?)),
            other => Err(LinkWireError::StateCode(other)),
        }
    }

    pub(super) fn cause(&mut self) -> Result<AbandonCause, LinkWireError> {
        Ok(match self.u8()? {
            1 => AbandonCause::Finished,
            2 => AbandonCause::Cancelled,
            3 => AbandonCause::Failed(self.failure(0)?),
            other => return Err(LinkWireError::CauseCode(other)),
        })
    }

    pub(super) fn failure(&mut self, depth: u32) -> Result<Failure, LinkWireError> {
        Ok(match self.u8()? {
            1 => Failure::WorkerLost,
            2 => Failure::LinkLost,
            3 => Failure::LeaseExpired,
            4 => Failure::Corrupt,
            5 => Failure::Rejected,
            6 => Failure::Engine(self.text()?),
            7 if depth + 1 < FAILURE_DEPTH_MAX => {
                Failure::RetriesSpent(Box::new(self.failure(depth + 1)?))
            }
            8 => Failure::OutOfBlocks,
            9 => Failure::Draining,
            10 => Failure::WorkerStuck,
            11 => Failure::SlowReader,
            other => return Err(LinkWireError::FailureCode(other)),
        })
    }

    pub(super) fn end(&self) -> Result<(), LinkWireError> {
        match self.0.len() {
            0 => Ok(()),
            surplus => Err(LinkWireError::TrailingBytes(surplus)),
        }
    }
}
