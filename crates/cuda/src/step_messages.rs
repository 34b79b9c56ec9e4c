//! The messages of a step to the device: tokens, positions, tables, rules.
//!
//! Owns: a fixed place on the device for each kind of message, and the pinned memory that the
//! device copies messages from, in two halves that steps use alternately.
//! Never: waits, except for the step before the last one and for a place that must grow.
//! Invariant: a message overwrites the last one of its kind in the stream's order: work queued
//! before it reads the old message, work queued after it the new one. Pinned memory is written
//! again only after the device copied it. A place moves only when it grows, and
//! [`StepMessages::reallocations_count`] counts the moves.

use crate::buffers::{GrowingMemory, MemoryContents};
use crate::driver::{CudaDevice, CudaEvent, CudaStream, PinnedMemory};
use crate::error::CudaError;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The alignment of a message in pinned memory, in bytes.
const ALIGNMENT: usize = 16;
/// The initial size of each half; a step that needs more enlarges it.
const HALF_BYTES: usize = 256 << 10;
/// The initial size of each place, large enough that small steps never move one.
const PLACE_BYTES: usize = 4 << 10;

/// A kind of message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StepMessage {
    Tokens,
    Positions,
    RowSlots,
    WindowRowSlots,
    Tables,
    WindowTables,
    Segments,
    SegmentsCount,
    /// The index is a window's among the windows of the model, as in the next three variants.
    DecodeItems(usize),
    DecodeItemsCount(usize),
    PrefillItems(usize),
    PrefillItemsCount(usize),
    /// One number of rows each; the first is the batch's.
    RowsCount(usize),
    Indices,
    AdapterPlaces,
    AdapterTiles,
    /// How many there are of both.
    AdapterCounts,
    Rules,
    Edits,
    MaskedRules,
    MaskedEdits,
    Masks,
}

#[derive(Debug)]
pub(crate) struct StepMessages {
    buffers: BTreeMap<StepMessage, GrowingMemory>,
    halves: [PinnedHalf; 2],
    /// The half that this step fills.
    current: usize,
    used: usize,
    reallocations_count: u64,
}

#[derive(Debug)]
struct PinnedHalf {
    memory: PinnedMemory,
    /// Reached when the device has copied the messages of the last step that used this half.
    fetched: CudaEvent,
    /// Memory that became too small during the step; the device may still copy from it.
    outgrown: Vec<PinnedMemory>,
}

impl StepMessages {
    pub(crate) fn new(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        let half = || -> Result<PinnedHalf, CudaError> {
            Ok(PinnedHalf {
                memory: PinnedMemory::new(device, HALF_BYTES)?,
                fetched: CudaEvent::new(device)?,
                outgrown: Vec::new(),
            })
        };
        Ok(Self {
            buffers: BTreeMap::new(),
            halves: [half()?, half()?],
            current: 0,
            used: 0,
            reallocations_count: 0,
        })
    }

    /// Counts the moves of places. A recording from before the last move contains old addresses.
    pub(crate) fn reallocations_count(&self) -> u64 {
        self.reallocations_count
    }

    /// Begins a step in the other half, after the device has copied that half's last messages.
    pub(crate) fn switch_half(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        self.halves[self.current].fetched.record(stream)?;
        self.current = 1 - self.current;
        self.used = 0;
        let half = &mut self.halves[self.current];
        half.fetched.synchronize()?;
        half.outgrown.clear();
        Ok(())
    }

    /// Queues the copy of values to their place, and returns its address for work that is queued
    /// later.
    pub(crate) fn send<T: Copy>(
        &mut self,
        stream: &CudaStream,
        message: StepMessage,
        values: &[T],
    ) -> Result<u64, CudaError> {
        let bytes = size_of_val(values);
        let buffer = match self.buffers.entry(message) {
            std::collections::btree_map::Entry::Occupied(buffer) => buffer.into_mut(),
            std::collections::btree_map::Entry::Vacant(none) => {
                self.reallocations_count += 1;
                let buffer = GrowingMemory::new(
                    stream,
                    PLACE_BYTES,
                    "a step's messages",
                    MemoryContents::Undefined,
                )?;
                none.insert(buffer)
            }
        };
        let before = buffer.memory().at(0);
        let to = buffer.ensure_bytes(stream, bytes)?;
        self.reallocations_count += u64::from(to.at(0) != before);
        let half = &mut self.halves[self.current];
        if self.used + bytes > half.memory.bytes() {
            let larger = (2 * half.memory.bytes()).max(bytes.next_power_of_two());
            let memory = PinnedMemory::new(stream.device(), larger)?;
            let old = std::mem::replace(&mut half.memory, memory);
            half.outgrown.push(old);
            self.used = 0;
        }
        let range = self.used..self.used + bytes;
        // SAFETY: structs of the kernels and numbers: any of their bytes may be read, since those
        // that no field has are zeros of named padding.
        let source = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), bytes) };
        half.memory.as_mut_slice()[range.clone()].copy_from_slice(source);
        stream.copy_in((&half.memory, range.clone()), (to, 0))?;
        self.used = range.end.next_multiple_of(ALIGNMENT);
        Ok(to.at(0))
    }
}
