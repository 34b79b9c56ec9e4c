//! One way in or out of a pool: a stream of its own, and pinned memory that it copies by way of.
//!
//! Owns: the stream, two halves of staging memory that copies take in turns, and the lists that kernels read.
//! Never: knows a worker, or orders itself after a step.
//! Invariant: what the caller lends is touched by the caller's thread alone, the device copies from and to staging
//! memory; a half is used again only when the copies through it are over. A call returns when nothing of it is left
//! in the stream.

use super::secret::SECRET;
use super::slices::{Half, Slice, halves};
use crate::args::{BlocksArgs, DevicePiece};
use crate::driver::{Device, DeviceMemory, Event, Kernel, PinnedMemory, Stream};
use crate::error::CudaError;
use crate::images::Images;
use std::sync::Arc;

/// Of each half. Long enough for a link to the host to run at its speed, and two of them far from filling a cache.
pub(super) const STAGE_BYTES: usize = 4 << 20;
/// Slices of a half, or checksums, at once.
pub(super) const PIECES_MAX: usize = 256;
/// Slices no longer than this on average are gathered by a kernel first: so short, what a copy costs to begin is most
/// of it. Longer ones go by the copy engines alone, and leave the multiprocessors to steps.
const GATHER_BYTES_MAX: usize = 64 << 10;
/// What the kernels copy in one go.
const WORD_BYTES: usize = 16;
/// Shorter ones have a checksum of another form, which the host makes.
const SUMMED_BYTES_MIN: usize = 241;
/// Bytes of a slice for each block of a grid.
const BLOCK_BYTES: usize = 16 << 10;

/// See the module.
#[derive(Debug)]
pub(super) struct Lane {
    stream: Stream,
    kernels: Kernels,
    stages: [Stage; 2],
    sums: Sums,
}

#[derive(Debug)]
struct Kernels {
    gather: Kernel<BlocksArgs>,
    scatter: Kernel<BlocksArgs>,
    checksum: Kernel<BlocksArgs>,
}

/// Half of the staging memory.
#[derive(Debug)]
struct Stage {
    pinned: PinnedMemory,
    /// Where short slices are gathered, or scattered from.
    gathered: DeviceMemory,
    list: List,
    /// Reached when the copies through this half are over.
    over: Event,
}

/// Pieces for a kernel.
#[derive(Debug)]
struct List {
    pinned: PinnedMemory,
    memory: DeviceMemory,
}

/// Checksums on their way.
#[derive(Debug)]
struct Sums {
    secret: DeviceMemory,
    list: List,
    memory: DeviceMemory,
    pinned: PinnedMemory,
    over: Event,
}

/// A range of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: usize,
    pub(super) bytes: usize,
}

impl Lane {
    /// # Errors
    /// If memory of the device or of the host is short.
    pub(super) fn new(images: &Images, device: &Arc<Device>) -> Result<Self, CudaError> {
        let stream = Stream::new(device)?;
        let stages = [Stage::new(device)?, Stage::new(device)?];
        let sums = Sums::new(device, &stream)?;
        Ok(Self {
            kernels: Kernels {
                gather: images.kernel("blocks_gather")?,
                scatter: images.kernel("blocks_scatter")?,
                checksum: images.kernel("blocks_checksum")?,
            },
            stream,
            stages,
            sums,
        })
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Waits for what was queued in the stream, and leaves the processor to others meanwhile.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        self.sums.over.record(&self.stream)?;
        self.sums.over.synchronize()
    }

    /// Copies ranges of the pool out, each into the buffer of its number.
    pub(super) fn read(
        &mut self,
        pool: &DeviceMemory,
        ranges: &[Range],
        into: &mut [&mut [u8]],
    ) -> Result<(), CudaError> {
        self.stream.bind()?;
        let halves = halves(ranges, STAGE_BYTES, PIECES_MAX);
        for (turn, half) in halves.iter().enumerate() {
            self.queue_out(pool, half, turn % 2)?;
            // The half before is emptied while this one fills.
            if turn > 0 {
                self.empty(&halves[turn - 1], (turn - 1) % 2, into)?;
            }
        }
        match halves.len() {
            0 => Ok(()),
            count => self.empty(&halves[count - 1], (count - 1) % 2, into),
        }
    }

    /// Copies buffers into ranges of the pool, each into that of its number.
    pub(super) fn write(
        &mut self,
        pool: &DeviceMemory,
        ranges: &[Range],
        from: &[&[u8]],
    ) -> Result<(), CudaError> {
        self.stream.bind()?;
        // A call that failed half-way may have left copies behind it.
        self.wait()?;
        for (turn, half) in halves(ranges, STAGE_BYTES, PIECES_MAX).iter().enumerate() {
            let stage = &mut self.stages[turn % 2];
            stage.over.synchronize()?;
            let pinned = stage.pinned.as_mut_slice();
            for slice in &half.slices {
                let bytes = &from[slice.part][slice.offset..slice.offset + slice.bytes];
                pinned[slice.staging..slice.staging + slice.bytes].copy_from_slice(bytes);
            }
            self.queue_in(pool, half, turn % 2)?;
        }
        self.wait()
    }

    /// Queues the copies of one half, out of the pool.
    fn queue_out(
        &mut self,
        pool: &DeviceMemory,
        half: &Half,
        which: usize,
    ) -> Result<(), CudaError> {
        let stage = &mut self.stages[which];
        let stream = &self.stream;
        if is_gathered(half) {
            let args = stage.list.send(stream, half, (pool, &stage.gathered))?;
            // SAFETY: every piece is within the pool and the staging memory, which outlive the stream's work.
            unsafe { self.kernels.gather.launch(stream, grid(half), args) }?;
            let to = (&mut stage.pinned, 0..half.bytes);
            stream.copy_out((&stage.gathered, 0), to)?;
        } else {
            for slice in &half.slices {
                let to = slice.staging..slice.staging + slice.bytes;
                stream.copy_out((pool, slice.pool), (&mut stage.pinned, to))?;
            }
        }
        stage.over.record(stream)
    }

    /// Queues the copies of one half, into the pool.
    fn queue_in(
        &mut self,
        pool: &DeviceMemory,
        half: &Half,
        which: usize,
    ) -> Result<(), CudaError> {
        let stage = &mut self.stages[which];
        let stream = &self.stream;
        if is_gathered(half) {
            stream.copy_in((&stage.pinned, 0..half.bytes), (&stage.gathered, 0))?;
            let args = stage.list.send(stream, half, (pool, &stage.gathered))?;
            // SAFETY: as in `queue_out`.
            unsafe { self.kernels.scatter.launch(stream, grid(half), args) }?;
        } else {
            for slice in &half.slices {
                let from = slice.staging..slice.staging + slice.bytes;
                stream.copy_in((&stage.pinned, from), (pool, slice.pool))?;
            }
        }
        stage.over.record(stream)
    }

    /// Waits for one half, and hands out what lies there.
    fn empty(&self, half: &Half, which: usize, into: &mut [&mut [u8]]) -> Result<(), CudaError> {
        let stage = &self.stages[which];
        stage.over.synchronize()?;
        let pinned = stage.pinned.as_slice();
        for slice in &half.slices {
            let to = &mut into[slice.part][slice.offset..slice.offset + slice.bytes];
            to.copy_from_slice(&pinned[slice.staging..slice.staging + slice.bytes]);
        }
        Ok(())
    }

    /// XXH3-64 of ranges of the pool.
    pub(super) fn checksums(
        &mut self,
        pool: &DeviceMemory,
        ranges: &[Range],
    ) -> Result<Vec<u64>, CudaError> {
        self.stream.bind()?;
        let mut sums = Vec::with_capacity(ranges.len());
        for chunk in ranges.chunks(PIECES_MAX) {
            match chunk.iter().all(|range| is_summed(*range)) {
                true => self.sum(pool, chunk, &mut sums)?,
                false => self.sum_here(pool, chunk, &mut sums)?,
            }
        }
        Ok(sums)
    }

    /// On the device.
    fn sum(
        &mut self,
        pool: &DeviceMemory,
        ranges: &[Range],
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
        // SAFETY: every range is within the pool, and there is room for so many sums.
        unsafe { self.kernels.checksum.launch(stream, grid, args) }?;
        let bytes = ranges.len() * size_of::<u64>();
        stream.copy_out((&self.sums.memory, 0), (&mut self.sums.pinned, 0..bytes))?;
        self.wait()?;
        let words = self.sums.pinned.as_slice()[..bytes].as_chunks::<8>().0;
        sums.extend(words.iter().map(|word| u64::from_le_bytes(*word)));
        Ok(())
    }

    /// On the host: of what no kernel is made for.
    fn sum_here(
        &mut self,
        pool: &DeviceMemory,
        ranges: &[Range],
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

impl Stage {
    fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Ok(Self {
            pinned: PinnedMemory::new(device, STAGE_BYTES)?,
            gathered: DeviceMemory::new(device, STAGE_BYTES, "staging of KV blocks")?,
            list: List::new(device)?,
            over: Event::idle(device)?,
        })
    }
}

impl List {
    fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let bytes = PIECES_MAX * size_of::<DevicePiece>();
        Ok(Self {
            pinned: PinnedMemory::new(device, bytes)?,
            memory: DeviceMemory::new(device, bytes, "lists of KV blocks")?,
        })
    }

    /// Sends pieces; says where they will lie. Whoever sends waits before sending again.
    fn fill(
        &mut self,
        stream: &Stream,
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
        stream: &Stream,
        half: &Half,
        (pool, staging): (&DeviceMemory, &DeviceMemory),
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

impl Sums {
    fn new(device: &Arc<Device>, stream: &Stream) -> Result<Self, CudaError> {
        let bytes = PIECES_MAX * size_of::<u64>();
        let mut pinned = PinnedMemory::new(device, bytes)?;
        let secret = DeviceMemory::new(device, SECRET.len(), "a checksum's secret")?;
        pinned.as_mut_slice()[..SECRET.len()].copy_from_slice(&SECRET);
        stream.copy_in((&pinned, 0..SECRET.len()), (&secret, 0))?;
        stream.synchronize()?;
        Ok(Self {
            secret,
            list: List::new(device)?,
            memory: DeviceMemory::new(device, bytes, "checksums of KV blocks")?,
            pinned,
            over: Event::idle(device)?,
        })
    }
}

/// Whether the kernel has this range's checksum.
fn is_summed(range: Range) -> bool {
    range.bytes >= SUMMED_BYTES_MIN
        && range.bytes.is_multiple_of(WORD_BYTES)
        && range.first.is_multiple_of(WORD_BYTES)
}

/// Whether a kernel brings these slices together.
fn is_gathered(half: &Half) -> bool {
    let fits = |slice: &Slice| {
        [slice.pool, slice.staging, slice.bytes]
            .iter()
            .all(|number| number.is_multiple_of(WORD_BYTES))
    };
    let count = half.slices.len();
    count > 1 && half.bytes <= count * GATHER_BYTES_MAX && half.slices.iter().all(fits)
}

/// Blocks for the longest slice, and slices.
fn grid(half: &Half) -> [u32; 3] {
    let longest = half.slices.iter().map(|slice| slice.bytes).max();
    let share = longest.unwrap_or(0).div_ceil(BLOCK_BYTES).max(1);
    [share as u32, half.slices.len() as u32, 1]
}
