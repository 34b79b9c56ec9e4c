//! Payloads that arrived and are held until they are in the pool or dropped.
//!
//! Owns: the bytes of a frame, the credit that they hold, and their last verification. Never: knows
//! which frame it is, or its place in the pool.
//! Invariant: dropping a [`ReceivedPayload`], for whatever reason, returns its credit.

use crate::buffer::PooledBuffer;
use crate::credit::CreditHold;
use crate::transports::shm::SlotView;
use std::convert::Infallible;

/// The bytes of a frame, and the credit that they hold.
#[derive(Debug)]
pub struct ReceivedPayload {
    // Dropped in this order: the memory is free before the credit is returned to the peer.
    location: PayloadLocation,
    _hold: CreditHold,
}

/// The memory of the bytes, and their checksum if it is not verified yet.
#[derive(Debug)]
pub(crate) enum PayloadLocation {
    Buffer(PooledBuffer),
    /// In memory that the sender can still write to; sent with this checksum.
    Slot(SlotView, u64),
    /// In the pool already, written there by the sender; sent with this checksum.
    Pool(u64),
}

impl ReceivedPayload {
    pub(crate) fn new(location: PayloadLocation, hold: CreditHold) -> Self {
        Self {
            location,
            _hold: hold,
        }
    }

    /// The bytes, `[part.len]`, unless they are already in the pool.
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.location {
            PayloadLocation::Buffer(buffer) => Some(buffer),
            PayloadLocation::Slot(slot, _) => Some(slot),
            PayloadLocation::Pool(_) => None,
        }
    }

    /// The checksum that the bytes in the pool must have after the write; `None` if the bytes were
    /// verified on arrival and cannot have changed since.
    pub fn checksum_unverified(&self) -> Option<u64> {
        match self.location {
            PayloadLocation::Buffer(_) => None,
            PayloadLocation::Slot(_, checksum) | PayloadLocation::Pool(checksum) => Some(checksum),
        }
    }

    /// Writes the payload to its destination, and returns whether the bytes there now are the bytes
    /// that were sent.
    ///
    /// Bytes from a socket were verified when they arrived. Bytes in shared memory, which the peer
    /// can still write to, are verified here and only here. If the host can read the destination,
    /// they are verified *there*: the verified bytes are the used bytes, whatever happens to the
    /// slot. If it cannot (memory of a device), the slot is verified after it was copied from. A
    /// late write by a defect is found if it is still there; a malicious peer could change the slot
    /// for the copy and back for the check, but under the same user it could also write into this
    /// process.
    ///
    /// # Errors
    /// The errors of the destination.
    pub fn write_verified<D: PayloadDestination + ?Sized>(
        &self,
        to: &mut D,
    ) -> Result<bool, D::Error> {
        if let Some(bytes) = self.bytes() {
            to.write(bytes)?;
        }
        let is_there = |checksum, bytes| crate::checksum(bytes) == checksum;
        Ok(match &self.location {
            PayloadLocation::Buffer(_) => true,
            PayloadLocation::Slot(view, checksum) => {
                is_there(*checksum, to.written().unwrap_or(view))
            }
            // Bytes that cannot be read cannot be verified.
            PayloadLocation::Pool(checksum) => {
                to.written().is_some_and(|there| is_there(*checksum, there))
            }
        })
    }
}

/// The destination of a payload: its part of a block in a pool.
pub trait PayloadDestination {
    /// The error of a failed write.
    type Error;

    /// Writes all bytes.
    ///
    /// # Errors
    /// If the bytes cannot be written.
    fn write(&mut self, bytes: &[u8]) -> Result<(), Self::Error>;

    /// The written bytes, if the host can read them.
    fn written(&self) -> Option<&[u8]>;
}

/// Host memory, as a slice of bytes.
impl PayloadDestination for [u8] {
    type Error = Infallible;

    fn write(&mut self, bytes: &[u8]) -> Result<(), Infallible> {
        self.copy_from_slice(bytes);
        Ok(())
    }

    fn written(&self) -> Option<&[u8]> {
        Some(self)
    }
}
