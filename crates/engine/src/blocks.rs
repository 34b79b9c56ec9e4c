//! KV blocks of a device apart from the engine that computes them: copies out of and into the pool that neither
//! wait for a step nor hold one up.
//!
//! Owns: the traits. Never: knows who sends a block to whom, or when it may be copied.
//!
//! The device orders nothing between these copies and steps: whoever asks for them does, and two rules are enough.
//! - What is read is final: the step that computed it has given its result, and an engine gives a result only when the
//!   device has done all that belongs to the step, also where nothing of it comes to the host.
//! - What is written belongs to nobody else: no step that was begun touches the block, and none does before the
//!   write has returned.
//!
//! Every method returns when its copies are over. They may be called from any thread; what leaves and what arrives
//! are apart, and neither waits for the other.

use crate::EngineError;
use cleave_domain::BlockIndex;
use std::fmt::Debug;
use std::sync::Arc;

/// Bytes of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSpan {
    /// Of which block.
    pub block: BlockIndex,
    /// From which byte of the block on.
    pub offset: usize,
    /// How many.
    pub len: usize,
}

/// A pool on a device. Checksums are XXH3-64 with seed 0.
pub trait DeviceBlocks: Send + Sync + Debug {
    /// Copies parts of blocks to the host, `[span.len]` each; gives the checksum of each, of what lies in the pool.
    ///
    /// # Errors
    /// `Plan` if a span is outside the pool, and nothing was copied; `Device` if the device failed.
    fn read(&self, parts: &mut [(BlockSpan, &mut [u8])]) -> Result<Vec<u64>, EngineError>;

    /// Copies bytes into parts of blocks, `[span.len]` each.
    ///
    /// # Errors
    /// As [`DeviceBlocks::read`].
    fn write(&self, parts: &[(BlockSpan, &[u8])]) -> Result<(), EngineError>;

    /// Checksums of what lies in the pool.
    ///
    /// # Errors
    /// As [`DeviceBlocks::read`].
    fn checksums(&self, spans: &[BlockSpan]) -> Result<Vec<u64>, EngineError>;

    /// What another pool of this process or of this host needs to write into this one, as bytes that mean
    /// something to [`DeviceBlocks::open`] only.
    ///
    /// # Errors
    /// `Device` if the memory cannot be shared.
    fn handle(&self) -> Result<Vec<u8>, EngineError>;

    /// Opens another pool by its handle, so that blocks can be copied from this one straight into it. It stays open
    /// until what is returned is dropped.
    ///
    /// # Errors
    /// `Plan` if the handle is none, or its blocks are of another size; `Device` if the memory cannot be reached.
    fn open(&self, handle: &[u8]) -> Result<Arc<dyn PeerBlocks>, EngineError>;
}

/// Another worker's pool, open for writing.
pub trait PeerBlocks: Send + Sync + Debug {
    /// Copies parts of this worker's blocks to the same place in blocks of the other; gives the checksum of each, of
    /// what lies in this worker's pool. When it returns the bytes are in the other pool.
    ///
    /// # Errors
    /// As [`DeviceBlocks::read`].
    fn write(&self, parts: &[(BlockSpan, BlockIndex)]) -> Result<Vec<u64>, EngineError>;

    /// Copies some bytes that mean nothing to a place beside the other's blocks; gives their number.
    ///
    /// # Errors
    /// `Device` if the device failed.
    fn probe(&self) -> Result<usize, EngineError>;
}
