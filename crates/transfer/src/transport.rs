//! What carries a link's bytes, from the best to the one that always works.
//!
//! Owns: their names and their order. Never: carries anything.
//!
//! All of them are *two-sided*: the receiver's own engine writes every byte into its pool, so a late
//! frame is dropped by its generation and harms nobody (`Writer::Receiver` in the worker's limits).
//!
//! A *one-sided* transport, whose sender writes into the receiver's pool itself (CUDA IPC within a
//! host, RDMA through NIXL between hosts), would be another variant here, and would plug in at four
//! places and nowhere else:
//! - `Addresses`: what a peer needs to reach the pool (an IPC handle, agent metadata);
//! - `outgoing`: dial, and the order of preference;
//! - `link::Store`: [`crate::Permit::buffer`] would give a staging area, or the permit would take the
//!   source block's address, and [`crate::Permit::send`] would start the write and return when it is
//!   over, so that a brain's `Exported` means what it says; the head of the frame then travels as
//!   `SlotFrame` does, and tells the receiver that the bytes are in place;
//! - `payload`: a [`crate::Payload`] without bytes of its own: `Import` then verifies in place.
//!
//! The rules that make one-sided writes safe are not here but in the brains, and their model covers
//! them already: with `Writer::Sender`, blocks of a hand-off that ended before it landed stay in
//! quarantine until the sender's `Stopped`, or until it is known to be dead.

use std::fmt;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// Within a process: buffers change hands, nothing is copied.
    Local,
    /// Between processes of a host: a ring of slots that both have mapped.
    SharedMemory,
    /// Between any two hosts: several TCP connections.
    Tcp,
}

impl Transport {
    /// As metrics, logs and the command line name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::SharedMemory => "shm",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
