//! Access to a KV pool beside the engine that computes in it, by copies in streams of their own.
//!
//! Owns: two lanes, one for blocks that leave and one for blocks that arrive, and the checks of
//! their arguments.
//! Never: waits for the engine's stream, or makes it wait; `cleave_engine::DeviceBlocks` says why
//! that is safe.
//! Invariant: no span exceeds its block; one caller at a time uses a lane.
//!
//! Behind the blocks the pool has some unused bytes, which another worker overwrites to measure its
//! speed. The pool's size is a multiple of the driver's unit of allocation, so that sharing the
//! pool shares nothing else.

mod lane;
mod peer;
mod secret;
mod slices;

use cleave_domain::KvPlane;

use crate::buffers::CudaPool;
use crate::driver::CudaDevice;
use crate::error::CudaError;
use crate::images::KernelImages;
use cleave_engine::{BlockSpan, DeviceBlocks, EngineError, PeerBlocks};
use lane::{CopyLane, PoolRange};
use parking_lot::{Mutex, MutexGuard};
use peer::{CudaPeerPool, PoolHandle};
use std::sync::Arc;

/// The size of the copy that measures the speed, in bytes.
const PROBE_BYTES: usize = 1 << 20;
/// The driver's unit of allocation in bytes: a handle opens whole units.
const GRANULE_BYTES: usize = 2 << 20;
/// The alignment of the probe's bytes.
const PROBE_ALIGNMENT: usize = 256;

/// Returns the offset of the probe's bytes behind the blocks; `None` if the sum overflows.
fn probe_first(blocks_count: usize, block_bytes: usize) -> Option<usize> {
    let blocks = blocks_count.checked_mul(block_bytes)?;
    let first = blocks.checked_next_multiple_of(PROBE_ALIGNMENT)?;
    (first < usize::MAX / 2).then_some(first)
}

/// Returns the size of a pool whose probe begins at that offset.
fn pool_bytes(probe_first: usize) -> usize {
    (probe_first + PROBE_BYTES).next_multiple_of(GRANULE_BYTES)
}

/// Returns the size in bytes of a pool of this shape, with the probe.
pub(crate) fn pool_bytes_of(blocks_count: usize, block_bytes: usize) -> usize {
    // A size beyond all memory stands for an overflow, so that the driver refuses it.
    probe_first(blocks_count, block_bytes).map_or(usize::MAX / 2, pool_bytes)
}

#[derive(Debug)]
pub(crate) struct CudaBlocks {
    shared: Arc<PoolLanes>,
}

/// The pool and its lanes, which opened pools of other workers keep using.
#[derive(Debug)]
struct PoolLanes {
    pool: CudaPool,
    outbound: Mutex<CopyLane>,
    inbound: Mutex<CopyLane>,
}

impl CudaBlocks {
    /// # Errors
    /// If memory of the device or of the host is short.
    pub(crate) fn new(
        images: &KernelImages,
        device: &Arc<CudaDevice>,
        pool: &CudaPool,
    ) -> Result<Self, CudaError> {
        let lane = || Ok::<_, CudaError>(Mutex::new(CopyLane::new(images, device)?));
        let shared = PoolLanes {
            pool: pool.clone(),
            outbound: lane()?,
            inbound: lane()?,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }
}

impl PoolLanes {
    fn outbound(&self) -> MutexGuard<'_, CopyLane> {
        self.outbound.lock()
    }

    fn inbound(&self) -> MutexGuard<'_, CopyLane> {
        self.inbound.lock()
    }

    fn ranges(&self, spans: &[BlockSpan]) -> Result<Vec<PoolRange>, EngineError> {
        let shape = &self.pool.shape;
        let block_bytes = shape.block_bytes();
        let range = |span: &BlockSpan| {
            let BlockSpan {
                plane,
                block,
                offset,
                len,
            } = *span;
            let end = offset.checked_add(len);
            let inside = plane == KvPlane::Blocks && end.is_some_and(|end| end <= block_bytes);
            if block.0 as usize >= shape.blocks_count || !inside {
                return Err(EngineError::Plan(format!(
                    "{len} bytes from {offset} of {block} of the plane {plane}: there are {} blocks of {block_bytes} bytes",
                    shape.blocks_count
                )));
            }
            Ok(PoolRange {
                first: block.0 as usize * block_bytes + offset,
                bytes: len,
            })
        };
        spans.iter().map(range).collect()
    }
}

impl DeviceBlocks for CudaBlocks {
    fn read(&self, parts: &mut [(BlockSpan, &mut [u8])]) -> Result<Vec<u64>, EngineError> {
        let spans: Vec<BlockSpan> = parts.iter().map(|(span, _)| *span).collect();
        let ranges = self.shared.ranges(&spans)?;
        let mut into: Vec<&mut [u8]> = Vec::with_capacity(parts.len());
        for (span, bytes) in parts {
            check_len(*span, bytes.len());
            into.push(bytes);
        }
        let mut lane = self.shared.outbound();
        let pool = &self.shared.pool.memory;
        lane.read(pool, &ranges, &mut into)?;
        Ok(lane.checksums(pool, &ranges)?)
    }

    fn write(&self, parts: &[(BlockSpan, &[u8])]) -> Result<(), EngineError> {
        let spans: Vec<BlockSpan> = parts.iter().map(|(span, _)| *span).collect();
        let ranges = self.shared.ranges(&spans)?;
        for (span, bytes) in parts {
            check_len(*span, bytes.len());
        }
        let from: Vec<&[u8]> = parts.iter().map(|(_, bytes)| *bytes).collect();
        let pool = &self.shared.pool.memory;
        Ok(self.shared.inbound().write(pool, &ranges, &from)?)
    }

    fn checksums(&self, spans: &[BlockSpan]) -> Result<Vec<u64>, EngineError> {
        let ranges = self.shared.ranges(spans)?;
        let pool = &self.shared.pool.memory;
        Ok(self.shared.inbound().checksums(pool, &ranges)?)
    }

    fn handle(&self) -> Result<Vec<u8>, EngineError> {
        Ok(PoolHandle::of(&self.shared.pool)?.to_bytes())
    }

    fn open(&self, handle: &[u8]) -> Result<Arc<dyn PeerBlocks>, EngineError> {
        Ok(Arc::new(CudaPeerPool::new(&self.shared, handle)?))
    }
}

/// # Panics
/// If a buffer is not as long as its span.
fn check_len(span: BlockSpan, len: usize) {
    assert_eq!(span.len, len, "a buffer is as long as its span");
}
