//! What carries a link's bytes, from the best to the one that always works.
//!
//! Owns: their names and their order. Never: carries anything.
//!
//! Two kinds. *Two-sided* ones carry bytes, which the receiver's own engine writes into its pool: a late frame is
//! dropped by its generation and harms nobody. On a *one-sided* one the sender writes into the receiver's pool itself;
//! only the head of a frame travels, and says that its bytes are in place:
//! - `host` and `local` give a worker's pool to whoever could open it, and `pools` remembers to whom;
//! - [`crate::Permit::pool`] is where the sender's engine then writes to, and [`crate::Permit::tell`] sends the head
//!   once the write is over, so that a brain's `Exported` means what it says;
//! - [`crate::Payload::bytes`] of such a frame are none, and its checksum is verified in place.
//!
//! What makes that safe is not here but in the brains: with `Writer::Sender`, blocks of a hand-off that ended before it
//! landed stay in quarantine until the sender's `Stopped`, or until it is severed, which [`crate::LinkEvent::Severed`]
//! tells.

use std::fmt;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// Within a process: buffers change hands, nothing is copied; between devices, straight from pool to pool.
    Local,
    /// Between processes of a host: the sender copies into the receiver's pool on its device. One-sided.
    CudaIpc,
    /// Between processes of a host: a ring of slots that both have mapped.
    SharedMemory,
    /// Between any two hosts: the sender's network card writes into a ring of slots at the receiver, which takes frames
    /// out of it. So it is two-sided for the brains.
    Nixl,
    /// Between any two hosts: several TCP connections.
    Tcp,
}

impl Transport {
    /// All of them, the best first.
    pub const ALL: [Self; 5] = [
        Self::Local,
        Self::CudaIpc,
        Self::SharedMemory,
        Self::Nixl,
        Self::Tcp,
    ];

    /// As metrics, logs and the command line name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::CudaIpc => "cuda-ipc",
            Self::SharedMemory => "shm",
            Self::Nixl => "nixl",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
