//! What a step sends to the device: tokens, positions, tables, rules.
//!
//! Owns: a place on the device for each kind of message, always the same one, and pinned memory from which
//! messages are fetched, in two halves that steps take in turns.
//! Never: waits, but for a step that is two steps old, or to make a place larger.
//! Invariant: a message overwrites the last one of its kind in the stream's order, so work queued before reads the
//! old one and work queued after the new one; pinned memory is written again only after it was fetched. A place
//! moves only when it grows, and [`Inbox::moves_count`] tells.

use crate::buffers::{Contents, Growing};
use crate::driver::{Device, Event, PinnedMemory, Stream};
use crate::error::CudaError;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What begins a message in pinned memory.
const ALIGNMENT: usize = 16;
/// Of each half at first; a step that needs more makes it larger.
const HALF_BYTES: usize = 256 << 10;
/// Of each place at first, so that small steps never move one.
const PLACE_BYTES: usize = 4 << 10;

/// A kind of message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Tokens,
    Positions,
    RowSlots,
    Tables,
    Segments,
    SegmentsCount,
    /// By the number of the window among those of the model.
    DecodeItems(usize),
    DecodeItemsCount(usize),
    PrefillItems(usize),
    PrefillItemsCount(usize),
    /// Numbers of rows, the first being the batch's.
    RowsCount(usize),
    Indices,
    Rules,
    Edits,
}

#[derive(Debug)]
pub(crate) struct Inbox {
    places: BTreeMap<Place, Growing>,
    halves: [Half; 2],
    /// The one that this step fills.
    current: usize,
    used: usize,
    moves_count: u64,
}

#[derive(Debug)]
struct Half {
    memory: PinnedMemory,
    /// Reached when the messages of the last step that used this half were fetched.
    fetched: Event,
    /// Halves that became too small during the step.
    outgrown: Vec<PinnedMemory>,
}

impl Inbox {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let half = || -> Result<Half, CudaError> {
            Ok(Half {
                memory: PinnedMemory::new(device, HALF_BYTES)?,
                fetched: Event::new(device)?,
                outgrown: Vec::new(),
            })
        };
        Ok(Self {
            places: BTreeMap::new(),
            halves: [half()?, half()?],
            current: 0,
            used: 0,
            moves_count: 0,
        })
    }

    /// How often a place has moved: what was recorded before the last move names old addresses.
    pub(crate) fn moves_count(&self) -> u64 {
        self.moves_count
    }

    /// A step begins.
    pub(crate) fn turn(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.halves[self.current].fetched.record(stream)?;
        self.current = 1 - self.current;
        self.used = 0;
        let half = &mut self.halves[self.current];
        half.fetched.synchronize()?;
        half.outgrown.clear();
        Ok(())
    }

    /// Sends values; returns where they will lie for work that is queued from now on.
    pub(crate) fn send<T: Copy>(
        &mut self,
        stream: &Stream,
        place: Place,
        values: &[T],
    ) -> Result<u64, CudaError> {
        let bytes = size_of_val(values);
        let room = match self.places.entry(place) {
            std::collections::btree_map::Entry::Occupied(room) => room.into_mut(),
            std::collections::btree_map::Entry::Vacant(none) => {
                self.moves_count += 1;
                let room =
                    Growing::new(stream, PLACE_BYTES, "a step's messages", Contents::Anything)?;
                none.insert(room)
            }
        };
        let before = room.memory().at(0);
        let to = room.at_least(stream, bytes)?;
        self.moves_count += u64::from(to.at(0) != before);
        let half = &mut self.halves[self.current];
        if self.used + bytes > half.memory.bytes() {
            let larger = (2 * half.memory.bytes()).max(bytes.next_power_of_two());
            let memory = PinnedMemory::new(stream.device(), larger)?;
            let old = std::mem::replace(&mut half.memory, memory);
            half.outgrown.push(old);
            self.used = 0;
        }
        let range = self.used..self.used + bytes;
        // SAFETY: structs of the kernels and numbers: any of their bytes may be read, since those that no field has
        // are zeros of named padding.
        let source = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), bytes) };
        half.memory.as_mut_slice()[range.clone()].copy_from_slice(source);
        stream.copy_in((&half.memory, range.clone()), (to, 0))?;
        self.used = range.end.next_multiple_of(ALIGNMENT);
        Ok(to.at(0))
    }
}
