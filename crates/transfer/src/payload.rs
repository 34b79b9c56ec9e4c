//! Payloads that arrived and are held until they are in the pool or dropped.
//!
//! Invariant: dropping a [`Payload`], for whatever reason, gives its credit back; so no path of a
//! payload can strand a peer's credit.

use crate::buffer::Buffer;
use crate::credit::Hold;
use crate::shared_memory::SlotView;
use std::ops::Deref;

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
}

impl Payload {
    pub(crate) fn new(place: Place, hold: Hold) -> Self {
        Self { place, _hold: hold }
    }

    /// Whether `written`, the bytes in the pool, are those that were sent; asked once the payload was
    /// written there, and with the payload itself where the host cannot read the pool.
    ///
    /// What came out of a socket was verified when it arrived. What lies in shared memory is verified
    /// here and only here: reading it once is half the work, and what was verified is then what is
    /// used, whatever the peer does to the slot meanwhile.
    pub fn is_intact(&self, written: &[u8]) -> bool {
        match self.place {
            Place::Buffer(_) => true,
            Place::Slot(_, checksum) => crate::checksum::checksum(written) == checksum,
        }
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.place {
            Place::Buffer(buffer) => buffer,
            Place::Slot(slot, _) => slot,
        }
    }
}
