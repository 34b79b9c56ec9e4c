//! Pools that this one's blocks are copied straight into: another worker's of this process, or of another process.
//!
//! Owns: what a handle says, which pools of this process can be found by one, and a pool that was opened.
//! Never: decides whether somebody may write: whoever gives a handle away does.
//! Invariant: memory of this process is never opened by its handle, which drivers refuse: it is found, and kept alive
//! for as long as it is open.

use super::{PROBE_BYTES, Shared, pool_bytes, probe_first};
use crate::buffers::CudaPool;
use crate::driver::{Device, DeviceMemory, HANDLE_BYTES, ImportedMemory, Stream};
use crate::error::CudaError;
use cleave_domain::BlockIndex;
use cleave_engine::{BlockSpan, EngineError, PeerBlocks};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// What a handle says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle {
    /// Drawn by each process once: process ids are not unique between containers.
    process: u64,
    /// Which of its pools.
    pool: u64,
    /// Of the device, for messages.
    uuid: [u8; 16],
    blocks_count: u64,
    block_bytes: u64,
    memory: [u8; HANDLE_BYTES],
}

/// Bytes of a handle as it travels.
const WIRE_BYTES: usize = 4 * 8 + 16 + HANDLE_BYTES;

/// Pools of this process that were shared and are still there.
static SHARED: Mutex<BTreeMap<u64, Weak<DeviceMemory>>> = Mutex::new(BTreeMap::new());

fn shared() -> MutexGuard<'static, BTreeMap<u64, Weak<DeviceMemory>>> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn this_process() -> u64 {
    static DRAWN: OnceLock<u64> = OnceLock::new();
    *DRAWN.get_or_init(|| RandomState::new().build_hasher().finish())
}

impl Handle {
    /// Makes a pool one that can be found, here and by other processes.
    pub(super) fn of(pool: &CudaPool) -> Result<Self, CudaError> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let memory = pool.memory.export()?;
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let mut shared = shared();
        shared.retain(|_, memory| memory.strong_count() > 0);
        shared.insert(serial, Arc::downgrade(&pool.memory));
        Ok(Self {
            process: this_process(),
            pool: serial,
            uuid: pool.memory.device().facts().uuid,
            blocks_count: pool.shape.blocks_count as u64,
            block_bytes: pool.shape.block_bytes() as u64,
            memory,
        })
    }

    pub(super) fn to_bytes(self) -> Vec<u8> {
        let Self {
            process,
            pool,
            uuid,
            blocks_count,
            block_bytes,
            memory,
        } = self;
        let numbers = [process, pool, blocks_count, block_bytes];
        let mut bytes = Vec::with_capacity(WIRE_BYTES);
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        bytes.extend(uuid);
        bytes.extend(memory);
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (numbers, rest) = bytes.split_at_checked(4 * 8)?;
        let (uuid, memory) = rest.split_at_checked(16)?;
        let numbers = numbers.as_chunks::<8>().0;
        let number = |index: usize| u64::from_le_bytes(numbers[index]);
        Some(Self {
            process: number(0),
            pool: number(1),
            blocks_count: number(2),
            block_bytes: number(3),
            uuid: uuid.try_into().ok()?,
            memory: memory.try_into().ok()?,
        })
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Opened {
    near: Arc<Shared>,
    far: Far,
    blocks_count: usize,
    probe_first: usize,
}

#[derive(Debug)]
enum Far {
    Here(Arc<DeviceMemory>),
    There(ImportedMemory),
}

impl Opened {
    pub(super) fn new(near: &Arc<Shared>, handle: &[u8]) -> Result<Self, EngineError> {
        let no_handle = || EngineError::Plan("this is no handle of a pool".to_owned());
        let handle = Handle::parse(handle).ok_or_else(no_handle)?;
        let block_bytes = near.pool.shape.block_bytes();
        if handle.block_bytes != block_bytes as u64 {
            return Err(EngineError::Plan(format!(
                "blocks of the other pool have {} bytes, these {block_bytes}",
                handle.block_bytes
            )));
        }
        let blocks_count = usize::try_from(handle.blocks_count).map_err(|_| no_handle())?;
        let beside = probe_first(blocks_count, block_bytes).ok_or_else(no_handle)?;
        let device = near.pool.memory.device();
        let far = match handle.process == this_process() {
            true => {
                let found = shared().get(&handle.pool).and_then(Weak::upgrade);
                let gone = || EngineError::Device("that pool is gone".to_owned());
                let far = found.ok_or_else(gone)?;
                reach_both_ways(device, far.device())?;
                Far::Here(far)
            }
            false => {
                let bytes = pool_bytes(beside);
                let opened = ImportedMemory::open(device, handle.memory, bytes);
                Far::There(opened.map_err(|error| unreachable_from(&handle, &error))?)
            }
        };
        Ok(Self {
            near: Arc::clone(near),
            far,
            blocks_count,
            probe_first: beside,
        })
    }

    /// Queues one copy, from a byte of this pool on to a byte of the other.
    fn queue(
        &self,
        stream: &Stream,
        (from, to): (usize, usize),
        bytes: usize,
    ) -> Result<(), CudaError> {
        let near = (&*self.near.pool.memory, from);
        match &self.far {
            Far::Here(memory) => stream.copy_within(near, (memory, to), bytes),
            Far::There(memory) => stream.copy_abroad(near, (memory, to), bytes),
        }
    }
}

/// Two GPUs of this process copy to each other directly where they can; else by way of the host, which is told.
fn reach_both_ways(near: &Device, far: &Device) -> Result<(), CudaError> {
    let can = near.reach(far)? && far.reach(near)?;
    if !can {
        let (near, far) = (near.ordinal(), far.ordinal());
        tracing::info!(
            "GPUs {near} and {far} cannot reach each other's memory: blocks go by way of the host"
        );
    }
    Ok(())
}

fn unreachable_from(handle: &Handle, error: &CudaError) -> EngineError {
    let uuid: String = handle.uuid.iter().map(|b| format!("{b:02x}")).collect();
    EngineError::Device(format!(
        "cannot reach memory of GPU {uuid} in the other process ({error}); CUDA_VISIBLE_DEVICES must let both \
         processes see it"
    ))
}

impl PeerBlocks for Opened {
    fn write(&self, parts: &[(BlockSpan, BlockIndex)]) -> Result<Vec<u64>, EngineError> {
        let spans: Vec<BlockSpan> = parts.iter().map(|(span, _)| *span).collect();
        let ranges = self.near.ranges(&spans)?;
        let block_bytes = self.near.pool.shape.block_bytes();
        let outside = parts
            .iter()
            .find(|(_, to)| to.0 as usize >= self.blocks_count);
        if let Some((_, to)) = outside {
            let count = self.blocks_count;
            return Err(EngineError::Plan(format!("{to} of a pool of {count}")));
        }
        let mut lane = self.near.leaving();
        lane.stream().bind()?;
        let queued = parts
            .iter()
            .zip(&ranges)
            .try_for_each(|((span, to), range)| {
                let to = to.0 as usize * block_bytes + span.offset;
                self.queue(lane.stream(), (range.first, to), range.bytes)
            });
        let sums = queued.and_then(|()| lane.checksums(&self.near.pool.memory, &ranges));
        // Whatever failed: nothing is written there any more when this returns.
        lane.wait()?;
        Ok(sums?)
    }

    fn probe(&self) -> Result<usize, EngineError> {
        let shape = &self.near.pool.shape;
        let from = probe_first(shape.blocks_count, shape.block_bytes());
        let from = from.expect("this pool was allocated");
        let lane = self.near.leaving();
        lane.stream().bind()?;
        let queued = self.queue(lane.stream(), (from, self.probe_first), PROBE_BYTES);
        lane.wait()?;
        queued?;
        Ok(PROBE_BYTES)
    }
}
