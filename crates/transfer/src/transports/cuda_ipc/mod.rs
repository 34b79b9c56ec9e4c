//! Links between processes of one host whose sender copies into the receiver's pool on its device.
//!
//! Owns: the observation of the peer's process. Never: copies a block.

mod peer_process;

pub(crate) use peer_process::PeerProcess;
