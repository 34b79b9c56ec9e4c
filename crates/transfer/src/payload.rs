//! Payloads that arrived and are held until they are in the pool or dropped.
//!
//! Owns: the bytes of a frame, the credit they hold, and the last verification. Never: knows which frame
//! it is, or where in the pool it goes.
//! Invariant: dropping a [`Payload`], for whatever reason, gives its credit back; so no path of a
//! payload can strand a peer's credit.

use crate::buffer::Buffer;
use crate::credit::Hold;
use crate::shared_memory::SlotView;
use std::convert::Infallible;

/// Bytes of a frame, and the credit they hold.
#[derive(Debug)]
pub struct Payload {
    // Dropped in this order: the place is free before the peer hears so.
    place: Place,
    _hold: Hold,
}

/// Where the bytes are, and what is known of them.
#[derive(Debug)]
pub(crate) enum Place {
    Buffer(Buffer),
    /// In memory that the sender can still reach; they were sent with this checksum.
    Slot(SlotView, u64),
    /// In the pool already, where the sender put them; the same.
    Pool(u64),
}

impl Payload {
    pub(crate) fn new(place: Place, hold: Hold) -> Self {
        Self { place, _hold: hold }
    }

    /// The bytes, `[part.len]`, unless they are in the pool already.
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.place {
            Place::Buffer(buffer) => Some(buffer),
            Place::Slot(slot, _) => Some(slot),
            Place::Pool(_) => None,
        }
    }

    /// The checksum that what is in the pool must have in the end; `None` if the bytes were verified on arrival and
    /// nobody can have changed them since.
    pub fn checksum_due(&self) -> Option<u64> {
        match self.place {
            Place::Buffer(_) => None,
            Place::Slot(_, checksum) | Place::Pool(checksum) => Some(checksum),
        }
    }

    /// Writes it to where it goes, and says whether what is there now is what was sent.
    ///
    /// What came out of a socket was verified when it arrived. What lies in shared memory, which the peer
    /// can still write to, is verified here and only here. Where the host can read the destination, it
    /// is verified *there*: what was verified is what is used, whatever happens to the slot. Where it
    /// cannot (memory of a device), the slot is verified after it was written from: a late write by
    /// a defect is found if it is still there, and a peer that means harm could change the slot for the
    /// copy and back for the check; under the same user it could as well write into this process.
    ///
    /// # Errors
    /// Those of the destination.
    pub fn land<D: Destination + ?Sized>(&self, to: &mut D) -> Result<bool, D::Error> {
        if let Some(bytes) = self.bytes() {
            to.write(bytes)?;
        }
        let is_there = |checksum, bytes| crate::checksum(bytes) == checksum;
        Ok(match &self.place {
            Place::Buffer(_) => true,
            Place::Slot(view, checksum) => is_there(*checksum, to.written().unwrap_or(view)),
            // What cannot be looked at is not vouched for.
            Place::Pool(checksum) => to.written().is_some_and(|there| is_there(*checksum, there)),
        })
    }
}

/// Where a payload goes: its part of a block in a pool.
pub trait Destination {
    /// Why it could not be written.
    type Error;

    /// Writes all of it.
    ///
    /// # Errors
    /// If it cannot be written.
    fn write(&mut self, bytes: &[u8]) -> Result<(), Self::Error>;

    /// What is there, if the host can read it.
    fn written(&self) -> Option<&[u8]>;
}

/// Memory of the host.
impl Destination for [u8] {
    type Error = Infallible;

    fn write(&mut self, bytes: &[u8]) -> Result<(), Infallible> {
        self.copy_from_slice(bytes);
        Ok(())
    }

    fn written(&self) -> Option<&[u8]> {
        Some(self)
    }
}
