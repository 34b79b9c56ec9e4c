//! A device's pool as links see it.
//!
//! Owns: the translation of types between them. Never copies on a thread that drives tasks: links
//! measure elsewhere, and `kv_copier` has threads of its own.

use super::spans::part_span;
use cleave_domain::Capacity;
use cleave_engine::{DeviceBlocks, PeerBlocks};
use cleave_transfer::{DirectCopy, PeerPool, PoolSharing};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct DevicePools {
    pub(crate) blocks: Arc<dyn DeviceBlocks>,
    pub(crate) capacity: Capacity,
}

#[derive(Debug)]
struct OpenedPeerPool {
    blocks: Arc<dyn PeerBlocks>,
    capacity: Capacity,
}

impl PoolSharing for DevicePools {
    fn handle(&self) -> Result<Vec<u8>, String> {
        self.blocks.handle().map_err(|error| error.to_string())
    }

    fn open(&self, handle: &[u8]) -> Result<Arc<dyn PeerPool>, String> {
        let opened = self.blocks.open(handle);
        Ok(Arc::new(OpenedPeerPool {
            blocks: opened.map_err(|error| error.to_string())?,
            capacity: self.capacity,
        }))
    }
}

impl PeerPool for OpenedPeerPool {
    fn write(&self, parts: &[DirectCopy]) -> Result<Vec<u64>, String> {
        let part = |direct: &DirectCopy| {
            let span = part_span(&self.capacity, direct.from, direct.part);
            (span, direct.to)
        };
        let parts: Vec<_> = parts.iter().map(part).collect();
        self.blocks.write(&parts).map_err(|error| error.to_string())
    }

    fn probe(&self) -> Result<usize, String> {
        self.blocks.probe().map_err(|error| error.to_string())
    }
}
