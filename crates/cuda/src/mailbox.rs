//! Small things that a step sends to the device: tokens, positions, tables, rules.
//!
//! Owns: pinned memory and its image on the device, in two halves that steps take in turns.
//! Never: waits, but for a step that is two steps old.
//! Invariant: a half is written again only after every piece of work that reads it is done.

use crate::driver::{Device, DeviceMemory, Event, PinnedMemory, Stream, Timing};
use crate::error::CudaError;
use std::sync::Arc;

/// What begins a message.
const ALIGNMENT: usize = 16;
/// Of each half at first; a step that needs more makes it larger.
const HALF_BYTES: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct Mailbox {
    halves: [Half; 2],
    /// The one that this step fills.
    current: usize,
    used: usize,
}

#[derive(Debug)]
struct Half {
    host: PinnedMemory,
    there: DeviceMemory,
    /// Reached when the last step that used this half is done.
    read: Event,
    /// Halves that became too small during the step, which its earlier messages are in.
    outgrown: Vec<(PinnedMemory, DeviceMemory)>,
}

impl Mailbox {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let half = || -> Result<Half, CudaError> {
            let (host, there) = memory(device, HALF_BYTES)?;
            Ok(Half {
                host,
                there,
                read: Event::new(device, Timing::Off)?,
                outgrown: Vec::new(),
            })
        };
        Ok(Self {
            halves: [half()?, half()?],
            current: 0,
            used: 0,
        })
    }

    /// A step begins: what the last one sent is marked as read by the work queued so far, and what the
    /// one before sent is forgotten.
    pub(crate) fn turn(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.halves[self.current].read.record(stream)?;
        self.current = 1 - self.current;
        self.used = 0;
        let half = &mut self.halves[self.current];
        half.read.synchronize()?;
        half.outgrown.clear();
        Ok(())
    }

    /// Sends what `write` writes into so many bytes; returns where it will lie, for work queued in
    /// `stream` from now on until the step after next.
    pub(crate) fn send(
        &mut self,
        stream: &Stream,
        bytes: usize,
        write: impl FnOnce(&mut [u8]),
    ) -> Result<u64, CudaError> {
        let half = &mut self.halves[self.current];
        if self.used + bytes > half.host.bytes() {
            let larger = (2 * half.host.bytes()).max(bytes.next_power_of_two());
            let (host, there) = memory(stream.device(), larger)?;
            let old = (
                std::mem::replace(&mut half.host, host),
                std::mem::replace(&mut half.there, there),
            );
            half.outgrown.push(old);
            self.used = 0;
        }
        let range = self.used..self.used + bytes;
        write(&mut half.host.as_mut_slice()[range.clone()]);
        let at = half.there.at(range.start);
        stream.copy_in((&half.host, range.clone()), (&half.there, range.start))?;
        self.used = range.end.next_multiple_of(ALIGNMENT);
        Ok(at)
    }

    /// Sends plain values.
    pub(crate) fn send_all<T: Copy>(
        &mut self,
        stream: &Stream,
        values: &[T],
    ) -> Result<u64, CudaError> {
        self.send(stream, size_of_val(values), |out| {
            // SAFETY: structs of the kernels and numbers: any of their bytes may be read, since those
            // that no field has are zeros of named padding.
            let bytes = unsafe {
                std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values))
            };
            out.copy_from_slice(bytes);
        })
    }
}

fn memory(device: &Arc<Device>, bytes: usize) -> Result<(PinnedMemory, DeviceMemory), CudaError> {
    let host = PinnedMemory::new(device, bytes)?;
    Ok((host, DeviceMemory::new(device, bytes, "a step's messages")?))
}
