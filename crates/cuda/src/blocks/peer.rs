//! Pools of other workers, in this process or another one, that this pool's blocks are copied into
//! directly.
//!
//! Owns: the contents of a handle, the register of this process's shared pools, and a pool that was
//! opened.
//! Never: decides who may write into a pool: its owner decides that by giving the handle away.
//! Invariant: memory of this process is never opened by its handle, which drivers refuse. It is
//! looked up in the register, and stays alive as long as it is open.

use super::regions::PROBE_BYTES;
use super::{PoolLanes, PoolRegions};
use crate::buffers::CudaPool;
use crate::driver::{CudaDevice, CudaStream, DeviceMemory, HANDLE_BYTES, ImportedMemory};
use crate::error::CudaError;
use cleave_domain::BlockIndex;
use cleave_engine::ops::PoolPlane;
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
    /// Zeros if the pool has no state slots.
    states_count: u64,
    state_bytes: u64,
    /// Zeros if the pool has no window plane.
    windows_count: u64,
    window_bytes: u64,
    memory: [u8; HANDLE_BYTES],
}

/// The number of integers in an encoded handle, before the identifier.
const NUMBERS_COUNT: usize = 8;
/// The size of an encoded handle in bytes.
const WIRE_BYTES: usize = NUMBERS_COUNT * 8 + 16 + HANDLE_BYTES;

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
        let PoolRegions {
            blocks,
            windows,
            states,
            ..
        } = pool.regions;
        Ok(Self {
            process: this_process(),
            pool: serial,
            uuid: pool.memory.device().facts().uuid,
            blocks_count: blocks.count as u64,
            block_bytes: blocks.bytes as u64,
            states_count: states.count as u64,
            state_bytes: states.bytes as u64,
            windows_count: windows.count as u64,
            window_bytes: windows.bytes as u64,
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
            states_count,
            state_bytes,
            windows_count,
            window_bytes,
            memory,
        } = self;
        let numbers: [u64; NUMBERS_COUNT] = [
            process,
            pool,
            blocks_count,
            block_bytes,
            states_count,
            state_bytes,
            windows_count,
            window_bytes,
        ];
        let mut bytes = Vec::with_capacity(WIRE_BYTES);
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        bytes.extend(uuid);
        bytes.extend(memory);
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (numbers, rest) = bytes.split_at_checked(NUMBERS_COUNT * 8)?;
        let (uuid, memory) = rest.split_at_checked(16)?;
        let numbers = numbers.as_chunks::<8>().0;
        let number = |index: usize| u64::from_le_bytes(numbers[index]);
        Some(Self {
            process: number(0),
            pool: number(1),
            blocks_count: number(2),
            block_bytes: number(3),
            states_count: number(4),
            state_bytes: number(5),
            windows_count: number(6),
            window_bytes: number(7),
            uuid: uuid.try_into().ok()?,
            memory: memory.try_into().ok()?,
        })
    }

    /// Returns the regions of the pool; `None` if its sizes are impossible.
    fn regions(&self) -> Option<PoolRegions> {
        let plane = |count: u64, bytes: u64| {
            let (count, bytes) = (usize::try_from(count).ok()?, usize::try_from(bytes).ok()?);
            Some(PoolPlane { count, bytes })
        };
        let blocks = plane(self.blocks_count, self.block_bytes)?;
        let windows = plane(self.windows_count, self.window_bytes)?;
        PoolRegions::new(blocks, windows, plane(self.states_count, self.state_bytes)?)
    }
}

#[derive(Debug)]
pub(super) struct CudaPeerPool {
    own: Arc<PoolLanes>,
    peer: PeerMemory,
    regions: PoolRegions,
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
        let PoolRegions { blocks, states, .. } = near.pool.regions;
        for (name, theirs, own) in [
            ("KV blocks", handle.block_bytes, blocks.bytes),
            ("state slots", handle.state_bytes, states.bytes),
        ] {
            if theirs != own as u64 {
                return Err(EngineError::Plan(format!(
                    "the other worker's {name} have {theirs} bytes, this worker's have {own}"
                )));
            }
        }
        let regions = handle.regions().ok_or_else(no_handle)?;
        let device = near.pool.memory.device();
        let far = if handle.process == this_process() {
            let found = shared().get(&handle.pool).and_then(Weak::upgrade);
            let gone = || EngineError::Device("that KV pool no longer exists".to_owned());
            let far = found.ok_or_else(gone)?;
            enable_peer_access(device, far.device())?;
            PeerMemory::SameProcess(far)
        } else {
            let opened = ImportedMemory::open(device, handle.memory, regions.bytes());
            PeerMemory::OtherProcess(opened.map_err(|error| unreachable_from(&handle, &error))?)
        };
        Ok(Self {
            own: Arc::clone(near),
            peer: far,
            regions,
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
        let target = |(span, to): &(BlockSpan, BlockIndex)| {
            let range = self.regions.range(&BlockSpan {
                block: *to,
                ..*span
            });
            let outside = || {
                let (plane, count) = (span.plane, self.regions.plane(span.plane).count);
                let problem =
                    format!("{to} lies outside the other pool's plane {plane} of {count}");
                EngineError::Plan(problem)
            };
            range.map(|range| range.start).ok_or_else(outside)
        };
        let targets: Vec<usize> = parts.iter().map(target).collect::<Result<_, _>>()?;
        let mut lane = self.own.outbound();
        lane.stream().bind()?;
        let queued = targets
            .iter()
            .zip(&ranges)
            .try_for_each(|(to, range)| self.queue(lane.stream(), range.first, *to, range.bytes));
        let sums = queued.and_then(|()| lane.checksums(&self.own.pool.memory, &ranges));
        // The wait comes before any error returns: afterwards nothing writes into the other pool
        // any more.
        lane.wait()?;
        Ok(sums?)
    }

    fn probe(&self) -> Result<usize, EngineError> {
        let from = self.own.pool.regions.probe_first;
        let lane = self.own.outbound();
        lane.stream().bind()?;
        let queued = self.queue(lane.stream(), from, self.regions.probe_first, PROBE_BYTES);
        lane.wait()?;
        queued?;
        Ok(PROBE_BYTES)
    }
}
