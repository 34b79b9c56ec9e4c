//! The flags of the transport of KV blocks between processes.

use clap::{Args, ValueEnum};
use cleave_transfer::Transport;
use std::collections::BTreeSet;
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "KV transport")]
pub(crate) struct TransportArgs {
    /// Transports allowed for KV blocks between processes, separated by commas. Two workers use the
    /// best one that both allow and that works; name fewer to force or to forbid one. `nixl` sends
    /// blocks unencrypted and is for a network that only the fleet can reach. It uses RDMA cards
    /// only; `UCX_TLS` can name other transports, whose ports accept any peer that reaches them.
    #[arg(
        long,
        value_enum,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "shm,tcp"
    )]
    pub(crate) kv_transport: Vec<KvTransport>,
    /// NVIDIA's transfer library, libnixl_capi.so of NIXL 1.5 or later, for RDMA between hosts. By
    /// default the one that the loader finds, if any.
    #[arg(long, value_name = "PATH")]
    pub(crate) nixl_library: Option<PathBuf>,
}

/// A transport; see [`TransportArgs::kv_transport`].
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
    /// Returns the transports that workers may use.
    pub(crate) fn transports(&self) -> BTreeSet<Transport> {
        let named = self.kv_transport.iter().flat_map(|named| match named {
            KvTransport::Shm => vec![Transport::SharedMemory, Transport::CudaIpc],
            KvTransport::Nixl => vec![Transport::Nixl],
            KvTransport::Tcp => vec![Transport::Tcp],
        });
        named.collect()
    }
}
