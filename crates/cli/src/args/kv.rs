//! The flags of `kv`.

use crate::values::parse_block_bytes;
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave kv bench")]
pub(crate) struct KvArgs {
    #[command(subcommand)]
    pub(crate) command: KvCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KvCommand {
    /// Measure bandwidth and latency of each transport, by number of blocks, next to the machine's
    /// own speed.
    #[command(after_help = "Examples:
  cleave kv bench
  cleave kv bench --transport shm --block-bytes 2MiB --blocks 1,32 --rounds 31 --json

A sample is the time from the request for the first block in one worker's pool until the last block
is verified in the other worker's pool and the sender is notified. `nixl`, `tcp` and `shm` run
between two processes; `nixl` uses the network cards that UCX finds, or those that UCX_TLS and
UCX_NET_DEVICES name. The floor is measured in turns with it: for `tcp` and `nixl` it sends the
same blocks over a plain blocking socket between the same processes, for the others it copies them
from pool to pool with one thread.")]
    Bench(KvBenchArgs),
    /// Run the receiving process of a measurement; `kv bench` starts it.
    #[command(hide = true)]
    FarEnd(KvFarArgs),
}

#[derive(Args, Debug)]
pub(crate) struct KvBenchArgs {
    /// Transport of the blocks; `all` includes `nixl` if its library is found.
    #[arg(long, value_enum, default_value_t = TransportArg::All)]
    pub(crate) transport: TransportArg,
    /// NVIDIA's transfer library; by default the one that the loader finds.
    #[arg(long, value_name = "PATH")]
    pub(crate) nixl_library: Option<PathBuf>,
    /// Bytes of a block, such as 512KiB.
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_block_bytes)]
    pub(crate) block_bytes: u32,
    /// Blocks sent at once, separated by commas; the largest number is the size of the pools.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,8,64,512", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) blocks: Vec<u32>,
    /// Samples of each number of blocks; medians are printed.
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Use mutual TLS for `tcp`, with `tls.crt`, `tls.key` and `ca.crt` of this folder at both
    /// ends.
    #[arg(long, value_name = "DIR")]
    pub(crate) peer_tls: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct KvFarArgs {
    #[arg(long, value_enum)]
    pub(crate) transport: FarTransportArg,
    #[arg(long)]
    pub(crate) block_bytes: u32,
    #[arg(long)]
    pub(crate) blocks_count: u32,
    /// Address at which the sending process listens.
    #[arg(long)]
    pub(crate) near: String,
    #[arg(long)]
    pub(crate) peer_tls: Option<PathBuf>,
    #[arg(long)]
    pub(crate) nixl_library: Option<PathBuf>,
}

/// Transport to measure; see [`KvBenchArgs::transport`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportArg {
    All,
    Local,
    Shm,
    Nixl,
    Tcp,
}

/// Transport between processes; see [`KvFarArgs::transport`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FarTransportArg {
    Shm,
    Nixl,
    Tcp,
}
