//! Copies of KV blocks out of and into a device's pool, beside the engine that computes in it: a
//! copy neither waits for a step nor delays one.
//!
//! Owns: the traits. Never: knows which worker sends a block to which, or when a block may be
//! copied.
//!
//! The device does not order these copies against steps; the caller does, by two rules.
//! - A block is read only when it is final: the step that computed it has returned its result, and
//!   an engine returns a result only when the device has finished the whole step, even if the step
//!   copies nothing to the host.
//! - A block is written only while no step uses it: no step that was begun touches the block, and
//!   none does before the write has returned.
//!
//! Every method returns when its copies are finished, and may be called from any thread. Reads and
//! writes use separate queues, so that neither waits for the other.

use crate::EngineError;
use cleave_domain::{BlockIndex, KvPlane};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// A byte range of one block, or of one slot of the state plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSpan {
    /// Plane of the block or slot.
    pub plane: KvPlane,
    /// Block or slot that has the range.
    pub block: BlockIndex,
    /// First byte, from the start of the block or slot.
    pub offset: usize,
    /// Length of the range in bytes.
    pub len: usize,
}

impl BlockSpan {
    /// A range of a block.
    pub fn of_block(block: BlockIndex, offset: usize, len: usize) -> Self {
        Self {
            plane: KvPlane::Blocks,
            block,
            offset,
            len,
        }
    }

    /// The start of a block or slot, which is a range of it if it exists.
    pub(crate) fn start_of(plane: KvPlane, block: BlockIndex) -> Self {
        Self {
            plane,
            block,
            offset: 0,
            len: 0,
        }
    }

    /// The bytes of the range in its block or slot.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// A pool on a device. Checksums are XXH3-64 with seed 0.
pub trait DeviceBlocks: Send + Sync + Debug {
    /// Copies parts of blocks to the host, `[span.len]` each. Returns a checksum per part, computed
    /// from the bytes in the pool.
    ///
    /// # Errors
    /// `Plan` if a span is outside the pool: nothing was copied then. `Device` if the device
    /// failed.
    fn read(&self, parts: &mut [(BlockSpan, &mut [u8])]) -> Result<Vec<u64>, EngineError>;

    /// Copies bytes into parts of blocks, `[span.len]` each.
    ///
    /// # Errors
    /// As [`DeviceBlocks::read`].
    fn write(&self, parts: &[(BlockSpan, &[u8])]) -> Result<(), EngineError>;

    /// Checksums of byte ranges, computed from the bytes in the pool.
    ///
    /// # Errors
    /// As [`DeviceBlocks::read`].
    fn checksums(&self, spans: &[BlockSpan]) -> Result<Vec<u64>, EngineError>;

    /// Handle by which another pool of this process or host opens this one for writing; opaque to
    /// all but [`DeviceBlocks::open`].
    ///
    /// # Errors
    /// `Device` if the memory cannot be shared.
    fn handle(&self) -> Result<Vec<u8>, EngineError>;

    /// Opens another pool by its handle, so that blocks are copied from this pool directly into it.
    /// The pool stays open until the returned value is dropped.
    ///
    /// # Errors
    /// `Plan` if the handle is invalid, or its blocks have another size; `Device` if this device
    /// cannot reach the memory.
    fn open(&self, handle: &[u8]) -> Result<Arc<dyn PeerBlocks>, EngineError>;
}

/// Another worker's pool, open for writing.
pub trait PeerBlocks: Send + Sync + Debug {
    /// Copies parts of this worker's blocks to the same offsets in blocks of the same plane of the
    /// other pool. Returns a checksum per part, computed from the bytes in this worker's pool. The
    /// bytes are in the other pool when the call returns.
    ///
    /// # Errors
    /// As [`DeviceBlocks::read`].
    fn write(&self, parts: &[(BlockSpan, BlockIndex)]) -> Result<Vec<u64>, EngineError>;

    /// Measures the path: copies meaningless bytes to a spare area beside the other pool's blocks.
    /// Returns their number.
    ///
    /// # Errors
    /// `Device` if the device failed.
    fn probe(&self) -> Result<usize, EngineError>;
}
