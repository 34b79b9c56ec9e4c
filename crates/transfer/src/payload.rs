//! Payloads that arrived and are held until they are in the pool or dropped.
//!
//! Invariant: dropping a [`Payload`], for whatever reason, gives its credit back; so no path of a
//! payload can strand a peer's credit.

use crate::credit::Hold;
use bytes::Bytes;
use std::ops::Deref;

/// Bytes of a frame, and the credit they hold.
#[derive(Debug)]
pub struct Payload {
    bytes: Bytes,
    _hold: Hold,
}

impl Payload {
    pub(crate) fn new(bytes: Bytes, hold: Hold) -> Self {
        Self { bytes, _hold: hold }
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}
