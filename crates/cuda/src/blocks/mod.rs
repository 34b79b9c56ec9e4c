//! Access to a KV pool beside the engine that computes in it, by copies in streams of their own.
//!
//! Owns: two lanes, one for blocks that leave and one for blocks that arrive, and the checks of
//! their arguments.
//! Never: waits for the engine's stream, or makes it wait; `cleave_engine::DeviceBlocks` says why
//! that is safe.
//! Invariant: no span exceeds its block; one caller at a time uses a lane.
//!
//! Behind the blocks the pool has some unused bytes, which another worker overwrites to measure its
//! speed, and then the state slots.

mod lane;
mod peer;
mod regions;
mod secret;
mod slices;

pub(crate) use regions::PoolRegions;

use crate::buffers::CudaPool;
use crate::driver::CudaDevice;
use crate::error::CudaError;
use crate::images::KernelImages;
use cleave_engine::ops::PoolPlane;
use cleave_engine::{BlockSpan, DeviceBlocks, EngineError, PeerBlocks};
use lane::{CopyLane, PoolRange};
use parking_lot::{Mutex, MutexGuard};
use peer::{CudaPeerPool, PoolHandle};
use std::sync::Arc;

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
        let regions = &self.pool.regions;
        let range = |span: &BlockSpan| {
            let Some(range) = regions.range(span) else {
                let BlockSpan {
                    plane,
                    block,
                    offset,
                    len,
                } = *span;
                let PoolPlane { count, bytes } = regions.plane(plane);
                return Err(EngineError::Plan(format!(
                    "{len} bytes from {offset} of {block}: the plane {plane} has {count} of {bytes} bytes"
                )));
            };
            Ok(PoolRange {
                first: range.start,
                bytes: range.len(),
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
