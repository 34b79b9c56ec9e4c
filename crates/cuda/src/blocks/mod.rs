//! A pool apart from the engine that computes in it: copies in streams of their own.
//!
//! Owns: the two lanes, one for what leaves and one for what arrives, and the checks of what is asked of them.
//! Never: waits for the engine's stream, or has it wait: see `cleave_engine::DeviceBlocks` for why that is safe.
//! Invariant: no span reaches out of the blocks; a lane is used by one caller at a time.
//!
//! Behind the blocks the pool has some bytes that mean nothing, for measuring how fast another worker writes here;
//! its size is a multiple of what the driver hands out, so that sharing it shares nothing else.

mod lane;
mod peer;
mod secret;
mod slices;

use crate::buffers::CudaPool;
use crate::driver::Device;
use crate::error::CudaError;
use crate::images::Images;
use cleave_engine::{BlockSpan, DeviceBlocks, EngineError, PeerBlocks};
use lane::{Lane, Range};
use peer::{Handle, Opened};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is copied to see how fast that is.
const PROBE_BYTES: usize = 1 << 20;
/// What the driver hands out: a handle opens whole ones.
const GRANULE_BYTES: usize = 2 << 20;
/// Where the probe's bytes begin.
const PROBE_ALIGNMENT: usize = 256;

/// Where the bytes beside the blocks begin; `None` where no memory is so large.
fn probe_first(blocks_count: usize, block_bytes: usize) -> Option<usize> {
    let blocks = blocks_count.checked_mul(block_bytes)?;
    let first = blocks.checked_next_multiple_of(PROBE_ALIGNMENT)?;
    (first < usize::MAX / 2).then_some(first)
}

/// Bytes of a pool whose probe begins there.
fn pool_bytes(probe_first: usize) -> usize {
    (probe_first + PROBE_BYTES).next_multiple_of(GRANULE_BYTES)
}

/// Bytes of a pool of this shape, blocks and what is beside them.
pub(crate) fn bytes_of(blocks_count: usize, block_bytes: usize) -> usize {
    // What is too large for memory is refused by the driver.
    probe_first(blocks_count, block_bytes).map_or(usize::MAX / 2, pool_bytes)
}

/// See the module.
#[derive(Debug)]
pub(crate) struct CudaBlocks {
    shared: Arc<Shared>,
}

/// What pools that were opened go on using.
#[derive(Debug)]
struct Shared {
    pool: CudaPool,
    leaving: Mutex<Lane>,
    arriving: Mutex<Lane>,
}

impl CudaBlocks {
    /// # Errors
    /// If memory of the device or of the host is short.
    pub(crate) fn new(
        images: &Images,
        device: &Arc<Device>,
        pool: &CudaPool,
    ) -> Result<Self, CudaError> {
        let lane = || Ok::<_, CudaError>(Mutex::new(Lane::new(images, device)?));
        let shared = Shared {
            pool: pool.clone(),
            leaving: lane()?,
            arriving: lane()?,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }
}

impl Shared {
    fn leaving(&self) -> MutexGuard<'_, Lane> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arriving(&self) -> MutexGuard<'_, Lane> {
        self.arriving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ranges(&self, spans: &[BlockSpan]) -> Result<Vec<Range>, EngineError> {
        let shape = &self.pool.shape;
        let block_bytes = shape.block_bytes();
        let range = |span: &BlockSpan| {
            let BlockSpan { block, offset, len } = *span;
            let inside = offset
                .checked_add(len)
                .is_some_and(|end| end <= block_bytes);
            if block.0 as usize >= shape.blocks_count || !inside {
                return Err(EngineError::Plan(format!(
                    "{len} bytes from {offset} of {block}: there are {} blocks of {block_bytes} bytes",
                    shape.blocks_count
                )));
            }
            Ok(Range {
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
        let mut lane = self.shared.leaving();
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
        Ok(self.shared.arriving().write(pool, &ranges, &from)?)
    }

    fn checksums(&self, spans: &[BlockSpan]) -> Result<Vec<u64>, EngineError> {
        let ranges = self.shared.ranges(spans)?;
        let pool = &self.shared.pool.memory;
        Ok(self.shared.arriving().checksums(pool, &ranges)?)
    }

    fn handle(&self) -> Result<Vec<u8>, EngineError> {
        Ok(Handle::of(&self.shared.pool)?.to_bytes())
    }

    fn open(&self, handle: &[u8]) -> Result<Arc<dyn PeerBlocks>, EngineError> {
        Ok(Arc::new(Opened::new(&self.shared, handle)?))
    }
}

/// # Panics
/// If a buffer is not as long as its span.
fn check_len(span: BlockSpan, len: usize) {
    assert_eq!(span.len, len, "a span measures its bytes");
}
