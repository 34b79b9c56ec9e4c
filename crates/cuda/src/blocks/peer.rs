//! Pools of other workers, in this process or another one, that this pool's blocks are copied into
//! directly.
//!
//! Owns: the contents of a handle, the register of this process's shared pools, and a pool that was
//! opened.
//! Never: decides who may write into a pool: its owner decides that by giving the handle away.
//! Invariant: memory of this process is never opened by its handle, which drivers refuse. It is
//! looked up in the register, and stays alive as long as it is open.

use super::{PROBE_BYTES, PoolLanes, pool_bytes, probe_first};
use crate::buffers::CudaPool;
use crate::driver::{CudaDevice, CudaStream, DeviceMemory, HANDLE_BYTES, ImportedMemory};
use crate::error::CudaError;
use cleave_domain::BlockIndex;
use cleave_engine::{BlockSpan, EngineError, PeerBlocks};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// The contents of a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolHandle {
    /// A random number of each process, because process ids are not unique across containers.
    process: u64,
    /// The pool's number in its process.
    pool: u64,
    /// The device's identifier, for messages.
    uuid: [u8; 16],
    blocks_count: u64,
    block_bytes: u64,
    memory: [u8; HANDLE_BYTES],
}

/// The size of an encoded handle in bytes.
const WIRE_BYTES: usize = 4 * 8 + 16 + HANDLE_BYTES;

/// The pools of this process that were shared and still exist.
static SHARED: Mutex<BTreeMap<u64, Weak<DeviceMemory>>> = Mutex::new(BTreeMap::new());

fn shared() -> MutexGuard<'static, BTreeMap<u64, Weak<DeviceMemory>>> {
    SHARED.lock()
}

fn this_process() -> u64 {
    static DRAWN: OnceLock<u64> = OnceLock::new();
    *DRAWN.get_or_init(|| RandomState::new().build_hasher().finish())
}

impl PoolHandle {
    /// Registers a pool, so that workers of this and of other processes can open it by the handle.
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

#[derive(Debug)]
pub(super) struct CudaPeerPool {
    own: Arc<PoolLanes>,
    peer: PeerMemory,
    blocks_count: usize,
    probe_first: usize,
}

#[derive(Debug)]
enum PeerMemory {
    SameProcess(Arc<DeviceMemory>),
    OtherProcess(ImportedMemory),
}

impl CudaPeerPool {
    pub(super) fn new(near: &Arc<PoolLanes>, handle: &[u8]) -> Result<Self, EngineError> {
        let no_handle = || EngineError::Plan("these bytes are no handle of a KV pool".to_owned());
        let handle = PoolHandle::parse(handle).ok_or_else(no_handle)?;
        let block_bytes = near.pool.shape.block_bytes();
        if handle.block_bytes != block_bytes as u64 {
            return Err(EngineError::Plan(format!(
                "the other worker's KV blocks have {} bytes, this worker's have {block_bytes}",
                handle.block_bytes
            )));
        }
        let blocks_count = usize::try_from(handle.blocks_count).map_err(|_| no_handle())?;
        let beside = probe_first(blocks_count, block_bytes).ok_or_else(no_handle)?;
        let device = near.pool.memory.device();
        let far = if handle.process == this_process() {
            let found = shared().get(&handle.pool).and_then(Weak::upgrade);
            let gone = || EngineError::Device("that KV pool no longer exists".to_owned());
            let far = found.ok_or_else(gone)?;
            enable_peer_access(device, far.device())?;
            PeerMemory::SameProcess(far)
        } else {
            let bytes = pool_bytes(beside);
            let opened = ImportedMemory::open(device, handle.memory, bytes);
            PeerMemory::OtherProcess(opened.map_err(|error| unreachable_from(&handle, &error))?)
        };
        Ok(Self {
            own: Arc::clone(near),
            peer: far,
            blocks_count,
            probe_first: beside,
        })
    }

    /// Queues one copy, from an offset in this pool to an offset in the other one.
    fn queue(
        &self,
        stream: &CudaStream,
        from: usize,
        to: usize,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let near = (&*self.own.pool.memory, from);
        match &self.peer {
            PeerMemory::SameProcess(memory) => stream.copy_within(near, (memory, to), bytes),
            PeerMemory::OtherProcess(memory) => stream.copy_to_process(near, (memory, to), bytes),
        }
    }
}

/// Enables direct copies between two GPUs of this process. Where the hardware has none, copies go
/// through the host and a log line says so.
fn enable_peer_access(near: &CudaDevice, far: &CudaDevice) -> Result<(), CudaError> {
    let can = near.enable_peer_access(far)? && far.enable_peer_access(near)?;
    if !can {
        let (near, far) = (near.ordinal(), far.ordinal());
        tracing::info!(
            "GPUs {near} and {far} cannot reach each other's memory: KV blocks are copied through host memory"
        );
    }
    Ok(())
}

fn unreachable_from(handle: &PoolHandle, error: &CudaError) -> EngineError {
    let uuid: String = handle.uuid.iter().map(|b| format!("{b:02x}")).collect();
    EngineError::Device(format!(
        "cannot reach memory of GPU {uuid} in the other process ({error}); CUDA_VISIBLE_DEVICES must let both \
         processes see it"
    ))
}

impl PeerBlocks for CudaPeerPool {
    fn write(&self, parts: &[(BlockSpan, BlockIndex)]) -> Result<Vec<u64>, EngineError> {
        let spans: Vec<BlockSpan> = parts.iter().map(|(span, _)| *span).collect();
        let ranges = self.own.ranges(&spans)?;
        let block_bytes = self.own.pool.shape.block_bytes();
        let outside = parts
            .iter()
            .find(|(_, to)| to.0 as usize >= self.blocks_count);
        if let Some((_, to)) = outside {
            let count = self.blocks_count;
            return Err(EngineError::Plan(format!(
                "{to} lies outside the other pool's {count} blocks"
            )));
        }
        let mut lane = self.own.outbound();
        lane.stream().bind()?;
        let queued = parts
            .iter()
            .zip(&ranges)
            .try_for_each(|((span, to), range)| {
                let to = to.0 as usize * block_bytes + span.offset;
                self.queue(lane.stream(), range.first, to, range.bytes)
            });
        let sums = queued.and_then(|()| lane.checksums(&self.own.pool.memory, &ranges));
        // The wait comes before any error returns: afterwards nothing writes into the other pool
        // any more.
        lane.wait()?;
        Ok(sums?)
    }

    fn probe(&self) -> Result<usize, EngineError> {
        let shape = &self.own.pool.shape;
        let from = probe_first(shape.blocks_count, shape.block_bytes());
        let from = from.expect("this pool was allocated");
        let lane = self.own.outbound();
        lane.stream().bind()?;
        let queued = self.queue(lane.stream(), from, self.probe_first, PROBE_BYTES);
        lane.wait()?;
        queued?;
        Ok(PROBE_BYTES)
    }
}
