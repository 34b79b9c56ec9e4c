//! A device's pool as links see it.
//!
//! Owns: the words of one for the other. Never: copies on a thread that drives tasks: links measure elsewhere, and the
//! porter has threads of its own.

use super::engine::range;
use cleave_engine::{BlockSpan, DeviceBlocks, PeerBlocks};
use cleave_transfer::{DirectPart, PeerPool, Pools};
use std::sync::Arc;

/// This worker's pool.
#[derive(Debug)]
pub(crate) struct DevicePools(pub(crate) Arc<dyn DeviceBlocks>);

/// A peer's.
#[derive(Debug)]
struct Opened(Arc<dyn PeerBlocks>);

impl Pools for DevicePools {
    fn handle(&self) -> Result<Vec<u8>, String> {
        self.0.handle().map_err(|error| error.to_string())
    }

    fn open(&self, handle: &[u8]) -> Result<Arc<dyn PeerPool>, String> {
        let opened = self.0.open(handle).map_err(|error| error.to_string())?;
        Ok(Arc::new(Opened(opened)))
    }
}

impl PeerPool for Opened {
    fn write(&self, parts: &[DirectPart]) -> Result<Vec<u64>, String> {
        let part = |direct: &DirectPart| {
            let of = range(direct.part);
            let span = BlockSpan {
                block: direct.from,
                offset: of.start,
                len: of.len(),
            };
            (span, direct.to)
        };
        let parts: Vec<_> = parts.iter().map(part).collect();
        self.0.write(&parts).map_err(|error| error.to_string())
    }

    fn probe(&self) -> Result<usize, String> {
        self.0.probe().map_err(|error| error.to_string())
    }
}
