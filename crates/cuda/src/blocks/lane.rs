//! One direction of copies into or out of a pool: a stream of its own, and the pinned memory that
//! its copies pass through.
//!
//! Owns: the stream, two halves of staging memory that copies use alternately, and the lists of
//! pieces that kernels read.
//! Never: knows a worker; orders its copies after a step.
//! Invariant: only the caller's thread touches the caller's buffers; the device copies from and to
//! staging memory. A half is used again only after the copies through it have ended. A call returns
//! after all its work in the stream has ended.

use super::secret::SECRET;
use super::slices::{StagedHalf, StagedSlice, split_into_halves};
use crate::args::{BlocksArgs, DevicePiece};
use crate::driver::{CudaDevice, CudaEvent, CudaKernel, CudaStream, DeviceMemory, PinnedMemory};
use crate::error::CudaError;
use crate::images::KernelImages;
use std::sync::Arc;

/// The size of each half in bytes: long enough for the link to the host to reach its speed, and
/// small enough that both fit the processor's cache.
pub(super) const STAGE_BYTES: usize = 4 << 20;
/// The most slices of a half, and the most checksums of one launch.
pub(super) const PIECES_MAX: usize = 256;
/// A kernel first gathers slices that are no longer than this on average, because the start of a
/// copy costs more than such a slice. The copy engines alone copy longer slices, which leaves the
/// multiprocessors to steps.
const GATHER_BYTES_MAX: usize = 64 << 10;
/// Bytes that one thread of the kernels copies at once.
const WORD_BYTES: usize = 16;
/// The kernel computes checksums from this size on. XXH3 has another form for shorter inputs, which
/// the host computes.
const DEVICE_CHECKSUM_BYTES_MIN: usize = 241;
/// Bytes of a slice for each thread block of a grid.
const BLOCK_BYTES: usize = 16 << 10;

#[derive(Debug)]
pub(super) struct CopyLane {
    stream: CudaStream,
    kernels: BlockKernels,
    halves: [StagingHalf; 2],
    sums: ChecksumBuffers,
}

#[derive(Debug)]
struct BlockKernels {
    gather: CudaKernel<BlocksArgs>,
    scatter: CudaKernel<BlocksArgs>,
    checksum: CudaKernel<BlocksArgs>,
}

/// Half of the staging memory.
#[derive(Debug)]
struct StagingHalf {
    pinned: PinnedMemory,
    /// Device memory that short slices are gathered into or scattered from.
    gathered: DeviceMemory,
    list: PieceList,
    /// Reached when the copies through this half have ended.
    copies_done: CudaEvent,
}

/// A list of pieces for a kernel.
#[derive(Debug)]
struct PieceList {
    pinned: PinnedMemory,
    memory: DeviceMemory,
}

/// Buffers for checksums, which the device computes and the host reads.
#[derive(Debug)]
struct ChecksumBuffers {
    secret: DeviceMemory,
    list: PieceList,
    memory: DeviceMemory,
    pinned: PinnedMemory,
    done: CudaEvent,
}

/// A range of the pool in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolRange {
    pub(super) first: usize,
    pub(super) bytes: usize,
}

impl CopyLane {
    /// # Errors
    /// If memory of the device or of the host is short.
    pub(super) fn new(images: &KernelImages, device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        let stream = CudaStream::new(device)?;
        let stages = [StagingHalf::new(device)?, StagingHalf::new(device)?];
        let sums = ChecksumBuffers::new(device, &stream)?;
        Ok(Self {
            kernels: BlockKernels {
                gather: images.kernel("blocks_gather")?,
                scatter: images.kernel("blocks_scatter")?,
                checksum: images.kernel("blocks_checksum")?,
            },
            stream,
            halves: stages,
            sums,
        })
    }

    pub(super) fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Waits for all queued work of the stream, without occupying the processor.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        self.sums.done.record(&self.stream)?;
        self.sums.done.synchronize()
    }

    /// Copies ranges of the pool out, each into the buffer with the same index.
    pub(super) fn read(
        &mut self,
        pool: &DeviceMemory,
        ranges: &[PoolRange],
        into: &mut [&mut [u8]],
    ) -> Result<(), CudaError> {
        self.stream.bind()?;
        let halves = split_into_halves(ranges, STAGE_BYTES, PIECES_MAX);
        for (turn, half) in halves.iter().enumerate() {
            self.queue_out(pool, half, turn % 2)?;
            // The host empties the previous half while the device fills this one.
            if turn > 0 {
                self.drain_half(&halves[turn - 1], (turn - 1) % 2, into)?;
            }
        }
        match halves.len() {
            0 => Ok(()),
            count => self.drain_half(&halves[count - 1], (count - 1) % 2, into),
        }
    }

    /// Copies buffers into ranges of the pool, each into the range with the same index.
    pub(super) fn write(
        &mut self,
        pool: &DeviceMemory,
        ranges: &[PoolRange],
        from: &[&[u8]],
    ) -> Result<(), CudaError> {
        self.stream.bind()?;
        // A failed call may have left copies in the stream that still use the staging memory.
        self.wait()?;
        for (turn, half) in split_into_halves(ranges, STAGE_BYTES, PIECES_MAX)
            .iter()
            .enumerate()
        {
            let stage = &mut self.halves[turn % 2];
            // The device may still copy from this half.
            stage.copies_done.synchronize()?;
            let pinned = stage.pinned.as_mut_slice();
            for slice in &half.slices {
                let bytes = &from[slice.part][slice.offset..slice.offset + slice.bytes];
                pinned[slice.staging..slice.staging + slice.bytes].copy_from_slice(bytes);
            }
            self.queue_in(pool, half, turn % 2)?;
        }
        self.wait()
    }

    /// Queues the copies of one half out of the pool.
    fn queue_out(
        &mut self,
        pool: &DeviceMemory,
        half: &StagedHalf,
        which: usize,
    ) -> Result<(), CudaError> {
        let stage = &mut self.halves[which];
        let stream = &self.stream;
        if is_gathered(half) {
            let args = stage.list.send(stream, half, pool, &stage.gathered)?;
            // SAFETY: every piece lies within the pool and the staging memory, which outlive the
            // stream's work.
            unsafe { self.kernels.gather.launch(stream, grid(half), args) }?;
            let to = (&mut stage.pinned, 0..half.bytes);
            stream.copy_out((&stage.gathered, 0), to)?;
        } else {
            for slice in &half.slices {
                let to = slice.staging..slice.staging + slice.bytes;
                stream.copy_out((pool, slice.pool), (&mut stage.pinned, to))?;
            }
        }
        stage.copies_done.record(stream)
    }

    /// Queues the copies of one half into the pool.
    fn queue_in(
        &mut self,
        pool: &DeviceMemory,
        half: &StagedHalf,
        which: usize,
    ) -> Result<(), CudaError> {
        let stage = &mut self.halves[which];
        let stream = &self.stream;
        if is_gathered(half) {
            stream.copy_in((&stage.pinned, 0..half.bytes), (&stage.gathered, 0))?;
            let args = stage.list.send(stream, half, pool, &stage.gathered)?;
            // SAFETY: as in `queue_out`.
            unsafe { self.kernels.scatter.launch(stream, grid(half), args) }?;
        } else {
            for slice in &half.slices {
                let from = slice.staging..slice.staging + slice.bytes;
                stream.copy_in((&stage.pinned, from), (pool, slice.pool))?;
            }
        }
        stage.copies_done.record(stream)
    }

    /// Waits for one half, and copies its slices to the caller's buffers.
    fn drain_half(
        &self,
        half: &StagedHalf,
        which: usize,
        into: &mut [&mut [u8]],
    ) -> Result<(), CudaError> {
        let stage = &self.halves[which];
        stage.copies_done.synchronize()?;
        let pinned = stage.pinned.as_slice();
        for slice in &half.slices {
            let to = &mut into[slice.part][slice.offset..slice.offset + slice.bytes];
            to.copy_from_slice(&pinned[slice.staging..slice.staging + slice.bytes]);
        }
        Ok(())
    }

    /// Returns the XXH3-64 checksums of ranges of the pool.
    pub(super) fn checksums(
        &mut self,
        pool: &DeviceMemory,
        ranges: &[PoolRange],
    ) -> Result<Vec<u64>, CudaError> {
        self.stream.bind()?;
        let mut sums = Vec::with_capacity(ranges.len());
        for chunk in ranges.chunks(PIECES_MAX) {
            if chunk.iter().all(|range| has_device_checksum(*range)) {
                self.checksum_on_device(pool, chunk, &mut sums)?
            } else {
                self.checksum_on_host(pool, chunk, &mut sums)?
            }
        }
        Ok(sums)
    }

    /// Computes checksums on the device.
    fn checksum_on_device(
        &mut self,
        pool: &DeviceMemory,
        ranges: &[PoolRange],
        sums: &mut Vec<u64>,
    ) -> Result<(), CudaError> {
        let pieces = ranges.iter().map(|range| DevicePiece {
            pool: range.first as u64,
            staging: 0,
            bytes: range.bytes as u64,
        });
        let stream = &self.stream;
        let args = BlocksArgs {
            pool: pool.at(0),
            staging: 0,
            pieces: self.sums.list.fill(stream, pieces)?,
            checksums: self.sums.memory.at(0),
            secret: self.sums.secret.at(0),
        };
        let grid = [ranges.len() as u32, 1, 1];
        // SAFETY: every range lies within the pool, and the memory has room for so many sums.
        unsafe { self.kernels.checksum.launch(stream, grid, args) }?;
        let bytes = ranges.len() * size_of::<u64>();
        stream.copy_out((&self.sums.memory, 0), (&mut self.sums.pinned, 0..bytes))?;
        self.wait()?;
        let words = self.sums.pinned.as_slice()[..bytes].as_chunks::<8>().0;
        sums.extend(words.iter().map(|word| u64::from_le_bytes(*word)));
        Ok(())
    }

    /// Computes on the host the checksums of ranges that the kernel does not take.
    fn checksum_on_host(
        &mut self,
        pool: &DeviceMemory,
        ranges: &[PoolRange],
        sums: &mut Vec<u64>,
    ) -> Result<(), CudaError> {
        for range in ranges {
            let mut bytes = vec![0; range.bytes];
            self.read(pool, std::slice::from_ref(range), &mut [&mut bytes])?;
            sums.push(twox_hash::XxHash3_64::oneshot(&bytes));
        }
        Ok(())
    }
}

impl StagingHalf {
    fn new(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        Ok(Self {
            pinned: PinnedMemory::new(device, STAGE_BYTES)?,
            gathered: DeviceMemory::new(device, STAGE_BYTES, "staging of KV blocks")?,
            list: PieceList::new(device)?,
            copies_done: CudaEvent::blocking(device)?,
        })
    }
}

impl PieceList {
    fn new(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        let bytes = PIECES_MAX * size_of::<DevicePiece>();
        Ok(Self {
            pinned: PinnedMemory::new(device, bytes)?,
            memory: DeviceMemory::new(device, bytes, "lists of KV blocks")?,
        })
    }

    /// Queues the copy of pieces to the device, and returns their address there. The caller waits
    /// for the stream before the next call.
    fn fill(
        &mut self,
        stream: &CudaStream,
        pieces: impl ExactSizeIterator<Item = DevicePiece>,
    ) -> Result<u64, CudaError> {
        let bytes = pieces.len() * size_of::<DevicePiece>();
        let slots = self.pinned.as_mut_slice()[..bytes].as_chunks_mut::<8>().0;
        for (slot, piece) in slots.chunks_mut(3).zip(pieces) {
            let DevicePiece {
                pool,
                staging,
                bytes,
            } = piece;
            for (word, value) in slot.iter_mut().zip([pool, staging, bytes]) {
                *word = value.to_le_bytes();
            }
        }
        stream.copy_in((&self.pinned, 0..bytes), (&self.memory, 0))?;
        Ok(self.memory.at(0))
    }

    fn send(
        &mut self,
        stream: &CudaStream,
        half: &StagedHalf,
        pool: &DeviceMemory,
        staging: &DeviceMemory,
    ) -> Result<BlocksArgs, CudaError> {
        let pieces = half.slices.iter().map(|slice| DevicePiece {
            pool: slice.pool as u64,
            staging: slice.staging as u64,
            bytes: slice.bytes as u64,
        });
        Ok(BlocksArgs {
            pool: pool.at(0),
            staging: staging.at(0),
            pieces: self.fill(stream, pieces)?,
            checksums: 0,
            secret: 0,
        })
    }
}

impl ChecksumBuffers {
    fn new(device: &Arc<CudaDevice>, stream: &CudaStream) -> Result<Self, CudaError> {
        let bytes = PIECES_MAX * size_of::<u64>();
        let mut pinned = PinnedMemory::new(device, bytes)?;
        let secret = DeviceMemory::new(device, SECRET.len(), "a checksum's secret")?;
        pinned.as_mut_slice()[..SECRET.len()].copy_from_slice(&SECRET);
        stream.copy_in((&pinned, 0..SECRET.len()), (&secret, 0))?;
        stream.synchronize()?;
        Ok(Self {
            secret,
            list: PieceList::new(device)?,
            memory: DeviceMemory::new(device, bytes, "checksums of KV blocks")?,
            pinned,
            done: CudaEvent::blocking(device)?,
        })
    }
}

/// Returns whether the kernel can compute this range's checksum.
fn has_device_checksum(range: PoolRange) -> bool {
    range.bytes >= DEVICE_CHECKSUM_BYTES_MIN
        && range.bytes.is_multiple_of(WORD_BYTES)
        && range.first.is_multiple_of(WORD_BYTES)
}

/// Returns whether a kernel gathers or scatters these slices.
fn is_gathered(half: &StagedHalf) -> bool {
    let fits = |slice: &StagedSlice| {
        [slice.pool, slice.staging, slice.bytes]
            .iter()
            .all(|number| number.is_multiple_of(WORD_BYTES))
    };
    let count = half.slices.len();
    count > 1 && half.bytes <= count * GATHER_BYTES_MAX && half.slices.iter().all(fits)
}

/// Returns the grid for a half: the thread blocks of its longest slice by the number of slices.
fn grid(half: &StagedHalf) -> [u32; 3] {
    let longest = half.slices.iter().map(|slice| slice.bytes).max();
    let share = longest.unwrap_or(0).div_ceil(BLOCK_BYTES).max(1);
    [share as u32, half.slices.len() as u32, 1]
}
