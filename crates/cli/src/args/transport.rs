//! The flags that say what carries KV blocks between processes.

use clap::{Args, ValueEnum};
use cleave_transfer::Transport;
use std::collections::BTreeSet;
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "KV transport")]
pub(crate) struct TransportArgs {
    /// What may carry KV blocks to and from other processes, with commas. Of what both ends have, the best that works
    /// is taken; name fewer to force or to forbid one. `nixl` is for a network that only the fleet is on: blocks go in
    /// clear there. It goes over RDMA cards alone; `UCX_TLS` names others, whose ports trust whoever reaches them.
    #[arg(
        long,
        value_enum,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "shm,tcp"
    )]
    pub(crate) kv_transport: Vec<KvTransport>,
    /// NVIDIA's transfer library, libnixl_capi.so of NIXL 1.5 or later, for RDMA between hosts. By default
    /// the one that the loader finds, if any.
    #[arg(long, value_name = "PATH", env = "CLEAVE_NIXL_LIBRARY")]
    pub(crate) nixl_library: Option<PathBuf>,
}

/// See [`TransportArgs::kv_transport`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvTransport {
    /// Within a host: through shared memory, or from device to device.
    Shm,
    /// Between hosts: by RDMA, with NIXL.
    Nixl,
    /// Between hosts: over TCP.
    Tcp,
}

impl TransportArgs {
    /// As workers know them.
    pub(crate) fn transports(&self) -> BTreeSet<Transport> {
        let named = self.kv_transport.iter().flat_map(|named| match named {
            KvTransport::Shm => vec![Transport::SharedMemory, Transport::CudaIpc],
            KvTransport::Nixl => vec![Transport::Nixl],
            KvTransport::Tcp => vec![Transport::Tcp],
        });
        named.collect()
    }
}
