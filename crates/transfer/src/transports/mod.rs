//! The transports of links, ordered from the fastest to the one that always works.
//!
//! Owns: the names of the transports and their order. Never: carries a byte.
//!
//! There are two kinds. A *two-sided* transport carries bytes, and the receiver's engine writes
//! them into its pool; a frame of an ended hand-off is discarded by its hand-off. On a *one-sided*
//! transport the sender writes into the receiver's pool; only the head of a frame travels, and it
//! reports that the bytes are in place:
//! - `host` and `local` grant access to a worker's pool, and `pools` records to whom;
//! - [`crate::SendPermit::pool`] is the pool that the sender's engine writes to, and
//!   [`crate::SendPermit::send_written`] sends the head once the write is over, so that a brain's
//!   `Exported` holds;
//! - [`crate::ReceivedPayload::bytes`] of such a frame is `None`, and its checksum is verified in
//!   place.
//!
//! The brains make one-sided writes safe: with `PoolWriter::Sender`, blocks of a hand-off that
//! ended before it landed stay in quarantine until the sender's `Stopped` arrives, or until the
//! sender is fenced ([`crate::LinkEvent::Fenced`]).

#[cfg_attr(not(target_os = "linux"), path = "cuda_ipc/unsupported.rs")]
pub(crate) mod cuda_ipc;
pub(crate) mod local;
#[cfg_attr(not(target_os = "linux"), path = "nixl/unsupported.rs")]
pub(crate) mod nixl;
#[cfg_attr(not(target_os = "linux"), path = "shm/unsupported.rs")]
pub(crate) mod shm;
pub(crate) mod tcp;

use std::fmt;

/// A transport of links. Smaller values are preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// Within a process. Buffers are handed over without a copy; between devices, blocks are copied
    /// directly from pool to pool.
    Local,
    /// Between processes of one host: the sender copies into the receiver's pool on its device.
    /// One-sided.
    CudaIpc,
    /// Between processes of one host: a ring of slots that both processes map.
    SharedMemory,
    /// Between any two hosts: the sender's network card writes into a ring of slots at the
    /// receiver, which copies frames out of the ring. For the brains it is two-sided.
    Nixl,
    /// Between any two hosts: several TCP connections.
    Tcp,
}

impl Transport {
    /// All transports, the preferred first.
    pub const ALL: [Self; 5] = [
        Self::Local,
        Self::CudaIpc,
        Self::SharedMemory,
        Self::Nixl,
        Self::Tcp,
    ];

    /// The name in metrics, logs and on the command line.
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
